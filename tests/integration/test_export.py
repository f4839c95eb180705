"""Checkpoints to safetensors and safetensors to tensors: bit for bit, all or nothing."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

import tierckpt
from tests.command_line import python
from tests.compat.worker import launch
from tests.files import flip, tmpfs
from tests.states import same, save, small_state
from tierckpt.client import close_all
from tierckpt.disk.processes import pid_namespace
from tierckpt.errors import CapacityError, ConfigError, IntegrityError, OperationTimeoutError, StateMismatchError
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.loading import export as exports
from tierckpt.loading.export import export_safetensors
from tierckpt.types import Progress


def model_state() -> dict[str, Any]:
    """Tensors of every dtype of safetensors, with bit patterns that arithmetic would change."""
    generator = torch.Generator().manual_seed(3)
    nan = torch.tensor([0x7FC1, -0x3F, 0x0001, -0x8000], dtype=torch.int16).view(torch.bfloat16)
    return {
        "wte": torch.randn(300, 64, generator=generator),
        "head.weight": torch.randn(64, 300, generator=generator).to(torch.bfloat16),
        "odd": nan,
        "half": torch.randn(33, generator=generator).half(),
        "fp8": torch.randn(128, generator=generator).to(torch.float8_e4m3fn),
        "double": torch.randn(7, generator=generator).double(),
        "ids": torch.arange(11),
        "mask": torch.tensor([True, False]),
        "byte": torch.arange(5, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


def training_state() -> dict[str, Any]:
    model = model_state()
    return {"model": model, "optimizer": {"m": torch.randn(300, 64)}, "step": 3, "note": {"text": "x"}}


def contents(directory: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of every file with the safetensors package."""
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


# --- export -----------------------------------------------------------------------------------------------------


def test_export_is_bit_for_bit_and_drops_the_prefix(file_uri: str, tmp_path: Path) -> None:
    state = training_state()
    save(f"{file_uri}/step-3", state, chunk_size_bytes="16KiB")
    result = export_safetensors(f"{file_uri}/step-3", tmp_path / "out", only="model")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert same(contents(tmp_path / "out"), state["model"])
    assert (result.tensors, result.files, result.uri) == (11, ("model.safetensors",), f"{file_uri}/step-3")
    assert result.size_bytes == sum(tensor.nbytes for tensor in state["model"].values())
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_without_only_every_tensor_keeps_its_name(file_uri: str, tmp_path: Path) -> None:
    state = training_state()
    save(f"{file_uri}/step-3", state)
    export_safetensors(file_uri, tmp_path / "out")  # the newest of the run
    expected = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    assert same(contents(tmp_path / "out"), expected | {"optimizer.m": state["optimizer"]["m"]})


@pytest.mark.slow
def test_files_are_split_at_the_limit_and_indexed(s3_uri: str, tmp_path: Path) -> None:
    state = {f"layer.{index}": torch.randn(100, 100) for index in range(7)}  # 40 kB each
    save(f"{s3_uri}/step-1", state, shard_size_bytes_max="90KB", chunk_size_bytes="16KiB")
    tierckpt.wait(f"{s3_uri}/step-1", timeout_seconds=60)
    close_all()
    shutil.rmtree(tmp_path / "local")
    seen: list[Progress] = []
    result = export_safetensors(
        f"{s3_uri}/step-1", tmp_path / "out", shard_size_bytes_max=100_000, listener=seen.append
    )
    names = [f"model-{index:05d}-of-00004.safetensors" for index in range(1, 5)]
    assert list(result.files) == names
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert index["weight_map"] == {name: file for file in names for name in load_file(tmp_path / "out" / file)}
    assert [len(load_file(tmp_path / "out" / name)) for name in names] == [2, 2, 2, 1]
    assert same(tierckpt.load_safetensors(tmp_path / "out"), state)
    assert [progress.done_bytes for progress in seen] == [40_000 * count for count in range(8)]
    assert {progress.total_bytes for progress in seen} == {280_000}


@pytest.mark.parametrize(
    ("spelled", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("FP32", torch.float32)]
)
def test_dtype_converts_floating_point_tensors(spelled: str, dtype: torch.dtype, file_uri: str, tmp_path: Path) -> None:
    state = {
        "w": torch.randn(64, 3),
        "h": torch.randn(9).bfloat16(),
        "ids": torch.arange(4),
        "mask": torch.tensor([True]),
    }
    save(f"{file_uri}/step-1", state)
    result = export_safetensors(f"{file_uri}/step-1", tmp_path / "out", dtype=spelled)
    expected = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    assert same(contents(tmp_path / "out"), expected)
    assert result.size_bytes == sum(tensor.nbytes for tensor in expected.values())


def test_checkpoint_of_stock_pytorch_is_exported(file_uri: str, tmp_path: Path) -> None:
    state = training_state()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{file_uri}/step-1"), no_dist=True)
    export_safetensors(f"{file_uri}/step-1", tmp_path / "out", only="model")
    assert same(contents(tmp_path / "out"), state["model"])


def sharded_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {"rows": torch.randn(7, 5, generator=generator), "bf16": torch.randn(9, 4, generator=generator).bfloat16()}


