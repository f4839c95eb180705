"""Copies of a file on any tier, and async sources of ranges of a checkpoint's files."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from ..checkpoint.peer_copies import Member, PeerCopies
from ..disk.durable import translated
from ..disk.file_io import Resident, open_direct, open_file, pread_all, read_direct, read_into
from ..disk.io_tuner import READ_MODES, ReadMode, ReadTuner, device_of
from ..disk.processes import set_aside_name
from ..errors import IntegrityError, ObjectNotFoundError, StoreUnavailableError, TierckptError
from ..quantities import DISK_BLOCK_BYTES, round_up
from ..stores.base import Recoverable, Store
from ..stores.verified_read import again, available
from ..telemetry import QUARANTINES, logger
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


log = logger("restore")


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
        self._device = ""
        self._direct_file: int | None = None
        self._may_direct = True
        self._resident: Resident | None = None
        self._lock = threading.Lock()

    @property
    def device(self) -> str:
        return self._device

    @property
    def mode(self) -> ReadMode:
        return self.tuner.mode(self._device) if self.tuner is not None else READ_MODES[0]

    @property
    def is_untried(self) -> bool:
        return self.tuner is not None and not self.tuner.is_known(self._device)

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
                self._device = device_of(self._file)
                self.set_mode(self.mode)

    def is_in_memory(self, byte_range: ByteRange, /) -> bool:
        try:
            self.open()
        except TierckptError:
            return False
        return self.is_in_page_cache(byte_range)

    def is_in_page_cache(self, byte_range: ByteRange) -> bool:
        """Whether the whole range is in the page cache. Cost: 20 us for 8 MiB.

        Uses ``mincore``: RWF_NOWAIT would start readahead of bytes that are then read past the page cache.
        """
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
