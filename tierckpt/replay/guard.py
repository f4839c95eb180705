"""Digests parameters and optimizer state around each step, to detect writes that version counters miss.

    update n   |                  | forward and backward n+1       | update n+1
    after(n)   | end_of_step(n)   | digest thread reads            | before(n+1)

Invariants:
    D1  Every frame has the digest of all parameters and state at ``end_of_step``. The next update waits until tensors
        in host memory are read.
    D2  ``before`` and ``after`` run at the first step after each base, at every step if that takes less than
        ``FREE_SECONDS``, otherwise within ``CHECK_SHARE``. An edit that they miss changes the next digest (D1).
    D3  A difference ends the log before that frame, with the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch

from ..errors import CheckpointError
from ..resources import ThreadPool
from .checksum import Digests, begin_digests, combined_digest, digest_values, digests_of
from .optimizers import tensors_of

CHECK_SHARE = 0.01
"""Maximum share of training time."""
FREE_SECONDS = 0.002
CHANGE_MESSAGE = (
    "parameters or state{} were changed outside the optimizer between {} and {}, in a way that version counters do not "
    "show (.data, numpy, a fused kernel)"
)

Check = Callable[[], Callable[[], tuple[str, int]]]
"""Reads parameters outside the optimizers, on the digest thread. Returns a function that waits for devices and returns
the reason not to log the step ('' for none) and a digest.
"""


def no_check() -> Callable[[], tuple[str, int]]:
    return lambda: ("", 0)


class Guard:
    """Digests once per step on its own thread, in some steps twice on the training thread (D2)."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._thread = ThreadPool(1, "tierckpt-digest")
        self._newest_digest: tuple[int, threading.Event, Future[str]] | None = None
        self._digests: dict[str, list[int]] = {}
        """Belongs to the digest thread."""
        self._digests_before: dict[str, Digests] = {}
        self._digests_after: dict[str, Digests] = {}
        self._failure: tuple[int, str] | None = None
        self._checks_step, self._has_new_base = False, True
        self._check_seconds = self._before_seconds = self._total_check_seconds = 0.0
        self._started_at = time.perf_counter()

    @property
    def failure(self) -> tuple[int, str] | None:
        if self._failure is not None or self._newest_digest is None or not self._newest_digest[2].done():
            return self._failure
        error = self._newest_digest[2].exception()
        return (self._newest_digest[0], str(error)) if error is not None else None

    def begin(self, step: int, check: Check) -> None:
        self._digests_before, self._digests_after, self._has_new_base, self._failure = {}, {}, True, None
        self._submit(step, check)

    def rebase(self) -> None:
        """Check the next step: a checkpoint has the current state."""
        self._has_new_base = True

    def before(self, name: str) -> None:
        self.wait()
        started_at = time.perf_counter()
        allowed_seconds = CHECK_SHARE * (started_at - self._started_at)
        is_within_share = self._total_check_seconds + self._check_seconds <= allowed_seconds
        self._checks_step = self._has_new_base or self._check_seconds <= FREE_SECONDS or is_within_share
        if self._checks_step and name not in self._digests_before:
            digests = self._digests_before[name] = self._digest(name)
            is_on_host = all(isinstance(one, int) for one in digests)  # else ``_submit`` compares
            if self._newest_digest is not None and is_on_host:
                step, _, digest = self._newest_digest
                if digest.exception() is None and digest_values(digests) != self._digests[name]:
                    self._failure = (step + 1, _change_message(name, f"step {step}", "the next update"))
        self._before_seconds = time.perf_counter() - started_at

    def wait(self) -> None:
        """Wait until the caller may write to host memory."""
        if self._newest_digest is not None:
            self._newest_digest[1].wait()

    def after(self, name: str) -> None:
        if self._checks_step:
            started_at = time.perf_counter()
            self._digests_after[name] = self._digest(name)
            seconds = self._before_seconds + time.perf_counter() - started_at
            self._check_seconds = min(seconds, self._check_seconds or seconds)  # the first passes load code
            self._total_check_seconds += seconds

    def _digest(self, name: str) -> Digests:
        try:
            return digests_of(tensors_of(self._optimizers[name]))
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError; training continues
            step = self._newest_digest[0] + 1 if self._newest_digest is not None else 0
            self._failure = (step, f"parameters and state cannot be digested: {error}")
            return []

    def end_of_step(self, step: int, check: Check) -> Future[str]:
        """The future raises CheckpointError if ``step`` must not be logged (D3)."""
        self._has_new_base = False
        return self._submit(step, check)

    def close(self) -> None:
        self._thread.shutdown()

    def _submit(self, step: int, check: Check) -> Future[str]:
        before, self._digests_before, after, self._digests_after = self._digests_before, {}, self._digests_after, {}
        pending_digests = {name: begin_digests(tensors_of(one)) for name, one in sorted(self._optimizers.items())}
        is_read = threading.Event()

        def read() -> str:
            try:
                digests = {name: finish() for name, finish in pending_digests.items()}
                finish_check = check()
            finally:
                is_read.set()
            values = {name: digest_values(one) for name, one in digests.items()}
            reason, other_digest = finish_check()
            for name, one in before.items():
                if digest_values(one) != self._digests.get(name):
                    reason = _change_message(name, "the previous step", f"the update of step {step}")
            for name, one in after.items():
                if digest_values(one) != values[name]:
                    reason = reason or _change_message(name, f"the update of step {step}", "its end")
            self._digests = values
            if reason:
                raise CheckpointError(reason)
            return frame_digest(values, other_digest)

        future = self._thread.submit(read)
        self._newest_digest = (step, is_read, future)
        return future


def frame_digest(digests: Mapping[str, list[int]], other_digest: int) -> str:
    return combined_digest([*(number for name in sorted(digests) for number in digests[name]), other_digest])


def _change_message(name: str, earlier: str, later: str) -> str:
    return CHANGE_MESSAGE.format(f" of {name}" if name else "", earlier, later)
