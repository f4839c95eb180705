"""The process of an optimizer near storage is stopped, killed, or its disk hangs: a shadow costs training half a second
at most, and offload loses nothing.

What counts is measured where the thread that trains would wait, and not on a wall clock that the rest of the machine
moves too.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.fault.near_storage_job import NearJob, Reference
from tierckpt.errors import CheckpointError, IntegrityError, OperationTimeoutError
from tierckpt.near_storage import shadow_channel, updater_process
from tierckpt.near_storage.blocks import Member, layout_of
from tierckpt.near_storage.mapped_state import Hold
from tierckpt.near_storage.shadow_channel import ShadowChannel
from tierckpt.near_storage.state_file import StateFile
from tierckpt.near_storage.states import begin_state, current_state
from tierckpt.near_storage.updater_process import UpdaterProcess
from tierckpt.replay.checksum import checksum

BUDGET_SECONDS = 0.5
MARGIN = 3.0
ANSWER_SECONDS = 150.0


class Waits:
    """How long the thread that trains has been in what can wait for the process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_in = False

    def counted(self, method: Any) -> Any:
        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            if self._is_in or threading.current_thread() is not threading.main_thread():
                return method(*arguments, **options)
            begun, self._is_in = time.monotonic(), True
            try:
                return method(*arguments, **options)
            finally:
                self._is_in = False
                self.seconds += time.monotonic() - begun

        return call


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    monkeypatch.setattr(ShadowChannel, "_begun", waits.counted(ShadowChannel._begun))  # private: where it waits
    for name in ("start", "stop", "send", "await_step", "call"):
        monkeypatch.setattr(UpdaterProcess, name, waits.counted(getattr(UpdaterProcess, name)))
    return waits


@pytest.fixture
def shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NearJob]:
    monkeypatch.setattr(shadow_channel, "BACKLOG_BYTES", 1 << 25)
    job = NearJob(tmp_path / "near", "shadow")
    job.train()
    yield job
    os.kill(job.optimizer.process_id, signal.SIGKILL)
    job.optimizer.close()


def stop(pid: int) -> Callable[[], None]:
    os.kill(pid, signal.SIGSTOP)
    return lambda: None


def kill(pid: int) -> Callable[[], None]:
    os.kill(pid, signal.SIGKILL)
    return lambda: None


