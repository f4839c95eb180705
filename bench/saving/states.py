"""State dicts to save, and their comparison with the loaded ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

MiB = 1 << 20
GiB = 1 << 30
FLOAT_BYTES = 4

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A state dict on a number of ranks, ``copies`` of which hold the same bytes."""

    title: str
    world: int
    build: Callable[[float], State]
    copies: int = 1


class MismatchError(Exception):
    """The loaded state differs from the saved one."""


def tensors(count: int, size_bytes: int) -> State:
    """Return ``count`` float32 tensors with separate memory and distinct bytes; the same on every rank."""
    shifts = 4099
    noise = torch.randn(size_bytes // FLOAT_BYTES + shifts, generator=torch.Generator().manual_seed(1))
    state: State = {}
    for index in range(count):
        tensor = noise[index % shifts :][: size_bytes // FLOAT_BYTES].clone()
        tensor[0] = index
        state[f"layer.{index}.weight"] = tensor
    return state


def scaled(number: int, scale: float) -> int:
    return max(1, round(number * scale))


def sharded(total_bytes: int) -> State:
    """The state dict of an FSDP2 model: 32 weights, each a DTensor sharded over all ranks. Needs a process group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers, columns = 32, 1024
    rows = max(1, total_bytes // layers // columns // FLOAT_BYTES)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(columns, rows, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    state: State = model.state_dict()
    noise = torch.randn(rows * columns, generator=torch.Generator().manual_seed(1 + torch.distributed.get_rank()))
    for index, tensor in enumerate(state.values()):
        mine = local(tensor).view(-1)
        mine.copy_(noise[: mine.numel()])
        mine[:1] = index
    return state


CASES: dict[str, Case] = {
    "large": Case("2 GiB in 32 tensors", 1, lambda scale: tensors(32, scaled(64 * MiB // 4096, scale) * 4096)),
    "medium": Case("2 GiB in 4,000 tensors", 1, lambda scale: tensors(scaled(4000, scale), 2 * GiB // 4000)),
    "small": Case("50,000 tensors of 1 KiB", 1, lambda scale: tensors(scaled(50_000, scale), 256 * FLOAT_BYTES)),
    "fsdp": Case("4 ranks, FSDP2, 1 GiB", 4, lambda scale: sharded(scaled(GiB // MiB, scale) * MiB)),
    "ddp": Case("4 ranks, DDP, 1 GiB on each", 4, lambda scale: tensors(32, scaled(32 * MiB // 4096, scale) * 4096), 4),
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size_bytes(state: Mapping[str, torch.Tensor]) -> int:
    """Bytes of ``state`` on this rank."""
    return sum(local(tensor).nbytes for tensor in state.values())


def blank(state: State) -> State:
    """Return tensors shaped like those of ``state``, filled with other values."""
    return {name: torch.full_like(tensor, -12345.0) for name, tensor in state.items()}


def same(loaded: Mapping[str, Any], state: State) -> None:
    """Raise MismatchError unless ``loaded`` has all bytes of ``state`` on this rank."""
    for name, tensor in state.items():
        if name not in loaded:
            raise MismatchError(f"{name} is missing")
        theirs, ours = (local(each).detach().reshape(-1).view(torch.uint8) for each in (loaded[name], tensor))
        if not torch.equal(theirs, ours):
            raise MismatchError(f"{name} differs from the saved tensor")
