"""One set of weights is loaded from a directory that may hold several; see ``tests/model_layouts.py``."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import tierckpt
from tests.model_layouts import LAYOUTS, value_of, write
from tierckpt.errors import CheckpointNotFoundError, ConfigError, IntegrityError


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("place", ["a path", "a URI"])
def test_published_layouts(
    name: str, place: str, tmp_path: Path, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout, directory = LAYOUTS[name], write(LAYOUTS[name], tmp_path / "model")
    where = str(directory) if place == "a path" else f"file://{directory}"
    if layout.loaded is None:
        with pytest.raises((IntegrityError, CheckpointNotFoundError)) as caught:
            tierckpt.load_safetensors(where, **layout.asked)
        assert layout.refused in f"{caught.value.message} {caught.value.hint}"
        return
    with caplog.at_level(logging.WARNING):
        found = tierckpt.load_safetensors(where, **layout.asked)
    wanted = {tensor: value_of(file, tensor) for file in layout.loaded for tensor in layout.files[file]}
    assert found.keys() == wanted.keys() and all(torch.equal(found[one], wanted[one]) for one in wanted)
    streamed = dict(tierckpt.stream_safetensors(where, **layout.asked))
    assert streamed.keys() == wanted.keys()
    said = " ".join(caplog.messages)
    below = layout.asked.get("subfolder", "")
    for file in layout.files:
        if file not in layout.loaded and file.startswith(below) and "/" not in file:
            assert file in said, "files that are not loaded are named"
    for tensor in layout.less:
        assert repr(tensor) in said


def test_invalid_arguments_are_rejected(tmp_path: Path, local_root: Path) -> None:
    directory = write(LAYOUTS["one file"], tmp_path / "model")
    with pytest.raises(ConfigError, match="is one file"):
        tierckpt.load_safetensors(directory / "model.safetensors", variant="fp16")
    with pytest.raises(ConfigError, match="subfolder"):
        tierckpt.load_safetensors(directory, subfolder="../other")
    with pytest.raises(CheckpointNotFoundError, match=r"has no b\.json"):
        tierckpt.load_safetensors(directory, index="b.json")


def test_a_tensor_in_two_shards_missing_from_the_index_is_rejected(tmp_path: Path, local_root: Path) -> None:
    layout = LAYOUTS["shards and an index"]
    twice = {file: (*tensors, "both") for file, tensors in layout.files.items()}
    directory = write(type(layout)(twice, layout.indexes), tmp_path / "model")
    with pytest.raises(IntegrityError, match="'both'"):
        tierckpt.load_safetensors(directory)
