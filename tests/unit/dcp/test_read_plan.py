"""Temporary row buffers of a load: reused by its next window, and bounded."""

from __future__ import annotations

import torch

from tierckpt.dcp.read_plan import RowBufferPool


def test_the_smallest_sufficient_buffer_is_reused() -> None:
    rows = RowBufferPool(1000)
    large, small = rows.acquire(400), rows.acquire(250)
    rows.release(large)
    rows.release(small)
    assert rows.acquire(200) is small
    assert rows.acquire(200) is large


def test_buffers_in_use_are_distinct() -> None:
    rows = RowBufferPool(1000)
    taken = [rows.acquire(100) for _ in range(5)]
    for number, one in enumerate(taken):
        one.fill_(number)
    assert [int(one.sum()) for one in taken] == [100 * number for number in range(5)]


def test_large_buffers_are_not_used_for_small_requests() -> None:
    rows = RowBufferPool(1000)
    rows.release(much := rows.acquire(500))
    assert rows.acquire(249) is not much


def test_unsuitable_buffers_are_freed() -> None:
    rows = RowBufferPool(1000)
    for size in (100, 100, 700):
        rows.release(rows.acquire(size))
    kept = rows.acquire(350)  # out of the 700, so that only 200 are free
    assert kept.nbytes == 700
    rows.release(kept)
    rows.acquire(900)  # more than fits next to the others: they are evicted
    assert rows.acquire(350) is not kept


def test_empty_buffers() -> None:
    assert RowBufferPool().acquire(0).view(torch.float32).view(0, 3).shape == (0, 3)
