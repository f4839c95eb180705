"""The disk under the local root: can it be written, is it a disk at all."""

from __future__ import annotations

from pathlib import Path

from ..config import Settings
from ..errors import ConfigError, ObjectNotFoundError, TierckptError
from ..stores.local import make_dirs
from ..telemetry import logger

log = logger("disk")

MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}

_checked: set[Path] = set()


def check_local_root(settings: Settings) -> None:
    """Make ``local_root`` and warn, once per process, when it is memory and not a disk.

    Raises:
        PermissionDeniedError: not writable, or on a read-only mount.
        ConfigError: it cannot be a directory.
    """
    root = settings.local_root
    try:
        make_dirs(root)
    except TierckptError as error:
        hint = "Set TIERCKPT_LOCAL_ROOT (or local_root=) to a writable directory on node-local SSD"
        kind = ConfigError if isinstance(error, ObjectNotFoundError) else type(error)
        raise kind(f"local_root {root} cannot be used: {error.message}", hint=hint, **error.context) from error
    if root in _checked:
        return
    _checked.add(root)
    kind_of_disk = filesystem_type(root)
    if kind_of_disk in MEMORY_FILESYSTEMS and not settings.allow_tmpfs:
        log.warning(
            "local_root %s is on %s: checkpoints there take memory and do not survive the node. Point it at an SSD, "
            "or set TIERCKPT_ALLOW_TMPFS=true if that is meant",
            root,
            kind_of_disk,
        )


def filesystem_type(path: Path) -> str:
    """Return the type of the file system that holds ``path`` (``ext4``, ``tmpfs``, ``nfs4``), '' if unknown."""
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    target = str(path.resolve())
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].replace("\\040", " ")
        # The last of equal mounts lies on top, so >= lets it win.
        if (target == mount or target.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind
