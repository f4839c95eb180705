"""The StorageWriter and StorageReader contract as DCP drives it: executors, ids, plans, with or without ranks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager

import tierckpt
from tests.compat.everything import blank, differences, everything
from tests.compat.worker import launch
from tests.states import load
from tierckpt.checkpoint.journal import Journal

distributed = pytest.mark.distributed
SCENARIOS = "tests.compat.scenarios"


WAYS: list[Any] = [
    pytest.param("async_saves", "file_uri", {"executor": "thread"}, 3, marks=pytest.mark.slow),
    pytest.param("async_saves", "file_uri", {"executor": "process"}, 3, marks=pytest.mark.slow),
    pytest.param("async_saves", "s3_uri", {"executor": "process"}, 3, marks=[pytest.mark.slow, pytest.mark.server]),
    pytest.param("one_writer_many_ids", "file_uri", {}, 2, marks=pytest.mark.slow),
    pytest.param("cached_plans", "file_uri", {}, 4, marks=pytest.mark.slow),
    pytest.param("without_collectives", "file_uri", {}, 4, marks=pytest.mark.slow),
    ("sharded_tensors", "file_uri", {}, 16),
]


@distributed
@pytest.mark.parametrize(("scenario", "place", "options", "count"), WAYS)
def test_every_way_to_save_on_two_ranks_is_right(
    scenario: str, place: str, options: dict[str, str], count: int, request: pytest.FixtureRequest
) -> None:
    outcome = launch(f"{SCENARIOS}:{scenario}", 2, folder=request.getfixturevalue(place), **options)
    assert len(outcome) == count
    assert [name for name, right in outcome.items() if right is not True] == []


@pytest.mark.slow
@distributed
@pytest.mark.server
@pytest.mark.parametrize("place", ["file_uri", "s3_uri"])
def test_one_id_saved_over_and_over_leaves_nothing_behind(
    place: str, request: pytest.FixtureRequest, local_root: Path, tmp_path: Path
) -> None:
    folder, elsewhere = request.getfixturevalue(place), str(tmp_path / "another-node")
    outcome = launch(f"{SCENARIOS}:saving_over_and_over", 2, folder=folder, elsewhere=elsewhere)
    assert outcome == {"errors": [], "on the local tier": True, "on the shared tier": True}
    assert Journal(local_root).entries() == []


def test_the_stock_keyword_path_takes_a_path_without_a_process_group_or_a_flag(tmp_path: Path) -> None:
    """DCP notices by itself that there is no process group."""
    state, folder = everything(1), tmp_path / "shared" / "step-1"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, storage_writer=tierckpt.TierStorageWriter(path=folder))
    target = blank(state)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, storage_reader=tierckpt.TierStorageReader(path=folder))
    assert differences(target, state) == []


def test_the_writer_pickles_and_the_copy_saves(file_uri: str) -> None:
    writer = tierckpt.TierStorageWriter(f"{file_uri}/step-1", thread_count=2, overwrite=False)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    twin = pickle.loads(pickle.dumps(writer))
    assert vars(twin)["thread_count"] == 2
    assert twin.storage_meta().checkpoint_id == writer.storage_meta().checkpoint_id
    state = everything(2)
    dcp.save(state, storage_writer=twin, checkpoint_id=f"{file_uri}/step-2", no_dist=True)
    assert differences(load(f"{file_uri}/step-2", state), state) == []


def test_the_writer_is_what_dcp_expects() -> None:
    assert issubclass(tierckpt.TierStorageWriter, dcp.StorageWriter)
    assert issubclass(tierckpt.TierStorageReader, dcp.StorageReader)
    assert isinstance(tierckpt.TierStorageWriter("/nowhere/step-1"), AsyncStager)
    for kind in (tierckpt.TierStorageWriter, tierckpt.TierStorageReader):
        assert kind.validate_checkpoint_id("s3://bucket/step-1")
        assert kind.validate_checkpoint_id(Path("/data/step-1"))
        assert not kind.validate_checkpoint_id("")


@pytest.mark.parametrize("cached", [False, True])
def test_a_writer_that_caches_its_staging_saves_each_step(cached: bool, file_uri: str) -> None:
    writer = tierckpt.TierStorageWriter(f"{file_uri}/step-0", cache_staged_state_dict=cached)
    for step in (1, 2, 3):
        state = {"w": torch.full((500,), float(step)), "step": step}
        future = dcp.async_save(state, storage_writer=writer, checkpoint_id=f"{file_uri}/step-{step}", no_dist=True)
        state["w"].zero_()
        future.result(timeout=60)  # type: ignore[union-attr]
    for step in (1, 2, 3):
        found = load(f"{file_uri}/step-{step}", state)
        assert (found["w"].unique().tolist(), found["step"]) == ([step], step)
