"""Locks between processes of one node, which end with their holder: a crash leaves nothing to clean up.

K1  At most one holder of a path at a time, also between tasks and threads of one process.
K2  Released when the block ends, even if a child forked in it has a copy of the descriptor.
K3  With ``remove`` the file is removed with the lock. A process that locks a removed file does not hold the lock.
K4  A process that receives the descriptor keeps the lock if the first holder is killed, not if it releases it.
K5  A forked child holds no lock of its parent, and releases none: its copies are closed at the fork.

Claims are byte locks that assign work to one process:

C1  A claim is a lock on one byte (fcntl(2), F_OFD_SETLK): one open file has it, in all containers of the host, and
    the kernel frees it when the process ends.
C2  A forked child holds no claim of its parent.
C3  A claim saves work and protects no data. On a file system without locks, each process gets each claim.
C4  A ``HostLease`` ends when its holder releases it, or has not written for ``SILENT_SECONDS``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import OperationTimeoutError, StoreError
from ..ownership import file_mode
from ..poll import BRIEF, Poll
from ..resources import start_thread
from ..telemetry import logger
from ..types import Tier
from .durable import closing_file, translated, write_new
from .processes import host_id
from .quarantine import open_regular

log = logger("disk")


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EPERM, errno.EACCES}

_FLOCK = struct.Struct("hhqqi4x")
"""The kernel's 64-bit ``struct flock``: type, whence, start, length, pid."""

_files: set[int] = set()
"""Descriptors that may hold a lock, except inherited ones."""


@dataclass(frozen=True, slots=True)
class LockAttempt:
    is_held: bool
    descriptor: int
    """A process that receives it inherits the lock (K4)."""

    def __bool__(self) -> bool:
        return self.is_held


@contextmanager
def try_lock(
    path: Path, *, remove: bool = False, is_shared: bool = False, inherited: int | None = None
) -> Iterator[LockAttempt]:
    """Yield a true ``LockAttempt`` while holding ``path``, or at once a false one if another holder has it.

    ``is_shared``: with other holders; with ``remove`` the last of them removes the file. ``inherited``: the descriptor
    of a holder that may be dead (K4); closed at the end.
    """
    file, pid = open_lock(path) if inherited is None else inherited, os.getpid()
    is_held = False
    try:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            is_held = _is_file(file, path)  # K3
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise StoreError(
                f"{path}: the file system has no file locks (flock: {error.strerror})",
                hint="Set TIERCKPT_LOCAL_ROOT (or local_root=) to a directory on a disk of this node",
                path=path,
                tier=Tier.LOCAL,
                errno=error.errno,
            ) from error
        yield LockAttempt(is_held, file)
    finally:
        if os.getpid() == pid:  # K5: an unlock in a child would release the parent's
            try:
                if is_held and remove:
                    with suppress(OSError):  # if the file stays, the next holder locks it
                        if is_shared:
                            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if there is another holder
                        if not is_shared or _is_file(file, path):  # the change to EX released SH for an instant
                            path.unlink()
            finally:
                with suppress(OSError):  # closing releases it, too, unless a child has a copy
                    fcntl.flock(file, fcntl.LOCK_UN)  # K2
                close_lock(file)


@contextmanager
def lock(path: Path, timeout_seconds: float, what: str) -> Iterator[None]:
    for _ in Poll(timeout_seconds, BRIEF):
        with try_lock(path) as is_held:
            if is_held:
                yield
                return
    raise _timeout_error(timeout_seconds, what)


@asynccontextmanager
async def lock_async(path: Path, timeout_seconds: float, what: str) -> AsyncIterator[None]:
    """``lock`` for coroutines; the file is removed with the lock."""
    async for _ in Poll(timeout_seconds, BRIEF):
        with try_lock(path, remove=True) as is_held:
            if is_held:
                yield
                return
    raise _timeout_error(timeout_seconds, what)


def _timeout_error(timeout_seconds: float, what: str) -> OperationTimeoutError:
    return OperationTimeoutError(
        f"another process of this node has locked {what} for {timeout_seconds:g} s",
        hint="Look for a hung tierckpt process on this node",
        tier=Tier.LOCAL,
    )


