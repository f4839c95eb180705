"""The main path on each kind of shared storage: save, drain, lose the node, restore."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import tierckpt
from tests.command_line import python
from tests.states import load, same, save, save_drained, small_state
from tierckpt.checkpoint.journal import READY, Journal, JournalEntry
from tierckpt.checkpoint.local_commit import read_local_manifest
from tierckpt.format.layout import local_dir, parse_uri


def test_checkpoint_is_restored_from_either_tier(shared_uri: str, local_root: Path) -> None:
    uri, state = f"{shared_uri}/step-1", small_state(1)
    save(uri, state)
    assert same(load(uri, state), state)  # from the local tier
    tierckpt.wait(uri, tier="shared", timeout_seconds=60)
    assert Journal(local_root).entries() == []
    shutil.rmtree(local_root)  # lose the node
    assert same(load(uri, state), state)
    found = {path.suffix for path in local_dir(local_root, parse_uri(uri)).iterdir()}
    assert ".distcp" in found and ".tmp" not in found, "a restore must fill the local tier"


def test_many_small_shards_all_arrive(shared_uri: str, local_root: Path) -> None:
    uri, state = f"{shared_uri}/step-1", {f"w{index}": torch.randn(64, 64) for index in range(20)}
    save(uri, state, shard_size_bytes_max="40KiB", chunk_size_bytes="8KiB")
    manifest = read_local_manifest(local_dir(local_root, parse_uri(uri)))
    assert manifest is not None
    assert len(manifest.files) == 10
    assert all(entry.size_bytes < 45_000 for entry in manifest.files)
    tierckpt.wait(uri, timeout_seconds=60)
    shutil.rmtree(local_root)
    assert same(load(uri, state), state)


@pytest.mark.slow
def test_latest_is_the_newest_committed_step(shared_uri: str, local_root: Path) -> None:
    assert tierckpt.latest(shared_uri) is None
    for step in (9, 10, 100):
        save_drained(f"{shared_uri}/step-{step}", small_state(step))
    assert tierckpt.latest(shared_uri) == f"{shared_uri}/step-100"
    shutil.rmtree(local_root)
    assert tierckpt.latest(shared_uri) == f"{shared_uri}/step-100"
    assert tierckpt.latest(f"{shared_uri}/step-9") == f"{shared_uri}/step-9"


def test_drain_false_keeps_the_checkpoint_on_the_local_tier(shared_uri: str, local_root: Path) -> None:
    uri, state = f"{shared_uri}/step-1", small_state(1)
    save(uri, state, drain=False)
    assert same(load(uri, state), state)
    assert Journal(local_root).entries() == []
    with pytest.raises(tierckpt.errors.CommitAbandonedError, match="drain=False"):
        tierckpt.wait(uri, timeout_seconds=60)
    shutil.rmtree(local_root)
    with pytest.raises(tierckpt.errors.CheckpointNotFoundError):
        load(uri, state)


def test_any_fsspec_url_is_a_shared_tier(local_root: Path) -> None:
    uri, state = "memory://bucket-of-the-process/run/step-1", small_state(4)
    save_drained(uri, state)
    shutil.rmtree(local_root)
    assert same(load(uri, state), state)


def test_foreign_files_are_left_alone(file_uri: str) -> None:
    theirs = [Path(file_uri, "step-1", name) for name in ("meta.pt", "train_state.json", "sub/x")]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("theirs")
    for seed in (1, 2):
        save_drained(f"{file_uri}/step-1", small_state(seed))
    assert {path.read_text() for path in theirs} == {"theirs"}


def test_on_one_filesystem_a_link_replaces_the_copy(file_uri: str, local_root: Path) -> None:
    uri = f"{file_uri}/step-1"
    save(uri, small_state(1))
    shard = next(local_dir(local_root, parse_uri(uri)).glob("*.distcp"))
    assert Path(uri, shard.name).samefile(shard)
    assert Path(uri, ".metadata").exists()  # save returns after the shared commit
    assert Journal(local_root).entries() == []


@pytest.mark.slow
def test_exit_waits_for_the_drain(s3_uri: str, local_root: Path) -> None:
    code = (
        "import sys, torch, torch.distributed.checkpoint as dcp, tierckpt\n"
        "dcp.save({'w': torch.arange(1000)}, storage_writer=tierckpt.TierStorageWriter(sys.argv[1]), no_dist=True)"
    )
    python(code, f"{s3_uri}/step-1", check=True)
    assert Journal(local_root).entries() == []
    shutil.rmtree(local_root)
    assert tierckpt.latest(s3_uri) == f"{s3_uri}/step-1"


def test_saving_twice_during_an_outage_drains_the_newer_one(
    s3_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{s3_uri}/step-1"
    with monkeypatch.context() as stuck:
        stuck.setattr("tierckpt.drain.background_drains.BackgroundDrains.submit", lambda self, token: None)
        for seed in (1, 2, 3):
            save(uri, small_state(seed))
    assert len(Journal(local_root).entries()) == 3
    tierckpt.wait(uri, timeout_seconds=60)
    assert Journal(local_root).entries() == []
    shutil.rmtree(local_root)
    assert same(load(uri, small_state(3)), small_state(3))


def test_journal_entries_of_other_jobs_do_not_fail_a_save(s3_uri: str, file_uri: str, local_root: Path) -> None:
    Journal(local_root).write(JournalEntry("left", "s3://deleted-bucket/x", 0, READY, 1.0, 4096))
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"value": step})
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-2"
