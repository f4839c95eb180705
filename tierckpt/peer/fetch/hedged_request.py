"""The requests for one chunk: one, or two when the first is late. The first answer counts."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from ...cache.peers import ReceivedChunk
from ...errors import TierckptError
from .scheduler import SHARED, ChunkRequest, Schedule
from .stats import Sources

LATE_SECONDS = 0.25


class Requests(Protocol):
    """What makes the requests, and counts them (``session.FetchSession``)."""

    requests: dict[int, asyncio.Task[str]]
    sources: Sources

    @property
    def schedule(self) -> Schedule: ...

    async def ask(self, ask: ChunkRequest, into: memoryview) -> str: ...

    def came(self, ask: ChunkRequest, seconds: float) -> None: ...

    def failed(self, ask: ChunkRequest, error: BaseException | None) -> None: ...


class HedgedRequest:
    """Ends, whatever comes, with nothing under way that would write to the caller's memory."""

    def __init__(self, swarm: Requests, ordinal: int, into: memoryview) -> None:
        self._swarm, self._ordinal, self._into = swarm, ordinal, into
        self.running: dict[asyncio.Task[str], tuple[ChunkRequest, memoryview, float]] = {}
        self.tried: set[str | None] = set()
        self.store_error: BaseException | None = None

    def begin(self, ask: ChunkRequest) -> None:
        is_second = any(memory is self._into for _, memory, _ in self.running.values())
        memory = memoryview(bytearray(len(self._into))) if is_second else self._into
        task = asyncio.ensure_future(self._swarm.ask(ask, memory))
        self.running[task] = (ask, memory, time.monotonic())
        self._swarm.requests[id(ask)] = task

    async def wait(self) -> ReceivedChunk | None:
        """Wait for an answer, or until a second one should be asked for; None when there is nothing yet."""
        schedule = self._swarm.schedule
        now = time.monotonic()
        due = min(schedule.hedge_at(ask) for ask, _, _ in self.running.values())
        done, _ = await asyncio.wait(
            self.running, timeout=max(due - now, LATE_SECONDS), return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            brought = await self._finished(task)
            if brought is not None:
                return brought
        if not done and time.monotonic() >= due:
            other = schedule.hedge(self._ordinal, time.monotonic())
            if other is not None:
                self._swarm.sources.hedges += 1
                self.begin(other)
        return None

    async def _finished(self, task: asyncio.Task[str]) -> ReceivedChunk | None:
        ask, memory, begun = self.running.pop(task)
        self._swarm.requests.pop(id(ask), None)
        self.tried.add(ask.source)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._swarm.failed(ask, error)
            if error is not None and not isinstance(error, TierckptError | OSError | TimeoutError):
                raise error
            if ask.source is SHARED and error is not None:
                self.store_error = error
            return None
        await self.end()
        if memory is not self._into:
            self._into[:] = memory
        self._swarm.came(ask, time.monotonic() - begun)
        return ReceivedChunk(task.result(), ask.source)

    async def end(self) -> None:
        """Break off what is still under way, and wait until nothing writes any more."""
        left = dict(self.running)
        self.running.clear()
        for task, (ask, _, _) in left.items():
            task.cancel()
            self._swarm.requests.pop(id(ask), None)
        if left:
            await asyncio.wait(left)
        for task, (ask, _, _) in left.items():
            if not task.cancelled():
                task.exception()  # it has been seen
            self._swarm.failed(ask, None)
