"""A stopped near-storage optimizer process, or an unreadable disk below it, loses no step and raises clear errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.agents import until
from tests.fault.near_storage_job import NearJob, Reference
from tierckpt.errors import IntegrityError, OperationTimeoutError
from tierckpt.near_storage import updater_process
from tierckpt.near_storage.optimizer import StateHold
from tierckpt.near_storage.state_file import StateFile, TrainerParameter, begin_state, current_state, layout_of
from tierckpt.near_storage.updater_process import UpdaterProcess

TIMEOUT_SECONDS = 150.0


def test_unreadable_state_raises_instead_of_a_signal(tmp_path: Path) -> None:
    """A read error raises, instead of SIGBUS from a mapping (N6), in every read of trainer and save."""
    weight = torch.randn(3000)
    layout = layout_of(torch.optim.AdamW, [TrainerParameter("0.0", "weight", (3000,), "float32")], [{}])
    begin_state(tmp_path, layout, {"0.0": {"": weight}}, 0)
    found = current_state(tmp_path, layout)
    assert found is not None
    file, [block] = StateFile(found, layout), layout.blocks
    target = torch.zeros(3000)
    read = file.reader(file.all_tensors()["0.0"][""], [0])
    read(target.data_ptr(), 4, 8)
    read(target.data_ptr() + 4, 0, 4)
    assert target[:3].tolist() == [weight[1].item(), weight[0].item(), 0.0] and file.present(block, 0) == {"0.0": {""}}
    os.truncate(found / "state", 0)
    reads: list[Callable[[], object]] = [
        lambda: file.present(block, 0),
        lambda: read(target.data_ptr(), 0, 4),
        lambda: file.digest(block, 0, is_trainers=True),
    ]
    for read_state in reads:
        with pytest.raises(IntegrityError, match="cannot be read: it is too short"):
            read_state()


def test_process_killed_by_sigbus_raises_an_integrity_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed_by_sigbus(_: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 7)"], cwd=tmp_path, **options
        )

    monkeypatch.setattr(updater_process, "start_python", killed_by_sigbus)
    with pytest.raises(IntegrityError, match="SIGBUS") as caught:
        UpdaterProcess({"directory": str(tmp_path)}, (), 5.0).start()
    assert str(tmp_path) in caught.value.message and "restore the newest checkpoint" in caught.value.hint


@pytest.mark.slow
def test_unreadable_disk_fails_the_save_and_the_trainer_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state file is truncated during a save. The trainer restores the previous checkpoint."""
    job = NearJob(tmp_path / "near")
    job.train()
    state = {"model": job.model, "optimizer": job.optimizer}
    with tierckpt.Checkpointer(tmp_path / "run", local_root=tmp_path / "local") as checkpointer:
        checkpointer.save(1, state).result(TIMEOUT_SECONDS)
        wait, [path] = StateHold.wait, list((tmp_path / "near").glob("*/state"))

        def truncate_state(self: StateHold, seconds: float) -> None:
            wait(self, seconds)
            os.truncate(path, 4096)

        monkeypatch.setattr(StateHold, "wait", truncate_state)
        job.train()
        checkpointer.save(2, state)
        with pytest.raises(IntegrityError, match="cannot be read"):
            checkpointer.wait("local")
        monkeypatch.undo()
        for message in ("SIGBUS|it is too short", "it is too short"):  # the save may have restarted the process
            with pytest.raises(IntegrityError, match=message):
                job.train()
        job.optimizer.close()
        again = NearJob(tmp_path / "another")
        assert checkpointer.restore({"model": again.model, "optimizer": again.optimizer}) == 1
        again.step = 1
        again.train()
        assert again.checksum() == Reference().at(2)
        again.optimizer.close()


@pytest.mark.slow
def test_step_waits_for_a_stopped_process_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step waits for a stopped process with a log line; after the timeout the process is killed and restarted."""
    monkeypatch.setattr(updater_process, "IDLE_SECONDS", 0.2)
    job = NearJob(tmp_path / "near", timeout_seconds=TIMEOUT_SECONDS)

    def resume() -> None:
        until(lambda: "is stopped" in caplog.text, "the log line")
        os.kill(job.optimizer.process_id, signal.SIGCONT)

    with job.optimizer:
        job.train()
        os.kill(job.optimizer.process_id, signal.SIGSTOP)
        threading.Thread(target=resume).start()
        job.train()
        assert "training waits" in caplog.text and "is stopped" in caplog.text
        job.backward()
        job.optimizer.param_groups[0]["lr"] = job.rate()
        os.kill(job.optimizer.process_id, signal.SIGSTOP)
        with pytest.raises(OperationTimeoutError, match="is stopped"), monkeypatch.context() as patched:
            patched.setattr(job.optimizer._process, "_timeout_seconds", 3.0)  # private: it is short for this step only
            job.optimizer.step()
        job.optimizer.step()
        job.train()
        assert job.checksum() == Reference().at(job.step)
