"""The disk of the local tier hangs around a save: training goes on, and waits for it no longer than half a second.

That nothing else waits is shown by what the thread that trains asks the disk for: nothing.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.waits import SEEDED_SECONDS, Disk, TooLongError, counted
from tierckpt.arena import slots
from tierckpt.checkpoint import local_commit
from tierckpt.disk import illness
from tierckpt.disk.illness import Errands, Requests, requests
from tierckpt.errors import CheckpointSkippedError, OperationTimeoutError
from tierckpt.training import saves as jobs
from tierckpt.training.run_log import RunLog

Patch = pytest.MonkeyPatch
SECONDS = 60.0


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


def check_left_out(left: Any, uri: str, local_root: Path) -> None:
    error = left.exception(0)
    assert isinstance(error, CheckpointSkippedError) and str(local_root) in error.message
    assert (error.context["checkpoint"], error.context["rank"], error.context["tier"]) == (uri, 0, "local")
    assert "dmesg" in error.hint and "the next save" in error.hint


@pytest.mark.parametrize("call", ["pwrite", "mkdir"])
def test_a_save_is_left_out_while_the_one_before_it_hangs(
    call: str, file_uri: str, local_root: Path, monkeypatch: Patch
) -> None:
    disk = Disk(monkeypatch, os, call)
    with tierckpt.Checkpointer(file_uri, checkpoints_in_flight_max=1) as checkpointer:
        checkpointer.save(1, state(1.0)).result(SECONDS)
        tierckpt.wait(f"{file_uri}/step-1", tier="shared")
        while requests.seconds_left() != illness.ILL_SECONDS:  # what ends meanwhile says that the disk is not ill
            time.sleep(0.01)
        disk.hangs.clear()
        first = checkpointer.save(2, state(2.0))
        assert disk.in_it.wait(SECONDS)
        while requests.seconds_left() == illness.ILL_SECONDS:  # the records may be the first to hang
            time.sleep(0.01)
        with counted():
            left = [checkpointer.save(step, state(float(step))) for step in (3, 4)]
            for step in range(5, 15):
                checkpointer.step(step, state(float(step)))
        for step, one in zip((3, 4), left, strict=True):
            check_left_out(one, f"{file_uri}/step-{step}", local_root)
        disk.hangs.set()
        first.result(SECONDS)
        checkpointer.save(15, state(15.0)).result(SECONDS)
    assert [bool(record.error) for record in checkpointer.stats] == [False, False, True, True, False]
    again = state(0.0)
    assert tierckpt.Checkpointer(file_uri).restore(again) == 15 and again["w"][0] == 15.0


def test_the_wait_that_was_for_an_ill_disk_is_found(file_uri: str, monkeypatch: Patch) -> None:
    """Seeded: the oldest save is waited for whatever it does."""
    monkeypatch.setattr(Requests, "seconds_left", lambda self: 600.0)
    monkeypatch.setattr(jobs, "ROUND_SECONDS", 600.0)
    disk = Disk(monkeypatch, os, "pwrite")
    with tierckpt.Checkpointer(file_uri, checkpoints_in_flight_max=1) as checkpointer:
        disk.hangs.clear()
        checkpointer.save(1, state(1.0))
        assert disk.in_it.wait(SECONDS)
        with counted(SEEDED_SECONDS), pytest.raises(TooLongError):
            checkpointer.save(2, state(2.0))
        disk.hangs.set()


def test_a_disk_that_is_slow_is_waited_for(monkeypatch: Patch) -> None:
    """Requests of three quarters of what one may take, one after another. The clock is the test's."""
    asked, now = Requests(), [0.0]
    monkeypatch.setattr(illness.time, "monotonic", lambda: now[0])
    for _ in range(8):
        with asked.counted():
            now[0] += 0.75 * illness.ILL_SECONDS
            assert not asked.is_ill
    assert asked.seconds_left() == illness.ILL_SECONDS, "it was asked for nothing"
    with asked.counted(), asked.counted():
        now[0] += illness.ILL_SECONDS
        assert asked.is_ill