def save_sharded(uri: str) -> int:
    """Save as one rank of a job with unevenly sharded weights. Run by tests/compat/worker.py."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in sharded_weights().items()}
    dcp.save({"model": state}, storage_writer=tierckpt.TierStorageWriter(uri))
    return dist.get_rank()


@pytest.mark.slow
@pytest.mark.distributed
def test_shards_of_several_ranks_are_joined(file_uri: str, tmp_path: Path) -> None:
    launch("tests.integration.test_export:save_sharded", 3, uri=f"{file_uri}/step-1")
    export_safetensors(f"{file_uri}/step-1", tmp_path / "out", only="model")
    assert same(contents(tmp_path / "out"), sharded_weights())


# --- export: all or nothing -------------------------------------------------------------------------------------


def nothing_left(target: Path) -> bool:
    return not target.exists() and not list(target.parent.glob(f".{target.name}*"))


def test_damage_in_the_last_shard_leaves_no_export(file_uri: str, local_root: Path, tmp_path: Path) -> None:
    uri = f"{file_uri}/step-1"
    save(uri, {f"w{index}": torch.randn(100, 100) for index in range(4)}, shard_size_bytes_max="45KB")
    tierckpt.wait(uri, timeout_seconds=60)
    last = max(Path(uri).glob("*.distcp")).name
    for place in (Path(uri), local_dir(local_root, parse_uri(uri))):
        flip(place / last)
    written: list[Progress] = []
    with pytest.raises(IntegrityError, match=last):
        export_safetensors(uri, tmp_path / "out", shard_size_bytes_max=50_000, listener=written.append)
    assert written, "no file was written before the error, so the test shows nothing"
    assert nothing_left(tmp_path / "out")


def test_a_directory_in_use_is_refused_and_untouched(file_uri: str, tmp_path: Path) -> None:
    save(f"{file_uri}/step-1", {"w": torch.ones(3)})
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("precious")
    with pytest.raises(ConfigError, match="not an empty directory"):
        export_safetensors(f"{file_uri}/step-1", tmp_path / "out")
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["precious"]
    (tmp_path / "out/mine").unlink()
    export_safetensors(f"{file_uri}/step-1", tmp_path / "out")  # empty is fine
    assert same(contents(tmp_path / "out"), {"w": torch.ones(3)})


def test_files_of_a_killed_export_are_replaced(file_uri: str, tmp_path: Path) -> None:
    save(f"{file_uri}/step-1", {"w": torch.ones(3)})
    ended = f"{pid_namespace():08x}{0x7FFFFFFF:08x}{1:016x}{0:08x}"  # no process has this number
    leftover = tmp_path / f".out.exporting.{ended}.tmp"
    leftover.mkdir()
    (leftover / "model-00001-of-00009.safetensors").write_bytes(b"half")
    export_safetensors(f"{file_uri}/step-1", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert not leftover.exists()


KILLED = """
import os, signal, sys
from tierckpt.loading import export

write = export.write_file
def once(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
export.write_file = once
export.export_safetensors(sys.argv[1], sys.argv[2], shard_size_bytes_max=1000)
"""


@pytest.mark.slow
def test_kill_between_two_files_publishes_no_directory(file_uri: str, tmp_path: Path) -> None:
    state = {"a": torch.randn(500), "b": torch.randn(500)}
    save(f"{file_uri}/step-1", state)
    assert python(KILLED, f"{file_uri}/step-1", tmp_path / "out").returncode == -9
    assert list(tmp_path.glob(".out.exporting.*.tmp/model-00001-of-00002.safetensors"))
    assert not (tmp_path / "out").exists()
    export_safetensors(f"{file_uri}/step-1", tmp_path / "out", shard_size_bytes_max=1000)
    assert same(tierckpt.load_safetensors(tmp_path / "out"), state)


def test_two_exports_to_one_directory_do_not_mix(
    file_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(f"{file_uri}/step-1", {"w": torch.ones(3)})
    writing, go = threading.Event(), threading.Event()
    write = exports.write_file

    def paused(*arguments: Any) -> None:
        writing.set()
        assert go.wait(60)
        write(*arguments)

    monkeypatch.setattr(exports, "write_file", paused)
    first = threading.Thread(target=export_safetensors, args=(f"{file_uri}/step-1", tmp_path / "out"))
    first.start()
    assert writing.wait(60)
    with pytest.raises(OperationTimeoutError, match="another process"):
        export_safetensors(f"{file_uri}/step-1", tmp_path / "out")
    go.set()
    first.join(60)
    assert same(contents(tmp_path / "out"), {"w": torch.ones(3)})


def test_a_mount_point_is_refused(file_uri: str, tmp_path: Path) -> None:
    save(f"{file_uri}/step-1", {"w": torch.ones(3)})
    with tmpfs(tmp_path / "mount", "size=1m") as mount:
        with pytest.raises(ConfigError, match="mount point"):
            export_safetensors(f"{file_uri}/step-1", mount)
        with pytest.raises(CapacityError, match="free"):
            export_safetensors(f"{file_uri}/step-1", mount / "below")
        assert list(mount.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"dtype": "int4"}, "int4"), ({"only": "modle"}, "modle"), ({"only": "step"}, "no tensors below")],
)
def test_invalid_export_raises(arguments: dict[str, Any], said: str, file_uri: str, tmp_path: Path) -> None:
    save(f"{file_uri}/step-1", small_state(1))
    with pytest.raises(ConfigError, match=said) as caught:
        export_safetensors(f"{file_uri}/step-1", tmp_path / "out", **arguments)
    assert "only" not in arguments or "model" in caught.value.hint
    assert nothing_left(tmp_path / "out")


def test_unsupported_dtype_error_names_it(file_uri: str, tmp_path: Path) -> None:
    save(f"{file_uri}/step-1", {"good": torch.ones(2), "bad": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(StateMismatchError, match="bad"):
        export_safetensors(f"{file_uri}/step-1", tmp_path / "out")
    assert nothing_left(tmp_path / "out")


# --- load_safetensors: see tests/unit/loading for layouts and damage ---------------------------------------------
