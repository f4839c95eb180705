"""Fills a cache entry together with the other nodes: joins the node cache (cache/entry.py) with its peers
(peer/fetch/fetch_session.py).

Invariants:
    E1  Peers are extra. Where no agent can be reached or started, or it takes no part in the cluster, everything is
        read from the store as if there were none; that is logged once.
    E2  Small things are not worth asking around for: they are read from the store.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ...cache.file_set import FileSet
from ...cache.partial_entry import PartialEntry
from ...cache.peer_fill import StoreReader
from ...config import Settings
from ...errors import TierckptError
from ...ipc.agent_client import own_contact
from ...telemetry import logger
from ...types import Json
from ..membership import Member, member_of

if TYPE_CHECKING:
    from .fetch_session import ClusterView, FetchSession

log = logger("prefetch")

SMALL_BYTES = 1 << 20
ANSWER_SECONDS = 15.0


class PeerJoiner:
    """Joins fills with the node's peers, for one ``Settings``. Runs on one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._is_told = False

    async def join(self, cached: StoreReader, filling: PartialEntry) -> FetchSession | None:
        """Return the session of a fetch, started; None to read from the store (E1, E2)."""
        if filling.frozen.size_bytes < SMALL_BYTES:
            return None
        agent = _Agent(self.settings, filling.frozen, cached.target)
        try:
            from ..peer_client import PeerClient
            from .fetch_session import FetchSession, LocalChunks

            session = FetchSession(
                filling.frozen,
                LocalChunks(cached, filling),
                agent.view,
                lambda me: PeerClient(self.settings, me),
                tell=agent.tell,
                leave=agent.leave,
            )
            await session.start()
            return session
        except (TierckptError, ImportError, OSError, KeyError, ValueError) as error:
            await agent.leave()
            log.log(logging.DEBUG if self._is_told else logging.WARNING, "reading without peers: %s", error)
            self._is_told = True
            return None


class _Agent:
    """This node's agent, on a connection of its own: while it lasts, what lands is served."""

    def __init__(self, settings: Settings, frozen: FileSet, directory: str) -> None:
        self._contact = own_contact(settings)
        self._version, self._directory = frozen.version, directory

    async def view(self, is_fetching: bool) -> ClusterView:
        from .fetch_session import ClusterView

        message: Json = {"op": "peers", "version": None, "directory": None}
        if is_fetching:
            message |= {"version": self._version, "directory": self._directory}
        answer = await asyncio.to_thread(self._contact.ask, message, timeout_seconds=ANSWER_SECONDS)
        live: list[Member] = [member_of(row) for row in answer["live"]]
        interested, slow_to = (frozenset(map(str, answer.get(key, ()))) for key in ("interested", "slow_to"))
        return ClusterView(member_of(answer["me"]), tuple(live), interested, slow_to)

    async def tell(self, report: Json) -> None:
        message = {"op": "fetched", "version": self._version, "report": report}
        await asyncio.to_thread(self._contact.ask, message, start=False)

    async def leave(self) -> None:
        await asyncio.to_thread(self._contact.close)
