"""One rank of test_sharing.py: loads of the same bytes by several ranks of one node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tierckpt
from tests.compat.scenarios import same_everywhere
from tests.states import zeros_like
from tierckpt import telemetry
from tierckpt.dcp import shared_read_planning

CHUNK = 64 << 10
ROWS, COLUMNS = 1024, 512
"""2 MiB of float32."""


class Read:
    """Bytes read by this rank while it is open, by tier, and the number of shared reads it gave up."""

    def __enter__(self) -> Read:
        self.bytes: dict[str, float] = {}
        self.alone = 0
        self._stop = telemetry.listen(self._note)
        return self

    def _note(self, metric: telemetry.Metric, value: float, labels: telemetry.Labels) -> None:
        if metric is telemetry.BYTES and labels["direction"] == "read":
            self.bytes[labels["tier"]] = self.bytes.get(labels["tier"], 0) + value
        elif metric is telemetry.READS_ALONE:
            self.alone += 1

    def __exit__(self, *_: object) -> None:
        self._stop()

    def of_all(self) -> dict[str, Any]:
        """Return the bytes by tier of all ranks together, and how many reads were given up."""
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, (self.bytes, self.alone))
        tiers = {tier for found, _ in seen for tier in found}
        read = {tier: sum(found.get(tier, 0) for found, _ in seen) for tier in tiers}
        return {"read": read, "alone": sum(alone for _, alone in seen)}


def values(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def replicated() -> dict[str, Any]:
    """As of DDP: every rank has all of it."""
    tensors = {f"layer-{number}": values(number) for number in range(8)}
    return {"model": tensors, "step": torch.tensor(7), "note": {"lr": 0.1}}


def mixed() -> dict[str, Any]:
    """As of FSDP with some layers left whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = [[Shard(0)], [Replicate()], [Shard(1)], [Shard(0)], [Replicate()]]
    return {
        f"layer-{number}": distribute_tensor(values(number), mesh, placement)
        for number, placement in enumerate(placements)
    } | {"bias": values(99)[:3], "note": "mixed"}


def sharded(dim: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {f"layer-{number}": distribute_tensor(values(number), mesh, [Shard(dim)]) for number in range(8)}


def trained() -> dict[str, Any]:
    """A model, and an optimizer's two moments of it: the model is a third of each rank's file."""
    return {
        f"{part}.layer-{number}": values(100 * place + number)
        for place, part in enumerate(("model", "first", "second"))
        for number in range(6)
    }


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "replicated": replicated,
    "mixed": mixed,
    "rows": lambda: sharded(0),
    "columns": lambda: sharded(1),
    "trained": trained,
}


def save(folder: str, saved: str) -> None:
    uri = f"{folder}/step-1"
    dcp.save(STATES[saved](), storage_writer=tierckpt.TierStorageWriter(uri, chunk_size_bytes=CHUNK))
    tierckpt.wait(uri, timeout_seconds=60)


def shard_bytes(uri: str) -> int:
    return sum(path.stat().st_size for path in Path(uri).glob("*.distcp"))


def load(uri: str, kind: str, **overrides: Any) -> dict[str, Any]:
    """Load; return on every rank the bytes read by all of them, and whether all loaded the right state."""
    state = zeros_like(STATES[kind]())
    with Read() as read:
        dcp.load(state, storage_reader=tierckpt.TierStorageReader(uri, **overrides))
    return {"right": same_everywhere(state, STATES[kind]()), **read.of_all()}


def save_and_load(folder: str, saved: str, loaded: str, window_bytes: int = 256 << 20) -> dict[str, Any]:
    save(folder, saved)
    return load_twice(folder, loaded, window_bytes)


def load_twice(folder: str, loaded: str, window_bytes: int = 256 << 20) -> dict[str, Any]:
    uri = f"{folder}/step-1"
    shared_read_planning.WINDOW_BYTES = window_bytes
    shared = load(uri, loaded)
    shared_read_planning.ReadSharing.add_interest = lambda self, plan, *_: plan  # type: ignore[method-assign]
    return {"size": shard_bytes(uri), "shared": shared, "apart": load(uri, loaded)}


def load_model(uri: str, apart: bool) -> dict[str, Any]:
    """Load the model alone, with the other ranks of this node or without them; return whether it is right."""
    if apart:
        shared_read_planning.ReadSharing.add_interest = lambda self, plan, *_: plan  # type: ignore[method-assign]
    wanted = {name: value for name, value in trained().items() if name.startswith("model.")}
    state = zeros_like(wanted)
    dcp.load(state, storage_reader=tierckpt.TierStorageReader(uri))
    return {"right": same_everywhere(state, wanted), "size": sum(value.nbytes for value in wanted.values())}


def restore_elsewhere(uri: str, local_root: str) -> dict[str, Any]:
    """Save with a Checkpointer, and restore on an empty node."""
    with tierckpt.Checkpointer(uri, chunk_size_bytes=CHUNK) as checkpointer:
        checkpointer.save(7, replicated())
    dist.barrier()
    state = zeros_like(replicated())
    with Read() as read, tierckpt.Checkpointer(uri, local_root=local_root) as checkpointer:
        step = checkpointer.restore(state)
    size = sum(path.stat().st_size for path in Path(local_root).rglob("*.distcp"))
    return {"size": size, "step": step, "right": same_everywhere(state, replicated()), **read.of_all()}
