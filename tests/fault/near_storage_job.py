"""A job with an optimizer near storage. The job or the process of its optimizer is killed.

``python -m tests.fault.near_storage_job BUG FILE`` is the process of an optimizer with a seeded bug.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierckpt.near_storage import updater, updater_process
from tierckpt.near_storage.optimizer import NearStorageOptimizer
from tierckpt.near_storage.state_file import StateFile
from tierckpt.near_storage.updater import GradientFiles
from tierckpt.replay.capture import Step
from tierckpt.replay.checksum import checksum
from tierckpt.replay.frame import Frame

PERSIST_EVERY = 2


class Job:
    """The training, with whatever steps it."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(24, 512), nn.Tanh(), nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 8))
        self.model.to(torch.bfloat16)
        self.step = 0

    def backward(self) -> None:
        self.step += 1
        for one in self.model.parameters():
            one.grad = None
        inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(self.step))
        self.model(inputs.bfloat16()).float().square().mean().backward()

    def rate(self) -> float:
        return 0.01 * 0.999**self.step

    def checksum(self) -> list[int]:
        return [int(checksum(one).item()) for one in self.model.parameters()]


class Reference(Job):
    """The same job with an ordinary optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.masters = [one.detach().float().requires_grad_() for one in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.01)

    def at(self, step: int) -> list[int]:
        while self.step < step:
            self.backward()
            for one, master in zip(self.model.parameters(), self.masters, strict=True):
                master.grad = one.grad.float() if one.grad is not None else None
            self.optimizer.param_groups[0]["lr"] = self.rate()
            self.optimizer.step()
            with torch.no_grad():
                for one, master in zip(self.model.parameters(), self.masters, strict=True):
                    one.copy_(master)
        assert self.step == step
        return self.checksum()


class NearJob(Job):
    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__()
        self.optimizer = NearStorageOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=0.01, directory=directory, persist_every=PERSIST_EVERY,
            **options,
        )  # fmt: skip
        self.step = self.optimizer.resume()

    def train(self) -> None:
        self.backward()
        self.optimizer.param_groups[0]["lr"] = self.rate()
        self.optimizer.step()


def with_bug(name: str, made: Path) -> None:
    """Seeded, in the process of the optimizer: what kills must find. ``made`` is there once it has done harm."""
    if name == "a block is stepped in the version that counts":

        def step_what_counts(self: StateFile, block: Any, source: int) -> int:
            made.touch()
            return source

        StateFile.copy = step_what_counts  # type: ignore[method-assign]
    if name == "a record says a later step":
        record = StateFile.record

        def record_later(self: StateFile, block: Any, version: int, step: int, digest: bytes) -> None:
            made.touch()
            record(self, block, version, step + 1, digest)

        StateFile.record = record_later  # type: ignore[method-assign]
    if name == "a frame is written after its step is said to be made":
        append = GradientFiles.append
        late: list[Any] = []

        def append_late(self: GradientFiles, frame: Any) -> None:
            [step] = frame.steps.values()
            gradients = {key: one.clone() for key, one in step.gradients.items()}
            step = Step(step.version, step.hyperparameters, gradients)
            late.append(Frame(frame.number, {"": step}, frame.layouts))
            made.touch()
            if len(late) > 1:
                append(self, late.pop(0))

        GradientFiles.append = append_late  # type: ignore[method-assign]


def train(folder: Path, bug: str = "") -> list[int]:
    """Resume at the newest step and train until the file ``folder``/stop exists. Returns the checksums.

    Prints "step N" after step N, and "process N" when there is a new process of the optimizer.
    """
    start = updater_process.start_python
    if bug:
        arguments = ("tests.fault.near_storage_job", bug, str(folder / "bug"))
        updater_process.start_python = lambda _, **options: start(*arguments, **options)
    job = NearJob(folder / "near")
    print(f"resumed {job.step}", flush=True)
    pid = -1
    while not (folder / "stop").exists():
        if job.optimizer.process_id != pid:
            pid = job.optimizer.process_id
            print(f"process {pid}", flush=True)
        job.train()
        print(f"step {job.step}", flush=True)
    sums = job.checksum()
    job.optimizer.close()
    return sums


if __name__ == "__main__":
    with_bug(sys.argv[1], Path(sys.argv[2]))
    updater.main()
