"""A process that exits without waiting for its last save, as a script does that ends after ``async_save``."""

from __future__ import annotations

from pathlib import Path

import pytest

import tierckpt
from tests.command_line import python
from tests.services import ENVIRONMENT

BEGIN = """
import logging, sys, time, torch, tierckpt
import torch.distributed.checkpoint as dcp
from tierckpt.save import flush
logging.basicConfig(level=logging.INFO)
write = flush.ShardFile.write
def slow(*args):
    time.sleep(1.0)
    write(*args)
flush.ShardFile.write = slow
where, state = sys.argv[1], {"w": torch.ones(1000)}
"""
SAVES = {
    "Checkpointer": 'kept = tierckpt.Checkpointer(where); kept.save(1, {"m": state})',
    "async_save": 'kept = dcp.async_save(state, storage_writer=tierckpt.TierStorageWriter(where + "/step-1"))',
}
ENDS = {"the end of the script": "", "an error": "raise ValueError", "Ctrl-C": "raise KeyboardInterrupt"}


def errors_of(script: str, where: Path, local_root: Path) -> str:
    environment = {**ENVIRONMENT, "TIERCKPT_LOCAL_ROOT": str(local_root), "TIERCKPT_MOVER": "inline"}
    return python(BEGIN + script, where, env=environment, timeout=150).stderr


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("save", SAVES)
def test_exit_waits_for_a_save_that_nobody_waits_for(save: str, end: str, tmp_path: Path, local_root: Path) -> None:
    errors = errors_of(f"{SAVES[save]}\n{ENDS[end]}", tmp_path / "run", local_root)
    assert "ERROR" not in errors and errors.count("Traceback") == bool(ENDS[end]), errors
    assert (tmp_path / "run" / "step-1" / ".metadata").exists(), errors
    assert tierckpt.latest(tmp_path / "run") == str(tmp_path / "run" / "step-1")


@pytest.mark.slow
def test_exit_does_not_wait_for_a_save_that_failed_in_dcp(tmp_path: Path, local_root: Path) -> None:
    script = """
class Planner(dcp.DefaultSavePlanner):
    def create_global_plan(self, plans):
        raise ValueError("a planner of the user")
writer = tierckpt.TierStorageWriter(where + "/step-1")
kept = dcp.async_save(state, storage_writer=writer, planner=Planner())
assert isinstance(kept.exception(), BaseException)
sys.stderr.write("it failed")
"""
    errors = errors_of(script, tmp_path / "run", local_root)  # a wait of exit_timeout_seconds exceeds its timeout
    assert "it failed" in errors
    assert not (tmp_path / "run").exists()
