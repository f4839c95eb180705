"""Reads and verifies chunks of a frozen version from its store.

Some servers reject ``If-Match``, or return other etags for reads than for listings. Then the store is queried once per
file: if the response equals the listing, the file has not changed.

If a server answers a range with the whole file, one process of the node streams it (the claim ``STREAM``), and each
chunk lands as it passes. A broken stream restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from ..errors import CapacityError, IntegrityError, PreconditionFailedError, StoreError, TierckptError
from ..format.manifest import digest_of
from ..stores.base import RangesIgnoredError, RangeSource, ReadsInto, ReadsWhole, Store, ended
from ..stores.verified_read import again, corrupt, verified
from ..telemetry import BYTES, logger
from ..types import Buffer, ByteRange, Tier
from .chunk_writer import ChunkWriter
from .direct_write import receive_memory
from .file_set import FileSet, FileSpec
from .partial_entry import STREAM, same_digest

log = logger("prefetch")

REFUSALS = {400, 405, 501}


class StoreChunks:
    def __init__(
        self, store: RangeSource, frozen: FileSet, writer: ChunkWriter | None = None, stall_seconds: float = 60.0
    ) -> None:
        self.store, self.frozen = store, frozen
        self._versions, self._writer, self._stall_seconds = Versions(store), writer, stall_seconds
        self._streams: dict[int, FileStream] = {}

    async def read(self, index: int, chunk: int, into: memoryview | None = None) -> tuple[Buffer, str]:
        """Return one chunk, in ``into`` if given, and its digest.

        Raises IntegrityError: damaged in the store, or changed since it was listed. StoreError.
        """
        item, chunk_range = self.frozen.files[index], self.frozen.chunk_range(index, chunk)

        async def read() -> tuple[Buffer, str]:
            data = await self._versions.read(item, chunk_range, into)
            digest = await asyncio.to_thread(digest_of, data)
            BYTES.emit(chunk_range.size_bytes, tier=Tier.SHARED, direction="read")
            if item.digests and not same_digest(data, digest, item.digests[chunk]):
                raise corrupt(item.path, chunk_range, Tier.SHARED, self.store.uri)
            return data, digest

        try:
            try:
                data, digest = await verified(self.store, read)
            except RangesIgnoredError:
                data, digest = await self._read_streamed(index, chunk, into)
        except PreconditionFailedError as error:
            raise IntegrityError(
                f"{item.key} changed in the store while it was being fetched",
                hint="Run it again to fetch the new version whole",
                file=item.path,
                tier=Tier.SHARED,
            ) from error
        if into is not None and data is not into:
            into[:] = data
        return data, digest

    async def _read_streamed(self, index: int, chunk: int, into: memoryview | None) -> tuple[Buffer, str]:
        chunk_range, writer = self.frozen.chunk_range(index, chunk), self._writer
        data = into if into is not None else memoryview(bytearray(chunk_range.size_bytes))
        if writer is not None and writer.has_room and not await asyncio.to_thread(writer.partial_entry.is_published):
            try:
                await self._stream_of(writer, index).wait(chunk)
                if await asyncio.to_thread(writer.partial_entry.read, index, chunk_range, data):
                    return data, writer.partial_entry.digest(index, chunk)
            except CapacityError as error:
                if not writer.is_cache:
                    raise
                writer.note_full(error)
        one = OneChunk(chunk, data)
        await _stream(self._versions, self.frozen, index, one)
        return data, one.digest

    def _stream_of(self, writer: ChunkWriter, index: int) -> FileStream:
        stream = self._streams.get(index)
        if stream is None or stream.is_over:
            stream = self._streams[index] = FileStream(self._versions, writer, index, self._stall_seconds)
        return stream

    async def close(self) -> None:
        for stream in self._streams.values():
            await stream.close()


class Versions:
    def __init__(self, store: RangeSource) -> None:
        self.store = store
        self._etags: dict[str, str | None] = {}
        """Of files read without ``If-Match``, which was refused: the etag of ``head``."""

    async def read(self, item: FileSpec, byte_range: ByteRange, memory: memoryview | None) -> Buffer:
        """Return a range, in ``memory`` if given. Raises PreconditionFailedError: the file has changed."""
        while True:
            etag = self._condition(item)
            try:
                if memory is not None and isinstance(self.store, ReadsInto):
                    await self.store.get_range_into(item.key, byte_range, memory, if_match=etag)
                    data: Buffer = memory
                else:
                    data = await self.store.get_range(item.key, byte_range, if_match=etag)
                break
            except StoreError as error:
                await self._retry_after_refusal(item, etag, error)
        await self._check_after(item)
        return data

    @contextlib.asynccontextmanager
    async def reading(self, item: FileSpec) -> AsyncIterator[Callable[[memoryview], Awaitable[None]]]:
        if not isinstance(self.store, ReadsWhole):
            raise StoreError(f"{self.store.uri} does not return whole files", file=item.path, tier=Tier.SHARED)
        async with contextlib.AsyncExitStack() as stack:
            while True:
                etag = self._condition(item)
                try:
                    receive = await stack.enter_async_context(self.store.reading(item.key, if_match=etag))
                    break
                except StoreError as error:
                    await self._retry_after_refusal(item, etag, error)

            async def fill(view: memoryview) -> None:
                await receive(view)
                await self._check_after(item)

            yield fill

    def _condition(self, item: FileSpec) -> str | None:
        return None if item.key in self._etags else item.etag

    async def _retry_after_refusal(self, item: FileSpec, etag: str | None, refusal: StoreError) -> None:
        """Return if the file is unchanged, to be read without a condition; else raise."""
        is_refused = isinstance(refusal, PreconditionFailedError) or refusal.context.get("status") in REFUSALS
        if etag is None or not is_refused or not isinstance(self.store, Store):
            raise refusal
        if not await self._has_listed(self.store, item, refusal):
            raise self._changed(item) from refusal

    async def _check_after(self, item: FileSpec) -> None:
        if item.key in self._etags:
            assert isinstance(self.store, Store)
            found = await self.store.head(item.key)
            if (found.size_bytes, found.etag) != (item.size_bytes, self._etags[item.key]):
                raise self._changed(item)

    def _changed(self, item: FileSpec) -> PreconditionFailedError:
        return PreconditionFailedError(f"{item.key} has changed", uri=self.store.uri, key=item.key)

    async def _has_listed(self, store: Store, item: FileSpec, refusal: TierckptError) -> bool:
        key = item.key
        found = await store.head(key)
        if found.size_bytes != item.size_bytes:
            return False
        if found.etag != item.etag:
            below = key.rpartition("/")[0]
            if not [info async for info in store.list(below) if (info.key, info.etag) == (key, item.etag)]:
                return False
        log.info("%s: %s is read without a condition, and compared after: %s", store.uri, key, refusal.message)
        self._etags[key] = found.etag
        return True


class FileStream:
    def __init__(self, versions: Versions, writer: ChunkWriter, index: int, stall_seconds: float) -> None:
        self._versions, self._writer, self._filling, self._index = versions, writer, writer.partial_entry, index
        self._stall_seconds = stall_seconds
        self._landed: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._task = asyncio.ensure_future(self._run())

    async def wait(self, chunk: int) -> None:
        waiter = asyncio.ensure_future(self._landed[chunk].wait())
        try:
            await asyncio.wait([self._task, waiter], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if self._task.done() and not self._landed[chunk].is_set():
            self._task.result()

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def close(self) -> None:
        self._task.cancel()
        await ended(self._task)

    async def _run(self) -> None:
        found = "free"
        while not self._filling.has_file(self._index):
            with self._filling.claimed(self._index, STREAM) as action:
                if action != "later" or found == "stalled":
                    if not self._filling.has_file(self._index):
                        await _stream(self._versions, self._writer.frozen, self._index, self)
                    return
            before = self._filling.landed_bytes
            found = await self._filling.await_other(self._index, STREAM, self._stall_seconds)
            if self._filling.landed_bytes != before:
                found = "free"

    def wants(self, chunk: int) -> bool:
        if self._filling.has(self._index, chunk):
            self._landed[chunk].set()
        return not self._landed[chunk].is_set()

    async def take(self, chunk: int, data: memoryview, digest: str) -> None:
        await self._writer.write_streamed(self._index, chunk, data, digest)
        self._landed[chunk].set()


class OneChunk:
    def __init__(self, chunk: int, into: memoryview) -> None:
        self._chunk, self._into, self.digest = chunk, into, ""

    def wants(self, chunk: int) -> bool:
        return chunk == self._chunk

    async def take(self, chunk: int, data: memoryview, digest: str) -> None:
        self._into[: len(data)], self.digest = data, digest


async def _stream(versions: Versions, frozen: FileSet, index: int, target: FileStream | OneChunk) -> None:
    """Read a file up to the last chunk that ``target`` wants; verify and pass on each chunk.

    Restarts after a transient failure. Raises IntegrityError, PreconditionFailedError, StoreError.
    """
    await again(versions.store, partial(_stream_once, versions, frozen, index, target))


async def _stream_once(versions: Versions, frozen: FileSet, index: int, target: FileStream | OneChunk) -> None:
    item = frozen.files[index]
    requested = [chunk for chunk in range(frozen.chunks_of(index)) if target.wants(chunk)]
    if not requested:
        return
    taking: asyncio.Future[None] | None = None
    try:
        async with versions.reading(item) as fill:
            for chunk in range(requested[-1] + 1):
                chunk_range = frozen.chunk_range(index, chunk)
                with contextlib.ExitStack() as stack:
                    memory = stack.enter_context(receive_memory(chunk_range.size_bytes))
                    view = memory if memory is not None else memoryview(bytearray(chunk_range.size_bytes))
                    await fill(view)
                    BYTES.emit(chunk_range.size_bytes, tier=Tier.SHARED, direction="read")
                    if taking is not None:
                        await taking
                        taking = None
                    if target.wants(chunk):
                        digest = await asyncio.to_thread(digest_of, view)
                        if item.digests and not same_digest(view, digest, item.digests[chunk]):
                            raise corrupt(item.path, chunk_range, Tier.SHARED, versions.store.uri)
                        taking = asyncio.ensure_future(target.take(chunk, view, digest))
                        taking.add_done_callback(partial(_close, stack.pop_all()))
            if taking is not None:
                await taking
    finally:
        if taking is not None:
            await ended(taking)


def _close(stack: contextlib.ExitStack, _: asyncio.Future[None]) -> None:
    stack.close()