def test_when_the_disk_of_one_rank_is_ill_all_leave_the_save_out(local_root: Path, monkeypatch: Patch) -> None:
    ill = illness.ill_disk("/nvme", rank=3)
    settings = tierckpt.Settings.load(local_root=local_root)
    running = jobs.RunningSaves(settings, 60.0)
    monkeypatch.setattr(jobs, "all_gather", lambda mine: [mine, ill])
    refused = running.refuses("s3://bucket/run/step-2")
    assert refused is ill
    left = jobs.left_out(jobs.SaveRecord(2, "s3://bucket/run/step-2"), refused).exception(0)
    assert isinstance(left, CheckpointSkippedError) and left.context["rank"] == 3 and "step 2 was" in left.message


def test_staging_does_not_wait_for_a_slot_that_an_ill_disk_holds(monkeypatch: Patch) -> None:
    arena = slots.Arena(slots_max=1, timeout_seconds=SECONDS)
    lease = arena.lease(1 << 20)
    assert lease is not None
    monkeypatch.setattr(illness, "ILL_SECONDS", 0.0)
    with requests.counted(), pytest.raises(CheckpointSkippedError, match="has not ended a request"):
        arena.lease(1 << 20)
    arena.close()


def test_planning_does_not_wait_for_a_disk_that_hangs(file_uri: str, local_root: Path, monkeypatch: Patch) -> None:
    disk, threads = Disk(monkeypatch, local_commit, "read_local_manifest"), threading.active_count()
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        checkpointer.save(1, state(1.0)).result(SECONDS)
        disk.hangs.clear()
        with counted():
            left = [checkpointer.save(step, state(float(step))) for step in (2, 3, 4)]
        assert threading.active_count() - threads < 12, "one thread hangs, and no other is sent after it"
        for step, one in zip((2, 3, 4), left, strict=True):
            check_left_out(one, f"{file_uri}/step-{step}", local_root)
        disk.hangs.set()
        while checkpointer.save(5, state(5.0)).exception(SECONDS) is not None:
            pass  # its thread has to come back
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-5"


def test_the_last_step_of_a_job_is_saved_once_the_disk_is_back(file_uri: str, monkeypatch: Patch) -> None:
    """Nothing trains any more that a wait would hold up."""
    disk = Disk(monkeypatch, local_commit, "read_local_manifest")
    with tierckpt.Checkpointer(file_uri, interval=2) as checkpointer:
        for step in range(1, 4):
            checkpointer.step(step, state(float(step)))
        checkpointer.wait("local")
        disk.hangs.clear()
        threading.Timer(2.0, disk.hangs.set).start()
    assert disk.in_it.is_set()
    assert [(record.step, record.error) for record in checkpointer.stats] == [(2, ""), (3, "")]
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-3"


def test_the_first_save_of_a_process_goes_on_when_the_disk_comes_back(file_uri: str, monkeypatch: Patch) -> None:
    """Of what it makes below the local root, and looks for there, the thread that trains waits for nothing in vain."""
    disk = Disk(monkeypatch, os, "mkdir")
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        disk.hangs.clear()
        with counted():
            first = checkpointer.save(1, state(1.0))
            for step in range(2, 6):
                checkpointer.step(step, state(float(step)))
            second = checkpointer.save(6, state(6.0))
        assert disk.in_it.wait(SECONDS)
        assert not first.done() and isinstance(second.exception(0), CheckpointSkippedError)
        disk.hangs.set()
        first.result(SECONDS)
        checkpointer.save(7, state(7.0)).result(SECONDS)
    again = state(0.0)
    assert tierckpt.Checkpointer(file_uri).restore(again, step=1) == 1 and again["w"][0] == 1.0


