"""Checks of keys and ranges, and ``to_completion`` for work that must not be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from ..config import MiB
from ..errors import ConfigError, IntegrityError
from ..quantities import round_up
from ..types import Buffer, ByteRange, ObjectInfo

T = TypeVar("T")


def check_key(key: str) -> str:
    """Return ``key`` if it is a plain path strictly below the store's root (S5), else raise ConfigError."""
    if "\0" in key or has_odd_parts(key):
        raise ConfigError(f"{key!r} is not a key below a store's root", hint="Write a/b, no empty or relative parts")
    return key


def has_odd_parts(key: str) -> bool:
    return any(part in {"", ".", ".."} for part in key.split("/"))


def check_prefix(prefix: str) -> str:
    stripped = prefix.rstrip("/")
    return check_key(stripped) if stripped else ""


async def to_completion(work: Awaitable[T]) -> T:
    """Await ``work`` to its end even if the caller is cancelled, then raise the cancellation.

    A thread could else write into a reused descriptor, or a request leave parts behind. The wait is bounded: one
    request or one file operation.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await ended(task)
        raise
    finally:
        del task  # breaks a reference cycle


async def ended(work: asyncio.Future[Any]) -> None:
    """Return at the end of ``work``, even after repeated cancellation."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])
    if not work.cancelled():
        work.exception()


@contextlib.asynccontextmanager
async def closing(pieces: AsyncIterator[Buffer]) -> AsyncIterator[AsyncIterator[Buffer]]:
    try:
        yield pieces
    finally:
        aclose = getattr(pieces, "aclose", None)
        if aclose is not None:
            await aclose()


def check_size(uri: str, key: str, expected_bytes: int, got_bytes: int) -> None:
    """Raise IntegrityError for a wrong total: no object beats a short one."""
    if got_bytes != expected_bytes:
        raise IntegrityError(
            f"the pieces of {key} were to be {expected_bytes} bytes and are {got_bytes}",
            hint="The object was not written; the source changed while it was read",
            uri=uri,
        )


def short_answer(uri: str, key: str, byte_range: ByteRange, got_bytes: int | None) -> IntegrityError:
    got = "fewer" if got_bytes is None else str(got_bytes)
    start, stop = byte_range.start, byte_range.stop
    return IntegrityError(
        f"bytes {start}-{stop} of {key} were asked for and {got} came back: the object is too short",
        hint="`tierckpt verify` lists damaged files",
        uri=uri,
    )


def check_range(byte_range: ByteRange) -> ByteRange:
    if not 0 <= byte_range.start <= byte_range.stop:
        raise ConfigError(f"{byte_range} is not a range of bytes")
    return byte_range


async def limited(request: Awaitable[T], timeout_seconds: float) -> T:
    async with asyncio.timeout(timeout_seconds):
        return await request


def part_size_bytes(size_bytes: int) -> int:
    smallest = -(-size_bytes // PARTS_MAX)
    return max(PART_SIZE_BYTES_MIN, round_up(smallest, MiB))


def frozen_piece(piece: Buffer) -> Buffer:
    owner = piece.obj if isinstance(piece, memoryview) else piece
    return piece if isinstance(owner, bytes) else bytes(piece)


PART_SIZE_BYTES_MIN = 8 * MiB
PARTS_MAX = 10_000
"""Limit of S3 and GCS."""


class FolderMarkers:
    """Tells folder markers (``x/``, ``x_$folder$``, an empty ``x`` next to ``x/...``) from other objects."""

    def __init__(self) -> None:
        self._empty: list[ObjectInfo] = []
        self._folders: set[str] = set()

    def take(self, info: ObjectInfo) -> bool:
        folder = info.key.rpartition("/")[0]
        while folder and folder not in self._folders:
            self._folders.add(folder)
            folder = folder.rpartition("/")[0]
        if info.size_bytes:
            return True
        if not info.key.endswith(("/", HADOOP_MARKER)):
            self._empty.append(info)
        return False

    def empty(self) -> list[ObjectInfo]:
        """After the listing, return the empty objects that are no markers."""
        return [info for info in self._empty if info.key not in self._folders]


HADOOP_MARKER = "_$folder$"
