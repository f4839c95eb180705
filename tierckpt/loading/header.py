"""The header of a safetensors file, checked before any allocation for its tensors.

    8 bytes         length of the JSON that follows, little-endian
    JSON            {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}}
    the rest        the tensors, one after the other, without holes

A header is untrusted. Every tensor must be inside the file, have as many bytes as its dtype and shape require, overlap
no other, and together they must cover the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import IntegrityError, StateMismatchError
from ..types import Buffer, ByteRange

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""The limit of the format's own reader."""

_SHOWN = 80
_BEGIN_BYTES = 20
_AGAIN = "It was cut short: fetch it again"
_DAMAGED = "Compare its digest with the source's, and fetch it again if they differ"
_OTHER = "If it is a file of torch.save, load it with torch.load(path, weights_only=True); else fetch it again"

_DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    "BOOL": (8, torch.bool),
    "U8": (8, torch.uint8),
    "I8": (8, torch.int8),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E4M3FNUZ": (8, torch.float8_e4m3fnuz),
    "F8_E5M2": (8, torch.float8_e5m2),
    "F8_E5M2FNUZ": (8, torch.float8_e5m2fnuz),
    "F8_E8M0": (8, torch.float8_e8m0fnu),
    "F4": (4, torch.float4_e2m1fn_x2),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U16": (16, torch.uint16),
    "I16": (16, torch.int16),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "U32": (32, torch.uint32),
    "I32": (32, torch.int32),
    "F32": (32, torch.float32),
    "U64": (64, torch.uint64),
    "I64": (64, torch.int64),
    "F64": (64, torch.float64),
    "C64": (64, torch.complex64),
}
"""Bits of an element, and torch's dtype, if it has one."""
DTYPE_BITS = {name: bits for name, (bits, _) in _DTYPES.items()}
_NAMES = {dtype: name for name, (_, dtype) in _DTYPES.items() if dtype is not None}


@dataclass(frozen=True, slots=True)
class TensorEntry:
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
    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]


class Malformed(Exception):
    """A defect, before the file is named."""

    def __init__(self, what: str, tensor: str | None = None, *, hint: str = "") -> None:
        super().__init__(what)
        self.tensor = tensor
        self.hint = hint or "It was written so: convert it with safetensors.torch.save_file, or ask for another file"


def read_header(where: str | os.PathLike[str], size_bytes: int, read: Callable[[ByteRange], Buffer]) -> Header:
    """Return the checked header of ``where``, a file of ``size_bytes``, which limits the memory.

    Raises IntegrityError: not a safetensors file, truncated, or inconsistent; names file and tensor.
    """
    try:
        return parse_header(_text(size_bytes, read), size_bytes)
    except Malformed as wrong:
        raise IntegrityError(
            f"{os.fspath(where)} is not a whole safetensors file: {wrong}",
            hint=wrong.hint,
            file=os.fspath(where).rpartition("/")[2],
            tensor=wrong.tensor,
        ) from wrong.__cause__


def _text(size_bytes: int, read: Callable[[ByteRange], Buffer]) -> bytes:
    if size_bytes < LENGTH_BYTES:
        raise Malformed(f"it has {size_bytes} bytes", hint=_AGAIN)
    length = int.from_bytes(read(ByteRange(0, LENGTH_BYTES)), "little")
    if length > HEADER_BYTES_MAX:
        begin = bytes(read(ByteRange(0, min(size_bytes, _BEGIN_BYTES))))
        raise Malformed(f"it begins with {begin!r}, which is no length of a header", hint=_OTHER)
    if LENGTH_BYTES + length > size_bytes:
        raise Malformed(f"its header should end at byte {LENGTH_BYTES + length} of {size_bytes}", hint=_AGAIN)
    text = bytes(read(ByteRange(LENGTH_BYTES, LENGTH_BYTES + length)))
    if len(text) != length:
        raise Malformed("it became shorter while it was read", hint=_AGAIN)
    return text


