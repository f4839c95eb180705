"""The handoff file: what an agent needs to write one rank's staged state if the rank dies before it is on the SSD.

Holds where every record of the rank's shards is to be written and where its bytes lie in memory that the agent holds;
the coordinator's also holds DCP's metadata. Executed by ``dcp/handoff/finish.py``. A pickle of this process for a
process of the
same user and node, in memory that has no name and goes with its last holder: no checkpoint ever contains one.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from ...arena.memory import Kind, Memory
from ...format.manifest import FileEntry
from ...save.shard_plan import Image, Record, Shard
from ...stores.environment import cloud_environment
from ...torch_internals import StorageInfo
from .. import split
from ..items import item_format

_VALID, _REVOKED = b"\1", b"\0"


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of held memory: which, and from where on."""

    memory: str
    offset: int


@dataclass(frozen=True, slots=True)
class PendingShard:
    """A shard's records, one column for each thing to know of them: an object for each record takes longer to make and
    to pickle than ten thousands of small tensors take to write."""

    name: str
    offsets: list[int]
    """Of their heads, in the file."""
    dtypes: list[torch.dtype | None]
    """None: an object, whose bytes are in ``data``."""
    shapes: list[tuple[int, ...]]
    memories: list[str | None]
    """Which held memory the bytes of a tensor lie in; None when it has none."""
    starts: list[int]
    """And where there."""
    data: list[bytes]
    """Of objects, in order."""
    image: tuple[Place, int] | None

    def records(self, memories: Mapping[str, Memory]) -> Iterator[Record]:
        """As this process has to write them."""
        data = iter(self.data)
        bases = {name: memory.address for name, memory in memories.items()}
        columns = zip(self.offsets, self.dtypes, self.shapes, self.memories, self.starts, strict=True)
        for offset, dtype, shape, memory, start in columns:
            if dtype is None:
                yield Record(offset, next(data))
            else:
                frame: Any = item_format.frame(dtype, shape)
                yield Record(offset, frame.head, frame, bases[memory] + start if memory is not None else 0)


@dataclass(frozen=True, slots=True)
class Results:
    """What DCP is told of the records once they are written, in columns too."""

    names: list[str]
    offsets: list[torch.Size | None]
    parts: list[int | None]
    files: list[str]
    starts: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, results: Sequence[WriteResult]) -> Results:
        """Of what ``TierStorageWriter`` makes: a record is in one piece of one file."""
        shared: dict[torch.Size | None, torch.Size | None] = {}
        columns = cls([], [], [], [], [], [])
        for result in results:
            index, stored = result.index, result.storage_data
            columns.names.append(index.fqn)
            columns.offsets.append(shared.setdefault(index.offset, index.offset))
            columns.parts.append(index.index)
            columns.files.append(stored.relative_path)
            columns.starts.append(stored.offset)
            columns.sizes.append(result.size_in_bytes)
        return columns

    def list(self) -> list[WriteResult]:
        columns = zip(self.names, self.offsets, self.parts, self.files, self.starts, self.sizes, strict=True)
        return [
            WriteResult(MetadataIndex(name, offset, part), size, StorageInfo(file, start, size))
            for name, offset, part, file, start, size in columns
        ]


