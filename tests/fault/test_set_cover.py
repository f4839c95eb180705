"""Restore takes the newest step of which each file has a good copy on some tier, and logs the skipped ones (P5)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.compat.worker import launch
from tests.files import flip
from tests.states import load, same, save_drained
from tierckpt import Checkpointer
from tierckpt.errors import IntegrityError
from tierckpt.format.layout import local_dir, parse_uri

STEPS = (1, 2, 3)


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((50_000,), value), "n": value}


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.distcp"))


@pytest.fixture
def run(file_uri: str, tmp_path: Path) -> str:
    """Save three steps, each whole on both tiers."""
    with Checkpointer(file_uri) as checkpointer:
        for step in STEPS:
            checkpointer.save(step, state(float(step))).result(60)
    return file_uri


def damage(run: str, step: int, tmp_path: Path) -> None:
    """Flip a bit of the step's shard on both tiers."""
    for directory in (local(run, step, tmp_path), Path(run, f"step-{step}")):
        flip(shards(directory)[0])


def local(run: str, step: int, tmp_path: Path) -> Path:
    return local_dir(tmp_path / "local", parse_uri(f"{run}/step-{step}"))


def restored(run: str, step: int | None = None) -> tuple[int | None, dict[str, Any]]:
    target = state(0.0)
    return Checkpointer(run).restore(target, step), target


@pytest.mark.slow
def test_damaged_local_copy_is_quarantined_and_the_shared_one_used(
    run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (shard,) = shards(local(run, 3, tmp_path))
    flip(shard)
    step, target = restored(run)
    assert (step, target["w"].unique().tolist()) == (3, [3.0])
    assert shard.with_name(shard.name + ".bad").exists()
    assert any("is bad" in record.message and shard.name in record.message for record in caplog.records)
    assert restored(run)[0] == 3


def test_previous_step_is_restored_without_a_good_copy_and_logged(
    run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 3):
        damage(run, step, tmp_path)
    with caplog.at_level(logging.WARNING):
        step, target = restored(run)
    assert (step, target["n"], target["w"].unique().tolist()) == (1, 1.0, [1.0])
    (line,) = [record.message for record in caplog.records if record.message.startswith("restored ")]
    assert "step-1, because" in line
    assert line.index("step-3 has no good copy") < line.index("step-2 has no good copy")


@pytest.mark.parametrize(
    ("harm", "files"), [(Path.unlink, "*.distcp"), (flip, ".tierckpt/metadata/*")], ids=["missing", "metadata"]
)
def test_step_with_a_missing_file_or_damaged_metadata_is_skipped(
    harm: Callable[[Path], None], files: str, run: str, tmp_path: Path
) -> None:
    for directory in (local(run, 3, tmp_path), Path(run, "step-3")):
        for path in directory.glob(files):
            harm(path)
    assert restored(run)[0] == 2


def test_error_of_the_newest_step_is_raised_if_no_step_is_left(run: str, tmp_path: Path) -> None:
    for step in STEPS:
        damage(run, step, tmp_path)
    with pytest.raises(IntegrityError, match="no good copy") as caught:
        restored(run)
    assert "step-3" in str(caught.value.context["checkpoint"])


@pytest.mark.slow
def test_explicit_step_is_not_replaced_by_another(run: str, tmp_path: Path) -> None:
    damage(run, 2, tmp_path)
    with pytest.raises(IntegrityError):
        restored(run, 2)
    assert restored(run)[0] == 3


@pytest.mark.slow
def test_restore_command_falls_back_to_an_older_step(run: str, tmp_path: Path) -> None:
    from tierckpt.cli.ui.app import run as command

    damage(run, 3, tmp_path)
    assert command(["restore", run, "--to", str(tmp_path / "out")]) == 0
    target = state(0.0)
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    assert target["n"] == 2.0


@pytest.mark.slow
def test_all_ranks_fall_back_to_the_same_step(file_uri: str) -> None:
    """Only rank 1 reads the damaged shard."""
    found = launch("tests.fault.rank_scenarios:two_ranks_one_bad_shard", 2, uri=file_uri, timeout_seconds=90)
    assert found == {"steps": [1, 1], "values": [[1.0], [1.0]]}


def test_checkpoint_spread_over_both_tiers_is_whole(file_uri: str, tmp_path: Path) -> None:
    """Half of the shards are on this node, the other half on the shared tier."""
    tensors = {f"w{index}": torch.full((2000,), float(index)) for index in range(4)}
    save_drained(f"{file_uri}/step-5", tensors, single_file_per_rank=False)
    here, there = shards(local(file_uri, 5, tmp_path)), shards(Path(file_uri, "step-5"))
    for path in (*here[::2], *there[1::2]):
        path.unlink()
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-5"
    assert same(load(f"{file_uri}/step-5", tensors), tensors)
