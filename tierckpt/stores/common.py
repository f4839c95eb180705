"""What the stores share: keys that stay inside the root, and work that is never left half done."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError, IntegrityError
from ..types import Buffer, ByteRange

T = TypeVar("T")

_OWNED = re.compile(r"\.([0-9a-f]{8})([0-9a-f]{8})([0-9a-f]{16})[0-9a-f]{8}\.tmp$")
_TEMPORARY = re.compile(r"^\..+\.[0-9a-f]{8,}\.tmp$", re.DOTALL)


def is_temporary(name: str) -> bool:
    """True for ``.<name>.<random>.tmp``: an object on its way, never listed."""
    return bool(_TEMPORARY.match(name))


def temporary_of_this_process(name: str) -> str:
    """A temporary name that says whose it is, so that ``is_abandoned`` can tell."""
    return f".{name}.{_namespace():08x}{os.getpid():08x}{_started(os.getpid()):016x}{secrets.token_hex(4)}.tmp"


def is_abandoned(name: str) -> bool:
    """True for a temporary name of a process of this machine that has ended: nobody goes on with it.

    A number that the system has given again has another start. Of a process of another container nobody can tell here.
    """
    match = _OWNED.search(name)
    if match is None or int(match[1], 16) != _namespace() or not _namespace():
        return False
    return _started(int(match[2], 16)) != int(match[3], 16)


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino & 0xFFFFFFFF  # noqa: PTH116
    except OSError:
        return 0


def _started(pid: int) -> int:
    """Clock ticks since boot (proc(5), field 22 of stat); 0 without such a process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def check_key(key: str) -> str:
    """Return ``key`` when it names something strictly below the store's root (S5).

    Raises:
        ConfigError: empty, absolute, or with an empty, ``.`` or ``..`` part, or a NUL.
    """
    if "\0" in key or any(part in {"", ".", ".."} for part in key.split("/")):
        raise ConfigError(f"{key!r} is not a key below a store's root", hint="Write a/b, no empty or relative parts")
    return key


def check_prefix(prefix: str) -> str:
    """Return the directory ``prefix`` without its trailing slash; '' is the root."""
    stripped = prefix.rstrip("/")
    return check_key(stripped) if stripped else ""


async def settled(work: Awaitable[T]) -> T:
    """Await ``work`` to its end even when the caller is cancelled meanwhile, then let the cancellation through.

    A thread that still writes to a file descriptor, or a request that still creates a multipart transfer, must finish
    before its owner closes or aborts it: cut short, it would write into a reused descriptor or leave parts behind.
    The wait is bounded because ``work`` is: one request with the store's own timeout, or one file operation.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await ended(task)
        raise
    finally:
        del task  # it holds its error, whose traceback holds this frame


async def ended(work: asyncio.Future[Any]) -> None:
    """Return when ``work`` has ended, however often the caller is cancelled meanwhile: who cancels, and then closes
    what it has cancelled, does so twice. Its error is looked at, so that asyncio does not log it."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])
    if not work.cancelled():
        work.exception()


@contextlib.asynccontextmanager
async def closing(pieces: AsyncIterator[Buffer]) -> AsyncIterator[AsyncIterator[Buffer]]:
    """Close an iterator of pieces (its files) when the transfer ends, however it ends."""
    try:
        yield pieces
    finally:
        aclose = getattr(pieces, "aclose", None)
        if aclose is not None:
            await aclose()


def check_size(uri: str, key: str, expected_bytes: int, got_bytes: int) -> None:
    """Raise IntegrityError when the pieces of a put do not add up: better no object than a short one."""
    if got_bytes != expected_bytes:
        raise IntegrityError(
            f"the pieces of {key} were to be {expected_bytes} bytes and are {got_bytes}",
            hint="The object was not written; the source changed while it was read",
            uri=uri,
        )


def short_answer(uri: str, key: str, wanted: ByteRange, got_bytes: int | None) -> IntegrityError:
    """The object ends before the range does."""
    got = "fewer" if got_bytes is None else str(got_bytes)
    return IntegrityError(
        f"bytes {wanted.start}-{wanted.stop} of {key} were asked for and {got} came back: the object is too short",
        hint="`tierckpt verify` lists what is damaged",
        uri=uri,
    )


def check_range(byte_range: ByteRange) -> ByteRange:
    """Raise ConfigError unless ``0 <= start <= stop``."""
    if not 0 <= byte_range.start <= byte_range.stop:
        raise ConfigError(f"{byte_range} is not a range of bytes")
    return byte_range
