"""A circuit breaker for the node's agent: a process waits only once for an unresponsive agent.

An agent that does not answer costs ``PATIENCE_SECONDS`` once. Then callers do its work themselves, and a thread waits
for an answer. That thread kills an agent that is silent for ``HUNG_SECONDS``, or stopped for ``STOPPED_SECONDS``: it
owns journal entries that no other process may drain, and locks that saves wait for. The next agent continues from the
journal (P6). An agent of uncertain identity (another container's) is left alone, and not used.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from enum import Enum
from pathlib import Path
from typing import Protocol

from ..disk.durable import read_whole
from ..errors import TierckptError
from ..format.layout import agent_dir
from ..poll import Pauses, Poll
from ..resources import start_if_possible
from ..telemetry import logger

log = logger("agent")

LOCK = "agent.lock"
"""Held by the running agent, with its process id."""
PATIENCE_SECONDS = 0.4
STARVED_SECONDS = 2.0
STARVED_SHARE = 0.5
"""Share of the time awake that a starved process waits for a processor."""
HUNG_SECONDS = 20.0
STOPPED_SECONDS = 3.0
PROBE_PAUSES = Pauses(0.5, 60.0)


class AgentAnswer(Enum):
    """``SILENT``: one runs but does not answer."""

    YES, SILENT, FAILED = range(3)


class Probe(Protocol):
    def __call__(self, timeout_seconds: float, *, start: bool) -> AgentAnswer:
        """Request an answer. If no agent runs and ``start`` is false, the answer is YES."""


class AgentBreaker:
    def __init__(self, local_root: Path) -> None:
        self._local_root = local_root
        self._lock = threading.Lock()
        self.is_open = False

    def open(self, reason: str, probe: Probe, *, start: bool) -> None:
        """Log once that the agent does not answer. A thread waits for it, or starts one (``start``)."""
        with self._lock:
            if self.is_open:
                return
            self.is_open = True
        log.warning(
            "the agent of %s does not answer (%s): this process does without it until it does", self._local_root, reason
        )
        waits = threading.Thread(target=self._await, args=(probe, start), name="tierckpt-breaker", daemon=True)
        if not start_if_possible(waits):
            with self._lock:
                self.is_open = False

    def _await(self, probe: Probe, start: bool) -> None:
        poll = Poll(pauses=PROBE_PAUSES)
        started_at = silent_since = time.monotonic()
        while (answer := probe(STOPPED_SECONDS, start=start)) is not AgentAnswer.YES:
            if answer is not AgentAnswer.SILENT:
                silent_since = time.monotonic()
            elif self._end_hung(time.monotonic() - silent_since):
                start = True  # it had work to do
                continue
            poll.pause()
        self.is_open = False
        log.info("the agent of %s answers after %.1f s", self._local_root, time.monotonic() - started_at)

    def _end_hung(self, silent_seconds: float) -> bool:
        pid = kill_agent(self._local_root, only_stopped=silent_seconds < HUNG_SECONDS)
        if pid is not None:
            log.warning(
                "the agent of %s (process %d) did not respond for %.0f s and was killed; the next one continues",
                self._local_root,
                pid,
                silent_seconds,
            )
        return pid is not None


LOCK_BYTES_MAX = 64


def kill_agent(local_root: Path, *, only_stopped: bool = False) -> int | None:
    """Kill the process that holds the agent's lock. Returns its id; None if uncertain.

    The id in the lock file may be old, or another container's: the process must have that very file open. A pidfd
    protects a process that reuses the id.
    """
    lock = agent_dir(local_root) / LOCK
    with contextlib.suppress(OSError, ValueError, TierckptError):
        pid = int(read_whole(lock, LOCK_BYTES_MAX))
        pidfd = os.pidfd_open(pid)
        try:
            is_meant = pid != os.getpid() and (not only_stopped or _is_stopped(pid)) and _has_open(pid, lock)
            if is_meant and not _has_ended(pidfd):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return pid
        finally:
            os.close(pidfd)
    return None


def _has_open(pid: int, path: Path) -> bool:
    expected = path.stat()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(file.stat(), expected):
                return True
    return False


def _is_stopped(pid: int) -> bool:
    """True after SIGSTOP or a similar signal. A debugger stops a process differently."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] == "T"


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class Starvation:
    def __init__(self, pid: int) -> None:
        self._pid, self._begun, self._waits_before = pid, time.monotonic(), _waited_seconds(pid)

    def is_seen(self) -> bool:
        elapsed, now = time.monotonic() - self._begun, _waited_seconds(self._pid)
        return any(
            waited - self._waits_before.get(task, waited) > STARVED_SHARE * elapsed for task, waited in now.items()
        )


def _waited_seconds(pid: int) -> dict[str, float]:
    waited = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                waited[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waited if pid > 0 else {}
