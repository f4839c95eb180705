"""Memory for rows that do not fit their target as they are: used again by the next window of a load, and bounded."""

from __future__ import annotations

import torch

from tierckpt.dcp.read_plan import RowBufferPool


def test_what_is_given_back_is_taken_again_and_the_smallest_that_fits_first() -> None:
    rows = RowBufferPool(1000)
    large, small = rows.take(400), rows.take(250)
    rows.give_back(large)
    rows.give_back(small)
    assert rows.take(200) is small
    assert rows.take(200) is large


def test_two_never_have_the_same_memory() -> None:
    rows = RowBufferPool(1000)
    taken = [rows.take(100) for _ in range(5)]
    for number, one in enumerate(taken):
        one.fill_(number)
    assert [int(one.sum()) for one in taken] == [100 * number for number in range(5)]


def test_little_is_not_taken_out_of_much() -> None:
    rows = RowBufferPool(1000)
    rows.give_back(much := rows.take(500))
    assert rows.take(249) is not much


def test_what_fits_nobody_makes_room_for_what_is_wanted() -> None:
    rows = RowBufferPool(1000)
    for size in (100, 100, 700):
        rows.give_back(rows.take(size))
    kept = rows.take(350)  # out of the 700, so that only 200 are free
    assert kept.nbytes == 700
    rows.give_back(kept)
    rows.take(900)  # more than fits next to the others: they are evicted
    assert rows.take(350) is not kept


def test_nothing_is_a_piece_of_memory_too() -> None:
    assert RowBufferPool().take(0).view(torch.float32).view(0, 3).shape == (0, 3)
