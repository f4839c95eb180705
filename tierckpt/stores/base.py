"""The store protocol, async only: the object operations that the mover needs. And checks and errors that stores share.

Contract, tested for every store (tests/contract/store_contract.py):
    S1  ``put`` and ``put_stream`` are all or nothing: an error or a cancellation leaves the old object. A piece may be
        reused after the next request.
    S2  ``put(if_absent=True)`` has exactly one winner, on stores where ``has_put_if_absent``; elsewhere it checks, then
        puts.
    S3  When a put returns, the object is durable (for a directory: file and directory fsynced).
    S4  Errors are tierckpt's own (errors.py), chosen by type or status code, never by message text.
    S5  Keys are relative to the store's root, '/'-separated, never starting with '/'.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit

from ..config import MiB
from ..errors import ConfigError, EndpointError, IntegrityError, StoreError, StoreUnavailableError, TierckptError
from ..resources import UNCANCELLED
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from .proxies import proxy_for

P = ParamSpec("P")
T = TypeVar("T")


@runtime_checkable
class Store(Protocol):
    """Objects under one root. One event loop at a time."""

    uri: str

    has_put_if_absent: bool

    async def head(self, key: str) -> ObjectInfo:
        """Raises ObjectNotFoundError."""

    async def get(self, key: str) -> bytes:
        """Return a whole small object. Raises ObjectNotFoundError."""

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        """Return exactly ``byte_range``, never a short buffer.

        Raises ObjectNotFoundError, PreconditionFailedError (another etag), IntegrityError (short object).
        """

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Write a small object. Raises PreconditionFailedError if it exists and ``if_absent``."""

    async def put_stream(self, key: str, pieces: AsyncIterator[Buffer], size_bytes: int) -> None:
        """Write a large object from pieces of any size, with only a few of them in memory.

        An error of the iterator aborts the transfer and is raised.
        """

    async def link(self, key: str, source: Path) -> bool:
        """Link ``source`` to ``key``, durably; False if unsupported (then copy)."""
        return False

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield every object under ``prefix``, recursively, unordered."""

    async def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        """Return the sorted names of the directories directly under ``prefix``."""

    async def list_level(self, prefix: str = "") -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
        """Return the objects and directory names directly under ``prefix``; None: no such directory."""

    async def delete(self, key: str) -> None:
        """Remove an object; no error if it is missing."""

    async def delete_dir(self, prefix: str) -> None:
        """Remove every object under ``prefix``, and empty directories."""

    async def close(self) -> None:
        """Release connections. Idempotent."""


@runtime_checkable
class Conditional(Protocol):
    """Stores that replace or delete an object conditionally. Servers that ignore conditions do it always."""

    async def replace(self, key: str, data: Buffer, *, etag: str) -> None:
        """``put`` over the version ``etag`` only. Raises PreconditionFailedError, also for a removed object."""

    async def remove(self, key: str, *, etag: str) -> None:
        """``delete`` the version ``etag`` only. Raises PreconditionFailedError; no error for a removed object."""


@runtime_checkable
class ReadsInto(Protocol):
    async def get_range_into(
        self, key: str, byte_range: ByteRange, into: memoryview, *, if_match: str | None = None
    ) -> None:
        """``get_range`` into the first bytes of ``into``, which is not written after return."""


class RangesIgnoredError(StoreError):
    """The server sends the whole object for a range: use ``ReadsWhole``."""


class OddKeyError(StoreError):
    """A listing has a key that is no path (``a//b``)."""


@runtime_checkable
class ReadsWhole(Protocol):
    def reading(
        self, key: str, *, if_match: str | None = None
    ) -> AbstractAsyncContextManager[Callable[[memoryview], Awaitable[None]]]:
        """Open an object; yield a function that fills a view with its next bytes. One request for all.

        Both raise as ``get_range``; after StoreUnavailableError it restarts at the first byte.
        """


@runtime_checkable
class Recoverable(Protocol):
    """Network stores, which recover from transient failures."""

    def again(self, work: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Retry ``work``, made of this store's verbs."""

    async def reconnect(self, damage: TierckptError) -> None:
        """Use new connections after a damaged response. Raises ``damage`` after too many."""

    async def available(self) -> bool:
        """Wait until the store is up. False, at once, if it was not down."""

    def probe_soon(self) -> None: ...


class RangeSource(Protocol):
    uri: str

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer: ...


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
    UNCANCELLED.add(task)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await ended(task)
        raise
    finally:
        del task, work  # a future keeps its error: named in a frame of that error's traceback it is a cycle


async def acquired(work: Awaitable[T], release: Callable[[T], object]) -> T:
    """Await ``work``, which opens or locks something. If the caller is cancelled, ``release`` gets the result later."""
    task = asyncio.ensure_future(work)
    UNCANCELLED.add(task)

    def release_result(done: asyncio.Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            release(done.result())

    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(release_result)
        raise
    finally:
        del task, work


def on_thread(work: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make a coroutine function of ``work``, which blocks and only reads."""

    @functools.wraps(work)
    async def run(*args: P.args, **named: P.kwargs) -> T:
        return await asyncio.to_thread(work, *args, **named)

    return run


def on_thread_to_end(work: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """``on_thread`` for ``work`` that a cancellation must not outrun (``to_completion``)."""

    @functools.wraps(work)
    async def run(*args: P.args, **named: P.kwargs) -> T:
        return await to_completion(asyncio.to_thread(work, *args, **named))

    return run


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
        hint = "The object was not written; the source changed while it was read"
        message = f"the pieces of {key} were to be {expected_bytes} bytes and are {got_bytes}"
        raise IntegrityError(message, hint=hint, uri=uri)


def retries_spent(what: str, reason: str, **context: object) -> StoreUnavailableError:
    hint = "Retries are spent; try again later"
    return StoreUnavailableError(f"{what}: {reason}", hint=hint, tier=Tier.SHARED, **context)


def untrusted(target: str, server: str, reason: str, scheme: str, **context: object) -> EndpointError:
    variables = "AWS_CA_BUNDLE, or SSL_CERT_FILE," if scheme == "s3" else "SSL_CERT_FILE"
    return EndpointError(
        f"{target} cannot be reached: TLS with {server} fails ({reason})",
        hint=f"Set {variables} to a PEM file with the authority of its certificate, check its names and dates and the "
        "clock of this node; client certificates are not supported",
        **context,
    )


def no_such_name(target: str, url: str, variable: str, **context: object) -> EndpointError:
    proxy = proxy_for(url) if url.startswith("http") else None
    name, setting = (proxy.name, proxy.variable) if proxy is not None else (urlsplit(url).hostname, variable)
    hint = f"Check {setting}, and the DNS of this node"
    return EndpointError(f"{target} cannot be reached: the name of {name} does not exist", hint=hint, **context)


def proxy_refused(target: str, url: str, status: int, **context: object) -> StoreError:
    proxy = proxy_for(url)
    name, variable = (proxy.name, proxy.variable) if proxy is not None else ("a proxy", "HTTPS_PROXY")
    message, context = f"{target} cannot be reached: {name} answers HTTP {status}", {**context, "status": status}
    if status >= 500:
        return StoreUnavailableError(message, hint="Try again later", **context)
    hint = (
        f"It wants a user and a password: write {variable}=http://USER:PASSWORD@HOST:PORT"
        if status == 407
        else "Have it allow the host of the store, or name that host in NO_PROXY"
    )
    return EndpointError(message, hint=hint, **context)


def short_answer(uri: str, key: str, byte_range: ByteRange, got_bytes: int) -> IntegrityError:
    start, stop = byte_range.start, byte_range.stop
    hint = "`tierckpt verify` lists damaged files"
    message = f"bytes {start}-{stop} of {key} were asked for and {got_bytes} came back: the object is too short"
    return IntegrityError(message, hint=hint, uri=uri)


def check_range(byte_range: ByteRange) -> ByteRange:
    if not 0 <= byte_range.start <= byte_range.stop:
        raise ConfigError(f"{byte_range} is not a range of bytes")
    return byte_range


async def limited(request: Awaitable[T], timeout_seconds: float) -> T:
    async with asyncio.timeout(timeout_seconds):
        try:
            return await request
        finally:
            del request  # as in to_completion


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
