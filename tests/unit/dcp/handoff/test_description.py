"""Handoffs: another process reads an equal description until it is revoked."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from tierckpt.arena.memory import Memory
from tierckpt.arena.slots import Lease
from tierckpt.dcp.handoff import description as descriptions
from tierckpt.dcp.handoff.description import Results, SaveHandoff, describe
from tierckpt.dcp.items import item_format
from tierckpt.format.manifest import FileEntry
from tierckpt.save.shard_plan import Image, Shard, ShardRecord

RESULTS = [
    WriteResult(MetadataIndex("weight", torch.Size([4, 2]), 1), 900, _StorageInfo("__1_0-ab.distcp", 0, 900)),
    WriteResult(MetadataIndex("weight", torch.Size([8, 2]), 2), 901, _StorageInfo("__1_0-ab.distcp", 900, 901)),
    WriteResult(MetadataIndex("step"), 40, _StorageInfo("__1_1-ab.distcp", 0, 40)),
]
HANDOFF = SaveHandoff(
    rank=1,
    world_size=4,
    is_coordinator=False,
    use_collectives=True,
    token="ab",
    uri="/shared/run/step-1",
    settings="{}",
    save_id="id",
    replaces=(),
    epoch="",
    shards=(),
    results=Results.of(RESULTS),
    parts=(),
    metadata=None,
    kinds={},
)


def test_a_handoff_is_readable_through_its_descriptor() -> None:
    written = HANDOFF.written()
    read = descriptions.read(os.dup(written.fileno()))
    assert read == HANDOFF and read.results.list() == RESULTS


def test_a_handoff_of_many_tensors_is_compact() -> None:
    """A pickle of one object per tensor takes longer than writing ten thousands of small tensors."""
    index = [MetadataIndex(f"layer.{number}.weight", torch.Size([0])) for number in range(1000)]
    results = [WriteResult(one, 1400, _StorageInfo("__1_0-ab.distcp", 1400 * at, 1400)) for at, one in enumerate(index)]
    few, many = (dataclasses.replace(HANDOFF, results=Results.of(some)).written() for some in ([], results))
    added = os.fstat(many.fileno()).st_size - os.fstat(few.fileno()).st_size
    assert added <= sum(len(one.fqn) + 24 for one in index)


def test_a_revoked_handoff_is_invalid_for_all_holders() -> None:
    """Without a message, which may reach the agent only after the memory holds another checkpoint."""
    written = HANDOFF.written()
    held = os.dup(written.fileno())
    descriptions.revoke(written)
    assert descriptions.read(held) is None


def test_private_memory_cannot_be_held() -> None:
    """Its stager has other settings than the writer."""
    frame = item_format.frame(torch.float32, (4,))
    with Memory.allocate(1 << 20) as memory:
        lease = Lease(memory, memory.size_bytes, 0)
        record = ShardRecord(0, frame.head, frame, memory.address + len(frame.head), lease=lease)
        assert describe([Shard(Path("shard"), [record])]) is None
        assert describe([Shard(Path("shard"), [record], Image(memory, memory.address, 4096))]) is None


def test_durable_files_need_no_memory() -> None:
    files = (FileEntry("__1_0-ab.distcp", 0, (), 1, "ab"),)
    durable = HANDOFF.durable(files)
    assert (durable.files, durable.shards, durable.kinds) == (files, (), {})
    assert descriptions.read(os.dup(durable.written().fileno())) == durable
