"""Read a file of a checkpoint from its first good copy, verified by chunk."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterable, Sequence

from ..errors import EndpointError, IntegrityError, PermissionDeniedError, StoreUnavailableError, TierckptError
from ..format.manifest import BLOCK_DIGEST_BYTES, DIGEST_BLOCK_BYTES, FileEntry, blocks_of, has_digest
from ..quantities import DISK_BLOCK_BYTES
from ..telemetry import BYTES, logger
from ..types import Buffer, ByteRange, Tier
from .block_digests import ShardBlockDigests
from .file_copies import FileCopy, LocalCopy, RemoteCopy

log = logger("restore")


class ReplicatedFile:
    """The copies of one file, nearest first. Thread-safe.

    Returned bytes are verified by digest, except files of stock DCP and ``read_unverified``. A bad copy is dropped, and
    quarantined if this node owns it; the next one is used.
    """

    def __init__(
        self,
        entry: FileEntry,
        chunk_size_bytes: int,
        copies: Sequence[FileCopy],
        blocks: ShardBlockDigests | None = None,
    ) -> None:
        self.entry = entry
        self.chunk_size_bytes = chunk_size_bytes
        self._copies = list(copies)
        self._blocks = blocks
        self._given_up: list[tuple[FileCopy, TierckptError]] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        for copy in (*self._copies, *(copy for copy, _ in self._given_up)):
            copy.close()
        if self._blocks is not None:
            self._blocks.close()

    @property
    def tier(self) -> str | None:
        return next((str(copy.tier) for copy in self._copies), None)

    @property
    def disk(self) -> LocalCopy | None:
        first = next(iter(self._copies), None)
        return first if isinstance(first, LocalCopy) else None

    @property
    def is_remote(self) -> bool:
        return isinstance(next(iter(self._copies), None), RemoteCopy)

    @property
    def _is_by_chunk(self) -> bool:
        """Whether a part of a chunk costs as much to read as the whole."""
        first = next(iter(self._copies), None)
        return isinstance(first, RemoteCopy) and first.chunk_size_bytes > 0

    @property
    def verify_block_bytes(self) -> int:
        """The smallest verifiable range. Parts begin at a multiple of it."""
        return DIGEST_BLOCK_BYTES if self.entry.digests else DISK_BLOCK_BYTES

    def chunk_range(self, index: int) -> ByteRange:
        start = index * self.chunk_size_bytes
        return ByteRange(start, min(start + self.chunk_size_bytes, self.entry.size_bytes))

    def expect_parts(self, indices: Iterable[int]) -> None:
        """Announce the chunks of later ``part`` calls."""
        if self._blocks is not None and not self._is_by_chunk:
            self._blocks.expect(indices)

    def has_parts(self, index: int) -> bool:
        if not self.entry.digests or not self.may_have_parts:
            return self.may_have_parts
        return self._blocks is not None and self._blocks.of(index) is not None

    @property
    def may_have_parts(self) -> bool:
        return not self.entry.digests or (not self._is_by_chunk and self._blocks is not None)

    def takes_parts(self, index: int) -> bool:
        """Whether chunk ``index``, wanted whole, can be read in parts: its block digests are as near as it."""
        is_near = not self.entry.digests or (self._blocks is not None and self._blocks.tier == self.tier)
        return is_near and not self.is_remote and self.has_parts(index)

    def chunk(self, index: int, into: memoryview | None = None) -> Buffer:
        """Return chunk ``index``, in ``into`` (page-aligned, whole pages) or in other memory."""
        return self.part(index, self.chunk_range(index), into)

    def part(
        self,
        index: int,
        byte_range: ByteRange,
        into: memoryview | None = None,
        arrived: Callable[[], object] = lambda: None,
    ) -> Buffer:
        """Return ``byte_range`` of chunk ``index``: all of it, or whole blocks of one that ``has_parts``.

        ``arrived`` is called between reading and digesting, once for each copy.

        Raises:
            IntegrityError: no copy is good; names each copy and its error.
            StoreUnavailableError, PermissionDeniedError: no other copy is good, and the shared tier could not be read.
        """
        tried: list[tuple[FileCopy, TierckptError]] = []
        while (copy := self._next_copy([copy for copy, _ in tried])) is not None:
            try:
                data = copy.read(byte_range, into)
                BYTES.emit(len(data), tier=copy.tier, direction="read")
                arrived()
                if len(data) == byte_range.size_bytes and self._matches_digest(data, index, byte_range):
                    return data
                problem: TierckptError = IntegrityError(
                    f"bytes {byte_range.start}-{byte_range.stop} do not match their digest",
                    tier=copy.tier,
                    where=copy.where,
                )
            except TierckptError as error:
                problem = error
            self._exclude_copy(copy, problem)
            tried.append((copy, problem))
        raise self._no_copy_error(byte_range, tried)

    def read_unverified(self, byte_range: ByteRange, into: memoryview | None = None) -> Buffer:
        """Return the bytes of some copy, **unverified**, or none. Only for a comparison with known ones."""
        for copy in tuple(self._copies):
            with contextlib.suppress(TierckptError):
                data = copy.read(byte_range, into)
                BYTES.emit(len(data), tier=copy.tier, direction="read")
                return data
        return b""

    def _matches_digest(self, data: Buffer, index: int, byte_range: ByteRange) -> bool:
        if not self.entry.digests:
            return True
        if byte_range == self.chunk_range(index):
            return has_digest(data, self.entry.digests[index])
        known = self._blocks.of(index) if self._blocks is not None else None
        found = blocks_of(data)
        at = (byte_range.start - self.chunk_range(index).start) // DIGEST_BLOCK_BYTES * BLOCK_DIGEST_BYTES
        return known is not None and known[at : at + len(found)] == found

    def _next_copy(self, tried: Sequence[FileCopy]) -> FileCopy | None:
        """Return the next copy, one with damage elsewhere last: this range may be good there."""
        with self._lock:
            damaged = [copy for copy, problem in self._given_up if isinstance(problem, IntegrityError)]
            return next((copy for copy in (*self._copies, *damaged) if copy not in tried), None)

    def _exclude_copy(self, copy: FileCopy, problem: TierckptError) -> None:
        with self._lock:
            if copy not in self._copies:
                return  # another thread has dropped it
            self._copies.remove(copy)
            self._given_up.append((copy, problem))  # other threads may be reading it
        if isinstance(problem, IntegrityError):
            copy.quarantine()
        log.warning("%s: the %s copy is bad, trying the next: %s", self.entry.path, copy.tier, problem)

    def _no_copy_error(self, byte_range: ByteRange, tried: Sequence[tuple[FileCopy, TierckptError]]) -> TierckptError:
        known = [copy for copy, _ in tried]
        with self._lock:
            all_tried = [*(given_up for given_up in self._given_up if given_up[0] not in known), *tried]
        kind: type[TierckptError] = IntegrityError
        hint = "Restore an older step; `tierckpt verify --read-data` shows which files are bad on which tier"
        for unavailable in (StoreUnavailableError, PermissionDeniedError, EndpointError):
            if any(copy.tier is Tier.SHARED and isinstance(problem, unavailable) for copy, problem in all_tried):
                kind = unavailable
                hint = "The copy on the shared tier may be good: retry when the store is reachable"
                break
        problems = [problem for _, problem in all_tried]
        return kind(
            f"no good copy of {self.entry.path} (bytes {byte_range.start}-{byte_range.stop})",
            hint=hint,
            file=self.entry.path,
            tier="+".join(str(problem.context.get("tier", "?")) for problem in problems) or "none",
            problems="; ".join(str(problem) for problem in problems) or "no tier has this file",
        )


class RangeFile(io.RawIOBase):
    """A read-only, seekable file of ``size_bytes``."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes, self._position = size_bytes, 0

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``start``, which are within the file."""
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
    """A file over ``copies``, which it closes. Holds one chunk in memory."""

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
