"""The limiter of a mover: its rate, its order, changes while it is drawn on, and room for a flush. No real time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierckpt.disk.priority import STEP_BACK_SECONDS_MAX, FlushMark, FlushYield, flushing
from tierckpt.drain import rate_limiter as rate_limiter
from tierckpt.drain.rate_limiter import Control, DrainFlow, RateLimiter, change_control, read_control
from tierckpt.errors import ConfigError
from tierckpt.format.layout import control_file

MIB = 1 << 20


class FakeTime:
    """A clock that moves when somebody sleeps; ``late`` is how much every sleep oversleeps, as real timers do."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.late = 1000.0, late

    def __call__(self) -> float:
        return self.now

    async def nap(self, seconds: float) -> None:
        self.now += seconds + self.late
        await asyncio.sleep(0)


def limiter_of(rate: int | None, time: FakeTime, **options: object) -> RateLimiter:
    return RateLimiter(rate, 4, clock=time, nap=time.nap, **options)  # type: ignore[arg-type]


async def spent_in(limiter: RateLimiter, chunks: int, size_bytes: int) -> None:
    for _ in range(chunks):
        await limiter.spend(size_bytes)


@pytest.mark.parametrize("late", [0.0, 0.003, 0.05])
@pytest.mark.parametrize("size_bytes", [4096, MIB, 8 * MIB, 64 * MIB])
async def test_the_long_run_rate_is_exact_for_any_chunk_and_any_late_timer(size_bytes: int, late: float) -> None:
    """G1: within 2 %. A limiter that ignores its oversleep would lose up to half."""
    time, rate = FakeTime(late), 8 * MIB
    limiter, chunks = limiter_of(rate, time), max(32, (256 * MIB) // size_bytes) if size_bytes > 4096 else 20_000
    begun = time.now
    await spent_in(limiter, chunks, size_bytes)
    allowed = rate * (time.now - begun)
    assert chunks * size_bytes == pytest.approx(allowed + max(size_bytes, rate / 4), rel=0.02)


async def test_control_a_limiter_that_forgets_what_it_overslept_is_found() -> None:
    class Forgetful(RateLimiter):
        def _refill(self, capacity_bytes: float) -> None:
            super()._refill(min(capacity_bytes, self._burst_bytes()))

    time, rate, chunks = FakeTime(0.05), 8 * MIB, 64
    limiter, begun = Forgetful(rate, 4, clock=time, nap=time.nap), time.now
    await spent_in(limiter, chunks, 8 * MIB)
    allowed = rate * (time.now - begun)
    assert chunks * 8 * MIB != pytest.approx(allowed + 8 * MIB, rel=0.02)


async def test_no_window_lets_more_through_than_the_rate_and_a_burst() -> None:
    time, rate, size_bytes = FakeTime(0.002), 8 * MIB, MIB
    limiter = limiter_of(rate, time)
    times = []
    for number in range(300):
        await limiter.spend(size_bytes)
        times.append(time.now)
        if number % 50 == 49:
            time.now += 3.0  # nothing to send for a while: that earns a burst and no more
    for width in (2, 5, 20, 100):
        for first, last in zip(times, times[width:], strict=False):
            assert width * size_bytes <= rate * (last - first) + 2 * 0.25 * rate + size_bytes


async def test_streams_get_equal_shares_in_the_order_they_ask() -> None:
    """G2: after the first chunk, which nobody had to wait for, everybody has one turn in four."""
    time = FakeTime()
    limiter = limiter_of(4 * MIB, time)
    order: list[int] = []

    async def stream(number: int) -> None:
        for _ in range(10):
            await limiter.spend(MIB)
            order.append(number)

    await asyncio.gather(*(stream(number) for number in range(4)))
    for turn in range(1, 33, 4):
        assert sorted(order[turn : turn + 4]) == [0, 1, 2, 3]


async def test_the_rate_changes_while_somebody_waits_for_it() -> None:
    time = FakeTime()
    limiter = limiter_of(1024, time)
    waiting = asyncio.create_task(spent_in(limiter, 3, MIB))  # over half an hour at this rate
    for _ in range(50):
        await asyncio.sleep(0)
    assert not waiting.done()
    before = time.now
    limiter.update(bytes_per_second=100 * MIB)
    await waiting
    assert time.now - before <= 0.2 + 2 * rate_limiter.SLEEP_SECONDS_MAX + MIB / 1024  # the debt was at most one chunk
    limiter.update(bytes_per_second=None)
    before = time.now
    await spent_in(limiter, 1000, 64 * MIB)
    assert time.now == before


async def test_nothing_passes_while_paused_and_a_pause_earns_no_more_than_a_burst() -> None:
    time = FakeTime()
    limiter = limiter_of(MIB, time)
    await limiter.spend(MIB)
    limiter.update(paused=True)
    passed: list[float] = []

    async def stream() -> None:
        for _ in range(4):
            await limiter.spend(MIB)
            passed.append(time.now)

    task = asyncio.create_task(stream())
    for _ in range(1000):
        await asyncio.sleep(0)
    assert passed == []
    assert time.now > 1050.0
    resumed = time.now
    limiter.update(paused=False)
    await task
    assert passed[-1] - resumed == pytest.approx(3.0, abs=0.5)


async def test_more_and_fewer_files_at_a_time_while_they_run() -> None:
    limiter, running, most = RateLimiter(None, 2), 0, 0
    go = asyncio.Event()

    async def file() -> None:
        nonlocal running, most
        async with limiter.flow(0.0).slot():
            running += 1
            most = max(most, running)
            await go.wait()
            running -= 1

    tasks = [asyncio.create_task(file()) for _ in range(12)]
    await settle()
    assert running == 2
    limiter.update(concurrency=5)
    await settle()
    assert running == 5
    limiter.update(concurrency=1)  # those that run finish, and only then is there one at a time
    tasks[5].cancel()  # one that waits goes away without taking a place with it
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (running, most) == (0, 5)
    async with limiter.flow(0.0).slot():
        assert limiter.running.total() == 1


async def order_of(limiter: RateLimiter, holder: DrainFlow, waiting: list[DrainFlow]) -> list[float]:
    """Return the order in which waiting files get the only slot after ``holder`` releases it."""
    order: list[float] = []

    async def file(flow: DrainFlow) -> None:
        async with flow.slot():
            order.append(flow.created_at)

    async with holder.slot():
        tasks = [asyncio.create_task(file(flow)) for flow in waiting]
        await settle()
        assert order == []
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)
    return order


