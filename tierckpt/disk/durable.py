"""Durable local files, and the meaning of their errors. Synchronous.

A file is durable after fsync(file), rename, fsync(directory), fsync(parent of each directory made).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

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
from ..quantities import human_bytes
from ..resources import exhausted
from ..types import Buffer, Json, Tier
from .illness import requests
from .processes import current_umask, stem_of, temporary_of_this_process
from .quarantine import open_regular, set_aside

MAKES_MAX = 100
NAME_BYTES_MAX = 255
PATH_BYTES_MAX = 4095 - 200
"""Our files below a path, and temporary names, take the rest."""
SET_LOCAL_ROOT = "Set TIERCKPT_LOCAL_ROOT (or local_root=) to a writable directory of this user on node-local SSD"
UNKNOWN_BYTES = 1 << 62
RECORD_BYTES_MAX = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_ROOM = {
    errno.ENOSPC: "",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "it is larger than a file can be there",
}
_NO_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EISDIR, errno.EPERM, errno.EACCES}
"""Errors of an fsync of a directory, or of a file open for reading."""
_DENIED = {
    errno.EACCES: "no permission",
    errno.EPERM: "the file system does not permit this",
    errno.EROFS: "it is on a read-only mount",
}
_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.ENOLCK, errno.EXDEV, errno.ENOTTY}
_MISSING = {errno.ENOENT, errno.ENOTDIR}
# Errors of a network mount or FUSE daemon during an outage of its server.
_OUTAGE_ERRNOS = {errno.ETIMEDOUT, errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.EREMOTEIO}
# Errors of a file system without such a link or call.
CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


class Space(NamedTuple):
    free_bytes: int
    used_bytes: int


def translate_os_error(error: OSError, path: Path, tier: Tier) -> TierckptError:
    if isinstance(error, TierckptError):
        return error
    if (found := exhausted(error)) is not None:
        return found
    if error.errno in _NO_ROOM:
        free = 0
        with contextlib.suppress(OSError):
            free = space_of(path).free_bytes
        why = _NO_ROOM[error.errno] or f"{free} bytes are free"
        return CapacityError(
            f"no room to write {path}: {why}",
            hint="Free some space or the quota, keep fewer checkpoints, raise `ulimit -f`, or choose another directory",
            path=path,
            tier=tier,
            free_bytes=free,
        )
    if error.errno in _DENIED:
        users = (
            "Check its owner and mode (users who share it need one group, umask 002, and `chmod g+s` on its directory)"
        )
        hint = f"{users}, or choose another place" if root_of(path) is None else SET_LOCAL_ROOT
        return PermissionDeniedError(f"{path}: {_DENIED[error.errno]}", hint=hint, path=path, tier=tier)
    if error.errno == errno.ENAMETOOLONG:
        return _too_long(path, "")
    if error.errno in _MISSING:
        return ObjectNotFoundError(f"{path} does not exist", path=path, tier=tier)
    kind, hint = StoreError, ""
    if error.errno in _OUTAGE_ERRNOS:
        kind, hint = StoreUnavailableError, "Look whether the server of this mount answers; remount it when it is stale"
    elif error.errno in _NOT_SUPPORTED:
        hint = "The file system there cannot do this, or has no such name: choose a directory on another one"
    return kind(f"{path}: {error.strerror or error}", hint=hint, path=path, tier=tier, errno=error.errno)


def space_of(path: Path) -> Space:
    """Return the space on the nearest existing parent; ``UNKNOWN_BYTES`` if FUSE reports none. Raises OSError."""
    for candidate in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            disk = os.statvfs(candidate)
            if not disk.f_blocks:
                return Space(UNKNOWN_BYTES, 0)
            size = disk.f_frsize
            return Space(disk.f_bavail * size, (disk.f_blocks - disk.f_bfree) * size)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def require_room(place: Path, size_bytes: int, what: str, hint: str, *, more_bytes: int = 0) -> None:
    """Raise CapacityError unless ``place`` has room for ``what`` and for ``more_bytes`` (negative: it has a part)."""
    free = space_of(place).free_bytes
    if free < size_bytes + more_bytes:
        raise CapacityError(
            f"{what} has {human_bytes(size_bytes)}, {human_bytes(free)} are free for {place}",
            hint=hint,
            tier=Tier.LOCAL,
            needed_bytes=size_bytes,
            free_bytes=free,
        )


def check_names(directory: Path, paths: Iterable[str] = ()) -> None:
    for path in ("", *paths):
        whole = os.fsencode(directory / path)
        longest = max(map(len, whole.split(b"/")))
        if longest > NAME_BYTES_MAX:
            raise _too_long(directory / path, f" ({longest} bytes in one name, {NAME_BYTES_MAX} are the limit)")
        if len(whole) > PATH_BYTES_MAX:
            raise _too_long(directory / path, f" ({len(whole)} bytes, {PATH_BYTES_MAX} are the limit)")


def _too_long(path: Path, why: str) -> ConfigError:
    return ConfigError(f"the name {path} is too long for its file system{why}", hint="Shorten it, or leave it out")


@contextlib.contextmanager
def translated(path: Path, tier: Tier = Tier.LOCAL, *, is_above: bool = False) -> Iterator[None]:
    """Raise typed errors for OS errors; ``is_above``: name the error's path under ``path``."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TierckptError):
            raise
        where = Path(os.fsdecode(error.filename)) if is_above and error.filename else path
        raise translate_os_error(error, where, tier) from error


