"""Adopts a directory written by another program into the local tier.

A1  The writer may delete or replace its files once they are adopted.
A2  The adopted bytes are the digested bytes. A file that changes between two scans, or is open for writing, refuses the
    whole directory.
A3  A reflink or a copy shares nothing with the writer. A hard link shares its inode: it is made only if the caller
    guarantees that files are never written in place. Readers detect such a write by the digests (P4).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..disk.durable import closing_file, create_file, fsync_dir, fsync_file, make_dirs, translated
from ..disk.file_io import open_file, pread_all
from ..errors import CheckpointError, ConfigError, ObjectNotFoundError
from ..format.layout import PRIVATE_DIR, Location
from ..format.manifest import chunk_count, digest_of, is_safe_path
from ..resources import ThreadPool
from ..stores.schemes import check_object_name
from ..types import ByteRange

FICLONE = 0x40049409
"""``ioctl_ficlone(2)``"""
THREADS = 4
COPY_BYTES = 8 << 20
CLOCK_REALTIME_COARSE = 5
QUIET_SECONDS = 2 * time.clock_getres(CLOCK_REALTIME_COARSE)
"""Two kernel ticks: a file with a more recent time stamp may change without a new one."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    place: Path
    size_bytes: int
    modified_ns: int
    changed_ns: int


def identity(directory: Path) -> str | None:
    """Return an identity of ``directory``, equal on all nodes; None without a file.

    Inode numbers differ between nodes on FUSE, and are left out.
    """
    walk = os.walk(directory)
    names = sorted(os.path.relpath(Path(folder, name), directory) for folder, _, found in walk for name in found)
    return digest_of(os.fsencode(f"{directory.stat().st_mtime_ns} {names}")) if names else None


@contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    try:
        yield
    except ObjectNotFoundError as error:
        raise _still_written(directory, str(error.context.get("path", directory))) from error


def check_names(files: Mapping[str, SourceFile], folder: str, location: Location) -> None:
    for path in files:
        if not is_safe_path(f"{folder}/{path}"):
            raise ConfigError(f"{path} is too long for a file name in a checkpoint", hint="Shorten it")
        check_object_name(location.child(f"{folder}/{path}"))


def scan(directory: Path) -> dict[str, SourceFile]:
    """Return the files under ``directory`` by relative path. Follows links that stay inside it.

    Raises ConfigError: it is missing or empty, or has an entry that no checkpoint can hold (an outside link, a device).
    """
    with locked_directory(directory), translated(directory, is_above=True):
        if not directory.is_dir():
            raise ConfigError(
                f"{directory} is not a directory", hint="Give the directory that the checkpoint was written to"
            )
        top = directory.resolve()
        found = dict(_walk(top, top, "", (top,)))
    if not found:
        raise ConfigError(f"{directory} contains no files", hint="Adopt a checkpoint after its writer has finished")
    return found


