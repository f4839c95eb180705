"""Retention killed at every change it makes to a file system: whole or invisible on each tier, nothing left (N4).

Real processes die by SIGKILL (removal_children.py), on the local tier and on a mounted shared one. Three seeded bugs
are the negative controls: the manifest last, on either tier, and no note of what is to be deleted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services import REPOSITORY

SWEEP_SECONDS = 400.0
POINTS_MIN = 40
"""Calls that change something, in the removal of one checkpoint of two shards from both tiers."""

pytestmark = pytest.mark.timeout(SWEEP_SECONDS + 30)


def sweep(folder: Path, bug: str = "") -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.fault.removal_children", str(folder), bug]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, timeout=SWEEP_SECONDS
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcome: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
    killed = [point["killed"] for point in outcome["points"]]
    assert killed == [-signal.SIGKILL] * len(outcome["planned"]), "a kill that was planned did not happen"
    return outcome


def torn(outcome: dict[str, Any], found: str = "found") -> list[str]:
    """Places that are neither whole nor invisible, and readers that were misled, at any point."""
    wrong = []
    for point in outcome["points"]:
        states = point.get(found, {"latest": "step-2"})
        wrong += [f"{point['number']}: {place} {state}" for place, state in states.items() if str(state)[:4] == "torn"]
        wrong += [f"{point['number']}: {states}"] if states.get("latest") != "step-2" else []
        wrong += [
            f"{point['number']}: {place}" for place in ("local/2", "shared/2") if states.get(place, "whole") != "whole"
        ]
    return wrong


@pytest.mark.slow
def test_a_prune_that_is_killed_leaves_each_checkpoint_whole_or_invisible(tmp_path: Path) -> None:
    outcome = sweep(tmp_path)
    assert outcome["changes"] >= POINTS_MIN
    assert outcome["left"] == []
    assert torn(outcome) == []
    seen = {point["found"][place] for point in outcome["points"] for place in ("local/1", "shared/1")}
    assert seen == {"whole", "invisible"}  # the sweep went over the instant of the commit

    # ... what finishes it may be killed too, and the one after that leaves nothing.
    again = [point["killed_again"] for point in outcome["points"] if "killed_again" in point]
    assert again.count(-signal.SIGKILL) >= len(again) // 2 > 0
    assert torn(outcome, "found_again") == []
    for point in outcome["points"]:
        assert (point["finished"], point["left"]) == (0, []), point
        assert point["end"]["step-1"] == "CheckpointNotFoundError"
        assert point["end"]["local/2"] == point["end"]["shared/2"] == "whole"


@pytest.mark.parametrize("bug", ["local", "shared"])
def test_a_removal_that_begins_with_the_shards_is_caught(bug: str, tmp_path: Path) -> None:
    assert any(f"{bug}/1 torn" in wrong for wrong in torn(sweep(tmp_path, bug)))


@pytest.mark.slow
def test_a_removal_without_a_note_is_caught(tmp_path: Path) -> None:
    left = [point["left"] for point in sweep(tmp_path, "no note")["points"]]
    assert any(any(name.endswith(".distcp") for name in names) for names in left)
