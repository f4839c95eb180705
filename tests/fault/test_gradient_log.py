"""A job that is killed at any moment resumes at a step that it had made durable, or later, bit for bit."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.fault.gradient_log_job import BASE, Job
from tests.open_files import open_files
from tests.services import ENVIRONMENT, REPOSITORY
from tierckpt.errors import CheckpointError, IntegrityError
from tierckpt.replay import log as logs
from tierckpt.replay import segments
from tierckpt.replay.link import Link
from tierckpt.replay.log import GradientLog, roll_forward
from tierckpt.replay.segments import paths_in

KILLS = int(ENVIRONMENT.get("TIERCKPT_TEST_LOG_KILLS", "4"))
STEPS = 100_000


def begin(directory: Path, steps: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fault.gradient_log_job", str(directory), str(steps), *more]
    return subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


class Reference:
    """The same job, never killed."""

    def __init__(self) -> None:
        self.job = Job()

    def at(self, step: int) -> list[int]:
        while self.job.step < step:
            self.job.train()
        assert self.job.step == step
        return self.job.checksum()


def test_a_killed_job_loses_no_durable_step(tmp_path: Path) -> None:
    """Each kill is one of a job that has resumed from the log of those before."""
    chosen, reference, resumed, lost = random.Random(11), Reference(), 0, []
    for _ in range(KILLS):
        child = begin(tmp_path, STEPS)
        assert child.stdout is not None
        assert child.stdout.readline() == f"resumed {resumed}\n"
        time.sleep(chosen.uniform(0.0, 0.4))
        child.kill()
        told = [line for line in child.communicate()[0].splitlines(keepends=True) if line.endswith("\n")]
        durable = max([resumed, *(int(line.split()[1]) for line in told)])
        again = Job()
        again.resume(tmp_path)
        assert again.step >= durable, "a step that was durable is lost"
        assert again.checksum() == reference.at(again.step)
        lost.append(resumed + len(told) - again.step)
        resumed = again.step
    print(f"{KILLS} kills over {resumed} steps; steps lost, by what was printed: {max(lost)} at most")


@pytest.mark.parametrize("bug", ["a missing frame", "a frame of another step", "a byte of a gradient"])
def test_a_log_with_a_fault_leads_to_the_step_before_it_and_says_so(bug: str, tmp_path: Path) -> None:
    assert begin(tmp_path, 9, bug).wait(120) == 0
    job = Job()
    found = job.resume(tmp_path)
    assert job.step == 4 and found.ended
    assert job.checksum() == Reference().at(4)


def test_a_stale_hyperparameter_is_seen_by_the_bits(tmp_path: Path) -> None:
    """Seeded: the comparison of the kills must be able to fail."""
    assert begin(tmp_path, 9, "a stale hyperparameter").wait(120) == 0
    job = Job()
    job.resume(tmp_path)
    assert job.step == 9 and job.checksum() != Reference().at(9)


def logged(directory: Path, steps: int) -> Job:
    job = Job()
    with GradientLog(job.optimizer, directory) as log:
        log.begin(BASE)
        for _ in range(steps):
            job.train()
            log.end_of_step(job.step, job.others())
        log.sync()
        assert log.durable_step == steps
    return job


def test_damage_anywhere_leads_to_a_step_before_it(tmp_path: Path) -> None:
    logged(tmp_path, 6)
    [path], reference = paths_in(tmp_path), Reference()
    whole, states = path.read_bytes(), {step: reference.at(step) for step in range(7)}
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
        assert job.step < 6 or data.count(0) >= whole.count(0) - 1  # what fills the last block of a frame is not read
        ended += bool(found.ended)
    assert ended > 30


def test_steps_can_be_left_out_at_the_end_only(tmp_path: Path) -> None:
    """What all ranks have is the minimum over them."""
    logged(tmp_path, 5)
    job = Job()
    assert roll_forward(job.optimizer, tmp_path, BASE, last_step=3).step == 3
    assert job.checksum() == Reference().at(3)


def test_a_log_fits_its_base_and_its_optimizer(tmp_path: Path) -> None:
    logged(tmp_path, 3)
    assert roll_forward(Job().optimizer, tmp_path, "another base").steps == 0
    with pytest.raises(IntegrityError, match="another optimizer"):
        roll_forward(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]), tmp_path, BASE)


def test_what_cannot_be_logged_is_said(tmp_path: Path) -> None:
    job = Job()
    with GradientLog(job.optimizer, tmp_path) as log:
        log.begin(BASE)
        job.train()
        log.end_of_step(1)
        log.sync()
        job.optimizer.load_state_dict(job.optimizer.state_dict())
        job.train()
        log.end_of_step(2)
        with pytest.raises(CheckpointError, match="load_state_dict"):
            log.sync()
        log.begin("base-2")
        job.train()
        log.end_of_step(3)
        log.sync()
        assert log.durable_step == 3
        job.train()
        job.train()
        log.end_of_step(5)
        with pytest.raises(CheckpointError, match="stepped twice"):
            log.sync()


def test_a_disk_that_fails_ends_the_log_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    with GradientLog(job.optimizer, tmp_path) as log:
        log.begin(BASE)
        job.train()
        log.end_of_step(1, job.others())
        log.sync()

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(segments.SegmentFile, "append", full)
        job.train()
        log.end_of_step(2, job.others())
        with pytest.raises(CheckpointError, match="no room"):
            log.sync()
        job.train()
        log.end_of_step(3)
        assert log.durable_step == 1
        monkeypatch.undo()
    again = Job()
    again.resume(tmp_path)
    assert again.step <= 2


@pytest.mark.parametrize("call", ["append", "sync"])
def test_whoever_waits_for_a_disk_that_fails_is_told(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    with GradientLog(job.optimizer, tmp_path, every_steps=10) as log:
        log.begin(BASE)

        def fails(*_: object) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(segments.SegmentFile, call, fails)
        job.train()
        log.end_of_step(1)
        with pytest.raises(CheckpointError, match="Input/output error"):
            log.sync()
        assert log.durable_step == -1
        assert call == "sync" or not (open_files(tmp_path) or paths_in(tmp_path)), "a file without a head is left"


def test_a_disk_that_hangs_ends_the_log_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, hangs = Job(), threading.Event()
    log = GradientLog(job.optimizer, tmp_path)
    log.begin(BASE)
    monkeypatch.setattr(logs, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(segments.SegmentFile, "sync", lambda _: hangs.wait(60))
    for _ in range(6):
        job.train()
        log.end_of_step(job.step)
    assert "has taken nothing" in log.failure and job.step == 6
    with pytest.raises(CheckpointError, match="has taken nothing"):
        log.sync()
    hangs.set()
    monkeypatch.undo()
    log.begin("base-6")
    job.train()
    log.end_of_step(7)
    log.sync()
    assert log.durable_step == 7
    log.close()


def test_gradients_in_buffers_that_are_used_again_are_logged_from_the_next_base_on(tmp_path: Path) -> None:
    job = Job()
    with contextlib.closing(Link(bytes_per_second=1e6)) as link, GradientLog(job.optimizer, tmp_path, link=link) as log:
        for base in ("one", "two"):
            log.begin(base)
            for _ in range(4):
                job.optimizer.zero_grad(set_to_none=False)
                job.train()
                job.optimizer.zero_grad(set_to_none=False)
                log.end_of_step(job.step)
            if base == "one":
                with pytest.raises(CheckpointError, match="written over"):
                    log.sync()
        log.sync()
        assert log.durable_step == 8
