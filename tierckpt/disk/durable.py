"""The one place that knows what makes a local file durable, and what its errors mean. Synchronous.

A file is durable when its bytes, its name and every new directory above it are on the disk:
fsync(file), rename, fsync(directory), fsync(parent of each directory made).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from ..errors import (
    CapacityError,
    ConfigError,
    ManifestError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from ..ownership import check, file_mode, mode_of, root_of
from ..types import Buffer, Tier
from .illness import requests
from .processes import current_umask
from .quarantine import open_regular, set_aside
from .temporary_names import stem_of, temporary_of_this_process

MAKES_MAX = 100
PATH_BYTES_MAX = 4095 - 200
"""A path has 4,095 bytes at most; files of ours below it, and temporary names, take the rest."""
SET_LOCAL_ROOT = "Set TIERCKPT_LOCAL_ROOT (or local_root=) to a writable directory of this user on node-local SSD"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_MISSING = {errno.ENOENT, errno.ENOTDIR}
# What a network mount or a FUSE daemon answers while its server is away.
_AWAY = {errno.ETIMEDOUT, errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.EREMOTEIO}
# What link() answers where a hard link cannot be made: other filesystem, none supported, too many, or forbidden.
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def translate_os_error(error: OSError, path: Path, tier: Tier) -> TierckptError:
    """Return the error of ours that says what ``error`` means for ``path``. Chosen by errno, never by text."""
    if isinstance(error, TierckptError):
        return error
    if error.errno in _NO_ROOM:
        free = _free_bytes(path)
        return CapacityError(
            f"no room to write {path}: {free} bytes are free",
            hint="Free some space or the quota, keep fewer checkpoints, or choose another directory",
            path=path,
            tier=tier,
            free_bytes=free,
        )
    if error.errno in _DENIED:
        is_read_only = error.errno == errno.EROFS
        remedy = "Remount it writable" if is_read_only else "Check its owner and mode"
        if tier is Tier.SHARED and not is_read_only:
            remedy += " (users who share it need one group, umask 002, and `chmod g+s` on its directory)"
        return PermissionDeniedError(
            f"{path} is on a read-only mount" if is_read_only else f"no permission for {path}",
            hint=SET_LOCAL_ROOT if root_of(path) is not None else f"{remedy}, or choose another place",
            path=path,
            tier=tier,
        )
    if error.errno == errno.ENAMETOOLONG:
        return _too_long(path, "")
    if error.errno in _MISSING:
        return ObjectNotFoundError(f"{path} does not exist", path=path, tier=tier)
    kind = StoreUnavailableError if error.errno in _AWAY else StoreError
    return kind(f"{path}: {error.strerror or error}", path=path, tier=tier, errno=error.errno)


def check_names(directory: Path, paths: Iterable[str] = ()) -> None:
    """Raise ConfigError when ``directory``, or one of ``paths`` below it, is too long for its file system."""
    name_bytes_max = _name_bytes_max(directory)
    for path in ("", *paths):
        whole = os.fsencode(directory / path)
        longest = max(map(len, whole.split(b"/")))
        if longest > name_bytes_max:
            raise _too_long(directory / path, f" ({longest} bytes in one name, {name_bytes_max} are the limit there)")
        if len(whole) > PATH_BYTES_MAX:
            raise _too_long(directory / path, f" ({len(whole)} bytes, {PATH_BYTES_MAX} are the limit)")


def _name_bytes_max(directory: Path) -> int:
    for candidate in (directory, *directory.parents):
        try:
            limit = os.pathconf(candidate, "PC_NAME_MAX")
            return limit if limit > 0 else 255
        except OSError:  # not made yet, or itself too long
            continue
    return 255


def _too_long(path: Path, why: str) -> ConfigError:
    return ConfigError(f"the name {path} is too long for its file system{why}", hint="Shorten it, or leave it out")


def _free_bytes(path: Path) -> int:
    for candidate in (path, *path.parents):
        try:
            return shutil.disk_usage(candidate).free
        except OSError:
            continue
    return 0


@contextlib.contextmanager
def translated(path: Path, tier: Tier = Tier.LOCAL, *, is_above: bool = False) -> Iterator[None]:
    """Raise what the system refuses as an error of ours; ``is_above``: of the path below ``path`` that it names."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TierckptError):
            raise
        where = Path(os.fsdecode(error.filename)) if is_above and error.filename else path
        raise translate_os_error(error, where, tier) from error


def fsync_dir(path: Path) -> None:
    """Make the names in directory ``path`` durable. Cost: one fsync."""
    with translated(path), requests.asking():
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        except OSError as error:
            # Some network and FUSE filesystems have no fsync of a directory; their names are as durable as they get.
            if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}:
                raise
        finally:
            os.close(file)


def matching(directory: Path, pattern: str) -> list[Path]:
    """What lies in ``directory`` under names like ``pattern``, sorted; nothing where it is gone, or no directory.

    Other processes remove what is found at any moment. (``Path.glob`` raises when they remove ``directory`` itself.)
    """
    try:
        names = os.listdir(directory)  # noqa: PTH208  # a third of the time
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return []
    return [directory / name for name in sorted(names) if fnmatchcase(name, pattern)]


def make_dirs(path: Path, *, tier: Tier = Tier.LOCAL, is_durable: bool = True) -> None:
    """Make directory ``path`` and its parents, each one durable. Cost: one fsync for each directory made.

    Below a local root nobody else can write to what is made, whatever the umask; what lies there and is no directory is
    set aside (``quarantine``).

    Raises:
        PermissionDeniedError: a directory below a local root is not safe to use (``ownership``).
        ConfigError: the local root, or a directory on the way to it, is a file.
    """
    with translated(path, tier):
        check(path)
        for left in reversed(range(MAKES_MAX)):
            try:
                _make_missing(path, is_durable=is_durable)
                return
            except FileNotFoundError as error:  # another process has removed one of them before the next was made
                if not left:
                    raise _not_made(path, error) from None
            except (FileExistsError, NotADirectoryError) as error:
                raise _not_made(path, error) from None


