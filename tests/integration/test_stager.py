"""TierStager with DCP: the staged copy is the state at that moment, whatever changes later."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import tierckpt
from tests.compat.everything import blank, differences, everything
from tests.fault import runner
from tests.states import load, raises_ours, same, save
from tests.waits import Disk
from tierckpt.arena import slots
from tierckpt.dcp import staging
from tierckpt.dcp.stager import StagedItems
from tierckpt.errors import CheckpointSkippedError, OperationTimeoutError, StateMismatchError, UpdaterLostError
from tierckpt.save import flush

SLOW_SECONDS = 0.4


@pytest.fixture(autouse=True)
def empty_arena() -> Iterator[None]:
    yield
    slots.close_arenas()


def start(uri: str, state: dict[str, Any], stager: Any, **options: Any) -> Any:
    writer = tierckpt.TierStorageWriter(uri, **options)
    return dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)


# --- the copy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_copy_has_the_same_structure_and_shares_no_memory(shared: bool) -> None:
    state = everything(4)
    staged = tierckpt.TierStager(shared=shared).stage(state)
    assert differences(staged, everything(4)) == []
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(state) if tensor.numel()}
    assert not addresses & {tensor.untyped_storage().data_ptr() for tensor in tensors_of(staged)}
    state["big"].zero_()
    state["objects"]["list"][2]["four"] = "changed"
    state["objects"]["ordered"]["a"][0]["deep"]["er"].add("changed")
    assert differences(staged, everything(4)) == []


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)


def test_containers_keep_their_types() -> None:
    one, two = torch.ones(3), torch.full((2,), 2.0)
    state = {"tuple": (one, (two, "x"), [one]), "ordered": OrderedDict(b=two, a=one), 3: {"int key": one}, "empty": {}}
    staged = tierckpt.TierStager().stage(state)
    assert type(staged["tuple"]) is tuple and type(staged["tuple"][1]) is tuple and type(staged["tuple"][2]) is list
    assert type(staged["ordered"]) is OrderedDict and list(staged["ordered"]) == ["b", "a"]
    assert staged["tuple"][1][1] == "x" and torch.equal(staged["tuple"][1][0], two)
    assert torch.equal(staged[3]["int key"], one) and staged["empty"] == {}


# --- slots ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_slot_is_freed_with_the_last_reference(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of one tensor keeps the slot; without references one slot serves any number of copies."""
    monkeypatch.setattr(slots, "SLOT_SECONDS", 0.1)
    stager = tierckpt.TierStager(shared=shared, checkpoints_in_flight_max=1)
    for _ in range(3):
        staged = stager.stage({"w": torch.ones(100_000), "b": torch.ones(3)})
        part = staged["w"][10:20]
        del staged
        with pytest.raises(OperationTimeoutError):
            stager.stage({"w": torch.full((5,), 2.0)})
        assert part.unique().tolist() == [1.0]
        del part


def test_skip_policy_raises_skipped(file_uri: str) -> None:
    stager = tierckpt.TierStager(checkpoints_in_flight_max=1, staging_policy="skip")
    kept = stager.stage({"w": torch.ones(100_000)})
    with pytest.raises(CheckpointSkippedError, match="nothing was staged"):
        start(f"{file_uri}/step-2", {"w": torch.ones(100_000)}, stager)
    del kept
    start(f"{file_uri}/step-3", {"w": torch.ones(100_000)}, stager).result(60)
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-3"


def test_copy_with_reused_memory_cannot_be_saved_again(file_uri: str) -> None:
    stager = tierckpt.TierStager()
    old = stager.stage({"w": torch.full((50_000,), 1.0)})
    save(f"{file_uri}/step-1", old)
    newer = [stager.stage({"w": torch.full((50_000,), value)}) for value in (2.0, 3.0)]
    with pytest.raises(StateMismatchError, match="is lost"):
        save(f"{file_uri}/step-9", old)
    for step, staged in enumerate(newer, 2):
        save(f"{file_uri}/step-{step}", staged)
        assert load(f"{file_uri}/step-{step}", staged)["w"].unique().tolist() == [float(step)]
    assert load(f"{file_uri}/step-1", newer[0])["w"].unique().tolist() == [1.0]


