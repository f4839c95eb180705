"""Verified reads: a chunk with a wrong digest is requested again, on a new connection.

A directory is read once: a second read of a disk returns the same bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from ..disk.durable import closing_file
from ..disk.file_io import open_file, pread_all
from ..errors import BucketNotFoundError, IntegrityError, ObjectNotFoundError
from ..format.manifest import FileEntry, has_digest
from ..telemetry import BYTES, logger
from ..types import Buffer, ByteRange, Tier
from .base import RangeSource, Recoverable, Store

log = logger("retry")

T = TypeVar("T")

READS_MAX = 3


def again(store: RangeSource, work: Callable[[], Awaitable[T]]) -> Awaitable[T]:
    """Retry ``work``, which must be idempotent, after transient failures."""
    return store.again(work) if isinstance(store, Recoverable) else work()


async def if_present(request: Awaitable[T]) -> T | None:
    """Return None for an object that is missing. Raises BucketNotFoundError, which says nothing about an object."""
    try:
        return await request
    except BucketNotFoundError:
        raise
    except ObjectNotFoundError:
        return None
    finally:
        del request  # as in base.to_completion


async def stored_bytes(store: Store, key: str) -> int:
    """Return the size of an object, -1 without it. Cost: one HEAD."""
    try:
        return (await store.head(key)).size_bytes
    except ObjectNotFoundError:
        return -1


async def verified(store: RangeSource, read: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``read``, which reads and checks; repeat it after damage, on a new connection.

    Raises IntegrityError: damaged in ``READS_MAX`` reads, or the retry budget is spent.
    """
    reads = 0
    while True:
        try:
            return await read()
        except IntegrityError as damage:
            reads += 1
            if reads >= READS_MAX or not isinstance(store, Recoverable):
                raise
            log.warning("%s: a damaged answer, asking again on a new connection: %s", store.uri, damage.message)
            await store.reconnect(damage)


async def available(store: Store) -> bool:
    """Wait, without limit, until ``store`` is up. False, at once, if it was not down."""
    return await store.available() if isinstance(store, Recoverable) else False


async def get_checked(store: RangeSource, entry: FileEntry, byte_range: ByteRange, digest: str) -> Buffer:
    """Return a verified chunk of ``entry``. Raises IntegrityError."""

    async def read() -> Buffer:
        chunk = await store.get_range(entry.key, byte_range)
        await check(chunk, digest, entry, byte_range, getattr(store, "tier", Tier.SHARED), store.uri)
        return chunk

    return await verified(store, read)


class LocalFiles:
    tier = Tier.LOCAL

    def __init__(self, directory: Path) -> None:
        self.uri = str(directory)
        self._directory = directory

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        return await asyncio.to_thread(self._read, self._directory / key, byte_range)

    def _read(self, path: Path, byte_range: ByteRange) -> bytes:
        with closing_file(open_file(path)) as file:
            return pread_all(file, byte_range, path)


async def get_whole(source: RangeSource, entry: FileEntry, chunk_size_bytes: int) -> bytes:
    chunks = entry.chunks(chunk_size_bytes)
    return b"".join([bytes(await get_checked(source, entry, at, digest)) for at, digest in chunks])


async def check_file(
    source: RangeSource, entry: FileEntry, chunk_size_bytes: int, on_bytes: Callable[[int], None] = lambda _: None
) -> None:
    """Compare every digest of ``entry``. Raises IntegrityError at the first damaged chunk."""
    for byte_range, digest in entry.chunks(chunk_size_bytes):
        chunk = await source.get_range(entry.key, byte_range)
        await check(chunk, digest, entry, byte_range, getattr(source, "tier", Tier.SHARED), source.uri)
        on_bytes(byte_range.size_bytes)


async def check(chunk: Buffer, digest: str, entry: FileEntry, byte_range: ByteRange, tier: Tier, where: str) -> None:
    expect(await asyncio.to_thread(is_good, chunk, digest, byte_range), entry, byte_range, tier, where)


def is_good(chunk: Buffer, digest: str, byte_range: ByteRange) -> bool:
    return len(chunk) == byte_range.size_bytes and has_digest(chunk, digest)


def expect(good: bool, entry: FileEntry, byte_range: ByteRange, tier: Tier, where: str) -> None:
    BYTES.emit(byte_range.size_bytes, tier=tier, direction="read")
    if not good:
        raise corrupt(entry.path, byte_range, tier, where)


def corrupt(path: str, byte_range: ByteRange, tier: Tier, where: str) -> IntegrityError:
    hint = "Restore reads another copy when there is one; `tierckpt verify --read-data` lists every bad file"
    message = f"bytes {byte_range.start}-{byte_range.stop} of {path} are not the bytes that were saved"
    return IntegrityError(message, hint=hint, file=path, tier=tier, where=where)


def check_bytes(data: bytes, entry: FileEntry, chunk_size_bytes: int, where: str) -> None:
    view = memoryview(data)
    good = len(data) == entry.size_bytes and all(
        has_digest(view[chunk.start : chunk.stop], digest) for chunk, digest in entry.chunks(chunk_size_bytes)
    )
    if not good:
        hint = "It was damaged on its way or in the store"
        raise IntegrityError(f"{entry.key} is not what was saved", hint=hint, file=entry.path, where=where)
