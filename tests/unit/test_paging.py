"""Which pages memory has that is read into: those that come faster, as measured."""

from __future__ import annotations

from tierckpt.arena.paging import FIRST_TRY, TRY_EVERY, Paging

MiB = 1 << 20
READS = 8 * TRY_EVERY


def reads(paging: Paging, huge_seconds: float, small_seconds: float, count: int = READS) -> list[bool]:
    """Which pages each of ``count`` reads had, if those took so long."""
    had = []
    for _ in range(count):
        is_huge = paging.next_is_huge()
        paging.learn(8 * MiB, huge_seconds if is_huge else small_seconds, is_huge=is_huge)
        had.append(is_huge)
    return had


def test_huge_pages_until_something_is_known() -> None:
    paging = Paging()
    assert all(paging.next_is_huge() for _ in range(FIRST_TRY - 1))


def test_where_huge_pages_are_no_slower_nearly_all_are_huge() -> None:
    had = reads(Paging(), 1.0, 0.9)
    assert had.count(False) == READS // TRY_EVERY


def test_where_huge_pages_are_slow_nearly_all_are_small() -> None:
    had = reads(Paging(), 4.0, 1.0)
    assert had.count(True) < 2 * FIRST_TRY + READS // TRY_EVERY + 1


def test_the_choice_follows_the_machine() -> None:
    paging = Paging()
    assert not reads(paging, 4.0, 1.0)[-1]
    assert reads(paging, 1.0, 1.5)[-1]
    assert not reads(paging, 4.0, 1.0)[-1]


def test_one_slow_read_changes_nothing() -> None:
    paging = Paging()
    reads(paging, 1.0, 1.0)
    paging.learn(8 * MiB, 1.5, is_huge=True)
    assert paging.is_huge


def test_a_read_of_few_bytes_says_nothing() -> None:
    paging = Paging()
    reads(paging, 1.0, 1.0)
    paging.learn(1000, 1.0, is_huge=True)
    assert paging.is_huge
    reads(paging, 4.0, 1.0)
    paging.learn(1000, 1.0, is_huge=False)
    assert not paging.is_huge
