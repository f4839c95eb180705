"""Copies tensors to host memory in the background, in chunks: gradients before parts of the state.

Copies from CUDA are queued on two streams, gradients with the higher priority. The training stream waits for them by
events; the training thread does not wait.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice

import numpy as np
import torch

from .. import poll, torch_internals
from ..arena.memory import pin
from ..arena.slots import Arena, SlotPolicy
from ..dcp.stager import base_of
from ..dcp.staging import Copies
from ..errors import CapacityError, CheckpointError
from ..quantities import round_up
from ..resources import start_thread

CHUNK_BYTES = 4 << 20
JOINED_GRADIENT_BYTES = 2 * CHUNK_BYTES
GRADIENTS, PARTS = 0, 1
CATCH_UP_SECONDS = 0.02
"""Maximum delay that a throttled link makes up for."""
COPY_TIMEOUT_SECONDS = 600.0
UPDATE_TIMEOUT_SECONDS = 0.25
"""Maximum pause of background threads during an update."""
ALIGNMENT_BYTES = 64
SLOTS_MAX = 1024
"""Enough for the parts and gradients of two windows."""
_LOWER_HALVES = 0x0000FFFF_0000FFFF


class TensorCopy:
    """``result`` is complete when ``done`` is set.

    The copying thread calls ``allocate``, because new memory is slow. None: float32 becomes bfloat16 if that loses no
    bit.
    """

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        allocate: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None,
        *,
        yields_to_update: bool = False,
    ) -> None:
        self.done: Future[None] = Future()
        self.was_overwritten = False
        self.copied_bytes = 0
        self.yields_to_update = yields_to_update
        self.size_bytes = sum(one.nbytes for one in sources) if allocate is not None else 0
        self.result: list[torch.Tensor] = []
        self.on_device: Copies | None = None
        self._sources = list(sources)
        self._versions = [torch_internals.version_of(one) for one in sources]
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._allocate = allocate
        self._next_source = 0

    @property
    def remaining_bytes(self) -> int:
        return self.size_bytes - self.copied_bytes

    @property
    def is_out_of_memory(self) -> bool:
        done = self.done
        return done.done() and not done.cancelled() and isinstance(done.exception(), MemoryError)

    def next_chunk(self, chunk_bytes: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        size_bytes = 0
        while size_bytes < chunk_bytes and (piece := self._next_piece()) is not None:
            targets.append(piece[0])
            sources.append(piece[1])
            size_bytes += piece[0].nbytes
        return targets, sources

    def allocate(self) -> None:
        if self._allocate is not None:
            self.result = self._allocate(self._sources)

    def _next_piece(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._next_source:
            self.allocate()
        while not self._pieces:
            if self._next_source == len(self._sources):
                return None
            if self._allocate is None:
                self._next_source += self._add_gradients()
            else:
                self._add(self.result[self._next_source], self._sources[self._next_source])
                self._next_source += 1
            self._pieces.reverse()
        return self._pieces.pop()

    def fence(self) -> bool:
        """Make the current stream wait, so that later work may overwrite the sources. False without a device."""
        if self.on_device is None:
            return False
        self.on_device.wait(poll.HANG_SECONDS)
        self._versions.clear()  # later writes are ordered after the copy
        return True

    def end(self) -> None:
        versions = map(torch_internals.version_of, self._sources)
        self.was_overwritten = any(map(operator.ne, versions, self._versions))
        self._sources.clear()
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(None)

    def _add_gradients(self) -> int:
        gradients: list[torch.Tensor] = []
        size_bytes = 0
        for source in islice(self._sources, self._next_source, None):
            size_bytes += source.nbytes
            if source.dtype is not torch.float32 or not source.numel() or size_bytes > JOINED_GRADIENT_BYTES:
                break
            gradients.append(source)
        if len(gradients) > 1:
            halves = lossless_upper_halves(torch_internals.flatten_dense_tensors(gradients))
            if halves is not None:
                target = self._add_memory(halves)
                self.result += torch_internals.unflatten_dense_tensors(target.view(torch.bfloat16), gradients)
                return len(gradients)
        gradients = gradients or [self._sources[self._next_source]]
        for source in gradients:
            halves = lossless_upper_halves(source)
            target = self._add_memory(source if halves is None else halves)
            self.result.append(target if halves is None else target.view(torch.bfloat16).view(source.shape))
        return len(gradients)

    def _add_memory(self, source: torch.Tensor) -> torch.Tensor:
        target = host_memory([source])[0]
        self._add(target, source)
        self.size_bytes += target.nbytes
        return target

    def _add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.numel() == 0:
            return
        if not source.is_contiguous() and source.ndim > 1:
            self._pieces.append((target, source))
            return
        count = max(1, CHUNK_BYTES // source.element_size())
        if source.numel() <= count:
            self._pieces.append((target, source))
            return
        flat_target, flat_source = target.view(-1), source.view(-1) if source.is_contiguous() else source
        for offset in range(0, source.numel(), count):
            self._pieces.append((flat_target[offset : offset + count], flat_source[offset : offset + count]))


class OverwrittenError(CheckpointError):
    """Gradients were overwritten before they were copied."""


class CopiedGradients(Mapping[str, torch.Tensor]):
    """Reading one gradient waits for the copy of all, and raises OverwrittenError or the copy's error."""

    def __init__(self, copy: TensorCopy, keys: Sequence[str]) -> None:
        self.copy = copy
        self._keys = keys
        self._gradients: dict[str, torch.Tensor] | None = None

    def __getitem__(self, key: str) -> torch.Tensor:
        if self._gradients is None:
            self.copy.done.result(COPY_TIMEOUT_SECONDS)
            if self.copy.was_overwritten:
                raise OverwrittenError("gradients were overwritten before they were copied (zero_grad in place?)")
            self._gradients = dict(zip(self._keys, self.copy.result, strict=True))
        return self._gradients[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class PinnedMemory:
    """Maps host memory once, reuses it when no tensor refers to it, and page-locks it for copies from CUDA."""

    def __init__(self) -> None:
        self._arena = Arena(slots_max=SLOTS_MAX, policy=SlotPolicy.SKIP)

    def tensors(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous targets in one slot. Raises MemoryError if all slots are in use."""
        offsets, size_bytes = [], 0
        for source in sources:
            offsets.append(size_bytes)
            size_bytes += round_up(source.numel() * source.element_size(), ALIGNMENT_BYTES)
        if not size_bytes:
            return [torch.empty(source.shape, dtype=source.dtype, device="cpu") for source in sources]
        try:
            lease = self._arena.lease(size_bytes)
        except CapacityError as error:
            raise MemoryError(str(error)) from error
        if lease is None:
            raise MemoryError(f"all of {SLOTS_MAX} pieces of page-locked memory are in use")
        if any(source.is_cuda for source in sources):
            pin(lease.memory)
        base = base_of(lease, size_bytes)
        return [
            base[offset : offset + source.numel() * source.element_size()].view(source.dtype).view(source.shape)
            for offset, source in zip(offsets, sources, strict=True)
        ]

    def close(self) -> None:
        """Used slots are released with their last tensor."""
        self._arena.close()


def lossless_upper_halves(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return None if a lower half of a float32 is not 0."""
    if tensor.dtype is not torch.float32 or not tensor.numel() or not tensor.is_contiguous() or not tensor.is_cpu:
        return None
    values = tensor.numpy(force=True).reshape(-1)  # numpy's views do not yield the interpreter
    even = len(values) & ~1
    lower_bits = int(np.bitwise_or.reduce(values[:even].view(np.uint64)))  # torch's any() takes 6 times as long
    if even < len(values):
        lower_bits |= int(values[even:].view(np.uint32)[0]) & 0xFFFF
    return None if lower_bits & _LOWER_HALVES else torch.from_numpy(values.view(np.int16)[1::2])


class Link:
    """Copies in order of priority, on a thread of its own."""

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self.bytes_per_second = bytes_per_second
        self.logged_gradients: dict[int, CopiedGradients | None] = {}
        """Keys are the ``id`` of each optimizer with a multi-step stager."""
        self._copied_bytes, self._busy_seconds, self._device_bytes_per_second = 0, 0.0, 0.0
        self._pinned = PinnedMemory()
        self._no_update = threading.Event()
        self._no_update.set()
        self._queue: list[tuple[int, int, TensorCopy]] = []
        self._sequence = itertools.count()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tierckpt-link", daemon=True)
        start_thread(self._thread)
        self._clock = time.pthread_getcpuclockid(self._thread.ident or 0)

    @property
    def measured_bytes_per_second(self) -> float:
        """Return 0 before the first chunk. From a device: the maximum, as copies queue."""
        if self._device_bytes_per_second:
            return self._device_bytes_per_second
        return self._copied_bytes / self._busy_seconds if self._copied_bytes >= CHUNK_BYTES else 0.0

    def progress(self) -> tuple[int, float]:
        return self._copied_bytes, time.clock_gettime(self._clock)

    def update_begins(self) -> None:
        self._no_update.clear()

    def update_ends(self) -> None:
        self._no_update.set()

    def wait_for_update(self) -> None:
        """Calls into torch on a background thread would take the interpreter from the update."""
        if not self._no_update.is_set():
            self._no_update.wait(UPDATE_TIMEOUT_SECONDS)
            self._no_update.set()  # a step that raised did not call update_ends

    def wait(self, copy: TensorCopy) -> bool:
        """Return False if the link hangs: the copy is unusable."""
        self.update_ends()
        return copy.fence() or poll.wait_while([copy.done], self.progress)

    def copy(self, sources: Sequence[torch.Tensor], priority: int, *, yields_to_update: bool = False) -> TensorCopy:
        """``sources`` must not be overwritten before the copy is done or ``wait`` returns.

        From a device: after the work queued on the current stream.
        """
        if any(one.is_cuda for one in sources):
            return self._copy_from_device(sources, priority)
        allocate = self._pinned.tensors if priority == PARTS else None
        tensor_copy = TensorCopy(sources, allocate, yields_to_update=yields_to_update)
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the link is closed")
            heapq.heappush(self._queue, (priority, next(self._sequence), tensor_copy))
            self._changed.notify()
        return tensor_copy

    def _copy_from_device(self, sources: Sequence[torch.Tensor], priority: int) -> TensorCopy:
        """Do not wait for the device, so float32 gradients are not narrowed."""
        if self._is_closed:
            raise RuntimeError("the link is closed")
        tensor_copy = TensorCopy(sources, self._pinned.tensors)
        tensor_copy.allocate()
        # the lowest number has priority
        tensor_copy.on_device = Copies(tensor_copy.result, sources, priority=priority - PARTS)
        tensor_copy.on_device.run_now(lambda one: not one.is_cuda)  # step counters
        started_at = time.monotonic()

        def on_done(error: BaseException | None) -> None:
            measured = tensor_copy.size_bytes / (time.monotonic() - started_at)
            self._device_bytes_per_second = max(self._device_bytes_per_second, measured)
            tensor_copy.copied_bytes = tensor_copy.size_bytes
            if error is None:
                tensor_copy.end()
            elif tensor_copy.done.set_running_or_notify_cancel():
                tensor_copy.done.set_exception(error)

        tensor_copy.on_device.run_in_background(on_done)
        return tensor_copy

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            queue, self._queue = self._queue, []
            self._changed.notify()
        for _, _, tensor_copy in queue:
            tensor_copy.done.cancel()
        self._thread.join()
        self._pinned.close()

    def _run(self) -> None:
        free_at = time.monotonic()
        chunk_bytes = min(CHUNK_BYTES, self.bytes_per_second * CATCH_UP_SECONDS or CHUNK_BYTES)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if self._is_closed:
                    return
                tensor_copy = self._queue[0][2]
            try:
                if tensor_copy.yields_to_update:
                    self.wait_for_update()
                targets, sources = tensor_copy.next_chunk(chunk_bytes)
                if targets:
                    started_at = time.monotonic()
                    size_bytes = sum(one.nbytes for one in targets)
                    if self.bytes_per_second:
                        free_at = max(free_at, time.monotonic() - CATCH_UP_SECONDS) + size_bytes / self.bytes_per_second
                        time.sleep(max(0.0, free_at - time.monotonic()))
                    torch_internals.foreach_copy(targets, sources)
                    tensor_copy.copied_bytes += size_bytes
                    self._copied_bytes += size_bytes
                    self._busy_seconds += time.monotonic() - started_at
                    continue
            except BaseException as error:
                self._remove(tensor_copy)
                if tensor_copy.done.set_running_or_notify_cancel():
                    tensor_copy.done.set_exception(error)
                continue
            self._remove(tensor_copy)
            tensor_copy.end()
            del tensor_copy, targets, sources  # else they keep its memory until the next copy

    def _remove(self, tensor_copy: TensorCopy) -> None:
        with self._changed:
            self._queue = [one for one in self._queue if one[2] is not tensor_copy]
            heapq.heapify(self._queue)


def host_memory(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    try:
        return [torch.empty(one.shape, dtype=one.dtype, device="cpu") for one in sources]
    except RuntimeError as error:  # torch has no error type for it on the host
        if "alloc" in str(error) or "memory" in str(error):
            raise MemoryError(str(error)) from error
        raise
