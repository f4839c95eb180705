"""Names of the file system's maximum length work in every verb; longer names are refused before any write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tierckpt import Checkpointer, TierStorageReader, TierStorageWriter
from tierckpt.errors import ConfigError
from tierckpt.loading.export import export_safetensors

LONGEST = pytest.mark.parametrize("name", ["n" * 255, "é" * 127], ids=["ascii", "multi-byte"])


def save_and_load(uri: Path) -> None:
    dcp.save({"x": torch.ones(4)}, storage_writer=TierStorageWriter(str(uri)))
    state = {"x": torch.zeros(4)}
    dcp.load(state, storage_reader=TierStorageReader(str(uri)))
    assert state["x"].sum() == 4


@LONGEST
def test_run_checkpoint_and_targets_of_the_longest_name(tmp_path: Path, name: str) -> None:
    with Checkpointer(str(tmp_path / "runs" / name)) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(4)})
    assert tierckpt.latest(str(tmp_path / "runs" / name))
    uri = tmp_path / "checkpoints" / name
    save_and_load(uri)
    tierckpt.prefetch(str(uri), to=tmp_path / "prefetched" / name)
    (tmp_path / "exported").mkdir()
    export_safetensors(str(uri), tmp_path / "exported" / name)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_bytes(b"weights")
    tierckpt.prefetch(str(tmp_path / "model"), to=tmp_path / "model-here")
    assert (tmp_path / "model-here" / name).read_bytes() == b"weights"
    tierckpt.adopt(tmp_path / "model", str(tmp_path / "adopted" / "step-1")).wait(timeout_seconds=60)


@pytest.mark.parametrize("below", ["n" * 256, "é" * 128, "/".join(["d" * 200] * 22)], ids=["name", "bytes", "path"])
def test_too_long_name_is_refused_with_its_length(tmp_path: Path, below: str) -> None:
    for work in (
        lambda: Checkpointer(str(tmp_path / below)),
        lambda: TierStorageWriter(str(tmp_path / below)),
        lambda: tierckpt.prefetch(str(tmp_path), to=tmp_path / "x" / below),
        lambda: export_safetensors(str(tmp_path), tmp_path / below),
    ):
        with pytest.raises(ConfigError, match="too long for its file system"):
            work()


def test_key_too_long_for_a_file_gets_another_name_or_is_excluded(s3_uri: str, tmp_path: Path) -> None:
    import fsspec

    for key, data in {"good.bin": b"good", "k" * 300: b"long", "k" * 299: b"shorter"}.items():
        with fsspec.open(f"{s3_uri}/model/{key}", "wb") as file:
            file.write(data)
    tierckpt.prefetch(f"{s3_uri}/model", to=tmp_path / "all")
    named = {path.name: path.read_bytes() for path in (tmp_path / "all").glob("k*")}
    assert sorted(named.values()) == [b"long", b"shorter"] and all(name.startswith("k" * 200) for name in named)
    tierckpt.prefetch(f"{s3_uri}/model", to=tmp_path / "to", exclude=["k*"])
    assert not list((tmp_path / "to").glob("k*"))
    assert (tmp_path / "to" / "good.bin").read_bytes() == b"good"
