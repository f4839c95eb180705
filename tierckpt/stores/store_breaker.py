"""A circuit breaker for each store: a store that does not answer gets one probe at a time, with growing pauses (R2).

Everybody else waits for that probe, for a while, and goes on the moment it gets an answer. The breaker also logs the
outage for its process: one WARNING at the begin and one INFO at the end. Retries of single requests are in retry.py.
The breaker of the node's agent is ``ipc/agent_breaker.py``: it decides by one silence, on threads.

Source: Nygard, "Release It!".
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping

from ..errors import StoreUnavailableError, TierckptError
from ..quantities import human_bytes
from ..telemetry import logger
from ..types import Json, Tier

log = logger("stores.retry")

Probe = Callable[[], Awaitable[bool]]
"""Ask a store for something cheap. True when it answered, whatever it said."""

FAILURES_TO_OPEN = 5
"""Failures in a row, of any requests to one store, after which it counts as down."""
PROBE_PAUSE_SECONDS_MIN = 0.5
PROBE_SECONDS_MAX = 10.0
PATIENCE_SECONDS = 5.0
"""How long after a store went down its callers still wait for it. Later ones get the error at once: a save must not
wait for a shared tier that is away."""


class StoreBreaker:
    """Whether one store is up, and the one place where its callers wait while it is not (R2)."""

    def __init__(
        self,
        name: str,
        pause_seconds_max: float,
        patience_seconds: float = PATIENCE_SECONDS,
        waiting_bytes: Mapping[str, int] | None = None,
    ) -> None:
        """``waiting_bytes``: by store, the size of what drains of this process send there."""
        self.name = name
        self._waiting_bytes = waiting_bytes if waiting_bytes is not None else {}
        self._reported_at = 0.0
        """When (Unix seconds) the outage that was logged began; 0 without one."""
        self._ends_with_drain = False
        self.ended_at = -math.inf
        """The end of the last outage that was logged, in monotonic seconds: requests of it may still be under way."""
        self.patience_seconds = patience_seconds
        self.is_open = False
        self._pause_seconds_max = pause_seconds_max
        self._pause_seconds = PROBE_PAUSE_SECONDS_MIN
        self._failures = 0
        self._down_since = 0.0
        self._next_probe_at = 0.0
        self._last_error = self._last_hint = ""
        self._failing_since_unix_seconds = 0.0
        self._turn = asyncio.Lock()

    def succeeded(self) -> None:
        """Record a response, to any request. Closes the breaker."""
        if not self._ends_with_drain:
            self._end()
        self.is_open = False
        self._failures = 0
        self._down_since = self._failing_since_unix_seconds = 0.0
        self._pause_seconds = PROBE_PAUSE_SECONDS_MIN

    def drained(self) -> None:
        """Record the end of a drain to the store."""
        self._end()

    def _end(self) -> None:
        if self.is_reported:
            log.info("%s answers again after %.1f s", self.name, time.time() - self._reported_at)
            self._reported_at, self.ended_at, self._ends_with_drain = 0.0, time.monotonic(), False

    @property
    def trouble(self) -> Json | None:
        """Return the reason why the store has not served requests since its last response; None while it answers."""
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
        """A request was not answered, or by a server that cannot serve."""
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
        """Return True from the log record of an outage to the record of its end."""
        return self._reported_at > 0

    def report(self, cause: str, remedy: str, since_unix_seconds: float, *, ends_with_drain: bool = False) -> None:
        """Log that the store does not answer: once, until ``succeeded``.

        ``ends_with_drain``: until ``drained``, as the store may answer small requests, and no drain.
        """
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

    def hasten(self) -> None:
        """Let the next caller send a probe at once, for a waiter that asks about once a second (R2)."""
        self._next_probe_at = 0.0

    def _plan_probe(self) -> None:
        self._next_probe_at = time.monotonic() + self._pause_seconds * random.uniform(0.5, 1.0)
        self._pause_seconds = min(2 * self._pause_seconds, self._pause_seconds_max)

    async def passed(self, probe: Probe, *, patient: bool = False) -> None:
        """Return when a request may be sent: at once while the store is up.

        While it is down the callers form a line. The first of them sends the probe when one is due; when that is
        answered, all go on at once.

        Args:
            patient: wait without limit, not only ``patience_seconds`` from the beginning of the outage.

        Raises:
            StoreUnavailableError: it is down, and has been for longer than that.
        """
        while self.is_open:
            left = self._down_since + self.patience_seconds - time.monotonic()
            is_due = time.monotonic() >= self._next_probe_at and not self._turn.locked()
            if left <= 0 and not (patient or is_due):
                raise self._unavailable()
            try:
                async with asyncio.timeout(None if patient else max(left, PROBE_SECONDS_MAX if is_due else 0.0)):
                    async with self._turn:
                        await self._probe_when_due(probe)
            except TimeoutError:
                continue
            if self.is_open and is_due and left <= 0 and not patient:
                raise self._unavailable()

    async def _probe_when_due(self, probe: Probe) -> None:
        while self.is_open:
            await asyncio.sleep(max(0.0, self._next_probe_at - time.monotonic()))
            if not self.is_open:
                return  # a request that was under way has been answered meanwhile
            self._plan_probe()  # before the probe: one that is cancelled counts as well
            if await probe():
                # Half closed: the first failure opens it again, and the pauses keep their length.
                self.is_open = False
                self._failures = FAILURES_TO_OPEN - 1
            elif time.monotonic() > self._down_since + self.patience_seconds:
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
