"""Directories of this node that hold chunks of a version: whole, on their way, or a committed checkpoint."""

from __future__ import annotations

import abc
import contextlib
import os
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from xxhash import xxh3_128

from ..cache.file_set import FileSet, decode, from_manifest
from ..cache.partial_entry import CLAIMS, ENTRY, FILLS, SHARED, ProgressLog
from ..cache.receipt import RECEIPT
from ..checkpoint.branches import NOTE, parse
from ..disk.file_io import open_beneath, read_into, stat_version
from ..disk.file_lock import locked
from ..errors import ManifestError
from ..format.layout import MANIFEST
from ..format.manifest import DIGEST_BLOCK_BYTES, Manifest, block_digest, digest_of_blocks
from ..format.manifest import decode as decode_manifest
from ..types import ByteRange
from .peer_http import MANIFEST_BYTES_MAX

RECHECK_SECONDS = 1.0
BAD_SECONDS = 60.0
PAGES_BYTES = 1 << 20
SINGLE_BYTES_MIN = 1 << 20
"""A request costs more than a smaller file is worth."""
_RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


class ChunkSource(abc.ABC):
    """A directory with ``frozen``, or a part of it. Digests each chunk once, and serves no damaged ones."""

    def __init__(self, directory: Path, frozen: FileSet) -> None:
        self.directory, self.frozen = directory, frozen
        self.order: list[tuple[int, int]] = []
        """Chunks in order of arrival. Append-only."""
        self._good: set[tuple[int, int]] = set()
        self._found: dict[tuple[int, int], str] = {}
        """Digests of chunks without a recorded one."""
        self._bad: dict[tuple[int, int], float] = {}

    @property
    @abc.abstractmethod
    def is_whole(self) -> bool: ...

    @abc.abstractmethod
    def refresh(self) -> bool:
        """Read the directory again. False if it is missing or replaced."""

    @abc.abstractmethod
    def covers(self, index: int, chunk: int) -> bool:
        """True if the chunk is here."""

    def path(self, index: int) -> str:
        return self.frozen.files[index].path

    def digest(self, index: int, chunk: int) -> str:
        item = self.frozen.files[index]
        return item.digests[chunk] if item.digests else self._landed(index, chunk)

    def _landed(self, index: int, chunk: int) -> str:
        return ""

    def trusts(self, index: int, chunk: int) -> bool:
        return (index, chunk) in self._good

    def is_bad(self, index: int, chunk: int) -> bool:
        bad_at = self._bad.get((index, chunk))
        return bad_at is not None and time.monotonic() - bad_at < BAD_SECONDS

    def verify(self, file: int, index: int, chunk: int) -> str | None:
        """Return the digest of a chunk; None if it is damaged. Needs no lock."""
        if verified := self.verified(index, chunk):
            return verified
        known = self.digest(index, chunk)
        found = digest_at(file, self.frozen.chunk_range(index, chunk), like=known or "t")
        if known and found != known:
            self._bad[index, chunk] = time.monotonic()
            return None
        self._good.add((index, chunk))
        self._bad.pop((index, chunk), None)
        self._found |= {(index, chunk): found} if not known else {}
        return found

    def verified(self, index: int, chunk: int) -> str:
        """``verify`` without reading; '' if it would have to read."""
        return (self.digest(index, chunk) or self._found.get((index, chunk), "")) if self.trusts(index, chunk) else ""

    def is_filled_now(self) -> bool:
        return False

    def claimed(self) -> Iterable[tuple[int, int]]:
        return ()


class Recorded(ChunkSource):
    RECORD: ClassVar[str]

    def __init__(self, directory: Path) -> None:
        """Raises OSError, ManifestError."""
        self._seen = _seen(directory / self.RECORD)
        record = read_beneath(directory, self.RECORD)
        super().__init__(directory, self._decode(record, directory))

    @abc.abstractmethod
    def _decode(self, record: bytes, directory: Path) -> FileSet: ...

    def refresh(self) -> bool:
        try:
            return _seen(self.directory / self.RECORD) == self._seen
        except OSError:
            return False


class Whole(Recorded):
    RECORD = RECEIPT
    is_whole = True

    def _decode(self, record: bytes, directory: Path) -> FileSet:
        self._receipt = decode(record, where=str(directory / RECEIPT))
        return self._receipt.frozen

    def trust(self, lines: ProgressLog) -> None:
        """Treat the chunks in ``lines``, of this boot, as verified."""
        if lines.frozen.chunk_size_bytes == self.frozen.chunk_size_bytes:
            self._good.update((index, chunk) for index, chunks in lines.landed.items() for chunk in chunks)

    def covers(self, index: int, chunk: int) -> bool:
        return not self.is_bad(index, chunk)

    def _landed(self, index: int, chunk: int) -> str:
        return self._receipt.landed[index][chunk] if self._receipt.landed else ""


