"""How the cache fetches chunks from other nodes: protocols that ``peer/fetch/fetch_session.py`` implements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ..types import Json
from .partial_entry import PartialEntry
from .store_chunks import StoreChunks


@dataclass(frozen=True, slots=True)
class Work:
    """A chunk to fetch: a file, a chunk of it, and with peers the request for it that has been decided on."""

    index: int
    chunk: int
    request: object | None = None


class NotNowError(Exception):
    """No reachable node has the chunk now, but one is fetching it. Choose again."""


@dataclass(slots=True)
class ReceivedChunk:
    """A chunk that has come."""

    digest: str
    source: str | None
    """A member's name, or None: shared storage."""


class ChunkOrder(Protocol):
    """Which chunk comes next."""

    async def take(self) -> Work | None:
        """Return the next chunk; None if all are assigned."""

    def put_back(self, work: Work) -> None:
        """It was not fetched: it comes again."""

    def done(self, work: Work) -> None:
        """Record that it is fetched, or abandoned."""


@dataclass(slots=True)
class PeerSources:
    """Where the bytes of a fill came from."""

    peer_bytes: Counter[str] = field(default_factory=Counter)
    peer_seconds: Counter[str] = field(default_factory=Counter)
    shared_bytes: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Chunks that came from shared storage for another reason than that they were ours to fetch."""
    banned: set[str] = field(default_factory=set)
    slowest: tuple[float, str, str] = (0.0, "", "")

    def peers(self) -> list[Json]:
        """For each peer its name, bytes, bytes per second, and whether it was banned."""
        return [
            {
                "name": name,
                "bytes": (size := self.peer_bytes[name]),
                "bytes_per_second": size / seconds if (seconds := self.peer_seconds[name]) > 0 else 0.0,
                "banned": name in self.banned,
            }
            for name in sorted({*self.peer_bytes, *self.banned}, key=lambda name: -self.peer_bytes[name])
        ]

    def report(self) -> Json:
        """Return the progress that is reported to the agent for display."""
        seconds, what, source = self.slowest
        return {
            "by_source": {"peer": sum(self.peer_bytes.values()), "shared": self.shared_bytes},
            "by_peer": dict(self.peer_bytes),
            "slowest": {"what": what, "seconds": seconds, "from": source} if what else None,
        }


class PeerFill(Protocol):
    """One fill of one version together with the other nodes. Runs on one event loop."""

    sources: PeerSources

    @property
    def slots(self) -> int:
        """Chunks that may be under way at a time."""

    def order(self, todo: Iterable[tuple[int, int]], *, whole: bool) -> ChunkOrder:
        """Choose the next of ``todo``, files and chunks, and its source."""

    async def fetch_chunk(
        self, index: int, chunk: int, into: memoryview, request: object | None = None
    ) -> ReceivedChunk:
        """Fill ``into`` with a chunk, from a peer or from the store. ``request`` is that of its ``Work``.

        Raises:
            NotNowError: it is to be chosen again.
            TierckptError: neither has it.
        """

    async def chunk_written(self, index: int, chunk: int) -> None:
        """It is in a file of this node, or never will be."""

    async def close(self) -> None: ...


class PeerJoin(Protocol):
    """Finds the other nodes for a fill."""

    async def join(self, chunks: StoreChunks, filling: PartialEntry) -> PeerFill | None:
        """Join them; None to read from the store. ``chunks``: reads the store."""
