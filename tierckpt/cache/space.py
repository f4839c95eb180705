"""Makes room on the SSD of the local root, for saves, copies of other nodes' checkpoints, and prefetches.

The disk (less a margin) and the quotas are hard limits. ``local_high_water`` is soft: above it evictable data goes and
saves wait for drains. docs/internals/cache.md has the order of eviction.

Invariants:
    E1  A checkpoint is evicted only when it is drained or superseded, not in use, and not the newest of its run (N1).
        A cache entry is evicted only when it is neither pinned nor leased.
    E2  A save waits only while a drain under way can free enough.
    E3  A prefetch reserves its room before its first byte, one process of the node at a time: all reservations stay
        within the quota and the disk.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint import local_commit
from ..checkpoint.branches import abandoned_here
from ..checkpoint.journal import READY, Journal
from ..checkpoint.retention import CheckpointCopy, local_checkpoints, local_health, protect
from ..checkpoint.select import age_of
from ..config import Settings
from ..disk import read_lease
from ..disk.durable import UNKNOWN_BYTES, make_dirs, space_of, translated
from ..disk.file_lock import lock
from ..errors import CapacityError, TierckptError
from ..format.layout import PRIVATE_DIR, local_dir, step_of
from ..format.manifest import Manifest
from ..poll import SHARED, Poll
from ..quantities import human_bytes
from ..telemetry import EVICTED_BYTES, logger
from ..types import Tier
from .file_set import FileSet
from .pool import CacheRow, Pool, allocated_bytes

log = logger("space")

MARGIN_FRACTION = 0.01
MARGIN_BYTES_MAX = 64 << 20
ROOM_SECONDS = 600.0
ADMISSION_SECONDS = 120.0
SAVE_ADMISSION_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Candidate:
    kind: str
    uri: str
    size_bytes: int
    is_pinned: bool
    is_used: Callable[[], bool]
    remove: Callable[[], bool]
    """False when a process uses it."""


class Shortfall(NamedTuple):
    disk_bytes: int = 0
    quota_bytes: int = 0
    mark_bytes: int = 0
    free_bytes: int = 0

    @property
    def hard_bytes(self) -> int:
        return max(self.disk_bytes, self.quota_bytes)

    @property
    def is_none(self) -> bool:
        return max(self.hard_bytes, self.mark_bytes) <= 0


@dataclass(slots=True)
class AdmissionPlan:
    lack: Shortfall
    evicted: list[Candidate] = field(default_factory=list)
    pinned: list[Candidate] = field(default_factory=list)
    leased: list[Candidate] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)
    drain_error: str = ""

    @property
    def fits(self) -> bool:
        return self.lack.hard_bytes <= sum(one.size_bytes for one in self.evicted)


def make_room(settings: Settings, needed_bytes: int, directory: Path, *, reserved_bytes: int = 0) -> None:
    """Make room for a save: evict, then wait or refuse by ``local_full_policy``.

    ``reserved_bytes``: part of ``needed_bytes`` already allocated. Raises CapacityError, at once if waiting cannot
    help. Cost: with room one statvfs; with ``local_bytes_max`` also a stat per file.
    """
    if _checkpoint_shortfall(settings, needed_bytes, directory, reserved_bytes).is_none:
        return
    started_at, is_logged = time.monotonic(), False
    for _ in Poll(ROOM_SECONDS, SHARED):
        plan = evict(settings, needed_bytes, directory, reserved_bytes)
        if plan.lack.is_none:
            return
        if not plan.waits or sum(plan.waits.values()) < plan.lack.hard_bytes:
            if plan.lack.hard_bytes > 0:
                break
            log.warning("%s is above its high-water mark without evictable files: saving anyway", directory)
            return
        if settings.local_full_policy == "error":
            break
        if not is_logged:
            what = ", ".join(sorted(plan.waits))
            log.warning("the local tier is full: a save of %s waits for %s", human_bytes(needed_bytes), what)
            is_logged = True
    raise _no_room(
        "the local tier has no room for this save",
        needed_bytes,
        plan,
        "Drain and remove older checkpoints, or give local_root a larger disk: it needs room for two checkpoints, "
        "the newest one stays until the next is committed. Nothing was written and older checkpoints are whole",
        local_root=settings.local_root,
        waited_seconds=round(time.monotonic() - started_at, 1) or None,
        draining=len(plan.waits) or None,
        last_error=plan.drain_error or None,
    )


def has_room(settings: Settings, needed_bytes: int, directory: Path) -> bool:
    """Return whether a replica fits, after evicting checkpoints only (E1). Does not wait."""
    return (
        _checkpoint_shortfall(settings, needed_bytes, directory).is_none
        or evict(settings, needed_bytes, directory, spares_cache=True).lack.is_none
    )


def room_bytes(settings: Settings) -> int:
    return max(0, -_checkpoint_shortfall(settings, 0, settings.local_root).hard_bytes)


def evict(
    settings: Settings, needed_bytes: int, directory: Path, reserved_bytes: int = 0, *, spares_cache: bool = False
) -> AdmissionPlan:
    with contextlib.ExitStack() as admission:
        # Safe without the lock: each removal holds a lease alone.
        with contextlib.suppress(OSError, TierckptError):
            admission.enter_context(_admission(settings, SAVE_ADMISSION_SECONDS))
        while True:
            plan = AdmissionPlan(_checkpoint_shortfall(settings, needed_bytes, directory, reserved_bytes))
            if plan.lack.is_none:
                return plan
            candidates = [_checkpoints(settings, directory, plan), () if spares_cache else _entries(Pool(settings))]
            _choose_evicted(plan, chain(*candidates), "checkpoint")
            freed = [one for one in plan.evicted if _evict(one, plan)]
            for one in freed:
                log.warning("evicted %s from the local tier: a save needs %s", one.uri, human_bytes(needed_bytes))
            if not freed:
                for one in plan.leased:
                    if one.kind == "checkpoint":
                        plan.waits[f"the reader of {Path(one.uri).name}"] = one.size_bytes
                return plan


def _checkpoint_shortfall(settings: Settings, needed_bytes: int, directory: Path, reserved_bytes: int = 0) -> Shortfall:
    quota = settings.local_bytes_max
    held_bytes = checkpoint_bytes(settings.local_root) if quota is not None else 0
    return _shortfall(settings, needed_bytes, directory, quota, held_bytes, reserved_bytes)


def reserve(pool: Pool, frozen: FileSet, size_bytes: int) -> AdmissionPlan:
    """Reserve ``size_bytes`` in total for the entry of ``frozen``, after evictions (E3).

    The caller holds its lease and its ``PartialEntry``. Raises CapacityError; nothing was evicted.
    """
    make_dirs(pool.state_dir(frozen.name))
    with translated(pool.root), _admission(pool.settings, ADMISSION_SECONDS):
        pool.clear_evicted()
        while True:
            plan = plan_prefetch(pool, frozen, size_bytes)
            if not plan.fits:
                raise _no_room(
                    f"the cache has no room for {frozen.uri}",
                    size_bytes - pool.reserved(frozen.name),
                    plan,
                    "Unpin or stop using something (`tierckpt cache ls` lists the cache), raise cache_bytes_max, "
                    "or give local_root a larger disk. Nothing was fetched, nothing was evicted",
                )
            if all(_evict(one) for one in plan.evicted):
                if size_bytes > pool.reserved(frozen.name):
                    pool.note_reserved(frozen.name, size_bytes)
                return plan


def plan_prefetch(pool: Pool, frozen: FileSet, size_bytes: int | None = None) -> AdmissionPlan:
    """Return the evictions of ``reserve``. Changes nothing."""
    own_bytes = pool.reserved(frozen.name)
    added_bytes = (frozen.size_bytes if size_bytes is None else size_bytes) - own_bytes
    if added_bytes <= 0:
        return AdmissionPlan(Shortfall())
    rows = [row for row in pool.rows() if row.name != frozen.name]
    held_bytes, outstanding_bytes = own_bytes, 0
    for row in rows:
        held_bytes += row.reserved_bytes
        if row.state == "partial":
            incoming = pool.incoming(row.name)
            allocated = allocated_bytes(incoming) if incoming is not None else 0
            outstanding_bytes += max(0, row.reserved_bytes - allocated)
    quota = pool.settings.cache_bytes_max
    lack = _shortfall(pool.settings, added_bytes, pool.root, quota, held_bytes, -outstanding_bytes)
    return _choose_evicted(AdmissionPlan(lack), _entries(pool, rows), "cache")


def shrink_cache(pool: Pool, size_bytes: int) -> None:
    if pool.root.is_dir():
        with _admission(pool.settings, ADMISSION_SECONDS):
            for one in _choose_evicted(AdmissionPlan(Shortfall(size_bytes)), _entries(pool), "cache").evicted:
                _evict(one)


def _shortfall(
    settings: Settings, needed_bytes: int, directory: Path, quota_bytes: int | None, held_bytes: int,
    reserved_bytes: int,
) -> Shortfall:  # fmt: skip
    """``reserved_bytes``: used for the disk, free for the caller; negative: the reverse."""
    space = space_of(directory)
    free, used = space.free_bytes + reserved_bytes, space.used_bytes - reserved_bytes
    total = used + free  # as df: without blocks reserved for root
    margin = min(MARGIN_BYTES_MAX, int(total * MARGIN_FRACTION))
    quota_free = quota_bytes - held_bytes if quota_bytes is not None else UNKNOWN_BYTES
    mark = used + needed_bytes - int(settings.local_high_water * total)
    free_bytes = max(0, min(free - margin, quota_free))
    return Shortfall(needed_bytes + margin - free, needed_bytes - quota_free, mark, free_bytes)


def _choose_evicted(plan: AdmissionPlan, candidates: Iterable[Candidate], quota_of: str) -> AdmissionPlan:
    left = iter(candidates)
    disk_bytes, quota_bytes = max(plan.lack.disk_bytes, plan.lack.mark_bytes), plan.lack.quota_bytes
    while max(disk_bytes, quota_bytes) > 0 and (one := next(left, None)) is not None:
        if one.kind != quota_of and disk_bytes <= 0:
            continue
        if one.is_pinned:
            plan.pinned.append(one)
        elif one.is_used():
            plan.leased.append(one)
        else:
            plan.evicted.append(one)
            disk_bytes -= one.size_bytes
            quota_bytes -= one.size_bytes if one.kind == quota_of else 0
    return plan


def _evict(one: Candidate, plan: AdmissionPlan | None = None) -> bool:
    """False when a process uses it. ``plan`` records errors."""
    try:
        is_gone = one.remove()
    except TierckptError as error:
        if plan is None:
            raise
        log.warning("%s cannot be evicted: %s", one.uri, error)
        return False
    if is_gone:
        EVICTED_BYTES.emit(one.size_bytes, kind=one.kind)
    elif plan is not None:
        plan.leased.append(one)
    return is_gone


def _admission(settings: Settings, seconds: float) -> contextlib.AbstractContextManager[None]:
    """Serialize evictions and reservations on the node."""
    return lock(settings.local_root / "admission.lock", seconds, f"admissions to {settings.local_root}")


def _no_room(what: str, needed_bytes: int, plan: AdmissionPlan, hint: str, **facts: Any) -> CapacityError:
    for name, candidates in (("evictable", plan.evicted), ("pinned", plan.pinned), ("leased", plan.leased)):
        facts[f"{name}_bytes"] = sum(one.size_bytes for one in candidates)
        if name != "evictable" and candidates:
            facts[name] = ", ".join(f"{one.uri} ({human_bytes(one.size_bytes)})" for one in candidates)
    return CapacityError(
        f"{what}: {human_bytes(needed_bytes)} are needed, {human_bytes(plan.lack.free_bytes)} are free",
        hint=hint,
        tier=Tier.LOCAL,
        needed_bytes=needed_bytes,
        free_bytes=plan.lack.free_bytes,
        **facts,
    )


def _entries(pool: Pool, rows: list[CacheRow] | None = None) -> Iterator[Candidate]:
    if rows is None:
        try:
            with translated(pool.root):
                rows = pool.rows() if pool.root.is_dir() else []
        except TierckptError as error:
            log.warning("the node cache cannot be evicted: %s", error)
            return
    for row in sorted(rows, key=lambda row: (row.state != "partial", row.used_unix_ns, row.name)):
        is_used, remove = partial(pool.is_leased, row.name), partial(pool.evict, row.name)
        yield Candidate("cache", row.uri, row.reserved_bytes, row.is_pinned, is_used, remove)


def _checkpoints(settings: Settings, directory: Path, plan: AdmissionPlan) -> Iterator[Candidate]:
    root = settings.local_root
    local_copies = list(local_checkpoints(root))
    abandoned = abandoned_here(local_copies)
    kept = _newest_of_each_run(local_copies, abandoned) | {directory}
    busy = set()
    for entry in Journal(root).entries():
        place = local_dir(root, entry.location)
        busy.add(place)
        if entry.error:
            plan.drain_error = entry.error
        elif entry.state == READY and settings.drain and place not in kept:
            plan.waits[f"the drain of {entry.uri}"] = plan.waits.get(f"the drain of {entry.uri}", 0) + entry.size_bytes
    for old, manifest in sorted(_oldest_first(local_copies), key=lambda item: item[0] not in abandoned):
        if old in kept | busy or not local_commit.is_evictable(old, manifest.attempt):
            continue
        if size_bytes := _own_bytes(old / entry.key for entry in manifest.files):  # else linked to the shared tier
            is_used, remove = partial(read_lease.is_read, root, old), partial(_remove, root, old, manifest.attempt)
            yield Candidate("checkpoint", str(old), size_bytes, False, is_used, remove)


def _oldest_first(local_copies: list[tuple[Path, Manifest]]) -> list[tuple[Path, Manifest]]:
    """By step within a run, between runs by time: a clock set back does not reorder steps."""
    ages: dict[Path, float] = {}
    latest: dict[Path, float] = {}
    for directory, manifest in sorted(local_copies, key=lambda item: age_of(item[0].name)):
        latest[directory.parent] = max(latest.get(directory.parent, 0.0), manifest.created_unix_seconds)
        ages[directory] = latest[directory.parent]
    return sorted(local_copies, key=lambda item: (ages[item[0]], age_of(item[0].name)))


def _newest_of_each_run(local_copies: list[tuple[Path, Manifest]], abandoned: Set[Path]) -> set[Path]:
    runs: dict[Path, list[CheckpointCopy]] = {}
    for directory, manifest in local_copies:
        step = step_of(directory.name)
        copy = CheckpointCopy(
            directory.name,
            -1 if step is None else step,
            Tier.LOCAL,
            local_health(directory, manifest),
            is_replicated=local_commit.is_replicated(directory, manifest.attempt)
            and not local_commit.is_drained(directory, manifest.attempt),
            is_abandoned=directory in abandoned,
        )
        runs.setdefault(directory.parent, []).append(copy)
    counting = {run: [copy for copy in copies if not copy.is_abandoned] or copies for run, copies in runs.items()}
    return {run / name for run, copies in counting.items() for name in protect(copies)}


def _remove(local_root: Path, directory: Path, attempt: str) -> bool:
    with read_lease.removing(local_root, directory) as free:
        return free and local_commit.remove_local(directory, attempt)


def checkpoint_bytes(local_root: Path) -> int:
    """Return the bytes that only the local tier has."""
    total = 0
    for folder, below, names in os.walk(local_root / "checkpoints"):
        if PRIVATE_DIR in below:
            below.remove(PRIVATE_DIR)
        total += _own_bytes(Path(folder) / name for name in names)
    return total


def _own_bytes(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.lstat()
            total += (status.st_blocks * 512 or status.st_size) if status.st_nlink <= 1 else 0
    return total
