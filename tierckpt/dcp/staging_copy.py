"""The one copy of a save: tensors, wherever they are, into staging memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import torch_internals
from ..errors import OperationTimeoutError
from ..resources import start_if_possible, start_thread
from ..save.write_ahead import WriteAhead

Pair = tuple[torch.Tensor, torch.Tensor]

MOVE_BYTES_MIN = 4 << 20
"""Each call may wait for the interpreter lock, so it copies at least this."""
MOVE_BYTES_MAX = 32 << 20


class Copies:
    """Pending copies: ``targets[i]`` from ``sources[i]``, same shape and dtype.

    The device's copy stream with the lower ``priority`` goes first.
    """

    def __init__(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        ahead: WriteAhead | None = None,
        *,
        priority: int = 0,
    ) -> None:
        self._priority = priority
        self._pairs: list[Pair] = list(zip(targets, sources, strict=True))
        self._ahead = ahead
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._events: list[Any] = []
        self._on_host = False

    def run(self) -> None:
        """Make all copies with all of torch's threads."""
        self.run_now(lambda tensor: True)
        self._done.set()
        if self._ahead is not None:
            self._ahead.start()

    def run_now(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        """Make the copies with a ``wanted`` source, complete on return; the others stay pending."""
        now = [pair for pair in self._pairs if wanted(pair[1])]
        self._pairs = [pair for pair in self._pairs if not wanted(pair[1])] if len(now) < len(self._pairs) else []
        on_device = [pair for pair in now if pair[1].is_cuda]
        events = _start_on_devices(on_device, self._priority)
        copy_tensors([pair for pair in now if not pair[1].is_cuda] if on_device else now)
        for event in events:
            event.synchronize()

    def run_in_background(self, done: Callable[[BaseException | None], None]) -> None:
        """Start the remaining copies; call ``done`` from another thread when they are complete or failed.

        Until then the sources must not change; ``wait`` is the fence.
        """
        on_device = [pair for pair in self._pairs if pair[1].is_cuda]
        on_host = [pair for pair in self._pairs if not pair[1].is_cuda]
        self._pairs = []
        self._on_host = bool(on_host)
        self._events = _start_on_devices(on_device, self._priority)

        def work() -> None:
            try:
                copy_in_background(on_host)
                for event in self._events:
                    event.synchronize()
            except BaseException as error:
                self._error = error
            self._done.set()
            done(self._error)

        start_thread(threading.Thread(target=work, name="tierckpt-stage", daemon=True))

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the sources may change. Raises the error of a failed copy, which is then lost.

        For copies on a device, its current stream waits instead of this thread.
        """
        if self._events and not self._on_host:
            for event in self._events:
                torch.cuda.current_stream(event.device).wait_event(event)
            return
        try:
            self._done.wait(timeout_seconds)
        finally:
            if not self._done.is_set():
                # The caller may now change the sources: the copy must not become a checkpoint.
                self._error = OperationTimeoutError(
                    "the copies to staging memory have not ended",
                    hint="Look for a hung device; the checkpoint that was being staged is lost",
                    waited_seconds=timeout_seconds,
                )
        if self._error is not None:
            raise self._error


def copy_tensors(pairs: Sequence[Pair]) -> None:
    """Copy large tensors by memmove, which takes less CPU time, all others in one call of torch."""
    large: list[Pair] = []
    rest: list[Pair] = []
    for pair in pairs:
        (large if pair[1].nbytes >= MOVE_BYTES_MIN and _is_bytes(pair[1]) else rest).append(pair)
    if large:
        move_all(large, torch.get_num_threads())
    if rest:
        with torch.no_grad():
            torch_internals.foreach_copy([target for target, _ in rest], [source for _, source in rest])


def move_all(pairs: Sequence[Pair], count: int) -> None:
    pieces = deque(
        (target.data_ptr() + at, source.data_ptr() + at, min(MOVE_BYTES_MAX, source.nbytes - at))
        for target, source in pairs
        for at in range(0, source.nbytes, MOVE_BYTES_MAX)
    )

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                ctypes.memmove(*pieces.popleft())

    threads = [threading.Thread(target=work, name="tierckpt-stage") for _ in range(min(count, len(pieces)) - 1)]
    try:
        all(start_if_possible(thread) for thread in threads)  # the started ones copy all
        work()
    finally:  # after an interrupt, too: returned memory must not be written
        pieces.clear()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _is_bytes(source: torch.Tensor) -> bool:
    """A freed storage has no address."""
    is_plain = source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg()
    return is_plain and source.data_ptr() != 0


def copy_in_background(pairs: Sequence[Pair]) -> None:
    """Copy on one thread: torch's pool belongs to the training step."""
    for target, source in pairs:
        if _is_bytes(source):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            with torch.no_grad():
                target.copy_(source)


def _start_on_devices(pairs: Sequence[Pair], priority: int) -> list[Any]:
    by_device: dict[torch.device, list[Pair]] = {}
    for pair in pairs:
        by_device.setdefault(pair[1].device, []).append(pair)
    return [_start_on_device(device, group, priority) for device, group in by_device.items()]


def _start_on_device(device: torch.device, pairs: Sequence[Pair], priority: int) -> Any:
    """Queue copies on their own stream, after the current stream's pending work."""
    stream = _stream_of(device, priority)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.no_grad():
        targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
        torch_internals.foreach_copy(targets, sources, non_blocking=True)
        for _, source in pairs:
            source.record_stream(stream)  # freed while the copy runs, it must not be reused
        return stream.record_event()


streams: dict[tuple[torch.device, int], Any] = {}


def _stream_of(device: torch.device, priority: int) -> Any:
    if (device, priority) not in streams:
        streams[device, priority] = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    return streams[device, priority]
