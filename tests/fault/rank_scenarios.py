"""What four ranks do of which one is killed in the middle of something."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.fault.kills import after, before
from tests.states import same
from tierckpt.checkpoint import local_commit
from tierckpt.dcp.reader import TierStorageReader
from tierckpt.dcp.save_session import SaveSession, encode_results
from tierckpt.dcp.stager import TierStager
from tierckpt.drain.drainer import Drainer
from tierckpt.errors import TierckptError
from tierckpt.rank_store import RankStore
from tierckpt.save import flush
from tierckpt.training import checkpointer as checkpointers
from tierckpt.training.rank_exchange import Exchange

COLLECTIVE_TIMEOUT_SECONDS = 10.0
SAVE_TIMEOUT_SECONDS = 10.0
"""The other ranks wait ten seconds more for the verdict of rank 0: 20 of the 30 seconds that they may take."""
ELEMENTS = 1 << 16


def state_of(rank: int, step: int) -> dict[str, Any]:
    """What ``rank`` saves as ``step``."""
    own = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(100 * step + rank))
    return {f"own-{rank}": own, "replicated": torch.full((ELEMENTS,), float(step)), "step": step}


SAVE_PHASES: dict[str, Callable[[], None]] = {
    "local plan": lambda: before(SaveSession, "plan_local"),
    "staging": lambda: before(TierStager, "stage_items"),
    "flush": lambda: before(flush.ShardFile, "finish"),
    "written": lambda: after(SaveSession, "write"),
    "hand over": lambda: after(Exchange, "gather_then"),
    "drain": lambda: before(Drainer, "send_files"),
}
COORDINATOR_PHASES: dict[str, Callable[[], None]] = {
    "global plan": lambda: before(SaveSession, "plan_global"),
    "commit": lambda: before(local_commit, "commit_local"),
    "committed": lambda: after(local_commit, "commit_local"),
}
RESTORE_PHASES: dict[str, Callable[[], None]] = {
    "finding the step": lambda: before(checkpointers, "restore_newest"),
    "planning to read": lambda: before(TierStorageReader, "prepare_local_plan"),
    "reading": lambda: before(TierStorageReader, "read_data"),
}
PHASES = SAVE_PHASES | COORDINATOR_PHASES | RESTORE_PHASES


def wait_for_ever() -> None:
    """Seeded bug: ranks wait for each other without a deadline."""

    def wait(self: RankStore, names: list[str], *_: Any) -> Any:
        while True:
            time.sleep(1)

    RankStore.wait = wait  # type: ignore[method-assign,assignment]


def commit_without_the_dead() -> None:
    """Seeded bug: the coordinator commits what it has heard of when the time is up."""
    real = RankStore.wait

    def wait(self: RankStore, names: list[str], *rest: Any) -> Any:
        try:
            return real(self, names, *rest)
        except TierckptError:
            nothing = [encode_results([]), False]
            return [(self.peek([name]) or [nothing])[0] for name in names]

    RankStore.wait = wait  # type: ignore[method-assign,assignment]


BUGS = {"wait for ever": wait_for_ever, "commit without the dead": commit_without_the_dead}


def lose_a_rank(folder: Path, uri: str, way: str, phase: str, victim: int, bug: str = "") -> None:
    """Save step 1, then step 2 or restore while ``victim`` dies in ``phase``. Each survivor leaves what it was told."""
    rank = dist.get_rank()
    checkpointer = tierckpt.Checkpointer(uri, timeout_seconds=SAVE_TIMEOUT_SECONDS)
    checkpointer.save(1, state_of(rank, 1))
    checkpointer.wait()
    dist.barrier()
    if bug:
        BUGS[bug]()
    if rank == victim:
        PHASES[phase]()
    begun = time.monotonic()
    told = "ok"
    try:
        if phase in RESTORE_PHASES:
            checkpointer.restore(state_of(rank, 0))
        elif way == "dcp.save":
            dcp.save(state_of(rank, 2), storage_writer=tierckpt.TierStorageWriter(f"{uri}/step-2"))
        else:
            checkpointer.save(2, state_of(rank, 2))
            checkpointer.wait("local")
            told = "saved"
            checkpointer.wait()
    except Exception as error:  # gloo's are RuntimeErrors
        told = f"{told}, {type(error).__name__}"
    seconds = time.monotonic() - begun
    (folder / f"told-{rank}").write_text(json.dumps([told, seconds]))
    os._exit(0)  # the process group is broken: leave as a job does that is about to be restarted


def come_back(folder: Path, uri: str) -> tuple[int | None, bool]:
    """The restarted job: restore the newest step, save and drain another. Returns the step and whether it is whole."""
    rank = dist.get_rank()
    with tierckpt.Checkpointer(uri, timeout_seconds=60) as checkpointer:
        state = state_of(rank, 0)
        step = checkpointer.restore(state)
        whole = same(state, state_of(rank, step or 0))
        checkpointer.save(3, state_of(rank, 3))
        checkpointer.wait()
    return step, whole
