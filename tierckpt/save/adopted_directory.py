"""Takes a directory that somebody else wrote into the local tier: looked at twice, linked or copied, digested.

A1  The writer may delete or replace its files as soon as they are taken in: the local tier has names of its own.
A2  What is digested is what was taken in. A file that differs between the first look and the last, or that anybody has
    open for writing, refuses the whole: no commit names half of a write.
A3  A reflink or a copy shares nothing with the writer. A hard link shares its inode: a write in place after the commit
    changes our bytes too, and every reader finds that by the digests (P4). So links are made only where the caller says
    that its files are never written in place.
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
from dataclasses import dataclass
from pathlib import Path

from ..disk.durable import create_file, fsync_dir, fsync_file, make_dirs, translated
from ..disk.file_io import open_file, pread_all
from ..errors import CheckpointError, ConfigError, ObjectNotFoundError
from ..format.layout import PRIVATE_DIR, Location
from ..format.manifest import chunk_count, digest_of, is_safe_path
from ..resources import ThreadPool
from ..stores.schemes import check_object_name
from ..types import ByteRange

FICLONE = 0x40049409
"""``ioctl_ficlone(2)``: one file gets the blocks of another, copied when either is written to."""
THREADS = 4
COPY_BYTES = 8 << 20
CLOCK_REALTIME_COARSE = 5
QUIET_SECONDS = 2 * time.clock_getres(CLOCK_REALTIME_COARSE)
"""Time stamps are as fine as a tick of the kernel: what was written later than this ago is looked at a moment later."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file as it was seen: two that are equal have not been written to between the looks."""

    place: Path
    size_bytes: int
    modified_ns: int
    changed_ns: int


def identity(directory: Path) -> str | None:
    """What all that see one directory say of it, once all have written: its names, last changed at one moment.

    No inode number: a FUSE server may give each node another. None where it has no file: a framework may make it on
    nodes that write nothing.
    """
    walk = os.walk(directory)
    names = sorted(os.path.relpath(Path(folder, name), directory) for folder, _, found in walk for name in found)
    return digest_of(os.fsencode(f"{directory.stat().st_mtime_ns} {names}")) if names else None


@contextmanager
def staying(directory: Path) -> Iterator[None]:
    """Raise CheckpointError for a file of ``directory`` that was there a moment ago: it is still being written."""
    try:
        yield
    except ObjectNotFoundError as error:
        raise _still_written(directory, str(error.context.get("path", directory))) from error


def check_names(files: Mapping[str, SourceFile], folder: str, location: Location) -> None:
    """Raise ConfigError for a path that no manifest, or no key of a bucket, can hold below ``folder``."""
    for path in files:
        if not is_safe_path(f"{folder}/{path}"):
            raise ConfigError(f"{path} is too long a name for a file of a checkpoint", hint="Shorten it")
        check_object_name(location.child(f"{folder}/{path}"))


def look(directory: Path) -> dict[str, SourceFile]:
    """Return the files below ``directory`` by their relative path. Links that stay inside are followed.

    Raises:
        ConfigError: no directory, nothing in it, or something in it that cannot be taken in: a link that leads out of
            it or nowhere, a name that no store has, a device, a pipe, a socket.
    """
    with staying(directory), translated(directory, is_above=True):
        if not directory.is_dir():
            raise ConfigError(
                f"{directory} is no directory", hint="Give the directory that the checkpoint was written to"
            )
        top = directory.resolve()
        found = dict(_walk(top, top, "", (top,)))
    if not found:
        raise ConfigError(f"{directory} has no file in it", hint="Adopt a checkpoint when its writer has written it")
    return found


