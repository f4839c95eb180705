"""Reads through the node cache and fills it.

One process of the node fetches each chunk (``Claims``); the others wait for its line in the progress file. A claim
without progress is overtaken after ``stall_seconds``. docs/internals/cache.md has the guarantees.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CapacityError, ConfigError, ObjectNotFoundError, OperationTimeoutError, StoreError
from ..poll import LOCAL, Poll
from ..stores.base import RangeSource, ended, to_completion
from ..telemetry import ignore_progress, logger
from ..types import Buffer, ByteRange, Progress, ProgressListener, Tier
from .chunk_writer import ChunkWriter, FetchStats
from .fetch_job import ChunkFetcher, FetchJob, PeerFill, PeerJoin
from .file_set import FileSet, FileSpec, Receipt
from .partial_entry import PartialEntry, read_file, remove_stale_directory
from .pool import Pool
from .receipt import read_receipt, whole_receipt
from .reuse import CopySource, copies_of, copy_chunk, reuse
from .store_chunks import StoreChunks
from .verifier import Checker, repair_chunk

log = logger("prefetch")

STALL_SECONDS_MIN = 60.0
JOINS_MAX = 5
COPIES_AT_A_TIME = 4


class CacheEntry:
    """One frozen version of some files, open for reading and filling. Holds a lease until closed.

    ``landed`` and ``read_available`` are thread-safe; coroutines run on one event loop.
    """

    def __init__(
        self,
        store: RangeSource,
        frozen: FileSet,
        directory: Path,
        *,
        fetch_slots: asyncio.Semaphore,
        pool: Pool | None = None,
        stall_seconds: float = STALL_SECONDS_MIN,
        fetches_max: int = 16,
        peer_join: PeerJoin | None = None,
        is_selected: Callable[[str], bool] = lambda path: True,
        copy_sources: Sequence[CopySource] = (),
    ) -> None:
        """Call ``begin`` next.

        ``fetch_slots`` bounds the concurrent chunks of this process, ``fetches_max`` those of the node. Chunks of
        ``copy_sources`` are copied.
        """
        self.store, self.frozen, self.pool = store, frozen, pool
        self._is_selected, self._copy_sources = is_selected, copy_sources
        self.only: FileSpec | None = None
        self.stats = FetchStats()
        self._target, self.stall_seconds = directory, stall_seconds
        self._fetch_slots, self._fetches_max, self._peer_join = fetch_slots, fetches_max, peer_join
        self._is_whole = False
        self._partial_entry: PartialEntry | None = None
        self._lease = contextlib.ExitStack()
        self._in_flight: dict[tuple[int, int, bool], asyncio.Task[Buffer | None]] = {}
        self._fills: set[asyncio.Task[Any]] = set()
        self._receipt: Receipt | None = None
        self.checker: Checker
        self._chunks: StoreChunks
        self._fetcher: ChunkFetcher | None = None

    @property
    def files(self) -> dict[str, FileSpec]:
        return {item.path: item for item in self.frozen.files}

    def file(self, path: str) -> FileSpec:
        return self.frozen.files[self.frozen.index_of(path)]

    @property
    def chunk_size_bytes(self) -> int:
        return self.frozen.chunk_size_bytes

    @property
    def target(self) -> str:
        return str(self._target.absolute())

    @property
    def directory(self) -> Path | None:
        return self._target if self._check_whole() else None

    def path(self, path: str) -> Path:
        """Return a file's path, which changes once, when the entry becomes whole."""
        index = self.frozen.index_of(path)
        if self._partial_entry is None or self.directory is not None:
            return self._target / path
        return self._partial_entry.prepare(index)

    def _check_whole(self) -> bool:
        if not self._is_whole and self._partial_entry is not None and self._partial_entry.is_published():
            self._is_whole = True
        return self._is_whole

    def begin(self, *, whole: bool) -> None:
        """Lease the entry and join the processes that fill it. ``whole``: reserve all room, or raise CapacityError."""
        name = self.frozen.name
        if self.pool is not None:
            self._lease = self.pool.lease(name)
        try:
            self._partial_entry = self._join_partial(whole)
            entry = weakref.proxy(self)
            self.checker = Checker(
                self.frozen,
                lambda *chunk: entry.digest(*chunk),
                lambda *range_: entry.read_here(*range_),
                lambda: entry.directories(),
            )
            if self._partial_entry is None:
                self._chunks = StoreChunks(self.store, self.frozen)
                remove_stale_directory(self._target)
                if self.pool is not None:
                    self.pool.used(name)
                return
            reuse(self._partial_entry, self._other_versions())
            self.stats.here_bytes = self._partial_entry.landed_bytes
            writer = ChunkWriter(self._partial_entry, self.pool, self.stats)
            self._chunks = StoreChunks(self.store, self.frozen, writer, self.stall_seconds)
            self._fetcher = ChunkFetcher(self._chunks, writer, self._fetch_slots, self._fetches_max, self._peer_join)
            writer.reserve(self.frozen.size_bytes if whole else 0)
        except BaseException as error:
            is_bare = self._partial_entry is None or not self._partial_entry.landed_bytes
            self._end()
            if self.pool is not None and is_bare and isinstance(error, CapacityError):
                self.pool.evict(name)
            raise

    def _other_versions(self) -> list[Path]:
        if self.pool is None:
            return [self._target]
        rows = self.pool.rows(self.frozen.uri)
        return [self.pool.directory(row.name) for row in rows if row.name != self.frozen.name]

    def _join_partial(self, whole: bool) -> PartialEntry | None:
        """Join the processes that fill the entry; None when it is whole.

        Publication before the join would show an empty directory: so check once more.
        """
        for left in reversed(range(JOINS_MAX)):
            receipt = whole_receipt(self._target, self.frozen.version)
            if receipt is not None:
                self.frozen, self._receipt, self._is_whole = receipt.frozen, receipt, True
                self.stats.here_bytes = self.frozen.size_bytes
                return None
            try:
                partial_entry = PartialEntry(
                    self._target, self.frozen, preallocate=whole, is_selected=self._is_selected
                )
            except ObjectNotFoundError:
                if not left:
                    raise
                continue
            if not left or not partial_entry.is_published():
                self.frozen = partial_entry.frozen
                return partial_entry
            partial_entry.close()
            partial_entry.tidy()
        raise AssertionError("unreachable")

    @property
    def peer_fetch(self) -> PeerFill | None:
        return self._fetcher.peers if self._fetcher is not None else None

    async def close(self) -> None:
        """Also when its caller is cancelled: a lease that is left is held as long as the process lives."""
        await to_completion(self._close())

    async def _close(self) -> None:
        # Also fills whose callers were cancelled in another loop: they still write into files that are closed here.
        left = [*self._in_flight.values(), *self._fills]
        for task in left:
            task.cancel()
        for task in left:
            await ended(task)
        try:
            if self._fetcher is not None:
                await self._fetcher.close()
        finally:
            await asyncio.to_thread(self._end)

    def _end(self) -> None:
        if self._partial_entry is not None:
            self._partial_entry.close()
            self._partial_entry.tidy()
        self._lease.close()

    def landed(self, path: str, byte_range: ByteRange) -> bool:
        index = self.frozen.index_of(path)
        return self._is_whole or self._partial_entry is None or self._partial_entry.has_range(index, byte_range)

    def read_available(self, path: str, byte_range: ByteRange, into: memoryview) -> bool:
        index = self._check(path, byte_range)
        try:
            return self.read_here(index, byte_range, into) and self.checker.is_good(index, byte_range, into)
        except StoreError as error:
            log.warning("%s: %s", self.frozen.uri, error)
            if len(chunks := self.frozen.touched(byte_range)) == 1:
                self.checker.note_bad(index, chunks[0])
            return False

    def is_good(self, path: str, byte_range: ByteRange, data: memoryview) -> bool:
        return self.checker.is_good(self._check(path, byte_range), byte_range, data)

    def digest(self, index: int, chunk: int) -> str:
        if self._partial_entry is not None and (digest := self._partial_entry.digest(index, chunk)):
            return digest
        if self._receipt is None and self._is_whole:
            self._receipt = read_receipt(self._target)
        receipt = self._receipt
        if receipt is None or receipt.frozen.chunk_size_bytes != self.chunk_size_bytes:
            return ""
        return receipt.digest(index, chunk)

    def directories(self) -> list[Path]:
        return [self._target] if self._partial_entry is None else [self._target, self._partial_entry.incoming]

    def read_here(self, index: int, byte_range: ByteRange, into: memoryview) -> bool:
        if not self._is_whole and self._partial_entry is not None:
            return self._partial_entry.read(index, byte_range, into)
        return read_file(self._target / self.frozen.files[index].path, byte_range, into)

    def _check(self, path: str, byte_range: ByteRange) -> int:
        index = self.frozen.index_of(path)
        if not 0 <= byte_range.start <= byte_range.stop <= self.frozen.files[index].size_bytes:
            raise ConfigError(
                f"bytes {byte_range.start}-{byte_range.stop} of {path}: it has {self.frozen.files[index].size_bytes}",
                uri=self.frozen.uri,
            )
        return index

    async def read(self, path: str, byte_range: ByteRange) -> memoryview:
        """Return the range. Missing chunks are fetched, and kept if there is room.

        Raises IntegrityError: the store's bytes differ from the frozen version. StoreError: the bytes are nowhere.
        """
        into = memoryview(bytearray(max(0, byte_range.size_bytes)))
        await self.read_into(path, byte_range, into)
        return into.toreadonly()

    async def read_into(self, path: str, byte_range: ByteRange, into: memoryview) -> None:
        index = self._check(path, byte_range)
        into = memoryview(into).cast("B")
        if await asyncio.to_thread(self.read_available, path, byte_range, into):
            return
        chunks = self.frozen.touched(byte_range)
        await asyncio.gather(*(self._read_chunk(index, chunk, byte_range, into) for chunk in chunks))

    async def _read_chunk(self, index: int, chunk: int, byte_range: ByteRange, into: memoryview) -> None:
        chunk_range = self.frozen.chunk_range(index, chunk)
        part = ByteRange(max(chunk_range.start, byte_range.start), min(chunk_range.stop, byte_range.stop))
        target = into[part.start - byte_range.start : part.stop - byte_range.start]
        data = await self._once((index, chunk, False), self._ensure)
        if data is None:
            if await asyncio.to_thread(self.read_available, self.frozen.files[index].path, part, target):
                return
            repair = partial(repair_chunk, self.checker, self._chunks, self.target)
            data = await self._once((index, chunk, True), repair)
            assert data is not None
        target[:] = memoryview(data)[part.start - chunk_range.start : part.stop - chunk_range.start]

    async def ensure(self, path: str, byte_range: ByteRange) -> None:
        """Fetch the range. Raises as ``read``, and CapacityError: no room to keep it."""
        index = self._check(path, byte_range)
        keys = [(index, chunk, False) for chunk in self.frozen.touched(byte_range)]
        for _ in range(2):
            await asyncio.gather(*(self._once(key, self._ensure) for key in keys))
            if self.landed(path, byte_range):
                return
        raise CapacityError(
            f"the cache has no room for {path} of {self.frozen.uri}",
            hint="`tierckpt cache ls` lists its entries; raise cache_bytes_max, or unpin an entry",
        )

    async def wait(self, path: str, byte_range: ByteRange, timeout_seconds: float = STALL_SECONDS_MIN) -> None:
        async for _ in Poll(timeout_seconds):
            if self.landed(path, byte_range):
                return
        raise OperationTimeoutError(
            f"bytes {byte_range.start}-{byte_range.stop} of {path} have not arrived in {timeout_seconds:g} s",
            hint="Nobody may be fetching them: read() fetches, wait() does not",
            uri=self.frozen.uri,
            tier=Tier.LOCAL,
        )

    async def _once(
        self, key: tuple[int, int, bool], work: Callable[[int, int], Coroutine[Any, Any, Buffer | None]]
    ) -> Buffer | None:
        task = self._in_flight.get(key)
        if task is None:
            task = asyncio.ensure_future(work(*key[:2]))
            self._in_flight[key] = task
            task.add_done_callback(lambda done: self._settled(key, done))
        try:
            return await asyncio.shield(task)
        finally:
            del task

    def _settled(self, key: tuple[int, int, bool], done: asyncio.Task[Buffer | None]) -> None:
        self._in_flight.pop(key, None)
        if not done.cancelled():
            done.exception()  # every waiter may have been cancelled

    async def _ensure(self, index: int, chunk: int) -> Buffer | None:
        fetcher, partial_entry = self._fetcher, self._partial_entry
        if fetcher is None or partial_entry is None:
            return None
        await fetcher.join()
        deadline = time.monotonic() + 2 * self.stall_seconds
        while True:
            partial_entry.refresh()
            if partial_entry.has(index, chunk):
                return None
            async with self._fetch_slots:
                with partial_entry.claimed(index, chunk) as action:
                    if action == "fetch":
                        return await fetcher.fetch(index, chunk, keep=True)
                    if action == "landed":
                        return None
            found = await partial_entry.await_other(index, chunk, self.stall_seconds)
            if found == "free":
                await asyncio.sleep(LOCAL.first_seconds)
            if found == "stalled" or time.monotonic() > deadline:
                log.warning(
                    "%s: waited too long for another process, fetching chunk %d too", partial_entry.incoming, chunk
                )
                async with self._fetch_slots:
                    return await fetcher.fetch(index, chunk, keep=True)

    async def fill(self, paths: Iterable[str] | None = None, listener: ProgressListener = ignore_progress) -> None:
        """Fetch ``paths`` (default: all files); publish when every file is whole.

        Raises, with nothing published:
            PartialTransferError: names the failed files. If all failed: the error of the first.
            IntegrityError, CapacityError: end the fill at once.
        """
        with self._ended_by_close():
            if self._partial_entry is None or self._fetcher is None or self.directory is not None:
                listener(Progress(str(self._target), self.frozen.size_bytes, self.frozen.size_bytes))
                return
            if await self._wait_for_host(self._partial_entry, listener):
                return
            await self._copy_held(self._partial_entry, listener)
            await self._fetcher.join()
            indexes = range(len(self.frozen.files)) if paths is None else [self.frozen.index_of(path) for path in paths]
            while True:
                await FetchJob(self._fetcher, indexes, listener, self.stall_seconds).run()
                if len(indexes) < len(self.frozen.files) and not self._partial_entry.has_all():
                    return
                if await self._publish(self._partial_entry):
                    return

    @contextlib.contextmanager
    def _ended_by_close(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._fills.add(task)
        try:
            yield
        finally:
            self._fills.discard(task)

    async def _copy_held(self, partial_entry: PartialEntry, listener: ProgressListener) -> None:
        copies = copies_of(self.frozen, self._copy_sources)
        todo = [(index, chunk) for index, chunk in reversed(copies) if not partial_entry.has(index, chunk)]

        async def work() -> None:
            while todo:
                index, chunk = todo.pop()
                with partial_entry.claimed(index, chunk) as turn:
                    copy = partial(copy_chunk, partial_entry, index, chunk, *copies[index, chunk])
                    if turn == "fetch" and await to_completion(asyncio.to_thread(copy)):
                        self.stats.cached_bytes += self.frozen.chunk_range(index, chunk).size_bytes
                        what = f"prefetch {self.frozen.uri}"
                        note = f"{self.stats.cached_bytes >> 20} MiB from the node cache"
                        listener(Progress(what, partial_entry.landed_bytes, self.frozen.size_bytes, note))

        for outcome in await asyncio.gather(*(work() for _ in range(COPIES_AT_A_TIME)), return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _wait_for_host(self, partial_entry: PartialEntry, listener: ProgressListener) -> bool:
        """Return True when another host has filled the entry; False: this host fills it."""
        what, progress_bytes, moved_at = f"prefetch {self.frozen.uri}", partial_entry.progress_bytes(), time.monotonic()
        async for _ in Poll():
            try:
                if await to_completion(asyncio.to_thread(partial_entry.host.take)):
                    return False
            except ObjectNotFoundError:
                if not self._check_whole():
                    raise
            if self._check_whole():
                listener(Progress(what, self.frozen.size_bytes, self.frozen.size_bytes))
                self.stats.others_bytes += self.frozen.size_bytes - self.stats.here_bytes
                return True
            listener(Progress(what, 0, self.frozen.size_bytes, "another node fills the directory"))
            if (now := await asyncio.to_thread(partial_entry.progress_bytes)) != progress_bytes:
                progress_bytes, moved_at = now, time.monotonic()
            elif time.monotonic() > moved_at + self.stall_seconds:
                log.warning("%s: the node that fills it makes no progress, filling it here", self.target)
                return False
        raise AssertionError("unreachable")

    async def _publish(self, partial_entry: PartialEntry) -> bool:
        async for _ in Poll(self.stall_seconds):
            if await to_completion(asyncio.to_thread(partial_entry.publish)):
                break
            partial_entry.refresh()
            if not partial_entry.has_all():
                return False
        else:
            raise OperationTimeoutError(
                f"another process has been publishing {self._target} for {self.stall_seconds:g} s",
                hint="Look for a hung disk, or a hung tierckpt process on this node",
                tier=Tier.LOCAL,
            )
        self._is_whole = True
        return True
