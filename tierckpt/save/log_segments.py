"""The file format of a gradient log: segments of frames. Without torch.

    <directory>/<step>-<random>.gradients    begins with the state after that step

    segment    a record, its head; then frames
    frame      a training step: a record, and the data that it describes
    record     8 bytes magic, 8 bytes size of its JSON (little endian), 16 bytes XXH3-128 of the JSON, the JSON

    JSON of a frame   number      of the step in training
                      previous    digest of the record before it
                      steps       by optimizer: its layout, and ``replay.frame.describe`` of its step
                      parameters  digest of all parameters and state after the step; optional
                      data        size in bytes and digests, one per ``CHUNK_BYTES``: gradients, then the attachment

Heads and frames start at disk blocks, padded with zeros.

    F1  A frame is whole or refused: its record has a digest of itself and of each chunk.
    F2  A frame of another run or step, or a repeated one, is refused: see ``previous`` and ``steps``.
    S1  Segments form a chain: a head has the digest of the frame that it continues, and the checkpoints of its first
        state. Each frame is on the disk once, and reachable from all earlier checkpoints.
    S2  If a segment continues a frame, later frames in that frame's own file are obsolete. Nothing is truncated: a
        crash leaves the old end of the log, or the new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from ..disk.durable import closing_file, fsync_dir, is_same_file, link_or_copy, make_dirs, matching, translated
from ..disk.file_io import DirectFile, address_of, open_file, pread_all
from ..errors import IntegrityError, TierckptError
from ..format.manifest import block_digest
from ..quantities import round_up
from ..types import ByteRange

SUFFIX = ".gradients"
SEGMENT, FRAME = b"TKSEGM01", b"TKGRAD03"
STAGING_BYTES = REQUEST_BYTES_MAX = 8 << 20
REQUEST_BYTES_MIN, REQUEST_SECONDS = 1 << 20, 0.1
"""A request's size adapts to this time."""
CHUNK_BYTES = 4 << 20
_HEAD = struct.Struct("<8sQ16s")
_JSON_BYTES_MAX = 1 << 30
_COPIED_BYTES_MAX = 64 << 10

Read = Callable[[int, int], memoryview]
"""Returns the bytes at an offset from the start of a record; fewer at the end of the file."""


def pack(magic: bytes, fields: dict[str, Any]) -> tuple[bytes, str]:
    text = json.dumps(fields, separators=(",", ":")).encode()
    digest = xxh3_128(text).digest()
    return _HEAD.pack(magic, len(text), digest) + text, digest.hex()


def pack_frame(fields: Mapping[str, Any], data: Sequence[memoryview]) -> tuple[bytes, str]:
    described = [
        (len(one), [block_digest(one[at : at + CHUNK_BYTES]).hex() for at in range(0, len(one), CHUNK_BYTES)])
        for one in data
    ]
    return pack(FRAME, {**fields, "data": described})


def unpack(read: Read, magic: bytes, *, where: str) -> tuple[dict[str, Any], str, int]:
    """Return the fields of a record, its digest, and its size in bytes. Raises IntegrityError."""
    head = read(0, _HEAD.size)
    if len(head) < _HEAD.size:
        raise damaged(where, "it is cut short")
    found, size_bytes, digest = _HEAD.unpack(head)
    if found != magic:
        raise damaged(where, f"it begins with {found!r} and not {magic!r}")
    text = bytes(read(_HEAD.size, size_bytes)) if size_bytes <= _JSON_BYTES_MAX else b""
    if len(text) < size_bytes:
        raise damaged(where, "it is cut short")
    if xxh3_128(text).digest() != digest:
        raise damaged(where, "its header does not match its digest")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise damaged(where, "its header has an unknown format")
    return fields, digest.hex(), _HEAD.size + size_bytes


def damaged(where: str, what: str) -> IntegrityError:
    return IntegrityError(
        f"a frame of the gradient log {where} cannot be used: {what}",
        hint="The step before it is restored; later frames of this log are ignored",
    )


@dataclass(frozen=True, slots=True)
class Segment:
    path: Path
    step: int
    bases: Sequence[str]
    previous: str
    """Digest of the frame that it continues; '' for none."""
    owner: dict[str, Any]
    digest: str
    head_bytes: int


@dataclass(frozen=True, slots=True)
class FramePosition:
    segment: Segment
    number: int
    layouts: dict[str, str]
    fields: dict[str, Any]
    digest: str
    head_bytes: int
    read: Read

    @property
    def file_text(self) -> str:
        return str(self.segment.path)


@dataclass(frozen=True, slots=True)
class Chain:
    base_step: int
    newest_step: int | None
    """None without a frame of full size."""
    steps: int
    size_bytes: int
    verified_step: int | None
    """The newest frame with a digest of all parameters."""
    ended: str
    """Why the rest is unusable; '' for no rest."""


def paths_in(directory: Path) -> list[Path]:
    return matching(directory, f"*{SUFFIX}")


def step_of_path(path: Path) -> int:
    number = path.name.partition("-")[0]
    return int(number) if number.isdecimal() else -1


