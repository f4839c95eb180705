"""Retries of store requests after a 503 SlowDown, a 429, a timeout or a lost connection.

``Retries.again`` repeats a request after a random wait of up to 0.2, 0.4, ... 3.2 s, if the budget allows, five times
at most and for ``store_timeout_seconds`` (60 s). One ``Retries`` spans all stores of a mover:
    R1  Retries are at most a share of the successful requests, plus a small floor (``RetryBudget``).
    R2  A store that does not answer at all gets one probe at a time, with growing pauses (``StoreBreaker``).

Each layer has one owner of retries: the clients' own are off, except for the parts of a large object
(``PART_RETRIES_MAX``). A drain repeats all of this for seven days (drain/drainer.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import Settings
from ..errors import StoreUnavailableError, TierckptError
from ..poll import Poll
from ..quantities import human_bytes
from ..telemetry import RETRIES, logger
from ..types import Json, Tier
from . import get_concurrency
from .get_concurrency import GetConcurrency

if TYPE_CHECKING:
    from .bucket import Bucket


Probe = Callable[[], Awaitable[bool]]

FAILURES_TO_OPEN = 5
"""Consecutive failures after which a store counts as down."""
PROBE_PAUSE_SECONDS_MIN = 0.5
PROBE_SECONDS_MAX = 10.0
OUTAGE_WAIT_SECONDS = 5.0
"""Callers wait so long from an outage's start: a save must not wait for a shared tier that is down."""


