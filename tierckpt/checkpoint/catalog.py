"""The catalog: finds one checkpoint on all tiers and lists runs."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..disk.durable import matching
from ..errors import (
    CheckpointNotFoundError,
    EndpointError,
    IntegrityError,
    ManifestError,
    ObjectNotFoundError,
    OperationTimeoutError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
    UncommittedCheckpointError,
)
from ..format.layout import (
    CLAIM,
    METADATA,
    METADATA_DIR,
    PARTS_DIR,
    PENDING_DIR,
    PRIVATE_DIR,
    SHARD_SUFFIX,
    WINDOWS_DIR,
    Location,
    parse_uri,
    rank_metadata,
    step_of,
)
from ..format.manifest import FileEntry, Manifest
from ..stores.base import Store
from ..stores.verified_read import stored_bytes
from ..telemetry import logger
from ..types import Json, Tier
from . import branches, local_commit, shared_commit
from .branches import Branch

if TYPE_CHECKING:
    from .peer_copies import PeerCopies, PeerLookup


T = TypeVar("T")

LISTINGS_MAX = 16
"""Listings of a run that loses checkpoints between listing and reading."""
UNREADABLE_ERRORS = (IntegrityError, ObjectNotFoundError, CheckpointNotFoundError, UncommittedCheckpointError)


async def retry_listing(
    location: Location,
    names: Callable[[], Awaitable[Collection[str]]],
    look: Callable[[Collection[str]], Awaitable[tuple[T, set[str]]]],
) -> T:
    """Return the result of ``look(names)``; list again if a name has disappeared.

    Raises OperationTimeoutError after ``LISTINGS_MAX`` rounds.
    """
    listed = await names()
    for _ in range(LISTINGS_MAX):
        result, missing = await look(listed)
        if not missing or missing <= {*(listed := await names())}:
            return result
    raise changing_run_error(location)


def read_newest(location: Location, newest: Callable[[], str | None], read: Callable[[str], T]) -> T:
    """Read the newest checkpoint, again if it is removed meanwhile. Raises as ``retry_listing``."""
    found = newest()
    for _ in range(LISTINGS_MAX):
        try:
            return read(found or location.uri)
        except UNREADABLE_ERRORS:
            before, found = found, newest()
            if not is_newer(found, before):
                raise
    raise changing_run_error(location)


class WalkBack:
    """Walks from the newest checkpoint of a run to older ones, past damaged and removed ones."""

    def __init__(self, run: Location) -> None:
        self._run, self._removed = run, 0
        self.step_max: int | None = None
        self.lost: list[tuple[Location, TierckptError]] = []

    def note_removed(self) -> None:
        self._removed += 1
        if self._removed >= LISTINGS_MAX:
            raise changing_run_error(self._run)

    def note_lost(self, damaged: Location, error: TierckptError) -> None:
        """Raises the first error if ``damaged`` has no step in its name."""
        self.lost.append((damaged, error))
        step = step_of(damaged.name)
        if step is None:
            raise self.lost[0][1] from None
        self.step_max = step - 1

    def end(self) -> None:
        if self.lost:
            raise self.lost[0][1]


def is_newer(uri: str | None, other: str | None) -> bool:
    if uri is None or other is None:
        return uri is not None
    step, other_step = (step_of(parse_uri(one).name) for one in (uri, other))
    return step is not None and (other_step is None or step > other_step)


def changing_run_error(location: Location) -> OperationTimeoutError:
    return OperationTimeoutError(
        f"{location.uri} was listed {LISTINGS_MAX} times, and its checkpoints were removed before they were read",
        hint="Run it again. A job that keeps more steps (keep_last) leaves time to read them",
        uri=location.uri,
    )


log = logger("catalog")

STOCK = "stock"
SHARED_TIMEOUT_SECONDS = 10.0
"""Timeout of the shared tier if all files are on this node."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``manifest`` is None for a checkpoint of stock DCP."""

    location: Location
    manifest: Manifest | None
    directory: Path
    store: Store
    tiers: frozenset[Tier] = field(default_factory=frozenset)
    elsewhere: PeerCopies | None = None
    unseen: StoreError | None = None
    """The shared tier did not answer: it may hold another attempt."""

    @property
    def step(self) -> int | None:
        return step_of(self.location.name)

    def local_path(self, entry: FileEntry) -> Path | None:
        path = self.directory / entry.key
        return path if file_size(path) == entry.size_bytes else None

    @property
    def attempt(self) -> str:
        return self.manifest.attempt if self.manifest is not None else ""

    @property
    def created_unix_seconds(self) -> float:
        return self.manifest.created_unix_seconds if self.manifest is not None else 0.0

    @property
    def branch(self) -> Branch:
        return branches.branch_of(self.manifest, self.location.name)

    def missing_locally(self) -> list[FileEntry]:
        return [entry for entry in self.manifest.entries if self.local_path(entry) is None] if self.manifest else []


def file_size(path: Path) -> int:
    """-1 without a regular file."""
    try:
        status = path.stat()
    except OSError:
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


