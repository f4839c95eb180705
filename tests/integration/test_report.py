"""``tierckpt report`` on runs that were killed: steps, seconds, and when saves reached each tier; text and JSON."""

from __future__ import annotations

import functools
import json
import os
import shutil
import statistics
import time
import xml.etree.ElementTree as tree
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.agents import agent_with_page, until
from tests.command_line import CommandLine, python
from tests.fault import training_scenarios
from tests.fault.runner import start
from tests.servers.faultproxy import FaultProxy, Kind, Plan
from tests.services import S3Server
from tests.states import save_drained
from tierckpt import Checkpointer
from tierckpt.checkpoint import run_records
from tierckpt.checkpoint.journal import Journal
from tierckpt.checkpoint.local_commit import remove_local
from tierckpt.cli.ui import output
from tierckpt.client import close_all, get_client
from tierckpt.config import Settings
from tierckpt.format.layout import HISTORY_DIR, MANIFEST, local_dir, parse_uri
from tierckpt.training import run_log

STEP_SECONDS = 0.04
"""Long compared with scheduling delays on a busy machine."""
PHASES = {"kept", "unsaved", "lost", "blocked", "down", "starting", "loading", "warming", "other"}


def killed_once(folder: Path, uri: str) -> tuple[float, float]:
    """Train, kill the job some steps after a save, restart and finish. Returns total and down seconds."""
    begun = time.monotonic()
    options: dict[str, Any] = {"uri": uri, "step_seconds": STEP_SECONDS, "interval": 20, "line_seconds": 0.05}
    job = start(training_scenarios.train, folder, start=0, hold_at=55, **options)
    newest = functools.partial(tierckpt.latest, uri, local_root=folder / "looker")
    seen = folder / "seen-000-0"
    job.until(lambda: seen.exists() and len(seen.read_text().splitlines()) == 55, "step 55")
    job.until(lambda: newest() == f"{uri}/step-40", "the checkpoint of step 40")
    job.kill()
    died = time.monotonic()
    time.sleep(0.5)
    again = time.monotonic()
    job = start(training_scenarios.train, folder, start=1, steps=80, **options)
    assert job.codes(60) == [0], job.output()[-3000:]
    return time.monotonic() - begun, again - died


@pytest.mark.slow
def test_report_of_a_killed_run_accounts_for_its_time(
    tmp_path: Path, file_uri: str, local_root: Path, cli: CommandLine
) -> None:
    wall, away = killed_once(tmp_path / "job", file_uri)
    found = cli.answer("report", file_uri)
    [failure] = found["failures"]
    assert failure["restored_step"] == 40
    assert failure["last_step"] >= 52
    assert failure["lost_steps"] == failure["last_step"] - 40
    assert failure["lost_seconds"] == pytest.approx(found["spent"]["lost"], abs=0.01)
    assert failure["lost_steps"] * STEP_SECONDS * 0.4 <= failure["lost_seconds"] < wall
    assert found["lost_steps_per_failure"] == failure["lost_steps"]
    assert found["kept_steps"] == 80
    assert 80 * STEP_SECONDS * 0.4 <= found["kept_seconds"] < wall
    assert found["saves"] == 4
    assert set(found["spent"]) == PHASES
    assert sum(found["spent"].values()) == pytest.approx(found["wall_seconds"], rel=0.02)
    assert away < found["wall_seconds"] <= wall + 0.1
    assert found["spent"]["down"] >= away - 0.3
    assert all(found["spent"][what] > 0 for what in ("starting", "loading", "blocked"))
    assert found["ettr"] == pytest.approx(found["kept_seconds"] / found["wall_seconds"])
    assert found["ettr"] < found["goodput"] < 1
    assert [start["end"] for start in found["starts"]] == ["", "closed"]
    shown = cli.text("report", file_uri, "--plot", tmp_path / "run.svg").out
    for words in ("ETTR", "lost by a failure", "training, lost by a failure", "where the time went"):
        assert words in shown
    bar = next(line for line in shown.splitlines() if line.startswith(("█", "·", "▸", "◦")))
    assert len(bar.rstrip()) <= 80 and "█" in bar
    assert tree.parse(tmp_path / "run.svg").getroot().tag.endswith("svg")
    shutil.rmtree(local_root)  # lose the node: the records are also next to the checkpoints
    after = cli.answer("report", file_uri)
    assert len(after["starts"]) == 2
    assert after["starts"][1] == found["starts"][1]


