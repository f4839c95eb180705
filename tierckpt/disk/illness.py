"""Distinguishes a slow disk from a hanging one, for which training does not wait.

A disk hangs if it has completed none of this process's pending requests for ``ILL_SECONDS``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import CapacityError, CheckpointSkippedError
from ..poll import wait_while
from ..resources import start_thread
from ..types import Tier

T = TypeVar("T")

ILL_SECONDS = 0.4
"""Training may wait half a second for a hanging disk."""
HINT = "look for a hung disk or mount (dmesg)"


class Requests:
    """Pending requests of this process to its local disks. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._begun: dict[int, float] = {}
        self._ended_at = 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        number = next(self._numbers)
        self._begun[number] = time.monotonic()
        try:
            yield
        finally:
            self._begun.pop(number, None)
            self._ended_at = time.monotonic()

    def seconds_left(self) -> float:
        """Seconds until the disk counts as hanging, unless it completes a request."""
        begun = min(tuple(self._begun.values()), default=None)
        if begun is None:
            return ILL_SECONDS
        return max(0.0, max(begun, self._ended_at) + ILL_SECONDS - time.monotonic())

    @property
    def is_ill(self) -> bool:
        return not self.seconds_left()

    def forget(self) -> None:
        self._begun.clear()


requests = Requests()
os.register_at_fork(after_in_child=requests.forget)  # threads of the parent made them


def ill_disk(where: object, **context: object) -> CheckpointSkippedError:
    return CheckpointSkippedError(
        f"the disk below {where} has not ended a request for {ILL_SECONDS:g} s",
        hint=f"Training continues, and the next save is tried. Meanwhile {HINT}",
        tier=Tier.LOCAL,
        **context,
    )


class Errands:
    """Runs requests to the disk below ``where`` on a thread; the caller waits only while they progress.

    Progress is processor time. While one request hangs no other begins.
    """

    def __init__(self, where: object) -> None:
        self._where = where
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        self._clocks: list[int] = []
        self._hung_at = -1.0

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Raises CheckpointSkippedError while an earlier request hangs."""
        if not self._last.done() and (self._progress() == self._hung_at or not self.wait_for_progress()):
            raise ill_disk(self._where)
        done, clocks = Future[T](), list[int]()
        self._last, self._clocks = done, clocks

        def do() -> None:
            clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
            try:
                with requests.counted():
                    result = work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        try:
            start_thread(threading.Thread(target=do, name="tierckpt-errand", daemon=True))
        except CapacityError as error:
            done.set_exception(error)
            raise
        return done

    def wait_for_progress(self) -> bool:
        is_done = wait_while([self._last], self._progress)
        self._hung_at = self._progress()
        return is_done

    def _progress(self) -> float:
        with contextlib.suppress(OSError):  # the thread has just ended
            return sum(map(time.clock_gettime, self._clocks))
        return -1.0

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``, or raise its error; CheckpointSkippedError if any request hangs."""
        done = self.begin(work)
        if not self.wait_for_progress():
            raise ill_disk(self._where)
        return done.result()

    def run_checked(self, work: Callable[[], object]) -> CheckpointSkippedError | None:
        """``run``, but return the CheckpointSkippedError."""
        try:
            self.run(work)
        except CheckpointSkippedError as error:
            return error
        return None
