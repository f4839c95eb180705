"""Evicts checkpoints from the SSD when a save needs room: drained or superseded ones that nobody uses. Else it waits.

What a retention policy removes, on any tier: ``checkpoint/prune.py``. What is not evictable is back-pressure by policy,
never growth (P7).

Three limits. Two are hard: what the disk has free, and ``local_bytes_max``. One is a mark, ``local_high_water``: above
it drained copies go and saves wait for drains; but a disk that other people's files keep above the mark is still used.

Invariants:
    E1  Evicted is only what was drained or is not to be, what nobody reads, saves or drains, and never the newest of
        its run (N1). Steps that a job has abandoned go first.
    E2  A save never waits for what cannot come: no drain under way, or not enough of it, ends the wait at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..cache.pool import Pool
from ..checkpoint import local_commit, marks
from ..checkpoint.branches import abandoned_here
from ..checkpoint.journal import READY, Journal
from ..checkpoint.retention import CheckpointCopy, local_checkpoints, local_health, protect
from ..checkpoint.select import age_of
from ..config import Settings
from ..disk import read_lease
from ..disk.durable import space_of
from ..errors import CapacityError, TierckptError
from ..format.layout import PRIVATE_DIR, local_dir, step_of
from ..format.manifest import Manifest
from ..poll import SHARED, Poll
from ..quantities import human_bytes
from ..telemetry import logger
from ..types import Tier

log = logger("space")

FREE_FRACTION_MARGIN = 0.01
FREE_BYTES_MARGIN_MAX = 64 << 20
"""Room left beside a save for manifests, the journal and everybody else's small files."""

ROOM_SECONDS = 600.0
"""How long a save waits for a drain to end."""
SETTLED_SECONDS = 2.0


def make_room(settings: Settings, needed_bytes: int, directory: Path, *, reserved_bytes: int = 0) -> None:
    """Return when a save of ``needed_bytes`` to ``directory`` may begin: evict, then wait or refuse by policy.

    Args:
        reserved_bytes: what the disk has given the save already, in files that have no name yet.

    Raises:
        CapacityError: no room, at once with ``local_full_policy="error"`` or where waiting cannot help, else after
            ``ROOM_SECONDS``. Says needed and free bytes. Nothing was written.
    Cost: with room one statvfs (20 microseconds); with ``local_bytes_max`` also one stat for each directory of the
        local tier. The manifests are read only when there is no room.
    """
    lack = _lack(settings, needed_bytes, directory, reserved_bytes)
    if lack.is_none:
        return
    begun, said = time.monotonic(), False
    for _ in Poll(ROOM_SECONDS, SHARED):
        lack, waits = evict(settings, needed_bytes, directory, reserved_bytes)
        if not lack.is_none and _cache_gives_way(settings, needed_bytes, directory, reserved_bytes):
            lack = _lack(settings, needed_bytes, directory, reserved_bytes, exact=True)
        if lack.is_none:
            return
        if waits.size_bytes < lack.hard_bytes or not waits.what:
            if lack.hard_bytes > 0:
                raise _full(settings, needed_bytes, lack, waits, time.monotonic() - begun)
            log.warning("%s is above its high-water mark, and nothing of ours can go: saving all the same", directory)
            return
        if settings.local_full_policy == "error":
            break
        if not said:
            log.warning("the local tier is full: a save of %s waits for %s", human_bytes(needed_bytes), waits)
            said = True
    raise _full(settings, needed_bytes, lack, waits, time.monotonic() - begun)


def has_room(settings: Settings, needed_bytes: int, directory: Path) -> bool:
    """True when ``needed_bytes`` of somebody else's checkpoint fit, after evicting what a save may evict (E1).

    Nothing is waited for, and the node cache gives way to nothing but this node's own saves.
    """
    if _lack(settings, needed_bytes, directory).is_none:
        return True
    lack, _ = evict(settings, needed_bytes, directory)
    return lack.is_none


def room_bytes(settings: Settings) -> int:
    """Bytes that saves may take now without anything having to go."""
    return max(0, -_lack(settings, 0, settings.local_root).hard_bytes)


class Shortfall(NamedTuple):
    """Bytes that have to go before a save fits: to fit at all, and to stay below the high-water mark."""

    hard_bytes: int
    mark_bytes: int
    free_bytes: int

    @property
    def is_none(self) -> bool:
        return self.hard_bytes <= 0 and self.mark_bytes <= 0


