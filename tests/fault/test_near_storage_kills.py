"""Trainers and processes of optimizers near storage are killed at any instruction, and no step and no bit is lost."""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.fault.near_storage_job import Reference
from tests.fault.nursery import Program
from tests.services import ENVIRONMENT, in_full

KILLS = int(ENVIRONMENT.get("TIERCKPT_TEST_NEAR_STORAGE_KILLS", "2"))
ANSWER_SECONDS = 150.0


class Running:
    """A job in a process of its own, and what it says."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.child = Program("tests.fault.near_storage_job", str(directory), *arguments, env=ENVIRONMENT)
        self.step = self.process = -1
        self._said: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.child.stdout:
            if line.endswith("\n"):
                self._said.put(line.rstrip())
        self._said.put("end")

    def until(self, word: str) -> list[int]:
        """Return the numbers behind ``word``, when it is said."""
        while True:
            found, *numbers = self._said.get(timeout=ANSWER_SECONDS).split()
            if found in ("step", "resumed"):
                self.step = int(numbers[0])
            if found == "process":
                self.process = int(numbers[0])
            if found == word:
                return [int(one) for one in numbers]
            assert found != "end", f"the job has ended before it said {word!r}"

    def kill(self) -> int:
        """Kill the trainer, and return the step that it had said."""
        self.child.kill()
        self.child.wait()
        self.until("end")
        self._reader.join()
        return self.step


def run(directory: Path, kills: int, *bug: str, seed: int = 0) -> None:
    """Kill trainers and processes in turns, and compare at the end."""
    chosen, reference, said = random.Random(seed), Reference(), 0
    job = Running(directory, *bug)
    try:
        for number in range(kills):
            job.until("process")
            for _ in range(chosen.randrange(1, 4)):
                job.until("step")
            time.sleep(chosen.uniform(0.0, 0.2))
            if number % 3 == 2:
                said = job.kill()
                job = Running(directory, *bug)
                (resumed,) = job.until("resumed")
                assert resumed >= said, "a step that was made is lost"
            else:
                os.kill(job.process, signal.SIGKILL)
        job.until("process")
        job.until("step")
        (directory / "stop").touch()
        sums = job.until("sums")
        assert sums == reference.at(job.step)
        print(f"{kills} kills over {job.step} steps")
    finally:
        if job.child.poll() is None:
            job.child.kill()
            job.child.wait()


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
