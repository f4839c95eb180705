"""Two trainers of a long run under faults: one that is never killed, one that often is."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import tierckpt
from tests.fault.scenario_tools import counted_state
from tests.states import same
from tierckpt.errors import TierckptError

KEEP = 3
RESTORE_EVERY = 5


def state_of(step: int) -> dict[str, Any]:
    """16 MiB."""
    return counted_state(8, 1 << 19, step % 97)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _threads_by_name() -> dict[str, int]:
    """Shows where threads come from when their number grows."""
    names: Counter[str] = Counter()
    for comm in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread ended
            names[comm.read_text().strip()] += 1
    return names


def train(folder: Path, uri: str, name: str, seconds: float, **settings: Any) -> None:
    """Resume from the newest step, then save one after the other, restoring now and then. Writes a line for each step.

    An error of a drain is recorded. A restore must give the bytes of the step that it names.
    """
    line = os.open(folder / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    deadline = time.monotonic() + seconds
    pause = random.Random(os.getpid())
    with tierckpt.Checkpointer(f"{uri}/{name}", keep_last=KEEP, timeout_seconds=60, **settings) as checkpointer:
        state = state_of(0)
        restored = checkpointer.restore(state)
        facts: dict[str, Any] = {"restored": restored, "good": restored is None or same(state, state_of(restored))}
        os.write(line, (json.dumps(facts) + "\n").encode())
        step = restored or 0
        while time.monotonic() < deadline:
            step += 1
            told = ""
            try:
                checkpointer.save(step, state_of(step))
            except TierckptError as error:  # of an earlier step's drain, and this one is not saved
                told = type(error).__name__
            try:
                checkpointer.wait("local")
            except TierckptError as error:
                told = type(error).__name__
            good = True
            if step % RESTORE_EVERY == 0:
                found = checkpointer.restore(state, None)
                good = found is not None and same(state, state_of(found))
            facts = {
                "step": step,
                "told": told,
                "good": good,
                "resident_bytes": _resident_bytes(),
                "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
                "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
                "threads_by_name": _threads_by_name(),
            }
            os.write(line, (json.dumps(facts) + "\n").encode())
            time.sleep(pause.uniform(0.05, 0.3))
