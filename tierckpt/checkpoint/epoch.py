"""The epoch of a run on this node: fences a restarted job off from the saves of its earlier start.

A run has one file with the random name of its epoch and two record locks, which end with the process; a fork does not
inherit them.

    F1  An epoch begins only under the exclusive lock ALIVE: no trainer of the run lives on this node. So a second rank
        of a job, or a reader, fences nothing.
    F2  A staged save compares its epoch and commits under the lock COMMIT. An epoch begins under the same lock, so the
        new process sees the commit, or the commit is refused.
    F3  A process that holds COMMIT for longer than a trainer waits is killed, as by any other crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..disk.durable import closing_file, make_dirs
from ..disk.file_lock import lock_record, record_holder
from ..disk.quarantine import open_regular
from ..errors import CommitAbandonedError, TierckptError
from ..format.layout import Location, agent_dir, epoch_file
from ..ipc.agent_client import PATIENCE_SECONDS
from ..poll import BRIEF, Poll
from ..telemetry import logger

log = logger("commit")

ALIVE, COMMIT = 0, 1
"""Locked bytes of the file. The trainers of the run share ALIVE; one committing process holds COMMIT."""
COMMIT_SECONDS = 60.0
EPOCH_BYTES = 16


@dataclass(eq=False)
class _Run:
    """Its file is never closed: closing it would release the locks."""

    file: int
    is_joined: bool = False
    begun: bytes = b""


runs: dict[Path, _Run] = {}
_lock = threading.RLock()


def enter(local_root: Path, run: Location, *, trains: bool) -> None:
    """Begin a new epoch of ``run`` if it has no live trainer on this node. ``trains``: this process saves to it.

    Call it before the search for the newest commit. Waits ``PATIENCE_SECONDS`` at most, and for a process that it
    kills.
    """
    if not trains and not agent_dir(local_root).exists():
        return
    try:
        with _lock:
            found = _open(local_root, run)
            if found.is_joined:
                return
            if lock_record(found.file, fcntl.F_WRLCK, ALIVE, is_process=True):
                _begin(found, run)
                lock_record(found.file, fcntl.F_RDLCK if trains else fcntl.F_UNLCK, ALIVE, is_process=True)
            elif trains:
                _wait_for(found.file, ALIVE, fcntl.F_RDLCK, PATIENCE_SECONDS)  # another rank is beginning it
            found.is_joined = trains
    except (OSError, TierckptError) as error:
        log.warning("%s: a staged save of an earlier start may still commit: %s", run.uri, error)


def current(local_root: Path, run: Location) -> str:
    """Return the epoch of ``run``, '' before the first. Raises OSError, PermissionDeniedError."""
    with _lock:
        return os.pread(_open(local_root, run).file, EPOCH_BYTES, 0).decode("ascii", "replace")


@contextlib.contextmanager
def committing(local_root: Path, run: Location, epoch: str) -> Iterator[None]:
    """Commit a save that was staged in ``epoch`` (F2). Raises CommitAbandonedError after a later start of the job."""
    with _lock:
        file = _open(local_root, run).file
    if not _wait_for(file, COMMIT, fcntl.F_WRLCK, COMMIT_SECONDS):
        raise CommitAbandonedError(f"{run.uri}: another process has been committing for {COMMIT_SECONDS:g} s")
    try:
        if current(local_root, run) != epoch:
            raise CommitAbandonedError(
                f"{run.uri} was started again on this node since this was staged, and went on without it",
                hint="No action is needed: the running job saves these steps",
            )
        yield
    finally:
        lock_record(file, fcntl.F_UNLCK, COMMIT, is_process=True)


def _begin(found: _Run, run: Location) -> None:
    before = os.pread(found.file, EPOCH_BYTES, 0)
    if before and before == found.begun:
        return  # no later trainer, so no later staged save
    if not _wait_for(found.file, COMMIT, fcntl.F_WRLCK, PATIENCE_SECONDS):
        holder = _committing_process(found.file)
        log.warning("%s: process %d, which commits an old save of it, takes too long and is ended", run.uri, holder)
        if holder > 0:
            _kill(holder, found.file)
        _wait_for(found.file, COMMIT, fcntl.F_WRLCK, PATIENCE_SECONDS)
    try:
        found.begun = secrets.token_hex(EPOCH_BYTES // 2).encode()
        os.pwrite(found.file, found.begun, 0)  # no fsync: a power cut loses staged saves as well
    finally:
        lock_record(found.file, fcntl.F_UNLCK, COMMIT, is_process=True)


def _open(local_root: Path, run: Location) -> _Run:
    path = epoch_file(local_root, run)
    if path not in runs:
        make_dirs(path.parent)
        runs[path] = _Run(open_regular(path, os.O_RDWR | os.O_CREAT))
    return runs[path]


def _wait_for(file: int, byte: int, kind: int, timeout_seconds: float) -> bool:
    return any(lock_record(file, kind, byte, is_process=True) for _ in Poll(timeout_seconds, BRIEF))


def _committing_process(file: int) -> int:
    """Return 0 also if it is in another container."""
    return max(0, record_holder(file, COMMIT, is_process=True) or 0)


def _kill(pid: int, file: int) -> None:
    with contextlib.suppress(OSError), closing_file(os.pidfd_open(pid)) as pidfd:
        if _committing_process(file) == pid:  # the pidfd refers to that process, even if its pid is reused
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    for run in runs.values():
        os.close(run.file)  # the parent keeps its locks
    runs.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
