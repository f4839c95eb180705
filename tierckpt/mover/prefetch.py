"""Prefetch: fill a directory of this node with the files of a checkpoint or model, whole or not at all.

1. Freeze what to fetch: the manifest of a checkpoint of ours, else a listing with size and version (etag) of each file.
2. Reserve the space, then fetch chunks in parallel into a directory beside the target; a progress file there names the
   chunks that have landed, so that a killed prefetch goes on where it stopped.
3. When every file is whole (digests verified where the manifest has them), publish: one rename of the directory where
   the target is new or empty, else file by file. The receipt comes last: a directory without it is not done.

The progress file is believed only for the same frozen files and the same boot of the machine: after a power cut the
page cache may have lost what the file claims.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import (
    CapacityError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    OperationTimeoutError,
    PartialTransferError,
    PreconditionFailedError,
    TierckptError,
)
from ..layout import PRIVATE_DIR
from ..manifest import FileEntry, Manifest, digest_of, is_safe_path
from ..stores.base import Store
from ..stores.common import settled
from ..stores.local import durable_write, fsync_dir, make_dirs, translate_os_error
from ..telemetry import logger
from ..types import Buffer, ByteRange, Progress, ProgressListener, Tier
from .lock import try_lock
from .retention import nearest_existing
from .retry import verified
from .transfer import check, pwrite_all

log = logger("prefetch")

RECEIPT = f"{PRIVATE_DIR}/prefetched.json"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One file to fetch: where it lies, its size and version, and its digests when somebody recorded them."""

    path: str
    key: str
    size_bytes: int
    etag: str | None = None
    digests: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "size_bytes": self.size_bytes, "etag": self.etag, "digests": list(self.digests)}


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """What a prefetch did. ``fetched_bytes`` came over the wire now; the rest was there already."""

    directory: Path
    files: int
    size_bytes: int
    fetched_bytes: int


def from_manifest(manifest: Manifest) -> list[Wanted]:
    return [Wanted(entry.path, entry.key, entry.size_bytes, None, entry.digests) for entry in manifest.entries]


async def from_listing(store: Store) -> list[Wanted]:
    """Freeze every file under the store's root, except our own private ones.

    Raises:
        ObjectNotFoundError: there is nothing there.
        ConfigError: a key that cannot be a file name below the target directory.
    """
    wanted = []
    async for info in store.list():
        if info.key.startswith(f"{PRIVATE_DIR}/") or info.key.endswith("/"):
            continue
        if f"/{PRIVATE_DIR}/" in info.key:
            raise ConfigError(
                f"{store.uri} holds checkpoints, it is not one",
                hint="Prefetch one of them: `tierckpt ls` lists them",
                uri=store.uri,
            )
        if not is_safe_path(info.key):
            raise ConfigError(f"{store.uri} holds the key {info.key!r}, which cannot be a file below a directory")
        wanted.append(Wanted(info.key, info.key, info.size_bytes, info.etag))
    if not wanted:
        raise ObjectNotFoundError(
            f"{store.uri} holds no files", hint="Check the URI; `tierckpt ls` shows what is there", tier=Tier.SHARED
        )
    return sorted(wanted, key=lambda item: item.path)


async def prefetch(
    store: Store,
    wanted: list[Wanted],
    directory: Path,
    *,
    chunk_size_bytes: int,
    concurrency: int,
    listener: ProgressListener,
) -> PrefetchResult:
    """Make ``directory`` hold exactly these versions of ``wanted``.

    Returns when every file is there, whole and durable. Idempotent: what is there already is not fetched again.

    Raises:
        PartialTransferError: some files could not be had; names each. Nothing was published.
        CapacityError: not enough room; nothing was fetched.
        OperationTimeoutError: another process is filling this directory.
    """
    total = sum(item.size_bytes for item in wanted)
    if await asyncio.to_thread(_is_done, directory, wanted):
        listener(Progress(str(directory), total, total))
        return PrefetchResult(directory, len(wanted), total, 0)
    incoming = await asyncio.to_thread(_incoming, directory)
    with try_lock(incoming.with_name(f"{incoming.name}.lock"), remove=True) as held:
        if not held:
            raise OperationTimeoutError(
                f"another process is filling {directory}", hint="Wait for it, or stop it", tier=Tier.LOCAL
            )
        job = _Job(store, incoming, wanted, chunk_size_bytes, concurrency, listener)
        fetched = await job.run()
        await asyncio.to_thread(_publish, incoming, directory, wanted)
    return PrefetchResult(directory, len(wanted), total, fetched)


