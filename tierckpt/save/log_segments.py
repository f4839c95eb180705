"""The files of a gradient log: segments of frames, one behind the other. No torch.

    <directory>/<step>-<random>.gradients    begins with the state after that step

    segment    a record, its head; then frames, until another segment begins
    frame      a training step: a record, and the data that it describes, one piece of memory behind the other
    record     8 bytes magic, 8 bytes size of its JSON (little endian), 16 bytes XXH3-128 of the JSON, the JSON

    frame's JSON   number      the step as training counts it
                   previous    digest of the record before it
                   steps       of each optimizer: its layout, and what ``replay.frame.describe`` says of its step
                   parameters  digest of all parameters and state after the step; absent where nothing has looked
                   data        size in bytes and digests, one for each ``CHUNK_BYTES``: gradients, then the attachment

Heads and frames begin on blocks of the disk (zeros before them), and are written past the page cache where there is
direct I/O. ``replay.frame`` makes a frame's fields and data of tensors, and tensors of them.

Invariants:
    F1  Whole or refused: the header has the digest of each chunk of the data, and its own comes before it.
    F2  In one place only: the header names the record before it by digest, and the layout of each optimizer. A frame of
        another run, of another step, or one that was repeated does not fit.
    S1  A chain. Each frame names the record before it by its digest. The head of a segment names the frame that it
        continues from, and the checkpoints that have the state it begins with. So every frame lies once on the disk,
        and is reached from every checkpoint before it: from the newest, and from an older one should that be lost.
    S2  Where a segment continues from a frame, it counts, and not what follows that frame in its own file. A job that
        goes on before the newest frame cuts nothing off: a crash leaves the end before, or the one after.
"""

from __future__ import annotations

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

from ..disk.durable import fsync_dir, is_same_file, link_or_copy, make_dirs, matching, translated
from ..disk.file_io import DirectFile, address_of, open_file, pread_all
from ..errors import IntegrityError, TierckptError
from ..quantities import round_up
from ..types import ByteRange

SUFFIX = ".gradients"
SEGMENT, FRAME = b"TKSEGM01", b"TKGRAD03"
STAGING_BYTES = REQUEST_BYTES_MAX = 8 << 20
REQUEST_BYTES_MIN, REQUEST_SECONDS = 1 << 20, 0.1
"""A request is as large as the disk writes in that time: a slow disk shows that it moves, and a fast one is full."""
CHUNK_BYTES = 4 << 20
"""Of a frame's data, what has a digest of its own."""
_HEAD = struct.Struct("<8sQ16s")
_JSON_BYTES_MAX = 1 << 30
_COPIED_BYTES_MAX = 64 << 10
"""Larger pieces are copied without the interpreter lock."""

Read = Callable[[int, int], memoryview]
"""Returns bytes, given offset from the head of a record and size; fewer at the end of the file."""


def pack(magic: bytes, fields: dict[str, Any]) -> tuple[bytes, str]:
    """Return a record, and the digest that names it."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    digest = xxh3_128(text).digest()
    return _HEAD.pack(magic, len(text), digest) + text, digest.hex()


def pack_frame(fields: Mapping[str, Any], data: Sequence[memoryview]) -> tuple[bytes, str]:
    """Return the record of a frame with ``data``, and the digest that names it. Cost: one pass over ``data``."""
    described = [
        (len(one), [digest_of_piece(one[at : at + CHUNK_BYTES]) for at in range(0, len(one), CHUNK_BYTES)])
        for one in data
    ]
    return pack(FRAME, {**fields, "data": described})


def unpack(read: Read, magic: bytes, *, where: str) -> tuple[dict[str, Any], str, int]:
    """Return the fields of a record, its digest, and its size in bytes.

    Raises:
        IntegrityError: it is cut short, damaged, or no such record.
    """
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
        raise damaged(where, "its header is not what was written")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise damaged(where, "its header is none that tierckpt writes")
    return fields, digest.hex(), _HEAD.size + size_bytes


def damaged(where: str, what: str) -> IntegrityError:
    return IntegrityError(
        f"a frame of the gradient log {where} cannot be used: {what}",
        hint="The step before it is restored; what follows it in this log is of no use",
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of a log, by its head."""

    path: Path
    step: int
    """It begins with the state after this step."""
    bases: Sequence[str]
    """The checkpoints that have this state, or an earlier one that no update lies behind."""
    previous: str
    """Digest of the frame that it continues from. '': of none."""
    owner: dict[str, Any]
    """Who writes it: the name of the job, rank and world size."""
    digest: str
    head_bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """A frame, and where it is."""

    segment: Segment
    number: int
    """The step as training counts it."""
    layouts: dict[str, str]
    """Of each optimizer that made a step, by name: ``replay.optimizers.layout_digest``."""
    fields: dict[str, Any]
    digest: str
    head_bytes: int
    read: Read

    @property
    def where(self) -> str:
        """The file, for messages."""
        return str(self.segment.path)


