"""Chooses the checkpoint that a job resumes from: the newest loadable one, or certainly none.

N1  "None" is returned only after a complete listing of the shared tier. A store that refuses, fails, hangs or ends
    a listing early is retried and then raises. A run whose names disappear is listed again.
N2  A checkpoint that the shared tier did not answer about is never skipped in favour of an older one.
N3  While the shared tier does not answer, the newest local step is taken only if this node saved it and has not
    drained it: no other node can have continued from it.
N4  Silent peers are waited for like the shared tier; then the others' newest step is taken, with a warning. A peer
    that refuses this node's secret raises.
N5  A step that a job abandoned by going back is no candidate (branches.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ..config import Settings
from ..disk.durable import matching
from ..errors import (
    BucketNotFoundError,
    CheckpointError,
    CheckpointNotFoundError,
    EndpointError,
    IntegrityError,
    ManifestError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreError,
    StoreUnavailableError,
    UncommittedCheckpointError,
)
from ..format.layout import BRANCHES_DIR, PRIVATE_DIR, REPLICA, WINDOWS_DIR, Location, adopted_dir, step_of
from ..format.manifest import Manifest
from ..poll import announced
from ..stores.base import Recoverable, Store
from ..telemetry import log_failure, logger
from ..types import Json, Tier
from . import branches, catalog, local_commit
from .branches import Branch
from .catalog import LISTINGS_MAX, Checkpoint, changing_run_error, retry_listing
from .peer_copies import FIRST_REPORT_SECONDS, HOW_LONG, PeerLookup, Refusal, SilentPeers

log = logger("select")

T = TypeVar("T")

SEARCH_SECONDS_MIN = 10.0
"""Time of one search, so that ``store_wait_seconds=0`` means one attempt and not none."""
PAUSE_SECONDS = 1.0
PEER_REMOVAL_SECONDS = 0.5
"""Time that a peer may list a checkpoint that it has removed."""

SEARCHED_DIRECTORIES_MAX, AT_ONCE = 256, 16


@dataclass(frozen=True, slots=True)
class RunDirectory:
    location: Location
    steps: int
    newest: catalog.CheckpointRow

    def merged_with(self, other: RunDirectory | None) -> RunDirectory:
        if other is None:
            return self
        newest = max(other.newest, self.newest, key=lambda row: age_of(row.name))
        return RunDirectory(self.location, self.steps + other.steps, newest)

    def to_json(self) -> Json:
        return {"uri": self.location.uri, "steps": self.steps, "newest": self.newest.to_json()}


class Selector:
    """Selects on all tiers. Runs on one event loop; no call uses a cache."""

    def __init__(
        self,
        settings: Settings,
        store_at: Callable[[Location], Store],
        directory_of: Callable[[Location], Path],
        peers: PeerLookup | None,
    ) -> None:
        self.settings, self.store_at, self.directory_of, self._peers = settings, store_at, directory_of, peers
        self._silent_peers = SilentPeers(peers, settings.store_wait_seconds)
        self.reached: set[tuple[str, str]] = set()
        """Stores (``store_key``) that have answered in this process."""

    async def find(self, location: Location) -> Checkpoint:
        return await catalog.find(location, self.directory_of(location), self.store_at(location), self._peers)

    async def found(self, location: Location) -> Checkpoint:
        """``find`` that waits for the shared tier if near copies lack a file, and for silent peers without a copy."""
        wait = _Wait(self.settings, self.store_at(location), location)

        async def look() -> Checkpoint:
            return await wait.until_seen(
                lambda: self._explicit(location), lambda error: self._whole_near(location, error)
            )

        try:
            return await look()
        except (CheckpointNotFoundError, UncommittedCheckpointError):
            if self._peers is None:
                raise
        silent = await self._silent_peers.wait(location.parent)
        try:
            return await look()
        except (CheckpointNotFoundError, UncommittedCheckpointError) as error:
            if silent:
                error.context["not_heard"] = ", ".join(silent)
            raise

    async def newest(
        self, location: Location, step_max: int | None = None, *, may_be_own: bool = True, windows: bool = False
    ) -> Checkpoint | None:
        """Return the newest usable checkpoint at or under ``location``: committed, every file with a copy of its size.

        Skipped ones are logged. Waits ``store_wait_seconds`` for the shared tier. ``may_be_own``: take this node's own
        newest step at once without it (N3); ``unseen`` of the result is then its error. ``windows``: consider newer
        redo logs.

        Raises StoreUnavailableError, PermissionDeniedError: no answer (N1), or a peer refuses this node's secret (N4).
        """
        wait = _Wait(self.settings, self.store_at(location), location)

        async def own(error: StoreError) -> Checkpoint | None:
            if (explicit := await self._whole_near(location, error)) is not None:
                return explicit
            near, is_own = await self._newest_near(location, step_max, windows)
            wait.advice = _advice(near)
            if not (may_be_own and is_own and near is not None):
                return None
            log.warning(
                "%s: continuing from %s, which this node saved and has not drained; shared storage could not be "
                "searched for a newer step: %s",
                location.uri,
                near.location.name,
                error.message,
            )
            return replace(near, unseen=error)

        async def look() -> Checkpoint | None:
            newest = await self._find_newest(location, step_max, windows)
            if newest is None or newest.unseen is None:
                self.reached.add(store_key(location))
            return newest

        silent = await self._silent_peers.wait(location)
        newest = await wait.until_seen(look, own)
        if silent:
            log.warning(
                "%s: the newest checkpoint found is %s; a newer one may be on %s, which did not answer",
                location.uri,
                newest.location.name if newest is not None else "none",
                ", ".join(silent),
            )
        return newest

    async def _explicit(self, location: Location) -> Checkpoint:
        found = await self.find(location)
        if found.unseen is not None and await catalog.missing_near_files(found):
            raise found.unseen
        return found

    async def _whole_near(self, location: Location, error: StoreError) -> Checkpoint | None:
        for found in await self.committed_near(location):
            if not await catalog.missing_near_files(found):
                text = "%s: going by the copy near, as shared storage does not say more: %s"
                log_failure(log, error, text, location.uri, error, level=logging.WARNING)
                return replace(found, unseen=error)
        return None

    async def _find_newest(self, location: Location, step_max: int | None, windows: bool) -> Checkpoint | None:
        try:
            return await self._explicit(location)
        except (CheckpointNotFoundError, UncommittedCheckpointError):
            pass
        names = await self._listed(location, windows)
        for _ in range(LISTINGS_MAX):
            ordered = _newest_first(names, step_max)
            found, removed = await self._first_usable(location, ordered, await self.noted_branch(location, names))
            if not ordered or (found is not None and found.location == location.child(ordered[0])):
                return found
            # A skipped checkpoint may have been removed since the listing, after newer steps were committed.
            before, names = names, await self._listed(location, windows, is_again=True)
            new = _newest_first(names - before, step_max)
            if self._peers is not None and removed & {*await self._peers.committed(location)}:
                # A peer drops removed steps from its list before it adds new ones.
                await asyncio.sleep(PEER_REMOVAL_SECONDS)
                continue
            if found is not None and not any(age_of(name) > age_of(found.location.name) for name in new):
                return found
            if found is not None or new:
                continue
            # Of two steps the older is removed after the newer is committed, so this order misses neither.
            ordered = _newest_first(names, step_max)[::-1]
            found, _ = await self._first_usable(location, ordered, await self.noted_branch(location, names))
            before, names = names, await self._listed(location, windows, is_again=True)
            if found is None and names <= before:
                return None
        if found is not None:
            return found
        raise changing_run_error(location)

    async def _listed(self, location: Location, windows: bool, *, is_again: bool = False) -> set[str]:
        """``is_again``: without the cache of the peers' answers."""
        names = {*await self._names_near(location, is_again), *await self.store_at(location).list_dirs()}
        if windows and WINDOWS_DIR in names:
            names |= below(WINDOWS_DIR, await self.store_at(location).list_dirs(WINDOWS_DIR))
            names |= below(WINDOWS_DIR, await self._names_near(location.child(WINDOWS_DIR), is_again))
        return names

    async def noted_branch(self, location: Location, names: Collection[str], *, is_near: bool = False) -> Branch | None:
        if BRANCHES_DIR not in names:
            return None
        found = [await asyncio.to_thread(branches.read_local, self.directory_of(location))]
        if not is_near:
            found.append(await branches.read_shared(self.store_at(location)))
        if self._peers is not None:
            for name in (await self._peers.committed(location)).get(BRANCHES_DIR, ()):
                copies = (await self._peers.replicas_at(location.child(name))).values()
                found += [branches.branch_of(copy.manifest, name) for copy in copies]
        return branches.current_branch((), *found)

    async def _first_usable(
        self, location: Location, names: Sequence[str], branch: Branch | None
    ) -> tuple[Checkpoint | None, set[str]]:
        removed: set[str] = set()
        for name in names:
            try:
                checkpoint = await self.find(location.child(name))
            except BucketNotFoundError:
                raise
            except (CheckpointError, IntegrityError, ObjectNotFoundError) as error:
                is_damage = isinstance(error, IntegrityError)
                (log.warning if is_damage else log.info)("latest: skipping %s: %s", name, error)
                removed |= {name} if isinstance(error, CheckpointNotFoundError) else set()
                continue
            if checkpoint.unseen is not None and not await asyncio.to_thread(self._is_own, checkpoint):
                raise checkpoint.unseen  # N2
            if branch is not None and not branch.holds(checkpoint.branch, checkpoint.step):
                if checkpoint.branch.order > branch.order:
                    return await self._first_usable(location, names, checkpoint.branch)
                log.info("latest: skipping %s: the job went back to an older step later", name)
                continue
            if await catalog.is_complete(checkpoint):
                return checkpoint, removed
            log.warning("latest: skipping %s: some files have no copy", name)
        return None, removed

    async def names(self, location: Location, *, level: int = logging.WARNING) -> list[str]:
        """For listings and removals of near copies: an omitted checkpoint may be newer than all of them."""
        return sorted(name for name in (await self.all_names(location, level=level))[0] if not name.startswith("."))

    async def windows(self, run: Location, *, level: int = logging.WARNING) -> list[str]:
        return sorted(below(WINDOWS_DIR, await self.names(run.child(WINDOWS_DIR), level=level)))

    async def branch(self, location: Location, known: Iterable[tuple[Branch, int | None]] = ()) -> Branch | None:
        """Return the branch that a job at ``location`` continues; None if no step is abandoned."""
        names, is_near = await self.all_names(location)
        return branches.current_branch(known, await self.noted_branch(location, names, is_near=is_near))

    async def all_names(
        self, location: Location, timeout_seconds: float | None = None, *, level: int = logging.WARNING
    ) -> tuple[set[str], bool]:
        """Return all names under ``location``, and True if the shared tier did not answer in time."""
        near = await self._names_near(location)
        try:
            async with asyncio.timeout(timeout_seconds):
                return {*near, *await self.store_at(location).list_dirs()}, False
        except TimeoutError:
            return {*near}, True
        except (StoreUnavailableError, EndpointError, PermissionDeniedError) as error:
            if timeout_seconds is None and (not near or isinstance(error, PermissionDeniedError)):
                raise
            text = "%s: listing this node and its peers only (%s)"
            log_failure(log, error, text, location.uri, error, level=level)
            return {*near}, True

    async def runs(
        self, locations: list[Location], *, look_max: int = SEARCHED_DIRECTORIES_MAX
    ) -> tuple[list[RunDirectory], bool]:
        """Return the runs in and under ``locations``, and whether the search covered all readable directories."""
        found: dict[Location, RunDirectory] = {}
        looked = 0
        while locations and looked < look_max:
            now, locations = locations[:AT_ONCE], locations[AT_ONCE:]
            looked += len(now)
            for run, below_it in await asyncio.gather(*map(self._run_at, now)):
                locations += below_it
                if run is not None:
                    found[run.location] = run.merged_with(found.get(run.location))
        return sorted(found.values(), key=lambda run: run.location.uri), not locations

    async def _run_at(self, location: Location) -> tuple[RunDirectory | None, list[Location]]:
        """Return the run at ``location``, or of the checkpoint there, and the directories to search next."""
        if location.scheme == "file" and Path(location.path).is_relative_to(self.settings.local_root):
            return None, []

        async def newest_in(
            names: Collection[str],
        ) -> tuple[tuple[set[str], Location, catalog.CheckpointRow | None], set[str]]:
            ordered = _newest_first({*names})
            newest_at = location.child(ordered[0]) if ordered else location
            if BRANCHES_DIR in names and (found := await self._find_newest(location, None, windows=False)) is not None:
                newest_at = found.location
            newest = await catalog.describe(newest_at, self.directory_of(newest_at), self.store_at(newest_at))
            return ({*names}, newest_at, newest), {newest_at.name} if ordered and newest is None else set()

        async def names_of_run() -> list[str]:
            listed = (await self.all_names(location))[0]
            return [name for name in listed if not name.startswith((".", adopted_dir(""))) or name == BRANCHES_DIR]

        try:
            names, newest_at, newest = await retry_listing(location, names_of_run, newest_in)
        except (PermissionDeniedError, ManifestError) as error:
            log.warning("%s is passed over: %s", location.uri, error)
            return None, []
        if newest is None:
            return None, [location.child(name) for name in sorted(names - {BRANCHES_DIR})]
        others = sorted(name for name in names - {newest_at.name, BRANCHES_DIR} if step_of(name) is None)
        return RunDirectory(newest_at.parent, max(1, len(names) - len(others)), newest), [
            location.child(name) for name in others
        ]

    async def _names_near(self, location: Location, is_again: bool = False) -> list[str]:
        local = await asyncio.to_thread(directories_in, self.directory_of(location))
        if self._peers is None:
            return local
        return local + list(await self._peers.committed(location, is_fresh=is_again))

    async def _newest_near(
        self, location: Location, step_max: int | None, windows: bool
    ) -> tuple[Checkpoint | None, bool]:
        """Return the newest whole checkpoint of near tiers, and whether the newest there is this node's own (N3)."""
        is_newest, is_own = True, False
        names = set(await self._names_near(location))
        if windows:
            names |= below(WINDOWS_DIR, await self._names_near(location.child(WINDOWS_DIR)))
        branch = await self.noted_branch(location, names, is_near=True)
        for name in _newest_first(names):
            for checkpoint in await self.committed_near(location.child(name)):
                if branch is not None and not branch.holds(checkpoint.branch, checkpoint.step):
                    if checkpoint.branch.order < branch.order:
                        continue
                    branch = checkpoint.branch
                is_whole = not await catalog.missing_near_files(checkpoint)
                if is_newest:
                    is_newest, is_own = False, is_whole and await asyncio.to_thread(self._is_own, checkpoint)
                if is_whole and (step_max is None or (checkpoint.step is not None and checkpoint.step <= step_max)):
                    return checkpoint, is_own
        return None, is_own

    async def committed_near(self, location: Location) -> list[Checkpoint]:
        """Newest first."""
        directory, store = self.directory_of(location), self.store_at(location)
        local = await asyncio.to_thread(local_commit.read_usable_manifest, directory)
        found = await self._peers.replicas_at(location, (local,)) if self._peers is not None else {}
        attempts: dict[str, Manifest] = {attempt: elsewhere.manifest for attempt, elsewhere in found.items()}
        attempts |= {local.attempt: local} if local is not None else {}
        return [
            Checkpoint(
                location,
                manifest,
                directory,
                store,
                frozenset({Tier.LOCAL if local is not None and manifest.attempt == local.attempt else Tier.PEER}),
                found.get(manifest.attempt),
            )
            for manifest in sorted(
                attempts.values(), key=lambda one: (branches.order_of(one), one.created_unix_seconds), reverse=True
            )
        ]

    def _is_own(self, checkpoint: Checkpoint) -> bool:
        manifest, directory = checkpoint.manifest, checkpoint.directory
        return manifest is not None and Tier.LOCAL in checkpoint.tiers and is_origin(directory, manifest)


