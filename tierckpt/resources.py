"""One error for threads, descriptors and memory that the system refuses, with the limit to raise."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import queue
import weakref
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

from .errors import CapacityError, TierckptError

_NO_THREAD = "can't start new thread"
_REMEDIES = {
    "descriptors": "Raise `ulimit -n`, or close files",
    "threads": "Raise `ulimit -u`, `ulimit -v` or the pids limit of the container, or run fewer threads",
    "memory": "Raise `ulimit -v` or the memory limit of the container, or use less memory",
}


def exhausted(error: BaseException) -> CapacityError | None:
    if isinstance(error, TierckptError):
        return None
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        what = "memory"
    elif isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        what = "threads"
    elif isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        what = "descriptors"
    else:
        return None
    hint = _REMEDIES[what]
    message = f"the system gives this process no more {what}: {error or type(error).__name__}"
    return CapacityError(message, hint=hint, resource=what)


def start_thread(thread: Thread) -> Thread:
    """Raise CapacityError if the system refuses the thread."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        _raise_interrupt(error)
        raise exhausted(error) or error from error
    return thread


def _raise_interrupt(error: BaseException) -> None:
    """Ctrl-C in ``Thread.start`` may arrive as "release unlocked lock"."""
    if isinstance(error.__context__, KeyboardInterrupt):
        raise error.__context__ from None


def start_if_possible(thread: Thread) -> bool:
    try:
        start_thread(thread)
    except CapacityError:
        return False
    return True


class ThreadPool(ThreadPoolExecutor):
    """Works with the threads it can get. ``submit`` raises CapacityError if it has none."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except (RuntimeError, MemoryError) as error:
            _raise_interrupt(error)
            if any(thread.is_alive() for thread in self._threads):
                return
            with contextlib.suppress(queue.Empty):
                while True:
                    self._work_queue.get_nowait()  # its future is cancelled
            raise exhausted(error) or error from error


UNCANCELLED: weakref.WeakSet[asyncio.Future[Any]] = weakref.WeakSet()
"""Work that its caller awaits to the end. A loop that stops must not cancel it: a thread may still be writing."""


class Tasks(set[asyncio.Task[Any]]):
    """Running tasks of an event loop, which keeps only weak references to them."""

    def spawn(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self.add(task)
        task.add_done_callback(self.discard)
        return task
