"""The bytes of a DCP item, made around raw tensor data without ``torch.save`` of the data.

An item is a zip archive of stored records, as ``torch.save`` makes it. For a dense tensor everything before its raw
bytes (the *head*) and after them (the *tail*) depends on dtype and shape alone, except the CRC-32 of the data, in two
places of the tail. Other objects are saved by ``torch.save``, which leaves nothing for a garbage collector here: a
training loop may have switched it off.

Invariants (tests cite them):
    W1  ``torch.load(weights_only=True)`` of ``head + data + tail_with(crc32(data))`` gives the tensor back bit for bit.
    W2  The archive is a valid zip: sizes, offsets and CRCs are right (``zipfile.testzip`` agrees).
    W3  The head's length is a multiple of 64, so data that is aligned in the file is aligned in the archive too.

Source: PKWARE APPNOTE 4.3 (records, data descriptors, central directory); torch.serialization (record names).
"""

from __future__ import annotations

import math
import os
import pickle
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import torch
import torch.utils.serialization.config as serialization_config
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from zlib_ng import zlib_ng


class _Pickler(pickle.Pickler):
    def __init__(self, stream: BinaryIO, protocol: int, persistent_id: Callable[[Any, Any], Any]) -> None:
        super().__init__(stream, protocol)
        self._persistent_id = persistent_id

    def persistent_id(self, value: Any) -> Any:
        return self._persistent_id(self, value)


class _Base:
    """An instance in place of the class that ``torch.save`` derives for each call: only a collector frees a class."""

    def __init__(self, _: str, __: tuple[Any, ...], namespace: dict[str, Any]) -> None:
        self._namespace = namespace

    def __call__(self, stream: BinaryIO, protocol: int) -> _Pickler:
        return _Pickler(stream, protocol, self._namespace["persistent_id"])


_module = SimpleNamespace(Pickler=_Base("", (), {}), __name__="pickle")


def save_object(value: Any, stream: BinaryIO) -> None:
    """Write the bytes of ``torch.save``."""
    torch.save(value, stream, pickle_module=_module)


Texts = dict[str, tuple[list[str], bytes]]


def resolve_object(planner: SavePlanner, item: WriteItem, known: Texts | None = None) -> BytesIO:
    """Serialise the planner's value of an item that is no tensor.

    ``known`` has lists of the previous save, such as the parameters' names: an equal list is not pickled again.
    """
    kind, stock = type(planner), DefaultSavePlanner
    if not all(getattr(kind, name) is getattr(stock, name, None) for name in ("resolve_data", "transform_object")):
        return cast(BytesIO, planner.resolve_data(item))
    value, name = cast(DefaultSavePlanner, planner).lookup_object(item.index), item.index.fqn
    is_texts = known is not None and type(value) is list and {str}.issuperset(map(type, value))
    if known is not None and is_texts and name in known and known[name][0] == value:
        return BytesIO(known[name][1])
    stream = BytesIO()
    save_object(value, stream)
    if known is not None and is_texts:
        known[name] = [*value], stream.getvalue()
    return stream


ALIGNMENT_BYTES = 64
ZIP64_BYTES = (1 << 32) - (1 << 16)
"""Larger sizes may need zip64 records, which torch makes."""

QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})

_STORAGE_CLASSES = {
    torch.float64: b"DoubleStorage",
    torch.float32: b"FloatStorage",
    torch.float16: b"HalfStorage",
    torch.bfloat16: b"BFloat16Storage",
    torch.int64: b"LongStorage",
    torch.int32: b"IntStorage",
    torch.int16: b"ShortStorage",
    torch.int8: b"CharStorage",
    torch.uint8: b"ByteStorage",
    torch.bool: b"BoolStorage",
    torch.complex64: b"ComplexFloatStorage",
    torch.complex128: b"ComplexDoubleStorage",
}


@dataclass(frozen=True, slots=True)
class ItemFrame:
    """The bytes around the raw data of a contiguous tensor of one dtype and shape."""

    head: bytes
    tail: bytes
    """With zeros in place of the CRC."""
    size_bytes: int
    crc_at: tuple[int, int]
    """Positions of the CRC-32 in the tail; (0, 0) without data."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    _around_crc: tuple[bytes, bytes, bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        (first, second), tail = self.crc_at, self.tail
        object.__setattr__(self, "_around_crc", (tail[:first], tail[first + 4 : second], tail[second + 4 :]))

    @property
    def total_bytes(self) -> int:
        return len(self.head) + self.size_bytes + len(self.tail)

    def tail_with(self, crc: int) -> bytes:
        if not self.size_bytes:
            return self.tail
        value, (before, between, after) = crc.to_bytes(4, "little"), self._around_crc
        return b"".join((before, value, between, value, after))


@lru_cache(maxsize=1 << 16)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> ItemFrame:
    """The frame of a contiguous, dense CPU tensor. Never allocates memory of the tensor's size."""
    shape = tuple(shape)
    size_bytes = math.prod(shape, start=dtype.itemsize)
    if dtype in _STORAGE_CLASSES and 0 < size_bytes < ZIP64_BYTES:
        return _build_frame(dtype, shape, size_bytes)
    return _from_torch(dtype, shape, size_bytes)


@lru_cache(maxsize=1 << 12)
def frame_by_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> ItemFrame:
    """Make the frame by plain ``torch.save``, for items of stock DCP. Its tail differs in an id."""
    return _from_torch(dtype, tuple(shape), math.prod(shape, start=dtype.itemsize))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the raw bytes describe ``tensor`` completely: dense, strided, no subclass."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized


