"""Ranks of a job save over several steps: all of them one step, whatever happens on one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import ENVIRONMENT, REPOSITORY


def run(directory: Path, *arguments: str) -> list[list[str]]:
    """Two ranks, each in a process of its own. Returns the lines of each."""
    command = [sys.executable, "-m", "tests.integration.multi_step_save_ranks"]
    environment = ENVIRONMENT | {"TIERCKPT_LOCAL_ROOT": str(directory / "local")}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(directory), *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=240) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], told
    return [text.splitlines() for text, _ in told]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_what_two_ranks_have_saved_is_restored_in_fresh_processes(kind: str, tmp_path: Path) -> None:
    saved = run(tmp_path, kind, "save")
    assert saved == [["saved 11 4 ", "saved 19 4 ", "saved 21 0 "]] * 2
    restored = run(tmp_path, kind, "restore")
    assert restored == [["restored 11", "restored 19", "restored 21"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"), [("one rank edits", "beside the optimizer"), ("one rank loads", "load_state_dict")]
)
def test_a_rank_that_gives_up_has_all_ranks_copy_the_same_step_whole(fault: str, reason: str, tmp_path: Path) -> None:
    saved = run(tmp_path, "fsdp", "save", fault)
    first = saved[0][0].split(maxsplit=3)
    assert saved[0] == saved[1], "ranks differ"
    assert int(first[1]) in (11, 12, 13) and first[2] == "0" and reason in first[3]
    assert saved[0][1:] == ["saved 19 4 ", "saved 21 0 "], "the window after it is whole again"
    assert len(run(tmp_path, "fsdp", "restore")[0]) == 3
