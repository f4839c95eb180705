"""A save with a cached plan and equal tensors uses the cached staging layout, with the same result."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType

from tests.unit.dcp.test_planner import change, plan
from tierckpt.config import Settings
from tierckpt.dcp import metadata_encoder
from tierckpt.dcp.items import records
from tierckpt.dcp.metadata_encoder import encode
from tierckpt.dcp.planner import TierSavePlanner, cache
from tierckpt.dcp.stager import StagedItems, TierStager
from tierckpt.dcp.writer import TierStorageWriter
from tierckpt.errors import StateMismatchError
from tierckpt.torch_internals import StorageInfo

State = dict[str, Any]


@pytest.fixture
def stager(tmp_path: Path) -> TierStager:
    return TierStager(settings=Settings.load(None, local_root=tmp_path, mover="inline"))


@pytest.fixture(autouse=True)
def clear_caches() -> None:
    cache.start_anew()


def base(seed: int = 0) -> State:
    made = torch.Generator().manual_seed(seed)
    return {
        "model": {f"layer{number}": torch.rand(5, number + 1, generator=made) for number in range(20)},
        "large": torch.rand(200, 200, generator=made),
        "empty": torch.empty(0, 3),
        "mask": torch.rand(7, generator=made) > 0.5,
        "waves": torch.rand(4, dtype=torch.complex64, generator=made),
        "optimizer": {
            "state": {number: {"step": torch.tensor(float(seed)), "average": torch.rand(6)} for number in range(20)}
        },
        "step": seed,
    }


def staged(stager: TierStager, state: State) -> StagedItems:
    planner = TierSavePlanner()
    planner.with_addresses = stager.needs_addresses
    final, _, _ = plan(planner, state)
    return stager.stage_items(final.items, planner)


def check(found: StagedItems, state: State) -> None:
    """Each tensor is staged with its bytes, at the offsets of a full layout."""
    planner = TierSavePlanner(enable_plan_caching=False)
    planner.set_up_planner(state, None, True)
    written = records.resolve(found.items, found)
    for record in records.plan_shards_of(written, shard_bytes_max=1 << 30, chunk_size_bytes=1 << 20)[0][0]:
        if record.frame is not None:
            wanted = planner.state_dict[record.item.index.fqn]
            assert (record.frame.dtype, record.frame.shape) == (wanted.dtype, tuple(wanted.shape))
    for item in found.items:
        if item.type is not WriteItemType.BYTE_IO:
            tensor = found.tensor(item)
            assert torch.equal(tensor, planner.state_dict[item.index.fqn]) and not tensor.requires_grad, item.index


def test_a_repeated_save_has_current_values(stager: TierStager) -> None:
    for seed in range(4):
        state = base(seed)
        found = staged(stager, state)
        assert (found.placed is not None) == (seed > 0)
        check(found, state)
        for tensor in state["model"].values():
            tensor.zero_()
        check(found, base(seed) | {"optimizer": state["optimizer"]})


def test_cached_and_full_layouts_have_equal_records(stager: TierStager) -> None:
    state = base()
    first, second = staged(stager, state), staged(stager, state)
    assert second.placed is not None
    shards = [
        records.plan_shards_of(records.resolve(one.items, one), shard_bytes_max=64 << 10, chunk_size_bytes=1 << 20)
        for one in (first, second)
    ]
    facts = [
        [[(one.item.index, one.offset, bytes(one.head), one.size_bytes) for one in shard] for shard, _ in some]
        for some in shards
    ]
    assert facts[0] == facts[1] and len(facts[0]) > 1


class Name(StrEnum):
    STEP = "step"


CHANGES: dict[str, Callable[[State], State]] = {
    "strided": lambda state: state | {"large": state["large"].T},
    "negative": change("model.layer3", lambda: torch.rand(5, 4, dtype=torch.complex64).conj().imag),
    "conjugate": change("waves", lambda: torch.rand(4, dtype=torch.complex64).conj()),
    "wider": change("model.layer3", lambda: torch.rand(5, 40)),
    "trained": change("model.layer3", lambda: torch.rand(5, 4, requires_grad=True)),
    "one more": change("optimizer.state.7.more", lambda: torch.rand(2)),
    "named by enum": change("optimizer.state.7", lambda: {Name.STEP: torch.tensor(1.0), "average": torch.rand(6)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_states_are_laid_out_in_full(name: str, stager: TierStager) -> None:
    for seed in range(2):
        staged(stager, base(seed))
    state = CHANGES[name](base(2))
    assert state["model"]["layer3"].is_neg() == (name == "negative")
    found = staged(stager, state)
    assert found.placed is None
    check(found, state)
    for seed in (3, 4):  # the cached layout is used again
        state = base(seed)
        found = staged(stager, state)
        check(found, state)
    assert found.placed is not None


@pytest.mark.parametrize("saves", [0, 2])
@pytest.mark.parametrize("name", ["model.layer3", "large"])
def test_a_freed_storage_is_rejected(name: str, saves: int, stager: TierStager) -> None:
    for seed in range(saves):
        staged(stager, base(seed))
    state = base(2)
    (state["large"] if name == "large" else state["model"]["layer3"]).untyped_storage().resize_(0)
    with pytest.raises(StateMismatchError, match=f"{name} was freed"):
        staged(stager, state)
    with pytest.raises(StateMismatchError, match="was freed"):
        stager.stage(state)


def test_dcp_save_refuses_a_freed_storage(tmp_path: Path) -> None:
    freed = torch.rand(5, 4)
    freed.untyped_storage().resize_(0)
    writer = TierStorageWriter(str(tmp_path / "run" / "step-1"), local_root=tmp_path / "local", mover="inline")
    with pytest.raises(CheckpointException, match="weight was freed"):
        dcp.save({"weight": freed}, storage_writer=writer, no_dist=True)


def test_staging_memory_is_freed_with_the_save(stager: TierStager) -> None:
    staged(stager, base())
    found = staged(stager, base(1))
    assert found.placed is not None
    lease = found.placed.lease
    assert lease.in_use()
    found.data.clear()
    assert lease.in_use()
    del found
    assert not lease.in_use()


def written(metadata: Metadata, indexes: list[MetadataIndex], name: str, uri: str, save: str) -> Metadata:
    """``metadata`` of a save with its items in two files named after ``name``."""
    files = [f"__0_{number}-{name}.distcp" for number in range(2)]
    places = [StorageInfo(files[number % 2], 64 * number, 60) for number in range(len(indexes))]
    storage, of_save = dict(zip(indexes, places, strict=True)), StorageMeta(checkpoint_id=uri, save_id=save)
    return dataclasses.replace(metadata, storage_data=storage, storage_meta=of_save)


SAVES = {
    "names of equal lengths": ("s3://b/run/step-1", "s3://b/run/step-2", 1),
    "a longer URI": ("s3://b/run/step-9", "s3://b/run/step-10", 2),
    "a name that a tensor has, too": ("model.layer3", "model.layer4", 2),
}
"""URIs of two saves, and the number of saves encoded in full."""


@pytest.mark.parametrize("case", SAVES)
def test_metadata_of_a_repeated_plan_reuses_the_first_encoding(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, count = SAVES[case]
    dumps: list[Metadata] = []
    real = metadata_encoder.encode_uncached
    monkeypatch.setattr(metadata_encoder, "encode_uncached", lambda metadata: dumps.append(metadata) or real(metadata))
    final, metadata, _ = plan(TierSavePlanner(), base())
    indexes = [item.index for item in final.items]
    first = written(metadata, indexes, "0" * 16, before, "f" * 16)
    second = written(metadata, indexes, "a" * 16, after, "e" * 16)
    for one in (first, second):
        assert pickle.loads(encode(one)) == one
    assert len(dumps) == count


def test_changed_file_places_are_encoded_again() -> None:
    final, metadata, _ = plan(TierSavePlanner(), base())
    indexes = [item.index for item in final.items]
    first = written(metadata, indexes, "0" * 16, "s3://b/run/step-1", "f" * 16)
    encode(first)
    for changed in ({"offset": 1}, {"length": 59}, {"relative_path": "__0_1-" + "0" * 16 + ".distcp"}):
        second = written(metadata, indexes, "0" * 16, "s3://b/run/step-2", "e" * 16)
        assert second.storage_data is not None
        second.storage_data[indexes[0]] = dataclasses.replace(second.storage_data[indexes[0]], **changed)
        assert pickle.loads(encode(second)) == second
