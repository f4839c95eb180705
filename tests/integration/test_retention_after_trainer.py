"""Retention after the trainer's end: the mover that completes a drain applies the run's rule."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_prune import on_local, on_shared
from tierckpt.checkpoint.journal import Journal
from tierckpt.checkpoint.prune import Pruner, has_due
from tierckpt.cli.ui.app import run
from tierckpt.client import close_all
from tierckpt.drain.rate_limiter import change_control
from tierckpt.format.layout import HISTORY_DIR
from tierckpt.poll import Poll

pytestmark = pytest.mark.server
SECONDS = 120.0
TRAINER = textwrap.dedent("""\
    import json, os, sys
    import torch
    import torch.distributed as dist
    import tierckpt

    uri, steps, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    checkpointer = tierckpt.Checkpointer(uri, interval=1, **options)
    for step in steps:
        checkpointer.save(step, {"model": model}).result()
    os._exit(0)  # no wait, no close: the drains are left to the agent
""")


@pytest.fixture
def run_uri(s3_uri: str) -> str:
    return s3_uri


@pytest.fixture
def paused(local_root: Path) -> None:
    """No drain before the trainer has exited."""
    change_control(local_root, paused=True)


def train(uri: str, steps: list[int], ranks: int = 1, *, mover: str = "agent", **options: Any) -> None:
    command = [sys.executable, "-c", TRAINER, uri, json.dumps(steps), json.dumps({"mover": mover, **options})]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]
        command = [sys.executable, *torchrun, *command]
    subprocess.run(command, check=True, timeout=SECONDS)


def let_drain(local_root: Path) -> None:
    """Return when the journal is empty and no run needs pruning."""
    change_control(local_root, paused=False)
    for _ in Poll(SECONDS):
        if not Journal(local_root).entries() and not has_due(local_root):
            return
    raise AssertionError(f"not drained and pruned: {Journal(local_root).entries()}, due: {has_due(local_root)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "local", "shared"),
    [
        ({"keep_last": 3}, [7, 8, 9], [7, 8, 9]),
        ({"keep_last": {"local": 1, "shared": 4}}, [9], [6, 7, 8, 9]),
        ({"keep_last": {"shared": 2}, "keep_every": {"shared": 4}}, [*range(1, 10)], [4, 8, 9]),
        ({}, [*range(1, 10)], [*range(1, 10)]),
    ],
)
@pytest.mark.usefixtures("paused")
def test_agent_applies_the_retention_rule(
    options: dict[str, Any], local: list[int], shared: list[int], run_uri: str, local_root: Path
) -> None:
    train(run_uri, [*range(1, 10)], **options)
    assert on_local(run_uri) == [*range(1, 10)]
    let_drain(local_root)
    assert (on_local(run_uri), on_shared(run_uri)) == (local, shared)


@pytest.mark.slow
@pytest.mark.usefixtures("paused")
def test_checkpoint_is_pruned_after_its_last_rank_has_drained(run_uri: str, local_root: Path) -> None:
    train(run_uri, [1, 2, 3, 4, 5], ranks=2, keep_last=2)
    let_drain(local_root)
    assert on_local(run_uri) == on_shared(run_uri) == [4, 5]


@pytest.mark.slow
@pytest.mark.usefixtures("paused")
def test_pruning_survives_agent_kills(run_uri: str, local_root: Path) -> None:
    """It is killed repeatedly while draining and pruning; a new one continues each time."""
    train(run_uri, [*range(1, 13)], keep_last=2)
    change_control(local_root, paused=False)
    for kill in range(6):
        for _ in Poll(SECONDS):
            if has_due(local_root) or not Journal(local_root).entries():
                break
        if pid := _agent_of(local_root):
            os.kill(pid, signal.SIGKILL)
        agent = [sys.executable, "-m", "tierckpt", "agent"]
        process = subprocess.Popen(agent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if kill == 5:
            break
        process.poll()
    let_drain(local_root)
    process.terminate()
    process.wait(SECONDS)
    assert on_local(run_uri) == on_shared(run_uri) == [11, 12]


def _agent_of(local_root: Path) -> int | None:
    text = (local_root / "agent" / "agent.lock").read_text().strip()
    return int(text) if text else None


@pytest.mark.slow
@pytest.mark.usefixtures("paused")
def test_drain_command_prunes(run_uri: str, local_root: Path) -> None:
    train(run_uri, [1, 2, 3, 4], keep_last=1, mover="inline")
    change_control(local_root, paused=False)
    assert run(["drain", "--wait"]) == 0
    close_all()
    assert on_local(run_uri) == on_shared(run_uri) == [4] and not has_due(local_root)


@pytest.mark.slow
@pytest.mark.usefixtures("paused")
def test_rule_of_the_latest_job_start_applies(run_uri: str, local_root: Path) -> None:
    train(run_uri, [1, 2, 3], keep_last=1, mover="inline")
    train(run_uri, [4, 5], mover="inline")  # keeps everything
    change_control(local_root, paused=False)
    assert run(["drain", "--wait"]) == 0
    close_all()
    assert on_local(run_uri) == on_shared(run_uri) == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.usefixtures("paused")
def test_job_that_shares_its_run_records_no_rule(file_uri: str, local_root: Path) -> None:
    uri, other = f"{file_uri}/run", {"what": "start", "host": "elsewhere", "pid": 1, "process": "1-1"}
    records = Path(uri, HISTORY_DIR)
    records.mkdir(parents=True)
    line = json.dumps({**other, "at": time.time() + SECONDS, "step": 3})
    (records / "elsewhere.jsonl").write_text(f"{line}\n")
    train(uri, [1, 2, 3, 4, 5], keep_last=1)
    let_drain(local_root)
    assert on_local(uri) == on_shared(uri) == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.usefixtures("paused")
def test_control_mover_without_pruning_is_detected(
    run_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded bug of this file."""

    async def nothing(self: Pruner) -> bool:
        return False

    monkeypatch.setattr(Pruner, "prune_due", nothing)
    train(run_uri, [1, 2, 3, 4], keep_last=1, mover="inline")
    change_control(local_root, paused=False)
    assert run(["drain", "--wait"]) == 0
    close_all()
    assert on_shared(run_uri) == [1, 2, 3, 4] and has_due(local_root)