def test_dropped_copy_is_never_saved_with_newer_bytes(file_uri: str) -> None:
    stager = tierckpt.TierStager(checkpoints_in_flight_max=1, staging_policy="drop_oldest_unflushed")
    old = stager.stage({"w": torch.full((50_000,), 1.0)})
    new = stager.stage({"w": torch.full((50_000,), 2.0)})
    with pytest.raises((StateMismatchError, CheckpointSkippedError)):
        save(f"{file_uri}/step-1", old)
    save(f"{file_uri}/step-2", new)
    assert load(f"{file_uri}/step-2", new)["w"].unique().tolist() == [2.0]


def test_copy_shared_with_another_process_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"checkpoints_in_flight_max": 1, "staging_policy": "drop_oldest_unflushed"}
    monkeypatch.setattr(slots, "SLOT_SECONDS", 0.1)
    stager = tierckpt.TierStager(shared=True, **options)
    old = stager.stage({"w": torch.full((50_000,), 1.0)})
    with pytest.raises(OperationTimeoutError, match="checkpoint 1 is staged"):
        stager.stage({"w": torch.full((50_000,), 2.0)})
    assert old["w"].unique().tolist() == [1.0]


@pytest.mark.parametrize("shared", [False, True])
def test_copy_being_written_is_not_dropped(shared: bool, file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"checkpoints_in_flight_max": 1, "staging_policy": "drop_oldest_unflushed"}
    monkeypatch.setattr(slots, "SLOT_SECONDS", 0.2)
    stager = tierckpt.TierStager(shared=shared, **options)
    state = {"w": torch.full((500_000,), 1.0)}
    with Disk(monkeypatch, flush.ShardFile, "write") as disk:
        disk.hangs.clear()
        future = start(f"{file_uri}/step-1", state, stager)
        assert disk.in_it.wait(60)
        with pytest.raises(OperationTimeoutError):
            stager.stage({"w": torch.full((500_000,), 2.0)})
    future.result(60)
    assert load(f"{file_uri}/step-1", state)["w"].unique().tolist() == [1.0]


# --- lazy -------------------------------------------------------------------------------------------------------------


