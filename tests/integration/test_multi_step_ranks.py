"""Two ranks copy their shards over several steps: each logs its own reduced gradient, without a collective."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import ENVIRONMENT, REPOSITORY


@pytest.mark.parametrize("kind", ["fsdp", "ddp", "bucket views"])
def test_two_ranks_bring_their_shards_to_one_version(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.multi_step_ranks"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), kind],
            cwd=REPOSITORY,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=240)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], told
    for rank, text in enumerate(told):
        assert f"rank {rank}: " in text
        allowed = (0, 1) if kind == "bucket views" else (0,)
        assert any(f"{count} windows copied whole" in text for count in allowed), text
