"""Export in bounded memory: files and tensors larger than the bound are exported correctly."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from tests.command_line import python
from tests.files import tmpfs
from tests.reads import told
from tests.states import same, save
from tierckpt.errors import CapacityError
from tierckpt.loading import export
from tierckpt.loading.export import Item, blocks, export_safetensors
from tierckpt.read.parallel_read import batches

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


def measured(checkpoint: str, to: Path, window_bytes: int, dtype: str = "") -> dict[str, int]:
    environment = {"TIERCKPT_LOCAL_ROOT": str(Path(checkpoint).parent / "local"), "TIERCKPT_MOVER": "inline"}
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
    write_file = export.write_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "write_file", lambda *arguments: write_file(*arguments, window_bytes=window_bytes))
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
    monkeypatch.setattr(export, "check_room", lambda *_: None)
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(Path(checkpoint).parent / "local"))
    with tmpfs(tmp_path / "mount", "size=12m") as mount:
        with pytest.raises(CapacityError):
            export_safetensors(checkpoint, mount / "out", only="model")
        assert [path.name for path in mount.iterdir() if not path.name.endswith(".lock")] == []


def test_row_larger_than_a_window_is_read_once(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file = export.write_file
    monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(Path(checkpoint).parent / "local"))
    monkeypatch.setattr(export, "write_file", lambda *arguments: write_file(*arguments, window_bytes=WINDOW))
    with told() as read:
        result = export_safetensors(checkpoint, tmp_path / "out", only="model")
    assert read.total() <= 1.3 * result.size_bytes