@dataclass(frozen=True)
class SaveHandoff:
    """One rank's, of ``world_size``.

    ``settings`` are the trainer's, as JSON, and ``environment`` what it knew of clouds, secrets among both: the agent
    may have been started by a process that knew others. ``kinds`` says what each held memory is backed by. ``files``
    are those of a rank whose shards are durable and with the mover: nothing of it is to be written any more.
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
    """Of the run on this node (``checkpoint/epoch.py``): in another one it is not committed."""
    shards: tuple[PendingShard, ...]
    results: Results
    parts: tuple[split.Part, ...]
    metadata: bytes | None
    """DCP's, pickled, of the coordinator."""
    kinds: Mapping[str, Kind]
    files: tuple[FileEntry, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=cloud_environment, repr=False)
    notes: Mapping[str, str | int | bool] = field(default_factory=dict)

    def durable(self, files: tuple[FileEntry, ...]) -> SaveHandoff:
        """The handoff of this rank once ``files`` are durable."""
        return dataclasses.replace(self, shards=(), kinds={}, files=files)

    def shards_in(self, directory: Path, memories: Mapping[str, Memory]) -> list[Shard]:
        """The shards to flush, in ``directory``, from the held memory as this process has mapped it."""
        return [
            Shard(
                directory / shard.name,
                list(shard.records(memories)),
                None
                if shard.image is None
                else Image(memories[shard.image[0].memory], _address(shard.image[0], memories), shard.image[1]),
            )
            for shard in self.shards
        ]

    def written(self) -> BinaryIO:
        """The handoff in unnamed memory, for whoever is to hold it by descriptor; ``revoke`` takes it back."""
        file = os.fdopen(os.memfd_create("tierckpt-handoff", os.MFD_CLOEXEC), "wb")
        file.write(_VALID)
        pickle.dump(self, file, pickle.HIGHEST_PROTOCOL)
        file.flush()
        return file


def revoke(written: BinaryIO) -> None:
    """Make a handoff count for nothing, whoever holds it: what it says of memory is not true any more. Cannot fail."""
    os.pwrite(written.fileno(), _REVOKED, 0)


def read(descriptor: int) -> SaveHandoff | None:
    """The handoff behind ``descriptor``, which is closed; None when it is revoked."""
    os.lseek(descriptor, 0, os.SEEK_SET)  # the position is its writer's too
    with os.fdopen(descriptor, "rb") as file:
        if file.read(1) != _VALID:
            return None
        handoff: SaveHandoff = pickle.load(file)
    return handoff


def describe(shards: Sequence[Shard]) -> tuple[tuple[PendingShard, ...], dict[str, Memory]] | None:
    """The shards as a handoff tells them, and the memory they need; None when nobody could hold some of it."""
    known = _Known()
    described = []
    for shard in shards:
        image = None
        if shard.image is not None:
            memory = shard.image.memory
            image = (Place(known.name(memory), shard.image.address - memory.address), shard.image.size_bytes)
        found = PendingShard(shard.path.name, [], [], [], [], [], [], image)
        if not all(known.add(record, found) for record in shard.records):
            return None
        described.append(found)
    return tuple(described), known.memories


class _Known:
    """The memory that records lie in. Of many records in few pieces of memory each piece is asked for its name once,
    and each shape is told once."""

    def __init__(self) -> None:
        self.memories: dict[str, Memory] = {}
        self._names: dict[int, str] = {}
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def name(self, memory: Memory) -> str:
        name = self._names.get(id(memory))
        if name is None:
            name = self._names[id(memory)] = memory_name(memory)
            self.memories[name] = memory  # which keeps it, and its id its own
        return name

    def add(self, record: Record, to: PendingShard) -> bool:
        """Tell of a record; False when nobody could hold its bytes."""
        dtype: torch.dtype | None = None
        shape: tuple[int, ...] = ()
        memory: str | None = None
        start = 0
        if record.frame is None:
            to.data.append(bytes(record.head))
        else:
            dtype, shape = record.frame.dtype, self._shapes.setdefault(record.frame.shape, record.frame.shape)
            if record.size_bytes:
                if record.fetch is not None or record.lease is None or record.lease.memory.fd is None:
                    return False
                memory = self.name(record.lease.memory)
                start = record.address - record.lease.memory.address
        to.offsets.append(record.offset)
        to.dtypes.append(dtype)
        to.shapes.append(shape)
        to.memories.append(memory)
        to.starts.append(start)
        return True


def memory_name(memory: Memory) -> str:
    """The same for all who have the memory open, and nobody else's while anyone has."""
    if memory.fd is None:
        raise ValueError("private memory has no name")
    status = os.fstat(memory.fd)
    return f"{status.st_dev}-{status.st_ino}"


def _address(place: Place, memories: Mapping[str, Memory]) -> int:
    return memories[place.memory].address + place.offset