@dataclass(frozen=True, slots=True)
class Chain:
    """Segments that follow each other, as they lie there."""

    base_step: int
    """The oldest state that they lead on from."""
    newest_step: int | None
    """The newest that is whole in size; None without any."""
    steps: int
    size_bytes: int
    verified_step: int | None
    """The newest whose frame has a digest of all parameters."""
    ended: str
    """Why nothing follows, where bytes do."""


def paths_in(directory: Path) -> list[Path]:
    """Return the segments in ``directory``, by the step that they begin with."""
    return matching(directory, f"*{SUFFIX}")


def step_of_path(path: Path) -> int:
    """Return the step that a segment begins with; -1 when its name is none of ours."""
    number = path.name.partition("-")[0]
    return int(number) if number.isdecimal() else -1


def remove_from(directory: Path, step: int) -> None:
    """Remove the segments that begin at ``step`` or later: what was done there is done again."""
    for path in paths_in(directory):
        if step_of_path(path) >= step:
            path.unlink(missing_ok=True)


def remove_before(directory: Path, step: int) -> None:
    """Remove the segments whose frames are all of ``step`` or before: a checkpoint has what they lead to."""
    paths = paths_in(directory)
    for path, following in pairwise(paths):
        if step_of_path(following) <= step:
            path.unlink(missing_ok=True)


def walk(directory: Path, base: str) -> Iterator[Place | str]:
    """Yield the frames behind ``base``, while they are whole in size and follow each other; then why no more do.

    The last is '' when no byte follows. Data of frames is not read.
    """
    found, ended = segments_in(directory)
    yield from walk_from(found, next((one for one in found if base in one.bases), None), ended)


def walk_from(found: Sequence[Segment], here: Segment | None, ended: str) -> Iterator[Place | str]:
    """As ``walk``, from the head of the segment ``here`` on; ``ended`` stands for ''."""
    while here is not None:
        file = open_file(here.path)
        try:
            size_bytes, at, digest = os.fstat(file).st_size, here.head_bytes, here.digest
            following = _continuing(found, digest)
            while following is None and at < size_bytes:
                place, length = _place(here, file, at, size_bytes, digest)
                yield place
                digest, at = place.digest, at + length
                following = _continuing(found, digest)
        except IntegrityError as error:
            yield error.message
            return
        finally:
            os.close(file)
        here = following
    yield ended


def chains(directory: Path) -> list[Chain]:
    """Return what lies in ``directory``, the oldest first. Data of frames is not read."""
    found: list[Chain] = []
    seen: set[Path] = set()
    there, wrong = segments_in(directory)
    for first in there:
        if first.path in seen:
            continue
        here, frames, newest, verified, ended = {first.path}, 0, None, None, ""
        try:
            for place in walk_from(there, first, wrong):
                if isinstance(place, str):
                    ended = place
                else:
                    here.add(place.segment.path)
                    frames, newest = frames + 1, place.number
                    verified = newest if place.fields.get("parameters") else verified
            size_bytes = sum(path.stat().st_size for path in here)
        except (TierckptError, OSError):
            continue  # a checkpoint has its steps now, and it was removed between two looks
        seen |= here
        found.append(Chain(first.step, newest, frames, size_bytes, verified, ended))
    return found


class Tail:
    """How far the whole frames of a segment reach, as of the last ``look``. One thread at a time.

    Args:
        is_verified: frames whose data was damaged are not whole; else they are when they are there in full length.
    """

    def __init__(self, path: Path, *, is_verified: bool = False) -> None:
        self.path = path
        self.size_bytes = 0
        """Of the head and the whole frames."""
        self.step = -1
        """The newest of them; -1 for none."""
        self.segment: Segment | None = None
        """None: not even its head is whole."""
        self._is_verified, self._digest = is_verified, ""

    def look(self) -> None:
        """Read on from where the last look ended. What cannot be read is told of as if it had not come yet.

        Cost: a header for each new frame; its data too, where that is verified.
        """
        try:
            file = open_file(self.path)
        except TierckptError:
            return
        try:
            there = os.fstat(file).st_size
            if self.segment is None:
                head = _head(file, self.path)
                if there < head.head_bytes:
                    return
                self.segment, self.size_bytes, self._digest = head, head.head_bytes, head.digest
            while self.size_bytes < there:
                place, length = _place(self.segment, file, self.size_bytes, there, self._digest)
                if self._is_verified:
                    deque(verified_pieces(place.read, place.fields, place.head_bytes, where=place.where), maxlen=0)
                self.size_bytes, self._digest, self.step = self.size_bytes + length, place.digest, place.number
        except (TierckptError, TypeError, KeyError, ValueError):
            return  # it is being written, or damaged: a restore says which
        finally:
            os.close(file)


def verified_pieces(read: Read, fields: Mapping[str, Any], at: int, *, where: str) -> Iterator[memoryview]:
    """Yield the data of a frame in pieces of ``CHUNK_BYTES``, of which none reaches into the next one's memory.

    Args:
        at: where it begins, behind the header.

    Raises:
        IntegrityError: it is cut short, or not what was written (F1).
    """
    for number, (size_bytes, digests) in enumerate(fields["data"]):
        end = at + size_bytes
        for digest in digests:
            wanted = min(CHUNK_BYTES, end - at)
            piece = read(at, wanted)
            if len(piece) < wanted:
                raise damaged(where, "it is cut short")
            if digest_of_piece(piece) != digest:
                raise damaged(where, f"its data ({number}) is not what was written")
            at += wanted
            yield piece
        if at != end:
            raise damaged(where, f"its data ({number}) is not of the size that was written")


