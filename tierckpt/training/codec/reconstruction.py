"""Decodes text and tensors into values: inverse of ``structure.py``, which has V1 to V4."""

from __future__ import annotations

import argparse
import base64
import binascii
import datetime
import enum
import functools
import io
import json
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any, cast
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from ...errors import StateMismatchError, TierckptError
from .structure import (
    CLASHES_MAX,
    CONSTANTS,
    DEPTH_MAX,
    FACTORIES,
    PATHS,
    ZONE,
    bad,
    class_of,
    fields_of,
    has_dict,
    is_dataclass,
    is_enum,
    is_json,
    is_key,
    is_namedtuple,
    is_tensor_subclass,
    join_flags,
    numpy_dtype,
    slots_of,
)

NO_TEXT = '{"paths": []}'
"""For an entry without text. An encoder writes no space."""


class Decoder:
    """Decodes one entry of a state.

    ``value`` is complete once ``tensors`` are loaded in place and ``finish`` was called.

    Raises UnsafeCheckpointError: invalid text. StateMismatchError: a class is unknown in this process.
    """

    def __init__(self, text: Any, metadata: Metadata, live: Callable[[], Any]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.has_text = text != NO_TEXT
        self.has_paths = str(text).startswith('{"paths":')
        """The text is of a module or optimizer: ``value`` has single values by path."""
        self._metadata = metadata
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._hashes: dict[int, Any] = {}
        self._clashes = 0
        try:
            node = json.loads(text)
            self.value = self._decode(node, live() if '{"tensor":' in text or '{"Generator":' in text else None, 0)
        except TierckptError:
            raise
        except Exception as error:
            raise bad(f"{type(error).__name__}: {error}") from error

    def finish(self) -> None:
        for generator, state in self._generators:
            generator.set_state(state.cpu())

    def _decode(self, node: Any, live: Any, depth: int) -> Any:
        if type(node) is list:
            return self._list(node, live, depth)
        if type(node) is not dict:
            return node
        if depth > 2 * DEPTH_MAX or len(node) != 1:
            raise bad("it is nested too deep, or has no tag")
        [(tag, body)] = node.items()
        made = _LEAF_MAKERS.get(tag)
        if made is not None:
            return made(body)
        maker = _MAKERS.get(tag)
        if maker is None:
            raise bad(f"it has the tag {tag!r:.60}, which this version does not support")
        return maker(self, body, live, depth + 1)

    def _list(self, nodes: Any, live: Any, depth: int) -> list[Any]:
        if type(nodes) is not list:
            raise bad("a list is invalid")
        if is_json(nodes):
            return nodes
        if depth > 2 * DEPTH_MAX:
            raise bad("it is nested too deep")
        live_items = live if isinstance(live, list | tuple | deque) else ()
        live_items = [*live_items, *[None] * (len(nodes) - len(live_items))]
        return [self._decode(node, other, depth + 1) for node, other in zip(nodes, live_items, strict=False)]

    def _dict(self, node: Any, live: Any, depth: int) -> dict[Any, Any]:
        if type(node) is not dict or len(node) != 1 or not node.keys() <= {"dict", "map"}:
            raise bad("a dict is invalid")
        [(tag, body)] = node.items()
        return self._mapping(body, live, depth) if tag == "dict" else self._map(body, live, depth)

    def _mapping(self, body: dict[str, Any], live: Any, depth: int) -> dict[str, Any]:
        live_items = live if isinstance(live, Mapping) else {}
        return {key: self._decode(item, live_items.get(key), depth + 1) for key, item in body.items()}

    def _map(self, body: list[Any], live: Any, depth: int) -> dict[Any, Any]:
        live_items = live if isinstance(live, Mapping) else {}
        made = {}
        for node, item in body:
            key = self._key(node, depth)
            made[key] = self._decode(item, live_items.get(key), depth + 1)
        return made

    def _key(self, node: Any, depth: int) -> Any:
        key = self._decode(node, None, depth + 1)
        if not is_key(key):
            raise bad(f"a {type(key).__name__} is a key")
        if self._hashes.setdefault(hash(key), key) != key:
            self._clashes += 1
            if self._clashes > CLASHES_MAX:
                raise bad("too many of its keys share a hash")
        return key

    def _deque(self, body: Any, live: Any, depth: int) -> Any:
        maxlen, items = body
        return deque(self._list(items, live, depth), maxlen)

    def _set(self, body: Any, live: Any, depth: int) -> Any:
        return {self._key(item, depth) for item in body}

    def _with_dict(self, made: Any, body: Any, live: Any, depth: int) -> Any:
        node, *more = body
        for key, item in self._dict(node, live, depth).items():
            made[key] = item
        for attributes in more:
            vars(made).update(self._dict(attributes, None, depth))
        return made

    def _defaultdict(self, body: Any, live: Any, depth: int) -> Any:
        factory, node = body
        return defaultdict(None if factory is None else FACTORIES[factory], self._dict(node, live, depth))

    def _filled(self, made: Any, body: Any, live: Any, depth: int) -> Any:
        live_items = vars(live) if type(live) is type(made) else None
        vars(made).update(self._dict(body, live_items, depth))
        return made

    def _generator(self, body: Any, live: Any, depth: int) -> Any:
        device, node = body
        state = self._decode(node, None, depth)
        made = live if type(live) is torch.Generator and str(live.device) == device else _generator_on(device)
        self._generators.append((made, state))
        return made

    def _enum(self, body: Any, live: Any, depth: int) -> Any:
        module, qualname, name = body
        kind = class_of(module, qualname, is_enum)
        if name not in kind._member_map_:
            raise StateMismatchError(
                f"{module}.{qualname} no longer has the member {name!r:.60} that the checkpoint uses",
                hint="Restore with the code that saved it, or exclude that entry with only=",
            )
        return kind._member_map_[name]

    def _flags(self, body: Any, live: Any, depth: int) -> Any:
        module, qualname, names = body
        return join_flags(class_of(module, qualname, lambda kind: enum.Flag in kind.__mro__), names)

    def _namedtuple(self, body: Any, live: Any, depth: int) -> Any:
        module, qualname, items = body
        kind = class_of(module, qualname, is_namedtuple)
        values = self._list(items, live, depth)
        if len(values) != len(kind._fields):
            raise StateMismatchError(f"{module}.{qualname} has other fields here than in the checkpoint")
        return tuple.__new__(kind, values)

    def _dataclass(self, body: Any, live: Any, depth: int) -> Any:
        module, qualname, node = body
        kind = class_of(module, qualname, is_dataclass)
        values = self._dict(node, fields_of(live) if type(live) is kind else None, depth)
        made, slots = object.__new__(kind), slots_of(kind)
        for name in values.keys() & slots.keys():
            slots[name].__set__(made, values[name])
        rest = {name: value for name, value in values.items() if name not in slots}
        if rest and not has_dict(kind):
            raise StateMismatchError(f"{module}.{qualname} has other fields here than in the checkpoint")
        if rest:
            object.__getattribute__(made, "__dict__").update(rest)
        return made

    def _ndarray(self, body: Any, live: Any, depth: int) -> Any:
        name, shape, order, data = body
        dtype = numpy_dtype(name)
        if type(data) is str:
            raw = np.frombuffer(bytearray(_bytes(data)), dtype=np.uint8)
        else:
            raw = self._decode(data, None, depth).numpy()
        array = raw.view(dtype) if dtype.itemsize else np.empty(shape, dtype)
        return array.reshape(shape) if order == "C" else array.reshape(shape[::-1]).T

    def _objects(self, body: Any, live: Any, depth: int) -> Any:
        shape, items = body
        array = np.empty(len(items), dtype=object)
        for index, item in enumerate(self._list(items, None, depth)):
            array[index] = item
        return array.reshape(shape)

    def _tensor(self, body: Any, live: Any, depth: int) -> Any:
        name, kind, requires_grad, *placed = body
        stored = self._metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata) or name in self.tensors:
            raise bad(f"{name!r:.200} is not a tensor of the checkpoint, or is named twice")
        shard_dims = next((one for one in placed if type(one) is list), None)
        device = next((one for one in placed if type(one) is str), "cpu")
        live_items = live if isinstance(live, torch.Tensor) else None
        self.tensors[name] = made = empty_like(
            stored, live_items, shard_dims, device=device if has_device(device) else "cpu"
        )
        if kind == "parameter":
            return torch.nn.Parameter(made, requires_grad=requires_grad is True)
        return made.requires_grad_() if requires_grad is True else made

    def _subclass(self, body: Any, live: Any, depth: int) -> Any:
        module, qualname, inner, described, shape, stride, requires_grad = body
        kind = class_of(module, qualname, is_tensor_subclass)
        live_items = {name: getattr(live, name, None) for name in inner.get("dict", ())} if type(live) is kind else None
        tensors = self._dict(inner, live_items, depth)
        context = self._decode(described, None, depth)
        made = kind.__tensor_unflatten__(tensors, context, torch.Size(shape), tuple(stride))
        return made.requires_grad_() if requires_grad is True else made