def remove_from(directory: Path, step: int) -> None:
    for path in paths_in(directory):
        if step_of_path(path) >= step:
            path.unlink(missing_ok=True)


def remove_before(directory: Path, step: int) -> None:
    """Remove the segments without frames after ``step``."""
    paths = paths_in(directory)
    for path, following in pairwise(paths):
        if step_of_path(following) <= step:
            path.unlink(missing_ok=True)


def iterate_frames(directory: Path, base: str) -> Iterator[FramePosition | str]:
    """Yield the frames after the checkpoint ``base``, without their data; then the reason for the end, or ''."""
    found, ended = segments_in(directory)
    yield from walk_from(found, next((one for one in found if base in one.bases), None), ended)


def walk_from(found: Sequence[Segment], here: Segment | None, ended: str) -> Iterator[FramePosition | str]:
    """As ``iterate_frames``, from the segment ``here``. ``ended`` replaces the reason ''."""
    while here is not None:
        with closing_file(open_file(here.path)) as file:
            size_bytes, at, digest = os.fstat(file).st_size, here.head_bytes, here.digest
            following = _find_continuation(found, digest)
            while following is None and at < size_bytes:
                try:
                    position, length = _place(here, file, at, size_bytes, digest)
                except IntegrityError as error:
                    yield error.message
                    return
                yield position
                digest, at = position.digest, at + length
                following = _find_continuation(found, digest)
        here = following
    yield ended


def list_chains(directory: Path) -> list[Chain]:
    found: list[Chain] = []
    seen: set[Path] = set()
    there, wrong = segments_in(directory)
    for first in there:
        if first.path in seen:
            continue
        here, frames, newest, verified, ended = {first.path}, 0, None, None, ""
        try:
            for position in walk_from(there, first, wrong):
                if isinstance(position, str):
                    ended = position
                else:
                    here.add(position.segment.path)
                    frames, newest = frames + 1, position.number
                    verified = newest if position.fields.get("parameters") else verified
            size_bytes = sum(path.stat().st_size for path in here)
        except (TierckptError, OSError):
            continue
        seen |= here
        found.append(Chain(first.step, newest, frames, size_bytes, verified, ended))
    return found


class Tail:
    """The whole frames of a growing segment, as of the last ``look``. One thread at a time."""

    def __init__(self, path: Path, *, is_verified: bool = False) -> None:
        self.path = path
        self.size_bytes = 0
        self.step = -1
        """-1 without a frame."""
        self.segment: Segment | None = None
        self._is_verified, self._digest = is_verified, ""

    def read_new(self) -> None:
        """Read new frames, up to the first unreadable one."""
        # Ignores a missing, incomplete or damaged file: a restore reports which.
        with (
            contextlib.suppress(TierckptError, TypeError, KeyError, ValueError),
            closing_file(open_file(self.path)) as file,
        ):
            there = os.fstat(file).st_size
            if self.segment is None:
                head = _read_head(file, self.path)
                if there < head.head_bytes:
                    return
                self.segment, self.size_bytes, self._digest = head, head.head_bytes, head.digest
            while self.size_bytes < there:
                position, length = _place(self.segment, file, self.size_bytes, there, self._digest)
                if self._is_verified:
                    pieces = verified_pieces(
                        position.read, position.fields, position.head_bytes, where=position.file_text
                    )
                    deque(pieces, maxlen=0)
                self.size_bytes, self._digest, self.step = (self.size_bytes + length, position.digest, position.number)


def verified_pieces(read: Read, fields: Mapping[str, Any], at: int, *, where: str) -> Iterator[memoryview]:
    """Yield the data of a frame in pieces of at most ``CHUNK_BYTES``, each of one gradient or the attachment.

    ``at``: offset of the data in the frame. Raises IntegrityError (F1).
    """
    for number, (size_bytes, digests) in enumerate(fields["data"]):
        end = at + size_bytes
        for digest in digests:
            piece_bytes = min(CHUNK_BYTES, end - at)
            piece = read(at, piece_bytes)
            if len(piece) < piece_bytes:
                raise damaged(where, "it is cut short")
            if block_digest(piece).hex() != digest:
                raise damaged(where, f"its data ({number}) does not match its digest")
            at += piece_bytes
            yield piece
        if at != end:
            raise damaged(where, f"its data ({number}) does not have the recorded size")


def adopt(copy: Path, directory: Path) -> None:
    """Replace the log in ``directory`` by the longer one in ``copy``. Raises OSError.

    Other segments are removed first, so two histories never mix. After a crash, the next restore repeats this.
    """
    make_dirs(directory)
    found = paths_in(copy)
    for path in paths_in(directory):
        if path.name not in {one.name for one in found} or not is_same_file(path, copy / path.name):
            path.unlink(missing_ok=True)
    for path in found:
        link_or_copy(path, directory / path.name)


def _find_continuation(found: Sequence[Segment], digest: str) -> Segment | None:
    return next((one for one in found if one.previous == digest), None)


