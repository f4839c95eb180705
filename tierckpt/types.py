"""Frozen value types. No I/O, no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


class Tier(enum.StrEnum):
    """Where a copy of a file lives."""

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
    """One object of a store: key relative to the store's root, size, and the version the store gives it (if any).

    ``modified_unix_seconds``: when it was written, by the store's clock; None from a store that does not say.
    """

    key: str
    size_bytes: int
    etag: str | None = None
    modified_unix_seconds: float | None = field(default=None, compare=False)


@dataclass(slots=True, eq=False)
class FileProgress:
    """How far one file of a transfer is. It changes while the file moves."""

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
    """More that a person may want to see: where the bytes come from."""
    files: tuple[FileProgress, ...] = ()
    """The files in flight."""


class ProgressListener(Protocol):
    def __call__(self, progress: Progress, /) -> None: ...


Json: TypeAlias = dict[str, Any]
