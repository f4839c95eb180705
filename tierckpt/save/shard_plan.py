"""Layout of a shard file before it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zlib_ng.zlib_ng import crc32_combine

from ..arena.memory import Memory
from .write_ahead import TempFile

Fetch = Callable[[int, int, int], None]
"""``fetch(target_address, start, count)`` copies part of the data."""


class ShardRecord:
    """An item of a shard: ``head``, ``size_bytes`` of data at ``address``, and a tail made from the data's CRC."""

    __slots__ = (
        *("address", "crcs", "fetch", "frame", "head", "head_bytes", "item", "known_bytes", "lease", "offset", "owner"),
        *("size_bytes", "tail_bytes", "total_bytes"),
    )

    def __init__(
        self,
        offset: int,
        head: Any,
        frame: Any = None,
        address: int = 0,
        owner: Any = None,
        fetch: Fetch | None = None,
        item: Any = None,
        lease: Any = None,
    ) -> None:
        self.offset = offset
        self.head = head
        self.frame = frame
        """Has ``tail_with(crc)``, ``tail`` and ``size_bytes``; None without a tail."""
        self.address = address
        self.owner = owner
        """It keeps the data alive."""
        self.fetch = fetch
        """Reads data that is not contiguous in host memory."""
        self.item = item
        self.lease = lease
        self.head_bytes = len(head)
        self.size_bytes: int = 0
        self.tail_bytes: int = 0
        if frame is not None:
            self.size_bytes, self.tail_bytes = frame.size_bytes, len(frame.tail)
        self.total_bytes = self.head_bytes + self.size_bytes + self.tail_bytes
        self.known_bytes = 0
        self.crcs: dict[int, tuple[int, int]] | None = None

    @property
    def data_offset(self) -> int:
        return self.offset + self.head_bytes

    @property
    def end(self) -> int:
        return self.offset + self.total_bytes

    def set_crc(self, offset: int, size_bytes: int, crc: int) -> None:
        if self.crcs is None:
            self.crcs = {}
        self.crcs[offset] = (crc, size_bytes)
        self.known_bytes += size_bytes

    def clear_crcs(self) -> None:
        self.known_bytes, self.crcs = 0, None

    def crc(self) -> int:
        value = 0
        for _, (crc, size_bytes) in sorted((self.crcs or {}).items()):
            value = crc32_combine(value, crc, size_bytes)
        return value


@dataclass(slots=True)
class Image:
    """A shard's data in the file's layout: offset 0 of the file is at ``address``."""

    memory: Memory
    address: int
    size_bytes: int
    ahead: TempFile | None = None
    """A file that already has part of the data."""


@dataclass(slots=True)
class Shard:
    """A file to be written. Its records are in order and do not overlap."""

    path: Path
    records: Sequence[ShardRecord]
    image: Image | None = None
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.size_bytes = self.records[-1].end if self.records else 0
