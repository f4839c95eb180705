"""A job killed at any moment resumes at its last durable step, or later, bit for bit."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fault import runner
from tests.fault.training_jobs import BASE, Job, log_steps
from tests.open_files import open_files
from tests.services import ENVIRONMENT
from tests.waits import SEEDED_SECONDS, Disk, TooLongError, counted
from tierckpt.disk import file_io
from tierckpt.errors import CheckpointError, IntegrityError
from tierckpt.replay import checksum, log_writer
from tierckpt.replay.link import Link
from tierckpt.replay.log import GradientLog, roll_forward
from tierckpt.save import log_segments
from tierckpt.save.log_segments import paths_in

KILLS = int(ENVIRONMENT.get("TIERCKPT_TEST_LOG_KILLS", "2"))
KILLS_PER_LOG = 30
STEPS = 100_000


def begin(directory: Path, steps: int, bug: str = "") -> runner.Job:
    options = {"directory": str(directory / "log"), "steps": steps, "bug": bug}
    return runner.start(log_steps, directory, threads=torch.get_num_threads(), **options)


def train(job: Job, log: GradientLog, steps: int) -> None:
    for _ in range(steps):
        job.train()
        log.end_of_step(job.step, job.others())


def test_killed_job_loses_no_durable_step(tmp_path: Path) -> None:
    """Each killed job has resumed from the log of the previous one, up to 30 times."""
    chosen, lost = random.Random(11), list[int]()
    for number in range(KILLS):
        if number % KILLS_PER_LOG == 0:  # each resume replays the log from its begin
            directory, reference, resumed = tmp_path / f"{number}", Job(), 0
        child = begin(directory, STEPS)
        assert child.until(child.lines, "the job to resume")[0] == f"resumed {resumed}"
        time.sleep(chosen.uniform(0.0, 0.4))
        child.kill()
        lines = child.lines()[1:]
        durable = max([resumed, *(int(line.split()[1]) for line in lines)])
        again = Job()
        again.resume(directory / "log")
        assert again.step >= durable, "a durable step is lost"
        assert again.checksum() == reference.train_to(again.step).checksum()
        lost.append(resumed + len(lines) - again.step)
        resumed = again.step
    print(f"{KILLS} kills; steps lost: {max(lost)} at most")


@pytest.mark.parametrize("bug", ["a missing frame", "a frame of another step", "a byte of a gradient"])
def test_replay_stops_before_a_fault_in_the_log_and_reports_it(bug: str, tmp_path: Path) -> None:
    begin(tmp_path, 9, bug).result()
    job = Job()
    found = job.resume(tmp_path / "log")
    assert job.step == 4 and found.end_reason
    assert job.checksum() == Job().train_to(4).checksum()


def test_edit_through_data_ends_the_log_before_that_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is in ``test_training_loops.py``."""
    monkeypatch.setattr(checksum, "CHECK_SHARE", 0.0)  # no check by the training thread: the digest must find it
    monkeypatch.setattr(checksum, "FREE_SECONDS", -1.0)
    job = Job()
    with GradientLog(job.optimizer, tmp_path) as log:
        log.begin(BASE)
        train(job, log, 4)
        log.sync()
        job.model[2].weight.data[3, 5] += 1e-3  # type: ignore[operator, union-attr]
        train(job, log, 4)
        log.sync()
    with pytest.raises(IntegrityError, match=r"after step 5: they were changed .* roll forward to step 4") as caught:
        Job().resume(tmp_path)
    assert caught.value.context["verified_step"] == 4
    again = Job()
    found = roll_forward(again.optimizer, tmp_path, BASE, last_step=4)
    assert found.step == found.verified_step == 4 and again.checksum() == Job().train_to(4).checksum()


def logged(directory: Path, steps: int) -> Job:
    job = Job()
    with GradientLog(job.optimizer, directory) as log:
        log.begin(BASE)
        train(job, log, steps)
        log.sync()
        assert log.durable_step == steps
    return job


