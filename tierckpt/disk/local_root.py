"""The disk under the local root: checks its kind and access, and removes leftovers of killed processes."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from ..config import Settings
from ..errors import TierckptError
from ..ownership import open_root
from ..telemetry import logger
from .durable import make_dirs
from .file_lock import try_lock
from .processes import is_abandoned, is_temporary

log = logger("disk")

MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}

LEFTOVER_SECONDS = 3600.0
"""A live transfer writes a temporary file more often."""

checked: set[Path] = set()


_MODES = {"user": 0o700, "group": 0o750, "all": 0o755}


def use_local_root(settings: Settings) -> None:
    """Check ``local_root`` and mark it as used by this process.

    Raises PermissionDeniedError: another user owns it, can write to it, or controls a link above it.
    """
    open_root(settings.local_root, _MODES[settings.local_readable_by])


def make_local_root(settings: Settings) -> Path:
    """Raises PermissionDeniedError: not safe to use, or not writable. ConfigError: it cannot be a directory."""
    use_local_root(settings)
    make_dirs(settings.local_root)
    return settings.local_root


def check_local_root(settings: Settings) -> None:
    """Warn, once per process, if it is in memory, and clear leftovers."""
    root = make_local_root(settings)
    if root in checked:
        return
    checked.add(root)
    clear_leftovers(root)
    kind_of_disk = filesystem_type(root)
    if kind_of_disk in MEMORY_FILESYSTEMS:
        log.warning(
            "local_root %s is on %s: checkpoints there take memory and do not survive the node. Point it at an SSD",
            root,
            kind_of_disk,
        )


def clear_leftovers(local_root: Path) -> int:
    """Remove temporary files and locks of killed processes. Returns how many.

    Temporary files of unknown owners are removed after LEFTOVER_SECONDS without a write. A lock is removed while it is
    held (K3), and never if its journal entry exists: its next owner would take the lock's name for the entry's.
    """
    removed = 0
    before = time.time() - LEFTOVER_SECONDS
    for folder, _, names in os.walk(local_root):
        for name in names:
            if is_temporary(name) or name.endswith(".lock"):
                with contextlib.suppress(OSError, TierckptError):  # in use, gone, or another user's
                    removed += _clear(Path(folder, name), before)
    if removed:
        log.info("removed %d files that killed processes had left under %s", removed, local_root)
    return removed


def _clear(path: Path, before_unix_seconds: float) -> bool:
    if is_abandoned(path.name):
        path.unlink()  # only its ended process used this name
        return True
    if path.stat().st_mtime > before_unix_seconds:
        return False
    if is_temporary(path.name):
        path.unlink()
        return True
    if path.with_suffix(".json").exists():
        return False
    with try_lock(path, remove=True) as is_held:
        return bool(is_held)


def filesystem_type(path: Path) -> str:
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    target = str(path.resolve())
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].replace("\\040", " ")
        # the last of equal mounts is on top
        if (target == mount or target.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind
