"""Run a scenario on several gloo ranks, each a real process, within a deadline.

A scenario is a function, named ``module:function``, called on every rank as ``function(**arguments)`` with a process
group in place. ``launch`` returns rank 0's result (JSON). If a rank fails or the deadline passes, every rank is killed
and the test fails with their output: no process is left.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.fault import runner
from tests.services import REPOSITORY

COLLECTIVE_TIMEOUT_SECONDS = 60.0
OUTPUT_CHARS_MAX = 6000
PRELOAD = (
    "torch._dynamo",  # imported by the first DTensor of a process, in two seconds
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


def launch(
    scenario: str,
    world_size: int,
    *,
    timeout_seconds: float = 120.0,
    env: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Any:
    """Run ``module:function`` on ``world_size`` ranks; return what rank 0 returned. Fails, never hangs."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        job = runner.start(run, Path(scratch), world_size, env=env, function=scenario, arguments=arguments)
        return job.result(timeout_seconds)


def run(folder: Path, function: str, arguments: dict[str, Any]) -> Any:
    """One rank of ``launch``."""
    import torch.distributed as dist

    module, _, name = function.partition(":")
    scenario = getattr(importlib.import_module(module), name)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS))
    outcome = scenario(**arguments)
    dist.barrier()
    return outcome


def start(command: list[str], output: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one process as the head of its own group, so that its children can be killed with it."""
    with output.open("ab") as stream:
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_seconds: float) -> None:
    """Wait until all ended successfully. The first failure, or the deadline, kills the others; raises their output."""
    deadline = time.monotonic() + timeout_seconds
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            if time.monotonic() > deadline:
                dump_stacks(processes)
                raise AssertionError(f"still running after {timeout_seconds:g} s\n{_output(folder)}")
            time.sleep(0.05)
    finally:
        kill(processes)
    codes = [process.returncode for process in processes]
    if any(codes):
        raise AssertionError(f"exit codes by rank: {codes}\n{_output(folder)}")


def dump_stacks(processes: list[subprocess.Popen[bytes]]) -> None:
    """End each with SIGABRT, on which Python prints the stack of every thread."""
    for process in processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGABRT)
    time.sleep(2)


def kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """SIGKILL each process and its group, and reap it. Those that ended already are only reaped."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the whole group exited
        process.wait(60)


def _output(folder: Path) -> str:
    logs = sorted(folder.glob("*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-OUTPUT_CHARS_MAX:]}" for log in logs)
