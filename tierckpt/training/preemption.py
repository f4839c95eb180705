"""SIGTERM: within ``grace_seconds`` what is staged reaches the SSD, and as much as can be shared storage. Then it ends.

Whether all ranks save once more is decided in final_save.py; ``Checkpointer.flush_before_exit`` finishes the saves.

A scheduler that takes a node back sends SIGTERM (or what Slurm's ``--signal`` asks for) and, after a grace period,
SIGKILL. The handlers are installed with the first Checkpointer, in the main thread, and only where nobody else handles
the signal. Python runs handlers between two bytecodes of the main thread, which may be inside a collective that waits
for a rank that is gone, or asleep: so the signal's number also arrives, at once, in a pipe that a thread of ours reads
(``signal.set_wakeup_fd``). Whichever comes first starts the thread that does the work, while training goes on; the
interrupted thread, which may hold any lock, does none of it. Then the process ends by the same signal, so that whoever
started it sees the status it expects. A second signal meanwhile changes nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any, Protocol
from weakref import WeakSet

from ..resources import start_thread
from ..telemetry import logger

log = logger("checkpointer")


class Saver(Protocol):
    """What such a signal concerns."""

    grace_seconds: float

    def request_final_save(self, deadline: float, reason: str) -> None:
        """Note that the process ends by ``deadline`` (monotonic), so that the training loop can save once more."""

    def flush_before_exit(self, deadline: float) -> list[str]:
        """Finish what is under way until ``deadline`` (monotonic). Returns a sentence for each thing that is left."""


_savers: WeakSet[Any] = WeakSet()
_begun = threading.Lock()
"""Taken for good by the first signal, and only ever tried: nothing waits for it."""
_ending_by = signal.SIGTERM
_ender: threading.Thread | None = None
_watched: set[signal.Signals] = set()
_pipe: list[int] = []
"""The wakeup descriptor's pipe: where to read, where to write. Empty while nothing is watched."""


def watch(saver: Saver, names: tuple[str, ...] = ("SIGTERM",)) -> None:
    """Have the signals ``names`` bring the saves of ``saver`` to safety, while it lives. Nothing with a grace of 0."""
    if saver.grace_seconds <= 0:
        return
    _savers.add(saver)
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.Signals[name] for name in names):
        if signal.getsignal(number) is signal.SIG_DFL:
            if not _pipe:
                _listen()
            signal.signal(number, _on_signal)
            _watched.add(number)


def forget(saver: Saver) -> None:
    """``saver`` is closed. With the last one the signals are again what they were."""
    _savers.discard(saver)
    if not _savers and not _begun.locked() and threading.current_thread() is threading.main_thread():
        _let_go()


def _listen() -> None:
    """Start the thread that hears of a signal while the main thread cannot. Yields to a loop that has the wakeup."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if previous != -1:
        signal.set_wakeup_fd(previous)
        os.close(reading)
        os.close(writing)
        return
    _pipe[:] = [reading, writing]
    start_thread(threading.Thread(target=_hear, args=(reading,), name="tierckpt-signals", daemon=True))


def _hear(reading: int) -> None:
    while numbers := os.read(reading, 64):
        for number in numbers:
            if number in _watched:
                _begin(number)
    os.close(reading)


def _let_go() -> None:
    """Give back the signals, and the pipe, at whose end the thread ends."""
    for number in tuple(_watched):
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_DFL)
    _watched.clear()
    if _pipe:
        _, writing = _pipe
        _pipe.clear()
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, writing):
            signal.set_wakeup_fd(current)  # somebody's loop has taken it since
        os.close(writing)


def _on_signal(number: int, frame: Any) -> None:
    if not _pipe:
        _begin(number)


def _begin(number: int) -> None:
    global _ending_by, _ender
    if _begun.acquire(blocking=False):
        _ending_by = signal.Signals(number)
        _ender = threading.Thread(target=_end, name="tierckpt-sigterm", daemon=True)
        _ender.start()


def is_ending() -> bool:
    """True from when a signal was heard."""
    return _begun.locked()


def await_end(timeout_seconds: float) -> None:
    """After a signal, wait until it has ended the process, so that the exit status is the signal's."""
    if _ender is not None and _ender is not threading.current_thread():
        _ender.join(timeout_seconds)


def _end() -> None:
    savers = list(_savers)
    name = _ending_by.name
    grace_seconds = min((saver.grace_seconds for saver in savers), default=0.0)
    deadline = time.monotonic() + grace_seconds
    log.warning("%s: up to %g s to bring %d run(s) to safety", name, grace_seconds, len(savers))
    for saver in savers:  # all of them first: their loops have to come to their next step
        saver.request_final_save(deadline, name)
    for saver in savers:
        try:
            for sentence in saver.flush_before_exit(deadline):
                log.warning("%s", sentence)
        except Exception as error:
            log.error("a save did not reach safety: %s", error)
    # signal.signal is refused outside the main thread, which may never run Python again.
    ctypes.pythonapi.PyOS_setsig(_ending_by, ctypes.c_void_p(signal.SIG_DFL))
    os.kill(os.getpid(), _ending_by)


def _start_anew() -> None:
    """In a forked child: the parent's saves are not ours, its pipe would tell it of our signals."""
    global _begun, _ender
    _begun, _ender = threading.Lock(), None
    _savers.clear()
    reading = _pipe[:1]
    _let_go()
    for file in reading:
        os.close(file)


os.register_at_fork(after_in_child=_start_anew)
