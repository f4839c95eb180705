"""The handoff file: one rank's staged state, for the agent to write if the rank dies before it is on the SSD.

A pickle for a process of the same user and node, in unnamed memory: no checkpoint contains one.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import pickle
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from ...arena.memory import Kind, Memory
from ...format.manifest import FileEntry
from ...save.shard_plan import Image, Shard, ShardRecord
from ...stores.access import cloud_environment
from ...torch_internals import StorageInfo
from .. import split
from ..bulk_objects import are_same
from ..items import item_format

_VALID, _REVOKED = b"\1", b"\0"


@dataclass(frozen=True, slots=True)
class PendingShard:
    """A shard's records, by columns: faster to pickle than an object per record."""

    name: str
    offsets: array[int]
    kinds: list[tuple[torch.dtype, tuple[int, ...]]]
    kind_of: array[int]
    """Index in ``kinds``; -1: an object with its bytes in ``data``."""
    memories: list[tuple[str, int]]
    memory_of: array[int]
    """Index in ``memories``; -1: no bytes there."""
    addresses: array[int]
    data: list[bytes]
    image: tuple[str, int, int] | None
    """Memory, offset in it, and size."""

    def records(self, memories: Mapping[str, Memory]) -> Iterator[ShardRecord]:
        data = iter(self.data)
        frames: list[Any] = [item_format.frame(dtype, shape) for dtype, shape in self.kinds]
        shifts = [memories[name].address - address for name, address in self.memories]
        for offset, kind, memory, address in zip(
            self.offsets, self.kind_of, self.memory_of, self.addresses, strict=True
        ):
            if kind < 0:
                yield ShardRecord(offset, next(data))
            else:
                yield ShardRecord(
                    offset, frames[kind].head, frames[kind], address + shifts[memory] if memory >= 0 else 0
                )


@dataclass(frozen=True, slots=True)
class Results:
    """DCP's write results of the records, by columns."""

    indexes: bytes
    """Pickled columns. Equal at each save of a plan."""
    files: list[tuple[str, int]]
    starts: array[int]
    sizes: array[int]

    @classmethod
    def of(cls, results: Sequence[WriteResult]) -> Results:
        """Each record must be in one piece of one file."""
        stored = [result.storage_data for result in results]
        files = groupby(map(operator.attrgetter("relative_path"), stored))
        return cls(
            _pickled_indexes([result.index for result in results]),
            [(name, sum(1 for _ in some)) for name, some in files],
            array("q", map(operator.attrgetter("offset"), stored)),
            array("q", map(operator.attrgetter("length"), stored)),
        )

    def list(self) -> list[WriteResult]:
        names = chain.from_iterable(repeat(name, count) for name, count in self.files)
        offsets, parts, fqns = pickle.loads(self.indexes)
        indexes = map(MetadataIndex, fqns, offsets, parts)
        return [
            WriteResult(index, size, StorageInfo(name, start, size))
            for index, name, start, size in zip(indexes, names, self.starts, self.sizes, strict=True)
        ]


_last_indexes: tuple[list[MetadataIndex], bytes] = [], b""


def _pickled_indexes(indexes: list[MetadataIndex]) -> bytes:
    """Return the previous columns if the indexes are the same objects."""
    global _last_indexes
    known, data = _last_indexes
    if not data or not are_same(known, indexes):
        shared: dict[torch.Size | None, torch.Size | None] = {}
        offsets = [shared.setdefault(index.offset, index.offset) for index in indexes]
        # Names last: a pickle refers to its first 256 objects in two bytes.
        columns = offsets, [index.index for index in indexes], [index.fqn for index in indexes]
        data = pickle.dumps(columns, pickle.HIGHEST_PROTOCOL)
        _last_indexes = indexes, data
    return data


