"""The manifest: which files a checkpoint consists of, with size and digests. Pure.

Invariants (tests cite them):
    M1  A manifest that decodes is safe to act on: no path leaves the checkpoint directory, no file is named twice,
        every size is possible and has exactly the digests its chunks need. Checked before any allocation.
    M2  Encoding is canonical: two movers that commit one attempt write equal bytes.
    M3  ``self_digest`` covers everything else: a damaged manifest or small record (``seal``) is refused completely.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from xxhash import xxh3_128

from ..errors import ManifestError
from ..types import Buffer, ByteRange


@dataclass(frozen=True, slots=True)
class Flushed:
    path: Path
    size_bytes: int
    digests: tuple[str, ...]
    blocks: bytes = b""


FORMAT = "tierckpt-manifest"
VERSION = 2
DIGEST = "xxh3-128"
"""Whole chunks; written if no chunk has more than one block."""
TREE_DIGEST = "xxh3-128-blocks"
"""Block digests of larger chunks (docs/adr/0011-digests-of-blocks.md)."""
DIGEST_BLOCK_BYTES = 256 * 1024
"""The minimum that a partial read must read to verify a byte."""
BLOCK_DIGEST_BYTES = 16
BASE_NOTE = "gradient log"
SIZE_BYTES_MAX = 1 << 50
FILES_MAX = 4_000_000
RANKS_MAX = 10_000_000
MANIFEST_BYTES_MAX = 1 << 30
RECORD_BYTES_MAX = 1 << 20
NAME_BYTES_MAX = 255

Bad = Callable[..., NoReturn]

_DIGEST = re.compile(r"^t?[0-9a-f]{32}\Z")
_TOKEN = re.compile(r"^(?!\.{1,2}\Z)[A-Za-z0-9_.-]{1,80}\Z")  # a token is the name of a file: not "." or ".."


def digest_of(data: Buffer) -> str:
    """Return the XXH3-128 of a chunk, seed 0, as 32 lower-case hex digits, most significant first.

    For a chunk of more than ``DIGEST_BLOCK_BYTES``: ``t`` and the XXH3-128 of its concatenated block digests. Detects
    damage, not malice. Uses ``update``, as the one-shot functions hold the GIL before xxhash 4.
    """
    return ChunkDigest.of(blocks_of(data))


class ChunkDigest(str):
    __slots__ = ("blocks",)
    blocks: bytes

    @classmethod
    def of(cls, blocks: bytes) -> ChunkDigest:
        digest = cls(digest_of_blocks(blocks))
        digest.blocks = blocks
        return digest


class BlockDigests:
    def __init__(self) -> None:
        self.size_bytes = 0
        self._found = list[bytes]()
        self._block, self._room = xxh3_128(), DIGEST_BLOCK_BYTES

    def update(self, piece: Buffer) -> None:
        view = memoryview(piece).cast("B")
        self.size_bytes += len(view)
        while len(view):
            count = min(self._room, len(view))
            self._block.update(view[:count])
            view, self._room = view[count:], self._room - count
            if not self._room:
                self._found.append(self._block.digest())
                self._block, self._room = xxh3_128(), DIGEST_BLOCK_BYTES

    def end(self) -> bytes:
        if self._room < DIGEST_BLOCK_BYTES or not self._found:
            self._found.append(self._block.digest())
        return b"".join(self._found)


def blocks_of(*pieces: Buffer) -> bytes:
    digests = BlockDigests()
    for piece in pieces:
        digests.update(piece)
    return digests.end()


def block_digest(data: Buffer) -> bytes:
    digest = xxh3_128()
    digest.update(data)
    return digest.digest()


def digest_of_blocks(blocks: bytes) -> str:
    """Return the digest of the chunk with these block digests. A single block is not digested twice."""
    return blocks.hex() if len(blocks) == BLOCK_DIGEST_BYTES else f"t{xxh3_128(blocks).hexdigest()}"


def has_digest(data: Buffer, digest: str) -> bool:
    """True if ``digest`` is of ``data``, also in the form of the first release."""
    if digest.startswith("t") or len(data) <= DIGEST_BLOCK_BYTES:
        return digest_of(data) == digest
    return block_digest(data).hex() == digest


def chunk_count(size_bytes: int, chunk_size_bytes: int) -> int:
    return -(-size_bytes // chunk_size_bytes)


def block_count(size_bytes: int, chunk_size_bytes: int) -> int:
    """No block spans two chunks."""
    chunks, rest = divmod(size_bytes, chunk_size_bytes)
    return chunks * chunk_count(chunk_size_bytes, DIGEST_BLOCK_BYTES) + chunk_count(rest, DIGEST_BLOCK_BYTES)


def digests_of(data: Buffer, chunk_size_bytes: int) -> tuple[str, ...]:
    view = memoryview(data).cast("B")
    return tuple(digest_of(view[at : at + chunk_size_bytes]) for at in range(0, len(view), chunk_size_bytes))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """``source``: location of the bytes if not ``path``: metadata that a later save must not replace."""

    path: str
    size_bytes: int
    digests: tuple[str, ...]
    rank: int = 0
    token: str = ""
    source: str = ""

    @property
    def key(self) -> str:
        return self.source or self.path

    def chunks(self, chunk_size_bytes: int) -> Iterable[tuple[ByteRange, str]]:
        for index, digest in enumerate(self.digests):
            start = index * chunk_size_bytes
            yield ByteRange(start, min(start + chunk_size_bytes, self.size_bytes)), digest


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed checkpoint, or one rank's fragment of a save without collectives."""

    attempt: str
    world_size: int
    chunk_size_bytes: int
    metadata: tuple[FileEntry, ...]
    files: tuple[FileEntry, ...]
    replaces: tuple[str, ...] = ()
    """Attempts under the id when the save began."""
    created_unix_seconds: float = 0.0
    notes: Mapping[str, str | int | bool] = field(default_factory=dict)

    @property
    def tokens(self) -> frozenset[str]:
        return frozenset(entry.token for entry in self.files if entry.token)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def adopted_dirs(self) -> frozenset[str]:
        return frozenset(entry.source.partition("/")[0] for entry in self.files if entry.source)

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        return self.files + self.metadata

    def encode(self) -> bytes:
        return seal(self._body())

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "digest": _algorithm(self.entries),
            "attempt": self.attempt,
            "replaces": sorted(self.replaces),
            "created_unix_seconds": self.created_unix_seconds,
            "world_size": self.world_size,
            "chunk_size_bytes": self.chunk_size_bytes,
            "metadata": [encode_entry(entry) for entry in sorted(self.metadata, key=lambda item: item.path)],
            "files": [encode_entry(entry) for entry in sorted(self.files, key=lambda item: item.path)],
            **({"notes": dict(self.notes)} if self.notes else {}),
        }