async def find(location: Location, directory: Path, store: Store, cluster: PeerLookup | None = None) -> Checkpoint:
    """Return the committed checkpoint at ``location``, the newer one if the tiers disagree.

    A tier that does not answer is left out if another one has a commit.

    Raises:
        CheckpointNotFoundError: no tier has files at ``location``.
        UncommittedCheckpointError: a save to it has not committed.
        ManifestError: a damaged manifest and no other copy of it.
        StoreError: no local commit, and the shared tier does not answer.
    """
    local, local_error = await _attempt(lambda: asyncio.to_thread(local_commit.read_local_manifest, directory))
    here = Checkpoint(location, local, directory, store)
    is_here = local is not None and not await asyncio.to_thread(here.missing_locally)
    shared, shared_error = await _attempt(lambda: _read_shared(store, SHARED_TIMEOUT_SECONDS if is_here else None))
    unseen = shared_error if isinstance(shared_error, StoreError) else None
    drained = local is not None and await asyncio.to_thread(local_commit.is_drained, directory, local.attempt)
    manifest = _newer(local, shared, drained)
    found = await cluster.replicas_at(location, (local, shared)) if cluster is not None else {}

    def checkpoint(manifest: Manifest) -> Checkpoint:
        attempts = {Tier.LOCAL: local, Tier.SHARED: shared, Tier.PEER: found.get(manifest.attempt)}
        tiers = (tier for tier, copy in attempts.items() if copy is not None and copy.attempt == manifest.attempt)
        return Checkpoint(location, manifest, directory, store, frozenset(tiers), found.get(manifest.attempt), unseen)

    if found or manifest is not None:
        for error in filter(None, (local_error, shared_error)):
            log.warning("%s: going by another copy of its manifest: %s", location.uri, error)
    if found:
        return await _newest_complete(manifest, [elsewhere.manifest for elsewhere in found.values()], checkpoint)
    if manifest is not None:
        return checkpoint(manifest)
    # A damaged local copy says nothing about a silent shared tier.
    for problem in (unseen, local_error if isinstance(local_error, ManifestError) else None, shared_error):
        if problem is not None:
            raise problem
    if await is_stock(store):
        return Checkpoint(location, None, directory, store, frozenset({Tier.SHARED}))
    if await _has_leftovers(directory, store):
        raise UncommittedCheckpointError(
            f"{location.uri} is not committed: a save to it is unfinished or failed",
            hint="Wait for it (`tierckpt drain --wait`, tierckpt.wait), or load an older step (`tierckpt ls`)",
        )
    raise CheckpointNotFoundError(
        f"no checkpoint at {location.uri}",
        hint="Check the URI; `tierckpt ls` on its parent lists checkpoints",
        local_copy=directory,
    )


async def _read_shared(store: Store, timeout_seconds: float | None) -> Manifest | None:
    try:
        async with asyncio.timeout(timeout_seconds):
            return await shared_commit.read_shared_manifest(store)
    except TimeoutError as error:
        if isinstance(error, TierckptError):
            raise
        raise StoreUnavailableError(
            f"{store.uri} has not answered for {timeout_seconds:g} s", tier=Tier.SHARED
        ) from None


async def _newest_complete(
    base: Manifest | None, others: Iterable[Manifest], checkpoint: Callable[[Manifest], Checkpoint]
) -> Checkpoint:
    """Without a complete attempt: ``base`` or the newest; the reader reports missing files."""
    attempts = {manifest.attempt: manifest for manifest in others}
    if base is not None:
        attempts[base.attempt] = base
    chosen = [checkpoint(manifest) for manifest in attempts.values()]
    for one in chosen:
        await missing_near_files(one)
    if len(chosen) == 1:
        return chosen[0]
    replaced = {attempt for manifest in attempts.values() for attempt in manifest.replaces}
    chosen.sort(key=lambda one: (one.attempt not in replaced, one.branch.order, one.created_unix_seconds), reverse=True)
    for one in chosen:
        if await _is_known_complete(one):
            log.warning(
                "%s: nodes have committed %d different saves under it; the newest that is whole is attempt %s",
                one.location.uri,
                len(chosen),
                one.attempt,
            )
            return one
    return checkpoint(base) if base is not None else chosen[0]


async def _attempt(read: Callable[[], Any]) -> tuple[Manifest | None, TierckptError | None]:
    try:
        return await read(), None
    except (ManifestError, StoreError) as error:
        return None, error


def _newer(local: Manifest | None, shared: Manifest | None, drained: bool) -> Manifest | None:
    """Return the manifest that replaced the other, or came from a later process. A drained local one is older."""
    if local is None or shared is None or local.attempt == shared.attempt:
        return local or shared
    if local.attempt in shared.replaces:
        return shared
    if shared.attempt in local.replaces:
        return local
    orders = branches.order_of(local), branches.order_of(shared)
    if all(orders) and orders[0] != orders[1]:  # B5
        return local if orders[0] > orders[1] else shared
    return shared if drained else local


