"""Protocols to fetch chunks from other nodes; ``peer/fetch/fetch_session.py`` implements them."""

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
    index: int
    chunk: int
    request: object | None = None


class NotNowError(Exception):
    """No reachable node has the chunk, but one is fetching it. Choose again."""


@dataclass(slots=True)
class ReceivedChunk:
    digest: str
    source: str | None


class ChunkOrder(Protocol):
    async def take(self) -> Work | None: ...

    def put_back(self, work: Work) -> None: ...

    def done(self, work: Work) -> None:
        """Record a chunk as fetched or abandoned."""


@dataclass(slots=True)
class PeerSources:
    peer_bytes: Counter[str] = field(default_factory=Counter)
    peer_seconds: Counter[str] = field(default_factory=Counter)
    shared_bytes: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Chunks read from shared storage instead of a peer, by reason."""
    banned: set[str] = field(default_factory=set)
    slowest: tuple[float, str, str] = (0.0, "", "")

    def peers(self) -> list[Json]:
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
        seconds, what, source = self.slowest
        return {
            "by_source": {"peer": sum(self.peer_bytes.values()), "shared": self.shared_bytes},
            "by_peer": dict(self.peer_bytes),
            "slowest": {"what": what, "seconds": seconds, "from": source} if what else None,
        }


class PeerFill(Protocol):
    """One fill of one version, on one event loop."""

    sources: PeerSources

    @property
    def slots(self) -> int: ...

    def order(self, todo: Iterable[tuple[int, int]], *, whole: bool) -> ChunkOrder:
        """Choose the next of ``todo`` (file and chunk), and its source."""

    async def fetch_chunk(
        self, index: int, chunk: int, into: memoryview, request: object | None = None
    ) -> ReceivedChunk:
        """Fill ``into`` with a chunk, from a peer or the store.

        Raises NotNowError: choose again. TierckptError: neither has it.
        """

    async def chunk_written(self, index: int, chunk: int) -> None:
        """Report that the chunk is in a file, or never will be."""

    async def close(self) -> None: ...


class PeerJoin(Protocol):
    async def join(self, chunks: StoreChunks, partial_entry: PartialEntry) -> PeerFill | None:
        """Join the other nodes; None to read from the store."""
