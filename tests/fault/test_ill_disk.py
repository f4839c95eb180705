"""A hung disk of the local tier around a save: training continues and waits at most half a second.

The tests count the disk requests of the training thread: there must be none.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.agents import until
from tests.waits import SEEDED_SECONDS, Disk, TooLongError, counted
from tierckpt import poll
from tierckpt.arena import slots
from tierckpt.checkpoint import local_commit
from tierckpt.disk import illness
from tierckpt.disk.illness import Errands, Requests, requests
from tierckpt.errors import CheckpointSkippedError, OperationTimeoutError
from tierckpt.training import saves as jobs
from tierckpt.training.run_log import RunLog

pytestmark = pytest.mark.ill

Patch = pytest.MonkeyPatch
SECONDS = 60.0


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


@contextmanager
def patient() -> Iterator[None]:
    """While the disk is healthy, however busy it is."""
    with Patch.context() as patched:
        patched.setattr(poll, "HANG_SECONDS", SECONDS)
        patched.setattr(illness, "ILL_SECONDS", SECONDS)
        yield


def check_skipped(skipped: Any, uri: str, local_root: Path) -> None:
    error = skipped.exception(0)
    assert isinstance(error, CheckpointSkippedError) and str(local_root) in error.message
    assert (error.context["checkpoint"], error.context["rank"], error.context["tier"]) == (uri, 0, "local")
    assert "dmesg" in error.hint and "the next save" in error.hint


@pytest.mark.parametrize("call", ["pwrite", "mkdir"])
def test_save_is_skipped_while_the_previous_one_hangs(
    call: str, file_uri: str, local_root: Path, monkeypatch: Patch
) -> None:
    disk = Disk(monkeypatch, os, call)
    with tierckpt.Checkpointer(file_uri, checkpoints_in_flight_max=1) as checkpointer, disk:
        with patient():
            checkpointer.save(1, state(1.0)).result(SECONDS)
        tierckpt.wait(f"{file_uri}/step-1", tier="shared")
        while requests.seconds_left() != illness.ILL_SECONDS:  # a request that ends resets the clock
            time.sleep(0.01)
        disk.hangs.clear()
        with patient():
            first = checkpointer.save(2, state(2.0))
        assert disk.in_it.wait(SECONDS)
        while requests.seconds_left() > illness.ILL_SECONDS / 4:  # others may still end, and reset the clock
            time.sleep(0.01)
        with counted():
            skipped = [checkpointer.save(step, state(float(step))) for step in (3, 4)]
            for step in range(5, 15):
                checkpointer.step(step, state(float(step)))
        for step, one in zip((3, 4), skipped, strict=True):
            check_skipped(one, f"{file_uri}/step-{step}", local_root)
        disk.hangs.set()
        first.result(SECONDS)
        with patient():
            checkpointer.save(15, state(15.0)).result(SECONDS)
    assert [bool(record.error) for record in checkpointer.stats] == [False, False, True, True, False]
    again = state(0.0)
    assert tierckpt.Checkpointer(file_uri).restore(again) == 15 and again["w"][0] == 15.0


def test_control_wait_for_a_hung_disk_is_found(file_uri: str, monkeypatch: Patch) -> None:
    """Control: an unbounded wait for the oldest save is found."""
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


def test_slow_disk_is_waited_for(monkeypatch: Patch) -> None:
    """Sequential requests of three quarters of the limit, by a simulated clock."""
    requests, now = Requests(), [0.0]
    monkeypatch.setattr(illness.time, "monotonic", lambda: now[0])
    for _ in range(8):
        with requests.counted():
            now[0] += 0.75 * illness.ILL_SECONDS
            assert not requests.is_ill
    assert requests.seconds_left() == illness.ILL_SECONDS, "a request is pending"
    with requests.counted(), requests.counted():
        now[0] += illness.ILL_SECONDS
        assert requests.is_ill


def test_all_ranks_skip_a_save_if_one_disk_hangs(local_root: Path, monkeypatch: Patch) -> None:
    ill = illness.ill_disk("/nvme", rank=3)
    settings = tierckpt.Settings.load(local_root=local_root)
    running = jobs.RunningSaves(settings, 60.0)
    monkeypatch.setattr(jobs, "all_gather", lambda mine: [mine, ill])
    refused = running.refuses("s3://bucket/run/step-2")
    assert refused is ill
    error = jobs.left_out(jobs.SaveRecord(2, "s3://bucket/run/step-2"), refused).exception(0)
    assert isinstance(error, CheckpointSkippedError) and error.context["rank"] == 3 and "step 2 was" in error.message


def test_staging_does_not_wait_for_a_slot_held_by_a_hung_disk(monkeypatch: Patch) -> None:
    arena = slots.Arena(slots_max=1, timeout_seconds=SECONDS)
    lease = arena.lease(1 << 20)
    assert lease is not None
    monkeypatch.setattr(illness, "ILL_SECONDS", 0.0)
    with requests.counted(), pytest.raises(CheckpointSkippedError, match="has not ended a request"):
        arena.lease(1 << 20)
    arena.close()


def test_planning_does_not_wait_for_a_hung_disk(file_uri: str, local_root: Path, monkeypatch: Patch) -> None:
    disk, threads = Disk(monkeypatch, local_commit, "read_local_manifest"), threading.active_count()
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        with patient():
            checkpointer.save(1, state(1.0)).result(SECONDS)
        disk.hangs.clear()
        with counted():
            skipped = [checkpointer.save(step, state(float(step))) for step in (2, 3, 4)]
        assert threading.active_count() - threads < 12, "more than one thread waits for the disk"
        for step, one in zip((2, 3, 4), skipped, strict=True):
            check_skipped(one, f"{file_uri}/step-{step}", local_root)
        disk.hangs.set()
        while checkpointer.save(5, state(5.0)).exception(SECONDS) is not None:
            pass  # the thread has to return
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-5"


def test_last_step_is_saved_once_the_disk_recovers(
    file_uri: str, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the last step, a wait blocks no training."""
    disk = Disk(monkeypatch, local_commit, "read_local_manifest")

    def recover() -> None:
        until(lambda: "step 3 was left out" in caplog.text, "the first try")
        disk.hangs.set()

    with tierckpt.Checkpointer(file_uri, interval=2) as checkpointer:
        with patient():
            for step in range(1, 4):
                checkpointer.step(step, state(float(step)))
            checkpointer.wait("local")
        disk.hangs.clear()
        threading.Thread(target=recover).start()
    assert disk.in_it.is_set()
    assert [(record.step, record.error) for record in checkpointer.stats] == [(2, ""), (3, "")]
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-3"


