"""Restores a checkpoint to a directory, and fetches its files: each chunk from the nearest copy with its digest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from ..cache.entry import CacheEntry
from ..cache.file_set import FileSet, files_of_rank, from_manifest
from ..cache.prefetch import fill_directory, from_listing
from ..checkpoint import catalog, local_commit
from ..checkpoint.catalog import Checkpoint, WalkBack
from ..disk.durable import make_dirs, publish, refuse_file, remove_tree, translated
from ..disk.file_lock import lock_async
from ..disk.processes import companion_path
from ..drain.file_transfer import FETCH_TIMEOUT_SECONDS, OnBytes, fetch
from ..errors import ConfigError, IntegrityError, ObjectNotFoundError, StoreError, TierckptError
from ..format.layout import INCOMING_DIR, Location
from ..format.manifest import FileEntry, Manifest
from ..mover import Mover
from ..peer.fetch.fetch_session import SMALL_BYTES, PeerJoiner
from ..read.replicated_file import NearestSource
from ..stores.base import RangeSource, Store, to_completion
from ..stores.verified_read import LocalFiles, check, get_checked, get_whole
from ..telemetry import ProgressCounter, logger
from ..types import Buffer, ByteRange, Json, Progress, Tier


async def fetch_missing(mover: Mover, checkpoint: Checkpoint, entries: Iterable[FileEntry]) -> None:
    """Fetch the missing ``entries`` to the local tier, verified. A file that cannot be kept is skipped."""
    if checkpoint.manifest is None:
        return
    missing = [entry for entry in entries if checkpoint.local_path(entry) is None]
    total = sum(entry.size_bytes for entry in missing)
    gate = asyncio.Semaphore(mover.settings.concurrency)
    on_bytes = ProgressCounter(mover.listener, f"restore {checkpoint.location.uri}", total).add

    async def one(entry: FileEntry) -> None:
        async with gate:
            try:
                width = mover.settings.concurrency
                await fetch_to_local(checkpoint, entry, sharing=mover.sharing, concurrency=width, on_bytes=on_bytes)
            except (TierckptError, OSError) as error:
                log.warning("%s could not be fetched to this node: %s", entry.path, error)

    async with mover.reading(checkpoint):
        is_elsewhere = bool(missing and checkpoint.tiers & {Tier.SHARED, Tier.PEER})
        if is_elsewhere and mover.peers is not None:
            await adopt(checkpoint)  # so that peers find each file once it is complete
        await asyncio.gather(*(one(entry) for entry in missing))
        if is_elsewhere:
            await adopt(checkpoint)


async def fetch_to_local(
    checkpoint: Checkpoint, entry: FileEntry, *, sharing: PeerJoiner | None, concurrency: int, on_bytes: OnBytes
) -> None:
    """Fetch one file to the local tier. It appears complete, verified and durable, or not at all.

    With ``sharing``, nodes read each byte from the shared tier once, together. One process of a node fetches a file;
    others wait for it. Raises IntegrityError, StoreError or CapacityError.
    """
    chunk = checkpoint.manifest.chunk_size_bytes if checkpoint.manifest is not None else 0
    path, nearest = checkpoint.directory / entry.key, NearestSource(checkpoint.store, checkpoint.elsewhere)
    if sharing is None or entry.size_bytes < SMALL_BYTES or not entry.digests:
        await fetch(nearest, entry, path, chunk, on_bytes, concurrency)
        return
    make_dirs(path.parent)
    async with lock_async(companion_path(path, ".lock"), FETCH_TIMEOUT_SECONDS, str(path)):
        if await asyncio.to_thread(path.exists):
            on_bytes(entry.size_bytes)
            return
        origin: RangeSource = checkpoint.store if Tier.SHARED in checkpoint.tiers else nearest
        # A separate version (``peer.chunk_files``): only nodes that want the file share it.
        frozen = FileSet(checkpoint.location.uri, (files_of_rank(entry),), chunk)
        incoming = checkpoint.directory / INCOMING_DIR / frozen.version
        gate, done_bytes = asyncio.Semaphore(concurrency), 0

        def counted(progress: Progress, /) -> None:
            nonlocal done_bytes
            on_bytes(progress.done_bytes - done_bytes)
            done_bytes = progress.done_bytes

        cached = CacheEntry(origin, frozen, incoming, fetch_slots=gate, fetches_max=concurrency, peer_join=sharing)
        try:
            await to_completion(asyncio.to_thread(lambda: cached.begin(whole=True)))
            await cached.fill(listener=counted)
            await to_completion(asyncio.to_thread(_rename_into_place, incoming, entry, path))
        finally:
            await cached.close()


def _rename_into_place(incoming: Path, entry: FileEntry, path: Path) -> None:
    with translated(path, is_above=True):
        publish(incoming / entry.path, path)
        remove_tree(incoming, ignore_errors=True)


async def adopt(checkpoint: Checkpoint) -> None:
    """Record on this node a commit made elsewhere. Best effort."""
    manifest, directory = checkpoint.manifest, checkpoint.directory
    if manifest is None:
        return
    try:
        await asyncio.to_thread(
            local_commit.record_commit, directory, manifest, await metadata_of(checkpoint, manifest)
        )
        if Tier.SHARED in checkpoint.tiers:
            await asyncio.to_thread(local_commit.mark_drained, directory, manifest.attempt)
    except (TierckptError, OSError) as error:
        log.warning("the commit of %s could not be recorded on this node: %s", checkpoint.location.uri, error)


async def metadata_of(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, bytes]:
    """Return the verified bytes of each metadata file by path, from the nearest copy.

    Raises IntegrityError or StoreError if a file has no good copy.
    """
    nearest, chunk = NearestSource(checkpoint.store, checkpoint.elsewhere), manifest.chunk_size_bytes
    here, found = LocalFiles(checkpoint.directory), {}
    for entry in manifest.metadata:
        for known in (entry, replace(entry, source="")):  # a prefetch writes stock PyTorch's layout
            with contextlib.suppress(OSError, IntegrityError, StoreError):
                found[entry.path] = await get_whole(here, known, chunk)
                break
        else:
            found[entry.path] = await get_whole(nearest, entry, chunk)
    return found


log = logger("restore")


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """Bytes of an earlier, killed attempt count on no tier."""

    location: Location
    directory: Path
    files: int
    size_bytes: int
    local_bytes: int
    shared_bytes: int
    peer_bytes: int = 0

    def to_json(self) -> Json:
        numbers = ("files", "size_bytes", "local_bytes", "peer_bytes", "shared_bytes")
        return {"uri": self.location.uri, "directory": str(self.directory)} | {
            name: getattr(self, name) for name in numbers
        }


async def restore(mover: Mover, location: Location, directory: Path) -> RestoreResult:
    """Make ``directory`` a plain copy of the newest usable checkpoint at or under ``location``.

    Complete and durable, or absent. A checkpoint with a file that has no good copy is skipped for an older step, with a
    warning.

    Raises:
        IntegrityError: no checkpoint has a good copy of every file; names each. Nothing was published.
        ConfigError: ``directory`` is a file, or the directory of one of the copies.
        PartialTransferError, CapacityError, StoreError: as in a prefetch.
    """
    await asyncio.to_thread(refuse_file, directory)
    walk = WalkBack(location)
    while True:
        checkpoint = await mover.selector.newest(location, walk.step_max)
        if checkpoint is None:
            walk.end()
            checkpoint = await mover.selector.find(location)
        try:
            async with mover.reading(checkpoint):
                if await catalog.is_still_committed(checkpoint):
                    return await _copy(mover, checkpoint, directory)
            walk.note_removed()  # removed before it was protected
        except (IntegrityError, ObjectNotFoundError) as error:
            if checkpoint.location == location or checkpoint.step is None:
                raise
            if not await catalog.is_still_committed(checkpoint):  # removed during the read
                walk.note_removed()
                continue
            log.warning("%s has no good copy left, trying an older step: %s", checkpoint.location.uri, error)
            walk.note_lost(checkpoint.location, error)


async def _copy(mover: Mover, checkpoint: Checkpoint, directory: Path) -> RestoreResult:
    if directory in (checkpoint.directory, Path(checkpoint.location.path)):
        raise ConfigError(f"{directory} is both source and target of the restore", hint="Use another --to")
    manifest = checkpoint.manifest
    source = RestoreSource(checkpoint, manifest) if manifest is not None else None
    # fill_directory requests only ranges from its source.
    store = cast(Store, source) if source is not None else checkpoint.store
    requested_files = from_manifest(manifest) if manifest is not None else await from_listing(checkpoint.store)

    def restoring(progress: Progress, /) -> None:
        mover.listener(replace(progress, what=f"restore {checkpoint.location.uri}", note=""))

    try:
        done = await fill_directory(
            store,
            requested_files,
            directory,
            chunk_size_bytes=(manifest or mover.settings).chunk_size_bytes,
            concurrency=mover.settings.concurrency * 2,
            stall_seconds=mover.node_cache.stall_seconds,
            listener=restoring,
        )
    except TierckptError as error:
        if source is None or not source.lost:
            raise
        raise source.missing_copy_error() from error
    local_bytes, peer_bytes = (source.local_bytes, source.others.peer_bytes) if source is not None else (0, 0)
    shared_bytes = done.fetched_bytes - local_bytes - peer_bytes
    return RestoreResult(
        checkpoint.location, done.directory, done.files, done.size_bytes, local_bytes, shared_bytes, peer_bytes
    )


class RestoreSource:
    """This node's chunks if their digest is right, else the nearest others'. An error names every copy's damage."""

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        self.uri = checkpoint.location.uri
        self.local_bytes = 0
        self.lost: dict[str, str] = {}
        """Damage of each copy, by file."""
        self._local = LocalFiles(checkpoint.directory)
        self._chunk_size_bytes = manifest.chunk_size_bytes
        self._entries = {entry.key: entry for entry in manifest.entries}
        self._bad: dict[str, str] = {}
        self.others = NearestSource(checkpoint.store, checkpoint.elsewhere)

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        entry = self._entries[key]
        digest = entry.digests[byte_range.start // self._chunk_size_bytes]
        if key not in self._bad:
            try:
                chunk = await self._local.get_range(key, byte_range)
                await check(chunk, digest, entry, byte_range, Tier.LOCAL, self._local.uri)
                self.local_bytes += byte_range.size_bytes
                return chunk
            except TierckptError as error:
                if not isinstance(error, ObjectNotFoundError) and key not in self._bad:
                    log.warning("the local copy is damaged, trying other tiers: %s", error.message)
                self._bad[key] = error.message
        try:
            return await get_checked(self.others, entry, byte_range, digest)
        except (IntegrityError, ObjectNotFoundError) as error:
            self.lost[entry.path] = f"local: {self._bad[key]}; elsewhere: {error.message}"
            raise

    def missing_copy_error(self) -> IntegrityError:
        return IntegrityError(
            f"{self.uri}: no good copy of {', '.join(sorted(self.lost))} on any tier",
            hint="Nothing was published. Restore an older step; `tierckpt verify --read-data` shows every bad copy",
            file=", ".join(sorted(self.lost)),
            tier=f"{Tier.LOCAL}+{Tier.SHARED}",
            problems="; ".join(f"{path}: {text}" for path, text in sorted(self.lost.items())),
        )
