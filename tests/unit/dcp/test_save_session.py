"""A save is committed only if its metadata can be loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import tierckpt
from tests.states import raises_ours
from tierckpt import TierSavePlanner, TierStorageWriter
from tierckpt.config import Settings
from tierckpt.dcp import sealed_unpickler
from tierckpt.dcp.metadata_encoder import encode
from tierckpt.dcp.save_planning import SaveDescription
from tierckpt.dcp.save_session import SaveSession
from tierckpt.errors import CheckpointError, UnsafeCheckpointError
from tierckpt.format.layout import parse_uri


class Mine:
    """No plain data."""


def changes(metadata: Metadata, kind: str) -> None:
    entry: Any = metadata.state_dict_metadata["w"]
    if kind == "planner data":
        metadata.planner_data = {"w": Mine()}
    elif kind == "a further field":
        metadata.later = [1]  # type: ignore[attr-defined]
    elif kind == "a size":
        metadata.state_dict_metadata["w"] = dataclasses.replace(entry, size=(4,))


class Planner(DefaultSavePlanner):
    kind = ""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        changes(metadata, self.kind)
        return plans, metadata


EXPECTED = {
    "planner data": r"test_save_session\.Mine",
    "a further field": r"a Metadata has a field \(later\)",
    "a size": r"a size of w is none",
}


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
def test_unloadable_metadata_fails_the_save(is_second: bool, kind: str, file_uri: str) -> None:
    state, planner = {"w": torch.ones(4)}, Planner()
    uri = f"{file_uri}/step-1"
    if is_second:
        dcp.save(state, storage_writer=TierStorageWriter(uri), planner=planner, no_dist=True)
    planner.kind = kind
    with pytest.raises(CheckpointError, match=f"is not committed, .*{EXPECTED[kind]}"), raises_ours():
        dcp.save({"w": torch.zeros(4)}, storage_writer=TierStorageWriter(uri), planner=planner, no_dist=True)
    if is_second:
        into = {"w": torch.zeros(4)}
        dcp.load(into, storage_reader=tierckpt.TierStorageReader(uri), no_dist=True)
        assert torch.equal(into["w"], torch.ones(4))
    else:
        assert tierckpt.latest(file_uri) is None


def test_metadata_with_user_classes_needs_an_option(file_uri: str) -> None:
    uri, planner = f"{file_uri}/step-1", Planner()
    planner.kind = "planner data"
    writer = TierStorageWriter(uri, trust_pickle=True)
    dcp.save({"w": torch.ones(4)}, storage_writer=writer, planner=planner, no_dist=True)
    into = {"w": torch.zeros(4)}
    reader = tierckpt.TierStorageReader(uri, trust_pickle=True)
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert isinstance((reader.read_metadata().planner_data or {})["w"], Mine) and torch.equal(into["w"], torch.ones(4))


def test_later_saves_check_only_new_metadata(tmp_path: Path) -> None:
    """Verified entries are not decoded again; places are checked each time."""
    metadata: list[Metadata] = []
    for step in (1, 2):
        writer = TierStorageWriter(str(tmp_path / f"step-{step}"))
        metadata.append(dcp.save({"w": torch.ones(4)}, storage_writer=writer, planner=TierSavePlanner(), no_dist=True))
    last = metadata[-1]
    sealed_unpickler.read_back(encode(last), last, where="m")
    place = (last.storage_data or {})[MetadataIndex("w", torch.Size([0]))]
    for field, value, match in (
        ("relative_path", "../w", "leads elsewhere"),
        ("relative_path", "../" + place.relative_path[3:], "leads elsewhere"),  # bytes that differ in a name alone
        ("length", 3, "needs 16 bytes and has 3"),
        ("transform_descriptors", [Mine()], "not made of strings"),
    ):
        kept = getattr(place, field)
        setattr(place, field, value)
        with pytest.raises(UnsafeCheckpointError, match=match):
            sealed_unpickler.read_back(encode(last), last, where="m")
        setattr(place, field, kept)


def test_a_session_writes_once(file_uri: str) -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(4)}, is_coordinator=True)
    session = SaveSession(Settings.load(mover="inline"), parse_uri(f"{file_uri}/step-1"), SaveDescription())
    [plan], _ = planner.create_global_plan([session.plan_local(planner.create_local_plan())])
    [plan] = session.plan_global([plan])
    session.write(plan, planner)
    with pytest.raises(CheckpointError, match="two saves used one"):
        session.write(plan, planner)
    assert not session.is_open and not list(session.directory.glob("*.distcp"))
