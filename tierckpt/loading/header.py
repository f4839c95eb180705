"""The header of a safetensors file, read and checked before anything is allocated for what it describes.

    8 bytes         length of the JSON that follows, little-endian
    JSON            {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}}
    the rest        the tensors, one after the other, without holes

A header is bytes from a stranger. What is believed of it is what the file can hold: every tensor lies inside the file,
has as many bytes as its dtype and shape say, overlaps no other, and together they are the file.

Source: the format of https://github.com/huggingface/safetensors, whose own reader checks the same.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import IntegrityError
from ..types import Buffer, ByteRange

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""Of the JSON: what the format's own reader accepts."""

DIMENSIONS_MAX = 64
_ELEMENTS_MAX = 1 << 62
_SHOWN = 80
_BEGIN_BYTES = 64
_TORCH_SAVE = (
    "it is a file of torch.save (a zip file or a pickle: .pt, .pth, .bin)",
    "Load it with torch.load(path, weights_only=True), and write it with safetensors.torch.save_file",
)
_KINDS = (
    (b"PK\x03\x04", *_TORCH_SAVE),
    *((b"\x80" + bytes([protocol]), *_TORCH_SAVE) for protocol in range(2, 6)),
    (b"version https://git-lfs", "it is a Git LFS pointer", "`git lfs pull` fetches the file that it stands for"),
    (b"GGUF", "it is a GGUF file", "llama.cpp and the package gguf read it"),
    (b"\x89HDF\r\n", "it is an HDF5 file", "h5py reads it"),
    (b"<", "it is a page of HTML or XML", "A fetch that was refused leaves such a file: fetch it again"),
)
_TEXT = frozenset(b"\t\n\r" + bytes(range(32, 127)))

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: bytes ``start`` to ``stop`` of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds: its tensors in the order of their bytes, and its free text."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str]


class Malformed(Exception):
    """A defect, before the file is named."""

    def __init__(self, what: str, tensor: str | None = None) -> None:
        super().__init__(what)
        self.tensor = tensor


def read_header(where: str | os.PathLike[str], size_bytes: int, read: Callable[[ByteRange], Buffer]) -> Header:
    """Return the header of a file of ``size_bytes``, checked.

    Args:
        where: the file, for the error.
        read: returns a range of its bytes.

    Raises:
        IntegrityError: it is no safetensors file, is cut short, or does not hold what it says; names file and tensor.
    Cost: two reads, the header only; memory for a few times the header's length, which the file's size bounds.
    """
    try:
        return parse_header(_text(size_bytes, read), size_bytes)
    except Malformed as wrong:
        kind, hint = _other_kind(size_bytes, read)
        raise IntegrityError(
            f"{os.fspath(where)} is not a whole safetensors file: {kind or wrong}",
            hint=hint,
            file=os.fspath(where).rpartition("/")[2],
            tensor=wrong.tensor,
        ) from wrong.__cause__


def _other_kind(size_bytes: int, read: Callable[[ByteRange], Buffer]) -> tuple[str, str]:
    """What a file is that is no safetensors file, by how it begins, and what to do; '' where that is unknown.

    The length of a header that may be read fits four bytes of eight, so in a damaged safetensors file the others are 0.
    """
    begin = bytes(read(ByteRange(0, min(size_bytes, _BEGIN_BYTES))))
    if not any(begin[4:LENGTH_BYTES]):
        return "", "Fetch it again"
    for magic, kind, hint in _KINDS:
        if begin.lstrip().startswith(magic):
            return kind, hint
    if all(byte in _TEXT for byte in begin):
        return f"it is text and begins with {begin[:20].decode()!r}", "Give a .safetensors file, or its directory"
    return "", "Fetch it again"


def _text(size_bytes: int, read: Callable[[ByteRange], Buffer]) -> bytes:
    if size_bytes < LENGTH_BYTES:
        raise Malformed(f"it has {size_bytes} bytes")
    length = int.from_bytes(read(ByteRange(0, LENGTH_BYTES)), "little")  # of fewer bytes, should it be shorter now
    if length > HEADER_BYTES_MAX:
        raise Malformed(f"its first {LENGTH_BYTES} bytes are no length of a header")
    if LENGTH_BYTES + length > size_bytes:
        raise Malformed(f"its header should end at byte {LENGTH_BYTES + length} of {size_bytes}")
    text = bytes(read(ByteRange(LENGTH_BYTES, LENGTH_BYTES + length)))
    if len(text) != length:
        raise Malformed("it became shorter while it was read")
    return text


def parse_header(text: bytes, size_bytes: int) -> Header:
    """Return what ``text``, the JSON of a file of ``size_bytes``, says. Raises ``Malformed``."""
    fields = strict_json(text)
    if not isinstance(fields, dict):
        raise Malformed("its header is no JSON object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Malformed("its metadata is not text by name")
    begin = LENGTH_BYTES + len(text)
    entries = sorted(
        (parse_entry(name, said, begin) for name, said in fields.items()), key=lambda one: (one.start, one.stop)
    )
    check_cover(entries, begin, size_bytes)
    return Header(tuple(entries), metadata)


def strict_json(text: bytes) -> Any:
    """Parse JSON that names nothing twice and holds no NaN. Raises ``Malformed``."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError among them
        raise Malformed(f"its JSON cannot be read: {error}") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise Malformed(f"{_shown(twice)} is named twice", twice)
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def parse_entry(name: str, said: Any, begin: int) -> Entry:
    shown = _shown(name)
    if not isinstance(said, dict) or not said.keys() >= {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"{shown} has no dtype, shape and data_offsets", name)
    dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise Malformed(f"{shown} has the unknown dtype {_shown(dtype)}", name)
    if not _are_counts(shape) or len(shape) > DIMENSIONS_MAX:
        raise Malformed(f"{shown} has a shape that no tensor has", name)
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Malformed(f"{shown} has no range of bytes", name)
    # Without its zeros: a tensor of no elements must have a shape that torch can count too.
    if math.prod(size for size in shape if size) > _ELEMENTS_MAX:
        raise Malformed(f"{shown} has more elements than can be counted", name)
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != (offsets[1] - offsets[0]) * 8:
        raise Malformed(f"{shown} is {dtype} of shape {tuple(shape)} and has {offsets[1] - offsets[0]} bytes", name)
    return Entry(name, dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _are_counts(value: Any) -> bool:
    """True for a list of whole numbers from 0 (of which ``True`` is none) that fit 63 bits."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def check_cover(entries: list[Entry], begin: int, size_bytes: int) -> None:
    """Every byte of the file belongs to one tensor: what is in no tensor, or in two, is no safetensors file."""
    position = begin
    for entry in entries:
        if entry.start != position:
            what = "overlaps the one before it" if entry.start < position else "comes after a hole"
            raise Malformed(f"{_shown(entry.name)} {what}, at byte {entry.start}", entry.name)
        position = entry.stop
    if position != size_bytes:
        last = entries[-1].name if entries and position > size_bytes else None
        raise Malformed(f"it should have {position} bytes and has {size_bytes}", last)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
