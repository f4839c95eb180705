"""A job killed anywhere in a window resumes from the previous checkpoint, or from the window's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exact import check_same
from tests.fault.runner import start
from tests.fault.training_jobs import FIRST, SECOND, WINDOW, Job, restored, save_in_windows
from tests.services import in_full

IS_FULL = bool(in_full([1]))
BEFORE, AFTER = FIRST + WINDOW - 1, SECOND + WINDOW - 1
POINTS = {
    "part 0": {BEFORE},
    "part 2": {BEFORE},
    "part 3": {BEFORE},
    "replay": {BEFORE},
    "write": {BEFORE, AFTER},  # the agent finishes the staged save
    "before the commit": {BEFORE, AFTER},
}


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS if IS_FULL else ("part 2", "before the commit"))
def test_kill_leaves_the_previous_checkpoint_or_the_right_one(point: str, tmp_path: Path, local_root: Path) -> None:
    environment = {"TIERCKPT_LOCAL_ROOT": str(local_root), "TIERCKPT_MOVER": "agent"}
    options: dict[str, Any] = {"env": environment, "threads": torch.get_num_threads(), "run": str(tmp_path / "run")}
    child = start(save_in_windows, tmp_path / "job", point=point, **options)
    assert (child.codes(170), child.lines()) == ([-9], ["committed"]), "the kill was not in the second window"
    job = Job()
    step = restored(tmp_path / "run", job)
    assert step in POINTS[point]
    reference = Job().train_to(step)
    check_same(job.values(), reference.values())
    for one in (job, reference):  # training continues as without a kill
        one.train()
    check_same(job.values(), reference.values())
