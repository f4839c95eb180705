"""Which pages memory gets that is read into: those that are cheaper, as measured."""

from __future__ import annotations

from tierckpt.arena.pages import MEASURE_INTERVAL, Paging

MiB = 1 << 20
FILLS = 8 * MEASURE_INTERVAL


def fills(paging: Paging, huge_seconds: float, small_seconds: float, count: int = FILLS) -> list[bool]:
    """Page kinds of ``count`` pieces of memory for these times. Only the requested kind is measured."""
    had = []
    for _ in range(count):
        is_huge, is_priced = paging.next()
        if is_priced:
            paging.learn(8 * MiB, huge_seconds if is_huge else small_seconds, is_huge=is_huge)
        had.append(is_huge)
    return had


def test_both_kinds_are_priced_before_any_choice() -> None:
    paging = Paging()
    assert [paging.next() for _ in range(3)] == [(True, True), (False, True), (True, False)]


def test_where_huge_pages_cost_no_more_nearly_all_are_huge() -> None:
    had = fills(Paging(), 1.0, 0.9)
    assert had.count(False) == FILLS // MEASURE_INTERVAL


def test_where_huge_pages_cost_far_more_nearly_all_are_small() -> None:
    had = fills(Paging(), 4.0, 1.0)
    assert had.count(True) == FILLS // MEASURE_INTERVAL


def test_the_choice_follows_the_machine() -> None:
    paging = Paging()
    assert not fills(paging, 4.0, 1.0)[-1]
    assert fills(paging, 1.0, 1.5)[-1]
    assert not fills(paging, 4.0, 1.0)[-1]


def test_one_high_price_changes_nothing() -> None:
    paging = Paging()
    fills(paging, 1.0, 1.0)
    paging.learn(8 * MiB, 1.5, is_huge=True)
    assert paging.is_huge


def test_the_price_of_few_bytes_says_nothing() -> None:
    paging = Paging()
    fills(paging, 1.0, 1.0)
    paging.learn(1000, 1.0, is_huge=True)
    assert paging.is_huge
    fills(paging, 4.0, 1.0)
    paging.learn(1000, 1.0, is_huge=False)
    assert not paging.is_huge
