"""Takes unchanged files over from another version of the URI on this node, by links or else copies.

A file is the same if its path, size and etag (or digests) are, and it has not been written to since its receipt.

Safe: a link has all of the file or none, and a repair is right for both names. A copy writes the same bytes (G2 of
``partial_entry``). ``copy_chunk`` shares no inode with the cache.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from ..disk.durable import CANNOT_LINK, hard_link, make_dirs
from ..disk.quarantine import open_regular
from ..errors import IntegrityError, StoreError
from ..format.manifest import digest_of
from ..ownership import file_mode
from ..stores.verified_read import corrupt
from ..telemetry import BYTES, logger
from ..types import Tier
from .direct_write import receive_memory
from .file_set import FileSet, FileSpec, Receipt
from .partial_entry import BLOCKS, PartialEntry, read_file, same_digest
from .receipt import RECEIPT, read_receipt

log = logger("cache")

COPY_BYTES = 4 << 20

CopySource: TypeAlias = tuple[Path, Receipt]
"""A directory, and its files with the digests of their fetched chunks."""


def reusable_bytes(frozen: FileSet, directories: Iterable[Path]) -> int:
    found: set[int] = set()
    for directory in directories:
        found |= _same(frozen, read_receipt(directory)).keys()
    return sum(frozen.files[index].size_bytes for index in found)


def reuse(partial_entry: PartialEntry, directories: Iterable[Path]) -> None:
    """Link files of other versions into ``partial_entry``, as if they had landed."""
    frozen, reused = partial_entry.frozen, 0
    for directory in directories:
        receipt = read_receipt(directory)
        try:
            written_ns = (directory / RECEIPT).stat().st_mtime_ns
            blocks = (directory / BLOCKS).read_bytes() if (directory / BLOCKS).exists() else b""
        except OSError:
            continue
        for index, old_index in _same(frozen, receipt).items():
            if receipt is None or partial_entry.has_file(index):
                continue
            item = frozen.files[index]
            if not _take(directory / item.path, partial_entry.incoming / item.path, item.size_bytes, written_ns):
                continue
            for chunk, digest in enumerate(receipt.landed[old_index]):
                chunk_range = receipt.frozen.blocks_range(old_index, chunk)
                partial_entry.take_over(index, chunk, digest, blocks[chunk_range.start : chunk_range.stop])
            partial_entry.keep(index)
            reused += 1
    if reused:
        log.info("%s: %d files of another version have not changed", frozen.uri, reused)


def copies_of(frozen: FileSet, copy_sources: Iterable[CopySource]) -> dict[tuple[int, int], tuple[Path, str]]:
    """By (file, chunk): a file with the chunk at the same offset, and the chunk's digest."""
    return {
        (index, chunk): (directory / frozen.files[index].path, digest)
        for directory, receipt in copy_sources
        for index, old_index in _same(frozen, receipt).items()
        for chunk, digest in enumerate(receipt.landed[old_index])
        if digest
    }


def copy_chunk(partial_entry: PartialEntry, index: int, chunk: int, source: Path, expected: str) -> bool:
    """False if ``source`` is missing or damaged. Raises CapacityError, StoreError: it could not be written."""
    chunk_range = partial_entry.frozen.chunk_range(index, chunk)
    with receive_memory(chunk_range.size_bytes) as memory:
        data = memory if memory is not None else memoryview(bytearray(chunk_range.size_bytes))
        try:
            if not read_file(source, chunk_range, data):
                return False
            BYTES.emit(chunk_range.size_bytes, tier=Tier.LOCAL, direction="read")
            if not same_digest(data, digest := digest_of(data), expected):
                raise corrupt(str(source), chunk_range, Tier.LOCAL, partial_entry.frozen.uri)
        except (StoreError, IntegrityError) as error:
            log.warning("%s: not copied from the node cache but fetched: %s", partial_entry.frozen.uri, error.message)
            return False
        partial_entry.store_chunk(index, chunk, data, digest, clone_of=source)
    return True


def _same(frozen: FileSet, receipt: Receipt | None) -> dict[int, int]:
    if receipt is None or not receipt.landed or receipt.frozen.chunk_size_bytes != frozen.chunk_size_bytes:
        return {}
    known = {item.path: index for index, item in enumerate(receipt.frozen.files)}
    found = {index: known[item.path] for index, item in enumerate(frozen.files) if item.path in known}
    return {
        index: old_index
        for index, old_index in found.items()
        if _is_same(frozen.files[index], receipt.frozen.files[old_index])
        and len(receipt.landed[old_index]) == frozen.chunks_of(index) > 0
    }


def _is_same(item: FileSpec, old_index: FileSpec) -> bool:
    if item.size_bytes != old_index.size_bytes:
        return False
    if item.digests and old_index.digests:
        return item.digests == old_index.digests
    is_strong = item.etag is not None and not item.etag.startswith("W/")  # a weak etag does not identify bytes
    return is_strong and item.etag == old_index.etag


def _take(source: Path, path: Path, size_bytes: int, written_ns: int) -> bool:
    try:
        status = source.lstat()
        is_same_file = stat.S_ISREG(status.st_mode) and status.st_size == size_bytes
        if not is_same_file or status.st_mtime_ns > written_ns:
            return False
        make_dirs(path.parent, is_durable=False)
        try:
            hard_link(source, path)
        except OSError as error:
            if error.errno not in CANNOT_LINK or path.exists():
                raise
            _copy(source, path)
    except OSError as error:  # fetched, evicted, or the disk is full
        log.debug("%s is not taken over: %s", source, error)
        return False
    return True


def _copy(source: Path, path: Path) -> None:
    with (
        source.open("rb") as whole,
        os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT, file_mode(path)), "wb") as to,
    ):
        shutil.copyfileobj(whole, to, COPY_BYTES)
