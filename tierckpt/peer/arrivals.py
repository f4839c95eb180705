"""Requests that wait for a chunk to land on this node: one look at a time, for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from .holdings import Holdings

LOOK_SECONDS = 0.01
"""Who writes is another process. A look is two system calls (``Holdings.look_now``)."""


class Arrivals:
    """Runs on one event loop; close it. ``in_thread`` runs what has to wait for a disk."""

    def __init__(self, holdings: Holdings, in_thread: Callable[..., Awaitable[object]]) -> None:
        self._holdings, self._in_thread = holdings, in_thread
        self._awaited: dict[tuple[str, int], dict[int, set[asyncio.Future[None]]]] = {}
        self._looking: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def wait(self, version: str, chunk_size_bytes: int, ordinal: int, deadline: float) -> bool:
        """Return True when the chunk is seen to be here, False at ``deadline`` (``time.monotonic``)."""
        left, key = deadline - time.monotonic(), (version, chunk_size_bytes)
        if left <= 0:
            return False
        future = asyncio.get_running_loop().create_future()
        awaited = self._awaited.setdefault(key, {})
        awaited.setdefault(ordinal, set()).add(future)
        if key not in self._looking:
            self._looking[key] = asyncio.ensure_future(self._look(key, awaited))
        try:
            async with asyncio.timeout(left):
                await future
        except TimeoutError:
            return False
        finally:
            if waiting := awaited.get(ordinal):
                waiting.discard(future)
                if not waiting:
                    del awaited[ordinal]
        return True

    async def close(self) -> None:
        """Stop looking. Idempotent."""
        looking = list(self._looking.values())
        for task in looking:
            task.cancel()
        if looking:
            await asyncio.wait(looking)

    async def _look(self, key: tuple[str, int], awaited: dict[int, set[asyncio.Future[None]]]) -> None:
        """Look until nobody waits. Without an answer of a look, those who wait come to their deadline."""
        try:
            while awaited:
                await asyncio.sleep(LOOK_SECONDS)
                if not self._holdings.look_now(key[0]):
                    with contextlib.suppress(OSError):
                        await self._in_thread(self._holdings.locate, *key, 0)
                for ordinal in [one for one in awaited if self._holdings.has_seen(*key, one)]:
                    for future in awaited.pop(ordinal):
                        if not future.done():
                            future.set_result(None)
        finally:
            # Nothing is awaited between the last look at ``awaited`` and here: nobody can have come in between.
            del self._looking[key], self._awaited[key]
