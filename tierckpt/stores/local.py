"""A directory as a store: node-local SSD, or shared storage that is mounted (NFS).

The synchronous helpers at the top are the one place that knows what makes a file durable; the DCP writer and the
mover use them directly. Each raises tierckpt's own errors.

    A file is durable when its bytes, its name and every new directory above it are on the disk:
    fsync(file), rename, fsync(directory), fsync(parent of each directory made).
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from ..disk.quarantine import open_regular, set_aside
from ..errors import (
    CapacityError,
    ManifestError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from ..ownership import check, mode_of
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from .common import (
    check_key,
    check_prefix,
    check_range,
    check_size,
    closing,
    is_temporary,
    settled,
    short_answer,
    temporary_of_this_process,
)

MAKES_MAX = 100

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_MISSING = {errno.ENOENT, errno.ENOTDIR}
# What a network mount or a FUSE daemon answers while its server is away.
_AWAY = {errno.ETIMEDOUT, errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.EREMOTEIO}
# What flock() answers on a mount without locks.
_CANNOT_LOCK = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF}
LOCK_SECONDS = 10.0
LOCK_POLL_SECONDS = 0.005
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
    if error.errno == errno.EROFS:
        return PermissionDeniedError(
            f"{path} is on a read-only mount", hint="Remount it writable or choose another place", path=path, tier=tier
        )
    if error.errno in _DENIED:
        return PermissionDeniedError(
            f"no permission for {path}", hint="Check its owner and mode, or choose another place", path=path, tier=tier
        )
    if error.errno in _MISSING:
        return ObjectNotFoundError(f"{path} does not exist", path=path, tier=tier)
    kind = StoreUnavailableError if error.errno in _AWAY else StoreError
    return kind(f"{path}: {error.strerror or error}", path=path, tier=tier, errno=error.errno)


def _free_bytes(path: Path) -> int:
    for candidate in (path, *path.parents):
        try:
            return shutil.disk_usage(candidate).free
        except OSError:
            continue
    return 0


@contextlib.contextmanager
def _translated(path: Path, tier: Tier) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, TierckptError):
            raise
        raise translate_os_error(error, path, tier) from error


def fsync_dir(path: Path) -> None:
    """Make the names in directory ``path`` durable. Cost: one fsync."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise translate_os_error(error, path, Tier.LOCAL) from error
    try:
        os.fsync(file)
    except OSError as error:
        # Some network and FUSE filesystems have no fsync of a directory; their names are as durable as they get.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}:
            raise translate_os_error(error, path, Tier.LOCAL) from error
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
    """
    with _translated(path, tier):
        check(path)
        for left in reversed(range(MAKES_MAX)):
            try:
                _make_missing(path, is_durable=is_durable)
                return
            except FileNotFoundError:  # another process has removed an empty one of them, before the next was made
                if not left:
                    raise


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
    with _translated(path, tier), os.fdopen(open_regular(path), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > size_bytes_max:
            raise ManifestError(f"{path}: {size_bytes} bytes is larger than any that tierckpt writes", tier=tier)
        return file.read(size_bytes)


def durable_write(path: Path, data: Buffer, *, tier: Tier = Tier.LOCAL) -> None:
    """Replace ``path`` by ``data``: a reader, or a crash, sees the old file or the whole new one, which is durable.

    The directory must exist. Cost: two fsyncs.
    """
    with _translated(path, tier), _temporary(path, is_owned=tier is Tier.LOCAL) as temporary:
        _write_new(temporary, data, 0o644 if check(path.parent) else 0o666)
        replace_file(temporary, path)
        fsync_dir(path.parent)


def replace_file(new: Path, path: Path) -> None:
    """Rename ``new`` over ``path``; a directory of that name below a local root is set aside. Raises OSError."""
    try:
        new.replace(path)
    except IsADirectoryError:
        if not set_aside(path):
            raise
        new.replace(path)


def durable_link(source: Path, target: Path, *, tier: Tier = Tier.LOCAL) -> bool:
    """Give the file ``source`` the second name ``target``, durably. False where no hard link can be made (then copy).

    Raises:
        PreconditionFailedError: ``target`` is there and is another file.
    """
    with _translated(target, tier):
        try:
            os.link(source, target)
        except FileExistsError:
            if not target.samefile(source):
                raise PreconditionFailedError(f"{target} exists and is another file", path=target, tier=tier) from None
        except OSError as error:
            if error.errno in _CANNOT_LINK:
                return False
            raise
        _fsync_file(target)
        fsync_dir(target.parent)
        return True


@contextlib.contextmanager
def _temporary(path: Path, *, is_owned: bool = False) -> Iterator[Path]:
    """Yield a new name beside ``path``; whatever is left under it is removed. ``is_owned``: it says whose it is."""
    name = temporary_of_this_process(path.name) if is_owned else f".{path.name}.{secrets.token_hex(6)}.tmp"
    temporary = path.with_name(name)
    try:
        yield temporary
    finally:
        # Failing to remove it must not hide the error that got us here; the name is never listed.
        with contextlib.suppress(OSError):
            temporary.unlink()


def _create(path: Path, mode: int = 0o666) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def _write_new(path: Path, data: Buffer, mode: int = 0o666) -> None:
    file = _create(path, mode)
    try:
        _write_all(file, data)
        os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, data: Buffer) -> int:
    view = memoryview(data).cast("B")
    size_bytes = len(view)
    while view:
        view = view[os.write(file, view) :]
    return size_bytes


def _fsync_file(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _lock(file: int, path: Path) -> None:
    """Lock an open file that others change in milliseconds. Raises StoreUnavailableError when one of them hangs."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreUnavailableError(f"{path} is locked by another process", path=path) from None
            time.sleep(LOCK_POLL_SECONDS)
        except OSError as error:
            if error.errno in _CANNOT_LOCK:
                return
            raise


