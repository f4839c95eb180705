"""Low priority, and a small share of a busy node, for background threads: training comes first (P8).

A low priority does not limit what two hardware threads of one core take from each other, nor the interpreter lock.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from pathlib import Path

from ..telemetry import logger

STAT = Path("/proc/stat")
BACKGROUND_CPU_SHARE = 0.04
"""Share of one processor for a background flush on a busy node (docs/adr/0007-flush.md)."""
BUSY_SHARE = 0.4
OWN_WINDOW_SECONDS = 0.01
NODE_WINDOW_SECONDS = 0.1
REST_SECONDS_MAX = 0.5


class CpuThrottle:
    """Sleeps after work, so that the work takes ``share`` of the time while processors are busy.

    Each of the ``threads`` of a flush gets its part of the share.
    """

    def __init__(self, share: float = 1.0, threads: int = 1) -> None:
        self.share = share if share >= 1.0 else share / threads
        self.has_throttled = False
        """A throttled flush does not measure the device."""
        if self.share >= 1.0:
            return
        self._processors = len(os.sched_getaffinity(0))
        self.used_seconds = 0.0
        self._own = (time.monotonic(), time.process_time(), 0.0)
        self._node = (time.monotonic(), *_ticks())
        self._own_busy = self._node_busy = False
        self._lock = threading.Lock()

    def throttle_after(self, used_seconds: float) -> None:
        """Sleep in proportion to the processor time just used, at most half a second."""
        if self.share < 1.0 and self._busy(used_seconds):
            self.has_throttled = True
            time.sleep(min(used_seconds / self.share - used_seconds, REST_SECONDS_MAX))

    def _busy(self, used_seconds: float) -> bool:
        with self._lock:
            self.used_seconds += used_seconds
            now = time.monotonic()
            if now - self._own[0] >= OWN_WINDOW_SECONDS:
                then, process, used = self._own
                self._own = (now, time.process_time(), self.used_seconds)
                other_ticks = self._own[1] - process - (self.used_seconds - used)
                self._own_busy = other_ticks / (now - then) / self._processors >= BUSY_SHARE
            if now - self._node[0] >= NODE_WINDOW_SECONDS:
                _, work, total = self._node
                self._node = (now, *_ticks())
                self._node_busy = self._node[1] - work >= BUSY_SHARE * max(1, self._node[2] - total)
            return self._own_busy or self._node_busy


def _ticks() -> tuple[int, int]:
    """Return ticks at normal priority, and in total (proc(5))."""
    try:
        user, _, system, _, _, irq, softirq, *_ = fields = [
            int(f) for f in STAT.read_text().split("\n", 1)[0].split()[1:9]
        ]
    except (OSError, ValueError):
        return 0, 0
    return user + system + irq + softirq, sum(fields)


log = logger("flush")

BACKGROUND_NICE = 10

_libc = ctypes.CDLL(None)

IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
BEST_EFFORT_LOWEST = (2 << 13) | 7


def lower_this_thread(nice: int) -> None:
    """Lower the CPU and I/O priority of the calling thread, and of threads that it starts, for good. Best effort."""
    _lower(threading.get_native_id(), nice)


def _lower(thread: int, nice: int) -> None:
    try:
        if os.getpriority(os.PRIO_PROCESS, thread) < nice:
            os.setpriority(os.PRIO_PROCESS, thread, nice)
    except OSError as error:
        log.debug("the CPU priority of thread %d stays: %s", thread, error)
    number = IOPRIO_SET.get(platform.machine())
    if number is None or _libc.syscall(number, _IOPRIO_WHO_PROCESS, thread, BEST_EFFORT_LOWEST) != 0:
        log.debug("the I/O priority of thread %d stays", thread)