def is_raw_on_host(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a dense ``tensor`` are contiguous in host memory, and not to be conjugated or negated."""
    is_lazy = tensor.is_neg() or (tensor.is_complex() and tensor.is_conj())
    return tensor.is_cpu and tensor.is_contiguous() and not is_lazy


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


# --- packed by hand: the fewest records that torch.load needs ------------------------------------------------------


def _build_frame(dtype: torch.dtype, shape: tuple[int, ...], size_bytes: int) -> ItemFrame:
    pickled = _pickle(dtype, shape)
    before = [(b"archive/data.pkl", pickled), (b"archive/byteorder", b"little")]
    version = (b"archive/version", b"3\n")
    head, central = b"", b""
    for name, data in before:
        central += _central_header(name, zlib_ng.crc32(data), len(data), len(head))
        head += _local_header(name) + data + _descriptor(zlib_ng.crc32(data), len(data))
    name = b"archive/data/0"
    padding = -(len(head) + len(_local_header(name)) + 4) % ALIGNMENT_BYTES
    central_crc_at = len(central) + _CENTRAL_CRC_AT
    central += _central_header(name, 0, size_bytes, len(head))
    head += _local_header(name, b"FB" + struct.pack("<H", padding) + b"Z" * padding)  # W3, padded as torch does
    tail = _descriptor(0, size_bytes)
    at = len(head) + size_bytes + len(tail)
    central += _central_header(version[0], zlib_ng.crc32(version[1]), len(version[1]), at)
    tail += _local_header(version[0]) + version[1] + _descriptor(zlib_ng.crc32(version[1]), len(version[1]))
    central_crc_at += len(tail)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 4, 4, len(central), len(head) + size_bytes + len(tail), 0)
    return ItemFrame(head, tail + central + end, size_bytes, (_DESCRIPTOR_CRC_AT, central_crc_at), dtype, shape)


_DESCRIPTOR_CRC_AT = 4
_CENTRAL_CRC_AT = 16
_FLAGS = 0x0808  # sizes and CRC follow in a data descriptor; UTF-8


def _local_header(name: bytes, extra: bytes = b"") -> bytes:
    return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def _descriptor(crc: int, size_bytes: int) -> bytes:
    return struct.pack("<4sIII", b"PK\7\x08", crc, size_bytes, size_bytes)


def _central_header(name: bytes, crc: int, size_bytes: int, offset: int) -> bytes:
    sizes = (crc, size_bytes, size_bytes, len(name))
    return struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 0, 0, _FLAGS, 0, 0, 0, *sizes, 0, 0, 0, 0, 0, offset) + name


def _pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """``_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())`` in pickle protocol 2."""
    count = _int(math.prod(shape))
    storage = b"(X\7\0\0\0storagectorch\n" + _STORAGE_CLASSES[dtype] + b"\nX\1\0\0\x000X\3\0\0\0cpu" + count + b"tQ"
    body = storage + b"K\0" + _tuple(shape) + _tuple(contiguous_strides(shape)) + b"\x89ccollections\nOrderedDict\n)R"
    return b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n(" + body + b"tR."


def _int(value: int) -> bytes:
    if value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def _tuple(values: Any) -> bytes:
    inner = b"".join(map(_int, values))
    return inner + (b")", b"\x85", b"\x86", b"\x87")[len(values)] if len(values) < 4 else b"(" + inner + b"t"


# --- by torch itself ------------------------------------------------------------------------------------------------


_config_lock = threading.Lock()
os.register_at_fork(after_in_child=_config_lock._at_fork_reinit)  # type: ignore[attr-defined]
"""torch's settings are global: threads must change and restore them one by one."""


class _Hole:
    def __init__(self) -> None:
        self.parts = [bytearray()]
        self.skipped = 0
        self._position = 0

    def write(self, data: Any) -> int:
        self.parts[-1] += bytes(data)
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        count = offset if whence == 1 else offset - self._position
        if count:
            self.skipped += count
            self.parts.append(bytearray())
        self._position += count
        return self._position

    def tell(self) -> int:
        return self._position

    def flush(self) -> None: ...


def _from_torch(dtype: torch.dtype, shape: tuple[int, ...], size_bytes: int) -> ItemFrame:
    stream: Any = _Hole()
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    save = serialization_config.save
    with _config_lock:
        before = save.storage_alignment, save.compute_crc32
        save.storage_alignment, save.compute_crc32 = ALIGNMENT_BYTES, True
        try:
            with torch.serialization.skip_data():
                torch.save(tensor, stream)
        finally:
            save.storage_alignment, save.compute_crc32 = before
    if not size_bytes:
        return ItemFrame(b"".join(map(bytes, stream.parts)), b"", 0, (0, 0), dtype, shape)
    head, tail = map(bytes, stream.parts)
    name_at = tail.index(b"archive/data/0")
    crc_at = (_DESCRIPTOR_CRC_AT, tail.rindex(b"PK\1\2", 0, name_at) + _CENTRAL_CRC_AT)
    if stream.skipped != size_bytes or tail[:4] != b"PK\7\x08" or len(head) % ALIGNMENT_BYTES:
        raise RuntimeError(f"torch {torch.__version__} writes {dtype} of shape {shape} in a way tierckpt does not know")
    blank = bytearray(tail)
    for at in crc_at:
        blank[at : at + 4] = bytes(4)
    return ItemFrame(head, bytes(blank), size_bytes, crc_at, dtype, shape)
