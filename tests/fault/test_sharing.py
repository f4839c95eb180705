"""A rank is killed, stopped, late or slow while the ranks of its node read together: the others have their bytes."""

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


def survivors(
    folder: Path, uri: str, fault: str, *, nth: int = 3, victim: int = VICTIM, bug: str = ""
) -> list[dict[str, Any]]:
    """What the other ranks (and the victim, if it lives) had when their own part was done."""
    job = start(sharing_scenarios.load_together, folder, RANKS, uri=uri, victim=victim, fault=fault, nth=nth, bug=bug)
    others = [rank for rank in range(RANKS) if fault not in ("kill", "stop") or rank != victim]
    found = [folder / f"read-{rank}.json" for rank in others]
    try:
        job.until(lambda: all(path.exists() and path.read_text() for path in found), "the others", RETURN_SECONDS_MAX)
        assert (folder / "fired").exists(), "the fault has not happened"
        return [json.loads(path.read_text()) for path in found]
    finally:
        job.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "nth"), [(VICTIM, 1), (VICTIM, 9), (0, 5)])
def test_what_a_killed_rank_had_begun_is_read_by_another(victim: int, nth: int, tmp_path: Path, uri: str) -> None:
    outcomes = survivors(tmp_path / "job", uri, "kill", nth=nth, victim=victim)
    assert [outcome["right"] for outcome in outcomes] == [True] * (RANKS - 1)
    assert [outcome["alone"] for outcome in outcomes] == [0] * (RANKS - 1)


@pytest.mark.slow
def test_nobody_waits_longer_than_the_deadline_for_a_rank_that_stands_still(tmp_path: Path, uri: str) -> None:
    outcomes = survivors(tmp_path / "job", uri, "stop")
    assert [outcome["right"] for outcome in outcomes] == [True] * (RANKS - 1)
    assert [outcome["alone"] for outcome in outcomes] == [1] * (RANKS - 1)  # and no more than once


@pytest.mark.slow
def test_a_rank_that_comes_when_the_others_have_gone_on_reads_for_itself(tmp_path: Path, uri: str) -> None:
    outcomes = survivors(tmp_path / "job", uri, "late")
    assert [outcome["right"] for outcome in outcomes] == [True] * RANKS
    assert outcomes[VICTIM]["alone"] == 1


@pytest.mark.slow
def test_a_slow_rank_gets_what_it_should(tmp_path: Path, uri: str) -> None:
    outcomes = survivors(tmp_path / "job", uri, "slow")
    assert [(outcome["right"], outcome["alone"]) for outcome in outcomes] == [(True, 0)] * RANKS
    assert SIZE <= sum(outcome["read"] for outcome in outcomes) <= SIZE * 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "fault"),
    [("a slot is used again at once", "slow"), ("what a dead rank began stays begun", "kill")],
)
def test_the_harness_finds_what_would_be_wrong(bug: str, fault: str, tmp_path: Path, uri: str) -> None:
    outcomes = survivors(tmp_path / "job", uri, fault, bug=bug)
    if fault == "slow":
        assert not all(outcome["right"] for outcome in outcomes)
    else:
        assert any(outcome["alone"] for outcome in outcomes)
