"""Reads through the node cache and fills it: chunks on this node come from its files, the others are fetched.

``CacheEntry`` is one entry (one frozen version of the files below a URI), or any directory that is filled in the
same way.
Between processes of a node each chunk has one that fetches it (disk/claims.py); the others wait for its line in the
progress file. What they wait for is bounded: a holder that ends is noticed at once, one that says nothing after
``SILENT_SECONDS``, and one that lives and does not get on is overtaken after ``stall_seconds``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import (
    CapacityError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    OperationTimeoutError,
    PreconditionFailedError,
    StoreError,
)
from ..format.manifest import digest_of
from ..poll import LOCAL, Poll
from ..stores.base import RangesIgnoredError, RangeSource, ReadsInto
from ..stores.common import to_completion
from ..stores.verified_read import corrupt, reread
from ..telemetry import BYTES, ignore_progress, logger
from ..types import Buffer, ByteRange, Progress, ProgressListener, Tier
from . import space
from .direct_write import landing_memory
from .fetch_job import FetchJob, FetchStats
from .file_set import FileSet, FileSpec, Receipt
from .partial_entry import PartialEntry, read_file, same_digest, tidy
from .peer_fill import PeerFill, PeerJoin
from .pool import Pool
from .receipt import read_receipt, whole_receipt
from .repair import mend
from .reuse import Held, copies_of, copy_chunk, reuse
from .verifier import Checker
from .version_check import Versions
from .whole_file import OneChunk, WholeFile, stream

log = logger("prefetch")

STALL_SECONDS_MIN = 60.0
NO_ROOM_SECONDS = 10.0
"""How long a reader that found no room does not ask for it again."""
JOINS_MAX = 5
COPIES_AT_A_TIME = 4
GROW_BYTES = 64 << 20
"""Room that reading through takes at a time."""


class CacheEntry:
    """One frozen version of some files, open for reading and filling. Close it: it holds a lease.

    ``landed`` and ``read_available`` may be called from any thread; the coroutines on one event loop.
    """

    def __init__(
        self,
        store: RangeSource,
        frozen: FileSet,
        directory: Path,
        *,
        gate: asyncio.Semaphore,
        pool: Pool | None = None,
        stall_seconds: float = STALL_SECONDS_MIN,
        fetches_max: int = 16,
        sharing: PeerJoin | None = None,
        is_selected: Callable[[str], bool] = lambda path: True,
        held: Sequence[Held] = (),
    ) -> None:
        """Use ``open_entry`` or ``open_directory``.

        Args:
            gate: bounds what this process fetches at a time.
            fetches_max: chunks that all processes of the node together fetch of this entry, to fill it.
            sharing: how to join the other nodes; None: there are none.
            is_selected: as ``PartialEntry`` has it.
            held: directories whose chunks are copied instead of fetched.
        """
        self.store, self.frozen, self.pool = store, frozen, pool
        self._is_selected, self._held = is_selected, held
        self.only: FileSpec | None = None
        """The file of a URI that is one object."""
        self.tally = FetchStats()
        self._target = directory
        self.gate, self.stall_seconds, self.fetches_max = gate, stall_seconds, fetches_max
        self._is_whole = False
        self._filling: PartialEntry | None = None
        self._lease = contextlib.ExitStack()
        self._granted_bytes = 0
        self._no_room_until = 0.0
        self._in_flight: dict[tuple[int, int, bool], asyncio.Task[Buffer | None]] = {}
        self._receipt: Receipt | None = None
        self._versions = Versions(store)
        self._whole_files: dict[int, WholeFile] = {}
        self._streamed: set[tuple[int, int]] = set()
        self.checker = self._new_checker()
        self.idle = asyncio.Lock()
        self._granting = asyncio.Lock()
        self.peer_fetch: PeerFill | None = None
        """The other nodes, once something had to be fetched."""
        self._sharing, self._read_gate, self._joining = sharing, gate, asyncio.Lock()

    # --- what it is ----------------------------------------------------------------------------------------------

    @property
    def files(self) -> dict[str, FileSpec]:
        return {item.path: item for item in self.frozen.files}

    def file(self, path: str) -> FileSpec:
        """Raises ObjectNotFoundError."""
        return self.frozen.files[self.frozen.index_of(path)]

    @property
    def chunk_size_bytes(self) -> int:
        return self.frozen.chunk_size_bytes

    @property
    def target(self) -> str:
        """The directory that is filled, whole or not."""
        return str(self._target.absolute())

    @property
    def directory(self) -> Path | None:
        """The directory of real files, once all of them are whole; else None."""
        return self._target if self._is_whole or self._look() else None

    def path(self, path: str) -> Path:
        """Where a file lies now, whole or with holes. The name may change once, when the entry becomes whole."""
        index = self.frozen.index_of(path)
        if self._filling is None or self.directory is not None:
            return self._target / path
        return self._filling.prepare(index)

    def _look(self) -> bool:
        """True when the entry has become whole."""
        if not self._is_whole and self._filling is not None and self._filling.is_published():
            self._is_whole = True
        return self._is_whole

    # --- opening and closing -------------------------------------------------------------------------------------

    def begin(self, *, whole: bool) -> None:
        """Blocking part of opening: lease the entry, and join who fills it if it is not whole.

        ``whole``: all of it is wanted, so all of its room is reserved first. Raises CapacityError.
        """
        name = self.frozen.name
        if self.pool is not None:
            self._lease = self.pool.lease(name)
        try:
            self._filling = self._join_filling(whole)
            if self._filling is None:
                tidy(self._target)
                if self.pool is not None:
                    self.pool.used(name)
                return
            self.frozen = self._filling.frozen
            reuse(self._filling, self.other_versions())
            self.checker = self._new_checker()
            self.tally.here_bytes = self._filling.landed_bytes
            if self.pool is not None:
                self._reserve(self.frozen.size_bytes if whole else 0)
        except BaseException as error:
            is_bare = self._filling is None or not self._filling.landed_bytes
            self._end()
            if self.pool is not None and is_bare and isinstance(error, CapacityError):
                self.pool.evict(name)  # a name and no bytes
            raise

    def other_versions(self) -> list[Path]:
        """Directories of this node that have another version of the same URI, or had one."""
        if self.pool is None:
            return [self._target]
        rows = self.pool.rows(self.frozen.uri)
        return [self.pool.directory(row.name) for row in rows if row.name != self.frozen.name]

    def _join_filling(self, whole: bool) -> PartialEntry | None:
        """Join who fills the entry; None when it is whole. It may become whole, and be tidied, at any moment.

        So it is looked at again after joining: when it was published in between, what was joined is a directory made
        anew, in which nothing has landed, and all of it would be fetched once more.
        """
        for left in reversed(range(JOINS_MAX)):
            receipt = whole_receipt(self._target, self.frozen.version)
            if receipt is not None:
                self.frozen, self._receipt, self._is_whole = receipt.frozen, receipt, True
                self.checker = self._new_checker()
                self.tally.here_bytes = self.frozen.size_bytes
                return None
            try:
                filling = PartialEntry(self._target, self.frozen, preallocate=whole, is_selected=self._is_selected)
            except ObjectNotFoundError:
                if not left:
                    raise
                continue
            if not left or not filling.is_published():
                return filling
            filling.close()
            filling.tidy()
        raise AssertionError("unreachable")

    def _reserve(self, size_bytes: int) -> None:
        if self.pool is not None and size_bytes > self._granted_bytes:
            space.reserve(self.pool, self.frozen, size_bytes)
            self._granted_bytes = size_bytes

    async def close(self) -> None:
        """Let go of the entry, and stop what is being fetched for it. Idempotent."""
        left = list(self._in_flight.values())
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        for whole in self._whole_files.values():
            await whole.close()
        if self.peer_fetch is not None:
            await self.peer_fetch.close()
        await asyncio.to_thread(self._end)

    async def _join(self, filling: PartialEntry) -> None:
        """Find the other nodes, once."""
        if self._sharing is None:
            return
        async with self._joining:
            sharing, self._sharing = self._sharing, None
            if sharing is None:
                return
            self.peer_fetch = await sharing.join(self, filling)
            if self.peer_fetch is not None:  # more at a time: what waits for a peer takes no room at the store
                self.fetches_max = max(self.fetches_max, self.peer_fetch.slots)
                self.gate = asyncio.Semaphore(self.fetches_max)

    def _end(self) -> None:
        if self._filling is not None:
            self._filling.close()
            self._filling.tidy()
        self._lease.close()

    # --- reading -------------------------------------------------------------------------------------------------

    def landed(self, path: str, byte_range: ByteRange | None = None) -> bool:
        """True when every chunk of the range (default: of the file) is on this node."""
        index = self.frozen.index_of(path)
        if self._is_whole or self._filling is None:
            return True
        wanted = byte_range or ByteRange(0, self.frozen.files[index].size_bytes)
        if self._has(index, wanted):
            return True
        self._filling.refresh()
        return self._has(index, wanted)

    def _has(self, index: int, byte_range: ByteRange) -> bool:
        return self._filling is None or all(self._filling.has(index, at) for at in self.frozen.touched(byte_range))

    def read_available(self, path: str, byte_range: ByteRange, into: memoryview) -> bool:
        """Copy the range into ``into`` if all of it has landed, and is as it landed; else False.

        Any thread, no event loop needed.
        """
        index = self._check(path, byte_range)
        try:
            return self.read_here(index, byte_range, into) and self.checker.is_good(index, byte_range, into)
        except StoreError as error:  # a disk that does not give it back is as good as one that gives other bytes
            log.warning("%s: %s", self.frozen.uri, error)
            if len(chunks := self.frozen.touched(byte_range)) == 1:
                self.checker.note_bad(index, chunks[0])
            return False

    def is_good(self, path: str, byte_range: ByteRange, data: memoryview) -> bool:
        """True when ``data``, which was read from ``path(path)``, is what landed there. Any thread. ``read_into`` has
        what is not good brought anew."""
        return self.checker.is_good(self._check(path, byte_range), byte_range, data)

    def _new_checker(self) -> Checker:
        entry = weakref.proxy(self)  # a cycle of the two would last until a garbage collection
        return Checker(
            self.frozen,
            lambda *chunk: entry.digest(*chunk),
            lambda *range_: entry.read_here(*range_),
            lambda: entry.directories(),
        )

    def digest(self, index: int, chunk: int) -> str:
        """With which digest a chunk landed; '' when that is not known."""
        if self._filling is not None and (digest := self._filling.digest(index, chunk)):
            return digest
        if self._receipt is None and self._is_whole:
            self._receipt = read_receipt(self._target)
        receipt = self._receipt
        if receipt is None or receipt.frozen.chunk_size_bytes != self.chunk_size_bytes:
            return ""
        return receipt.digest(index, chunk)

    def directories(self) -> list[Path]:
        return [self._target] if self._filling is None else [self._target, self._filling.incoming]

    def read_here(self, index: int, byte_range: ByteRange, into: memoryview) -> bool:
        path = self.frozen.files[index].path
        if not self._is_whole and self._filling is not None:
            if self._filling.read(index, byte_range, into):
                return True
            if not self._has(index, byte_range) or not self._look():
                return False
        return read_file(self._target / path, byte_range, into)

    def _check(self, path: str, byte_range: ByteRange) -> int:
        index = self.frozen.index_of(path)
        if not 0 <= byte_range.start <= byte_range.stop <= self.frozen.files[index].size_bytes:
            raise ConfigError(
                f"bytes {byte_range.start}-{byte_range.stop} of {path}: it has {self.frozen.files[index].size_bytes}",
                uri=self.frozen.uri,
            )
        return index

    async def read(self, path: str, byte_range: ByteRange) -> memoryview:
        """Return the range. What has not landed is fetched, and kept if there is room.

        Raises:
            IntegrityError: the bytes are not those of the frozen version.
            StoreError: they are not here and cannot be had.
        """
        into = memoryview(bytearray(max(0, byte_range.size_bytes)))
        await self.read_into(path, byte_range, into)
        return into.toreadonly()

    async def read_into(self, path: str, byte_range: ByteRange, into: memoryview) -> None:
        """``read`` into memory of the caller's: the first bytes of ``into``."""
        index = self._check(path, byte_range)
        into = memoryview(into).cast("B")
        if await asyncio.to_thread(self.read_available, path, byte_range, into):
            return
        chunks = self.frozen.touched(byte_range)
        await asyncio.gather(*(self._read_chunk(index, chunk, byte_range, into) for chunk in chunks))

    async def _read_chunk(self, index: int, chunk: int, byte_range: ByteRange, into: memoryview) -> None:
        """Copy what one chunk has of ``byte_range``: out of memory if it was just fetched, else out of the file."""
        at = self.frozen.chunk_range(index, chunk)
        part = ByteRange(max(at.start, byte_range.start), min(at.stop, byte_range.stop))
        target = into[part.start - byte_range.start : part.stop - byte_range.start]
        data = await self._ensure_once(index, chunk)
        if data is None:
            if await asyncio.to_thread(self.read_available, self.frozen.files[index].path, part, target):
                return
            data = await self._once(
                (index, chunk, True), partial(mend, self.checker, self.get, self.store.uri, self.target)
            )
            assert data is not None
        target[:] = memoryview(data)[part.start - at.start : part.stop - at.start]

    async def ensure(self, path: str, byte_range: ByteRange) -> None:
        """Have the range on this node. Raises as ``read``; CapacityError: there is no room to keep it."""
        index = self._check(path, byte_range)
        for _ in range(2):  # what has landed goes again when a fill of the whole file finds it damaged meanwhile
            await asyncio.gather(*(self._ensure_once(index, chunk) for chunk in self.frozen.touched(byte_range)))
            if self.landed(path, byte_range):
                return
        raise CapacityError(
            f"the cache has no room for {path} of {self.frozen.uri}",
            hint="`tierckpt cache ls` lists what it holds; raise cache_bytes_max, or unpin something",
        )

    async def wait(self, path: str, byte_range: ByteRange, timeout_seconds: float = STALL_SECONDS_MIN) -> None:
        """Return when the range has landed, whoever fetches it. Raises OperationTimeoutError."""
        async for _ in Poll(timeout_seconds):
            if self.landed(path, byte_range):
                return
        raise OperationTimeoutError(
            f"bytes {byte_range.start}-{byte_range.stop} of {path} have not arrived in {timeout_seconds:g} s",
            hint="Nobody may be fetching them: read() fetches, wait() does not",
            uri=self.frozen.uri,
            tier=Tier.LOCAL,
        )

    # --- one chunk -----------------------------------------------------------------------------------------------

    async def _ensure_once(self, index: int, chunk: int) -> Buffer | None:
        """Have one chunk here; the readers of this process share the work. Returns it if it was fetched just now."""
        return await self._once((index, chunk, False), self._ensure)

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
            del task  # it holds its error, whose traceback holds this frame

    def _settled(self, key: tuple[int, int, bool], done: asyncio.Task[Buffer | None]) -> None:
        self._in_flight.pop(key, None)
        if not done.cancelled():
            done.exception()  # looked at: those who waited for it may have been cancelled

    async def _ensure(self, index: int, chunk: int) -> Buffer | None:
        """Return None when the chunk has landed through somebody else."""
        filling = self._filling
        if filling is None:
            return None
        await self._join(filling)
        deadline = time.monotonic() + 2 * self.stall_seconds
        while True:
            filling.refresh()
            if filling.has(index, chunk):
                return None
            async with self._read_gate:
                with filling.claimed(index, chunk) as turn:
                    if turn == "fetch":
                        return await self.fetch(filling, index, chunk, keep=True)
                    if turn == "landed":
                        return None
            found = await self.await_other(filling, index, chunk)
            if found == "free":
                await asyncio.sleep(LOCAL.first_seconds)  # who keeps us from a free claim does not make us spin
            if found == "stalled" or time.monotonic() > deadline:
                log.warning("%s: waited too long for another process, fetching chunk %d too", filling.incoming, chunk)
                async with self._read_gate:
                    return await self.fetch(filling, index, chunk, keep=True)

    async def await_other(self, filling: PartialEntry, index: int, chunk: int) -> str:
        """Wait for whoever has claimed a chunk: ``landed``, ``free`` (it has let go or ended), or ``stalled``."""
        async for _ in Poll(self.stall_seconds):
            filling.refresh()
            if filling.has(index, chunk):
                return "landed"
            if not filling.is_claimed(index, chunk):
                return "free"
        return "stalled"

    async def fetch(
        self, filling: PartialEntry, index: int, chunk: int, *, keep: bool, request: object | None = None
    ) -> Buffer | None:
        """Fetch one chunk and land it. Returns it to ``keep``; then it need not find room.

        Where the store can, it is received in aligned memory, and digested and written from there.
        """
        begun, at = time.monotonic(), self.frozen.chunk_range(index, chunk)
        wanted_bytes = at.size_bytes if self.peer_fetch is not None or isinstance(self.store, ReadsInto) else 0
        peer: str | None = None
        with landing_memory(wanted_bytes) as memory:
            if self.peer_fetch is None:
                data, digest = await self.get(index, chunk, memory)
            else:
                data = memory if memory is not None else memoryview(bytearray(at.size_bytes))
                received = await self.peer_fetch.fetch_chunk(index, chunk, data, request)
                digest, peer = received.digest, received.source
            try:
                if not self.has_streamed(index, chunk):
                    await self._write_chunk(filling, index, chunk, data, digest, keep)
            finally:
                if self.peer_fetch is not None:
                    await self.peer_fetch.chunk_written(index, chunk)
            kept = bytes(data) if keep and memory is not None else data
        if not self.has_streamed(index, chunk):
            self.tally.note(self.frozen.files[index].path, at, time.monotonic() - begun, peer)
        return kept if keep else None

    async def _write_chunk(
        self, filling: PartialEntry, index: int, chunk: int, data: Buffer, digest: str, keep: bool
    ) -> None:
        if keep and time.monotonic() < self._no_room_until:
            return
        try:
            await self._grant(filling, len(data))
            await to_completion(asyncio.to_thread(filling.land, index, chunk, data, digest))
        except CapacityError as error:
            if not keep:
                raise
            log.warning("%s: reading without the cache: %s", self.frozen.uri, error.message)
            self._no_room_until = time.monotonic() + NO_ROOM_SECONDS
        except ObjectNotFoundError:
            filling.refresh()
            if not filling.has(index, chunk):  # else it was published meanwhile, by whoever was faster with this chunk
                raise

    async def _grant(self, filling: PartialEntry, size_bytes: int) -> None:
        """Reserve room for one chunk more, some way ahead."""
        if self.pool is None:
            return
        async with self._granting:
            wanted = min(self.frozen.size_bytes, filling.landed_bytes + size_bytes)
            if wanted > self._granted_bytes:
                ahead = max(GROW_BYTES, 16 * self.chunk_size_bytes)
                await to_completion(asyncio.to_thread(self._reserve, min(self.frozen.size_bytes, wanted + ahead)))

    async def read_store(self, index: int, chunk: int, into: memoryview) -> str:
        """Read one chunk from the store, verified, into ``into``; return its digest."""
        data, digest = await self.get(index, chunk, into)
        if data is not into:
            into[:] = data
        return digest

    async def get(self, index: int, chunk: int, memory: memoryview | None) -> tuple[Buffer, str]:
        """Return one chunk, in ``memory`` if there is some, and its digest, verified as far as anybody knows it."""
        item = self.frozen.files[index]
        try:
            return await self._get_verified(index, chunk, memory)
        except RangesIgnoredError:
            pass
        except PreconditionFailedError as error:
            raise _changed(item) from error
        try:
            return await self._get_streamed(index, chunk, memory)
        except PreconditionFailedError as error:
            raise _changed(item) from error

    async def _get_verified(self, index: int, chunk: int, memory: memoryview | None) -> tuple[Buffer, str]:
        item, at, reads = self.frozen.files[index], self.frozen.chunk_range(index, chunk), 0
        while True:
            try:
                data = await self._versions.read(item, at, memory)
                digest = await asyncio.to_thread(digest_of, data)
                BYTES.emit(at.size_bytes, tier=Tier.SHARED, direction="read")
                if item.digests and not same_digest(data, digest, item.digests[chunk]):
                    raise corrupt(item.path, at, Tier.SHARED, self.store.uri)
                return data, digest
            except IntegrityError as damage:
                reads += 1
                if not await reread(self.store, damage, reads):
                    raise

    async def _get_streamed(self, index: int, chunk: int, memory: memoryview | None) -> tuple[Buffer, str]:
        """A chunk of a file that its server gives only whole: all of it lands, and all who want a part share that."""
        at, filling = self.frozen.chunk_range(index, chunk), self._filling
        data = memory if memory is not None else memoryview(bytearray(at.size_bytes))
        if filling is not None and not self._look() and time.monotonic() >= self._no_room_until:
            try:
                await self._whole_file(filling, index).wait(chunk)
                filling.refresh()
                if await asyncio.to_thread(self.read_here, index, at, data) and (digest := self.digest(index, chunk)):
                    return data, digest
            except CapacityError as error:
                if self.pool is None:
                    raise
                log.warning("%s: reading without the cache: %s", self.frozen.uri, error.message)
                self._no_room_until = time.monotonic() + NO_ROOM_SECONDS
        one = OneChunk(chunk, data)
        await stream(self._versions, self.frozen, index, one)
        return data, one.digest

    def _whole_file(self, filling: PartialEntry, index: int) -> WholeFile:
        whole = self._whole_files.get(index)
        if whole is None or whole.is_over:
            whole = self._whole_files[index] = WholeFile(self, self._versions, filling, index)
        return whole

    async def land_streamed(self, filling: PartialEntry, index: int, chunk: int, data: Buffer, digest: str) -> None:
        """Write a chunk of a stream, which is noted as fetched here."""
        begun = time.monotonic()
        await self._write_chunk(filling, index, chunk, data, digest, keep=False)
        self._streamed.add((index, chunk))
        self.tally.note(self.frozen.files[index].path, self.frozen.chunk_range(index, chunk), time.monotonic() - begun)

    def has_streamed(self, index: int, chunk: int) -> bool:
        """True for a chunk that this process has landed out of a stream of its file."""
        return (index, chunk) in self._streamed

    # --- filling -------------------------------------------------------------------------------------------------

    async def fill(self, paths: Iterable[str] | None = None, listener: ProgressListener = ignore_progress) -> None:
        """Fetch every chunk of ``paths`` (default: all files) that is not here, together with whoever else does.

        When all files are whole the entry is published. Raises, with nothing published:
            PartialTransferError: some files could not be had; names each. All of them: the error of the first.
            IntegrityError: something changed or is damaged. CapacityError: no room. Both end the fill at once.
        """
        if self._filling is None or self.directory is not None:
            listener(Progress(str(self._target), self.frozen.size_bytes, self.frozen.size_bytes))
            return
        if await self._wait_for_host(self._filling, listener):
            return
        await self._copy_held(self._filling, listener)
        await self._join(self._filling)
        indexes = range(len(self.frozen.files)) if paths is None else [self.frozen.index_of(path) for path in paths]
        while True:
            await FetchJob(self, self._filling, indexes, listener).run()
            if len(indexes) < len(self.frozen.files) and not self._filling.has_all():
                return
            if await self._publish(self._filling):
                return

    async def _copy_held(self, filling: PartialEntry, listener: ProgressListener) -> None:
        """Copy the chunks that this node holds; one that is damaged there is left to be fetched."""
        copies = copies_of(self.frozen, self._held)
        todo = [(index, chunk) for index, chunk in reversed(copies) if not filling.has(index, chunk)]

        async def work() -> None:
            while todo:
                index, chunk = todo.pop()
                with filling.claimed(index, chunk) as turn:
                    copy = partial(copy_chunk, filling, index, chunk, *copies[index, chunk])
                    if turn == "fetch" and await to_completion(asyncio.to_thread(copy)):
                        self.tally.cached_bytes += self.frozen.chunk_range(index, chunk).size_bytes
                        note = f"{self.tally.cached_bytes >> 20} MiB from the node cache"
                        listener(
                            Progress(f"prefetch {self.frozen.uri}", filling.landed_bytes, self.frozen.size_bytes, note)
                        )

        for outcome in await asyncio.gather(*(work() for _ in range(COPIES_AT_A_TIME)), return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _wait_for_host(self, filling: PartialEntry, listener: ProgressListener) -> bool:
        """Wait while another host that has the file system mounted fills the entry. True when it is whole then.

        False when this host is to fill it: the other has ended, or has landed nothing for ``stall_seconds``.
        """
        what, landed, moved_at = f"prefetch {self.frozen.uri}", filling.progress_bytes(), time.monotonic()
        async for _ in Poll():
            try:
                if await asyncio.to_thread(filling.host.take):
                    return False
            except ObjectNotFoundError:
                if not self._look():
                    raise
            if self._look():
                listener(Progress(what, self.frozen.size_bytes, self.frozen.size_bytes))
                self.tally.others_bytes += self.frozen.size_bytes - self.tally.here_bytes
                return True
            listener(Progress(what, 0, self.frozen.size_bytes, "another node fills the directory"))
            if (now := await asyncio.to_thread(filling.progress_bytes)) != landed:
                landed, moved_at = now, time.monotonic()
            elif time.monotonic() > moved_at + self.stall_seconds:
                log.warning("%s: the node that fills it makes no progress, filling it here", self.target)
                return False
        raise AssertionError("unreachable")

    async def _publish(self, filling: PartialEntry) -> bool:
        """True when the entry is whole; False when something has to be fetched again."""
        async for _ in Poll(self.stall_seconds):
            if await to_completion(asyncio.to_thread(filling.publish)):
                break
            filling.refresh()
            if not filling.has_all():
                return False
        else:
            raise OperationTimeoutError(
                f"another process has been publishing {self._target} for {self.stall_seconds:g} s",
                hint="Look for a hung disk, or a hung tierckpt process on this node",
                tier=Tier.LOCAL,
            )
        self._is_whole = True
        return True


def _changed(item: FileSpec) -> IntegrityError:
    return IntegrityError(
        f"{item.key} changed in the store while it was being fetched",
        hint="Run it again to fetch the new version whole",
        file=item.path,
        tier=Tier.SHARED,
    )
