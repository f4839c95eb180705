"""Block digests of a rank's shards, so that small reads need no whole chunk.

The manifest has one digest a chunk, of the digests of its blocks. Those are in ``.tierckpt/blocks/<token>``: 16 bytes a
block, no header, shards in the order of their paths. See docs/adr/0011-digests-of-blocks.md.

    B1  Block digests are used only after they match the chunk's digest. If they are missing or damaged, a read is
        larger, but never returns wrong bytes and never fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..disk.durable import durable_write, make_dirs
from ..errors import TierckptError
from ..format.layout import blocks_file
from ..format.manifest import (
    BLOCK_DIGEST_BYTES,
    FileEntry,
    Flushed,
    Manifest,
    block_count,
    digest_of_blocks,
    digests_of,
)
from ..telemetry import BYTES, logger
from ..types import ByteRange
from .file_copies import FileCopy

log = logger("restore")


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