async def test_places_go_to_the_newest_checkpoint_that_waits_but_one_that_has_begun_is_finished_first() -> None:
    """G4."""
    limiter = RateLimiter(None, 1)
    begun, older, newer, newest = (limiter.flow(created_at) for created_at in (1.0, 2.0, 3.0, 4.0))
    assert await order_of(limiter, begun, [older, newest, begun, newer]) == [1.0, 4.0, 3.0, 2.0]


async def test_in_a_hurry_the_newest_waits_for_no_place_and_the_others_wait_for_it() -> None:
    """G4."""
    limiter = RateLimiter(None, 1)
    older, newer = limiter.flow(1.0), limiter.flow(2.0)
    async with older.slot():
        place = newer.slot()
        waiting = asyncio.create_task(place.__aenter__())
        await settle()
        assert not waiting.done()
        limiter.prefer_newest()
        await settle()
        assert waiting.done()
        outdone = asyncio.create_task(older.spend(MIB))
        await settle()
        assert not outdone.done()
        await newer.spend(MIB)
        await place.__aexit__(None, None, None)
        async with asyncio.timeout(60):
            await outdone


async def test_a_place_given_and_cancelled_in_one_moment_is_not_lost() -> None:
    limiter = RateLimiter(None, 1)
    holder = limiter.flow(0.0).slot()
    await holder.__aenter__()
    waiting = asyncio.create_task(limiter.flow(0.0).slot().__aenter__())
    await settle()
    await holder.__aexit__(None, None, None)  # gives the place to the waiting task ...
    waiting.cancel()  # ... which has left
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(60):
        async with limiter.flow(0.0).slot():
            pass


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


