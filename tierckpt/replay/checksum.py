"""Compares tensors bit by bit, by a digest of 8 bytes, and detects writes that version counters miss (``Guard``)."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import torch
import xxhash

from .. import torch_internals
from ..errors import CheckpointError
from ..resources import ThreadPool
from .optimizers import tensors_of

_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ROW_ELEMENTS = 1 << 12
SAMPLE_ELEMENTS = 64
SMALL_BYTES, SMALL_TENSORS_MAX = 1 << 14, 1 << 10
"""Tensors of up to 16 KiB are digested together, at most 1,024 at a time."""
JOINED_BYTES = 64 << 20
"""A kernel launch costs as much as a megabyte."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all elements of (bits of the element) x (2 x its index + 1), modulo 2**64.

    The sum is an int64 scalar on the tensor's device, the same on every device. Does not wait for the device.
    """
    data = tensor.detach()
    if data.is_complex():
        data = torch.view_as_real(data)
    flat = data.contiguous().view(-1)
    bits = flat.view(_VIEWS[flat.element_size()])
    weights = _weights(bits.device)
    whole = bits.numel() // ROW_ELEMENTS * ROW_ELEMENTS
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    if whole:  # 2 (row x ROW_ELEMENTS + column) + 1 = row weight + column weight
        rows = bits[:whole].view(-1, ROW_ELEMENTS)
        total += (rows.sum(0, dtype=torch.int64) * weights).sum()
        if len(rows) > 1:
            numbers = torch.arange(0, 2 * whole, 2 * ROW_ELEMENTS, device=bits.device)
            total += (rows.sum(1, dtype=torch.int64) * numbers).sum()
    if rest := bits.numel() - whole:
        total += (bits[whole:] * (weights[:rest] + 2 * whole)).sum()
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * ROW_ELEMENTS, 2, device=device)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """XXH3 in host memory, where it is faster; ``checksum`` on a device.

    ``sample`` distinguishes different rounding from a different tensor.
    """

    value: int | torch.Tensor
    sample: torch.Tensor
    is_sum: bool

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> Fingerprint:
        is_sum = tensor.device.type != "cpu"
        return cls(checksum(tensor) if is_sum else _hash(tensor), sample_of(tensor).clone(), is_sum)

    def matches(self, copy: torch.Tensor) -> bool:
        """Waits for the device."""
        return self.int_value == (int(checksum(copy).item()) if self.is_sum else _hash(copy))

    def to_host(self) -> Fingerprint:
        """Waits for the device."""
        return Fingerprint(self.int_value, self.sample.cpu(), self.is_sum)

    @property
    def int_value(self) -> int:
        return self.value if isinstance(self.value, int) else int(self.value.item())


Digests = list[int | torch.Tensor]


def digests_of(tensors: Iterable[torch.Tensor]) -> Digests:
    return begin_digests(tensors)()


def begin_digests(tensors: Iterable[torch.Tensor]) -> Callable[[], Digests]:
    """Digest tensors on a device in stream order, and others in the returned function.

    Another thread may call the function if nothing writes to the tensors then.
    """
    host, device = list[torch.Tensor](), list[torch.Tensor]()
    for one in tensors:
        (host if one.device.type == "cpu" else device).append(one)
    on_device: Digests = [checksum(one) for one in _join_small_tensors(device)]
    return lambda: [*map(_hash, _join_small_tensors(host)), *on_device]


def _join_small_tensors(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """A call into torch costs more than reading small tensors."""
    small: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for one in tensors:
        if one.nbytes > (SMALL_BYTES if one.is_cpu else JOINED_BYTES):
            yield one
        elif one.numel():
            small.setdefault((one.device, one.dtype), []).append(one)
    for small_tensors in small.values():
        yield from map(torch_internals.flatten_dense_tensors, _bounded_groups(small_tensors))


def _bounded_groups(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    group: list[torch.Tensor] = []
    size_bytes = 0
    for one in tensors:
        if group and (len(group) == SMALL_TENSORS_MAX or size_bytes + one.nbytes > JOINED_BYTES):
            yield group
            group, size_bytes = [], 0
        group.append(one)
        size_bytes += one.nbytes
    if group:
        yield group


def digest_values(digests: Digests) -> list[int]:
    """Waits for the device."""
    return [int(one) % 2**64 for one in digests]


def combined_digest(digests: Digests) -> str:
    """Waits for the device."""
    return xxhash.xxh3_64_hexdigest(b"".join(one.to_bytes(8, "little") for one in digest_values(digests)))


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """The result may share memory."""
    flat = tensor.detach().contiguous().view(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE_ELEMENTS))]


def _hash(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().view(-1)
    if not flat.numel():
        return 0
    return xxhash.xxh3_64_intdigest(memoryview(cast(Any, flat.view(torch.uint8).numpy())))


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
    """Digests parameters and optimizer state around each step.

    Once per step on its own thread, in some steps twice on the training thread (D2):

        update n   |                  | forward and backward n+1       | update n+1
        after(n)   | end_of_step(n)   | digest thread reads            | before(n+1)

        D1  Every frame has the digest of all parameters and state at ``end_of_step``. The next update waits until
            tensors in host memory are read.
        D2  ``before`` and ``after`` run at the first step after each base, at every step if that takes less than
            ``FREE_SECONDS``, otherwise within ``CHECK_SHARE``. An edit that they miss changes the next digest (D1).
        D3  A difference ends the log before that frame, with the reason.
    """

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
