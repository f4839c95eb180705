"""The StorageWriter and StorageReader contract as DCP drives it: executors, ids, plans, with or without ranks."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager

import tierckpt
from tests.compat.everything import blank, differences, everything
from tests.compat.worker import launch
from tierckpt.checkpoint.journal import Journal

distributed = pytest.mark.distributed
SCENARIOS = "tests.compat.scenarios"


def all_true(outcome: dict[str, bool], count: int) -> None:
    assert len(outcome) == count
    assert [name for name, right in outcome.items() if right is not True] == []


@pytest.mark.slow
@distributed
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_async_saves_on_two_ranks(executor: str, file_uri: str) -> None:
    all_true(launch(f"{SCENARIOS}:async_saves", 2, folder=file_uri, executor=executor), 3)


@pytest.mark.slow
@distributed
@pytest.mark.server
def test_async_saves_drain_to_s3(s3_uri: str) -> None:
    all_true(launch(f"{SCENARIOS}:async_saves", 2, folder=s3_uri, executor="process"), 3)


@pytest.mark.slow
@distributed
def test_one_writer_serves_many_ids_on_two_ranks(file_uri: str) -> None:
    all_true(launch(f"{SCENARIOS}:one_writer_many_ids", 2, folder=file_uri), 2)


@pytest.mark.slow
@distributed
def test_cached_plans_on_two_ranks(file_uri: str) -> None:
    all_true(launch(f"{SCENARIOS}:cached_plans", 2, folder=file_uri), 4)


@pytest.mark.slow
@distributed
def test_saves_without_collectives(file_uri: str) -> None:
    all_true(launch(f"{SCENARIOS}:without_collectives", 2, folder=file_uri), 4)


@distributed
def test_sharded_tensors(file_uri: str) -> None:
    all_true(launch(f"{SCENARIOS}:sharded_tensors", 2, folder=file_uri), 16)


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


def test_no_process_group_and_no_flag(file_uri: str) -> None:
    """DCP notices by itself that there is no process group."""
    state = everything(1)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, storage_writer=tierckpt.TierStorageWriter(file_uri))
    target = blank(state)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, storage_reader=tierckpt.TierStorageReader(file_uri))
    assert differences(target, state) == []


def test_the_writer_pickles_and_the_copy_saves(file_uri: str) -> None:
    writer = tierckpt.TierStorageWriter(f"{file_uri}/step-1", thread_count=2, overwrite=False)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    twin = pickle.loads(pickle.dumps(writer))
    assert vars(twin)["thread_count"] == 2
    assert twin.storage_meta().checkpoint_id == writer.storage_meta().checkpoint_id
    state = everything(2)
    dcp.save(state, storage_writer=twin, checkpoint_id=f"{file_uri}/step-2", no_dist=True)
    target = blank(state)
    dcp.load(target, storage_reader=tierckpt.TierStorageReader(f"{file_uri}/step-2"), no_dist=True)
    assert differences(target, state) == []


def test_path_may_be_a_path_and_is_the_stock_keyword(tmp_path: Path) -> None:
    folder = tmp_path / "shared" / "step-1"
    dcp.save({"w": torch.ones(3)}, storage_writer=tierckpt.TierStorageWriter(path=folder), no_dist=True)
    target = {"w": torch.zeros(3)}
    dcp.load(target, storage_reader=tierckpt.TierStorageReader(path=folder), no_dist=True)
    assert target["w"].tolist() == [1, 1, 1]


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
        target = {"w": torch.zeros(500), "step": 0}
        dcp.load(target, storage_reader=tierckpt.TierStorageReader(f"{file_uri}/step-{step}"), no_dist=True)
        assert target["w"].unique().tolist() == [step]
        assert target["step"] == step
