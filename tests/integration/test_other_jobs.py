"""Two jobs in one run, by mistake or after a node's return: each detects the other within one save and reports it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tierckpt import Checkpointer
from tierckpt.checkpoint.run_records import has_ended_here
from tierckpt.client import close_all
from tierckpt.format.layout import MANIFEST
from tierckpt.training.run_log import identity

JOB = """
import logging, os, sys
import torch
from tierckpt import Checkpointer
uri, root, value, keep = sys.argv[1:5]
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
checkpointer = Checkpointer(uri, local_root=root, keep_last=int(keep) or None)
print("ready", flush=True)
for line in sys.stdin:
    step = int(line)
    try:
        checkpointer.save(step, {"w": torch.full((1000,), float(value))}).result(60)
        checkpointer.wait()
        print("saved", step, flush=True)
    except Exception as error:
        print("failed", step, type(error).__name__, flush=True)
"""


class Process:
    def __init__(self, uri: str, folder: Path, value: int, keep: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._errors = folder / "stderr"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", JOB, uri, str(folder / "local"), str(value), str(keep)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "TIERCKPT_MOVER": "inline"},
            )
        assert self._answer() == "ready", self.said

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def save(self, step: int) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{step}\n")
        self._process.stdin.flush()
        return self._answer()

    @property
    def said(self) -> str:
        return self._errors.read_text()

    @property
    def knows(self) -> bool:
        return "another job saves there" in self.said

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.server)])
def test_two_jobs_detect_each_other_within_one_save_and_stop_removals(
    where: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    uri = request.getfixturevalue(f"{where}_uri")
    with (
        closing(Process(uri, folder / "one", 1, keep=1)) as one,
        closing(Process(uri, folder / "two", 2, keep=1)) as two,
    ):
        assert one.save(1) == "saved 1"
        assert two.save(2) == "saved 2"
        assert one.save(3) == "saved 3"
        assert two.save(4) == "saved 4"
        assert one.save(5) == "saved 5"
        for job, other in ((one, two), (two, one)):
            assert job.knows, job.said
            assert job.said.count("another job saves there") == 1, "one warning for each other job"
            assert f"process {other._process.pid}" in job.said
    close_all()
    for step, value in ((3, 1), (4, 2), (5, 1)):
        state: dict[str, Any] = {"w": torch.zeros(1000)}
        assert Checkpointer(uri).restore(state, step) == step
        assert state["w"][0] == value, "no job may remove checkpoints after the detection"


@pytest.mark.slow
def test_restarted_job_detects_no_other_job(file_uri: str, folder: Path) -> None:
    with closing(Process(file_uri, folder, 1, keep=1)) as first:
        assert first.save(1) == "saved 1"
    with closing(Process(file_uri, folder, 1, keep=1)) as again:
        assert [again.save(step) for step in (2, 3)] == ["saved 2", "saved 3"]
        assert not again.knows, again.said
    assert [path.name for path in Path(file_uri).glob("step-*") if (path / MANIFEST).exists()] == ["step-3"]


def test_run_continued_elsewhere_detects_no_other_job(
    file_uri: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for node in ("one", "two"):
        with Checkpointer(file_uri, local_root=folder / node, keep_last=2) as checkpointer:
            for step in (1, 2, 3) if node == "one" else (4, 5, 6):
                checkpointer.save(step, {"w": torch.zeros(10)}).result(60)
        close_all()
    assert "another job saves there" not in caplog.text


def test_store_without_conditional_puts_warns_at_the_first_save(caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer("memory://two-jobs/run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.zeros(10)}).result(60)
            assert caplog.text.count("no conditional puts") == 1
    assert "another job saves there" not in caplog.text


def test_record_of_a_former_process_with_the_same_pid() -> None:
    own = identity()
    namespace, began = own["process"].split("-")
    assert not has_ended_here(own)
    assert has_ended_here({**own, "process": f"{namespace}-{int(began) - 1}"})


def test_record_without_process_is_ignored() -> None:
    for process in (None, "", "1", "a-b", "0-0", "1-1-1"):
        assert not has_ended_here({**identity(), "process": process})
