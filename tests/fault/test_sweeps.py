"""Kills before, and errors of, each system call of save, drain, restore, fetch, retention and resume.

Invariants of docs/internals/commit.md: after any fault and a restart, each checkpoint is whole or invisible, everything
acknowledged is present, and the interrupted work can be repeated.

The sweeps (tests/fault/sweep) run as three processes, because only in a process with one thread the n-th call is always
the same. ``make torture`` takes ten times the points of this suite; TIERCKPT_TEST_SWEEP=full every one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.runner import start
from tests.fault.sweep.bugs import BUGS
from tests.fault.sweep.phases import PHASES
from tests.fault.sweep.races import BUGS as RACE_BUGS
from tests.fault.sweep.races import run_races
from tests.services import needs

LENGTH = os.environ.get("TIERCKPT_TEST_SWEEP", "part")
KILLS_MIN, ANSWERS_MIN, PAIRS_MIN, RACES = {
    "quick": (18, 60, 0, 25),
    "part": (45, 110, 0, 25),
    "long": (450, 700, 200, 250),
    "full": (5000, 5000, 2000, 2000),
}[LENGTH]
SECONDS_MAX = 6 * 3600 if PAIRS_MIN else 400
PROCESSES = 3
"""More than cores: each waits half of its time."""
BUG_RACES_MAX = 24

pytestmark = pytest.mark.timeout(SECONDS_MAX + 100)


def sweep(what: str, folder: Path) -> list[dict[str, Any]]:
    """Run the sweep ``what`` in several processes and return their outcomes."""
    needs("strace")
    processes = []
    for share in range(PROCESSES):
        own = folder / f"{what}-{share}"
        own.mkdir()
        with (own / "log").open("wb") as log:
            command = [sys.executable, "-m", "tests.fault.sweep.run", what, str(own), str(share), str(PROCESSES)]
            processes.append((own, subprocess.Popen(command, stdout=log, stderr=log)))
    try:
        for own, process in processes:
            assert process.wait(SECONDS_MAX) == 0, (own / "log").read_text()[-3000:]
    finally:
        for _, process in processes:
            process.kill()
            process.wait()
    return [json.loads((own / "outcome.json").read_text()) for own, _ in processes]


def total(outcomes: list[dict[str, Any]], key: str) -> int:
    return sum(outcome[key] for outcome in outcomes)


def fired_by_phase(outcomes: list[dict[str, Any]]) -> dict[str, int]:
    return {phase.name: sum(outcome["by_phase"].get(phase.name, 0) for outcome in outcomes) for phase in PHASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("sweep")


def judge(outcomes: list[dict[str, Any]], planned_min: int, record: Any) -> None:
    """Check that the planned faults were injected in every phase, without violations."""
    planned, fired = total(outcomes, "planned"), total(outcomes, "fired")
    record("planned", planned)
    record("fired", fired)
    violations = [text for outcome in outcomes for text in outcome["violations"]]
    assert not violations, f"{len(violations)} of {planned}: {violations[0]}"
    assert planned >= planned_min
    # A call that depends on timing may be missing from all runs.
    missed = [text for outcome in outcomes for text in outcome["missed"]]
    assert planned - fired <= max(1, planned // 100), missed
    assert all(fired_by_phase(outcomes).values()), fired_by_phase(outcomes)


def test_kill_before_any_call_tears_and_loses_nothing(folder: Path, record_property: Any) -> None:
    outcomes = sweep("kills", folder)
    judge(outcomes, KILLS_MIN, record_property)
    assert sum(outcome["ends"].get("killed again", 0) for outcome in outcomes) >= KILLS_MIN // 6


@pytest.mark.slow
def test_error_of_any_call_is_handled_or_raised_and_loses_nothing(folder: Path, record_property: Any) -> None:
    judge(sweep("errnos", folder), ANSWERS_MIN, record_property)


@pytest.mark.skipif(not PAIRS_MIN, reason="only `make torture` injects two errors in one run")
def test_two_errors_in_one_run_lose_nothing(folder: Path, record_property: Any) -> None:
    judge(sweep("pairs", folder), PAIRS_MIN, record_property)


@pytest.mark.slow
def test_sweeps_find_every_seeded_bug(folder: Path) -> None:
    found = {bug: is_found for outcome in sweep("bugs", folder) for bug, is_found in outcome["found"].items()}
    assert found == dict.fromkeys(BUGS, True)


def race_outcome(folder: Path, races: int, bug: str = "") -> dict[str, Any]:
    outcome: dict[str, Any] = start(run_races, folder, races=races, bug=bug).result(SECONDS_MAX)
    return outcome


@pytest.mark.slow
def test_exactly_one_of_2_to_32_concurrent_writers_commits(tmp_path: Path, record_property: Any) -> None:
    outcome = race_outcome(tmp_path, RACES)
    record_property("races", outcome["races"])
    assert outcome["violations"] == []
    assert sum(outcome["races"].values()) == RACES


@pytest.mark.slow
@pytest.mark.parametrize("bug", RACE_BUGS)
def test_races_find_a_seeded_bug(bug: str, tmp_path: Path) -> None:
    assert race_outcome(tmp_path, BUG_RACES_MAX, bug)["violations"]
