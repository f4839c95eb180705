"""A job that saves over several steps, and is killed at a point of a window.

``python -m tests.fault.window_job DIRECTORY POINT`` trains 40 steps, and kills itself at POINT of the second window
(steps 16 to 19).
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierckpt
from tierckpt.dcp.save_session import SaveSession
from tierckpt.replay.apply import Replay
from tierckpt.replay.link import PARTS, Link, TensorCopy
from tierckpt.save.flush import ShardFile

WINDOW = 4
FIRST, SECOND = 8, 16
"""Steps at which windows begin."""


class Job:
    """Every step depends on its number and on the state before it, and on nothing else."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(*(nn.Linear(21, 21) for _ in range(8)))
        self.model.register_buffer("seen", torch.zeros(()))
        self.optimizer = make(self.model.parameters(), **{"lr": 0.01, **options})
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.scaler: torch.amp.GradScaler | None = None
        self.number = 0

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
        torch.manual_seed(self.number)
        loss = self.model(torch.randn(4, 21)).square().mean()
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        if self.scaler is not None:
            if self.number % 3 == 0:  # inf: the scaler has the optimizer skip the step
                self.model[0].weight.grad.view(-1)[0] = torch.inf
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            self.optimizer.step()
        self.schedule.step()
        self.model.seen += 1  # type: ignore[operator]

    def values(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "rng": torch.get_rng_state(),
                "number": self.number,
            }
        )


def restored(uri: Path, job: Job, step: int | None = None) -> int | None:
    """Restore into ``job``. Returns the step."""
    state = job.state
    with tierckpt.Checkpointer(uri) as checkpointer:
        found = checkpointer.restore(state, step)
    job.number = state["number"]
    return found


class Points:
    """Kills this process at a point, once the second window is open."""

    def __init__(self, point: str) -> None:
        self.point, self.parts, self.is_armed = point, 0, False
        self.put_in(Link, "copy", self.on_copy)
        self.put_in(TensorCopy, "next_chunk", self.on_chunk)
        self.put_in(Replay, "apply", lambda *_: self.reach("replay"))
        self.put_in(SaveSession, "commit", lambda *_: self.reach("before the commit"))
        self.put_in(ShardFile, "write", lambda *_: self.reach("write"))

    def put_in(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def seen(this: Any, *arguments: Any, **named: Any) -> Any:
            look(this, *arguments)
            return original(this, *arguments, **named)

        setattr(owner, name, seen)

    def on_copy(self, _: Link, sources: list[torch.Tensor], priority: int) -> None:
        self.parts += priority == PARTS and self.is_armed

    def on_chunk(self, *_: Any) -> None:
        self.reach(f"part {self.parts - 1}")

    def reach(self, point: str) -> None:
        if self.is_armed and point == self.point:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    directory, points = Path(sys.argv[1]), Points(sys.argv[2])
    job, saved = Job(), None
    every_step = tierckpt.EveryStep(window_steps=WINDOW)
    with tierckpt.Checkpointer(directory / "run", every_step=every_step, interval=FIRST) as checkpointer:
        while job.number < 40:
            job.train()
            if job.number == SECOND:
                points.is_armed = True
            saved = checkpointer.step(job.number, job.state) or saved
            if job.number == FIRST + WINDOW and saved is not None:
                checkpointer.wait("local")  # parts that are not whole yet are written by this, or by a later step
                saved.result(120)
                print("committed", flush=True)
    print("not killed", flush=True)


if __name__ == "__main__":
    main()
