"""``tierckpt.wait`` includes saves that this process has started but not yet written."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tierckpt import Checkpointer, TierStager, TierStorageWriter
from tierckpt.checkpoint import in_flight
from tierckpt.dcp import writer as writers
from tierckpt.dcp.save_session import SaveSession
from tierckpt.errors import AlreadyCommittedError, CheckpointError, OperationTimeoutError
from tierckpt.format.layout import parse_uri

SLOW_SECONDS = 0.5


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


def value_of(uri: str, root: Path) -> float:
    target = state(0.0)
    dcp.load(target, storage_reader=tierckpt.TierStorageReader(uri, local_root=root), no_dist=True)
    return float(target["w"][0])


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
    dcp.save(state(1.0), storage_writer=TierStorageWriter(uri), no_dist=True)
    tierckpt.wait(uri, timeout_seconds=60)
    options: dict[str, Any] = {}
    if how in ("TierStager", "lazy"):
        options["async_stager"] = TierStager(mode="lazy" if how == "lazy" else "eager")
    writer = TierStorageWriter(f"{file_uri}/step-0" if how == "checkpoint_id" else uri)
    if how == "checkpoint_id":
        options["checkpoint_id"] = uri
    saving = dcp.async_save(state(2.0), storage_writer=writer, no_dist=True, **options)
    tierckpt.wait(uri, tier=tier, timeout_seconds=60)
    assert value_of(uri, tmp_path / ("local" if tier == "local" else "fresh")) == 2.0
    getattr(saving, "upload_completion", saving).result(timeout=60)


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
def test_wait_raises_the_error_of_a_started_save(file_uri: str) -> None:
    uri = f"{file_uri}/step-1"
    dcp.save(state(1.0), storage_writer=TierStorageWriter(uri), no_dist=True)
    refused = dcp.async_save(state(2.0), storage_writer=TierStorageWriter(uri, overwrite=False), no_dist=True)
    with pytest.raises(AlreadyCommittedError):
        tierckpt.wait(uri, timeout_seconds=60)
    with pytest.raises(BaseException, match="belongs to another save"):
        refused.result(timeout=60)
    dcp.save(state(3.0), storage_writer=TierStorageWriter(uri), no_dist=True)
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
    dcp.save(state(1.0), storage_writer=TierStorageWriter(uri), no_dist=True)
    with pytest.raises(BaseException, match="belongs to another save"):
        dcp.save(state(2.0), storage_writer=TierStorageWriter(uri, overwrite=False), no_dist=True)
    tierckpt.wait(uri, timeout_seconds=60)


@pytest.mark.slow
def test_wait_includes_saves_of_a_checkpointer(file_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commit, is_free = SaveSession.commit, threading.Event()

    def blocked(self: Any, *args: Any, **options: Any) -> None:
        assert is_free.wait(60)
        commit(self, *args, **options)

    uri = f"{file_uri}/step-1"
    with Checkpointer(file_uri) as checkpointer:
        checkpointer.save(1, state(1.0)).result(timeout=60)
        tierckpt.wait(uri, timeout_seconds=60)
        monkeypatch.setattr(SaveSession, "commit", blocked)
        checkpointer.save(1, state(2.0))
        with pytest.raises(OperationTimeoutError):
            tierckpt.wait(uri, timeout_seconds=0.3)
        threading.Timer(0.3, is_free.set).start()
        tierckpt.wait(uri, timeout_seconds=60)
        assert value_of(uri, tmp_path / "fresh") == 2.0


def test_wait_ignores_unsaved_staged_data(file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "ORPHAN_SECONDS", 0.3)
    uri = f"{file_uri}/step-1"
    dcp.save(state(1.0), storage_writer=TierStorageWriter(uri), no_dist=True)
    TierStager().stage(state(2.0))
    tierckpt.wait(uri, timeout_seconds=60)
    in_flight.wait(local_root, parse_uri(uri).uri, 0.0)  # no save is registered