@contextlib.contextmanager
def closing_file(file: int) -> Iterator[int]:
    """Close the descriptor ``file`` at the end."""
    try:
        yield file
    finally:
        os.close(file)


def fsync_dir(path: Path) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with translated(path), requests.counted(), closing_file(os.open(path, flags)) as file:
        try:
            os.fsync(file)
        except OSError as error:
            # Some network and FUSE filesystems cannot fsync a directory.
            if error.errno not in _NO_FSYNC:
                raise


def matching(directory: Path, pattern: str) -> list[Path]:
    """Return the sorted entries that match; [] without a directory. Safe against concurrent removals."""
    try:
        names = os.listdir(directory)  # noqa: PTH208  # a third of the time
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise translate_os_error(error, directory, Tier.LOCAL) from error
        return []
    return [directory / name for name in sorted(names) if fnmatchcase(name, pattern)]


def make_dirs(path: Path, *, tier: Tier = Tier.LOCAL, is_durable: bool = True) -> None:
    """Make directory ``path`` and its parents, durably. Cost: one fsync per directory made.

    Under a local root no other user can write to new directories, and an entry that is no directory is quarantined.

    Raises PermissionDeniedError: a directory below a local root is not safe to use (``ownership``). ConfigError: the
    local root, or a directory above it, is a file.
    """
    with translated(path, tier):
        check(path)
        for left in reversed(range(MAKES_MAX)):
            try:
                _make_missing(path, is_durable=is_durable)
                return
            except FileNotFoundError as error:  # another process has removed a parent
                if not left:
                    raise _not_made(path, error) from None
            except (FileExistsError, NotADirectoryError) as error:
                raise _not_made(path, error) from None


def _not_made(path: Path, error: OSError) -> OSError | ConfigError:
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
        mode = mode_of(directory)
        try:
            with requests.counted():
                directory.mkdir(mode)
        except FileExistsError:  # another process made it, or it is no directory
            if not directory.is_dir():
                if not set_aside(directory):
                    raise
                directory.mkdir(mode, exist_ok=True)
        if is_durable:
            fsync_dir(directory.parent)


def read_whole(path: Path, size_bytes_max: int) -> bytes:
    """Return the bytes of a small file.

    Raises ManifestError: larger than ``size_bytes_max``, checked before allocation. ObjectNotFoundError,
    PermissionDeniedError, StoreError.
    """
    with translated(path), os.fdopen(open_regular(path), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > size_bytes_max:
            raise ManifestError(f"{path}: {size_bytes} bytes is larger than any that tierckpt writes", tier=Tier.LOCAL)
        return file.read(size_bytes)


def read_record(path: Path) -> Json:
    """Return {} if the file is missing, damaged or another user's."""
    try:
        found = json.loads(read_whole(path, RECORD_BYTES_MAX))
    except (TierckptError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def durable_write(path: Path, data: Buffer, *, tier: Tier = Tier.LOCAL) -> None:
    """Replace ``path`` by ``data``, durably: a reader, or a crash, sees the old file or the whole new one.

    The directory must exist. Cost: two fsyncs.
    """
    with translated(path, tier), temporary_next_to(path, is_owned=tier is Tier.LOCAL) as temporary:
        check(path.parent)
        write_new(temporary, data, file_mode(path))
        publish(temporary, path)


def publish(new: Path, path: Path, file: int | None = None) -> None:
    """Rename ``new``, with durable bytes, to ``path``, durably. Raises OSError, or a typed error.

    ``file``: its descriptor, if its bytes are not durable yet. A directory replaces an empty one only.
    """
    if file is not None:
        with requests.counted():
            os.fsync(file)
    replace_file(new, path)
    fsync_dir(path.parent)


def replace_file(new: Path, path: Path) -> None:
    """Rename ``new`` over ``path``; under a local root, quarantine a directory there. Raises OSError."""
    try:
        with requests.counted():
            new.replace(path)
    except IsADirectoryError:
        if not set_aside(path):
            raise
        new.replace(path)


def hard_link(source: Path, target: Path) -> None:
    """Raises OSError: one of ``CANNOT_LINK`` without hard links."""
    try:
        with requests.counted():
            os.link(source, target)
    except FileNotFoundError as error:
        if source.lstat().st_nlink:
            raise
        # The kernel takes a file without a count of links for a removed one.
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(source)) from error


def rename_new(new: Path, path: Path) -> None:
    """Raises FileExistsError; OSError if unsupported."""
    if not hasattr(_libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))
    with requests.counted():
        if _libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))


