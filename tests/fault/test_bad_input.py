"""Bad input raises a typed error that names the cause and the next step; nothing is lost."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat

import tierckpt
from tests.files import flip, tmpfs
from tests.states import load, raises_ours, same, save, small_state
from tierckpt.disk import local_root as disk
from tierckpt.errors import (
    AlreadyCommittedError,
    CheckpointError,
    ConfigError,
    IntegrityError,
    ManifestError,
    StateMismatchError,
    UncommittedCheckpointError,
)
from tierckpt.format.layout import local_dir, parse_uri


def local_shard(local_root: Path, uri: str) -> Path:
    return next(local_dir(local_root, parse_uri(uri)).glob("*.distcp"))


# --- URIs, packages, credentials --------------------------------------------------------------------------------


def test_uri_of_an_unknown_scheme_is_no_checkpoint_id() -> None:
    assert not tierckpt.TierStorageWriter.validate_checkpoint_id("s4://bucket/run")
    assert tierckpt.TierStorageWriter.validate_checkpoint_id("s3://bucket/run")


def test_uncommitted_checkpoint(file_uri: str, local_root: Path) -> None:
    save(f"{file_uri}/step-1", small_state(1))
    save(f"{file_uri}/step-2", small_state(2))
    for place in (Path(file_uri), local_dir(local_root, parse_uri(file_uri))):
        (place / "step-2/.tierckpt/manifest.json").unlink()
    with pytest.raises(UncommittedCheckpointError, match="step-2"):
        load(f"{file_uri}/step-2", small_state(2))
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-1"


def test_step_already_committed(shared_uri: str) -> None:
    uri = f"{shared_uri}/step-1"
    save(uri, small_state(1))
    with pytest.raises(AlreadyCommittedError, match="step-1"):
        save(uri, small_state(2), overwrite=False)
    assert same(load(uri, small_state(1)), small_state(1))


def test_stock_checkpoint_is_not_overwritten_by_default(file_uri: str) -> None:
    dcp.save(small_state(1), checkpoint_id=f"{file_uri}/step-1", no_dist=True)
    with pytest.raises(AlreadyCommittedError):
        save(f"{file_uri}/step-1", small_state(2), overwrite=False)


# --- local_root -------------------------------------------------------------------------------------------------


def test_target_inside_local_root(local_root: Path) -> None:
    with pytest.raises(ConfigError, match="local_root"):
        tierckpt.TierStorageWriter(local_root / "run", local_root=local_root)


def test_local_root_on_tmpfs_is_warned_about(tmp_path: Path, file_uri: str, caplog: pytest.LogCaptureFixture) -> None:
    disk.checked.clear()
    with tmpfs(tmp_path / "small", "size=4m,mode=700") as directory, caplog.at_level(logging.WARNING, "tierckpt"):
        save(f"{file_uri}/step-1", small_state(), local_root=directory / "root")
    assert any("tmpfs" in record.getMessage() for record in caplog.records)


# --- damaged files ----------------------------------------------------------------------------------------------


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = [flip, zero, truncate, Path.unlink]


@pytest.mark.parametrize(
    ("damage", "what"),
    [*((damage, "*.distcp") for damage in DAMAGES), (flip, ".tierckpt/metadata/*"), (flip, ".tierckpt/manifest.json")],
)
def test_damaged_local_file_is_read_from_the_shared_tier(
    damage: Callable[[Path], None], what: str, s3_uri: str, local_root: Path
) -> None:
    uri, state = f"{s3_uri}/step-1", small_state(1)
    save(uri, state)
    tierckpt.wait(uri, timeout_seconds=60)
    damage(next(local_dir(local_root, parse_uri(uri)).glob(what)))
    assert same(load(uri, state), state)
    assert same(load(uri, state), state)


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_a_good_copy_the_error_names_tensor_file_and_tier(
    damage: Callable[[Path], None], file_uri: str, local_root: Path
) -> None:
    uri = f"{file_uri}/step-1"
    save(uri, {"only": torch.randn(5000)}, drain=False)
    shard = local_shard(local_root, uri)
    damage(shard)
    target = {"only": torch.full((5000,), 7.0)}
    with pytest.raises(IntegrityError) as caught, raises_ours():
        dcp.load(target, storage_reader=tierckpt.TierStorageReader(uri, drain=False), no_dist=True)
    text = str(caught.value)
    assert shard.name in text
    assert "only" in text
    assert "local" in text or "shared" in text
    assert target["only"].unique().tolist() == [7.0]  # never wrong bytes


def test_damaged_only_manifest_is_an_error(file_uri: str, local_root: Path) -> None:
    uri = f"{file_uri}/step-1"
    save(uri, small_state(1), drain=False)
    flip(local_dir(local_root, parse_uri(uri)) / ".tierckpt/manifest.json")
    with pytest.raises(ManifestError, match="manifest"):
        load(uri, small_state(1), drain=False)


# --- state dicts ------------------------------------------------------------------------------------------------


def test_meta_tensors_are_rejected_by_name(file_uri: str) -> None:
    state = {"model": {"ghost": torch.empty(3, device="meta")}}
    with pytest.raises(StateMismatchError, match="ghost"):
        save(f"{file_uri}/step-1", state)
    with pytest.raises(StateMismatchError, match="ghost"), raises_ours():
        dcp.async_save(state, storage_writer=tierckpt.TierStorageWriter(f"{file_uri}/step-1"), no_dist=True)
    with pytest.raises(StateMismatchError, match="ghost"):
        tierckpt.TierStager().stage(state)
    assert tierckpt.latest(file_uri) is None


# --- options ----------------------------------------------------------------------------------------------------


def test_safetensors_format_is_rejected_with_a_hint(file_uri: str) -> None:
    with pytest.raises(ConfigError, match="export"):
        tierckpt.TierStorageWriter(file_uri, serialization_format=SerializationFormat.SAFETENSORS)


@pytest.mark.parametrize("options", [{"thread_count": 0}, {"colour": "red"}, {"concurrency": -1}])
def test_invalid_options_are_rejected(options: dict[str, object], file_uri: str) -> None:
    with pytest.raises(ConfigError):
        tierckpt.TierStorageWriter(file_uri, **options)  # type: ignore[arg-type]


def test_concurrent_saves_with_one_writer_raise(file_uri: str) -> None:
    started, go = threading.Event(), threading.Event()

    class Slow(DefaultSavePlanner):
        def resolve_data(self, item: object) -> object:  # type: ignore[override]
            started.set()
            go.wait(60)
            return super().resolve_data(item)  # type: ignore[arg-type]

    writer = tierckpt.TierStorageWriter(f"{file_uri}/step-1")
    options = {"storage_writer": writer, "no_dist": True}
    first = dcp.async_save({"w": torch.ones(10)}, checkpoint_id=f"{file_uri}/step-1", planner=Slow(), **options)
    assert started.wait(60)
    second = dcp.async_save({"w": torch.zeros(10)}, checkpoint_id=f"{file_uri}/step-2", **options)
    with pytest.raises(CheckpointError, match="still saving"), raises_ours():
        second.result(timeout=60)  # type: ignore[union-attr]
    go.set()
    first.result(timeout=60)  # type: ignore[union-attr]
    assert load(f"{file_uri}/step-1", {"w": torch.zeros(10)})["w"].unique().tolist() == [1.0]
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-1"
