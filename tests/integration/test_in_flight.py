"""Saves in flight: saves faster than the disk, and ``tierckpt.wait`` for a save that is not yet written."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.compat.worker import launch
from tests.fault.scenario_tools import of_each_rank
from tests.states import load, same, save
from tests.waits import Disk
from tierckpt import Checkpointer, TierStager, TierStorageWriter
from tierckpt.arena.slots import arena_for
from tierckpt.checkpoint import in_flight
from tierckpt.dcp import staging
from tierckpt.dcp import writer as writers
from tierckpt.dcp.save_session import SaveSession
from tierckpt.errors import (
    AlreadyCommittedError,
    CapacityError,
    CheckpointError,
    CheckpointSkippedError,
    OperationTimeoutError,
)
from tierckpt.format.layout import parse_uri
from tierckpt.save import flush

SLOW_SECONDS = 0.5


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """A disk that blocks writes until it is released."""
    with Disk(monkeypatch, flush.ShardFile, "write") as disk:
        disk.hangs.clear()
        yield disk


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100_000,), value)}


def restored(uri: str, step: int | None = None) -> float:
    target = state(0.0)
    assert Checkpointer(uri).restore(target, step) is not None
    assert target["w"].unique().numel() == 1
    return float(target["w"][0].item())


def test_save_does_not_wait_for_the_previous_one(file_uri: str, disk: Disk) -> None:
    with Checkpointer(file_uri, checkpoints_in_flight_max=2) as checkpointer:
        first, second = checkpointer.save(1, state(1.0)), checkpointer.save(2, state(2.0))
        assert not first.done(), "the first save must still wait for the disk"
        disk.hangs.set()
        second.result(timeout=60)
    assert (restored(file_uri, 1), restored(file_uri, 2)) == (1.0, 2.0)


def test_save_waits_for_the_oldest_when_all_slots_are_in_use(file_uri: str, disk: Disk) -> None:
    with Checkpointer(file_uri, checkpoints_in_flight_max=1) as checkpointer:
        first = checkpointer.save(1, state(1.0))
        threading.Timer(0.5, disk.hangs.set).start()
        checkpointer.save(2, state(2.0))
        assert disk.hangs.is_set() and first.done()
    assert restored(file_uri) == 2.0


def test_skip_policy_returns_a_skipped_future(file_uri: str, disk: Disk) -> None:
    options: dict[str, Any] = {"checkpoints_in_flight_max": 1, "staging_policy": "skip"}
    with Checkpointer(file_uri, **options) as checkpointer:
        checkpointer.save(1, state(1.0))
        skipped = checkpointer.save(2, state(2.0))
        assert isinstance(skipped.exception(timeout=0), CheckpointSkippedError)
        assert "CheckpointSkippedError" in checkpointer.stats[1].error
        disk.hangs.set()
        checkpointer.wait("local")
        checkpointer.save(3, state(3.0))
    assert [record.step for record in checkpointer.stats if not record.error] == [1, 3]
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-3"
    assert restored(file_uri) == 3.0


def test_drop_policy_replaces_the_oldest_save_not_started(file_uri: str, disk: Disk) -> None:
    options: dict[str, Any] = {"checkpoints_in_flight_max": 2, "staging_policy": "drop_oldest_unflushed"}
    checkpointer = Checkpointer(file_uri, **options)
    futures = [checkpointer.save(1, state(1.0))]
    assert disk.in_it.wait(60)
    futures += [checkpointer.save(step, state(float(step))) for step in (2, 3)]
    disk.hangs.set()
    checkpointer.wait("local")  # a dropped save is not a failure
    checkpointer.close()
    assert [future.exception(timeout=60) is None for future in futures] == [True, False, True]
    assert isinstance(futures[1].exception(), CheckpointSkippedError)
    assert (restored(file_uri, 1), restored(file_uri)) == (1.0, 3.0)


def test_later_of_two_saves_of_one_id_wins(file_uri: str, disk: Disk) -> None:
    threading.Timer(0.3, disk.hangs.set).start()
    with Checkpointer(file_uri) as checkpointer:
        checkpointer.save(1, state(1.0))
        checkpointer.save(1, state(2.0))
    assert restored(file_uri) == 2.0


def test_a_failed_save_is_raised_by_the_next(file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(file_uri)
    checkpointer.save(0, state(5.0)).result(timeout=60)

    def full(*_: Any, **__: Any) -> None:
        raise CapacityError("no room (seeded)")

    with monkeypatch.context() as broken:
        broken.setattr(flush.ShardFile, "open", full)
        failed = checkpointer.save(1, state(1.0))
        assert failed.exception(timeout=60) is not None
        with pytest.raises(CapacityError, match="seeded") as caught:
            checkpointer.save(2, state(2.0))
    assert caught.value.context["checkpoint"] == f"{file_uri}/step-1"
    assert restored(file_uri) == 5.0
    checkpointer.save(3, state(3.0))  # raised once only
    checkpointer.close()
    assert restored(file_uri) == 3.0


def test_state_may_change_while_it_is_written(file_uri: str, disk: Disk) -> None:
    live = state(1.0)
    with Checkpointer(file_uri) as checkpointer:
        checkpointer.save(1, live)
        live["w"].fill_(9.0)
        disk.hangs.set()
    assert restored(file_uri) == 1.0


def test_lazy_staging_saves_the_state_before_the_step(file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are held until the optimizer step, which must wait for them; buffers must not need to wait."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()

    step()
    real, held_up = staging.copy_in_background, threading.Event()

    def slow(pairs: Any) -> None:
        held_up.set()
        time.sleep(0.3)
        real(pairs)

    monkeypatch.setattr(staging, "copy_in_background", slow)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with Checkpointer(file_uri, staging="lazy") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
        assert held_up.wait(60)
        step()
    after = model.state_dict()
    assert all(not torch.equal(before[key], after[key]) for key in ("0.weight", "1.weight", "1.running_mean"))
    Checkpointer(file_uri).restore({"model": model, "optimizer": optimizer})
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def staged_bytes(uri: str, rows: int) -> list[dict[str, int]]:
    """On every rank: save replicated tensors twice and return the bytes staged and written."""
    replica = {"w": torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024), "step": 1}
    checkpointer = Checkpointer(uri)
    for step in (1, 2):
        checkpointer.save(step, replica)
        checkpointer.wait("local")
    own = {"staged": arena_for(checkpointer.settings).size_bytes, "written": checkpointer.stats[-1].size_bytes}
    checkpointer.close()
    by_rank = of_each_rank(own)
    target = {"w": torch.zeros(rows, 1024), "step": 0}
    Checkpointer(uri).restore(target)
    assert torch.equal(target["w"], replica["w"])
    return by_rank


@pytest.mark.slow
@pytest.mark.distributed
def test_replicas_are_staged_and_written_once(file_uri: str, tmp_path: Path) -> None:
    rows, whole = 8192, 8192 * 1024 * 4
    by_rank = launch("tests.integration.test_in_flight:staged_bytes", 2, uri=file_uri, rows=rows)
    for rank in by_rank:
        assert rank["staged"] < 0.6 * whole
        assert whole < rank["written"] < 1.1 * whole


@pytest.mark.slow
def test_hung_save_times_out_once_and_is_named(file_uri: str, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """``wait`` and ``close`` end at their timeout, however many saves are queued after the hung one."""
    monkeypatch.setattr("tierckpt.training.saves.EXTRA_SECONDS", 0.0)
    checkpointer = Checkpointer(file_uri, timeout_seconds=3.0, checkpoints_in_flight_max=2)
    checkpointer.save(1, state(1.0))
    last = checkpointer.save(2, state(2.0))
    with pytest.raises(OperationTimeoutError, match="step-1 has not finished"):
        checkpointer.wait("local")
    disk.hangs.set()
    last.result(timeout=60)
    checkpointer.close()
    assert restored(file_uri) == 2.0


# --- waiting for a save that this process has started but not yet written ---------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the save thread before its first visible change on disk."""
    set_up = writers.TierStorageWriter.set_up_storage_writer

    def late(self: Any, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(SLOW_SECONDS)
        set_up(self, *args, **kwargs)
        time.sleep(SLOW_SECONDS)

    monkeypatch.setattr(writers.TierStorageWriter, "set_up_storage_writer", late)


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("how", ["own stager", "TierStager", "lazy", "checkpoint_id"])
@pytest.mark.parametrize("tier", ["local", "shared"])
def test_wait_includes_a_started_save(how: str, tier: str, file_uri: str, tmp_path: Path) -> None:
    """Before the fix it returned at once, for the previous save."""
    uri = f"{file_uri}/step-1"
    save(uri, state(1.0))
    tierckpt.wait(uri, timeout_seconds=60)
    options: dict[str, Any] = {}
    if how in ("TierStager", "lazy"):
        options["async_stager"] = TierStager(mode="lazy" if how == "lazy" else "eager")
    writer = TierStorageWriter(f"{file_uri}/step-0" if how == "checkpoint_id" else uri)
    if how == "checkpoint_id":
        options["checkpoint_id"] = uri
    saving = dcp.async_save(state(2.0), storage_writer=writer, no_dist=True, **options)
    tierckpt.wait(uri, tier=tier, timeout_seconds=60)
    root = tmp_path / ("local" if tier == "local" else "fresh")
    assert same(load(uri, state(0.0), local_root=root), state(2.0))
    getattr(saving, "upload_completion", saving).result(timeout=60)


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
def test_wait_raises_the_error_of_a_started_save(file_uri: str) -> None:
    uri = f"{file_uri}/step-1"
    save(uri, state(1.0))
    refused = dcp.async_save(state(2.0), storage_writer=TierStorageWriter(uri, overwrite=False), no_dist=True)
    with pytest.raises(AlreadyCommittedError):
        tierckpt.wait(uri, timeout_seconds=60)
    with pytest.raises(BaseException, match="belongs to another save"):
        refused.result(timeout=60)
    save(uri, state(3.0))
    tierckpt.wait(uri, timeout_seconds=60)  # the newest save only


def test_save_that_ends_without_calling_its_writer_is_an_error(file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner raises in the save thread, without a call to the writer."""
    uri, writer = f"{file_uri}/step-1", TierStorageWriter(f"{file_uri}/step-1")
    dcp.save(state(1.0), storage_writer=writer, no_dist=True)

    class Failing(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            raise ValueError("seeded")

    saving = dcp.async_save(state(2.0), storage_writer=writer, planner=Failing(), no_dist=True)
    with pytest.raises(CheckpointError, match="that this process began has failed"):
        tierckpt.wait(uri, timeout_seconds=60)
    assert saving.exception(timeout=60) is not None


def test_error_raised_in_the_callers_thread_is_not_raised_again(file_uri: str) -> None:
    uri = f"{file_uri}/step-1"
    save(uri, state(1.0))
    with pytest.raises(BaseException, match="belongs to another save"):
        dcp.save(state(2.0), storage_writer=TierStorageWriter(uri, overwrite=False), no_dist=True)
    tierckpt.wait(uri, timeout_seconds=60)


@pytest.mark.slow
def test_wait_includes_saves_of_a_checkpointer(file_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uri = f"{file_uri}/step-1"
    with Disk(monkeypatch, SaveSession, "commit") as disk, Checkpointer(file_uri) as checkpointer:
        checkpointer.save(1, state(1.0)).result(timeout=60)
        tierckpt.wait(uri, timeout_seconds=60)
        disk.hangs.clear()
        checkpointer.save(1, state(2.0))
        with pytest.raises(OperationTimeoutError):
            tierckpt.wait(uri, timeout_seconds=0.3)
        threading.Timer(0.3, disk.hangs.set).start()
        tierckpt.wait(uri, timeout_seconds=60)
        assert same(load(uri, state(0.0), local_root=tmp_path / "fresh"), state(2.0))


def test_wait_ignores_unsaved_staged_data(file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "ORPHAN_SECONDS", 0.3)
    uri = f"{file_uri}/step-1"
    save(uri, state(1.0))
    TierStager().stage(state(2.0))
    tierckpt.wait(uri, timeout_seconds=60)
    in_flight.wait(local_root, parse_uri(uri).uri, 0.0)  # no save is registered
