"""Checkpoints in one process, without torch.distributed.

    python examples/single_process.py                      # trains 30 steps, saving every 10
    python examples/single_process.py --steps 60           # resumes at step 30
    python examples/single_process.py s3://bucket/run      # the same, on S3 (AWS_* variables as usual)

Saves go to the local tier first (``TIERCKPT_LOCAL_ROOT``, default ``~/.cache/tierckpt``) and drain to the URI in the
background. Kill it at any moment and start it again: it resumes from the newest committed step.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from tierckpt import Checkpointer, RngState


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri", nargs="?", default=str(Path(tempfile.gettempdir(), "tierckpt-example", "single")))
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": RngState(), "samples_seen": 0}

    with Checkpointer(arguments.uri, keep_last=3) as checkpointer:
        resumed_from = checkpointer.restore(state) or 0
        print(f"{arguments.uri}: starting after step {resumed_from}, {state['samples_seen']} samples seen")
        for step in range(resumed_from + 1, arguments.steps + 1):
            inputs = torch.randn(64, 32)
            loss = F.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state["samples_seen"] += len(inputs)
            if step % 10 == 0:
                checkpointer.save(step, state)  # blocks only while the state is copied
                print(f"step {step}: loss {loss.item():.4f}")
    for record in checkpointer.stats:
        milliseconds = record.blocked_seconds * 1000
        print(f"step {record.step}: training waited {milliseconds:.1f} ms for {record.size_bytes:,} bytes")


if __name__ == "__main__":
    main()
