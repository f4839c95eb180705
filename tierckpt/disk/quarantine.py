"""Quarantine: moves files of an unexpected kind below a local root to ``<local_root>/quarantine/<hex>.<name>``.

A link or a FIFO in place of a file is not read, waited for, or followed: the work continues as if it were missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from ..errors import StoreError
from ..ownership import check, check_owner, root_of
from ..telemetry import QUARANTINES, logger
from ..types import Tier
from .illness import requests
from .processes import stem_of

log = logger("disk")

QUARANTINE = "quarantine"
_OTHER_KIND = {errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV}
"""Errors for a link, a directory, a socket, a FIFO without reader, a device without driver."""
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """``os.open`` of a regular file, which never waits; below a local root it follows no link either.

    An entry of another kind under a local root is quarantined: then the file is missing, or made with O_CREAT.

    Raises:
        OSError: as ``os.open``.
        StoreError: an entry of another kind that cannot be quarantined.
        PermissionDeniedError: its directory is not safe to use, or another user owns it (``ownership``).
    """
    is_state = check(path.parent)
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if is_state else 0)
    for _ in range(2):
        try:
            with requests.counted():
                file = os.open(path, flags, mode)
        except OSError as error:
            if error.errno not in _OTHER_KIND:
                raise
        else:
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode):
                try:
                    if is_state:
                        check_owner(status, path)
                    return file
                except BaseException:
                    os.close(file)
                    raise
            os.close(file)
        if not set_aside(path):
            break
    raise StoreError(f"{path} is {kind_of(path)} and not a file", hint="Move it away", path=path, tier=Tier.LOCAL)


def set_aside(path: Path) -> bool:
    """Quarantine the unexpected entry ``path``. True also if it has vanished.

    False if it is under no local root, or cannot be moved.
    """
    root = root_of(path)
    if root is None or root == path:
        return False
    kind = kind_of(path)
    directory = root / QUARANTINE
    target = directory / f"{secrets.token_hex(4)}.{stem_of(path.name)}"
    try:
        if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
            directory.rename(directory.with_name(f"{QUARANTINE}.{secrets.token_hex(4)}"))
        directory.mkdir(0o700, exist_ok=True)
        check(directory)
        path.rename(target)
    except FileNotFoundError:
        return True
    except OSError as error:
        log.warning("%s is %s, does not belong there, and cannot be moved away: %s", path, kind, error.strerror)
        return False
    QUARANTINES.emit(1, tier=Tier.LOCAL)
    log.warning("%s was %s, which does not belong there: it is now %s", path, kind, target)
    return True


def kind_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return _KINDS.get(stat.S_IFMT(path.lstat().st_mode), "a device")
    return "nothing"
