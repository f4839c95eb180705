"""Reads a file of a checkpoint from its first good copy on any tier, verified by chunk.

Block digests of a rank's shards make small reads cheap. The manifest has one digest a chunk, of the digests of its
blocks. Those are in ``.tierckpt/blocks/<token>``: 16 bytes a block, no header, shards in the order of their paths. See
docs/adr/0011-digests-of-blocks.md.

    B1  Block digests are used only after they match the chunk's digest. If they are missing or damaged, a read is
        larger, but never returns wrong bytes and never fails.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from ..checkpoint.peer_copies import Member, PeerCopies
from ..disk.durable import durable_write, make_dirs, translated
from ..disk.file_io import Resident, open_direct, open_file, pread_all, read_direct, read_into
from ..disk.io_tuner import READ_MODES, ReadMode, ReadTuner, device_of
from ..disk.processes import set_aside_name
from ..errors import (
    EndpointError,
    IntegrityError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreUnavailableError,
    TierckptError,
)
from ..format.layout import blocks_file
from ..format.manifest import (
    BLOCK_DIGEST_BYTES,
    DIGEST_BLOCK_BYTES,
    FileEntry,
    Flushed,
    Manifest,
    block_count,
    blocks_of,
    digest_of_blocks,
    digests_of,
    has_digest,
)
from ..quantities import DISK_BLOCK_BYTES, round_up
from ..stores.base import Recoverable, Store
from ..stores.verified_read import again, available
from ..telemetry import BYTES, QUARANTINES, logger
from ..types import Buffer, ByteRange, Tier

T = TypeVar("T")

PEERS_TRIED_MAX = 3


class PeerSource:
    """Whole chunks of a checkpoint's files from other nodes, verified on arrival.

    A peer that fails is not used again; one that returns wrong bytes is reported. ``spend`` is awaited with the size of
    each chunk before its request.
    """

    tier = Tier.PEER

    def __init__(
        self,
        copies: PeerCopies,
        members: Sequence[Member] | None = None,
        spend: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.uri = f"peers {', '.join(member.name for member in members)}" if members is not None else "peers"
        self.size_bytes = 0
        self._copies, self._members, self._spend = copies, members, spend
        self._entries = {entry.key: entry for entry in copies.manifest.entries}
        self._given_up: dict[str, TierckptError] = {}

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        entry = self._entries.get(key)
        if entry is None or not entry.digests:
            raise ObjectNotFoundError(f"peers do not serve {key}", key=key)
        if self._spend is not None:
            await self._spend(byte_range.size_bytes)
        index = byte_range.start // self._copies.manifest.chunk_size_bytes
        holders = self._members if self._members is not None else self._copies.holders(entry)
        nobody: TierckptError = ObjectNotFoundError(f"no peer has {entry.path}", key=key)
        last = next((self._given_up[one.name] for one in holders if one.name in self._given_up), nobody)
        candidates = [one for one in holders if one.name not in self._given_up]
        for member in candidates if self._members is not None else candidates[:PEERS_TRIED_MAX]:
            try:
                data = await self._copies.chunk(member, entry, index)
                self.size_bytes += byte_range.size_bytes
                return data
            except ObjectNotFoundError as error:
                log.info("%s: %s", key, error)
                last = error
            except (TierckptError, OSError, TimeoutError) as error:
                if isinstance(error, IntegrityError):
                    self._copies.report_damage(member)
                last = error if isinstance(error, TierckptError) else StoreUnavailableError(f"{member.name}: {error}")
                self._given_up[member.name] = last
                log.warning("not using peer %s any more: %s", member.name, error)
        raise last


class NearestSource:
    """Files of one checkpoint: verified chunks from peers, else unverified ranges."""

    def __init__(self, store: Store, elsewhere: PeerCopies | None) -> None:
        self.uri = store.uri
        self._store, self._peers = store, PeerSource(elsewhere) if elsewhere is not None else None

    @property
    def peer_bytes(self) -> int:
        return self._peers.size_bytes if self._peers is not None else 0

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        """Return one chunk, or any range, which only the store has. Raises the store's errors."""
        if self._peers is not None:
            try:
                return await self._peers.get_range(key, byte_range)
            except TierckptError as error:
                log.debug("%s: %s", self.uri, error)
        return await self._store.get_range(key, byte_range, if_match=if_match)

    def again(self, work: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        return again(self._store, work)

    async def reconnect(self, damage: TierckptError) -> None:
        """Handle damage, which comes from the store: chunks of peers are verified on arrival."""
        if not isinstance(self._store, Recoverable):
            raise damage
        await self._store.reconnect(damage)

    async def available(self) -> bool:
        return await available(self._store)

    def probe_soon(self) -> None:
        if isinstance(self._store, Recoverable):
            self._store.probe_soon()


class FileCopy(Protocol):
    """One copy of a file. ``read`` raises a TierckptError. Thread-safe.

    ``into``: page-aligned memory of whole blocks. ``through``: a buffer of whole blocks for an intermediate read.
    """

    tier: Tier
    where: str

    def read(
        self, byte_range: ByteRange, into: memoryview | None = None, through: memoryview | None = None, /
    ) -> Buffer: ...

    def is_in_memory(self, byte_range: ByteRange, /) -> bool:
        """Whether a read waits for neither disk nor network."""

    def quarantine(self) -> None:
        """Quarantine a bad copy of this node."""

    def close(self) -> None: ...


class LocalCopy:
    """A copy on a mounted file system. A bad copy on this node is renamed, and kept.

    Ranges outside the page cache are read with O_DIRECT, unless ``tuner`` found that slower.

    Attributes:
        is_straight: read past the page cache without a buffer, even if one is given.
        cold_bytes: bytes read that were not in the page cache.
    """

    def __init__(self, path: Path, tier: Tier = Tier.LOCAL, tuner: ReadTuner | None = None) -> None:
        self.tier = tier
        self.where = str(path)
        self.tuner = tuner
        self.is_direct = self.is_straight = True
        self.cold_bytes = 0
        self._path = path
        self._file = -1
        self.device = ""
        self._direct_file: int | None = None
        self._may_direct = True
        self._resident: Resident | None = None
        self._lock = threading.Lock()

    @property
    def mode(self) -> ReadMode:
        return self.tuner.mode(self.device) if self.tuner is not None else READ_MODES[0]

    @property
    def is_untried(self) -> bool:
        return self.tuner is not None and not self.tuner.is_known(self.device)

    def set_mode(self, way: ReadMode) -> None:
        self.is_direct, self.is_straight = way.direct, way.in_place

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
                file, blocks = self._direct_descriptor(), into[: round_up(byte_range.size_bytes)]
                if file is not None:
                    done = read_direct(file, blocks, byte_range.start, None if self.is_straight else through)
                    done = min(done, byte_range.size_bytes)
            if not done and not is_cached:  # all at once: the kernel would read ahead in small steps
                os.posix_fadvise(self._file, byte_range.start, byte_range.size_bytes, os.POSIX_FADV_WILLNEED)
            done += read_into(self._file, into[done : byte_range.size_bytes], byte_range.start + done)
        return into[:done]

    def read_pieces(self, start: int, size: int, step: int, into: memoryview) -> int:
        """Fill ``into`` with ``size`` bytes of each ``step`` from ``start``; return the count.

        Also reads the gaps if the ranks of this node together want them.
        """
        self.open()
        starts, advised = range(start, start + len(into) // size * step, step), size
        with translated(self._path, is_above=True):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
            if self.mode.ranks * size >= step:
                advised = starts[-1] + size - start
            for at in starts[:1] if advised > size else starts:
                os.posix_fadvise(self._file, at, advised, os.POSIX_FADV_WILLNEED)
            for done, at in zip(range(0, len(into), size), starts, strict=True):
                if (count := read_into(self._file, into[done : done + size], at)) < size:
                    return done + count
        return len(into)

    def open(self) -> None:
        with self._lock:
            if self._file < 0:
                self._file = open_file(self._path)
                self.device = device_of(self._file)
                self.set_mode(self.mode)

    def is_in_memory(self, byte_range: ByteRange, /) -> bool:
        """Whether the whole range is in the page cache. Cost: 20 us for 8 MiB.

        Uses ``mincore``: RWF_NOWAIT would start readahead of bytes that are then read past the page cache.
        """
        try:
            self.open()
        except TierckptError:
            return False
        with self._lock:
            if self._resident is None:
                self._resident = Resident(self._file)
        return self._resident.has(byte_range)

    def _direct_descriptor(self) -> int | None:
        with self._lock:
            if self._may_direct and self._direct_file is None:
                self._may_direct = False
                with contextlib.suppress(OSError):
                    self._direct_file = open_direct(self._path, os.O_RDONLY)
            return self._direct_file

    def quarantine(self) -> None:
        if self.tier is not Tier.LOCAL:
            return
        try:
            self._path.rename(set_aside_name(str(self._path)))
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
    """A copy over a network. Each read is a request into new memory.

    ``chunk_size_bytes``: of a peer, which serves whole chunks only. ``report`` is called if the bytes are damaged.
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
        """Do nothing."""


def write_digests(
    directory: Path, flushed: Sequence[Flushed], rank: int, token: str, chunk_size_bytes: int
) -> list[FileEntry]:
    """Write the block digests of ``flushed``, durably. Return the entry of their file, or [] if no chunk has two."""
    shards = sorted(flushed, key=lambda shard: shard.path.name)
    data = b"".join(shard.blocks for shard in shards)
    if not any(len(shard.blocks) > BLOCK_DIGEST_BYTES * len(shard.digests) for shard in shards):
        return []
    path = directory / blocks_file(token)
    make_dirs(path.parent)
    durable_write(path, data)
    return [FileEntry(blocks_file(token), len(data), digests_of(data, chunk_size_bytes), rank, token)]


def digest_locations(manifest: Manifest) -> dict[str, tuple[FileEntry, int]]:
    """Return the file and offset of each shard's block digests, by its path."""
    kept = {entry.token: entry for entry in manifest.files if entry.path == blocks_file(entry.token)}
    at = dict.fromkeys(kept, 0)
    found: dict[str, tuple[FileEntry, int]] = {}
    for entry in sorted(manifest.files, key=lambda item: item.path):
        if entry.token in kept and entry is not kept[entry.token]:
            found[entry.path] = (kept[entry.token], at[entry.token])
            at[entry.token] += BLOCK_DIGEST_BYTES * block_count(entry.size_bytes, manifest.chunk_size_bytes)
    return {path: place for path, place in found.items() if at[place[0].token] == place[0].size_bytes}


class ShardBlockDigests:
    """The block digests of one shard. Thread-safe.

    Cost: one read for all chunks between the first and the last of ``expect``.
    """

    def __init__(self, shard: FileEntry, chunk_size_bytes: int, start: int, copies: Sequence[FileCopy]) -> None:
        self._shard = shard
        self._chunk_size_bytes = chunk_size_bytes
        self._start = start
        self._copies = list(copies)
        self._expected: list[int] = []
        self._known: dict[int, bytes | None] = {}
        self._lock = threading.Lock()

    @property
    def tier(self) -> str | None:
        return next((str(copy.tier) for copy in self._copies), None)

    def expect(self, indices: Iterable[int]) -> None:
        """Announce the chunks of later ``of`` calls, in order."""
        self._expected = sorted(indices)

    def of(self, index: int) -> bytes | None:
        """Return the verified digests of the blocks of chunk ``index``, if any (B1)."""
        with self._lock:
            if index not in self._known:
                near = self._expected if index in self._expected else [index]
                self._known |= dict.fromkeys(near)
                self._read(near[0], near[-1])
            return self._known.get(index)

    def close(self) -> None:
        for copy in self._copies:
            copy.close()

    def _read(self, first: int, last: int) -> None:
        at = [self._place(index) for index in range(first, last + 1)]
        for copy in self._copies:
            try:
                data = bytes(copy.read(ByteRange(at[0].start, at[-1].stop)))
            except TierckptError as error:
                log.debug("%s: no block digests on the %s tier: %s", self._shard.path, copy.tier, error)
                continue
            BYTES.emit(len(data), tier=copy.tier, direction="read")
            for index, digest_range in zip(range(first, last + 1), at, strict=True):
                digests = data[digest_range.start - at[0].start : digest_range.stop - at[0].start]
                if digests and digest_of_blocks(digests) == self._shard.digests[index]:
                    self._known[index] = digests
            if all(self._known.get(index) is not None for index in range(first, last + 1)):
                return
            log.debug("%s: its block digests on the %s tier do not match its chunks", self._shard.path, copy.tier)

    def _place(self, index: int) -> ByteRange:
        def at(end: int) -> int:
            size_bytes = min(end * self._chunk_size_bytes, self._shard.size_bytes)
            return self._start + BLOCK_DIGEST_BYTES * block_count(size_bytes, self._chunk_size_bytes)

        return ByteRange(at(index), at(index + 1))


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