def _etag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"


def _etag_at(path: Path) -> str:
    try:
        return _etag(path.stat())
    except FileNotFoundError:
        return ""


class LocalStore:
    """Files under the directory ``root``. The root is made by the first put; reading a missing one finds nothing."""

    def __init__(self, root: Path, tier: Tier = Tier.SHARED) -> None:
        self.root = root
        self.tier = tier
        self.uri = str(root)
        self.has_put_if_absent = True

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    async def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        status = await asyncio.to_thread(self._stat, path)
        return ObjectInfo(key, status.st_size, _etag(status))

    def _stat(self, path: Path) -> os.stat_result:
        with _translated(path, self.tier):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ObjectNotFoundError(f"{path} is not a file", path=path, tier=self.tier)
        return status

    async def get(self, key: str) -> bytes:
        path = self._path(key)

        def read() -> bytes:
            self._stat(path)
            with _translated(path, self.tier):
                return path.read_bytes()

        return await asyncio.to_thread(read)

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        return await asyncio.to_thread(self._read_range, self._path(key), key, check_range(byte_range), if_match)

    def _read_range(self, path: Path, key: str, byte_range: ByteRange, if_match: str | None) -> bytes:
        self._stat(path)
        with _translated(path, self.tier):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                pieces, offset = [], byte_range.start
                while offset < byte_range.stop:
                    piece = os.pread(file, byte_range.stop - offset, offset)
                    if not piece:
                        raise short_answer(self.uri, key, byte_range, offset - byte_range.start)
                    pieces.append(piece)
                    offset += len(piece)
                # After the read: an etag that still matches now was the file's etag while it was read.
                if if_match is not None and _etag(os.fstat(file)) != if_match:
                    raise PreconditionFailedError(f"{path} changed while it was read", path=path, tier=self.tier)
            finally:
                os.close(file)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        write = self._put_new if if_absent else self._put_over
        await settled(asyncio.to_thread(write, self._path(key), data))

    def _put_over(self, path: Path, data: Buffer) -> None:
        make_dirs(path.parent, tier=self.tier)
        durable_write(path, data, tier=self.tier)

    def _put_new(self, path: Path, data: Buffer) -> None:
        make_dirs(path.parent, tier=self.tier)
        with _translated(path, self.tier), _temporary(path) as temporary:
            _write_new(temporary, data)
            self._claim(temporary, path)
            fsync_dir(path.parent)

    def _claim(self, temporary: Path, path: Path) -> None:
        """Publish ``temporary`` as ``path`` unless it exists. link() decides between racing callers, also over NFS."""
        exists = PreconditionFailedError(f"{path} exists", path=path, tier=self.tier)
        try:
            os.link(temporary, path)
        except FileExistsError:
            # An NFS server that answered twice says "exists" about our own link: then the file has two names.
            if temporary.stat().st_nlink != 2:
                raise exists from None
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            self.has_put_if_absent = False  # no hard links on this mount: check, then put, and say so
            if path.exists():
                raise exists from None
            temporary.replace(path)

    async def replace(self, key: str, data: Buffer, *, etag: str) -> None:
        path = self._path(key)
        try:
            write = partial(durable_write, path, data, tier=self.tier)
            await settled(asyncio.to_thread(self._change, path, etag, write))
        except ObjectNotFoundError:
            raise PreconditionFailedError(f"{path} is gone", path=path, tier=self.tier) from None

    async def remove(self, key: str, *, etag: str) -> None:
        path = self._path(key)
        try:
            await settled(asyncio.to_thread(self._change, path, etag, lambda: self._delete(path)))
        except ObjectNotFoundError:
            pass

    def _change(self, path: Path, etag: str, change: Callable[[], None]) -> None:
        """Do ``change`` while ``path`` is the file of ``etag``, and nobody else can ``replace`` or ``remove`` it.

        The lock is on the very file that goes: who comes second finds another file under the name, or none. A crash
        gives it up. On a mount that has no locks two may both find it as they saw it.
        """
        with _translated(path, self.tier):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                _lock(file, path)
                if {_etag(os.fstat(file)), _etag_at(path)} != {etag}:
                    raise PreconditionFailedError(f"{path} has changed", path=path, tier=self.tier)
                change()
            finally:
                os.close(file)

    async def put_stream(self, key: str, pieces: AsyncIterator[Buffer], size_bytes: int) -> None:
        path = self._path(key)
        async with closing(pieces):
            await settled(asyncio.to_thread(make_dirs, path.parent, tier=self.tier))
            with _temporary(path) as temporary:
                await self._write_pieces(temporary, key, pieces, size_bytes)
                await settled(asyncio.to_thread(self._publish, temporary, path))

    async def _write_pieces(self, path: Path, key: str, pieces: AsyncIterator[Buffer], size_bytes: int) -> None:
        with _translated(path, self.tier):
            file = _create(path)
        try:
            written = 0
            async for piece in pieces:
                written += await settled(asyncio.to_thread(self._write_piece, file, piece, path))
            check_size(self.uri, key, size_bytes, written)
            await settled(asyncio.to_thread(self._fsync, file, path))
        finally:
            os.close(file)

    def _write_piece(self, file: int, piece: Buffer, path: Path) -> int:
        with _translated(path, self.tier):
            return _write_all(file, piece)

    def _fsync(self, file: int, path: Path) -> None:
        with _translated(path, self.tier):
            os.fsync(file)

    def _publish(self, temporary: Path, path: Path) -> None:
        with _translated(path, self.tier):
            temporary.replace(path)
            fsync_dir(path.parent)

    async def link(self, key: str, source: Path) -> bool:
        path = self._path(key)

        def make() -> bool:
            make_dirs(path.parent, tier=self.tier)
            return durable_link(source, path, tier=self.tier)

        return await settled(asyncio.to_thread(make))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        waiting = [check_prefix(prefix)]
        while waiting:
            infos, directories = await asyncio.to_thread(self._scan, waiting.pop())
            waiting += directories
            for info in infos:
                yield info

    def _scan(self, prefix: str, *, follow: bool = False) -> tuple[builtins.list[ObjectInfo], builtins.list[str]]:
        """Return the files and the directories of one directory. What vanishes meanwhile is not there."""
        infos, directories = [], []
        for entry in self._entries(prefix):
            key = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.is_dir(follow_symlinks=follow):
                directories.append(key)
            elif entry.is_file() and not is_temporary(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    infos.append(ObjectInfo(key, status.st_size, _etag(status)))
        return infos, directories

    def _entries(self, prefix: str) -> builtins.list[os.DirEntry[str]]:
        path = self.root / prefix
        try:
            with _translated(path, self.tier), os.scandir(path) as entries:
                return [*entries]
        except ObjectNotFoundError:
            return []

    async def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        entries = await asyncio.to_thread(self._entries, check_prefix(prefix))
        return sorted(entry.name for entry in entries if entry.is_dir())

    async def list_level(self, prefix: str = "") -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
        directory = check_prefix(prefix)

        def scan() -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
            return self._scan(directory, follow=True) if (self.root / directory).is_dir() else None

        found = await asyncio.to_thread(scan)
        return None if found is None else (found[0], [key.rpartition("/")[2] for key in found[1]])

    async def delete(self, key: str) -> None:
        await settled(asyncio.to_thread(self._delete, self._path(key)))

    def _delete(self, path: Path) -> None:
        try:
            with _translated(path, self.tier):
                path.unlink()
                fsync_dir(path.parent)
        except ObjectNotFoundError:
            pass

    async def delete_dir(self, prefix: str) -> None:
        await settled(asyncio.to_thread(self._delete_dir, self.root / check_prefix(prefix)))

    def _delete_dir(self, path: Path) -> None:
        try:
            with _translated(path, self.tier):
                shutil.rmtree(path)
                fsync_dir(path.parent)
        except ObjectNotFoundError:
            pass

    async def close(self) -> None:
        """Nothing is held open."""
