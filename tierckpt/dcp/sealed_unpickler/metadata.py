"""``.metadata`` of a DCP checkpoint, read without running code in it, and checked before use and at each save.

Invariants (tests cite them):
    S4  An accepted file has the value that ``pickle.load`` would return, in any version of torch. A field that a later
        torch added to a class of DCP is set, if its value is plain (``_check_further``).
    S5  An accepted file is safe to use: no path leaves the checkpoint's directory, every chunk is inside its tensor and
        the chunks fill it, each chunk has stored bytes, list positions do not exceed the number of entries. So an
        allocation by the metadata is at most as large as the items, or ``COMPACT_RATIO_MAX`` times that for a tensor
        subclass.
    S6  All else is rejected with one error: a global that is not in ``GLOBALS`` by format/pickle_machine.py. Work is
        linear in the size of the data, even if objects are shared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ...errors import UnsafeCheckpointError, UnsupportedTorchError
from ...format import pickle_machine as machine
from ...format.pickle_machine import Class, Function, InertObject, RefusedPickle
from ...torch_internals import MemoryFormatEncoding, StorageInfo
from ..bulk_objects import gc_paused, index_of
from ..metadata_encoder import encode, renamed

try:
    from ...torch_internals import OldMemoryFormatEncoding, OldTensorProperties
except UnsupportedTorchError:  # then today's class replaces that before torch 2.3
    OldMemoryFormatEncoding, OldTensorProperties = MemoryFormatEncoding, TensorProperties  # type: ignore[assignment]

METADATA_BYTES_MAX = 1 << 31
ELEMENTS_MAX = 1 << 50
DEPTH_MAX = 100
DIMENSIONS_MAX = 64
"""Shared sizes are compared at each reference, so their length is bounded (S6)."""
LIST_ITEMS_MIN = 1 << 16
COMPACT_BYTES_MIN = 512
COMPACT_RATIO_MAX = 1024
"""One-bit weights with dtype float64 are stored in a 64th of their bytes."""
HASH_COLLISIONS_MAX = 100

_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"

_Made = TypeVar("_Made")
_PLAIN = frozenset({str, int, float, bool, type(None), bytes, torch.Size, torch.dtype})
_PATH = frozenset({str, int})
LATER_FIELDS_MAX = 64
LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def load_metadata(data: bytes, *, where: str, partial: bool = False) -> Metadata:
    """Return the metadata in ``data``, as ``pickle.load`` does for DCP's output. No code in it runs.

    ``partial``: it is the metadata of one rank, which has only its own chunks.

    Raises:
        UnsafeCheckpointError: it is damaged, names a global that is not data, or has impossible values (S5).
    """
    with _refusing(where), gc_paused():
        return MetadataBuilder(len(data), partial).metadata(_parse(data))


@contextlib.contextmanager
def _refusing(where: str) -> Iterator[None]:
    try:
        yield
    except RefusedPickle as error:
        message = f"{where} is refused: {error}"
        raise unsafe_error(message, error.global_name, file=where) from None
    except Exception as error:  # whatever else invalid values raise
        raise unsafe_error(f"{where} is refused: {type(error).__name__}: {error}", file=where) from error


def unsafe_error(message: str, wanted: str = "", **context: Any) -> UnsafeCheckpointError:
    if wanted.startswith("torch."):
        hint = (
            f"If a PyTorch newer than {torch.__version__} wrote it, use a tierckpt newer than {_version()} that was "
            "released after that PyTorch, or the PyTorch that wrote it; otherwise the file is damaged: use another "
            "copy or an older step"
        )
    elif wanted:
        hint = (
            "A checkpoint that you wrote yourself, with classes of your own in its metadata, is read with "
            "trust_pickle=True, which runs any code that it names; never use that for a checkpoint of unknown origin, "
            "which may have been made to do harm"
        )
    else:
        hint = "It is damaged, or made to do harm: use another copy or an older step"
    return UnsafeCheckpointError(message, hint=hint, wanted=wanted or None, **context)


def _version() -> str:
    from ... import __version__

    return __version__


def _parse(data: bytes) -> Any:
    if len(data) > METADATA_BYTES_MAX:
        raise RefusedPickle(f"{len(data)} bytes is more than any metadata has")
    paths, sizes = _Paths(len(data)), _DistinctHashes("sizes")
    bounded = {name: paths.spent_on(make) for name, make in _PATHS.items()}
    known = {**GLOBALS, **bounded, ("torch", "Size"): Function(lambda numbers: sizes.add(_size(numbers)))}
    return machine.run(data, known, keys=(MetadataIndex,))


# --- the functions metadata may call: arguments can be anything. Results are checked later, unless here ---


def _build_index(fqn: Any, offset: Any, index: Any) -> MetadataIndex:
    """The index is a key before any other check."""
    fqn = _text(fqn, "a name")
    if offset is not None and type(offset) is not torch.Size:
        raise RefusedPickle(f"the offset of {fqn:.200} is no size")
    return index_of(fqn, offset, _optional(index, int, "an index"))


def _storage(path: Any, offset: Any, length: Any, transforms: Any = None) -> StorageInfo:
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise RefusedPickle("the place of an item is not a number from 0")
    return StorageInfo(_text(path, "a path"), offset, length, transforms)


def _size(numbers: Any) -> torch.Size:
    is_list = type(numbers) in (tuple, list)
    if is_list and len(numbers) > DIMENSIONS_MAX:
        raise RefusedPickle(f"a size has {len(numbers)} dimensions")
    if not is_list or (numbers and (set(map(type, numbers)) != {int} or min(numbers) < 0)):
        raise RefusedPickle("a size is not made of numbers from 0")
    return torch.Size(numbers)


class _DistinctHashes:
    """Keys of dicts: a tuple's hash has no secret.

    A file of a few MB can have 100,000 sizes with one hash, and a dict of those takes hours (S6).
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._first: dict[int, Any] = {}
        self._clashes = 0

    def add(self, key: _Made) -> _Made:
        if self._first.setdefault(hash(key), key) != key:
            self._clashes += 1
            if self._clashes > HASH_COLLISIONS_MAX:
                raise RefusedPickle(f"its {self._what} are made to share a hash")
        return key


