"""A job that is told to go saves the step it is at, on all ranks, if what was measured says that it fits: with real
signals, by torchrun too, and by the notices of the clouds, asked of a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.agents import until
from tests.fault import training_scenarios
from tests.fault.runner import Job, start
from tests.services import REPOSITORY, HttpServer
from tierckpt.config import Settings
from tierckpt.errors import ConfigError
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.training import preemption
from tierckpt.training.final_save import fits_deadline
from tierckpt.training.preemption import Notices

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]


def steps_done(folder: Path, rank: int = 0) -> int:
    path = folder / f"seen-000-{rank}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def until_step(job: Job, folder: Path, step: int, ranks: int = 1) -> None:
    job.until(lambda: min(steps_done(folder, rank) for rank in range(ranks)) >= step, f"step {step}")


def newest(local_root: Path, uri: str) -> int:
    run = local_dir(local_root, parse_uri(uri))
    return max((int(path.parent.parent.name[5:]) for path in run.glob("*/.tierckpt/manifest.json")), default=0)


@pytest.mark.parametrize(
    ("name", "ranks"), [("SIGTERM", 2), ("SIGUSR1", 1), pytest.param("SIGUSR2", 2, marks=pytest.mark.slow)]
)
def test_a_signal_saves_the_step_the_job_is_at_and_ends_it(
    tmp_path: Path, local_root: Path, file_uri: str, name: str, ranks: int
) -> None:
    """The signal reaches one rank only; the other hears of it from that one."""
    options = {"preempt_signals": ["SIGTERM", "SIGUSR1", "SIGUSR2"], "interval": 1000, "grace_seconds": 20}
    job = start(training_scenarios.train, tmp_path, ranks, uri=file_uri, step_seconds=0.02, **options)
    until_step(job, tmp_path, 5, ranks)
    os.kill(job.pids[-1], getattr(signal, name))
    codes = Job(job.pids[-1:], tmp_path).codes(40)
    job.kill()
    assert codes[-1] == -getattr(signal, name), job.output()[-3000:]
    saved = newest(local_root, file_uri)
    assert saved >= 5, job.output()[-3000:]
    assert f"{name}: step {saved} is saved" in job.output()


def test_without_a_last_save_those_steps_are_lost(tmp_path: Path, local_root: Path, file_uri: str) -> None:
    job = start(training_scenarios.train, tmp_path, 1, uri=file_uri, step_seconds=0.02, interval=1000, grace_seconds=0)
    until_step(job, tmp_path, 5)
    os.kill(job.pids[0], signal.SIGTERM)
    assert job.codes(40) == [-signal.SIGTERM]
    assert newest(local_root, file_uri) == 0


@pytest.mark.slow
def test_a_save_that_does_not_fit_is_not_begun(tmp_path: Path, local_root: Path, file_uri: str) -> None:
    """A disk that takes 1.5 s for a checkpoint, judged as 30 s, and 25 s of grace."""
    job = start(training_scenarios.train_on_a_slow_disk, tmp_path, 1, uri=file_uri, slow_seconds=1.5, grace_seconds=25)
    until_step(job, tmp_path, 6)
    os.kill(job.pids[0], signal.SIGTERM)
    assert job.codes(60) == [-signal.SIGTERM]
    assert newest(local_root, file_uri) == 2
    assert "is not saved:" in job.output()
    assert "s to the SSD, and" in job.output()


@pytest.mark.slow
def test_torchrun_passes_the_signal_on_and_the_last_step_is_saved(
    tmp_path: Path, local_root: Path, file_uri: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import pathlib, sys, torch.distributed as dist\n"
        "from tests import patience\n"
        "from tests.fault.training_scenarios import train\n"
        "patience.extend_if_told()\n"
        "dist.init_process_group('gloo')\n"
        "train(pathlib.Path(sys.argv[1]), sys.argv[2], step_seconds=0.02, interval=1000, grace_seconds=20)\n"
    )
    output = tmp_path / "output"
    with output.open("wb") as stream:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
        process = subprocess.Popen(
            [*command, str(tmp_path), file_uri],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        until(
            lambda: process.poll() is not None or min(steps_done(tmp_path, rank) for rank in (0, 1)) >= 5, "step 5", 90
        )
        assert process.poll() is None, output.read_text()[-3000:]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait(60)
    saved = newest(local_root, file_uri)
    assert saved >= 5, output.read_text()[-3000:]


# --- what fits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost_seconds", "seconds", "fits", "says"),
    [
        (None, 5.0, True, "step 7 is saved: nothing was measured yet, and 5 s are left"),
        (2.0, 5.0, True, "step 7 is saved: a save takes 2 s to the SSD, and 5 s are left"),
        (6.0, 5.0, False, "step 7 is not saved: a save takes 6 s to the SSD, and 5 s are left"),
        (6.0, -1.0, False, "step 7 is not saved: a save takes 6 s to the SSD, and 0 s are left"),
    ],
)
def test_what_fits_is_judged_by_measured_times_and_said(
    cost_seconds: float | None, seconds: float, fits: bool, says: str
) -> None:
    assert fits_deadline(7, cost_seconds, seconds) == (fits, says)


# --- notices -------------------------------------------------------------------------------------------------------


class Metadata(HttpServer):
    """A metadata server: what it answers for each path, and what it was asked."""

    verbs = ("GET", "PUT")

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        headers = {key.lower(): value for key, value in request.headers.items()}
        self.asked.append((request.command, request.path, headers))
        self.say(request, *self.answers.get(f"{request.command} {request.path}", (404, b"")))


@pytest.fixture
def server() -> Iterator[Metadata]:
    with closing(Metadata()) as made:
        yield made


def look_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cloud's metadata is at ``url``, and is looked at often."""
    monkeypatch.setattr(preemption, "ADDRESSES", dict.fromkeys(preemption.ADDRESSES, url))
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.02)


