"""The agent's answers to the page's server beyond ``status``: history, runs, checkpoints, the cluster.

The server of the page may be another process (``tierckpt status --web``): it sends requests through the agent's
socket, and the agent reads stores with its own credentials.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from ..checkpoint.journal import JournalEntry
from ..mover import Mover
from ..types import Json, Progress
from . import history
from .cluster_drains import ClusterDrains
from .history import History
from .peer_service import PeerService
from .run_catalog import RunCatalog

DRAIN = "drain "
"""Of a drain, the beginning of ``Progress.what``."""
SLOT_MARGIN_SECONDS = 0.05
"""A sample is taken so long after the begin of its slot: a timer may fire a little early."""


class PageSource:
    """The answers of one agent. Runs on its loop.

    Args:
        status: returns the agent's status.
        peers: None where there are none.
    """

    def __init__(self, mover: Mover, status: Callable[[], Json], peers: PeerService | None) -> None:
        self._root = mover.settings.local_root
        self.history = History.read(self._root)
        self.runs = RunCatalog(mover)
        self.cluster = ClusterDrains(mover.settings, status, peers)
        self.entries: Sequence[JournalEntry] = ()
        """The journal, as the agent has read it last."""

    def moved(self, progress: Progress, size_bytes: int) -> None:
        """Note that ``size_bytes`` of a transfer have moved."""
        if progress.what.startswith(DRAIN):
            self.history.count_sent(progress.what.removeprefix(DRAIN), size_bytes)

    async def run(self) -> None:
        """Sample the drains, once in each slot of the history, until cancelled."""
        written_at = time.monotonic()
        while True:
            await asyncio.sleep(history.SAMPLE_SECONDS - time.time() % history.SAMPLE_SECONDS + SLOT_MARGIN_SECONDS)
            self.history.sample(self.entries, time.time())
            if time.monotonic() - written_at >= history.WRITE_SECONDS:
                written_at = time.monotonic()
                await self.write()

    async def write(self) -> None:
        """Keep the history for the next agent."""
        if (data := self.history.unwritten()) is not None:
            await asyncio.to_thread(history.write, self._root, data)

    async def close(self) -> None:
        await self.cluster.close()
        await self.write()

    async def answer(self, what: str, asked: Json) -> Json:
        """Answer the operation ``page``.

        Raises ValueError: there is no such page.
        """
        if what == "history":
            return self.history.to_json(str(asked.get("run", "")), asked.get("after"))
        if what == "run":
            return await self.runs.run(str(asked["uri"]))
        if what == "checkpoint":
            return await self.runs.checkpoint(str(asked["uri"]), str(asked.get("filter", "")))
        if what == "cluster":
            return await self.cluster.document()
        raise ValueError(f"no page {what!r}")
