"""A job of one rank that saves in DCP's process mode, with each kind of staging memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import tierckpt
from tests.states import same

SAVES = 4


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((200_000,), value), "small": {"b": torch.full((3,), value)}, "step": value}


def save_some(uri: str, **options: Any) -> list[str]:
    wrong, state = [], state_of(0.0)
    for step in range(1, SAVES + 1):
        state["w"].fill_(step)
        state["small"]["b"].fill_(step)
        state["step"] = step
        future = dcp.async_save(
            state,
            storage_writer=tierckpt.TierStorageWriter(f"{uri}/step-{step}"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            **options,
        )
        state["w"].fill_(-1.0)  # training goes on
        future.result(120)
    for step in range(1, SAVES + 1):
        target = state_of(0.0)
        dcp.load(target, storage_reader=FileSystemReader(f"{uri}/step-{step}"), no_dist=True)
        if not same(target, {**state_of(float(step)), "step": step}):
            wrong.append(f"step-{step}: {target['w'][:3]} {target['step']}")
    return wrong


def save_in_process_mode(folder: Path) -> dict[str, list[str]]:
    """Return the errors that a reader finds, for each kind of staging memory."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    return {
        "TierStager()": save_some(f"{folder}/private", async_stager=tierckpt.TierStager()),
        "TierStager(shared=True)": save_some(f"{folder}/shared", async_stager=tierckpt.TierStager(shared=True)),
        "the writer itself": save_some(f"{folder}/writer"),
    }
