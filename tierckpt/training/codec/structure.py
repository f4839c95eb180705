"""Encodes a training job's values as text and tensors, equal in type and in value.

    null, true, 1, 1.5, "x"   None, bool, int of 64 bits, float, str
    [...]                     list
    {"tag": ...}              everything else; {"tensor": [name, kind]} refers to a tensor of the checkpoint

The text runs no code (P9). Nothing is imported, and no constructor of a class that the text names is called:
    V1  Only the functions of this module make values; an unknown tag is rejected.
    V2  An enum, dataclass or named tuple needs a class of this kind that is already imported. Members of enums exist;
        an empty instance of the others gets its fields, without ``__init__``, ``__post_init__`` and ``__setattr__``. A
        class with ``__del__`` is rejected: it would run later, on fields that the text has chosen.
    V3  Keys and members of sets have a hash and an equality of Python's own, and few share a hash.
    V4  Functions, classes and objects are rejected at save: to restore one is to call it.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import datetime
import enum
import io
import json
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, cast
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard

from ...errors import StateMismatchError, UnsafeCheckpointError

DEPTH_MAX = 100
CLASHES_MAX = 100
INT64 = range(-(1 << 63), 1 << 63)
NUMBERS = frozenset({float, bool, type(None)})
FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool, bytes)}
PATHS: dict[str, Any] = {kind.__name__: kind for kind in (PosixPath, PurePosixPath, WindowsPath, PureWindowsPath)}
ZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
CONSTANTS = {
    tag: {str(value): value for value in vars(torch).values() if isinstance(value, kind)}
    for tag, kind in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format))
}
_KEY_TYPES = frozenset(
    {str, int, float, bool, type(None), bytes, complex, range, Decimal, Fraction, UUID}
    | {datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, *PATHS.values()}
)
_KEY_CONTAINERS = frozenset({tuple, frozenset, torch.Size})
_TUPLE: Any = tuple
_OBJECT: Any = object
_KEY_HASHES = frozenset({enum.Enum.__hash__, int.__hash__, str.__hash__, tuple.__hash__})


def is_json(items: list[Any]) -> bool:
    kinds = set(map(type, items))
    if kinds == {int}:
        return min(items) in INT64 and max(items) in INT64
    return kinds <= NUMBERS


def fields_of(value: Any) -> dict[str, Any]:
    found = {name: slot.__get__(value) for name, slot in slots_of(type(value)).items() if _is_set(slot, value)}
    return found | (object.__getattribute__(value, "__dict__") if has_dict(type(value)) else {})


def _is_set(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def slots_of(kind: type) -> dict[str, Any]:
    return {
        name: slot
        for base in reversed(kind.__mro__)
        for name, slot in vars(base).items()
        if type(slot) is types.MemberDescriptorType
    }


def has_dict(kind: type) -> bool:
    return kind.__dictoffset__ != 0


def is_key(value: Any) -> bool:
    kind = type(value)
    if kind in _KEY_TYPES:
        return True
    if kind in _KEY_CONTAINERS or (
        isinstance(value, tuple) and kind.__hash__ is _TUPLE.__hash__ and kind.__eq__ is _TUPLE.__eq__
    ):
        return all(map(is_key, value))
    if isinstance(value, enum.Enum):
        return kind.__hash__ in _KEY_HASHES
    return isinstance(value, np.generic) and kind.__module__ == "numpy"


def found_class(module: Any, qualname: Any) -> Any:
    if type(module) is not str or type(qualname) is not str:
        return None
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if not issubclass(type(found), types.ModuleType | type):
            return None
        found = type.__getattribute__(found, "__dict__").get(part) if isinstance(found, type) else vars(found).get(part)
    return found if issubclass(type(found), type) else None


def has_finalizer(kind: type) -> bool:
    return any("__del__" in vars(base) for base in kind.__mro__)


def class_of(module: Any, qualname: Any, fits: Callable[[type], bool]) -> Any:
    kind = found_class(module, qualname)
    if kind is None:
        raise StateMismatchError(
            f"the checkpoint has a value of {module}.{qualname}, which this process has not imported",
            hint="Import or define that class before restoring",
        )
    if not fits(kind) or has_finalizer(kind):
        raise bad(f"{module}.{qualname} is not a class that a checkpoint may instantiate")
    return kind


def is_enum(kind: type) -> bool:
    return enum.Enum in kind.__mro__


def is_dataclass(kind: type) -> bool:
    return any("__dataclass_fields__" in vars(base) for base in kind.__mro__) and kind.__new__ is _OBJECT.__new__


def is_tensor_subclass(kind: type) -> bool:
    return torch.Tensor in kind.__mro__ and hasattr(kind, "__tensor_unflatten__")


def is_namedtuple(kind: type) -> bool:
    return tuple in kind.__mro__ and any("_fields" in vars(base) for base in kind.__mro__)


def join_flags(kind: Any, names: Iterable[str]) -> Any:
    """Return the flag of these members, which ``enum`` makes or finds by number."""
    value = 0
    for name in names:
        value |= kind.__members__[name].value
    return kind(value)


def numpy_dtype(name: Any) -> Any:
    dtype = np.lib.format.descr_to_dtype(_as_tuples(name)) if type(name) is list else np.dtype(str(name))
    if dtype.hasobject:
        raise bad("an array has pointers")
    return dtype


def _as_tuples(name: list[Any]) -> Any:
    """Convert lists to tuples: numpy describes a structure as a list of tuples, and JSON has only lists."""
    if name and all(type(part) is list for part in name):
        return [tuple(_as_tuples(item) if _is_nested(item) else _shape(item) for item in part) for part in name]
    return tuple(_as_tuples(item) if _is_nested(item) else _shape(item) for item in name)


def _is_nested(item: Any) -> bool:
    return type(item) is list and bool(item) and type(item[0]) is not int


def _shape(item: Any) -> Any:
    return tuple(item) if type(item) is list else item


def bad(what: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"the structure of the state is rejected: {what}",
        hint="It is damaged or from a newer tierckpt: use that version, another copy or an older step",
    )


LARGE_BYTES = 64 << 10
"""Arrays of at least this size are tensors of the checkpoint."""
NOTHING: Any = object()
PathOf = tuple[str | int, ...]


class Encoder:
    """Encodes one entry of a state. Tensors have DCP's names.

    If two values would have the same name, the second one's are saved under ``below``; with ``is_ambiguous``, all are.
    """

    def __init__(self, below: str, *, is_ambiguous: bool = False) -> None:
        self.numbered: dict[str, torch.Tensor] = {}
        self._below = below
        self._is_ambiguous = is_ambiguous
        self._split_values = 0
        """The number of tensors, and of values that do not pickle."""
        self._open: set[int] = set()

    def encode(self, value: Any, path: PathOf) -> tuple[Any, Any]:
        """Return the node of ``value``, and the part of it that DCP saves. Raises StateMismatchError."""
        kind = type(value)
        if kind in NUMBERS:
            return value, value
        if kind is int:
            return (value if value in INT64 else {"int": format(value, "x")}), value
        if kind is str:
            return _text(value), value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if (leaf := _LEAVES.get(kind)) is not None:
            tag, encode = leaf
            try:
                node = {tag: encode(value)}
            except ValueError as error:
                raise _refused(path, value, str(error)) from None
            self._split_values += kind is torch.memory_format
            return node, NOTHING if kind is torch.memory_format else value
        if id(value) in self._open or len(self._open) >= DEPTH_MAX:
            reason = "contains itself" if id(value) in self._open else f"is nested more than {DEPTH_MAX} deep"
            raise _refused(path, value, reason)
        self._open.add(id(value))
        try:
            return self._container(value, kind, path)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, kind: Any, path: PathOf) -> tuple[Any, Any]:
        if kind is list:
            return self._items(value, path)
        if kind is dict:
            return self._dict(value, path)
        if kind in (set, frozenset):
            return {kind.__name__: [self._key(item, path) for item in value]}, value
        if kind in (OrderedDict, Counter):
            node, flat = self._dict(value, path)
            return {kind.__name__: [node, *self._attributes(value, path)]}, flat
        if kind is defaultdict:
            node, flat = self._dict(value, path)
            factory = value.default_factory
            if factory is not None and FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                raise _refused(path, value, "has a default_factory that is not a plain type of Python")
            return {"defaultdict": [None if factory is None else factory.__name__, node]}, flat
        if kind is torch.Generator:
            node, flat = self._tensor(value.get_state(), path)
            return {"Generator": [str(value.device), node]}, flat
        if isinstance(value, enum.Enum):
            return self._enum(value, path), value
        before = self._split_values
        node, flat = self._record(value, kind, path)
        return node, value if self._split_values == before else flat

    def _record(self, value: Any, kind: Any, path: PathOf) -> tuple[Any, Any]:
        """Encode a value that DCP saves whole if it has no tensors."""
        if kind in (tuple, deque):
            node, flat = self._items(list(value), path)
            return {"tuple": node} if kind is tuple else {"deque": [value.maxlen, node]}, flat
        if kind in (argparse.Namespace, types.SimpleNamespace):
            node, flat = self._dict(vars(value), path)
            return {kind.__name__: node}, flat
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            node, flat = self._items(list(value), path)
            return {"namedtuple": [*_class_name(value, path, is_namedtuple), node]}, flat
        if dataclasses.is_dataclass(value) and not hasattr(value, "state_dict"):
            node, flat = self._dict(fields_of(value), path)
            return {"dataclass": [*_class_name(value, path, is_dataclass), node]}, flat
        if kind.__module__.partition(".")[0] == "numpy":
            return self._numpy(value, path)
        raise _refused(path, value, _why_not(value))

    def _items(self, items: list[Any], path: PathOf) -> tuple[Any, Any]:
        if is_json(items):
            return items, items
        pairs = [self.encode(item, (*path, index)) for index, item in enumerate(items)]
        flat: Any = [shown for _, shown in pairs]
        if any(shown is NOTHING for shown in flat):
            flat = {str(index): shown for index, shown in enumerate(flat) if shown is not NOTHING}
        return [node for node, _ in pairs], flat

    def _dict(self, value: Mapping[Any, Any], path: PathOf) -> tuple[Any, Any]:
        nodes: list[Any] = []
        flat: dict[str, Any] = {}
        for key, item in value.items():
            text = _key_text(key)
            before = self._is_ambiguous
            self._is_ambiguous = before or text in flat
            node, shown = self.encode(item, (*path, text))
            nodes.append(node)
            if shown is not NOTHING and not self._is_ambiguous:
                flat[text] = shown
            self._is_ambiguous = before
        if all(type(key) is str and key.isascii() for key in value):
            return {"dict": dict(zip(value, nodes, strict=True))}, flat
        return {"map": [[self._key(key, path), node] for key, node in zip(value, nodes, strict=True)]}, flat

    def _attributes(self, value: Any, path: PathOf) -> list[Any]:
        if not vars(value):
            return []
        before = self._split_values
        node, _ = self._dict(vars(value), (*path, "__dict__"))
        if self._split_values != before:
            raise _refused(path, value, "has tensors among its attributes")
        return [node]

    def _key(self, key: Any, path: PathOf) -> Any:
        if not is_key(key):
            raise _refused((*path, _key_text(key)), key, "cannot be a key or a member of a set in a checkpoint")
        return self.encode(key, (*path, _key_text(key)))[0]

    def _enum(self, value: enum.Enum, path: PathOf) -> Any:
        name = _class_name(value, path, is_enum)
        if type(value).__members__.get(value.name or "") is value:
            return {"enum": [*name, value.name]}
        parts = [member.name for member in cast(Any, value)] if isinstance(value, enum.Flag) else []
        if not isinstance(value, enum.Flag) or join_flags(type(value), parts) != value:
            raise _refused(path, value, "is not a named member of its class")
        return {"flags": [*name, parts]}

    def _numpy(self, value: Any, path: PathOf) -> tuple[Any, Any]:
        if isinstance(value, np.dtype):
            return {"numpy.dtype": _dtype_name(value, path)}, value
        if isinstance(value, np.generic):
            array = np.asarray(value)
            return {"numpy": [_dtype_name(array.dtype, path), _base64(array.tobytes())]}, value
        if type(value) is not np.ndarray:
            raise _refused(path, value, _why_not(value))
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        if value.dtype == object:
            node, flat = self._items(list(value.ravel(order="C")), path)
            return {"objects": [list(value.shape), node]}, flat
        name = _dtype_name(value.dtype, path)
        if value.nbytes < LARGE_BYTES:
            return {"ndarray": [name, list(value.shape), order, _base64(value.tobytes(order=cast(Any, order)))]}, value
        raw = value.T if order == "F" else np.ascontiguousarray(value)
        raw = raw if raw.flags.writeable else raw.copy()
        node, flat = self._tensor(torch.from_numpy(raw.reshape(-1).view(np.uint8)), path)
        return {"ndarray": [name, list(value.shape), order, node]}, flat

    def _tensor(self, value: torch.Tensor, path: PathOf) -> tuple[Any, Any]:
        kind = type(value)
        if torch.nn.parameter.is_lazy(value):
            raise _refused(path, value, "has no shape before the first forward pass of its module")
        if kind is not DTensor and hasattr(value, "__tensor_flatten__"):
            return self._subclass(value, path)
        is_known = kind in (torch.Tensor, torch.nn.Parameter, DTensor)
        if not is_known or value.layout != torch.strided or value.is_quantized:
            what = f"is a {kind.__name__} of {value.layout} and {value.dtype}; only dense tensors are saved"
            raise _refused(path, value, what)
        self._split_values += 1
        name = ".".join(map(str, path))
        if self._is_ambiguous:
            number = str(len(self.numbered))
            name = f"{self._below}.{number}"
            self.numbered[number] = value
        tensor_kind = "parameter" if kind is torch.nn.Parameter else ""
        node = [name, tensor_kind, value.requires_grad]
        if isinstance(value, DTensor):
            node.append([one.dim if isinstance(one, Shard) else None for one in value.placements])
        elif value.device.type not in ("cpu", "meta"):
            node.append(value.device.type)
        return {"tensor": node}, NOTHING if self._is_ambiguous else value

    def _subclass(self, value: Any, path: PathOf) -> tuple[Any, Any]:
        names, context = value.__tensor_flatten__()
        inner, shown = self._dict({name: getattr(value, name) for name in names}, path)
        described, _ = self.encode(context, (*path, "context"))
        kind = _class_name(value, path, is_tensor_subclass)
        sizes = [list(value.shape), list(value.stride()), value.requires_grad]
        return {"subclass": [*kind, inner, described, *sizes]}, shown


def text_of(node: Any) -> str:
    return json.dumps(node, separators=(",", ":"), check_circular=False)


def _key_text(key: Any) -> str:
    """Return the key as in DCP's names. Python writes no integer of thousands of digits."""
    if type(key) is int and key not in INT64:
        return format(key, "x")
    return key if type(key) is str else str(key)