def digest_of_piece(data: bytes | memoryview) -> str:
    """The digest of a piece of a frame's data, of ``CHUNK_BYTES`` at most, taken without the interpreter lock."""
    digest = xxh3_128()
    digest.update(data)
    return digest.hexdigest()


def adopt(copy: Path, directory: Path) -> None:
    """Have ``directory`` hold the log that ``copy`` holds, which reaches further, and nothing else. Raises OSError.

    What another log has goes first: two histories are never mixed. A crash in between leaves ``copy`` as it is, which
    then still reaches further, so that this is done again.
    """
    make_dirs(directory)
    found = paths_in(copy)
    for path in paths_in(directory):
        if path.name not in {one.name for one in found} or not is_same_file(path, copy / path.name):
            path.unlink(missing_ok=True)
    for path in found:
        link_or_copy(path, directory / path.name)


def _continuing(found: Sequence[Segment], digest: str) -> Segment | None:
    return next((one for one in found if one.previous == digest), None)


def _place(segment: Segment, file: int, at: int, size_bytes: int, previous: str) -> tuple[Place, int]:
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
        raise damaged(where, "its header is none that tierckpt writes")
    length = round_up(head_bytes + sum(sizes))
    if at + length > size_bytes:
        raise damaged(where, "it is cut short")
    if fields.get("previous") != previous:
        raise damaged(where, f"the frame of step {number} does not follow the one before it")
    return Place(segment, number, layouts, fields, digest, head_bytes, read), length


def segments_in(directory: Path) -> tuple[list[Segment], str]:
    """The segments with a whole head, and what is wrong with another."""
    found, wrong = [], ""
    for path in paths_in(directory):
        try:
            file = open_file(path)
        except TierckptError as error:
            wrong = error.message
            continue
        try:
            found.append(_head(file, path))
        except (IntegrityError, TypeError) as error:
            wrong = str(error)
        finally:
            os.close(file)
    return found, wrong


def _head(file: int, path: Path) -> Segment:
    def read(offset: int, count: int) -> memoryview:
        return memoryview(pread_all(file, ByteRange(offset, offset + count), path))

    fields, digest, size_bytes = unpack(read, SEGMENT, where=str(path))
    segment = Segment(path, digest=digest, head_bytes=round_up(size_bytes), **fields)
    if not (isinstance(segment.step, int) and all(isinstance(base, str) for base in segment.bases)):
        raise damaged(str(path), "its head is none that tierckpt writes")
    return segment


class SegmentFile:
    """A segment that is being written. One thread.

    Args:
        is_cached: through the page cache, so that nothing waits for the disk but ``sync``.
    """

    def __init__(self, directory: Path, step: int, fields: dict[str, Any], *, is_cached: bool = False) -> None:
        self.path = directory / f"{max(step, 0):012d}-{secrets.token_hex(4)}{SUFFIX}"
        self.size_bytes = 0
        self._request_bytes = REQUEST_BYTES_MAX
        self._file = DirectFile(direct=not is_cached)
        self._is_cached = is_cached
        self._staging = mmap.mmap(-1, STAGING_BYTES)  # begins on a page, as direct I/O wants it
        with translated(self.path):
            make_dirs(directory)
            self._file.create(self.path)
            try:
                fsync_dir(directory)
                head, self.digest = pack(SEGMENT, {"step": step, **fields})
                self.append([memoryview(head)])
            except BaseException:  # a full disk: neither the descriptor nor a file without a head stays
                self._file.close()
                self.path.unlink(missing_ok=True)
                raise

    def append(self, pieces: Sequence[memoryview], on_write: Callable[[], None] = lambda: None) -> None:
        """Write ``pieces``, and zeros to the next block. ``on_write`` is called after each request. Raises OSError."""
        for view in self._staged(pieces):
            while view:
                part, begun = view[: self._request_bytes], time.monotonic()
                self._file.write(part, self.size_bytes)
                view, self.size_bytes = view[len(part) :], self.size_bytes + len(part)
                wanted = len(part) * REQUEST_SECONDS / max(time.monotonic() - begun, 1e-6)
                self._request_bytes = max(REQUEST_BYTES_MIN, min(REQUEST_BYTES_MAX, int(wanted) >> 20 << 20))
                on_write()
            if not (self._file.direct or self._is_cached):  # else one sync waits for all, which shows no progress
                self.sync()
                on_write()

    def _staged(self, pieces: Sequence[memoryview]) -> Iterator[memoryview]:
        """Yield ``pieces`` in aligned memory, which is used again. The last one ends with zeros to the next block."""
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
        """Return when what was appended is on the disk. Raises OSError."""
        os.fdatasync(self._file.fd)

    def close(self) -> None:
        self._file.close()
