"""A training job's values as text and tensors, and back: equal in type and in value.

DCP flattens nested values to names and forgets what they were in: keys become text, tuples lists, empty containers
nothing. So beside the tensors, which lie where DCP has them, lies one text for each entry of the state:

    null, true, 1, 1.5, "x"   None, bool, int of 64 bits, float, str
    [...]                     list
    {"tag": ...}              everything else; {"tensor": [name, kind]} stands for a tensor of the checkpoint

No code runs from it (P9). Nothing is imported and no constructor of a class that the text names is called:
    V1  Values are made by the functions of this module alone; a tag that it does not know is refused.
    V2  An enum, dataclass or named tuple is made only of a class that this process has imported already and that is
        one. Members of enums exist; of the others an empty instance gets its fields, past ``__init__``,
        ``__post_init__`` and ``__setattr__``. A class with ``__del__`` is refused: that would run later, over fields
        that the text has chosen.
    V3  What becomes a key or a member of a set has a hash and an equality of Python's own, and few share a hash.
    V4  Functions, classes and objects are refused when they are saved: to give one back is to have it called.
"""

from __future__ import annotations

import argparse
import base64
import binascii
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
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, cast
from uuid import UUID
from zoneinfo import ZoneInfo

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor

from ..errors import StateMismatchError, TierckptError, UnsafeCheckpointError

DEPTH_MAX = 100
CLASHES_MAX = 100
LARGE_BYTES = 64 << 10
"""Arrays from here on are tensors of the checkpoint: staged, checked and read as such."""

NOTHING: Any = object()
"""In place of what DCP is not to see."""

PathOf = tuple[str | int, ...]

_INT64 = range(-(1 << 63), 1 << 63)
_NUMBERS = frozenset({float, bool, type(None)})
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool, bytes)}
_PATHS: dict[str, Any] = {kind.__name__: kind for kind in (PosixPath, PurePosixPath, WindowsPath, PureWindowsPath)}
_ZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_CONSTANTS = {
    tag: {str(value): value for value in vars(torch).values() if isinstance(value, kind)}
    for tag, kind in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format))
}
_KEY_TYPES = frozenset(
    {str, int, float, bool, type(None), bytes, complex, range, Decimal, Fraction, UUID}
    | {datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, *_PATHS.values()}
)
_KEY_CONTAINERS = frozenset({tuple, frozenset, torch.Size})
_TUPLE: Any = tuple
_OBJECT: Any = object
_KEY_HASHES = frozenset({enum.Enum.__hash__, int.__hash__, str.__hash__, tuple.__hash__})


# --- to text ------------------------------------------------------------------------------------------------------