def parse_header(text: bytes, size_bytes: int) -> Header:
    """Return the tensors and metadata. Raises ``Malformed``.

    As in safetensors 0.8, unknown fields are ignored, the last of two tensors with one name wins, and an array may
    replace the fields of a tensor.
    """
    try:
        fields = json.loads(text.decode(), object_pairs_hook=_object)
        if b"\\u" in text:
            json.dumps(fields, ensure_ascii=False).encode()  # fails for half a character
    except (ValueError, RecursionError) as error:
        raise Malformed(f"its JSON cannot be read: {error}", hint=_DAMAGED) from error
    if not isinstance(fields, dict):
        raise Malformed("its header is no JSON object")
    metadata = fields.pop(_METADATA, None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Malformed("its metadata is not text by name")
    begin = LENGTH_BYTES + len(text)
    found = (parse_entry(name, value, begin) for name, value in fields.items())
    entries = sorted(found, key=lambda one: (one.start, one.stop))
    check_cover(entries, begin, size_bytes)
    return Header(tuple(entries), metadata)


_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_COUNT_MAX = 1 << 64
"""The format's own reader overflows here."""
_SIZE_MAX = (1 << 63) - 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs) and any([name for name, _ in pairs].count(one) > 1 for one in (_METADATA, *_FIELDS)):
        raise ValueError("it has a field twice")
    return found


def parse_entry(name: str, fields: Any, begin: int) -> TensorEntry:
    try:
        keys = range(3) if isinstance(fields, list) and len(fields) == 3 else _FIELDS
        dtype, shape, offsets = (fields[key] for key in keys)
    except (KeyError, TypeError):
        raise Malformed(f"{_shown(name)} has no dtype, shape and data_offsets", name) from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise Malformed(f"{_shown(name)} has the unknown dtype {_shown(dtype)}", name)
    if not _are_counts(shape):
        raise Malformed(f"{_shown(name)} has a shape that no tensor has", name)
    if not _are_counts(offsets) or len(offsets) != 2:
        raise Malformed(f"{_shown(name)} has no range of bytes", name)
    check_size(name, dtype, shape, *offsets)
    return TensorEntry(name, dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def check_size(name: str, dtype: str, shape: list[int], start: int, stop: int) -> None:
    bits = 1
    for factor in (*shape, DTYPE_BITS[dtype]):
        bits *= factor
        if bits >= _COUNT_MAX or factor > _SIZE_MAX:
            raise Malformed(f"{_shown(name)} has more elements than can be counted", name)
    if start > stop or bits != (stop - start) * 8:
        raise Malformed(f"{_shown(name)} is {dtype} of shape {tuple(shape)} and has {stop - start} bytes", name)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _COUNT_MAX for item in value)


def check_cover(entries: list[TensorEntry], begin: int, size_bytes: int) -> None:
    position = begin
    for entry in entries:
        if entry.start != position:
            what = "overlaps the one before it" if entry.start < position else "comes after a hole"
            raise Malformed(f"{_shown(entry.name)} {what}, at byte {entry.start}", entry.name)
        position = entry.stop
    if position != size_bytes:
        is_cut = position > size_bytes
        last = entries[-1].name if entries and is_cut else None
        raise Malformed(f"it should have {position} bytes and has {size_bytes}", last, hint=_AGAIN if is_cut else "")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def of_entry(entry: TensorEntry) -> tuple[torch.dtype, tuple[int, ...]]:
    """Raise StateMismatchError: torch has no such tensor."""
    dtype = _DTYPES[entry.dtype][1] if entry.dtype in _DTYPES else None
    if dtype is None or (dtype is torch.float4_e2m1fn_x2 and (not entry.shape or entry.shape[-1] % 2)):
        raise StateMismatchError(
            f"torch has no tensor of {entry.dtype} and shape {entry.shape}",
            hint="Leave it out with names=",
            tensor=entry.name,
        )
    if dtype is torch.float4_e2m1fn_x2:  # two numbers per element
        return dtype, (*entry.shape[:-1], entry.shape[-1] // 2)
    return dtype, entry.shape


def name_of(dtype: torch.dtype) -> str | None:
    """Return None if safetensors cannot hold it."""
    return _NAMES.get(dtype)


def shape_in_file(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    if dtype is torch.float4_e2m1fn_x2 and shape:
        return (*shape[:-1], shape[-1] * 2)
    return shape
