"""Ranks of a job save over several steps: all of them one step, whatever happens on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compat.worker import launch


def run(what: str, directory: Path, **arguments: Any) -> list[list[str]]:
    """Two ranks, each in a process of its own. Returns the lines of each."""
    lines: list[list[str]] = launch(
        f"tests.integration.multi_step_save_ranks:{what}", 2, directory=str(directory), **arguments
    )
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp", "bucket views"])
def test_what_two_ranks_have_saved_is_restored_in_fresh_processes(kind: str, tmp_path: Path) -> None:
    saved = run("save", tmp_path, kind=kind)
    if kind != "bucket views":  # where gradients lie in buffers that are used again, one window is copied whole
        assert saved == [["saved 11 4 ", "saved 19 4 ", "saved 21 0 "]] * 2
    assert sum(not line.endswith(" ") for line in saved[0]) <= 1, saved
    restored = run("restore", tmp_path, kind=kind)
    assert restored == [[" ".join(["restored", line.split()[1]]) for line in of_rank] for of_rank in saved]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"), [("one rank edits", "outside the optimizer"), ("one rank loads", "load_state_dict")]
)
def test_a_rank_that_gives_up_has_all_ranks_copy_the_same_step_whole(fault: str, reason: str, tmp_path: Path) -> None:
    saved = run("save", tmp_path, kind="fsdp", fault=fault)
    first = saved[0][0].split(maxsplit=3)
    assert saved[0] == saved[1], "ranks differ"
    assert int(first[1]) in (11, 12, 13) and first[2] == "0" and reason in first[3]
    assert saved[0][1:] == ["saved 19 4 ", "saved 21 0 "], "the window after it is whole again"
    assert len(run("restore", tmp_path, kind="fsdp")[0]) == 3
