"""A circuit breaker for each store: one that does not answer is asked by one probe at a time, ever more rarely (R2).

Everybody else waits for that probe, for a while, and goes on the moment it gets an answer. Retries of single requests
are in retry.py. That of the node's agent is ``ipc/agent_breaker.py``: it decides by one silence, on threads.

Source: Nygard, "Release It!".
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from ..errors import StoreUnavailableError, TierckptError
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

    def __init__(self, name: str, pause_seconds_max: float, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.name = name
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
        """A request was answered. Closes the breaker, whoever made the request."""
        if self._down_since:
            log.warning("%s answers again after %.1f s", self.name, time.monotonic() - self._down_since)
        self.is_open = False
        self._failures = 0
        self._down_since = self._failing_since_unix_seconds = 0.0
        self._pause_seconds = PROBE_PAUSE_SECONDS_MIN

    @property
    def trouble(self) -> Json | None:
        """What the store does not serve requests for, since its last answer; None while it answers."""
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
                log.warning("%s is down, probing it from now on: %s", self.name, error.message)
            self._plan_probe()

    def hasten(self) -> None:
        """Let the next caller send a probe at once, for one who waits and asks about once a second (R2)."""
        self._next_probe_at = 0.0

    def _plan_probe(self) -> None:
        self._next_probe_at = time.monotonic() + self._pause_seconds * random.uniform(0.5, 1.0)
        self._pause_seconds = min(2 * self._pause_seconds, self._pause_seconds_max)

    async def passed(self, probe: Probe, *, patient: bool = False) -> None:
        """Return when the store may be asked. At once while it is up.

        While it is down the callers form a line. The first of them sends the probe when one is due; when that is
        answered, all go on at once.

        Args:
            patient: wait as long as it takes, not only ``patience_seconds`` from when the store went down.

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
                # Half closed: the first failure opens it again, and the pauses stay as long as they had become.
                self.is_open = False
                self._failures = FAILURES_TO_OPEN - 1
            elif time.monotonic() > self._down_since + self.patience_seconds:
                return

    def _unavailable(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self.name} is down: {self._last_error}",
            hint=f"{self._last_hint or 'Try again later'}. It is probed until it answers",
            tier=Tier.SHARED,
            down_seconds=round(time.monotonic() - self._down_since, 1),
        )
