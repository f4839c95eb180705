"""The store protocol: the object operations that the mover needs. Async only.

Contract, tested by one suite that every store subclasses (tests/contract/store_contract.py):
    S1  ``put`` and ``put_stream`` are all or nothing: a reader sees the old object, or the whole new one. An error or
        a cancellation leaves no new object and no truncated one. A piece may be reused once the next is asked for.
    S2  ``put(if_absent=True)`` has exactly one winner among concurrent callers, on stores where
        ``has_put_if_absent``; elsewhere it is check-then-put and says so.
    S3  When a put returns, the object is durable (for a directory: file and directory fsynced).
    S4  Errors are tierckpt's own (errors.py), chosen by type or status code, never by message text.
    S5  Keys are relative to the store's root, '/'-separated, never starting with '/'.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from ..errors import StoreError, TierckptError
from ..types import Buffer, ByteRange, ObjectInfo

T = TypeVar("T")


@runtime_checkable
class Store(Protocol):
    """Objects under one root (a bucket and key prefix, a directory). Safe to use from one event loop at a time."""

    uri: str
    """Root, for messages."""

    has_put_if_absent: bool
    """True when S2 is a guarantee of the store itself."""

    async def head(self, key: str) -> ObjectInfo:
        """Return size and etag. Raises ObjectNotFoundError."""

    async def get(self, key: str) -> bytes:
        """Return a whole small object (manifests, metadata). Raises ObjectNotFoundError."""

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        """Return exactly ``byte_range``; a short answer is an error, never a short buffer.

        Raises ObjectNotFoundError, PreconditionFailedError (the object's etag is no longer ``if_match``),
        IntegrityError (the object ends before the range does).
        """

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Write a small object. Raises PreconditionFailedError when ``if_absent`` and it exists."""

    async def put_stream(self, key: str, pieces: AsyncIterator[Buffer], size_bytes: int) -> None:
        """Write a large object from pieces of any size, holding only a few of them in memory.

        When the iterator raises, the transfer is aborted, nothing appears under ``key`` and that error is raised.
        """

    async def link(self, key: str, source: Path) -> bool:
        """Make ``source`` appear under ``key`` without copying, durable; False when this store cannot (then copy)."""

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield every object under the directory ``prefix``, recursively, unordered."""

    async def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        """Return the names of the directories directly under ``prefix``, sorted, [] when there is none."""

    async def delete(self, key: str) -> None:
        """Remove an object; no error when it is not there."""

    async def delete_dir(self, prefix: str) -> None:
        """Remove every object under ``prefix`` and, where the store has them, the empty directories."""

    async def close(self) -> None:
        """Release connections. Idempotent."""


@runtime_checkable
class Conditional(Protocol):
    """Stores that can replace or delete an object on condition of its etag."""

    async def replace(self, key: str, data: Buffer, *, etag: str) -> None:
        """``put`` over the version ``etag`` only. Raises PreconditionFailedError, also if the object is gone.

        A server that ignores conditions makes this a plain ``put``.
        """

    async def remove(self, key: str, *, etag: str) -> None:
        """``delete`` the version ``etag`` only; no error if the object is gone.

        Raises PreconditionFailedError. A server that ignores conditions makes this a plain ``delete``.
        """


@runtime_checkable
class Browsable(Protocol):
    """Stores that can back a file system."""

    async def list_level(self, prefix: str = "") -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
        """Return the objects and the names of the directories directly under ``prefix``; None: no such directory.

        Where there are no directories but in names, an empty one does not exist.
        """


@runtime_checkable
class ReadsInto(Protocol):
    """Stores that receive ranges in the caller's memory, for less processor time."""

    async def get_range_into(
        self, key: str, byte_range: ByteRange, into: memoryview, *, if_match: str | None = None
    ) -> None:
        """``get_range`` into the first bytes of ``into``. ``into`` is not written after it returns or raises."""


class RangesIgnoredError(StoreError):
    """The server answers a request for a range with the whole object: it is to be read whole (``ReadsWhole``)."""


class OddKeyError(StoreError):
    """A listing has a key that is no path (``a//b``), which this store can neither list nor read."""


@runtime_checkable
class ReadsWhole(Protocol):
    """Stores whose server may ignore ranges."""

    def reading(
        self, key: str, *, if_match: str | None = None
    ) -> AbstractAsyncContextManager[Callable[[memoryview], Awaitable[None]]]:
        """Open an object; yield a function that fills a view with its next bytes. One request for all of them.

        Raises as ``get_range`` does, here and in the function; after StoreUnavailableError it begins at the first byte.
        """


@runtime_checkable
class Recoverable(Protocol):
    """Stores behind a network: recovery from failures that may pass."""

    def again(self, work: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Do ``work``, made of verbs of this store, again while it fails in a way that may pass."""

    async def reconnect(self, damage: TierckptError) -> None:
        """Use new connections from here on, after a damaged answer. Raises ``damage`` when there were too many."""

    async def available(self) -> bool:
        """Wait until the store is up. False, at once, when it was not down."""

    def hasten(self) -> None:
        """Somebody waits for this store: the next request asks at once whether a store that was down is up again."""


class RangeSource(Protocol):
    """Where the bytes come from: a ``Store``, or whatever else gives ranges of the same keys."""

    uri: str

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer: ...