def is_origin(directory: Path, manifest: Manifest) -> bool:
    """Return True if a rank of this node saved it and no mark says that it was drained (N3)."""
    is_copy = (directory / REPLICA).exists() and not manifest.tokens & local_commit.origins(directory)
    return not is_copy and not local_commit.is_drained(directory, manifest.attempt)


def store_key(location: Location) -> tuple[str, str]:
    """Requests with one key share an outcome."""
    return location.scheme, location.authority


class _Wait:
    def __init__(self, settings: Settings, store: Store, location: Location) -> None:
        self._store, self._location = store, location
        self._seconds = settings.store_wait_seconds
        self._begun = time.monotonic()
        self._end = self._begun + self._seconds
        self._problem = "no answer yet"
        self._refusal = Refusal()
        self.advice = ""
        """The user's options with the checkpoints of this node."""

    async def until_seen(
        self, look: Callable[[], Awaitable[T]], instead: Callable[[StoreError], Awaitable[T | None]]
    ) -> T:
        """Call ``look`` until the store answers; after the first failure, take the result of ``instead``, if any."""
        with announced(log, self._describe, FIRST_REPORT_SECONDS):
            while True:
                try:
                    return await self._answer(look())
                except BucketNotFoundError:
                    raise
                except (StoreUnavailableError, PermissionDeniedError, EndpointError) as error:
                    other = await instead(error)
                    if other is not None:
                        return other
                    if self._is_over(error):
                        raise self._unanswered_error(error) from error
                    self._problem = error.message
                await asyncio.sleep(max(0.0, min(PAUSE_SECONDS, self._end - time.monotonic())))
                if isinstance(self._store, Recoverable):
                    self._store.probe_soon()

    async def _answer(self, work: Awaitable[T]) -> T:
        """Hanging work is abandoned, even if it cannot be cancelled."""
        task = asyncio.ensure_future(work)
        end = max(self._end, time.monotonic() + SEARCH_SECONDS_MIN)
        try:
            if not (await asyncio.wait({task}, timeout=end - time.monotonic()))[0]:
                raise StoreUnavailableError(f"{self._location.uri} has not answered for {end - self._begun:.0f} s")
            return task.result()
        finally:
            task.cancel()
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _is_over(self, error: StoreError) -> bool:
        is_final = self._refusal.is_permanent(isinstance(error, PermissionDeniedError))
        return is_final or isinstance(error, EndpointError) or time.monotonic() >= self._end

    def _describe(self) -> str:
        text = f"waiting for {self._location.uri} to say which checkpoints it has"
        seconds = time.monotonic() - self._begun
        return f"{text}, {seconds:.0f} of {self._seconds:.0f} s ({self._problem}). {HOW_LONG}"

    def _unanswered_error(self, error: StoreError) -> StoreError:
        kinds = (EndpointError, PermissionDeniedError, StoreUnavailableError)
        endpoint = os.environ.get("AWS_ENDPOINT_URL") if self._location.scheme == "s3" else None
        context = {"uri": self._location.uri, "endpoint": endpoint, "tier": Tier.SHARED} | error.context
        return next(kind for kind in kinds if isinstance(error, kind))(
            f"which checkpoints {self._location.uri} has is not known: {error.message}",
            hint=f"This does not mean that there are none. {f'{error.hint}. ' if error.hint else ''}Check the "
            "credentials, and that the store is up and can be reached (AWS_ENDPOINT_URL for s3://); "
            f"store_wait_seconds (TIERCKPT_STORE_WAIT_SECONDS) waits longer than {self._seconds:g} s.{self.advice}",
            **context | {"waited_seconds": round(time.monotonic() - self._begun, 1)},
        )