def _layout(name: Any) -> torch.layout:
    if type(name) is not str or name not in LAYOUTS:
        raise RefusedPickle("a layout that torch does not have")
    return LAYOUTS[name]


class _Members(Function):
    """Replaces an Enum of DCP: returns its members, including later ones."""

    __slots__ = ("kind",)

    def __init__(self, kind: type[Enum]) -> None:
        super().__init__(self.member)
        self.kind = kind

    def member(self, value: Any) -> Enum:
        if type(value) is not int or value not in [member.value for member in self.kind]:
            raise self._unknown(value)
        return self.kind(value)

    def named(self, name: Any) -> Enum:
        if type(name) is not str or name not in self.kind.__members__:
            raise self._unknown(name)
        return self.kind[name]

    def _unknown(self, member: Any) -> RefusedPickle:
        wanted = f"{self.kind.__module__}.{self.kind.__qualname__}"
        return RefusedPickle(f"{member!r:.100} is no member of {wanted} in torch {torch.__version__}", wanted)


def _member(owner: Any, name: Any) -> Enum:
    """``getattr`` for Enums only: some Pythons pickle members by it."""
    if type(owner) is not _Members:
        raise RefusedPickle(
            "it refers to 'builtins.getattr', which is not part of any checkpoint's metadata", "builtins.getattr"
        )
    return owner.named(name)


