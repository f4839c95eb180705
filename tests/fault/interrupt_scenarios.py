"""Verbs that are interrupted."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.fault.verbs import empty_root, local_root, put_model
from tierckpt.disk.durable import remove_tree
from tierckpt.training.restore_state import unwrapped

FILES = 4
BYTES = 4 << 20


def prepare(folder: Path, root: str) -> None:
    """Put a model and a run on the store."""
    for number in range(FILES):
        put_model(f"{root}/model/model-{number}.safetensors", {f"w{number}": torch.ones(BYTES // 4)})
    with tierckpt.Checkpointer(f"{root}/run") as made:
        made.save(1, {"model": {"w": torch.ones(BYTES)}})
        made.wait()


def sharded(root: str) -> None:
    tierckpt.load_safetensors(f"{root}/model", shard=(1, 2, 0), local_root=empty_root())


def load(root: str) -> None:
    tierckpt.load_safetensors(f"{root}/model", local_root=empty_root())


def prefetch(root: str) -> None:
    tierckpt.prefetch(f"{root}/model", to=empty_root() / "to")


def restore(root: str) -> None:
    tierckpt.Checkpointer(f"{root}/run", local_root=empty_root()).restore({"model": {"w": torch.zeros(BYTES)}})


def save(root: str) -> None:
    where = f"{root}/saved/step-{os.getpid()}"
    with unwrapped():  # stock DCP wraps an interrupt like any failure
        dcp.save({"w": torch.zeros(BYTES)}, storage_writer=tierckpt.TierStorageWriter(where), no_dist=True)
    tierckpt.wait(where)


def close(root: str) -> None:
    with tierckpt.Checkpointer(f"{root}/closed-{os.getpid()}") as made:
        made.save(1, {"model": {"w": torch.zeros(BYTES)}})


def repeat(folder: Path, root: str, verb: str) -> None:
    """Print "begun" and execute the verb until the process is ended."""
    print("begun", flush=True)
    while True:
        globals()[verb](root)
        for left in local_root().glob("tmp*"):
            remove_tree(left, ignore_errors=True)  # an interrupted shutil.rmtree may raise OSError