def _advice(offered: Checkpoint | None) -> str:
    if offered is None:
        return ""
    where = "This node has" if Tier.LOCAL in offered.tiers else "Other nodes have"
    return (
        f" {where} {offered.location.name} complete; other nodes may have continued from it, so it is not used without "
        f"your consent: restore(state, step={offered.step}), or its URI {offered.location.uri}, accepts it"
    )


def age_of(name: str) -> tuple[bool, int]:
    """Sort key: by step; names without a step are oldest."""
    step = step_of(name)
    return step is not None, step or 0


def newest_of(names: Iterable[str]) -> list[str]:
    """Several names may differ in other parts than the step."""
    names = list(names)
    newest = max(map(age_of, names), default=None)
    return [name for name in names if age_of(name) == newest]


def below(name: str, children: Iterable[str]) -> set[str]:
    return {f"{name}/{child}" for child in children}


def _newest_first(names: set[str], step_max: int | None = None) -> list[str]:
    def is_wanted(name: str) -> bool:
        step, child = step_of(name), name.removeprefix(f"{WINDOWS_DIR}/")
        return not child.startswith(".") and (step_max is None or (step is not None and step <= step_max))

    return sorted(filter(is_wanted, names), key=lambda name: (*age_of(name), name), reverse=True)


def directories_in(directory: Path) -> list[str]:
    return [path.name for path in matching(directory, "*") if path.is_dir() and path.name != PRIVATE_DIR]
