"""Temporary row buffers of a load: reused by its next window, and bounded."""

from __future__ import annotations

from tierckpt.dcp.read_plan import RowBufferPool


def test_buffers_are_reused_for_similar_requests_only() -> None:
    rows = RowBufferPool(1000)
    taken = [rows.acquire(100) for _ in range(5)]
    assert len({one.data_ptr() for one in taken}) == 5
    rows.release(taken[0])
    assert rows.acquire(49) is not taken[0]
    assert rows.acquire(90) is taken[0]


def test_unsuitable_buffers_are_freed() -> None:
    rows = RowBufferPool(1000)
    for size in (100, 100, 700):
        rows.release(rows.acquire(size))
    kept = rows.acquire(350)  # out of the 700, so that only 200 are free
    assert kept.nbytes == 700
    rows.release(kept)
    rows.acquire(900)  # more than fits next to the others: they are evicted
    assert rows.acquire(350) is not kept