class Encoder:
    """Takes one entry of a state apart.

    Tensors have the names that DCP gives them. Where two values would have one name, those of the second are numbered.

    Args:
        below: where tensors are numbered.
        is_ambiguous: all of them are.

    Attributes:
        numbered: these tensors, to be saved below ``below``.
    """

    def __init__(self, below: str, *, is_ambiguous: bool = False) -> None:
        self.numbered: dict[str, torch.Tensor] = {}
        self._below = below
        self._is_ambiguous = is_ambiguous
        self._apart = 0
        """How many of the values so far DCP cannot be shown in one piece: tensors, and what does not pickle."""
        self._open: set[int] = set()

    def encode(self, value: Any, path: PathOf) -> tuple[Any, Any]:
        """Return the node of ``value``, and what DCP is to save of it: its tensors, and what it can show to others.

        Raises StateMismatchError naming what cannot be given back. Cost: about a microsecond for each value.
        """
        kind = type(value)
        if kind in _NUMBERS:
            return value, value
        if kind is int:
            return (value if value in _INT64 else {"int": format(value, "x")}), value
        if kind is str:
            return _text(value), value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if (leaf := _LEAVES.get(kind)) is not None:
            node = self._leaf(value, *leaf, path)
            self._apart += kind is torch.memory_format
            return node, NOTHING if kind is torch.memory_format else value
        if id(value) in self._open or len(self._open) >= DEPTH_MAX:
            deep = "contains itself" if id(value) in self._open else f"is nested more than {DEPTH_MAX} deep"
            raise _refused(path, value, deep)
        self._open.add(id(value))
        try:
            return self._container(value, kind, path)
        finally:
            self._open.discard(id(value))

    def _leaf(self, value: Any, tag: str, encode: Callable[[Any], Any], path: PathOf) -> Any:
        try:
            return {tag: encode(value)}
        except ValueError as error:
            raise _refused(path, value, str(error)) from None

    def _container(self, value: Any, kind: Any, path: PathOf) -> tuple[Any, Any]:
        before = self._apart
        if kind is list:
            return self._items(value, path)
        if kind is dict:
            return self._dict(value, path)
        if kind in (tuple, deque):
            node, flat = self._items(list(value), path)
            return ({"tuple": node} if kind is tuple else {"deque": [value.maxlen, node]}), self._shown(
                value, flat, before
            )
        if kind in (set, frozenset):
            return {kind.__name__: [self._key(item, path) for item in value]}, value
        if kind in (OrderedDict, Counter):
            node, flat = self._dict(value, path)
            return {kind.__name__: [node, *self._attributes(value, path)]}, flat
        if kind is defaultdict:
            node, flat = self._dict(value, path)
            factory = value.default_factory
            if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                raise _refused(path, value, "has a default_factory that is not a plain type of Python")
            return {"defaultdict": [None if factory is None else factory.__name__, node]}, flat
        if kind in (argparse.Namespace, types.SimpleNamespace):
            node, flat = self._dict(vars(value), path)
            return {kind.__name__: node}, self._shown(value, flat, before)
        if kind is torch.Generator:
            node, flat = self._tensor(value.get_state(), path)
            return {"Generator": [str(value.device), node]}, flat
        if isinstance(value, enum.Enum):
            return self._enum(value, path), value
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            node, flat = self._items(list(value), path)
            return {"namedtuple": [*_class_name(value, path, _is_namedtuple), node]}, self._shown(value, flat, before)
        if dataclasses.is_dataclass(value) and not hasattr(value, "state_dict"):
            node, flat = self._dict(_fields_of(value), path)
            return {"dataclass": [*_class_name(value, path, _is_dataclass), node]}, self._shown(value, flat, before)
        if kind.__module__.partition(".")[0] == "numpy" and "numpy" in sys.modules:
            return self._numpy(value, path)
        raise _refused(path, value, _why_not(value))

    def _shown(self, value: Any, flat: Any, before: int) -> Any:
        """What DCP sees of a container that it does not open: the container, unless it must be taken apart."""
        return value if self._apart == before else flat

    def _items(self, items: list[Any], path: PathOf) -> tuple[Any, Any]:
        if _is_json(items):
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
        """``_metadata`` of a module's state dict, which is an attribute of it."""
        if not vars(value):
            return []
        before = self._apart
        node, _ = self._dict(vars(value), (*path, "__dict__"))
        if self._apart != before:
            raise _refused(path, value, "has tensors among its attributes")
        return [node]

    def _key(self, key: Any, path: PathOf) -> Any:
        if not is_key(key):
            raise _refused((*path, _key_text(key)), key, "cannot be a key or a member of a set in a checkpoint")
        return self.encode(key, (*path, _key_text(key)))[0]

    def _enum(self, value: enum.Enum, path: PathOf) -> Any:
        name = _class_name(value, path, _is_enum)
        if type(value).__members__.get(value.name or "") is value:
            return {"enum": [*name, value.name]}
        parts = [member.name for member in cast(Any, value)] if isinstance(value, enum.Flag) else []
        if not isinstance(value, enum.Flag) or _joined(type(value), parts) != value:
            raise _refused(path, value, "is no member of its class by name")
        return {"flags": [*name, parts]}

    def _numpy(self, value: Any, path: PathOf) -> tuple[Any, Any]:
        import numpy as np

        before = self._apart
        if isinstance(value, np.dtype):
            return {"numpy.dtype": _dtype_name(value, path)}, value
        if isinstance(value, np.generic):
            array = np.asarray(value)
            return {"numpy": [_dtype_name(array.dtype, path), _base64(array.tobytes())]}, value
        if type(value) is not np.ndarray:
            raise _refused(path, value, _why_not(value))
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        if value.dtype == object:
            items = self._items(list(value.ravel(order="C")), path)
            return {"objects": [list(value.shape), items[0]]}, self._shown(value, items[1], before)
        name = _dtype_name(value.dtype, path)
        if value.nbytes < LARGE_BYTES:
            return {"ndarray": [name, list(value.shape), order, _base64(value.tobytes(order=cast(Any, order)))]}, value
        raw = value.T if order == "F" else np.ascontiguousarray(value)
        raw = raw if raw.flags.writeable else raw.copy()
        node, flat = self._tensor(torch.from_numpy(raw.reshape(-1).view(np.uint8)), path)
        return {"ndarray": [name, list(value.shape), order, node]}, flat

    def _tensor(self, value: torch.Tensor, path: PathOf) -> tuple[Any, Any]:
        kind = type(value)
        if kind not in (torch.Tensor, torch.nn.Parameter, DTensor) or value.layout != torch.strided:
            raise _refused(path, value, f"is a {kind.__name__} of layout {value.layout}: only dense tensors come back")
        if value.is_quantized:
            raise _refused(path, value, "is quantized: DCP loads it as something else")
        self._apart += 1
        name = ".".join(map(str, path))
        if self._is_ambiguous:
            number = str(len(self.numbered))
            name = f"{self._below}.{number}"
            self.numbered[number] = value
        told = "parameter" if kind is torch.nn.Parameter else ""
        return {"tensor": [name, told, value.requires_grad]}, NOTHING if self._is_ambiguous else value