@dataclass(slots=True)
class _Waits:
    """What will free room by itself: drains under way, and readers of what is drained."""

    size_bytes: int = 0
    what: set[str] = field(default_factory=set)
    error: str = ""

    def add(self, what: str, size_bytes: int) -> None:
        self.what.add(what)
        self.size_bytes += size_bytes

    def __str__(self) -> str:
        return ", ".join(sorted(self.what))


def _lack(
    settings: Settings, needed_bytes: int, directory: Path, reserved_bytes: int = 0, *, exact: bool = False
) -> Shortfall:
    space = space_of(directory)
    free, used = space.free_bytes + reserved_bytes, space.used_bytes - reserved_bytes
    margin = min(FREE_BYTES_MARGIN_MAX, int((used + free) * FREE_FRACTION_MARGIN))
    hard = needed_bytes + margin - free
    mark = used + needed_bytes - int(settings.local_high_water * (used + free))
    if settings.local_bytes_max is not None:
        held = space_counter(settings.local_root).total(exact=exact)
        hard = max(hard, held + needed_bytes - settings.local_bytes_max)
        free = max(0, min(free, settings.local_bytes_max - held))
    return Shortfall(hard, mark, free)


# --- evicting --------------------------------------------------------------------------------------------------


def _cache_gives_way(settings: Settings, needed_bytes: int, directory: Path, reserved_bytes: int) -> bool:
    """Evict from the node cache what the disk lacks (``local_bytes_max`` does not concern it). True if any went.

    Training comes first: what the cache holds can be fetched again, unless somebody uses it or has pinned it.
    """
    boundless = settings.model_copy(update={"local_bytes_max": None})
    lack = _lack(boundless, needed_bytes, directory, reserved_bytes)
    if lack.is_none:
        return False
    try:
        freed = Pool(settings).make_room(max(lack.hard_bytes, lack.mark_bytes))
    except TierckptError as error:
        log.warning("the node cache cannot give way: %s", error)
        return False
    if freed:
        log.warning("evicted %s of the node cache: a save needs %s", human_bytes(freed), human_bytes(needed_bytes))
    return freed > 0


def evict(settings: Settings, needed_bytes: int, directory: Path, reserved_bytes: int = 0) -> tuple[Shortfall, _Waits]:
    """Evict, oldest first, until a save fits or nothing may go. Returns what still lacks, and what will free it."""
    lack = _lack(settings, needed_bytes, directory, reserved_bytes, exact=True)
    if lack.is_none:
        return lack, _Waits()
    here = list(local_checkpoints(settings.local_root))
    abandoned = abandoned_here(here)
    protected = _newest_of_each_run(here, abandoned)
    busy, waits = _draining(settings, protected | {directory})
    for old, manifest in sorted(_oldest_first(here), key=lambda item: item[0] not in abandoned):
        if old in protected | busy | {directory} or not marks.is_evictable(old, manifest.attempt):
            continue
        size_bytes = _own_bytes(old, manifest)
        if not size_bytes:
            continue  # linked to the shared tier: removing ours would free nothing
        if not _remove(settings.local_root, old, manifest):
            waits.add(f"the reader of {old.name}", size_bytes)
            continue
        log.warning("evicted %s from the local tier: a save needs %s", old, human_bytes(needed_bytes))
        lack = _lack(settings, needed_bytes, directory, reserved_bytes, exact=True)
        if lack.is_none:
            break
    return lack, waits


def _oldest_first(here: list[tuple[Path, Manifest]]) -> list[tuple[Path, Manifest]]:
    """By step within a run, between runs by time. A clock that went back makes no step older than the one before."""
    ages: dict[Path, float] = {}
    latest: dict[Path, float] = {}
    for directory, manifest in sorted(here, key=lambda item: age_of(item[0].name)):
        latest[directory.parent] = max(latest.get(directory.parent, 0.0), manifest.created_unix_seconds)
        ages[directory] = latest[directory.parent]
    return sorted(here, key=lambda item: (ages[item[0]], age_of(item[0].name)))


def _newest_of_each_run(here: list[tuple[Path, Manifest]], abandoned: Set[Path]) -> set[Path]:
    """The copies that retention never removes (N1), for every run on this node."""
    runs: dict[Path, list[CheckpointCopy]] = {}
    for directory, manifest in here:
        step = step_of(directory.name)
        copy = CheckpointCopy(
            directory.name,
            -1 if step is None else step,
            Tier.LOCAL,
            local_health(directory, manifest),
            is_replicated=marks.is_replicated(directory, manifest.attempt)
            and not marks.is_drained(directory, manifest.attempt),
            is_abandoned=directory in abandoned,
        )
        runs.setdefault(directory.parent, []).append(copy)
    counting = {run: [copy for copy in copies if not copy.is_abandoned] or copies for run, copies in runs.items()}
    return {run / name for run, copies in counting.items() for name in protect(copies)}


