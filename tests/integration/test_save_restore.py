"""The main path on each kind of shared storage: save, drain, lose the node, restore."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import tierckpt
from tests.states import load, same, save, small_state, zeros_like
from tierckpt.checkpoint.journal import Journal
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


def test_a_restore_fills_the_local_tier(shared_uri: str, local_root: Path) -> None:
    uri, state = f"{shared_uri}/step-1", small_state(1)
    save(uri, state)
    tierckpt.wait(uri, timeout_seconds=60)
    shutil.rmtree(local_root)
    load(uri, state)
    shards = list(local_dir(local_root, parse_uri(uri)).glob("*.distcp"))
    assert shards
    assert not [path for path in shards[0].parent.iterdir() if path.name.endswith(".tmp")]


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
        save(f"{shared_uri}/step-{step}", small_state(step))
        tierckpt.wait(f"{shared_uri}/step-{step}", timeout_seconds=60)
    assert tierckpt.latest(shared_uri) == f"{shared_uri}/step-100"
    shutil.rmtree(local_root)
    assert tierckpt.latest(shared_uri) == f"{shared_uri}/step-100"
    assert tierckpt.latest(f"{shared_uri}/step-9") == f"{shared_uri}/step-9"


@pytest.mark.slow
def test_saving_again_replaces_the_checkpoint_and_its_files(shared_uri: str, local_root: Path) -> None:
    uri = f"{shared_uri}/step-1"
    for seed in (1, 2, 3):
        save(uri, small_state(seed))
        tierckpt.wait(uri, timeout_seconds=60)
    directory = local_dir(local_root, parse_uri(uri))
    assert len(list(directory.glob("*.distcp"))) == 1
    shutil.rmtree(local_root)
    assert same(load(uri, small_state(3)), small_state(3))


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
    save(uri, state)
    tierckpt.wait(uri, timeout_seconds=60)
    shutil.rmtree(local_root)
    assert same(load(uri, state), state)


def test_foreign_files_are_left_alone(shared_uri: str, tmp_path: Path, file_uri: str) -> None:
    directory = Path(file_uri, "step-1")
    directory.mkdir(parents=True)
    for name in ("meta.pt", "train_state.json", "sub/x"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("theirs")
    for seed in (1, 2):
        save(str(directory), small_state(seed))
        tierckpt.wait(str(directory), timeout_seconds=60)
    for name in ("meta.pt", "train_state.json", "sub/x"):
        assert (directory / name).read_text() == "theirs"


def test_on_one_filesystem_a_link_replaces_the_copy(file_uri: str, local_root: Path) -> None:
    uri = f"{file_uri}/step-1"
    save(uri, small_state(1))
    shard = next(local_dir(local_root, parse_uri(uri)).glob("*.distcp"))
    assert Path(uri, shard.name).samefile(shard)
    assert Path(uri, ".metadata").exists()  # save returns after the shared commit
    assert Journal(local_root).entries() == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["shared", "local"])
def test_plain_pytorch_reads_both_tiers_without_tierckpt(where: str, file_uri: str, local_root: Path) -> None:  # P1
    uri, state = f"{file_uri}/step-1", small_state(5)
    save(uri, state)
    directory = uri if where == "shared" else str(local_dir(local_root, parse_uri(uri)))
    expected = Path(file_uri).parent / "expected.pt"
    torch.save(state, expected)
    code = (
        "import sys; sys.modules['tierckpt'] = None\n"
        "import torch, torch.distributed.checkpoint as dcp\n"
        "from torch.distributed.checkpoint import FileSystemReader\n"
        "state = torch.load(sys.argv[2], weights_only=False); weight = torch.zeros_like(state['model']['weight'])\n"
        "out = {'model': {'weight': weight, 'bias': torch.zeros(256, dtype=torch.bfloat16)}, 'step': None}\n"
        "dcp.load(out, storage_reader=FileSystemReader(sys.argv[1]), no_dist=True)\n"
        "assert torch.equal(out['model']['weight'], state['model']['weight'])\n"
        "assert torch.equal(out['model']['bias'], state['model']['bias']) and out['step'] == 5\n"
        "try:\n    import tierckpt\n    sys.exit('tierckpt can be imported')\nexcept ImportError: pass\n"
    )
    subprocess.run([sys.executable, "-c", code, directory, str(expected)], check=True, timeout=90)


def test_checkpoints_of_stock_dcp_are_read(file_uri: str) -> None:
    state = small_state(6)
    dcp.save(state, storage_writer=FileSystemWriter(f"{file_uri}/step-1"), no_dist=True)
    assert same(load(f"{file_uri}/step-1", state), state)
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-1"


def test_one_writer_and_one_reader_serve_many_checkpoints(file_uri: str) -> None:
    writer, reader = tierckpt.TierStorageWriter(f"{file_uri}/step-1"), tierckpt.TierStorageReader(f"{file_uri}/step-1")
    for step in (1, 2, 3):
        dcp.save(small_state(step), storage_writer=writer, checkpoint_id=Path(file_uri, f"step-{step}"), no_dist=True)
    for step in (3, 1, 2):
        target = zeros_like(small_state(step))
        dcp.load(target, storage_reader=reader, checkpoint_id=f"{file_uri}/step-{step}", no_dist=True)
        assert same(target, small_state(step))


def test_async_save_owns_its_copy(shared_uri: str) -> None:
    state = small_state(7)
    expected = pickle.loads(pickle.dumps(state))
    future = dcp.async_save(state, storage_writer=tierckpt.TierStorageWriter(f"{shared_uri}/step-1"), no_dist=True)
    state["model"]["weight"].zero_()  # as training would
    future.result(timeout=60)  # type: ignore[union-attr]
    assert same(load(f"{shared_uri}/step-1", expected), expected)


def test_reused_stager_saves_each_step(file_uri: str) -> None:
    stager, state = tierckpt.TierStager(), small_state(0)
    for step in (1, 2, 3):
        state["model"]["weight"].fill_(step)
        writer = tierckpt.TierStorageWriter(f"{file_uri}/step-{step}")
        dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True).result(timeout=60)  # type: ignore[union-attr]
    for step in (1, 2, 3):
        assert load(f"{file_uri}/step-{step}", state)["model"]["weight"].unique().tolist() == [step]
    stager.close()


@pytest.mark.slow
def test_drain_resumes_in_the_next_process(s3_uri: str, local_root: Path) -> None:
    """The trainer is killed after the save, before the drain; the next process finds the journal entry."""
    code = (
        "import os, sys, torch, torch.distributed.checkpoint as dcp\n"
        "import tierckpt\n"
        "from tierckpt.drain.background_drains import BackgroundDrains\n"
        "BackgroundDrains.submit = lambda self, token: None  # the drain never gets to run\n"
        "dcp.save({'w': torch.arange(1000)}, storage_writer=tierckpt.TierStorageWriter(sys.argv[1]), no_dist=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    uri = f"{s3_uri}/step-1"
    done = subprocess.run([sys.executable, "-c", code, uri], timeout=90, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert len(Journal(local_root).entries()) == 1
    with pytest.raises(tierckpt.errors.OperationTimeoutError):
        tierckpt.wait(f"{s3_uri}/step-2", tier="shared", timeout_seconds=0.2)
    tierckpt.wait(uri, tier="shared", timeout_seconds=60)
    shutil.rmtree(local_root)
    assert torch.equal(load(uri, {"w": torch.zeros(1000, dtype=torch.int64)})["w"], torch.arange(1000))


@pytest.mark.slow
def test_exit_waits_for_the_drain(s3_uri: str, local_root: Path) -> None:
    code = (
        "import sys, torch, torch.distributed.checkpoint as dcp, tierckpt\n"
        "dcp.save({'w': torch.arange(1000)}, storage_writer=tierckpt.TierStorageWriter(sys.argv[1]), no_dist=True)"
    )
    subprocess.run([sys.executable, "-c", code, f"{s3_uri}/step-1"], check=True, timeout=90)
    assert Journal(local_root).entries() == []
    shutil.rmtree(local_root)
    assert tierckpt.latest(s3_uri) == f"{s3_uri}/step-1"


def test_stock_reader_ignores_tierckpt_files(file_uri: str) -> None:
    """tierckpt's files next to DCP's do not disturb the stock reader."""
    state = small_state(8)
    save(f"{file_uri}/step-1", state)
    target = zeros_like(state)
    dcp.load(target, storage_reader=FileSystemReader(f"{file_uri}/step-1"), no_dist=True)
    assert same(target, state)


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


@pytest.mark.slow
def test_wait_is_for_the_newest_save_of_an_id(s3_uri: str, local_root: Path) -> None:
    uri = f"{s3_uri}/step-1"
    for seed in (1, 2, 3, 4):
        save(uri, small_state(seed))
        tierckpt.wait(uri, timeout_seconds=60)
        assert same(load(uri, small_state(seed), local_root=local_root / f"other-{seed}"), small_state(seed))


def test_outage_after_the_local_commit_loses_no_checkpoint(
    file_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared tier fails after the local commit: the save succeeds, and the mover retries."""
    from tierckpt.errors import StoreUnavailableError
    from tierckpt.stores.local import LocalStore

    async def away(*_: object) -> bool:
        raise StoreUnavailableError("away (seeded)")

    uri = f"{file_uri}/step-1"
    writer = tierckpt.TierStorageWriter(uri)
    with monkeypatch.context() as outage:
        outage.setattr(LocalStore, "link", away)
        dcp.save(small_state(1), storage_writer=writer, no_dist=True)
    dcp.save(small_state(2), storage_writer=writer, checkpoint_id=f"{file_uri}/step-2", no_dist=True)
    assert same(load(uri, small_state(1)), small_state(1))
    tierckpt.wait(uri, timeout_seconds=60)
    assert Path(uri, ".metadata").exists()


def test_journal_entries_of_other_jobs_do_not_fail_a_save(s3_uri: str, file_uri: str, local_root: Path) -> None:
    """A journal entry for a deleted bucket must not fail another run's save."""
    from tierckpt.checkpoint.journal import READY, JournalEntry
    from tierckpt.format.layout import parse_uri as parse

    Journal(local_root).write(JournalEntry("left", parse("s3://no-such-bucket-anywhere/x").uri, 0, READY, 1.0, 4096))
    with tierckpt.Checkpointer(file_uri) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"value": step})
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-2"
