"""Replaces the files of a directory with another version, inside it: it keeps inode, owner and mode.

Invariants:
    R1  ``.tierckpt/written.json`` names the files of both versions before the old receipt goes, and the new receipt
        comes last. Readers refuse a directory with ``written.json`` and no receipt; the next prefetch completes it.
    R2  Only files that a prefetch wrote are removed, by those names, and never through a link.
    R3  One process of all hosts replaces files at a time, with the lease ``.tierckpt/publishing``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..disk.durable import fsync_dir, make_dirs, matching
from ..disk.file_lock import HostLease, holder_name
from ..format.layout import PRIVATE_DIR
from .file_set import FileSet
from .receipt import RECEIPT, WRITTEN, put_receipt, put_written, written_in

PUBLISHING = f"{PRIVATE_DIR}/publishing"


@contextlib.contextmanager
def replacement_lock(directory: Path) -> Iterator[bool]:
    """Yield False if another process replaces files (R3)."""
    folder = os.open(directory / PRIVATE_DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        has_locks = True
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            has_locks = False
        lease = HostLease(directory / PUBLISHING, holder_name(has_locks=has_locks))
        try:
            yield lease.take()
        finally:
            lease.release()
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_UN)  # a forked child has this descriptor too
        os.close(folder)


class Replacement:
    def __init__(
        self, directory: Path, incoming: Path, frozen: FileSet, is_selected: Callable[[str], bool], scratch: Path
    ) -> None:
        self._target, self._incoming, self._scratch = directory, incoming, scratch
        self._new = {item.path for item in frozen.files}
        self._before = written_in(directory)
        self._stale = {path for path in self._before - self._new if is_selected(path)}

    def begin(self) -> None:
        put_written(self._target, self._before | self._new, self._scratch)
        (self._target / RECEIPT).unlink(missing_ok=True)
        fsync_dir((self._target / RECEIPT).parent)

    def move(self) -> None:
        """Remove stale files and move the new ones in, durably.

        Indexes go first and come last: a loader that ignores receipts finds an index only with its files.
        """
        for path in sorted(filter(is_index, self._before & (self._stale | self._new))):
            _remove(self._target, path)
        for path in sorted(self._stale):
            _remove(self._target, path)
        for path in sorted(self._new, key=lambda path: (is_index(path), path)):
            make_dirs((self._target / path).parent)
            (self._incoming / path).replace(self._target / path)
        for folder in folders_of(self._target, self._stale | self._new):
            if folder.exists():
                fsync_dir(folder)

    def end(self, receipt: bytes) -> None:
        kept = self._before - self._stale - self._new
        put_written(self._target, kept, self._scratch)
        put_receipt(self._target, receipt, self._scratch)
        if not kept:
            (self._target / WRITTEN).unlink(missing_ok=True)


def _remove(directory: Path, path: str) -> None:
    parents = Path(path).parents[:-1]
    if any((directory / parent).is_symlink() for parent in parents):
        return
    (directory / path).unlink(missing_ok=True)
    for parent in parents:
        try:
            (directory / parent).rmdir()
        except OSError:
            return


def folders_of(base: Path, paths: Iterable[str]) -> list[Path]:
    """Return the directories of ``paths``, deepest first."""
    found = {base / parent for path in paths for parent in Path(path).parents}
    return sorted(found, key=lambda path: -len(path.parts))


def inherit_group(directory: Path, incoming: Path) -> None:
    """Give new files the group of ``directory`` if it has setgid."""
    status = directory.stat()
    if status.st_mode & stat.S_ISGID:
        for folder in (incoming.parent, incoming):
            with contextlib.suppress(PermissionError):  # the owner's process does it for its files
                os.chown(folder, -1, status.st_gid)
                folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_ISGID)


def other_weights(directory: Path, frozen: FileSet) -> list[str]:
    known = {item.path for item in frozen.files}
    folders = {str(Path(path).parent) for path in known}
    found = (str(path.relative_to(directory)) for folder in folders for path in matching(directory / folder, "*"))
    endings = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt")
    return sorted(name for name in found if name not in known and (name.endswith(endings) or is_index(name)))


def is_index(name: str) -> bool:
    return name.endswith(".json") and ".index." in name.rpartition("/")[2]
