"""The workers of a fill, and the order from which they take their chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.peer_node import CHUNK, begin, freeze, land
from tierckpt.cache.fetch_job import FetchJob, FetchStats
from tierckpt.cache.peers import NotNowError

DATA = {"weights": bytes(2 * CHUNK)}  # two chunks, hence two workers


class Turns:
    """Gives the first chunk out twice, the second time while the first worker still ends."""

    def __init__(self) -> None:
        self.given, self.planned = 0, False
        self.again, self.first_has_ended = asyncio.Event(), asyncio.Event()

    async def take(self) -> tuple[int, int] | None:
        self.given += 1
        if self.given == 2:
            await self.again.wait()
        elif self.given > 2:
            self.first_has_ended.set()
            return None
        self.planned = True
        return 0, 0

    def put_back(self, work: tuple[int, int]) -> None:
        self.planned = False

    def done(self, work: tuple[int, int]) -> None:
        self.put_back(work)


async def test_a_chunk_that_another_worker_has_taken_again_is_not_put_back_by_the_one_that_did_not_get_it(
    tmp_path: Path,
) -> None:
    frozen, order = freeze(DATA), Turns()
    filling = begin(tmp_path, frozen)
    was_planned: list[bool] = []

    @contextlib.asynccontextmanager
    async def claimed(*_: Any) -> AsyncIterator[str]:
        yield "fetch"

    async def fetch(*_: Any, keep: bool) -> None:
        if not was_planned:
            was_planned.append(order.planned)
            order.planned = False  # what was planned has been tried
            order.again.set()
            await asyncio.sleep(0.01)
            raise NotNowError
        await order.first_has_ended.wait()
        was_planned.append(order.planned)
        land(filling, DATA)

    cached = SimpleNamespace(
        frozen=frozen,
        swarm=SimpleNamespace(order=lambda todo, whole: order),
        fetches_max=2,
        gate=asyncio.Semaphore(2),
        idle=asyncio.Lock(),
        tally=FetchStats(),
        stall_seconds=60.0,
        claimed=claimed,
        fetch=fetch,
    )
    async with asyncio.timeout(60):
        await FetchJob(cached, filling, [0], lambda progress: None).run()  # type: ignore[arg-type]
    assert was_planned == [True, True]
    filling.close()
