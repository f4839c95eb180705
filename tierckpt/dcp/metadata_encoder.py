"""DCP's metadata as bytes that stock DCP unpickles to the same objects, in few opcodes.

A load reads this file first, alone. So equal objects are written once, and others as calls of their classes.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from ..torch_internals import StorageInfo
from .bulk_objects import are_same


def encode(metadata: Metadata) -> bytes:
    """Return bytes that ``pickle.loads``, on any torch with DCP, turns into ``metadata``.

    Equal objects in ``metadata`` (properties, sizes, chunks) are one object afterwards.
    """
    global _last
    deduplicate(metadata)
    last, made = _last, _Encoded.of(metadata)
    data = last.with_names_of(made) if last is not None and made is not None else None
    if data is None:
        data = encode_uncached(metadata)
    if made is not None:
        made.data = data
    _last = made
    return data


def renamed(data: bytes) -> tuple[bytes, set[str]] | None:
    """Return the previous encoding and file names if ``data`` differs from it only in names; else None."""
    last = _last
    if last is None or last.data is not data or last.like is None:
        return None
    return last.like, set(last.paths)


def encode_plan(metadata: Metadata) -> bytes:
    """Encode without storage data, for a process of this machine."""
    global _last_plan
    deduplicate(metadata)
    if metadata.storage_data or metadata.storage_meta is not None:
        return encode_uncached(metadata)
    made = [metadata.planner_data, *metadata.state_dict_metadata.values()]
    known, data = _last_plan
    if not are_same(made, known) or not data:
        data = encode_uncached(metadata)
        _last_plan = made, data
    return data


def encode_uncached(metadata: Metadata) -> bytes:
    stream = io.BytesIO()
    _MetadataPickler(stream, pickle.DEFAULT_PROTOCOL).dump(metadata)
    return stream.getvalue()


class _Encoded:
    def __init__(self, metadata: Metadata, places: list[StorageInfo], names: list[str], rest: dict[str, Any]) -> None:
        self.data = b""
        self.like: bytes | None = None
        self._names, self._rest = names, rest
        self._same = [metadata.planner_data, *metadata.state_dict_metadata.values(), *(metadata.storage_data or ())]
        self.paths = list(map(operator.attrgetter("relative_path"), places))
        self._at = [list(map(operator.attrgetter(name), places)) for name in ("offset", "length")]

    @classmethod
    def of(cls, metadata: Metadata) -> _Encoded | None:
        """Return None for metadata with anything that is not compared here."""
        places, of_save = list((metadata.storage_data or {}).values()), metadata.storage_meta
        if not {StorageInfo}.issuperset(map(type, places)) or not isinstance(of_save, StorageMeta):
            return None
        names, rest = dict(vars(of_save)), dict(vars(metadata))
        known = [names.pop("checkpoint_id", None), names.pop("save_id", None)]
        for name in ("planner_data", "state_dict_metadata", "storage_data", "storage_meta"):
            rest.pop(name, None)
        is_plain = all(place.transform_descriptors is None for place in places)
        if not is_plain or not all(isinstance(name, str) for name in known) or any(map(bool, names.values())):
            return None
        return cls(metadata, places, known, rest)

    def with_names_of(self, new: _Encoded) -> bytes | None:
        """Make the bytes of ``new`` from these; None if more than names of equal lengths differ."""
        if not are_same(self._same, new._same) or (self._at, self._rest) != (new._at, new._rest):
            return None
        renamed = dict(zip(self.paths, new.paths, strict=True))
        if list(map(renamed.__getitem__, self.paths)) != new.paths:
            return None
        data = self.data
        for old, name in [*renamed.items(), *zip(self._names, new._names, strict=True)]:
            before, after = _short_text(old), _short_text(name)
            if before != after:
                # Frames of a pickle contain their lengths, and a name that occurs twice may mean something else.
                if len(before) != len(after) or data.count(before) != 1:
                    return None
                data = data.replace(before, after)
        new.like = self.data
        return data


def _short_text(text: str) -> bytes:
    encoded = text.encode()
    return b"\x8c" + bytes([len(encoded)]) + encoded if len(encoded) < 256 else encoded


_last: _Encoded | None = None
_last_plan: tuple[list[Any], bytes] = [], b""


def _storage(info: StorageInfo) -> tuple[Any, ...]:
    place = (info.relative_path, info.offset, info.length)
    transforms = info.transform_descriptors
    return StorageInfo, place if transforms is None else (*place, transforms)


_CALLS: dict[type, tuple[Callable[[Any], tuple[Any, ...]], tuple[str, ...]]] = {
    MetadataIndex: (lambda index: (MetadataIndex, (index.fqn, index.offset, index.index)), ("fqn", "offset", "index")),
    StorageInfo: (_storage, ("relative_path", "offset", "length", "transform_descriptors")),
    TensorStorageMetadata: (
        lambda stored: (TensorStorageMetadata, (stored.properties, stored.size, stored.chunks)),
        ("properties", "size", "chunks"),
    ),
}


class _MetadataPickler(pickle.Pickler):
    """Only these exact classes are written as calls: others may have more fields."""

    dispatch_table = {
        **copyreg.dispatch_table,
        **{
            kind: call
            for kind, (call, names) in _CALLS.items()
            if tuple(field.name for field in dataclasses.fields(kind)) == names
        },
    }


def deduplicate(metadata: Metadata) -> None:
    """Replace equal properties, sizes and chunks by one object, which is never modified."""
    stored_ones, indexes = [*metadata.state_dict_metadata.values()], [*(metadata.storage_data or ())]
    if are_same(stored_ones, _last_shared[0]) and (not indexes or are_same(indexes, _last_shared[1])):
        return
    properties: dict[Any, Any] = {}
    sizes: dict[Any, Any] = {}
    chunks: dict[Any, ChunkStorageMetadata] = {}
    for stored in stored_ones:
        if isinstance(stored, TensorStorageMetadata):
            stored.properties = _shared(stored.properties, properties)
            stored.size = sizes.setdefault(stored.size, stored.size)
            stored.chunks = [_shared(chunk, chunks) for chunk in stored.chunks]
    for chunk in chunks.values():
        _share_size(chunk, "offsets", sizes)
        _share_size(chunk, "sizes", sizes)
    for index in indexes:  # a handoff describes a save that has not been written yet
        _share_size(index, "offset", sizes)
    _last_shared[:] = stored_ones, indexes or _last_shared[1]


_last_shared: list[list[Any]] = [[], []]


def _shared(one: Any, known: dict[Any, Any]) -> Any:
    try:
        return known.setdefault(tuple(vars(one).values()), one)
    except TypeError:  # a later torch added a field without a hash
        return one


def _share_size(owner: Any, name: str, sizes: dict[Any, Any]) -> None:
    """Comparison and hash of ``owner``, frozen or not, do not change."""
    fields = vars(owner)
    if (size := fields.get(name)) is not None:
        fields[name] = sizes.setdefault(size, size)