def text_of(node: Any) -> str:
    """The text of a node: ASCII."""
    return json.dumps(node, separators=(",", ":"), check_circular=False)


def _is_json(items: list[Any]) -> bool:
    """True for long lists of numbers, at the speed of C."""
    kinds = set(map(type, items))
    if kinds == {int}:
        return min(items) in _INT64 and max(items) in _INT64
    return kinds <= _NUMBERS


def _key_text(key: Any) -> str:
    """The key in the name of a tensor, as DCP has it. Python writes no integer of thousands of digits."""
    if type(key) is int and key not in _INT64:
        return format(key, "x")
    return key if type(key) is str else str(key)


def _text(value: str) -> Any:
    """JSON would join two surrogates that stand side by side."""
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
    if type(zone) is ZoneInfo and zone.key is not None and _ZONE.fullmatch(zone.key):
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
    **{kind: ("path", lambda value: [type(value).__name__, _text(str(value))]) for kind in _PATHS.values()},
}


def _integer(value: Any) -> Any:
    if value is None or (type(value) is int and value in _INT64):
        return value
    raise ValueError("has ends that are no numbers of 64 bits")


def _dtype_name(dtype: Any, path: PathOf) -> Any:
    import numpy as np

    with contextlib.suppress(Exception):
        name: Any = dtype.str if dtype.fields is None else np.lib.format.dtype_to_descr(dtype)
        if not dtype.metadata and _numpy_dtype(json.loads(json.dumps(name))) == dtype:
            return name
    raise _refused(path, dtype, f"has numpy's dtype {dtype}")


def _fields_of(value: Any) -> dict[str, Any]:
    """All that an instance of a dataclass remembers, fields or not."""
    found = {name: slot.__get__(value) for name, slot in _slots(type(value)).items() if _is_set(slot, value)}
    return found | (object.__getattribute__(value, "__dict__") if _has_dict(type(value)) else {})


