"""Types that a state's text may name."""

from __future__ import annotations

import datetime
import enum
import re
import sys
import types
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from uuid import UUID

import torch

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
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].generic) and kind.__module__ == "numpy"


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
    import numpy as np

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
