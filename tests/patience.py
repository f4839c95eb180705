"""Patience with healthy components: a busy machine stops a thread or an fsync for seconds.

Training goes on without a disk, a thread or an agent that makes no progress for less than half a second. A test of
something else must not see that: it keeps these limits only with the marker ``ill``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "TIERCKPT_TEST_PATIENCE"
"""Set for the processes that a patient test starts."""
SECONDS = 30.0
LIMITS = {
    "poll": ("HANG_SECONDS",),
    "disk.illness": ("ILL_SECONDS",),
    "checkpoint.namespace": ("ILL_SECONDS",),
    "ipc.agent_client": ("PATIENCE_SECONDS", "STARVED_SECONDS"),
    "replay.log_writer": ("ILL_SECONDS",),
    "training.run_log": ("ILL_SECONDS", "WRITE_WAIT_SECONDS"),
}


def extend(replace: Callable[[Any, str, float], None] = setattr) -> None:
    for module, names in LIMITS.items():
        for name in names:
            replace(importlib.import_module(f"tierckpt.{module}"), name, SECONDS)


def extend_if_told() -> None:
    if os.environ.get(VARIABLE):
        extend()
