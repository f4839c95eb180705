"""Seeded bugs: each makes the guest's code less careful with the disk. A harness that finds none is blind."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierckpt.disk import durable
from tierckpt.format.layout import MANIFEST

_fsync = os.fsync
_link = os.link
_replace = Path.replace
_write_new = durable.write_new


def seed(name: str) -> None:
    """Bring the bug ``name`` into this process; none for an empty name."""
    if name:
        BUGS[name]()


def no_fsync() -> None:
    """As libeatmydata has it."""
    os.fsync = lambda file: None  # type: ignore[assignment]


def no_file_fsync() -> None:
    os.fsync = _only(stat.S_ISDIR)  # type: ignore[assignment]


def no_directory_fsync() -> None:
    os.fsync = _only(stat.S_ISREG)  # type: ignore[assignment]


def _only(kind: Callable[[int], bool]) -> Callable[[int], None]:
    def fsync(file: int) -> None:
        if kind(os.fstat(file).st_mode):
            _fsync(file)

    return fsync


def rename_before_fsync() -> None:
    """What gets its name, by rename or link, is made durable afterwards: the name before the bytes."""

    def named(path: Path) -> None:
        durable.fsync_dir(path.parent)
        durable.fsync_file(path)

    def replace(self: Path, target: Any) -> Path:
        result = _replace(self, target)
        named(Path(target))
        return result

    def link(source: Any, target: Any) -> None:
        _link(source, target)
        named(Path(target))

    durable.write_new = _unsynced
    os.link = link  # type: ignore[assignment]
    Path.replace = replace  # type: ignore[method-assign, assignment]


def write_after_fsync() -> None:
    """A buffer that is flushed when the file is closed, after the fsync."""

    def write_new(path: Path, data: Any, mode: int = 0o666) -> None:
        file = durable.create_file(path)
        try:
            _fsync(file)
            durable.write_all(file, data)
        finally:
            os.close(file)

    durable.write_new = write_new


def _unsynced(path: Path, data: Any, mode: int = 0o666) -> None:
    file = durable.create_file(path)
    try:
        durable.write_all(file, data)
    finally:
        os.close(file)


def unlink_before_rename() -> None:
    """The standing manifest goes before the new one comes."""

    def replace(self: Path, target: Any) -> Path:
        if Path(target).name == Path(MANIFEST).name and self.suffix == ".tmp":
            Path(target).unlink(missing_ok=True)
            durable.fsync_dir(Path(target).parent)
        return _replace(self, target)

    Path.replace = replace  # type: ignore[method-assign, assignment]


BUGS: dict[str, Callable[[], None]] = {
    "no fsync": no_fsync,
    "no file fsync": no_file_fsync,
    "no directory fsync": no_directory_fsync,
    "rename before fsync": rename_before_fsync,
    "write after fsync": write_after_fsync,
    "unlink before rename": unlink_before_rename,
}