def merge(fragments: Sequence[Manifest]) -> Manifest:
    first = fragments[0]
    if len({fragment.attempt for fragment in fragments}) != 1 or len(fragments) != first.world_size:
        raise ManifestError(
            f"{len(fragments)} fragments do not make one save of {first.world_size} ranks", attempt=first.attempt
        )
    files: dict[str, FileEntry] = {}
    for entry in (entry for fragment in fragments for entry in fragment.files):
        other = files.setdefault(entry.path, entry)  # ranks with a common directory
        if (other.size_bytes, other.digests) != (entry.size_bytes, entry.digests):
            hint = "Give the file another name on each rank, or write the same bytes on all ranks"
            message = f"{entry.path} of rank {entry.rank} differs from the file of rank {other.rank}"
            raise ManifestError(message, hint=hint, attempt=first.attempt)
    merged = replace(
        first,
        metadata=tuple(sorted((entry for fragment in fragments for entry in fragment.metadata), key=lambda e: e.path)),
        files=tuple(sorted(files.values(), key=lambda e: e.path)),
        created_unix_seconds=max(fragment.created_unix_seconds for fragment in fragments),
    )
    return decode(merged.encode())


def decode(data: Buffer, *, where: str = "manifest") -> Manifest:
    """Decode and validate by M1 and M3. Raises ManifestError."""
    bad = _refusal(where, "The manifest is damaged or was not written by tierckpt; try another tier")
    body = _parse(data, MANIFEST_BYTES_MAX, bad)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        bad("not a tierckpt manifest")
    version, digest = body.get("version"), body.get("digest")
    if version != VERSION or isinstance(version, bool) or digest not in (DIGEST, TREE_DIGEST):
        # Another release may define digests and fields differently.
        bad(
            f"version {version!r:.40} with digest {digest!r:.40} is not known to this release, "
            f"which reads version {VERSION} with digest {DIGEST!r} or {TREE_DIGEST!r}",
            hint="Read it with the release that wrote it. Its data files are plain DCP and load with stock PyTorch",
        )
    check_seal(body, data, bad)

    body.setdefault("notes", {})
    for name, is_good in _CHECKS.items():
        if not is_good(body.get(name)):
            bad(f"{name} is {body.get(name)!r:.80}")
    chunk = body["chunk_size_bytes"]
    metadata = _decode_entries(body.get("metadata"), chunk, bad)
    files = _decode_entries(body.get("files"), chunk, bad)
    paths = [entry.path for entry in metadata + files] + [entry.source for entry in metadata + files if entry.source]
    if len(set(paths)) != len(paths):
        bad("a file is named twice")
    if not metadata and not any(entry.source for entry in files):
        bad("no metadata file")  # an adopted directory has none
    if digest != _algorithm(metadata + files):
        bad(f"it has other digests than {digest!r}")
    replaces, created = tuple(body["replaces"]), float(body["created_unix_seconds"])
    return Manifest(body["attempt"], body["world_size"], chunk, metadata, files, replaces, created, body["notes"])


