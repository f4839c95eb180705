"""Read leases: what a live process of this node reads (a checkpoint, a cache entry) is neither evicted nor pruned.

A lease is a shared flock on a small file under the local root; who removes needs the exclusive one. So a lease ends
with its process, whatever ends it, and there is no pid to compare and nothing to clean up after a crash.

Invariants:
    L1  While anybody reads, ``removing`` yields False; while somebody removes, a reader waits (a removal is short).
    L2  Only this node is seen: a reader on another node that loses its copy reads the next one, or an error.
    L3  No lease is no obstacle to reading: on a read-only local root a restore goes on without one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from ..errors import TierckptError
from ..format.manifest import digest_of
from ..poll import BRIEF, Poll
from ..telemetry import logger
from .durable import make_dirs, matching
from .file_lock import try_lock

log = logger("leases")

REMOVAL_SECONDS_MAX = 60.0
"""How long a reader waits for a removal that is under way. After that it goes on: it finds the copy or does not."""


@contextmanager
def reading(local_root: Path, directory: Path) -> Iterator[None]:
    """Hold the checkpoint that ``directory`` mirrors against removal. Any number of readers at a time.

    Look again, once inside, whether the checkpoint still stands: it may have gone before the lease was held.
    """
    with holding(lease_path(local_root, directory)):
        yield


@contextmanager
def holding(path: Path) -> Iterator[None]:
    """Hold the lease file ``path`` with any number of others. Who removes holds it alone (``try_lock``)."""
    for _ in Poll(REMOVAL_SECONDS_MAX, BRIEF):
        with _leased(path) as is_had:
            if is_had:
                yield
                return
    yield


@asynccontextmanager
async def reading_async(local_root: Path, directory: Path) -> AsyncIterator[None]:
    """``reading`` for coroutines."""
    async for _ in Poll(REMOVAL_SECONDS_MAX, BRIEF):  # another process holds it: it sets no event of ours
        with _leased(lease_path(local_root, directory)) as is_had:
            if is_had:
                yield
                return
    yield


@contextmanager
def _leased(path: Path) -> Iterator[bool]:
    """Yield True with the lease, and where none can be had (L3); False while somebody removes."""
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
    """Yield True while nobody reads the checkpoint of ``directory``, nor can begin to; False at once when one does."""
    path = lease_path(local_root, directory)
    make_dirs(path.parent)
    with try_lock(path, remove=True) as free:
        yield bool(free)


def is_read(local_root: Path, directory: Path) -> bool:
    """True while a process of this node reads the checkpoint that ``directory`` mirrors. Writes nothing."""
    return is_held(lease_path(local_root, directory))


def is_held(path: Path) -> bool:
    """True while a process of this node holds the lease file ``path``. Writes nothing."""
    if not path.exists():
        return False
    with try_lock(path, remove=True) as free:
        return not free


def holders(path: Path) -> list[int]:
    """The processes that hold the lease file ``path``, by what the kernel tells: 0 for some that it does not name."""
    if not is_held(path):
        return []
    with contextlib.suppress(OSError):
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return [int(lock[4]) for lock in locks if lock[1:4:2] == ["FLOCK", "READ"] and lock[5] == device] or [0]
    return [0]


def forget_dead(local_root: Path) -> None:
    """Remove the files of leases whose holder was killed. They hold nothing; they are only in the way."""
    for path in matching(local_root / "leases", "*.lock"):
        with contextlib.suppress(OSError, TierckptError), try_lock(path, remove=True):
            pass


def lease_path(local_root: Path, directory: Path) -> Path:
    return local_root / "leases" / f"{digest_of(str(directory).encode())}.lock"
