"""Checkpoints to safetensors: bit for bit, all or nothing, in bounded memory."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

import tierckpt
from tests.command_line import python
from tests.compat.worker import launch
from tests.files import flip, tmpfs
from tests.reads import told
from tests.states import same, save, save_drained, small_state
from tierckpt.client import close_all
from tierckpt.errors import CapacityError, ConfigError, IntegrityError, OperationTimeoutError, StateMismatchError
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.loading import export
from tierckpt.loading.export import Item, blocks, export_safetensors
from tierckpt.read.parallel_read import batches
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
    save_drained(f"{s3_uri}/step-1", state, shard_size_bytes_max="90KB", chunk_size_bytes="16KiB")
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
    save_drained(uri, {f"w{index}": torch.randn(100, 100) for index in range(4)}, shard_size_bytes_max="45KB")
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
    export_safetensors(f"{file_uri}/step-1", tmp_path / "out")  # other file names than those that are left
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert not list(tmp_path.glob(".out.exporting.*.tmp"))
    assert same(tierckpt.load_safetensors(tmp_path / "out"), state)


def test_two_exports_to_one_directory_do_not_mix(
    file_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(f"{file_uri}/step-1", {"w": torch.ones(3)})
    writing, go = threading.Event(), threading.Event()
    write = export.write_file

    def paused(*arguments: Any) -> None:
        writing.set()
        assert go.wait(60)
        write(*arguments)

    monkeypatch.setattr(export, "write_file", paused)
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


# --- export: memory ---------------------------------------------------------------------------------------------

MIB = 1 << 20
WINDOW = 4 * MIB
MEMORY_BOUND = 3 * WINDOW + 16 * MIB + 20 * MIB
"""Two windows, the source of a conversion, the reader's two buffers, and slack."""

MEASURED = """
import json, sys
from tierckpt.disk.io_tuner import ReadMode, ReadTuner
from tierckpt.loading import export
from tierckpt.loading.export import export_safetensors

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key + ":"))

write_file = export.write_file
ReadTuner.mode = lambda *_: ReadMode(direct=True, threads=2)
export.write_file = lambda *arguments: write_file(*arguments, window_bytes=int(sys.argv[4]))
export_safetensors(sys.argv[1], sys.argv[2] + "-small", only="small")
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
result = export_safetensors(sys.argv[1], sys.argv[2], only="model", dtype=sys.argv[3] or None)
print(json.dumps(dict(size=result.size_bytes, files=len(result.files), peak=status("VmHWM") - before)))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """80 MiB with one tensor of 48 MiB, which exceeds the memory bound."""
    folder = tmp_path_factory.mktemp("checkpoint")
    state = {
        "model": {"large": torch.arange(12 * MIB, dtype=torch.float32).view(3, -1), "other": torch.ones(8 * MIB)},
        "small": {"w": torch.ones(4096)},
    }
    save(f"{folder}/step-1", state, local_root=folder / "local", mover="inline", drain=False)
    return f"{folder}/step-1"


def local_root_of(checkpoint: str) -> Path:
    return Path(checkpoint).parent / "local"


@contextmanager
def windows_of(size_bytes: int) -> Iterator[None]:
    write_file = export.write_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "write_file", lambda *arguments: write_file(*arguments, window_bytes=size_bytes))
        yield


def measured(checkpoint: str, to: Path, window_bytes: int, dtype: str = "") -> dict[str, int]:
    environment = {"TIERCKPT_LOCAL_ROOT": str(local_root_of(checkpoint)), "TIERCKPT_MOVER": "inline"}
    done = python(MEASURED, checkpoint, to, dtype, window_bytes, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_export_memory_is_two_windows_for_any_tensors(dtype: str, checkpoint: str, tmp_path: Path) -> None:
    found = measured(checkpoint, tmp_path / "out", WINDOW, dtype)
    assert (found["files"], found["size"]) == (1, (80 if not dtype else 40) * MIB)
    assert found["peak"] <= MEMORY_BOUND
    loaded = load_file(tmp_path / "out/model.safetensors")
    expected = torch.arange(12 * MIB, dtype=torch.float32).view(3, -1)
    assert same(loaded["large"], expected.bfloat16() if dtype else expected)
    assert bool((loaded["other"] == 1).all())


@pytest.mark.slow
def test_control_large_windows_exceed_the_bound(checkpoint: str, tmp_path: Path) -> None:
    assert measured(checkpoint, tmp_path / "out", 256 * MIB)["peak"] > MEMORY_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("window_bytes", [96, 1000, 4096, 50_000])
def test_window_size_does_not_change_the_file(window_bytes: int, tmp_path: Path, file_uri: str) -> None:
    generator = torch.Generator().manual_seed(4)
    state = {
        "cube": torch.randn(5, 7, 11, generator=generator),
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(13, 3, generator=generator).half(),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
        "ids": torch.arange(101),
    }
    save(f"{file_uri}/step-1", state, chunk_size_bytes="4KiB")
    export_safetensors(f"{file_uri}/step-1", tmp_path / "expected")
    with windows_of(window_bytes):
        export_safetensors(f"{file_uri}/step-1", tmp_path / "out")
    assert same(load_file(tmp_path / "out/model.safetensors"), state)
    left, right = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("expected", "out"))
    assert left == right or pytest.fail("the bytes differ")


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7,), (3, 5), (1, 1, 9), (2, 3, 4, 5), (1000, 2)])
@pytest.mark.parametrize("size_bytes", [1, 4, 17, 64, 1 << 20])
def test_blocks_cover_the_tensor_once_in_order(shape: tuple[int, ...], size_bytes: int) -> None:
    metadata = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), [])
    item = Item("t", "t", metadata, torch.float32)
    found = list(blocks([item], 40, size_bytes))
    values = torch.arange(math.prod(shape)).view(shape)
    position, seen = 40, []
    for block in found:
        assert block.start == position
        assert block.size_bytes <= max(4, size_bytes)
        position = block.stop
        part = values
        for dim, (offset, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        seen += part.flatten().tolist()
    assert seen == list(range(math.prod(shape)))
    for window in batches(found, lambda block: block.memory_bytes, size_bytes):
        assert len(window) == 1 or sum(block.size_bytes for block in window) <= size_bytes


def test_full_disk_leaves_no_export(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tmpfs smaller than the export, whose free space is reported too large."""
    monkeypatch.setattr(export, "require_room", lambda *_, **__: None)
    with tmpfs(tmp_path / "mount", "size=12m") as mount:
        with pytest.raises(CapacityError):
            export_safetensors(checkpoint, mount / "out", only="model", local_root=local_root_of(checkpoint))
        assert [path.name for path in mount.iterdir() if not path.name.endswith(".lock")] == []


def test_row_larger_than_a_window_is_read_once(checkpoint: str, tmp_path: Path) -> None:
    with windows_of(WINDOW), told() as read:
        result = export_safetensors(checkpoint, tmp_path / "out", only="model", local_root=local_root_of(checkpoint))
    assert read.total() <= 1.3 * result.size_bytes
