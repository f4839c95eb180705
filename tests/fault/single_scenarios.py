"""Single processes that race, die, save at the same time as many others, or are preempted."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.fault.scenario_tools import counted_state, die, until
from tests.states import raises_ours, same
from tierckpt.checkpoint import shared_commit
from tierckpt.errors import AlreadyCommittedError
from tierckpt.format.layout import pending


def race(uri: str, folder: Path, root: str, value: int, of: int) -> str:
    """Save when each of the ``of`` savers has found the id free. Returns the outcome."""
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


def die_before_the_shared_commit(uri: str, folder: Path) -> None:
    """Killed in the drain, when all files are there."""

    async def claim_and_die(store: Any, location: Any, manifest: Any) -> None:
        await shared_commit.put_claim(store, location, manifest)
        await store.put(pending(manifest.attempt), manifest.encode())
        die()

    shared_commit.commit_shared = claim_and_die
    dcp.save({"w": torch.zeros(1000)}, storage_writer=tierckpt.TierStorageWriter(uri), no_dist=True)
    tierckpt.wait(uri, timeout_seconds=60)


# --- many savers of one node ------------------------------------------------------------------------------------------


def save_often(folder: Path, uri: str, saver: int, savers: int, saves: int) -> tuple[Any, ...]:
    """Wait for the others and save. Returns the seconds to each tier, the restored step, and if its bytes are right."""
    state = counted_state(4, 1 << 21, saver + 1)  # 32 MiB
    with tierckpt.Checkpointer(f"{uri}/{saver}", timeout_seconds=300) as checkpointer:
        checkpointer.save(0, state)  # memory, connections
        checkpointer.wait("local")
        (folder.parent / f"ready-{saver}").touch()
        until(lambda: len(list(folder.parent.glob("ready-*"))) == savers)
        begun = time.monotonic()
        for step in range(1, saves + 1):
            checkpointer.save(step, state)
            checkpointer.wait("local")
        local_seconds = time.monotonic() - begun
        checkpointer.wait()
        shared_seconds = time.monotonic() - begun
        wanted = {name: torch.empty_like(value) for name, value in state.items()}
        step_found = checkpointer.restore(wanted)
    return local_seconds, shared_seconds, step_found, same(wanted, state)


# --- a preempted trainer ----------------------------------------------------------------------------------------------


def large_state() -> dict[str, Any]:
    """512 MiB."""
    return counted_state(16, 1 << 23)


def train_until_told(folder: Path, uri: str, stuck: bool = False, **settings: Any) -> None:
    """Save steps 1 and 2. The file ``staged`` appears with step 1 on shared storage, and step 2 on its way to the SSD.

    ``stuck``: the main thread then stays in C code, as in a collective without its peer.
    """
    checkpointer = tierckpt.Checkpointer(uri, timeout_seconds=60, **settings)
    checkpointer.save(1, {"small": torch.ones(8)})
    checkpointer.wait()
    checkpointer.save(2, large_state())
    (folder / "staged").touch()
    if stuck:
        _wait_in_c()
    time.sleep(1000)


def _wait_in_c() -> None:
    condition, mutex = ctypes.create_string_buffer(128), ctypes.create_string_buffer(128)  # zeros: initialised
    c = ctypes.CDLL(None)
    c.pthread_mutex_lock(mutex)
    c.pthread_cond_wait(condition, mutex)  # no signal ends it


def come_back(folder: Path, uri: str, drain: bool = False, **settings: Any) -> tuple[int | None, bool]:
    """Restore the newest step. Returns which it is, and whether every byte is there. ``drain``: drain step 2 first."""
    with tierckpt.Checkpointer(uri, timeout_seconds=60, **settings) as checkpointer:
        if drain:
            tierckpt.wait(f"{uri}/step-2", timeout_seconds=60, **settings)
        location = tierckpt.latest(uri, **settings)
        step = int(location.rpartition("-")[2]) if location else None
        if step != 2:
            return step, False
        state = {name: torch.zeros_like(value) for name, value in large_state().items()}
        checkpointer.restore(state, step)
        return step, same(state, large_state())
