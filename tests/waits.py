"""Waits of a test's thread that time out: counted by the requested time, and not by a clock of the machine.

Every wait of Python's with a deadline ends in ``Condition.wait``. A wait that times out was in vain; their sum is
the cost of an ill disk, process or thread, even on a busy machine. A wait that ends late means that this thread had
no processor: its condition is checked once more (``poll.wait_while``). Nor is a wait in vain while another thread of
this process waits for a processor: what it does later is progress, which the next wait is for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tierckpt.poll import LATE

BUDGET_SECONDS = 0.5
"""Budget of a training thread's waits for an ill component."""


ANSWER_SECONDS = 30.0
"""Healthy components answer by then, on a busy machine too."""
LATE_SECONDS = 0.05
"""By which a wait ends late, however short it was to be."""
SEEDED_SECONDS = 1.0
"""The same once a component is known to be ill."""
STARVED_SHARE = 0.1
"""The machine is busy if other threads wait for a processor for a larger share of a wait."""


class TooLongError(AssertionError):
    """A wait that training must not make."""


class Waits:
    def __init__(self, answer_seconds: float) -> None:
        self.in_vain_seconds = 0.0
        self._answer_seconds = answer_seconds
        self._thread = threading.current_thread()

    def wait(self, condition: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is not self._thread:
            return real(condition, timeout)
        is_long = timeout is None or self.in_vain_seconds + timeout > BUDGET_SECONDS
        begun, starved = time.monotonic(), starved_seconds()
        was_notified = real(condition, self._answer_seconds if is_long else timeout)
        if is_long and not was_notified:
            raise TooLongError(f"{timeout} s more, after {self.in_vain_seconds:.3f} s in vain")
        is_late = timeout and time.monotonic() - begun > max(LATE * timeout, timeout + LATE_SECONDS)
        if timeout and not (was_notified or is_late or starved_seconds() - starved > STARVED_SHARE * timeout):
            self.in_vain_seconds += timeout
        return was_notified


def starved_seconds() -> float:
    """Return for how long the threads of this process have waited for a processor, in total."""
    total = 0.0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended
            total += int(path.read_text().split()[1]) / 1e9
    return total


real = threading.Condition.wait


@contextmanager
def counted(answer_seconds: float = ANSWER_SECONDS) -> Iterator[Waits]:
    """Count waits of this thread that time out in the block. A wait beyond the budget raises TooLongError."""
    waits = Waits(answer_seconds)
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

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self.hangs.set()
