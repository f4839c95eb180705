"""Seeded bugs that make the code less durable. The harness and the crash states (test_crash_states.py) must find them.

Each replaces some of ``PLACES``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierckpt.disk import durable
from tierckpt.format.layout import MANIFEST

PLACES = ((os, "fsync"), (os, "link"), (Path, "replace"), (durable, "write_new"))


def seed(name: str) -> None:
    """Plant the bug ``name`` in this process; none for an empty name."""
    if name:
        BUGS[name]()


def no_fsync() -> None:
    """No fsync at all, as with libeatmydata."""
    os.fsync = lambda file: None  # type: ignore[assignment]


def no_file_fsync() -> None:
    os.fsync = _fsync_only(stat.S_ISDIR)  # type: ignore[assignment]


def no_directory_fsync() -> None:
    os.fsync = _fsync_only(stat.S_ISREG)  # type: ignore[assignment]


def _fsync_only(kind: Callable[[int], bool]) -> Callable[[int], None]:
    real = os.fsync

    def fsync(file: int) -> None:
        if kind(os.fstat(file).st_mode):
            real(file)

    return fsync


def rename_before_fsync() -> None:
    """A file is made durable after its rename or link: the name before the bytes."""
    real_replace, real_link = Path.replace, os.link

    def fsync_parent_and_file(path: Path) -> None:
        durable.fsync_dir(path.parent)
        durable.fsync_file(path)

    def replace(self: Path, target: Any) -> Path:
        result = real_replace(self, target)
        fsync_parent_and_file(Path(target))
        return result

    def link(source: Any, target: Any, **options: Any) -> None:
        real_link(source, target, **options)
        fsync_parent_and_file(Path(target))

    durable.write_new = _write_unsynced
    os.link = link  # type: ignore[assignment]
    Path.replace = replace  # type: ignore[method-assign, assignment]


def write_after_fsync() -> None:
    """The buffer is written when the file is closed, after the fsync."""

    def write_new(path: Path, data: Any, mode: int = 0o666) -> None:
        file = durable.create_file(path)
        try:
            os.fsync(file)
            durable.write_all(file, data)
        finally:
            os.close(file)

    durable.write_new = write_new


def _write_unsynced(path: Path, data: Any, mode: int = 0o666) -> None:
    file = durable.create_file(path)
    try:
        durable.write_all(file, data)
    finally:
        os.close(file)


def unlink_before_rename() -> None:
    """The existing manifest is removed before the new one is renamed."""
    real = Path.replace

    def replace(self: Path, target: Any) -> Path:
        if Path(target).name == Path(MANIFEST).name and self.suffix == ".tmp":
            Path(target).unlink(missing_ok=True)
            durable.fsync_dir(Path(target).parent)
        return real(self, target)

    Path.replace = replace  # type: ignore[method-assign, assignment]


BUGS: dict[str, Callable[[], None]] = {
    "no fsync": no_fsync,
    "no file fsync": no_file_fsync,
    "no directory fsync": no_directory_fsync,
    "rename before fsync": rename_before_fsync,
    "write after fsync": write_after_fsync,
    "unlink before rename": unlink_before_rename,
}
