"""Ranks of a node read a checkpoint together; one is killed, stopped, late or slow: the others get their bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fault import sharing_scenarios
from tests.fault.runner import start
from tests.fault.sharing_scenarios import state
from tests.states import save

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
    job = start(sharing_scenarios.load_together, folder, RANKS, uri=uri, victim=victim, fault=fault, nth=nth, bug=bug)
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
