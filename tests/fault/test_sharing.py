"""Ranks of a node read a checkpoint together; one is killed, stopped, late or slow: the others get their bytes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.compat.sharing import Read
from tests.fault.runner import start
from tests.fault.scenario_tools import before, until
from tests.states import same, save
from tierckpt.arena.shared_buffer import SharedWindow
from tierckpt.dcp import shared_read_planning
from tierckpt.read import shared_read
from tierckpt.read.replicated_file import ReplicatedFile

TENSORS, ELEMENTS = 16, 1 << 18
"""1 MiB each."""
WINDOW_BYTES = 2 << 20


def state() -> dict[str, torch.Tensor]:
    return {str(number): torch.arange(ELEMENTS, dtype=torch.int32) * (number + 3) for number in range(TENSORS)}


class Reader(tierckpt.TierStorageReader):
    """Writes this rank's result before DCP waits for the others."""

    def watch(self, folder: Path, loaded: dict[str, torch.Tensor], is_late: bool) -> None:
        self.folder, self.loaded, self.is_late = folder, loaded, is_late

    def read_data(self, plan: Any, planner: Any) -> Any:
        if self.is_late:
            until(lambda: len(list(self.folder.glob("read-*"))) >= dist.get_world_size() - 1)
        with Read() as read:
            done = super().read_data(plan, planner)
        outcome = {"right": same(self.loaded, state()), "alone": read.alone, "read": sum(read.bytes.values())}
        (self.folder / f"read-{dist.get_rank()}.json").write_text(json.dumps(outcome))
        return done


def load_together(folder: Path, uri: str, victim: int, fault: str, nth: int, bug: str = "") -> None:
    """Load; at the ``nth`` read of the ``victim`` the fault happens to it."""
    is_victim = dist.get_rank() == victim
    shared_read.JOIN_SECONDS = 1.0 if fault == "late" else 30.0
    shared_read_planning.IDLE_SECONDS_MAX = 3.0 if fault == "stop" or bug else 30.0
    shared_read_planning.WINDOW_BYTES = WINDOW_BYTES
    if bug:
        BUGS[bug]()
    if is_victim and fault in ("kill", "stop"):
        _at_read(nth, folder, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if is_victim and fault == "slow":
        _take_slowly(folder)
    if is_victim and fault == "late":
        (folder / "fired").touch()
    loaded = {name: torch.zeros_like(value) for name, value in state().items()}
    reader = Reader(uri)
    reader.watch(folder, loaded, is_victim and fault == "late")
    try:
        dcp.load(loaded, storage_reader=reader)
    except BaseException as error:  # the collective that follows fails without the rank
        print(f"{type(error).__name__}: {error}")
        if fault not in ("kill", "stop"):
            raise
        os._exit(0)


def _at_read(nth: int, folder: Path, number: signal.Signals) -> None:
    count = 0

    def part(file: ReplicatedFile, *_: Any) -> None:
        nonlocal count
        count += file.entry.path.endswith(".distcp")
        if count == nth and file.entry.path.endswith(".distcp"):
            (folder / "fired").touch()
            os.kill(os.getpid(), number)

    before(ReplicatedFile, "part", part)


def _take_slowly(folder: Path) -> None:
    def wait(*_: Any) -> None:
        (folder / "fired").touch()
        time.sleep(0.1)  # the others are quicker, on a busy machine too

    before(shared_read.UnitThreads, "copy_unit", wait)


def _reuse_at_once() -> None:
    SharedWindow.has_slot = lambda self, unit: True  # type: ignore[method-assign]


def _never_take_over() -> None:
    real = SharedWindow.claim

    def claim(self: SharedWindow, unit: int) -> bool:
        begun = 4096 + (1 << 20) + unit  # behind the units in the window's head
        if self._memory.view[begun] or not real(self, unit):
            return False
        self._memory.view[begun] = 1
        return True

    SharedWindow.claim = claim  # type: ignore[method-assign]


BUGS = {"a slot is used again at once": _reuse_at_once, "what a dead rank began stays begun": _never_take_over}
"""Seeded, for the controls."""


# --- the tests --------------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.distributed

RANKS, VICTIM = 4, 2
RETURN_SECONDS_MAX = 60.0
SIZE = sum(value.nbytes for value in state().values())


@pytest.fixture
def uri(file_uri: str) -> str:
    save(f"{file_uri}/step-1", state(), chunk_size_bytes=64 << 10)
    return f"{file_uri}/step-1"


def outcomes_of_survivors(
    folder: Path, uri: str, fault: str, *, nth: int = 3, victim: int = VICTIM, bug: str = ""
) -> list[dict[str, Any]]:
    """Return the outcomes of the other ranks, and of the victim if it lives."""
    job = start(load_together, folder, RANKS, uri=uri, victim=victim, fault=fault, nth=nth, bug=bug)
    others = [rank for rank in range(RANKS) if fault not in ("kill", "stop") or rank != victim]
    found = [folder / f"read-{rank}.json" for rank in others]
    try:
        job.until(lambda: all(path.exists() and path.read_text() for path in found), "the others", RETURN_SECONDS_MAX)
        assert (folder / "fired").exists(), "the fault did not happen"
        return [json.loads(path.read_text()) for path in found]
    finally:
        job.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "nth"), [(VICTIM, 1), (VICTIM, 9), (0, 5)])
def test_chunks_of_a_killed_rank_are_read_by_another(victim: int, nth: int, tmp_path: Path, uri: str) -> None:
    outcomes = outcomes_of_survivors(tmp_path / "job", uri, "kill", nth=nth, victim=victim)
    assert [outcome["right"] for outcome in outcomes] == [True] * (RANKS - 1)
    assert [outcome["alone"] for outcome in outcomes] == [0] * (RANKS - 1)


@pytest.mark.slow
def test_ranks_wait_at_most_the_timeout_for_a_stopped_rank(tmp_path: Path, uri: str) -> None:
    outcomes = outcomes_of_survivors(tmp_path / "job", uri, "stop")
    assert [outcome["right"] for outcome in outcomes] == [True] * (RANKS - 1)
    assert [outcome["alone"] for outcome in outcomes] == [1] * (RANKS - 1)  # each waited once only


@pytest.mark.slow
def test_late_rank_reads_for_itself(tmp_path: Path, uri: str) -> None:
    outcomes = outcomes_of_survivors(tmp_path / "job", uri, "late")
    assert [outcome["right"] for outcome in outcomes] == [True] * RANKS
    assert outcomes[VICTIM]["alone"] == 1


@pytest.mark.slow
def test_slow_rank_gets_its_bytes(tmp_path: Path, uri: str) -> None:
    outcomes = outcomes_of_survivors(tmp_path / "job", uri, "slow")
    assert [(outcome["right"], outcome["alone"]) for outcome in outcomes] == [(True, 0)] * RANKS
    assert SIZE <= sum(outcome["read"] for outcome in outcomes) <= SIZE * 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "fault"), [("a slot is used again at once", "slow"), ("what a dead rank began stays begun", "kill")]
)
def test_harness_finds_a_seeded_bug(bug: str, fault: str, tmp_path: Path, uri: str) -> None:
    outcomes = outcomes_of_survivors(tmp_path / "job", uri, fault, bug=bug)
    if fault == "slow":
        assert not all(outcome["right"] for outcome in outcomes)
    else:
        assert any(outcome["alone"] for outcome in outcomes)
