"""The poll loop of the package, with a deadline, and the warning of a long wait."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from .resources import start_if_possible

GROWTH = 1.5
"""A wait ends at most half its length late."""


class Pauses(NamedTuple):
    first_seconds: float
    longest_seconds: float


BRIEF = Pauses(0.001, 0.02)
"""For a lock held for a few system calls, and for waits of a person or a training step."""
LOCAL = Pauses(0.005, 0.1)
"""For waits for another process of this node."""
SHARED = Pauses(0.05, 2.0)
"""For waits for other nodes, where a check costs a request."""
HANG_SECONDS = 0.2
"""Background work without progress for this long hangs. Training waits at most twice as long."""
LATE = 1.25


class Poll:
    """Iterator of checks: the first at once, then after growing pauses, the last at the deadline.

    ``for`` sleeps, ``async for`` lets the event loop run::

        for _ in Poll(timeout_seconds, LOCAL):
            if is_done():
                break
        else:
            raise OperationTimeoutError(...)
    """

    def __init__(self, timeout_seconds: float = math.inf, pauses: Pauses = LOCAL) -> None:
        self._deadline = time.monotonic() + timeout_seconds
        self._pause, self._longest = pauses
        self._has_looked = False

    def __iter__(self) -> Poll:
        return self

    def __next__(self) -> None:
        if self._has_looked and not self.pause():
            raise StopIteration
        self._has_looked = True

    def __aiter__(self) -> Poll:
        return self

    async def __anext__(self) -> None:
        if self._has_looked and not await self.pause_async():
            raise StopAsyncIteration
        self._has_looked = True

    def pause(self) -> bool:
        """Return False, at once, after the deadline."""
        seconds = self._next_pause()
        if seconds > 0:
            time.sleep(seconds)
        return seconds > 0

    async def pause_async(self) -> bool:
        seconds = self._next_pause()
        if seconds > 0:
            await asyncio.sleep(seconds)
        return seconds > 0

    def _next_pause(self) -> float:
        pause, self._pause = self._pause, min(self._pause * GROWTH, self._longest)
        return min(pause, self._deadline - time.monotonic())


def wait_while(work: Sequence[Future[Any]], progress: Callable[[], object]) -> bool:
    """Return False if ``progress`` stops changing. A late check, without CPU time, does not count."""
    seen, looked_at = None, time.monotonic()
    while futures.wait(work, HANG_SECONDS).not_done:
        now, is_late = progress(), time.monotonic() - looked_at > LATE * HANG_SECONDS
        if now == seen and not is_late:
            return False
        seen, looked_at = now, time.monotonic()
    return True


ANNOUNCED_AFTER_SECONDS = 1.0
ANNOUNCED_EVERY_SECONDS = 10.0


@contextmanager
def announced(
    log: logging.Logger, describe: Callable[[], str], first_seconds: float = ANNOUNCED_AFTER_SECONDS
) -> Iterator[None]:
    """Log ``describe()`` as a warning after ``first_seconds`` or once it is not empty, then every ten seconds."""
    is_done = threading.Event()

    def tell() -> None:
        pause = first_seconds
        while not is_done.wait(pause):
            text = describe()
            pause = ANNOUNCED_EVERY_SECONDS if text else first_seconds
            if text:
                log.warning("%s", text)

    thread = threading.Thread(target=tell, name="tierckpt-announce", daemon=True)
    start_if_possible(thread)
    try:
        yield
    finally:
        is_done.set()
