"""Random histories of a run whose job goes back to older steps, against a model (``histories.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.fault.histories import BUGS

HISTORIES = int(os.environ.get("TIERCKPT_TEST_HISTORIES", "4"))
SEEDED = 40
SECONDS = 60 + 40 * HISTORIES  # tells what hangs from what is slow

pytestmark = pytest.mark.timeout(max(SECONDS, 600) + 30)


def play(first: int, count: int, bug: str = "") -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.fault.histories", str(first), str(count), bug]
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(SECONDS, 600))
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_each_seeded_bug_is_found(bug: str) -> None:
    assert any(one["wrong"] for one in play(0, SEEDED, bug)), f"{SEEDED} histories do not find it"


def test_a_job_that_goes_back_loses_nothing_it_was_told() -> None:
    histories = play(0, HISTORIES)
    assert not [one for one in histories if one["wrong"]], histories[-1]
    assert len(histories) == HISTORIES