def lock_record(file: int, kind: int, offset: int = 0, *, is_process: bool = False) -> bool:
    """Set byte ``offset`` to ``fcntl.F_WRLCK``, ``F_RDLCK`` or ``F_UNLCK``. False if another holder conflicts.

    The lock ends with the open file, which forked children share; with ``is_process``, with this process, or when it
    closes any descriptor of the file. Never blocks. Cost: 1 microsecond.
    """
    try:
        command = fcntl.F_SETLK if is_process else fcntl.F_OFD_SETLK
        fcntl.fcntl(file, command, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def record_holder(file: int, offset: int = 0, *, is_process: bool = False) -> int | None:
    """Return the process that locks byte ``offset``; negative if unknown. Takes no lock."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    answer = fcntl.fcntl(file, fcntl.F_GETLK if is_process else fcntl.F_OFD_GETLK, request)
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return int(pid) if kind != fcntl.F_UNLCK else None


def open_lock(path: Path, mode: int = 0o600) -> int:
    """A forked child closes its copy (K5)."""
    file = open_regular(path, os.O_RDWR | os.O_CREAT, mode)
    _files.add(file)
    return file


def close_lock(file: int) -> None:
    _files.discard(file)
    os.close(file)


def _reset_after_fork() -> None:
    for file in _files:
        with suppress(OSError):
            os.close(file)
    _files.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


def _is_file(file: int, path: Path) -> bool:
    """If inode numbers change at each stat (FUSE), any name of ``file`` counts."""
    try:
        status = os.fstat(file)
        if os.path.samestat(status, path.lstat()):
            return True
        return os.fstat(file).st_ino != status.st_ino and status.st_nlink > 0
    except OSError:
        return False


HEARTBEAT_SECONDS = 2.0
SILENT_SECONDS = 20.0
"""Ten heartbeats: a process short of processor time is not dead."""
LEASE_ATTEMPTS = 100
NAME_BYTES_MAX = 1024


class Claims:
    """Claims on the bytes of the file ``path``. Thread-safe. Close it. Cost of a call: 1 microsecond."""

    def __init__(self, path: Path) -> None:
        self._file, self._pid = open_lock(path, file_mode(path)), os.getpid()
        self._taken: set[int] = set()
        self._lock = threading.Lock()
        self.has_locks = True

    def take(self, offset: int) -> bool:
        """False if any other claim, also of this process, has the byte."""
        if self._pid != os.getpid():
            return True  # as without locks (C3): the descriptor was closed at the fork (C2)
        with self._lock:
            if offset in self._taken or not self._set(fcntl.F_WRLCK, offset):
                return False
            self._taken.add(offset)
            return True

    def share(self, offset: int) -> bool:
        return self._set(fcntl.F_RDLCK, offset)

    def release(self, offset: int) -> None:
        if self._pid != os.getpid():
            return  # in a fork the descriptor may be another file's by now
        with self._lock:
            self._taken.discard(offset)
            self._set(fcntl.F_UNLCK, offset)

    def held(self, start: int, stop: int) -> list[int]:
        own = [offset for offset in tuple(self._taken) if start <= offset < stop]
        return sorted({*own, *locked(self._file, start, stop)})

    def close(self) -> None:
        """Release every claim. Idempotent; no effect in a forked child."""
        if self._file >= 0 and self._pid == os.getpid():
            with contextlib.suppress(OSError):  # a child forked by C code may have a copy of the descriptor
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
            close_lock(self._file)
            self._file = -1

    def _set(self, kind: int, offset: int) -> bool:
        try:
            return lock_record(self._file, kind, offset)
        except OSError as error:  # C3
            if self.has_locks:
                log.debug("no file locks here, so claims are not exclusive: %s", error)
            self.has_locks = False
        return True


def locked(file: int, start: int, stop: int) -> list[int]:
    """Return the bytes of a range locked by other open files. Cost: a system call per lock and per gap."""
    found: list[int] = []
    ranges = [(start, stop)]
    with contextlib.suppress(OSError):
        while ranges:
            first, end = ranges.pop()
            if first >= end:
                continue
            question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, end - first, 0)
            kind, _, offset, size, _ = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, question))
            if kind != fcntl.F_UNLCK:
                last = offset + size if size else end
                found += range(max(first, offset), min(last, end))
                ranges += [(first, offset), (last, end)]
    return found


def holder_name(*, has_locks: bool) -> str:
    return f"{host_id()}" if has_locks else f"{host_id()}-{secrets.token_hex(4)}"


class HostLease:
    """A lease by the file ``path``, held by all processes of a host together. Blocking."""

    def __init__(self, path: Path, holder: str) -> None:
        self._path, self._holder = path, holder.encode()
        self._file, self._pid = -1, os.getpid()
        self._seen_ns, self._seen_at = 0, 0.0
        self._is_over = threading.Event()

    def take(self) -> bool:
        """Hold the lease until ``release``; False while another holder has it. Idempotent.

        Raises ObjectNotFoundError: no directory. StoreError, PermissionDeniedError: the file is inaccessible.
        """
        with translated(self._path):
            for _ in range(LEASE_ATTEMPTS if self._file < 0 else 0):
                with contextlib.suppress(FileExistsError):
                    write_new(self._path, self._holder, file_mode(self._path), is_durable=False)
                if (found := self._read()) is None:
                    continue
                holder, written_ns = found
                if holder == self._holder:
                    with contextlib.suppress(FileNotFoundError):  # another process of this host has released it
                        self._begin()
                        break
                elif not self._is_silent(written_ns) or not self._overtake(holder, written_ns):
                    break
        return self._file >= 0

    def is_held_elsewhere(self) -> bool:
        try:
            with translated(self._path):
                found = self._read()
                return found is not None and found[0] != self._holder and not self._is_silent(found[1])
        except OSError:
            return True  # unknown: assume yes

    def release(self, *, is_last: bool = True) -> None:
        """``is_last``: no other process of the holder needs it. Idempotent."""
        if self._file < 0 or self._pid != os.getpid():
            return
        self._is_over.set()
        with contextlib.suppress(OSError):
            if is_last and os.path.samestat(os.fstat(self._file), self._path.lstat()):
                self._path.unlink()
        os.close(self._file)
        self._file = -1

    def _begin(self) -> None:
        self._file = open_regular(self._path, os.O_WRONLY)
        os.pwrite(self._file, self._holder, 0)
        self._is_over = threading.Event()
        beat = threading.Thread(
            target=self._heartbeat, args=(self._file, self._is_over), name="tierckpt-lease", daemon=True
        )
        start_thread(beat)

    def _heartbeat(self, file: int, is_over: threading.Event) -> None:
        while not is_over.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # others then see no heartbeat
                os.pwrite(file, self._holder, 0)  # some file systems set no times; does not recreate a removed file

    def _read(self) -> tuple[bytes, int] | None:
        """Opens the file: a network mount may cache its ``stat`` for a minute."""
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return None
        except PermissionError:
            return b"", self._path.lstat().st_mtime_ns
        with closing_file(file):
            return os.read(file, NAME_BYTES_MAX), os.fstat(file).st_mtime_ns

    def _is_silent(self, written_ns: int) -> bool:
        """By this host's clock; at the first check by the file system's, which may differ."""
        now = time.monotonic()
        if written_ns == self._seen_ns:
            return now - self._seen_at > SILENT_SECONDS
        is_first, self._seen_ns, self._seen_at = self._seen_ns == 0, written_ns, now
        if not is_first:
            return False
        probe = self._sibling(secrets.token_hex(4))
        write_new(probe, b"", is_durable=False)
        age_ns = probe.stat().st_mtime_ns - written_ns
        probe.unlink(missing_ok=True)
        return age_ns > SILENT_SECONDS * 1e9

    def _overtake(self, holder: bytes, written_ns: int) -> bool:
        # The right to remove that lease: only one host creates this file.
        takeover_mark = self._sibling(f"{written_ns:x}")
        try:
            write_new(takeover_mark, b"", is_durable=False)
        except FileExistsError:
            if time.monotonic() - self._seen_at < 2 * SILENT_SECONDS:  # else that host died here
                return False
        self._path.unlink(missing_ok=True)
        log.info("taking over %s from host %s, which is silent", self._path, holder.decode())
        return True

    def _sibling(self, suffix: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{suffix}")
