"""A directory as a store: node-local SSD, or shared storage that is mounted (NFS)."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ..disk.durable import (
    CANNOT_LINK,
    closing_file,
    create_file,
    durable_link,
    durable_write,
    fsync_dir,
    make_dirs,
    matching,
    name_new,
    publish,
    remove_tree,
    replace_file,
    temporary_next_to,
    translate_os_error,
    translated,
    write_all,
    write_new,
)
from ..disk.file_io import pread_all, stat_version
from ..disk.processes import (
    boot_id,
    companion_path,
    is_abandoned,
    is_made_here,
    is_temporary,
    temporary_of_this_process,
)
from ..disk.quarantine import kind_of
from ..errors import ObjectNotFoundError, PreconditionFailedError, StoreUnavailableError
from ..ownership import file_mode
from ..poll import BRIEF, Poll
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from .base import (
    Store,
    check_key,
    check_prefix,
    check_range,
    check_size,
    closing,
    on_thread,
    on_thread_to_end,
    short_answer,
    to_completion,
)

T = TypeVar("T")

MARK = f".{'0' * 8}.tmp"
"""Its digit count matches no random name."""
LOCK_SECONDS = 5.0
"""Age of an abandoned mark: its holder renames or unlinks one file. Less than the silence of a drain that counts as an
outage (``drain.active_drain.SILENT_SECONDS``): a power cut may leave a mark."""
TICK_NS = 2_000_000_000


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock ``path`` against changes, also by other hosts, by a mark file, made by an exclusive create.

    No flock: on some mounts (NFS ``nolock``, FUSE) it holds within one host only. The mark of an ended local process is
    removed at once, another after ``LOCK_SECONDS``. Two processes hold ``path`` only if both remove a stale mark in the
    same instant, or if one change takes longer than ``LOCK_SECONDS``. Raises StoreUnavailableError.

    The holder calls no fsync: a power cut leaves the mark only if the file system wrote its journal in between.
    """
    mark = companion_path(path, MARK)
    boot, name = boot_id(), temporary_of_this_process("lock")
    seen, since, own = "", time.monotonic(), f"{boot} {name}"
    for _ in Poll(3 * LOCK_SECONDS, BRIEF):
        with contextlib.suppress(FileExistsError):
            _put_mark(mark, own)
            break
        holder = _mark_of(mark)
        if holder != seen:
            seen, since = holder, time.monotonic()
        if (_has_ended(holder) or time.monotonic() - since > LOCK_SECONDS) and _mark_of(mark) == seen:
            mark.unlink(missing_ok=True)
    else:
        raise StoreUnavailableError(f"{path} is locked by other processes", hint="Try again later", path=path)
    try:
        if _mark_of(mark) != own:
            raise StoreUnavailableError(f"{path} is locked by another process", hint="Try again later", path=path)
        for stale_mark in matching(path.parent, f".*{MARK}.*.tmp"):
            if is_abandoned(stale_mark.name):
                stale_mark.unlink(missing_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            if _mark_of(mark) == own:
                mark.unlink()


def _has_ended(holder: str) -> bool:
    return holder.startswith(f"{boot_id()} ") and is_abandoned(holder)


def _put_mark(mark: Path, own: str) -> None:
    if mark.exists():
        raise FileExistsError(mark)
    with temporary_next_to(mark, is_owned=True) as temporary:
        write_new(temporary, own.encode(), is_durable=False)
        try:
            name_new(temporary, mark)
        except FileExistsError:
            if _mark_of(mark) != own:  # else an NFS server has answered twice
                raise
        except OSError as error:
            if error.errno not in CANNOT_LINK:
                raise
            write_new(mark, own.encode(), is_durable=False)


def _mark_of(mark: Path) -> str:
    try:
        return mark.read_text(errors="replace")
    except OSError:
        return ""


def etag_reuse_seconds(etags: Iterable[str | None]) -> float:
    """Return the seconds until no later write, on a coarse clock, can reuse one of these etags."""
    times = (int(etag.partition("-")[0], 16) for etag in etags if etag)
    stale_mark = (time_ns + TICK_NS - time.time_ns() for time_ns in times if time_ns % 1_000_000_000 == 0)
    return min(max(0, *stale_mark, 0), TICK_NS) / 1e9


def _make_later(path: Path, before_ns: int) -> None:
    with contextlib.suppress(OSError):  # a mount without times is no vfat
        if path.stat().st_mtime_ns <= before_ns:
            os.utime(path, ns=(before_ns + TICK_NS, before_ns + TICK_NS))


class LocalStore(Store):
    """The first put creates the root; a missing root reads as empty."""

    tier = Tier.SHARED

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)
        self.has_put_if_absent = True

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    @on_thread
    def head(self, key: str) -> ObjectInfo:
        status = self._stat(self._path(key))
        return ObjectInfo(key, status.st_size, stat_version(status), status.st_mtime)

    def _stat(self, path: Path) -> os.stat_result:
        """Raises ObjectNotFoundError, and then removes the mark of a process killed in ``remove``."""
        try:
            with translated(path, self.tier):
                status = path.stat()
        except ObjectNotFoundError:
            mark = companion_path(path, MARK)
            if _has_ended(_mark_of(mark)):
                mark.unlink(missing_ok=True)
            raise
        if not stat.S_ISREG(status.st_mode):
            raise ObjectNotFoundError(f"{path} is not a file", path=path, tier=self.tier)
        return status

    @on_thread
    def get(self, key: str) -> bytes:
        path = self._path(key)
        self._stat(path)
        with translated(path, self.tier):
            return path.read_bytes()

    @on_thread
    def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        path = self._path(key)
        check_range(byte_range)
        self._stat(path)
        with translated(path, self.tier), closing_file(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as file:
            data = pread_all(file, byte_range, path, self.tier)
            if len(data) < byte_range.size_bytes:
                raise short_answer(self.uri, key, byte_range, len(data))
            # After the read: an etag that still matches was the etag during the read.
            if if_match is not None and stat_version(os.fstat(file)) != if_match:
                raise PreconditionFailedError(f"{path} changed while it was read", path=path, tier=self.tier)
        return data

    @on_thread_to_end
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        path = self._path(key)
        make_dirs(path.parent, tier=self.tier)
        if not if_absent:
            before = -1
            with contextlib.suppress(OSError):
                before = path.stat().st_mtime_ns
            durable_write(path, data, tier=self.tier)
            _make_later(path, before)
            return
        with translated(path, self.tier), temporary_next_to(path) as temporary:
            write_new(temporary, data)
            self._claim(temporary, path)
            fsync_dir(path.parent)

    def _claim(self, temporary: Path, path: Path) -> None:
        def exists() -> PreconditionFailedError:
            return PreconditionFailedError(f"{path} exists", path=path, tier=self.tier)

        try:
            name_new(temporary, path)
        except FileExistsError:
            # An NFS server that answered twice reports our own link: then the file has two names.
            if temporary.stat().st_nlink != 2:
                raise exists() from None
        except OSError as error:
            if error.errno not in CANNOT_LINK:
                raise
            self.has_put_if_absent = False
            with _locked(path):
                if path.exists():
                    raise exists() from None
                temporary.replace(path)

    @on_thread_to_end
    def replace(self, key: str, data: Buffer, *, etag: str) -> None:
        path = self._path(key)
        try:
            with translated(path, self.tier), temporary_next_to(path) as temporary:
                before = path.stat().st_mtime_ns
                write_new(temporary, data, file_mode(path))
                _make_later(temporary, before)
                self._change(path, etag, lambda: replace_file(temporary, path))
        except ObjectNotFoundError:
            raise PreconditionFailedError(f"{path} no longer exists", path=path, tier=self.tier) from None

    @on_thread_to_end
    def remove(self, key: str, *, etag: str) -> None:
        path = self._path(key)
        with contextlib.suppress(ObjectNotFoundError), translated(path, self.tier):
            self._change(path, etag, path.unlink)

    def _change(self, path: Path, etag: str, change: Callable[[], object]) -> None:
        """Raises PreconditionFailedError unless ``path`` is the file of ``etag``.

        The fsync follows the release: a cut before it may revert the change, which is not acknowledged yet.
        """
        path.stat()
        with _locked(path):
            if stat_version(path.stat()) != etag:
                raise PreconditionFailedError(f"{path} has changed", path=path, tier=self.tier)
            change()
        fsync_dir(path.parent)

    async def put_stream(self, key: str, pieces: AsyncIterator[Buffer], size_bytes: int) -> None:
        path = self._path(key)
        async with closing(pieces):
            await to_completion(asyncio.to_thread(make_dirs, path.parent, tier=self.tier))
            with temporary_next_to(path) as temporary:
                with translated(temporary, self.tier):
                    file = create_file(temporary)
                with closing_file(file):
                    written = 0
                    async for piece in pieces:
                        written += await self._translated(temporary, write_all, file, piece)
                    check_size(self.uri, key, size_bytes, written)
                    await self._translated(temporary, os.fsync, file)
                await self._translated(path, publish, temporary, path)

    @on_thread_to_end
    def _translated(self, path: Path, call: Callable[..., T], *args: object) -> T:
        with translated(path, self.tier):
            return call(*args)

    @on_thread_to_end
    def link(self, key: str, source: Path) -> bool:
        path = self._path(key)
        make_dirs(path.parent, tier=self.tier)
        return durable_link(source, path, tier=self.tier)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        waiting = [check_prefix(prefix)]
        while waiting:
            infos, directories = await asyncio.to_thread(self._scan, waiting.pop())
            waiting += directories
            for info in infos:
                yield info

    def _scan(self, prefix: str, *, follow: bool = False) -> tuple[builtins.list[ObjectInfo], builtins.list[str]]:
        infos, directories = [], []
        for entry in self._entries(prefix):
            key = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.is_dir(follow_symlinks=follow):
                directories.append(key)
            elif entry.is_file() and not is_temporary(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    infos.append(ObjectInfo(key, status.st_size, stat_version(status)))
        return infos, directories

    def files(self) -> tuple[builtins.list[ObjectInfo], dict[str, str]]:
        """Return all files, also in linked directories, and the kinds of other entries, by key."""
        infos: builtins.list[ObjectInfo] = []
        other_entries: dict[str, str] = {}
        waiting: builtins.list[tuple[str, tuple[str, ...]]] = [("", (os.path.realpath(self.root),))]
        while waiting:
            prefix, above = waiting.pop()
            for entry in self._entries(prefix):
                key = f"{prefix}/{entry.name}" if prefix else entry.name
                try:
                    if entry.is_file():
                        if not is_made_here(entry.name):
                            status = entry.stat()
                            infos.append(ObjectInfo(key, status.st_size, stat_version(status)))
                    elif not entry.is_dir():
                        other_entries[key] = _entry_kind(Path(entry.path))
                    elif (real := os.path.realpath(entry.path)) in above:
                        other_entries[key] = f"is a link to {real}, which it is in"
                    else:
                        waiting.append((key, (*above, real)))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if error.errno != errno.ELOOP:
                        raise translate_os_error(error, Path(entry.path), self.tier) from error
                    other_entries[key] = _entry_kind(Path(entry.path))
        return infos, other_entries

    def _entries(self, prefix: str) -> builtins.list[os.DirEntry[str]]:
        path = self.root / prefix
        try:
            with translated(path, self.tier), os.scandir(path) as entries:
                return [*entries]
        except ObjectNotFoundError:
            return []

    @on_thread
    def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        return sorted(entry.name for entry in self._entries(check_prefix(prefix)) if entry.is_dir())

    @on_thread
    def list_level(self, prefix: str = "") -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
        directory = check_prefix(prefix)
        if not (self.root / directory).is_dir():
            return None
        infos, directories = self._scan(directory, follow=True)
        return infos, [key.rpartition("/")[2] for key in directories]

    @on_thread_to_end
    def delete(self, key: str) -> None:
        path = self._path(key)
        with contextlib.suppress(ObjectNotFoundError), translated(path, self.tier):
            path.unlink()
            fsync_dir(path.parent)

    @on_thread_to_end
    def delete_dir(self, prefix: str) -> None:
        path = self.root / check_prefix(prefix)
        with contextlib.suppress(ObjectNotFoundError), translated(path, self.tier):
            remove_tree(path)
            fsync_dir(path.parent)

    async def close(self) -> None: ...


def _entry_kind(path: Path) -> str:
    return f"is a link to {path.readlink()}, where no file is" if path.is_symlink() else f"is {kind_of(path)}"
