"""Saves of this process that have not ended yet, for ``tierckpt.wait`` and for the exit of the process.

``dcp.async_save`` returns before the first file is written; until then the disk shows the earlier checkpoint.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from concurrent.futures import Future, thread
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, OperationTimeoutError
from ..poll import BRIEF, Poll

ORPHAN_SECONDS = 10.0
"""A save takes a staged state within moments; an older one belongs to another library's writer."""
FAILURES_MAX = 64


class Begun:
    def __init__(self, local_root: Path, ready: Future[Any] | None = None) -> None:
        self.local_root = local_root
        self.uri: str | None = None
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._began_in: threading.Thread | None = None
        self._writer: weakref.ref[object] | None = None
        self._ready_at: float | None = None
        if ready is not None:
            ready.add_done_callback(self._staged)

    def _staged(self, _: Future[Any]) -> None:
        self._ready_at = time.monotonic()

    def ended(self, error: BaseException | None = None) -> None:
        """Record the commit on the local tier, or the failure. The first call wins.

        ``wait`` in the thread that saved does not raise the error: its caller already has it.
        """
        with _lock:
            if self not in _open:
                return
            _open.remove(self)
            self.error = error
            if error is not None and self.uri is not None:
                _failed.pop((self.local_root, self.uri), None)
                _failed[self.local_root, self.uri] = self
                while len(_failed) > FAILURES_MAX:
                    del _failed[next(iter(_failed))]

    def is_of_this_thread(self) -> bool:
        return self._thread is threading.current_thread()

    def is_at_work(self) -> bool:
        """Return whether a background thread still makes this save.

        DCP does not report a failure of its own (a dead peer, the user's planner): its thread waits for other work.
        """
        self.check()
        if self not in _open:
            return False
        if self._began_in is None:  # staged, not begun
            return True
        frame = sys._current_frames().get(self._began_in.ident or 0)
        is_busy = frame is not None and frame.f_code is not thread._worker.__code__
        return is_busy and self._began_in is not threading.current_thread()

    def check(self) -> None:
        if self.uri is None:
            if self._ready_at is not None and time.monotonic() > self._ready_at + ORPHAN_SECONDS:
                self.ended()
            return
        is_left = self._thread is not None and (self.is_of_this_thread() or not self._thread.is_alive())
        if is_left or (self._writer is not None and self._writer() is None):
            self.abandon()

    def abandon(self) -> None:
        self.ended(
            CheckpointError(
                f"a save to {self.uri} that this process began has failed",
                hint="The future of async_save has the error; earlier commits are intact",
            )
        )


_lock = threading.RLock()
_open: list[Begun] = []
_failed: dict[tuple[Path, str], Begun] = {}
_running: set[Future[Any]] = set()


def running(future: Future[Any]) -> None:
    """Have ``finish`` wait for ``future``, which ends with a save."""
    _running.add(future)
    future.add_done_callback(_running.discard)


def left() -> int:
    """Return the number of saves that background threads still make."""
    return len(_running) + sum(one.is_at_work() for one in tuple(_open))


def finish(timeout_seconds: float) -> None:
    """Wait until the saves of background threads have ended and their drains have begun."""
    for _ in Poll(timeout_seconds, BRIEF):
        if not left():
            break


def staged(local_root: Path, ready: Future[Any]) -> None:
    with _lock:
        _open.append(Begun(local_root, ready))


def begin(local_root: Path, uri: str, writer: object, *, is_of_thread: bool) -> Begun:
    """The save ends with ``ended``, with ``writer`` and, if ``is_of_thread``, with the calling thread."""
    with _lock:
        own_save = next((one for one in _open if one.local_root == local_root and one.uri is None), None)
        if own_save is None:
            own_save = Begun(local_root)
            _open.append(own_save)
        own_save._began_in = threading.current_thread()
        own_save._thread = own_save._began_in if is_of_thread else None
        own_save.uri = uri
        own_save._writer = weakref.ref(writer)
        _failed.pop((local_root, uri), None)
    return own_save


def wait(local_root: Path, uri: str, timeout_seconds: float) -> None:
    """Wait until each save to ``uri`` that this process began is on the local tier.

    Raises OperationTimeoutError, or the newest save's error if another thread made it.
    """
    for _ in Poll(timeout_seconds, BRIEF):
        under_way = [one for one in tuple(_open) if one.local_root == local_root and one.uri in (None, uri)]
        if not under_way:
            break
        for one in under_way:
            one.check()
    else:
        raise OperationTimeoutError(
            f"a save to {uri} that this process began has not ended after {timeout_seconds:g} s",
            hint="Its future tells how it ends",
        )
    failed = _failed.get((local_root, uri))
    if failed is not None and failed.error is not None and not failed.is_of_this_thread():
        raise failed.error


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _open.clear()
    _failed.clear()
    _running.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
