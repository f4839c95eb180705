"""The layout of a shard: the image of the file, whether it is staged in the arena or gathered later.

Small items come first, packed, and none crosses the end of a segment, which one worker makes. Large items follow, with
their raw data on a multiple of 4096 in the file, for O_DIRECT. Items without data, and so without an address, come
last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...quantities import round_up
from .item_format import ALIGNMENT_BYTES, ItemFrame

LARGE_BYTES = 64 * 1024
"""Larger items start their own block: the padding is at most some percent."""

SEGMENT_BYTES_MIN = 8 << 20

Placed = tuple[int, int]
"""Index of a frame, and the offset of its head in the file."""


def unit_bytes(chunk_size_bytes: int) -> int:
    """Small items do not cross it: whole chunks, and at least the smallest segment."""
    return chunk_size_bytes * max(1, SEGMENT_BYTES_MIN // chunk_size_bytes)


def assign_positions(frames: Sequence[ItemFrame], *, shard_bytes_max: int, unit: int) -> list[list[Placed]]:
    """Return for each shard its items and their offsets, in file order. Deterministic.

    An item larger than ``shard_bytes_max`` gets its own shard.
    """
    shards: list[list[Placed]] = []
    shard: list[Placed] = []
    position = 0
    for index in _in_file_order(frames):
        frame = frames[index]
        offset = _next_offset(position, frame, unit)
        if shard and offset + frame.total_bytes > shard_bytes_max:
            shards.append(shard)
            shard, offset = [], _next_offset(0, frame, unit)
        shard.append((index, offset))
        position = offset + len(frame.head) + frame.size_bytes + len(frame.tail)
    if shard:
        shards.append(shard)
    return shards


def _in_file_order(frames: Sequence[ItemFrame]) -> Iterable[int]:
    sizes = [frame.size_bytes for frame in frames]
    return sorted(range(len(frames)), key=lambda index: (not sizes[index], sizes[index] >= LARGE_BYTES))


def _next_offset(position: int, frame: ItemFrame, unit: int) -> int:
    head = len(frame.head)
    if frame.size_bytes >= LARGE_BYTES:
        return round_up(position + head) - head
    offset = round_up(position + head, ALIGNMENT_BYTES) - head
    if offset // unit != (offset + head + frame.size_bytes + len(frame.tail) - 1) // unit:
        offset = round_up(offset, unit)
    return offset