def seal(body: dict[str, Any]) -> bytes:
    """Encode canonically, with a ``self_digest`` of everything else (M2, M3)."""
    return canonical({**body, "self_digest": block_digest(canonical(body)).hex()})


def unseal(
    data: Buffer,
    fields: frozenset[str],
    *,
    where: str,
    newer: frozenset[str] = frozenset(),
    size_bytes_max: int = RECORD_BYTES_MAX,
) -> dict[str, Any]:
    """Decode a small record of ``seal``: exactly ``fields``, and any of ``newer``. Values are not checked.

    Raises ManifestError: damaged, without a digest, or other fields.
    """
    bad = _refusal(where, "The record is damaged and is ignored")
    body = _parse(data, size_bytes_max, bad)
    if not isinstance(body, dict) or body.keys() - newer != fields | {"self_digest"}:
        bad("not a record of these fields")
    check_seal(body, data, bad)
    return body


def _refusal(where: str, hint: str = "") -> Bad:
    """Return a function that raises ManifestError with the reason, and another hint if it is given."""

    def bad(reason: str, hint: str = hint) -> NoReturn:
        raise ManifestError(f"{where}: {reason}", hint=hint)

    return bad


def _parse(data: Buffer, size_bytes_max: int, bad: Bad) -> Any:
    if len(data) > size_bytes_max:
        bad(f"{len(data)} bytes is larger than any that tierckpt writes")
    try:
        return json.loads(bytes(data), object_pairs_hook=_unique_keys, parse_constant=_no_constants)
    except (ValueError, RecursionError) as error:
        bad(f"not valid JSON ({error})")


def check_seal(body: dict[str, Any], data: Buffer, bad: Bad) -> None:
    """Remove ``self_digest`` from ``body``; reject a wrong digest, or ``data`` that is not canonical (M3)."""
    claimed = body.pop("self_digest", None)
    try:
        rest = canonical(body)
    except (ValueError, RecursionError) as error:
        bad(f"not encodable ({error})")
    if claimed != block_digest(rest).hex():
        bad("its own digest does not match")
    if data != canonical({**body, "self_digest": claimed}):
        bad("its own digest matches and its bytes are not canonical: something was added to it")


