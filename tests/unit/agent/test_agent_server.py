"""An agent and the signals that end it (tierckpt/agent/agent_server.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import until
from tests.services import ENVIRONMENT, REPOSITORY
from tierckpt.checkpoint.journal import Journal

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
        until(lambda: "is ready" in log_file.read_text(), "is ready")
        yield process, log_file
    finally:
        process.kill()
        process.wait()


def hear_hang_ups() -> None:
    """Undo a ``nohup`` that the tests themselves run under: an agent honours it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_signal_drains_and_the_second_ends_it_at_once(
    number: signal.Signals, agent: tuple[subprocess.Popen[bytes], Path], local_root: Path
) -> None:
    process, log_file = agent
    process.send_signal(number)
    until(lambda: f"{number.name}: the agent drains for" in log_file.read_text(), "the signal in the log")
    process.send_signal(number)
    assert process.wait(60) == -number
    assert len(Journal(local_root).entries()) == 1


def test_nohup_keeps_it_from_ending_with_its_terminal(local_root: Path, tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    environment = {**ENVIRONMENT, "TIERCKPT_LOCAL_ROOT": str(local_root)}
    with log_file.open("wb") as log:
        command = ["nohup", sys.executable, "-m", "tierckpt", "agent"]
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
    until(lambda: "is ready" in log_file.read_text(), "is ready")
    os.kill(process.pid, signal.SIGHUP)
    process.terminate()
    until(lambda: "SIGTERM" in log_file.read_text(), "SIGTERM")
    assert process.wait(60) == 0
    assert "SIGHUP" not in log_file.read_text()
