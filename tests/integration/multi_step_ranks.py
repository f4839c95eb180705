"""A rank of ``test_multi_step_ranks.py``: trains a sharded model, and copies its state over several steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.fault.scenario_tools import of_each_rank
from tierckpt.replay.multi_step import MultiStepStager

STEPS = 4


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(6)))
    if kind == "fsdp":
        for layer in model:
            fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=kind == "bucket views")


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, DTensor):
        return isinstance(found, DTensor) and torch.equal(found.to_local(), wanted.to_local())
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], one) for key, one in wanted.items())
    return bool(found == wanted)


def windows_copied_whole(kind: str) -> list[list[str]]:
    """Train, and check the state of each of three windows. Returns each rank's reasons for copying a window whole."""
    rank = dist.get_rank()
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def train(number: int) -> None:
        optimizer.zero_grad(set_to_none=kind != "bucket views")
        inputs = torch.randn(3, 12, generator=torch.Generator().manual_seed(rank * 100 + number))
        model(inputs).square().mean().backward()
        optimizer.step()

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}

    train(0)
    fallbacks: list[str] = []
    shards = [one.to_local() if isinstance(one, DTensor) else one for one in model.state_dict().values()]
    with MultiStepStager(optimizer, STEPS) as stager:
        assert stager.gradient_bytes() == sum(one.nbytes for one in shards)
        for window in range(3):  # where gradients lie in buffers that are used again, one is copied whole
            pending, states = stager.begin(state), {0: copy.deepcopy(state())}
            for number in range(1, STEPS + 3):
                train(window * 20 + number)
                states[number] = copy.deepcopy(state())
                stager.end_of_step()
            snapshot = pending.result(60)
            assert same(snapshot.state, states[snapshot.steps]), f"not the state after step {snapshot.steps}"
            fallbacks += [snapshot.fallback] if snapshot.fallback else []
    return of_each_rank(fallbacks)