def decode_entries(items: Any, chunk_size_bytes: int, *, where: str) -> tuple[FileEntry, ...]:
    return _decode_entries(items, chunk_size_bytes, _refusal(where))


def _decode_entries(items: Any, chunk: int, bad: Bad) -> tuple[FileEntry, ...]:
    if not isinstance(items, list) or len(items) > FILES_MAX:
        bad("the list of files is not a list of sane length")
    return tuple(_decode_entry(item, chunk, bad) for item in items)


def _decode_entry(item: Any, chunk: int, bad: Bad) -> FileEntry:
    if not isinstance(item, dict) or set(item) - {"path", "size_bytes", "digests", "rank", "token", "source"}:
        bad(f"a file entry has unknown or missing fields: {str(item)[:120]}")
    path, size, digests = item.get("path"), item.get("size_bytes"), item.get("digests")
    rank, token, source = item.get("rank", 0), item.get("token", ""), item.get("source", "")
    if not is_safe_path(path) or (source != "" and not is_safe_path(source)):
        bad(f"path {path!r:.80} leaves the checkpoint directory or is no path")
    if not is_int(size) or not 0 <= size <= SIZE_BYTES_MAX:
        bad(f"{path}: size {size!r:.80} is not possible")
    if not is_int(rank) or not 0 <= rank < RANKS_MAX or (token != "" and not is_token(token)):
        bad(f"{path}: rank {rank!r:.80} or token {token!r:.80} is not possible")
    # The list is in memory: counting it allocates nothing.
    if not isinstance(digests, list) or len(digests) != chunk_count(size, chunk):
        bad(f"{path}: {size} bytes need {chunk_count(size, chunk)} digests")
    if not all(isinstance(digest, str) and _DIGEST.match(digest) for digest in digests):
        bad(f"{path}: a digest is not 32 hex digits")
    return FileEntry(path, size, tuple(digests), rank, token, source)


def _algorithm(entries: Iterable[FileEntry]) -> str:
    has_tree = any(digest.startswith("t") for entry in entries for digest in entry.digests)
    return TREE_DIGEST if has_tree else DIGEST


def is_safe_path(path: Any) -> TypeGuard[str]:
    """True for a relative path without ``..``, ``.``, empty part, backslash or NUL, at most 255 bytes per part."""
    if not isinstance(path, str) or not path or len(path) > 1024 or "\\" in path or "\0" in path:
        return False
    try:
        names = path.encode().split(b"/")
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return all(name not in {b"", b".", b".."} and len(name) <= NAME_BYTES_MAX for name in names)


def encode_entry(entry: FileEntry) -> dict[str, Any]:
    item: dict[str, Any] = {
        "path": entry.path,
        "size_bytes": entry.size_bytes,
        "digests": list(entry.digests),
        "rank": entry.rank,
        "token": entry.token,
    }
    if entry.source:
        item["source"] = entry.source
    return item


def canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate keys")
    return result


def _no_constants(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def is_token(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(_TOKEN.match(value))


def is_tokens(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(map(is_token, value))


def is_unix_seconds(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 53


def is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_notes(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(note, str | int) for note in value.values())


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "chunk_size_bytes": lambda value: is_int(value) and 4096 <= value <= SIZE_BYTES_MAX,
    "world_size": lambda value: is_int(value) and 1 <= value <= RANKS_MAX,
    "attempt": is_token,
    "replaces": is_tokens,
    "created_unix_seconds": is_unix_seconds,
    "notes": _are_notes,
}


def stale_files(old: Manifest, new: Manifest) -> list[FileEntry]:
    """Files of ``old`` that ``new`` lacks. Only files in a manifest are ever deleted."""
    kept = {entry.key for entry in new.entries}
    return [entry for entry in old.entries if entry.key not in kept]


def stale_metadata(old: Manifest, new: Manifest) -> list[str]:
    kept = {entry.path for entry in new.metadata}
    return [entry.path for entry in old.metadata if entry.path not in kept]
