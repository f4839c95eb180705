"""Copies tensors to host memory in the background: gradients before parts of the state, in chunks.

One thread stands for one direction of the link between accelerator and host. A copy of a part is cut into chunks, so
that a gradient, which the next backward pass writes over, waits for one chunk and not for a part.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch

CHUNK_BYTES = 4 << 20
GRADIENTS, PARTS = 0, 1


class Copy:
    """Some tensors on their way to host memory. ``result`` is complete when ``done`` is."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self.sources = list(sources)
        self.result = host_memory(sources)
        self.done: Future[None] = Future()
        self.was_changed = False
        """Something wrote over a source before the copy was done."""
        self._versions = [one._version for one in sources]

    @property
    def size_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.result)

    def end(self) -> None:
        """All is copied."""
        changed = (one._version != version for one, version in zip(self.sources, self._versions, strict=True))
        self.was_changed = any(changed)
        self.sources.clear()
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(None)


class Link:
    """Copies to host memory, in order of priority, by a thread of its own.

    Args:
        bytes_per_second: stands in for a slower link, where there is no accelerator. 0: as fast as it goes.
    """

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self.bytes_per_second = bytes_per_second
        self.bytes_moved = 0
        self._waiting: list[tuple[int, int, Copy, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="tierckpt-link", daemon=True)
        self._thread.start()

    def copy(self, sources: Sequence[torch.Tensor], priority: int) -> Copy:
        """Begin to copy ``sources``. They must not be written over until the copy is done."""
        made = Copy(sources)
        chunks = [pair for one, two in zip(made.result, made.sources, strict=True) for pair in _chunks(one, two)]
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the link is closed")
            heapq.heappush(self._waiting, (priority, next(self._order), made, chunks[::-1]))
            self._changed.notify()
        return made

    def close(self) -> None:
        """Cancel what is not done, and end the thread."""
        with self._changed:
            self._is_closed = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify()
        for _, _, made, _ in waiting:
            made.done.cancel()
        self._thread.join()

    def _work(self) -> None:
        free_at = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                _, _, made, chunks = self._waiting[0]
                pair = chunks.pop() if chunks else None
                if not chunks:
                    heapq.heappop(self._waiting)
            try:
                if pair is not None:
                    target, source = pair
                    size_bytes = target.numel() * target.element_size()
                    if self.bytes_per_second:
                        free_at = max(free_at, time.monotonic()) + size_bytes / self.bytes_per_second
                        time.sleep(max(0.0, free_at - time.monotonic()))
                    target.copy_(source)
                    self.bytes_moved += size_bytes
            except BaseException as error:
                with self._changed, contextlib.suppress(ValueError):
                    self._waiting.remove(next(one for one in self._waiting if one[2] is made))
                    heapq.heapify(self._waiting)
                if made.done.set_running_or_notify_cancel():
                    made.done.set_exception(error)
                continue
            if not chunks:
                made.end()


def host_memory(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    try:
        return [torch.empty(one.shape, dtype=one.dtype) for one in sources]
    except RuntimeError as error:  # torch has no type of its own for it on the host
        if "alloc" in str(error) or "memory" in str(error):
            raise MemoryError(str(error)) from error
        raise


def _chunks(target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if not source.is_contiguous() or source.numel() == 0:
        return [(target, source)]
    flat_target, flat_source = target.view(-1), source.view(-1)
    count = max(1, CHUNK_BYTES // source.element_size())
    return [(flat_target[at : at + count], flat_source[at : at + count]) for at in range(0, source.numel(), count)]
