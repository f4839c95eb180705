"""A will: what to do with one rank's staged state if the rank ends before it is on the SSD.

Holds where every record of the rank's shards is to be written and where its bytes lie in memory that the agent holds;
the coordinator's also holds DCP's metadata. Executed by ``executor.py``. A pickle of this process for a process of the
same user and node, in memory that has no name and goes with its last holder: no checkpoint ever contains one.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from ..arena.memory import Kind, Memory
from ..manifest import FileEntry
from ..mover.flush import Image, Record, Shard
from . import split, wire

_VALID, _REVOKED = b"\1", b"\0"


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of held memory: which, and from where on."""

    memory: str
    offset: int


@dataclass(frozen=True, slots=True)
class Item:
    """One record: a tensor that lies at ``place`` (None when it has no bytes), or an object, whose bytes are here."""

    offset: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    place: Place | None
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class ShardToBe:
    name: str
    items: tuple[Item, ...]
    image: tuple[Place, int] | None


@dataclass(frozen=True)
class Will:
    """One rank's, of ``world_size``.

    ``settings`` are the trainer's, as JSON; ``kinds`` says what each held memory is backed by. ``files`` are those of a
    rank whose shards are durable and with the mover: nothing of it is to be written any more.
    """

    rank: int
    world_size: int
    is_coordinator: bool
    use_collectives: bool
    token: str
    uri: str
    settings: str
    save_id: str
    replaces: tuple[str, ...]
    shards: tuple[ShardToBe, ...]
    results: tuple[WriteResult, ...]
    parts: tuple[split.Part, ...]
    metadata: Metadata | None
    kinds: Mapping[str, Kind]
    files: tuple[FileEntry, ...] | None = None

    def durable(self, files: tuple[FileEntry, ...]) -> Will:
        """The will of this rank once ``files`` are durable."""
        return dataclasses.replace(self, shards=(), kinds={}, files=files)

    def shards_in(self, directory: Path, memories: Mapping[str, Memory]) -> list[Shard]:
        """The shards to flush, in ``directory``, from the held memory as this process has mapped it."""
        return [
            Shard(
                directory / shard.name,
                [_record(item, memories) for item in shard.items],
                None
                if shard.image is None
                else Image(memories[shard.image[0].memory], _address(shard.image[0], memories), shard.image[1]),
            )
            for shard in self.shards
        ]

    def written(self) -> BinaryIO:
        """The will in unnamed memory, for whoever is to hold it by descriptor; ``revoke`` takes it back."""
        file = os.fdopen(os.memfd_create("tierckpt-will", os.MFD_CLOEXEC), "wb")
        file.write(_VALID)
        pickle.dump(self, file, pickle.HIGHEST_PROTOCOL)
        file.flush()
        return file


def revoke(written: BinaryIO) -> None:
    """Make a will count for nothing, whoever holds it: what it says of memory is not true any more. Cannot fail."""
    os.pwrite(written.fileno(), _REVOKED, 0)


def read(descriptor: int) -> Will | None:
    """The will behind ``descriptor``, which is closed; None when it is revoked."""
    os.lseek(descriptor, 0, os.SEEK_SET)  # the position is its writer's too
    with os.fdopen(descriptor, "rb") as file:
        if file.read(1) != _VALID:
            return None
        will: Will = pickle.load(file)
    return will


def describe(shards: Sequence[Shard]) -> tuple[tuple[ShardToBe, ...], dict[str, Memory]] | None:
    """The shards as a will tells them, and the memory they need; None when nobody could hold some of it."""
    memories: dict[str, Memory] = {}
    described = []
    for shard in shards:
        items = []
        for record in shard.records:
            item = _item(record, memories)
            if item is None:
                return None
            items.append(item)
        image = None
        if shard.image is not None:
            image = (_place(shard.image.memory, shard.image.address, memories), shard.image.size_bytes)
        described.append(ShardToBe(shard.path.name, tuple(items), image))
    return tuple(described), memories


def memory_name(memory: Memory) -> str:
    """The same for all who have the memory open, and nobody else's while anyone has."""
    if memory.fd is None:
        raise ValueError("private memory has no name")
    status = os.fstat(memory.fd)
    return f"{status.st_dev}-{status.st_ino}"


def _item(record: Record, memories: dict[str, Memory]) -> Item | None:
    if record.frame is None:
        return Item(record.offset, None, (), None, bytes(record.head))
    tensor = record.owner
    if not record.size_bytes:
        return Item(record.offset, tensor.dtype, tuple(tensor.shape), None)
    if record.fetch is not None or record.lease is None or record.lease.memory.fd is None:
        return None
    place = _place(record.lease.memory, record.address, memories)
    return Item(record.offset, tensor.dtype, tuple(tensor.shape), place)


def _place(memory: Memory, address: int, memories: dict[str, Memory]) -> Place:
    name = memory_name(memory)
    memories[name] = memory
    return Place(name, address - memory.address)


def _address(place: Place, memories: Mapping[str, Memory]) -> int:
    return memories[place.memory].address + place.offset


def _record(item: Item, memories: Mapping[str, Memory]) -> Record:
    if item.dtype is None:
        return Record(item.offset, item.data)
    frame: Any = wire.frame(item.dtype, item.shape)
    address = _address(item.place, memories) if item.place is not None else 0
    return Record(item.offset, frame.head, frame, address)
