"""Checkpointer with several saves in flight: saves faster than the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.compat.worker import launch
from tests.fault.scenario_tools import of_each_rank
from tierckpt import Checkpointer
from tierckpt.arena.slots import arena_for
from tierckpt.dcp import staging
from tierckpt.errors import CapacityError, CheckpointSkippedError, OperationTimeoutError
from tierckpt.save import flush


class Gate(threading.Event):
    """Set when the disk accepts writes. ``reached`` is set on the first write."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A disk that blocks writes until the gate opens."""
    opened, real = Gate(), flush.ShardFile.write

    def slow(self: flush.ShardFile, view: memoryview, offset: int) -> None:
        opened.reached.set()
        assert opened.wait(60), "the test did not open the gate"
        real(self, view, offset)

    monkeypatch.setattr(flush.ShardFile, "write", slow)
    yield opened
    opened.set()


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100_000,), value)}


def restored(uri: str, step: int | None = None) -> float:
    target = state(0.0)
    assert Checkpointer(uri).restore(target, step) is not None
    assert target["w"].unique().numel() == 1
    return float(target["w"][0].item())


def test_save_does_not_wait_for_the_previous_one(file_uri: str, gate: Gate) -> None:
    with Checkpointer(file_uri, checkpoints_in_flight_max=2) as checkpointer:
        first, second = checkpointer.save(1, state(1.0)), checkpointer.save(2, state(2.0))
        assert not first.done(), "the first save must still wait at the gate"
        gate.set()
        second.result(timeout=60)
    assert (restored(file_uri, 1), restored(file_uri, 2)) == (1.0, 2.0)


def test_save_waits_for_the_oldest_when_all_slots_are_in_use(file_uri: str, gate: Gate) -> None:
    with Checkpointer(file_uri, checkpoints_in_flight_max=1) as checkpointer:
        first = checkpointer.save(1, state(1.0))
        threading.Timer(0.5, gate.set).start()
        checkpointer.save(2, state(2.0))
        assert gate.is_set() and first.done()
    assert restored(file_uri) == 2.0


def test_skip_policy_returns_a_skipped_future(file_uri: str, gate: Gate) -> None:
    options: dict[str, Any] = {"checkpoints_in_flight_max": 1, "staging_policy": "skip"}
    with Checkpointer(file_uri, **options) as checkpointer:
        checkpointer.save(1, state(1.0))
        skipped = checkpointer.save(2, state(2.0))
        assert isinstance(skipped.exception(timeout=0), CheckpointSkippedError)
        assert "CheckpointSkippedError" in checkpointer.stats[1].error
        gate.set()
        checkpointer.wait("local")
        checkpointer.save(3, state(3.0))
    assert [record.step for record in checkpointer.stats if not record.error] == [1, 3]
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-3"
    assert restored(file_uri) == 3.0


def test_drop_policy_replaces_the_oldest_save_not_started(file_uri: str, gate: Gate) -> None:
    options: dict[str, Any] = {"checkpoints_in_flight_max": 2, "staging_policy": "drop_oldest_unflushed"}
    checkpointer = Checkpointer(file_uri, **options)
    futures = [checkpointer.save(1, state(1.0))]
    assert gate.reached.wait(60)
    futures += [checkpointer.save(step, state(float(step))) for step in (2, 3)]
    gate.set()
    checkpointer.wait("local")  # a dropped save is not a failure
    checkpointer.close()
    assert [future.exception(timeout=60) is None for future in futures] == [True, False, True]
    assert isinstance(futures[1].exception(), CheckpointSkippedError)
    assert (restored(file_uri, 1), restored(file_uri)) == (1.0, 3.0)


def test_later_of_two_saves_of_one_id_wins(file_uri: str, gate: Gate) -> None:
    threading.Timer(0.3, gate.set).start()
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


def test_state_may_change_while_it_is_written(file_uri: str, gate: Gate) -> None:
    live = state(1.0)
    with Checkpointer(file_uri) as checkpointer:
        checkpointer.save(1, live)
        live["w"].fill_(9.0)
        gate.set()
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
def test_hung_save_times_out_once_and_is_named(file_uri: str, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """``wait`` and ``close`` end at their timeout, however many saves are queued after the hung one."""
    monkeypatch.setattr("tierckpt.training.saves.EXTRA_SECONDS", 0.0)
    checkpointer = Checkpointer(file_uri, timeout_seconds=3.0, checkpoints_in_flight_max=2)
    checkpointer.save(1, state(1.0))
    last = checkpointer.save(2, state(2.0))
    with pytest.raises(OperationTimeoutError, match="step-1 has not finished"):
        checkpointer.wait("local")
    gate.set()
    last.result(timeout=60)
    checkpointer.close()
    assert restored(file_uri) == 2.0