class Incoming(Recorded):
    RECORD = ENTRY
    is_whole = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.lines = ProgressLog(self.frozen)
        self.order = self.lines.order
        self._size_bytes = 0
        self._progress = self.lines.path(directory)
        self._claims = -1
        self.refresh()

    def _decode(self, record: bytes, directory: Path) -> FileSet:
        return decode(record, where=str(directory / ENTRY)).frozen

    def refresh(self) -> bool:
        if not super().refresh():
            return False
        try:
            size = self._progress.stat().st_size
        except FileNotFoundError:
            return True
        if size != self._size_bytes:
            file = open_beneath(self.directory, str(self._progress.relative_to(self.directory)))
            with os.fdopen(file, "rb", buffering=0):
                self.lines.read_on(file)
            self._size_bytes = size
        return True

    def covers(self, index: int, chunk: int) -> bool:
        return chunk in self.lines.landed.get(index, {}) and not self.is_bad(index, chunk)

    def _landed(self, index: int, chunk: int) -> str:
        return self.lines.landed.get(index, {}).get(chunk, "")

    def trusts(self, index: int, chunk: int) -> bool:
        return True  # all chunks here were verified on arrival

    def is_filled_now(self) -> bool:
        return bool(self._locked(FILLS, FILLS + 1))

    def claimed(self) -> Iterable[tuple[int, int]]:
        """Return the chunks that live processes fetch from shared storage now."""
        firsts = self.frozen.first_ordinals
        for at in self._locked(SHARED, SHARED + firsts[-1]):
            index = bisect_right(firsts, at - SHARED) - 1
            yield index, at - SHARED - firsts[index]

    def _locked(self, start: int, stop: int) -> list[int]:
        if self._claims < 0:
            with contextlib.suppress(FileNotFoundError):
                self._claims = open_beneath(self.directory, CLAIMS)
                weakref.finalize(self, os.close, self._claims)
        return locked(self._claims, start, stop) if self._claims >= 0 else []


class Committed(Recorded):
    RECORD = MANIFEST

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._paths: dict[int, str] = {}
        self._checked_at = float("-inf")
        self._find_files()

    def _decode(self, record: bytes, directory: Path) -> FileSet:
        manifest = decode_manifest(record, where=str(directory / MANIFEST))
        branch = parse(manifest.notes.get(NOTE))
        self.attempt = manifest.attempt
        self.went_back_at = branch.order if branch is not None and branch.base is not None else 0
        return frozen_of(manifest, str(directory))

    @property
    def is_whole(self) -> bool:
        return len(self._paths) == len(self.frozen.files) and not self._bad

    def has(self, index: int) -> bool:
        return index in self._paths

    @cached_property
    def singles(self) -> dict[str, Single]:
        sizes = enumerate(item.size_bytes for item in self.frozen.files)
        found = [Single(self, index) for index, size in sizes if size >= SINGLE_BYTES_MIN]
        return {single.frozen.version: single for single in found}

    def path(self, index: int) -> str:
        return self._paths[index]

    def refresh(self) -> bool:
        if not super().refresh():
            return False
        if len(self._paths) < len(self.frozen.files) and time.monotonic() - self._checked_at > RECHECK_SECONDS:
            self._find_files()
        return True

    def _find_files(self) -> None:
        """Find the files. Metadata has a name of its attempt, or its restored name."""
        self._checked_at = time.monotonic()
        for index, item in enumerate(self.frozen.files):
            if index in self._paths:
                continue
            for name in dict.fromkeys((item.key, item.path)):
                if _size(self.directory / name) == item.size_bytes:
                    self._paths[index] = name
                    self.order.extend((index, chunk) for chunk in range(self.frozen.chunks_of(index)))
                    break

    def covers(self, index: int, chunk: int) -> bool:
        return index in self._paths and not self.is_bad(index, chunk)


