"""A rank of ``test_multi_step_save.py`` and ``test_redo_log.py``: trains and saves over several steps, or
restores and compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tests.exact import check_same
from tests.fault.scenario_tools import of_each_rank
from tests.fault.training_jobs import Deferring, Job
from tierckpt.replay.multi_step import MultiStepStager
from tierckpt.replay.optimizers import local_shard
from tierckpt.training.every_step import window

INTERVAL, WINDOW, STEPS = 8, 4, 21
FAULTY_STEP = 10


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(6)))
    if kind == "fsdp":
        for layer in model:
            fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=kind == "bucket views")


class RankJob(Job):
    def __init__(self, kind: str, rank: int, seed: int) -> None:
        self.model, self.rank, self.step = model_of(kind), rank, 0
        self.keeps_gradients = kind == "bucket views"
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + 0.1 * seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def train(self) -> None:
        self.step += 1
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        inputs = torch.randn(3, 12) + self.rank
        self.model(inputs).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()

    def values(self) -> dict[str, Any]:
        """This rank's, cloned."""

        def walk(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return local_shard(value.detach()).clone()
            return {key: walk(one) for key, one in value.items()} if isinstance(value, dict) else value

        optimizer = self.optimizer.state_dict()
        return {
            "model": walk(self.model.state_dict()),
            "optimizer": walk(optimizer["state"]),
            "rates": [group["lr"] for group in optimizer["param_groups"]],
            "schedule": self.schedule.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def fail(self, fault: str) -> None:
        if fault == "one rank edits":
            local_shard(next(self.model.parameters()).data).mul_(0.5)
        elif fault == "one rank loads":
            self.optimizer.load_state_dict(self.optimizer.state_dict())


def save(directory: str, kind: str, fault: str = "") -> list[list[str]]:
    job = begun(kind, 1)
    with MultiStepStager(job.optimizer, WINDOW) as stager:
        assert stager.gradient_bytes() == sum(local_shard(one).nbytes for one in job.model.parameters())
    kept = {}
    every_step = tierckpt.EveryStep(window_steps=WINDOW)
    with tierckpt.Checkpointer(Path(directory) / "run", every_step=every_step, interval=INTERVAL) as checkpointer:
        for _ in range(STEPS):
            job.train()
            if fault and job.rank == 1 and job.step == FAULTY_STEP:
                job.fail(fault)
            kept[job.step] = job.values()
            checkpointer.step(job.step, job.state)
    for record in checkpointer.stats:
        torch.save(kept[record.step], Path(directory) / f"{record.step}-{job.rank}.pt")
    return of_each_rank([f"saved {one.step} {one.window_steps} {one.fallback}" for one in checkpointer.stats])


def save_as_copied(directory: str, kind: str) -> list[list[str]]:
    """Windows are kept as they were copied, as on an accelerator."""
    window.MultiStepStager = Deferring  # type: ignore[misc]
    return save(directory, kind)


def restore(directory: str, kind: str) -> list[list[str]]:
    job = begun(kind, 0)
    lines = []
    with tierckpt.Checkpointer(Path(directory) / "run") as checkpointer:
        for path in sorted(Path(directory).glob(f"*-{job.rank}.pt")):
            step = int(path.name.partition("-")[0])
            assert checkpointer.restore(job.state, step) == step
            check_same(job.values(), torch.load(path, weights_only=False), f"step {step}")
            lines.append(f"restored {step}")
    return of_each_rank(lines)


def begun(kind: str, seed: int) -> RankJob:
    job = RankJob(kind, dist.get_rank(), seed)
    torch.manual_seed(job.rank)
    return job