def _is_set(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _slots(kind: type) -> dict[str, Any]:
    return {
        name: slot
        for base in reversed(kind.__mro__)
        for name, slot in vars(base).items()
        if type(slot) is types.MemberDescriptorType
    }


def _has_dict(kind: type) -> bool:
    return kind.__dictoffset__ != 0


def _class_name(value: Any, path: PathOf, fits: Callable[[type], bool]) -> tuple[str, str]:
    """The name that ``_class_of`` finds the class by: it must be that very class, and one to make values of."""
    kind = type(value)
    if not fits(kind) or _has_finalizer(kind):
        raise _refused(path, value, f"{_why_not(value)}, whose values are made by code of its own")
    if _found_class(kind.__module__, kind.__qualname__) is not kind:
        raise _refused(path, value, f"{_why_not(value)}, which no module has by that name")
    return kind.__module__, kind.__qualname__


def is_key(value: Any) -> bool:
    """True for what may be a key of a dict or a member of a set (V3)."""
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


def _why_not(value: Any) -> str:
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return f"is the function {value.__qualname__}"
    if isinstance(value, type):
        return f"is the class {value.__qualname__}"
    if hasattr(value, "state_dict"):
        return f"is a {type(value).__qualname__} inside a container: give it a name of its own in the state"
    return f"is a {type(value).__module__}.{type(value).__qualname__}"


def _refused(path: PathOf, value: Any, what: str) -> StateMismatchError:
    name = ".".join(map(str, path))
    return StateMismatchError(
        f"{name!r} {what}; a restore could not give it back",
        hint="Leave it out of the state, or save the plain values it is made of",
        key=name,
        type=type(value).__name__,
    )


# --- classes of the user's ------------------------------------------------------------------------------------------


def _found_class(module: Any, qualname: Any) -> Any:
    """The class of this name in a module that is imported already; None when there is none. Runs no code."""
    if type(module) is not str or type(qualname) is not str:
        return None
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if not issubclass(type(found), types.ModuleType | type):
            return None
        found = type.__getattribute__(found, "__dict__").get(part) if isinstance(found, type) else vars(found).get(part)
    return found if issubclass(type(found), type) else None


def _has_finalizer(kind: type) -> bool:
    return any("__del__" in vars(base) for base in kind.__mro__)


def _class_of(module: Any, qualname: Any, fits: Callable[[type], bool]) -> Any:
    kind = _found_class(module, qualname)
    if kind is None:
        raise StateMismatchError(
            f"the checkpoint holds a value of {module}.{qualname}, which this process has not imported",
            hint="Import or define that class before restoring",
        )
    if not fits(kind) or _has_finalizer(kind):
        raise _bad(f"{module}.{qualname} is not a class that a checkpoint may make values of")
    return kind


def _is_enum(kind: type) -> bool:
    return enum.Enum in kind.__mro__


def _is_dataclass(kind: type) -> bool:
    return any("__dataclass_fields__" in vars(base) for base in kind.__mro__) and kind.__new__ is _OBJECT.__new__


def _is_namedtuple(kind: type) -> bool:
    return tuple in kind.__mro__ and any("_fields" in vars(base) for base in kind.__mro__)


def _joined(kind: Any, names: Iterable[str]) -> Any:
    """The flag of these members. Made by ``enum`` alone: the value exists or is looked up by number."""
    value = 0
    for name in names:
        value |= kind.__members__[name].value
    return kind(value)


# --- from text ------------------------------------------------------------------------------------------------------


class Decoder:
    """Makes one entry of a state anew.

    ``value`` is complete once ``tensors`` are loaded in place and ``finish`` was called. Tensors lie where those in
    ``live`` do, the value that stands in their place: on its device, and a DTensor by its placements.

    Raises:
        UnsafeCheckpointError: the text is none of ours.
        StateMismatchError: a class that this process lacks.
    """

    def __init__(self, text: Any, metadata: Metadata, live: Callable[[], Any]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._metadata = metadata
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._hashes: dict[int, Any] = {}
        self._clashes = 0
        try:
            node = json.loads(text)
            self.value = self._decode(node, live() if '{"tensor":' in text else None, 0)
        except TierckptError:
            raise
        except Exception as error:
            raise _bad(f"{type(error).__name__}: {error}") from error

    def finish(self) -> None:
        for generator, state in self._generators:
            generator.set_state(state.cpu())

    def _decode(self, node: Any, live: Any, depth: int) -> Any:
        if type(node) is list:
            return self._list(node, live, depth)
        if type(node) is not dict:
            return node
        if depth > 2 * DEPTH_MAX or len(node) != 1:
            raise _bad("it is nested too deep, or has no tag")
        [(tag, body)] = node.items()
        made = _LEAF_MAKERS.get(tag)
        if made is not None:
            return made(body)
        maker = _MAKERS.get(tag)
        if maker is None:
            raise _bad(f"it has the tag {tag!r:.60}, which this version does not know")
        return maker(self, body, live, depth + 1)

    def _list(self, nodes: Any, live: Any, depth: int) -> list[Any]:
        if type(nodes) is not list:
            raise _bad("a list is none")
        if _is_json(nodes):
            return nodes
        if depth > 2 * DEPTH_MAX:
            raise _bad("it is nested too deep")
        beside = live if isinstance(live, list | tuple | deque) else ()
        beside = [*beside, *[None] * (len(nodes) - len(beside))]
        return [self._decode(node, other, depth + 1) for node, other in zip(nodes, beside, strict=False)]

    def _dict(self, node: Any, live: Any, depth: int) -> dict[Any, Any]:
        if type(node) is not dict or len(node) != 1 or not node.keys() <= {"dict", "map"}:
            raise _bad("a dict is none")
        [(tag, body)] = node.items()
        return self._mapping(body, live, depth) if tag == "dict" else self._map(body, live, depth)

    def _mapping(self, body: dict[str, Any], live: Any, depth: int) -> dict[str, Any]:
        beside = live if isinstance(live, Mapping) else {}
        return {key: self._decode(item, beside.get(key), depth + 1) for key, item in body.items()}

    def _map(self, body: list[Any], live: Any, depth: int) -> dict[Any, Any]:
        beside = live if isinstance(live, Mapping) else {}
        made = {}
        for node, item in body:
            key = self._key(node, depth)
            made[key] = self._decode(item, beside.get(key), depth + 1)
        return made

    def _key(self, node: Any, depth: int) -> Any:
        key = self._decode(node, None, depth + 1)
        if not is_key(key):
            raise _bad(f"a {type(key).__name__} is a key")
        if self._hashes.setdefault(hash(key), key) != key:
            self._clashes += 1
            if self._clashes > CLASHES_MAX:
                raise _bad("its keys are made to share a hash")
        return key

    def _tuple(self, body: Any, live: Any, depth: int) -> Any:
        return tuple(self._list(body, live, depth))

    def _deque(self, body: Any, live: Any, depth: int) -> Any:
        maxlen, items = body
        return deque(self._list(items, live, depth), maxlen)

    def _set(self, body: Any, live: Any, depth: int) -> Any:
        return {self._key(item, depth) for item in body}

    def _frozenset(self, body: Any, live: Any, depth: int) -> Any:
        return frozenset(self._set(body, live, depth))

    def _ordered(self, body: Any, live: Any, depth: int) -> Any:
        return self._with_dict(OrderedDict(), body, live, depth)

    def _counter(self, body: Any, live: Any, depth: int) -> Any:
        return self._with_dict(Counter(), body, live, depth)

    def _with_dict(self, made: Any, body: Any, live: Any, depth: int) -> Any:
        node, *more = body
        for key, item in self._dict(node, live, depth).items():
            made[key] = item
        for attributes in more:
            vars(made).update(self._dict(attributes, None, depth))
        return made

    def _defaultdict(self, body: Any, live: Any, depth: int) -> Any:
        factory, node = body
        return defaultdict(None if factory is None else _FACTORIES[factory], self._dict(node, live, depth))

    def _namespace(self, body: Any, live: Any, depth: int) -> Any:
        return self._filled(argparse.Namespace(), body, live, depth)

    def _simple_namespace(self, body: Any, live: Any, depth: int) -> Any:
        return self._filled(types.SimpleNamespace(), body, live, depth)

    def _filled(self, made: Any, body: Any, live: Any, depth: int) -> Any:
        beside = vars(live) if type(live) is type(made) else None
        vars(made).update(self._dict(body, beside, depth))
        return made

    def _generator(self, body: Any, live: Any, depth: int) -> Any:
        device, node = body
        state = self._decode(node, None, depth)
        made = live if type(live) is torch.Generator and str(live.device) == device else _generator_on(device)
        self._generators.append((made, state))
        return made

    def _enum(self, body: Any, live: Any, depth: int) -> Any:
        module, qualname, name = body
        kind = _class_of(module, qualname, _is_enum)
        if name not in kind._member_map_:
            raise StateMismatchError(
                f"{module}.{qualname} has no member {name!r:.60} here, and it had one when the checkpoint was saved",
                hint="Restore with the code that saved it, or leave that entry out with only=",
            )
        return kind._member_map_[name]

    def _flags(self, body: Any, live: Any, depth: int) -> Any:
        module, qualname, names = body
        return _joined(_class_of(module, qualname, lambda kind: enum.Flag in kind.__mro__), names)

    def _namedtuple(self, body: Any, live: Any, depth: int) -> Any:
        module, qualname, items = body
        kind = _class_of(module, qualname, _is_namedtuple)
        values = self._list(items, live, depth)
        if len(values) != len(kind._fields):
            raise StateMismatchError(f"{module}.{qualname} has other fields here than in the checkpoint")
        return tuple.__new__(kind, values)

    def _dataclass(self, body: Any, live: Any, depth: int) -> Any:
        module, qualname, node = body
        kind = _class_of(module, qualname, _is_dataclass)
        values = self._dict(node, _fields_of(live) if type(live) is kind else None, depth)
        made, slots = object.__new__(kind), _slots(kind)
        for name in values.keys() & slots.keys():
            slots[name].__set__(made, values[name])
        rest = {name: value for name, value in values.items() if name not in slots}
        if rest and not _has_dict(kind):
            raise StateMismatchError(f"{module}.{qualname} has other fields here than in the checkpoint")
        if rest:
            object.__getattribute__(made, "__dict__").update(rest)
        return made

    def _ndarray(self, body: Any, live: Any, depth: int) -> Any:
        import numpy as np

        name, shape, order, data = body
        dtype = _numpy_dtype(name)
        if type(data) is str:
            raw = np.frombuffer(bytearray(_bytes(data)), dtype=np.uint8)
        else:
            raw = self._decode(data, None, depth).numpy()
        array = raw.view(dtype) if dtype.itemsize else np.empty(shape, dtype)
        return array.reshape(shape) if order == "C" else array.reshape(shape[::-1]).T

    def _objects(self, body: Any, live: Any, depth: int) -> Any:
        import numpy as np

        shape, items = body
        array = np.empty(len(items), dtype=object)
        for index, item in enumerate(self._list(items, None, depth)):
            array[index] = item
        return array.reshape(shape)

    def _tensor(self, body: Any, live: Any, depth: int) -> Any:
        name, kind, requires_grad = body
        stored = self._metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata) or name in self.tensors:
            raise _bad(f"{name!r:.200} is no tensor of the checkpoint, or is named twice")
        self.tensors[name] = made = _empty_like(stored, live)
        if kind == "parameter":
            return torch.nn.Parameter(made, requires_grad=requires_grad is True)
        return made.requires_grad_() if requires_grad is True else made


def _generator_on(device: Any) -> torch.Generator:
    try:
        return torch.Generator(device)
    except (RuntimeError, TypeError) as error:
        raise StateMismatchError(
            f"the checkpoint holds a random generator of {device!r:.60}, which this process has not: {error}",
            hint="Restore where there is such a device, or leave that entry out with only=",
        ) from None


def _empty_like(stored: TensorStorageMetadata, live: Any) -> torch.Tensor:
    dtype = stored.properties.dtype
    if isinstance(live, DTensor):
        return empty_dtensor(stored.size, dtype=dtype, device_mesh=live.device_mesh, placements=live.placements)
    device = live.device if isinstance(live, torch.Tensor) and not live.is_meta else "cpu"
    return torch.empty(stored.size, dtype=dtype, device=device)


def _bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError) as error:
        raise _bad(f"bytes are none: {error}") from error


