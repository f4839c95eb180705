"""A job with almost no address space left: failed allocations raise typed errors, and training continues.

Each process trains with less memory than the one after it, thread stacks included.
"""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.fault.runner import start

MARGINS_MIB = (-1, 2, 6, 12, 16, 32)
"""MiB above the process's size at the start of training; -1: no limit. A thread's stack takes 8 MiB."""
PRELOAD = "tierckpt.training.every_step.step_log", "tierckpt.replay.log", "tierckpt.dcp.writer"
EXITS_AT_ONCE = True


def train(folder: Path, margin_mib: int) -> tuple[list[str], list[str]]:
    """Return the outcome of each step, and the messages on the end of the log."""
    torch.set_num_threads(1)
    told: list[str] = []
    keep = logging.Handler()
    keep.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tierckpt").addHandler(keep)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    options: dict[str, Any] = {"local_root": folder / "root", "mover": "inline", "exit_timeout_seconds": 5}
    every_step = tierckpt.EveryStep(gradient_log=True)
    jobs = tierckpt.Checkpointer(folder / "run", interval=2, drain=False, every_step=every_step, **options)
    jobs.save(1, state).result(60)  # the threads of saves are there
    jobs._step_log.close()  # type: ignore[union-attr]  # private: its threads begin once more
    vars(jobs._step_log).pop("link", None)  # private: the same
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    if margin_mib >= 0:
        resource.setrlimit(resource.RLIMIT_AS, (used + (margin_mib << 20), resource.RLIM_INFINITY))
    rows = []
    for step in range(2, 8):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            saved = jobs.step(step, state)
            if saved is not None:
                saved.result(60)
            rows.append("ok")
        except tierckpt.errors.TierckptError as error:
            rows.append(type(error).__name__)
        except BaseException as error:
            rows.append(f"BARE {error!r}")
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    return rows, [line for line in told if "is logged" in line]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_training_continues_without_memory_and_errors_are_typed(tmp_path: Path) -> None:
    found = {margin: start(train, tmp_path / f"{margin}", margin_mib=margin).result(60) for margin in MARGINS_MIB}
    assert found[-1] == [["ok"] * 6, []], found
    assert not [rows for rows, _ in found.values() if any(row.startswith("BARE") for row in rows)], found
    assert [margin for margin, (rows, messages) in found.items() if messages and set(rows) == {"ok"}], found
