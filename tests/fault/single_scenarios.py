"""What one process does in the tests of saves that race and of processes that die."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.states import raises_ours
from tierckpt.checkpoint import local_commit, shared_commit
from tierckpt.dcp.shard_delivery import ShardDelivery
from tierckpt.drain import drainer
from tierckpt.errors import AlreadyCommittedError
from tierckpt.format.layout import pending
from tierckpt.save import flush

MEET_SECONDS = 60.0


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def race(uri: str, folder: Path, root: str, value: int, meet: str, of: int) -> None:
    """Save when every one of the ``of`` savers has looked at what stands under the id, and has seen nothing."""
    writer = tierckpt.TierStorageWriter(uri, local_root=root)
    plan = writer.prepare_global_plan

    def late(plans: Any) -> Any:
        Path(meet, f"ready.{value}").touch()
        deadline = time.monotonic() + MEET_SECONDS
        while len(list(Path(meet).glob("ready.*"))) < of:
            if time.monotonic() > deadline:
                raise TimeoutError("the other savers did not get there")
            time.sleep(0.001)
        return plan(plans)

    writer.prepare_global_plan = late  # type: ignore[method-assign]
    try:
        with raises_ours():
            dcp.save({"w": torch.full((1000,), float(value))}, storage_writer=writer, no_dist=True)
        tierckpt.wait(uri, timeout_seconds=60, local_root=root)
        told = "won"
    except AlreadyCommittedError as error:
        told = f"lost {error.context['winner']}"
    Path(meet, f"told.{value}").write_text(told)


def _half(directory: Path, location: Any, manifest: Any, metadata: Any) -> None:
    for entry in manifest.metadata:
        local_commit.durable_write(directory / entry.path, metadata[entry.path])
    die()


def _commits_and_dies(*arguments: Any) -> None:
    _commit_local(*arguments)
    die()


_commit_local = local_commit.commit_local

POINTS: dict[str, tuple[Any, str, Any]] = {
    "before shards": (ShardDelivery, "write", die),
    "in a shard": (flush.ShardFile, "write", die),
    "before the commit": (local_commit, "commit_local", die),
    # private: between the two writes of one local commit there is nothing public
    "between metadata and manifest": (local_commit, "_publish", _half),
    "after the commit": (local_commit, "commit_local", _commits_and_dies),
}


def die_at(uri: str, folder: Path, point: str) -> None:
    setattr(*POINTS[point])
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