def test_first_save_continues_when_the_disk_recovers(file_uri: str, monkeypatch: Patch) -> None:
    """The training thread does not wait for directories and files below the local root."""
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
        with patient():
            checkpointer.save(7, state(7.0)).result(SECONDS)
    again = state(0.0)
    assert tierckpt.Checkpointer(file_uri).restore(again, step=1) == 1 and again["w"][0] == 1.0


def test_sync_save_on_a_hung_disk_names_its_step_and_waits_once(
    file_uri: str, local_root: Path, monkeypatch: Patch
) -> None:
    disk = Disk(monkeypatch, os, "pwrite")
    checkpointer = tierckpt.Checkpointer(file_uri, mode="sync", timeout_seconds=SECONDS)
    with patient():
        checkpointer.save(1, state(1.0))
    disk.hangs.clear()
    monkeypatch.setattr(jobs, "EXTRA_SECONDS", 0.2 - SECONDS)
    with patient(), pytest.raises(OperationTimeoutError, match="step-2 has not finished") as caught:
        checkpointer.save(2, state(2.0))
    assert (caught.value.context["tier"], caught.value.context["checkpoint"]) == ("local", f"{file_uri}/step-2")
    assert str(local_root) in caught.value.hint and "dmesg" in caught.value.hint
    with counted():
        skipped = [checkpointer.save(step, state(float(step))) for step in (3, 4)]
    assert all(isinstance(one.exception(0), CheckpointSkippedError) for one in skipped)
    monkeypatch.setattr(jobs, "EXTRA_SECONDS", SECONDS)
    disk.hangs.set()
    checkpointer.close()
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-2"


def test_hung_errand_is_abandoned_and_errors_reach_the_caller() -> None:
    errands, hangs = Errands("/nvme"), threading.Event()
    assert errands.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        errands.run(lambda: 1 // 0)
    with counted():
        for _ in range(3):
            with pytest.raises(CheckpointSkippedError, match="below /nvme"):
                errands.run(lambda: hangs.wait(SECONDS))
    hangs.set()


DISK_CALLS = (
    *("stat", "lstat", "open", "mkdir", "rmdir", "listdir", "scandir", "statvfs", "pwrite", "pread", "preadv", "fsync"),
    *("fdatasync", "ftruncate", "truncate", "rename", "replace", "unlink", "remove", "link", "symlink", "access"),
)
"""Functions of ``os`` that may block on a disk."""


class DiskCalls:
    """Records the disk calls of a thread below ``root``."""

    def __init__(self, patched: Patch, root: Path) -> None:
        self.found: list[str] = []
        self.is_counting = False
        thread, names = threading.current_thread(), (str(root), f"{root}/")

        def recording(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if self.is_counting and threading.current_thread() is thread:
                    is_there = isinstance(arguments[0], int) or os.fspath(arguments[0]).startswith(names)
                    if is_there:
                        self.found.append(f"os.{name}{arguments[:1]} by\n" + "".join(traceback.format_stack(limit=12)))
                return real(*arguments, **options)

            return call

        for name in DISK_CALLS:
            patched.setattr(os, name, recording(name, getattr(os, name)))


@pytest.fixture
def calls(monkeypatch: Patch, local_root: Path) -> DiskCalls:
    return DiskCalls(monkeypatch, local_root)


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


SAVE_MODES: dict[str, dict[str, Any]] = {
    "async, adaptive": {"exposure_seconds_max": 60.0},
    "multi-step, with a gradient log": {"every_step": tierckpt.EveryStep(window_steps=2, gradient_log=True)},
}


@pytest.mark.parametrize("way", SAVE_MODES)
def test_training_thread_makes_no_disk_calls(way: str, file_uri: str, calls: DiskCalls) -> None:
    trained(file_uri, calls, **SAVE_MODES[way])
    assert not calls.found, "\n\n".join(calls.found)


def run_immediately(self: Errands, work: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(work())
    return done


@pytest.mark.parametrize("bug", ["planning", "records"])
def test_control_disk_call_of_the_training_thread_is_found(
    bug: str, file_uri: str, calls: DiskCalls, monkeypatch: Patch
) -> None:
    """Control: errands that run in the calling thread are found."""
    if bug == "planning":
        monkeypatch.setattr(Errands, "begin", run_immediately)
    else:
        real = RunLog._warn  # private: there the bug is

        def tell(self: RunLog) -> None:
            self._path.exists()  # private: where it writes
            real(self)

        monkeypatch.setattr(RunLog, "_warn", tell)  # private: there the bug is
    trained(file_uri, calls)
    assert calls.found
