"""``tierckpt report`` of real runs: times at which saves reached each tier, also after the trainer's end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.servers.faultproxy import FaultProxy, Kind, Plan
from tests.services import S3Server
from tests.states import save
from tierckpt.checkpoint import run_records
from tierckpt.checkpoint.journal import Journal
from tierckpt.checkpoint.local_commit import remove_local
from tierckpt.cli.ui.app import run
from tierckpt.client import close_all, get_client
from tierckpt.config import Settings
from tierckpt.format.layout import HISTORY_DIR, MANIFEST, local_dir, parse_uri
from tierckpt.poll import Poll

WAIT_SECONDS = 60.0
OUTAGE_SECONDS = 6.0

TRAINER = """
import json, os, sys, time, torch, tierckpt
uri, steps, waited, ends = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "waits", sys.argv[4]
checkpointer = tierckpt.Checkpointer(uri, timeout_seconds=60)
for step in steps:
    print(json.dumps([step, time.time()]), flush=True)
    checkpointer.save(step, {"w": torch.ones(1000)}).result(60)
if waited:
    checkpointer.wait("shared", 60)
if ends == "close":
    checkpointer.close()
os.kill(os.getpid(), 9)
"""

DIE_AFTER_COMMIT = """
import os, sys, torch, tierckpt
from tierckpt.drain.drainer import Drainer

async def dies(*_):
    os.kill(os.getpid(), 9)

Drainer._after_commit = dies
tierckpt.Checkpointer(sys.argv[1]).save(1, {"w": torch.ones(1000)}).result(60)
"""


@contextlib.contextmanager
def agent(endpoint: str) -> Iterator[None]:
    command = [sys.executable, "-m", "tierckpt", "agent", "--metrics-port", "0"]
    environment = os.environ | {"AWS_ENDPOINT_URL": endpoint}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        assert any("metrics on" in line for line in process.stderr)
        yield
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def train(uri: str, steps: list[int], endpoint: str, *, waits: bool, ends: str = "kill") -> dict[int, float]:
    """Save ``steps`` in a process that is then killed. Returns the time of each ``save`` call."""
    environment = os.environ | {"AWS_ENDPOINT_URL": endpoint, "TIERCKPT_MOVER": "agent"}
    command = [sys.executable, "-c", TRAINER, uri, json.dumps(steps), "waits" if waits else "", ends]
    done = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def report(capsys: pytest.CaptureFixture[str], uri: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["report", uri, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def text(capsys: pytest.CaptureFixture[str], uri: str) -> str:
    capsys.readouterr()
    assert run(["report", uri]) == 0
    return capsys.readouterr().out


def until(holds: Callable[[], bool], what: str) -> None:
    for _ in Poll(WAIT_SECONDS):
        if holds():
            return
    raise AssertionError(f"waited {WAIT_SECONDS} s for {what}")


def written_at(uri: str) -> float:
    """Return the commit time of the checkpoint at the store."""
    store = get_client(Settings.load()).mover.store(parse_uri(uri))
    at = get_client(Settings.load()).run(store.head(MANIFEST))
    assert at.modified_unix_seconds is not None
    return at.modified_unix_seconds


@pytest.mark.slow
def test_report_after_an_outage_and_a_killed_trainer(
    moto: S3Server, s3_uri: str, local_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket, proxy = s3_uri.split("/")[2], FaultProxy(moto.endpoint)
    journal = Journal(local_root / "journal")
    with proxy.running() as endpoint, agent(endpoint):
        began = train(s3_uri, [10, 20], endpoint, waits=True)
        proxy.plans[bucket] = Plan(Kind.RESET, 1.0)
        began |= train(s3_uri, [30, 40], endpoint, waits=False)
        time.sleep(OUTAGE_SECONDS)

        found = report(capsys, s3_uri)["tiers"]
        assert (found["local"]["reached"], found["shared"]["reached"]) == (4, 2)
        assert found["shared"]["waiting_steps"] == [30, 40] and found["shared"]["saves"] == 4
        assert found["shared"]["oldest_waiting_seconds"] == pytest.approx(time.time() - began[30], abs=1.5)
        assert found["peer"]["is_used"] is False
        shown = " ".join(text(capsys, s3_uri).split())
        assert "shared storage 2 of 4" in shown and "not yet on shared storage: 2, steps 30 to 40" in shown
        assert "peers not set up" in shown

        proxy.plans.clear()
        until(lambda: not journal.entries(), "the agent to drain")
    truth = {step: written_at(f"{s3_uri}/step-{step}") - at for step, at in began.items()}
    assert truth[30] > OUTAGE_SECONDS

    def check(found: dict[str, Any]) -> None:
        assert (found["reached"], found["untimed"], found["waiting_steps"], found["unknown_steps"]) == (4, 0, [], [])
        seconds = sorted(truth.values())
        assert found["maximum_seconds"] == pytest.approx(seconds[-1], abs=1.1)  # store times are whole seconds
        assert found["p90_seconds"] == found["maximum_seconds"]
        assert found["median_seconds"] == pytest.approx((seconds[1] + seconds[2]) / 2, abs=1.1)

    check(report(capsys, s3_uri)["tiers"]["shared"])
    for step in began:  # evicted
        assert remove_local(local_dir(local_root, parse_uri(f"{s3_uri}/step-{step}")))
    check(report(capsys, s3_uri)["tiers"]["shared"])
    close_all()
    assert run(["prune", s3_uri, "--keep-last", "1"]) == 0
    check(report(capsys, s3_uri)["tiers"]["shared"])
    close_all()
    shutil.rmtree(local_root)  # a report from another node
    check(report(capsys, s3_uri)["tiers"]["shared"])


def test_times_from_the_store_without_commit_records(
    file_uri: str, local_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without commit records, times come from the store."""
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.full((1000,), step)})
    run_dir = local_dir(local_root, parse_uri(file_uri))
    for place in (run_dir / HISTORY_DIR, Path(file_uri, HISTORY_DIR)):
        for path in place.glob("*.commits"):
            path.unlink()
    close_all()
    found = report(capsys, file_uri)["tiers"]
    assert (found["shared"]["reached"], found["shared"]["unknown_steps"]) == (3, [])
    assert found["shared"]["maximum_seconds"] < 60


