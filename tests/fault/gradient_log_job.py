"""A job whose steps are logged, and which is killed.

``python -m tests.fault.gradient_log_job DIRECTORY STEPS [BUG]`` resumes where the log in DIRECTORY leads, and says
"step N" when that step is on the disk.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierckpt.replay import guard, log_writer
from tierckpt.replay.checksum import checksum
from tierckpt.replay.log import GradientLog, Recovered, roll_forward

BASE = "base-0"


class Job:
    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.step = 0

    def train(self) -> None:
        self.step += 1
        self.optimizer.zero_grad()
        inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(self.step))
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()

    def others(self) -> bytes:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return json.dumps({"schedule": self.schedule.state_dict(), "rates": rates}).encode()

    def resume(self, directory: Path) -> Recovered:
        attachments: list[bytes] = []
        found = roll_forward(self.optimizer, directory, BASE, on_attachment=attachments.append)
        if found.steps:
            others = json.loads(attachments[-1])
            self.schedule.load_state_dict(others["schedule"])
            for group, rate in zip(self.optimizer.param_groups, others["rates"], strict=True):
                group["lr"] = rate
            self.step = found.step
        return found

    def checksum(self) -> list[int]:
        states = [self.optimizer.state[one] for one in self.model.parameters()]
        tensors: list[Any] = [*self.model.parameters(), *(one for state in states for one in state.values())]
        return [int(checksum(one).item()) for one in tensors]


def with_bug(name: str) -> None:
    """Seeded: what a log must not survive unseen."""
    original = log_writer.encode
    seen: list[Any] = []

    def encode(frame: Any, *place: str) -> Any:
        seen.append((frame, place))
        if name == "a stale hyperparameter":
            frame.steps[""].hyperparameters[0]["lr"] = seen[0][0].steps[""].hyperparameters[0]["lr"]
        head, views, digest = original(frame, *place)
        if len(seen) == 5 and name == "a missing frame":
            return b"", [], digest
        if len(seen) == 5 and name == "a frame of another step":
            return original(seen[2][0], *seen[2][1])
        if len(seen) == 5 and name == "a byte of a gradient":
            views[0] = memoryview(bytes(views[0][:-1]) + bytes([views[0][-1] ^ 1]))
        return head, views, digest

    log_writer.encode = encode
    if name == "a stale hyperparameter":  # else the digest of the parameters sees it first
        guard.frame_digest = lambda seen, others: ""


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) > 3:
        with_bug(sys.argv[3])
    job = Job()
    found = job.resume(directory)
    with GradientLog(job.optimizer, directory) as log:
        log.begin(BASE, found if found.steps else None)
        print(f"resumed {job.step}", flush=True)
        while job.step < steps:
            job.train()
            log.end_of_step(job.step, job.others())
            print(f"step {log.durable_step}", flush=True)


if __name__ == "__main__":
    main()
