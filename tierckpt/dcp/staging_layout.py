"""The layout of tensors in staging memory, and the shortcut for a save with the previous layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ..arena.slots import Lease
from ..config import Settings
from ..disk.file_io import copy_small
from ..quantities import round_up
from ..save import write_ahead
from ..save.shard_plan import ShardRecord
from .items import item_format, shard_layout
from .items.item_format import ItemFrame, Texts
from .staging_copy import Pair

SMALL_BYTES_MAX = 64 << 10
"""Smaller tensors are copied by address: torch needs a view of each target, which takes 15 times as long."""

Facts = tuple[torch.dtype, torch.Size]


@dataclass(frozen=True)
class StagingLayout:
    """The position of each tensor in staging memory, as in the files. Holds no tensor."""

    facts: list[Facts]
    frames: list[ItemFrame]
    shards: list[list[shard_layout.Placed]]
    offsets: list[int]
    size_bytes: int
    places: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]]
    """Dtype, shape, strides, and offset in elements."""
    key: int
    """Equal layouts have equal keys."""
    limits: tuple[int, int]

    @classmethod
    def of(cls, facts: list[Facts], settings: Settings) -> StagingLayout:
        frames = [item_format.frame(dtype, tuple(shape)) for dtype, shape in facts]
        size_max, unit = settings.shard_size_bytes_max, shard_layout.unit_bytes(settings.chunk_size_bytes)
        shards = shard_layout.assign_positions(frames, shard_bytes_max=size_max, unit=unit)
        offsets, size_bytes = _in_arena(frames, shards)
        places = [
            (dtype, shape, _contiguous_strides(shape), offset // dtype.itemsize)
            for (dtype, shape), offset in zip(facts, offsets, strict=True)
        ]
        return cls(facts, frames, shards, offsets, size_bytes, places, hash((size_bytes, *offsets)), (size_max, unit))

    @cached_property
    def file_offsets(self) -> list[int]:
        found = [0] * len(self.frames)
        for shard in self.shards:
            for index, offset in shard:
                found[index] = offset
        return found

    @cached_property
    def tensors_with_data(self) -> int:
        return sum(frame.size_bytes > 0 for frame in self.frames)

    @cached_property
    def images(self) -> list[tuple[int, int] | None]:
        """Start and size of each image; None for a file without data."""
        found: list[tuple[int, int] | None] = []
        for shard in self.shards:
            staged = [(index, offset) for index, offset in shard if self.frames[index].size_bytes]
            if not staged:
                found.append(None)
                continue
            index, offset = staged[0]
            last, end = staged[-1]
            start = self.offsets[index] - offset - len(self.frames[index].head)
            found.append((start, round_up(end + self.frames[last].total_bytes)))
        return found

    def views(self, base: torch.Tensor, wanted: Sequence[int] | None = None) -> list[torch.Tensor]:
        whole = self.size_bytes
        typed = {
            dtype: base[: whole - whole % dtype.itemsize].view(dtype) for dtype in {dtype for dtype, _ in self.facts}
        }
        places = self.places if wanted is None else [self.places[index] for index in wanted]
        return [typed[dtype].as_strided(shape, strides, offset) for dtype, shape, strides, offset in places]

    def spans(self, address: int) -> list[write_ahead.Span]:
        """Return the memory of each future file and of its data."""
        spans = []
        for shard, image in zip(self.shards, self.images, strict=True):
            if image is not None:
                staged = [(self.frames[index], offset) for index, offset in shard if self.frames[index].size_bytes]
                heads = [(offset + len(frame.head), frame.size_bytes) for frame, offset in staged]
                data = [(start, start + length) for start, length in heads]
                spans.append(write_ahead.Span(address + image[0], image[1], data))
        return spans


def _in_arena(frames: Sequence[ItemFrame], shards: Sequence[Sequence[shard_layout.Placed]]) -> tuple[list[int], int]:
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
    """The planner has compared types, shapes and dtypes of plain tensors in host memory: only the addresses change."""

    def __init__(
        self, items: Sequence[WriteItem], tensors: Sequence[WriteItem], known: Mapping[str, Any], layout: StagingLayout
    ) -> None:
        self.items, self.layout = items, layout
        self.objects = [item for item in items if item.type is WriteItemType.BYTE_IO]
        self.texts: Texts = {}
        self.of_tensors = tensors
        numbers = {name: number for number, name in enumerate(
            name for name, value in known.items() if isinstance(value, torch.Tensor))}  # fmt: skip
        self._names = [item.index.fqn for item in tensors]
        self._order = [numbers[name] for name in self._names]
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
        layout: StagingLayout,
    ) -> RepeatedSave | None:
        """``found``: the tensors of ``items``, in the order of ``layout``. ``known``: the planner's state dict."""
        is_simple = all(
            type(item) is WriteItem and item.type is WriteItemType.TENSOR and known.get(item.index.fqn) is tensor
            for item, tensor in found
        )
        if not layout.size_bytes or not is_simple or not all(item_format.is_plain(tensor) for _, tensor in found):
            return None
        return cls(items, [item for item, _ in found], known, layout)

    def find(self, known: Mapping[str, Any], addresses: list[int] | None) -> list[int] | None:
        """Return the tensors' addresses; None if unknown, conjugated, or their storage was freed.

        ``addresses``: of the planner's tensors, in its order.
        """
        if addresses is None or any(known[self._names[number]].is_conj() for number in self._complex):
            return None
        ordered = list(map(addresses.__getitem__, self._order))
        is_freed = 0 in ordered and any(not ordered[number] for number in chain(self._small, self._large))
        return None if is_freed else ordered

    def copy_small(self, known: Mapping[str, Any], addresses: Sequence[int], base: torch.Tensor) -> list[Pair]:
        """Copy the small tensors into ``base``. Return the other pairs."""
        sources = map(addresses.__getitem__, self._small)
        deque(map(copy_small, map(base.data_ptr().__add__, self._offsets), sources, self._sizes), maxlen=0)
        large = [known[self._names[number]] for number in self._large]
        return list(zip(self.layout.views(base, self._large), large, strict=True))


@dataclass(frozen=True)
class Placed:
    repeated: RepeatedSave
    base: torch.Tensor
    lease: Lease

    def data(self) -> dict[MetadataIndex, torch.Tensor]:
        indexes = [item.index for item in self.repeated.of_tensors]
        return dict(zip(indexes, self.repeated.layout.views(self.base), strict=True))

    def records(self) -> list[ShardRecord] | None:
        """Return None if ``base`` is another mapping of the memory."""
        start, layout, base, lease = self.lease.memory.address, self.repeated.layout, self.base, self.lease
        if base.data_ptr() != start:
            return None
        return [
            ShardRecord(at, frame.head, frame, start + offset, base, None, item, lease)
            if frame.size_bytes
            else ShardRecord(at, frame.head, frame, 0, base, None, item)
            for item, frame, offset, at in zip(
                self.repeated.of_tensors, layout.frames, layout.offsets, layout.file_offsets, strict=True
            )
        ]