@dataclass(frozen=True)
class SaveHandoff:
    """``settings`` and ``environment`` (cloud variables, with secrets) are the trainer's: the agent may have others.
    ``kinds`` has the backing of each memory. ``files`` are the rank's shards if they are durable.
    """

    rank: int
    world_size: int
    is_coordinator: bool
    use_collectives: bool
    token: str
    uri: str
    settings: str = field(repr=False)
    save_id: str
    replaces: tuple[str, ...]
    epoch: str
    """The handoff commits only in this epoch of the run."""
    shards: tuple[PendingShard, ...]
    results: Results
    parts: tuple[split.Part, ...]
    metadata: bytes | None
    kinds: Mapping[str, Kind]
    files: tuple[FileEntry, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=cloud_environment, repr=False)
    notes: Mapping[str, str | int | bool] = field(default_factory=dict)

    def durable(self, files: tuple[FileEntry, ...]) -> SaveHandoff:
        return dataclasses.replace(self, shards=(), kinds={}, files=files)

    def shards_in(self, directory: Path, memories: Mapping[str, Memory]) -> list[Shard]:
        shards = []
        for shard in self.shards:
            image = None
            if shard.image is not None:
                name, offset, size_bytes = shard.image
                image = Image(memories[name], memories[name].address + offset, size_bytes)
            shards.append(Shard(directory / shard.name, list(shard.records(memories)), image))
        return shards

    def written(self) -> BinaryIO:
        """Return the handoff in unnamed memory, to be passed by descriptor; ``revoke`` invalidates it."""
        file = os.fdopen(os.memfd_create("tierckpt-handoff", os.MFD_CLOEXEC), "wb")
        file.write(_VALID)
        pickle.dump(self, file, pickle.HIGHEST_PROTOCOL)
        file.flush()
        return file


def revoke(written: BinaryIO) -> None:
    """Invalidate a handoff for all its owners before its memory is reused. Cannot fail."""
    os.pwrite(written.fileno(), _REVOKED, 0)


def read(descriptor: int) -> SaveHandoff | None:
    """Read and close ``descriptor``; None if the handoff was revoked."""
    os.lseek(descriptor, 0, os.SEEK_SET)  # the writer shares the position
    with os.fdopen(descriptor, "rb") as file:
        if file.read(1) != _VALID:
            return None
        handoff: SaveHandoff = pickle.load(file)
    return handoff


def describe(shards: Sequence[Shard]) -> tuple[tuple[PendingShard, ...], dict[str, Memory]] | None:
    """Describe the shards and their memory; None if some memory cannot be held."""
    memories: dict[str, Memory] = {}
    described = []
    for shard in shards:
        found = _describe_shard(shard, memories)
        if found is None:
            return None
        described.append(found)
    return tuple(described), memories


def _describe_shard(shard: Shard, memories: dict[str, Memory]) -> PendingShard | None:
    def name_of(memory: Memory) -> str:
        """Return a key that is equal for all processes with the memory open, and unique while any has."""
        status = os.fstat(cast(int, memory.fd))
        name = f"{status.st_dev}-{status.st_ino}"
        memories[name] = memory
        return name

    records, image = shard.records, shard.image
    loose = [record for record in records if record.lease is None or record.fetch is not None]
    if any(record.frame is not None and record.size_bytes for record in loose):
        return None
    leases: list[Any] = list(map(operator.attrgetter("lease"), records))
    frames: list[Any] = list(map(operator.attrgetter("frame"), records))
    lease_by_id, frame_by_id = ({id(one): one for one in some if one is not None} for some in (leases, frames))
    held = [lease.memory for lease in lease_by_id.values()]
    if any(memory.fd is None for memory in held):
        return None
    at = {key: number for number, key in enumerate(lease_by_id)} | {id(None): -1}
    kind_at = {key: number for number, key in enumerate(frame_by_id)} | {id(None): -1}
    return PendingShard(
        shard.path.name,
        array("q", map(operator.attrgetter("offset"), records)),
        [(frame.dtype, frame.shape) for frame in frame_by_id.values()],
        array("q", map(kind_at.__getitem__, map(id, frames))),
        [(name_of(memory), memory.address) for memory in held],
        array("q", map(at.__getitem__, map(id, leases))),
        array("q", map(operator.attrgetter("address"), records)),
        [bytes(record.head) for record in records if record.frame is None],
        None if image is None else (name_of(image.memory), image.address - image.memory.address, image.size_bytes),
    )