def _walk(top: Path, place: Path, below: str, above: tuple[Path, ...]) -> Iterator[tuple[str, SourceFile]]:
    for entry in sorted(os.scandir(place), key=lambda one: one.name):
        path, real = f"{below}{entry.name}", Path(entry.path)
        if path == PRIVATE_DIR:  # the receipt of a restore, not the checkpoint
            continue
        if entry.is_symlink():
            real = _followed(top, real, path)
        status = real.stat()
        if not is_safe_path(path):
            raise ConfigError(f"{top}/{path!r} is no name that a store can have", hint="Rename or remove it")
        if stat.S_ISDIR(status.st_mode):
            if real in above:
                raise ConfigError(f"{top}/{path} is a link to a directory that it lies in", hint="Remove the link")
            yield from _walk(top, real, f"{path}/", (*above, real))
        elif not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{top}/{path!r} is no file that a store can hold", hint="Remove it from the directory")
        else:
            yield path, SourceFile(real, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _followed(top: Path, link: Path, path: str) -> Path:
    try:
        real = link.resolve(strict=True)
    except (OSError, RuntimeError):
        raise ConfigError(f"{top}/{path} is a link that leads nowhere", hint="Remove the link") from None
    if not real.is_relative_to(top):
        raise ConfigError(
            f"{top}/{path} is a link out of the directory, to {real}",
            hint="A checkpoint holds its own files: put the file itself there, or remove the link",
        )
    return real


def check_quiet(directory: Path, files: Mapping[str, SourceFile]) -> None:
    """Raise CheckpointError when anybody has one of ``files`` open for writing, where the kernel tells."""
    newest = max(file.modified_ns for file in files.values()) / 1e9
    time.sleep(min(QUIET_SECONDS, max(0.0, newest + QUIET_SECONDS - time.time())))
    with staying(directory):
        for path, file in files.items():
            if _is_open_for_writing(file.place):
                raise _still_written(directory, path)


def check_same(directory: Path, before: Mapping[str, SourceFile], links: bool) -> None:
    """Raise CheckpointError when ``directory`` is not what it was at the first look."""
    was, now = ({path: _seen(file, links) for path, file in files.items()} for files in (before, look(directory)))
    for path in sorted(was.keys() | now.keys()):
        if was.get(path) != now.get(path):
            raise _still_written(directory, path)


def _seen(file: SourceFile, links: bool) -> tuple[object, ...]:
    """A second name changes the inode's own time, and no byte."""
    return (file.size_bytes, file.modified_ns, None if links else file.changed_ns)


def _still_written(directory: Path, path: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} is still being written: {path} changes",
        hint="Adopt it when its writer has closed every file; nothing was committed",
        file=path,
    )


def _is_open_for_writing(path: Path) -> bool:
    """True when some process has the file open for writing: then the kernel gives nobody a read lease (fcntl(2)).

    It gives none on network mounts, nor for files of others: there the two looks have to do.
    """
    file = open_file(path)
    try:
        # Whoever opens the file in the moment that we hold the lease has us signalled; SIGIO would end the process.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(file)
    return False


def take_in(files: Mapping[str, SourceFile], target: Path, *, links: bool) -> None:
    """Give each file a name below ``target``: a hard link where ``links``, else a reflink, else a copy (A3)."""
    with translated(target, is_above=True), ThreadPool(THREADS) as pool:
        for place in sorted({(target / path).parent for path in files}):
            make_dirs(place)
        list(pool.map(lambda path: _take_file(files[path].place, target / path, links), files))


def _take_file(source: Path, target: Path, links: bool) -> None:
    if links:
        with suppress(OSError):
            target.hardlink_to(source)
            return
    with os.fdopen(open_file(source), "rb", 0) as old, os.fdopen(create_file(target, 0o644), "wb") as new:
        try:
            fcntl.ioctl(new, FICLONE, old.fileno())
        except OSError:  # another file system, or one that shares no blocks
            shutil.copyfileobj(old, new, COPY_BYTES)


def settle(
    target: Path, sizes: Mapping[str, int], chunk_size_bytes: int, on_bytes: Callable[[int], None]
) -> dict[str, tuple[str, ...]]:
    """Have the files below ``target``, and their names, durable. Return the digests of the chunks of each.

    ``on_bytes`` is told how many bytes have been digested so far.
    Cost: an fsync for each file and directory, several at a time, and meanwhile one read of every byte.
    """

    def digest(place: tuple[str, int]) -> str:
        path, start = place
        file = open_file(target / path)
        try:
            byte_range = ByteRange(start, min(start + chunk_size_bytes, sizes[path]))
            return digest_of(pread_all(file, byte_range, target / path))
        finally:
            os.close(file)

    starts = {path: range(chunk_count(size, chunk_size_bytes)) for path, size in sizes.items()}
    places = [(path, index * chunk_size_bytes) for path, indices in starts.items() for index in indices]
    with translated(target, is_above=True), ThreadPool(THREADS) as disk, ThreadPool(THREADS) as pool:
        flushed = disk.map(lambda path: fsync_file(target / path), sorted(sizes, key=lambda path: -sizes[path]))
        found, done = [], 0
        for (path, start), one in zip(places, pool.map(digest, places), strict=True):
            found.append(one)
            done += min(chunk_size_bytes, sizes[path] - start)
            on_bytes(done)
        list(flushed)
        for place in {(target / path).parent for path in sizes}:
            fsync_dir(place)
    each = iter(found)
    return {path: tuple(next(each) for _ in indices) for path, indices in starts.items()}