AWS = "GET /latest/meta-data/spot/instance-action"
GCP = "GET /computeMetadata/v1/instance/preempted"
AZURE = "GET /metadata/scheduledevents?api-version=2020-07-01"
SOON = datetime.now(UTC) + timedelta(hours=3)  # all tests together may take an hour


TERMINATE = json.dumps({"action": "terminate", "time": f"{SOON:%Y-%m-%dT%H:%M:%SZ}"}).encode()


def events(kind: str, when: str) -> bytes:
    return json.dumps({"DocumentIncarnation": 1, "Events": [{"EventType": kind, "NotBefore": when}]}).encode()


@pytest.mark.parametrize(
    ("cloud", "path", "quiet", "notice", "seconds", "header"),
    [
        ("aws", AWS, (404, b""), TERMINATE,
         (600, 10801), ("x-aws-ec2-metadata-token", "a token")),
        ("gcp", GCP, (200, b"FALSE"), b"TRUE", (30, 30), ("metadata-flavor", "Google")),
        ("azure", AZURE, (200, events("Freeze", "")), events("Preempt", format_datetime(SOON, usegmt=True)),
         (600, 10801),
         ("metadata", "true")),
        ("azure", AZURE, (200, b'{"DocumentIncarnation": 0, "Events": []}'), events("Terminate", ""), (30, 30),
         ("metadata", "true")),
    ],
    ids=["aws", "gcp", "azure preempts", "azure terminates"],
)  # fmt: skip
def test_each_clouds_notice_is_heard_and_its_quiet_is_not(
    cloud: str,
    path: str,
    quiet: tuple[int, bytes],
    notice: bytes,
    seconds: tuple[float, float],
    header: tuple[str, str],
    server: Metadata,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[float] = []
    server.answers = {"PUT /latest/api/token": (200, b"a token"), path: quiet}
    look_at(server.endpoint, monkeypatch)
    notices = Notices(Settings.load(preempt_notices=cloud), lambda left, why: heard.append(left))
    until(lambda: sum(f"{method} {asked}" == path for method, asked, _ in server.asked) >= 3, "three requests")
    assert not heard
    server.answers[path] = (200, notice)
    until(lambda: heard, "the notice")
    notices.close()
    assert seconds[0] <= heard[0] <= seconds[1]
    asked = next(headers for method, asked, headers in server.asked if f"{method} {asked}" == path)
    assert asked[header[0]] == header[1]


def test_nobody_is_asked_unless_it_is_wanted_and_a_broken_answer_harms_nothing(
    server: Metadata, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[float] = []
    look_at(server.endpoint, monkeypatch)
    off = Notices(Settings.load(), lambda left, why: heard.append(left))
    server.answers = {"PUT /latest/api/token": (200, b"t"), AWS: (200, b"<html>")}
    broken = Notices(Settings.load(preempt_notices="aws"), lambda left, why: heard.append(left))
    until(lambda: sum(path.endswith("instance-action") for _, path, _ in server.asked) >= 3, "three requests")
    count = len(server.asked)
    off.close()
    broken.close()
    assert heard == []
    assert count >= 6
    assert sum("does not report preemptions" in message for message in caplog.messages) == 1


def test_a_notice_saves_and_training_goes_on(server: Metadata, tmp_path: Path, local_root: Path, file_uri: str) -> None:
    server.answers = {GCP: (200, b"FALSE")}
    options = {"preempt_notices": "gcp", "metadata": server.endpoint}
    job = start(training_scenarios.train, tmp_path, 2, uri=file_uri, step_seconds=0.02, interval=1000, **options)
    until_step(job, tmp_path, 5, 2)
    server.answers = {GCP: (200, b"TRUE")}
    assert set(job.codes(60)) == {0}, job.output()[-3000:]  # the loop leaves when it is told that it may
    saved = newest(local_root, file_uri)
    assert saved >= 5
    assert saved == steps_done(tmp_path)
    assert "a notice of gcp, 30 s ahead" in job.output()


def test_bad_settings_get_a_sentence() -> None:
    with pytest.raises(ConfigError, match="preempt_signals"):
        Settings.load(preempt_signals=("SIGKILL",))
    with pytest.raises(ConfigError, match="preempt_notices"):
        Settings.load(preempt_notices="ibm")
    assert Settings.load(preempt_signals="TERM, USR1").preempt_signals == ("SIGTERM", "SIGUSR1")