def _numpy_dtype(name: Any) -> Any:
    import numpy as np

    dtype = np.lib.format.descr_to_dtype(_tupled(name)) if type(name) is list else np.dtype(str(name))
    if dtype.hasobject:
        raise _bad("an array holds pointers")
    return dtype


def _tupled(name: list[Any]) -> Any:
    """numpy describes a structure as a list of tuples; JSON has lists only."""
    if name and all(type(part) is list for part in name):
        return [tuple(_tupled(item) if _is_nested(item) else _shape(item) for item in part) for part in name]
    return tuple(_tupled(item) if _is_nested(item) else _shape(item) for item in name)


def _is_nested(item: Any) -> bool:
    return type(item) is list and bool(item) and type(item[0]) is not int


def _shape(item: Any) -> Any:
    return tuple(item) if type(item) is list else item


def _numpy_scalar(body: Any) -> Any:
    import numpy as np

    name, data = body
    dtype = _numpy_dtype(name)
    return np.frombuffer(_bytes(data), dtype=dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]


def _zone_of(body: Any) -> datetime.tzinfo | None:
    if body is None:
        return None
    if type(body) is str:
        if not _ZONE.fullmatch(body):
            raise _bad("a time zone is none")
        return ZoneInfo(body)
    days, seconds, microseconds, *name = body
    offset = datetime.timedelta(days, seconds, microseconds)
    return datetime.timezone(offset, *map(_text_of, name))


