"""A model and a run on storage, for scenarios of forks, interrupts and leaks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save

import tierckpt


def local_root() -> Path:
    return Path(os.environ["TIERCKPT_LOCAL_ROOT"])


def empty_root() -> Path:
    """A new local root, so that reads come from the store."""
    return Path(tempfile.mkdtemp(dir=local_root()))


def url_of(uri: str) -> str:
    """The name of ``uri`` in fsspec."""
    return f"tierckpt://{uri.replace('://', '/')}" if "://" in uri else f"tierckpt://file{uri}"


def put_model(uri: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file of safetensors, and wait until it is on the store."""
    with fsspec.open(url_of(uri), "wb") as file:
        file.write(save(tensors))
    fsspec.filesystem("tierckpt").wait(url_of(uri))


def save_step(uri: str, state: dict[str, Any]) -> None:
    """Save with ``dcp.save``, and wait until it is on the store."""
    dcp.save(dict(state), storage_writer=tierckpt.TierStorageWriter(uri), no_dist=True)
    tierckpt.wait(uri, timeout_seconds=60)


def prefetch(root: str) -> object:
    return max(path.name for path in tierckpt.prefetch(f"{root}/model", to=empty_root() / "to").iterdir())


def load_safetensors(root: str) -> object:
    return float(tierckpt.load_safetensors(f"{root}/model", local_root=empty_root())["w"].sum())
