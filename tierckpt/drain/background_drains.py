"""The drains of one mover, as tasks of its event loop.

A drain waits while its store is unavailable. ``submit_due`` retries other failures, after a pause that doubles.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TypeVar

from ..checkpoint import local_commit, retention, shared_commit
from ..checkpoint.journal import DRAIN_STATES, READY, SET_ASIDE_STATES, Journal, JournalEntry, set_aside_error
from ..checkpoint.prune import finish_local
from ..checkpoint.select import store_key
from ..config import Settings
from ..disk.local_root import clear_leftovers
from ..errors import (
    BucketNotFoundError,
    CapacityError,
    CommitAbandonedError,
    EndpointError,
    OperationTimeoutError,
    PermissionDeniedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from ..format.layout import Location, parse_uri
from ..format.manifest import Manifest
from ..poll import LOCAL, SHARED, Poll
from ..telemetry import log_failure, logger
from ..types import Json, Tier
from .active_drain import COMMITTING, OTHER_RANKS
from .drainer import Drainer, DrainResult, is_commit_of
from .recovery import recover_entry

log = logger("drain")

T = TypeVar("T")

OTHER_RANKS_SECONDS = 10.0
ANSWER_SECONDS_MIN = 0.5
"""Minimum timeout of store requests when ``wait`` is nearly over."""
REFUSAL_ERRORS = (PermissionDeniedError, EndpointError, BucketNotFoundError, CapacityError)
"""Errors of a store that concern all checkpoints of a run."""
RETRY_SECONDS_MIN = 5.0
RETRY_SECONDS_MAX = 300.0
ERRORS_MAX = 20
OUTCOMES_MAX = 1024


def _remember(known: dict[str, T], key: str, value: T) -> None:
    known[key] = value
    if len(known) > OUTCOMES_MAX:
        del known[next(iter(known))]


class BackgroundDrains:
    """Not thread-safe: every coroutine runs on the event loop that created it."""

    def __init__(self, settings: Settings, drainer: Drainer) -> None:
        self.settings = settings
        self._drainer = drainer
        self._drains: dict[str, asyncio.Task[DrainResult]] = {}
        self._failures: dict[str, tuple[str, TierckptError]] = {}
        self._retries: dict[str, tuple[int, float]] = {}
        """Consecutive failures and the time (monotonic seconds) of the next try, by token."""
        self.errors: deque[Json] = deque(maxlen=ERRORS_MAX)
        self.drained = asyncio.Event()
        """Set when a drain succeeds; its waiter clears it."""
        self._drained_to: set[tuple[str, str]] = set()
        self._not_waited_for: set[str] = set()
        self.committed_at: dict[str, float] = {}
        """When (monotonic seconds) this process saw the commit on the shared tier, by URI."""

    @property
    def journal(self) -> Journal:
        return self._drainer.journal

    async def close(self) -> None:
        """Stop every drain; their journal entries stay."""
        for task in self._drains.values():
            task.cancel()
        await asyncio.gather(*self._drains.values(), return_exceptions=True)
        await self._drainer.close()

    async def send_linked(self, entry: JournalEntry) -> bool:
        """Return False if copies are needed."""
        store, directory = self._drainer.store(entry.location), self._drainer.directory(entry.location)
        keys = [file.key for file in entry.files]
        is_linked = bool(keys) and await store.link(keys[0], directory / keys[0])
        if is_linked:
            await self._drainer.send_files(entry)
        return is_linked

    @property
    def draining(self) -> Collection[str]:
        return self._drains.keys()

    @property
    def active(self) -> list[Json]:
        return [drain.to_json() for drain in self._drainer.active.values()]

    @property
    def is_idle(self) -> bool:
        return not (self._drains or self._retries)

    def submit_due(self, entries: Sequence[JournalEntry]) -> None:
        """Start draining ``entries``, except failed ones that are in a pause."""
        ready = [entry.token for entry in entries if entry.state in DRAIN_STATES]
        self._retries = {token: self._retries[token] for token in ready if token in self._retries}
        for token in ready:
            if time.monotonic() >= self._retries.get(token, (0, 0.0))[1]:
                self.submit(token)

    def submit(self, token: str) -> asyncio.Task[DrainResult]:
        """Start a drain in the background. ``wait`` raises its error."""
        if token not in self._drains:
            task = asyncio.create_task(self._drain(token), name=f"drain {token}")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # kept in _failures
            self._drains[token] = task
        return self._drains[token]

    async def recover(self) -> None:
        """Drain finished saves of ended processes, and remove their other shards.

        Safe while other processes save and drain: each holds the locks of its entries.
        """
        await asyncio.to_thread(finish_local, self.settings.local_root, self.journal)
        root = self.settings.local_root
        for folder in (self.journal.directory, root / "checkpoints", root / "written"):
            await asyncio.to_thread(clear_leftovers, folder)
        for entry in await asyncio.to_thread(self.journal.entries):
            if await recover_entry(entry, self._drainer) and self.settings.drain:
                self.submit(entry.token)

    async def _drain(self, token: str) -> DrainResult:
        uri = ""
        try:
            entry = await asyncio.to_thread(self.journal.read, token)
            uri = entry.uri if entry else ""
            result = await self._drainer.drain(token)
            if result.outcome == "committed" and uri:  # "": another mover was first
                _remember(self.committed_at, uri, time.monotonic())
                self._drained_to.add(store_key(parse_uri(uri)))
            self._retries.pop(token, None)
            self.drained.set()
            return result
        except Exception as error:
            count = self._retries.get(token, (0, 0.0))[0] + 1
            pause_seconds = min(RETRY_SECONDS_MIN * 2 ** min(count - 1, 10), RETRY_SECONDS_MAX)
            self._retries[token] = count, time.monotonic() + pause_seconds
            if isinstance(error, TierckptError):
                self._log_failure(uri, error, is_first=count == 1)
                _remember(self._failures, token, (uri, error))
                self.errors.append({"at_unix_seconds": time.time(), **error.to_json()})
            else:
                log.exception("drain of %s failed; it will be retried", uri or token)
            raise
        finally:
            self._drains.pop(token, None)

    def _log_failure(self, uri: str, error: TierckptError, *, is_first: bool) -> None:
        """Log one ERROR per run if its store refuses requests, else the first of an entry."""
        is_local = error.context.get("tier") == Tier.LOCAL
        if isinstance(error, REFUSAL_ERRORS) and not is_local and uri:
            self._drainer.retries.refused(parse_uri(uri).parent.uri, "drain", error)
        error.is_logged |= not is_first
        log_failure(log, error, "drain of %s failed: %s", uri, error, level=logging.ERROR)
        error.is_logged = True

    async def promote_newest(self, run: Location | None = None) -> list[JournalEntry]:
        """Start draining the newest local-only checkpoint of each run."""
        return await asyncio.to_thread(retention.promote_newest, self.settings.local_root, self.journal, run)

    async def drop_superseded(self, run: Location | None = None) -> None:
        await asyncio.to_thread(retention.drop_superseded, self.settings.local_root, self.journal, run)

    async def drain_now(self, token: str) -> bool:
        """Return False if files of other ranks are missing."""
        result = await self._drainer.commit_if_complete(token)
        if result.outcome == "waiting":
            return False
        _remember(self.committed_at, result.uri, time.monotonic())
        return True

    async def drain_all(self, *, patient: bool) -> tuple[list[DrainResult], list[TierckptError]]:
        entries = await asyncio.to_thread(self.journal.entries)
        ready = [entry for entry in entries if entry.state in DRAIN_STATES]
        results = await asyncio.gather(
            *(self._drainer.drain(entry.token, patient=patient) for entry in ready), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, TierckptError):
                raise error
        drained = [result for result in results if isinstance(result, DrainResult)]
        return drained, [error for error in errors if isinstance(error, TierckptError)]

    async def prefer_newest(self) -> None:
        self._drainer.limiter.prefer_newest()
        self._retries.clear()

    async def idle(self, timeout_seconds: float) -> list[JournalEntry]:
        """Wait until no drain of this process runs. Return the entries of drains that still run at the timeout.

        For other ranks' parts it waits at most ``OTHER_RANKS_SECONDS``: their rank may have died.
        """
        deadline = time.monotonic() + timeout_seconds
        patience = time.monotonic() + min(timeout_seconds, OTHER_RANKS_SECONDS)
        while time.monotonic() < deadline and not self._drainer.limiter.paused:
            awaited = {token: drain for token, drain in self._drains.items() if token not in self._not_waited_for}
            active = self._drainer.active.items()
            sending = awaited.keys() - {token for token, drain in active if drain.state in (COMMITTING, OTHER_RANKS)}
            if not awaited or (not sending and time.monotonic() > patience):
                break
            await asyncio.wait(awaited.values(), timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        entries = await asyncio.to_thread(self.journal.entries)
        return [entry for entry in entries if entry.token in self._drains]

    async def ignore_running(self) -> None:
        """Make ``idle`` ignore the drains that run now."""
        self._not_waited_for = {*self._drains}

    async def wait(self, location: Location, tier: Tier, timeout_seconds: float) -> None:
        """Wait until the newest save to ``location`` is committed on ``tier``.

        Raises:
            OperationTimeoutError: not within ``timeout_seconds``; names the number of pending entries.
            TierckptError: the drain failed permanently.
        """
        deadline = time.monotonic() + timeout_seconds
        idle_rounds = 0
        self._forget_passing(location)
        may_fail = True  # only the outcome of an attempt after this call is raised
        async for _ in Poll(timeout_seconds, LOCAL if tier is Tier.LOCAL else SHARED):
            entries = await asyncio.to_thread(self._pending_entries, location)
            directory = self._drainer.directory(location)
            local = await asyncio.to_thread(local_commit.read_sound_manifest, directory)
            if tier is Tier.LOCAL:
                if local is not None and all(is_commit_of(local, entry) for entry in entries):
                    return
            else:
                if may_fail and self._forget_passing(location):
                    may_fail = False
                for _, error in self.take_failures({location.uri}).values():
                    raise error
                if not entries and await self._is_committed(location, local, deadline - time.monotonic()):
                    return
                idle_rounds = idle_rounds + 1 if local is not None and not entries else 0
                if idle_rounds > 2:
                    for entry in await asyncio.to_thread(self.journal.entries):
                        if entry.uri == location.uri and entry.state in SET_ASIDE_STATES:
                            raise set_aside_error(entry)
                    raise CommitAbandonedError(
                        f"{location.uri} is committed on the local tier only and no process drains it",
                        hint="It was saved with drain=False, or its interval keeps it here (`tierckpt drain` sends the "
                        "newest), or another save of the same id was committed on the shared tier",
                    )
                for entry in entries:
                    if entry.state == READY:
                        self.submit(entry.token)
        raise OperationTimeoutError(
            f"{location.uri} is not committed on the {tier} tier after {round(timeout_seconds, 1):g} s",
            hint="`tierckpt status` shows the journal and the last error",
            tier=tier,
            draining=len(entries),
            last_error=next((entry.error for entry in entries if entry.error), None),
        )

    def _pending_entries(self, location: Location) -> list[JournalEntry]:
        found = []
        for entry in self.journal.entries():
            if entry.uri != location.uri or entry.state in SET_ASIDE_STATES:
                continue
            if entry.state != READY:
                with self.journal.own(entry.token) as dead:
                    if dead:
                        continue  # its saver is dead: recover() removes it
            found.append(entry)
        return found

    async def _is_committed(self, location: Location, local: Manifest | None, timeout_seconds: float) -> bool:
        """Whether the shared tier has our local attempt, or any attempt if this node has none."""
        directory = self._drainer.directory(location)
        if local is not None and await asyncio.to_thread(local_commit.is_drained, directory, local.attempt):
            return True
        try:
            async with asyncio.timeout(max(ANSWER_SECONDS_MIN, timeout_seconds)):
                shared = await shared_commit.read_shared_manifest(self._drainer.store(location))
        except (StoreUnavailableError, TimeoutError):
            return False
        return shared is not None and (local is None or local.attempt == shared.attempt)

    def _forget_passing(self, location: Location) -> bool:
        """Forget temporary failures, so that their drains are retried. Return False if there are none."""
        passing = [
            token
            for token, (uri, error) in self._failures.items()
            if uri == location.uri and self.is_transient(location, error)
        ]
        for token in passing:
            del self._failures[token]
        return bool(passing)

    def take_failures(self, uris: set[str]) -> dict[str, tuple[str, TierckptError]]:
        taken = {token: failure for token, failure in self._failures.items() if failure[0] in uris}
        for token in taken:
            del self._failures[token]
        return taken

    def is_transient(self, location: Location, error: TierckptError) -> bool:
        """Whether ``error`` may be temporary: this process has drained to that store before."""
        is_local = error.context.get("tier") == Tier.LOCAL
        return isinstance(error, StoreError) and not is_local and store_key(location) in self._drained_to