def _walk(top: Path, place: Path, below: str, above: tuple[Path, ...]) -> Iterator[tuple[str, SourceFile]]:
    for entry in sorted(os.scandir(place), key=lambda one: one.name):
        path, real = f"{below}{entry.name}", Path(entry.path)
        if path == PRIVATE_DIR:  # the receipt of a restore
            continue
        if entry.is_symlink():
            real = _followed(top, real, path)
        status = real.stat()
        if not is_safe_path(path):
            raise ConfigError(f"{top}/{path!r} is not a valid name for a store", hint="Rename or remove it")
        if stat.S_ISDIR(status.st_mode):
            if real in above:
                raise ConfigError(f"{top}/{path} is a link to one of its parent directories", hint="Remove the link")
            yield from _walk(top, real, f"{path}/", (*above, real))
        elif not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{top}/{path!r} is not a regular file", hint="Remove it from the directory")
        else:
            yield path, SourceFile(real, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _followed(top: Path, link: Path, path: str) -> Path:
    real = Path(os.path.realpath(link))
    if not (real.is_relative_to(top) and real.exists()):
        raise ConfigError(
            f"{top}/{path} is a link to {real}, which does not exist or is outside the directory",
            hint="Replace the link by the file itself, or remove it",
        )
    return real


def check_quiet(directory: Path, files: Mapping[str, SourceFile]) -> None:
    newest = max(file.modified_ns for file in files.values()) / 1e9
    time.sleep(min(QUIET_SECONDS, max(0.0, newest + QUIET_SECONDS - time.time())))
    with locked_directory(directory):
        for path, file in files.items():
            if _is_open_for_writing(file.place):
                raise _still_written(directory, path)


def check_same(directory: Path, before: Mapping[str, SourceFile], links: bool) -> None:
    # A new hard link changes the ctime.
    was, now = (
        {path: replace(file, changed_ns=0) if links else file for path, file in files.items()}
        for files in (before, scan(directory))
    )
    for path in sorted(was.keys() | now.keys()):
        if was.get(path) != now.get(path):
            raise _still_written(directory, path)


def _still_written(directory: Path, path: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} is still being written: {path} changes",
        hint="Adopt it after its writer has closed every file; nothing was committed",
        file=path,
    )


def _is_open_for_writing(path: Path) -> bool:
    """Whether the kernel refuses a read lease (fcntl(2)), as a process has the file open for writing.

    It also refuses leases on network mounts and for other users' files: there only the scans protect.
    """
    with closing_file(open_file(path)) as file:
        try:
            # A process that opens the file during the lease makes the kernel signal us. SIGIO would end the process.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            return error.errno == errno.EAGAIN
    return False


def import_files(files: Mapping[str, SourceFile], target: Path, *, links: bool) -> None:
    with translated(target, is_above=True), ThreadPool(THREADS) as pool:
        for parent in sorted({(target / path).parent for path in files}):
            make_dirs(parent)
        list(pool.map(lambda path: _take_file(files[path].place, target / path, links), files))


def _take_file(source: Path, target: Path, links: bool) -> None:
    if links:
        with suppress(OSError):
            target.hardlink_to(source)
            return
    with os.fdopen(open_file(source), "rb", 0) as old, os.fdopen(create_file(target, 0o644), "wb") as new:
        try:
            fcntl.ioctl(new, FICLONE, old.fileno())
        except OSError:
            shutil.copyfileobj(old, new, COPY_BYTES)


def make_durable(
    target: Path, sizes: Mapping[str, int], chunk_size_bytes: int, on_bytes: Callable[[int], None]
) -> dict[str, tuple[str, ...]]:
    """Make the files under ``target`` durable, names included. Return the chunk digests of each file."""

    def digest(parent: tuple[str, int]) -> str:
        path, start = parent
        byte_range = ByteRange(start, min(start + chunk_size_bytes, sizes[path]))
        with closing_file(open_file(target / path)) as file:
            return digest_of(pread_all(file, byte_range, target / path))

    starts = {path: range(chunk_count(size, chunk_size_bytes)) for path, size in sizes.items()}
    chunk_positions = [(path, index * chunk_size_bytes) for path, indices in starts.items() for index in indices]
    with translated(target, is_above=True), ThreadPool(THREADS) as disk, ThreadPool(THREADS) as pool:
        flushed = disk.map(lambda path: fsync_file(target / path), sorted(sizes, key=lambda path: -sizes[path]))
        found, done = [], 0
        for (path, start), one in zip(chunk_positions, pool.map(digest, chunk_positions), strict=True):
            found.append(one)
            done += min(chunk_size_bytes, sizes[path] - start)
            on_bytes(done)
        list(flushed)
        for parent in {(target / path).parent for path in sizes}:
            fsync_dir(parent)
    each = iter(found)
    return {path: tuple(next(each) for _ in indices) for path, indices in starts.items()}