def test_report_of_a_run_without_drains(file_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    with tierckpt.Checkpointer(file_uri, drain=False) as checkpointer:
        checkpointer.save(1, {"w": torch.full((1000,), 1)})
    found = report(capsys, file_uri)["tiers"]
    assert (found["shared"]["is_used"], found["shared"]["waiting_steps"], found["local"]["reached"]) == (False, [], 1)
    assert "shared storage not set up" in " ".join(text(capsys, file_uri).split())


@pytest.mark.slow
def test_commit_of_a_killed_mover_is_recorded_with_the_store_time(
    file_uri: str, local_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next mover finds the commit much later."""
    done = subprocess.run(
        [sys.executable, "-c", DIE_AFTER_COMMIT, file_uri], timeout=120, capture_output=True, text=True
    )
    assert done.returncode == -9, done.stderr[-3000:]
    assert Path(file_uri, "step-1", MANIFEST).exists()
    time.sleep(3)
    assert run(["drain", "--wait"]) == 0
    found = report(capsys, file_uri)["tiers"]["shared"]
    assert found["reached"] == 1 and 0 < found["maximum_seconds"] < 2.5
    lines = [*local_dir(local_root, parse_uri(file_uri)).glob(f"{HISTORY_DIR}/*.commits")]
    assert len(lines) == 1


def test_commit_records_are_bounded_and_tolerate_a_torn_line(
    file_uri: str, local_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
    found = report(capsys, file_uri)["tiers"]["shared"]
    assert found["reached"] >= 9 and found["reached"] + len(found["unknown_steps"]) == 30
    assert found["waiting_steps"] == [] and max(found["unknown_steps"]) <= 21


def test_plain_saves_leave_no_records(file_uri: str) -> None:
    save(f"{file_uri}/step-1", {"w": torch.full((1000,), 1)})
    tierckpt.wait(f"{file_uri}/step-1", timeout_seconds=WAIT_SECONDS)
    assert not Path(file_uri, HISTORY_DIR).exists()


@pytest.mark.slow
def test_two_saves_of_a_step_are_distinguished(
    file_uri: str, local_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        checkpointer.save(1, {"w": torch.full((1000,), 1)})
        checkpointer.wait("shared", 60)
        time.sleep(2.5)
        checkpointer.save(1, {"w": torch.full((1000,), 2)})
    found = report(capsys, file_uri)["tiers"]["shared"]
    assert (found["reached"], found["skipped_steps"]) == (2, [])
    assert found["maximum_seconds"] < 2
