"""The retry policy: its budget, the breaker, and concurrent waits. No network here."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.virtual_time import VirtualTime
from tierckpt.config import Settings
from tierckpt.errors import IntegrityError, ObjectNotFoundError, StoreUnavailableError, TierckptError
from tierckpt.format.manifest import FileEntry, digest_of
from tierckpt.stores import retry
from tierckpt.stores import verified_read as mover_retry
from tierckpt.stores.local import LocalStore
from tierckpt.stores.retry import FAILURES_TO_OPEN, FLOOR_RETRIES, Probe, Retries, RetryBudget, StoreBreaker
from tierckpt.stores.verified_read import get_checked
from tierckpt.types import ByteRange


def retries(**settings: object) -> Retries:
    return Retries(Settings.load(**settings))


def failure(**context: object) -> StoreUnavailableError:
    return StoreUnavailableError("busy", **context)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BACKOFF_SECONDS_MAX", 0.02)
    monkeypatch.setattr(retry, "PROBE_PAUSE_SECONDS_MIN", 0.05)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime(monkeypatch)


async def unreachable() -> bool:
    return False


async def once(policy: Retries, breaker: StoreBreaker, probe: Probe, request: Callable[[], Awaitable[str]]) -> str:
    async with policy.request(breaker, probe):
        return await request()


async def run(policy: Retries, breaker: StoreBreaker, probe: Probe, request: Callable[[], Awaitable[str]]) -> str:
    """One request and its retries."""
    limit = policy.settings.store_timeout_seconds
    return await policy.again(lambda: once(policy, breaker, probe, request), timeout_seconds=limit)


# --- the budget (R1) -----------------------------------------------------------------------------------------------


def test_the_minimum_budget_refills_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    budget = RetryBudget(0.1)
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]
    now[0] += 0.9
    assert not budget.take()
    now[0] += 0.2
    assert budget.take()
    now[0] += 1e6
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False], "only the minimum budget"


def test_successes_add_budget_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    budget = RetryBudget(0.25)
    for _ in range(int(FLOOR_RETRIES)):
        budget.take()
    for _ in range(8):
        budget.earn()
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(100_000):
        budget.earn()
    assert sum(budget.take() for _ in range(1000)) == retry.BUDGET_RETRIES_MAX


async def test_retries_add_a_bounded_share_of_requests(clock: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1, over many concurrent requests. Without a budget the share below would be 1."""
    monkeypatch.setattr(retry, "RETRY_SHARE_MAX", 0.1)
    policy, noise = retries(store_timeout_seconds=0.5), random.Random(1)
    breaker, asked, good = policy.breaker("s3://b"), 0, 0

    async def request() -> None:
        nonlocal asked, good
        asked += 1
        await asyncio.sleep(0.001)
        if noise.random() < 0.5:
            raise failure()
        good += 1

    async def one() -> None:
        try:
            await run(policy, breaker, available, request)
        except StoreUnavailableError:
            pass

    begun = clock.now
    for _ in range(20):
        await asyncio.gather(*(one() for _ in range(20)))
    paid = FLOOR_RETRIES + (clock.now - begun) * retry.FLOOR_RETRIES_PER_SECOND
    assert policy.counts["retries"] <= 0.1 * good + paid + 1
    assert policy.counts["retries_refused"] > 0
    assert asked == policy.counts["requests"]


async def available() -> bool:
    return True


# --- one request ---------------------------------------------------------------------------------------------------


def failing(times: int, error: Callable[[], Exception] = failure) -> tuple[Callable[[], Awaitable[str]], list[int]]:
    calls: list[int] = []

    async def request() -> str:
        calls.append(len(calls))
        if len(calls) <= times:
            raise error()
        return "done"

    return request, calls


@pytest.mark.parametrize(("context", "tries"), [({}, 1), ({"crowded_seconds": 0.2}, 2)], ids=["its own", "in a crowd"])
async def test_queueing_time_of_a_get_does_not_count(context: dict[str, float], tries: int, clock: VirtualTime) -> None:
    policy, calls = retries(store_timeout_seconds=0.1), []

    async def request() -> str:
        calls.append(len(calls))
        if len(calls) == 1:
            await asyncio.sleep(0.15)
            raise failure(too_slow=True, moved_bytes=1, **context)
        return "done"

    with contextlib.suppress(StoreUnavailableError):
        await run(policy, policy.breaker("s3://b"), unreachable, request)
    assert len(calls) == tries


