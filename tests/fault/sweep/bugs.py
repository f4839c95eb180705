"""Seeded bugs: common errors with files. ``seed`` plants one in this process; ``run.py bugs`` must find each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierckpt.checkpoint import local_commit, retention
from tierckpt.disk import durable
from tierckpt.format import layout
from tierckpt.format.manifest import Flushed, Manifest, digests_of
from tierckpt.save import flush
from tierckpt.stores.base import Store
from tierckpt.stores.local import LocalStore

KILLS, ERRNOS = "kills", "errnos"


def replace(real: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Replace ``real`` by ``other`` in every tierckpt module that imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("tierckpt", "tests.fault.sweep")):
            for attribute, value in list(vars(module).items()):
                if value is real:
                    setattr(module, attribute, other)


def short_write_ignored() -> None:
    def write_all(file: int, data: Any) -> int:
        os.write(file, data)
        return len(data)

    def write(self: Any, view: memoryview, offset: int) -> None:
        os.pwrite(self.fd, view, offset)

    replace(durable.write_all, write_all)
    flush.ShardFile.write = write  # type: ignore[method-assign]


def commit_before_shards() -> None:
    """The manifest exists before the shards that it names are written."""
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
            real(fd)  # the kernel has marked the unwritten pages clean

    os.fsync = fsync  # type: ignore[assignment]


def error_swallowed() -> None:
    """A failed write is treated as successful."""
    real = flush.ShardFile.write

    def write(self: Any, view: memoryview, offset: int) -> None:
        try:
            real(self, view, offset)
        except OSError:
            pass

    flush.ShardFile.write = write  # type: ignore[method-assign]


def files_before_manifest() -> None:
    """A removal deletes the files before the manifest that names them."""
    real = local_commit.remove_local

    def remove_local(directory: Path, *arguments: Any) -> bool:
        manifest = local_commit.read_local_manifest(directory)
        if manifest is not None:
            for entry in manifest.entries:
                (directory / entry.key).unlink(missing_ok=True)
        return real(directory, *arguments)

    replace(real, remove_local)


def shared_files_before_manifest() -> None:
    """The same on shared storage."""

    async def remove_shared(store: Store, manifest: Manifest) -> bool:
        for name in (*(entry.key for entry in manifest.entries), layout.METADATA, layout.MANIFEST):
            await store.delete(name)
        return True

    replace(retention.remove_shared, remove_shared)


def no_record_of_removal() -> None:
    """The names of the files to delete are not recorded before their manifest is."""
    real = LocalStore.put

    async def put(self: LocalStore, key: str, data: Any, **options: Any) -> None:
        if layout.REMOVED_DIR not in key:
            await real(self, key, data, **options)

    LocalStore.put = put  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class Bug:
    seed: Callable[[], None]
    harness: str
    """The sweep that must find it. Crash states find bugs of ordering (test_crash_states.py)."""
    phase: str = "overwrite"


BUGS = {
    "short write ignored": Bug(short_write_ignored, ERRNOS),
    "fsync tried again": Bug(retried_fsync, ERRNOS),
    "error swallowed": Bug(error_swallowed, ERRNOS),
    "commit before the shards": Bug(commit_before_shards, KILLS),
    "files before the manifest": Bug(files_before_manifest, KILLS, "retention"),
    "shared files before the manifest": Bug(shared_files_before_manifest, KILLS, "retention"),
    "no record of a removal": Bug(no_record_of_removal, KILLS, "retention"),
}


def seed(name: str) -> None:
    if name:
        BUGS[name].seed()
