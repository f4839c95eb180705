"""Two nodes save the same steps of one run: neither reverts a commit that was acknowledged to the other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.fault.runner import start
from tests.fault.two_nodes import Verdict, judge, save_steps

STEPS = int(os.environ.get("TIERCKPT_TEST_TWO_NODES", "6"))
"""Steps of each node; the second half is saved twice."""
SECONDS_MAX = 120 + 20 * STEPS  # longer than a slow run takes

pytestmark = pytest.mark.timeout(SECONDS_MAX + 30)


def run(uri: str, folder: Path, *, keep: int = 0, store: str = "", bug: str = "", steps: int = STEPS) -> Verdict:
    options: dict[str, Any] = {"uri": uri, "steps": steps, "keep": keep, "store": store, "bug": bug}
    for job in [start(save_steps, folder, **options, name=name) for name in ("one", "two")]:
        assert job.codes(SECONDS_MAX) == [0], job.output()[-3000:]
    lines = [json.loads(line) for name in ("one", "two") for line in (folder / f"{name}.jsonl").open()]
    return judge(uri, lines, store)


@pytest.mark.parametrize(
    ("tier", "keep"),
    [
        ("file", 1),
        pytest.param("s3", 0, marks=pytest.mark.server),
        pytest.param("file", 0, marks=pytest.mark.slow),
        pytest.param("s3", 1, marks=[pytest.mark.server, pytest.mark.slow]),
    ],
)
def test_two_nodes_save_one_run_consistently(
    tier: str, keep: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    uri = request.getfixturevalue(f"{tier}_uri")
    verdict = run(uri, tmp_path / "nodes", keep=keep)
    print(verdict.counts)
    assert not verdict.wrong
    assert verdict.counts["acknowledged"] >= STEPS and verdict.counts["save"] >= 2 * STEPS
    assert verdict.counts["removed"] >= STEPS // 2 if keep else verdict.counts["standing"] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "keep"), [("no condition", 0), ("no look", 1)])
def test_two_nodes_find_a_seeded_bug(bug: str, keep: int, file_uri: str, tmp_path: Path) -> None:
    for turn in range(5):
        if run(f"{file_uri}-{turn}", tmp_path / f"nodes-{turn}", keep=keep, bug=bug, steps=8).wrong:
            return
    pytest.fail(f"{bug!r} was not found")
