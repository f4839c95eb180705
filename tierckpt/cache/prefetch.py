"""Prefetch: fill a directory of this node with the files of a checkpoint or model, all or none.

Chunks are fetched into a directory next to the target (cache/partial_entry.py). The receipt comes last: a directory
without it is incomplete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from ..disk.durable import check_names, require_room
from ..errors import CapacityError, ConfigError, ObjectNotFoundError
from ..format.layout import PRIVATE_DIR
from ..format.manifest import NAME_BYTES_MAX, digest_of, is_safe_path
from ..quantities import first_of, human_bytes
from ..stores.base import RangeSource, Store, to_completion
from ..stores.local import LocalStore, etag_reuse_seconds
from ..telemetry import logger
from ..types import Json, ObjectInfo, ProgressListener, Tier
from .chunk_writer import FetchStats
from .entry import CacheEntry
from .fetch_job import PeerJoin
from .file_set import FileSet, FileSpec
from .partial_entry import incoming_of, remove_abandoned
from .pool import allocated_bytes
from .receipt import whole_receipt
from .reuse import CopySource, reusable_bytes

log = logger("prefetch")


@dataclass(slots=True, kw_only=True)
class PrefetchResult(FetchStats):
    """``fetched_bytes`` came from shared storage, ``peer_bytes`` from other nodes."""

    directory: Path
    files: int
    size_bytes: int
    is_pinned: bool = False
    peers: tuple[Json, ...] = ()
    fallbacks: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> Json:
        return {
            "directory": str(self.directory),
            "files": self.files,
            "size_bytes": self.size_bytes,
            "fetched_bytes": self.fetched_bytes,
            "bytes_by_source": {
                "here": self.here_bytes,
                "cache": self.cached_bytes,
                "peer": self.peer_bytes,
                "shared": self.fetched_bytes,
                "other_processes": self.others_bytes,
            },
            "chunks_fetched": self.requests,
            "slowest_chunk": {"what": self.slowest, "seconds": self.slowest_seconds, "from": self.slowest_from}
            if self.slowest
            else None,
            "peers": list(self.peers),
            "fallbacks": self.fallbacks,
            "pinned": self.is_pinned,
        }


@dataclass(frozen=True, slots=True)
class FileFilter:
    """Globs that choose files by path; ``*`` also matches slashes. A glob equal to a file name means that file."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude)

    def has(self, path: str, names: Container[str]) -> bool:

        def is_matched(globs: Sequence[str]) -> bool:
            return any(path == glob if glob in names else fnmatchcase(path, glob) for glob in globs)

        return (not self.include or is_matched(self.include)) and not is_matched(self.exclude)

    def choose(self, files: Sequence[FileSpec], uri: str) -> list[FileSpec]:
        if not self:
            return list(files)
        names = {item.path for item in files}
        chosen = [item for item in files if self.has(item.path, names)]
        if not chosen:
            raise ObjectNotFoundError(
                f"no file of {uri} matches", hint="Look at --include and --exclude; `tierckpt info` lists the files"
            )
        return chosen


ALL_FILES = FileFilter()


async def from_listing(
    store: Store, files: FileFilter = ALL_FILES, *, strict: bool = True, infos: Sequence[ObjectInfo] | None = None
) -> list[FileSpec]:
    """Return the files under the store's root with fixed versions, except tierckpt's own. Follows links of a mount.

    A recent file on a coarse clock is listed again: a later write could get the same etag. A key that is not a file
    name (``a//b``) gets one, with a warning. ``strict`` rejects objects that cannot be fetched.

    Raises ObjectNotFoundError: nothing exists there. ConfigError: a dangling or circular link, a device or pipe, or an
    object with the name of a directory.
    """
    requested = await _listed(store, files, strict, infos)
    if isinstance(store, LocalStore) and (seconds := etag_reuse_seconds(item.etag for item in requested)):
        await asyncio.sleep(seconds)
        requested = await _listed(store, files, strict)
    if not requested:
        raise ObjectNotFoundError(
            f"{store.uri} has no files", hint="Check the URI; `tierckpt ls` lists its content", tier=Tier.SHARED
        )
    return sorted(requested, key=lambda item: item.path)


