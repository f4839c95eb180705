"""Low priority, and a small share of a busy node, for background threads: training comes first (P8).

A low priority does not limit what two hardware threads of one core take from each other, nor the interpreter lock.

The flush lock: drains yield the disk to a process of this node that flushes a checkpoint. Movers only test the shared
lock of the flush, so neither waits for the other.

    G3  Drains pause for at most ``STEP_BACK_SECONDS_MAX`` at a time, then run for at least as long.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import TierckptError
from ..format.layout import flush_mark
from ..telemetry import BYTES, FLUSH_SECONDS, STEPPED_BACK_SECONDS, logger
from ..types import Tier
from .file_lock import close_lock, lock_record, open_lock, record_holder
from .quarantine import open_regular

log = logger("flush")


STEP_BACK_SECONDS_MAX = 2.0


@contextmanager
def flushing(local_root: Path, size_bytes: int = 0) -> Iterator[None]:
    """Mark that this process writes a checkpoint to the local tier (G3). Cost: 5 microseconds.

    Best effort; never blocks or fails a save.
    """
    file, pid = _mark(local_root), os.getpid()
    started_at = time.monotonic()
    try:
        yield
        FLUSH_SECONDS.emit(time.monotonic() - started_at)
        BYTES.emit(size_bytes, tier=Tier.LOCAL, direction="written")
    finally:
        if file >= 0 and pid == os.getpid():
            with suppress(OSError):
                # Also unlock: a child forked by C code may have a copy of the descriptor.
                lock_record(file, fcntl.F_UNLCK)
            close_lock(file)


def _mark(local_root: Path) -> int:
    file = -1
    try:
        file = open_lock(flush_mark(local_root))
        lock_record(file, fcntl.F_RDLCK)
        return file
    except (OSError, TierckptError) as error:
        log.debug("this flush is invisible to drains: %s", error)
        if file >= 0:
            close_lock(file)
        return -1


class FlushMark:
    """The mark as seen by movers. Cost of a test: 1 microsecond."""

    def __init__(self, local_root: Path) -> None:
        self._path = flush_mark(local_root)
        self._file = -1

    def is_held(self) -> bool:
        try:
            if self._file < 0:
                self._file = open_regular(self._path, os.O_RDWR | os.O_CREAT)
            return record_holder(self._file) is not None
        except (OSError, TierckptError):
            return False

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class FlushYield:
    def __init__(self, mark: FlushMark) -> None:
        self.mark = mark
        self._since: float | None = None
        self._own_until = 0.0

    def must_wait(self, now: float) -> bool:
        if now < self._own_until:
            return False
        waited = min(now - self._since, STEP_BACK_SECONDS_MAX) if self._since is not None else 0.0
        if waited < STEP_BACK_SECONDS_MAX and self.mark.is_held():
            self._since = now if self._since is None else self._since
            return True
        if self._since is not None:
            self._since = None
            self._own_until = now + waited
            STEPPED_BACK_SECONDS.emit(waited)
        return False


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


BACKGROUND_NICE = 10

_libc = ctypes.CDLL(None)

IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
BEST_EFFORT_LOWEST = (2 << 13) | 7


def lower_this_thread(nice: int) -> None:
    """Lower the CPU and I/O priority of the calling thread, and of threads that it starts, for good. Best effort."""
    thread = threading.get_native_id()
    try:
        if os.getpriority(os.PRIO_PROCESS, thread) < nice:
            os.setpriority(os.PRIO_PROCESS, thread, nice)
    except OSError as error:
        log.debug("the CPU priority of thread %d stays: %s", thread, error)
    number = IOPRIO_SET.get(platform.machine())
    if number is None or _libc.syscall(number, _IOPRIO_WHO_PROCESS, thread, BEST_EFFORT_LOWEST) != 0:
        log.debug("the I/O priority of thread %d stays", thread)
