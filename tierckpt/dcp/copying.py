"""The one copy of a save: tensors, wherever they are, into staging memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import OperationTimeoutError
from ..mover.ahead import Ahead

Pair = tuple[torch.Tensor, torch.Tensor]


class Copies:
    """Copies still to be made: ``targets[i]`` from ``sources[i]``, same shape and dtype."""

    def __init__(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], ahead: Ahead | None = None
    ) -> None:
        self._pairs: list[Pair] = list(zip(targets, sources, strict=True))
        self._ahead = ahead
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._events: list[Any] = []
        self._on_host = False

    def run(self) -> None:
        """Make all copies, with every thread torch may use. Returns when they are complete."""
        self.run_now(lambda tensor: True)
        self._done.set()
        if self._ahead is not None:
            self._ahead.start()

    def run_now(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        """Make the copies whose source is ``wanted``, complete on return; the others stay to be made."""
        now = [pair for pair in self._pairs if wanted(pair[1])]
        self._pairs = [pair for pair in self._pairs if not wanted(pair[1])] if len(now) < len(self._pairs) else []
        on_device = [pair for pair in now if pair[1].is_cuda]
        events = _start_on_devices(on_device)
        _copy([pair for pair in now if not pair[1].is_cuda] if on_device else now)
        for event in events:
            event.synchronize()

    def run_in_background(self, done: Callable[[BaseException | None], None]) -> None:
        """Start the copies that are left, and call ``done`` from another thread when they are complete or failed.

        Until then nobody may change the sources; ``wait`` is the fence.
        """
        on_device = [pair for pair in self._pairs if pair[1].is_cuda]
        on_host = [pair for pair in self._pairs if not pair[1].is_cuda]
        self._pairs = []
        self._on_host = bool(on_host)
        self._events = _start_on_devices(on_device)

        def work() -> None:
            try:
                _copy_beside_training(on_host)
                for event in self._events:
                    event.synchronize()
            except BaseException as error:
                self._error = error
            self._done.set()
            done(self._error)

        threading.Thread(target=work, name="tierckpt-stage", daemon=True).start()

    def wait(self, timeout_seconds: float) -> None:
        """Return when the sources may change. Raises what went wrong with a copy, which is then lost.

        Copies on a device are not waited for by this thread: what it starts on that device's current stream from now
        on is.
        """
        if self._events and not self._on_host:
            for event in self._events:
                torch.cuda.current_stream(event.device).wait_event(event)
            return
        try:
            self._done.wait(timeout_seconds)
        finally:
            if not self._done.is_set():
                # Whoever waited goes on and may change the sources under the copy: it must not become a checkpoint.
                self._error = OperationTimeoutError(
                    "the copies to staging memory have not ended",
                    hint="Look for a hung device; the checkpoint that was being staged is lost",
                    waited_seconds=timeout_seconds,
                )
        if self._error is not None:
            raise self._error


def _copy(pairs: Sequence[Pair]) -> None:
    """One call for all of them: torch copies each with all its threads, and no Python runs in between."""
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _copy_beside_training(pairs: Sequence[Pair]) -> None:
    """One thread, and torch's own only where it must be: its thread pool belongs to the training step."""
    for target, source in pairs:
        if source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg():
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            with torch.no_grad():
                target.copy_(source)


def _start_on_devices(pairs: Sequence[Pair]) -> list[Any]:
    """Start the copies from every device there is. Returns one event for each device."""
    by_device: dict[torch.device, list[Pair]] = {}
    for pair in pairs:
        by_device.setdefault(pair[1].device, []).append(pair)
    return [_start_on_device(device, group) for device, group in by_device.items()]


def _start_on_device(device: torch.device, pairs: Sequence[Pair]) -> Any:
    """Queue copies on a stream of their own, after what the current stream has still to do. Returns their event."""
    stream = _stream_of(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.no_grad():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs], non_blocking=True)
        for _, source in pairs:
            source.record_stream(stream)  # freed while the copy runs, it must not be handed out again
        return stream.record_event()


_streams: dict[torch.device, Any] = {}


def _stream_of(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
