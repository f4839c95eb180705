"""The layout of tensors in staging memory, and the shortcut for a save with the layout of the previous one."""

from __future__ import annotations

import ctypes
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ..arena.slots import Lease
from ..config import Settings
from ..quantities import round_up
from ..save import write_ahead
from ..save.shard_plan import Record
from .items import item_format, shard_layout
from .items.item_format import Frame
from .plan_outline import CHUNK_TENSORS
from .staging_copy import Pair

SMALL_BYTES_MAX = 64 << 10
"""Smaller tensors are copied by address. torch needs a view of each target: for 52,000 tensors of 64 elements that
takes 0.3 s, and copies by address 0.02 s."""

Facts = tuple[torch.dtype, torch.Size]


@dataclass(frozen=True)
class Layout:
    """The place of each tensor in staging memory: that which it has in the files. Holds no tensor."""

    facts: list[Facts]
    frames: list[Frame]
    shards: list[list[shard_layout.Placed]]
    offsets: list[int]
    """Of each tensor's data."""
    size_bytes: int
    places: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]]
    """Dtype, shape, strides, and offset in elements."""
    key: int
    """Equal layouts have equal keys."""
    limits: tuple[int, int]
    """The largest size of a shard, and the unit, of ``shards``."""

    @classmethod
    def of(cls, facts: list[Facts], settings: Settings) -> Layout:
        frames = [item_format.frame(dtype, tuple(shape)) for dtype, shape in facts]
        size_max, unit = settings.shard_size_bytes_max, shard_layout.unit_bytes(settings.chunk_size_bytes)
        shards = shard_layout.arrange(frames, shard_bytes_max=size_max, unit=unit)
        offsets, size_bytes = _in_arena(frames, shards)
        places = [
            (dtype, shape, _contiguous_strides(shape), offset // dtype.itemsize)
            for (dtype, shape), offset in zip(facts, offsets, strict=True)
        ]
        return cls(facts, frames, shards, offsets, size_bytes, places, hash((size_bytes, *offsets)), (size_max, unit))

    def views(self, base: torch.Tensor, wanted: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return the tensors (None: all of them) in ``base``, the staging memory as bytes."""
        whole = self.size_bytes
        typed = {
            dtype: base[: whole - whole % dtype.itemsize].view(dtype) for dtype in {dtype for dtype, _ in self.facts}
        }
        places = self.places if wanted is None else [self.places[index] for index in wanted]
        return [typed[dtype].as_strided(shape, strides, offset) for dtype, shape, strides, offset in places]

    def spans(self, address: int) -> list[write_ahead.Span]:
        """Return the range in memory, from ``address`` on, of each future file and of the data in it."""
        spans = []
        for shard in self.shards:
            staged = [(index, offset) for index, offset in shard if self.frames[index].size_bytes]
            if not staged:
                continue
            index, offset = staged[0]
            head = offset + len(self.frames[index].head)
            heads = [(at + len(self.frames[number].head), self.frames[number].size_bytes) for number, at in staged]
            last, end = staged[-1]
            size_bytes = round_up(end + self.frames[last].total_bytes)
            data = [(start, start + length) for start, length in heads]
            spans.append(write_ahead.Span(address + self.offsets[index] - head, size_bytes, data))
        return spans


def _in_arena(frames: Sequence[Frame], shards: Sequence[Sequence[shard_layout.Placed]]) -> tuple[list[int], int]:
    """Return the offset of each frame's data in the memory that holds the images of all shards, and its size."""
    offsets = [0] * len(frames)
    start = 0
    for shard in shards:
        end = start
        for index, offset in shard:
            offsets[index] = start + offset + len(frames[index].head)
            end = start + offset + frames[index].total_bytes
        start = round_up(end)
    return offsets, start


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


class RepeatedSave:
    """The items of a plan with their layout, if all tensors were plain ones in host memory.

    A planner that reuses a plan has compared types, shapes and dtypes of all tensors with the tensors it planned. The
    layout is therefore the same, and only the addresses change.
    """

    def __init__(self, items: Sequence[WriteItem], tensors: Sequence[WriteItem], layout: Layout) -> None:
        self.items, self.layout = items, layout
        self.objects = [item for item in items if item.type is WriteItemType.BYTE_IO]
        self.of_tensors = tensors
        names = [item.index.fqn for item in tensors]
        self._names = [names[start : start + CHUNK_TENSORS] for start in range(0, len(names), CHUNK_TENSORS)]
        sizes = [frame.size_bytes for frame in layout.frames]
        self._small = [number for number, size in enumerate(sizes) if 0 < size <= SMALL_BYTES_MAX]
        self._large = [number for number, size in enumerate(sizes) if size > SMALL_BYTES_MAX]
        self._complex = [number for number, (dtype, _) in enumerate(layout.facts) if dtype.is_complex]
        self._offsets = [layout.offsets[number] for number in self._small]
        self._sizes = [sizes[number] for number in self._small]

    @classmethod
    def of(
        cls,
        items: Sequence[WriteItem],
        found: Sequence[tuple[WriteItem, torch.Tensor]],
        known: Mapping[str, Any],
        layout: Layout,
    ) -> RepeatedSave | None:
        """``found``: the tensors of ``items``, in the order of ``layout``. ``known``: the state dict of the planner."""
        is_simple = all(
            type(item) is WriteItem and item.type is WriteItemType.TENSOR and known.get(item.index.fqn) is tensor
            for item, tensor in found
        )
        if not layout.size_bytes or not is_simple or not all(item_format.is_plain(tensor) for _, tensor in found):
            return None
        return cls(items, [item for item, _ in found], layout)

    def find(self, known: Mapping[str, Any]) -> tuple[list[torch.Tensor], list[int]] | None:
        """Return the tensors of this save and their addresses. None when a tensor is not contiguous, not in host
        memory, negated or conjugated, or its storage was freed."""
        tensors: list[torch.Tensor] = []
        addresses: list[int] = []
        for names in self._names:
            some: list[torch.Tensor] = list(map(known.__getitem__, names))
            if not (all(map(_IS_CPU, some)) and all(map(torch.Tensor.is_contiguous, some))):
                return None
            if any(map(torch.Tensor.is_neg, some)):
                return None
            tensors += some
            addresses += map(torch.Tensor.data_ptr, some)
        if any(tensors[number].is_conj() for number in self._complex):
            return None
        is_freed = 0 in addresses and any(not addresses[number] for number in chain(self._small, self._large))
        return None if is_freed else (tensors, addresses)

    def copy_small(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int], base: torch.Tensor) -> list[Pair]:
        """Copy the small tensors into ``base``. Return the other pairs, still to be copied."""
        sources = map(addresses.__getitem__, self._small)
        deque(map(_move, map(base.data_ptr().__add__, self._offsets), sources, self._sizes), maxlen=0)
        return list(zip(self.layout.views(base, self._large), [tensors[n] for n in self._large], strict=True))


_IS_CPU = operator.attrgetter("is_cpu")


@dataclass(frozen=True)
class Placed:
    """A repeated save in staging memory. Keeps the memory."""

    repeated: RepeatedSave
    base: torch.Tensor
    lease: Lease

    def data(self) -> dict[MetadataIndex, torch.Tensor]:
        """Return the tensors."""
        indexes = [item.index for item in self.repeated.of_tensors]
        return dict(zip(indexes, self.repeated.layout.views(self.base), strict=True))

    def records(self) -> list[Record] | None:
        """Return the records to write, in layout order; None when ``base`` is another mapping of the memory."""
        start, layout = self.lease.memory.address, self.repeated.layout
        if self.base.data_ptr() != start:
            return None
        return [
            Record(0, frame.head, frame, start + offset, self.base, None, item, self.lease)
            if frame.size_bytes
            else Record(0, frame.head, frame, 0, self.base, None, item)
            for item, frame, offset in zip(self.repeated.of_tensors, layout.frames, layout.offsets, strict=True)
        ]


# ctypes.memmove releases the interpreter lock at each call: another thread then takes it for 5 ms.
_move = ctypes.PyDLL(None).memmove
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move.restype = None
