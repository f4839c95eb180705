"""Checkpoints cross both ways between stock DCP and us, with everything a state dict can hold (P1)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import tierckpt
from tests.compat.everything import blank, differences, everything
from tests.compat.extensions import Flipped, registry
from tests.states import save_drained as save_ours
from tierckpt.dcp import shard_delivery
from tierckpt.format.layout import local_dir, parse_uri

EXTENSIONS = {"flipped": [Flipped], "flipped-twice": [Flipped, Flipped], "zstandard": [ZStandard]}
"""No chain of two different ones: torch 2.13 records them in the wrong order and cannot load its own save."""


def load_ours(uri: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    target = blank(state)
    dcp.load(target, storage_reader=tierckpt.TierStorageReader(uri, **options), no_dist=True)
    return target


def assert_stock_loads(state: dict[str, Any], tmp_path: Path, *uris: str) -> None:
    """Stock PyTorch loads ``state`` from each of ``uris``, in a process where tierckpt cannot be imported."""
    expected = tmp_path / "expected.pt"
    torch.save(state, expected)
    script = Path(__file__).with_name("stock_reader.py")
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(expected), *uris], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"thread_count": 3},
        {"single_file_per_rank": False},
        {"sync_files": False, "per_thread_copy_ahead": 0},
        {"shard_size_bytes_max": "64KiB", "chunk_size_bytes": "8KiB"},
    ],
    ids=["threads", "file-per-item", "no-fsync", "small-shards"],
)
def test_stock_reads_ours_however_it_was_written(options: dict[str, Any], file_uri: str, local_root: Path) -> None:
    uri, state = f"{file_uri}/step-1", everything(1)
    save_ours(uri, state, **options)
    assert differences(load_ours(uri, state), state) == []
    for where in (uri, local_dir(local_root, parse_uri(uri))):
        target = blank(state)
        dcp.load(target, storage_reader=FileSystemReader(where), no_dist=True)
        assert differences(target, state) == []


@pytest.mark.slow
@pytest.mark.server
def test_stock_reads_ours_from_s3(s3_uri: str, tmp_path: Path) -> None:
    uri, state = f"{s3_uri}/step-1", everything(2)
    save_ours(uri, state)
    assert_stock_loads(state, tmp_path, uri)


@pytest.mark.slow
def test_stock_reads_both_tiers_of_a_replaced_checkpoint(file_uri: str, local_root: Path, tmp_path: Path) -> None:
    uri = f"{file_uri}/step-1"
    for seed in (1, 2):
        save_ours(uri, everything(seed))
    assert_stock_loads(everything(2), tmp_path, uri, str(local_dir(local_root, parse_uri(uri))))


def test_torch_converts_ours_to_one_file(file_uri: str, tmp_path: Path) -> None:
    uri, state = f"{file_uri}/step-1", everything(3)
    save_ours(uri, state)
    dcp_to_torch_save(uri, tmp_path / "whole.pt")
    assert differences(torch.load(tmp_path / "whole.pt", weights_only=False), state) == []


@pytest.mark.slow
@pytest.mark.parametrize("thread_count", [1, 3])
@pytest.mark.parametrize("single_file_per_rank", [True, False])
def test_ours_reads_stock(single_file_per_rank: bool, thread_count: int, file_uri: str) -> None:
    uri, state = f"{file_uri}/step-1", everything(4)
    writer = FileSystemWriter(uri, single_file_per_rank=single_file_per_rank, thread_count=thread_count)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert differences(load_ours(uri, state), state) == []
    assert tierckpt.latest(file_uri) == uri


@pytest.mark.server
def test_ours_reads_stock_from_s3(s3_uri: str) -> None:
    uri, state = f"{s3_uri}/step-1", everything(5)
    dcp.save(state, storage_writer=FsspecWriter(uri), no_dist=True)
    assert differences(load_ours(uri, state), state) == []
    assert tierckpt.latest(s3_uri) == uri


@pytest.mark.slow
def test_ours_replaces_stock(file_uri: str, tmp_path: Path) -> None:
    """Saving over a checkpoint of stock DCP: the new one is what everybody reads."""
    uri = f"{file_uri}/step-1"
    dcp.save(everything(6), storage_writer=FileSystemWriter(uri), no_dist=True)
    save_ours(uri, everything(7))
    assert differences(load_ours(uri, everything(7)), everything(7)) == []
    assert_stock_loads(everything(7), tmp_path, uri)


@pytest.mark.slow
@pytest.mark.parametrize("chain", EXTENSIONS)
def test_stream_extensions(chain: str, file_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they fill several shards."""
    state = everything(8)
    monkeypatch.setattr(shard_delivery, "STREAMED_BYTES", 1 << 14)
    save_ours(f"{file_uri}/ours-1", state, _extensions=[kind() for kind in EXTENSIONS[chain]])
    assert len(list(Path(file_uri, "ours-1").glob("*.distcp"))) > 1
    stock = FileSystemWriter(f"{file_uri}/stock-1", _extensions=[kind() for kind in EXTENSIONS[chain]])
    dcp.save(state, storage_writer=stock, no_dist=True)
    for name in ("ours-1", "stock-1"):
        assert differences(load_ours(f"{file_uri}/{name}", state, _extension_registry=registry()), state) == []
    assert_stock_loads(state, tmp_path, f"{file_uri}/ours-1")


def test_an_extension_nobody_registered_is_named(file_uri: str) -> None:
    state = {"weight": torch.randn(4)}
    save_ours(f"{file_uri}/step-1", state, _extensions=[Flipped()])
    with pytest.raises(dcp.CheckpointException, match=r"stream\.flipped"):
        load_ours(f"{file_uri}/step-1", state)
