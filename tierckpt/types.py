"""Frozen value types. No I/O, no torch."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


class Tier(enum.StrEnum):
    LOCAL = "local"
    PEER = "peer"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Half-open range of bytes."""

    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """``modified_unix_seconds`` is by the store's clock."""

    key: str
    size_bytes: int
    etag: str | None = None
    modified_unix_seconds: float | None = field(default=None, compare=False)


@dataclass(slots=True, eq=False)
class FileProgress:
    path: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    what: str
    done_bytes: int
    total_bytes: int
    note: str = ""
    """Source of the bytes, for people."""
    files: tuple[FileProgress, ...] = ()


ProgressListener: TypeAlias = Callable[[Progress], None]
Json: TypeAlias = dict[str, Any]
