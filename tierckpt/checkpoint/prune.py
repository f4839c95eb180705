"""Prunes a run on each tier by the rules of retention.py, and finishes interrupted removals."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from ..config import Settings
from ..disk import read_lease
from ..disk.durable import durable_write, make_dirs, matching, read_whole
from ..errors import ManifestError, ObjectNotFoundError, StoreError, TierckptError
from ..format import layout
from ..format.layout import PRIVATE_DIR, Location, local_dir, parse_uri, step_of
from ..format.manifest import BASE_NOTE, RECORD_BYTES_MAX, Manifest, seal, unseal
from ..stores.base import Store, to_completion
from ..telemetry import log_failure, logger
from ..types import Json, Tier
from . import local_commit, retention, shared_commit
from .branches import Branch, branch_of, current_branch, order_of
from .catalog import is_stock
from .journal import Journal
from .retention import CheckpointCopy, Health, Policy, Rule, Verdict
from .select import Selector

log = logger("retention")

KEPT, WOULD_GO, REMOVED, FAILED = "kept", "would go", "removed", "failed"
HAS_LOG = "a gradient log leads on from it"
DUE_SECONDS_MAX = 7 * 86400.0
"""Time with a silent store; the next drain makes the run due again."""
_DUE_FIELDS = frozenset({"run", "shared"})


@dataclass(frozen=True, slots=True)
class Outcome:
    copy: CheckpointCopy
    outcome: str
    reason: str

    def to_json(self) -> Json:
        return {
            "name": self.copy.name,
            "step": self.copy.step,
            "tier": str(self.copy.tier),
            "outcome": self.outcome,
            "reason": self.reason,
            "size_bytes": self.copy.size_bytes,
            "health": str(self.copy.health) if self.copy.health else None,
            "abandoned": self.copy.is_abandoned,
        }


@dataclass(slots=True)
class PruneResult:
    outcomes: list[Outcome]
    others: dict[str, str] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    errors: list[TierckptError] = field(default_factory=list)

    def join(self, other: PruneResult) -> None:
        self.outcomes += other.outcomes
        self.others |= other.others
        self.leftovers += other.leftovers
        self.errors += other.errors

    def only(self, outcome: str) -> list[Outcome]:
        return [one for one in self.outcomes if one.outcome == outcome]


@dataclass(slots=True)
class _RunEntry:
    name: str
    """Below the run."""
    location: Location
    local: Manifest | None = None
    shared: Manifest | None = None
    other: str = ""
    begun: list[Manifest] = field(default_factory=list)
    is_empty: bool = False

    @property
    def copies(self) -> list[tuple[Tier, Manifest]]:
        copies = ((Tier.LOCAL, self.local), (Tier.SHARED, self.shared))
        return [(tier, manifest) for tier, manifest in copies if manifest is not None]


_Run: TypeAlias = tuple[list[_RunEntry], list[_RunEntry]]


class Pruner:
    """Prunes the runs of one local root. Runs on one event loop."""

    def __init__(
        self, settings: Settings, journal: Journal, store_of: Callable[[Location], Store], selector: Selector
    ) -> None:
        self._settings = settings
        self._root = settings.local_root
        self._journal = journal
        self._store = store_of
        self._run_selector = selector
        self._gate = asyncio.Semaphore(4 * settings.concurrency)

    async def prune(
        self,
        run: Location,
        policy: Policy,
        *,
        dry_run: bool = False,
        branch: Branch | None = None,
        own: Sequence[int] = (),
        seen: _Run | None = None,
    ) -> PruneResult:
        """Remove the checkpoints directly under ``run`` that ``policy`` does not keep.

        Redo logs count among themselves and against newer checkpoints. A copy that cannot be removed does not stop the
        others. ``branch`` None: the one that a job of this run continues. ``own``: steps that this process has saved,
        the latest last. ``seen``: the checkpoints of ``run``, if they were just read.

        Raises StoreError: the shared tier does not answer; nothing was removed.
        Cost: one or two GETs for each name, one listing of the newest; one request for each removed file.
        """
        steps, windows = seen or await self._look_at_run(run)
        noted = await self._run_selector.branch(run) if branch is None else None
        result = await self._judge(steps, policy, dry_run, branch, noted, own)
        if windows:
            kept = [one.copy for one in result.only(KEPT) if not one.copy.is_abandoned]
            result.join(await self._judge(windows, policy, dry_run, branch, noted, own, kept))
        if not dry_run:
            finished = await asyncio.to_thread(finish_local, self._root, self._journal)
            result.leftovers += [directory.name for directory in finished]
        return result

    async def prune_due(self, is_reported: Callable[[Location], bool] = lambda run: False) -> bool:
        """Prune each run with a drain that ended here since, by the rule of its newest checkpoint (N9).

        Returns True if some runs are still due. ``is_reported``: the outage of a store is in the log.
        """
        for run, notes in (await asyncio.to_thread(_due_runs, self._root)).items():
            try:
                seen = await self._look_at_run(run, level=logging.DEBUG)
                policy, own = _rule_of_newest([*seen[0], *seen[1]])
                if not any(is_shared for _, is_shared in notes):
                    policy = replace(policy, shared=Rule())
                is_due = False
                if policy:
                    result = await self.prune(run, policy, own=own, seen=seen)
                    is_due = any(error.retryable for error in result.errors)
            except TierckptError as error:
                is_due = error.retryable
                level = logging.DEBUG if is_due or is_reported(run) else logging.WARNING
                log.log(level, "%s is not pruned: %s", run.uri, error)
            for path, _ in notes:
                with suppress(FileNotFoundError):
                    if not is_due or time.time() - path.stat().st_mtime > DUE_SECONDS_MAX:
                        path.unlink()
        return await asyncio.to_thread(has_due, self._root)

    async def _look_at_run(self, run: Location, *, level: int = logging.WARNING) -> _Run:

        async def look(names: Iterable[str]) -> list[_RunEntry]:
            return await asyncio.gather(*(self._read_location(_RunEntry(name, run.child(name))) for name in names))

        names = await self._run_selector.names(run, level=level)
        return await look(names), await look(await self._run_selector.windows(run, level=level))

    async def _judge(
        self,
        seen: list[_RunEntry],
        policy: Policy,
        dry_run: bool,
        branch: Branch | None,
        noted: Branch | None,
        own: Sequence[int],
        beside: Sequence[CheckpointCopy] = (),
    ) -> PruneResult:
        """``beside``: copies that count and are kept."""
        if branch is None:
            known = ((branch_of(found, one.name), step_of(one.name)) for one in seen for _, found in one.copies)
            branch = current_branch(known, noted)
        copies = await self.copies_of(seen, branch)
        result = PruneResult([], {one.name: one.other for one in seen if one.other})
        locations = {one.name: one.location for one in seen}
        for verdict in policy.judge([*copies, *beside], drains=self._settings.drain, own=own):
            if verdict.copy.name not in locations:
                continue
            result.outcomes.append(await self._carry_out(verdict, locations[verdict.copy.name], dry_run, result.errors))
        for one in seen:
            if one.begun or one.is_empty:
                await self._finish(one, dry_run, result)
        return result

    async def _read_location(self, seen: _RunEntry) -> _RunEntry:
        location = seen.location
        if location.scheme == "file" and await asyncio.to_thread(Path(location.path).is_symlink):
            seen.other = "a link"
            return seen
        async with self._gate:
            directory = local_dir(self._root, location)
            if not await asyncio.to_thread(directory.is_symlink):
                seen.local = await self._read(lambda: asyncio.to_thread(local_commit.read_local_manifest, directory))
            try:
                await self._look_at_shared(seen)
            except StoreError as error:
                if self._settings.drain:
                    raise
                log.info("%s: there is no shared tier to look at (%s)", location.uri, error)
        if seen.local is None and seen.shared is None and not (seen.begun or seen.is_empty) and not seen.other:
            seen.other = "without a commit of tierckpt"
        return seen

    async def _look_at_shared(self, seen: _RunEntry) -> None:
        store = self._store(seen.location)
        seen.shared = await self._read(lambda: shared_commit.read_shared_manifest(store))
        if seen.shared is not None:
            return
        if await is_stock(store):
            seen.other = "saved by stock PyTorch"
            return
        seen.begun = await retention.unfinished_removals(store)
        mark = Path(seen.location.path, PRIVATE_DIR)
        if seen.location.scheme == "file" and await asyncio.to_thread(mark.is_dir):
            seen.is_empty = not [info async for info in store.list()]

    async def _read(self, read: Callable[[], Awaitable[Manifest | None]]) -> Manifest | None:
        """Log a damaged manifest and keep its checkpoint (N5)."""
        try:
            return await read()
        except ManifestError as error:
            log.warning("retention leaves it alone: %s", error)
            return None

    async def copies_of(self, seen: Sequence[_RunEntry], branch: Branch | None) -> list[CheckpointCopy]:
        journaled_uris = {entry.uri for entry in await asyncio.to_thread(self._journal.entries)}
        links = [one.location for one in seen if one.other == "a link"]  # ``best -> step-100`` keeps step 100
        linked = await asyncio.to_thread(lambda: {Path(link.path).resolve(): link.name for link in links})
        base = _base_of_log(seen, branch)
        copies = []
        for one in seen:
            step = step_of(one.name)
            if step is None:
                one.other = one.other or ("no step number in its name" if one.local or one.shared else "")
                continue
            obstacle = self._obstacle_of(one.location, journaled_uris, linked) or (HAS_LOG if step == base else "")
            directory = local_dir(self._root, one.location)
            for tier, manifest in one.copies:
                attempt, is_local = manifest.attempt, tier is Tier.LOCAL
                is_shared = one.shared is not None and one.shared.attempt == attempt
                is_drained = is_local and (is_shared or local_commit.is_evictable(directory, attempt))
                copies.append(
                    CheckpointCopy(
                        one.name,
                        step,
                        tier,
                        is_drained=is_drained,
                        held=obstacle,
                        attempt=attempt,
                        size_bytes=manifest.size_bytes,
                        is_replicated=is_local and not is_drained and local_commit.is_replicated(directory, attempt),
                        is_abandoned=branch is not None and not branch.holds(branch_of(manifest, one.name), step),
                    )
                )
        return await self._with_health(copies, {one.name: one for one in seen})

    def _obstacle_of(self, location: Location, journaled_uris: set[str], linked: dict[Path, str]) -> str:
        if location.uri in journaled_uris:
            return "being saved or drained"
        if location.scheme == "file" and Path(location.path).resolve() in linked:
            return f"{linked[Path(location.path).resolve()]} links to it"
        return "being read" if read_lease.is_read(self._root, local_dir(self._root, location)) else ""

    async def _with_health(self, copies: list[CheckpointCopy], seen: dict[str, _RunEntry]) -> list[CheckpointCopy]:
        """Check each tier down to its first whole copy: older ones protect nothing."""
        known: dict[tuple[str, Tier], Health] = {}
        manifests = {(one.name, tier): manifest for one in seen.values() for tier, manifest in one.copies}
        for tier in (Tier.LOCAL, Tier.SHARED):
            here = [copy for copy in copies if copy.tier is tier]
            here.sort(key=lambda copy: (not copy.is_abandoned, copy.step), reverse=True)
            for copy in here:
                known[copy.name, tier] = await self._health(seen[copy.name].location, tier, manifests[copy.name, tier])
                if known[copy.name, tier] is Health.WHOLE:
                    break
        return [replace(copy, health=known.get((copy.name, copy.tier))) for copy in copies]

    async def _health(self, location: Location, tier: Tier, manifest: Manifest) -> Health:
        if tier is Tier.SHARED:
            return await retention.shared_health(self._store(location), manifest)
        return await asyncio.to_thread(retention.local_health, local_dir(self._root, location), manifest)

    async def _carry_out(
        self, verdict: Verdict, location: Location, dry_run: bool, errors: list[TierckptError]
    ) -> Outcome:
        copy = verdict.copy
        if not verdict.remove:
            return Outcome(copy, KEPT, verdict.reason)
        if dry_run:
            return Outcome(copy, WOULD_GO, verdict.reason)
        try:
            obstacle = await self._remove(copy, location)
        except TierckptError as error:
            errors.append(error)
            text = "%s stays on the %s tier: %s"
            log_failure(log, error, text, location.uri, copy.tier, error, level=logging.WARNING)
            return Outcome(copy, FAILED, error.message)
        if obstacle:
            return Outcome(copy, KEPT, obstacle)
        log.info("removed %s from the %s tier: %s", location.uri, copy.tier, verdict.reason)
        return Outcome(copy, REMOVED, verdict.reason)

    async def _remove(self, copy: CheckpointCopy, location: Location) -> str:
        """Return the reason if the copy must stay now (N3)."""
        directory = local_dir(self._root, location)
        with read_lease.removing(self._root, directory) as free:
            if not free:
                return "being read"
            if location.uri in {entry.uri for entry in await asyncio.to_thread(self._journal.entries)}:
                return "being saved or drained"
            if copy.tier is Tier.LOCAL:
                is_removed = await to_completion(asyncio.to_thread(local_commit.remove_local, directory, copy.attempt))
                return "" if is_removed else "saved again meanwhile"
            store = self._store(location)
            manifest = await shared_commit.read_shared_manifest(store)
            if manifest is None or manifest.attempt != copy.attempt:
                return "saved again meanwhile"
            if not await retention.remove_shared(store, manifest):
                return "another save has claimed it"
            await asyncio.to_thread(remove_empty, location)
            return ""

    async def _finish(self, seen: _RunEntry, dry_run: bool, result: PruneResult) -> None:
        result.leftovers.append(seen.name)
        if dry_run:
            return
        try:
            for removal in seen.begun:
                await retention.finish_shared(self._store(seen.location), removal)
            await asyncio.to_thread(remove_empty, seen.location)
        except TierckptError as error:
            result.errors.append(error)
            log_failure(log, error, "leftovers of %s stay: %s", seen.location.uri, error, level=logging.WARNING)


def note_due(local_root: Path, run: Location, token: str, *, is_shared: bool) -> None:
    """Make ``run`` due until a prune that begins after this, even after a kill.

    ``token``: of the journal entry. ``is_shared``: this node also prunes the shared tier.
    """
    path = local_root / layout.RETENTION_DIR / f"{token}.json"
    if not path.exists():
        make_dirs(path.parent)
        durable_write(path, seal({"run": run.uri, "shared": is_shared}))


def has_due(local_root: Path) -> bool:
    return bool(matching(local_root / layout.RETENTION_DIR, "*.json"))


def _due_runs(local_root: Path) -> dict[Location, list[tuple[Path, bool]]]:
    found: dict[Location, list[tuple[Path, bool]]] = {}
    for path in matching(local_root / layout.RETENTION_DIR, "*.json"):
        try:
            note = unseal(read_whole(path, RECORD_BYTES_MAX), _DUE_FIELDS, where=str(path))
            found.setdefault(parse_uri(str(note["run"])), []).append((path, bool(note["shared"])))
        except ObjectNotFoundError:
            continue
        except TierckptError as error:
            log.warning("%s", error)
            path.unlink(missing_ok=True)
    return found


def _rule_of_newest(seen: Sequence[_RunEntry]) -> tuple[Policy, list[int]]:
    manifests = [(one, manifest) for one in seen for _, manifest in one.copies]
    start = max((order_of(manifest) for _, manifest in manifests), default=0)
    if not start:
        return Policy(), []
    own = {
        step: manifest
        for one, manifest in manifests
        if order_of(manifest) == start and (step := step_of(one.name)) is not None
    }
    return (Policy.from_manifest(own[max(own)]), sorted(own)) if own else (Policy(), [])


def remove_empty(location: Location) -> None:
    if location.scheme != "file":
        return
    directory = Path(location.path)
    for torn in matching(directory / layout.REMOVED_DIR, ".*.tmp"):
        torn.unlink(missing_ok=True)
    for name in (*local_commit.PRIVATE_DIRS, PRIVATE_DIR, "."):
        try:
            (directory / name).rmdir()
        except OSError:
            continue


def finish_local(local_root: Path, journal: Journal) -> list[Path]:
    """Finish interrupted removals on the local tier, in one walk. Safe with live processes."""
    found = []
    journaled_directories = {local_dir(local_root, parse_uri(entry.uri)) for entry in journal.entries()}
    for directory in list(retention.marked_directories(local_root / "checkpoints")):
        if directory in journaled_directories or not _is_leftover(directory):
            continue
        try:
            with read_lease.removing(local_root, directory) as free:
                if free and local_commit.finish_removal(directory):
                    found.append(directory)
                    log.info("finished the removal of %s that was cut short", directory)
        except (OSError, TierckptError) as error:
            log.warning("leftovers in %s stay: %s", directory, error)
    return found


def _base_of_log(seen: Sequence[_RunEntry], branch: Branch | None) -> int | None:
    """Return the newest step of ``branch`` with a gradient log, which may reach further."""
    steps = []
    for one in seen:
        step, found = step_of(one.name), one.local or one.shared
        if step is None or found is None or BASE_NOTE not in found.notes:
            continue
        if branch is None or branch.holds(branch_of(found, one.name), step):
            steps.append(step)
    return max(steps, default=None)


def _is_leftover(directory: Path) -> bool:
    if (directory / layout.REMOVED_DIR).is_dir():
        return True
    return not any(name != "lock" for _, _, names in os.walk(directory) for name in names)
