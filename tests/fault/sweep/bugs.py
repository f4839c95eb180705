"""Seeded bugs: what people get wrong about files. ``seed`` puts one of them into the process it is called in.

Which harness must find which is in ``FOUND_BY``; ``run.py bugs`` sees to it.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierckpt.checkpoint import local_commit
from tierckpt.disk import durable
from tierckpt.format import layout
from tierckpt.format.manifest import Flushed, digests_of
from tierckpt.save import flush

KILLS, ERRNOS, ORDER = "kills", "errnos", "order"


def replace(real: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Put ``other`` in the place of ``real`` in every module of ours that has it by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("tierckpt", "tests.fault.sweep")):
            for attribute, value in list(vars(module).items()):
                if value is real:
                    setattr(module, attribute, other)


def no_fsync(kind: Callable[[int], bool]) -> None:
    real = os.fsync
    os.fsync = lambda fd: None if kind(os.fstat(fd).st_mode) else real(fd)  # type: ignore[assignment]


def rename_before_fsync() -> None:
    def durable_write(path: Path, data: Any, **_: Any) -> None:
        temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(file, data)
        temporary.replace(path)
        os.fsync(file)
        os.close(file)
        durable.fsync_dir(path.parent)

    replace(durable.durable_write, durable_write)


def no_flush_before_fsync() -> None:
    """The bug of stock DCP: the bytes are in a buffer of the process when the file is fsynced."""

    def write_new(path: Path, data: Any, mode: int = 0o666) -> None:
        with path.open("xb", buffering=1 << 20) as file:
            file.write(data)
            os.fsync(file.fileno())

    replace(durable.write_new, write_new)


def short_write_ignored() -> None:
    def write_all(file: int, data: Any) -> int:
        os.write(file, data)
        return len(data)

    def write(self: Any, view: memoryview, offset: int) -> None:
        os.pwrite(self.fd, view, offset)

    replace(durable.write_all, write_all)
    flush.ShardFile.write = write  # type: ignore[method-assign]


def commit_before_shards() -> None:
    """The manifest is in place while the shards it names are still to be written."""
    real_flush, real_commit = flush.flush, local_commit.commit_local
    later: list[Callable[[], Any]] = []

    def flush_later(shards: Any, **options: Any) -> list[Flushed]:
        flushed = []
        for shard in shards:
            heads = b"".join(bytes(record.head) for record in shard.records)
            digests = digests_of(heads, options["chunk_size_bytes"])
            flushed.append(Flushed(shard.path, shard.size_bytes, digests))
        later.append(lambda: real_flush(shards, **options))
        return flushed

    def commit_now(*arguments: Any) -> None:
        real_commit(*arguments)
        while later:
            later.pop(0)()

    flush.flush, local_commit.commit_local = flush_later, commit_now  # type: ignore[assignment]


def retried_fsync() -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        try:
            real(fd)
        except OSError:
            real(fd)  # the pages that could not be written are marked clean by now

    os.fsync = fsync  # type: ignore[assignment]


def unlink_before_rename() -> None:
    real = durable.durable_write

    def durable_write(path: Path, data: Any, **options: Any) -> None:
        path.unlink(missing_ok=True)
        real(path, data, **options)

    replace(real, durable_write)


def data_name_reused() -> None:
    """As stock DCP: the shards of the next save have the names of this one, and are opened with O_TRUNC."""
    layout.shard_name = lambda prefix, index, token: f"{prefix}{index}-same.distcp"

    def open_again(self: Any) -> None:
        self.fd = os.open(self.shard.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self.direct = False

    flush.ShardFile.open_file = open_again  # type: ignore[method-assign]


def error_swallowed() -> None:
    """A write that fails is taken for one that worked."""
    real = flush.ShardFile.write

    def write(self: Any, view: memoryview, offset: int) -> None:
        try:
            real(self, view, offset)
        except OSError:
            pass

    flush.ShardFile.write = write  # type: ignore[method-assign]


def files_before_manifest() -> None:
    """Removal the wrong way round."""
    real = local_commit.remove_local

    def remove_local(directory: Path, *arguments: Any) -> bool:
        manifest = local_commit.read_local_manifest(directory)
        if manifest is not None:
            for entry in manifest.entries:
                (directory / entry.key).unlink(missing_ok=True)
        return real(directory, *arguments)

    replace(real, remove_local)


BUGS: dict[str, Callable[[], None]] = {
    "no fsync of files": lambda: no_fsync(stat.S_ISREG),
    "no fsync of directories": lambda: no_fsync(stat.S_ISDIR),
    "rename before fsync": rename_before_fsync,
    "no flush before fsync": no_flush_before_fsync,
    "short write ignored": short_write_ignored,
    "commit before the shards": commit_before_shards,
    "fsync tried again": retried_fsync,
    "unlink before rename": unlink_before_rename,
    "data name reused": data_name_reused,
    "error swallowed": error_swallowed,
    "files before the manifest": files_before_manifest,
}

FOUND_BY = {
    "no fsync of files": {ORDER},
    "no fsync of directories": {ORDER},
    "rename before fsync": {ORDER},
    "no flush before fsync": {ORDER},
    "short write ignored": {ERRNOS},
    "commit before the shards": {KILLS, ORDER},
    "fsync tried again": {ERRNOS},
    "unlink before rename": {KILLS, ORDER},
    "data name reused": {KILLS, ORDER},
    "error swallowed": {ERRNOS},
    "files before the manifest": {KILLS, ORDER},
}
"""At least these. Which others do is in the outcome."""

TRIED_IN_A_PART: dict[str, set[str]] = {
    "short write ignored": {ERRNOS},
    "fsync tried again": {ERRNOS},
    "error swallowed": {ERRNOS},
    "commit before the shards": {KILLS},
    "files before the manifest": {KILLS},
}
"""What is looked for besides the order when the sweep is not full: kills and errors take seconds for each bug."""

PHASE_OF = {"files before the manifest": "retention"}
"""Where a bug shows, if not when a checkpoint is saved over another of the same id."""


def seed(name: str) -> None:
    if name:
        BUGS[name]()
