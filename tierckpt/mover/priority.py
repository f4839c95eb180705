"""Training comes first (P8): a thread of ours asks the kernel to be served last, for the processor and for the disk."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

from ..telemetry import logger

log = logger("flush")

_libc = ctypes.CDLL(None)

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_BEST_EFFORT_LOWEST = (2 << 13) | 7


def lower_this_thread(nice: int) -> None:
    """Lower the CPU and I/O priority of the calling thread, for good: raising it again needs privileges.

    Linux keeps both per thread. Best effort: what the kernel refuses is logged and the thread works on as it is.
    """
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, nice)
    except OSError as error:
        log.debug("the CPU priority of thread %d stays: %s", thread, error)
    number = _IOPRIO_SET.get(platform.machine())
    if number is None or _libc.syscall(number, _IOPRIO_WHO_PROCESS, thread, _BEST_EFFORT_LOWEST) != 0:
        log.debug("the I/O priority of thread %d stays", thread)
