"""Read a file of a checkpoint from its nearest good copy, every chunk verified before a byte of it is handed out."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ..errors import IntegrityError, TierckptError
from ..manifest import FileEntry, digest_of
from ..telemetry import QUARANTINES, logger
from ..types import Buffer, ByteRange, Tier
from .transfer import open_file, pread_all

log = logger("restore")


class Copy(Protocol):
    """One copy of a file. ``read`` returns a range of it or raises one of our errors."""

    tier: Tier
    where: str

    def read(self, byte_range: ByteRange, /) -> Buffer: ...

    def quarantine(self) -> None:
        """Put a bad copy out of the way, where that is ours to do."""

    def close(self) -> None: ...


class LocalCopy:
    """A copy on this node's file system. A bad one is renamed and kept for a person to look at."""

    def __init__(self, path: Path, tier: Tier = Tier.LOCAL) -> None:
        self.tier = tier
        self.where = str(path)
        self._path = path
        self._file = -1

    def read(self, byte_range: ByteRange, /) -> Buffer:
        if self._file < 0:
            self._file = open_file(self._path)
        return pread_all(self._file, byte_range, self._path)

    def quarantine(self) -> None:
        if self.tier is not Tier.LOCAL:
            return
        try:
            self._path.rename(self._path.with_name(f"{self._path.name}.bad"))
            QUARANTINES.emit(1, tier=self.tier)
        except OSError as error:
            log.warning("cannot quarantine %s: %s", self._path, error)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class RemoteCopy:
    """A copy behind a store, read by ranges through ``get_range`` (blocking)."""

    def __init__(self, where: str, get_range: Callable[[ByteRange], Buffer]) -> None:
        self.tier = Tier.SHARED
        self.where = where
        self._get_range = get_range

    def read(self, byte_range: ByteRange, /) -> Buffer:
        return self._get_range(byte_range)

    def quarantine(self) -> None:
        """The shared tier is not ours to rename in: `tierckpt verify` reports it."""

    def close(self) -> None:
        """Nothing is held."""


class CheckedFile(io.RawIOBase):
    """A read-only, seekable file over the copies of ``entry``, nearest first.

    Every byte it returns has passed its digest (files of stock DCP have none and are returned as they are). When a
    chunk of one copy is bad or cannot be read, that copy is given up (quarantined where it is ours) for the next.

    Raises:
        IntegrityError: no copy has a good version of a chunk that was asked for; names each copy and what was wrong.
    Cost: one chunk of memory; sequential readers read each chunk once.
    """

    def __init__(self, entry: FileEntry, chunk_size_bytes: int, copies: Sequence[Copy]) -> None:
        self.entry = entry
        self.chunk_size_bytes = chunk_size_bytes
        self._copies = list(copies)
        self._position = 0
        self._index = -1
        self._chunk: memoryview = memoryview(b"")
        self._problems: list[TierckptError] = []

    def close(self) -> None:
        for copy in self._copies:
            copy.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.entry.size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, target: Buffer) -> int:  # type: ignore[override]
        view = memoryview(target).cast("B")
        done = 0
        while done < len(view) and self._position < self.entry.size_bytes:
            index, offset = divmod(self._position, self.chunk_size_bytes)
            if index != self._index:
                self._chunk, self._index = memoryview(self._load(index)).cast("B"), index
            count = min(len(view) - done, len(self._chunk) - offset)
            view[done : done + count] = self._chunk[offset : offset + count]
            done += count
            self._position += count
        return done

    def _load(self, index: int) -> Buffer:
        start = index * self.chunk_size_bytes
        byte_range = ByteRange(start, min(start + self.chunk_size_bytes, self.entry.size_bytes))
        while self._copies:
            copy = self._copies[0]
            try:
                chunk = copy.read(byte_range)
                if len(chunk) == byte_range.size_bytes and (
                    not self.entry.digests or digest_of(chunk) == self.entry.digests[index]
                ):
                    return chunk
                problem: TierckptError = IntegrityError(
                    f"bytes {byte_range.start}-{byte_range.stop} are not what was saved",
                    tier=copy.tier,
                    where=copy.where,
                )
                copy.quarantine()
            except TierckptError as error:
                problem = error
            self._problems.append(problem)
            self._copies.pop(0).close()
            log.warning("%s: the %s copy is bad, trying the next: %s", self.entry.path, copy.tier, problem)
        raise IntegrityError(
            f"no good copy of {self.entry.path} (bytes {byte_range.start}-{byte_range.stop})",
            hint="Restore an older step; `tierckpt verify --read-data` shows which files are bad on which tier",
            file=self.entry.path,
            tier="+".join(str(problem.context.get("tier", "?")) for problem in self._problems) or "none",
            problems="; ".join(str(problem) for problem in self._problems) or "no tier has this file",
        )