@pytest.mark.parametrize("error", [ObjectNotFoundError("no"), IntegrityError("short"), ValueError("a bug")])
async def test_permanent_errors_are_not_retried(error: Exception) -> None:
    policy = retries()
    request, calls = failing(1, lambda: error)
    with pytest.raises(type(error)):
        await run(policy, policy.breaker("s3://b"), unreachable, request)
    assert len(calls) == 1


async def test_nested_retries_do_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation is not retried if a request in it has used up its own attempts."""
    monkeypatch.setattr(retry, "RETRIES_MAX", 2)
    policy = retries()
    breaker = policy.breaker("s3://b")
    request, calls = failing(99)
    with pytest.raises(StoreUnavailableError) as caught:
        await policy.again(lambda: run(policy, breaker, unreachable, request))
    assert len(calls) == caught.value.context["attempts"] == 3


async def test_an_exhausted_budget_ends_work_without_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: RetryBudget, timeout_seconds: float) -> bool:
        return False

    monkeypatch.setattr(RetryBudget, "wait", refuse)
    monkeypatch.setattr(retry, "RETRIES_MAX", 3)
    policy = retries()
    request, calls = failing(99)
    with pytest.raises(StoreUnavailableError):
        await policy.again(lambda: once(policy, policy.breaker("s3://b"), unreachable, request))
    assert len(calls) == 1
    assert policy.counts["retries_refused"] == 3


async def test_an_operation_is_retried_as_a_whole() -> None:
    policy = retries()
    breaker = policy.breaker("s3://b")
    request, calls = failing(2)
    assert await policy.again(lambda: once(policy, breaker, unreachable, request)) == "done"
    assert (len(calls), policy.counts["retries"]) == (3, 2)


async def test_pauses_have_full_jitter(clock: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BACKOFF_SECONDS_MAX", 3.2)
    pauses: list[list[float]] = []

    async def one() -> None:
        policy, times = retries(), []

        async def request() -> None:
            times.append(clock.now)
            raise failure()

        with pytest.raises(StoreUnavailableError):
            await policy.again(request)
        pauses.append([later - earlier for earlier, later in itertools.pairwise(times)])

    await asyncio.gather(*(one() for _ in range(200)))
    for limit, drawn in zip([0.2, 0.4, 0.8, 1.6, 3.2], zip(*pauses, strict=True), strict=True):
        assert min(drawn) < 0.2 * limit
        assert 0.8 * limit < max(drawn) <= limit + 0.01


class Buffer:
    """Stands for the memory of a request."""


@pytest.mark.parametrize("failures", [0, 1, 99])
async def test_finished_work_keeps_no_memory(failures: int) -> None:
    """Training loops disable the garbage collector: no reference cycle may hold the frames of a request."""
    request, _ = failing(failures)
    held: list[weakref.ref[Buffer]] = []

    async def work() -> str:
        buffer = Buffer()
        held.append(weakref.ref(buffer))
        return await request()

    gc.disable()
    try:
        with contextlib.suppress(StoreUnavailableError):
            await retries().again(work)
        assert len(held) == min(failures, retry.RETRIES_MAX) + 1
        assert not [one for one in held if one() is not None]
    finally:
        gc.enable()


# --- the breaker (R2) ----------------------------------------------------------------------------------------------


def opened(patience_seconds: float = 5.0) -> StoreBreaker:
    breaker = StoreBreaker("s3://b", 0.2, patience_seconds)
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(failure())
    assert breaker.is_open
    return breaker


def test_one_success_resets_the_failure_count() -> None:
    breaker = StoreBreaker("s3://b", 1.0)
    for _ in range(3):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failed(failure())
        breaker.succeeded()
    assert not breaker.is_open


async def test_probes_back_off_and_success_releases_all_requests(clock: VirtualTime) -> None:
    breaker, probes, under_way = opened(), [], 0

    async def probe() -> bool:
        nonlocal under_way
        under_way += 1
        assert under_way == 1
        probes.append(clock.now)
        await asyncio.sleep(0.02)
        under_way -= 1
        return len(probes) == 5

    passed: list[float] = []

    async def caller() -> None:
        await breaker.wait_until_up(probe)
        passed.append(clock.now)

    await asyncio.gather(*(caller() for _ in range(50)))
    assert len(probes) == 5
    gaps = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert gaps[-1] > gaps[0]
    assert max(passed) - probes[-1] == pytest.approx(0.02), "immediately after the probe's answer"


async def test_an_impatient_request_fails_fast_during_an_outage(clock: VirtualTime) -> None:
    breaker = opened(patience_seconds=0.2)
    with pytest.raises(StoreUnavailableError, match="s3://b is down: busy"):
        await breaker.wait_until_up(unreachable)
    begun = clock.now
    with pytest.raises(StoreUnavailableError) as caught:
        await breaker.wait_until_up(unreachable)
    assert clock.now == begun
    assert caught.value.context["down_seconds"] >= 0.2


async def test_a_patient_request_waits_for_the_store(clock: VirtualTime) -> None:
    breaker, is_up = opened(patience_seconds=0.0), False

    async def probe() -> bool:
        return is_up

    waiting = asyncio.create_task(breaker.wait_until_up(probe, is_unlimited=True))
    await asyncio.sleep(30)
    assert not waiting.done()
    is_up = True
    await waiting


async def test_another_request_takes_over_a_cancelled_probe() -> None:
    """The request that waits to probe is cancelled: the next one takes over."""
    breaker = opened()
    first = asyncio.create_task(breaker.wait_until_up(unreachable))
    second = asyncio.create_task(breaker.wait_until_up(available))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert not breaker.is_open


async def test_a_failure_after_a_probe_reopens_with_longer_pauses() -> None:
    breaker = opened()
    await breaker.wait_until_up(available)
    pause = breaker._pause_seconds  # private: the pause itself is drawn at random
    breaker.failed(failure())
    assert breaker.is_open
    assert breaker._pause_seconds > pause or pause == 0.2  # private: see above
    breaker.succeeded()  # a request that started before the outage
    assert not breaker.is_open


@pytest.mark.parametrize("status", [409, 403, 404])
async def test_refusals_do_not_open_the_breaker(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conflicts and expired credentials are retried, and do not count as failures of the server."""
    monkeypatch.setattr(retry, "RETRIES_MAX", 0)
    policy = retries()
    breaker = policy.breaker("s3://b")
    for _ in range(2 * FAILURES_TO_OPEN):
        with pytest.raises(StoreUnavailableError):
            await run(policy, breaker, unreachable, failing(9, lambda: failure(status=status))[0])
    assert not breaker.is_open


