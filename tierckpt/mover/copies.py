"""Read a file of a checkpoint from its nearest good copy, every chunk verified before a byte of it is handed out."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ..errors import IntegrityError, TierckptError
from ..manifest import FileEntry, digest_of
from ..telemetry import QUARANTINES, logger
from ..types import Buffer, ByteRange, Tier
from .disk import typed_errors
from .flush import BLOCK_BYTES, round_up
from .resident import Resident
from .transfer import open_file, pread_all

log = logger("restore")


class Copy(Protocol):
    """One copy of a file. ``read`` returns a range of it or raises one of our errors; any thread may call it.

    ``into``: page-aligned memory, whole blocks of it, which the range may be read into instead of new memory.
    """

    tier: Tier
    where: str

    def read(self, byte_range: ByteRange, into: memoryview | None = None, /) -> Buffer: ...

    def quarantine(self) -> None:
        """Put a bad copy out of the way, where that is ours to do."""

    def close(self) -> None: ...


class LocalCopy:
    """A copy on a mounted file system. A bad one of this node is renamed and kept for a person to look at.

    What is in the page cache is taken from there; the rest is read past it (O_DIRECT), where the file system can.
    """

    def __init__(self, path: Path, tier: Tier = Tier.LOCAL) -> None:
        self.tier = tier
        self.where = str(path)
        self._path = path
        self._file = -1
        self._direct_file = -1
        self._may_direct = True
        self._resident: Resident | None = None
        self._lock = threading.Lock()

    def read(self, byte_range: ByteRange, into: memoryview | None = None, /) -> Buffer:
        with self._lock:
            if self._file < 0:
                self._file = open_file(self._path)
        if into is None:
            return pread_all(self._file, byte_range, self._path)
        with typed_errors(self._path):
            return into[: self._read_into(into, byte_range)]

    def _read_into(self, into: memoryview, byte_range: ByteRange) -> int:
        """Return how many bytes of the range are in ``into`` now: fewer than asked for where the file is too short."""
        done = 0
        if byte_range.start % BLOCK_BYTES == 0 and not self._is_cached(byte_range):
            done = self._read_direct(into, byte_range)
        while done < byte_range.size_bytes:
            count = os.preadv(self._file, [into[done : byte_range.size_bytes]], byte_range.start + done)
            if not count:
                break
            done += count
        return done

    def _is_cached(self, byte_range: ByteRange) -> bool:
        """True when the whole range is in the page cache.

        Asked of the kernel by ``mincore``: a read with RWF_NOWAIT, when it finds nothing, starts readahead of what is
        then read past it. Cost: some 20 us for 8 MiB.
        """
        with self._lock:
            if self._resident is None:
                self._resident = Resident(self._file)
        return self._resident.has(byte_range)

    def _read_direct(self, into: memoryview, byte_range: ByteRange) -> int:
        with self._lock:
            if self._may_direct and self._direct_file < 0:
                self._open_direct()
        if not self._may_direct:
            return 0
        done, wanted = 0, round_up(byte_range.size_bytes)
        with contextlib.suppress(OSError):  # read again through the page cache, which tells what is wrong
            while done < wanted:
                count = os.preadv(self._direct_file, [into[done:wanted]], byte_range.start + done)
                done += count
                if not count or count % BLOCK_BYTES:
                    break  # the end of the file
        return min(done, byte_range.size_bytes)

    def _open_direct(self) -> None:
        try:
            self._direct_file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            self._may_direct = False
            log.info("%s: no O_DIRECT here (%s), reading through the page cache", self._path, error.strerror)

    def quarantine(self) -> None:
        if self.tier is not Tier.LOCAL:
            return
        try:
            self._path.rename(self._path.with_name(f"{self._path.name}.bad"))
            QUARANTINES.emit(1, tier=self.tier)
        except OSError as error:
            log.warning("cannot quarantine %s: %s", self._path, error)

    def close(self) -> None:
        for file in (self._file, self._direct_file):
            if file >= 0:
                os.close(file)
        self._file = self._direct_file = -1
        self._resident = None


class RemoteCopy:
    """A copy behind a store, read by ranges through ``get_range`` (blocking)."""

    def __init__(self, where: str, get_range: Callable[[ByteRange], Buffer]) -> None:
        self.tier = Tier.SHARED
        self.where = where
        self._get_range = get_range

    def read(self, byte_range: ByteRange, into: memoryview | None = None, /) -> Buffer:
        data = self._get_range(byte_range)
        if into is None:
            return data
        into[: len(data)] = data
        return into[: len(data)]

    def quarantine(self) -> None:
        """The shared tier is not ours to rename in: `tierckpt verify` reports it."""

    def close(self) -> None:
        """Nothing is held."""


class Copies:
    """The copies of one file, nearest first. Any thread may ask for any chunk.

    Every chunk it returns has passed its digest (files of stock DCP have none and are returned as they are). When a
    chunk of one copy is bad or cannot be read, that copy is given up (quarantined where it is ours) for the next.
    """

    def __init__(self, entry: FileEntry, chunk_size_bytes: int, copies: Sequence[Copy]) -> None:
        self.entry = entry
        self.chunk_size_bytes = chunk_size_bytes
        self._copies = list(copies)
        self._given_up: list[Copy] = []
        self._problems: list[TierckptError] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        for copy in (*self._copies, *self._given_up):
            copy.close()

    @property
    def tier(self) -> str | None:
        """The tier of the copy that is read now."""
        return next((str(copy.tier) for copy in self._copies), None)

    def chunk_range(self, index: int) -> ByteRange:
        start = index * self.chunk_size_bytes
        return ByteRange(start, min(start + self.chunk_size_bytes, self.entry.size_bytes))

    def chunk(self, index: int, into: memoryview | None = None) -> Buffer:
        """Return chunk ``index``: in ``into`` (page-aligned, a chunk in whole blocks) or in memory of its own.

        Raises:
            IntegrityError: no copy has a good version of it; names each copy and what was wrong.
        """
        byte_range = self.chunk_range(index)
        while (copy := next(iter(self._copies), None)) is not None:
            try:
                chunk = copy.read(byte_range, into)
                if len(chunk) == byte_range.size_bytes and (
                    not self.entry.digests or digest_of(chunk) == self.entry.digests[index]
                ):
                    return chunk
                problem: TierckptError = IntegrityError(
                    f"bytes {byte_range.start}-{byte_range.stop} are not what was saved",
                    tier=copy.tier,
                    where=copy.where,
                )
            except TierckptError as error:
                problem = error
            self._give_up(copy, problem)
        raise self._loss(byte_range)

    def _give_up(self, copy: Copy, problem: TierckptError) -> None:
        with self._lock:
            if copy not in self._copies:
                return  # another thread has found out before
            self._copies.remove(copy)
            self._given_up.append(copy)  # others may be reading it: it is closed with the rest
            self._problems.append(problem)
        if isinstance(problem, IntegrityError):
            copy.quarantine()
        log.warning("%s: the %s copy is bad, trying the next: %s", self.entry.path, copy.tier, problem)

    def _loss(self, byte_range: ByteRange) -> IntegrityError:
        return IntegrityError(
            f"no good copy of {self.entry.path} (bytes {byte_range.start}-{byte_range.stop})",
            hint="Restore an older step; `tierckpt verify --read-data` shows which files are bad on which tier",
            file=self.entry.path,
            tier="+".join(str(problem.context.get("tier", "?")) for problem in self._problems) or "none",
            problems="; ".join(str(problem) for problem in self._problems) or "no tier has this file",
        )


class CheckedFile(io.RawIOBase):
    """A read-only, seekable file over ``copies``, which it closes. One chunk of memory; each is read once in order."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._position = 0
        self._index = -1
        self._chunk: memoryview = memoryview(b"")

    def close(self) -> None:
        self.copies.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        size_bytes = self.copies.entry.size_bytes
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, target: Buffer) -> int:  # type: ignore[override]
        view = memoryview(target).cast("B")
        done = 0
        while done < len(view) and self._position < self.copies.entry.size_bytes:
            index, offset = divmod(self._position, self.copies.chunk_size_bytes)
            if index != self._index:
                self._chunk, self._index = memoryview(self.copies.chunk(index)).cast("B"), index
            count = min(len(view) - done, len(self._chunk) - offset)
            view[done : done + count] = self._chunk[offset : offset + count]
            done += count
            self._position += count
        return done