def test_replay_stops_before_damage_at_any_place(tmp_path: Path) -> None:
    logged(tmp_path, 6)
    [path], reference = paths_in(tmp_path), Job()
    whole, states = path.read_bytes(), {step: reference.train_to(step).checksum() for step in range(7)}
    chosen, ended = random.Random(2), 0
    for _ in range(40):
        data = bytearray(whole)
        if chosen.random() < 0.5:
            data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        else:
            del data[chosen.randrange(len(data)) :]
        path.write_bytes(data)
        job = Job()
        found = job.resume(tmp_path)
        assert job.checksum() == states[job.step]
        assert job.step < 6 or data.count(0) >= whole.count(0) - 1  # padding of a frame's last block is not read
        ended += bool(found.end_reason)
    assert ended > 30


def test_log_of_another_base_or_optimizer_is_rejected(tmp_path: Path) -> None:
    logged(tmp_path, 3)
    assert roll_forward(Job().optimizer, tmp_path, "another base").steps == 0
    with pytest.raises(IntegrityError, match="another optimizer"):
        roll_forward(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]), tmp_path, BASE)


def test_unloggable_changes_of_the_optimizer_are_reported(tmp_path: Path) -> None:
    job = Job()
    with GradientLog(job.optimizer, tmp_path) as log:
        log.begin(BASE)
        train(job, log, 1)
        log.sync()
        job.optimizer.load_state_dict(job.optimizer.state_dict())
        train(job, log, 1)
        with pytest.raises(CheckpointError, match="load_state_dict"):
            log.sync()
        log.begin("base-2")
        train(job, log, 1)
        log.sync()
        assert log.durable_step == 3
        job.train()
        job.train()
        log.end_of_step(5)
        with pytest.raises(CheckpointError, match="stepped twice"):
            log.sync()


def test_failing_disk_ends_the_log_but_not_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    with GradientLog(job.optimizer, tmp_path) as log:
        log.begin(BASE)
        train(job, log, 1)
        log.sync()

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(log_segments.SegmentFile, "append", full)
        train(job, log, 1)
        with pytest.raises(CheckpointError, match="no room"):
            log.sync()
        train(job, log, 1)
        assert log.durable_step == 1
        monkeypatch.undo()
    again = Job()
    again.resume(tmp_path)
    assert again.step <= 2