def _generator_on(device: Any) -> torch.Generator:
    try:
        return torch.Generator(device)
    except (RuntimeError, TypeError) as error:
        raise StateMismatchError(
            f"the checkpoint has a random generator of {device!r:.60}, which this process lacks: {error}",
            hint="Restore on a machine with such a device, or exclude that entry with only=",
        ) from None


@functools.cache
def has_device(kind: str) -> bool:
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == kind


class NewTensors:
    def __init__(self) -> None:
        self._like: Any = None
        self._last: torch.Tensor | None = None

    def like(self, stored: TensorStorageMetadata, live: Any, *, device: str | torch.device = "cpu") -> torch.Tensor:
        if type(live) in _PLAIN:
            device = live.device
        elif isinstance(live, torch.Tensor):
            return empty_like(stored, live)
        like = stored.properties.dtype, device, stored.size
        if self._last is None or self._like != like:
            self._like, self._last = like, empty_like(stored, live, device=device)
            return self._last
        try:
            return torch.empty_like(self._last)
        except torch.OutOfMemoryError:
            return empty_like(stored, live, device=device)


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def empty_like(
    stored: TensorStorageMetadata,
    live: Any,
    shard_dims: Sequence[int | None] | None = None,
    *,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Return a new tensor for ``stored``, placed like ``live``, or on ``device`` if that is not a tensor."""
    dtype: Any = stored.properties.dtype
    if isinstance(live, DTensor):
        placements = live.placements
        if shard_dims is not None and live.shape != stored.size:
            whole = [None] * live.device_mesh.ndim
            kept = shard_dims if len(shard_dims) == len(whole) else whole
            placements = tuple(Replicate() if dim is None else Shard(dim) for dim in kept)
        return empty_dtensor(stored.size, dtype=dtype, device_mesh=live.device_mesh, placements=placements)
    if isinstance(live, torch.Tensor):
        device = "cpu" if live.is_meta else live.device
    try:
        return torch.empty(stored.size, dtype=dtype, device=device)
    except torch.OutOfMemoryError:  # next to the model and its optimizer
        return torch.empty(stored.size, dtype=dtype, device="cpu")


def _bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError) as error:
        raise bad(f"bytes are invalid: {error}") from error


def _numpy_scalar(body: Any) -> Any:
    name, data = body
    dtype = numpy_dtype(name)
    return np.frombuffer(_bytes(data), dtype=dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]


def _zone_of(body: Any) -> datetime.tzinfo | None:
    if body is None:
        return None
    if type(body) is str:
        if not ZONE.fullmatch(body):
            raise bad("a time zone is invalid")
        return ZoneInfo(body)
    days, seconds, microseconds, *name = body
    offset = datetime.timedelta(days, seconds, microseconds)
    return datetime.timezone(offset, *map(_text_of, name))


def _time_of(body: Any) -> datetime.time:
    hour, minute, second, microsecond, fold, zone = body
    return datetime.time(hour, minute, second, microsecond, _zone_of(zone), fold=fold)


def _text_of(node: Any) -> str:
    if type(node) is dict:
        return str(_bytes(node["str"]), "utf-8", "surrogatepass")
    return str(node)


def _stream(body: Any) -> io.BytesIO:
    data, at = body
    stream = io.BytesIO(_bytes(data))
    stream.seek(at)
    return stream


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
    "time": _time_of,
    "datetime": lambda body: datetime.datetime.combine(datetime.date(*body[:3]), _time_of(body[3:])),
    "timezone": _zone_of,
    "BytesIO": _stream,
    "Size": torch.Size,
    "device": torch.device,
    "path": lambda body: cast(PurePath, PATHS[body[0]](_text_of(body[1]))),
    "numpy.dtype": numpy_dtype,
    "numpy": _numpy_scalar,
    **{tag: known.__getitem__ for tag, known in CONSTANTS.items()},
}
_MAKERS: dict[str, Callable[[Decoder, Any, Any, int], Any]] = {
    "dict": Decoder._mapping,
    "map": Decoder._map,
    "paths": Decoder._map,
    "tuple": lambda self, *node: tuple(self._list(*node)),
    "deque": Decoder._deque,
    "set": Decoder._set,
    "frozenset": lambda self, *node: frozenset(self._set(*node)),
    "OrderedDict": lambda self, *node: self._with_dict(OrderedDict(), *node),
    "Counter": lambda self, *node: self._with_dict(Counter(), *node),
    "defaultdict": Decoder._defaultdict,
    "Namespace": lambda self, *node: self._filled(argparse.Namespace(), *node),
    "SimpleNamespace": lambda self, *node: self._filled(types.SimpleNamespace(), *node),
    "Generator": Decoder._generator,
    "enum": Decoder._enum,
    "flags": Decoder._flags,
    "namedtuple": Decoder._namedtuple,
    "dataclass": Decoder._dataclass,
    "ndarray": Decoder._ndarray,
    "objects": Decoder._objects,
    "tensor": Decoder._tensor,
    "subclass": Decoder._subclass,
}
