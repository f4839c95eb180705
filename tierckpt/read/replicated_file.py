"""Read a file of a checkpoint from its first good copy, every chunk verified before a byte of it is handed out.

The order of copies is the caller's: ``dcp/checkpoint_files`` for a load.
"""

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
from .block_digests import BlockDigests
from .file_copies import Copy, LocalCopy, RemoteCopy

log = logger("restore")


class ReplicatedFile:
    """The copies of one file, nearest first. Any thread may ask for any chunk, or for whole blocks of one.

    Every byte it returns has passed a digest (files of stock DCP have none and are returned as they are), but for what
    ``read_unverified`` shows. When a part of one copy is bad or cannot be read, that copy is given up (quarantined
    where it is ours) for the next.
    """

    def __init__(
        self, entry: FileEntry, chunk_size_bytes: int, copies: Sequence[Copy], blocks: BlockDigests | None = None
    ) -> None:
        self.entry = entry
        self.chunk_size_bytes = chunk_size_bytes
        self._copies = list(copies)
        self._blocks = blocks
        self._given_up: list[tuple[Copy, TierckptError]] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        for copy in (*self._copies, *(copy for copy, _ in self._given_up)):
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
        tried: list[tuple[Copy, TierckptError]] = []
        while (copy := self._next_copy([copy for copy, _ in tried])) is not None:
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
            tried.append((copy, problem))
        raise self._loss(byte_range, tried)

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

    def _next_copy(self, tried: Sequence[Copy]) -> Copy | None:
        """The copy to read next. Those with damage elsewhere come last: the range that is wanted may be good there."""
        with self._lock:
            damaged = [copy for copy, problem in self._given_up if isinstance(problem, IntegrityError)]
            return next((copy for copy in (*self._copies, *damaged) if copy not in tried), None)

    def _give_up(self, copy: Copy, problem: TierckptError) -> None:
        with self._lock:
            if copy not in self._copies:
                return  # another thread has given it up before
            self._copies.remove(copy)
            self._given_up.append((copy, problem))  # others may be reading it: it is closed with the rest
        if isinstance(problem, IntegrityError):
            copy.quarantine()
        log.warning("%s: the %s copy is bad, trying the next: %s", self.entry.path, copy.tier, problem)

    def _loss(self, byte_range: ByteRange, tried: Sequence[tuple[Copy, TierckptError]]) -> TierckptError:
        """The error of a range that ``tried`` cannot give; other copies were given up before."""
        known = [copy for copy, _ in tried]
        with self._lock:
            all_tried = [*(given_up for given_up in self._given_up if given_up[0] not in known), *tried]
        kind: type[TierckptError] = IntegrityError
        hint = "Restore an older step; `tierckpt verify --read-data` shows which files are bad on which tier"
        for unavailable in (StoreUnavailableError, PermissionDeniedError, EndpointError):
            if any(copy.tier is Tier.SHARED and isinstance(problem, unavailable) for copy, problem in all_tried):
                kind = unavailable
                hint = "The copy on the shared tier may be good: run it again when the store can be asked"
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