def _text(value: str) -> Any:
    """Encode text as JSON, which would join two adjacent surrogates."""
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"str": _base64(value.encode("utf-8", "surrogatepass"))}
    return value


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _zone(zone: datetime.tzinfo | None) -> Any:
    if zone is None:
        return None
    if type(zone) is ZoneInfo and zone.key is not None and ZONE.fullmatch(zone.key):
        return zone.key
    if type(zone) is datetime.timezone:
        offset, *name = cast(Any, zone).__getinitargs__()
        return [*_delta(offset), *map(_text, name)]
    raise ValueError(f"has a time zone of type {type(zone).__name__}")


def _delta(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _time(value: Any) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, _zone(value.tzinfo)]


_LEAVES: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", _base64),
    bytearray: ("bytearray", _base64),
    complex: ("complex", lambda value: [value.real, value.imag]),
    range: ("range", lambda value: [_integer(part) for part in (value.start, value.stop, value.step)]),
    slice: ("slice", lambda value: [_integer(part) for part in (value.start, value.stop, value.step)]),
    Decimal: ("Decimal", str),
    Fraction: ("Fraction", lambda value: [format(value.numerator, "x"), format(value.denominator, "x")]),
    UUID: ("UUID", lambda value: value.hex),
    datetime.timedelta: ("timedelta", _delta),
    datetime.date: ("date", lambda value: [value.year, value.month, value.day]),
    datetime.time: ("time", _time),
    datetime.datetime: ("datetime", lambda value: [value.year, value.month, value.day, *_time(value)]),
    datetime.timezone: ("timezone", _zone),
    ZoneInfo: ("timezone", _zone),
    io.BytesIO: ("BytesIO", lambda value: [_base64(value.getvalue()), value.tell()]),
    torch.Size: ("Size", list),
    torch.dtype: ("dtype", str),
    torch.layout: ("layout", str),
    torch.memory_format: ("memory_format", str),
    torch.device: ("device", str),
    **{kind: ("path", lambda value: [type(value).__name__, _text(str(value))]) for kind in PATHS.values()},
}


