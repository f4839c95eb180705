"""The drill: checks that the shared tier alone can restore a checkpoint, before a node is lost.

It compares every byte with its digest twice: as received, and as read back from the disk. It does not load the
checkpoint, so no code in it can run (P9).
"""

from __future__ import annotations

import asyncio
import random
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..checkpoint import shared_commit
from ..checkpoint.catalog import retry_listing
from ..disk.durable import make_dirs, remove_tree, require_room, translated
from ..disk.file_lock import try_lock
from ..drain.file_transfer import fetch
from ..errors import BucketNotFoundError, CheckpointNotFoundError, IntegrityError, ObjectNotFoundError
from ..format.layout import MANIFEST, Location
from ..format.manifest import FileEntry, Manifest
from ..mover import Mover
from ..stores import verified_read
from ..stores.base import Store
from ..stores.verified_read import LocalFiles, check_file
from ..telemetry import ProgressCounter, logger
from ..types import Json

log = logger("drill")

PREFIX = "drill-"


@dataclass
class DrillReport:
    """``problems`` maps each bad file to its problem."""

    location: Location
    seed: int
    committed: int
    files: int = 0
    size_bytes: int = 0
    restored_bytes: int = 0
    seconds: float = 0.0
    problems: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> Json:
        numbers = ("seed", "committed", "files", "size_bytes", "restored_bytes", "seconds")
        return {
            "uri": self.location.uri,
            **{name: getattr(self, name) for name in numbers},
            "bytes_per_second": self.restored_bytes / self.seconds if self.seconds else 0.0,
            "good": not self.problems,
            "problems": [{"file": path, "problem": text} for path, text in sorted(self.problems.items())],
        }


async def drill(
    mover: Mover, location: Location, *, seed: int | None = None, scratch: Path | None = None
) -> DrillReport:
    """Restore a random committed step at or under ``location`` from the shared tier only, and compare every byte.

    The directory is always removed, at the latest by the next drill there.

    Args:
        seed: repeats the choice of an earlier drill.
        scratch: directory to restore to. None: the local root.

    Raises:
        CheckpointNotFoundError: nothing is committed there.
        ManifestError: the manifest of the chosen step is damaged.
        CapacityError: it does not fit; nothing was fetched.
        StoreUnavailableError, PermissionDeniedError: the store does not answer; the files may still be good.
    """
    gate = asyncio.Semaphore(mover.settings.concurrency)
    seed = secrets.randbelow(1 << 32) if seed is None else seed

    async def look(names: Collection[str]) -> tuple[tuple[Location, int, Manifest] | None, set[str]]:
        locations = [location, *(location.child(name) for name in names if not name.startswith("."))]
        has_commit = await asyncio.gather(*(_has_commit(mover.store(found), gate) for found in locations))
        steps = [found for found, has in zip(locations, has_commit, strict=True) if has]
        if not steps:
            return None, {*names}
        ordered = sorted(steps, key=lambda location: location.uri)
        chosen = ordered[random.Random(seed).randrange(len(ordered))]
        manifest = await shared_commit.read_shared_manifest(mover.store(chosen))
        return (chosen, len(steps), manifest) if manifest else None, set() if manifest else {chosen.name}

    found = await retry_listing(location, mover.store(location).list_dirs, look)
    if found is None:
        raise CheckpointNotFoundError(
            f"nothing is committed on the shared tier at or under {location.uri}",
            hint="`tierckpt ls` lists checkpoints; `tierckpt drain --wait` on the training nodes commits pending ones",
        )
    chosen, count, manifest = found
    report = DrillReport(chosen, seed, count)
    await _compare(mover, report, manifest, scratch or mover.settings.local_root)
    return report


async def _has_commit(store: Store, gate: asyncio.Semaphore) -> bool:
    async with gate:
        try:
            await store.head(MANIFEST)
        except BucketNotFoundError:
            raise  # a missing bucket is not an empty one
        except ObjectNotFoundError:
            return False
        return True


async def _compare(mover: Mover, report: DrillReport, manifest: Manifest, parent: Path) -> None:
    report.files, report.size_bytes = len(manifest.entries), manifest.size_bytes
    begun = time.monotonic()
    with _scratch_directory(parent, manifest.size_bytes) as scratch:
        job = _Drill(mover, report, manifest, scratch)
        try:
            async with asyncio.TaskGroup() as group:
                for entry in manifest.entries:
                    group.create_task(job.restore(entry))
                for entry in manifest.metadata:
                    if entry.source:
                        group.create_task(job.inspect_stock_copy(entry))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    report.restored_bytes = job.progress.done_bytes
    report.seconds = time.monotonic() - begun


class _Drill:
    def __init__(self, mover: Mover, report: DrillReport, manifest: Manifest, scratch: Path) -> None:
        self.report, self.manifest, self.scratch = report, manifest, scratch
        self.store = mover.store(report.location)
        self.concurrency = mover.settings.concurrency
        self.gate = asyncio.Semaphore(self.concurrency)
        self.progress = ProgressCounter(mover.listener, f"drill {report.location.uri}", report.size_bytes)

    async def restore(self, entry: FileEntry) -> None:
        path = self.scratch / entry.path
        chunk_size = self.manifest.chunk_size_bytes
        async with self._noting_damage(entry.path):
            found_bytes = (await self.store.head(entry.key)).size_bytes
            if found_bytes != entry.size_bytes:  # a fetch by ranges would miss bytes added at the end
                raise IntegrityError(f"it has {found_bytes} bytes, the manifest says {entry.size_bytes}")
            with self.progress.moving(entry.path, entry.size_bytes) as on_file:
                await fetch(self.store, entry, path, chunk_size, on_file, self.concurrency)
            await check_file(LocalFiles(self.scratch), replace(entry, source=""), chunk_size)

    async def inspect_stock_copy(self, entry: FileEntry) -> None:
        async with self._noting_damage(entry.path):
            data = await self.store.get(entry.path)
            verified_read.check_bytes(data, entry, self.manifest.chunk_size_bytes, self.store.uri)

    @asynccontextmanager
    async def _noting_damage(self, path: str) -> AsyncIterator[None]:
        async with self.gate:
            try:
                yield
            except (IntegrityError, ObjectNotFoundError) as error:
                log.warning("the drill found damage: %s", error.message, extra={"file": path})
                self.report.problems[path] = error.message


@contextmanager
def _scratch_directory(parent: Path, needed_bytes: int) -> Iterator[Path]:
    make_dirs(parent)
    _remove_dead(parent)
    with translated(parent):
        hint = "Use a --scratch directory with more room; nothing was fetched"
        require_room(parent, needed_bytes, "the checkpoint", hint)
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    with try_lock(_lock_of(directory), remove=True):
        try:
            yield directory
        finally:
            remove_tree(directory, ignore_errors=True)


def _remove_dead(parent: Path) -> None:
    for left in parent.glob(f"{PREFIX}*"):
        if left.is_dir() and _lock_of(left).exists():  # else it may not be a drill's
            with try_lock(_lock_of(left), remove=True) as dead:
                if dead:
                    remove_tree(left, ignore_errors=True)
                    log.info("removed %s, left by a killed drill", left)


def _lock_of(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.lock")
