"""Prefetch: fill a directory of this node with the files of a checkpoint or model, whole or not at all.

1. Freeze what to fetch: the manifest of a checkpoint of ours, else a listing with size and version (etag) of each file.
2. See that there is room, then fetch chunks in parallel into a directory beside the target (cache/partial_entry.py); a
   progress file there names the chunks that have landed, so that a killed prefetch goes on where it stopped, and
   several processes fill one directory together.
3. When every file is whole (digests verified where the manifest has them), publish: one rename of the directory where
   the target is new or empty, else file by file. The receipt comes last: a directory without it is not done.

Into the node cache it is the same, with a reservation and a lease (cache/node_cache.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from ..disk.durable import check_names, space_of
from ..errors import CapacityError, ConfigError, ObjectNotFoundError
from ..format.layout import PRIVATE_DIR
from ..format.manifest import is_safe_path
from ..quantities import human_bytes
from ..stores.base import RangeSource, Store
from ..stores.local import LocalStore, young_seconds
from ..telemetry import logger
from ..types import Json, ProgressListener, Tier
from .entry import CacheEntry
from .fetch_job import FetchStats
from .file_set import FileSet, FileSpec
from .partial_entry import incoming_of, remove_abandoned, whole_receipt
from .peer_fill import PeerJoin
from .pool import allocated_bytes

log = logger("prefetch")


@dataclass(slots=True, kw_only=True)
class PrefetchResult(FetchStats):
    """What a prefetch did. ``fetched_bytes`` came from shared storage now, ``peer_bytes`` from other nodes; the rest
    was there already, or was fetched by other processes of this node meanwhile (``others_bytes``)."""

    directory: Path
    files: int
    size_bytes: int
    is_pinned: bool = False
    peers: tuple[Json, ...] = ()
    """Of each peer its name, what came from it, how fast, and whether it was banned for wrong bytes."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Chunks read from shared storage that another node was to read, by the reason."""

    def to_json(self) -> Json:
        return {
            "directory": str(self.directory),
            "files": self.files,
            "size_bytes": self.size_bytes,
            "fetched_bytes": self.fetched_bytes,
            "bytes_by_source": {
                "here": self.here_bytes,
                "peer": self.peer_bytes,
                "shared": self.fetched_bytes,
                "other_processes": self.others_bytes,
            },
            "chunks_fetched": self.requests,
            "slowest_chunk": self._slowest(),
            "peers": list(self.peers),
            "fallbacks": self.fallbacks,
            "pinned": self.is_pinned,
        }

    def _slowest(self) -> Json | None:
        if not self.slowest:
            return None
        return {"what": self.slowest, "seconds": self.slowest_seconds, "from": self.slowest_from}


