"""Ranks that fail, or are killed in a phase of a save or a restore."""

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
from tests.fault.scenario_tools import after, before, of_each_rank
from tests.files import flip
from tests.states import raises_ours, same
from tierckpt.checkpoint import local_commit
from tierckpt.dcp.reader import TierStorageReader
from tierckpt.dcp.save_session import SaveSession, encode_results
from tierckpt.dcp.stager import TierStager
from tierckpt.drain.drainer import Drainer
from tierckpt.errors import CapacityError, TierckptError
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.rank_store import RankStore
from tierckpt.save import flush
from tierckpt.training import checkpointer as checkpointers
from tierckpt.training.rank_exchange import Exchange

COLLECTIVE_TIMEOUT_SECONDS = 30.0
SAVE_TIMEOUT_SECONDS = 10.0
"""The other ranks wait ten seconds more for the verdict of rank 0: 20 of the 60 seconds that they may take."""
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
    """Seeded bug: at the deadline the coordinator commits without the missing ranks."""
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
    """Save step 1, then step 2 or restore while ``victim`` dies in ``phase``. Survivors write results to files."""
    rank = dist.get_rank()
    checkpointer = tierckpt.Checkpointer(uri, timeout_seconds=60)
    checkpointer.save(1, state_of(rank, 1))
    checkpointer.wait()
    checkpointer.timeout_seconds = SAVE_TIMEOUT_SECONDS
    dist.barrier()
    (folder / f"begun-{rank}").touch()
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


def save_with_a_failing_rank(uri: str, way: str, failing: int) -> dict[str, Any]:
    """Save step 1, then step 2, which ``failing`` cannot write. Returns each rank's error and the restored step."""
    rank = dist.get_rank()
    checkpointer = tierckpt.Checkpointer(uri, timeout_seconds=60)
    checkpointer.save(1, state_of(rank, 1))
    checkpointer.wait()
    if rank == failing:
        flush.ShardFile.finish = full  # type: ignore[method-assign,assignment]
    error = ""
    try:
        if way == "dcp.save":
            with raises_ours():
                dcp.save(state_of(rank, 2), storage_writer=tierckpt.TierStorageWriter(f"{uri}/step-2"))
        else:
            checkpointer.save(2, state_of(rank, 2))
            checkpointer.wait("local")
    except TierckptError as caught:
        error = type(caught).__name__
    errors, state = of_each_rank(error), state_of(rank, 0)
    step = checkpointer.restore(state)
    return {"errors": errors, "step": step, "latest": tierckpt.latest(uri), "right": same(state, state_of(rank, 1))}


def full(*_: Any, **__: Any) -> None:
    raise CapacityError("no room (seeded)", tier="local")


def two_ranks_one_bad_shard(uri: str) -> dict[str, Any]:
    """Save two steps, and damage the newer shard of rank 1 on both tiers. Returns what each rank restores."""
    name = f"rank-{dist.get_rank()}"
    with tierckpt.Checkpointer(uri) as checkpointer:
        checkpointer.save(1, {name: torch.full((10_000,), 1.0)})
        checkpointer.save(2, {name: torch.full((10_000,), 2.0)})
    if dist.get_rank() == 0:
        directory = local_dir(Path(os.environ["TIERCKPT_LOCAL_ROOT"]), parse_uri(f"{uri}/step-2"))
        for place in (directory, Path(uri, "step-2")):
            (shard,) = place.glob("__1_*.distcp")
            flip(shard)
    dist.barrier()
    target = {name: torch.zeros(10_000)}
    step = tierckpt.Checkpointer(uri).restore(target)
    found = of_each_rank((step, target[name].unique().tolist()))
    return {"steps": [step for step, _ in found], "values": [value for _, value in found]}
