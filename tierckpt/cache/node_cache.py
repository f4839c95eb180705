"""The node cache by URI: open, prefetch, plan, check, pin, evict.

Checkpoints of tierckpt are not cached: they belong to the local tier.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from ..checkpoint import shared_commit
from ..checkpoint.catalog import file_size
from ..config import Settings
from ..errors import (
    BucketNotFoundError,
    EndpointError,
    ObjectNotFoundError,
    OperationTimeoutError,
    PermissionDeniedError,
    StoreUnavailableError,
    TierckptError,
    UncommittedCheckpointError,
)
from ..format.layout import METADATA, PRIVATE_DIR, SHARD_SUFFIX, Location, parse_uri
from ..format.manifest import FileEntry, Manifest, digest_of, is_safe_path
from ..poll import SHARED, Poll
from ..stores import REMOTE_SCHEMES
from ..stores.base import Store, to_completion
from ..stores.local import LocalStore, etag_reuse_seconds
from ..stores.verified_read import LocalFiles, check_file
from ..telemetry import logger
from ..types import Json, ObjectInfo, ProgressListener, Tier
from .entry import STALL_SECONDS_MIN, CacheEntry
from .fetch_job import PeerJoin
from .file_set import FileSet, FileSpec, from_manifest
from .partial_entry import landed_in, read_entry, read_landed
from .pool import CacheRow, Pool
from .prefetch import ALL_FILES, FileFilter, PrefetchResult, from_listing, result_of
from .receipt import read_receipt, whole_receipt
from .reuse import CopySource

log = logger("prefetch")

T = TypeVar("T")
Kind: TypeAlias = Literal["auto", "object", "directory"]
ANCESTORS_MAX = 16
DIGESTS_AT_A_TIME = 4

_kept_leases: dict[str, ExitStack] = {}
"""Held until this process exits."""


@dataclass(frozen=True, slots=True)
class ResolvedUri:
    location: Location
    store: Store
    frozen: FileSet
    manifest: Manifest | None = None
    only: FileSpec | None = None
    is_filtered: bool = False


@dataclass(slots=True)
class CacheCheck:
    uri: str
    state: str
    """``outdated``: whole, but the store has a newer version."""
    directory: Path | None
    files: int
    size_bytes: int
    here_bytes: int
    missing: dict[str, int] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)
    is_pinned: bool = False
    leases: int = 0

    def to_json(self) -> Json:
        facts = asdict(self)
        directory, is_pinned = facts.pop("directory"), facts.pop("is_pinned")
        return {**facts, "directory": str(directory) if directory else None, "pinned": is_pinned}


class NodeCache:
    def __init__(
        self,
        settings: Settings,
        store_at: Callable[[Location], Store],
        listener: ProgressListener,
        peer_join: PeerJoin | None = None,
    ) -> None:
        self.settings, self.peer_join = settings, peer_join
        self.pool = Pool(settings)
        self.store_at, self._listener = store_at, listener
        self._gate = asyncio.Semaphore(2 * settings.concurrency)

    async def freeze(
        self, location: Location, *, kind: Kind = "auto", info: ObjectInfo | None = None, files: FileFilter = ALL_FILES
    ) -> ResolvedUri:
        """Fix the current content of ``location``: a checkpoint, a directory of files, or one object.

        Raises ObjectNotFoundError: nothing matches. UncommittedCheckpointError.
        """
        if info is not None or kind == "object":
            return await self._object(location, info)
        if kind == "auto" and "." in location.name and location.path.strip("/"):
            try:
                return await self._object(location, None)
            except ObjectNotFoundError:
                return await self._directory(location, files)
        try:
            return await self._directory(location, files)
        except ObjectNotFoundError as error:
            if kind == "directory" or not location.path.strip("/"):
                raise
            try:
                return await self._object(location, None)
            except ObjectNotFoundError:
                raise error from None

    async def _object(self, location: Location, info: ObjectInfo | None) -> ResolvedUri:
        store, name = self.store_at(location.parent), location.name
        if info is None:
            info = await store.head(name)
            if isinstance(store, LocalStore) and (seconds := etag_reuse_seconds([info.etag])):
                await asyncio.sleep(seconds)
                info = await store.head(name)
        path = name if is_safe_path(name) else digest_of(name.encode(errors="replace"))
        item = FileSpec(path, name, info.size_bytes, info.etag)
        return ResolvedUri(location, store, self._frozen(location, [item]), only=item)

    async def _directory(self, location: Location, files: FileFilter) -> ResolvedUri:
        store = self.store_at(location)
        infos: list[ObjectInfo] | None = None
        if location.scheme in REMOTE_SCHEMES:  # one request proves that it has no manifest
            with contextlib.suppress(PermissionDeniedError):
                infos = [info async for info in store.list()]
        if infos is None or any(info.key.startswith(f"{PRIVATE_DIR}/") for info in infos):
            manifest = await shared_commit.read_shared_manifest(store)
            if manifest is None and await _claimed(store):
                raise _uncommitted(location)
            if manifest is not None:
                return self.resolve_checkpoint(location, store, manifest, files)
        found = await from_listing(store, files, infos=infos)
        if _is_half(found):
            raise _uncommitted(location)
        chosen = files.choose(found, location.uri)
        return ResolvedUri(location, store, self._frozen(location, chosen), is_filtered=bool(files))

    def resolve_checkpoint(
        self, location: Location, store: Store, manifest: Manifest, files: FileFilter
    ) -> ResolvedUri:
        frozen = self._frozen(location, files.choose(from_manifest(manifest), location.uri), manifest.chunk_size_bytes)
        return ResolvedUri(location, store, frozen, manifest, is_filtered=bool(files))

    def _frozen(self, location: Location, files: Sequence[FileSpec], chunk_size_bytes: int | None = None) -> FileSet:
        return FileSet(location.uri, tuple(files), chunk_size_bytes or int(self.settings.chunk_size_bytes))

    @property
    def stall_seconds(self) -> float:
        """Seconds without progress before another process fetches the same."""
        return max(STALL_SECONDS_MIN, 2 * self.settings.store_timeout_seconds)

    async def open(self, resolved: ResolvedUri, *, whole: bool = False) -> CacheEntry:
        """Open or make the entry; the caller closes it. Raises CapacityError: no room for ``whole``."""
        found = await asyncio.to_thread(self._larger, resolved)
        frozen = found or resolved.frozen
        store = resolved.store if found is None or resolved.only is None else self._store_of(frozen, resolved)
        cached = CacheEntry(
            store,
            frozen,
            self.pool.directory(frozen.name),
            pool=self.pool,
            fetch_slots=self._gate,
            stall_seconds=self.stall_seconds,
            fetches_max=2 * self.settings.concurrency,
            peer_join=self.peer_join,
        )
        try:
            await to_completion(asyncio.to_thread(lambda: cached.begin(whole=whole)))
        except asyncio.CancelledError:
            await cached.close()
            raise
        cached.only = self._only(resolved, frozen)
        return cached

    async def open_at(self, location: Location, *, kind: Kind = "auto", info: ObjectInfo | None = None) -> CacheEntry:
        """Open the current version; the caller closes it. Raises ObjectNotFoundError."""
        return await self.open(await self.freeze(location, kind=kind, info=info))

    async def reopen(self, frozen: FileSet) -> CacheEntry:
        """Open an entry by its receipt, without requests. The caller closes it."""
        location, files = parse_uri(frozen.uri), frozen.files
        is_object = len(files) == 1 and files[0].key == location.name
        resolved = ResolvedUri(location, self.store_at(location.parent if is_object else location), frozen)
        return await self.open(resolved)

    def _store_of(self, frozen: FileSet, resolved: ResolvedUri) -> Store:
        location = resolved.location
        while location.uri != frozen.uri:
            location = location.parent
        return self.store_at(location)

    def _only(self, resolved: ResolvedUri, frozen: FileSet) -> FileSpec | None:
        if resolved.only is None or frozen is resolved.frozen or frozen.version == resolved.frozen.version:
            return resolved.only
        return next(item for item in frozen.files if _same(item, resolved.only, _below(frozen.uri, resolved.location)))

    def _larger(self, resolved: ResolvedUri) -> FileSet | None:
        """Find an entry of the URI or a parent URI with all of ``resolved`` in the same versions."""
        if not self.pool.root.is_dir():
            return None
        locations = [resolved.location]
        while resolved.only is not None and locations[-1].path.strip("/") and len(locations) < ANCESTORS_MAX:
            locations.append(locations[-1].parent)
        rows = self.pool.rows(*(location.uri for location in locations))
        exact = next((row for row in rows if row.name == resolved.frozen.name), None)
        if exact is not None and exact.state == "complete":
            return None
        for row in sorted(rows, key=lambda row: (row.state != "complete", -row.used_unix_ns)):
            if row.state != "complete" and (exact is not None or resolved.only is None):
                break  # partial entries serve only single objects
            frozen = self._contents(row)
            if frozen is not None and _covers(frozen, resolved):
                return frozen
        return None

    def _contents(self, row: CacheRow) -> FileSet | None:
        if row.state != "complete":
            incoming = self.pool.incoming(row.name)
            return read_entry(incoming) if incoming is not None else None
        receipt = self.pool.receipt(row.name)
        return receipt.frozen if receipt is not None else None

    def copy_sources(self, resolved: ResolvedUri, leases: ExitStack) -> list[CopySource]:
        """Entries of the same URI to copy from; ``leases`` protects them from eviction."""
        found: list[CopySource] = []
        for row in self.pool.rows(resolved.location.uri) if self.pool.root.is_dir() else ():
            leases.enter_context(self.pool.lease(row.name))
            directory, incoming = self.pool.directory(row.name), self.pool.incoming(row.name)
            if (receipt := read_receipt(directory)) is not None:
                found.append((directory, receipt))
            elif incoming is not None and (receipt := read_landed(incoming)) is not None:
                found.append((incoming, receipt))
        return found

    async def fill(self, resolved: ResolvedUri, *, pin: bool = False, keep: bool = False) -> PrefetchResult:
        """``pin`` unpins other versions of the URI. ``keep``: lease it until this process exits."""
        cached = await self.open(resolved, whole=True)
        try:
            await cached.fill(listener=self._listener)
            directory, name = self.pool.directory(cached.frozen.name), cached.frozen.name
            if pin:
                await asyncio.to_thread(self._pin, cached.frozen)
            if keep and name not in _kept_leases:
                _kept_leases[name] = await asyncio.to_thread(self.pool.lease, name)
            return result_of(cached, directory, is_pinned=pin or self.pool.is_pinned(name))
        finally:
            await cached.close()

    def _pin(self, frozen: FileSet) -> None:
        self.pool.pin(frozen.name)
        for row in self.pool.rows(frozen.uri):
            if row.is_pinned and row.name != frozen.name:
                self.pool.pin(row.name, False)

    async def check_at(
        self, location: Location, place: Callable[[ResolvedUri], Path | None], files: FileFilter
    ) -> CacheCheck:
        """Check the current version, or the last fetched one while its store is down."""
        try:
            resolved = await self.freeze(location, files=files)
        except (StoreUnavailableError, EndpointError) as error:
            rows = await asyncio.to_thread(self.pool.rows, location.uri)
            frozen = self._contents(rows[-1]) if rows else None
            if frozen is None:
                raise
            log.warning("%s: cannot check for a new version: %s", location.uri, error.message)
            resolved = ResolvedUri(location, self.store_at(location), frozen)
        return await asyncio.to_thread(self.check, resolved, place(resolved))

    def check(self, resolved: ResolvedUri, directory: Path | None = None) -> CacheCheck:
        frozen = self._larger(resolved) or resolved.frozen if directory is None else resolved.frozen
        target = directory or self.pool.directory(frozen.name)
        check = _check(frozen, target)
        if resolved.manifest is not None and check.state != "whole" and _has_sizes(frozen, target):
            check = CacheCheck(frozen.uri, "whole", target, len(frozen.files), frozen.size_bytes, frozen.size_bytes)
        check.uri = resolved.location.uri
        if directory is None:
            check.is_pinned = self.pool.is_pinned(frozen.name)
            check.leases = len(self.pool.leases(frozen.name))
            older = [row for row in self.pool.rows(resolved.location.uri) if row.version != frozen.version]
            if check.state == "absent" and any(row.state == "complete" for row in older):
                check.state = "outdated"
        elif check.state == "absent" and read_receipt(target) is not None:
            check.state = "outdated"
        return check

    async def read_again(self, check: CacheCheck) -> None:
        if check.state != "whole" or check.directory is None:
            return
        if (receipt := await asyncio.to_thread(read_receipt, check.directory)) is None:
            return
        frozen, files, read_slots = receipt.frozen, LocalFiles(check.directory), asyncio.Semaphore(DIGESTS_AT_A_TIME)

        async def one(item: FileSpec, digests: Sequence[str]) -> None:
            async with read_slots:
                try:
                    entry = FileEntry(item.path, item.size_bytes, tuple(digests))
                    await check_file(files, entry, frozen.chunk_size_bytes)
                except TierckptError as error:
                    check.bad[item.path] = error.message

        landed = receipt.landed or [item.digests for item in frozen.files]
        await asyncio.gather(*map(one, frozen.files, landed))

    def unpin(self, location: Location) -> list[CacheRow]:
        rows = [row for row in self.pool.rows(location.uri) if row.is_pinned]
        for row in rows:
            self.pool.pin(row.name, False)
        return rows

    def evict(self, location: Location) -> tuple[list[CacheRow], list[CacheRow]]:
        """Returns removed rows, and those pinned or in use."""
        rows = self.pool.rows(location.uri)
        if not rows:
            raise ObjectNotFoundError(
                f"the cache has no files of {location.uri}", hint="`tierckpt cache ls` lists its entries"
            )
        gone = {row.name for row in rows if self.pool.evict(row.name)}
        return [row for row in rows if row.name in gone], [row for row in rows if row.name not in gone]


async def retry_until_available(work: Callable[[], Awaitable[T]], timeout_seconds: float, what: str) -> T:
    """Retry ``work`` while ``what`` is missing or its store is down. Raises OperationTimeoutError."""
    poll, last = Poll(pauses=SHARED), "nothing went wrong"
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    return await work()
                except BucketNotFoundError:
                    raise
                except (UncommittedCheckpointError, ObjectNotFoundError, StoreUnavailableError) as error:
                    last = error.message
                    log.info("waiting for %s: %s", what, last)
                await poll.pause_async()
    except TimeoutError as error:
        if isinstance(error, TierckptError):
            raise
        raise OperationTimeoutError(
            f"{what} was not whole on this node after {timeout_seconds:g} s: {last}",
            hint="Run it again: fetched chunks are kept",
            tier=Tier.SHARED,
        ) from error


def _check(frozen: FileSet, target: Path) -> CacheCheck:
    found = CacheCheck(frozen.uri, "absent", None, len(frozen.files), frozen.size_bytes, 0)
    if whole_receipt(target, frozen.version) is not None:
        found.state, found.directory, found.here_bytes = "whole", target, frozen.size_bytes
        return found
    landed = landed_in(target, frozen.version)
    found.missing = {item.path: item.size_bytes - landed.get(item.path, 0) for item in frozen.files}
    found.missing = {path: lacking for path, lacking in found.missing.items() if lacking or path not in landed}
    found.here_bytes = sum(landed.values())
    found.state = "partial" if found.here_bytes else "absent"
    return found


def _has_sizes(frozen: FileSet, target: Path) -> bool:
    return all(file_size(target / item.path) == item.size_bytes for item in frozen.files)


def _covers(frozen: FileSet, resolved: ResolvedUri) -> bool:
    if resolved.only is not None:
        below = _below(frozen.uri, resolved.location)
        return any(_same(item, resolved.only, below) for item in frozen.files)
    own = {(item.path, item.size_bytes, item.etag, item.digests) for item in frozen.files}
    return all((item.path, item.size_bytes, item.etag, item.digests) in own for item in resolved.frozen.files)


def _same(item: FileSpec, other: FileSpec, path: str) -> bool:
    same = item.size_bytes == other.size_bytes and item.etag == other.etag
    return same and item.etag is not None and item.path == path


def _below(uri: str, location: Location) -> str:
    return location.uri[len(uri) :].lstrip("/")


def _uncommitted(location: Location) -> UncommittedCheckpointError:
    return UncommittedCheckpointError(
        f"{location.uri} is not committed on the shared tier",
        hint="Wait for its drain (`tierckpt drain --wait` on the training nodes), or take an older step",
    )


def _is_half(files: Sequence[FileSpec]) -> bool:
    """True for shards without metadata: a checkpoint being uploaded."""
    names = [file.path for file in files if "/" not in file.path]
    return any(name.endswith(SHARD_SUFFIX) for name in names) and not any(name.endswith(METADATA) for name in names)


async def _claimed(store: Store) -> bool:
    return bool(await store.list_dirs(PRIVATE_DIR)) or await shared_commit.read_claim(store) is not None
