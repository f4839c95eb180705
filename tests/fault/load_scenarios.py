"""One of many savers on one node."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from tests.fault.kills import until
from tests.states import same
from tierckpt import Checkpointer  # here, so that all savers share the memory of what this imports

TENSORS = 4
ELEMENTS = 1 << 21
"""8 MiB each, 32 MiB together."""


def save_often(folder: Path, uri: str, saver: int, savers: int, saves: int) -> tuple[Any, ...]:
    """Wait for the others and save. Returns the seconds to the SSD and to shared storage, and what is restored."""
    state = {str(index): torch.arange(ELEMENTS, dtype=torch.int32) + saver for index in range(TENSORS)}
    with Checkpointer(f"{uri}/{saver}", timeout_seconds=300) as checkpointer:
        checkpointer.save(0, state)  # memory, connections
        checkpointer.wait("local")
        (folder.parent / f"ready-{saver}").touch()
        until(lambda: len(list(folder.parent.glob("ready-*"))) == savers)
        begun = time.monotonic()
        for step in range(1, saves + 1):
            checkpointer.save(step, state)
            checkpointer.wait("local")
        local_seconds = time.monotonic() - begun
        checkpointer.wait()
        shared_seconds = time.monotonic() - begun
        wanted = {name: torch.empty_like(value) for name, value in state.items()}
        step_found = checkpointer.restore(wanted)
    return local_seconds, shared_seconds, step_found, same(wanted, state)
