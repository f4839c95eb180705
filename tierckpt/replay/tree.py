"""Takes the tensors of optimizers out of a nested state, and puts copies of them in their place."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .optimizers import local

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class _Gap:
    place: Hashable


def detach(tree: Any, held: Mapping[Any, torch.Tensor]) -> Any:
    """Return ``tree`` with a gap for each tensor of ``held``, and a copy of all else in host memory.

    A tensor is one of ``held`` when it is the same memory: a state dict has other objects around it.
    """
    known = {_identity(tensor): place for place, tensor in held.items()}

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            place = known.get(_identity(value))
            return _Gap(place) if place is not None else like(value, local(value.detach()).to("cpu", copy=True))
        if isinstance(value, dict):
            return {key: walk(one) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(walk(one) for one in value)
        return value if isinstance(value, _IMMUTABLE) else copy.deepcopy(value)

    return walk(tree)


def fill(tree: Any, copies: Mapping[Any, torch.Tensor]) -> Any:
    """Return ``tree`` with ``copies`` in its gaps."""
    if isinstance(tree, _Gap):
        return copies[tree.place]
    if isinstance(tree, dict):
        return {key: fill(one, copies) for key, one in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(fill(one, copies) for one in tree)
    return tree


def like(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return ``shard``, a copy of this rank's part of ``tensor``, as the kind of tensor that that is."""
    if not isinstance(tensor, DTensor):
        return shard
    return DTensor.from_local(shard, tensor.device_mesh, tensor.placements, run_check=False,
                              shape=tensor.shape, stride=tensor.stride())  # fmt: skip


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    shard = local(tensor.detach())
    return (shard.device, shard.data_ptr() if shard.numel() else id(tensor), shard.shape, shard.stride(), shard.dtype)