async def test_no_request_is_sent_while_the_breaker_is_open(clock: VirtualTime) -> None:
    policy = retries(store_timeout_seconds=0.3)
    breaker = policy.breaker("s3://b")
    request, calls = failing(10**9)
    for _ in range(20):
        with pytest.raises(StoreUnavailableError):
            await run(policy, breaker, unreachable, request)
    assert len(calls) <= FAILURES_TO_OPEN + 1
    assert policy.breaker("s3://other") is not breaker
    assert await run(policy, policy.breaker("s3://other"), unreachable, failing(0)[0]) == "done"


# --- damaged data --------------------------------------------------------------------------------------------------


def chunk_of(data: bytes) -> tuple[FileEntry, ByteRange, str]:
    return FileEntry("file", len(data), (digest_of(data),)), ByteRange(0, len(data)), digest_of(data)


class Recovering(LocalStore):
    """Behind a network: a damaged answer may be requested again. The first ``damages`` answers become ``damaged``."""

    damages, damaged, reconnects = 0, b"", 0

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> bytes:
        data = await super().get_range(key, byte_range, if_match=if_match)
        self.damages -= 1
        return bytes(data) if self.damages < 0 else self.damaged

    async def reconnect(self, damage: TierckptError) -> None:
        self.reconnects += 1

    async def again(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return await work()

    async def available(self) -> bool:
        return False

    def probe_soon(self) -> None: ...


@pytest.mark.parametrize("damaged", [b"dat4", b"dat"])
async def test_data_damaged_in_transit_is_fetched_again(tmp_path: Path, damaged: bytes) -> None:
    store = Recovering(tmp_path)
    store.damages, store.damaged = mover_retry.READS_MAX - 1, damaged
    await store.put("file", b"data")
    assert bytes(await get_checked(store, *chunk_of(b"data"))) == b"data"
    assert store.reconnects == mover_retry.READS_MAX - 1


async def test_persistent_damage_raises(tmp_path: Path) -> None:
    store = Recovering(tmp_path)
    await store.put("file", b"dat4")
    with pytest.raises(IntegrityError, match="bytes 0-4 of file"):
        await get_checked(store, *chunk_of(b"data"))
    assert store.reconnects == mover_retry.READS_MAX - 1


async def test_a_disk_is_read_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await store.put("file", b"dat4")
    reads = 0

    async def read() -> None:
        nonlocal reads
        reads += 1
        await get_checked(store, *chunk_of(b"data"))

    with pytest.raises(IntegrityError):
        await mover_retry.verified(store, read)
    assert reads == 1
