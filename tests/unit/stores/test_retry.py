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

import pytest

from tests.contract.faults import Fault, FaultyStore, Kind
from tests.virtual_time import VirtualTime
from tierckpt.config import Settings
from tierckpt.errors import IntegrityError, ObjectNotFoundError, StoreUnavailableError
from tierckpt.format.manifest import FileEntry, digest_of
from tierckpt.stores import retry
from tierckpt.stores import verified_read as mover_retry
from tierckpt.stores.local import LocalStore
from tierckpt.stores.retry import FAILURES_TO_OPEN, FLOOR_RETRIES, Probe, Retries, RetryBudget, StoreBreaker
from tierckpt.stores.verified_read import get_checked
from tierckpt.types import ByteRange


def retries(**settings: object) -> Retries:
    return Retries(Settings.load(**settings))


@pytest.fixture
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries of one request, limited by the test's parameter."""
    monkeypatch.setattr(retry, "RETRIES_MAX", request.param)


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


def test_the_floor_is_spent_and_comes_back_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    budget = RetryBudget(0.1)
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]
    now[0] += 0.9
    assert not budget.take()
    now[0] += 0.2
    assert budget.take()
    now[0] += 1e6
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False], "no more than the floor"


def test_what_went_well_pays_for_retries_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_store_that_fails_half_of_the_time_is_not_asked_twice_as_much(
    clock: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise R1, over many requests side by side. Without a budget the share below would be 1."""
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
            await run(policy, breaker, always, request)
        except StoreUnavailableError:
            pass

    begun = clock.now
    for _ in range(20):
        await asyncio.gather(*(one() for _ in range(20)))
    paid = FLOOR_RETRIES + (clock.now - begun) * retry.FLOOR_RETRIES_PER_SECOND
    assert policy.counts["retries"] <= 0.1 * good + paid + 1
    assert policy.counts["retries_refused"] > 0
    assert asked == policy.counts["requests"]


async def always() -> bool:
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


async def test_what_may_pass_is_tried_again() -> None:
    policy = retries()
    request, calls = failing(3)
    assert await run(policy, policy.breaker("s3://b"), unreachable, request) == "done"
    assert len(calls) == 4
    assert policy.counts["retries"] == 3


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("few", [2], indirect=True)
async def test_the_last_failure_says_how_often_it_was_tried() -> None:
    policy = retries()
    request, calls = failing(99)
    with pytest.raises(StoreUnavailableError) as caught:
        await run(policy, policy.breaker("s3://b"), unreachable, request)
    assert len(calls) == 3
    assert caught.value.context["attempts"] == 3


@pytest.mark.parametrize(("context", "tries"), [({}, 1), ({"crowded_seconds": 0.2}, 2)], ids=["its own", "in a crowd"])
async def test_time_that_a_get_waited_for_others_is_not_its_own(
    context: dict[str, float], tries: int, clock: VirtualTime
) -> None:
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
async def test_what_does_not_pass_is_not_tried_again(error: Exception) -> None:
    policy = retries()
    request, calls = failing(1, lambda: error)
    with pytest.raises(type(error)):
        await run(policy, policy.breaker("s3://b"), unreachable, request)
    assert len(calls) == 1


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("few", [2], indirect=True)
async def test_retries_do_not_multiply() -> None:
    """Work that is tried again as a whole is not, when a request in it has used up its own attempts."""
    policy = retries()
    breaker = policy.breaker("s3://b")
    request, calls = failing(99)
    with pytest.raises(StoreUnavailableError):
        await policy.again(lambda: run(policy, breaker, unreachable, request))
    assert len(calls) == 3


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("few", [3], indirect=True)
async def test_a_budget_that_refuses_each_retry_ends_work_without_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: RetryBudget, timeout_seconds: float) -> bool:
        return False

    monkeypatch.setattr(RetryBudget, "wait", refuse)
    policy = retries()
    request, calls = failing(99)
    with pytest.raises(StoreUnavailableError):
        await policy.again(lambda: once(policy, policy.breaker("s3://b"), unreachable, request))
    assert len(calls) == 1
    assert policy.counts["retries_refused"] == 3


async def test_work_in_one_piece_is_tried_again_as_a_whole() -> None:
    policy = retries()
    breaker = policy.breaker("s3://b")
    request, calls = failing(2)
    assert await policy.again(lambda: once(policy, breaker, unreachable, request)) == "done"
    assert len(calls) == 3


async def test_a_pause_is_anything_up_to_its_backoff(clock: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """What a request holds."""


@pytest.mark.parametrize("failures", [0, 1, 99])
async def test_work_that_has_ended_keeps_no_memory(failures: int) -> None:
    """Training loops switch the garbage collector off: no cycle may hold the frames of a request."""
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


def test_one_good_answer_starts_the_count_anew() -> None:
    breaker = StoreBreaker("s3://b", 1.0)
    for _ in range(3):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failed(failure())
        breaker.succeeded()
    assert not breaker.is_open


def test_an_outage_says_how_much_waits_for_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = Retries(Settings.load(local_root=tmp_path))
    breaker = policy.breaker("s3://b")
    policy.waiting_bytes["s3://b"] += 3 << 20
    with caplog.at_level("WARNING", "tierckpt"):
        breaker.report("no answer", "", 0.0)
    assert "3.0 MiB wait" in caplog.text


async def test_one_probe_at_a_time_ever_more_rarely_and_all_go_on_at_once(clock: VirtualTime) -> None:
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


async def test_the_impatient_are_told_at_once_when_it_has_been_down_for_long(clock: VirtualTime) -> None:
    breaker = opened(patience_seconds=0.2)
    with pytest.raises(StoreUnavailableError, match="s3://b is down: busy"):
        await breaker.wait_until_up(unreachable)
    begun = clock.now
    with pytest.raises(StoreUnavailableError) as caught:
        await breaker.wait_until_up(unreachable)
    assert clock.now == begun
    assert caught.value.context["down_seconds"] >= 0.2


async def test_the_patient_wait_until_it_is_up(clock: VirtualTime) -> None:
    breaker, is_up = opened(patience_seconds=0.0), False

    async def probe() -> bool:
        return is_up

    waiting = asyncio.create_task(breaker.wait_until_up(probe, is_unlimited=True))
    await asyncio.sleep(30)
    assert not waiting.done()
    is_up = True
    await waiting


async def test_nobody_is_left_without_a_prober() -> None:
    """The one that waits to probe is cancelled: the next in line takes over."""
    breaker = opened()
    first = asyncio.create_task(breaker.wait_until_up(unreachable))
    second = asyncio.create_task(breaker.wait_until_up(always))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert not breaker.is_open


async def test_after_a_good_probe_one_failure_opens_it_again_with_longer_pauses() -> None:
    breaker = opened()
    await breaker.wait_until_up(always)
    pause = breaker._pause_seconds  # private: the pause itself is drawn at random
    breaker.failed(failure())
    assert breaker.is_open
    assert breaker._pause_seconds > pause or pause == 0.2  # private: see above
    breaker.succeeded()  # a request that was under way all the time
    assert not breaker.is_open


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("few", [0], indirect=True)
@pytest.mark.parametrize("status", [409, 403, 404])
async def test_a_refusal_is_an_answer(status: int) -> None:
    """Conflicts and expired credentials are tried again, and say nothing against the server."""
    policy = retries()
    breaker = policy.breaker("s3://b")
    for _ in range(2 * FAILURES_TO_OPEN):
        with pytest.raises(StoreUnavailableError):
            await run(policy, breaker, unreachable, failing(9, lambda: failure(status=status))[0])
    assert not breaker.is_open


async def test_while_it_is_down_no_request_is_made(clock: VirtualTime) -> None:
    policy = retries(store_timeout_seconds=0.3)
    breaker = policy.breaker("s3://b")
    request, calls = failing(10**9)
    for _ in range(20):
        with pytest.raises(StoreUnavailableError):
            await run(policy, breaker, unreachable, request)
    assert len(calls) <= FAILURES_TO_OPEN + 1
    assert policy.breaker("s3://other") is not breaker
    assert await run(policy, policy.breaker("s3://other"), unreachable, failing(0)[0]) == "done"


# --- damaged answers -----------------------------------------------------------------------------------------------


def chunk_of(data: bytes) -> tuple[FileEntry, ByteRange, str]:
    return FileEntry("file", len(data), (digest_of(data),)), ByteRange(0, len(data)), digest_of(data)


@pytest.mark.parametrize("kind", [Kind.CORRUPT, Kind.TRUNCATE])
async def test_damage_on_the_way_is_asked_for_again(tmp_path: Path, kind: Kind) -> None:
    store = FaultyStore(LocalStore(tmp_path), [Fault("get_range", kind, times=mover_retry.READS_MAX - 1)])
    await store.put("file", b"data")
    assert bytes(await get_checked(store, *chunk_of(b"data"))) == b"data"
    assert store.fired["reconnect"] == mover_retry.READS_MAX - 1


async def test_damage_that_stays_is_damage(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(tmp_path))
    await store.put("file", b"dat4")
    with pytest.raises(IntegrityError, match="bytes 0-4 of file"):
        await get_checked(store, *chunk_of(b"data"))
    assert store.fired["reconnect"] == mover_retry.READS_MAX - 1


async def test_a_disk_is_asked_once(tmp_path: Path) -> None:
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
