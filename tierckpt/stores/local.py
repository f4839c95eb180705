"""A directory as a store: node-local SSD, or shared storage that is mounted (NFS)."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from ..disk.durable import (
    _CANNOT_LINK,
    create_file,
    durable_link,
    durable_write,
    fsync_dir,
    make_dirs,
    publish,
    temporary_beside,
    translated,
    write_all,
    write_new,
)
from ..disk.file_io import pread_all
from ..disk.temporary_names import is_temporary
from ..errors import ObjectNotFoundError, PreconditionFailedError, StoreUnavailableError
from ..poll import BRIEF, Poll
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from .common import check_key, check_prefix, check_range, check_size, closing, short_answer, to_completion

# What flock() answers on a mount without locks.
_CANNOT_LOCK = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF}
LOCK_SECONDS = 10.0


def _lock(file: int, path: Path) -> None:
    """Lock an open file that others change in milliseconds. Raises StoreUnavailableError when one of them hangs."""
    for _ in Poll(LOCK_SECONDS, BRIEF):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno in _CANNOT_LOCK:
                return
            raise
    raise StoreUnavailableError(f"{path} is locked by another process", path=path)


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
        with translated(path, self.tier):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ObjectNotFoundError(f"{path} is not a file", path=path, tier=self.tier)
        return status

    async def get(self, key: str) -> bytes:
        path = self._path(key)

        def read() -> bytes:
            self._stat(path)
            with translated(path, self.tier):
                return path.read_bytes()

        return await asyncio.to_thread(read)

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        return await asyncio.to_thread(self._read_range, self._path(key), key, check_range(byte_range), if_match)

    def _read_range(self, path: Path, key: str, byte_range: ByteRange, if_match: str | None) -> bytes:
        self._stat(path)
        with translated(path, self.tier):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = pread_all(file, byte_range, path, self.tier)
                if len(data) < byte_range.size_bytes:
                    raise short_answer(self.uri, key, byte_range, len(data))
                # After the read: an etag that still matches now was the file's etag while it was read.
                if if_match is not None and _etag(os.fstat(file)) != if_match:
                    raise PreconditionFailedError(f"{path} changed while it was read", path=path, tier=self.tier)
            finally:
                os.close(file)
        return data

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        write = self._put_new if if_absent else self._put_over
        await to_completion(asyncio.to_thread(write, self._path(key), data))

    def _put_over(self, path: Path, data: Buffer) -> None:
        make_dirs(path.parent, tier=self.tier)
        durable_write(path, data, tier=self.tier)

    def _put_new(self, path: Path, data: Buffer) -> None:
        make_dirs(path.parent, tier=self.tier)
        with translated(path, self.tier), temporary_beside(path) as temporary:
            write_new(temporary, data)
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
            await to_completion(asyncio.to_thread(self._change, path, etag, write))
        except ObjectNotFoundError:
            raise PreconditionFailedError(f"{path} is gone", path=path, tier=self.tier) from None

    async def remove(self, key: str, *, etag: str) -> None:
        path = self._path(key)
        try:
            await to_completion(asyncio.to_thread(self._change, path, etag, lambda: self._delete(path)))
        except ObjectNotFoundError:
            pass

    def _change(self, path: Path, etag: str, change: Callable[[], None]) -> None:
        """Do ``change`` while ``path`` is the file of ``etag``, and nobody else can ``replace`` or ``remove`` it.

        The lock is on the very file that goes: who comes second finds another file under the name, or none. A crash
        gives it up. On a mount that has no locks two may both find it as they saw it.
        """
        with translated(path, self.tier):
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
            await to_completion(asyncio.to_thread(make_dirs, path.parent, tier=self.tier))
            with temporary_beside(path) as temporary:
                await self._write_pieces(temporary, key, pieces, size_bytes)
                await to_completion(asyncio.to_thread(self._publish, temporary, path))

    async def _write_pieces(self, path: Path, key: str, pieces: AsyncIterator[Buffer], size_bytes: int) -> None:
        with translated(path, self.tier):
            file = create_file(path)
        try:
            written = 0
            async for piece in pieces:
                written += await to_completion(asyncio.to_thread(self._write_piece, file, piece, path))
            check_size(self.uri, key, size_bytes, written)
            await to_completion(asyncio.to_thread(self._fsync, file, path))
        finally:
            os.close(file)

    def _write_piece(self, file: int, piece: Buffer, path: Path) -> int:
        with translated(path, self.tier):
            return write_all(file, piece)

    def _fsync(self, file: int, path: Path) -> None:
        with translated(path, self.tier):
            os.fsync(file)

    def _publish(self, temporary: Path, path: Path) -> None:
        with translated(path, self.tier):
            publish(temporary, path)

    async def link(self, key: str, source: Path) -> bool:
        path = self._path(key)

        def make() -> bool:
            make_dirs(path.parent, tier=self.tier)
            return durable_link(source, path, tier=self.tier)

        return await to_completion(asyncio.to_thread(make))

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
            with translated(path, self.tier), os.scandir(path) as entries:
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
        await to_completion(asyncio.to_thread(self._delete, self._path(key)))

    def _delete(self, path: Path) -> None:
        try:
            with translated(path, self.tier):
                path.unlink()
                fsync_dir(path.parent)
        except ObjectNotFoundError:
            pass

    async def delete_dir(self, prefix: str) -> None:
        await to_completion(asyncio.to_thread(self._delete_dir, self.root / check_prefix(prefix)))

    def _delete_dir(self, path: Path) -> None:
        try:
            with translated(path, self.tier):
                shutil.rmtree(path)
                fsync_dir(path.parent)
        except ObjectNotFoundError:
            pass

    async def close(self) -> None:
        """Nothing is held open."""
