"""The pool: which entries the node cache has, how much room they take, and which are evicted (least recently used).

    <local_root>/cache/NAME-<hex>/                     one entry, whole: real files, and its receipt
    <local_root>/cache/.NAME-<hex>.<version>.incoming/ the same on its way (cache/partial_entry.py)
    <local_root>/cache/.state/NAME-<hex>/               pinned, used (its time is the last use), reserved (bytes)
    <local_root>/cache/.leases/NAME-<hex>.lock         flocks of those who use it (disk/read_lease.py)
    <local_root>/cache/.admission.lock                 flock of who admits just now
    <local_root>/cache/.<hex>.evicted/                 out of sight already; anybody may remove the rest

Invariants:
    H1  Room is reserved before the first byte: what the entries may take together stays within the quota and the disk.
    H2  Evicted is nothing that is pinned, nor leased by a live process: who evicts holds the lease alone.
    H3  An entry goes by one rename. A crash in the middle leaves it whole, or invisible.
    H4  First go partial entries that nobody fills, then the least recently used.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from ..config import Settings
from ..disk import read_lease
from ..disk.durable import make_dirs, matching, read_whole, remove_tree, replace_file, space_of, translated
from ..disk.file_lock import lock, try_lock
from ..disk.local_root import make_local_root
from ..errors import CapacityError, TierckptError
from ..format.layout import PRIVATE_DIR
from ..quantities import human_bytes
from ..telemetry import logger
from ..types import Tier
from .file_set import FileSet, stem_of
from .partial_entry import SUFFIX, read_entry, remove_dir
from .receipt import RECEIPT, read_receipt

log = logger("cache")

EVICTED_FRACTION = 0.1
"""Of the disk: how far below ``local_high_water`` an eviction goes, so that the next prefetch needs none."""
MARGIN_FRACTION = 0.01
MARGIN_BYTES_MAX = 64 << 20
"""Room left on the disk for everybody else's small files."""
ADMISSION_SECONDS = 120.0
RESERVED_BYTES_MAX = 64
KNOWN_MAX = 4096
"""Entries whose receipts need not be read again."""

_INCOMING = re.compile(rf"^\.(?P<name>.+)\.[0-9a-f]{{8}}{re.escape(SUFFIX)}$")


State: TypeAlias = Literal["partial", "complete"]


@dataclass(frozen=True, slots=True)
class Row:
    """One entry. ``reserved_bytes`` is what the quota counts: of a partial entry, what it may take."""

    name: str
    uri: str
    version: str
    files: int
    size_bytes: int
    state: State
    reserved_bytes: int
    is_pinned: bool
    used_unix_ns: int


Summary: TypeAlias = tuple[str, str, int, int]
"""URI, version, files and bytes of an entry."""

receipts_read: dict[Path, tuple[tuple[int, int], Summary]] = {}
"""Of each receipt read, inode and time of writing, and its summary."""


def _summary_of(frozen: FileSet) -> Summary:
    return frozen.uri, frozen.version, len(frozen.files), frozen.size_bytes


@dataclass(slots=True)
class AdmissionPlan:
    """What an admission found: what has to go, and why that may not be enough."""

    needed_bytes: int
    free_bytes: int
    evicted: list[Row] = field(default_factory=list)
    pinned: list[Row] = field(default_factory=list)
    leased: list[Row] = field(default_factory=list)
    fits: bool = True


