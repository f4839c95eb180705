"""One of many savers on one node."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from tierckpt import Checkpointer  # here, so that all savers share the memory of what this imports

TENSORS = 4
ELEMENTS = 1 << 21
"""8 MiB each, 32 MiB together."""


def save_often(folder: Path, uri: str, saver: int, savers: int, saves: int) -> None:
    """Wait for the others, save, and leave for each save how long it took to the SSD and to shared storage."""
    state = {str(index): torch.arange(ELEMENTS, dtype=torch.int32) + saver for index in range(TENSORS)}
    with Checkpointer(f"{uri}/{saver}", timeout_seconds=300) as checkpointer:
        checkpointer.save(0, state)  # memory, connections
        checkpointer.wait("local")
        (folder / f"ready-{saver}").touch()
        while len(list(folder.glob("ready-*"))) < savers:
            time.sleep(0.01)
        begun = time.monotonic()
        for step in range(1, saves + 1):
            checkpointer.save(step, state)
            checkpointer.wait("local")
        local_seconds = time.monotonic() - begun
        checkpointer.wait()
        shared_seconds = time.monotonic() - begun
        wanted = {name: torch.empty_like(value) for name, value in state.items()}
        step_found = checkpointer.restore(wanted)
        whole = all(torch.equal(wanted[name], value) for name, value in state.items())
    (folder / f"took-{saver}").write_text(json.dumps([local_seconds, shared_seconds, step_found, whole]))
