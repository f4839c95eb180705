"""Writes fetched chunks into an entry while there is room, and counts their sources."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from ..errors import CapacityError, ObjectNotFoundError
from ..stores.base import to_completion
from ..telemetry import logger
from ..types import Buffer, ByteRange
from . import space
from .partial_entry import PartialEntry
from .pool import Pool

log = logger("prefetch")

NO_ROOM_SECONDS = 10.0
GROW_BYTES = 64 << 20
SHARED_NAME = "shared"


@dataclass(slots=True)
class FetchStats:
    """``here``: bytes present before the fill; ``others``: fetched by other processes."""

    here_bytes: int = 0
    cached_bytes: int = 0
    fetched_bytes: int = 0
    peer_bytes: int = 0
    others_bytes: int = 0
    requests: int = 0
    slowest_seconds: float = 0.0
    slowest: str = ""
    slowest_from: str = SHARED_NAME

    def note(self, path: str, byte_range: ByteRange, seconds: float, peer: str | None = None) -> None:
        self.requests += 1
        if peer is None:
            self.fetched_bytes += byte_range.size_bytes
        else:
            self.peer_bytes += byte_range.size_bytes
        if seconds > self.slowest_seconds:
            self.slowest_seconds, self.slowest = seconds, f"{path} {byte_range.start}-{byte_range.stop}"
            self.slowest_from = peer or SHARED_NAME


class ChunkWriter:
    """Writes chunks on one event loop. ``pool`` grants room; None: no limit."""

    def __init__(self, partial_entry: PartialEntry, pool: Pool | None, stats: FetchStats) -> None:
        self.partial_entry, self.frozen, self.stats = partial_entry, partial_entry.frozen, stats
        self._pool, self.is_cache = pool, pool is not None
        self._granted_bytes = 0
        self._no_room_until = 0.0
        self._granting = asyncio.Lock()
        self.streamed: set[tuple[int, int]] = set()

    def reserve(self, size_bytes: int) -> None:
        if self._pool is not None and size_bytes > self._granted_bytes:
            space.reserve(self._pool, self.frozen, size_bytes)
            self._granted_bytes = size_bytes

    @property
    def has_room(self) -> bool:
        return time.monotonic() >= self._no_room_until

    def note_full(self, error: CapacityError) -> None:
        log.warning("%s: reading without the cache: %s", self.frozen.uri, error.message)
        self._no_room_until = time.monotonic() + NO_ROOM_SECONDS

    async def write(self, index: int, chunk: int, data: Buffer, digest: str, *, keep: bool = False) -> None:
        """Write one chunk. Raises CapacityError unless ``keep``, and as ``PartialEntry.store_chunk``."""
        if keep and not self.has_room:
            return
        try:
            if self._pool is not None:
                await self._grant(len(data))
            await to_completion(asyncio.to_thread(self.partial_entry.store_chunk, index, chunk, data, digest))
        except CapacityError as error:
            if not keep:
                raise
            self.note_full(error)
        except ObjectNotFoundError:
            self.partial_entry.refresh()
            if not self.partial_entry.has(index, chunk):
                raise

    async def write_streamed(self, index: int, chunk: int, data: Buffer, digest: str) -> None:
        begun = time.monotonic()
        await self.write(index, chunk, data, digest)
        self.streamed.add((index, chunk))
        byte_range = self.frozen.chunk_range(index, chunk)
        self.stats.note(self.frozen.files[index].path, byte_range, time.monotonic() - begun)

    async def _grant(self, size_bytes: int) -> None:
        async with self._granting:
            needed_bytes = min(self.frozen.size_bytes, self.partial_entry.landed_bytes + size_bytes)
            if needed_bytes > self._granted_bytes:
                ahead = max(GROW_BYTES, 16 * self.frozen.chunk_size_bytes)
                await to_completion(asyncio.to_thread(self.reserve, min(self.frozen.size_bytes, needed_bytes + ahead)))
