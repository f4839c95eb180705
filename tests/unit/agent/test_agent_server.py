"""An agent and the signals that end it (tierckpt/agent/agent_server.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import ENVIRONMENT, REPOSITORY
from tierckpt.checkpoint.journal import Journal
from tierckpt.poll import LOCAL, Poll

GRACE_SECONDS = 170


SAVE = """
import os, torch, torch.distributed.checkpoint as dcp, tierckpt
dcp.save({"weight": torch.ones(4)}, storage_writer=tierckpt.TierStorageWriter("s3://bucket/run/step-1"))
os._exit(0)
"""


@pytest.fixture
def agent(local_root: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """An agent that has a checkpoint to drain and no store, and its log."""
    store = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    environment = {**ENVIRONMENT, **store, "TIERCKPT_LOCAL_ROOT": str(local_root), "TIERCKPT_MOVER": "inline"}
    environment["TIERCKPT_GRACE_SECONDS"] = str(GRACE_SECONDS)
    subprocess.run([sys.executable, "-c", SAVE], cwd=REPOSITORY, env=environment, check=True)
    log_file = tmp_path / "log"
    with log_file.open("wb") as log:
        command = [sys.executable, "-m", "tierckpt", "agent"]
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, preexec_fn=hear_hang_ups
        )
    try:
        says(log_file, "is ready")
        yield process, log_file
    finally:
        process.kill()
        process.wait()


def hear_hang_ups() -> None:
    """Undo a ``nohup`` that the tests themselves run under: an agent honours it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def says(log_file: Path, text: str) -> None:
    assert any(text in log_file.read_text() for _ in Poll(60, LOCAL)), log_file.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_signal_drains_and_the_second_ends_it_at_once(
    number: signal.Signals, agent: tuple[subprocess.Popen[bytes], Path], local_root: Path
) -> None:
    process, log_file = agent
    process.send_signal(number)
    says(log_file, f"{number.name}: the agent drains for at most {GRACE_SECONDS} s")
    process.send_signal(number)
    assert process.wait(60) == -number
    assert len(Journal(local_root).entries()) == 1


def test_nohup_keeps_it_from_ending_with_its_terminal(local_root: Path, tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    environment = {**ENVIRONMENT, "TIERCKPT_LOCAL_ROOT": str(local_root)}
    with log_file.open("wb") as log:
        command = ["nohup", sys.executable, "-m", "tierckpt", "agent"]
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
    says(log_file, "is ready")
    os.kill(process.pid, signal.SIGHUP)
    process.terminate()
    says(log_file, "SIGTERM")
    assert process.wait(60) == 0
    assert "SIGHUP" not in log_file.read_text()