BAD_RATES = [{"bytes_per_second": rate} for rate in (0, -5, 1.5, True, "fast")]


@pytest.mark.parametrize(
    "change",
    [*BAD_RATES, *({"concurrency": files} for files in (0, 257, "4")), {"paused": "yes"},
     {"bytes_per_second": MIB, "concurrency": 0}],
)  # fmt: skip
def test_a_change_that_cannot_work_is_refused_and_changes_nothing(change: dict[str, Any], tmp_path: Path) -> None:
    limiter = RateLimiter(5 * MIB, 3)
    with pytest.raises(ConfigError):
        limiter.update(**change)
    with pytest.raises(ConfigError):
        change_control(tmp_path, **change)
    assert not control_file(tmp_path).exists()
    if change in BAD_RATES:
        with pytest.raises(ConfigError, match="bytes_per_second"):
            limiter.throttle(change["bytes_per_second"], 10)
    assert (limiter.rate, limiter.concurrency, limiter.paused) == (5 * MIB, 3, False)


# --- the control file ------------------------------------------------------------------------------------------


async def test_the_control_file_rules_every_mover_and_gives_back_what_it_took(tmp_path: Path) -> None:
    time = FakeTime()
    movers = [limiter_of(rate, time, local_root=tmp_path) for rate in (None, 3 * MIB)]

    def state() -> list[tuple[int | None, int, bool]]:
        time.now += rate_limiter.CONTROL_CHECK_SECONDS
        for mover in movers:
            mover.refresh()
        return [(mover.bytes_per_second, mover.concurrency, mover.paused) for mover in movers]

    assert state() == [(None, 4, False), (3 * MIB, 4, False)]
    change_control(tmp_path, bytes_per_second=200 * MIB, paused=True)
    assert state() == [(200 * MIB, 4, True)] * 2
    change_control(tmp_path, paused=False, concurrency=7)
    assert state() == [(200 * MIB, 7, False)] * 2
    change_control(tmp_path, bytes_per_second=None)
    assert state() == [(None, 7, False)] * 2
    change_control(tmp_path, bytes_per_second="default")
    assert state() == [(None, 7, False), (3 * MIB, 7, False)]
    control_file(tmp_path).unlink()
    assert state() == [(None, 4, False), (3 * MIB, 4, False)]


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"paused": 1}', b'{"concurrency": 0}', b'{"bytes_per_second": "x"}', b'{"x": 1}'],
)  # fmt: skip
async def test_a_damaged_control_file_changes_nothing_and_the_next_command_mends_it(
    damage: bytes, tmp_path: Path
) -> None:
    """G4."""
    time = FakeTime()
    limiter = limiter_of(MIB, time, local_root=tmp_path)
    change_control(tmp_path, bytes_per_second=2 * MIB)
    limiter.refresh()
    control_file(tmp_path).write_bytes(damage)
    time.now += 5
    limiter.refresh()
    assert limiter.bytes_per_second == 2 * MIB
    with pytest.raises(ConfigError):
        read_control(tmp_path)
    change_control(tmp_path, paused=False)
    assert read_control(tmp_path) == Control()


# --- room for a flush ------------------------------------------------------------------------------------------


