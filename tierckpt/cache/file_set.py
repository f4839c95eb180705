"""A file set: the files below one URI, frozen with size, version (etag) and digests. Pure.

F1  Two processes that freeze the same files get the same ``version``, whatever their settings.
F2  A decoded record is safe to act on: no path leaves its directory, no size is impossible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NoReturn

from ..errors import ManifestError, ObjectNotFoundError
from ..format.manifest import (
    BLOCK_DIGEST_BYTES,
    MANIFEST_BYTES_MAX,
    SIZE_BYTES_MAX,
    FileEntry,
    Manifest,
    block_count,
    chunk_count,
    digest_of,
    is_safe_path,
    seal,
    unseal,
)
from ..types import ByteRange, Json

_FIELDS = frozenset({"uri", "chunk_size_bytes", "files", "count", "wanted", "landed"})
_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class FileSpec:
    path: str
    key: str
    size_bytes: int
    etag: str | None = None
    digests: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "size_bytes": self.size_bytes, "etag": self.etag, "digests": list(self.digests)}


@dataclass(frozen=True)
class FileSet:
    """One version of the files below ``uri``. The chunk size is not part of the version (F1)."""

    uri: str
    files: tuple[FileSpec, ...]
    chunk_size_bytes: int

    @cached_property
    def version(self) -> str:
        return version_of(self.files)

    @cached_property
    def name(self) -> str:
        return f"{stem_of(self.uri)}-{digest_of(f'{self.uri} {self.version}'.encode())[:16]}"

    @cached_property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.files)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {item.path: index for index, item in enumerate(self.files)}

    def index_of(self, path: str) -> int:
        try:
            return self._index[path]
        except KeyError:
            raise ObjectNotFoundError(f"{self.uri} holds no file {path!r}", file=path) from None

    def chunks_of(self, index: int) -> int:
        return chunk_count(self.files[index].size_bytes, self.chunk_size_bytes)

    def chunk_range(self, index: int, chunk: int) -> ByteRange:
        start = chunk * self.chunk_size_bytes
        return ByteRange(start, min(start + self.chunk_size_bytes, self.files[index].size_bytes))

    def blocks_range(self, index: int, chunk: int) -> ByteRange:
        start = self._first_blocks[index] + block_count(chunk * self.chunk_size_bytes, self.chunk_size_bytes)
        count = block_count(self.chunk_range(index, chunk).size_bytes, self.chunk_size_bytes)
        return ByteRange(BLOCK_DIGEST_BYTES * start, BLOCK_DIGEST_BYTES * (start + count))

    @cached_property
    def first_ordinals(self) -> list[int]:
        """The ordinal in ``chunks()`` of each file's first chunk, then the number of chunks."""
        return [0, *accumulate(map(self.chunks_of, range(len(self.files))))]

    @cached_property
    def _first_blocks(self) -> list[int]:
        return [0, *accumulate(block_count(item.size_bytes, self.chunk_size_bytes) for item in self.files)]

    def touched(self, byte_range: ByteRange) -> range:
        if byte_range.stop <= byte_range.start:
            return range(0)
        return range(byte_range.start // self.chunk_size_bytes, -(-byte_range.stop // self.chunk_size_bytes))

    def chunks(self) -> Iterator[tuple[int, int]]:
        return ((index, chunk) for index in range(len(self.files)) for chunk in range(self.chunks_of(index)))

    def encode(self, landed: Sequence[Sequence[str]] = ()) -> bytes:
        body = {
            "uri": self.uri,
            "chunk_size_bytes": self.chunk_size_bytes,
            "files": self.version,
            "count": len(self.files),
            "wanted": [{**item.to_json(), "key": item.key} for item in self.files],
            "landed": [list(digests) for digests in landed],
        }
        return seal(body)


@dataclass(frozen=True)
class Receipt:
    frozen: FileSet
    landed: tuple[tuple[str, ...], ...]

    def digest(self, index: int, chunk: int) -> str:
        """Return a chunk's digest as fetched, else as recorded by its writer; "" if unknown."""
        known = self.landed[index] if self.landed else self.frozen.files[index].digests
        return known[chunk] if known else ""


def from_manifest(manifest: Manifest) -> list[FileSpec]:
    return [files_of_rank(entry) for entry in manifest.entries]


def files_of_rank(entry: FileEntry) -> FileSpec:
    return FileSpec(entry.path, entry.key, entry.size_bytes, None, entry.digests)


def stem_of(uri: str) -> str:
    return _PLAIN.sub("-", uri.rstrip("/").rpartition("/")[2]).strip(".-")[:80] or "files"


def version_of(files: Sequence[FileSpec]) -> str:
    return digest_of(json.dumps([item.to_json() for item in files], sort_keys=True).encode())


def decode(data: bytes, *, where: str) -> Receipt:
    """Raise ManifestError for a damaged record (F2)."""

    def bad(reason: str) -> NoReturn:
        raise ManifestError(f"{where}: {reason}", hint="The record is damaged and was not used")

    body = unseal(data, _FIELDS, where=where, size_bytes_max=MANIFEST_BYTES_MAX)
    chunk, uri, items, landed = body["chunk_size_bytes"], body["uri"], body["wanted"], body["landed"]
    if not isinstance(chunk, int) or not 0 < chunk <= SIZE_BYTES_MAX or not isinstance(uri, str):
        bad("no chunk size or URI that can be")
    if not isinstance(items, list) or not isinstance(landed, list):
        bad("no list of files")
    files = tuple(_decode_wanted(item, bad) for item in items)
    frozen = FileSet(uri, files, chunk)
    if frozen.version != body["files"] or len({item.path for item in files}) != len(files):
        bad("it is not of the files that it names")
    digests = tuple(tuple(map(str, one)) for one in landed if isinstance(one, list))
    if digests and [len(one) for one in digests] != [frozen.chunks_of(index) for index in range(len(files))]:
        bad("its digests are not of its files")
    return Receipt(frozen, digests)


def _decode_wanted(item: Json, bad: Any) -> FileSpec:
    try:
        digests = tuple(map(str, item["digests"]))
        items = FileSpec(item["path"], item["key"], item["size_bytes"], item["etag"], digests)
    except (KeyError, TypeError):
        bad("a file entry lacks a field")
    if not is_safe_path(items.path) or not isinstance(items.key, str) or not isinstance(items.etag, str | None):
        bad(f"a file {items.path!r:.80} cannot be")
    if not isinstance(items.size_bytes, int) or not 0 <= items.size_bytes <= SIZE_BYTES_MAX:
        bad(f"{items.path}: size {items.size_bytes!r:.80} cannot be")
    return items
