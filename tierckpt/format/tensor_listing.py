"""Lists the tensors in a DCP checkpoint's ``.metadata`` for display, without torch or running its code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsafeCheckpointError
from ..types import Json
from .pickle_machine import Class, Function, InertObject, RefusedPickle, run

METADATA_BYTES_MAX = 32 << 20
DIMENSIONS_MAX = 64
OBJECT = "object"

BITS = {
    **dict.fromkeys(("float64", "double", "int64", "long", "uint64", "complex64", "cfloat"), 64),
    **dict.fromkeys(("float32", "float", "int32", "int", "uint32", "complex32", "chalf"), 32),
    **dict.fromkeys(("float16", "half", "bfloat16", "int16", "short", "uint16"), 16),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"), 8),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu", "qint8", "quint8", "float4_e2m1fn_x2"), 8),
    **dict.fromkeys(("complex128", "cdouble"), 128),
}


@dataclass(frozen=True, slots=True)
class TensorRow:
    """An object has the dtype ``OBJECT`` and an empty shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    def to_json(self) -> Json:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "size_bytes": self.size_bytes}


@dataclass(eq=False, slots=True)
class _Index:
    """Hashed by identity, never by its contents (S3 of ``pickle_machine``)."""

    fqn: Any


def tensors_in(data: bytes, where: str) -> list[TensorRow]:
    """Return the entries of a whole ``.metadata``, by name, at 5 us an entry.

    Raises UnsafeCheckpointError: more than ``METADATA_BYTES_MAX``, damaged, or not written by DCP.
    """
    if len(data) > METADATA_BYTES_MAX:
        raise UnsafeCheckpointError(f"{where} has {len(data)} bytes: too many to list its tensors", file=where)
    try:
        record = run(data, _KNOWN, keys=(_Index,))
        state = _fields(record)
        objects = _object_sizes(state.get("storage_data"))
        entries = _mapping(state["state_dict_metadata"])
        return sorted((_row(name, entry, objects) for name, entry in entries.items()), key=lambda row: row.name)
    except (RefusedPickle, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UnsafeCheckpointError(f"the tensors of {where} cannot be listed: {error}", file=where) from None


def _row(name: Any, entry: Any, objects: Mapping[str, int]) -> TensorRow:
    if type(name) is not str:
        raise RefusedPickle("a name that is no text")
    if type(entry) is InertObject and entry.kind is _BYTES:
        return TensorRow(name, OBJECT, (), objects.get(name, 0))
    properties, size = entry if type(entry) is tuple else map(_fields(entry).get, ("properties", "size"))
    dtype = _fields(properties, "dtype")[0]
    if type(size) is not tuple or len(size) > DIMENSIONS_MAX:
        raise RefusedPickle(f"the shape of {name:.200} is none")
    return TensorRow(name, dtype, size, math.prod(size) * BITS[dtype] // 8)


def _object_sizes(storage: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for key, value in _mapping(storage or {}).items():
        name = key.fqn if type(key) is _Index else _fields(key).get("fqn")
        length = value if type(value) is int else _fields(value).get("length")
        if type(name) is str and type(length) is int:
            sizes[name] = sizes.get(name, 0) + length
    return sizes


def _fields(record: Any, *names: str) -> Any:
    state = record.state if type(record) is InertObject else None
    if names and type(state) is tuple:
        return state
    found = _mapping(state)
    return [found[name] for name in names] if names else found


def _mapping(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise RefusedPickle(f"a {type(value).__name__} where fields belong")
    return value


def _size(numbers: Any) -> tuple[int, ...]:
    if type(numbers) not in (tuple, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise RefusedPickle("a size is not made of numbers from 0")
    return tuple(numbers)


_DCP, _OLD_DCP = "torch.distributed.checkpoint.metadata", "torch.distributed._shard.sharded_tensor.metadata"
_BYTES = Class("BytesStorageMetadata")
_PROPERTIES = Class("TensorProperties")
_LAST = Function(lambda *arguments: arguments[-1])
_KNOWN: dict[tuple[str, str], Any] = {
    **{("torch", name): name for name in BITS},
    ("torch", "Size"): Function(_size),
    ("torch.serialization", "_get_layout"): _LAST,
    ("builtins", "getattr"): _LAST,
    ("__builtin__", "getattr"): _LAST,
    (_DCP, "_MEM_FORMAT_ENCODING"): _LAST,
    (_OLD_DCP, "MEM_FORMAT_ENCODING"): _LAST,
    (_DCP, "BytesStorageMetadata"): _BYTES,
    (_DCP, "TensorProperties"): _PROPERTIES,
    (_OLD_DCP, "TensorProperties"): _PROPERTIES,
    (_DCP, "TensorStorageMetadata"): Class("TensorStorageMetadata", lambda properties, size, _: (properties, size)),
    (_DCP, "ChunkStorageMetadata"): Class("ChunkStorageMetadata", lambda *_: None),
    (_DCP, "MetadataIndex"): Class("MetadataIndex", lambda fqn, *_: _Index(fqn)),
    (_DCP, "Metadata"): Class("Metadata"),
    (_DCP, "StorageMeta"): Class("StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Class("_StorageInfo", lambda _, __, size, *___: size),
    **{
        (module, name): _LAST
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