def _integer(value: Any) -> Any:
    if value is None or (type(value) is int and value in INT64):
        return value
    raise ValueError("has bounds that are not integers of 64 bits")


def _dtype_name(dtype: Any, path: PathOf) -> Any:
    with contextlib.suppress(Exception):
        name: Any = dtype.str if dtype.fields is None else np.lib.format.dtype_to_descr(dtype)
        if not dtype.metadata and numpy_dtype(json.loads(json.dumps(name))) == dtype:
            return name
    raise _refused(path, dtype, f"has numpy's dtype {dtype}")


def _class_name(value: Any, path: PathOf, fits: Callable[[type], bool]) -> tuple[str, str]:
    """Return the class's name. Raises if ``class_of`` cannot, or must not, instantiate it."""
    kind = type(value)
    if not fits(kind) or has_finalizer(kind):
        raise _refused(path, value, f"{_why_not(value)}, a class that creates values by its own code")
    if found_class(kind.__module__, kind.__qualname__) is not kind:
        raise _refused(path, value, f"{_why_not(value)}, which no module has by that name")
    return kind.__module__, kind.__qualname__


def _why_not(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"is a {kind}" + (", which needs its own name in the state" if hasattr(value, "state_dict") else "")


def _refused(path: PathOf, value: Any, what: str) -> StateMismatchError:
    name = ".".join(map(str, path))
    return StateMismatchError(
        f"{name!r} {what}; it could not be restored",
        hint="Leave it out of the state, or save the plain values it consists of",
        key=name,
        type=type(value).__name__,
    )
