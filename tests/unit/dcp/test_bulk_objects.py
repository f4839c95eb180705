"""DCP's objects constructed without their ``__init__`` equal those that DCP constructs."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from tierckpt.dcp import bulk_objects

OFFSETS, SIZE = torch.Size([4, 0]), torch.Size([2, 3])


@pytest.mark.parametrize("is_known", [True, False])
def test_bulk_objects_equal_constructed_ones(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KNOWS_INDEX", "KNOWS_READ", "KNOWS_RESULT"):
        assert getattr(bulk_objects, name)
        monkeypatch.setattr(bulk_objects, name, is_known)
    index, bare = bulk_objects.index_of("w", OFFSETS, 1), bulk_objects.index_of("w", None, None)
    made = [
        index,
        bare,
        bulk_objects.read_whole(index, OFFSETS, SIZE),
        bulk_objects.result_of(index, 24, _StorageInfo("f", 0, 24)),
    ]
    theirs = [
        MetadataIndex("w", OFFSETS, 1),
        MetadataIndex("w"),
        ReadItem(LoadItemType.TENSOR, index, OFFSETS, index, OFFSETS, SIZE),
        WriteResult(index, 24, _StorageInfo("f", 0, 24)),
    ]
    for one, other in zip(made, theirs, strict=True):
        assert (one, type(one), repr(one)) == (other, type(other), repr(other))
        assert pickle.loads(pickle.dumps(one)) == other
    assert [hash(one) for one in made[:3]] == [hash(one) for one in theirs[:3]]
    assert (index.index, bare.index) == (1, None)
