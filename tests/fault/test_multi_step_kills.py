"""A job that is killed anywhere in a window resumes from the checkpoint before it, or from the window's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact import check_same
from tests.fault.nursery import Program
from tests.fault.window_job import FIRST, SECOND, WINDOW, Job, restored
from tests.services import ENVIRONMENT, in_full

EVERY = bool(in_full([1]))
BEFORE, AFTER = FIRST + WINDOW - 1, SECOND + WINDOW - 1
POINTS = {
    "part 0": {BEFORE},
    "part 2": {BEFORE},
    "part 3": {BEFORE},
    "replay": {BEFORE},
    "write": {BEFORE, AFTER},  # the agent finishes what was staged
    "before the commit": {BEFORE, AFTER},
}


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS if EVERY else ("part 2", "before the commit"))
def test_a_kill_leaves_the_checkpoint_before_or_the_right_one(point: str, tmp_path: Path, local_root: Path) -> None:
    environment = ENVIRONMENT | {"TIERCKPT_LOCAL_ROOT": str(local_root)}
    child = Program("tests.fault.window_job", str(tmp_path), point, env=environment)
    assert (child.stdout.read(), child.wait()) == ("committed\n", -9), "it was killed in the second window"
    job, reference = Job(), Job()
    step = restored(tmp_path / "run", job)
    assert step in POINTS[point]
    while reference.number < step:
        reference.train()
    check_same(job.values(), reference.values())
    for one in (job, reference):  # and training goes on as if it had not been killed
        one.train()
    check_same(job.values(), reference.values())