@pytest.mark.parametrize("call", ["append", "sync"])
def test_waiting_call_raises_the_error_of_a_failing_disk(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    with GradientLog(job.optimizer, tmp_path, every_steps=10) as log:
        log.begin(BASE)

        def fails(*_: object) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(log_segments.SegmentFile, call, fails)
        train(job, log, 1)
        with pytest.raises(CheckpointError, match="Input/output error"):
            log.sync()
        assert log.durable_step == -1
        assert call == "sync" or not (open_files(tmp_path) or paths_in(tmp_path)), "a file without a head is left"


CALLS: dict[str, tuple[Any, str]] = {
    "create": (file_io.DirectFile, "create"),
    "write": (file_io.DirectFile, "write"),
    "sync": (os, "fdatasync"),
}


@pytest.mark.ill
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("every_seconds", [0.0, 0.01])
def test_hung_disk_ends_the_log_and_costs_half_a_second(
    call: str, every_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_writer, "QUEUED_BYTES", 0)  # two steps, as for a large model
    disk, job, others = Disk(monkeypatch, *CALLS[call]), Job(), threading.active_count()
    log = GradientLog(job.optimizer, tmp_path, every_seconds=every_seconds)
    log.begin(BASE)
    if call != "create":
        train(job, log, 1)
        log.sync()
    disk.hangs.clear()
    with counted():
        train(job, log, 8)
        deadline = time.monotonic() + 60
        while not log.failure and time.monotonic() < deadline:  # the request may begin a moment later
            train(job, log, 1)
        assert "has not completed a request" in log.failure
        log.begin("base-8")
        train(job, log, 2)
    assert disk.in_it.is_set() and threading.active_count() - others < 12
    message = caplog.text
    assert all(text in message for text in ("no step after", str(tmp_path), "dmesg", "are not logged"))
    with pytest.raises(CheckpointError, match="has not completed a request"):
        log.sync()
    disk.hangs.set()
    deadline = time.monotonic() + 60
    while log.failure and time.monotonic() < deadline:  # the writer thread has to return
        log.begin("base-10")
    train(job, log, 1)
    log.sync()
    assert log.durable_step == job.step
    log.close()
    reference = Job().train_to(job.step - 1)
    assert roll_forward(reference.optimizer, tmp_path, "base-10").steps == 1
    assert reference.checksum() == job.checksum()


@pytest.mark.ill
def test_disk_that_recovers_in_time_has_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, job = Disk(monkeypatch, os, "fdatasync"), Job()
    with GradientLog(job.optimizer, tmp_path) as log:
        log.begin(BASE)
        disk.hangs.clear()
        with counted():
            train(job, log, 12)
        assert not log.failure and log.durable_step == -1
        disk.hangs.set()
        log.sync()
        assert log.durable_step == 12
    assert "are not durable" in caplog.text
    again = Job()
    again.resume(tmp_path)
    assert again.step == 12 and again.checksum() == job.checksum()


def test_control_long_wait_for_the_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a wait of ten seconds for a hung disk is found."""
    disk, job = Disk(monkeypatch, os, "fdatasync"), Job()
    monkeypatch.setattr(log_writer, "ILL_SECONDS", 10.0)
    log = GradientLog(job.optimizer, tmp_path)
    log.begin(BASE)
    disk.hangs.clear()
    with counted(SEEDED_SECONDS), pytest.raises(TooLongError):
        train(job, log, 8)
    disk.hangs.set()
    log.close()


@pytest.mark.parametrize("shows_progress", [True, False], ids=["no bug", "one clock for a whole frame"])
def test_slow_disk_with_progress_is_not_hung(
    shows_progress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame takes 8 requests, each three quarters of the limit of a request, by a simulated clock."""
    now, hung = [0.0], list[bool]()
    monkeypatch.setattr(log_segments, "REQUEST_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(log_writer, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    real, append = file_io.DirectFile.write, log_segments.SegmentFile.append

    def write(*arguments: Any) -> None:
        now[0] += 0.75 * log_writer.ILL_SECONDS
        hung.append(log._writer.is_hung)  # type: ignore[union-attr]  # private: read during a request
        real(*arguments)

    monkeypatch.setattr(file_io.DirectFile, "write", write)
    if not shows_progress:
        monkeypatch.setattr(log_segments.SegmentFile, "append", lambda one, pieces, *_: append(one, pieces))
    weight = torch.nn.Parameter(torch.randn(7 << 18))
    optimizer = torch.optim.AdamW([weight])
    with GradientLog(optimizer, tmp_path) as log:
        log.begin(BASE)
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        log.end_of_step(1)
        log.sync()
    assert len(hung) >= 8 and any(hung) != shows_progress


def test_gradients_in_reused_buffers_are_logged_from_the_next_base(tmp_path: Path) -> None:
    job = Job()
    with contextlib.closing(Link(bytes_per_second=2e5)) as link, GradientLog(job.optimizer, tmp_path, link=link) as log:
        for base in ("one", "two"):
            log.begin(base)
            for _ in range(4):
                job.optimizer.zero_grad(set_to_none=False)
                job.train()
                job.optimizer.zero_grad(set_to_none=False)
                log.end_of_step(job.step)
            if base == "one":
                with pytest.raises(CheckpointError, match="overwritten"):
                    log.sync()
        log.sync()
        assert log.durable_step == 8