def _place(segment: Segment, file: int, at: int, size_bytes: int, previous: str) -> tuple[FramePosition, int]:
    def read(offset: int, count: int) -> memoryview:
        begin = min(at + offset, size_bytes)
        return memoryview(pread_all(file, ByteRange(begin, min(begin + count, size_bytes)), segment.path))

    where = str(segment.path)
    fields, digest, head_bytes = unpack(read, FRAME, where=where)
    try:
        number, sizes = fields["number"], [size for size, _ in fields["data"]]
        layouts = {name: one["layout"] for name, one in fields["steps"].items()}
        is_ours = isinstance(number, int) and all(isinstance(size, int) and size >= 0 for size in sizes)
    except (KeyError, TypeError, ValueError, AttributeError):
        is_ours = False
    if not is_ours:
        raise damaged(where, "its header has an unknown format")
    length = round_up(head_bytes + sum(sizes))
    if at + length > size_bytes:
        raise damaged(where, "it is cut short")
    if fields.get("previous") != previous:
        raise damaged(where, f"the frame of step {number} does not follow the previous one")
    return FramePosition(segment, number, layouts, fields, digest, head_bytes, read), length


def segments_in(directory: Path) -> tuple[list[Segment], str]:
    """Return the segments with a whole head, and the error of another."""
    found, wrong = [], ""
    for path in paths_in(directory):
        try:
            file = open_file(path)
        except TierckptError as error:
            wrong = error.message
            continue
        with closing_file(file):
            try:
                found.append(_read_head(file, path))
            except (IntegrityError, TypeError) as error:
                wrong = str(error)
    return found, wrong


def _read_head(file: int, path: Path) -> Segment:
    def read(offset: int, count: int) -> memoryview:
        return memoryview(pread_all(file, ByteRange(offset, offset + count), path))

    fields, digest, size_bytes = unpack(read, SEGMENT, where=str(path))
    segment = Segment(path, digest=digest, head_bytes=round_up(size_bytes), **fields)
    if not (isinstance(segment.step, int) and all(isinstance(base, str) for base in segment.bases)):
        raise damaged(str(path), "its head has an unknown format")
    return segment


class SegmentFile:
    """Writes a segment. One thread. ``is_cached``: through the page cache; only ``sync`` waits for the disk."""

    def __init__(self, directory: Path, step: int, fields: dict[str, Any], *, is_cached: bool = False) -> None:
        self.path = directory / f"{max(step, 0):012d}-{secrets.token_hex(4)}{SUFFIX}"
        self.size_bytes = 0
        self._request_bytes = REQUEST_BYTES_MAX
        self._file = DirectFile(direct=not is_cached)
        self._is_cached = is_cached
        self._staging = mmap.mmap(-1, STAGING_BYTES)  # page-aligned for direct I/O
        with translated(self.path):
            make_dirs(directory)
            self._file.create(self.path)
            try:
                fsync_dir(directory)
                head, self.digest = pack(SEGMENT, {"step": step, **fields})
                self.append([memoryview(head)])
            except BaseException:  # leave neither a descriptor nor a file without a head
                self._file.close()
                self.path.unlink(missing_ok=True)
                raise

    def append(self, pieces: Sequence[memoryview], on_write: Callable[[], None] = lambda: None) -> None:
        """Write ``pieces``, padded to blocks. ``on_write`` is called after each request. Raises OSError."""
        for view in self._aligned_pieces(pieces):
            while view:
                part, begun = view[: self._request_bytes], time.monotonic()
                self._file.write(part, self.size_bytes)
                view, self.size_bytes = view[len(part) :], self.size_bytes + len(part)
                request_bytes = len(part) * REQUEST_SECONDS / max(time.monotonic() - begun, 1e-6)
                self._request_bytes = max(REQUEST_BYTES_MIN, min(REQUEST_BYTES_MAX, int(request_bytes) >> 20 << 20))
                on_write()
            if not (self._file.direct or self._is_cached):  # one sync would write everything, without progress
                self.sync()
                on_write()

    def _aligned_pieces(self, pieces: Sequence[memoryview]) -> Iterator[memoryview]:
        """Yield ``pieces`` in aligned memory, which is reused, padded to whole blocks."""
        staging, filled = memoryview(self._staging), 0
        for piece in pieces:
            while piece:
                count = min(len(piece), STAGING_BYTES - filled)
                if count > _COPIED_BYTES_MAX and not piece.readonly:
                    ctypes.memmove(address_of(staging) + filled, address_of(piece), count)
                else:
                    staging[filled : filled + count] = piece[:count]
                piece, filled = piece[count:], filled + count
                if filled == STAGING_BYTES:
                    yield staging
                    filled = 0
        if filled:
            end = round_up(filled)
            staging[filled:end] = bytes(end - filled)
            yield staging[:end]

    def sync(self) -> None:
        """Wait until all appended bytes are durable. Raises OSError."""
        os.fdatasync(self._file.fd)

    def close(self) -> None:
        self._file.close()
