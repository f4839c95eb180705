"""Trainers and processes of optimizers near storage are killed at any instruction, and no step and no bit is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.fault.near_storage_job import Reference, train
from tests.fault.runner import start
from tests.services import ENVIRONMENT, in_full

KILLS = int(ENVIRONMENT.get("TIERCKPT_TEST_NEAR_STORAGE_KILLS", "2"))
ANSWER_SECONDS = 150.0


class Running:
    """A job in a process of its own, and the lines that it prints."""

    def __init__(self, directory: Path, *bug: str) -> None:
        self.job = start(train, directory, threads=torch.get_num_threads(), bug="".join(bug))
        self._read = 0
        """How many lines ``until`` has seen."""

    def until(self, word: str) -> int:
        """Return the number behind ``word`` in the next line that has it."""
        while True:
            lines = self.job.until(
                lambda: self.job.lines()[self._read :] or self.job.codes(0.0) != [None], word, ANSWER_SECONDS
            )
            assert lines is not True, f"the job has ended before it printed {word!r}"
            self._read += 1
            found, number = lines[0].split()
            if found == word:
                return int(number)

    @property
    def step(self) -> int:
        """The newest step that it has printed."""
        lines = map(str.split, self.job.lines())
        return max((int(number) for word, number in lines if word in ("step", "resumed")), default=-1)


def run(directory: Path, kills: int, *bug: str, seed: int = 0) -> None:
    """Kill trainers and processes in turns, and compare at the end."""
    chosen, reference = random.Random(seed), Reference()
    job = Running(directory, *bug)
    try:
        for number in range(kills):
            process = job.until("process")
            for _ in range(chosen.randrange(1, 4)):
                job.until("step")
            time.sleep(chosen.uniform(0.0, 0.2))
            if number % 3 == 2:
                job.job.kill()
                made = job.step
                job = Running(directory, *bug)
                assert job.until("resumed") >= made, "a step that was made is lost"
            else:
                os.kill(process, signal.SIGKILL)
        job.until("process")
        job.until("step")
        (directory / "stop").touch()
        sums = job.job.result(ANSWER_SECONDS)
        assert sums == reference.at(job.step)
        print(f"{kills} kills over {job.step} steps")
    finally:
        job.job.kill()


@pytest.mark.slow
def test_kills_lose_no_step_and_no_bit(tmp_path: Path) -> None:
    run(tmp_path, KILLS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    [
        "a block is stepped in the version that counts",
        *in_full(["a record says a later step", "a frame is written after its step is said to be made"]),
    ],
)
def test_a_seeded_bug_is_found(bug: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run(tmp_path, 40, bug)
    assert (tmp_path / "bug").exists(), "it was never made"
