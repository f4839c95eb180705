"""The store protocol: the object operations that the mover needs. Async only.

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

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield every object under ``prefix``, recursively, unordered."""

    async def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        """Return the sorted names of the directories directly under ``prefix``."""

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
class Browsable(Protocol):
    async def list_level(self, prefix: str = "") -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
        """Return the objects and directory names directly under ``prefix``; None: no such directory."""


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
