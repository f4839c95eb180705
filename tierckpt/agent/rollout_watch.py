"""Looks at all nodes, through the agent of this one, and finds the version that they fill."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import TypeVar

from ..cache.pool import Pool
from ..config import Settings
from ..errors import TierckptError
from ..ipc.agent_client import AgentClient
from ..peer.membership import Member, member_of
from ..peer.peer_client import PeerClient
from ..types import Json
from .rollout import Rollout, rows

T = TypeVar("T")

ASK_SECONDS = 2.0
ASKED_MAX = 512
"""Nodes that are looked at; of more, those first by name."""
ASKED_AT_A_TIME = 32


class RolloutWatch:
    """One version on its way to all nodes. ``look`` asks each of them once; ``rollout`` is what they have told.

    Args:
        uri: whose; None: what most nodes are filling.
    """

    def __init__(self, uri: str | None, settings: Settings) -> None:
        self.uri, self.settings = uri, settings
        self.rollout: Rollout | None = None
        self.members = 0
        self._before: Mapping[str, Json | None] = {}
        self._contact = AgentClient(settings)
        self._client: PeerClient | None = None
        self._gate = asyncio.Semaphore(ASKED_AT_A_TIME)

    async def look(self, *, start: bool = True) -> None:
        """Ask each node what it has.

        Args:
            start: start an agent when none runs on this node.

        Raises:
            TierckptError: the agent of this node refuses, or is not there.
        """
        answer = await asyncio.to_thread(self._contact.ask, {"op": "peers"}, start=start)
        live = [member_of(row) for row in answer["live"][:ASKED_MAX]]
        client = self._client = self._client or PeerClient(self.settings, member_of(answer["me"]))
        statuses = await self._all({member.name: client.status(member) for member in live})
        self.members = len(live)
        if self.rollout is None or (self.uri is None and self.rollout.is_done):
            self._find(statuses)
        if self.rollout is not None:
            await self._look(self.rollout, client, live, statuses)

    async def close(self) -> None:
        self._contact.close()
        if self._client is not None:
            await self._client.close()

    async def _look(
        self, rollout: Rollout, client: PeerClient, members: Sequence[Member], statuses: Mapping[str, Json | None]
    ) -> None:
        version, size = rollout.version, rollout.chunk_size_bytes
        asks = {
            member.name: client.held(member, version, size, after=rollout.node(member.name).after)
            for member in members
            if not rollout.node(member.name).is_whole
        }
        held = await self._all(asks)
        gone = {node.name: None for node in rollout.part if node.name not in statuses}  # left, or dead
        rollout.take({**held, **gone}, statuses, time.monotonic())

    async def _all(self, asks: Mapping[str, Awaitable[T]]) -> dict[str, T | None]:
        """Ask some at a time; None for who does not answer."""

        async def one(ask: Awaitable[T]) -> T | None:
            try:
                async with self._gate, asyncio.timeout(ASK_SECONDS):
                    return await ask
            except (TierckptError, OSError, TimeoutError):
                return None

        return dict(zip(asks, await asyncio.gather(*map(one, asks.values())), strict=True))

    def _find(self, statuses: Mapping[str, Json | None]) -> None:
        """What most nodes are filling now, of the URI that was asked for; else what is whole on this node already."""
        found: Counter[tuple[bool, str, str, int]] = Counter()
        for status in statuses.values():
            found.update(fill for fill in _fills(status) if self.uri in (None, fill[1]))
        new: Rollout | None = None
        if found:
            _, uri, version, size = max(found, key=lambda key: (key[0], found[key]))
            new = Rollout(uri, version, size, time.monotonic())
        elif self.rollout is None and self.uri is not None:
            for row in Pool(self.settings).rows():
                if row.uri == self.uri and row.state == "complete":
                    new = Rollout(row.uri, row.version, self.settings.chunk_size_bytes, time.monotonic())
        if new is not None and (self.rollout is None or new.version != self.rollout.version):
            new.take({}, self._before, new.now)  # what nodes said when none of them was filling it yet
            self.rollout = new
        self._before = statuses


def _fills(status: Json | None) -> Iterator[tuple[bool, str, str, int]]:
    """What a node says it fills: (a process is at it, URI, version, chunk size). What is none is left out."""
    for fill in rows((status or {}).get("fills")):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            version, size = str(fill["version"]), int(fill["chunk_size_bytes"])
            if re.fullmatch(r"[0-9a-f]{32}", version) and size > 0:
                yield fill["live"] is True, str(fill["uri"]), version, size