async def _listed(
    store: Store, files: FileFilter, strict: bool, listed: Sequence[ObjectInfo] | None = None
) -> list[FileSpec]:
    other_kinds: dict[str, str] = {}
    if isinstance(store, LocalStore):
        infos, other_kinds = await asyncio.to_thread(store.files)
    else:
        infos = [*listed] if listed is not None else [info async for info in store.list()]
    infos = [info for info in infos if not (info.key.endswith("/") or info.key.startswith(f"{PRIVATE_DIR}/"))]
    if any(f"/{PRIVATE_DIR}/" in info.key for info in infos):
        raise ConfigError(
            f"{store.uri} holds checkpoints, it is not one",
            hint="Choose one of them: `tierckpt ls` lists them",
            uri=store.uri,
        )
    chosen = [info for info in infos if files.has(info.key, {info.key})]
    folders = {str(parent) for info in chosen for parent in PurePosixPath(info.key).parents}
    other_kinds |= {
        info.key: f"is an object, and others are below {info.key}/" for info in chosen if info.key in folders
    }
    bad = [f"{key!r} {what}" for key, what in sorted(other_kinds.items()) if files.has(key, {key})]
    if bad and strict:
        raise ConfigError(
            f"{store.uri} holds what cannot be fetched: {first_of(bad, SHOWN, '; ')}",
            hint="Repair it at the source, or leave it out with --exclude",
            uri=store.uri,
        )
    names = {info.key for info in infos if is_safe_path(info.key)}
    requested = [FileSpec(info.key, info.key, info.size_bytes, info.etag) for info in infos if info.key in names]
    for info in chosen:
        if info.key not in names:
            path = _legal_name(info.key, names)
            names.add(path)
            log.warning("%s: the key %r is not a valid file name; fetching it as %s", store.uri, info.key, path)
            requested.append(FileSpec(path, info.key, info.size_bytes, info.etag))
    return [item for item in requested if item.key not in other_kinds]


def _legal_name(key: str, used_names: Container[str]) -> str:
    parts = [part for part in key.split("/") if part not in ("", ".")]
    path = "/".join(map(_legal_part, parts))[-PATH_BYTES_MAX:].strip("/")
    if path and path not in used_names:
        return path
    return f"{path or 'object'}~{digest_of(key.encode(errors='replace'))[:8]}"


def _legal_part(part: str) -> str:
    part = "%2E%2E" if part == ".." else part.replace("\\", "%5C").replace("\0", "%00")
    raw = part.encode(errors="replace")
    if len(raw) <= NAME_BYTES_MAX:
        return raw.decode()
    return f"{raw[:PART_BYTES_KEPT].decode(errors='ignore')}~{digest_of(raw)[:8]}"


SHOWN = 5
PATH_BYTES_MAX = 900
PART_BYTES_KEPT = 200


async def fill_directory(
    store: RangeSource,
    requested: Sequence[FileSpec],
    directory: Path,
    *,
    chunk_size_bytes: int,
    concurrency: int,
    listener: ProgressListener,
    stall_seconds: float,
    peer_join: PeerJoin | None = None,
    files: FileFilter = ALL_FILES,
    copy_sources: Sequence[CopySource] = (),
) -> PrefetchResult:
    """Fill ``directory`` with exactly these versions of ``requested``; return when all are whole and durable.

    Publication removes files of an earlier prefetch that ``files`` would choose. Other files stay; a warning names
    possible weights. Idempotent. Concurrent processes share the chunks.

    Raises:
        PartialTransferError: names the failed files. Nothing was published.
        CapacityError: not enough room; nothing was fetched.
        IntegrityError: something changed or is damaged in the store.
        CheckpointError: another version was published in ``directory`` meanwhile.
    """
    cached = CacheEntry(
        store,
        FileSet(store.uri, tuple(requested), chunk_size_bytes),
        directory,
        fetch_slots=asyncio.Semaphore(concurrency),
        stall_seconds=stall_seconds,
        fetches_max=concurrency,
        peer_join=peer_join,
        is_selected=lambda path: files.has(path, {path}),
        copy_sources=copy_sources,
    )
    try:
        await to_completion(asyncio.to_thread(_begin, cached, directory))
        await cached.fill(listener=listener)
        return result_of(cached, directory)
    finally:
        await cached.close()


def result_of(cached: CacheEntry, directory: Path, *, is_pinned: bool = False) -> PrefetchResult:
    sources = cached.peer_fetch.sources if cached.peer_fetch is not None else None
    return PrefetchResult(
        **asdict(cached.stats),
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


def check_size(frozen: FileSet, size_bytes_max: int | None) -> None:
    if size_bytes_max is not None and frozen.size_bytes > size_bytes_max:
        raise CapacityError(
            f"{frozen.uri} has {human_bytes(frozen.size_bytes)}, more than {human_bytes(size_bytes_max)}",
            hint="Raise --max-bytes, or fetch a part (--include, --exclude); nothing was fetched",
            needed_bytes=frozen.size_bytes,
        )


def _check_room(frozen: FileSet, directory: Path) -> None:
    incoming = incoming_of(directory, frozen.version)
    present_bytes = allocated_bytes(incoming) if incoming.exists() else reusable_bytes(frozen, [directory])
    hint = "Free some space or give another directory; nothing was fetched"
    require_room(directory, frozen.size_bytes, frozen.uri, hint, more_bytes=-present_bytes)
