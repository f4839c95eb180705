"""CheckpointableTensor (torch 2.15): a plain tensor whose attributes describe its parts of a global tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tierckpt import TierSavePlanner, TierStager, TierStorageReader, TierStorageWriter

pytestmark = pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="this torch has no CheckpointableTensor (2.15 and newer)"
)

ORDER = (0, 2, 1)
"""Position in the global tensor of each pair of local rows."""


def parts() -> torch.Tensor:
    tensor: Any = torch.arange(24.0).reshape(6, 4)
    tensor.global_shape = (6, 4)
    tensor.global_offsets = tuple((2 * place, 0) for place in ORDER)
    tensor.local_offsets = tuple((2 * row, 0) for row in range(3))
    tensor.local_sizes = ((2, 4),) * 3
    return tensor  # type: ignore[no-any-return]


def whole() -> torch.Tensor:
    tensor = torch.empty(6, 4)
    for row, place in enumerate(ORDER):
        tensor[2 * place : 2 * place + 2] = parts()[2 * row : 2 * row + 2]
    return tensor


def saved(uri: str) -> None:
    dcp.save({"w": parts()}, storage_writer=TierStorageWriter(uri), no_dist=True)


def planned_like_a_plain_one(uri: str) -> None:
    """The cached plan of the same tensor without attributes must not be reused."""
    for tensor, place in ((torch.ones(6, 4), f"{uri}-plain"), (parts(), uri)):
        dcp.save({"w": tensor}, storage_writer=TierStorageWriter(place), planner=TierSavePlanner(), no_dist=True)


def staged(uri: str, **options: Any) -> None:
    stager = TierStager(**options)
    dcp.async_save({"w": parts()}, storage_writer=TierStorageWriter(uri), async_stager=stager, no_dist=True)  # type: ignore[arg-type]
    tierckpt.wait(uri, tier="local", timeout_seconds=30)
    stager.close()


@pytest.mark.parametrize(
    "save",
    [saved, planned_like_a_plain_one, staged, lambda uri: staged(uri, mode="lazy")],
    ids=["save", "plan cache", "async", "lazy"],
)
def test_every_part_is_saved_at_its_offset(save: Callable[[str], None], tmp_path: Path) -> None:
    uri = str(tmp_path / "c")
    save(uri)
    for reader in (TierStorageReader(uri), dcp.FileSystemReader(uri)):
        into, local = torch.zeros(6, 4), parts()
        dcp.load({"w": into}, storage_reader=reader, no_dist=True)
        assert torch.equal(into, whole())
        dcp.load({"w": local.zero_()}, storage_reader=reader, no_dist=True)
        assert torch.equal(local, parts())


def test_checkpoint_of_stock_dcp_is_loaded(tmp_path: Path) -> None:
    dcp.save({"w": parts()}, checkpoint_id=tmp_path / "c", no_dist=True)
    into, local = torch.zeros(6, 4), parts()
    dcp.load({"w": into}, storage_reader=TierStorageReader(str(tmp_path / "c")), no_dist=True)
    dcp.load({"w": local.zero_()}, storage_reader=TierStorageReader(str(tmp_path / "c")), no_dist=True)
    assert torch.equal(into, whole()) and torch.equal(local, parts())
