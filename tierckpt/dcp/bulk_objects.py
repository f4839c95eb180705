"""Makes the thousands of small objects of a save or load: without garbage collection, and without ``__init__``.

DCP's frozen objects set each field by a call in ``__init__``, which takes twice as long. A class of a later torch with
other fields is called as usual.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.storage import WriteResult

_lock = threading.Lock()
has_frozen = False
"""Counting frozen objects visits each."""


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector in this block, for short stretches without I/O.

    The new objects get into the oldest generation; the next full collection frees young garbage. A job that freezes
    (gc.freeze) is not changed.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _promote_objects()
            gc.enable()


def _promote_objects() -> None:
    global has_frozen
    # Without the lock another thread does the same; a child forked meanwhile never gets it.
    if has_frozen or not _lock.acquire(blocking=False):
        return
    try:
        has_frozen = gc.get_freeze_count() > 0  # objects that the job froze must stay frozen
        if not has_frozen:
            gc.freeze()  # moves all generations to the permanent one,
            gc.unfreeze()  # and from there to the oldest
    finally:
        _lock.release()


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether both have the very same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _has_fields(kind: Any, *names: str) -> bool:
    return tuple(field.name for field in dataclasses.fields(kind)) == names


KNOWS_INDEX = _has_fields(MetadataIndex, "fqn", "offset", "index")
KNOWS_READ = _has_fields(ReadItem, "type", "dest_index", "dest_offsets", "storage_index", "storage_offsets", "lengths")
KNOWS_RESULT = _has_fields(WriteResult, "index", "size_in_bytes", "storage_data")
_new_index, _new_read, _new_result = MetadataIndex.__new__, ReadItem.__new__, WriteResult.__new__


def index_of(fqn: str, offset: torch.Size | None, index: int | None) -> MetadataIndex:
    """Shares ``offset``, which the class would copy."""
    if not KNOWS_INDEX:
        return MetadataIndex(fqn, offset, index)
    made = _new_index(MetadataIndex)
    fields = made.__dict__
    fields["fqn"], fields["offset"], fields["index"] = fqn, offset, index
    return made


def read_whole(index: MetadataIndex, offsets: torch.Size, lengths: torch.Size) -> ReadItem:
    if not KNOWS_READ:
        return ReadItem(LoadItemType.TENSOR, index, offsets, index, offsets, lengths)
    made = _new_read(ReadItem)
    fields = made.__dict__
    fields["type"], fields["lengths"] = LoadItemType.TENSOR, lengths
    fields["dest_index"] = fields["storage_index"] = index
    fields["dest_offsets"] = fields["storage_offsets"] = offsets
    return made


def result_of(index: MetadataIndex, size_bytes: int, stored: Any) -> WriteResult:
    if not KNOWS_RESULT:
        return WriteResult(index, size_bytes, stored)
    made = _new_result(WriteResult)
    fields = made.__dict__
    fields["index"], fields["size_in_bytes"], fields["storage_data"] = index, size_bytes, stored
    return made
