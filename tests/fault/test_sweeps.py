"""Kill -9 before, and every error the kernel may give to, the calls of save, drain, restore, fetch, retention, resume.

The sweeps are processes of their own (tests/fault/sweep), three at a time: what the n-th call is stays the same only in
a process with one thread. ``make torture`` runs them in full; here a part of the points is taken, the same each time.

Cites docs/internals/commit.md: whatever the fault, after a restart each checkpoint is whole or invisible, what was
acknowledged is there, and the same work done again ends well.
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

from tests.fault.sweep.bugs import BUGS
from tests.fault.sweep.phases import PHASES
from tests.fault.sweep.races import BUGS as RACE_BUGS
from tests.services import needs

LENGTH = os.environ.get("TIERCKPT_TEST_SWEEP", "part")
FULL = LENGTH == "full"
KILLS_MIN, ANSWERS_MIN, PAIRS_MIN = {"full": (5000, 5000, 2000), "part": (45, 110, 0), "quick": (40, 60, 0)}[LENGTH]
SECONDS_MAX = 6 * 3600 if FULL else 400
PROCESSES = 3
"""Half of their time they wait."""
RACES = 2000 if FULL else 25
BUG_RACES_MAX = 24

pytestmark = pytest.mark.timeout(SECONDS_MAX + 100)


def sweep(what: str, folder: Path) -> list[dict[str, Any]]:
    """The outcomes of ``what``, of all processes that shared it."""
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


def of_phases(outcomes: list[dict[str, Any]]) -> dict[str, int]:
    return {phase.name: sum(outcome["by_phase"].get(phase.name, 0) for outcome in outcomes) for phase in PHASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("sweep")


def judge(outcomes: list[dict[str, Any]], planned_min: int, record: Any) -> None:
    """All that was planned came to pass, in every phase, and nothing that must not be was seen."""
    planned, fired = total(outcomes, "planned"), total(outcomes, "fired")
    record("planned", planned)
    record("fired", fired)
    violations = [text for outcome in outcomes for text in outcome["violations"]]
    assert not violations, f"{len(violations)} of {planned}: {violations[0]}"
    assert planned >= planned_min
    # A call that depends on the clock may not come again, in any of the runs it is waited for.
    missed = [text for outcome in outcomes for text in outcome["missed"]]
    assert planned - fired <= max(1, planned // 100), missed
    assert all(of_phases(outcomes).values()), of_phases(outcomes)


def test_killed_before_any_call_nothing_is_torn_or_lost(folder: Path, record_property: Any) -> None:
    outcomes = sweep("kills", folder)
    judge(outcomes, KILLS_MIN, record_property)
    assert sum(outcome["ends"].get("killed again", 0) for outcome in outcomes) >= KILLS_MIN // 6


@pytest.mark.slow
def test_an_error_of_any_call_is_gone_on_with_or_told_and_nothing_is_torn_or_lost(
    folder: Path, record_property: Any
) -> None:
    judge(sweep("errnos", folder), ANSWERS_MIN, record_property)


@pytest.mark.skipif(not FULL, reason="two errors in one run are tried by `make torture`")
def test_two_errors_in_one_run(folder: Path, record_property: Any) -> None:
    judge(sweep("pairs", folder), PAIRS_MIN, record_property)


@pytest.mark.slow
def test_every_seeded_bug_is_found(folder: Path) -> None:
    found = {bug: is_found for outcome in sweep("bugs", folder) for bug, is_found in outcome["found"].items()}
    assert found == dict.fromkeys(BUGS, True)


def raced(folder: Path, races: int, *bug: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.fault.sweep.races", str(folder), str(races), *bug]
    subprocess.run(command, check=True, timeout=SECONDS_MAX)
    outcome: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
    return outcome


@pytest.mark.slow
def test_of_two_to_32_writers_of_one_id_exactly_one_wins_and_the_others_are_told(
    tmp_path: Path, record_property: Any
) -> None:
    outcome = raced(tmp_path, RACES)
    record_property("races", outcome["races"])
    assert outcome["violations"] == []
    assert sum(outcome["races"].values()) == RACES


@pytest.mark.slow
@pytest.mark.parametrize("bug", RACE_BUGS)
def test_a_race_that_several_win_is_found(bug: str, tmp_path: Path) -> None:
    assert raced(tmp_path, BUG_RACES_MAX, bug)["violations"]
