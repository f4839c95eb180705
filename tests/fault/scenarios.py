"""What one rank does in the tests of ranks that fail. Run by tests/compat/worker.py."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.fault.kills import before
from tests.states import raises_ours
from tierckpt.errors import CapacityError, TierckptError
from tierckpt.save import flush


def state_of(rank: int, value: float) -> dict[str, Any]:
    return {f"rank-{rank}": torch.full((1000,), value), "shared": torch.full((10,), value)}


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:

        def full(*_: Any, **__: Any) -> None:
            raise CapacityError("no room (seeded)", tier="local")

        flush.ShardFile.finish = full  # type: ignore[method-assign,assignment]


def dcp_save_with_a_failing_rank(uri: str, failing: int) -> dict[str, Any]:
    """One good save, then one in which ``failing`` cannot write: every rank must raise."""
    rank = dist.get_rank()
    dcp.save(state_of(rank, 1.0), storage_writer=tierckpt.TierStorageWriter(f"{uri}/step-1"))
    _fail_on(failing)
    error = ""
    try:
        with raises_ours():
            dcp.save(state_of(rank, 2.0), storage_writer=tierckpt.TierStorageWriter(f"{uri}/step-2"))
    except TierckptError as caught:
        error = type(caught).__name__
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    target = state_of(rank, 0.0)
    dcp.load(target, storage_reader=tierckpt.TierStorageReader(f"{uri}/step-1"))
    return {"errors": errors, "latest": tierckpt.latest(uri), "value": target["shared"][0].item()}


def checkpointer_with_a_failing_rank(uri: str, failing: int) -> dict[str, Any]:
    rank = dist.get_rank()
    checkpointer = tierckpt.Checkpointer(uri, timeout_seconds=60)
    checkpointer.save(1, state_of(rank, 1.0))
    checkpointer.wait()
    _fail_on(failing)
    error = ""
    checkpointer.save(2, state_of(rank, 2.0))
    try:
        checkpointer.wait("local")
    except TierckptError as caught:
        error = type(caught).__name__
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    restored = {"shared": torch.zeros(10)}
    step = checkpointer.restore(restored)
    return {"errors": errors, "step": step, "value": restored["shared"][0].item()}


def checkpointer_with_a_killed_rank(uri: str, killed: int, results: str) -> None:
    """``killed`` dies while it writes; the others must raise within the deadline and leave what happened in a file."""
    rank = dist.get_rank()
    checkpointer = tierckpt.Checkpointer(uri, timeout_seconds=15)
    checkpointer.save(1, state_of(rank, 1.0))
    checkpointer.wait()
    if rank == killed:
        before(flush.ShardFile, "finish")
    checkpointer.save(2, state_of(rank, 2.0))
    try:
        checkpointer.wait("local")
        outcome = "no error"
    except TierckptError as caught:
        outcome = type(caught).__name__
    with open(f"{results}/{rank}", "w") as file:  # noqa: PTH123
        file.write(outcome)
    os._exit(0)  # the process group is broken: leave as a job does that is about to be restarted
