"""Refuses paths that another user has made, can change, or has linked.

Invariants:
    O1  Directories at and under a local root belong to this user or to root, no other user can write to them, and no
        link of another user leads to them.
    O2  A link is trusted if this user or root made it and no other user can replace it: in a directory that others
        cannot write to, or in a sticky one of this user or root (``/tmp``).
    O3  The path to a directory is checked once per process, by device and inode; its owner and mode at every use.
    O4  Only root is trusted besides this user: root, too, refuses a directory of another user.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from .errors import PermissionDeniedError, TierckptError
from .telemetry import logger
from .types import Tier

log = logger("disk")

LINKS_MAX = 40
"""As many as the kernel follows (path_resolution(7))."""
KNOWN_MAX = 1 << 16
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_DATA = ("checkpoints", "cache")
"""``local_readable_by`` applies to these. Everything else is for this user alone."""

roots: dict[Path, int] = {}
"""Mode of the data of each local root."""
_checked_directories: set[tuple[int, int, int]] = set()


def open_root(root: Path, mode: int = 0o700) -> None:
    """Check ``root`` now, and everything used below it later (O1). ``mode`` is the access of other users to its data.

    Raises PermissionDeniedError: another user owns it or its data, can write to it, or made a link to it.
    """
    is_new = root not in roots
    roots[root] = mode
    try:
        check(root)
        for name in _DATA:
            check(root / name)
    except BaseException:
        if is_new:
            del roots[root]
        raise
    if is_new:
        _set_modes(root, mode)
        _warn_of_exposed(root)


def check(directory: Path) -> bool:
    """Return False for a ``directory`` outside the local roots. Cost: one stat.

    Raises PermissionDeniedError: another user can write to it, or above it up to the root (O1).
    """
    root = root_of(directory)
    if root is None:
        return False
    try:
        status = os.stat(directory)  # noqa: PTH116
    except PermissionError:
        raise _refused(directory, f"cannot be reached by user {os.geteuid()}") from None
    except OSError:  # its replacement is made in its parent
        return check(directory.parent) if directory != root else bool(resolve(root))
    key = (os.geteuid(), status.st_dev, status.st_ino)
    if key not in _checked_directories:
        if directory != root:
            check(directory.parent)
        resolve(directory)
    if stat.S_ISDIR(status.st_mode) and (fault := _fault(status)):
        raise _refused(directory, fault)
    if len(_checked_directories) >= KNOWN_MAX:
        _checked_directories.clear()
    _checked_directories.add(key)
    return True


def check_owner(status: os.stat_result, path: Path) -> None:
    """Raise PermissionDeniedError for another user than this one or root."""
    if not _is_trusted(status.st_uid):
        raise _refused(path, _fault(status))


def mode_of(directory: Path) -> int:
    """No other user may write at, under, or above a local root."""
    root = root_of(directory)
    if root is None:
        return 0o755 if any(one.is_relative_to(directory) for one in tuple(roots)) else 0o777
    if directory == root or (directory.parent == root and directory.name in _DATA):
        return roots[root]
    return 0o700 if directory.parent == root else 0o755


def file_mode(path: Path) -> int:
    """No other user may write under a local root."""
    return 0o644 if root_of(path) is not None else 0o666


def root_of(path: Path) -> Path | None:
    text = f"{path}/"
    return next((root for root in tuple(roots) if text.startswith(f"{root}/".replace("//", "/"))), None)


def resolve(path: Path) -> Path:
    """Resolve existing links. Raises PermissionDeniedError: another user made one, or can replace it (O2)."""
    current, waiting = Path("/"), [*path.absolute().parts[1:]]
    parent, links = current.lstat(), 0
    while waiting:
        name = waiting.pop(0)
        if name == "..":
            current = current.parent
            parent = current.lstat()
            continue
        try:
            status = (current / name).lstat()
        except OSError:
            return current.joinpath(name, *waiting)
        if not stat.S_ISLNK(status.st_mode):
            current, parent = current / name, status
            continue
        links += 1
        if not _is_trusted(status.st_uid) or _can_be_replaced(parent):
            raise _refused(path, f"is reached through the link {current / name}, which another user controls")
        if links > LINKS_MAX:
            raise _refused(path, f"is reached through links that never end, {current / name} among them")
        target = (current / name).readlink()
        if target.is_absolute():
            current = Path("/")
            parent = current.lstat()
        waiting = [part for part in target.parts if part != "/"] + waiting
    return current


def untrusted_reason(path: Path) -> str:
    """Return why other users may have written ``path``; '' if they cannot."""
    try:
        found = resolve(path)
        folder, status = found.parent.lstat(), found.lstat()
    except TierckptError as error:
        return error.message
    except OSError as error:
        return f"it cannot be looked at: {error.strerror}"
    if fault := _fault(status):
        return f"it {fault}"
    if fault := _fault(folder):
        return f"its directory {found.parent} {fault}"
    return ""


def _is_trusted(uid: int) -> bool:
    return uid in (os.geteuid(), 0)


def _fault(status: os.stat_result) -> str:
    if not _is_trusted(status.st_uid):
        return f"belongs to user {status.st_uid}, not to user {os.geteuid()}"
    if status.st_mode & OTHERS_WRITE:
        return f"can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _can_be_replaced(folder: os.stat_result) -> bool:
    if not _is_trusted(folder.st_uid):
        return True
    return bool(folder.st_mode & OTHERS_WRITE) and not folder.st_mode & stat.S_ISVTX


def _refused(path: Path, fault: str) -> PermissionDeniedError:
    root = root_of(path)
    what = f"local_root {path}" if root == path else f"{path}, below local_root," if root else str(path)
    return PermissionDeniedError(
        f"{what} {fault}",
        hint="Set TIERCKPT_LOCAL_ROOT (or local_root=) to a directory that only you can write to, "
        "or to a new one, which is made for you alone. If this one is yours and you know all files in it: "
        "`chmod -R go-w` it; on file systems without modes (SMB, vfat), mount it with your uid and umask=077",
        path=path,
        tier=Tier.LOCAL,
    )


def _set_modes(root: Path, mode: int) -> None:
    """Set ``mode`` on existing data; only widen the root."""
    wider = [root] if mode != 0o700 else []
    for directory in (*wider, *(root / name for name in _DATA)):
        try:
            status = directory.stat()
            now = stat.S_IMODE(status.st_mode)
            new_mode = mode if directory != root else now | mode
            if status.st_uid != os.geteuid() or now == new_mode:
                continue
            directory.chmod(new_mode)
        except OSError:  # missing, or on a read-only mount
            continue
        if now & 0o055 & ~new_mode:
            log.warning(
                "%s could be read by other users and is now this user's alone; local_readable_by opens it", directory
            )


def _warn_of_exposed(root: Path) -> None:
    for parent in resolve(root).parents:
        with contextlib.suppress(OSError):
            mode = parent.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                log.warning("local_root %s is in %s, where any user can rename it: `chmod +t` that", root, parent)
                return