def _time_of(body: Any) -> dict[str, Any]:
    hour, minute, second, microsecond, fold, zone = body
    return {
        "hour": hour,
        "minute": minute,
        "second": second,
        "microsecond": microsecond,
        "fold": fold,
        "tzinfo": _zone_of(zone),
    }


def _text_of(node: Any) -> str:
    if type(node) is dict:
        return str(_bytes(node["str"]), "utf-8", "surrogatepass")
    return str(node)


def _stream(body: Any) -> io.BytesIO:
    data, at = body
    stream = io.BytesIO(_bytes(data))
    stream.seek(at)
    return stream


def _bad(what: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"the structure of the state is refused: {what}",
        hint="It is damaged, made to do harm, or of a newer version: use another copy or an older step",
    )


_LEAF_MAKERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda body: int(body, 16),
    "str": lambda body: str(_bytes(body), "utf-8", "surrogatepass"),
    "bytes": _bytes,
    "bytearray": lambda body: bytearray(_bytes(body)),
    "complex": lambda body: complex(*body),
    "range": lambda body: range(*body),
    "slice": lambda body: slice(*body),
    "Decimal": Decimal,
    "Fraction": lambda body: Fraction(int(body[0], 16), int(body[1], 16)),
    "UUID": lambda body: UUID(hex=body),
    "timedelta": lambda body: datetime.timedelta(*body),
    "date": lambda body: datetime.date(*body),
    "time": lambda body: datetime.time(**_time_of(body)),
    "datetime": lambda body: datetime.datetime(*body[:3], **_time_of(body[3:])),
    "timezone": _zone_of,
    "BytesIO": _stream,
    "Size": torch.Size,
    "device": torch.device,
    "path": lambda body: cast(PurePath, _PATHS[body[0]](_text_of(body[1]))),
    "numpy.dtype": _numpy_dtype,
    "numpy": _numpy_scalar,
    **{tag: known.__getitem__ for tag, known in _CONSTANTS.items()},
}

_MAKERS: dict[str, Callable[[Decoder, Any, Any, int], Any]] = {
    "dict": Decoder._mapping,
    "map": Decoder._map,
    "tuple": Decoder._tuple,
    "deque": Decoder._deque,
    "set": Decoder._set,
    "frozenset": Decoder._frozenset,
    "OrderedDict": Decoder._ordered,
    "Counter": Decoder._counter,
    "defaultdict": Decoder._defaultdict,
    "Namespace": Decoder._namespace,
    "SimpleNamespace": Decoder._simple_namespace,
    "Generator": Decoder._generator,
    "enum": Decoder._enum,
    "flags": Decoder._flags,
    "namedtuple": Decoder._namedtuple,
    "dataclass": Decoder._dataclass,
    "ndarray": Decoder._ndarray,
    "objects": Decoder._objects,
    "tensor": Decoder._tensor,
}
