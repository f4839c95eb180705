"""The flush lock: drains yield the disk to a process of this node that flushes a checkpoint (P8).

Movers only test the shared lock of the flush, so neither waits for the other.

    G3  Drains pause for at most ``STEP_BACK_SECONDS_MAX`` at a time, then run for at least as long.
"""

from __future__ import annotations

import fcntl
import os
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
