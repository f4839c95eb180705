"""What Ctrl-C ends.

``python -m tests.fault.interrupt_scenarios VERB ROOT`` says "begun" and does VERB again and again.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import tierckpt
from tierckpt.training.restore_state import unwrapped

logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False
warnings.simplefilter("ignore")
torch.set_num_threads(1)
FILES = 4
BYTES = 4 << 20


def prepare(root: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(FILES):
            save_file({f"w{number}": torch.ones(BYTES // 4)}, Path(folder) / f"model-{number}.safetensors")
        from tierckpt.client import get_client
        from tierckpt.config import Settings
        from tierckpt.format.layout import parse_uri

        store_at = get_client(Settings.load()).mover.store

        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}

        async def put(_: object) -> None:
            for name, data in files.items():
                await store_at(parse_uri(f"{root}/model")).put(name, data)

        client = get_client(Settings.load())
        client.run(put(client.mover))
    with tierckpt.Checkpointer(f"{root}/run") as made:
        made.save(1, {"model": {"w": torch.ones(BYTES)}})
        made.wait()


def _elsewhere() -> Path:
    return Path(tempfile.mkdtemp(dir=os.environ["TIERCKPT_LOCAL_ROOT"]))


def sharded(root: str) -> None:
    tierckpt.load_safetensors(f"{root}/model", shard=(1, 2, 0), local_root=_elsewhere())


def load(root: str) -> None:
    tierckpt.load_safetensors(f"{root}/model", local_root=_elsewhere())


def prefetch(root: str) -> None:
    tierckpt.prefetch(f"{root}/model", to=_elsewhere() / "to")


def restore(root: str) -> None:
    tierckpt.Checkpointer(f"{root}/run", local_root=_elsewhere()).restore({"model": {"w": torch.zeros(BYTES)}})


def save(root: str) -> None:
    where = f"{root}/saved/step-{os.getpid()}"
    with unwrapped():  # stock DCP wraps an interrupt like any failure
        dcp.save({"w": torch.zeros(BYTES)}, storage_writer=tierckpt.TierStorageWriter(where), no_dist=True)
    tierckpt.wait(where)


def close(root: str) -> None:
    with tierckpt.Checkpointer(f"{root}/closed-{os.getpid()}") as made:
        made.save(1, {"model": {"w": torch.zeros(BYTES)}})


VERBS: list[Callable[[str], None]] = [sharded, load, prefetch, restore, save, close]


def main() -> None:
    verb, root = sys.argv[1], sys.argv[2]
    if verb == "prepare":
        prepare(root)
        return
    act = globals()[verb]
    print("begun", flush=True)
    while True:
        act(root)
        for left in Path(os.environ["TIERCKPT_LOCAL_ROOT"]).glob("tmp*"):
            shutil.rmtree(left, ignore_errors=True)


if __name__ == "__main__":
    main()
