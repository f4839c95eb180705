"""What a rank does in ``test_multi_step_save_ranks.py``: trains, saves over several steps; or restores and compares.

``python -m tests.integration.multi_step_save_ranks RANK RANKS DIRECTORY KIND save|restore [FAULT]``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tierckpt
from tests.integration.multi_step_ranks import model_of, same
from tierckpt.replay.optimizers import local

INTERVAL, WINDOW, STEPS = 8, 4, 21
FAULTY_STEP = 10


class Job:
    def __init__(self, kind: str, rank: int, seed: int) -> None:
        self.model, self.rank, self.number = model_of(kind), rank, 0
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + 0.1 * seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "rng": tierckpt.RngState(),
            "number": self.number,
        }

    def train(self) -> None:
        self.number += 1
        self.optimizer.zero_grad()
        inputs = torch.randn(3, 12) + self.rank
        self.model(inputs).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()

    def values(self) -> dict[str, Any]:
        """This rank's, cloned."""

        def walk(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return local(value.detach()).clone()
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
            local(next(self.model.parameters()).data).mul_(0.5)
        elif fault == "one rank loads":
            self.optimizer.load_state_dict(self.optimizer.state_dict())


def save(job: Job, directory: Path, fault: str) -> None:
    kept = {}
    options: dict[str, Any] = {"mode": "multi_step", "window_steps": WINDOW, "interval": INTERVAL}
    with tierckpt.Checkpointer(directory / "run", **options) as checkpointer:
        for _ in range(STEPS):
            job.train()
            if fault and job.rank == 1 and job.number == FAULTY_STEP:
                job.fail(fault)
            kept[job.number] = job.values()
            checkpointer.step(job.number, job.state)
    for record in checkpointer.stats:
        print(f"saved {record.step} {record.window_steps} {record.fallback}", flush=True)
        torch.save(kept[record.step], directory / f"{record.step}-{job.rank}.pt")


def restore(job: Job, directory: Path) -> None:
    with tierckpt.Checkpointer(directory / "run") as checkpointer:
        for path in sorted(directory.glob(f"*-{job.rank}.pt")):
            step = int(path.name.partition("-")[0])
            if checkpointer.restore(job.state, step) != step:
                raise SystemExit(f"rank {job.rank}: step {step} is not restored")
            if not same(job.values(), torch.load(path, weights_only=False)):
                raise SystemExit(f"rank {job.rank}: not the state after step {step}")
            print(f"restored {step}", flush=True)


def main() -> None:
    rank, ranks, directory, kind, what, *more = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{directory}/{what}", rank=int(rank), world_size=int(ranks))
    job = Job(kind, int(rank), seed=what == "save")
    torch.manual_seed(int(rank))
    if what == "save":
        save(job, Path(directory), *(more or [""]))
    else:
        restore(job, Path(directory))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
