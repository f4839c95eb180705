"""The log that QEMU's ``blklogwrites`` writes, and the disks that a power cut at a point of it may leave.

The format is that of Linux's dm-log-writes: a superblock of one sector, then for each request a header of one sector
and, for a write, its data. Its superblock is brought up to date now and then only, and QEMU is killed, so the log is
read up to the first header that makes no sense.
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
"""Of the tested disk and of the log; what is written whole or not at all."""
_SUPER = struct.Struct("<QQQI")
_MAGIC = 0x6A736677736872
_HEADER = struct.Struct("<QQQQ")
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8

WAYS = ("nothing", "all", "writes", "blocks")
"""What is left of what was written after the last flush."""


@dataclass(frozen=True)
class Request:
    """A write of ``size_bytes`` at ``offset``, its data in the log at ``data_offset``; a flush is one of no bytes."""

    offset: int
    size_bytes: int
    flags: int
    data_offset: int

    @property
    def is_flush(self) -> bool:
        return bool(self.flags & FLUSH)


def read(log: Path) -> list[Request]:
    """The requests in the order in which the disk did them. Raises ValueError when this is no such log."""
    with log.open("rb") as file:
        magic, _, _, sector_bytes = _SUPER.unpack(file.read(_SUPER.size))
        if (magic, sector_bytes) not in {(_MAGIC, SECTOR_BYTES), (0, 0)}:  # it comes with the first flush
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
    disk: Path, log: Path, requests: Sequence[Request], way: str, made: random.Random, *, kept_from: int
) -> tuple[int, int]:
    """Do ``requests`` on ``disk`` as far as a disk with a volatile cache has them when the power goes after the last.

    What was flushed is there. Of the rest, ``way`` says what is; writes at or behind ``kept_from`` always are.
    Returns how many blocks of it are there, and how many are not.
    """
    flushed = max((index + 1 for index, request in enumerate(requests) if request.is_flush), default=0)
    kept = lost = 0
    with (
        disk.open("r+b") as target,
        log.open("rb") as source,
        mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ) as data,
    ):
        for index, request in enumerate(requests):
            whole = index < flushed or request.offset >= kept_from or way == "all"
            survives = way == "writes" and made.random() < 0.5
            for block in range(0, request.size_bytes, SECTOR_BYTES):
                if not (whole or survives or (way == "blocks" and made.random() < 0.5)):
                    lost += 1
                    continue
                at = request.data_offset + block
                content = bytes(SECTOR_BYTES) if request.flags & DISCARD else data[at : at + SECTOR_BYTES]
                os.pwrite(target.fileno(), content, request.offset + block)
                kept += index >= flushed
    return kept, lost
