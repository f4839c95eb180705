"""``tierckpt doctor``."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import platform
import secrets
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

from typer import Argument

from ..agent.node_document import node_document
from ..arena import memory, pages
from ..checkpoint.journal import Journal
from ..checkpoint.retention import nearest_existing
from ..config import GiB, Settings, unknown_variables
from ..disk.durable import closing_file, read_record
from ..disk.file_io import open_direct
from ..disk.io_tuner import MODEL_READ_MODES, READ_MODES, ReadMode, device_of, read_tuner_for
from ..disk.local_root import MEMORY_FILESYSTEMS, filesystem_type
from ..errors import IntegrityError, ObjectNotFoundError, PreconditionFailedError, StoreError, TierckptError
from ..format.layout import Location
from ..mover import Mover
from ..quantities import DISK_BLOCK_BYTES
from ..stores.base import Store
from ..torch_internals import CHECKED_VERSIONS
from .ui.output import Report, human_bytes, human_seconds, table
from .ui.session import Session, location_of

OK, WARN, FAIL = "ok", "warn", "fail"
EXTRAS = {
    "torch": "torch",
    "cli": "typer",
    "s3": "s3fs",
    "azure": "adlfs",
    "gcs": "gcsfs",
    "agent": "prometheus_client",
}
TORCH_FLOOR = (2, 10)
FREE_BYTES_WARN = 10 * GiB
FSYNC_SECONDS_WARN = 0.1
FSYNC_ROUNDS = 5
NOT_NODE_LOCAL = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "9p", "beegfs", "gpfs")


@dataclass(frozen=True, slots=True)
class Finding:
    """``ok``, ``warn`` (works, but not well) or ``fail`` (does not work)."""

    name: str
    status: str
    detail: str


def doctor(
    session: Session,
    uri: Annotated[
        str | None, Argument(metavar="[URI]", help="Also test this location: puts, reads and removes a small object.")
    ] = None,
) -> Report:
    """Check the installation, the local root, the journal and, with URI, shared storage. Exit 1 if anything fails."""
    location = location_of(uri) if uri is not None else None
    settings = session.settings()
    unknown = (Finding("environment", WARN, problem) for problem in unknown_variables().values())
    checks = [*_software(), *unknown, *_local_root(settings), _journal(settings), *huge_pages()]
    if location is not None:
        with session.client() as client:
            checks += client.run(_store(client.mover, location))
    document = {
        "local_root": str(settings.local_root),
        "uri": location.uri if location is not None else None,
        "ok": all(check.status != FAIL for check in checks),
        "checks": [asdict(check) for check in checks],
    }
    return Report(document, [table("check=name status detail", checks)], 0 if document["ok"] else 1)


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _software() -> Iterator[Finding]:
    yield Finding("python", OK, platform.python_version())
    found = _installed("torch")
    if found is None:
        yield Finding("torch", OK, "not installed: this node can move checkpoints and models, not save or load them")
    elif _major_minor(found) < TORCH_FLOOR:
        yield Finding("torch", FAIL, f"{found} is older than {'.'.join(map(str, TORCH_FLOOR))}")
    elif _major_minor(found) > _major_minor(CHECKED_VERSIONS[-1]):
        yield Finding("torch", WARN, f"{found} is newer than {CHECKED_VERSIONS[-1]}, the newest that was checked")
    else:
        yield Finding("torch", OK, found)
    present = [extra for extra, package in EXTRAS.items() if _installed(package)]
    absent = [extra for extra in EXTRAS if extra not in present]
    detail = f"installed: {', '.join(present) or 'none'}"
    yield Finding("extras", OK, f"{detail}; not installed: {', '.join(absent)}" if absent else detail)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _local_root(settings: Settings) -> Iterator[Finding]:
    root = settings.local_root
    base = nearest_existing(root)
    if not base.is_dir():
        yield Finding("local_root", FAIL, f"{base} is not a directory")
        return
    try:
        direct, fsync_seconds = _probe_disk(base)
    except OSError as error:
        hint = "set TIERCKPT_LOCAL_ROOT to a directory on node-local SSD"
        yield Finding("local_root", FAIL, f"{base} cannot be written: {error.strerror or error}; {hint}")
        return
    yield Finding("local_root", OK, str(root) if base == root else f"{root} will be made: {base} can be written")
    yield _filesystem(base)
    free = shutil.disk_usage(base).free
    yield Finding("free space", WARN if free < FREE_BYTES_WARN else OK, human_bytes(free))
    yield Finding(
        "O_DIRECT", OK if direct else WARN, "works" if direct else "refused: shards go through the page cache"
    )
    slow = fsync_seconds > FSYNC_SECONDS_WARN
    yield _reads("reads", base, settings, READ_MODES)
    yield _reads("model files", base, settings, MODEL_READ_MODES)
    yield Finding("fsync", WARN if slow else OK, f"{fsync_seconds * 1000:.1f} ms (median of {FSYNC_ROUNDS})")


def _reads(name: str, base: Path, settings: Settings, ways: tuple[ReadMode, ...]) -> Finding:
    tuner = read_tuner_for(settings, ways)
    with closing_file(os.open(base, os.O_RDONLY | os.O_CLOEXEC)) as file:
        device = device_of(file)
    way = tuner.mode(device)
    rates = read_record(tuner.path).get(device, {}).get("bytes_per_second", {})
    found = ", ".join(f"{tried} {human_bytes(rate)}/s" for tried, rate in rates.items())
    return Finding(name, OK, f"{way} (measured: {found})" if found else f"{way} until a large load has measured it")


def _filesystem(base: Path) -> Finding:
    kind = filesystem_type(base)
    if kind in MEMORY_FILESYSTEMS:
        return Finding("file system", WARN, f"{kind}: checkpoints there take memory and do not survive the node")
    if kind == "overlay":
        return Finding("file system", WARN, "overlay: it is deleted with the container; mount a disk of the node")
    if kind.startswith(NOT_NODE_LOCAL):
        return Finding("file system", WARN, f"{kind}: the local tier belongs on a disk of this node")
    return Finding("file system", OK, kind or "unknown")


def _probe_disk(directory: Path) -> tuple[bool, float]:
    """Return whether O_DIRECT works, and the median time of a write with fsync."""
    path = directory / f".tierckpt-doctor-{secrets.token_hex(6)}"
    flags = os.O_WRONLY | os.O_CREAT
    with mmap.mmap(-1, DISK_BLOCK_BYTES) as block:
        try:
            try:
                file = open_direct(path, flags)
                direct = file is not None
                if file is not None:
                    _timed_write(file, block)
            except OSError:
                direct = False
            times = [_timed_write(os.open(path, flags | os.O_CLOEXEC, 0o600), block) for _ in range(FSYNC_ROUNDS)]
            return direct, statistics.median(times)
        finally:
            path.unlink(missing_ok=True)


def _timed_write(file: int, block: mmap.mmap) -> float:
    with closing_file(file):
        begun = time.monotonic()
        os.pwrite(file, block, 0)
        os.fsync(file)
        return time.monotonic() - begun


def _journal(settings: Settings) -> Finding:
    entries = Journal(settings.local_root).entries()
    if not entries:
        return Finding("journal", OK, "empty")
    oldest = human_seconds(max(0.0, time.time() - entries[-1].created_unix_seconds))
    detail = (
        f"{len(entries)} entries to drain, {human_bytes(sum(entry.size_bytes for entry in entries))}, oldest {oldest}"
    )
    stores = [
        f"{row['store']} for {human_seconds(time.time() - row['since_unix_seconds'])} ({row['cause']}. {row['remedy']})"
        for row in node_document(settings)["stores"]
    ]
    remedy = f"waiting for {'; '.join(stores)}" if stores else "`tierckpt drain --wait`"
    return Finding("journal", WARN, f"{detail}; {remedy}")


def huge_pages() -> Iterator[Finding]:
    found = pages.advice(collapses=memory.collapses())
    if not found:
        yield Finding("huge pages", OK, "for private and for shared staging memory")
    for sentence in found:
        yield Finding("huge pages", WARN, sentence)


async def _store(mover: Mover, location: Location) -> list[Finding]:
    """Put, read, replace and remove one small object, up to the first failure. Always removes the object."""
    try:
        store = mover.store(location)
    except TierckptError as error:
        return [Finding("store", FAIL, str(error))]
    made = nearest_existing(Path(location.path)) if location.scheme == "file" else None
    key, names = f".tierckpt-doctor-{secrets.token_hex(6)}", iter(STORE_CHECKS)
    checks = list[Finding]()
    try:
        async for detail in _probe_store(store, key):
            checks.append(Finding(next(names), OK, detail))
    except TierckptError as error:
        checks.append(Finding(next(names), FAIL, str(error)))
    finally:
        with contextlib.suppress(TierckptError):  # already reported
            await store.delete(key)
        if made is not None:
            await asyncio.to_thread(_remove_empty, Path(location.path), made)
    sources = "; ".join(f"{name} {value}" for name, value in getattr(store, "sources", {}).items())
    return [Finding("store configuration", OK, sources), *checks] if sources else checks


STORE_CHECKS = ("store reachable", "store put", "store get", "store put-if-absent", "store delete")


async def _probe_store(store: Store, key: str) -> AsyncIterator[str]:
    """Yield a detail for each of ``STORE_CHECKS``."""
    data = secrets.token_bytes(1024)
    try:
        await store.head(key)
    except ObjectNotFoundError as error:
        if type(error) is not ObjectNotFoundError:
            raise  # the bucket itself is missing
    yield f"{store.uri} answers, the credentials are good"
    begun = time.monotonic()
    await store.put(key, data, if_absent=True)
    yield f"{(time.monotonic() - begun) * 1000:.0f} ms"
    begun = time.monotonic()
    if await store.get(key) != data:
        raise IntegrityError("the store returned other bytes than were written")
    yield f"{(time.monotonic() - begun) * 1000:.0f} ms, same bytes"
    try:
        await store.put(key, b"second", if_absent=True)
    except PreconditionFailedError:
        yield "supported" if store.has_put_if_absent else "checked, then put: two racing saves may both win"
    else:
        raise StoreError("a second put-if-absent overwrote the first: racing saves would overwrite each other")
    await store.delete(key)
    try:
        await store.head(key)
    except ObjectNotFoundError:
        yield "gone"
    else:
        raise StoreError("the deleted object is still there")


def _remove_empty(path: Path, stop: Path) -> None:
    while path != stop:
        try:
            path.rmdir()
        except OSError:
            return
        path = path.parent
