"""A small training job that is killed and comes back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tierckpt
from tests.fault.scenario_tools import before, replace
from tierckpt.save import flush


def train(
    folder: Path,
    uri: str,
    samples: int = 0,
    epochs: int = 1,
    batch_size: int = 8,
    steps: int = 10**9,
    step_seconds: float = 0.005,
    interval: Any = 3,
    bug: str = "",
    start: int = 0,
    elements: int = 1000,
    line_seconds: float = 1.0,
    metadata: str = "",
    hold_at: int = 0,
    hold_after: int = 0,
    **options: Any,
) -> None:
    """Train until the data or ``steps`` end. Each rank writes the samples of a step to a file before it calls ``step``.

    ``hold_at``: after this step, wait to be killed. ``hold_after``: after this many steps of this process.
    """
    from tierckpt.training import final_save, preemption, run_log

    final_save.PATIENCE_SECONDS = options.get("grace_seconds", final_save.PATIENCE_SECONDS)  # the loop does not stall
    run_log.LINE_SECONDS = line_seconds
    if metadata:
        preemption.ADDRESSES["gcp"], preemption.POLL_SECONDS = metadata, 0.05
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    model = torch.nn.Linear(elements, 1)
    state: dict[str, Any] = {"model": model, "step": 0, "position": 0}
    end = samples * epochs or 10**12
    log = os.open(folder / f"seen-{start:03d}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with tierckpt.Checkpointer(uri, interval=interval, timeout_seconds=60, **options) as checkpointer:
        checkpointer.restore(state)
        if bug == "forget the place":
            state["position"] = 0
        step = state["step"]
        hold_at = step + hold_after if hold_after else hold_at
        while state["position"] < end:
            step += 1
            first = state["position"] + rank * batch_size
            batch = [place % (samples or end) for place in range(first, min(first + batch_size, end))]
            state["position"] += ranks * batch_size
            time.sleep(step_seconds)
            if dist.is_initialized():
                dist.all_reduce(torch.ones(1))
            os.write(log, f"{step} {','.join(map(str, batch)) if samples else ''}\n".encode())
            state["step"] = step
            checkpointer.step(step, state)
            while step == hold_at:
                time.sleep(1)
            if step >= steps or checkpointer.preempted:
                break


def train_on_a_slow_disk(folder: Path, uri: str, slow_seconds: float, **options: Any) -> None:
    """Two saves that take ``slow_seconds`` to be durable, each judged as 20, then steps without any until the end."""
    from tierckpt.training import checkpointer as checkpointers
    from tierckpt.training import final_save

    replace(checkpointers, "seconds_to_local", lambda measured: lambda *given: 20 * measured(*given))
    final_save.PATIENCE_SECONDS = options["grace_seconds"]
    before(flush.ShardFile, "finish", lambda *_: time.sleep(slow_seconds))
    state = {"w": torch.zeros(1000)}
    log = os.open(folder / "seen-000-0", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with tierckpt.Checkpointer(uri, interval=None, timeout_seconds=60, **options) as checkpointer:
        checkpointer.save(2, state).result(60)
        for step in range(3, 10**6):
            time.sleep(0.02)
            os.write(log, f"{step} \n".encode())
            checkpointer.step(step, state)
