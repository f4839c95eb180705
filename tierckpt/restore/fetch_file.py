"""Fetches files of a checkpoint to this node from the nearest copy: peers, then the shared tier."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..cache.entry import CacheEntry
from ..cache.file_set import FileSet, files_of_rank
from ..checkpoint import local_commit, marks
from ..checkpoint.catalog import Checkpoint
from ..disk.durable import make_dirs, publish, remove_tree, translated
from ..disk.file_lock import lock_async
from ..disk.processes import companion_path
from ..drain.file_transfer import FETCH_TIMEOUT_SECONDS, OnBytes, fetch
from ..errors import IntegrityError, StoreError, TierckptError
from ..format.layout import INCOMING_DIR
from ..format.manifest import FileEntry, Manifest
from ..mover import Mover
from ..peer.fetch.fetch_session import SMALL_BYTES, PeerJoiner
from ..read.range_sources import NearestSource
from ..stores.base import RangeSource
from ..stores.common import to_completion
from ..stores.verified_read import LocalFiles, get_whole
from ..telemetry import logger
from ..types import Progress, Tier

log = logger("restore")


async def fetch_missing(mover: Mover, checkpoint: Checkpoint, entries: Iterable[FileEntry]) -> None:
    """Fetch the missing ``entries`` to the local tier, verified. A file that cannot be kept is skipped."""
    if checkpoint.manifest is None:
        return
    done = 0
    missing = [entry for entry in entries if checkpoint.local_path(entry) is None]
    total = sum(entry.size_bytes for entry in missing)
    gate = asyncio.Semaphore(mover.settings.concurrency)

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        mover.listener(Progress(f"restore {checkpoint.location.uri}", done, total))

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
        gate, counted = asyncio.Semaphore(concurrency), _Counted(on_bytes)
        cached = CacheEntry(origin, frozen, incoming, fetch_slots=gate, fetches_max=concurrency, peer_join=sharing)
        try:
            await asyncio.to_thread(lambda: cached.begin(whole=True))
            await cached.fill(listener=counted)
            await to_completion(asyncio.to_thread(_rename_into_place, incoming, entry, path))
        finally:
            await cached.close()


class _Counted:
    def __init__(self, on_bytes: OnBytes) -> None:
        self._on_bytes, self._done_bytes = on_bytes, 0

    def __call__(self, progress: Progress, /) -> None:
        self._on_bytes(progress.done_bytes - self._done_bytes)
        self._done_bytes = progress.done_bytes


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
            await asyncio.to_thread(marks.mark_drained, directory, manifest.attempt)
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
