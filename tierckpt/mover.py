"""The mover: everything that moves the bytes of one process. A limit that is "per mover" holds for one ``Mover``.

Each process has one for its settings (``client.py`` runs it), and so has a node's agent (``agent/agent_server.py``).
Where ``settings.mover`` is "agent" the agent's alone drains, so that all processes of a node share its limits; one
whose agent does not answer drains for itself, with limits of its own. The limits: files at a time and bytes per second
of drains (``drain/rate_limiter.py``), retries of requests (``stores/retry.py``)."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from .cache.entry import CacheEntry
from .cache.file_set import Receipt
from .cache.hub_layout import check_hub_cache, hub_of, prefetch_to_hub_cache
from .cache.node_cache import Check, Kind, NodeCache, ResolvedUri
from .cache.prefetch import PrefetchResult, check_size, prefetch
from .cache.reuse import Held
from .cache.space import AdmissionPlan, plan_prefetch
from .checkpoint import catalog, local_commit, marks, shared_commit
from .checkpoint.branches import Branch
from .checkpoint.catalog import Checkpoint, Row
from .checkpoint.journal import Journal
from .checkpoint.listing import LISTINGS_MAX, changing, listed_again
from .checkpoint.namespace import Browser
from .checkpoint.prune import Pruner, PruneResult
from .checkpoint.retention import Policy, nearest_existing
from .checkpoint.select import LOOK_MAX, Selector, age_of, place_of
from .checkpoint.verify import VerifyReport, verify
from .config import Settings
from .disk import read_lease
from .disk.durable import check_names, translated
from .disk.local_root import use_local_root
from .drain.background_drains import BackgroundDrains
from .drain.drainer import Drainer
from .drain.rate_limiter import RateLimiter
from .errors import (
    BucketNotFoundError,
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    ManifestError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from .format.layout import MANIFEST, Location, local_dir, step_of
from .format.manifest import FileEntry, Manifest
from .peer.fetch.fetch_session import PeerJoiner
from .peer.peer_catalog import Live, cluster_of
from .read.range_sources import NearestSource
from .restore import fetch_file
from .restore.drill import DrillReport, choose, drill
from .restore.restore import RestoreResult, restore
from .stores.base import Store
from .stores.hub.api import hub_cache
from .telemetry import ignore_progress, logger
from .types import ObjectInfo, Progress, ProgressListener, Tier

log = logger("mover")

PROBE_TIMEOUT_SECONDS = 10.0
PROBE_SILENT_SECONDS = 0.5
REPORT_SECONDS = 8.0
"""A save that waits for so long for the answer of its store logs an outage."""
SILENT_SECONDS = 60.0
"""For so long a store that has let a save wait in vain is asked no longer than ``PROBE_SILENT_SECONDS``, and training
does not wait for what it says."""


class Mover:
    """Everything the library does apart from torch: drain, wait, find, fetch, verify, prefetch, remove.

    Owns the stores and the running drains. Not thread-safe: every coroutine runs on the loop that made it.
    """

    def __init__(
        self,
        settings: Settings,
        listener: ProgressListener = ignore_progress,
        *,
        live: Callable[[], Awaitable[Live]] | None = None,
    ) -> None:
        """``live``: who the other nodes are; None: this node's agent is asked, where there are ``peers``.

        Raises PermissionDeniedError: ``local_root`` is not safe to use.
        """
        use_local_root(settings)
        self.settings = settings
        self._listener = listener
        self.drainer = Drainer(settings, listener)
        self.drains = BackgroundDrains(settings, self.drainer)
        """What this process drains, and has drained."""
        # The agent, which says itself who is there, fetches nothing that it would have to ask others for.
        self.sharing = PeerJoiner(settings) if settings.peers is not None and live is None else None
        self.node_cache = NodeCache(settings, self.drainer.store, listener, self.sharing)
        self.cluster = cluster_of(settings, live)
        """The other nodes, where there are ``peers``."""
        self.selector = Selector(settings, self.drainer.store, self.drainer.directory, self.cluster)
        """The newest checkpoint of a run, and the waiting for a store that does not answer."""
        self.pruner = Pruner(settings, self.journal, self.drainer.store, self.selector)
        self._silent_until: dict[tuple[str, str], float] = {}
        """Until when (monotonic seconds) saves do not wait for stores that have let one wait in vain."""
        self._asking: list[tuple[tuple[str, str], float, asyncio.Timeout]] = []
        """The stores that saves ask what they have, and when (of the loop's clock) one is to have answered."""
        self._blind: set[Location] = set()
        """Runs of which it was said that other jobs cannot be seen there."""

    @cached_property
    def browser(self) -> Browser:
        return Browser(self.store, self.find, self.directory, self.journal)

    @property
    def journal(self) -> Journal:
        return self.drainer.journal

    @property
    def limiter(self) -> RateLimiter:
        """Limits the drains of this mover; it can be changed while they run."""
        return self.drainer.limiter

    def store(self, location: Location) -> Store:
        return self.drainer.store(location)

    def directory(self, location: Location) -> Path:
        return local_dir(self.settings.local_root, location)

    async def close(self) -> None:
        await self.drains.close()
        if self.cluster is not None:
            await self.cluster.close()

    # --- saving ------------------------------------------------------------------------------------------------

    def standing_here(self, location: Location) -> tuple[bool, set[str]]:
        """Return whether a checkpoint stands under ``location`` on the local tier, and which attempts the tiers may be
        at by what lies here. Blocking."""
        directory = self.directory(location)
        try:
            local = local_commit.read_local_manifest(directory)
        except (ManifestError, StoreError) as error:
            # Set aside by the commit, no sooner: what the journal still has to drain is known by it.
            log.warning("%s: what stands on the local tier cannot be read, a new save replaces it: %s", location, error)
            return False, self._attempts_in_journal(location)
        if local is None:
            return False, set()
        is_drained = marks.is_drained(directory, local.attempt)
        return True, {local.attempt, *(() if is_drained else local.replaces)}  # the shared tier may be at one of those

    def is_silent(self, location: Location) -> bool:
        """Whether the store of ``location`` lets a save wait for an answer, or has done so of late. Thread-safe."""
        place = place_of(location)
        is_asked = any(one == place for one, _, _ in self._asking)
        return is_asked or time.monotonic() < self._silent_until.get(place, 0.0)

    def ask_no_longer(self) -> None:
        """Pass over each store that lets a save wait for longer than ``PROBE_SILENT_SECONDS``."""
        for _, soon, limit in self._asking:
            if not limit.expired():
                limit.reschedule(max(soon, asyncio.get_running_loop().time()))

    @contextlib.asynccontextmanager
    async def _asks(self, place: tuple[str, str], seconds: float) -> AsyncIterator[None]:
        async with asyncio.timeout(seconds) as limit:
            loop, breaker = asyncio.get_running_loop(), self.drainer.retries.breaker("://".join(place))
            asked = place, loop.time() + PROBE_SILENT_SECONDS, limit
            self._asking.append(asked)
            report = partial(breaker.report, "no answer to a save", "", time.time())
            timer = loop.call_later(REPORT_SECONDS, report)
            try:
                yield
            except asyncio.CancelledError:
                if limit.expired():
                    report()
                raise
            finally:
                timer.cancel()
                self._asking.remove(asked)

    async def attempts_to_replace(
        self, location: Location, here: tuple[bool, set[str]] | None = None, *, overwrite: bool
    ) -> tuple[str, ...]:
        """Return the attempts that stand under ``location`` now: a new save is told to replace exactly these.

        ``here``: what ``standing_here`` has returned.

        A shared tier that does not answer in time is passed over, because a save must not wait for it; should an
        attempt stand there, the drain will find it. So is one that refuses us, once it has been reached in this
        process: credentials may have expired, and the save is safe on this node until there are others.

        Raises:
            AlreadyCommittedError: something stands there and ``overwrite`` is False.
            StoreError: the shared tier refuses us (missing bucket, credentials) before it was ever reached: better said
                at the first save.
        """
        is_local, standing = await asyncio.to_thread(self.standing_here, location) if here is None else here
        if self.settings.drain:
            place = place_of(location)
            is_silent = time.monotonic() < self._silent_until.get(place, 0.0)
            try:
                async with self._asks(place, PROBE_SILENT_SECONDS if is_silent else PROBE_TIMEOUT_SECONDS):
                    store = self.store(location)
                    if location.scheme == "file":
                        await _refuse_file(await asyncio.to_thread(nearest_existing, Path(location.path)))
                    self._say_if_blind(store, location)
                    found = await shared_commit.attempts_standing(store)
                    stock = not overwrite and not found and await catalog.is_stock(store)
                self.selector.reached.add(place)
                self.drainer.retries.accepted(location.parent.uri, "save")
                standing |= found
                if stock:
                    raise shared_commit.already_committed(location, "of stock DCP", Tier.SHARED)
            except (StoreUnavailableError, TimeoutError) as error:
                if not is_silent:
                    self._silent_until[place] = time.monotonic() + SILENT_SECONDS
                if isinstance(error, StoreUnavailableError):
                    self.drainer.breaker(location).report(error.message, error.hint, time.time())
                log.debug("%s: the shared tier does not answer, saving locally: %s", location.uri, error)
            except StoreError as error:
                if place not in self.selector.reached:
                    raise
                self.drainer.retries.refused(location.parent.uri, "save", error)
                log.debug("%s: the shared tier refuses requests, saving locally: %s", location.uri, error)
        if standing and not overwrite:
            raise shared_commit.already_committed(
                location, ", ".join(sorted(standing)), Tier.LOCAL if is_local else Tier.SHARED
            )
        return tuple(sorted(standing))

    def _attempts_in_journal(self, location: Location) -> set[str]:
        entries = [entry for entry in self.journal.entries() if entry.uri == location.uri]
        return {entry.manifest.attempt if entry.manifest else entry.token for entry in entries}

    def _say_if_blind(self, store: Store, location: Location) -> None:
        """Say once for each run when nobody can know there whether another job saves to it too."""
        run = location.parent
        if store.has_put_if_absent or run in self._blind:
            return
        self._blind.add(run)
        log.warning(
            "%s: this store has no conditional puts, so it cannot be known whether another job or node saves there at "
            "the same time, and one may replace what the other has saved. Make sure that only one does",
            run.uri,
        )

    async def holds(self, location: Location, file: FileEntry) -> bool:
        """True when the shared tier has ``file`` with its size, committed or not."""
        try:
            return (await self.store(location).head(file.key)).size_bytes == file.size_bytes
        except ObjectNotFoundError:
            return False

    async def discard(self, location: Location, names: Iterable[str]) -> None:
        """Delete files from the shared tier that no commit names, and none will."""
        for name in names:
            await self.store(location).delete(name)

    # --- finding -----------------------------------------------------------------------------------------------

    async def find(self, location: Location) -> Checkpoint:
        return await self.selector.find(location)

    async def list(self, location: Location) -> builtins.list[Row]:
        """Return the checkpoints at or directly under ``location``, by step, uncommitted ones included.

        Raises CheckpointNotFoundError when there is none.
        """
        own = await catalog.describe(location, self.directory(location), self.store(location))
        if own is not None:
            return [own]

        async def names() -> builtins.list[str]:
            return [*await self.selector.names(location), *await self.selector.windows(location)]

        async def describe(names: Collection[str]) -> tuple[builtins.list[Row], set[str]]:
            ordered, found = sorted(names, key=age_of, reverse=True), dict[str, Row]()
            for first in range(0, len(ordered), LOOK_MAX):
                part = ordered[first:][:LOOK_MAX]
                rows = await asyncio.gather(*(self._describe(location.child(name)) for name in part))
                found |= {name: row for name, row in zip(part, rows, strict=True) if row is not None}
                if not found:
                    break  # a bucket of other things: its runs are further down
            return [*found.values()], {name for name in names if step_of(name) is not None} - found.keys()

        found = await listed_again(location, names, describe)
        if not found:
            raise CheckpointNotFoundError(
                f"no checkpoint at or under {location.uri}",
                hint="Name a run or a checkpoint; check the URI, the endpoint and local_root",
            )
        branch = await self.selector.branch(location, [(row.branch, row.step) for row in found])
        if branch is not None:
            found = [replace(row, is_abandoned=not branch.holds(row.branch, row.step)) for row in found]
        return sorted(found, key=lambda row: (row.step is not None, row.step or 0, row.location.name))

    async def _describe(self, location: Location) -> Row | None:
        try:
            return await catalog.describe(location, self.directory(location), self.store(location))
        except PermissionDeniedError as error:
            if location.scheme != "file":
                raise  # the credentials: they are for all of it
            log.warning("%s is passed over: %s", location.uri, error)  # "lost+found", another user's
            return None

    async def latest(self, location: Location, step_max: int | None = None) -> Checkpoint | None:
        """Return the newest usable checkpoint at or under ``location``, as ``Selector.newest`` does (N1 to N3)."""
        return (await self.selector.newest(location, step_max)).checkpoint

    # --- reading -----------------------------------------------------------------------------------------------

    async def fetch_missing(self, checkpoint: Checkpoint, entries: Iterable[FileEntry]) -> None:
        """Bring those of ``entries`` that this node lacks to the local tier, verified, from peers or the shared tier.
        Best effort: readers go there themselves for what could not be kept here."""
        if checkpoint.manifest is None:
            return
        done = 0
        missing = [entry for entry in entries if checkpoint.local_path(entry) is None]
        total = sum(entry.size_bytes for entry in missing)
        gate = asyncio.Semaphore(self.settings.concurrency)

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            self._listener(Progress(f"restore {checkpoint.location.uri}", done, total))

        async def one(entry: FileEntry) -> None:
            async with gate:
                try:
                    width = self.settings.concurrency
                    await fetch_file.bring(
                        checkpoint, entry, sharing=self.sharing, concurrency=width, on_bytes=on_bytes
                    )
                except (TierckptError, OSError) as error:
                    log.warning("%s could not be brought to this node: %s", entry.path, error)

        async with self.reading(checkpoint):
            is_elsewhere = bool(missing and checkpoint.tiers & {Tier.SHARED, Tier.PEER})
            if is_elsewhere and self.cluster is not None:
                await fetch_file.adopt(checkpoint)  # so that peers find each file here from the moment that it is whole
            await asyncio.gather(*(one(entry) for entry in missing))
            if is_elsewhere:
                await fetch_file.adopt(checkpoint)  # what was brought is known to retention and eviction

    async def verify(self, location: Location, *, read_data: bool) -> tuple[Checkpoint, VerifyReport]:
        checkpoint = await self.find(location)
        chunk = int(self.settings.chunk_size_bytes)
        report = await verify(
            checkpoint,
            read_data=read_data,
            chunk_size_bytes=chunk,
            concurrency=self.settings.concurrency,
            listener=self._listener,
        )
        return checkpoint, report

    async def drill(self, location: Location, *, seed: int | None, scratch: Path | None) -> DrillReport:
        """Restore a random committed step at or under ``location`` from the shared tier only, and compare every byte.

        Raises:
            CheckpointNotFoundError: nothing is committed there.
            ManifestError: the manifest of the chosen step is damaged.
        """
        gate = asyncio.Semaphore(self.settings.concurrency)
        seed = secrets.randbelow(1 << 32) if seed is None else seed

        async def look(names: Collection[str]) -> tuple[tuple[Location, int, Manifest] | None, set[str]]:
            places = [location, *(location.child(name) for name in names if not name.startswith("."))]
            has_commit = await asyncio.gather(*(self._has_commit(place, gate) for place in places))
            steps = [place for place, has in zip(places, has_commit, strict=True) if has]
            if not steps:
                return None, {*names}
            chosen = choose(steps, seed)
            manifest = await shared_commit.read_shared_manifest(self.store(chosen))
            return (chosen, len(steps), manifest) if manifest else None, set() if manifest else {chosen.name}

        found = await listed_again(location, self.store(location).list_dirs, look)
        if found is None:
            raise CheckpointNotFoundError(
                f"nothing is committed on the shared tier at or under {location.uri}",
                hint="`tierckpt ls` lists what is there; `tierckpt drain --wait` on the training nodes brings more",
            )
        chosen, count, manifest = found
        report = DrillReport(chosen, seed, count)
        concurrency, parent = self.settings.concurrency, scratch or self.settings.local_root
        return await drill(
            report, self.store(chosen), manifest, parent, concurrency=concurrency, listener=self._listener
        )

    async def _has_commit(self, location: Location, gate: asyncio.Semaphore) -> bool:
        async with gate:
            try:
                await self.store(location).head(MANIFEST)
            except BucketNotFoundError:
                raise  # a place that does not exist is not an empty place
            except ObjectNotFoundError:
                return False
            return True

    async def cached(self, location: Location, *, kind: Kind = "auto", info: ObjectInfo | None = None) -> CacheEntry:
        """Open what ``location`` holds now (files, a model, one object) through the node cache. Close what is returned.

        Raises ObjectNotFoundError. docs/internals/cache.md says how to use it.
        """
        return await self.node_cache.open(await self.node_cache.freeze(location, kind=kind, info=info))

    async def prefetch(
        self,
        location: Location,
        directory: Path | None,
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        pin: bool = False,
        keep: bool = False,
        hf_cache: bool = False,
        size_bytes_max: int | None = None,
    ) -> PrefetchResult:
        """Have a checkpoint or model on this node, whole: in ``directory``, or where it belongs.

        A checkpoint of ours belongs on the local tier, anything else in the node cache. ``keep``: nobody evicts it from
        there while this process lives. ``hf_cache``: ``directory`` is a Hugging Face cache, by default this user's.
        Raises CapacityError: the files have more than ``size_bytes_max``; nothing was fetched.
        """
        await _refuse_file(directory)
        resolved, checkpoint = await self._freeze(location, include, exclude)
        check_size(resolved.frozen, size_bytes_max)
        if hf_cache:
            if pin:
                raise ConfigError("a Hugging Face cache pins nothing", hint="Leave --pin out")
            cache = (directory or hub_cache()).absolute()
            with contextlib.ExitStack() as leases:
                held = await asyncio.to_thread(self._held, resolved, cache, leases)
                return await prefetch_to_hub_cache(
                    hub_of(resolved.store),
                    resolved.frozen.files,
                    cache,
                    chunk_size_bytes=(held[-1][1] if held else resolved).frozen.chunk_size_bytes,
                    concurrency=self.settings.concurrency * 2,
                    listener=self._listener,
                    sharing=self.sharing,
                    stall_seconds=self.node_cache.stall_seconds,
                    held=held,
                )
        target = directory or self.local_place(resolved)
        if target is None:
            return await self.node_cache.prefetch(resolved, pin=pin, keep=keep)
        if pin:
            raise ConfigError(
                f"{resolved.location.uri} is a checkpoint of tierckpt: it goes to the local tier, which has no pins",
                hint="Leave --pin out (retention keeps it), or give --to a directory of its own",
            )
        if location.scheme == "file" and target.absolute() == Path(location.path):
            raise ConfigError(f"{target} is both source and target of the prefetch", hint="Give another --to")
        with contextlib.ExitStack() as leases:
            held = await asyncio.to_thread(self._held, resolved, target, leases)
            result = await prefetch(
                NearestSource(resolved.store, checkpoint.elsewhere) if checkpoint is not None else resolved.store,
                resolved.frozen.files,
                target,
                # Of a model the size of the chunks is free: that of the copies lets their digests be compared.
                chunk_size_bytes=(held[-1][1] if held else resolved).frozen.chunk_size_bytes,
                concurrency=self.settings.concurrency * 2,
                listener=self._listener,
                sharing=self.sharing,
                stall_seconds=self.node_cache.stall_seconds,
                include=include,
                exclude=exclude,
                held=held,
            )
        if resolved.manifest is not None and directory is None:
            tiers = frozenset({Tier.SHARED})
            await fetch_file.adopt(checkpoint or Checkpoint(location, resolved.manifest, target, resolved.store, tiers))
        return result

    def _held(self, resolved: ResolvedUri, target: Path, leases: contextlib.ExitStack) -> builtins.list[Held]:
        """The copies on this node of the files of ``resolved``: in the node cache, or on the local tier. Blocking."""
        held = self.node_cache.held(resolved, leases)
        if resolved.manifest is None:
            return held
        directory = self.directory(resolved.location)
        if directory != target:
            leases.enter_context(read_lease.reading(self.settings.local_root, directory))
            held.append((directory, Receipt(resolved.frozen, tuple(item.digests for item in resolved.frozen.files))))
        return [one for one in held if one[1].frozen.chunk_size_bytes == resolved.frozen.chunk_size_bytes]

    async def _freeze(
        self, location: Location, include: Sequence[str], exclude: Sequence[str]
    ) -> tuple[ResolvedUri, Checkpoint | None]:
        """What is at ``location``, frozen; and the checkpoint there, when peers have committed it.

        A checkpoint is there from the moment that some node has committed it, on the shared tier or not yet.
        """
        if self.cluster is not None and location.name in await self.cluster.committed(location.parent):
            checkpoint = await self.find(location)
            if checkpoint.manifest is not None and checkpoint.elsewhere is not None:
                await checkpoint.elsewhere.look()
                resolve = self.node_cache.resolve_checkpoint
                return resolve(location, checkpoint.store, checkpoint.manifest, include, exclude), checkpoint
        return await self.node_cache.freeze(location, include=include, exclude=exclude), None

    async def check_prefetched(
        self,
        location: Location,
        directory: Path | None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        *,
        hf_cache: bool = False,
    ) -> Check:
        """Say what of a checkpoint or model is on this node: in ``directory``, or where it belongs. Changes nothing.

        ``hf_cache``: as for ``prefetch``; every byte is read.
        """
        if hf_cache:
            resolved = await self.node_cache.freeze(location, include=include, exclude=exclude)
            return await check_hub_cache(hub_of(resolved.store), resolved.frozen, (directory or hub_cache()).absolute())
        return await self.node_cache.check_at(
            location, lambda resolved: directory or self.local_place(resolved), include, exclude
        )

    async def plan_prefetch(
        self, location: Location, include: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> AdmissionPlan | None:
        """What the cache would evict for a prefetch; None where it has no part in it. Changes nothing."""
        resolved = await self.node_cache.freeze(location, include=include, exclude=exclude)
        if self.local_place(resolved) is not None:
            return None
        return await asyncio.to_thread(plan_prefetch, self.node_cache.pool, resolved.frozen)

    def local_place(self, resolved: ResolvedUri) -> Path | None:
        """Where a checkpoint of ours, all of it, goes by default; None for what goes to the node cache: there what was
        adopted has the names that its writer gave it."""
        is_ours = resolved.manifest is not None and not resolved.is_filtered and not resolved.manifest.adopted_dirs
        return self.directory(resolved.location) if is_ours else None

    async def restore(self, location: Location, directory: Path) -> RestoreResult:
        """Make ``directory`` a plain copy of the newest usable checkpoint at or under ``location``.

        One with a file that has no good copy left is passed over for the step before it; the log says so.
        """
        await _refuse_file(directory)
        lost: TierckptError | None = None
        step_max: int | None = None
        removed = 0
        while removed < LISTINGS_MAX:
            checkpoint = await self.latest(location, step_max)
            if checkpoint is None:
                if lost is not None:
                    raise lost
                checkpoint = await self.find(location)  # it says what is wrong
            try:
                result = await self._restore(checkpoint, directory)
                if result is not None:
                    return result
                removed += 1
            except (IntegrityError, ObjectNotFoundError) as error:
                if checkpoint.location == location or checkpoint.step is None:
                    raise
                if not await catalog.stands(checkpoint):  # removed while it was read: there are newer ones
                    removed += 1
                    continue
                log.warning("%s has no good copy left, going back to an older step: %s", checkpoint.location.uri, error)
                lost, step_max = lost or error, checkpoint.step - 1
        raise changing(location)

    async def _restore(self, checkpoint: Checkpoint, directory: Path) -> RestoreResult | None:
        """Restore ``checkpoint``; None when it was removed, or replaced, before it was held: look again."""
        async with self.reading(checkpoint):
            if not await catalog.stands(checkpoint):
                return None
            return await restore(
                checkpoint,
                directory,
                chunk_size_bytes=int(self.settings.chunk_size_bytes),
                concurrency=self.settings.concurrency * 2,
                stall_seconds=self.node_cache.stall_seconds,
                listener=self._listener,
            )

    def reading(self, checkpoint: Checkpoint) -> AbstractAsyncContextManager[None]:
        """Hold ``checkpoint`` against retention and eviction on this node while it is read."""
        return read_lease.reading_async(self.settings.local_root, checkpoint.directory)

    # --- removing ----------------------------------------------------------------------------------------------

    async def prune(
        self,
        location: Location,
        policy: Policy,
        *,
        dry_run: bool = False,
        branch: Branch | None = None,
        own: Sequence[int] = (),
    ) -> PruneResult:
        """Remove the checkpoints directly under ``location`` that ``policy`` does not keep: ``Pruner.prune``."""
        return await self.pruner.prune(location, policy, dry_run=dry_run, branch=branch, own=own)


async def _refuse_file(directory: Path | None) -> None:
    if directory is None:
        return
    await asyncio.to_thread(check_names, directory)
    with translated(directory):
        is_file = await asyncio.to_thread(directory.is_file)
    if is_file:
        raise ConfigError(f"{directory} is a file, and is to be a directory", hint="Give another directory")
