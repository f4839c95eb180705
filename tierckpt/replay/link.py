"""Copies tensors to host memory in the background: gradients before parts of the state, in chunks.

One thread stands for one direction of the link between accelerator and host. A copy of a part is cut into chunks, so
that a gradient, which the next backward pass writes over, waits for one chunk and not for a part.

From CUDA, copies are queued on two streams beside the one that trains, gradients on the one that goes first, to
page-locked memory; what trains waits for them on the device, by events, and no thread of the trainer does.
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
from ..dcp.staging_copy import Copies
from ..errors import CheckpointError
from ..resources import start_thread
from .pinned import PinnedMemory

CHUNK_BYTES = 4 << 20
SEVERAL_BYTES = 2 * CHUNK_BYTES
"""Of small gradients, which are looked at and sent together."""
GRADIENTS, PARTS = 0, 1
CATCH_UP_SECONDS = 0.02
"""A throttled link makes up for so much of what waking up late has cost it."""
COPY_TIMEOUT_SECONDS = 600.0
"""For threads beside training that wait for a copy."""
UPDATE_SECONDS = 0.25
"""Of an update of the optimizer, what the threads beside it give way for."""
_LOWER_HALVES = 0x0000FFFF_0000FFFF
"""Of two float32 values."""


class Copy:
    """Some tensors on their way to host memory. ``result`` is complete when ``done`` is.

    Args:
        allocate: returns memory to copy all sources to, called by whoever copies, before the first byte: new memory
            takes its time. None: sends float32 tensors as bfloat16 when that loses no bit, as gradients that were
            reduced in bfloat16.
        gives_way: they are copied when the update that is made now has ended.
    """

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        allocate: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None,
        *,
        gives_way: bool = False,
    ) -> None:
        self.done: Future[None] = Future()
        self.was_changed = False
        """Something wrote over a source before the copy was done."""
        self.copied_bytes = 0
        self.gives_way = gives_way
        self.size_bytes = sum(one.nbytes for one in sources) if allocate is not None else 0
        self.result: list[torch.Tensor] = []
        self.on_device: Copies | None = None
        """The same copy as its device knows it."""
        self._sources = list(sources)
        self._versions = [torch_internals.version_of(one) for one in sources]
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._allocate = allocate
        self._next = 0

    @property
    def left_bytes(self) -> int:
        return self.size_bytes - self.copied_bytes

    @property
    def has_no_memory(self) -> bool:
        done = self.done
        return done.done() and not done.cancelled() and isinstance(done.exception(), MemoryError)

    def next_chunk(self, chunk_bytes: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what to copy next, targets and sources: small tensors, or a piece of a large one. None are left at the
        end."""
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
        if not self._next:
            self.allocate()
        while not self._pieces:
            if self._next == len(self._sources):
                return None
            if self._allocate is None:
                self._next += self._add_gradients()
            else:
                self._add(self.result[self._next], self._sources[self._next])
                self._next += 1
            self._pieces.reverse()
        return self._pieces.pop()

    def fence(self) -> bool:
        """Let what this thread queues from now on write over the sources: on a device its current stream waits for the
        copy, and this thread does not. False where there is no stream to wait."""
        if self.on_device is None:
            return False
        self.on_device.wait(poll.LOOK_SECONDS)
        self._versions.clear()  # what comes now comes later there, too
        return True

    def end(self) -> None:
        """All is copied."""
        versions = map(torch_internals.version_of, self._sources)
        self.was_changed = any(map(operator.ne, versions, self._versions))
        self._sources.clear()
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(None)

    def _add_gradients(self) -> int:
        """Add the next gradient, or several small ones, and return how many.

        Small ones are looked at and sent as one: each call into torch hands the interpreter to the thread that trains,
        and waits to have it back.
        """
        several: list[torch.Tensor] = []
        size_bytes = 0
        for source in islice(self._sources, self._next, None):
            size_bytes += source.nbytes
            if source.dtype is not torch.float32 or not source.numel() or size_bytes > SEVERAL_BYTES:
                break
            several.append(source)
        if len(several) > 1:
            halves = halves_without_loss(torch_internals.flatten_dense_tensors(several))
            if halves is not None:
                target = self._add_memory(halves)
                self.result += torch_internals.unflatten_dense_tensors(target.view(torch.bfloat16), several)
                return len(several)
        several = several or [self._sources[self._next]]
        for source in several:
            halves = halves_without_loss(source)
            target = self._add_memory(source if halves is None else halves)
            self.result.append(target if halves is None else target.view(torch.bfloat16).view(source.shape))
        return len(several)

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
        for at in range(0, source.numel(), count):
            self._pieces.append((flat_target[at : at + count], flat_source[at : at + count]))


