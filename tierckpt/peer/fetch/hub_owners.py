"""Fetches each chunk of a Hub through its owner, which reads it at the first request (agent/hub_proxy.py).

O1  While all members are healthy and agree on the members, one member reads each chunk from the Hub, once. It
    requests the chunk from the next ranks first: after a change of members another node may have it.
O2  No two nodes wait for each other: an owner makes no node read, and a node without a chunk answers at once.
O3  An owner can cost time, never the chunk: one that is silent for ``SILENT_SECONDS``, or unreachable, is skipped
    for ``AVOID_SECONDS``. After ``STALL_SECONDS_MIN`` a node reads the chunk itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from ...cache.entry import STALL_SECONDS_MIN
from ...cache.fetch_job import InOrder, PeerSources, ReceivedChunk
from ...cache.partial_entry import PartialEntry
from ...cache.store_chunks import StoreChunks
from ...config import Settings
from ...errors import ObjectNotFoundError, PeerBusyError, TierckptError
from ...telemetry import BYTES, logger
from ...types import Tier
from ..membership import Member
from ..peer_catalog import Live
from ..peer_client import PeerClient
from ..peer_http import TARGET_BYTES_MAX, hub_target
from .scheduler import fraction

log = logger("peer")

SILENT_SECONDS: Final = 15.0
AVOID_SECONDS: Final = 30.0
RANKS_MAX: Final = 3
"""Owners that may fail before a node reads a chunk itself."""
HOLDERS_MAX: Final = 8
"""Members that may lack a chunk before its owner reads it from the Hub."""
VIEW_SECONDS: Final = 0.25
GONE_SECONDS: Final = 60.0
BUSY_SECONDS: Final = 0.05


class HubOwners:
    """Runs on one event loop; close it. ``is_owner``: this node reads for others."""

    def __init__(self, settings: Settings, live: Callable[[], Awaitable[Live]], *, is_owner: bool = False) -> None:
        self._settings, self._ask_live, self._is_owner = settings, live, is_owner
        self._me, self._refresh_at = "", 0.0
        self._seen: dict[str, tuple[Member, float]] = {}
        self._avoided: dict[str, float] = {}
        self._client: PeerClient | None = None

    async def join(self, chunks: StoreChunks, filling: PartialEntry) -> OwnerFill:
        return OwnerFill(self, chunks, filling)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def receive(self, uri: str, key: str, start: int, into: memoryview) -> ReceivedChunk | None:
        """Fill ``into`` from the owner of ``key``; None if this node must read it."""
        is_mine, failed, fits = self._is_owner, 0, len(hub_target(uri, start, len(into))) <= TARGET_BYTES_MAX
        members = await self._members() if fits else []
        for member in sorted(members, key=lambda member: fraction(f"{key}/{member.name}")):
            if member.name == self._me:
                is_mine, failed = True, 0
                continue
            if failed == (HOLDERS_MAX if is_mine else RANKS_MAX):
                return None
            if self._avoided.get(member.name, 0.0) > time.monotonic():
                continue
            try:
                digest = await self._ask(member, uri, start, into, is_mine)
            except ObjectNotFoundError:
                failed += 1
            except (TierckptError, OSError) as error:
                log.info("%s gets no requests for Hub files for %g s: %s", member.name, AVOID_SECONDS, error)
                self._avoided[member.name] = time.monotonic() + AVOID_SECONDS
            else:
                BYTES.emit(len(into), tier=Tier.PEER, direction="read")
                return ReceivedChunk(digest, member.name)
        return None

    async def _members(self) -> list[Member]:
        """Return members that were live lately: nodes notice a death at different times (O1)."""
        now = time.monotonic()
        if now >= self._refresh_at:
            with contextlib.suppress(TierckptError, OSError):
                live = await self._ask_live()
                self._me = live.me
                self._seen.update({member.name: (member, now) for member in live.members})
            self._refresh_at = now + VIEW_SECONDS
        return [member for member, at in self._seen.values() if now - at < GONE_SECONDS]

    async def _ask(self, member: Member, uri: str, start: int, into: memoryview, is_mine: bool) -> str:
        if self._client is None:
            self._client = PeerClient(self._settings, self._me)
        while True:
            with contextlib.suppress(PeerBusyError):
                return await self._client.hub_range(member, uri, start, into, SILENT_SECONDS, reads=not is_mine)
            await asyncio.sleep(BUSY_SECONDS)


class OwnerFill:
    slots = 16

    def __init__(self, owners: HubOwners, chunks: StoreChunks, filling: PartialEntry) -> None:
        self._owners, self._chunks, self._frozen = owners, chunks, filling.frozen
        self.sources = PeerSources()

    def order(self, todo: Iterable[tuple[int, int]], *, whole: bool) -> InOrder:
        return InOrder(todo)

    async def fetch_chunk(
        self, index: int, chunk: int, into: memoryview, request: object | None = None
    ) -> ReceivedChunk:
        item, at = self._frozen.files[index], self._frozen.chunk_range(index, chunk)
        uri = self._frozen.uri
        if not uri.endswith(f"/{item.path}"):
            uri = f"{uri}/{item.path}"
        received = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STALL_SECONDS_MIN):
                received = await self._owners.receive(uri, f"{item.etag}/{at.start}", at.start, into)
        return received or ReceivedChunk((await self._chunks.read(index, chunk, into))[1], None)

    async def chunk_written(self, index: int, chunk: int) -> None: ...

    async def close(self) -> None: ...
