"""A job that is killed, with a log of every step or an optimizer near storage."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tests.fault.log_bugs import seed_log_bug
from tierckpt.replay.optimizers import local_shard


class Job:
    """Random numbers come from the generators of the process, which are part of the state."""

    def __init__(
        self, *, parallel: str = "", has_statistics: bool = True, near: bool = False, folder: Path = Path()
    ) -> None:
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(5)
        layers: list[nn.Module] = [nn.Linear(24, 64), nn.Dropout(0.2), nn.Tanh(), nn.Linear(64, 8)]
        if has_statistics and not parallel:  # each rank has its own statistics, and a checkpoint has one rank's
            layers.insert(1, nn.BatchNorm1d(64))
        self.model = nn.Sequential(*layers).to(torch.bfloat16 if near else torch.float32)
        if parallel == "FSDP2":
            mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
        if parallel == "DDP":
            self.model = DistributedDataParallel(self.model)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if near:
            self.optimizer = tierckpt.NearStorageOptimizer(
                self.model.parameters(), torch.optim.AdamW, lr=0.01, directory=folder / "near"
            )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "random": tierckpt.RngState(),
            "step": 0,
        }

    def train(self) -> int:
        self.optimizer.zero_grad()
        share = 1 + dist.get_rank() if dist.is_initialized() else 1  # each rank has gradients of its own to reduce
        inputs = share * torch.randn(4, 24).to(next(self.model.parameters()).dtype)
        self.model(inputs).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()
        self.state["step"] += 1
        return int(self.state["step"])

    def digest(self) -> str:
        """Of all that makes the next step."""
        found = xxhash.xxh3_64()
        states = [one for p in self.model.parameters() for one in self.optimizer.state[p].values()]
        for tensor in (*self.model.parameters(), *self.model.buffers(), *states, torch.get_rng_state()):
            found.update(local_shard(tensor.detach()).contiguous().view(-1).view(torch.uint8).cpu().numpy())
        found.update(repr((self.schedule.state_dict(), self.optimizer.param_groups[0]["lr"])).encode())
        return str(found.hexdigest())


def train(
    folder: Path,
    uri: str,
    steps: int = 10**9,
    bug: str = "",
    has_statistics: bool = True,
    near: bool = False,
    parallel: str = "FSDP2",
    window_steps: int | None = None,
    **options: Any,
) -> None:
    """Each rank writes the digest of a step before it is logged, and a line when it is durable."""
    seed_log_bug(bug)
    rank = dist.get_rank() if dist.is_initialized() else 0
    parallel = parallel if dist.is_initialized() else ""
    job = Job(parallel=parallel, has_statistics=has_statistics, near=near, folder=folder)
    seen = os.open(folder / f"seen-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    every_step = tierckpt.EveryStep(gradient_log=not near, window_steps=window_steps)
    with tierckpt.Checkpointer(uri, **{"every_step": every_step, "drain": False} | options) as checkpointer:
        at = checkpointer.restore(job.state) or 0
        os.write(seen, f"resumed {at} {job.digest() if at else ''}\n".encode())
        while at < steps:
            at = job.train()
            os.write(seen, f"trained {at} {job.digest()}\n".encode())
            saved = checkpointer.step(at, job.state)
            if saved is not None and (at == 1 or steps < 100 or near) and window_steps is None:
                saved.result(60)  # before the first checkpoint there is nothing to go on from
            if at == 4 and window_steps is not None:
                checkpointer.wait("local")  # the first window is of so many steps
            os.write(seen, f"ended {at} \n".encode())
        if near:
            dist.barrier()  # the first rank hosts the store with the result of the save
        os._exit(0)  # as a kill: no final save