class Single(ChunkSource):
    def __init__(self, checkpoint: Committed, index: int) -> None:
        item = checkpoint.frozen.files[index]
        super().__init__(
            checkpoint.directory, FileSet(checkpoint.frozen.uri, (item,), checkpoint.frozen.chunk_size_bytes)
        )
        self._checkpoint, self._index = checkpoint, index
        self._find_file()

    @property
    def is_whole(self) -> bool:
        return bool(self.order) and not self._bad

    def refresh(self) -> bool:
        stands = self._checkpoint.refresh()
        self._find_file()
        return stands

    def _find_file(self) -> None:
        if not self.order and self._checkpoint.has(self._index):
            self.order.extend((0, chunk) for chunk in range(self.frozen.chunks_of(0)))

    def path(self, index: int) -> str:
        return self._checkpoint.path(self._index)

    def covers(self, index: int, chunk: int) -> bool:
        return bool(self.order) and not self.is_bad(index, chunk)


def frozen_of(manifest: Manifest, uri: str) -> FileSet:
    """The version does not depend on ``uri``."""
    return FileSet(uri, tuple(from_manifest(manifest)), manifest.chunk_size_bytes)


def digest_at(file: int, at: ByteRange, like: str = "t") -> str:
    blocks, plain = [], xxh3_128()
    is_plain = not like.startswith("t") and at.size_bytes > DIGEST_BLOCK_BYTES
    piece = memoryview(bytearray(min(4 * DIGEST_BLOCK_BYTES, at.size_bytes)))
    for start in range(at.start, at.stop, max(1, len(piece))):
        view = piece[: min(len(piece), at.stop - start)]
        if read_into(file, view, start) < len(view):
            return ""
        if is_plain:
            plain.update(view)
        else:
            blocks += [
                block_digest(view[offset : offset + DIGEST_BLOCK_BYTES])
                for offset in range(0, len(view), DIGEST_BLOCK_BYTES)
            ]
    return plain.hexdigest() if is_plain else digest_of_blocks(b"".join(blocks) or block_digest(b""))


def bring_in(file: int, at: ByteRange) -> None:
    """Read a range into the page cache, so that sending it never waits for the disk. Best effort."""
    if is_resident(file, at):
        return
    try:
        with open(os.devnull, "wb", buffering=0) as nowhere:  # noqa: PTH123
            done = at.start
            while done < at.stop:
                count = os.sendfile(nowhere.fileno(), file, done, at.stop - done)
                if not count:
                    return
                done += count
    except OSError:
        os.posix_fadvise(file, at.start, at.size_bytes, os.POSIX_FADV_WILLNEED)


def is_resident(file: int, at: ByteRange) -> bool:
    """True if a byte of each MiB of the range is in the page cache; False if unknown."""
    probe = bytearray(1)
    try:
        for start in range(at.start, at.stop, PAGES_BYTES):
            os.preadv(file, [probe], start, _RWF_NOWAIT)
    except OSError:
        return False
    return bool(_RWF_NOWAIT)


def read_beneath(directory: Path, relative: str) -> bytes:
    """Raises OSError; ManifestError: too large."""
    file = open_beneath(directory, relative)
    with os.fdopen(file, "rb") as stream:
        if os.fstat(file).st_size > MANIFEST_BYTES_MAX:
            raise ManifestError(f"{directory / relative} is larger than any that tierckpt writes")
        return stream.read(MANIFEST_BYTES_MAX)


def _seen(path: Path) -> str:
    return stat_version(path.lstat())


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1


class ChunkIndex:
    """One version in chunks of one size, and the list of its chunks here, in order of arrival."""

    def __init__(self, frozen: FileSet) -> None:
        self.frozen = frozen
        self._firsts = frozen.first_ordinals
        self.total = self._firsts[-1]
        self.log: list[tuple[int, str]] = []
        """Ordinal and digest of each chunk; "" if the version has digests."""
        self._from: dict[int, ChunkSource] = {}
        self._taken: dict[int, tuple[ChunkSource, int]] = {}

    def chunk_at(self, ordinal: int) -> tuple[int, int]:
        index = bisect_right(self._firsts, ordinal) - 1
        return index, ordinal - self._firsts[index]

    def ordinal(self, index: int, chunk: int) -> int:
        return self._firsts[index] + chunk

    def take(self, sources: Iterable[ChunkSource]) -> None:
        for source in sources:
            _, done = self._taken.get(id(source), (source, 0))
            for index, chunk in source.order[done:]:
                ordinal = self.ordinal(index, chunk)
                if self._from.setdefault(ordinal, source) is source:  # twice from one source: lost, and fetched
                    self.log.append((ordinal, "" if self.frozen.files[index].digests else source.digest(index, chunk)))
            self._taken[id(source)] = (source, len(source.order))  # the reference keeps the id unique
