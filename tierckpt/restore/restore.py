"""Restore: copies a committed checkpoint to a plain directory, each chunk from the nearest copy with its digest."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from ..cache.file_set import from_manifest
from ..cache.prefetch import fill_directory, from_listing
from ..checkpoint import catalog
from ..checkpoint.catalog import Checkpoint, WalkBack
from ..disk.durable import refuse_file
from ..errors import ConfigError, IntegrityError, ObjectNotFoundError, TierckptError
from ..format.layout import Location
from ..format.manifest import FileEntry, Manifest
from ..mover import Mover
from ..read.range_sources import NearestSource
from ..stores.base import Store
from ..stores.verified_read import LocalFiles, check, get_checked
from ..telemetry import logger
from ..types import Buffer, ByteRange, Json, Progress, Tier

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
        return {
            "uri": self.location.uri,
            "directory": str(self.directory),
            "files": self.files,
            "size_bytes": self.size_bytes,
            "local_bytes": self.local_bytes,
            "peer_bytes": self.peer_bytes,
            "shared_bytes": self.shared_bytes,
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
        checkpoint = (await mover.selector.newest(location, walk.step_max)).checkpoint
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
    local_bytes, peer_bytes = (source.local_bytes, source.peer_bytes) if source is not None else (0, 0)
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
        self._others = NearestSource(checkpoint.store, checkpoint.elsewhere)

    @property
    def peer_bytes(self) -> int:
        return self._others.peer_bytes

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
                self._exclude_local(entry, error)
        try:
            return await get_checked(self._others, entry, byte_range, digest)
        except (IntegrityError, ObjectNotFoundError) as error:
            self.lost[entry.path] = f"local: {self._bad[key]}; elsewhere: {error.message}"
            raise

    def _exclude_local(self, entry: FileEntry, error: TierckptError) -> None:
        if not isinstance(error, ObjectNotFoundError) and entry.key not in self._bad:
            log.warning("the local copy is damaged, trying other tiers: %s", error.message)
        self._bad[entry.key] = error.message

    def missing_copy_error(self) -> IntegrityError:
        return IntegrityError(
            f"{self.uri}: no good copy of {', '.join(sorted(self.lost))} on any tier",
            hint="Nothing was published. Restore an older step; `tierckpt verify --read-data` shows every bad copy",
            file=", ".join(sorted(self.lost)),
            tier=f"{Tier.LOCAL}+{Tier.SHARED}",
            problems="; ".join(f"{path}: {text}" for path, text in sorted(self.lost.items())),
        )
