"""The replicator: executes ``peer/replica_policy.py``, and copies other nodes' checkpoints to this node.

Once a second it scans the local tier and requests ``/v1/fresh`` from its sources and holders. It learns of commits, as
a node without the save's coordinator has no manifest; fetches missing saves of the newest checkpoint of each run, and
new frames of gradient logs; and removes those that newer ones on all their holders replace (R2).

Crash safety: the manifest is written first, so every file that a killed agent leaves is named by one and removed with
it. A file gets its name after it is whole, verified and durable. The replicator touches neither the journal nor a file
that another process writes, and evicts only files that a save may evict.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..cache import space
from ..checkpoint import local_commit, run_records, shared_commit
from ..checkpoint.branches import abandoned_here
from ..checkpoint.catalog import file_size
from ..checkpoint.journal import Journal
from ..checkpoint.retention import marked_directories
from ..checkpoint.select import age_of
from ..config import Settings
from ..disk import read_lease
from ..disk.durable import durable_write, matching, read_whole
from ..drain.file_transfer import fetch
from ..drain.rate_limiter import RateLimiter, stamp_of
from ..errors import CapacityError, ManifestError, ObjectNotFoundError, StoreError, TierckptError
from ..format import manifest as manifests
from ..format.layout import MANIFEST, REPLICA, SHARD_SUFFIX, Location, local_dir, location_at, step_of
from ..format.manifest import Manifest
from ..peer.membership import Member
from ..peer.peer_catalog import Live, PeerCatalog, PeerReplicas
from ..peer.replica_policy import FRESH_MAX, LOGS_MAX, FreshCheckpoint, LogRow, holders, outdated, sources
from ..read.replicated_file import PeerSource
from ..stores.base import Store
from ..stores.verified_read import get_whole
from ..telemetry import REPLICAS, ProgressCounter, logger
from ..types import Json, ProgressListener, Tier
from .log_copies import LogIndex, fetch_log

STEPS_TOLD = 2
_NOTE_FIELDS = frozenset({"attempt", "of"})


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """A committed checkpoint of the local tier, and its saves that are whole here."""

    directory: Path
    location: Location
    manifest: Manifest
    own: frozenset[str]
    held: frozenset[str]
    made_by: Mapping[str, str]

    @property
    def key(self) -> tuple[str, str]:
        return self.location.uri, self.manifest.attempt

    def fresh(self, *, is_safe: bool) -> FreshCheckpoint:
        uri, manifest = self.location.uri, self.manifest
        return FreshCheckpoint(
            uri, manifest.attempt, manifest.created_unix_seconds, self.own, self.held, is_safe, self.made_by
        )


class LocalIndex:
    """The checkpoints below one local root, as of the last ``refresh``: own saves and replicas. Blocking.

    A file gets its name after it is whole, verified and durable: a save counts if all its files are here (R1).
    """

    def __init__(self, local_root: Path) -> None:
        self._root = local_root
        self._manifests: dict[Path, tuple[tuple[int, int, int], Manifest]] = {}
        self.newest: list[LocalCheckpoint] = []
        self.unnamed: dict[Path, set[str]] = {}
        """Saves of this node's ranks that no manifest here names, by directory."""

    def refresh(self) -> None:
        runs: dict[Path, list[tuple[Path, Manifest]]] = {}
        unnamed: dict[Path, set[str]] = {}
        for directory in marked_directories(self._root / "checkpoints"):
            manifest = self._manifest(directory)
            named = manifest.tokens | {manifest.attempt} if manifest is not None else frozenset()
            unknown = local_commit.origins(directory) - named
            if flushed := {token for token in unknown if matching(directory, f"*-{token}{SHARD_SUFFIX}")}:
                unnamed[directory] = flushed
            if manifest is not None:
                runs.setdefault(directory.parent, []).append((directory, manifest))
        abandoned = abandoned_here(step for run in runs.values() for step in run)
        kept = [[step for step in run if step[0] not in abandoned] for run in runs.values()]
        steps = [step for run in kept for step in sorted(run, key=_age, reverse=True)[:STEPS_TOLD]]
        self.newest = list(self._here(sorted(steps, key=_age, reverse=True)))
        self.unnamed = unnamed
        existing = {directory for run in runs.values() for directory, _ in run}
        self._manifests = {path: known for path, known in self._manifests.items() if path in existing}

    def copies(self) -> list[LocalCheckpoint]:
        known = [(directory, manifest) for directory, (_, manifest) in self._manifests.items()]
        return list(self._here(step for step in known if (step[0] / REPLICA).exists()))

    def _here(self, steps: Iterable[tuple[Path, Manifest]]) -> Iterable[LocalCheckpoint]:
        for directory, manifest in steps:
            location = location_at(self._root, directory)
            if location is not None:
                yield complete_saves(directory, location, manifest)

    def _manifest(self, directory: Path) -> Manifest | None:
        stamp, known = stamp_of(directory / MANIFEST), self._manifests.get(directory)
        if stamp is None:
            return None
        if known is not None and known[0] == stamp:
            return known[1]
        manifest = local_commit.read_usable_manifest(directory)
        if manifest is not None:
            self._manifests[directory] = (stamp, manifest)
        return manifest