@pytest.mark.slow
@pytest.mark.distributed
def test_lost_steps_equal_repeated_steps_for_any_number_of_ranks(
    tmp_path: Path, file_uri: str, cli: CommandLine
) -> None:
    """Two ranks are killed twice at the same step, then one rank finishes."""
    folder, options = tmp_path / "job", {"uri": file_uri, "interval": 10, "step_seconds": 0.01}

    def killed_at_25(life: int) -> dict[str, Any]:
        job = start(training_scenarios.train, folder, 2, start=life, hold_at=25, **options)
        seen = folder / f"seen-{life:03d}-0"
        job.until(lambda: seen.exists() and seen.read_text().splitlines()[-1:] == ["25 "], "step 25")
        found: dict[str, Any] = {}
        job.until(
            lambda: found.update(cli.answer("report", file_uri)) or found["tiers"]["shared"]["reached"] >= 2, "step 20"
        )
        job.kill()
        return found

    found = killed_at_25(0)
    assert [found[f"{what}_steps"] for what in ("kept", "unsaved", "lost", "trained")] == [20, 5, 0, 25]
    shown = " ".join(cli.text("report", file_uri).out.split())
    assert "20 of 25 steps" in shown and "5 steps after the newest save" in shown
    found = killed_at_25(1)
    assert [found[f"{what}_steps"] for what in ("kept", "unsaved", "lost", "trained")] == [20, 5, 5, 30]
    job = start(training_scenarios.train, folder, 1, start=2, steps=43, **options)
    assert job.codes(60) == [0], job.output()[-3000:]
    found = cli.answer("report", file_uri)
    assert [found[f"{what}_steps"] for what in ("kept", "unsaved", "lost", "trained")] == [43, 0, 10, 53]
    assert [start["world_size"] for start in found["starts"]] == [2, 2, 1]
    assert [failure["lost_steps"] for failure in found["failures"]] == [5, 5]
    assert (found["tiers"]["local"]["reached"], found["tiers"]["shared"]["reached"]) == (5, 5)  # the last on exit
    assert (found["tiers"]["shared"]["waiting_steps"], found["tiers"]["shared"]["untimed"]) == ([], 0)


def test_loop_that_only_calls_save_loses_no_steps(file_uri: str, cli: CommandLine) -> None:
    with Checkpointer(file_uri) as checkpointer:
        for step in range(10, 101, 10):
            checkpointer.save(step, {"w": torch.zeros(3)})
    found = cli.answer("report", file_uri)
    assert (found["kept_steps"], found["trained_steps"], found["lost_steps"]) == (100, 100, 0)
    shown = cli.text("report", file_uri).out
    assert "100 of 100 steps" in shown
    tiers, cells = found["tiers"], [line.split() for line in shown.splitlines()]
    for name, tier in (("local SSD", "local"), ("shared storage", "shared")):  # the text agrees with --json
        row = next(cell for cell in cells if cell[:2] == name.split())
        assert row[2:5] == ["10", "of", "10"] and row[-2:] == ["0", "-"]
        values = [tiers[tier][f"{what}_seconds"] for what in ("median", "p90", "maximum")]
        assert row[5:-2] == [word for value in values for word in output.short(value).split()]


def test_run_without_records_prints_one_sentence(file_uri: str, cli: CommandLine) -> None:
    with Checkpointer(file_uri) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(3)})
    done = cli.text("report", f"{file_uri}/step-1")
    assert done.code == 4 and "has no records of training" in done.err


def test_reading_a_run_writes_no_record(file_uri: str, local_root: Path) -> None:
    with Checkpointer(file_uri) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(3)})
    before = sorted(Path(file_uri, HISTORY_DIR).glob("*.jsonl"))
    with Checkpointer(file_uri) as reader:
        assert reader.restore({"w": torch.zeros(3)}) == 1
    assert sorted(Path(file_uri, HISTORY_DIR).glob("*.jsonl")) == before
    assert len(list((local_dir(local_root, parse_uri(file_uri)) / HISTORY_DIR).glob("*.jsonl"))) == 1


