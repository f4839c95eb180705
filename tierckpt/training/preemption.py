"""SIGTERM: what is staged reaches the SSD, and as much as can be reaches shared storage, before the process ends.

A scheduler that takes a node back sends SIGTERM and, after a grace period, SIGKILL. The handler is installed with the
first Checkpointer, in the main thread, and only where nobody else handles the signal. It does not do the work itself:
the interrupted thread may hold any lock. A thread of its own does, while training goes on; then the process ends by the
same signal, so that whoever started it sees the status it expects. A second SIGTERM meanwhile changes nothing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, Protocol
from weakref import WeakSet

from ..telemetry import logger

log = logger("checkpointer")

END_SECONDS = 2.0
"""How long the main thread has to run the handler a second time; it may be inside a long call of another library."""


class Saver(Protocol):
    """What a SIGTERM concerns."""

    grace_seconds: float

    def bring_to_safety(self, deadline: float) -> list[str]:
        """Finish what is under way until ``deadline`` (monotonic). Returns a sentence for each thing that is left."""


_savers: WeakSet[Any] = WeakSet()
_state = {"ending": False, "done": False}


def watch(saver: Saver) -> None:
    """Have a SIGTERM bring the saves of ``saver`` to safety, while it lives. Does nothing with a grace of 0."""
    if saver.grace_seconds <= 0:
        return
    _savers.add(saver)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_signal)


def forget(saver: Saver) -> None:
    """``saver`` is closed. With the last one the signal is again what it was."""
    _savers.discard(saver)
    if _savers or _state["ending"] or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_signal(number: int, frame: Any) -> None:
    if _state["done"]:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    elif not _state["ending"]:
        _state["ending"] = True
        threading.Thread(target=_end, name="tierckpt-sigterm", daemon=True).start()


def _end() -> None:
    savers = list(_savers)
    grace_seconds = min((saver.grace_seconds for saver in savers), default=0.0)
    deadline = time.monotonic() + grace_seconds
    log.warning("SIGTERM: up to %g s to bring %d run(s) to safety", grace_seconds, len(savers))
    for saver in savers:
        try:
            for sentence in saver.bring_to_safety(deadline):
                log.warning("%s", sentence)
        except Exception as error:
            log.error("a save did not reach safety: %s", error)
    _state["done"] = True
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(128 + signal.SIGTERM)


def _start_anew() -> None:
    """In a forked child: the parent's saves are not ours, and a SIGTERM ends us as it would any process."""
    _savers.clear()
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_start_anew)
