"""Locks between processes of one node, which end with their holder: a crash leaves nothing to clean up.

K1  At most one holder of a path at a time, also between tasks and threads of one process.
K2  Released when the block ends, even if a child forked in it has a copy of the descriptor.
K3  With ``remove`` the file is removed with the lock. A process that locks a removed file does not hold the lock.
K4  A process that receives the descriptor keeps the lock if the first holder is killed, not if it releases it.
K5  A forked child holds no lock of its parent, and releases none: its copies are closed at the fork.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import OperationTimeoutError, StoreError
from ..poll import BRIEF, Poll
from ..types import Tier
from .quarantine import open_regular

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EPERM, errno.EACCES}

_RECORD = struct.Struct("hhqqi4x")
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
        fcntl.fcntl(
            file, fcntl.F_SETLK if is_process else fcntl.F_OFD_SETLK, _RECORD.pack(kind, os.SEEK_SET, offset, 1, 0)
        )
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def record_holder(file: int, offset: int = 0, *, is_process: bool = False) -> int | None:
    """Return the process that locks byte ``offset``; negative if unknown. Takes no lock."""
    request = _RECORD.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    answer = fcntl.fcntl(file, fcntl.F_GETLK if is_process else fcntl.F_OFD_GETLK, request)
    kind, _, _, _, pid = _RECORD.unpack(answer)
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
