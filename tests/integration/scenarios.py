"""What one rank does in the tests of several nodes: each has a local root of its own. Run by tests/compat/worker.py."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tierckpt
from tierckpt.checkpoint.journal import Journal
from tierckpt.checkpoint.local_commit import read_local_manifest
from tierckpt.format.layout import local_dir, parse_uri


def state_of(rank: int, value: float) -> dict[str, Any]:
    return {f"rank-{rank}": torch.full((5000,), value + rank), "both": torch.full((10,), value)}


def save_on_two_nodes(uri: str, roots: str, use_collectives: bool, slow: int) -> dict[str, Any]:
    """Save from two nodes, ``slow`` drains last; every node learns of the commit; lose both; load."""
    rank = dist.get_rank()
    root = Path(roots, f"node-{rank}")
    options = {"local_root": root}
    if rank == slow:
        _delay_drain(1.5)
    step = f"{uri}/step-1"
    writer = tierckpt.TierStorageWriter(step, **options)
    dcp.save(state_of(rank, 1.0), storage_writer=writer, use_collectives=use_collectives)
    tierckpt.wait(step, tier="shared", timeout_seconds=60, **options)
    manifest = read_local_manifest(local_dir(root, parse_uri(step)))
    outcome = {
        "journal": len(Journal(root).entries()),
        "knows the commit": manifest is not None and len(manifest.files) == 2,
        "own shard only": len(list(local_dir(root, parse_uri(step)).glob("*.distcp"))) == 1,
    }
    dist.barrier()
    shutil.rmtree(root)  # both nodes are lost
    loaded = state_of(rank, 0.0)
    dcp.load(loaded, storage_reader=tierckpt.TierStorageReader(step, **options))
    outcome["value"] = loaded[f"rank-{rank}"].unique().tolist() == [1.0 + rank]
    outcome["latest"] = tierckpt.latest(uri, **options) == step
    outcomes: list[Any] = [None] * 2
    dist.all_gather_object(outcomes, outcome)
    return {name: [one[name] for one in outcomes] for name in outcome}


def _delay_drain(seconds: float) -> None:
    from tierckpt.drain.drainer import Drainer

    real = Drainer.send_files

    async def late(self: Drainer, entry: Any) -> None:
        import asyncio

        await asyncio.sleep(seconds)
        await real(self, entry)

    Drainer.send_files = late  # type: ignore[method-assign]


def restart_from_what_is_left(uri: str, roots: str, lose: int) -> dict[str, Any]:
    """Step 2 is on both SSDs and not on the shared tier: a lost node costs step 2, and no rank mixes steps."""
    rank = dist.get_rank()
    root = Path(roots, f"node-{rank}")
    checkpointer = tierckpt.Checkpointer(uri, local_root=root, timeout_seconds=60, exit_timeout_seconds=0)
    checkpointer.save(1, state_of(rank, 1.0))
    checkpointer.wait()
    _delay_drain(1000.0)
    checkpointer.save(2, state_of(rank, 2.0))
    checkpointer.wait("local")
    dist.barrier()
    if rank == lose:
        root.rename(root.with_name("lost"))  # all of it at once, whatever the mover is doing with it
    dist.barrier()
    state = {f"rank-{rank}": torch.zeros(5000), "both": torch.zeros(10)}
    begun = time.monotonic()
    step = checkpointer.restore(state)
    outcomes: list[Any] = [None] * 2
    dist.all_gather_object(outcomes, (step, state[f"rank-{rank}"].unique().tolist(), state["both"].unique().tolist()))
    return {"outcomes": outcomes, "seconds": time.monotonic() - begun}