class Pool:
    """The entries below ``settings.local_root``. Blocking; any thread and any process may use it at the same time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.root = settings.local_root / "cache"

    def directory(self, name: str) -> Path:
        return self.root / name

    def state_dir(self, name: str) -> Path:
        return self.root / ".state" / name

    # --- what is there -------------------------------------------------------------------------------------------

    def rows(self, *uris: str) -> list[Row]:
        """Return all entries, or those of ``uris``, the least recently used first.

        Cost: three stats for each entry; its receipt is read once in a process.
        """
        stems = {stem_of(uri) for uri in uris}
        names = [name for name in self._names() if not uris or name.rpartition("-")[0] in stems]
        found = [row for name in names if (row := self.describe(name)) is not None]
        wanted = [row for row in found if not uris or row.uri in uris]
        return sorted(wanted, key=lambda row: (row.used_unix_ns, row.name))

    def _names(self) -> set[str]:
        """The entries there may be, whole ones and partial ones. What is renamed while a directory is listed may be in
        the list under neither name; a reservation has a name that stays (H1)."""
        found = {path.name for path in matching(self.root / ".state", "*")}
        for path in matching(self.root, "*"):
            if match := _INCOMING.match(path.name):
                found.add(match["name"])
            elif not path.name.startswith("."):
                found.add(path.name)
        return found

    def incoming(self, name: str) -> Path | None:
        return next(iter(matching(self.root, f".{glob.escape(name)}.*{SUFFIX}")), None)

    def describe(self, name: str) -> Row | None:
        """What the files say of an entry; None when they say nothing that can be used."""
        for _ in range(2):  # it may be published between the looks at its two places: then it is in the first
            if (summary := self._summary_by_receipt(name)) is not None:
                return Row(name, *summary, "complete", summary[3], self.is_pinned(name), self._used_ns(name))
            incoming = self.incoming(name)
            frozen = read_entry(incoming) if incoming is not None else None
            if incoming is not None and frozen is not None:
                reserved = self._reserved(name) or allocated_bytes(incoming)
                return Row(name, *_summary_of(frozen), "partial", reserved, self.is_pinned(name), self._used_ns(name))
        return None

    def _summary_by_receipt(self, name: str) -> Summary | None:
        path = self.directory(name) / RECEIPT
        try:
            status = path.stat()
        except OSError:
            return None
        stamp, known = (status.st_ino, status.st_mtime_ns), receipts_read.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        if (receipt := read_receipt(self.directory(name))) is None:
            return None
        if len(receipts_read) >= KNOWN_MAX:
            receipts_read.clear()
        receipts_read[path] = (stamp, _summary_of(receipt.frozen))
        return _summary_of(receipt.frozen)

    def _reserved(self, name: str) -> int:
        try:
            return int(read_whole(self.state_dir(name) / "reserved", RESERVED_BYTES_MAX))
        except (TierckptError, ValueError):
            return 0

    def _used_ns(self, name: str) -> int:
        for path in (self.state_dir(name) / "used", self.directory(name)):
            try:
                return path.stat().st_mtime_ns
            except OSError:
                continue
        return 0

    def used(self, name: str) -> None:
        """Note that an entry is being used. Best effort."""
        now, path = time.time_ns(), self.state_dir(name) / "used"
        with contextlib.suppress(OSError, TierckptError):
            make_dirs(path.parent, is_durable=False)
            path.touch()
            os.utime(path, ns=(now, now))

    # --- pins and leases -----------------------------------------------------------------------------------------

    def is_pinned(self, name: str) -> bool:
        return (self.state_dir(name) / "pinned").exists()

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep an entry until it is unpinned, or no longer."""
        path = self.state_dir(name) / "pinned"
        with translated(path):
            make_dirs(path.parent)
            path.touch() if pinned else path.unlink(missing_ok=True)
        if not pinned:
            self.remove_state(name)

    def lease_path(self, name: str) -> Path:
        return self.root / ".leases" / f"{name}.lock"

    def lease(self, name: str) -> contextlib.ExitStack:
        """Hold an entry against eviction until what is returned is closed, or this process ends.

        Look again, once it is held, whether it is still there.

        Raises PermissionDeniedError, ConfigError: see ``make_local_root``.
        """
        make_local_root(self.settings)
        hold = contextlib.ExitStack()  # closed from the last to the first
        hold.callback(self.remove_state, name)
        hold.enter_context(read_lease.holding(self.lease_path(name)))
        hold.callback(self.used, name)
        return hold

    def leases(self, name: str) -> list[int]:
        """The live processes that hold an entry."""
        return read_lease.holders(self.lease_path(name))

    def remove_state(self, name: str) -> None:
        """Remove what is written about an entry that is gone, unless somebody holds it: it is going to be made (H2)."""
        with contextlib.suppress(OSError, TierckptError), try_lock(self.lease_path(name), remove=True) as is_free:
            if is_free and not self.directory(name).exists() and self.incoming(name) is None:
                remove_tree(self.state_dir(name), ignore_errors=True)

    # --- room ----------------------------------------------------------------------------------------------------

    def reserve(self, frozen: FileSet, reserved_bytes: int) -> AdmissionPlan:
        """Let the entry of ``frozen`` take ``reserved_bytes`` altogether; evict what has to go.

        Hold its lease first, and have its directory made (an empty ``PartialEntry``): others see it by that.

        Raises:
            CapacityError: no room even so; says bytes needed, free, pinned and leased. Nothing was evicted.
        """
        with translated(self.root):
            make_dirs(self.state_dir(frozen.name))
            with self._admission():
                self._clear_evicted()
                held = self._reserved(frozen.name)
                if reserved_bytes <= held:
                    return AdmissionPlan(0, 0)
                room = self._find(reserved_bytes - held, frozen.name)
                if not room.fits:
                    raise self._full(frozen, room)
                for row in room.evicted:
                    self.evict(row.name)
                path = self.state_dir(frozen.name) / "reserved"
                temporary = path.with_name("reserved.new")
                temporary.write_text(str(reserved_bytes))
                replace_file(temporary, path)
                return room

    def plan(self, frozen: FileSet) -> AdmissionPlan:
        """What ``reserve`` of the whole of ``frozen`` would do. Changes nothing."""
        held = self._reserved(frozen.name)
        return self._find(max(0, frozen.size_bytes - held), frozen.name)

    def make_room(self, needed_bytes: int) -> int:
        """Give way to somebody else on this disk: evict until ``needed_bytes`` more are free, or nothing may go.

        Returns the bytes of what was evicted.
        """
        if not self.root.is_dir():
            return 0
        freed = 0
        with translated(self.root), self._admission():
            for row in self._order(self.rows()):
                if freed >= needed_bytes:
                    break
                freed += row.reserved_bytes if self.evict(row.name) else 0
        return freed

    def _find(self, needed_bytes: int, own: str) -> AdmissionPlan:
        """Choose what has to go so that ``needed_bytes`` more fit. Quota and disk are hard, the marks soft."""
        rows = [row for row in self.rows() if row.name != own]
        mine = self._reserved(own)
        free, used = space_of(self.root)
        room_bytes = used + free  # as df counts it: blocks that are kept for root, or by the host, are neither
        outstanding = sum(self._outstanding(row) for row in rows if row.state == "partial")
        free, used = free - outstanding, used + outstanding
        margin = min(MARGIN_BYTES_MAX, int(room_bytes * MARGIN_FRACTION))
        held = sum(row.reserved_bytes for row in rows) + mine
        quota = self.settings.cache_bytes_max
        room_of_quota = quota - held if quota is not None else free
        hard = max(needed_bytes + margin - free, needed_bytes - room_of_quota)
        above = needed_bytes + used - int(self.settings.local_high_water * room_bytes)
        low = max(0.0, self.settings.local_high_water - EVICTED_FRACTION)
        soft = needed_bytes + used - int(low * room_bytes) if above > 0 else 0
        room = AdmissionPlan(needed_bytes, max(0, min(free - margin, room_of_quota)))
        going = 0
        for row in self._order(rows):
            if going >= max(hard, soft):
                break
            if row.is_pinned or self.is_pinned(row.name):
                room.pinned.append(row)
            elif read_lease.is_held(self.lease_path(row.name)):
                room.leased.append(row)
            else:
                room.evicted.append(row)
                going += row.reserved_bytes
        room.fits = going >= hard
        return room

    def _order(self, rows: Iterable[Row]) -> list[Row]:
        """H4. What somebody fills is leased, and is passed over for that."""
        return sorted(rows, key=lambda row: (row.state != "partial", row.used_unix_ns, row.name))

    def _outstanding(self, row: Row) -> int:
        incoming = self.incoming(row.name)
        return max(0, row.reserved_bytes - (allocated_bytes(incoming) if incoming is not None else 0))

    def _full(self, frozen: FileSet, room: AdmissionPlan) -> CapacityError:
        def said(rows: list[Row]) -> str | None:
            return ", ".join(f"{row.uri} ({human_bytes(row.reserved_bytes)})" for row in rows) or None

        return CapacityError(
            f"the cache has no room for {frozen.uri}: {human_bytes(room.needed_bytes)} are needed, "
            f"{human_bytes(room.free_bytes)} are free",
            hint="Unpin or stop using something (`tierckpt cache ls` lists the cache), raise cache_bytes_max, "
            "or give local_root a larger disk. Nothing was fetched, nothing was evicted",
            tier=Tier.LOCAL,
            needed_bytes=room.needed_bytes,
            free_bytes=room.free_bytes,
            evictable_bytes=sum(row.reserved_bytes for row in room.evicted),
            pinned_bytes=sum(row.reserved_bytes for row in room.pinned),
            leased_bytes=sum(row.reserved_bytes for row in room.leased),
            pinned=said(room.pinned),
            leased=said(room.leased),
        )

    def evict(self, name: str) -> bool:
        """Remove one entry; False when it is pinned or leased."""
        path = self.lease_path(name)
        with translated(self.root):
            make_dirs(path.parent)
            with try_lock(path, remove=True) as is_free:
                if not is_free or self.is_pinned(name):
                    return False
                incoming = self.incoming(name)
                for directory in (self.directory(name), *([incoming] if incoming is not None else [])):
                    remove_dir(directory)
                log.info("evicted %s from the cache", name)
        self.remove_state(name)
        return True

    def _clear_evicted(self) -> None:
        for left in matching(self.root, ".*.evicted"):
            remove_tree(left, ignore_errors=True)
        for left in matching(self.root, "index.sqlite*"):  # of earlier versions: what it told the files tell
            left.unlink(missing_ok=True)

    def _admission(self) -> contextlib.AbstractContextManager[None]:
        """One process of the node admits at a time. Raises OperationTimeoutError."""
        return lock(self.root / ".admission.lock", ADMISSION_SECONDS, f"admissions to {self.root}")


def allocated_bytes(directory: Path) -> int:
    """Bytes that the files below ``directory`` take on the disk, our own small ones not counted."""
    total = 0
    for folder, below, names in os.walk(directory):
        if PRIVATE_DIR in below:
            below.remove(PRIVATE_DIR)
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512  # noqa: PTH118
    return total


def evict_all(pool: Pool, rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Evict ``rows``; return what went and what was in use or pinned."""
    went: list[Row] = []
    stayed: list[Row] = []
    for row in rows:
        (went if pool.evict(row.name) else stayed).append(row)
    return went, stayed
