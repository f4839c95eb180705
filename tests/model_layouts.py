"""Directories of models as people publish them, and the files that a loader takes of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass(frozen=True)
class Layout:
    """Files with their tensors; indexes with the file of each tensor; and the expected selection, or the error."""

    files: Mapping[str, tuple[str, ...]]
    indexes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    loaded: tuple[str, ...] | None = None
    """Of these files. None: refused."""
    refused: str = ""
    """A word of the error."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """variant=, subfolder=, index=."""
    less: tuple[str, ...] = ()
    """Tensors that an index names and no file has."""


def _sharded(index: str, files: Mapping[str, tuple[str, ...]]) -> dict[str, dict[str, str]]:
    return {index: {tensor: file for file, tensors in files.items() for tensor in tensors}}


TWO = {SHARDS[0]: ("a",), SHARDS[1]: ("b",)}
WHOLE = {"model.safetensors": ("a", "b")}
FP16 = {"model.fp16-00001-of-00002.safetensors": ("a",), "model.fp16-00002-of-00002.safetensors": ("b",)}
LATE = {f"diffusion_pytorch_model-0000{n}-of-00002.fp16.safetensors": (t,) for n, t in ((1, "a"), (2, "b"))}
MISTRAL = {"consolidated.safetensors": ("layers.a", "layers.b")}
MISTRAL_SHARDS = {f"consolidated-0000{n}-of-00002.safetensors": (f"layers.{t}",) for n, t in ((1, "a"), (2, "b"))}

LAYOUTS: dict[str, Layout] = {
    "one file": Layout(WHOLE, loaded=("model.safetensors",)),
    "shards and an index": Layout(TWO, _sharded(INDEX, TWO), SHARDS),
    "shards without an index": Layout(TWO, loaded=SHARDS),
    "a shard is missing, no index": Layout({SHARDS[0]: ("a",)}, refused="lacks shards 2 of 2"),
    "shards of two versions, no index": Layout(
        {**TWO, "model-00001-of-00003.safetensors": ("a",)}, refused="of 2 and of 3"
    ),
    "shards of two versions and an index": Layout(
        {**TWO, "model-00001-of-00003.safetensors": ("a",)}, _sharded(INDEX, TWO), SHARDS
    ),
    "one file and shards of the previous version": Layout(
        {**WHOLE, **TWO}, _sharded(INDEX, TWO), ("model.safetensors",)
    ),
    "Mistral: one file of each naming": Layout({**WHOLE, **MISTRAL}, loaded=("model.safetensors",)),
    "Mistral: two indexes": Layout(
        {**TWO, **MISTRAL_SHARDS},
        {**_sharded(INDEX, TWO), **_sharded("consolidated.safetensors.index.json", MISTRAL_SHARDS)},
        SHARDS,
    ),
    "Mistral: the other index": Layout(
        {**TWO, **MISTRAL_SHARDS},
        {**_sharded(INDEX, TWO), **_sharded("consolidated.safetensors.index.json", MISTRAL_SHARDS)},
        tuple(MISTRAL_SHARDS),
        asked={"index": "consolidated.safetensors.index.json"},
    ),
    "Mistral: only its own naming": Layout(MISTRAL, loaded=tuple(MISTRAL)),
    "an adapter and its model": Layout(
        {**WHOLE, "adapter_model.safetensors": ("lora",)}, loaded=("model.safetensors",)
    ),
    "an adapter alone": Layout({"adapter_model.safetensors": ("lora",)}, loaded=("adapter_model.safetensors",)),
    "an adapter beside Mistral's naming": Layout(
        {**MISTRAL, "adapter_model.safetensors": ("lora",)}, refused="several sets"
    ),
    "a model and a variant": Layout(
        {**WHOLE, "model.fp16.safetensors": ("a", "b")}, loaded=("model.safetensors",)
    ),
    "the variant of two": Layout(
        {**WHOLE, "model.fp16.safetensors": ("a", "b")}, loaded=("model.fp16.safetensors",), asked={"variant": "fp16"}
    ),
    "the variant, in shards": Layout(
        {**TWO, **FP16},
        {**_sharded(INDEX, TWO), **_sharded("model.safetensors.index.fp16.json", FP16)},
        tuple(FP16),
        asked={"variant": "fp16"},
    ),
    "a variant that begins with a digit": Layout(
        {**WHOLE, "model.4bit.safetensors": ("a", "b")}, loaded=("model.4bit.safetensors",), asked={"variant": "4bit"}
    ),
    "a variant alone": Layout({"model.fp16.safetensors": ("a",)}, loaded=("model.fp16.safetensors",)),
    "two variants": Layout(
        {"model.fp16.safetensors": ("a",), "model.bf16.safetensors": ("a",)}, refused="several sets"
    ),
    "a variant that is not there": Layout(
        {**WHOLE, "model.bf16.safetensors": ("a",)}, refused="'bf16'", asked={"variant": "fp16"}
    ),
    "diffusers: the variant behind the number": Layout(
        {**LATE, "diffusion_pytorch_model.safetensors": ("a", "b")}, loaded=tuple(LATE), asked={"variant": "fp16"}
    ),
    "diffusers: a pipeline": Layout(
        {"unet/diffusion_pytorch_model.safetensors": ("a",), "vae/diffusion_pytorch_model.safetensors": ("b",)},
        refused="subfolder=",
    ),
    "diffusers: a part of a pipeline": Layout(
        {"unet/diffusion_pytorch_model.safetensors": ("a",), "vae/diffusion_pytorch_model.safetensors": ("b",)},
        loaded=("vae/diffusion_pytorch_model.safetensors",),
        asked={"subfolder": "vae"},
    ),
    "an index that lacks a tensor of its shards": Layout(
        {SHARDS[0]: ("a", "rotary"), SHARDS[1]: ("b",)}, _sharded(INDEX, TWO), SHARDS
    ),
    "an index that names a tied head": Layout(
        TWO, {INDEX: {"a": SHARDS[0], "b": SHARDS[1], "lm_head": SHARDS[1]}}, SHARDS, less=("lm_head",)
    ),
    "an index that names another file": Layout(TWO, {INDEX: {"a": SHARDS[1], "b": SHARDS[0]}}, SHARDS),
    "an index that names a file that is not there": Layout(
        {SHARDS[0]: ("a",)}, _sharded(INDEX, TWO), refused="not there"
    ),
    "files of names of one's own": Layout({"first.safetensors": ("a",), "last.safetensors": ("b",)},
                                           loaded=("first.safetensors", "last.safetensors")),
    "a model and a file of another name": Layout(
        {**WHOLE, "vision.safetensors": ("v",)}, loaded=("model.safetensors",)
    ),
    "one name in two files, no index": Layout(
        {"first.safetensors": ("a",), "last.safetensors": ("a",)}, refused="holds too"
    ),
    "no weights": Layout({}, refused="no safetensors files"),
}  # fmt: skip


def value_of(file: str, tensor: str) -> torch.Tensor:
    """Each tensor of each file is of its own."""
    return torch.frombuffer(bytearray(f"{file}|{tensor}".encode()), dtype=torch.uint8).clone()


def write(layout: Layout, directory: Path, make: Callable[[str, str], torch.Tensor] = value_of) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    for file, tensors in layout.files.items():
        (directory / file).parent.mkdir(exist_ok=True)
        save_file({name: make(file, name) for name in tensors}, directory / file)
    for index, weight_map in layout.indexes.items():
        (directory / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
