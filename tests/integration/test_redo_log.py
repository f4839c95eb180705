"""Restores that replay a multi-step save: the exact state, or the previous checkpoint."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import tierckpt
from tests.agents import until
from tests.command_line import CommandLine
from tests.compat.worker import launch
from tests.fault.training_jobs import Deferring
from tests.integration.test_multi_step_save import Job, check
from tests.states import flip
from tests.unit.replay.test_redo import OTHER, flipped
from tierckpt import Checkpointer, EveryStep
from tierckpt.client import close_all, get_client
from tierckpt.errors import IntegrityError, TierckptError
from tierckpt.format.layout import WINDOWS_DIR, parse_uri
from tierckpt.replay.multi_step import MultiStepStager
from tierckpt.replay.redo import Conditions
from tierckpt.training.every_step import window


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "MultiStepStager", Deferring)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    close_all()


def trained(
    uri: Path, windows: int = 1, plain: int = 0, exact: Any = "required", **options: Any
) -> tuple[Job, list[int]]:
    """Save a checkpoint at each of the first ``plain`` steps, then ``windows`` windows of three steps. Stop without a
    final save. Returns the job and the steps of the windows."""
    job, steps = Job(), []
    with (
        contextlib.suppress(KeyboardInterrupt),
        Checkpointer(uri, every_step=EveryStep(window_steps=3, exact=exact), **options) as saves,
    ):
        for _ in range(plain):
            job.train()
            with Checkpointer(uri, **options) as ordinary:
                ordinary.save(job.number, job.state).result(60)
        for _ in range(windows):
            job.train()
            pending = saves.save(job.number, job.state)
            while not pending.done():
                job.train()
                saves.step(job.number, job.state)
            pending.result(60)
            steps.append(pending.record.step)  # type: ignore[attr-defined]
        raise KeyboardInterrupt
    return job, steps


def restored(uri: Path, step: int | None = None, **options: Any) -> tuple[int | None, Job, Any]:
    job = Job()
    state = job.state
    with Checkpointer(uri, **options) as checkpointer:
        found = checkpointer.restore(state, step)
    return found, job, state


def check_restored(uri: Path, job: Job, expected: int, step: int | None = None, **options: Any) -> None:
    """Restore ``step``, or the newest: the state must be that of ``job`` after step ``expected``."""
    found, again, _ = restored(uri, step, **options)
    assert found == expected
    check(again.values(), job.kept[expected])


def test_replayed_save_is_exact_and_becomes_a_checkpoint(run: Path) -> None:
    job, (step,) = trained(run)
    assert (run / WINDOWS_DIR / f"step-{step}" / ".metadata").is_file() and not (run / f"step-{step}").exists()
    with Checkpointer(run) as checkpointer:
        assert checkpointer.latest_step() == step
    assert tierckpt.latest(run) is None  # readers without replay ignore redo logs
    found, again, state = restored(run)
    assert found == step and state["data"]["at"] == step
    check(again.values(), job.kept[step])
    assert tierckpt.latest(run) == str(run / f"step-{step}")
    check_restored(run, job, step)


def test_stock_pytorch_reads_the_checkpoint_only_after_the_replay(run: Path) -> None:
    job, (step,) = trained(run)
    target = {"model": Job().model.state_dict()}
    for uri in (run / f"step-{step}", run / WINDOWS_DIR / f"step-{step}"):
        with pytest.raises(CheckpointException, match=r"metadata|Missing key"):
            dcp.load({"model": Job().model.state_dict()}, checkpoint_id=uri)
    restored(run)
    dcp.load(target, checkpoint_id=run / f"step-{step}")
    check(target["model"], job.kept[step]["model"])


def test_next_save_and_model_only_restore(run: Path) -> None:
    job, (step,) = trained(run)
    again = Job()
    with Checkpointer(run) as checkpointer:
        state: dict[str, Any] = {"model": again.model, "first": again.first, "second": again.second}
        assert checkpointer.restore(state, only="model") == step
        check(again.model.state_dict(), job.kept[step]["model"])
        assert not again.first.state
        checkpointer.save(step + 1, again.state).result(60)
    assert tierckpt.latest(run) == str(run / f"step-{step + 1}")


def test_restore_by_step_number(run: Path) -> None:
    job, steps = trained(run, windows=2)
    check_restored(run, job, steps[0], steps[0])
    check_restored(run, job, steps[1])
    with pytest.raises(TierckptError):
        restored(run, 99)


def copies(run: Path, step: int, local: Path) -> list[Path]:
    found = [*run.glob(f"{WINDOWS_DIR}/step-{step}/*.distcp"), *local.glob(f"**/{WINDOWS_DIR}/step-{step}/*.distcp")]
    assert found
    return list({path.stat().st_ino: path for path in found}.values())  # one path for each inode


@pytest.mark.parametrize("place", ["begin", "middle", "end"])
def test_damaged_redo_log_restores_the_previous_checkpoint(
    place: str, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = tmp_path / "local"
    job, (step,) = trained(run, plain=1, local_root=local)
    for path in copies(run, step, local):
        size = path.stat().st_size
        flip(path, {"begin": 5000, "middle": size // 2, "end": size - 5000}[place])
    close_all()
    check_restored(run, job, 1, local_root=local)
    assert "was not replayed" in caplog.text and not (run / f"step-{step}").exists()


def test_other_device_falls_back_with_a_reason_or_is_accepted(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Conditions, "current", lambda *_: OTHER)
        job, (step,) = trained(run, plain=1)
    with monkeypatch.context() as elsewhere:
        flipped(elsewhere, 1)
        check_restored(run, job, 1)
        assert "another device in training" in caplog.text
        found, again, _ = restored(run, every_step=EveryStep(exact="approximate"))
        assert found == step
    with pytest.raises(AssertionError):
        check(again.values(), job.kept[step])
    for name, tensor in again.model.state_dict().items():
        assert torch.allclose(tensor, job.kept[step]["model"][name], rtol=0, atol=1e-7), name
    notes = notes_at(run / f"step-{step}")
    assert notes["exact"] is False and notes["replay"] == "replayed" and "x 2**-24" in notes["tolerance"]


def test_without_an_earlier_checkpoint_the_error_is_raised(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(run)
    flipped(monkeypatch, 1)
    with pytest.raises(IntegrityError, match="other bits than in training"):
        restored(run)


def test_mismatched_parameters_are_refused_before_any_change(run: Path) -> None:
    job, _ = trained(run, plain=1)
    other = Job()
    other.first.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    with Checkpointer(run) as checkpointer:
        state: dict[str, Any] = {"model": other.model, "second": other.second}
        assert checkpointer.restore(state, only="model") == 1  # without optimizers there is no replay
    check(other.model.state_dict(), job.kept[1]["model"])


def test_retention_ls_verify_and_info_of_redo_logs(run: Path, cli: CommandLine) -> None:
    _, steps = trained(run, windows=4, keep_last=2)
    kept = {f"step-{step}" for step in steps[-2:]}
    until(lambda: {path.name for path in (run / WINDOWS_DIR).iterdir()} == kept, "retention")
    close_all()
    newest = run / WINDOWS_DIR / f"step-{steps[-1]}"
    assert f"{WINDOWS_DIR}/{newest.name}" in cli("ls", run).out
    assert cli.text("verify", run, "--read-data").code == cli.text("status").code == 0
    shown = cli.text("info", newest).out
    assert "redo log" in shown and "AdamW, SGD" in shown
    cli.answer("prune", run, "--keep-last", "1", "--yes")
    assert [path.name for path in (run / WINDOWS_DIR).iterdir()] == [newest.name]
    flip(next(newest.glob("*.distcp")))
    assert cli.text("verify", run, "--read-data").code != 0


def test_retention_removes_a_redo_log_older_than_enough_checkpoints(run: Path) -> None:
    """No checkpoint is removed because of a redo log, which other readers cannot use."""
    _, (step,) = trained(run, plain=1, keep_last=1)
    assert (run / "step-1").exists() and (run / WINDOWS_DIR / f"step-{step}").exists()
    found, again, _ = restored(run)
    assert found == step
    with Checkpointer(run, keep_last=1) as checkpointer:
        for _ in range(2):
            again.train()
            checkpointer.save(again.number + step, again.state).result(60)
    assert not list((run / WINDOWS_DIR).glob("step-*")) and not (run / f"step-{step}").exists()
    assert tierckpt.latest(run) == str(run / f"step-{again.number + step}")


def notes_at(uri: Path) -> Any:
    client = get_client(tierckpt.Settings.load(None))
    checkpoint = client.run(client.mover.selector.find(parse_uri(uri)))
    assert checkpoint.manifest is not None
    return checkpoint.manifest.notes


def test_approximate_save_is_a_checkpoint_at_once_with_a_note(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = Conditions.current

    def of_training(device: torch.device, implementation: str) -> Conditions:
        trains = threading.current_thread() is threading.main_thread()
        return OTHER if trains else current(device, implementation)

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Conditions, "current", of_training)
        flipped(elsewhere, 1)
        job, (step,) = trained(run, exact="approximate")
    assert not (run / WINDOWS_DIR).exists()
    found, again, _ = restored(run)
    assert found == step
    with pytest.raises(AssertionError):
        check(again.values(), job.kept[step])
    notes = notes_at(run / f"step-{step}")
    assert notes["exact"] is False and notes["device"] == OTHER.device and "x 2**-24" in notes["tolerance"]
    assert "another device in training" in notes["other than in training"]


def test_exact_save_is_a_checkpoint_at_once_with_a_note(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "MultiStepStager", MultiStepStager)
    _, (step,) = trained(run)
    notes = notes_at(run / f"step-{step}")
    assert notes["exact"] is True and notes["replay"] == "beside training" and notes["optimizer"] == "AdamW, SGD"
    assert "tolerance" not in notes


# --- several ranks ----------------------------------------------------------------------------------------------------

SCENARIOS = "tests.integration.multi_step_save_ranks"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_two_ranks_replay_what_they_have_saved(kind: str, tmp_path: Path) -> None:
    job = {"directory": str(tmp_path), "kind": kind}
    launch(f"{SCENARIOS}:save_as_copied", 2, **job)
    windows = {path.name for path in (tmp_path / "run" / WINDOWS_DIR).iterdir()}
    assert windows == {"step-11", "step-19"}
    assert not (tmp_path / "run" / "step-11").exists()
    for path in (tmp_path / "run").glob("step-21/**/*"):  # the whole copy at the end of the loop: windows are asked for
        path.unlink() if path.is_file() else None
    for name in tmp_path.glob("21-*.pt"):
        name.unlink()
    if kind == "fsdp":
        with pytest.raises(AssertionError, match="has the shards of 2 ranks"):
            launch(f"{SCENARIOS}:restore", 1, **job)
        assert not (tmp_path / "run" / "step-11").exists()
    assert launch(f"{SCENARIOS}:restore", 2, **job) == [["restored 11", "restored 19"]] * 2
    assert (tmp_path / "run" / "step-11" / ".metadata").exists()
