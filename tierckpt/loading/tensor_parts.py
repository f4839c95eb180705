"""The part of each tensor to load, and the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from ..errors import ConfigError, StateMismatchError


def check_device(device: str | int | torch.device) -> torch.device:
    """Raise ConfigError, with the available devices, if this machine lacks ``device``."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"torch knows no device {device!r}", hint='Use "cpu" or "cuda:0"') from None
    if found.type in ("cpu", "meta"):
        return found
    backend = getattr(torch, found.type, None)
    count = backend.device_count() if backend is not None and backend.is_available() else 0
    if (found.index or 0) >= count:
        raise ConfigError(
            f"there is no device {str(found)!r}: this torch ({torch.__version__}) sees {count} {found.type} devices",
            hint='Use device="cpu", or one counted from 0; CUDA_VISIBLE_DEVICES hides some',
        )
    return found


Shard: TypeAlias = tuple[int, int, int]

Part: TypeAlias = Shard | slice | tuple[slice, ...] | None
"""A rank's share, slices of the first dimensions, or None for the whole tensor."""

Plan: TypeAlias = Mapping[str, Part] | Callable[[str], Part]

Bounds: TypeAlias = tuple[tuple[int, int], ...]


class Parts:
    """The requested parts of tensors. Raises ConfigError: an invalid shard, or both a shard and a plan.

    ``shard`` cuts as ``torch.chunk`` and DTensor's ``Shard``: ``ceil(size / world)`` for each rank, less or nothing for
    the last. A tensor without the dimension is read whole.
    """

    def __init__(self, shard: Shard | None = None, plan: Plan | None = None) -> None:
        if shard is not None and plan is not None:
            raise ConfigError("give a shard or a plan, not both", hint="A plan may say (rank, world, dim) for a name")
        if shard is not None:
            _check_shard(shard, "shard")
        self._shard = shard
        self._part_of: Callable[[str], Part] = (
            (lambda _: None) if plan is None else plan if callable(plan) else plan.get
        )

    def of(self, name: str, shape: tuple[int, ...]) -> Bounds:
        """Raise ConfigError: an invalid plan. StateMismatchError: the tensor has no such dimension."""
        if self._shard is not None:
            return share_of(self._shard, shape) if self._shard[2] < len(shape) else whole_bounds(shape)
        part = self._part_of(name)
        if part is None:
            return whole_bounds(shape)
        if isinstance(part, slice):
            return _sliced((part,), name, shape)
        if isinstance(part, tuple) and all(isinstance(one, slice) for one in part):
            return _sliced(part, name, shape)  # type: ignore[arg-type]
        shard = _check_shard(part, f"the plan for {name!r}")
        if shard[2] >= len(shape):
            raise StateMismatchError(f"{name!r} has shape {shape}, and no dimension {shard[2]}", tensor=name)
        return share_of(shard, shape)


def whole_bounds(shape: tuple[int, ...]) -> Bounds:
    return tuple((0, size) for size in shape)


def share_of(shard: Shard, shape: tuple[int, ...]) -> Bounds:
    rank, world, dim = shard
    each = -(-shape[dim] // world)
    start = min(rank * each, shape[dim])
    bounds = list(whole_bounds(shape))
    bounds[dim] = (start, min(start + each, shape[dim]))
    return tuple(bounds)


def _sliced(slices: tuple[slice, ...], name: str, shape: tuple[int, ...]) -> Bounds:
    if len(slices) > len(shape):
        raise StateMismatchError(f"{name!r} has shape {shape}, {len(slices)} slices were given", tensor=name)
    bounds = list(whole_bounds(shape))
    for dim, one in enumerate(slices):
        start, stop, step = one.indices(shape[dim])
        if step != 1:
            raise ConfigError(f"the slice of {name!r} has step {step}", hint="Take every row, and index afterwards")
        bounds[dim] = (start, max(start, stop))
    return tuple(bounds)


def _check_shard(shard: Any, what: str) -> Shard:
    if not isinstance(shard, tuple) or len(shard) != 3 or not all(type(one) is int for one in shard):
        raise ConfigError(f"{what} is {shard!r}", hint="Write (rank, world, dim)")
    rank, world, dim = shard
    if not 0 <= rank < world or dim < 0:
        raise ConfigError(f"{what} is {shard!r}", hint="Write (rank, world, dim): rank below world, dim from 0")
    return rank, world, dim