def _incoming(directory: Path) -> Path:
    """Where to gather the files, on the file system of ``directory``: beside it, or inside where it is in use already
    (a mount point cannot be renamed over)."""
    make_dirs(directory.parent)
    if _is_new(directory):
        return directory.with_name(f".{directory.name}.incoming")
    make_dirs(directory / PRIVATE_DIR)
    return directory / PRIVATE_DIR / "incoming"


def _is_new(directory: Path) -> bool:
    return not directory.exists() or not (directory.is_mount() or any(directory.iterdir()))


class _Job:
    """One prefetch into the ``incoming`` directory."""

    def __init__(
        self,
        store: Store,
        incoming: Path,
        wanted: list[Wanted],
        chunk_size_bytes: int,
        concurrency: int,
        listener: ProgressListener,
    ) -> None:
        self.store, self.incoming, self.wanted = store, incoming, wanted
        self.chunk_size_bytes = chunk_size_bytes
        self.gate = asyncio.Semaphore(concurrency)
        self.files_gate = asyncio.Semaphore(2 * concurrency)  # bounds open files
        self.listener = listener
        self.total = sum(item.size_bytes for item in wanted)
        self.done_bytes = 0
        self.fetched_bytes = 0
        self.log: int = -1

    async def run(self) -> int:
        landed = await asyncio.to_thread(self._prepare)
        failures: dict[str, str] = {}
        try:
            results = await asyncio.gather(
                *(self._fetch(index, item, landed.get(index, set())) for index, item in enumerate(self.wanted)),
                return_exceptions=True,
            )
        finally:
            os.close(self.log)
        for item, result in zip(self.wanted, results, strict=True):
            if isinstance(result, TierckptError):
                failures[item.path] = f"{type(result).__name__}: {result}"
            elif isinstance(result, BaseException):
                raise result
        if failures:
            errors = [error for error in results if isinstance(error, TierckptError)]
            first = next((error for error in errors if isinstance(error, IntegrityError)), errors[0])
            nothing_came = len(failures) == len(self.wanted)
            if nothing_came or isinstance(first, IntegrityError | CapacityError):
                raise first
            raise PartialTransferError(
                f"{len(failures)} of {len(self.wanted)} files of {self.store.uri} could not be fetched",
                hint="Nothing was published; run the same command again to fetch only what is missing",
                uri=self.store.uri,
                failures=failures,
            )
        return self.fetched_bytes

    def _prepare(self) -> dict[int, set[int]]:
        """Open the progress file, or start over when it is of other files or another boot. Reserve the space."""
        header = json.dumps({"boot": _boot_id(), "chunk": self.chunk_size_bytes, "files": _frozen(self.wanted)})
        path = self.incoming / PRIVATE_DIR / "progress"
        landed: dict[int, set[int]] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and lines[0] == header:
            for line in lines[1:]:
                parts = line.split()
                if len(parts) == 2:  # the last line may be torn
                    landed.setdefault(int(parts[0]), set()).add(int(parts[1]))
        else:
            shutil.rmtree(self.incoming, ignore_errors=True)
            self._reserve()
            make_dirs(path.parent)
            path.write_text(header + "\n")
        self.log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        return landed

    def _reserve(self) -> None:
        free = shutil.disk_usage(nearest_existing(self.incoming)).free
        if free < self.total:
            raise CapacityError(
                f"{self.store.uri} has {self.total} bytes, {free} are free for {self.incoming.parent}",
                hint="Free some space or give another directory; nothing was fetched",
                tier=Tier.LOCAL,
                needed_bytes=self.total,
                free_bytes=free,
            )

    async def _fetch(self, index: int, item: Wanted, landed: set[int]) -> None:
        async with self.files_gate:
            await self._fetch_file(index, item, landed)

    async def _fetch_file(self, index: int, item: Wanted, landed: set[int]) -> None:
        path = self.incoming / item.path
        file = await asyncio.to_thread(_open_sized, path, item.size_bytes)
        try:
            await self._fetch_chunks(index, item, landed, file, path)
            await settled(asyncio.to_thread(os.fsync, file))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            os.close(file)

    async def _fetch_chunks(self, index: int, item: Wanted, landed: set[int], file: int, path: Path) -> None:
        async with asyncio.TaskGroup() as group:
            for chunk, start in enumerate(range(0, item.size_bytes, self.chunk_size_bytes)):
                byte_range = ByteRange(start, min(start + self.chunk_size_bytes, item.size_bytes))
                if chunk in landed:
                    self._advance(byte_range.size_bytes)
                    continue
                await self.gate.acquire()  # before the task exists, so that tasks are bounded too
                group.create_task(self._fetch_chunk(index, chunk, item, byte_range, file, path))

    async def _fetch_chunk(
        self, index: int, chunk: int, item: Wanted, byte_range: ByteRange, file: int, path: Path
    ) -> None:
        try:
            try:
                data = await verified(self.store, lambda: self._read_chunk(chunk, item, byte_range))
            except PreconditionFailedError as error:
                raise IntegrityError(
                    f"{item.key} changed in the store while it was being fetched",
                    hint="Run the prefetch again to fetch the new version whole",
                    file=item.path,
                    tier=Tier.SHARED,
                ) from error
            await settled(asyncio.to_thread(pwrite_all, file, data, byte_range.start, path))
            os.write(self.log, f"{index} {chunk}\n".encode())  # O_APPEND and short: atomic between tasks
            self.fetched_bytes += byte_range.size_bytes
            self._advance(byte_range.size_bytes)
        finally:
            self.gate.release()

    async def _read_chunk(self, chunk: int, item: Wanted, byte_range: ByteRange) -> Buffer:
        data = await self.store.get_range(item.key, byte_range, if_match=item.etag)
        if item.digests:
            entry = FileEntry(item.path, item.size_bytes, item.digests)
            await check(data, item.digests[chunk], entry, byte_range, Tier.SHARED, self.store.uri)
        return data

    def _advance(self, size_bytes: int) -> None:
        self.done_bytes += size_bytes
        self.listener(Progress(f"prefetch {self.store.uri}", self.done_bytes, self.total))


