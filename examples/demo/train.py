"""The training job of the demo, one rank of it: FSDP2 over gloo on CPUs. ``torchrun`` starts two of these.

    torchrun --standalone --nproc-per-node 2 train.py s3://bucket/run --events events.jsonl --summary summary.json

``state`` has everything that decides the next loss: weights, AdamW moments, learning rate, and, because of the dropout,
the random number generators of every rank. Rank 0 appends each loss to the events file in hexadecimal, to compare two
runs bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Gpt, GptConfig
from text import batch, corpus
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tierckpt import Checkpointer, EveryStep
from tierckpt.training import RngState

SEED = 20_240
ROWS = 16
WARMUP_STEPS = 5


def build(steps: int) -> tuple[Gpt, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return model, optimizer and scheduler. All ranks start from the same weights and keep their own shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(SEED)
    model = Gpt(GptConfig())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)

    def warmup_then_cosine(step: int) -> float:
        return min((step + 1) / WARMUP_STEPS, 0.55 + 0.45 * math.cos(math.pi * step / steps))

    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine)


def train_step(model: Gpt, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Take one optimizer step and return the loss, averaged over the ranks."""
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def digests(model: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of every weight in memory, gathered from its shards."""
    found = {}
    for name, parameter in model.named_parameters():
        full: Tensor = parameter.detach().full_tensor()  # type: ignore[attr-defined]  # a DTensor
        found[name] = hashlib.sha256(full.contiguous().view(torch.uint8).numpy()).hexdigest()
    return found


class Events:
    """Appends one JSON object per line, on rank 0 only, and flushes each line."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO | None = path.open("a", buffering=1) if dist.get_rank() == 0 else None

    def write(self, **event: Any) -> None:
        if self._file:
            self._file.write(json.dumps(event) + "\n")


def train(arguments: argparse.Namespace) -> None:
    text, rank = corpus(), dist.get_rank()
    model, optimizer, scheduler = build(arguments.steps)
    torch.manual_seed(SEED + 1 + rank)  # each rank has its own dropout
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RngState(), "bytes_seen": 0}
    events = Events(arguments.events)
    every_step = EveryStep(gradient_log=arguments.gradient_log)
    with Checkpointer(arguments.uri, keep_last=3, every_step=every_step) as checkpointer:
        resumed_from = checkpointer.restore(state)
        events.write(event="start", resumed_from=resumed_from, bytes_seen=state["bytes_seen"])
        for step in range((resumed_from or 0) + 1, arguments.steps + 1):
            inputs, targets = batch(text, step=step, rank=rank, rows=ROWS, length=model.config.context, seed=SEED)
            loss = train_step(model, optimizer, inputs, targets)
            scheduler.step()
            state["bytes_seen"] += inputs.numel() * dist.get_world_size()
            if arguments.gradient_log:
                checkpointer.step(step, state)
            events.write(event="step", step=step, loss=loss.item().hex(), bytes_seen=state["bytes_seen"])
            if step % arguments.save_every == 0:
                checkpointer.save(step, state)
                events.write(event="save", step=step)
        weights = digests(model)
        checkpointer.wait()
        if rank == 0:
            arguments.summary.write_text(json.dumps(summary(checkpointer, weights), indent=1))


def summary(checkpointer: Checkpointer, weights: dict[str, str]) -> dict[str, Any]:
    columns = ("step", "size_bytes", "blocked_seconds", "local_commit_seconds", "shared_commit_seconds")
    return {
        "weights": weights,
        "config": vars(GptConfig()),
        "saves": [{column: getattr(record, column) for column in columns} for record in checkpointer.stats],
        "restore_seconds": checkpointer.restore_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uri")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--gradient-log", action="store_true", help="log each step between two saves")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--summary", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    try:
        train(arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