class StoreBreaker:
    """State of one store; its callers wait here during an outage (R2). Logs an outage once per process."""

    def __init__(
        self,
        name: str,
        pause_seconds_max: float,
        outage_wait_seconds: float = OUTAGE_WAIT_SECONDS,
        waiting_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.name, self._waiting_bytes = name, waiting_bytes
        self._reported_at = 0.0
        self._ends_with_drain = False
        self.ended_at = -math.inf
        """End of the last logged outage (monotonic): its requests may still be running."""
        self.outage_wait_seconds = outage_wait_seconds
        self.is_open = False
        self._pause_seconds_max = pause_seconds_max
        self._pause_seconds = PROBE_PAUSE_SECONDS_MIN
        self._failures = 0
        self._down_since = 0.0
        self._next_probe_at = 0.0
        self._last_error = self._last_hint = ""
        self._failing_since_unix_seconds = 0.0
        self._probe_lock = asyncio.Lock()

    def succeeded(self) -> None:
        if not self._ends_with_drain:
            self.drained()
        self.is_open = False
        self._failures = 0
        self._down_since = self._failing_since_unix_seconds = 0.0
        self._pause_seconds = PROBE_PAUSE_SECONDS_MIN

    def drained(self) -> None:
        if self.is_reported:
            log.info("%s answers again after %.1f s", self.name, time.time() - self._reported_at)
            self._reported_at, self.ended_at, self._ends_with_drain = 0.0, time.monotonic(), False

    @property
    def outage(self) -> Json | None:
        if not self._failing_since_unix_seconds:
            return None
        return {
            "store": self.name,
            "cause": self._last_error,
            "remedy": self._last_hint,
            "since_unix_seconds": self._failing_since_unix_seconds,
            "next_try_seconds": max(0.0, self._next_probe_at - time.monotonic()) if self.is_open else 0.0,
        }

    def failed(self, error: TierckptError) -> None:
        self._last_error, self._last_hint = error.message, error.hint
        self._failing_since_unix_seconds = self._failing_since_unix_seconds or time.time()
        self._failures += 1
        if not self.is_open and self._failures >= FAILURES_TO_OPEN:
            self.is_open = True
            if not self._down_since:
                self._down_since = time.monotonic()
            self._plan_probe()
            self.report(error.message, error.hint, self._failing_since_unix_seconds)
        error.is_logged = self.is_reported

    @property
    def is_reported(self) -> bool:
        return self._reported_at > 0

    def report(self, cause: str, remedy: str, since_unix_seconds: float, *, ends_with_drain: bool = False) -> None:
        """Log an outage once, until ``succeeded``; with ``ends_with_drain`` until ``drained``."""
        if self.is_reported:
            return
        self._reported_at, self._ends_with_drain = since_unix_seconds, ends_with_drain
        next_try_seconds = max(0.0, self._next_probe_at - time.monotonic()) if self.is_open else 0.0
        waiting_bytes = self._waiting_bytes.get(self.name, 0)
        log.warning(
            "%s does not answer: %s (since %s, %s, %s for it)%s",
            self.name,
            cause,
            time.strftime("%H:%M:%S", time.localtime(since_unix_seconds)),
            f"next attempt in {next_try_seconds:.1f} s" if next_try_seconds else "requests are under way",
            f"{human_bytes(waiting_bytes)} wait" if waiting_bytes else "nothing waits",
            f". {remedy}" if remedy else "",
            extra={
                "store": self.name,
                "cause": cause,
                "since_unix_seconds": since_unix_seconds,
                "next_try_seconds": next_try_seconds,
                "waiting_bytes": waiting_bytes,
            },
        )

    def probe_soon(self) -> None:
        """Let the next caller send a probe at once, for a waiter that polls about once a second."""
        self._next_probe_at = 0.0

    def _plan_probe(self) -> None:
        self._next_probe_at = time.monotonic() + self._pause_seconds * random.uniform(0.5, 1.0)
        self._pause_seconds = min(2 * self._pause_seconds, self._pause_seconds_max)

    async def wait_until_up(self, probe: Probe, *, is_unlimited: bool = False) -> None:
        """Return when a request may be sent: at once while the store is up.

        The first caller probes; its response releases all. Raises StoreUnavailableError after ``outage_wait_seconds``
        of the outage, unless ``is_unlimited``.
        """
        while self.is_open:
            left = self._down_since + self.outage_wait_seconds - time.monotonic()
            is_due = time.monotonic() >= self._next_probe_at and not self._probe_lock.locked()
            if left <= 0 and not (is_unlimited or is_due):
                raise self._unavailable()
            try:
                async with asyncio.timeout(None if is_unlimited else max(left, PROBE_SECONDS_MAX if is_due else 0.0)):
                    async with self._probe_lock:
                        await self._probe_when_due(probe)
            except TimeoutError:
                continue
            if self.is_open and is_due and left <= 0 and not is_unlimited:
                raise self._unavailable()

    async def _probe_when_due(self, probe: Probe) -> None:
        while self.is_open:
            await asyncio.sleep(max(0.0, self._next_probe_at - time.monotonic()))
            if not self.is_open:
                return
            self._plan_probe()  # before the probe: a cancelled one counts
            if await probe():
                # Half open: the first failure opens it again.
                self.is_open = False
                self._failures = FAILURES_TO_OPEN - 1
            elif time.monotonic() > self._down_since + self.outage_wait_seconds:
                return

    def _unavailable(self) -> StoreUnavailableError:
        error = StoreUnavailableError(
            f"{self.name} is down: {self._last_error}",
            hint=f"{self._last_hint or 'Try again later'}. It is probed until it answers",
            tier=Tier.SHARED,
            down_seconds=round(time.monotonic() - self._down_since, 1),
        )
        error.is_logged = self.is_reported
        return error


log = logger("stores.retry")

T = TypeVar("T")

FLOOR_RETRIES = 10.0
FLOOR_RETRIES_PER_SECOND = 1.0
BUDGET_RETRIES_MAX = 100.0

RETRY_SHARE_MAX = 0.15
"""Retries per successful request (R1)."""

RETRIES_MAX = 5
BACKOFF_SECONDS_MIN = 0.2
BACKOFF_SECONDS_MAX = BACKOFF_SECONDS_MIN * 2 ** (RETRIES_MAX - 1)

PAUSE_SECONDS_MAX = 30.0
"""Longest pause between two probes, and between two drain attempts."""


class RetryBudget:
    """A successful request earns a share of a retry, each retry costs one (R1)."""

    def __init__(self, share_max: float) -> None:
        self.share_max = share_max
        self._retries = FLOOR_RETRIES
        self._refilled_at = time.monotonic()

    def earn(self) -> None:
        self._retries = min(BUDGET_RETRIES_MAX, self._retries + self.share_max)

    def take(self) -> bool:
        now = time.monotonic()
        if self._retries < FLOOR_RETRIES:
            refill = (now - self._refilled_at) * FLOOR_RETRIES_PER_SECOND
            self._retries = min(FLOOR_RETRIES, self._retries + refill)
        self._refilled_at = now
        if self._retries < 1.0:
            return False
        self._retries -= 1.0
        return True

    async def wait(self, timeout_seconds: float) -> bool:
        """Pay for one retry; False if not in time."""
        async for _ in Poll(timeout_seconds):
            if self.take():
                return True
        return False


class Retries:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.budget = RetryBudget(RETRY_SHARE_MAX)
        self.counts: Counter[str] = Counter()
        self.waiting_bytes: Counter[str] = Counter()
        self._breakers: dict[str, StoreBreaker] = {}
        self._refusals: dict[str, tuple[str, float]] = {}
        self._get_concurrency: dict[str, GetConcurrency] = {}
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self.hub: Any = None

    def breaker(self, name: str) -> StoreBreaker:
        if name not in self._breakers:
            patience = min(OUTAGE_WAIT_SECONDS, self.settings.store_timeout_seconds)
            self._breakers[name] = StoreBreaker(name, PAUSE_SECONDS_MAX, patience, self.waiting_bytes)
        return self._breakers[name]

    def refused(self, run: str, operation: str, error: TierckptError) -> None:
        """Log one ERROR for refusals, until ``accepted`` for the same operation."""
        if run not in self._refusals:
            self._refusals[run] = operation, time.time()
            log.error("%s is refused by its store; saves stay on this node until they can be drained: %s", run, error)
        error.is_logged = True

    def is_refused(self, run: str) -> bool:
        return run in self._refusals

    def accepted(self, run: str, operation: str) -> None:
        if (refusal := self._refusals.get(run)) is not None and refusal[0] == operation:
            del self._refusals[run]
            log.info("%s is accepted by its store again after %.1f s", run, time.time() - refusal[1])

    @property
    def outages(self) -> list[Json]:
        return [trouble for breaker in self._breakers.values() if (trouble := breaker.outage) is not None]

    def get_concurrency(self, name: str) -> GetConcurrency:
        return self._get_concurrency.setdefault(name, GetConcurrency(name, get_concurrency.BYTES_PER_SECOND_MIN))

    def bucket(self, scheme: str, authority: str) -> Bucket:
        from .bucket import Bucket

        if (scheme, authority) not in self._buckets:
            self._buckets[scheme, authority] = Bucket(scheme, authority, self.counts)
        return self._buckets[scheme, authority]

    def close(self) -> None:
        for bucket in self._buckets.values():
            bucket.close()

    @contextlib.asynccontextmanager
    async def request(self, breaker: StoreBreaker, probe: Probe) -> AsyncIterator[None]:
        """One request, entered once the store is up; its outcome counts for ``breaker`` and the budget.

        Raises StoreUnavailableError, without a request, while the breaker is open.
        """
        await breaker.wait_until_up(probe)
        self.counts["requests"] += 1
        try:
            yield
        except StoreUnavailableError as error:
            self.counts["failures"] += 1
            # 401, 403, 404, 409 mean "not now" of a working server
            if error.context.get("moved_bytes") or error.context.get("status") in {401, 403, 404, 409}:
                breaker.succeeded()
            else:
                breaker.failed(error)
            raise
        except TierckptError:
            self._record_success(breaker)
            raise
        self._record_success(breaker)

    def _record_success(self, breaker: StoreBreaker) -> None:
        self.budget.earn()
        breaker.succeeded()

    async def again(self, work: Callable[[], Awaitable[T]], *, timeout_seconds: float = math.inf) -> T:
        """Retry ``work`` after transient failures, at most ``RETRIES_MAX`` times, paid from the budget.

        A GET's queueing time (``crowded_seconds``) does not count. Retries do not multiply: failures that a nested call
        has retried are raised.
        """
        from tenacity import AsyncRetrying, retry_if_result, wait_random_exponential

        started_at = time.monotonic()
        try:
            return await work()  # tenacity leaves 20 objects in cycles per call
        except StoreUnavailableError as error:
            failure = error
        attempts, deadline = 1, started_at + timeout_seconds + failure.context.get("crowded_seconds", 0.0)
        tries = AsyncRetrying(
            sleep=asyncio.sleep,
            wait=wait_random_exponential(BACKOFF_SECONDS_MIN, BACKOFF_SECONDS_MAX),
            retry=retry_if_result(bool),
            stop=lambda state: state.attempt_number > RETRIES_MAX or time.monotonic() >= deadline,
            retry_error_callback=lambda _: None,
        )
        try:
            async for one in tries:
                if one.retry_state.attempt_number > 1 and await self.take_retry(deadline):
                    attempts += 1
                    try:
                        return await work()
                    except StoreUnavailableError as error:
                        failure = error
                        deadline += error.context.get("crowded_seconds", 0.0)
                # With tenacity's frames the error itself would form a cycle.
                one.retry_state.set_result(not failure.context.keys() & {"down_seconds", "attempts"})
            failure.context.setdefault("attempts", attempts)
            raise failure
        finally:
            del failure  # breaks a reference cycle

    async def take_retry(self, deadline: float = math.inf) -> bool:
        """Take one retry from the budget; False if unavailable before ``deadline`` (monotonic)."""
        left = min(deadline - time.monotonic(), self.settings.store_timeout_seconds)
        if not await self.budget.wait(left):
            self.counts["retries_refused"] += 1
            return False
        self.counts["retries"] += 1
        RETRIES.emit(1, operation="request")
        return True