class OverwrittenError(CheckpointError):
    """Something wrote over gradients before they were copied."""


class CopiedGradients(Mapping[str, torch.Tensor]):
    """Gradients by parameter key, on their way to host memory. Reading one waits for all, and raises what ended their
    copy, or OverwrittenError."""

    def __init__(self, copy: Copy, keys: Sequence[str]) -> None:
        self.copy = copy
        self._keys = keys
        self._found: dict[str, torch.Tensor] | None = None

    def __getitem__(self, key: str) -> torch.Tensor:
        if self._found is None:
            self.copy.done.result(COPY_TIMEOUT_SECONDS)
            if self.copy.was_changed:
                raise OverwrittenError("gradients were written over before they were copied (zero_grad in place?)")
            self._found = dict(zip(self._keys, self.copy.result, strict=True))
        return self._found[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def halves_without_loss(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the upper halves of float32 values in host memory, as int16, when all the lower ones are 0."""
    if tensor.dtype is not torch.float32 or not tensor.numel() or not tensor.is_contiguous() or not tensor.is_cpu:
        return None
    values = tensor.numpy(force=True).reshape(-1)  # numpy's views do not hand the interpreter to another thread
    even = len(values) & ~1
    found = int(np.bitwise_or.reduce(values[:even].view(np.uint64)))  # torch's any() takes 6 times as long
    if even < len(values):
        found |= int(values[even:].view(np.uint32)[0]) & 0xFFFF
    return None if found & _LOWER_HALVES else torch.from_numpy(values.view(np.int16)[1::2])


class Link:
    """Copies to host memory, in order of priority, by a thread of its own.

    Args:
        bytes_per_second: stands in for a slower link, where there is no accelerator. 0: as fast as it goes.
    """

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self.bytes_per_second = bytes_per_second
        self.logged: dict[int, CopiedGradients | None] = {}
        """By ``id`` of each optimizer whose steps a window follows: the gradients of the step that is being made, where
        a log has them copied."""
        self._moved_bytes, self._busy_seconds, self._device_rate = 0, 0.0, 0.0
        self._pinned = PinnedMemory()
        self._no_update = threading.Event()
        self._no_update.set()
        self._waiting: list[tuple[int, int, Copy]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="tierckpt-link", daemon=True)
        start_thread(self._thread)
        self._clock = time.pthread_getcpuclockid(self._thread.ident or 0)

    @property
    def measured_rate(self) -> float:
        """Bytes per second while it copied; 0 until a few chunks were. From a device, where a copy is queued behind
        compute: the best so far."""
        if self._device_rate:
            return self._device_rate
        return self._moved_bytes / self._busy_seconds if self._moved_bytes >= CHUNK_BYTES else 0.0

    def progress(self) -> tuple[int, float]:
        """Return what changes while its thread copies."""
        return self._moved_bytes, time.clock_gettime(self._clock)

    def update_begins(self) -> None:
        """An optimizer is to be stepped, by this thread."""
        self._no_update.clear()

    def update_ends(self) -> None:
        """It was stepped, or its thread waits for others."""
        self._no_update.set()

    def give_way(self) -> None:
        """Wait while an optimizer is stepped. For threads beside training, which have the time of the next forward and
        backward passes: each call into torch of an update would wait for the interpreter that they hold."""
        if not self._no_update.is_set():
            self._no_update.wait(UPDATE_SECONDS)
            self._no_update.set()  # a step that raised has not said that it ended

    def wait(self, copy: Copy) -> bool:
        """Return when the sources of ``copy`` may be written over. False when nothing moves here any more: a link that
        hangs is not waited for, and the copy is of no use."""
        self.update_ends()
        return copy.fence() or poll.wait_while([copy.done], self.progress)

    def copy(self, sources: Sequence[torch.Tensor], priority: int, *, gives_way: bool = False) -> Copy:
        """Begin to copy ``sources``. They must not be written over until the copy is done, or after ``wait``.

        From a device: on a stream of this priority, behind what the current stream has still to do.

        Args:
            gives_way: copy them when the update that is made now has ended.
        """
        if any(one.is_cuda for one in sources):
            return self._copy_from_device(sources, priority)
        made = Copy(sources, self._pinned.tensors if priority == PARTS else None, gives_way=gives_way)
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the link is closed")
            heapq.heappush(self._waiting, (priority, next(self._order), made))
            self._changed.notify()
        return made

    def _copy_from_device(self, sources: Sequence[torch.Tensor], priority: int) -> Copy:
        """Nothing here waits for a device: whether gradients have lower halves, above all, is not looked at."""
        if self._is_closed:
            raise RuntimeError("the link is closed")
        made = Copy(sources, self._pinned.tensors)
        made.allocate()
        made.on_device = Copies(made.result, sources, priority=priority - PARTS)  # the lowest number goes first
        made.on_device.run_now(lambda one: not one.is_cuda)  # counters of steps, which torch keeps on the host
        begun = time.monotonic()

        def ended(error: BaseException | None) -> None:
            self._device_rate = max(self._device_rate, made.size_bytes / (time.monotonic() - begun))
            made.copied_bytes = made.size_bytes
            if error is None:
                made.end()
            elif made.done.set_running_or_notify_cancel():
                made.done.set_exception(error)

        made.on_device.run_in_background(ended)
        return made

    def close(self) -> None:
        """Cancel what is not done, and end the thread."""
        with self._changed:
            self._is_closed = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify()
        for _, _, made in waiting:
            made.done.cancel()
        self._thread.join()
        self._pinned.close()

    def _work(self) -> None:
        free_at = time.monotonic()
        chunk_bytes = min(CHUNK_BYTES, self.bytes_per_second * CATCH_UP_SECONDS or CHUNK_BYTES)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                made = self._waiting[0][2]
            try:
                if made.gives_way:
                    self.give_way()
                targets, sources = made.next_chunk(chunk_bytes)
                if targets:
                    begun = time.monotonic()
                    size_bytes = sum(one.nbytes for one in targets)
                    if self.bytes_per_second:
                        free_at = max(free_at, time.monotonic() - CATCH_UP_SECONDS) + size_bytes / self.bytes_per_second
                        time.sleep(max(0.0, free_at - time.monotonic()))
                    torch_internals.foreach_copy(targets, sources)
                    made.copied_bytes += size_bytes
                    self._moved_bytes += size_bytes
                    self._busy_seconds += time.monotonic() - begun
                    continue
            except BaseException as error:
                self._remove(made)
                if made.done.set_running_or_notify_cancel():
                    made.done.set_exception(error)
                continue
            self._remove(made)
            made.end()

    def _remove(self, made: Copy) -> None:
        with self._changed:
            self._waiting = [one for one in self._waiting if one[2] is not made]
            heapq.heapify(self._waiting)


def host_memory(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    try:
        return [torch.empty(one.shape, dtype=one.dtype, device="cpu") for one in sources]
    except RuntimeError as error:  # torch has no type of its own for it on the host
        if "alloc" in str(error) or "memory" in str(error):
            raise MemoryError(str(error)) from error
        raise
