"""Workers of a fill, and the order of their chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.peer_node import CHUNK, begin, freeze, land
from tierckpt.cache.chunk_writer import FetchStats
from tierckpt.cache.fetch_job import FetchJob, NotNowError, Work

DATA = {"weights": bytes(2 * CHUNK)}  # two chunks, so two workers


class Turns:
    """Hands out the first chunk twice, the second time while the first worker still finishes."""

    def __init__(self) -> None:
        self.given = 0
        self.put: list[object] = []
        self.again, self.first_has_ended = asyncio.Event(), asyncio.Event()

    async def take(self) -> Work | None:
        self.given += 1
        if self.given == 2:
            await self.again.wait()
        elif self.given > 2:
            self.first_has_ended.set()
            return None
        return Work(0, 0, f"request {self.given}")

    def put_back(self, work: Work) -> None:
        self.put.append(work.request)

    def done(self, work: Work) -> None:
        pass


async def test_a_worker_without_the_claim_does_not_put_back_the_chunk(tmp_path: Path) -> None:
    frozen, order = freeze(DATA), Turns()
    filling = begin(tmp_path, frozen)
    fetched: list[object] = []

    @contextlib.contextmanager
    def claimed(*_: Any) -> Iterator[str]:
        yield "fetch"

    filling.claimed = claimed  # type: ignore[method-assign, assignment]

    async def fetch(*_: Any, keep: bool, request: object) -> None:
        fetched.append(request)
        if len(fetched) == 1:
            order.again.set()
            await asyncio.sleep(0.01)
            raise NotNowError
        await order.first_has_ended.wait()
        land(filling, DATA)

    fetcher = SimpleNamespace(
        partial_entry=filling,
        writer=SimpleNamespace(stats=FetchStats(), streamed=()),
        peers=SimpleNamespace(order=lambda todo, whole: order),
        fetches_max=2,
        fetch_slots=asyncio.Semaphore(2),
        fetch=fetch,
    )
    async with asyncio.timeout(60):
        await FetchJob(fetcher, [0], lambda progress: None, 60.0).run()  # type: ignore[arg-type]
    assert fetched == ["request 1", "request 2"]
    assert order.put == []
    filling.close()