def _frozen(wanted: list[Wanted]) -> str:
    return digest_of(json.dumps([item.to_json() for item in wanted], sort_keys=True).encode())


def _is_done(directory: Path, wanted: list[Wanted]) -> bool:
    """True when the receipt is of exactly these versions and every file has its size."""
    try:
        receipt = json.loads((directory / RECEIPT).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    if receipt.get("files") != _frozen(wanted):
        return False
    return all(_size(directory / item.path) == item.size_bytes for item in wanted)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _publish(incoming: Path, directory: Path, wanted: list[Wanted]) -> None:
    try:
        (incoming / PRIVATE_DIR / "progress").unlink()
        receipt = json.dumps({"files": _frozen(wanted), "count": len(wanted)}).encode()
        if incoming.parent == directory.parent:
            durable_write(incoming / RECEIPT, receipt)
            for folder in {(incoming / item.path).parent for item in wanted}:
                fsync_dir(folder)
            incoming.rename(directory)  # over an empty directory too: one instant at which all of it appears
            fsync_dir(directory.parent)
            return
        # The target holds other files already. The old receipt goes first, the new one comes last.
        (directory / RECEIPT).unlink(missing_ok=True)
        for item in wanted:
            make_dirs((directory / item.path).parent)
            (incoming / item.path).replace(directory / item.path)
        for folder in {(directory / item.path).parent for item in wanted}:
            fsync_dir(folder)
        make_dirs((directory / RECEIPT).parent)
        durable_write(directory / RECEIPT, receipt)
        shutil.rmtree(incoming, ignore_errors=True)
    except OSError as error:
        raise translate_os_error(error, directory, Tier.LOCAL) from error


def _open_sized(path: Path, size_bytes: int) -> int:
    try:
        make_dirs(path.parent)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if size_bytes and os.fstat(file).st_size != size_bytes:
                os.posix_fallocate(file, 0, size_bytes)
        except BaseException:
            os.close(file)
            raise
        return file
    except OSError as error:
        raise translate_os_error(error, path, Tier.LOCAL) from error


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
