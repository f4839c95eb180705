"""A file whose server gives it only whole: one request streams it, and each chunk lands as it passes.

Between processes of a node one streams a file (the claim ``STREAM``), and the others see its chunks land. What a stream
that breaks off has landed stays; the next one begins at the first byte, and writes what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from ..format.manifest import digest_of
from ..stores.base import Store
from ..stores.common import ended
from ..stores.verified_read import again, corrupt
from ..telemetry import BYTES
from ..types import Buffer, Tier
from .direct_write import landing_memory
from .file_set import FileSet
from .partial_entry import STREAM, PartialEntry, same_digest
from .version_check import Versions


class StreamTarget(Protocol):
    """What is filled (``entry.CacheEntry``)."""

    frozen: FileSet

    async def await_other(self, filling: PartialEntry, index: int, chunk: int) -> str: ...

    async def land_streamed(self, filling: PartialEntry, index: int, chunk: int, data: Buffer, digest: str) -> None: ...


class WholeFile:
    """The transfer of one file of an entry, which begins at once. Close it."""

    def __init__(self, target: StreamTarget, versions: Versions, filling: PartialEntry, index: int) -> None:
        self._target, self._versions, self._filling, self._index = target, versions, filling, index
        self._landed: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._task = asyncio.ensure_future(self._run())

    async def wait(self, chunk: int) -> None:
        """Return when ``chunk`` has landed, or all has ended. Raises what ended the transfer."""
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
        """End the transfer, and look at its error. Idempotent."""
        self._task.cancel()
        await ended(self._task)

    async def _run(self) -> None:
        """Stream the file, or wait while another process does."""
        while True:
            with self._filling.claimed(self._index, STREAM) as turn:
                if turn != "later":
                    self._filling.refresh()
                    if not self._filling.has_file(self._index):
                        await stream(self._versions, self._target.frozen, self._index, self)
                    return
            before = self._filling.landed_bytes
            found = await self._target.await_other(self._filling, self._index, STREAM)
            if self._filling.has_file(self._index):
                return
            if found == "stalled" and self._filling.landed_bytes == before:
                await stream(self._versions, self._target.frozen, self._index, self)
                return

    def wants(self, chunk: int) -> bool:
        if self._filling.has(self._index, chunk):
            self._landed[chunk].set()
        return not self._landed[chunk].is_set()

    async def take(self, chunk: int, data: memoryview, digest: str) -> None:
        await self._target.land_streamed(self._filling, self._index, chunk, data, digest)
        self._landed[chunk].set()


class OneChunk:
    """Keeps one chunk of a stream: for a read that nothing may be kept of."""

    def __init__(self, chunk: int, into: memoryview) -> None:
        self._chunk, self._into, self.digest = chunk, into, ""

    def wants(self, chunk: int) -> bool:
        return chunk == self._chunk

    async def take(self, chunk: int, data: memoryview, digest: str) -> None:
        self._into[: len(data)], self.digest = data, digest


async def stream(versions: Versions, frozen: FileSet, index: int, target: WholeFile | OneChunk) -> None:
    """Read a file from its first byte, up to the last chunk that ``target`` wants; verify each, and hand it over.

    It begins again after a failure that may pass. One chunk is written while the next is received.

    Raises:
        IntegrityError: a chunk is not what it should be.
        PreconditionFailedError: the file has changed. StoreError: it cannot be had.
    """
    await again(cast(Store, versions.store), partial(_stream, versions, frozen, index, target))


async def _stream(versions: Versions, frozen: FileSet, index: int, target: WholeFile | OneChunk) -> None:
    item = frozen.files[index]
    wanted = [chunk for chunk in range(frozen.chunks_of(index)) if target.wants(chunk)]
    if not wanted:
        return
    taking: asyncio.Future[None] | None = None
    try:
        async with versions.reading(item) as fill:
            for chunk in range(wanted[-1] + 1):
                at = frozen.chunk_range(index, chunk)
                with contextlib.ExitStack() as stack:
                    memory = stack.enter_context(landing_memory(at.size_bytes))
                    view = memory if memory is not None else memoryview(bytearray(at.size_bytes))
                    await fill(view)
                    BYTES.emit(at.size_bytes, tier=Tier.SHARED, direction="read")
                    if taking is not None:
                        await taking
                        taking = None
                    if target.wants(chunk):
                        digest = await asyncio.to_thread(digest_of, view)
                        if item.digests and not same_digest(view, digest, item.digests[chunk]):
                            raise corrupt(item.path, at, Tier.SHARED, versions.store.uri)
                        taking = asyncio.ensure_future(_take(target, chunk, view, digest, stack.pop_all().close))
            if taking is not None:
                await taking
    finally:
        if taking is not None:
            await ended(taking)


async def _take(
    target: WholeFile | OneChunk, chunk: int, view: memoryview, digest: str, release: Callable[[], None]
) -> None:
    try:
        await target.take(chunk, view, digest)
    finally:
        release()
