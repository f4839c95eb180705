"""Handoffs: another process reads the same description until it is revoked."""

from __future__ import annotations

import dataclasses
import os

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from tierckpt.dcp.handoff import description as descriptions
from tierckpt.dcp.handoff.description import Results, SaveHandoff
from tierckpt.format.manifest import FileEntry

RESULTS = [
    WriteResult(MetadataIndex("weight", torch.Size([4, 2]), 1), 900, _StorageInfo("__1_0-ab.distcp", 0, 900)),
    WriteResult(MetadataIndex("weight", torch.Size([8, 2]), 2), 901, _StorageInfo("__1_0-ab.distcp", 900, 901)),
    WriteResult(MetadataIndex("step"), 40, _StorageInfo("__1_1-ab.distcp", 0, 40)),
]
WILL = SaveHandoff(
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


def test_a_will_is_read_by_whoever_has_the_descriptor() -> None:
    written = WILL.written()
    assert descriptions.read(os.dup(written.fileno())) == WILL


def test_what_dcp_is_told_comes_back_as_it_was() -> None:
    written = WILL.written()
    read = descriptions.read(os.dup(written.fileno()))
    assert read is not None
    assert read.results.list() == RESULTS


def test_a_will_of_many_tensors_is_not_much_longer_than_their_names() -> None:
    """A pickle of an object for each thing told takes longer than ten thousands of small tensors take to write."""
    index = [MetadataIndex(f"layer.{number}.weight", torch.Size([0])) for number in range(1000)]
    results = [WriteResult(one, 1400, _StorageInfo("__1_0-ab.distcp", 1400 * at, 1400)) for at, one in enumerate(index)]
    few, many = (dataclasses.replace(WILL, results=Results.of(some)).written() for some in ([], results))
    added = os.fstat(many.fileno()).st_size - os.fstat(few.fileno()).st_size
    assert added <= sum(len(one.fqn) + 24 for one in index)


def test_a_revoked_will_is_none_for_all_who_hold_it() -> None:
    """Without a message to its writer, which may not reach the agent once the memory has another checkpoint."""
    written = WILL.written()
    held = os.dup(written.fileno())
    descriptions.revoke(written)
    assert descriptions.read(held) is None


def test_what_is_durable_needs_no_memory() -> None:
    files = (FileEntry("__1_0-ab.distcp", 0, (), 1, "ab"),)
    durable = WILL.durable(files)
    assert (durable.files, durable.shards, durable.kinds) == (files, (), {})
    assert descriptions.read(os.dup(durable.written().fileno())) == durable
