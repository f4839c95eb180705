"""Read leases: protect data from removal while a process of this node reads it.

A lease is a shared flock on a small file under the local root, so it ends with its process.

    L1  During a read, ``removing`` yields False; during a removal, a reader waits (a removal is short).
    L2  Leases cover this node only: a reader on another node that loses its copy reads the next one, or gets an error.
    L3  Reading does not require a lease: on a read-only local root a restore continues without one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path

from ..errors import TierckptError
from ..format.manifest import digest_of
from ..poll import BRIEF, Poll
from ..telemetry import logger
from .durable import make_dirs
from .file_lock import try_lock

log = logger("leases")

REMOVAL_SECONDS_MAX = 60.0
"""After that a reader continues, and may find no copy."""


def reading(local_root: Path, directory: Path) -> AbstractContextManager[None]:
    """Protect the checkpoint that ``directory`` mirrors from removal, with any number of readers.

    Check in the block that it exists: it may have been removed before.
    """
    return holding(lease_path(local_root, directory))


@contextmanager
def holding(path: Path) -> Iterator[None]:
    """Hold the lease file ``path`` with other readers."""
    for _ in Poll(REMOVAL_SECONDS_MAX, BRIEF):
        with _leased(path) as is_had:
            if is_had:
                yield
                return
    yield


@asynccontextmanager
async def reading_async(local_root: Path, directory: Path) -> AsyncIterator[None]:
    async for _ in Poll(REMOVAL_SECONDS_MAX, BRIEF):  # another process holds it, so no event of ours fires
        with _leased(lease_path(local_root, directory)) as is_had:
            if is_had:
                yield
                return
    yield


@contextmanager
def _leased(path: Path) -> Iterator[bool]:
    """Yield True with the lease, or if it is unavailable (L3); False during a removal."""
    with contextlib.ExitStack() as lease:
        try:
            make_dirs(path.parent)
            is_had = bool(lease.enter_context(try_lock(path, remove=True, is_shared=True)))
        except (OSError, TierckptError) as error:
            log.debug("no lease by %s: %s", path, error)
            is_had = True
        yield is_had


@contextmanager
def removing(local_root: Path, directory: Path) -> Iterator[bool]:
    path = lease_path(local_root, directory)
    make_dirs(path.parent)
    with try_lock(path, remove=True) as free:
        yield bool(free)


def is_read(local_root: Path, directory: Path) -> bool:
    return is_held(lease_path(local_root, directory))


def is_held(path: Path) -> bool:
    if not path.exists():
        return False
    with try_lock(path, remove=True) as free:
        return not free


def holders(path: Path) -> list[int]:
    """Return the processes that hold ``path``; 0 for unnamed ones."""
    if not is_held(path):
        return []
    with contextlib.suppress(OSError):
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return [int(lock[4]) for lock in locks if lock[1:4:2] == ["FLOCK", "READ"] and lock[5] == device] or [0]
    return [0]


def lease_path(local_root: Path, directory: Path) -> Path:
    return local_root / "leases" / f"{digest_of(str(directory).encode())}.lock"