def test_a_save_that_waits_for_its_disk_says_which_and_is_waited_for_once(
    file_uri: str, local_root: Path, monkeypatch: Patch
) -> None:
    disk = Disk(monkeypatch, os, "pwrite")
    checkpointer = tierckpt.Checkpointer(file_uri, mode="sync", timeout_seconds=SECONDS)
    checkpointer.save(1, state(1.0))
    disk.hangs.clear()
    monkeypatch.setattr(jobs, "EXTRA_SECONDS", 0.2 - SECONDS)
    with pytest.raises(OperationTimeoutError, match="step-2 has not finished") as late:
        checkpointer.save(2, state(2.0))
    assert (late.value.context["tier"], late.value.context["checkpoint"]) == ("local", f"{file_uri}/step-2")
    assert str(local_root) in late.value.hint and "dmesg" in late.value.hint
    with counted():
        left = [checkpointer.save(step, state(float(step))) for step in (3, 4)]
    assert all(isinstance(one.exception(0), CheckpointSkippedError) for one in left)
    monkeypatch.setattr(jobs, "EXTRA_SECONDS", SECONDS)
    disk.hangs.set()
    checkpointer.close()
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-2"


def test_an_errand_that_hangs_is_given_up_and_its_errors_are_the_callers() -> None:
    errands, hangs = Errands("/nvme"), threading.Event()
    assert errands.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        errands.run(lambda: 1 // 0)
    with counted():
        for _ in range(3):
            with pytest.raises(CheckpointSkippedError, match="below /nvme"):
                errands.run(lambda: hangs.wait(SECONDS))
    hangs.set()


ASKS = (
    *("stat", "lstat", "open", "mkdir", "rmdir", "listdir", "scandir", "statvfs", "pwrite", "pread", "preadv", "fsync"),
    *("fdatasync", "ftruncate", "truncate", "rename", "replace", "unlink", "remove", "link", "symlink", "access"),
)
"""Functions of ``os`` that may wait for a disk."""


class DiskCalls:
    """What a thread asks the disk below ``root`` for."""

    def __init__(self, patched: Patch, root: Path) -> None:
        self.found: list[str] = []
        self.is_counting = False
        thread, names = threading.current_thread(), (str(root), f"{root}/")

        def heard(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **options: Any) -> Any:
                if self.is_counting and threading.current_thread() is thread:
                    is_there = isinstance(given[0], int) or os.fspath(given[0]).startswith(names)
                    if is_there:
                        self.found.append(f"os.{name}{given[:1]} by\n" + "".join(traceback.format_stack(limit=12)))
                return real(*given, **options)

            return call

        for name in ASKS:
            patched.setattr(os, name, heard(name, getattr(os, name)))


@pytest.fixture
def calls(monkeypatch: Patch, local_root: Path) -> Iterator[DiskCalls]:
    with monkeypatch.context() as patched:
        yield DiskCalls(patched, local_root)


def trained(uri: str, calls: DiskCalls, **options: Any) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}
    with tierckpt.Checkpointer(uri, interval=2, keep_last=2, **options) as checkpointer:
        for step in range(1, 12):
            model(torch.ones(8)).sum().backward()
            state["optimizer"].step()
            state["step"] = step
            calls.is_counting = True
            saved = checkpointer.step(step, state)
            calls.is_counting = False
            if step < 4 and saved is not None:
                checkpointer.wait("local")


WAYS: dict[str, dict[str, Any]] = {
    "async, adaptive": {"exposure_seconds_max": 60.0},
    "multi-step, with a gradient log": {"every_step": tierckpt.EveryStep(window_steps=2, gradient_log=True)},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_thread_that_trains_asks_the_disk_for_nothing(way: str, file_uri: str, calls: DiskCalls) -> None:
    trained(file_uri, calls, **WAYS[way])
    assert not calls.found, "\n\n".join(calls.found)


def at_once(self: Errands, work: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(work())
    return done


@pytest.mark.parametrize("bug", ["planning", "records"])
def test_a_request_of_the_thread_that_trains_is_found(
    bug: str, file_uri: str, calls: DiskCalls, monkeypatch: Patch
) -> None:
    """Seeded: what threads were to do is done at once."""
    if bug == "planning":
        monkeypatch.setattr(Errands, "begin", at_once)
    else:
        real = RunLog._warn  # private: there the bug is

        def tell(self: RunLog) -> None:
            self._path.exists()  # private: where it writes
            real(self)

        monkeypatch.setattr(RunLog, "_warn", tell)  # private: there the bug is
    trained(file_uri, calls)
    assert calls.found
