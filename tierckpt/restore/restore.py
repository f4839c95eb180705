"""Restore: a committed checkpoint as a plain directory, each chunk from the nearest copy that passes its digest.

It is a prefetch (cache/prefetch.py: reserve, resume, publish atomically) whose source reads this node's copies first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from ..cache.file_set import from_manifest
from ..cache.prefetch import from_listing, prefetch
from ..checkpoint.catalog import Checkpoint
from ..errors import ConfigError, IntegrityError, ObjectNotFoundError, TierckptError
from ..format.layout import Location
from ..format.manifest import FileEntry, Manifest
from ..read.range_sources import NearestSource
from ..stores.base import Store
from ..stores.verified_read import LocalFiles, check, get_checked
from ..telemetry import logger
from ..types import Buffer, ByteRange, Json, Progress, ProgressListener, Tier

log = logger("restore")


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """The result of a restore. Bytes left by an earlier, killed attempt count on no tier."""

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


async def restore(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    chunk_size_bytes: int,
    concurrency: int,
    stall_seconds: float,
    listener: ProgressListener,
) -> RestoreResult:
    """Make ``directory`` a plain copy of ``checkpoint`` that stock PyTorch reads. Whole and durable, or not there.

    Args:
        chunk_size_bytes: bytes moved at a time where the checkpoint has no manifest that says so (stock DCP).

    Raises:
        IntegrityError: a file has no good copy on any tier; names each. Nothing was published.
        ConfigError: ``directory`` holds one of the copies.
        PartialTransferError, CapacityError, StoreError: as prefetch.
    Cost: every byte read, digested and written once; good local bytes are not read from the shared tier.
    """
    if directory in (checkpoint.directory, Path(checkpoint.location.path)):
        raise ConfigError(f"{directory} is both source and target of the restore", hint="Give another --to")
    manifest = checkpoint.manifest
    source = RestoreSource(checkpoint, manifest) if manifest is not None else None
    store = cast(Store, source) if source is not None else checkpoint.store  # prefetch asks its source for ranges only
    wanted = from_manifest(manifest) if manifest is not None else await from_listing(checkpoint.store)
    chunk = manifest.chunk_size_bytes if manifest is not None else chunk_size_bytes

    def restoring(progress: Progress, /) -> None:
        listener(replace(progress, what=f"restore {checkpoint.location.uri}", note=""))  # it says "shared" of all

    try:
        done = await prefetch(
            store,
            wanted,
            directory,
            chunk_size_bytes=chunk,
            concurrency=concurrency,
            stall_seconds=stall_seconds,
            listener=restoring,
        )
    except TierckptError as error:
        if source is None or not source.lost:
            raise
        raise source.loss() from error
    local_bytes, peer_bytes = (source.local_bytes, source.peer_bytes) if source is not None else (0, 0)
    shared_bytes = done.fetched_bytes - local_bytes - peer_bytes
    return RestoreResult(
        checkpoint.location, done.directory, done.files, done.size_bytes, local_bytes, shared_bytes, peer_bytes
    )


class RestoreSource:
    """A ``RangeSource`` of one checkpoint: this node's chunks where the digest is right, else the nearest others'.

    Digests are compared here, not only by the caller: the error of a restore names every copy and its damage.
    """

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        self.uri = checkpoint.location.uri
        self.local_bytes = 0
        self.lost: dict[str, str] = {}
        """Files without a good copy, and the damage of each copy."""
        self._local = LocalFiles(checkpoint.directory)
        self._chunk_size_bytes = manifest.chunk_size_bytes
        self._entries = {entry.key: entry for entry in manifest.entries}
        self._bad: dict[str, str] = {}
        self._others = NearestSource(checkpoint.store, checkpoint.elsewhere)

    @property
    def peer_bytes(self) -> int:
        return self._others.peer_bytes

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        """Return one chunk of the file ``key``, verified. Prefetch cuts files as their manifest does."""
        entry = self._entries[key]
        digest = entry.digests[byte_range.start // self._chunk_size_bytes]
        if key not in self._bad:
            try:
                chunk = await self._local.get_range(key, byte_range)
                await check(chunk, digest, entry, byte_range, Tier.LOCAL, self._local.uri)
                self.local_bytes += byte_range.size_bytes
                return chunk
            except TierckptError as error:
                self._give_up_local(entry, error)
        try:
            return await get_checked(self._others, entry, byte_range, digest)
        except (IntegrityError, ObjectNotFoundError) as error:
            self.lost[entry.path] = f"local: {self._bad[key]}; elsewhere: {error.message}"
            raise

    def _give_up_local(self, entry: FileEntry, error: TierckptError) -> None:
        if not isinstance(error, ObjectNotFoundError) and entry.key not in self._bad:
            log.warning("the local copy is bad, trying other tiers: %s", error.message)
        self._bad[entry.key] = error.message

    def loss(self) -> IntegrityError:
        return IntegrityError(
            f"{self.uri}: no good copy of {', '.join(sorted(self.lost))} on any tier",
            hint="Nothing was published. Restore an older step; `tierckpt verify --read-data` shows every bad copy",
            file=", ".join(sorted(self.lost)),
            tier=f"{Tier.LOCAL}+{Tier.SHARED}",
            problems="; ".join(f"{path}: {text}" for path, text in sorted(self.lost.items())),
        )