def name_new(new: Path, path: Path) -> None:
    """Give the file ``new`` the name ``path``, unless that exists; its old name may go.

    A hard link decides between racing callers, also over NFS. Raises FileExistsError; OSError: one of ``CANNOT_LINK``.
    """
    try:
        hard_link(new, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        rename_new(new, path)


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a directory tree, following no link, even if one is planted meanwhile. Raises OSError.

    Works if inode numbers change at each stat (FUSE), unlike ``shutil.rmtree``.
    """
    try:
        with closing_file(os.open(path, _FOLDER)) as folder:
            _empty(folder)
        path.rmdir()
    except OSError:
        if not ignore_errors:
            raise


def _empty(folder: int) -> None:
    with os.scandir(folder) as found:
        entries = [*found]
    first: OSError | None = None
    for entry in entries:
        try:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
                continue
            with closing_file(os.open(entry.name, _FOLDER, dir_fd=folder)) as below:
                _empty(below)
            os.rmdir(entry.name, dir_fd=folder)
        except FileNotFoundError:
            continue  # another process removes it, too
        except OSError as error:
            first = first or error
    if first is not None:
        raise first


def is_same_file(one: Path, other: Path) -> bool:
    """With unstable inode numbers, size and time decide. Raises OSError."""
    status, status_of_other = one.stat(), other.stat()
    if os.path.samestat(status, status_of_other):
        return True
    seen, seen_of_other = ((found.st_size, found.st_mtime_ns) for found in (status, status_of_other))
    return seen == seen_of_other and one.stat().st_ino != status.st_ino


def durable_link(source: Path, target: Path, *, tier: Tier = Tier.LOCAL) -> bool:
    """Link ``source`` to ``target``, durably. False without hard links.

    Outside of a local root ``target`` gets the mode and group of a new file; False if that fails. Raises
    PreconditionFailedError: ``target`` is another file.
    """
    with translated(target, tier):
        try:
            hard_link(source, target)
        except FileExistsError:
            if not is_same_file(source, target):
                raise PreconditionFailedError(f"{target} exists and is another file", path=target, tier=tier) from None
        except OSError as error:
            if error.errno in CANNOT_LINK:
                return False
            raise
        if root_of(target) is None and not _match_new_file(target):
            target.unlink()
            return False
        fsync_file(target)
        fsync_dir(target.parent)
        return True


def _match_new_file(path: Path) -> bool:
    """Give ``path`` the mode and group of a new file. False if another file is needed: an ACL, a group of others."""
    with contextlib.suppress(OSError):
        os.getxattr(path.parent, "system.posix_acl_default")
        return False
    status, folder, umask = path.stat(), path.parent.stat(), current_umask()
    try:
        if folder.st_mode & stat.S_ISGID and folder.st_gid != status.st_gid:
            os.chown(path, -1, folder.st_gid)
        if umask is not None and stat.S_IMODE(status.st_mode) == 0o644 & ~umask:
            path.chmod(0o666 & ~umask)
    except OSError:
        return False
    return True


def link_or_copy(source: Path, target: Path) -> bool:
    """True for a hard link. Raises as ``durable_link``; OSError."""
    if durable_link(source, target):
        return True
    with temporary_next_to(target) as temporary:
        shutil.copyfile(source, temporary)
        fsync_file(temporary)
        publish(temporary, target)
    return False


@contextlib.contextmanager
def temporary_next_to(path: Path, *, is_owned: bool = False) -> Iterator[Path]:
    """Yield a new name next to ``path``; a file left under it is removed. ``is_owned``: the name tells its owner."""
    name = temporary_of_this_process(path.name) if is_owned else f".{stem_of(path.name)}.{secrets.token_hex(6)}.tmp"
    temporary = path.parent / name
    try:
        yield temporary
    finally:
        # Do not hide the original error; the name is never listed.
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108


def create_file(path: Path, mode: int = 0o666) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def write_new(path: Path, data: Buffer, mode: int = 0o666, *, is_durable: bool = True) -> None:
    with requests.counted():
        file = create_file(path, mode)
    with closing_file(file):
        write_all(file, data)
        if is_durable:
            with requests.counted():
                os.fsync(file)


def write_all(file: int, data: Buffer) -> int:
    view = memoryview(data).cast("B")
    size_bytes = len(view)
    while view:
        with requests.counted():
            view = view[os.write(file, view) :]
    return size_bytes


def fsync_file(path: Path) -> None:
    for flags in (os.O_RDONLY, os.O_RDWR):
        with requests.counted(), closing_file(os.open(path, flags | os.O_CLOEXEC)) as file:
            try:
                os.fsync(file)
                return
            except OSError as error:  # SMB wants the file open for writing
                if flags != os.O_RDONLY or error.errno not in _NO_FSYNC:
                    raise


def refuse_file(directory: Path) -> None:
    check_names(directory)
    with translated(directory):
        is_file = directory.is_file()
    if is_file:
        raise ConfigError(f"{directory} is a file, and is to be a directory", hint="Give another directory")
