"""Ranks replay what each has saved: its shards, or what all have alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import ENVIRONMENT, REPOSITORY
from tierckpt.format.layout import WINDOWS_DIR


def run(directory: Path, ranks: int, kind: str, what: str) -> list[tuple[int, str, str]]:
    """Each rank in a process of its own. Returns its exit code, and what it said."""
    command = [sys.executable, "-m", "tests.integration.redo_log_ranks"]
    environment = ENVIRONMENT | {"TIERCKPT_LOCAL_ROOT": str(directory / "local")}
    (directory / what).unlink(missing_ok=True)
    children = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(directory), kind, what],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    told = [child.communicate(timeout=240) for child in children]
    return [(child.returncode, *text) for child, text in zip(children, told, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_two_ranks_replay_what_they_have_saved(kind: str, tmp_path: Path) -> None:
    assert [code for code, _, _ in run(tmp_path, 2, kind, "save")] == [0, 0]
    windows = {path.name for path in (tmp_path / "run" / WINDOWS_DIR).iterdir()}
    assert windows == {"step-11", "step-19"}
    assert not (tmp_path / "run" / "step-11").exists()
    for path in (tmp_path / "run").glob("step-21/**/*"):  # the whole copy at the end of the loop: windows are asked for
        path.unlink() if path.is_file() else None
    for name in tmp_path.glob("21-*.pt"):
        name.unlink()
    if kind == "fsdp":
        [(code, _, error)] = run(tmp_path, 1, kind, "restore")
        assert code != 0 and "has the shards of 2 ranks" in error
        assert not (tmp_path / "run" / "step-11").exists()
    restored = run(tmp_path, 2, kind, "restore")
    assert [(code, text.split("\n")[:2]) for code, text, _ in restored] == [(0, ["restored 11", "restored 19"])] * 2
    assert (tmp_path / "run" / "step-11" / ".metadata").exists()
