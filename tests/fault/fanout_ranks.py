"""A rank of a job on several nodes: its save and its restore. Run by ``tests/compat/worker.py``."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tierckpt
from tests.fault.scenario_tools import of_each_rank

REPLICAS = 2
"""Data-parallel groups: this many ranks hold each shard."""
ROWS, COLUMNS, SHARDED = 1024, 512, 4
"""Each tensor has 2 MiB."""
REPLICATED = 4


def whole_state() -> dict[str, torch.Tensor]:
    names = [f"sharded-{number}" for number in range(SHARDED)] + [
        f"replicated-{number}" for number in range(REPLICATED)
    ]
    return {name: _value(number) for number, name in enumerate(names)}


def part_of(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the part of ``state`` of this rank: tensors with hybrid sharding, and replicated ones."""
    mesh = init_device_mesh("cpu", (REPLICAS, dist.get_world_size() // REPLICAS))
    placements = [Replicate(), Shard(0)]
    return {
        name: distribute_tensor(value, mesh, placements, src_data_rank=None) if name.startswith("sharded") else value
        for name, value in state.items()
    }


def _value(number: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(number))


def save(uri: str, root: str) -> dict[str, Any]:
    """Save as an earlier job of one rank, and wait for the shared tier."""
    writer = tierckpt.TierStorageWriter(uri, local_root=root, mover="inline")
    dcp.save(whole_state(), storage_writer=writer)
    tierckpt.wait(uri, tier="shared", timeout_seconds=60, local_root=root, mover="inline")
    return {"size_bytes": (SHARDED + REPLICATED) * ROWS * COLUMNS * 4}


def restore(uri: str, nodes: list[dict[str, str]]) -> dict[str, Any]:
    """Restore with the settings of this rank's node (ranks in blocks). Returns correctness and seconds by rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ.update(nodes[rank * len(nodes) // world_size])
    wanted = part_of(whole_state())
    loaded = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dist.barrier()
    begun = time.monotonic()
    dcp.load(loaded, storage_reader=tierckpt.TierStorageReader(uri))
    seconds = time.monotonic() - begun
    right = all(torch.equal(_local(loaded[name]), _local(value)) for name, value in wanted.items())
    outcomes = of_each_rank({"right": right, "seconds": seconds})
    return {name: [one[name] for one in outcomes] for name in outcomes[0]}


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
