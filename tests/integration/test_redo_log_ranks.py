"""Ranks replay what each has saved: its shards, or what all have alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.worker import launch
from tierckpt.format.layout import WINDOWS_DIR

SCENARIOS = "tests.integration.multi_step_save_ranks"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_two_ranks_replay_what_they_have_saved(kind: str, tmp_path: Path) -> None:
    job = {"directory": str(tmp_path), "kind": kind}
    launch(f"{SCENARIOS}:save_as_copied", 2, **job)
    windows = {path.name for path in (tmp_path / "run" / WINDOWS_DIR).iterdir()}
    assert windows == {"step-11", "step-19"}
    assert not (tmp_path / "run" / "step-11").exists()
    for path in (tmp_path / "run").glob("step-21/**/*"):  # the whole copy at the end of the loop: windows are asked for
        path.unlink() if path.is_file() else None
    for name in tmp_path.glob("21-*.pt"):
        name.unlink()
    if kind == "fsdp":
        with pytest.raises(AssertionError, match="has the shards of 2 ranks"):
            launch(f"{SCENARIOS}:restore", 1, **job)
        assert not (tmp_path / "run" / "step-11").exists()
    assert launch(f"{SCENARIOS}:restore", 2, **job) == [["restored 11", "restored 19"]] * 2
    assert (tmp_path / "run" / "step-11" / ".metadata").exists()