def _draining(settings: Settings, protected: set[Path]) -> tuple[set[Path], _Waits]:
    """Return the directories that the journal names, and what room their drains will bring."""
    busy: set[Path] = set()
    waits = _Waits()
    for entry in Journal(settings.local_root).entries():
        directory = local_dir(settings.local_root, entry.location)
        busy.add(directory)
        if entry.error:
            waits.error = entry.error  # its drain has given up: waiting does not bring it back
        elif entry.state == READY and settings.drain and directory not in protected:
            waits.add(f"the drain of {entry.uri}", entry.size_bytes)
    return busy, waits


def _remove(local_root: Path, directory: Path, manifest: Manifest) -> bool:
    with read_lease.removing(local_root, directory) as free:
        try:
            return free and local_commit.remove_local(directory, manifest.attempt)
        except TierckptError as error:
            log.warning("%s cannot be evicted: %s", directory, error)
            return False


def _own_bytes(directory: Path, manifest: Manifest) -> int:
    """Bytes that removing the copy would free."""
    total = 0
    for entry in manifest.files:
        try:
            status = (directory / entry.key).stat()
        except OSError:
            continue
        total += _allocated(status) if status.st_nlink <= 1 else 0
    return total


def _full(
    settings: Settings, needed_bytes: int, lack: Shortfall, waits: _Waits, waited_seconds: float
) -> CapacityError:
    return CapacityError(
        f"the local tier has no room for this save: {human_bytes(needed_bytes)} are needed, "
        f"{human_bytes(lack.free_bytes)} are free",
        hint="Drain and remove older checkpoints, or give local_root a larger disk: it needs room for two checkpoints, "
        "the newest one stays until the next is committed. Nothing was written and older checkpoints are whole",
        tier=Tier.LOCAL,
        local_root=settings.local_root,
        needed_bytes=needed_bytes,
        free_bytes=lack.free_bytes,
        waited_seconds=round(waited_seconds, 1) if waited_seconds >= 0.1 else None,
        draining=len(waits.what) or None,
        last_error=waits.error or None,
    )


# --- counting --------------------------------------------------------------------------------------------------


class _Counted(NamedTuple):
    """One directory: when its names last changed, the bytes of its files, and the directories below it."""

    changed_ns: int
    size_bytes: int
    below: list[str]
    newest_ns: int


class SpaceCounter:
    """Bytes of files on the local tier that only it has. What has not changed since is not looked at again.

    A directory's time changes with its names; the times of its files say whether one is still being written. What
    changed less than SETTLED_SECONDS before it was counted is counted again.
    """

    def __init__(self, top: Path) -> None:
        self._top = str(top)
        self._settled: dict[str, _Counted] = {}

    def total(self, *, exact: bool) -> int:
        known = {} if exact else self._settled
        total, settled = 0, {}
        settled_ns = time.time_ns() - int(SETTLED_SECONDS * 1e9)
        waiting = [self._top]
        while waiting:
            path = waiting.pop()
            try:
                counted = known.get(path)
                if counted is None or counted.changed_ns != os.stat(path).st_mtime_ns:  # noqa: PTH116  # a save waits
                    counted = _count(path)
            except OSError:
                continue  # removed meanwhile
            if counted.newest_ns < settled_ns:
                settled[path] = counted
            total += counted.size_bytes
            waiting += counted.below
        self._settled = settled
        return total


def _count(path: str) -> _Counted:
    changed = newest = os.stat(path).st_mtime_ns  # noqa: PTH116
    size_bytes, below = 0, []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != PRIVATE_DIR:
                    below.append(entry.path)
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed meanwhile, and the rest is there
            newest = max(newest, status.st_mtime_ns)
            size_bytes += _allocated(status) if status.st_nlink <= 1 else 0
    return _Counted(changed, size_bytes, below, newest)


_counters: dict[Path, SpaceCounter] = {}


def space_counter(local_root: Path) -> SpaceCounter:
    if local_root not in _counters:
        _counters[local_root] = SpaceCounter(local_root / "checkpoints")
    return _counters[local_root]


def _allocated(status: os.stat_result) -> int:
    """The bytes that a file takes on the disk; its size where the file system counts no blocks."""
    return status.st_blocks * 512 or status.st_size