async def from_listing(store: Store, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[FileSpec]:
    """Freeze every file under the store's root, except our own private ones.

    A file that was written a moment ago, on a file system with coarse times, is looked at again when its time can no
    longer be that of another write: else the cache would serve it for what another write makes of it.

    Raises:
        ObjectNotFoundError: there is nothing there.
        ConfigError: a key that ``select`` would choose and that cannot be a file name below the target directory.
    """
    wanted = await _listed(store, include, exclude)
    if isinstance(store, LocalStore) and (seconds := young_seconds(item.etag for item in wanted)):
        await asyncio.sleep(seconds)
        wanted = await _listed(store, include, exclude)
    if not wanted:
        raise ObjectNotFoundError(
            f"{store.uri} holds no files", hint="Check the URI; `tierckpt ls` shows what is there", tier=Tier.SHARED
        )
    return sorted(wanted, key=lambda item: item.path)


async def _listed(store: Store, include: Sequence[str], exclude: Sequence[str]) -> list[FileSpec]:
    wanted = []
    async for info in store.list():
        if info.key.startswith(f"{PRIVATE_DIR}/") or info.key.endswith("/"):
            continue
        if f"/{PRIVATE_DIR}/" in info.key:
            raise ConfigError(
                f"{store.uri} holds checkpoints, it is not one",
                hint="Name one of them: `tierckpt ls` lists them",
                uri=store.uri,
            )
        if not is_safe_path(info.key):
            if not _is_selected(info.key, {info.key}, include, exclude):
                continue
            raise ConfigError(
                f"{store.uri} holds the key {info.key!r}, which cannot be a file below a directory",
                hint="Leave it out with --exclude; a name has 255 bytes at most, and is neither empty nor '..'",
            )
        wanted.append(FileSpec(info.key, info.key, info.size_bytes, info.etag))
    return wanted


def select(files: Sequence[FileSpec], include: Sequence[str], exclude: Sequence[str], uri: str) -> list[FileSpec]:
    """Those of ``files`` that match a glob of ``include`` (none: all) and none of ``exclude``; ``*`` crosses slashes.

    A glob that is the name of one of them means that file, whatever wildcards it holds.

    Raises:
        ObjectNotFoundError: that leaves nothing.
    """
    names = {item.path for item in files}
    chosen = [item for item in files if _is_selected(item.path, names, include, exclude)]
    if not chosen:
        raise ObjectNotFoundError(
            f"no file of {uri} matches", hint="Look at --include and --exclude; `tierckpt info` lists the files"
        )
    return chosen


def _is_selected(path: str, names: Container[str], include: Sequence[str], exclude: Sequence[str]) -> bool:
    def is_matched(globs: Sequence[str]) -> bool:
        return any(path == glob if glob in names else fnmatchcase(path, glob) for glob in globs)

    return (not include or is_matched(include)) and not is_matched(exclude)


async def prefetch(
    store: RangeSource,
    wanted: Sequence[FileSpec],
    directory: Path,
    *,
    chunk_size_bytes: int,
    concurrency: int,
    listener: ProgressListener,
    stall_seconds: float = 120.0,
    sharing: PeerJoin | None = None,
) -> PrefetchResult:
    """Make ``directory`` hold exactly these versions of ``wanted``.

    Returns when every file is there, whole and durable. Idempotent: what is there already is not fetched again. Several
    processes may do it at a time: each chunk is fetched by one of them; with ``sharing``, one of all nodes.

    Raises:
        PartialTransferError: some files could not be had; names each. Nothing was published.
        CapacityError: not enough room; nothing was fetched.
        IntegrityError: something changed in the store meanwhile, or is damaged there.
    """
    frozen = FileSet(store.uri, tuple(wanted), chunk_size_bytes)
    gate = asyncio.Semaphore(concurrency)
    cached = CacheEntry(
        store, frozen, directory, gate=gate, stall_seconds=stall_seconds, fetches_max=concurrency, sharing=sharing
    )
    try:
        await asyncio.to_thread(_begin, cached, directory)
        await cached.fill(listener=listener)
        return result_of(cached, directory)
    finally:
        await cached.close()


def result_of(cached: CacheEntry, directory: Path, *, is_pinned: bool = False) -> PrefetchResult:
    sources = cached.peer_fetch.sources if cached.peer_fetch is not None else None
    return PrefetchResult(
        **asdict(cached.tally),
        directory=directory,
        files=len(cached.frozen.files),
        size_bytes=cached.frozen.size_bytes,
        is_pinned=is_pinned,
        peers=tuple(sources.peers()) if sources is not None else (),
        fallbacks=dict(sources.fallbacks) if sources is not None else {},
    )


def _begin(cached: CacheEntry, directory: Path) -> None:
    check_names(directory, (item.path for item in cached.frozen.files))
    if whole_receipt(directory, cached.frozen.version) is None:
        _check_room(cached.frozen, directory)
    cached.begin(whole=True)
    if cached.directory is None:
        remove_abandoned(directory, incoming_of(directory, cached.frozen.version))


def _check_room(frozen: FileSet, directory: Path) -> None:
    incoming = incoming_of(directory, frozen.version)
    free = space_of(incoming).free_bytes
    if free < frozen.size_bytes - (allocated_bytes(incoming) if incoming.exists() else 0):
        raise CapacityError(
            f"{frozen.uri} has {human_bytes(frozen.size_bytes)}, {human_bytes(free)} are free for {directory.parent}",
            hint="Free some space or give another directory; nothing was fetched",
            tier=Tier.LOCAL,
            needed_bytes=frozen.size_bytes,
            free_bytes=free,
        )
