"""What one rank does in the tests of peers: rank N is on node N, which has a local root and an agent of its own."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tierckpt
from tierckpt.config import Settings

ROWS = 40_000


def state_of(rank: int, step: int) -> dict[str, Any]:
    """Each rank has a tensor of its own; one is on all of them."""
    return {
        f"rank-{rank}": torch.arange(ROWS, dtype=torch.float32) + 1000.0 * step + rank,
        "both": torch.full((ROWS,), float(step)),
    }


def save(uri: str, nodes: list[str], step: int) -> dict[str, Any]:
    rank = dist.get_rank()
    settings = Settings(**json.loads(nodes[rank]))
    with tierckpt.Checkpointer(uri, settings=settings, timeout_seconds=60) as checkpointer:
        checkpointer.save(step, state_of(rank, step))
        checkpointer.wait("local")
        dist.barrier()
        checkpointer.flush_before_exit(0.0)
    return {"rank": rank}


def save_locally(uri: str, nodes: list[str], step: int) -> dict[str, Any]:
    """With what dcp itself offers; returns when it is committed on the coordinator's node."""
    rank = dist.get_rank()
    settings = Settings(**json.loads(nodes[rank]))
    dcp.save(state_of(rank, step), storage_writer=tierckpt.TierStorageWriter(f"{uri}/step-{step}", settings=settings))
    dist.barrier()
    return {"rank": rank}


def restore(uri: str, nodes: list[str]) -> dict[str, Any]:
    """What every rank has after a restore, and whether it is right."""
    rank = dist.get_rank()
    settings = Settings(**json.loads(nodes[rank]))
    checkpointer = tierckpt.Checkpointer(uri, settings=settings, timeout_seconds=60)
    state = {f"rank-{rank}": torch.zeros(ROWS), "both": torch.zeros(ROWS)}
    step = checkpointer.restore(state)
    expected = state_of(rank, step or 0)
    outcome = (step, all(torch.equal(state[name], expected[name]) for name in expected))
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    return {"outcomes": outcomes}
