"""Fetches missing chunks from other nodes or the store, singly (``ChunkFetcher``) or all (``FetchJob``).

``peer/fetch/fetch_session.py`` implements the protocols to fetch chunks from other nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import CapacityError, IntegrityError, PartialTransferError, TierckptError
from ..poll import Poll
from ..stores.base import ReadsInto, ended
from ..telemetry import ignore_progress, logger
from ..types import Buffer, FileProgress, Json, Progress, ProgressListener
from .chunk_writer import ChunkWriter
from .direct_write import receive_memory
from .partial_entry import ChunkAction, PartialEntry
from .store_chunks import StoreChunks

log = logger("prefetch")


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
        return {
            "by_source": {"peer": sum(self.peer_bytes.values()), "shared": self.shared_bytes},
            "by_peer": dict(self.peer_bytes),
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


class InOrder:
    def __init__(self, todo: Iterable[tuple[int, int]]) -> None:
        self._todo = deque(Work(*one) for one in todo)

    async def take(self) -> Work | None:
        return self._todo.popleft() if self._todo else None

    def put_back(self, work: Work) -> None:
        self._todo.append(work)

    def done(self, work: Work) -> None:
        pass


class ChunkFetcher:
    """Fetches single chunks of one entry, on one event loop. Close it."""

    def __init__(
        self,
        chunks: StoreChunks,
        writer: ChunkWriter,
        fetch_slots: asyncio.Semaphore,
        fetches_max: int,
        peer_join: PeerJoin | None = None,
    ) -> None:
        self.chunks, self.writer, self.partial_entry = chunks, writer, writer.partial_entry
        self.fetch_slots, self.fetches_max = fetch_slots, fetches_max
        self.peers: PeerFill | None = None
        self._sharing, self._joining = peer_join, asyncio.Lock()

    async def join(self) -> None:
        async with self._joining:
            peer_join, self._sharing = self._sharing, None
            if peer_join is None:
                return
            self.peers = await peer_join.join(self.chunks, self.partial_entry)
            if self.peers is not None:
                self.fetches_max = max(self.fetches_max, self.peers.slots)
                self.fetch_slots = asyncio.Semaphore(self.fetches_max)

    async def fetch(self, index: int, chunk: int, *, keep: bool, request: object | None = None) -> Buffer | None:
        """Fetch and write one chunk; with ``keep`` also return it, and need no room."""
        started_at, chunk_range = time.monotonic(), self.partial_entry.frozen.chunk_range(index, chunk)
        uses_memory = self.peers is not None or isinstance(self.chunks.store, ReadsInto)
        peer: str | None = None
        with receive_memory(chunk_range.size_bytes if uses_memory else 0) as memory:
            if self.peers is None:
                data, digest = await self.chunks.read(index, chunk, memory)
            else:
                data = memory if memory is not None else memoryview(bytearray(chunk_range.size_bytes))
                received = await self.peers.fetch_chunk(index, chunk, data, request)
                digest, peer = received.digest, received.source
            try:
                if (index, chunk) not in self.writer.streamed:
                    await self.writer.write(index, chunk, data, digest, keep=keep)
            finally:
                if self.peers is not None:
                    await self.peers.chunk_written(index, chunk)
            kept = bytes(data) if keep and memory is not None else data
        if (index, chunk) not in self.writer.streamed:
            path = self.partial_entry.frozen.files[index].path
            self.writer.stats.note(path, chunk_range, time.monotonic() - started_at, peer)
        return kept if keep else None

    async def close(self) -> None:
        await self.chunks.close()
        if self.peers is not None:
            await self.peers.close()


class FetchJob:
    def __init__(
        self, fetcher: ChunkFetcher, indexes: Iterable[int], listener: ProgressListener, stall_seconds: float
    ) -> None:
        self.fetcher, self.partial_entry, self.listener = fetcher, fetcher.partial_entry, listener
        self.frozen, self.stats, self._stall_seconds = self.partial_entry.frozen, fetcher.writer.stats, stall_seconds
        self.partial_entry.refresh()
        self.wanted = list(indexes)
        todo = [
            (index, chunk)
            for index in self.wanted
            for chunk in range(self.frozen.chunks_of(index))
            if not self.partial_entry.has(index, chunk)
        ]
        self.total = sum(self.frozen.files[index].size_bytes for index in self.wanted)
        self._lacking_bytes = Counter[int]()
        for index, chunk in todo:
            self._lacking_bytes[index] += self.frozen.chunk_range(index, chunk).size_bytes
        self._files: dict[int, FileProgress] = {}
        self._fetching: list[int] = []
        self.count = len(todo)
        is_all = len(self.wanted) == len(self.frozen.files)
        peers = fetcher.peers
        self.order: ChunkOrder = InOrder(todo) if peers is None else peers.order(todo, whole=is_all)
        self.done_bytes = self.total - self._lacking_bytes.total()
        self.failures: dict[int, TierckptError] = {}
        self.fatal = False
        self._idle, self._poll = asyncio.Lock(), Poll()
        self._moved_at = time.monotonic()
        self._is_overtaking = False

    async def run(self) -> None:
        self._log_progress()
        workers = min(self.fetcher.fetches_max, self.count)
        tasks = [asyncio.ensure_future(self._work()) for _ in range(workers)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                await ended(task)  # also when cancelled again: its thread writes into the entry
        if self.failures:
            raise self._error()

    async def _work(self) -> None:
        while not self.fatal and (work := await self.order.take()) is not None:
            index, chunk = work.index, work.chunk
            if index in self.failures:
                self.order.done(work)
                continue
            if self.partial_entry.has(index, chunk):
                self._advance(work)
                continue
            try:
                async with self.fetcher.fetch_slots:
                    with self._claim_chunk(index, chunk) as action:
                        if action == "fetch":
                            with self._in_flight(index):
                                await self.fetcher.fetch(index, chunk, keep=False, request=work.request)
                if action == "later":
                    self.order.put_back(work)
                    await self._pause()
                else:
                    self._advance(work, is_fetched=action == "fetch")
            except NotNowError:
                pass
            except TierckptError as error:
                self.order.done(work)
                self.failures.setdefault(index, error)
                self.fatal |= isinstance(error, IntegrityError | CapacityError)

    @contextlib.contextmanager
    def _in_flight(self, index: int) -> Iterator[None]:
        item = self.frozen.files[index]
        if index not in self._files:
            done_bytes = item.size_bytes - self._lacking_bytes[index]
            self._files[index] = FileProgress(item.path, done_bytes, item.size_bytes)
        self._fetching.append(index)
        try:
            self._log_progress()
            yield
        finally:
            self._fetching.remove(index)

    @contextlib.contextmanager
    def _claim_chunk(self, index: int, chunk: int) -> Iterator[ChunkAction]:
        if not self._is_overtaking and time.monotonic() >= self._moved_at + self._stall_seconds:
            log.warning(
                "%s: other processes make no progress, fetching the chunks they claimed", self.partial_entry.incoming
            )
            self._is_overtaking = True
        with self.partial_entry.claimed(index, chunk) as action:
            if self._is_overtaking:
                yield "fetch" if action == "later" else action
            elif action == "fetch" and self.partial_entry.count_fetches() > self.fetcher.fetches_max:
                yield "later"
            else:
                yield action

    async def _pause(self) -> None:
        """One worker polls; the rest wait for it."""
        before = self.partial_entry.landed_bytes
        async with self._idle:
            self.partial_entry.refresh()
            if self.partial_entry.landed_bytes == before:
                await self._poll.pause_async()
                self.partial_entry.refresh()
        if self.partial_entry.landed_bytes != before:
            self._poll, self._moved_at = Poll(), time.monotonic()

    def _advance(self, work: Work, *, is_fetched: bool = False) -> None:
        size_bytes = self.frozen.chunk_range(work.index, work.chunk).size_bytes
        self.done_bytes += size_bytes
        self._lacking_bytes[work.index] -= size_bytes
        if (file := self._files.get(work.index)) is not None:
            file.done_bytes += size_bytes
        self._moved_at = time.monotonic()
        self.order.done(work)
        if not is_fetched and (work.index, work.chunk) not in self.fetcher.writer.streamed:
            self.stats.others_bytes += size_bytes
        self._log_progress()

    def _log_progress(self) -> None:
        if self.listener is ignore_progress:
            return
        sources = {
            "here": self.stats.here_bytes,
            "peers": self.stats.peer_bytes,
            "shared": self.stats.fetched_bytes,
            "other processes": self.stats.others_bytes,
        }
        note = ", ".join(f"{size_bytes >> 20} MiB {source}" for source, size_bytes in sources.items() if size_bytes)
        files = tuple(self._files[index] for index in dict.fromkeys(self._fetching))
        self.listener(Progress(f"prefetch {self.frozen.uri}", self.done_bytes, self.total, note, files))

    def _error(self) -> TierckptError:
        errors = {self.frozen.files[index].path: error for index, error in sorted(self.failures.items())}
        fatal = [error for error in errors.values() if isinstance(error, IntegrityError | CapacityError)]
        if fatal or len(errors) == len(self.wanted):
            return [*fatal, *errors.values()][0]
        return PartialTransferError(
            f"{len(errors)} of {len(self.wanted)} files of {self.frozen.uri} could not be fetched",
            hint="Nothing was published; run the same command again to fetch the missing files",
            uri=self.frozen.uri,
            failures={path: f"{type(error).__name__}: {error}" for path, error in errors.items()},
        )
