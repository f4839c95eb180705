"""Move a file between the local tier and a store, verifying every byte on the way (P4).

File operations in threads run ``to_completion``: a cancelled one is awaited before its descriptor is closed, or it
would write to the next file with that descriptor.
"""

from __future__ import annotations

import asyncio
import glob
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..disk.durable import closing_file, make_dirs, matching, publish, translated
from ..disk.file_io import allocate, open_file, pread_all, pwrite_all
from ..disk.file_lock import lock_async
from ..disk.processes import stem_of
from ..errors import IntegrityError, TierckptError
from ..format.manifest import FileEntry
from ..ownership import file_mode
from ..stores import verified_read
from ..stores.base import Store, acquired, to_completion
from ..stores.verified_read import get_checked, stored_bytes
from ..telemetry import BYTES, FILE_SECONDS, FILES
from ..types import Buffer, ByteRange, Tier
from .rate_limiter import DrainFlow

if TYPE_CHECKING:
    from ..stores.base import RangeSource

FETCH_TIMEOUT_SECONDS = 3600.0

OnBytes = Callable[[int], None]


async def send(
    store: Store,
    path: Path,
    entry: FileEntry,
    chunk_size_bytes: int,
    on_bytes: OnBytes,
    flow: DrainFlow | None = None,
    *,
    replaces: bool = False,
) -> None:
    """Put the local file ``path`` under ``entry.key``. On return it is whole and durable there.

    An object of this name and size is not sent again: names are new for every save, and puts are atomic. With
    ``replaces`` the file is always sent. On a shared file system it is linked.

    This is one attempt, which the caller repeats. A failed attempt uncounts its bytes.

    Raises:
        IntegrityError: the local bytes differ from the staged ones; the transfer is aborted without an object.
    """
    counted = 0

    def count(size_bytes: int) -> None:
        nonlocal counted
        counted += size_bytes
        on_bytes(size_bytes)

    try:
        if not replaces and await _is_stored(store, path, entry):
            count(entry.size_bytes)
            return
        begun = time.monotonic()
        pieces = _checked_chunks(path, entry, chunk_size_bytes, count, flow)
        await store.put_stream(entry.key, pieces, entry.size_bytes)
        _record_operation("send", begun)
    except BaseException:
        count(-counted)
        raise


async def _is_stored(store: Store, path: Path, entry: FileEntry) -> bool:
    if await stored_bytes(store, entry.key) == entry.size_bytes:
        return True
    if await store.link(entry.key, path):
        BYTES.emit(entry.size_bytes, tier=Tier.SHARED, direction="linked")
        return True
    return False


async def _checked_chunks(
    path: Path, entry: FileEntry, chunk_size_bytes: int, on_bytes: OnBytes, flow: DrainFlow | None
) -> AsyncIterator[Buffer]:
    in_thread = flow.limiter.in_background if flow is not None else asyncio.to_thread
    with closing_file(await acquired(asyncio.to_thread(open_file, path), os.close)) as file:
        for byte_range, digest in entry.chunks(chunk_size_bytes):
            if flow is not None:
                await flow.spend(byte_range.size_bytes)
            chunk = await to_completion(in_thread(pread_all, file, byte_range, path))
            is_good = await in_thread(verified_read.is_good, chunk, digest, byte_range)
            verified_read.expect(is_good, entry, byte_range, Tier.LOCAL, str(path))
            yield chunk
            BYTES.emit(len(chunk), tier=Tier.SHARED, direction="written")
            on_bytes(len(chunk))


async def fetch(
    store: RangeSource, entry: FileEntry, path: Path, chunk_size_bytes: int, on_bytes: OnBytes, concurrency: int
) -> None:
    """Fetch ``entry`` to ``path``, verified by chunk; whole and durable, or not at all.

    One process of the node fetches a file; the others wait for it. Raises IntegrityError for damage in the store.
    """
    make_dirs(path.parent)
    stem = stem_of(path.name)
    async with lock_async(path.with_name(f".{stem}.lock"), FETCH_TIMEOUT_SECONDS, str(path)):
        if await asyncio.to_thread(path.exists):
            on_bytes(entry.size_bytes)
            return
        begun = time.monotonic()
        for left in matching(path.parent, f".{glob.escape(stem)}.*.tmp"):
            left.unlink(missing_ok=True)  # of a killed process: the lock excludes other fetchers
        temporary = path.with_name(f".{stem}.{secrets.token_hex(4)}.tmp")
        gate = asyncio.Semaphore(concurrency)
        creation = asyncio.to_thread(create_file, temporary, entry.size_bytes)
        with closing_file(await acquired(creation, lambda file: _discard(file, temporary))) as file:

            async def move(byte_range: ByteRange, digest: str) -> None:
                async with gate:
                    chunk = await get_checked(store, entry, byte_range, digest)
                    await to_completion(asyncio.to_thread(pwrite_all, file, chunk, byte_range.start, temporary))
                    on_bytes(byte_range.size_bytes)

            try:
                async with asyncio.TaskGroup() as group:
                    for byte_range, digest in entry.chunks(chunk_size_bytes):
                        group.create_task(move(byte_range, digest))
                with translated(path):
                    await to_completion(asyncio.to_thread(publish, temporary, path, file))
                _record_operation("fetch", begun)
            except BaseException as error:
                temporary.unlink(missing_ok=True)
                raise error_to_report(error) from None


def _record_operation(operation: str, begun: float) -> None:
    FILES.emit(1, operation=operation)
    FILE_SECONDS.emit(time.monotonic() - begun, operation=operation)


def error_to_report(error: BaseException) -> BaseException:
    """Return damage if a group has some, else a permanent error, else any."""
    flat = _flatten(error)
    ours = [one for one in flat if isinstance(one, TierckptError)]
    damage = [one for one in ours if isinstance(one, IntegrityError)]
    final = [one for one in ours if not one.retryable]
    return next(iter([*damage, *final, *ours, *flat]))


def _flatten(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _flatten(inner)]
    return [error]


def _discard(file: int, path: Path) -> None:
    os.close(file)
    path.unlink(missing_ok=True)


def create_file(path: Path, size_bytes: int) -> int:
    with translated(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file_mode(path))
        try:
            allocate(file, size_bytes)
            os.ftruncate(file, size_bytes)
        except BaseException:
            _discard(file, path)
            raise
        return file