async def is_stock(store: Store) -> bool:
    for name in (METADATA, rank_metadata(0)):
        if await stored_bytes(store, name) >= 0:
            return await stored_bytes(store, CLAIM) < 0
    return False


async def is_still_committed(checkpoint: Checkpoint) -> bool:
    """Return False if a removal or another save was faster than the lease."""
    if checkpoint.manifest is None:
        return True
    local = await asyncio.to_thread(local_commit.read_sound_manifest, checkpoint.directory)
    if local is not None and local.attempt == checkpoint.manifest.attempt:
        return True
    try:
        shared = await shared_commit.read_shared_manifest(checkpoint.store)
    except (StoreUnavailableError, EndpointError, ManifestError):
        return True  # the restore reports the unreadable files
    if shared is not None and shared.attempt == checkpoint.manifest.attempt:
        return True
    # A peer may remove copies at any moment: the reader then fails or takes the next one.
    return Tier.PEER in checkpoint.tiers and (shared is None or checkpoint.attempt not in shared.replaces)


async def _has_leftovers(directory: Path, store: Store) -> bool:
    if await asyncio.to_thread(lambda: (directory / PRIVATE_DIR).exists() or has_shards(directory)):
        return True
    for prefix in (PENDING_DIR, PARTS_DIR, METADATA_DIR):
        async for _ in store.list(prefix):
            return True
    async for info in store.list():
        if "/" not in info.key and info.key.endswith(SHARD_SUFFIX):
            return True
    return False


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    location: Location
    step: int | None
    local: str
    shared: str
    files: int
    size_bytes: int
    branch: Branch
    created_unix_seconds: float | None = None
    is_adopted: bool = False
    is_abandoned: bool = False

    @property
    def name(self) -> str:
        is_window = self.location.parent.name == WINDOWS_DIR
        return f"{WINDOWS_DIR}/{self.location.name}" if is_window else self.location.name

    @property
    def age_seconds(self) -> float | None:
        return None if self.created_unix_seconds is None else max(0.0, time.time() - self.created_unix_seconds)

    @property
    def note(self) -> str:
        return ", ".join([*["adopted"] * self.is_adopted, *["abandoned"] * self.is_abandoned])

    def to_json(self) -> Json:
        return {
            "uri": self.location.uri,
            "name": self.name,
            "step": self.step,
            "local": self.local,
            "shared": self.shared,
            "files": self.files,
            "size_bytes": self.size_bytes,
            "created_unix_seconds": self.created_unix_seconds,
            "age_seconds": self.age_seconds,
            "adopted": self.is_adopted,
            "abandoned": self.is_abandoned,
        }


async def describe(location: Location, directory: Path, store: Store) -> CheckpointRow | None:
    try:
        local = await asyncio.to_thread(local_commit.read_local_manifest, directory)
    except ManifestError as error:
        log.warning("%s", error)
        local = None
    shared = await shared_commit.read_shared_manifest(store)
    manifest = shared or local
    has_local_shards = local is None and await asyncio.to_thread(has_shards, directory)
    if manifest is None:
        if await is_stock(store):
            sizes = [info.size_bytes async for info in store.list()]
            branch = branches.branch_of(None, location.name)
            return CheckpointRow(location, step_of(location.name), "-", STOCK, len(sizes), sum(sizes), branch)
        if not has_local_shards and not await store.list_dirs(PRIVATE_DIR):
            return None
    return CheckpointRow(
        location,
        step_of(location.name),
        "committed" if local else "uncommitted" if has_local_shards else "-",
        "committed" if shared else ("-" if local else "uncommitted"),
        len(manifest.entries) if manifest else 0,
        manifest.size_bytes if manifest else 0,
        branches.branch_of(_newer(local, shared, drained=True), location.name),
        manifest.created_unix_seconds if manifest else None,
        bool(manifest and manifest.adopted_dirs),
    )


def has_shards(directory: Path) -> bool:
    return bool(matching(directory, f"*{SHARD_SUFFIX}"))


async def _is_known_complete(checkpoint: Checkpoint) -> bool:
    try:
        return await is_complete(checkpoint)
    except StoreError as error:
        log.warning("%s", error)
        return False


async def is_complete(checkpoint: Checkpoint) -> bool:
    """Every file has a copy of its size on some tier. Raises StoreError."""
    if checkpoint.manifest is None:
        return True
    missing = {entry.key: entry.size_bytes for entry in await missing_near_files(checkpoint)}
    if not missing:
        return True
    sizes = {info.key: info.size_bytes async for info in checkpoint.store.list()}
    return all(sizes.get(key) == size for key, size in missing.items())


async def missing_near_files(checkpoint: Checkpoint) -> list[FileEntry]:
    lacking = await asyncio.to_thread(checkpoint.missing_locally)
    if lacking and checkpoint.elsewhere is not None:
        lacking = (await checkpoint.elsewhere.query_files()).missing(lacking)
    return lacking
