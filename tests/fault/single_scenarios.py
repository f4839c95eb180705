"""What one process does in the tests of saves that race and of processes that die."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.fault.kills import after, before, die, until
from tests.states import raises_ours
from tierckpt.checkpoint import local_commit, shared_commit
from tierckpt.dcp.shard_delivery import ShardDelivery
from tierckpt.drain import drainer
from tierckpt.errors import AlreadyCommittedError
from tierckpt.format.layout import pending
from tierckpt.save import flush


def race(uri: str, folder: Path, root: str, value: int, of: int) -> str:
    """Save when each of the ``of`` savers has read that nothing is saved under the id. Returns what it was told."""
    writer = tierckpt.TierStorageWriter(uri, local_root=root)
    plan = writer.prepare_global_plan

    def late(plans: Any) -> Any:
        (folder.parent / f"ready.{value}").touch()
        until(lambda: len(list(folder.parent.glob("ready.*"))) == of)
        return plan(plans)

    writer.prepare_global_plan = late  # type: ignore[method-assign]
    try:
        with raises_ours():
            dcp.save({"w": torch.full((1000,), float(value))}, storage_writer=writer, no_dist=True)
        tierckpt.wait(uri, timeout_seconds=60, local_root=root)
        return "won"
    except AlreadyCommittedError as error:
        return f"lost {error.context['winner']}"


def _half(directory: Path, location: Any, manifest: Any, metadata: Any) -> None:
    for entry in manifest.metadata:
        local_commit.durable_write(directory / entry.path, metadata[entry.path])
    die()


POINTS: dict[str, Callable[[], None]] = {
    "before shards": lambda: before(ShardDelivery, "write"),
    "in a shard": lambda: before(flush.ShardFile, "write"),
    "before the commit": lambda: before(local_commit, "commit_local"),
    # private: between the two writes of one local commit there is nothing public
    "between metadata and manifest": lambda: setattr(local_commit, "_publish", _half),
    "after the commit": lambda: after(local_commit, "commit_local"),
}


def die_at(uri: str, folder: Path, point: str) -> None:
    POINTS[point]()
    state = {"w": torch.full((100_000,), 2.0)}
    dcp.save(state, storage_writer=tierckpt.TierStorageWriter(uri), no_dist=True)


def die_after_the_first_file(uri: str, folder: Path) -> None:
    """Killed in the drain."""
    real = drainer.send

    async def send(*arguments: Any) -> None:
        await real(*arguments)
        die()

    drainer.send = send
    state = {f"w{i}": torch.full((10_000,), float(i)) for i in range(6)}
    writer = tierckpt.TierStorageWriter(uri, shard_size_bytes_max=50_000, concurrency=1)
    dcp.save(state, storage_writer=writer, no_dist=True)
    tierckpt.wait(uri, timeout_seconds=60, concurrency=1)


def die_before_the_shared_commit(uri: str, folder: Path) -> None:
    """Killed in the drain, when all files are there."""

    async def claim_and_die(store: Any, location: Any, manifest: Any) -> None:
        await shared_commit.put_claim(store, location, manifest)
        await store.put(pending(manifest.attempt), manifest.encode())
        die()

    shared_commit.commit_shared = claim_and_die
    dcp.save({"w": torch.zeros(1000)}, storage_writer=tierckpt.TierStorageWriter(uri), no_dist=True)
    tierckpt.wait(uri, timeout_seconds=60)
