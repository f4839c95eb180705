"""The cache entries on disk: list, pins, leases, reservations, and removal.

docs/internals/cache.md lists the files.

Invariants:
    H1  A reservation's name stays while its entry is renamed, so that no listing misses the entry.
    H2  An entry that is pinned, or leased by a live process, is not evicted: an eviction holds the lease alone.
    H3  An entry goes by one rename: a crash leaves it whole, or invisible.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

from ..config import Settings
from ..disk import read_lease
from ..disk.durable import make_dirs, matching, read_whole, remove_tree, replace_file, translated
from ..disk.file_lock import try_lock
from ..disk.local_root import make_local_root
from ..errors import TierckptError
from ..format.layout import PRIVATE_DIR
from ..telemetry import logger
from .file_set import FileSet, Receipt, stem_of
from .partial_entry import SUFFIX, read_entry, remove_dir
from .receipt import RECEIPT, read_receipt

log = logger("cache")

RESERVED_BYTES_MAX = 64
KNOWN_MAX = 4096

_INCOMING = re.compile(rf"^\.(?P<name>.+)\.[0-9a-f]{{8}}{re.escape(SUFFIX)}$")


State: TypeAlias = Literal["partial", "complete"]


@dataclass(frozen=True, slots=True)
class CacheRow:
    """``reserved_bytes`` counts for the quota: size of a whole entry, reservation of a partial one."""

    name: str
    uri: str
    version: str
    files: int
    size_bytes: int
    state: State
    reserved_bytes: int
    is_pinned: bool
    used_unix_ns: int


@lru_cache(maxsize=KNOWN_MAX)
def read_known(directory: Path, _inode: int, _changed_ns: int) -> Receipt | None:
    return read_receipt(directory)


class Pool:
    """The cache below ``settings.local_root``. Blocking; safe for threads and processes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.root = settings.local_root / "cache"

    def directory(self, name: str) -> Path:
        return self.root / name

    def state_dir(self, name: str) -> Path:
        return self.root / ".state" / name

    def rows(self, *uris: str) -> list[CacheRow]:
        """Return all entries, or those of ``uris``, least recently used first."""
        stems = {stem_of(uri) for uri in uris}
        names = [name for name in self._names() if not uris or name.rpartition("-")[0] in stems]
        found = [row for name in names if (row := self.describe(name)) is not None]
        selected = [row for row in found if not uris or row.uri in uris]
        return sorted(selected, key=lambda row: (row.used_unix_ns, row.name))

    def _names(self) -> set[str]:
        """Names of whole and partial entries; none is missed (H1)."""
        found = {path.name for path in matching(self.root / ".state", "*")}
        for path in matching(self.root, "*"):
            if match := _INCOMING.match(path.name):
                found.add(match["name"])
            elif not path.name.startswith("."):
                found.add(path.name)
        return found

    def incoming(self, name: str) -> Path | None:
        return next(iter(matching(self.root, f".{glob.escape(name)}.*{SUFFIX}")), None)

    def describe(self, name: str) -> CacheRow | None:
        for _ in range(2):  # it may be published between the two checks
            if (receipt := self.receipt(name)) is not None:
                return self._row(name, receipt.frozen, "complete", receipt.frozen.size_bytes)
            incoming = self.incoming(name)
            if incoming is not None and (frozen := read_entry(incoming)) is not None:
                return self._row(name, frozen, "partial", self.reserved(name) or allocated_bytes(incoming))
        return None

    def _row(self, name: str, frozen: FileSet, state: State, reserved_bytes: int) -> CacheRow:
        size_bytes, is_pinned, used_ns = frozen.size_bytes, self.is_pinned(name), self._used_ns(name)
        files = len(frozen.files)
        return CacheRow(name, frozen.uri, frozen.version, files, size_bytes, state, reserved_bytes, is_pinned, used_ns)

    def receipt(self, name: str) -> Receipt | None:
        """Return the receipt of a whole entry. It is read again after a change only."""
        try:
            status = (self.directory(name) / RECEIPT).stat()
        except OSError:
            return None
        return read_known(self.directory(name), status.st_ino, status.st_mtime_ns)

    def _used_ns(self, name: str) -> int:
        for path in (self.state_dir(name) / "used", self.directory(name)):
            try:
                return path.stat().st_mtime_ns
            except OSError:
                continue
        return 0

    def used(self, name: str) -> None:
        now, path = time.time_ns(), self.state_dir(name) / "used"
        with contextlib.suppress(OSError, TierckptError):
            make_dirs(path.parent, is_durable=False)
            path.touch()
            os.utime(path, ns=(now, now))

    def is_pinned(self, name: str) -> bool:
        return (self.state_dir(name) / "pinned").exists()

    def pin(self, name: str, pinned: bool = True) -> None:
        path = self.state_dir(name) / "pinned"
        with translated(path):
            make_dirs(path.parent)
            path.touch() if pinned else path.unlink(missing_ok=True)
        if not pinned:
            self.remove_state(name)

    def lease_path(self, name: str) -> Path:
        return self.root / ".leases" / f"{name}.lock"

    def lease(self, name: str) -> contextlib.ExitStack:
        """Hold an entry against eviction, also in other processes. Then check that it still exists."""
        make_local_root(self.settings)
        stack = contextlib.ExitStack()
        stack.callback(self.remove_state, name)
        stack.enter_context(read_lease.holding(self.lease_path(name)))
        stack.callback(self.used, name)
        return stack

    def leases(self, name: str) -> list[int]:
        return read_lease.holders(self.lease_path(name))

    def is_leased(self, name: str) -> bool:
        return read_lease.is_held(self.lease_path(name))

    def remove_state(self, name: str) -> None:
        """Remove an evicted entry's state, unless a process is about to fill it (H2)."""
        with contextlib.suppress(OSError, TierckptError), try_lock(self.lease_path(name), remove=True) as is_free:
            if is_free and not self.directory(name).exists() and self.incoming(name) is None:
                remove_tree(self.state_dir(name), ignore_errors=True)

    def reserved(self, name: str) -> int:
        try:
            return int(read_whole(self.state_dir(name) / "reserved", RESERVED_BYTES_MAX))
        except (TierckptError, ValueError):
            return 0

    def note_reserved(self, name: str, size_bytes: int) -> None:
        """After a crash the next reservation replaces it."""
        path = self.state_dir(name) / "reserved"
        temporary = path.with_name("reserved.new")
        temporary.write_text(str(size_bytes))
        replace_file(temporary, path)

    def evict(self, name: str) -> bool:
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

    def clear_evicted(self) -> None:
        for left in matching(self.root, ".*.evicted"):
            remove_tree(left, ignore_errors=True)


def allocated_bytes(directory: Path) -> int:
    total = 0
    for folder, below, names in os.walk(directory):
        if PRIVATE_DIR in below:
            below.remove(PRIVATE_DIR)
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512  # noqa: PTH118
    return total
