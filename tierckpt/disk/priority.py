"""Low CPU and I/O priority for background threads: training comes first (P8)."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

from ..telemetry import logger

log = logger("flush")

BACKGROUND_NICE = 10
"""How far background work steps back from training (P8)."""

_libc = ctypes.CDLL(None)

IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
BEST_EFFORT_LOWEST = (2 << 13) | 7


def lower_this_thread(nice: int) -> None:
    """Lower the CPU and I/O priority of the calling thread, for good: raising it again needs privileges.

    Linux keeps both per thread, and a new thread inherits them. Best effort:
    a refusal of the kernel is logged and the thread continues unchanged.
    """
    _lower(threading.get_native_id(), nice)


def _lower(thread: int, nice: int) -> None:
    try:
        if os.getpriority(os.PRIO_PROCESS, thread) < nice:  # the site may have set it lower already
            os.setpriority(os.PRIO_PROCESS, thread, nice)
    except OSError as error:
        log.debug("the CPU priority of thread %d stays: %s", thread, error)
    number = IOPRIO_SET.get(platform.machine())
    if number is None or _libc.syscall(number, _IOPRIO_WHO_PROCESS, thread, BEST_EFFORT_LOWEST) != 0:
        log.debug("the I/O priority of thread %d stays", thread)
