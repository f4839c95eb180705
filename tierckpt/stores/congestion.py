"""How many GETs one store is asked at a time: as many as its callers like, until one of them gets too little.

GETs share a path. On one that is narrow, or shared with many other nodes, many GETs move too little each, count as
hung, are broken off, and are asked again: nothing arrives, for ever. So the number is halved when one was too slow,
and grows by one each time as many as are allowed have gone well.

Source: additive increase, multiplicative decrease (RFC 5681, 3.1).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator

from ..errors import StoreUnavailableError
from ..telemetry import logger

log = logger("stores.congestion")

GETS_MAX = 1 << 20
"""More than anybody asks for."""


class Congestion:
    """The GETs of one store under way. Of one event loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gets_max: float = GETS_MAX
        """No limit until a GET has been too slow."""
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._reduced_at = -math.inf

    @contextlib.asynccontextmanager
    async def get(self) -> AsyncIterator[None]:
        """One GET. First come, first served; whoever waits does so for others that end, or are broken off."""
        await self._begin()
        begun = time.monotonic()
        try:
            yield
        except StoreUnavailableError as error:
            if error.context.get("too_slow"):
                self._reduce(begun)
            raise
        else:
            self.gets_max = min(GETS_MAX, self.gets_max + 1 / self.gets_max)
        finally:
            self._end()

    async def _begin(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._wake()
        try:
            await turn  # whoever set it has counted us in
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end()
            raise

    def _end(self) -> None:
        self._running -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting and (self._waiting[0].done() or self._running + 1 <= self.gets_max):
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)

    def _reduce(self, begun: float) -> None:
        """Halve it, once for all that were under way at the same time."""
        if begun < self._reduced_at:
            return
        self._reduced_at = time.monotonic()
        self.gets_max = max(1.0, self._running // 2)
        log.info("%s moves too little: %d GETs at a time from here on", self.name, self.gets_max)
