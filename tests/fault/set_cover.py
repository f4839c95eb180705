"""The ranks of test_set_cover.py. Run by tests/compat/worker.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tierckpt import Checkpointer
from tierckpt.format.layout import local_dir, parse_uri


def state_of(value: float) -> dict[str, Any]:
    return {f"rank-{dist.get_rank()}": torch.full((10_000,), value)}


def two_ranks_one_bad_shard(uri: str) -> dict[str, Any]:
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(1, state_of(1.0))
        checkpointer.save(2, state_of(2.0))
    if dist.get_rank() == 0:
        directory = local_dir(Path(os.environ["TIERCKPT_LOCAL_ROOT"]), parse_uri(f"{uri}/step-2"))
        for place in (directory, Path(uri, "step-2")):
            (shard,) = place.glob("__1_*.distcp")
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.unlink()
            shard.write_bytes(data)
    dist.barrier()
    target = state_of(0.0)
    step = Checkpointer(uri).restore(target)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (step, target[f"rank-{dist.get_rank()}"].unique().tolist()))
    return {"steps": [step for step, _ in found], "values": [value for _, value in found]}
