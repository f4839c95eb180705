"""Sharded training with FSDP2: each rank writes its own shards, and the rank that drains last commits.

    torchrun --nproc-per-node 2 examples/fsdp2_torchrun.py
    torchrun --nproc-per-node 4 examples/fsdp2_torchrun.py s3://bucket/run --steps 60    # with another world size

Runs on CPUs over gloo, or on GPUs over NCCL if available, with gloo for the messages between ranks while a save is
planned.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tierckpt import Checkpointer, RngState


def start() -> torch.device:
    """Join the job and return this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def train(uri: str, steps: int) -> None:
    device = start()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)  # the same weights on every rank before sharding
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks).to(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # separate data and dropout on each rank
    state = {"model": model, "optimizer": optimizer, "rng": RngState()}

    with Checkpointer(uri, keep_last=3) as checkpointer:
        resumed_from = checkpointer.restore(state) or 0
        for step in range(resumed_from + 1, steps + 1):
            inputs = torch.randn(32, 64, device=device)
            loss = nn.functional.mse_loss(model(inputs), inputs.flip(dims=(1,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                checkpointer.save(step, state)
                if dist.get_rank() == 0:
                    print(f"step {step}: loss {loss.item():.4f} (started after step {resumed_from})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri", nargs="?", default=str(Path(tempfile.gettempdir(), "tierckpt-example", "fsdp2")))
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    try:
        train(arguments.uri, arguments.steps)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
