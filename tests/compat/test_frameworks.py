"""Training that saves through us, is killed, loses its node, and resumes bit for bit from S3.

Accelerate (DDP), Lightning Fabric (FSDP2), and torchtitan's CheckpointManager (FSDP2) where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.compat.worker import finish, kill, start
from tests.services import free_port

STEPS = 24
KILL_AT_STEP, HOLD_AT_STEP = 14, 20
RANKS = 2
TIMEOUT_SECONDS = 120.0
DRIVERS = {"accelerate": "tests.compat.drivers", "fabric": "tests.compat.drivers", "torchtitan": "tests.compat.titan"}

pytestmark = [pytest.mark.frameworks, pytest.mark.distributed, pytest.mark.server, pytest.mark.timeout(400)]


def framework(name: str, module: str) -> Any:
    absent = importlib.util.find_spec(module) is None
    return pytest.param(name, marks=pytest.mark.skipif(absent, reason=f"{module} is not installed"))


def begin(name: str, uri: str, folder: Path, log: Path, hold_at: int = 0) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of one run, as torchrun would."""
    folder.mkdir(exist_ok=True)
    shared = {
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "compat",
        "GROUP_RANK": "0",
        "TIERCKPT_LOCAL_ROOT": str(folder / "local"),
        "TIERCKPT_TEST_HOLD_AT": str(hold_at),
    }
    return [
        start(
            [sys.executable, "-m", DRIVERS[name], name, uri, str(STEPS), str(log)],
            folder / f"rank-{rank}.log",
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]


def notes(log: Path) -> list[dict[str, Any]]:
    """Return the log lines of the run; the last one may be incomplete."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(log: Path) -> dict[int, str]:
    return {note["step"]: note["loss"] for note in notes(log) if "step" in note}


def wait_until_worth_killing(uri: str, log: Path, tmp_path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    """Until it is past ``KILL_AT_STEP`` and the shared tier holds a checkpoint (another node looks)."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    is_there = False
    while not (is_there and max(losses(log), default=0) >= KILL_AT_STEP):
        # Checked from the first step on: a check may take longer than some steps.
        is_there = is_there or tierckpt.latest(uri, local_root=tmp_path / "looker") is not None
        assert all(rank.poll() is None for rank in ranks), "the run ended before it was killed"
        if time.monotonic() > deadline:
            finish(ranks, tmp_path / "b", 0.0)  # raises, with the stacks of the ranks
        time.sleep(0.05)


@pytest.mark.parametrize(
    "name",
    [framework("accelerate", "accelerate"), framework("fabric", "lightning"), framework("torchtitan", "torchtitan")],
)
def test_a_killed_run_resumes_bit_for_bit(name: str, s3_uri: str, tmp_path: Path) -> None:
    undisturbed, killed, resumed = (tmp_path / f"{run}.jsonl" for run in ("undisturbed", "killed", "resumed"))
    finish(begin(name, f"{s3_uri}/a", tmp_path / "a", undisturbed), tmp_path / "a", TIMEOUT_SECONDS)

    ranks = begin(name, f"{s3_uri}/b", tmp_path / "b", killed, HOLD_AT_STEP)
    try:
        wait_until_worth_killing(f"{s3_uri}/b", killed, tmp_path, ranks)
    finally:
        kill(ranks)
    assert max(losses(killed)) < STEPS
    shutil.rmtree(tmp_path / "b" / "local")  # the node is lost with its SSD

    finish(begin(name, f"{s3_uri}/b", tmp_path / "b", resumed), tmp_path / "b", TIMEOUT_SECONDS)
    first = notes(resumed)[0]["resumed_from"]
    assert 0 < first <= max(losses(killed))
    expected = losses(undisturbed)
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert losses(killed) == {step: expected[step] for step in losses(killed)}
    assert losses(resumed) == {step: expected[step] for step in range(first + 1, STEPS + 1)}
    assert notes(resumed)[-1] == notes(undisturbed)[-1]
    assert "digest" in notes(resumed)[-1]
