"""Drains a journal entry to the shared tier, and commits when all parts are there.

Each rank's mover sends its own files, then a part record. The coordinator's mover also puts the pending manifest under
``pending/``. The mover that finds every part commits, without a rank or a collective. A restarted mover repeats its
steps, which are idempotent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..checkpoint import branches, local_commit, prune, retention, run_records, shared_commit
from ..checkpoint.journal import DRAIN_STATES, READY, SET_ASIDE_STATES, Journal, JournalEntry
from ..checkpoint.retention import Policy
from ..config import Settings
from ..disk import read_lease
from ..disk.durable import make_dirs, translated
from ..disk.file_lock import lock_async
from ..disk.priority import BACKGROUND_NICE
from ..errors import (
    AlreadyCommittedError,
    CapacityError,
    CommitAbandonedError,
    EndpointError,
    ManifestError,
    ObjectNotFoundError,
    PermissionDeniedError,
    TierckptError,
)
from ..format import manifest as manifests
from ..format.layout import (
    PENDING_DIR,
    PRIVATE_DIR,
    SHARD_SUFFIX,
    Location,
    adopted_dir,
    local_dir,
    parse_uri,
    part,
    pending,
)
from ..format.manifest import Manifest
from ..poll import SHARED, Poll
from ..quantities import human_bytes
from ..redaction import redact
from ..stores import open_store, retry, verified_read
from ..stores.base import Store, to_completion
from ..stores.retry import Retries, StoreBreaker
from ..stores.verified_read import again, available, stored_bytes
from ..telemetry import COMMITS, DRAIN_SECONDS, ERRORS, RETRIES, ProgressCounter, logger
from ..types import Progress, ProgressListener, Tier
from . import write_back
from .active_drain import COMMITTING, OTHER_RANKS, SILENT_SECONDS, STORE, ActiveDrain
from .file_transfer import error_to_report, send
from .rate_limiter import RateLimiter

log = logger("drain")

PAUSE_SECONDS_MIN = 0.5
PASSING_SECONDS = 7 * 86400.0
"""Time limit of a drain with an unreachable, full or refusing store: a long weekend and a week."""
NOTE_SECONDS = 3600.0
WATCH_SECONDS = 0.5
STORES_MAX = 16


@dataclass
class DrainResult:
    """``outcome``: ``committed``, ``superseded``, ``held`` by another mover, or ``waiting`` for other ranks' parts."""

    token: str
    uri: str
    outcome: str
    size_bytes: int = 0


