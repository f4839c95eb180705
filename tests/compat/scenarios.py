"""One rank of test_contract.py: the ways in which DCP drives a StorageWriter and StorageReader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tierckpt
from tests.states import same, zeros_like

WAIT_SECONDS = 60


def state_of_step(step: int) -> dict[str, Any]:
    """A sharded, a replicated and a plain tensor, an object, and one tensor that differs by rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(33 * 5, dtype=torch.float32).reshape(33, 5) + step
    return {
        "sharded": distribute_tensor(values, mesh, [Shard(0)]),
        "plain": values.to(torch.bfloat16),
        "note": {"step": step, "text": f"step {step}"},
        f"own-{dist.get_rank()}": torch.full((3,), dist.get_rank() + 100 * step),
    }


def empty_state() -> dict[str, Any]:
    return dict(zeros_like(state_of_step(0)))


def is_state_of(state: dict[str, Any], step: int) -> bool:
    return same_everywhere(state, state_of_step(step))


def same_everywhere(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """True on every rank when both have the same bits on all of them."""
    is_same = torch.tensor(int(same(local_parts(left), local_parts(right))))
    dist.all_reduce(is_same, dist.ReduceOp.MIN)
    return bool(is_same)


def local_parts(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: local_parts(value) for key, value in state.items()}
    return state.to_local() if isinstance(state, DTensor) else state


def load(uri: str, **overrides: Any) -> dict[str, Any]:
    state = empty_state()
    dcp.load(state, storage_reader=tierckpt.TierStorageReader(uri, **overrides))
    return state


def async_saves(folder: str, executor: str) -> dict[str, bool]:
    """Three asynchronous saves with one writer; the state changes right after each call has staged it."""
    writer = tierckpt.TierStorageWriter(f"{folder}/step-0")
    group = dist.new_group(backend="gloo")
    outcome = {}
    for step in (1, 2, 3):
        state = state_of_step(step)
        response = dcp.async_save(
            state,
            storage_writer=writer,
            checkpoint_id=f"{folder}/step-{step}",
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType(executor),
        )
        state["plain"].zero_()
        state["sharded"].to_local().zero_()
        response.result(timeout=WAIT_SECONDS)  # type: ignore[union-attr]
    for step in (1, 2, 3):
        uri = f"{folder}/step-{step}"
        tierckpt.wait(uri, tier="shared", timeout_seconds=WAIT_SECONDS)
        outcome[f"step-{step}"] = is_state_of(load(uri), step)
    return outcome


def one_writer_many_ids(folder: str) -> dict[str, bool]:
    """One writer and one reader, pointed to new ids by ``checkpoint_id=``, as text and as Path; an id saved twice."""
    writer, reader = tierckpt.TierStorageWriter(f"{folder}/step-0"), tierckpt.TierStorageReader(f"{folder}/step-0")
    for step in (1, 2):
        dcp.save(state_of_step(step), storage_writer=writer, checkpoint_id=f"{folder}/step-{step}")
    dcp.save(state_of_step(3), storage_writer=writer, checkpoint_id=Path(folder, "step-1"))
    outcome = {}
    for name, step in (("step-2", 2), ("step-1", 3), ("step-2", 2)):
        state = empty_state()
        dcp.load(state, storage_reader=reader, checkpoint_id=Path(folder, name))
        outcome[f"{name} holds {step}"] = is_state_of(state, step)
    return outcome


def cached_plans(folder: str) -> dict[str, bool]:
    """Plans are cached by DCP's planner: later saves send empty plans, and ids and values differ."""
    outcome = {}
    for step in (1, 2, 3, 4):
        uri = f"{folder}/step-{step}"
        dcp.save(
            state_of_step(step),
            storage_writer=tierckpt.TierStorageWriter(uri),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        outcome[f"step-{step}"] = is_state_of(load(uri), step)
    return outcome


def without_collectives(folder: str) -> dict[str, bool]:
    """Every rank saves for itself; the second save replaces the first."""
    uri, outcome = f"{folder}/step-1", {}
    for step in (1, 2):
        dcp.save(state_of_step(step), storage_writer=tierckpt.TierStorageWriter(uri), use_collectives=False)
        tierckpt.wait(uri, tier="shared", timeout_seconds=WAIT_SECONDS)
        dist.barrier()
        outcome[f"ours, save {step}"] = is_state_of(load(uri), step)
    stock = empty_state()
    dcp.load(stock, storage_reader=dcp.FileSystemReader(uri))
    outcome["stock reads it"] = is_state_of(stock, 2)
    dcp.save(state_of_step(3), storage_writer=dcp.FileSystemWriter(f"{folder}/stock-1"), use_collectives=False)
    outcome["reads stock's"] = is_state_of(load(f"{folder}/stock-1"), 3)
    return outcome


def sharded_tensors(folder: str) -> dict[str, bool]:
    """ShardedTensor, DTensor's ancestor: saved in each sharding, loaded in every other."""
    specs = {
        "rows": ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"]),
        "interleaved": ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu", "rank:1/cpu", "rank:0/cpu"]),
        "columns": ChunkShardingSpec(dim=1, placements=["rank:1/cpu", "rank:0/cpu"]),
        "uneven": EnumerableShardingSpec(
            [
                ShardMetadata(shard_offsets=[0, 0], shard_sizes=[9, 20], placement="rank:1/cpu"),
                ShardMetadata(shard_offsets=[9, 0], shard_sizes=[1, 20], placement="rank:0/cpu"),
            ]
        ),
    }
    outcome = {}
    for name, spec in specs.items():
        saved = sharded_tensor.rand(spec, 10, 20)
        dcp.save({"t": saved}, storage_writer=tierckpt.TierStorageWriter(f"{folder}/{name}"))
        expected = _gathered(saved)
        for other, target in specs.items():
            loaded = sharded_tensor.zeros(target, 10, 20)
            dcp.load({"t": loaded}, storage_reader=tierckpt.TierStorageReader(f"{folder}/{name}"))
            outcome[f"{name} -> {other}"] = same(_gathered(loaded), expected)
    return outcome


def _gathered(tensor: sharded_tensor.ShardedTensor) -> torch.Tensor | None:
    whole = torch.full((10, 20), -1.0) if dist.get_rank() == 0 else None
    tensor.gather(out=whole)
    return whole


def saving_over_and_over(folder: str, elsewhere: str) -> dict[str, Any]:
    """One id saved ten times, faster than it drains: both tiers end with the last save, and no drain fails."""
    uri = f"{folder}/step-1"
    errors: list[str] = []
    for step in range(10):
        dcp.save(state_of_step(step), storage_writer=tierckpt.TierStorageWriter(uri))
    for _ in range(10):
        try:
            tierckpt.wait(uri, tier="shared", timeout_seconds=WAIT_SECONDS / 2)
            break
        except tierckpt.TierckptError as error:
            errors.append(str(error))
            if isinstance(error, tierckpt.errors.OperationTimeoutError):
                break  # otherwise continue: the final content is checked elsewhere
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, errors)
    return {
        "errors": [error for of_rank in gathered for error in of_rank],
        "on the local tier": is_state_of(load(uri), 9),
        "on the shared tier": is_state_of(load(uri, local_root=elsewhere), 9),
    }
