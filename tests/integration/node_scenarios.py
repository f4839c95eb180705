"""The ranks of the tests of several nodes: rank N is on node N, with its own local root, and with peers an agent."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.fault.scenario_tools import of_each_rank
from tests.states import same
from tierckpt.checkpoint.journal import Journal
from tierckpt.checkpoint.local_commit import read_local_manifest
from tierckpt.config import Settings
from tierckpt.drain.drainer import Drainer
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
    outcomes = of_each_rank(outcome)
    return {name: [one[name] for one in outcomes] for name in outcome}


def _delay_drain(seconds: float) -> None:
    real = Drainer.send_files

    async def late(self: Drainer, entry: Any) -> None:
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
    outcomes = of_each_rank((step, state[f"rank-{rank}"].unique().tolist(), state["both"].unique().tolist()))
    return {"outcomes": outcomes, "seconds": time.monotonic() - begun}


# --- with peers -------------------------------------------------------------------------------------------------------

ROWS = 40_000


def rows_of(rank: int, step: int) -> dict[str, Any]:
    """Each rank has a tensor of its own; one is on all of them."""
    return {
        f"rank-{rank}": torch.arange(ROWS, dtype=torch.float32) + 1000.0 * step + rank,
        "both": torch.full((ROWS,), float(step)),
    }


def save_locally(uri: str, nodes: list[str], step: int) -> dict[str, Any]:
    """With what dcp itself offers; returns when it is committed on the coordinator's node."""
    rank = dist.get_rank()
    settings = Settings(**json.loads(nodes[rank]))
    dcp.save(rows_of(rank, step), storage_writer=tierckpt.TierStorageWriter(f"{uri}/step-{step}", settings=settings))
    dist.barrier()
    return {"rank": rank}


def restore(uri: str, nodes: list[str]) -> dict[str, Any]:
    """Restore. Returns each rank's step, and whether its bytes are right."""
    rank = dist.get_rank()
    settings = Settings(**json.loads(nodes[rank]))
    checkpointer = tierckpt.Checkpointer(uri, settings=settings, timeout_seconds=60)
    state = {f"rank-{rank}": torch.zeros(ROWS), "both": torch.zeros(ROWS)}
    step = checkpointer.restore(state)
    return {"outcomes": of_each_rank((step, same(state, rows_of(rank, step or 0))))}


def meet(roots: list[str]) -> None:
    """Each rank is the first of its own node, and the agent already runs."""
    os.environ["LOCAL_RANK"] = "0"
    settings = Settings.load(local_root=roots[dist.get_rank()], peers="torchrun")
    tierckpt.Checkpointer(f"{roots[0]}-run", settings=settings).close()
