"""What a rank of a job does in the tests of ``peers=torchrun``."""

from __future__ import annotations

import os

import torch.distributed as dist

from tierckpt import Checkpointer
from tierckpt.config import Settings


def meet(roots: list[str]) -> None:
    """Each rank is the first of a node of its own, whose agent runs already."""
    os.environ["LOCAL_RANK"] = "0"
    root = roots[dist.get_rank()]
    Checkpointer(f"{roots[0]}-run", settings=Settings.load(local_root=root, peers="torchrun")).close()
