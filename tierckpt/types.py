"""Frozen value types. No I/O, no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


class Tier(enum.StrEnum):
    """The storage tier of a copy."""

    LOCAL = "local"
    PEER = "peer"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Half-open range ``[start, stop)`` of bytes."""

    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a store: key relative to the store's root, size, and the store's version of it (if any).

    ``modified_unix_seconds``: time of the write, by the store's clock; None if the store does not report it.
    """

    key: str
    size_bytes: int
    etag: str | None = None
    modified_unix_seconds: float | None = field(default=None, compare=False)


@dataclass(slots=True, eq=False)
class FileProgress:
    """Progress of one file of a transfer. Updated while the file is transferred."""

    path: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a transfer: ``done_bytes`` of ``total_bytes`` for ``what`` (a file, or the whole operation)."""

    what: str
    done_bytes: int
    total_bytes: int
    note: str = ""
    """Additional text for people: the source of the bytes."""
    files: tuple[FileProgress, ...] = ()
    """The files in flight."""


class ProgressListener(Protocol):
    def __call__(self, progress: Progress, /) -> None: ...


Json: TypeAlias = dict[str, Any]
