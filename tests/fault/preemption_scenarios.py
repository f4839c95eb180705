"""A trainer that is told to go while 1 GiB is on its way."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import torch

import tierckpt
from tests.states import same

TENSORS = 16
ELEMENTS = 1 << 23
"""32 MiB each, 512 MiB together."""
FOR_EVER_SECONDS = 1000.0


def state_of(step: int) -> dict[str, Any]:
    return {f"{index}": torch.arange(ELEMENTS, dtype=torch.int32) * step + index for index in range(TENSORS)}


def train_until_told(folder: Path, uri: str, stuck: bool = False, **settings: Any) -> None:
    """Save steps 1 and 2; the first is on shared storage, and the second still on its way to the SSD, when the file
    ``staged`` appears.

    ``stuck``: then the main thread is in C and stays there, as in a collective whose other rank is gone.
    """
    state = state_of(1)
    checkpointer = tierckpt.Checkpointer(uri, timeout_seconds=60, **settings)
    checkpointer.save(1, {"small": torch.ones(8)})
    checkpointer.wait()
    checkpointer.save(2, state)
    (folder / "staged").touch()
    if stuck:
        _wait_in_c()
    time.sleep(FOR_EVER_SECONDS)


def _wait_in_c() -> None:
    condition, mutex = ctypes.create_string_buffer(128), ctypes.create_string_buffer(128)  # zeros: initialised
    c = ctypes.CDLL(None)
    c.pthread_mutex_lock(mutex)
    c.pthread_cond_wait(condition, mutex)  # no signal ends it


def come_back(folder: Path, uri: str, drain: bool = False, **settings: Any) -> tuple[int | None, bool]:
    """Restore the newest step. Returns which it is, and whether every byte is there. ``drain``: drain step 2 first."""
    with tierckpt.Checkpointer(uri, timeout_seconds=60, **settings) as checkpointer:
        if drain:
            tierckpt.wait(f"{uri}/step-2", timeout_seconds=60, **settings)
        location = tierckpt.latest(uri, **settings)
        step = int(location.rpartition("-")[2]) if location else None
        if step != 2:
            return step, False
        state = {name: torch.zeros_like(value) for name, value in state_of(1).items()}
        checkpointer.restore(state, step)
        return step, same(state, state_of(1))