def test_records_are_bounded_and_lose_only_their_detail(
    file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setattr(run_log, "LINES_MAX", 40)
    monkeypatch.setattr(run_log, "LINE_SECONDS", 0.0)
    with Checkpointer(file_uri) as checkpointer:
        for step in range(1, 500):
            checkpointer.step(step, {})
        assert checkpointer._run_log._flush(60)  # private: a thread does it
        [path] = (local_dir(local_root, parse_uri(file_uri)) / HISTORY_DIR).glob("*.jsonl")
        assert len(path.read_text().splitlines()) <= 41
    assert cli.answer("report", file_uri)["kept_steps"] == 499


def test_torn_line_and_full_disk_lose_only_their_records(
    file_uri: str, local_root: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(file_uri) as checkpointer:
        for step in range(1, 20):
            checkpointer.step(step, {})
        checkpointer.save(20, {"w": torch.zeros(3)}).result(60)
        with monkeypatch.context() as full:

            def no_room(*_: Any) -> int:
                raise OSError(28, "No space left on device")

            full.setattr(os, "pwrite", no_room)
            checkpointer._run_log.saved(20, 0.0)  # private: the disk is full for this log line only
            checkpointer._run_log._flush(60)  # private: a thread does it
        checkpointer.save(21, {"w": torch.zeros(3)}).result(60)  # saves continue
    for path in [*local_dir(local_root, parse_uri(file_uri)).rglob("*.jsonl"), *Path(file_uri).rglob("*.jsonl")]:
        with path.open("a") as stream:
            stream.write('{"what": "step", "at": 179')
    assert cli.answer("report", file_uri)["kept_steps"] == 20


KILLED = """
import os, sys, torch
from tierckpt import Checkpointer
from tierckpt.training import run_log
run_log.WRITE_WAIT_SECONDS = 60.0
state = {"w": torch.zeros(10)}
checkpointer = Checkpointer(sys.argv[1])
start = checkpointer.restore(state) or 0
for step in range(start + 1, start + 16):
    checkpointer.step(step, state)
    if step == 5:
        checkpointer.save(step, state).result()
if start == 0:
    os.kill(os.getpid(), 9)
checkpointer.close()
"""


@pytest.mark.slow
def test_steps_in_the_last_second_before_a_kill_are_counted(file_uri: str, cli: CommandLine) -> None:
    """Ten steps of microseconds after the save, then kill -9: all ten count as lost."""
    for code in (-9, 0):
        done = python(KILLED, file_uri)
        assert done.returncode == code, done.stderr
    found = cli.answer("report", file_uri)
    [failure] = found["failures"]
    assert (failure["last_step"], failure["restored_step"], failure["lost_steps"]) == (15, 5, 10)


# --- times at which saves reached each tier ---------------------------------------------------------------------------

WAIT_SECONDS = 60.0
OUTAGE_SECONDS = 6.0
LATE_SECONDS = 0.5
"""By which a save's own time is after that of its call, at most."""

TRAINER = """
import json, os, sys, time, torch, tierckpt
uri, steps, waited = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "waits"
checkpointer = tierckpt.Checkpointer(uri, timeout_seconds=60)
state = {"w": torch.ones(1000)}
for step in steps:
    at = time.time()
    checkpointer.save(step, state).result(60)
    print(json.dumps([step, at]), flush=True)
if waited:
    checkpointer.wait("shared", 60)
os.kill(os.getpid(), 9)
"""

DIE_AFTER_COMMIT = """
import os, sys, time, torch, tierckpt
from tierckpt.drain.drainer import Drainer

async def dies(*_):
    os.kill(os.getpid(), 9)

Drainer._after_commit = dies
checkpointer = tierckpt.Checkpointer(sys.argv[1])
print(time.time(), flush=True)
checkpointer.save(1, {"w": torch.ones(1000)}).result(60)
"""


def train(uri: str, steps: list[int], endpoint: str, *, waits: bool) -> dict[int, float]:
    """Save ``steps`` in a process that is then killed. Returns the time of each ``save`` call."""
    environment = os.environ | {"AWS_ENDPOINT_URL": endpoint, "TIERCKPT_MOVER": "agent"}
    done = python(TRAINER, uri, json.dumps(steps), "waits" if waits else "", env=environment)
    assert done.returncode == -9, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def written_at(uri: str) -> float:
    """Return the commit time of the checkpoint at the store."""
    store = get_client(Settings.load()).mover.store(parse_uri(uri))
    at = get_client(Settings.load()).run(store.head(MANIFEST))
    assert at.modified_unix_seconds is not None
    return at.modified_unix_seconds


@pytest.mark.slow
def test_report_after_an_outage_and_a_killed_trainer(
    moto: S3Server, s3_uri: str, local_root: Path, cli: CommandLine
) -> None:
    bucket, proxy = s3_uri.split("/")[2], FaultProxy(moto.endpoint)
    journal = Journal(local_root)
    with proxy.running() as endpoint, agent_with_page(AWS_ENDPOINT_URL=endpoint):
        began = train(s3_uri, [10, 20], endpoint, waits=True)
        until(lambda: not journal.entries(), "the agent to drain")
        latest = dict.fromkeys(began, time.time())
        proxy.plans[bucket] = Plan(Kind.RESET, 1.0)
        began |= train(s3_uri, [30, 40], endpoint, waits=False)
        time.sleep(OUTAGE_SECONDS)

        asked = time.time()
        found = cli.answer("report", s3_uri)["tiers"]
        answered = time.time()
        assert (found["local"]["reached"], found["shared"]["reached"]) == (4, 2)
        assert found["shared"]["waiting_steps"] == [30, 40] and found["shared"]["saves"] == 4
        waiting = found["shared"]["oldest_waiting_seconds"]
        assert asked - LATE_SECONDS <= began[30] + waiting <= answered + 0.01
        assert found["peer"]["is_used"] is False
        shown = " ".join(cli.text("report", s3_uri).out.split())
        assert "shared storage 2 of 4" in shown and "not yet on shared storage: 2, steps 30, 40" in shown
        assert "peers not set up" in shown

        proxy.plans.clear()
        until(lambda: not journal.entries(), "the agent to drain")
        latest |= dict.fromkeys([30, 40], time.time())
    truth = {step: written_at(f"{s3_uri}/step-{step}") - at for step, at in began.items()}
    assert truth[30] > OUTAGE_SECONDS - 1

    def check(found: dict[str, Any]) -> None:
        assert (found["reached"], found["untimed"], found["waiting_steps"], found["unknown_steps"]) == (4, 0, [], [])
        low, high = sorted(truth.values()), sorted(latest[step] - at for step, at in began.items())
        assert low[-1] - LATE_SECONDS <= found["maximum_seconds"] <= high[-1] + 0.01  # store times are whole seconds
        assert found["p90_seconds"] == found["maximum_seconds"]
        assert statistics.median(low) - LATE_SECONDS <= found["median_seconds"] <= statistics.median(high) + 0.01

    check(cli.answer("report", s3_uri)["tiers"]["shared"])
    for step in began:  # evicted
        assert remove_local(local_dir(local_root, parse_uri(f"{s3_uri}/step-{step}")))
    check(cli.answer("report", s3_uri)["tiers"]["shared"])
    close_all()
    cli.answer("prune", s3_uri, "--keep-last", 1)
    check(cli.answer("report", s3_uri)["tiers"]["shared"])
    close_all()
    shutil.rmtree(local_root)  # a report from another node
    check(cli.answer("report", s3_uri)["tiers"]["shared"])


def test_times_from_the_store_without_commit_records(file_uri: str, local_root: Path, cli: CommandLine) -> None:
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.full((1000,), step)})
    run_dir = local_dir(local_root, parse_uri(file_uri))
    for place in (run_dir / HISTORY_DIR, Path(file_uri, HISTORY_DIR)):
        for path in place.glob("*.commits"):
            path.unlink()
    close_all()
    found = cli.answer("report", file_uri)["tiers"]
    assert (found["shared"]["reached"], found["shared"]["unknown_steps"]) == (3, [])
    assert found["shared"]["maximum_seconds"] < 60