class _Paths:
    """The paths of one file. Together they are no longer than it is (S6)."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def spent_on(self, make: Callable[..., Any]) -> Function:
        def made(*parts: Any) -> Any:
            self._budget -= 1 + len(parts) + sum(map(len, _strings(parts)))
            if self._budget < 0:
                raise RefusedPickle(_REPEATS)
            return make(*parts)

        return Function(made)


def _strings(parts: Any) -> Any:
    if not all(type(part) is str for part in parts):
        raise RefusedPickle("a path is not made of strings")
    return parts


_PATHS: dict[tuple[str, str], Callable[..., Any]] = {
    (module, name): PureWindowsPath if "Windows" in name else Path
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
_REPEATS = "it says the same things over and over"


def _globals() -> dict[tuple[str, str], Any]:
    """Every global that metadata may name, except paths and sizes: an exact table, without lookups in modules."""
    dtypes = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return {
        **dtypes,
        **{(kind.__module__, kind.__name__): _CLASSES[kind] for kind in _CLASSES},
        (_OLD_METADATA, "TensorProperties"): _CLASSES[OldTensorProperties],
        (_METADATA, "_MEM_FORMAT_ENCODING"): _Members(MemoryFormatEncoding),
        (_OLD_METADATA, "MEM_FORMAT_ENCODING"): _Members(OldMemoryFormatEncoding),
        ("builtins", "getattr"): Function(_member),
        ("__builtin__", "getattr"): Function(_member),  # in protocols below 3
        ("torch.serialization", "_get_layout"): Function(_layout),
    }


FIELDS: dict[Any, frozenset[str]] = {
    BytesStorageMetadata: frozenset(),
    ChunkStorageMetadata: frozenset({"offsets", "sizes"}),
    Metadata: frozenset({"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}),
    MetadataIndex: frozenset({"fqn", "offset", "index"}),
    OldTensorProperties: frozenset(),
    StorageMeta: frozenset({"checkpoint_id", "save_id", "load_id", "modules"}),
    TensorProperties: frozenset(),
    TensorStorageMetadata: frozenset({"properties", "size", "chunks"}),
    StorageInfo: frozenset({"relative_path", "offset", "length", "transform_descriptors"}),
}

_CALLS: dict[Any, Any] = {
    MetadataIndex: _build_index,
    StorageInfo: _storage,
    TensorStorageMetadata: lambda properties, size, chunks: TensorStorageMetadata(properties, size, chunks),
}
_CLASSES: dict[Any, Class] = {kind: Class(kind.__name__, _CALLS.get(kind)) for kind in FIELDS}

_PROPERTIES = (torch.dtype, torch.layout, bool, Enum, bool)
"""Since torch 2.15 the strides follow."""
_STATE_LENGTHS = {kind: len(cast(Any, kind)().__getstate__()) for kind in (TensorProperties, OldTensorProperties)}
"""A later torch may have written more."""
_HAS_STRIDES = {kind: "strides" in {field.name for field in dataclasses.fields(kind)} for kind in _STATE_LENGTHS}

HAS_LATER_FIELDS = any(
    {field.name for field in dataclasses.fields(kind)} - FIELDS[kind] for kind in (MetadataIndex, StorageInfo)
)

GLOBALS = _globals()


# --- from records to DCP's classes ------------------------------------------------------------------------------


class MetadataBuilder:
    """Makes the real objects and checks each. ``budget`` bounds the visited objects by the file's length (S6)."""

    def __init__(self, budget: int, partial: bool) -> None:
        self._budget = budget
        self._partial = partial
        # The source objects are kept, so that no other object gets their id.
        self._properties: dict[int, tuple[Any, TensorProperties]] = {}
        self._chunks: dict[tuple[int, torch.Size], tuple[Any, ChunkStorageMetadata]] = {}
        self._paths: set[str] = set()
        self._indices = _DistinctHashes("indices")

    def metadata(self, record: Any) -> Metadata:
        state, further = self._state(record, Metadata, "state_dict_metadata")
        entries = _container(state["state_dict_metadata"], "state_dict_metadata", dict)
        storage, planner = state.get("storage_data"), state.get("planner_data")
        built = {_text(fqn, "a name"): self._entry(fqn, entry) for fqn, entry in entries.items()}
        if storage is not None:
            storage = self.places(_container(storage, "storage_data", dict))
            check_stored(built, storage)
        self._check_plain(planner, "planner_data")
        check_positions(planner)
        meta = state.get("storage_meta")
        made = Metadata(
            state_dict_metadata=built,
            planner_data=planner,
            storage_data=storage,
            storage_meta=None if meta is None else self._storage_meta(meta),
            version=_optional(state.get("version"), str, "version"),
        )
        return _with_extra_fields(made, further)

    def _entry(self, fqn: str, record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if type(record) is TensorStorageMetadata:
            entry = record
        elif type(record) is InertObject and record.kind is _CLASSES[BytesStorageMetadata]:
            _, further = self._state(record, BytesStorageMetadata)
            return _with_extra_fields(BytesStorageMetadata(), further)
        else:
            state, further = self._state(record, TensorStorageMetadata, "properties", "size", "chunks")
            entry = _with_extra_fields(
                TensorStorageMetadata(state["properties"], state["size"], state["chunks"]), further
            )
        size, chunks = _sizes(entry.size, fqn), entry.chunks
        elements = math.prod(size)
        if elements > ELEMENTS_MAX:
            raise RefusedPickle(f"{fqn:.200} has {elements} elements")
        if type(chunks) is not list:
            raise RefusedPickle(f"{fqn:.200} has no list of chunks")
        self.spend(1 + len(chunks))
        entry.chunks = [self._chunk(chunk, size, fqn) for chunk in chunks]
        if not self._partial and sum(math.prod(chunk.sizes) for chunk in entry.chunks) < elements:
            raise RefusedPickle(f"the chunks of {fqn:.200} do not fill it")
        entry.properties = self._tensor_properties(entry.properties)
        strides = getattr(entry.properties, "strides", None)
        if strides is not None and len(strides) != len(size):
            raise RefusedPickle(f"{fqn:.200} has {len(size)} dimensions and {len(strides)} strides")
        return entry

    def places(self, storage: dict[Any, Any]) -> dict[MetadataIndex, StorageInfo]:
        if {MetadataIndex}.issuperset(map(type, storage)) and {StorageInfo}.issuperset(map(type, storage.values())):
            for info in storage.values():
                self._stored(info)
            return storage
        return {self._key(key): self._stored(value) for key, value in storage.items()}

    def _stored(self, record: Any) -> StorageInfo:
        if type(record) is StorageInfo:
            info = record
        else:
            state, further = self._state(record, StorageInfo, "relative_path", "offset", "length")
            names = ("relative_path", "offset", "length", "transform_descriptors")
            info = _with_extra_fields(_storage(*map(state.get, names)), further)
        if info.relative_path not in self._paths:
            self._paths.add(relative_of(info.relative_path))
        if info.transform_descriptors is not None:
            self.spend(len(_container(info.transform_descriptors, "transform_descriptors", list, tuple)))
            _strings(info.transform_descriptors)
        return info

    def _check_plain(self, value: Any, what: str, depth: int = 0) -> None:
        if type(value) in _PLAIN:
            return
        if depth > DEPTH_MAX:
            raise RefusedPickle(f"{what} is nested more than {DEPTH_MAX} deep")
        if type(value) is dict:
            if not _PATH.issuperset(map(type, value)):
                raise RefusedPickle(f"a key of {what} is neither a string nor an integer")
            value = value.values()
        elif type(value) not in (tuple, list):
            raise RefusedPickle(f"{what} holds more than plain data")
        self.spend(1 + len(value))
        if not _PLAIN.issuperset(map(type, value)):
            for item in value:
                self._check_plain(item, what, depth + 1)

    def _check_further(self, fields: Mapping[Any, Any], kind: Any) -> None:
        """Check a field of a later torch: numbers, strings, dtypes and the like, or tuples of them."""
        for count, (name, value) in enumerate(fields.items(), start=1):
            items = value if type(value) is tuple else (value,)
            if count > LATER_FIELDS_MAX or len(items) > LATER_FIELDS_MAX or not _PLAIN.issuperset(map(type, items)):
                raise RefusedPickle(
                    f"a {kind.__name__} has a field ({name}) that torch {torch.__version__} and tierckpt {_version()} "
                    "do not know, and its value is not plain data",
                    f"{kind.__module__}.{kind.__qualname__}",
                )
            self.spend(1 + len(items))

    def spend(self, count: int) -> None:
        """Bound the visits, also of shared objects: they may never end."""
        self._budget -= count
        if self._budget < 0:
            raise RefusedPickle(_REPEATS)

    def _state(self, record: Any, kind: Any, *needed: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
        if type(record) is not InertObject or record.kind is not _CLASSES[kind]:
            raise RefusedPickle(f"it has another object where a {kind.__name__} belongs")
        state = {} if record.state is None else record.state
        if type(state) is not dict:
            raise RefusedPickle(f"the state of a {kind.__name__} is not its fields")
        for name in needed:
            if name not in state:
                raise RefusedPickle(f"a {kind.__name__} has no {name}")
        if FIELDS[kind].issuperset(state):
            return state, {}
        further = {name: value for name, value in state.items() if name not in FIELDS[kind]}
        if not all(type(name) is str and name.isidentifier() and not name.startswith("__") for name in further):
            raise RefusedPickle(f"a {kind.__name__} has a field that no class can have")
        self._check_further(further, kind)
        return state, further

    def _key(self, record: Any) -> MetadataIndex:
        if type(record) is MetadataIndex:
            return record
        state, further = self._state(record, MetadataIndex, "fqn")
        made = _with_extra_fields(_build_index(state["fqn"], state.get("offset"), state.get("index")), further)
        return self._indices.add(made) if further else made

    def _chunk(self, record: Any, size: torch.Size, fqn: str) -> ChunkStorageMetadata:
        if (known := self._chunks.get((id(record), size))) is not None:
            return known[1]
        state, further = self._state(record, ChunkStorageMetadata, "offsets", "sizes")
        offsets, sizes = _sizes(state["offsets"], fqn), _sizes(state["sizes"], fqn)
        if not len(offsets) == len(sizes) == len(size):
            raise RefusedPickle(f"a chunk of {fqn:.200} has another number of dimensions")
        # Ranks without rows of a tensor write empty chunks anywhere.
        if any(at + count > end for at, count, end in zip(offsets, sizes, size, strict=True)) and 0 not in sizes:
            raise RefusedPickle(f"a chunk of {fqn:.200} is outside it")
        made = _with_extra_fields(ChunkStorageMetadata(offsets, sizes), further)
        self._chunks[id(record), size] = self._chunks[id(made), size] = record, made
        return made

    def _tensor_properties(self, record: Any) -> Any:
        if (known := self._properties.get(id(record))) is not None:
            return known[1]
        of_old = type(record) is InertObject and record.kind is _CLASSES[OldTensorProperties]
        kind: Any = OldTensorProperties if of_old else TensorProperties
        state = record.state if type(record) is InertObject and record.kind is _CLASSES[kind] else None
        count = len(_PROPERTIES)
        if type(state) is not tuple or not all(map(isinstance, state[:count], _PROPERTIES)) or len(state) < count:
            raise RefusedPickle("the properties of a tensor are malformed")
        if _HAS_STRIDES[kind] and len(state) > count and not _are_strides(state[count]):
            raise RefusedPickle("the strides of a tensor are not numbers from 0")
        self._check_further(dict(enumerate(state[count:], count + 1)), kind)
        made = kind.__new__(kind)
        made.__setstate__(state[: _STATE_LENGTHS[kind]])
        self._properties[id(record)] = self._properties[id(made)] = record, made
        return made

    def _storage_meta(self, record: Any) -> StorageMeta:
        state, further = self._state(record, StorageMeta)
        place = state.get("checkpoint_id")
        if not isinstance(place, str | PurePath | None):
            raise RefusedPickle("the checkpoint's id is no path")
        made = StorageMeta(
            checkpoint_id=place,
            save_id=_optional(state.get("save_id"), str, "save_id"),
            load_id=_optional(state.get("load_id"), str, "load_id"),
            modules=list(_strings(_container(state.get("modules", []), "modules", list, tuple))),
        )
        return _with_extra_fields(made, further)


def _with_extra_fields(made: _Made, further: Mapping[str, Any]) -> _Made:
    for name, value in further.items():
        object.__setattr__(made, name, value)  # frozen classes too, as pickle does
    return made


# --- checks of values -------------------------------------------------------------------------------------------


def relative_of(path: Any) -> str:
    """Refuse a path that could lead out of the checkpoint's directory, on any store."""
    if type(path) is not str or any(character in path for character in "\\\0"):
        raise RefusedPickle("the path of a file is not acceptable")
    if any(part in {"", ".", ".."} for part in path.split("/")):
        raise RefusedPickle(f"the path {path[:200]!r} leads elsewhere")
    return path


def check_stored(entries: dict[str, Any], storage: dict[MetadataIndex, StorageInfo]) -> None:
    """Check that a chunk's bytes, or ``torch.save``'s of a subclass, are in its item."""
    needed: dict[int, dict[Any, int]] = {}
    for index, info in storage.items():
        entry = entries.get(index.fqn)
        if not isinstance(entry, TensorStorageMetadata) or entry.properties.layout is not torch.strided:
            continue
        item_bytes = entry.properties.dtype.itemsize
        if len(entry.chunks) == 1:
            [chunk] = entry.chunks
            size_bytes = math.prod(chunk.sizes) * item_bytes if chunk.offsets == index.offset else 0
        else:
            if id(entry) not in needed:
                of_entry = needed[id(entry)] = {}
                for chunk in entry.chunks:
                    of_entry[chunk.offsets] = max(math.prod(chunk.sizes) * item_bytes, of_entry.get(chunk.offsets, 0))
            size_bytes = needed[id(entry)].get(index.offset, 0)
        held = info.length * (COMPACT_RATIO_MAX if info.length >= COMPACT_BYTES_MIN else 1)
        if held < size_bytes and not info.transform_descriptors:
            raise RefusedPickle(f"a chunk of {index.fqn:.200} needs {size_bytes} bytes and has {info.length}")


def check_positions(planner_data: Any) -> None:
    """Loaders make lists of the length that paths of DCP's planner name."""
    if type(planner_data) is not dict:
        return
    longest: dict[tuple[Any, ...], int] = {}
    room = LIST_ITEMS_MIN + 16 * len(planner_data)
    for path in planner_data.values():
        if type(path) is not tuple or int not in set(map(type, path)) or not _PATH.issuperset(map(type, path)):
            continue
        if len(path) > DEPTH_MAX:
            raise RefusedPickle(f"planner_data has lists nested more than {DEPTH_MAX} deep")
        for depth, part in enumerate(path):
            if type(part) is int:
                if not 0 <= part < room:
                    raise RefusedPickle(f"planner_data has a list of {part} items")
                longest[path[:depth]] = max(longest.get(path[:depth], 0), part + 1)
    if sum(longest.values()) > room:
        raise RefusedPickle(f"planner_data has lists of {sum(longest.values())} items")


def _are_strides(value: Any) -> bool:
    if value is None:
        return True
    is_tuple = type(value) is tuple and len(value) <= DIMENSIONS_MAX
    return is_tuple and all(type(step) is int and 0 <= step <= ELEMENTS_MAX for step in value)


def _sizes(value: Any, fqn: str) -> torch.Size:
    if type(value) is not torch.Size:
        raise RefusedPickle(f"a size of {fqn:.200} is none")
    return value


def _text(value: Any, what: str) -> str:
    if type(value) is not str:
        raise RefusedPickle(f"{what} is not a string")
    return value


def _container(value: Any, what: str, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise RefusedPickle(f"{what} is not a {kinds[0].__name__}")
    return value


def _optional(value: Any, kind: type, what: str) -> Any:
    if value is not None and type(value) is not kind:
        raise RefusedPickle(f"{what} is not of type {kind.__name__}")
    return value


_verified: tuple[dict[str, Any], Any, bytes] = {}, None, b""
"""The newest verified metadata: a cached plan gives its objects to each save."""


def read_back(data: bytes, metadata: Metadata, *, where: str, partial: bool = False) -> None:
    """Raise the error of ``load_metadata`` for ``data``, the encoding of ``metadata``.

    Only changes since the last call are checked.
    """
    global _verified
    entries, planner = metadata.state_dict_metadata, metadata.planner_data
    known, known_planner, known_data = _verified
    if (made := renamed(data)) is not None and made[0] is known_data:
        with _refusing(where):
            for path in made[1]:
                relative_of(path)
        _verified = dict(entries), planner, data
        return
    new = {fqn: entry for fqn, entry in entries.items() if known.get(fqn) is not entry}
    has_further = HAS_LATER_FIELDS or not FIELDS[Metadata].issuperset(vars(metadata))
    if partial or has_further or planner is not known_planner or 2 * len(new) > len(entries):
        load_metadata(data, where=where, partial=partial)
        if not partial:
            _verified = dict(entries), planner, data
        return
    if new:
        load_metadata(encode(Metadata(new)), where=where)
    with _refusing(where), gc_paused():
        check_stored(entries, MetadataBuilder(len(data), partial).places(metadata.storage_data or {}))
    _verified = dict(entries), planner, data
