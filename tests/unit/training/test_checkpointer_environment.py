"""A Checkpointer in a process with a minimal environment (tierckpt/training/checkpointer.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import ENVIRONMENT, REPOSITORY
from tierckpt.format.layout import agent_dir
from tierckpt.ipc.agent_client import LOG

JOB = """
import os, sys, torch, tierckpt
base = sys.argv[1]
os.rmdir(os.getcwd())
state = {"weight": torch.ones(4)}
with tierckpt.Checkpointer(f"file://{base}/run", local_root=f"{base}/root") as checkpoints:
    checkpoints.save(1, state)
    tierckpt.wait(f"{base}/run/step-1", timeout_seconds=60, local_root=f"{base}/root")
    state["weight"].zero_()
    assert checkpoints.restore(state) == 1
    assert state["weight"].sum() == 4
assert tierckpt.latest(f"{base}/run", local_root=f"{base}/root") == f"{base}/run/step-1"
for call in (
    lambda: tierckpt.Checkpointer("run"),
    lambda: tierckpt.prefetch(f"{base}/run", to="to"),
    lambda: tierckpt.TierStorageWriter("run/step-1"),
    lambda: tierckpt.latest(f"{base}/run", local_root="root"),
):
    try:
        call()
    except tierckpt.errors.ConfigError as error:
        assert "the working directory of this process was removed" in str(error), error
    else:
        raise AssertionError("a relative path was taken")
print("done")
"""


@pytest.mark.slow
def test_absolute_paths_need_no_working_directory(tmp_path: Path) -> None:
    """It also starts an agent on demand."""
    directory = tmp_path / "gone"
    directory.mkdir()
    environment = {**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", JOB, str(tmp_path)]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
    assert "could not be started" not in done.stderr
    assert "is ready" in (agent_dir(tmp_path / "root") / LOG).read_text()
