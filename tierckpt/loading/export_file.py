"""Writes tensors of a checkpoint to one safetensors file, in bounded memory, by overlapping windows.

DCP reads a window's blocks straight into the memory that O_DIRECT writes. A *block* is a contiguous stretch of a
tensor.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..arena.memory import Memory
from ..config import MiB
from ..dcp.reader import TierStorageReader
from ..disk.file_io import DirectFile
from ..errors import IntegrityError
from ..quantities import DISK_BLOCK_BYTES, round_up
from ..read.parallel_read import batches
from ..resources import ThreadPool
from .header import name_of, shape_in_file

WINDOW_BYTES = 128 * MiB
"""Includes conversion buffers. Two windows are in memory."""


@dataclass(frozen=True, slots=True)
class Item:
    key: str
    name: str
    stored: TensorStorageMetadata
    written: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.properties.dtype

    @property
    def size_bytes(self) -> int:
        return self.stored.size.numel() * self.written.itemsize


@dataclass(frozen=True, slots=True)
class TensorSlice:
    item: Item
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.item.written.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.size_bytes

    @property
    def memory_bytes(self) -> int:
        converted_bytes = self.numel * self.item.dtype.itemsize if self.item.dtype != self.item.written else 0
        return self.size_bytes + converted_bytes


def in_file_order(items: Sequence[Item]) -> list[Item]:
    """Align every tensor to its own dtype."""
    return sorted(items, key=lambda item: -item.written.itemsize)


def header_of(items: Sequence[Item]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for item in items:
        fields[item.name] = {
            "dtype": name_of(item.written),
            "shape": shape_in_file(item.written, tuple(item.stored.size)),
            "data_offsets": [position, position + item.size_bytes],
        }
        position += item.size_bytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(round_up(8 + len(text)) - 8)
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: Path,
    items: Sequence[Item],
    reader: TierStorageReader,
    on_bytes: Callable[[int], None],
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Write the new file ``path``, durably. Raises OSError, and the reader's errors.

    Reads a part saved in columns by whole rows.
    """
    header = header_of(items)
    memory_bytes = min(window_bytes, sum(item.size_bytes for item in items)) + 2 * DISK_BLOCK_BYTES
    ordered = batches(blocks(items, len(header), window_bytes), lambda block: block.memory_bytes, window_bytes)
    with contextlib.closing(DirectFile()) as file, ThreadPool(1, "tierckpt-export") as writer:
        file.create(path)
        with contextlib.closing(Memory.allocate(len(header))) as memory:
            memory.view[: len(header)] = header
            file.write(memory.view[: len(header)], 0)
        writing: Future[None] | None = None
        end = len(header)
        memories: list[Memory] = []
        rest = b""
        for number, window in enumerate(ordered):
            if len(memories) < 2:
                memories.append(Memory.allocate(memory_bytes))
            view = memories[number % 2].view
            begin = window[0].start - len(rest)  # the last window's incomplete block
            view[: len(rest)] = rest
            _read(reader, window, view, begin)
            for block in window:
                on_bytes(block.size_bytes)
            end = window[-1].stop
            tail = (end - begin) % DISK_BLOCK_BYTES
            rest = bytes(view[end - begin - tail : end - begin])
            if writing is not None:
                writing.result()
            writing = writer.submit(file.write, view[: round_up(end - begin)], begin)
        if writing is not None:
            writing.result()
        file.cut(end, durable=True)


def blocks(items: Sequence[Item], start: int, size_bytes_max: int) -> Iterator[TensorSlice]:
    for item in items:
        unit = item.written.itemsize + (item.dtype.itemsize if item.dtype != item.written else 0)
        shape = tuple(item.stored.size)
        position = start
        for offsets, sizes in _stretches(shape, max(1, size_bytes_max // unit)):
            block = TensorSlice(item, offsets, sizes, position)
            position = block.stop
            if block.numel:
                yield block
        start += item.size_bytes


def _stretches(shape: tuple[int, ...], numel_max: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    row = math.prod(shape[1:])
    if math.prod(shape) <= numel_max:
        yield (0,) * len(shape), shape
    elif row <= numel_max:
        step = numel_max // row
        for first in range(0, shape[0], step):
            yield (first, *(0,) * (len(shape) - 1)), (min(step, shape[0] - first), *shape[1:])
    else:
        for index in range(shape[0]):
            for offsets, sizes in _stretches(shape[1:], numel_max):
                yield (index, *offsets), (1, *sizes)


def _read(reader: TierStorageReader, window: list[TensorSlice], view: memoryview, begin: int) -> None:
    placed: list[Tensor] = []
    targets: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    plan: list[ReadItem] = []
    for block in window:
        item = block.item
        raw = torch.frombuffer(view, dtype=item.written, count=block.numel, offset=block.start - begin)
        block_view = raw.view(block.sizes)
        target = block_view if item.dtype == item.written else torch.empty(block.sizes, dtype=item.dtype, device="cpu")
        placed.append(block_view)
        targets[item.key, block.offsets] = target
        plan += _reads(block)
    reader.read_data(LoadPlan(plan), _Into(targets))  # type: ignore[arg-type]
    for block, block_view in zip(window, placed, strict=True):
        target = targets.pop((block.item.key, block.offsets))
        if target is not block_view:
            block_view.copy_(target)


def _reads(block: TensorSlice) -> list[ReadItem]:
    chunk = ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes))
    found = create_read_items_for_chunk_list(block.item.key, block.item.stored, [chunk])
    if sum(math.prod(item.lengths) for item in found) != block.numel:  # memory of an earlier window
        raise IntegrityError(
            f"the shards of {block.item.key} do not cover it, each element once", tensor=block.item.key
        )
    return found


class _Into:
    def __init__(self, targets: dict[tuple[str, tuple[int, ...]], Tensor]) -> None:
        self._targets = targets

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        target = self._targets[item.dest_index.fqn, tuple(item.dest_index.offset or ())]
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None: ...