class Drainer:
    """Drains journal entries. One per mover; all methods run on its event loop."""

    def __init__(self, settings: Settings, listener: ProgressListener) -> None:
        self.settings = settings
        self.journal = Journal(settings.local_root)
        self.listener = listener
        self._stores: dict[Location, Store] = {}
        self._opening = threading.Lock()
        self.retries = Retries(settings)
        self.limiter = RateLimiter(
            settings.drain_bytes_per_second, settings.concurrency, local_root=settings.local_root, nice=BACKGROUND_NICE
        )
        self.active: dict[str, ActiveDrain] = {}
        self._watch: asyncio.Task[None] | None = None

    def store(self, location: Location) -> Store:
        with self._opening:
            store = self._stores.pop(location, None) or open_store(location, self.settings, self.retries)
            self._stores[location] = store
            if len(self._stores) > STORES_MAX:
                del self._stores[next(iter(self._stores))]
        return store

    def directory(self, location: Location) -> Path:
        return local_dir(self.settings.local_root, location)

    def breaker(self, location: Location) -> StoreBreaker:
        return self.retries.breaker(f"{location.scheme}://{location.authority}")

    def is_away(self, run: Location) -> bool:
        """Whether the store has a logged outage or refusal that has not ended."""
        return self.retries.is_refused(run.uri) or self.breaker(run).is_reported

    async def _watch_silence(self) -> None:
        while self.active:
            await asyncio.sleep(WATCH_SECONDS)
            for drain in self.active.values():
                breaker, silent_seconds = self.breaker(parse_uri(drain.uri)), drain.silent_seconds
                if silent_seconds >= SILENT_SECONDS and breaker.ended_at < drain.moved_at:
                    cause = f"no answer to a drain for {silent_seconds:.0f} s"
                    since = time.time() - silent_seconds
                    breaker.report(cause, "Check that this node can reach it", since, ends_with_drain=True)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for store in self._stores.values():
            await store.close()
        self._stores.clear()
        self.retries.close()
        self.limiter.close()

    async def drain(self, token: str, *, patient: bool = True) -> DrainResult:
        """Drain one entry to its commit on the shared tier. An error is noted in the journal and raised.

        Args:
            patient: retry while the store is unavailable, and wait up to ``commit_timeout_seconds`` for other ranks'
                parts. False fails at the first obstacle.

        Raises:
            CommitAbandonedError: the other ranks' parts did not arrive.
            IntegrityError, AlreadyCommittedError, StoreError: the entry cannot be drained.
        """
        from tenacity import AsyncRetrying, retry_always, wait_random_exponential

        with self.journal.own(token) as owned:
            entry = await asyncio.to_thread(self.journal.read, token) if owned else None
            if entry is None or entry.state not in DRAIN_STATES:
                outcome = "committed" if owned and entry is None else "held"
                return DrainResult(token, entry.uri if entry is not None else "", outcome)
            begun, breaker = time.monotonic(), self.breaker(entry.location)
            drain = self._drain if entry.state == READY else partial(write_back.drain, self)
            work = partial(drain, entry, patient)
            active = self.active[token] = ActiveDrain(entry.uri, entry.rank, entry.size_bytes)
            self.retries.waiting_bytes[breaker.name] += entry.size_bytes
            if self._watch is None or self._watch.done():
                self._watch = asyncio.create_task(self._watch_silence(), name="watch drains")
            wait = wait_random_exponential(PAUSE_SECONDS_MIN, retry.PAUSE_SECONDS_MAX)
            pause = partial(self._pause, entry, active)
            try:
                outcome = await self._attempt(work, entry, active, patient)
                if not outcome:  # tenacity leaves objects in cycles, so the first attempt goes without it
                    async for one in AsyncRetrying(sleep=pause, wait=wait, retry=retry_always):
                        if one.retry_state.attempt_number > 1:
                            outcome = await self._attempt(work, entry, active, patient)
                        if outcome:
                            break
                        one.retry_state.set_result(None)
            except TierckptError as error:
                ERRORS.emit(1, operation="drain", error=type(error).__name__)
                await self._note_failure(entry, error, patient)
                raise
            finally:
                self.active.pop(token, None)
                self.retries.waiting_bytes[breaker.name] -= entry.size_bytes
            return await self._finish_drain(entry, outcome, begun)

    async def _attempt(
        self, work: Callable[[], Awaitable[str]], entry: JournalEntry, active: ActiveDrain, patient: bool
    ) -> str:
        """Return the outcome, "" if another attempt may succeed."""
        tried_at = time.monotonic()
        try:
            return await work()
        except TierckptError as error:
            if not (patient and error.retryable and await self._may_retry(entry, active, error, tried_at)):
                raise
        return ""

    async def _pause(self, entry: JournalEntry, active: ActiveDrain, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NOTE_SECONDS):
                if not await available(self.store(entry.location)):
                    active.next_try_at = time.monotonic() + seconds
                    await asyncio.sleep(seconds)

    async def _may_retry(self, entry: JournalEntry, active: ActiveDrain, error: TierckptError, tried_at: float) -> bool:
        """Return False after ``PASSING_SECONDS``."""
        RETRIES.emit(1, operation="drain")
        breaker = self.breaker(entry.location)
        if breaker.ended_at < tried_at:
            breaker.report(error.message, error.hint, time.time(), ends_with_drain=True)
        log.debug("%s: its drain waits for the store: %s", entry.uri, error)
        if time.monotonic() >= active.note_at:
            active.note_at = time.monotonic() + NOTE_SECONDS
            entry_noted = await asyncio.to_thread(self.journal.fail, entry.token, "", is_passing=True)
            if entry_noted is not None and time.time() - entry_noted.failing_since_unix_seconds > PASSING_SECONDS:
                return False
        active.enter(STORE, error)
        return True

    async def commit_if_complete(self, token: str) -> DrainResult:
        """Commit an entry with its files on the shared tier. ``waiting`` is no error."""
        with self.journal.own(token) as owned:
            entry = await asyncio.to_thread(self.journal.read, token) if owned else None
            if entry is None or entry.state != READY:
                return DrainResult(token, entry.uri if entry else "", "waiting")
            begun = time.monotonic()
            outcome = await self.try_commit(entry)
            if outcome is None:
                return DrainResult(token, entry.uri, "waiting")
            return await self._finish_drain(entry, outcome, begun)

    async def _finish_drain(self, entry: JournalEntry, outcome: str, begun: float) -> DrainResult:
        # A crash before the removal repeats both. Pruning skips runs with journal entries.
        await asyncio.to_thread(self._note_due, entry, None, is_shared=entry.rank == 0)
        await asyncio.to_thread(self.journal.remove, entry.token)
        seconds = time.monotonic() - begun
        DRAIN_SECONDS.emit(seconds)
        facts = {"uri": entry.uri, "rank": entry.rank, "size_bytes": entry.size_bytes, "seconds": round(seconds, 3)}
        self.breaker(entry.location).drained()
        self.retries.accepted(entry.location.parent.uri, "drain")
        log.info("drained %s (rank %d): %s", entry.uri, entry.rank, outcome, extra={**facts, "outcome": outcome})
        return DrainResult(entry.token, entry.uri, outcome, entry.size_bytes)

    def _note_due(self, entry: JournalEntry, manifest: Manifest | None, *, is_shared: bool) -> None:
        """Note that a run must be pruned, if its checkpoint (None: the local one) has a rule."""
        if entry.state != READY:
            return
        found = manifest or local_commit.read_sound_manifest(self.directory(entry.location))
        if found is not None and Policy.from_manifest(found):
            prune.note_due(self.settings.local_root, branches.run_of(entry.location), entry.token, is_shared=is_shared)

    async def _note_failure(self, entry: JournalEntry, error: TierckptError, patient: bool) -> None:
        """Note ``error`` in the journal; set aside an entry that fails for too long. The files stay."""
        # A server may repeat our credentials in its answer.
        text = redact(f"{type(error).__name__}: {error}")
        # An outage, expired credentials or an expired certificate may end by themselves.
        is_passing = error.retryable or isinstance(error, PermissionDeniedError | CapacityError | EndpointError)
        limit = PASSING_SECONDS if is_passing else self.settings.commit_timeout_seconds
        entry_noted = await asyncio.to_thread(
            self.journal.fail, entry.token, text, patience_seconds=limit if patient else math.inf, is_passing=is_passing
        )
        if entry_noted is not None and entry_noted.state in SET_ASIDE_STATES:
            log.error(
                "%s (%s) is set aside, as its drain failed for %.0f s: %s. It stays on this node; `tierckpt "
                "drain --retry` retries it, `tierckpt drain --forget %s` drops the drain",
                entry.uri,
                human_bytes(entry.size_bytes),
                time.time() - entry_noted.failing_since_unix_seconds,
                text,
                entry.uri,
            )
            error.is_logged = True

    async def _drain(self, entry: JournalEntry, patient: bool) -> str:
        with translated(self.directory(entry.location), is_above=True):
            try:
                if await asyncio.to_thread(self._is_replaced, entry):
                    return await self._clean_up_replaced(entry)
                if await self._was_cleaned_up(entry):
                    return "committed"
                await self.send_files(entry)
                # The timeout starts here: the rate limit may delay our own sending.
                return await self._await_commit(entry, self.settings.commit_timeout_seconds if patient else 0.0)
            except TierckptError as error:
                # A save that replaces this one may remove its files at any step.
                if error.retryable or not await asyncio.to_thread(self._is_replaced, entry):
                    raise
                return await self._clean_up_replaced(entry)

    async def _await_commit(self, entry: JournalEntry, timeout_seconds: float) -> str:
        active = self.active[entry.token]
        active.enter(COMMITTING)
        async for _ in Poll(timeout_seconds, SHARED):
            outcome = await self.try_commit(entry)
            if outcome is not None:
                return outcome
            active.enter(OTHER_RANKS)
        raise CommitAbandonedError(
            f"{entry.uri}: this rank's files are on the shared tier, but other ranks' parts are not",
            hint="A rank failed while saving, or its node has not drained yet; `tierckpt drain --wait` on each "
            "node retries, and the checkpoint stays uncommitted until then",
            rank=entry.rank,
            waited_seconds=timeout_seconds or None,
        )

    def _is_replaced(self, entry: JournalEntry) -> bool:
        """Return whether no commit of this node can name this entry's files any more.

        It was replaced if the local manifest does not name it and its files are missing, as only the replacing commit
        removes files. A crash just before the local commit leaves it unnamed, but with files. Clocks are not compared.
        """
        directory = self.directory(entry.location)
        try:
            local = local_commit.read_local_manifest(directory)
        except ManifestError:
            return False  # unknown: each chunk is verified as it is sent
        if entry.manifest is not None and not entry.is_fragment:
            return local is None or not is_commit_of(local, entry)
        if local is None or is_commit_of(local, entry):
            return False
        return not all((directory / file.key).exists() for file in entry.files)

    async def _clean_up_replaced(self, entry: JournalEntry) -> str:
        """Return ``superseded``, or ``committed`` if it was committed before.

        Objects on the shared tier are removed only while no manifest names them: another mover may be committing.
        """
        store, directory = self.store(entry.location), self.directory(entry.location)
        current = await shared_commit.read_shared_manifest(store)
        if current is not None and is_commit_of(current, entry):
            await branches.note_shared(self.store(branches.run_of(entry.location)), current)
            return "committed"
        log.info("%s: attempt %s was replaced before it was drained", entry.uri, entry.token)
        await asyncio.to_thread(self._forget_local, directory, entry)
        if entry.is_fragment or await self._pending_manifest(entry, store) is None:
            await self._delete_sent(entry, store)
        return "superseded"

    async def _delete_sent(self, entry: JournalEntry, store: Store) -> None:
        await store.delete(part(entry.token))
        for file in entry.files:
            await store.delete(file.key)

    def _forget_local(self, directory: Path, entry: JournalEntry) -> None:
        local_commit.discard_attempt(directory, entry.token, entry.manifest)
        with read_lease.removing(self.settings.local_root, directory) as free:
            if free:
                local_commit.remove_empty(directory)

    async def send_files(self, entry: JournalEntry) -> None:
        store, directory = self.store(entry.location), self.directory(entry.location)
        flow = self.limiter.flow(entry.created_unix_seconds)
        if (active := self.active.get(entry.token)) is not None:
            active.flow = flow
        progress = self.progress_of(entry)

        async def move(file: manifests.FileEntry) -> None:
            async with flow.slot():
                with progress.moving(file.path, file.size_bytes) as on_file:
                    path = directory / file.key
                    await again(store, partial(send, store, path, file, entry.chunk_size_bytes, on_file, flow))

        try:
            async with asyncio.TaskGroup() as group:
                for file in entry.files:
                    group.create_task(move(file))
        except BaseExceptionGroup as errors:
            raise error_to_report(errors) from None
        if entry.manifest is None:
            await store.put(part(entry.token), b"{}")
        elif entry.is_fragment:
            await store.put(part(entry.token), entry.manifest.encode())
        elif not entry.manifest.tokens <= {entry.token}:
            await store.put(pending(entry.manifest.attempt), entry.manifest.encode())
            await store.put(part(entry.token), b"{}")

    def progress_of(self, entry: JournalEntry) -> ProgressCounter:
        def note(progress: Progress) -> None:
            if (active := self.active.get(entry.token)) is not None:
                active.add_progress(progress.done_bytes)
            self.listener(progress)

        return ProgressCounter(note, f"drain {entry.uri}", entry.size_bytes)

    async def try_commit(self, entry: JournalEntry) -> str | None:
        """Commit if all parts are there. Return ``committed``, ``superseded``, or None if a part is missing.

        One mover of a node at a time, so that the newer of two attempts at one id is committed last.
        """
        if await self._was_cleaned_up(entry):
            return "committed"
        directory = self.directory(entry.location)
        lock = directory / PRIVATE_DIR / "commit.lock"
        await asyncio.to_thread(make_dirs, lock.parent)
        async with lock_async(lock, self.settings.commit_timeout_seconds, f"the commit of {entry.uri}"):
            if await asyncio.to_thread(self._is_replaced, entry):
                return await self._clean_up_replaced(entry)
            return await self._try_commit(entry)

    async def _try_commit(self, entry: JournalEntry) -> str | None:
        store, directory = self.store(entry.location), self.directory(entry.location)
        current = await shared_commit.read_shared_manifest(store)
        if current is not None and is_commit_of(current, entry):
            if entry.manifest is not None:
                await shared_commit.commit_shared(store, entry.location, current)
            await store.delete(part(entry.token))
            await self._after_commit(entry, current)
            return "committed"
        manifest = await self._manifest(entry, store)
        if manifest is None:
            return await self._handle_missing_part(entry, store)
        if not await self.all_parts(manifest, entry, store):
            return None
        try:
            committed_at = await shared_commit.commit_shared(store, entry.location, manifest)
        except AlreadyCommittedError:
            if await self._is_superseded(manifest, store):
                return "superseded"
            if not await shared_commit.is_abandoned(store, entry.location, manifest):
                raise
            log.info("%s: the job went back to an older step, and saved this one again", entry.uri)
            await asyncio.to_thread(local_commit.mark_superseded, directory, manifest.attempt)
            await self._delete_sent(entry, store)
            return "superseded"
        COMMITS.emit(1, tier=Tier.SHARED)
        await self._after_commit(entry, manifest, committed_at)
        return "committed"

    async def _handle_missing_part(self, entry: JournalEntry, store: Store) -> str | None:
        if await stored_bytes(store, part(entry.token)) >= 0:
            return None
        # The manifest was put before the part was removed, so this read cannot miss it.
        current = await shared_commit.read_shared_manifest(store)
        if current is None:
            return None
        if not is_commit_of(current, entry):
            return "superseded"
        await self._after_commit(entry, current)
        return "committed"

    async def _was_cleaned_up(self, entry: JournalEntry) -> bool:
        """Return whether another mover of this node committed, and no cleanup is left.

        Removes the part record too: the committer may have been killed.
        """
        if entry.manifest is not None and not entry.is_fragment:
            return False
        directory = self.directory(entry.location)
        local = await asyncio.to_thread(local_commit.read_sound_manifest, directory)
        if local is None or not is_commit_of(local, entry):
            return False
        if not await asyncio.to_thread(local_commit.is_drained, directory, local.attempt):
            return False
        await self.store(entry.location).delete(part(entry.token))
        return True

    async def _manifest(self, entry: JournalEntry, store: Store) -> Manifest | None:
        if entry.is_fragment:
            return await self._merge_parts(entry, store)
        if entry.manifest is not None:
            return entry.manifest
        return await self._pending_manifest(entry, store)

    async def _pending_manifest(self, entry: JournalEntry, store: Store) -> Manifest | None:
        # A stale listing can delay a commit, but decides nothing: listed names are read.
        async for info in store.list(PENDING_DIR):
            try:
                candidate = await shared_commit.read_manifest_at(store, info.key)
            except ObjectNotFoundError:
                continue
            if entry.token in candidate.tokens:
                return candidate
        return None

    async def is_named(self, entry: JournalEntry) -> bool:
        """Whether a committed or pending manifest on the shared tier names this entry's files."""
        store = self.store(entry.location)
        current = await shared_commit.read_shared_manifest(store)
        is_committed = current is not None and entry.token in current.tokens
        return is_committed or await self._pending_manifest(entry, store) is not None

    async def remove_unnamed(self, entry: JournalEntry) -> None:
        """Delete the shards from the shared tier, unless a manifest there names them."""
        if await self.is_named(entry):
            return
        store, adopted = self.store(entry.location), f"{adopted_dir(entry.token)}/"
        async for info in store.list():
            if info.key.endswith(f"-{entry.token}{SHARD_SUFFIX}") or info.key.startswith(adopted):
                await store.delete(info.key)

    async def _merge_parts(self, entry: JournalEntry, store: Store) -> Manifest | None:
        own = entry.manifest
        if own is None:
            return None
        fragments = []
        for rank in range(own.world_size):
            try:
                fragments.append(await shared_commit.read_manifest_at(store, part(f"{own.attempt}-{rank}")))
            except ObjectNotFoundError:
                return None
        return manifests.merge(fragments)

    async def all_parts(self, manifest: Manifest, entry: JournalEntry, store: Store) -> bool:
        if entry.is_fragment:
            return True
        for token in manifest.tokens - {entry.token}:
            if await stored_bytes(store, part(token)) < 0:
                return False
        return True

    async def _is_superseded(self, manifest: Manifest, store: Store) -> bool:
        """Whether the committed manifest is a later save of ours, not a rival."""
        current = await shared_commit.read_shared_manifest(store)
        replaced = await shared_commit.replaced_by_claim(store)
        return manifest.attempt in replaced or (current is not None and manifest.attempt in current.replaces)

    async def _after_commit(self, entry: JournalEntry, manifest: Manifest, committed_at: float | None = None) -> None:
        """``committed_at``: when this mover made the commit; None if another did."""
        store, directory = self.store(entry.location), self.directory(entry.location)
        run = self.store(branches.run_of(entry.location))
        await branches.note_shared(run, manifest)
        if committed_at is not None or (entry.manifest is not None and not entry.is_fragment):
            root = self.settings.local_root
            await run_records.note_shared(root, entry.location, manifest, store, run, committed_at)
        local = await asyncio.to_thread(local_commit.read_sound_manifest, directory)
        if local is None or local.attempt != manifest.attempt:
            await self.adopt(store, directory, manifest)
        await to_completion(asyncio.to_thread(local_commit.mark_drained, directory, manifest.attempt))
        if await asyncio.to_thread(_is_committed_elsewhere, directory, entry, manifest):
            await to_completion(asyncio.to_thread(local_commit.remove_local, directory, manifest.attempt))
            parent = entry.location.parent
            await asyncio.to_thread(retention.drop_superseded, self.settings.local_root, self.journal, parent, entry)
        if committed_at is not None:
            await asyncio.to_thread(self._note_due, entry, manifest, is_shared=True)

    async def adopt(self, store: Store, directory: Path, manifest: Manifest) -> None:
        """Record on this node a commit of the shared tier, after verifying its metadata."""
        metadata = {}
        for item in manifest.metadata:
            metadata[item.path] = await store.get(item.key)
            verified_read.check_bytes(metadata[item.path], item, manifest.chunk_size_bytes, store.uri)
        await to_completion(asyncio.to_thread(local_commit.record_commit, directory, manifest, metadata))


def _is_committed_elsewhere(directory: Path, entry: JournalEntry, manifest: Manifest) -> bool:
    shards = [file for file in manifest.files if file.path.endswith(SHARD_SUFFIX)]
    had = any(file.path.endswith(SHARD_SUFFIX) for file in entry.files)
    return had and not any((directory / file.key).exists() for file in shards)


def is_commit_of(manifest: Manifest, entry: JournalEntry) -> bool:
    """A coordinator without a shard is matched by the attempt."""
    return entry.token in manifest.tokens or (entry.manifest is not None and entry.manifest.attempt == manifest.attempt)
