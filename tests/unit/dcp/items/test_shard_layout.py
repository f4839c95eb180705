"""Placement of items in a shard: no overlaps, large data aligned to blocks, small items within one unit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierckpt.dcp.items import item_format, shard_layout
from tierckpt.dcp.items.item_format import ItemFrame, frame
from tierckpt.dcp.items.shard_layout import LARGE_BYTES, Placed, assign_positions, unit_bytes
from tierckpt.quantities import DISK_BLOCK_BYTES

KiB, MiB = 1 << 10, 1 << 20

SHAPES = st.one_of(
    st.just((0,)),
    st.just(()),
    st.tuples(st.integers(1, 300)),
    st.tuples(st.integers(1, 40), st.integers(1, 900)),
    st.sampled_from([(LARGE_BYTES // 4,), (LARGE_BYTES // 4 - 1,), (LARGE_BYTES // 4 + 1,), (300_000,)]),
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.complex128, torch.uint16])
FRAMES = st.lists(st.builds(frame, DTYPES, SHAPES), max_size=40)
CAPS = st.sampled_from([1, 10_000, 100_000, 1 * MiB, 1 << 40])


def place(frames: Sequence[ItemFrame], cap: int, unit: int = 8 * MiB) -> list[list[Placed]]:
    return assign_positions(frames, shard_bytes_max=cap, unit=unit)


def end(frames: Sequence[ItemFrame], placed: Placed) -> int:
    return placed[1] + frames[placed[0]].total_bytes


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(frames=FRAMES, cap=CAPS, unit=st.sampled_from([64 * KiB, 128 * KiB, 8 * MiB]))
def test_layouts_keep_the_rules(frames: list[ItemFrame], cap: int, unit: int) -> None:
    shards = place(frames, cap, unit)
    assert sorted(index for shard in shards for index, _ in shard) == list(range(len(frames))), "each item once"
    for shard in shards:
        assert shard, "no shard is empty"
        for before, after in pairwise(shard):
            assert end(frames, before) <= after[1], "in order, and nothing overlaps"
        assert shard[0][1] >= 0
        assert len(shard) == 1 or end(frames, shard[-1]) <= cap
        for index, offset in shard:
            item, data = frames[index], offset + len(frames[index].head)
            if item.size_bytes >= LARGE_BYTES:
                assert data % DISK_BLOCK_BYTES == 0, "large data begins on a block"
            elif item.size_bytes:
                assert data % item_format.ALIGNMENT_BYTES == 0
            if item.size_bytes < LARGE_BYTES and item.total_bytes <= unit:
                assert offset // unit == (end(frames, (index, offset)) - 1) // unit, "a small item is in one unit"
    assert place(frames, cap, unit) == shards, "equal frames give equal layouts"


@settings(max_examples=50, deadline=None)
@given(frames=FRAMES, cap=CAPS)
def test_layout_is_idempotent(frames: list[ItemFrame], cap: int) -> None:
    """Staging lays out a state dict, and writing lays out the staged one: the layout must not change."""
    shards = place(frames, cap)
    in_order = [frames[index] for shard in shards for index, _ in shard]
    again = place(in_order, cap)
    assert [[offset for _, offset in shard] for shard in again] == [[offset for _, offset in shard] for shard in shards]


def test_order_is_small_then_large_then_empty_items() -> None:
    frames = [frame(torch.uint8, (size,)) for size in (LARGE_BYTES, 0, 5, LARGE_BYTES - 1, 0, 1 * MiB)]
    ((*placed,),) = place(frames, 1 << 40)
    assert [index for index, _ in placed] == [2, 3, 0, 5, 1, 4]


def test_alignment_overhead_is_small() -> None:
    small = [frame(torch.float32, (12,))] * 20_000
    large = [frame(torch.uint8, (LARGE_BYTES,))] * 500
    for frames, wasted in ((small, 0.08), (large, 0.07)):
        ((*placed,),) = place(frames, 1 << 40)
        assert end(frames, placed[-1]) <= (1 + wasted) * sum(item.total_bytes for item in frames)


@pytest.mark.parametrize("chunk_size_bytes", [4096, 12_288, 1 * MiB, 3 * MiB, 8 * MiB, 64 * MiB])
def test_a_unit_is_a_multiple_of_the_chunk_size(chunk_size_bytes: int) -> None:
    unit = unit_bytes(chunk_size_bytes)
    assert unit % chunk_size_bytes == 0
    assert unit >= min(chunk_size_bytes, shard_layout.SEGMENT_BYTES_MIN) and unit > LARGE_BYTES
