"""Read a file of a checkpoint from its nearest good copy, every chunk verified before a byte of it is handed out."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from ..disk.durable import translated
from ..disk.file_io import open_direct, open_file, pread_all, read_direct, read_into
from ..disk.page_cache import Resident
from ..disk.read_tuner import WAYS, ReadMode, ReadTuner, device_of
from ..errors import IntegrityError, PermissionDeniedError, StoreUnavailableError, TierckptError
from ..format.manifest import BLOCK_DIGEST_BYTES, DIGEST_BLOCK_BYTES, FileEntry, blocks_of, has_digest
from ..quantities import DISK_BLOCK_BYTES, round_up
from ..telemetry import BYTES, QUARANTINES, logger
from ..types import Buffer, ByteRange, Tier

log = logger("restore")


class Copy(Protocol):
    """One copy of a file. ``read`` returns a range of it or raises one of our errors; any thread may call it.

    ``into``: page-aligned memory, whole blocks of it, which the range may be read into instead of new memory.
    ``through``: a buffer of whole blocks, which may be read into first, if that is faster.
    """

    tier: Tier
    where: str

    def read(
        self, byte_range: ByteRange, into: memoryview | None = None, through: memoryview | None = None, /
    ) -> Buffer: ...

    def is_in_memory(self, byte_range: ByteRange, /) -> bool:
        """True when to read the range is to copy it from memory: nobody waits for a disk or a network."""

    def quarantine(self) -> None:
        """Put a bad copy out of the way, where that is ours to do."""

    def close(self) -> None: ...


class LocalCopy:
    """A copy on a mounted file system. A bad one of this node is renamed and kept for a person to look at.

    What is in the page cache is taken from there; the rest is read past it (O_DIRECT), where the file system can, or
    through it, where that is faster (``tuner``).

    Attributes:
        is_direct: read past the page cache.
        is_straight: and not through a buffer, even where one is given.
        cold_bytes: what was read and was not in the page cache.
    """

    def __init__(self, path: Path, tier: Tier = Tier.LOCAL, tuner: ReadTuner | None = None) -> None:
        self.tier = tier
        self.where = str(path)
        self.tuner = tuner
        self.is_direct = self.is_straight = True
        self.cold_bytes = 0
        self._path = path
        self._file = -1
        self._device = ""
        self._direct_file: int | None = None
        self._may_direct = True
        self._resident: Resident | None = None
        self._lock = threading.Lock()

    @property
    def device(self) -> str:
        """What the file lies on, once it is open."""
        return self._device

    @property
    def way(self) -> ReadMode:
        """How the device is read, as far as is known."""
        return self.tuner.way(self._device) if self.tuner is not None else WAYS[0]

    @property
    def is_untried(self) -> bool:
        """True when there are ways to try, and nobody has."""
        return self.tuner is not None and not self.tuner.is_known(self._device)

    def take(self, way: ReadMode) -> None:
        """Read what comes now in this way."""
        self.is_direct, self.is_straight = way.direct, way.straight

    def read(
        self, byte_range: ByteRange, into: memoryview | None = None, through: memoryview | None = None, /
    ) -> Buffer:
        self.open()
        if into is None:
            return pread_all(self._file, byte_range, self._path)
        done = 0
        with translated(self._path, is_above=True):
            if not (is_cached := self.is_in_memory(byte_range)):
                self.cold_bytes += byte_range.size_bytes
            if self.is_direct and not is_cached and byte_range.start % DISK_BLOCK_BYTES == 0:
                file, blocks = self._direct(), into[: round_up(byte_range.size_bytes)]
                if file is not None:
                    done = read_direct(file, blocks, byte_range.start, None if self.is_straight else through)
                    done = min(done, byte_range.size_bytes)
            if not done and not is_cached:  # all of it at once, where the kernel would read ahead in small steps
                os.posix_fadvise(self._file, byte_range.start, byte_range.size_bytes, os.POSIX_FADV_WILLNEED)
            done += read_into(self._file, into[done : byte_range.size_bytes], byte_range.start + done)
        return into[:done]

    def open(self) -> None:
        """Raises our error when it cannot be had. Once is enough."""
        with self._lock:
            if self._file < 0:
                self._file = open_file(self._path)
                self._device = device_of(self._file)
                self.take(self.way)

    def is_in_memory(self, byte_range: ByteRange, /) -> bool:
        """True for what is in the page cache."""
        try:
            self.open()
        except TierckptError:
            return False  # who reads it is told why
        return self.is_in_page_cache(byte_range)

    def is_in_page_cache(self, byte_range: ByteRange) -> bool:
        """True when the whole range is in the page cache.

        Asked of the kernel by ``mincore``: a read with RWF_NOWAIT, when it finds nothing, starts readahead of what is
        then read past it. Cost: some 20 us for 8 MiB.
        """
        with self._lock:
            if self._resident is None:
                self._resident = Resident(self._file)
        return self._resident.has(byte_range)

    def _direct(self) -> int | None:
        """The file, opened past the page cache at the first call; None where that cannot be had."""
        with self._lock:
            if self._may_direct and self._direct_file is None:
                self._may_direct = False
                with contextlib.suppress(OSError):  # what is wrong is said when it is read through the page cache
                    self._direct_file = open_direct(self._path, os.O_RDONLY)
            return self._direct_file

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
            if file is not None and file >= 0:
                os.close(file)
        self._file, self._direct_file = -1, None
        self._resident = None


class RemoteCopy:
    """A copy behind a network, each read of which is a request (``get_range``, blocking), into memory of its own.

    Args:
        chunk_size_bytes: of a peer, which gives whole chunks only; 0: any range can be asked for.
        report: is told when what came was not what was saved. The shared tier is not ours to rename in:
            ``tierckpt verify`` reports it.
    """

    def __init__(
        self,
        where: str,
        get_range: Callable[[ByteRange], Buffer],
        tier: Tier = Tier.SHARED,
        *,
        chunk_size_bytes: int = 0,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        self.where, self.tier, self.chunk_size_bytes, self.quarantine = where, tier, chunk_size_bytes, report
        self._get_range = get_range

    def read(
        self, byte_range: ByteRange, into: memoryview | None = None, through: memoryview | None = None, /
    ) -> Buffer:
        if not self.chunk_size_bytes:
            return self._get_range(byte_range)
        size = self.chunk_size_bytes
        first = byte_range.start // size * size
        starts = range(first, max(byte_range.stop, first + 1), size)
        chunks = [self._get_range(ByteRange(start, start + size)) for start in starts]
        data = b"".join(chunks) if len(chunks) > 1 else chunks[0]
        return memoryview(data)[byte_range.start - first : byte_range.stop - first]

    def is_in_memory(self, byte_range: ByteRange, /) -> bool:
        return False

    def close(self) -> None:
        """Nothing is held."""


class KnownBlocks(Protocol):
    """Digests of the blocks of a file's chunks (read/block_digests.py)."""

    @property
    def tier(self) -> str | None: ...

    def expect(self, indices: Iterable[int], /) -> None: ...

    def of(self, index: int, /) -> bytes | None: ...

    def close(self) -> None: ...