def complete_saves(directory: Path, location: Location, manifest: Manifest) -> LocalCheckpoint:
    """Return the saves of ``manifest`` that are whole in ``directory`` (R1)."""
    missing = {entry.token for entry in manifest.files if file_size(directory / entry.key) != entry.size_bytes}
    whole, own = manifest.tokens - missing, local_commit.origins(directory)
    return LocalCheckpoint(
        directory, location, manifest, own & whole, whole - own, _read_notes(directory, manifest.attempt)
    )


def note(directory: Path, manifest: Manifest, made_by: Mapping[str, str]) -> None:
    """Record the members that made the saves copied here. Without it they count as own saves."""
    body = {"attempt": manifest.attempt, "of": {**_read_notes(directory, manifest.attempt), **made_by}}
    durable_write(directory / REPLICA, manifests.seal(body))


def _read_notes(directory: Path, attempt: str) -> dict[str, str]:
    path = directory / REPLICA
    try:
        data = read_whole(path, manifests.MANIFEST_BYTES_MAX)
        body = manifests.unseal(data, _NOTE_FIELDS, where=str(path), size_bytes_max=manifests.MANIFEST_BYTES_MAX)
    except ObjectNotFoundError:
        return {}
    except (ManifestError, StoreError) as error:
        log.warning("%s", error)
        return {}
    if body["attempt"] != attempt or not isinstance(body["of"], dict):
        return {}
    return {str(token): str(name) for token, name in body["of"].items()}


def _age(step: tuple[Path, Manifest]) -> tuple[tuple[bool, int], float]:
    return age_of(step[0].name), step[1].created_unix_seconds


log = logger("replicas")

ROUND_SECONDS = 1.0
NO_ROOM_SECONDS, RETRY_SECONDS = 30.0, 5.0
"""The delay after a lack of room, and after other errors."""
WAIT_FOR_HOLDERS_SECONDS = 120.0
"""How long an agent with a fresh save waits for its holders before it exits."""
SETTLE_SECONDS = 60.0
NEWS_SECONDS_MAX = 10.0
ASKED_PER_SECOND = 64
CONCURRENCY = 4


@dataclass
class ReplicationStatus:
    members: int = 0
    holders: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    copied: int = 0
    copied_bytes: int = 0
    without_room: int = 0
    failed: int = 0
    removed: int = 0
    last_error: str = ""
    newest: dict[str, Json] = field(default_factory=dict)
    """By run: the newest own step, and whether all its holders have it."""
    logs: list[Json] = field(default_factory=list)
    """Per gradient log: its newest step, and the newest step that all its holders have."""


