"""DCP's metadata as bytes: what stock DCP unpickles to the same objects, in as few opcodes as there can be.

Whoever reads a checkpoint reads this first, alone, and one opcode after the other (``sealed/machine.py``). So what is
equal is written once, and of what there is for each tensor an object is written as a call of its class, where a pickle
has an empty object, a dict with the names of its fields, and their values.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from ..torch_internals import StorageInfo


def encode(metadata: Metadata) -> bytes:
    """Return what ``pickle.loads``, on any torch that has DCP, makes ``metadata`` of.

    What is equal in ``metadata`` (properties, sizes, chunks) is one object afterwards.
    Cost: 4 microseconds for each tensor.
    """
    share(metadata)
    stream = io.BytesIO()
    _Pickler(stream, pickle.DEFAULT_PROTOCOL).dump(metadata)
    return stream.getvalue()


def _index(index: MetadataIndex) -> tuple[Any, ...]:
    return MetadataIndex, (index.fqn, index.offset, index.index)


def _storage(info: StorageInfo) -> tuple[Any, ...]:
    place = (info.relative_path, info.offset, info.length)
    transforms = info.transform_descriptors
    return StorageInfo, place if transforms is None else (*place, transforms)


def _tensor(stored: TensorStorageMetadata) -> tuple[Any, ...]:
    return TensorStorageMetadata, (stored.properties, stored.size, stored.chunks)


_CALLS: dict[type, tuple[Callable[[Any], tuple[Any, ...]], tuple[str, ...]]] = {
    MetadataIndex: (_index, ("fqn", "offset", "index")),
    StorageInfo: (_storage, ("relative_path", "offset", "length", "transform_descriptors")),
    TensorStorageMetadata: (_tensor, ("properties", "size", "chunks")),
}


class _Pickler(pickle.Pickler):
    """Exactly these classes are written as calls. A subclass, or the class of a later torch, may have more fields."""

    dispatch_table = {
        **copyreg.dispatch_table,
        **{
            kind: call
            for kind, (call, names) in _CALLS.items()
            if tuple(field.name for field in dataclasses.fields(kind)) == names
        },
    }


def share(metadata: Metadata) -> None:
    """Have equal properties, sizes and chunks be one object: the pickle holds each once.

    It is half as long then, and whoever reads it builds as much less. What is shared nobody changes: DCP and we put
    other objects in its place.
    """
    properties: dict[Any, Any] = {}
    sizes: dict[Any, Any] = {}
    chunks: dict[Any, ChunkStorageMetadata] = {}
    for stored in metadata.state_dict_metadata.values():
        if isinstance(stored, TensorStorageMetadata):
            stored.properties = _shared(stored.properties, properties)
            stored.size = sizes.setdefault(stored.size, stored.size)
            stored.chunks = [_shared(chunk, chunks) for chunk in stored.chunks]
    for chunk in chunks.values():
        _share_size(chunk, "offsets", sizes)
        _share_size(chunk, "sizes", sizes)
    for index in metadata.storage_data or ():  # a handoff tells of a save that has not been written yet
        _share_size(index, "offset", sizes)


def _shared(one: Any, known: dict[Any, Any]) -> Any:
    try:
        return known.setdefault(tuple(vars(one).values()), one)
    except TypeError:  # a later torch has added a field that has no hash
        return one


def _share_size(owner: Any, name: str, sizes: dict[Any, Any]) -> None:
    """Put an equal size in its place: nothing changes by which ``owner``, frozen or not, is compared or hashed."""
    fields = vars(owner)
    if (size := fields.get(name)) is not None:
        fields[name] = sizes.setdefault(size, size)