class ReplicatedFile:
    """The copies of one file, nearest first. Any thread may ask for any chunk, or for whole blocks of one.

    Every byte it returns has passed a digest (files of stock DCP have none and are returned as they are), but for what
    ``read_unverified`` shows. When a part of one copy is bad or cannot be read, that copy is given up (quarantined
    where it is
    ours) for the next.
    """

    def __init__(
        self, entry: FileEntry, chunk_size_bytes: int, copies: Sequence[Copy], blocks: KnownBlocks | None = None
    ) -> None:
        self.entry = entry
        self.chunk_size_bytes = chunk_size_bytes
        self._copies = list(copies)
        self._blocks = blocks
        self._given_up: list[Copy] = []
        self._problems: list[TierckptError] = []
        self._kind_of_loss: type[TierckptError] = IntegrityError
        self._lock = threading.Lock()

    def close(self) -> None:
        for copy in (*self._copies, *self._given_up):
            copy.close()
        if self._blocks is not None:
            self._blocks.close()

    @property
    def tier(self) -> str | None:
        """The tier of the copy that is read now."""
        return next((str(copy.tier) for copy in self._copies), None)

    @property
    def disk(self) -> LocalCopy | None:
        """The copy that is read now, where it lies on a mounted file system."""
        first = next(iter(self._copies), None)
        return first if isinstance(first, LocalCopy) else None

    @property
    def is_remote(self) -> bool:
        """True when the copy that is read now lies behind a network: each read of it is a request."""
        return isinstance(next(iter(self._copies), None), RemoteCopy)

    @property
    def _is_by_chunk(self) -> bool:
        """True when less than a chunk of the copy that is read now costs as much as the whole."""
        first = next(iter(self._copies), None)
        return isinstance(first, RemoteCopy) and first.chunk_size_bytes > 0

    @property
    def verify_block_bytes(self) -> int:
        """The least that can be verified, and so the least that is worth reading; parts begin at a multiple of it."""
        return DIGEST_BLOCK_BYTES if self.entry.digests else DISK_BLOCK_BYTES

    def chunk_range(self, index: int) -> ByteRange:
        start = index * self.chunk_size_bytes
        return ByteRange(start, min(start + self.chunk_size_bytes, self.entry.size_bytes))

    def expect_parts(self, indices: Iterable[int]) -> None:
        """Say of which chunks ``part`` will be asked for."""
        if self._blocks is not None and not self._is_by_chunk:
            self._blocks.expect(indices)

    def has_parts(self, index: int) -> bool:
        """True when less than the whole of chunk ``index`` can be had, by ``part``."""
        if not self.entry.digests or not self.may_have_parts:
            return self.may_have_parts
        return self._blocks is not None and self._blocks.of(index) is not None

    @property
    def may_have_parts(self) -> bool:
        """False when no chunk ``has_parts``: known without reading anything."""
        return not self.entry.digests or (not self._is_by_chunk and self._blocks is not None)

    def takes_parts(self, index: int) -> bool:
        """True when chunk ``index``, all of which is wanted, is read from a disk, and can be had in parts without going
        farther for it: what they are verified by lies where the file does."""
        is_near = not self.entry.digests or (self._blocks is not None and self._blocks.tier == self.tier)
        return is_near and not self.is_remote and self.has_parts(index)

    def chunk(self, index: int, into: memoryview | None = None) -> Buffer:
        """Return chunk ``index``: in ``into`` (page-aligned, a chunk in whole pages), or in other memory."""
        return self.part(index, self.chunk_range(index), into)

    def part(
        self,
        index: int,
        byte_range: ByteRange,
        into: memoryview | None = None,
        arrived: Callable[[], object] = lambda: None,
    ) -> Buffer:
        """Return ``byte_range`` of chunk ``index``: all of it, or whole blocks of one that ``has_parts``.

        Args:
            arrived: called between reading and digesting; again, when what was read is bad, for the next copy.

        Raises:
            IntegrityError: no copy has a good version of it; names each copy and what was wrong.
            StoreUnavailableError, PermissionDeniedError: the shared tier could not be asked for its copy, and no other
                is good: that one may be.
        """
        while (copy := next(iter(self._copies), None)) is not None:
            try:
                data = copy.read(byte_range, into)
                BYTES.emit(len(data), tier=copy.tier, direction="read")
                arrived()
                if len(data) == byte_range.size_bytes and self._is_good(data, index, byte_range):
                    return data
                problem: TierckptError = IntegrityError(
                    f"bytes {byte_range.start}-{byte_range.stop} are not what was saved",
                    tier=copy.tier,
                    where=copy.where,
                )
            except TierckptError as error:
                problem = error
            self._give_up(copy, problem)
        raise self._loss(byte_range)

    def read_unverified(self, byte_range: ByteRange, into: memoryview | None = None) -> Buffer:
        """Return what some copy has there, **unverified**, and nothing where it cannot be read.

        Only for what is compared with what is known already: damage then shows as a difference.
        """
        for copy in tuple(self._copies):
            with contextlib.suppress(TierckptError):
                data = copy.read(byte_range, into)
                BYTES.emit(len(data), tier=copy.tier, direction="read")
                return data
        return b""

    def _is_good(self, data: Buffer, index: int, byte_range: ByteRange) -> bool:
        if not self.entry.digests:
            return True
        if byte_range == self.chunk_range(index):
            return has_digest(data, self.entry.digests[index])
        known = self._blocks.of(index) if self._blocks is not None else None
        found = blocks_of(data)
        at = (byte_range.start - self.chunk_range(index).start) // DIGEST_BLOCK_BYTES * BLOCK_DIGEST_BYTES
        return known is not None and known[at : at + len(found)] == found

    def _give_up(self, copy: Copy, problem: TierckptError) -> None:
        with self._lock:
            if copy not in self._copies:
                return  # another thread has found out before
            self._copies.remove(copy)
            self._given_up.append(copy)  # others may be reading it: it is closed with the rest
            self._problems.append(problem)
            if copy.tier is Tier.SHARED and isinstance(problem, StoreUnavailableError | PermissionDeniedError):
                is_denied = isinstance(problem, PermissionDeniedError)
                self._kind_of_loss = PermissionDeniedError if is_denied else StoreUnavailableError
        if isinstance(problem, IntegrityError):
            copy.quarantine()
        log.warning("%s: the %s copy is bad, trying the next: %s", self.entry.path, copy.tier, problem)

    def _loss(self, byte_range: ByteRange) -> TierckptError:
        hint = "Restore an older step; `tierckpt verify --read-data` shows which files are bad on which tier"
        if self._kind_of_loss is not IntegrityError:
            hint = "The copy on the shared tier may be good: run it again when the store can be asked"
        return self._kind_of_loss(
            f"no good copy of {self.entry.path} (bytes {byte_range.start}-{byte_range.stop})",
            hint=hint,
            file=self.entry.path,
            tier="+".join(str(problem.context.get("tier", "?")) for problem in self._problems) or "none",
            problems="; ".join(str(problem) for problem in self._problems) or "no tier has this file",
        )


class RangeFile(io.RawIOBase):
    """A read-only, seekable file of ``size_bytes``, any part of which ``read_into`` gives."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes, self._position = size_bytes, 0

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``start`` on, all of which are there."""
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}, before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, target: Buffer) -> int:  # type: ignore[override]
        view = memoryview(target).cast("B")
        count = max(0, min(len(view), self._size_bytes - self._position))
        if count:
            self.read_into(self._position, view[:count])
        self._position += count
        return count


class VerifiedFile(RangeFile):
    """A file over ``copies``, which it closes. One chunk of memory; each is read once in order."""

    def __init__(self, copies: ReplicatedFile) -> None:
        super().__init__(copies.entry.size_bytes)
        self.copies = copies
        self._index = -1
        self._chunk: memoryview = memoryview(b"")

    def close(self) -> None:
        self.copies.close()
        super().close()

    def read_into(self, start: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            index, offset = divmod(start + done, self.copies.chunk_size_bytes)
            if index != self._index:
                self._chunk, self._index = memoryview(self.copies.chunk(index)).cast("B"), index
            count = min(len(into) - done, len(self._chunk) - offset)
            into[done : done + count] = self._chunk[offset : offset + count]
            done += count
