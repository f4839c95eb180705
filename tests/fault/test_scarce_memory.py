"""A job with almost no address space left: failed allocations raise typed errors, and training continues.

One process prepares everything; its forked children train with less and less memory, thread stacks included.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import REPOSITORY

MARGINS_MIB = (-1, 2, 6, 12, 16, 32)
"""MiB above the process's size at the start of training; -1: no limit. A thread's stack takes 8 MiB."""
CHILD = """
import faulthandler, json, logging, os, pathlib, resource, sys, threading
import torch, tierckpt
import tierckpt.training.every_step.step_log, tierckpt.replay.log, tierckpt.dcp.writer
torch.set_num_threads(1)
folder, margins = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])

def train(margin):
    told = []
    class Keep(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())
    logging.getLogger("tierckpt").addHandler(Keep())
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    jobs = tierckpt.Checkpointer(str(folder / f"run-{margin}"), local_root=folder / f"root-{margin}", mover="inline",
                                 interval=2, exit_timeout_seconds=5, drain=False,
                                 every_step=tierckpt.EveryStep(gradient_log=True))
    jobs.save(1, state).result(60)  # the threads of saves are there
    rows = []
    jobs._step_log.close()
    jobs._step_log.__dict__.pop("link", None)
    used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    if margin >= 0:
        resource.setrlimit(resource.RLIMIT_AS, (used + (margin << 20), resource.RLIM_INFINITY))
    for step in range(2, 8):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            future = jobs.step(step, state)
            future is None or future.result(60)
            rows.append("ok")
        except tierckpt.errors.TierckptError as error:
            rows.append(type(error).__name__)
        except BaseException as error:
            rows.append(f"BARE {error!r}")
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    return rows, [line for line in told if "is logged" in line]

for margin in margins:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            answer = train(margin)
        except BaseException as error:
            answer = [f"BARE {error!r}"], []
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        print(json.dumps([margin, json.loads(answer.read() or '[["BARE it died"], []]')]), flush=True)
    os.waitpid(pid, 0)
"""


def trained(folder: Path, margins: tuple[int, ...]) -> dict[int, tuple[list[str], list[str]]]:
    command = [sys.executable, "-c", CHILD, str(folder), json.dumps(margins)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return {margin: (rows, messages) for margin, (rows, messages) in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_training_continues_without_memory_and_errors_are_typed(tmp_path: Path) -> None:
    found = trained(tmp_path, MARGINS_MIB)
    assert found[-1] == (["ok"] * 6, []), found
    assert not [rows for rows, _ in found.values() if any(row.startswith("BARE") for row in rows)], found
    without_log = [margin for margin, (rows, messages) in found.items() if messages and set(rows) == {"ok"}]
    assert without_log, found
