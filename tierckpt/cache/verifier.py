"""Verifies reads from an entry's files by the digests recorded with their chunks; repairs damage.

V1  Digests are taken of the bytes in the caller's memory; the file completes a partial block or chunk.
V2  A good block may go bad later: its digest is kept in memory (16 bytes for 256 KiB), not its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import IntegrityError, ObjectNotFoundError, TierckptError
from ..format.manifest import BLOCK_DIGEST_BYTES, DIGEST_BLOCK_BYTES, blocks_of, digest_of_blocks, has_digest
from ..stores.base import to_completion
from ..telemetry import QUARANTINES, logger
from ..types import Buffer, ByteRange, Tier
from .direct_write import write_at
from .file_set import FileSet
from .partial_entry import BLOCKS, read_file, same_digest
from .store_chunks import StoreChunks

log = logger("cache")


class _Unreadable(Exception): ...


class Checker:
    """The digests of one directory. Thread-safe.

    Args:
        digest: of (file, chunk); "": the chunk is not verified.
        read: reads exactly a range of a file; False if it cannot.
        directories: possible locations of the block digests.
    """

    def __init__(
        self,
        frozen: FileSet,
        digest: Callable[[int, int], str],
        read: Callable[[int, ByteRange, memoryview], bool],
        directories: Callable[[], Iterable[Path]],
    ) -> None:
        self.frozen, self.digest, self.directories = frozen, digest, directories
        self._read = read
        self._blocks: dict[tuple[int, int], bytes] = {}
        self._lock = threading.Lock()
        self.bad: set[tuple[int, int]] = set()

    def is_good(self, index: int, byte_range: ByteRange, data: memoryview) -> bool:
        """Return whether ``data`` is undamaged, or its digest unknown.

        Cost: a digest, and a read of the rest of a block at either end.
        """
        for chunk in self.frozen.touched(byte_range):
            chunk_range = self.frozen.chunk_range(index, chunk)
            part = ByteRange(max(chunk_range.start, byte_range.start), min(chunk_range.stop, byte_range.stop))
            piece = data[part.start - byte_range.start : part.stop - byte_range.start]
            try:
                if self._is_good(index, chunk, part, piece):
                    continue
            except _Unreadable:
                return False
            self.note_bad(index, chunk)
            return False
        return True

    def note_bad(self, index: int, chunk: int) -> None:
        with self._lock:
            is_new = (index, chunk) not in self.bad
            self.bad.add((index, chunk))
        if is_new:
            chunk_range = self.frozen.chunk_range(index, chunk)
            QUARANTINES.emit(1, tier=Tier.LOCAL)
            path = self.frozen.files[index].path
            log.error(
                "%s: bytes %d-%d of %s are damaged on this node",
                self.frozen.uri,
                chunk_range.start,
                chunk_range.stop,
                path,
            )

    def note_good(self, index: int, chunk: int) -> None:
        with self._lock:
            self.bad.discard((index, chunk))

    def _is_good(self, index: int, chunk: int, part: ByteRange, data: memoryview) -> bool:
        digest = self.digest(index, chunk)
        if not digest:
            return True
        chunk_range = self.frozen.chunk_range(index, chunk)
        known = self._blocks_of(index, chunk, digest)
        start, stop = chunk_range.start, chunk_range.stop
        if known:
            start = part.start - (part.start - chunk_range.start) % DIGEST_BLOCK_BYTES
            stop = min(chunk_range.stop, part.stop + -(part.stop - chunk_range.start) % DIGEST_BLOCK_BYTES)
        pieces = (self._range(index, start, part.start), data, self._range(index, part.stop, stop))
        found = blocks_of(*pieces)
        if known:
            first = (start - chunk_range.start) // DIGEST_BLOCK_BYTES * BLOCK_DIGEST_BYTES
            return known[first : first + len(found)] == found
        if not digest.startswith("t") and chunk_range.size_bytes > DIGEST_BLOCK_BYTES:
            is_good = has_digest(b"".join(pieces), digest)
        else:
            is_good = digest_of_blocks(found) == digest
        if is_good:
            self._blocks[index, chunk] = found
        return is_good

    def _range(self, index: int, start: int, stop: int) -> Buffer:
        if start == stop:
            return b""
        into = memoryview(bytearray(stop - start))
        if not self._read(index, ByteRange(start, stop), into):
            raise _Unreadable
        return into

    def _blocks_of(self, index: int, chunk: int, digest: str) -> bytes:
        """The verified block digests of a chunk; b'' without them (G5)."""
        known = self._blocks.get((index, chunk), b"")
        if known or not digest.startswith("t"):
            return known
        chunk_range = self.frozen.blocks_range(index, chunk)
        into = bytearray(chunk_range.size_bytes)
        for directory in self.directories():
            with contextlib.suppress(TierckptError):
                if (
                    read_file(directory / BLOCKS, chunk_range, memoryview(into))
                    and digest_of_blocks(bytes(into)) == digest
                ):
                    self._blocks[index, chunk] = bytes(into)
                    return bytes(into)
        return b""


async def repair_chunk(checker: Checker, chunks: StoreChunks, target: str, index: int, chunk: int) -> Buffer:
    """Read a damaged or missing chunk from the store; overwrite damaged bytes.

    Raises IntegrityError: damaged here, and no good copy from the store. StoreError: missing here, and unavailable.
    """
    frozen, digest = checker.frozen, checker.digest(index, chunk)
    item, chunk_range = frozen.files[index], frozen.chunk_range(index, chunk)
    if (index, chunk) not in checker.bad:
        log.warning("%s: %s is missing in the cache, reading from the store", frozen.uri, target)
        return (await chunks.read(index, chunk))[0]
    try:
        data, found = await chunks.read(index, chunk)
        if digest and not same_digest(data, found, digest):
            raise IntegrityError("the store has other bytes there now", tier=Tier.SHARED)
    except TierckptError as error:
        raise IntegrityError(
            f"bytes {chunk_range.start}-{chunk_range.stop} of {item.path} are damaged in the node cache, "
            f"and the store has no good ones: {error.message}",
            hint=f"Load it again when {chunks.store.uri} can be reached, or fetch it again: "
            f"`tierckpt cache evict {frozen.uri}`, then `tierckpt prefetch`",
            file=item.path,
            entry=target,
            tier=Tier.LOCAL,
        ) from error
    await to_completion(asyncio.to_thread(_put_back, checker, index, chunk, data))
    return data


def _put_back(checker: Checker, index: int, chunk: int, data: Buffer) -> None:
    """Overwrite in place. Safe: readers verify (V1), and a crash leaves a bad chunk, as before."""
    frozen = checker.frozen
    path, start = frozen.files[index].path, frozen.chunk_range(index, chunk).start
    for directory in checker.directories():
        try:
            write_at(directory / path, data, start)
        except ObjectNotFoundError:
            continue
        except TierckptError as error:
            log.warning("%s: cannot repair the damage in %s: %s", frozen.uri, directory, error)
            return
        checker.note_good(index, chunk)
        log.warning("%s: %s is repaired in %s, from the store", frozen.uri, path, directory)
        return
