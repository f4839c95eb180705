"""The log that QEMU's ``blklogwrites`` writes, and the disks that a power cut at a point of it may leave.

The format is that of Linux's dm-log-writes: a superblock of one sector, then for each request a header of one sector
and, for a write, its data. The superblock is rarely updated and QEMU is killed, so ``read`` ignores its count and stops
at the first invalid header.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SECTOR_BYTES = 4096
"""The atomic unit of the tested disk and of the log."""
_SUPER = struct.Struct("<QQQI")
_MAGIC = 0x6A736677736872
_HEADER = struct.Struct("<QQQQ")
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8

SURVIVAL_MODES = ("nothing", "all", "writes", "blocks")
"""The writes after the last flush that survive."""


@dataclass(frozen=True)
class Request:
    """A write of ``size_bytes`` at ``offset``, with its data at ``data_offset`` of the log; a flush has no bytes."""

    offset: int
    size_bytes: int
    flags: int
    data_offset: int

    @property
    def is_flush(self) -> bool:
        return bool(self.flags & FLUSH)


def read(log: Path) -> list[Request]:
    """Return the requests in disk order. Raises ValueError if ``log`` is no such log."""
    with log.open("rb") as file:
        magic, _, _, sector_bytes = _SUPER.unpack(file.read(_SUPER.size))
        if (magic, sector_bytes) not in {(_MAGIC, SECTOR_BYTES), (0, 0)}:  # zero until the first flush
            raise ValueError(f"{log} is no log of writes with sectors of {SECTOR_BYTES} bytes")
        return list(_requests(file.fileno(), os.fstat(file.fileno()).st_size))


def _requests(file: int, end: int) -> Iterator[Request]:
    at = SECTOR_BYTES
    while at + SECTOR_BYTES <= end:
        sector, sectors, flags, _ = _HEADER.unpack(os.pread(file, _HEADER.size, at))
        data = at + SECTOR_BYTES
        size_bytes = sectors * SECTOR_BYTES
        if not (sectors or flags) or flags >= 2 * MARK:
            return
        at = data if flags & DISCARD else data + size_bytes
        if at > end:
            return
        yield Request(sector * SECTOR_BYTES, size_bytes, flags, data)


def replay(
    disk: Path, log: Path, requests: Sequence[Request], way: str, rng: random.Random, *, durable_from: int
) -> tuple[int, int]:
    """Apply ``requests`` to ``disk`` as a disk with a volatile cache has them after a power cut.

    Flushed writes survive; of the others those that ``way`` names, and all writes at or after ``durable_from``.
    Returns the numbers of unflushed blocks that survived and that were lost.
    """
    flushed = max((index + 1 for index, request in enumerate(requests) if request.is_flush), default=0)
    kept = lost = 0
    with (
        disk.open("r+b") as target,
        log.open("rb") as source,
        mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ) as data,
    ):
        for index, request in enumerate(requests):
            whole = index < flushed or request.offset >= durable_from or way == "all"
            survives = way == "writes" and rng.random() < 0.5
            for block in range(0, request.size_bytes, SECTOR_BYTES):
                if not (whole or survives or (way == "blocks" and rng.random() < 0.5)):
                    lost += 1
                    continue
                at = request.data_offset + block
                content = bytes(SECTOR_BYTES) if request.flags & DISCARD else data[at : at + SECTOR_BYTES]
                os.pwrite(target.fileno(), content, request.offset + block)
                kept += index >= flushed
    return kept, lost