@dataclass(frozen=True, slots=True)
class _Fetch:
    what: str
    run: Callable[[], Awaitable[int]]
    """Returns the number of bytes."""
    is_checkpoint: bool = False


class Replicator:
    """Runs on the agent's event loop until it is cancelled."""

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        limiter: RateLimiter,
        cluster: PeerCatalog,
        store_at: Callable[[Location], Store],
        listener: ProgressListener,
    ) -> None:
        self.settings = settings
        self.progress = ReplicationStatus()
        self._journal, self._limiter, self._cluster = journal, limiter, cluster
        self._store_at, self._listener = store_at, listener
        self._settled_at = time.monotonic()
        self._tier = LocalIndex(settings.local_root)
        self._safe: set[tuple[str, str]] = set()
        """(URI, attempt) of own saves that all holders report."""
        self._marked: set[tuple[str, str]] = set()
        self._told: Mapping[str, list[FreshCheckpoint]] = {}
        self.logs = LogIndex(settings.local_root)
        self._told_logs: Mapping[str, list[LogRow]] = {}
        self._logged_at = float("-inf")
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._again_at: dict[str, float] = {}

    def fresh(self) -> Json:
        """Return the answer to ``/v1/fresh``. Any thread."""
        fresh = [here.fresh(is_safe=here.key in self._safe).to_json() for here in self._tier.newest[:FRESH_MAX]]
        return {"fresh": fresh, "logs": [row.to_json() for row in self.logs.rows[:LOGS_MAX]]}

    def status(self) -> Json:
        return {"replicas": self.settings.replicas, **vars(self.progress)}

    async def run(self) -> None:
        """Run until cancelled. Errors are logged, and retried in the next round."""
        try:
            while True:
                try:
                    await self.round()
                except (TierckptError, OSError) as error:
                    self._failed("a round of replication failed", error)
                except Exception:
                    log.exception("a round of replication failed")
                await asyncio.sleep(ROUND_SECONDS)
        finally:
            for task in self._fetching.values():
                task.cancel()
            await asyncio.gather(*self._fetching.values(), return_exceptions=True)

    async def round(self) -> None:
        live = await self._cluster.live()
        await asyncio.to_thread(self._tier.refresh)
        await asyncio.to_thread(self.logs.refresh)
        await self._adopt_commits(live)
        if self.settings.drain and time.monotonic() - self._settled_at > SETTLE_SECONDS:
            self._settled_at = time.monotonic()
            await self._record_drained()
        if self.settings.replicas < 2 or not live.me:
            return
        await self._query_holders(live)
        members = {member.name: member for member in live.other_nodes}
        for kind, find in (("replicas", self._missing_copies), ("logs", self._lacking_logs)):
            if kind not in self._fetching or self._fetching[kind].done():
                missing, now = await asyncio.to_thread(find, members), time.monotonic()
                if ready := [one for one in missing if now >= self._again_at.get(one.what, 0.0)]:
                    self._fetching[kind] = asyncio.create_task(self._fetch_all(ready), name=kind)
        await asyncio.to_thread(self._remove_outdated)
        await asyncio.to_thread(self._shorten_logs)

    @property
    def is_needed(self) -> bool:
        """True during a fetch, or while a holder lacks a fresh save of this node."""
        if not all(task.done() for task in self._fetching.values()):
            return True
        is_fresh = time.monotonic() - self._logged_at < WAIT_FOR_HOLDERS_SECONDS
        if is_fresh and any(row["peers_step"] != row["step"] for row in self.progress.logs):
            return True
        limit = time.time() - WAIT_FOR_HOLDERS_SECONDS
        return len(self.progress.holders) > 1 and any(
            here.own and here.manifest.created_unix_seconds > limit and here.key not in self._safe
            for here in self._tier.newest
        )

    async def _adopt_commits(self, live: Live) -> None:
        for directory, tokens in self._tier.unnamed.items():
            location = location_at(self.settings.local_root, directory)
            key = f"news {directory}"
            pause = ROUND_SECONDS * len(live.other_nodes) / ASKED_PER_SECOND
            if location is None or not live.other_nodes or time.monotonic() < self._again_at.get(key, 0.0):
                continue
            try:
                if not await self._learn_of(location, directory, tokens):
                    self._retry_after(key, min(pause, NEWS_SECONDS_MAX))
            except (TierckptError, OSError) as error:
                self._retry_after(key, NEWS_SECONDS_MAX)
                self._failed(f"cannot record the commit of {location.uri} on this node", error)

    async def _learn_of(self, location: Location, directory: Path, tokens: set[str]) -> bool:
        for elsewhere in (await self._cluster.replicas_at(location)).values():
            if tokens & elsewhere.manifest.tokens:
                log.info("%s is committed, according to %s", location.uri, elsewhere.members[0].name)
                return await self._adopt(elsewhere, directory, elsewhere.members)
        return False

    async def _adopt(self, elsewhere: PeerReplicas, directory: Path, members: Sequence[Member]) -> bool:
        manifest, taking = elsewhere.manifest, PeerSource(elsewhere, members)
        chunk_size_bytes = manifest.chunk_size_bytes
        metadata = {entry.path: await get_whole(taking, entry, chunk_size_bytes) for entry in manifest.metadata}
        await asyncio.to_thread(local_commit.record_commit, directory, manifest, metadata)
        committed = await asyncio.to_thread(local_commit.read_local_manifest, directory)
        return committed is not None and committed.attempt == manifest.attempt

    async def _query_holders(self, live: Live) -> None:
        members = {member.name: member for member in live.other_nodes}
        placed = holders(live.members, self.settings.replicas)
        own_holders, others = placed.get(live.me, ()), sources(placed, live.me)
        # Also the makers of the copies here, even if their holders have changed.
        made = {name for here in self._tier.newest for name in here.made_by.values()}
        fellows = [members[name] for name in {*own_holders, *others, *made} if name in members]
        replies = await self._cluster.fresh(fellows)
        self._told = {name: fresh for name, (fresh, _) in replies.items()}
        self._told_logs = {name: logs for name, (_, logs) in replies.items()}
        self.progress.members, self.progress.holders = len(members) + 1, tuple(own_holders)
        self.progress.sources = tuple(others)
        safe = {
            here.key
            for here in self._tier.newest
            if here.own
            and len(own_holders) > 1
            and all(self._holds(name, here) for name in own_holders if name != live.me)
        }
        self._safe = safe
        await asyncio.to_thread(self._mark_replicated)
        self.progress.newest = {}
        for here in self._tier.newest:
            if here.own:
                row = {"uri": here.location.uri, "has_all_replicas": here.key in safe}
                self.progress.newest.setdefault(here.location.parent.uri, row)
        others = [name for name in own_holders if name != live.me]
        logs = [self._copied(row, others, live.me) for row in self.logs.rows if others and not row.of]
        if logs != self.progress.logs:
            self.progress.logs, self._logged_at = logs, time.monotonic()

    def _copied(self, own: LogRow, names: Sequence[str], me: str) -> Json:
        steps = [
            max((row.step for row in self._told_logs.get(name, ()) if row.log == own.log and row.of == me), default=-1)
            for name in names
        ]
        return {"uri": own.uri, "rank": own.rank, "step": own.step, "peers_step": min(steps)}

    def _mark_replicated(self) -> None:
        """Mark steps on all holders: retention keeps the newest of them (N1)."""
        rows = [row for name in self.progress.sources for row in self._told.get(name, ())]
        for here in self._tier.newest:
            others = [row for row in rows if row.own and (row.uri, row.attempt) == here.key]
            if here.key in self._safe and here.key not in self._marked and all(row.is_safe for row in others):
                # Only the node of rank 0 records it, once: an earlier agent may have marked it.
                is_first = any(file.rank == 0 and file.token in here.own for file in here.manifest.files)
                if is_first and not local_commit.is_replicated(here.directory, here.manifest.attempt):
                    root = self.settings.local_root
                    run_records.note(root, here.location, here.manifest, Tier.PEER, time.time())
                local_commit.mark_replicated(here.directory, here.manifest.attempt)
                self._marked.add(here.key)

    def _holds(self, name: str, here: LocalCheckpoint) -> bool:
        rows = self._told.get(name, ())
        return any(row.attempt == here.manifest.attempt and here.own <= row.held | row.own for row in rows)

    def _missing_copies(self, members: Mapping[str, Member]) -> list[_Fetch]:
        """Return the missing copies of each source's newest checkpoints, newest first."""
        having: dict[tuple[str, str], Set[str]] = {here.key: here.own | here.held for here in self._tier.newest}
        found: list[tuple[Member, FreshCheckpoint]] = []
        for name in self.progress.sources:
            newest: dict[str, FreshCheckpoint] = {}
            for row in sorted((row for row in self._told.get(name, ()) if row.own), key=lambda row: row.age):
                newest[row.run] = row
            lacking = [row for row in newest.values() if row.own - having.get((row.uri, row.attempt), set())]
            found += [(members[name], row) for row in lacking if name in members]
        found.sort(key=lambda item: item[1].created_unix_seconds, reverse=True)
        return [
            _Fetch(f"the copy of {row.uri} of {member.name}", partial(self._fetch_copy, member, row), True)
            for member, row in found
        ]

    async def _fetch_all(self, missing: Sequence[_Fetch]) -> None:
        """A failed one is repeated later."""
        for one in missing:
            try:
                size_bytes = await one.run()
            except CapacityError as error:
                self.progress.without_room += 1
                self._retry_after(one.what, NO_ROOM_SECONDS)
                self._failed(f"no room for {one.what}", error, outcome="no_room")
            except (TierckptError, OSError, TimeoutError) as error:
                self.progress.failed += 1
                self._retry_after(one.what, RETRY_SECONDS)
                self._failed(f"{one.what} is not whole yet", error)
            else:
                self.progress.copied_bytes += size_bytes
                if one.is_checkpoint:
                    self.progress.copied += size_bytes > 0
                    REPLICAS.emit(1, outcome="copied")

    async def _fetch_copy(self, member: Member, row: FreshCheckpoint) -> int:
        directory = local_dir(self.settings.local_root, row.location)
        here = next((here for here in self._tier.newest if here.directory == directory), None)
        is_new = here is None or here.manifest.attempt != row.attempt
        manifest = here.manifest if here is not None and not is_new else await self._manifest_of(member, row)
        elsewhere = PeerReplicas(self._cluster, row.location, manifest, [member])
        files = [entry for entry in manifest.files if entry.token in row.own]
        lacking = [entry for entry in files if file_size(directory / entry.key) != entry.size_bytes]
        needed = sum(entry.size_bytes for entry in (*lacking, *manifest.metadata))
        async with read_lease.reading_async(self.settings.local_root, directory):
            if not await asyncio.to_thread(space.has_room, self.settings, needed, directory):
                raise CapacityError(f"{needed} bytes are needed, and only this node's own saves could be evicted")
            if is_new and not await self._adopt(elsewhere, directory, [member]):
                raise ManifestError(f"{directory} has another save", hint="It is this node's own, and is kept")
            await asyncio.to_thread(note, directory, manifest, dict.fromkeys(row.own, member.name))
            flow = self._limiter.flow(row.created_unix_seconds)
            source = PeerSource(elsewhere, [member], flow.spend)
            what = f"replica {row.uri} of {member.name}"
            progress = ProgressCounter(self._listener, what, sum(entry.size_bytes for entry in lacking))
            for entry in lacking:
                async with flow.slot():
                    chunk = elsewhere.frozen.chunk_size_bytes
                    await fetch(source, entry, directory / entry.key, chunk, progress.add, CONCURRENCY)
        return sum(entry.size_bytes for entry in lacking)

    def _lacking_logs(self, members: Mapping[str, Member]) -> list[_Fetch]:
        having = {(row.of, row.log): dict(row.segments) for row in self.logs.rows}
        found = []
        for name in self.progress.sources:
            for row in self._told_logs.get(name, ()) if name in members else ():
                after, here = self._safe_step(name, row.uri), having.get((name, row.log), {})
                if not row.of and any(here.get(segment, 0) < size for segment, size in row.after(after)):
                    what = f"the gradient log of rank {row.rank} of {row.uri} of {name}"
                    found.append(_Fetch(what, partial(self._fetch_log, members[name], row, after)))
        return found

    async def _fetch_log(self, member: Member, row: LogRow, after: int) -> int:
        spend = self._limiter.flow(time.time()).spend
        return await fetch_log(self.logs, self.settings, self._cluster, member, row, after=after, spend=spend)

    def _shorten_logs(self) -> None:
        """Remove frames before a checkpoint that another node has (R2)."""
        steps_by_log = {(name, row.log) for name, rows in self._told_logs.items() for row in rows if not row.of}
        for row in self.logs.rows:
            if row.of and (after := self._safe_step(row.of, row.uri)) >= 0:
                self.logs.truncate(row, after, is_told=(row.of, row.log) in steps_by_log)

    def _safe_step(self, name: str, run: str) -> int:
        """Return the newest step of a run that survives the node ``name``."""
        uris = [row.uri for row in self._told.get(name, ()) if row.is_safe and row.run == run]
        uris += [
            here.location.uri
            for here in self._tier.newest
            if here.location.parent.uri == run and local_commit.is_drained(here.directory, here.manifest.attempt)
        ]
        return max((step_of(uri) or -1 for uri in uris), default=-1)

    async def _manifest_of(self, member: Member, row: FreshCheckpoint) -> Manifest:
        found = await self._cluster.manifest_of(member, row.location)
        if found is None or found.attempt != row.attempt or not row.own <= found.tokens:
            raise ObjectNotFoundError(f"{member.name} does not have {row.uri} as it said", uri=row.uri)
        return found

    async def _record_drained(self) -> None:
        """Record which copies the shared tier has: a save may evict these."""
        for here in self._tier.newest:
            drained = await asyncio.to_thread(local_commit.is_drained, here.directory, here.manifest.attempt)
            if here.own or drained:
                continue
            try:
                shared = await shared_commit.read_shared_manifest(self._store_at(here.location))
            except TierckptError as error:
                log.info("%s: cannot check whether it is on the shared tier: %s", here.location.uri, error)
                continue
            if shared is not None and shared.attempt == here.manifest.attempt:
                await asyncio.to_thread(local_commit.mark_drained, here.directory, shared.attempt)

    def _remove_outdated(self) -> None:
        journaled_uris = {entry.uri for entry in self._journal.entries()}
        copies = self._tier.copies()
        found = outdated([copy.fresh(is_safe=False) for copy in copies], self._told, journaled_uris)
        outdated_uris = {row.uri for row in found}
        for old in copies:
            if old.location.uri not in outdated_uris:
                continue
            with read_lease.removing(self.settings.local_root, old.directory) as free:
                if free and local_commit.remove_local(old.directory, old.manifest.attempt):
                    self.progress.removed += 1
                    log.info("removed the copy of %s: a newer one is on all its holders", old.location.uri)

    def _retry_after(self, key: str, seconds: float) -> None:
        now = time.monotonic()
        self._again_at = {key: at for key, at in self._again_at.items() if at > now} | {key: now + seconds}

    def _failed(self, what: str, error: BaseException, outcome: str = "failed") -> None:
        REPLICAS.emit(1, outcome=outcome)
        self.progress.last_error = f"{what}: {error}"
        log.warning("%s: %s", what, error)
