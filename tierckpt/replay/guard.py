"""Digests parameters and optimizer state around each step, to detect writes that version counters miss.

    update n   |                  | forward and backward n+1       | update n+1
    after(n)   | end_of_step(n)   | digest thread reads            | before(n+1)

Invariants:
    D1  Every frame has the digest of all parameters and state at ``end_of_step``, computed during the next forward
        pass. The next update waits until tensors in host memory are read. Tensors on a device are digested in stream
        order, and no step waits for them. A frame is written after its digest is computed.
    D2  ``before`` and ``after`` digest the tensors of one optimizer on the training thread, directly before and after
        its update, so that nothing can write in between: at the first step after each base, at every step if that takes
        less than ``FREE_SECONDS``, otherwise within ``CHECK_SHARE`` of training time. An edit that they miss changes
        the digest of the next frame (D1), and a restore ends at the step before it.
    D3  A difference fails the digest of the frame, with the reason, and the log ends before that frame.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch

from ..errors import CheckpointError
from ..resources import ThreadPool
from .checksum import Marks, begin_marks, digest_of, marks_of, numbers_of
from .optimizers import tensors_of

CHECK_SHARE = 0.01
"""Share of training time that digests on the training thread may take."""
FREE_SECONDS = 0.002
CHANGED = (
    "parameters or state{} were changed outside the optimizer between {} and {}, in a way that version counters do not "
    "show (.data, numpy, a fused kernel)"
)

Check = Callable[[], Callable[[], tuple[str, int]]]
"""Reads parameters outside the optimizers in host memory, on the digest thread. Returns a function that waits for
devices and returns the reason not to log the step ('' for none) and a digest."""


def no_check() -> Callable[[], tuple[str, int]]:
    return lambda: ("", 0)


class Guard:
    """Digests parameters and state of ``optimizers``, and compares the digests between steps.

    Cost: one pass over them for each step, on a thread of its own; two passes on the training thread in some steps
        (D2).
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._thread = ThreadPool(1, "tierckpt-digest")
        self._newest: tuple[int, threading.Event, Future[str]] | None = None
        self._seen: dict[str, list[int]] = {}
        """Digests by optimizer at the end of the newest step. Used by the digest thread."""
        self._before: dict[str, Marks] = {}
        self._after: dict[str, Marks] = {}
        """Marks of the current step."""
        self._failure: tuple[int, str] | None = None
        self._looks, self._is_new = False, True
        self._look_seconds = self._taken_seconds = self._spent_seconds = 0.0
        self._begun = time.perf_counter()

    @property
    def failure(self) -> tuple[int, str] | None:
        """The first step that must not be logged, and the reason."""
        if self._failure is not None or self._newest is None or not self._newest[2].done():
            return self._failure
        error = self._newest[2].exception()
        return (self._newest[0], str(error)) if error is not None else None

    def begin(self, step: int, check: Check) -> None:
        """Begin a new log at the current state, after ``step``."""
        self._before, self._after, self._is_new, self._failure = {}, {}, True, None
        self._submit(step, check)

    def rebase(self) -> None:
        """Check the next step: a checkpoint has the current state."""
        self._is_new = True

    def before(self, name: str) -> None:
        """Run before a step of the optimizer ``name``."""
        self.wait()
        begun = time.perf_counter()
        is_paid = self._spent_seconds + self._look_seconds <= CHECK_SHARE * (begun - self._begun)
        self._looks = self._is_new or self._look_seconds <= FREE_SECONDS or is_paid
        if self._looks and name not in self._before:
            marks = self._before[name] = self._marks(name)
            if self._newest is not None and all(isinstance(one, int) for one in marks):  # else ``_submit`` compares
                step, _, digest = self._newest
                if digest.exception() is None and numbers_of(marks) != self._seen[name]:
                    self._failure = (step + 1, _changed(name, f"step {step}", "the next update"))
        self._taken_seconds = time.perf_counter() - begun

    def wait(self) -> None:
        """Wait until the digest thread has read host memory; then the caller may write to it."""
        if self._newest is not None:
            self._newest[1].wait()

    def after(self, name: str) -> None:
        """Run directly after the update of the optimizer ``name``."""
        if self._looks:
            begun = time.perf_counter()
            self._after[name] = self._marks(name)
            taken = self._taken_seconds + time.perf_counter() - begun
            self._look_seconds = min(taken, self._look_seconds or taken)  # the first passes load code
            self._spent_seconds += taken

    def _marks(self, name: str) -> Marks:
        try:
            return marks_of(tensors_of(self._optimizers[name]))
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError; training continues without the log
            step = self._newest[0] + 1 if self._newest is not None else 0
            self._failure = (step, f"parameters and state cannot be digested: {error}")
            return []

    def end_of_step(self, step: int, check: Check) -> Future[str]:
        """Begin to digest the current state. The future raises CheckpointError if ``step`` must not be logged (D3)."""
        self._is_new = False
        return self._submit(step, check)

    def close(self) -> None:
        self._thread.shutdown()

    def _submit(self, step: int, check: Check) -> Future[str]:
        before, self._before, after, self._after = self._before, {}, self._after, {}
        reading = {name: begin_marks(tensors_of(one)) for name, one in sorted(self._optimizers.items())}
        is_read = threading.Event()

        def read() -> str:
            try:
                marks = {name: begun() for name, begun in reading.items()}
                checked = check()
            finally:
                is_read.set()
            seen = {name: numbers_of(one) for name, one in marks.items()}
            reason, others = checked()
            for name, one in before.items():
                if numbers_of(one) != self._seen.get(name):
                    reason = _changed(name, "the previous step", f"the update of step {step}")
            for name, one in after.items():
                if numbers_of(one) != seen[name]:
                    reason = reason or _changed(name, f"the update of step {step}", "its end")
            self._seen = seen
            if reason:
                raise CheckpointError(reason)
            return total_of(seen, others)

        future = self._thread.submit(read)
        self._newest = (step, is_read, future)
        return future


def total_of(seen: Mapping[str, list[int]], others: int) -> str:
    """Return the digest for a frame: of the numbers of each optimizer, and of ``others``, the digest of a ``Check``."""
    return digest_of([*(number for name in sorted(seen) for number in seen[name]), others])


def _changed(name: str, since: str, until: str) -> str:
    return CHANGED.format(f" of {name}" if name else "", since, until)
