"""Limits concurrent GETs per store: halved after a GET that was too slow (RFC 5681, 3.1).

On a narrow path, many concurrent GETs would all be cancelled as hung. A 503 only waits: retry.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable

from ..errors import StoreUnavailableError
from ..telemetry import logger
from ..types import Buffer

log = logger("stores.get_concurrency")

BYTES_PER_SECOND_MIN = 16 << 10
"""A slower request counts as hung: it is aborted and retried."""
WINDOW_SECONDS = 15.0

GETS_MAX = 1 << 20

GROWTH_RATE_RATIO = 2.0

CROWDED_RETRIES_MAX = 8


class GetConcurrency:
    def __init__(self, name: str, least_bytes_per_second: int) -> None:
        self.name = name
        self._ample_bytes_per_second = GROWTH_RATE_RATIO * least_bytes_per_second
        self.gets_max: float = GETS_MAX
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._reduced_at = -math.inf
        self._arrived_at = -math.inf

    async def run(self, get: Callable[[], Awaitable[Buffer]]) -> Buffer:
        """Run one GET, first come, first served.

        A GET that is slow among others is repeated once fewer run, at most ``CROWDED_RETRIES_MAX`` times. A GET that is
        slow alone has failed: its error has the seconds in the queue (``crowded_seconds``).
        """
        asked_at = time.monotonic()
        for crowded_retries in range(CROWDED_RETRIES_MAX + 1):
            await self._begin()
            started_at, concurrent_gets = time.monotonic(), self._running
            try:
                data = await get()
                self._arrived_at = time.monotonic()
                if len(data) >= (self._arrived_at - started_at) * self._ample_bytes_per_second:
                    self.gets_max = min(GETS_MAX, self.gets_max + 1 / self.gets_max)
                return data
            except StoreUnavailableError as error:
                concurrent_gets = max(concurrent_gets, self._running)
                is_crowded = False
                if error.context.get("too_slow"):
                    self.reduce(started_at)
                    is_alive = error.context.get("moved_bytes") or self._arrived_at > started_at
                    is_crowded = concurrent_gets > 1 and bool(is_alive)
                if not is_crowded or crowded_retries == CROWDED_RETRIES_MAX:
                    error.context["crowded_seconds"] = round(started_at - asked_at, 1)
                    raise
            finally:
                self._end()
        raise AssertionError("unreachable")

    async def _begin(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self.wake()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._end()
            raise

    def _end(self) -> None:
        self._running -= 1
        self.wake()

    def wake(self) -> None:
        while self._waiting and (self._waiting[0].done() or self._running + 1 <= self.gets_max):
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._running += 1
                waiter.set_result(None)

    def reduce(self, started_at: float) -> None:
        """Halve it, once for all GETs that ran at the same time."""
        if started_at < self._reduced_at:
            return
        self._reduced_at = time.monotonic()
        self.gets_max = max(1.0, self._running // 2)
        log.info("%s moves too little: %d GETs at a time from here on", self.name, self.gets_max)