def _not_made(path: Path, error: OSError) -> OSError | ConfigError:
    """The error to raise for ``path``: the system's, unless the local root is no directory."""
    root = root_of(path)
    if root is None or root.is_dir():
        return error
    why = f"{error.filename} is not a directory" if error.errno != errno.ENOENT else f"{error.filename} cannot be made"
    return ConfigError(f"local_root {root} cannot be used: {why}", hint=SET_LOCAL_ROOT)


def _make_missing(path: Path, *, is_durable: bool) -> None:
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        _make_dir(directory)
        if is_durable:
            fsync_dir(directory.parent)


def _make_dir(directory: Path) -> None:
    mode = mode_of(directory)
    try:
        with requests.asking():
            directory.mkdir(mode)
    except FileExistsError:  # another process made it, or it is no directory
        if not directory.is_dir():
            if not set_aside(directory):
                raise
            directory.mkdir(mode, exist_ok=True)


def read_whole(path: Path, size_bytes_max: int, *, tier: Tier = Tier.LOCAL) -> bytes:
    """Return the bytes of a small file.

    Raises:
        ManifestError: it is larger than ``size_bytes_max``, found before any memory is taken for it.
        ObjectNotFoundError, PermissionDeniedError, StoreError: as the file system says.
    """
    with translated(path, tier), os.fdopen(open_regular(path), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > size_bytes_max:
            raise ManifestError(f"{path}: {size_bytes} bytes is larger than any that tierckpt writes", tier=tier)
        return file.read(size_bytes)


def durable_write(path: Path, data: Buffer, *, tier: Tier = Tier.LOCAL) -> None:
    """Replace ``path`` by ``data``: a reader, or a crash, sees the old file or the whole new one, which is durable.

    The directory must exist. Cost: two fsyncs.
    """
    with translated(path, tier), temporary_beside(path, is_owned=tier is Tier.LOCAL) as temporary:
        check(path.parent)
        write_new(temporary, data, file_mode(path))
        publish(temporary, path)


def publish(new: Path, path: Path, file: int | None = None) -> None:
    """Give ``new``, whose bytes are durable, the name ``path``, durably: rename, fsync of the directory.

    ``file``: its descriptor, where its bytes are not durable yet. A directory takes the place of an empty one only.
    Raises OSError, or an error of ours.
    """
    if file is not None:
        with requests.asking():
            os.fsync(file)
    replace_file(new, path)
    fsync_dir(path.parent)


def replace_file(new: Path, path: Path) -> None:
    """Rename ``new`` over ``path``; a directory of that name below a local root is set aside. Raises OSError."""
    try:
        with requests.asking():
            new.replace(path)
    except IsADirectoryError:
        if not set_aside(path):
            raise
        new.replace(path)


def durable_link(source: Path, target: Path, *, tier: Tier = Tier.LOCAL) -> bool:
    """Give the file ``source`` the second name ``target``, durably. False where no hard link can be made (then copy).

    Outside of a local root ``target`` gets the mode and the group of a new file there. False where it cannot.

    Raises:
        PreconditionFailedError: ``target`` is there and is another file.
    """
    with translated(target, tier):
        try:
            os.link(source, target)
        except FileExistsError:
            if not target.samefile(source):
                raise PreconditionFailedError(f"{target} exists and is another file", path=target, tier=tier) from None
        except OSError as error:
            if error.errno in _CANNOT_LINK:
                return False
            raise
        if root_of(target) is None and not _match_new_file(target):
            target.unlink()
            return False
        fsync_file(target)
        fsync_dir(target.parent)
        return True


def _match_new_file(path: Path) -> bool:
    """Give ``path``, which was made below a local root, the mode and the group of a new file at its place.

    Its mode there is narrower than the umask lets it be, and its group this process's, whatever the directory's is.
    A file made under another umask keeps its mode. False when that takes another file: an ACL, a group of others.
    """
    try:
        os.getxattr(path.parent, "system.posix_acl_default")
        return False
    except OSError:  # no such ACL, or no ACLs at all
        pass
    status, folder, umask = path.stat(), path.parent.stat(), current_umask()
    try:
        if folder.st_mode & stat.S_ISGID and folder.st_gid != status.st_gid:
            os.chown(path, -1, folder.st_gid)
        if umask is not None and stat.S_IMODE(status.st_mode) == 0o644 & ~umask:
            path.chmod(0o666 & ~umask)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def temporary_beside(path: Path, *, is_owned: bool = False) -> Iterator[Path]:
    """Yield a new name beside ``path``; whatever is left under it is removed. ``is_owned``: it says whose it is."""
    name = temporary_of_this_process(path.name) if is_owned else f".{stem_of(path.name)}.{secrets.token_hex(6)}.tmp"
    temporary = path.parent / name
    try:
        yield temporary
    finally:
        # Failing to remove it must not hide the error that got us here; the name is never listed.
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108


def create_file(path: Path, mode: int = 0o666) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def write_new(path: Path, data: Buffer, mode: int = 0o666) -> None:
    with requests.asking():
        file = create_file(path, mode)
    try:
        write_all(file, data)
        with requests.asking():
            os.fsync(file)
    finally:
        os.close(file)


def write_all(file: int, data: Buffer) -> int:
    view = memoryview(data).cast("B")
    size_bytes = len(view)
    while view:
        with requests.asking():
            view = view[os.write(file, view) :]
    return size_bytes


def fsync_file(path: Path) -> None:
    with requests.asking():
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
