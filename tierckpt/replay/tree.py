"""Replaces the tensors of optimizers in a nested state by gaps, and fills the gaps with copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..errors import CheckpointError
from .link import PARTS, Link, TensorCopy
from .optimizers import local_shard

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class _Gap:
    key: Hashable


@dataclass(frozen=True, slots=True)
class _Other:
    index: int


def detach(tree: Any, optimizer_tensors: Mapping[Any, torch.Tensor], link: Link) -> tuple[Any, TensorCopy | None]:
    """Return ``tree`` with a gap for each of ``optimizer_tensors``, and a copy of everything else in host memory.

    Recognises tensors by their memory, because a state dict wraps them.
    """
    key_by_id = {id(tensor): tensor_key for tensor_key, tensor in optimizer_tensors.items()}
    key_by_memory: dict[tuple[Any, ...], Any] = {}
    cuda_tensors: list[torch.Tensor] = []

    def key_of(tensor: torch.Tensor) -> Any:
        if id(tensor) in key_by_id:
            return key_by_id[id(tensor)]
        if not key_by_memory:
            key_by_memory.update((_memory_of(one), tensor_key) for tensor_key, one in optimizer_tensors.items())
        return key_by_memory.get(_memory_of(tensor))

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensor_key = key_of(value)
            if tensor_key is not None:
                return _Gap(tensor_key)
            shard = local_shard(value.detach())
            if not shard.is_cuda:
                return wrap_shard(value, shard.to("cpu", copy=True))
            cuda_tensors.append(value)
            return _Gap(_Other(len(cuda_tensors) - 1))
        return value if isinstance(value, _IMMUTABLE) else copy.deepcopy(value)

    detached = _map(copied, tree)
    if not cuda_tensors:
        return detached, None
    tensor_copy = link.copy([local_shard(one.detach()) for one in cuda_tensors], PARTS)
    tensor_copy.fence()  # later work on the device waits; this thread does not
    shards = zip(cuda_tensors, tensor_copy.result, strict=True)
    return fill(detached, {_Other(number): wrap_shard(*pair) for number, pair in enumerate(shards)}), tensor_copy


def gaps(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Raise CheckpointError for a gap inside a tuple."""
    if isinstance(tree, _Gap):
        yield path, tree.key
    elif isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from gaps(value, (*path, key))
    elif isinstance(tree, tuple) and any(isinstance(one, _Gap) for one in tree):
        raise CheckpointError(
            "a tuple of the state contains a tensor of the optimizer",
            hint='Put it into a list, or save with mode="async"',
        )


def without_gaps(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: without_gaps(one) for key, one in tree.items() if not isinstance(one, _Gap)}
    if type(tree) is list:
        return [None if isinstance(one, _Gap) else without_gaps(one) for one in tree]
    return tree


def fill(tree: Any, copies: Mapping[Any, torch.Tensor]) -> Any:
    return _map(lambda one: copies.get(one.key, one) if isinstance(one, _Gap) else one, tree)


def _map(work: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``work`` to all but dicts, lists and tuples."""
    if isinstance(tree, dict):
        return {key: _map(work, one) for key, one in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map(work, one) for one in tree)
    return work(tree)


def wrap_shard(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return ``shard`` as the type of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return shard
    # from_local would move it to the device
    wrapped = cast(Any, DTensor)(shard, torch_internals.spec_of(tensor), requires_grad=False)
    return cast(DTensor, wrapped)


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    shard = local_shard(tensor.detach()) if isinstance(tensor, DTensor) else tensor
    return (shard.device, shard.data_ptr() if shard.numel() else id(tensor), shard.shape, shard.stride(), shard.dtype)