class Job:
    """A small model with parameters, buffers that forward changes, and a stateful optimizer."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 1))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.train()

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 64)).sum().backward()

    def train(self) -> None:
        self.forward_backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def copy(self) -> dict[str, Any]:
        return tierckpt.TierStager().stage(self.state())  # type: ignore[no-any-return]


class HeldCopies(threading.Event):
    """Blocks background copies half way until set. ``counts``: tensors of each copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: list[int] = []
        real = staging.copy_in_background

        def blocked(pairs: Any) -> None:
            self.counts.append(len(pairs))
            for number, pair in enumerate(pairs):
                if number == len(pairs) // 2:
                    assert self.wait(60)
                real([pair])

        monkeypatch.setattr(staging, "copy_in_background", blocked)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_only_the_optimizer_step_waits_for_a_lazy_copy(
    optimizer: type[torch.optim.Optimizer], file_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(optimizer)
    before, copies = job.copy(), HeldCopies(monkeypatch)
    stager = tierckpt.TierStager(mode="lazy", optimizers=[job.optimizer])
    response = start(f"{file_uri}/step-1", job.state(), stager)
    job.forward_backward()
    assert not response.staging_completion.done(), "save, forward and backward must not wait for the copy"
    threading.Timer(0.3, copies.set).start()
    job.optimizer.step()
    assert copies.is_set(), "optimizer.step must wait for the copy"
    response.upload_completion.result(60)
    assert copies.counts == [len(list(job.model.parameters())) * (4 if optimizer is torch.optim.AdamW else 1)]
    assert differences(read(f"{file_uri}/step-1", before), before) == []
    assert differences(job.copy(), before) != [], "the step and the forward pass must change the state"


def read(uri: str, like: dict[str, Any]) -> dict[str, Any]:
    target: dict[str, Any] = blank(like)
    with raises_ours():
        dcp.load(target, storage_reader=tierckpt.TierStorageReader(uri), no_dist=True)
    return target


def test_control_without_the_fence_the_step_changes_the_file(file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the previous test."""
    job = Job()
    before, copies = job.copy(), HeldCopies(monkeypatch)
    monkeypatch.setattr(tierckpt.TierStager, "wait_before_step", lambda *_: None)
    stager = tierckpt.TierStager(mode="lazy", optimizers=[job.optimizer])
    response = start(f"{file_uri}/step-1", job.state(), stager)
    job.train()
    copies.set()
    response.upload_completion.result(60)
    assert differences(read(f"{file_uri}/step-1", before), before) != []


def test_lazy_without_optimizers_copies_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = HeldCopies(monkeypatch)
    weight = torch.zeros(1000)
    staged = tierckpt.TierStager(mode="lazy").stage({"w": weight})
    weight.fill_(1.0)
    copies.set()
    assert staged.result(60)["w"].unique().tolist() == [0.0]
    assert copies.counts == [0]


def test_failed_copy_raises_and_makes_no_checkpoint(file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    monkeypatch.setattr(slots, "SLOT_SECONDS", 10)
    stager = tierckpt.TierStager(mode="lazy", optimizers=[job.optimizer])
    start(f"{file_uri}/step-1", job.state(), stager).upload_completion.result(60)
    with monkeypatch.context() as patch:

        def fails(pairs: Any) -> None:
            time.sleep(0.1)
            raise RuntimeError("the copy failed (seeded)")

        patch.setattr(staging, "copy_in_background", fails)
        response = start(f"{file_uri}/step-2", job.state(), stager)
        with pytest.raises(RuntimeError, match="seeded"):
            job.optimizer.step()
        with pytest.raises(RuntimeError, match="seeded"):
            response.upload_completion.result(60)
        with pytest.raises(RuntimeError, match="seeded"):
            response.staging_completion.result(60)
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-1"
    job.train()
    before = copy.deepcopy(job.state())
    start(f"{file_uri}/step-3", job.state(), stager).upload_completion.result(60)
    assert differences(read(f"{file_uri}/step-3", before), before) == []


def test_copy_the_step_stopped_waiting_for_is_discarded(file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step continues after a deadline and may change parameters that are still being copied."""
    job = Job()
    copies = HeldCopies(monkeypatch)
    monkeypatch.setattr(slots, "SLOT_SECONDS", 0.1)
    stager = tierckpt.TierStager(mode="lazy", optimizers=[job.optimizer])
    response = start(f"{file_uri}/step-1", job.state(), stager)
    with pytest.raises(OperationTimeoutError, match="copies to staging memory"):
        job.optimizer.step()
    job.optimizer.step()
    copies.set()
    with pytest.raises(OperationTimeoutError):
        response.upload_completion.result(60)
    assert tierckpt.latest(file_uri) is None


@pytest.mark.slow
def test_twenty_lazy_saves_in_a_row(file_uri: str) -> None:
    """Two slots and a step after each save, without waiting: every file holds the state of its moment."""
    job, expected = Job(), []
    stager = tierckpt.TierStager(mode="lazy", optimizers=[job.optimizer])
    responses = []
    for step in range(20):
        expected.append(copy.deepcopy(job.state()))
        responses.append(start(f"{file_uri}/step-{step}", job.state(), stager, drain=False))
        job.train()
    for response in responses:
        response.upload_completion.result(60)
    for step, state in enumerate(expected):
        assert differences(read(f"{file_uri}/step-{step}", state), state) == []


def test_close_removes_the_optimizer_hooks() -> None:
    job = Job()
    hooks = len(job.optimizer._optimizer_step_pre_hooks)
    stager = tierckpt.TierStager(mode="lazy", optimizers=[job.optimizer])
    assert len(job.optimizer._optimizer_step_pre_hooks) == hooks + 1
    stager.watch([job.optimizer])
    assert len(job.optimizer._optimizer_step_pre_hooks) == hooks + 1, "one fence for each"
    stager.close()
    assert len(job.optimizer._optimizer_step_pre_hooks) == hooks


# --- other processes --------------------------------------------------------------------------------------------------


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((200_000,), value), "small": {"b": torch.full((3,), value)}, "step": value}


def save_some(uri: str, **options: Any) -> list[str]:
    wrong, state = [], state_of(0.0)
    for step in range(1, 5):
        state["w"].fill_(step)
        state["small"]["b"].fill_(step)
        state["step"] = step
        future = dcp.async_save(
            state,
            storage_writer=tierckpt.TierStorageWriter(f"{uri}/step-{step}"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            **options,
        )
        state["w"].fill_(-1.0)  # training goes on
        future.result(120)
    for step in range(1, 5):
        target = state_of(0.0)
        dcp.load(target, storage_reader=FileSystemReader(f"{uri}/step-{step}"), no_dist=True)
        if not same(target, {**state_of(float(step)), "step": step}):
            wrong.append(f"step-{step}: {target['w'][:3]} {target['step']}")
    return wrong


def save_in_process_mode(folder: Path) -> dict[str, list[str]]:
    """Return the errors that a reader finds, for each kind of staging memory."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    return {
        "TierStager()": save_some(f"{folder}/private", async_stager=tierckpt.TierStager()),
        "TierStager(shared=True)": save_some(f"{folder}/shared", async_stager=tierckpt.TierStager(shared=True)),
        "the writer itself": save_some(f"{folder}/writer"),
    }


@pytest.mark.slow
def test_process_mode(tmp_path: Path) -> None:
    """AsyncCheckpointerType.PROCESS: another process receives and writes the state during training."""
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    found = runner.start(save_in_process_mode, tmp_path).result(150)
    assert len(found) == 3 and not any(found.values()), found
    left = {name for name in os.listdir("/dev/shm") if "tierckpt" in name} - before  # noqa: PTH208
    assert not left


@pytest.mark.slow
def test_forked_child_can_save(file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both save at the same time from separate arenas; the child's exit leaves the parent's intact."""
    state, other = {"w": torch.full((700_000,), 1.0)}, {"w": torch.full((700_000,), 2.0)}
    stager = tierckpt.TierStager()
    with Disk(monkeypatch, os, "pwrite") as disk:
        disk.hangs.clear()
        future = start(f"{file_uri}/step-1", state, stager)
        assert disk.in_it.wait(60)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(60)
                disk.hangs.set()  # the child's
                torch.set_num_threads(1)  # as a DataLoader worker does: OpenMP threads do not survive a fork
                for step in (2, 3):
                    start(f"{file_uri}/step-{step}", other, stager).result(60)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not future.done()
    future.result(60)
    assert same(load(f"{file_uri}/step-1", state), state)
    for step in (2, 3):
        assert same(load(f"{file_uri}/step-{step}", other), other)


def test_all_sources_are_released_although_one_has_changed() -> None:
    """The process behind each source waits for its release."""
    released: list[int] = []

    class Changed:
        def __init__(self, number: int) -> None:
            self.number = number

        def release(self) -> None:
            released.append(self.number)
            raise UpdaterLostError(f"{self.number} has ended")

    staged = StagedItems()
    staged.sources = cast(Any, [Changed(1), Changed(2)])
    with pytest.raises(UpdaterLostError):
        staged.release()
    assert sorted(released) == [1, 2]
    staged.release()  # once
    assert len(released) == 2