@pytest.mark.slow
def test_commit_of_a_killed_mover_is_recorded_with_the_store_time(
    file_uri: str, local_root: Path, cli: CommandLine
) -> None:
    """The next mover finds the commit much later."""
    done = python(DIE_AFTER_COMMIT, file_uri)
    assert done.returncode == -9, done.stderr[-3000:]
    assert Path(file_uri, "step-1", MANIFEST).exists()
    time.sleep(3)
    cli.answer("drain", "--wait")
    found = cli.answer("report", file_uri)["tiers"]["shared"]
    committed = Path(file_uri, "step-1", MANIFEST).stat().st_mtime - float(done.stdout)
    assert found["reached"] == 1 and 0 < found["maximum_seconds"] <= committed + 0.01
    lines = [*local_dir(local_root, parse_uri(file_uri)).glob(f"{HISTORY_DIR}/*.commits")]
    assert len(lines) == 1


def test_commit_records_are_bounded_and_tolerate_a_torn_line(
    file_uri: str, local_root: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_records, "LINES_MAX", 20)
    with tierckpt.Checkpointer(file_uri, keep_last=2) as checkpointer:
        for step in range(1, 31):
            checkpointer.save(step, {"w": torch.full((1000,), step)}).result(60)
            if step == 28:
                [path] = local_dir(local_root, parse_uri(file_uri)).glob(f"{HISTORY_DIR}/*.commits")
                with path.open("a") as stream:
                    stream.write('{"what": "shared", "st')
    assert len([text for text in path.read_text().splitlines() if text]) <= 22
    assert path.read_bytes() == Path(file_uri, HISTORY_DIR, path.name).read_bytes()
    found = cli.answer("report", file_uri)["tiers"]["shared"]
    assert found["reached"] >= 9 and found["reached"] + len(found["unknown_steps"]) == 30
    assert found["waiting_steps"] == [] and max(found["unknown_steps"]) <= 21


def test_plain_saves_leave_no_records(file_uri: str) -> None:
    save_drained(f"{file_uri}/step-1", {"w": torch.full((1000,), 1)})
    assert not Path(file_uri, HISTORY_DIR).exists()