def test_a_flush_of_any_process_is_seen_while_it_lasts_and_ends_with_its_process(tmp_path: Path) -> None:
    mark = FlushMark(tmp_path)
    assert not mark.is_held()
    with flushing(tmp_path):
        assert mark.is_held()
        with flushing(tmp_path):
            assert mark.is_held()
        assert mark.is_held()  # the other rank still writes
    assert not mark.is_held()
    code = (
        "import sys, time; from pathlib import Path; from tierckpt.disk.priority import flushing\n"
        "with flushing(Path(sys.argv[1])): print('writing', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert mark.is_held()
        process.kill()
        process.wait(60)
    assert not mark.is_held()
    mark.close()


def test_a_flush_never_waits_for_movers_and_goes_on_where_no_mark_can_be_made(tmp_path: Path) -> None:
    ran = False
    with flushing(tmp_path / "missing"):
        ran = True
    assert ran
    marks = [FlushMark(tmp_path) for _ in range(20)]
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            for mark in marks:
                mark.is_held()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(200):
            with flushing(tmp_path):
                assert marks[0].is_held()  # all 200 checks saw the lock: a mover's check never blocked it
    finally:
        stop.set()
        thread.join(60)


async def test_a_drain_leaves_the_disk_to_a_flush_and_is_not_starved_by_one_that_never_ends() -> None:
    """G3: half of the time is the drain's, whatever training does."""
    time, writes = FakeTime(), True
    rule = FlushYield(SimpleNamespace(is_held=lambda: writes))  # type: ignore[arg-type]
    waited = worked = longest = stretch = 0.0
    for _ in range(100_000):
        if rule.must_wait(time.now):
            waited, stretch = waited + 0.001, stretch + 0.001
        else:
            worked, stretch = worked + 0.001, 0.0
        longest = max(longest, stretch)
        time.now += 0.001
    assert longest == pytest.approx(STEP_BACK_SECONDS_MAX, abs=0.01)
    assert waited / (waited + worked) == pytest.approx(0.5, abs=0.03)
    writes = False
    time.now += 10
    assert not rule.must_wait(time.now)


async def test_after_a_short_flush_the_drain_goes_on_at_once_and_may_step_back_again_soon() -> None:
    writes = True
    rule = FlushYield(SimpleNamespace(is_held=lambda: writes))  # type: ignore[arg-type]
    assert rule.must_wait(10.0)
    assert rule.must_wait(10.3)
    writes = False
    assert not rule.must_wait(10.4)
    writes = True
    assert not rule.must_wait(10.7)  # it waited 0.4 s, so 0.4 s are its own
    assert rule.must_wait(10.81)


async def test_a_limiter_without_a_rate_steps_back_too(tmp_path: Path) -> None:
    time = FakeTime()
    limiter = limiter_of(None, time, local_root=tmp_path)
    with flushing(tmp_path):
        begun = time.now
        await limiter.spend(MIB)
        assert time.now - begun == pytest.approx(STEP_BACK_SECONDS_MAX, abs=0.1)
        await spent_in(limiter, 50, MIB)
        assert time.now - begun == pytest.approx(STEP_BACK_SECONDS_MAX, abs=0.1)
    limiter.close()


# --- priority --------------------------------------------------------------------------------------------------


async def test_the_threads_of_a_limiter_step_back_and_the_callers_thread_does_not() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    limiter = RateLimiter(None, 1, nice=15)
    lowered = await limiter.in_background(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    assert (lowered, os.getpriority(os.PRIO_PROCESS, 0)) == (max(15, own), own)
    limiter.close()
    limiter.close()


# --- a throttle ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "expected"), [(None, 2 * MIB), (8 * MIB, 2 * MIB), (MIB, MIB)])
async def test_a_throttle_lowers_the_rate_and_never_lifts_a_limit(limit: int | None, expected: int) -> None:
    time = FakeTime()
    limiter = limiter_of(limit, time)
    limiter.throttle(2 * MIB, seconds=1000)
    assert limiter.rate == expected
    begun = time.now
    await spent_in(limiter, 64, MIB)
    assert pytest.approx(expected * (time.now - begun) + MIB, rel=0.05) == 64 * MIB


async def test_a_throttle_ends_by_itself_or_when_it_is_taken_back() -> None:
    time = FakeTime()
    limiter = limiter_of(None, time)
    for end in ("late", "taken back"):
        limiter.throttle(MIB, seconds=30)
        await spent_in(limiter, 4, MIB)
        if end == "late":
            time.now += 31
        else:
            limiter.throttle(None, seconds=0)
        assert limiter.rate is None
        before = time.now
        await spent_in(limiter, 1000, MIB)
        assert time.now == before, "and leaves no debt"
