"""Adaptive number of concurrent GETs to a store. Cites tierckpt/stores/get_concurrency.py."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.virtual_time import VirtualTime
from tierckpt.errors import ObjectNotFoundError, StoreUnavailableError
from tierckpt.stores.get_concurrency import CROWDED_RETRIES_MAX, GETS_MAX, GetConcurrency

MINIMUM_RATE = 1000
"""Minimum throughput of a GET, in bytes per second."""


class Gets:
    """GETs that stay in flight until the test ends them."""

    def __init__(self, count: int, concurrency: GetConcurrency) -> None:
        self.concurrency = concurrency
        self.under_way: list[int] = []
        """In order of start."""
        self._ends: dict[int, asyncio.Future[int]] = {}
        self.tasks = [asyncio.create_task(self._get(number)) for number in range(count)]

    async def _get(self, number: int) -> None:
        async def get() -> bytes:
            self.under_way.append(number)
            self._ends[number] = asyncio.get_running_loop().create_future()
            try:
                return bytes(await self._ends[number])
            finally:
                self.under_way.remove(number)

        await self.concurrency.run(get)

    async def end(self, *numbers: int, error: BaseException | None = None, size_bytes: int = 10**6) -> None:
        for number in numbers:
            if error is None:
                self._ends[number].set_result(size_bytes)
            else:
                self._ends[number].set_exception(error)
        await turns()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


Begin = Callable[..., Awaitable[Gets]]


@pytest.fixture
async def begin() -> AsyncIterator[Begin]:
    """Begin GETs, with another limit than that of a new store or those of another test's ``concurrency``."""
    made: list[Gets] = []

    async def begin(count: int, most: int = GETS_MAX, concurrency: GetConcurrency | None = None) -> Gets:
        if concurrency is None:
            concurrency = GetConcurrency("s3://bucket", MINIMUM_RATE)
            concurrency.gets_max = most
        made.append(Gets(count, concurrency))
        await turns()
        return made[-1]

    yield begin
    for one in made:
        for task in one.tasks:
            task.cancel()
        await asyncio.gather(*one.tasks, return_exceptions=True)


def too_slow(moved_bytes: int = 0) -> StoreUnavailableError:
    return StoreUnavailableError("too little moved", too_slow=True, moved_bytes=moved_bytes)


async def test_a_slow_get_halves_the_limit(begin: Begin) -> None:
    some = await begin(16)
    await some.end(3, error=too_slow())
    assert some.concurrency.gets_max == 8
    late = await begin(1, concurrency=some.concurrency)
    await some.end(*range(4, 11))  # eight are left
    assert late.under_way == []
    await some.end(11)
    assert late.under_way == [0]


async def test_concurrent_slow_gets_count_once(begin: Begin) -> None:
    some = await begin(16)
    await some.end(*range(16), error=too_slow())
    assert some.concurrency.gets_max == 8


async def test_later_slow_gets_halve_the_limit_down_to_one(begin: Begin) -> None:
    concurrency = GetConcurrency("s3://bucket", MINIMUM_RATE)
    found = []
    for _ in range(6):
        some = await begin(16, concurrency=concurrency)
        while some.under_way:
            await some.end(*some.under_way, error=too_slow())
        found.append(concurrency.gets_max)
    assert found[-1] == 1


@pytest.mark.parametrize("error", [StoreUnavailableError("HTTP 503", status=503), ObjectNotFoundError("none")])
async def test_other_failures_do_not_change_the_limit(begin: Begin, error: Exception) -> None:
    some = await begin(16)
    await some.end(3, error=error)
    assert some.concurrency.gets_max == GETS_MAX


async def test_the_limit_grows_by_one_per_round_of_successes(begin: Begin) -> None:
    some = await begin(100, most=4)
    assert some.under_way == [0, 1, 2, 3]
    await some.end(0, 1, 2, 3)
    assert math.floor(some.concurrency.gets_max) == 4  # growth is a little less than one, as it grows meanwhile
    await some.end(*some.under_way)
    assert len(some.under_way) == 5


async def test_barely_fast_enough_gets_do_not_raise_the_limit(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualTime(monkeypatch)
    some = await begin(3, most=1)
    await asyncio.sleep(0.1)
    await some.end(0, size_bytes=150)  # 1.5 times the minimum
    assert some.concurrency.gets_max == 1
    await asyncio.sleep(0.1)
    await some.end(1, size_bytes=10**6)
    assert some.concurrency.gets_max == 2


async def test_a_cancelled_get_releases_its_slot(begin: Begin) -> None:
    some = await begin(5, most=2)
    for number in (0, 3):  # one in flight, one waiting
        some.tasks[number].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await some.tasks[number]
    await turns()
    assert some.under_way == [1, 2]
    await some.end(1)
    assert some.under_way == [2, 4]


async def test_a_get_cancelled_when_granted_passes_on_its_slot(begin: Begin) -> None:
    some = await begin(3, most=1)
    some._ends[0].set_result(1)
    await asyncio.sleep(0)  # the first ends and wakes the second, which has not run yet
    some.tasks[1].cancel()
    await turns()
    assert some.under_way == [2]


@pytest.mark.parametrize("moved_bytes", [1, 0], ids=["slow", "stalled"])
async def test_a_slow_get_among_many_is_repeated(begin: Begin, moved_bytes: int) -> None:
    some = await begin(5)
    await some.end(4)  # others make progress
    await some.end(0, error=too_slow(moved_bytes))
    assert some.under_way == [1, 2, 3]
    assert not some.tasks[0].done()
    await some.end(1, 2)
    assert some.under_way == [3, 0]
    await some.end(0, 3)
    assert some.tasks[0].exception() is None


@pytest.mark.parametrize(("count", "moved_bytes"), [(1, 1), (4, 0)], ids=["crept alone", "stood"])
async def test_a_slow_get_without_competition_fails(begin: Begin, count: int, moved_bytes: int) -> None:
    some = await begin(count)
    await some.end(0, error=too_slow(moved_bytes))
    assert isinstance(some.tasks[0].exception(), StoreUnavailableError)


async def test_a_repeatedly_slow_get_fails(begin: Begin) -> None:
    some = await begin(2)
    tries = 0
    while not some.tasks[0].done():
        some.concurrency.gets_max = 2
        some.concurrency.wake()
        await turns()
        await some.end(0, error=too_slow(moved_bytes=1))
        tries += 1
    assert tries == CROWDED_RETRIES_MAX + 1
    assert isinstance(some.tasks[0].exception(), StoreUnavailableError)
