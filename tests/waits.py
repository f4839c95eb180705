"""What the thread that runs a test waits for in vain: by what its waits asked for, and not by a clock of the machine.

Every wait of Python's with a deadline ends in ``Condition.wait``. One that runs out has been for nothing; so the sum of
these is what an ill disk, process or thread has cost, however busy the machine is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BUDGET_SECONDS = 0.5
"""What training may wait for somebody that is ill."""


ANSWER_SECONDS = 1.5
"""What is healthy has answered by then, on a busy machine too."""


class TooLongError(AssertionError):
    """A wait that training must not make."""


class Waits:
    def __init__(self) -> None:
        self.in_vain_seconds = 0.0
        self._thread = threading.current_thread()

    def wait(self, condition: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is not self._thread:
            return real(condition, timeout)
        is_long = timeout is None or self.in_vain_seconds + timeout > BUDGET_SECONDS
        was_notified = real(condition, ANSWER_SECONDS if is_long else timeout)
        if is_long and not was_notified:
            raise TooLongError(f"{timeout} s more, after {self.in_vain_seconds:.3f} s in vain")
        self.in_vain_seconds += 0.0 if was_notified else timeout or 0.0
        return was_notified


real = threading.Condition.wait


@contextmanager
def counted() -> Iterator[Waits]:
    """Count what this thread waits in vain in the block. A wait beyond the budget raises TooLongError."""
    waits = Waits()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Condition, "wait", lambda one, timeout=None: waits.wait(one, timeout))
        yield waits


class Disk:
    """Hangs in one kind of request, from when it is armed until it is released. Each request takes ``seconds``."""

    def __init__(self, patched: pytest.MonkeyPatch, owner: Any, call: str) -> None:
        self.hangs, self.in_it = threading.Event(), threading.Event()
        self.hangs.set()
        real = getattr(owner, call)

        def asked(*given: Any, **options: Any) -> Any:
            if not self.hangs.is_set():
                self.in_it.set()
                self.hangs.wait(60)
            return real(*given, **options)

        patched.setattr(owner, call, asked)
