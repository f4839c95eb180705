"""SIGTERM: flush staged saves to the SSD, drain what fits into ``grace_seconds``, then end the process.

The main thread, which runs Python's handlers, may be asleep or in a collective that waits for a dead rank. So the
signal's number also arrives in a pipe, read by a thread. The first of the two starts a worker thread: the interrupted
thread may hold any lock. Then the process ends by the same signal. A signal with another handler keeps it.

``Notices`` polls a cloud's metadata address for the notice of preemption, which comes before the signal.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from weakref import WeakSet

from ..config import Settings
from ..resources import start_thread
from ..telemetry import logger

log = logger("checkpointer")


ANSWER_SECONDS = 2.0
ANSWER_BYTES_MAX = 1 << 20
TOKEN_SECONDS = 21600
GRACE_SECONDS = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""The providers' minimum notice, for a notice that states none."""
ADDRESSES = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
POLL_SECONDS = 5.0
"""AWS recommends this period."""
MEMORY_LOSS_EVENTS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""These events of Azure lose the memory. A freeze keeps it."""

NoticeCallback = Callable[[float, str], None]


class Notices:
    """Polls until a notice or ``close``. Calls back once, on its own thread."""

    def __init__(self, settings: Settings, callback: NoticeCallback) -> None:
        self._cloud = settings.preempt_notices
        self._address = ADDRESSES.get(self._cloud, "")
        self._callback = callback
        self._closed = threading.Event()
        self._has_failed = False
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        if self._cloud != "none":
            start_thread(threading.Thread(target=self._watch, name="tierckpt-notices", daemon=True))

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        poll = {"aws": self._poll_aws, "gcp": self._poll_gcp, "azure": self._poll_azure}[self._cloud]
        while not self._closed.is_set():
            try:
                seconds = poll()
                self._has_failed = False
            except (OSError, ValueError) as error:
                if not self._has_failed:
                    log.warning("%s does not report preemptions at the moment: %s", self._address, error)
                self._has_failed, seconds = True, None
            if seconds is not None:
                self._callback(seconds, f"a notice of {self._cloud}, {seconds:.0f} s ahead")
                return
            self._closed.wait(POLL_SECONDS)

    def _poll_aws(self) -> float | None:
        token = self._ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}, "PUT")
        headers = {"X-aws-ec2-metadata-token": (token or b"").decode("ascii", "replace").strip()}
        answer = self._ask("/latest/meta-data/spot/instance-action", headers)
        notice = _object(answer or b"{}")
        is_ending = notice.get("action") in ("terminate", "stop", "hibernate")
        return self._until(str(notice.get("time", ""))) if is_ending else None

    def _poll_gcp(self) -> float | None:
        answer = self._ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return GRACE_SECONDS["gcp"] if answer is not None and answer.strip() == b"TRUE" else None

    def _poll_azure(self) -> float | None:
        answer = self._ask("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
        events = _object(answer or b"{}").get("Events", [])
        ending = [one for one in events if isinstance(one, dict) and one.get("EventType") in MEMORY_LOSS_EVENTS]
        return min((self._until(str(one.get("NotBefore", ""))) for one in ending), default=None)

    def _until(self, when: str) -> float:
        try:
            at = datetime.fromisoformat(when) if when[:1].isdigit() else parsedate_to_datetime(when)
        except (ValueError, TypeError):
            return GRACE_SECONDS[self._cloud]
        at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        return max(0.0, at.timestamp() - time.time())

    def _ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> bytes | None:
        request = urllib.request.Request(self._address + path, headers=dict(headers), method=method)
        try:
            with self._opener.open(request, timeout=ANSWER_SECONDS) as answer:
                return bytes(answer.read(ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise


def _object(data: bytes) -> dict[str, Any]:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("the answer is not an object")  # noqa: TRY004  # not of a caller
    return found


class Saver(Protocol):
    grace_seconds: float

    def request_final_save(self, deadline: float, reason: str) -> None:
        """Request a last save. ``deadline`` is the end of the process (monotonic)."""

    def flush_before_exit(self, deadline: float) -> list[str]:
        """Finish running saves until ``deadline`` (monotonic). Returns a line per unfinished one."""


_savers: WeakSet[Any] = WeakSet()
_begun = threading.Lock()
"""The first signal acquires it for good."""
_exit_deadline = signal.SIGTERM
_exit_thread: threading.Thread | None = None
_watched: set[signal.Signals] = set()
_pipe: list[int] = []
"""The read end and the write end. Empty while no signal is handled."""


def watch(saver: Saver, names: tuple[str, ...] = ("SIGTERM",)) -> None:
    """Flush the saves of ``saver`` on these signals, while it lives. No effect if its grace is 0."""
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
    _savers.discard(saver)
    if not _savers and not _begun.locked() and threading.current_thread() is threading.main_thread():
        _restore_handlers()


def _listen() -> None:
    """Start the thread that reads signals. Yields to an event loop that owns the wakeup."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if previous != -1:
        signal.set_wakeup_fd(previous)
        os.close(reading)
        os.close(writing)
        return
    _pipe[:] = [reading, writing]
    start_thread(threading.Thread(target=_read_signals, args=(reading,), name="tierckpt-signals", daemon=True))


def _read_signals(reading: int) -> None:
    while numbers := os.read(reading, 64):
        for number in numbers:
            if number in _watched:
                _begin(number)
    os.close(reading)


def _restore_handlers() -> None:
    for number in tuple(_watched):
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_DFL)
    _watched.clear()
    if _pipe:
        _, writing = _pipe
        _pipe.clear()
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, writing):
            signal.set_wakeup_fd(current)
        os.close(writing)


def _on_signal(number: int, frame: Any) -> None:
    if not _pipe:
        _begin(number)


def _begin(number: int) -> None:
    global _exit_deadline, _exit_thread
    if _begun.acquire(blocking=False):
        _exit_deadline = signal.Signals(number)
        _exit_thread = threading.Thread(target=_end, name="tierckpt-sigterm", daemon=True)
        _exit_thread.start()


def is_ending() -> bool:
    return _begun.locked()


def await_end(timeout_seconds: float) -> None:
    """Wait for a signal to end the process, so that the exit status is the signal's."""
    if _exit_thread is not None and _exit_thread is not threading.current_thread():
        _exit_thread.join(timeout_seconds)


def _end() -> None:
    savers = list(_savers)
    name = _exit_deadline.name
    grace_seconds = min((saver.grace_seconds for saver in savers), default=0.0)
    deadline = time.monotonic() + grace_seconds
    log.warning("%s: up to %g s to flush the saves of %d run(s)", name, grace_seconds, len(savers))
    for saver in savers:  # each loop must reach its next step
        saver.request_final_save(deadline, name)
    for saver in savers:
        try:
            for sentence in saver.flush_before_exit(deadline):
                log.warning("%s", sentence)
        except Exception as error:
            log.error("a save was not flushed: %s", error)
    # signal.signal works only in the main thread, which may never run again.
    ctypes.pythonapi.PyOS_setsig(_exit_deadline, ctypes.c_void_p(signal.SIG_DFL))
    os.kill(os.getpid(), _exit_deadline)


def _reset_after_fork() -> None:
    """Drop the parent's saves, and its pipe, which would receive the child's signals."""
    global _begun, _exit_thread
    _begun, _exit_thread = threading.Lock(), None
    _savers.clear()
    reading = _pipe[:1]
    _restore_handlers()
    for file in reading:
        os.close(file)


os.register_at_fork(after_in_child=_reset_after_fork)
