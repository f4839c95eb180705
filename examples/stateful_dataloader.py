"""A data loader that resumes in the middle of an epoch: torchdata's ``StatefulDataLoader`` in a checkpoint.

    python examples/stateful_dataloader.py              # trains one epoch of 64 batches, saving every 8
    python examples/stateful_dataloader.py --stop 20    # ends after step 20; the next start resumes at batch 21

Under torchrun each rank reads its own part (``DistributedSampler``) and restores its own position.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tierckpt import Checkpointer, PerRank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri", nargs="?", default=str(Path(tempfile.gettempdir(), "tierckpt-example", "data")))
    parser.add_argument("--stop", type=int, default=64)
    arguments = parser.parse_args()

    dataset = TensorDataset(torch.arange(512))
    loader = StatefulDataLoader(dataset, batch_size=8, shuffle=True, num_workers=2)
    state = {"data": PerRank(loader), "sum": torch.zeros((), dtype=torch.int64)}
    with Checkpointer(arguments.uri, interval=8, keep_last=2) as checkpointer:
        step = checkpointer.restore(state) or 0
        print(f"starting after batch {step}")
        for (numbers,) in loader:
            step += 1
            state["sum"] += numbers.sum()
            checkpointer.step(step, state)
            if step == arguments.stop:
                break
    print(f"{step} batches, sum of their numbers {int(state['sum'])}, of the dataset {511 * 512 // 2}")


if __name__ == "__main__":
    main()