def hang_disk(pid: int) -> Callable[[], None]:
    """Whatever it writes from now on takes until what is returned is called. Until then not even SIGKILL ends it."""
    calls = "write,pwrite64,fdatasync,fsync,msync"
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}"]
    command += ["-e", f"inject={calls}:delay_enter=600000000", "-p", str(pid)]
    tracer = subprocess.Popen(command)
    until(lambda: "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text())
    assert tracer.poll() is None

    def mend() -> None:
        tracer.kill()
        tracer.wait()

    return mend


def until(is_true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def trained_to_the_end(job: NearJob, waits: Waits, fault: Callable[[int], Callable[[], None]]) -> None:
    """Make ``fault``, and train until the shadow is given up. Nobody mends it meanwhile."""
    mend = fault(job.optimizer.process_id)
    waits.seconds = 0.0
    for _ in range(100):
        if not job.optimizer.failure and waits.seconds <= MARGIN * BUDGET_SECONDS:
            job.train()
    mend()
    assert waits.seconds <= MARGIN * BUDGET_SECONDS, f"training waited {waits.seconds:.2f} s"


def begin_save(job: NearJob) -> tuple[Hold, list[torch.Tensor]]:
    """What a save of now reads of the shadow, and when."""
    with job.optimizer.mapped():
        tensors = states_in(job.optimizer.state)
    hold = job.optimizer.hold()
    assert hold is not None, "it is the trainer's state that would be saved"
    return hold, tensors


def states_in(state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
    ordered = sorted(state.items(), key=lambda item: item[0].numel())
    return [found[name] for _, found in ordered for name in ("exp_avg", "exp_avg_sq", "step")]


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [int(checksum(one).item()) for one in tensors]


def trained(job: NearJob) -> list[int]:
    """The state of the trainer's optimizer, which the shadow follows."""
    assert job.optimizer.inner is not None
    return checksums(states_in(job.optimizer.inner.state))


def read(saved: tuple[Hold, list[torch.Tensor]]) -> list[int]:
    hold, tensors = saved
    hold.wait(ANSWER_SECONDS)
    copies = [torch.empty_like(one) for one in tensors]
    for one, copy in zip(tensors, copies, strict=True):
        hold.reader(one)(copy.data_ptr(), 0, one.nbytes)
    hold.release()
    return checksums(copies)


def check(job: NearJob) -> None:
    """The shadow has every step, and a save reads there what training without one leads to."""
    until(lambda: job.optimizer.logged_steps == job.step)
    assert read(begin_save(job)) == trained(job)
    assert job.checksum() == Reference("shadow").at(job.step)


FAULTS = {"stopped": stop, "its disk hangs": hang_disk}


@pytest.mark.parametrize("fault", ["stopped", pytest.param("its disk hangs", marks=pytest.mark.slow)])
def test_a_shadow_that_hangs_is_given_up_and_begins_again_at_a_checkpoint(
    fault: str, shadow: NearJob, waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    if fault != "stopped" and shutil.which("strace") is None:
        pytest.skip("there is no strace here")
    trained_to_the_end(shadow, waits, FAULTS[fault])
    assert "given up until the next checkpoint" in caplog.text
    with shadow.optimizer.mapped():
        assert shadow.optimizer.hold() is None  # the trainer's state is saved
    check(shadow)
    shadow.train()
    check(shadow)


@pytest.mark.slow
def test_a_shadow_that_is_late_catches_up(shadow: NearJob, waits: Waits) -> None:
    """Stopped for a while, then killed: no step of it is lost, though training has gone on."""
    stop(shadow.optimizer.process_id)
    waits.seconds = 0.0
    for _ in range(8):
        shadow.train()
    os.kill(shadow.optimizer.process_id, signal.SIGCONT)
    shadow.train()
    kill(shadow.optimizer.process_id)
    shadow.train()
    assert waits.seconds <= MARGIN * BUDGET_SECONDS
    check(shadow)


@pytest.mark.slow
def test_a_save_whose_process_is_killed_reads_of_the_next(shadow: NearJob) -> None:
    """The process was asked and had not begun: the one that takes its place is asked again, before later steps."""
    stop(shadow.optimizer.process_id)
    saved, wanted = begin_save(shadow), trained(shadow)
    shadow.train()
    kill(shadow.optimizer.process_id)
    assert read(saved) == wanted
    check(shadow)


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["a process that hangs is waited for", "a process that is being begun is waited for"])
def test_a_seeded_bug_is_found(bug: str, shadow: NearJob, waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "a process that hangs is waited for":
        monkeypatch.setattr(shadow_channel, "PATIENCE_SECONDS", 3.0)
    else:

        def is_worth_waiting(channel: ShadowChannel) -> bool:
            return channel.is_behind and not channel.failure

        monkeypatch.setattr(ShadowChannel, "_is_worth_waiting", is_worth_waiting)  # private: there the bug is
    with pytest.raises(AssertionError, match="training waited"):
        trained_to_the_end(shadow, waits, stop if "hangs" in bug else kill)


def test_a_state_that_cannot_be_read_is_an_error_of_the_trainers_call_and_no_signal(tmp_path: Path) -> None:
    """Where a mapping would end the process (N6): all that the trainer reads, and what a save reads."""
    weight = torch.randn(3000)
    layout = layout_of(torch.optim.AdamW, [Member("0.0", "weight", (3000,), "float32")], [{}], master_dtype=None)
    begin_state(tmp_path, layout, {"0.0": {"": weight}}, 0)
    found = current_state(tmp_path, layout)
    assert found is not None
    file, [block] = StateFile(found, layout), layout.blocks
    target = torch.zeros(3000)
    read = file.reader(file.all_tensors()["0.0"][""], [0])
    read(target.data_ptr(), 4, 8)
    read(target.data_ptr() + 4, 0, 4)
    assert target[:3].tolist() == [weight[1].item(), weight[0].item(), 0.0] and file.present(block, 0) == {"0.0": {""}}
    assert torch.equal(file.read(block, 0)["0.0"][""], weight)
    os.truncate(found / "state", 0)
    asked: list[Callable[[], object]] = [
        lambda: file.present(block, 0),
        lambda: file.read(block, 0),
        lambda: read(target.data_ptr(), 0, 4),
        lambda: file.record(block, 0, 1, is_trainers=True),
    ]
    for one in asked:
        with pytest.raises(IntegrityError, match="cannot be read: it is too short"):
            one()


def test_a_process_that_its_disk_has_ended_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended_by_its_disk(_: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 7)"], cwd=tmp_path, **options
        )

    monkeypatch.setattr(updater_process, "start_python", ended_by_its_disk)
    with pytest.raises(IntegrityError, match="SIGBUS") as caught:
        UpdaterProcess({"directory": str(tmp_path)}, (), 5.0).start()
    assert str(tmp_path) in caught.value.message and "restore the newest checkpoint" in caught.value.hint


@pytest.mark.slow
def test_a_disk_that_cannot_be_read_fails_the_save_and_the_trainer_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state file is cut off when a save is about to read it. The trainer goes on from the checkpoint before."""
    job = NearJob(tmp_path / "near", "offload")
    job.train()
    state = {"model": job.model, "optimizer": job.optimizer}
    with tierckpt.Checkpointer(tmp_path / "run", local_root=tmp_path / "local") as checkpointer:
        checkpointer.save(1, state).result(ANSWER_SECONDS)
        wait, [path] = Hold.wait, list((tmp_path / "near").glob("*/state"))

        def cut_off(self: Hold, seconds: float) -> None:
            wait(self, seconds)
            os.truncate(path, 4096)

        monkeypatch.setattr(Hold, "wait", cut_off)
        job.train()
        checkpointer.save(2, state)
        with pytest.raises(IntegrityError, match="cannot be read"):
            checkpointer.wait("local")
        monkeypatch.undo()
        for told in ("SIGBUS", "it is too short"):  # now, and when it has been begun again
            with pytest.raises(IntegrityError, match=told):
                job.train()
        job.optimizer.close()
        again = NearJob(tmp_path / "another", "offload")
        assert checkpointer.restore({"model": again.model, "optimizer": again.optimizer}) == 1
        again.step = 1
        again.train()
        assert again.checksum() == Reference("offload").at(2)
        again.optimizer.close()


@pytest.mark.slow
def test_offload_waits_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While its process is stopped a step waits, and says so; one that never goes on is ended, and the step made."""
    monkeypatch.setattr(updater_process, "IDLE_SECONDS", 0.2)
    job = NearJob(tmp_path / "near", "offload", timeout_seconds=3.0)
    with job.optimizer:
        job.train()
        stop(job.optimizer.process_id)
        threading.Timer(1.0, os.kill, [job.optimizer.process_id, signal.SIGCONT]).start()
        job.train()
        assert "training waits" in caplog.text and "is stopped" in caplog.text
        job.backward()
        job.optimizer.param_groups[0]["lr"] = job.rate()
        stop(job.optimizer.process_id)
        with pytest.raises(OperationTimeoutError, match="is stopped"):
            job.optimizer.step()
        job.optimizer.step()
        job.train()
        assert job.checksum() == Reference("offload").at(job.step)


@pytest.mark.slow
def test_a_shadow_that_cannot_begin_again_is_refused_and_training_goes_on(
    shadow: NearJob, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_to_the_end(shadow, waits, stop)
    hold = threading.Event()
    begin = shadow_channel.begin_state
    monkeypatch.setattr(shadow_channel, "begin_state", lambda *given: (hold.wait(ANSWER_SECONDS), begin(*given)))

    def begins_again() -> bool:
        with suppress(CheckpointError), shadow.optimizer.mapped():
            return True
        return False

    assert begins_again()
    waits.seconds = 0.0
    while not shadow.optimizer.failure:
        shadow.train()
    assert waits.seconds <= MARGIN * BUDGET_SECONDS
    with pytest.raises(CheckpointError, match="has not begun again"), shadow.optimizer.mapped():
        pass
    hold.set()
    until(begins_again)
    check(shadow)
