"""Finds the attempts that a new save replaces."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from ..checkpoint import catalog, local_commit, shared_commit
from ..checkpoint.retention import nearest_existing
from ..checkpoint.select import Selector, store_key
from ..disk.durable import refuse_file
from ..drain.drainer import Drainer
from ..errors import ManifestError, StoreError, StoreUnavailableError
from ..format.layout import Location
from ..stores.base import Store
from ..telemetry import logger
from ..types import Tier

log = logger("mover")

PROBE_TIMEOUT_SECONDS = 10.0
PROBE_SILENT_SECONDS = 0.5
REPORT_SECONDS = 8.0
SILENT_SECONDS = 60.0
"""Time after an unanswered save during which its store gets only ``PROBE_SILENT_SECONDS``."""


class ReplacedAttempts:
    def __init__(self, drainer: Drainer, selector: Selector) -> None:
        self._drainer, self._selector = drainer, selector
        self._silent_until: dict[tuple[str, str], float] = {}
        self._asking: list[tuple[tuple[str, str], float, asyncio.Timeout]] = []
        """Stores being queried, and the loop's time when each counts as silent."""
        self._blind: set[Location] = set()

    def local_attempts(self, location: Location) -> tuple[bool, set[str]]:
        """Return whether the local tier has a checkpoint, and this node's attempts. Blocking."""
        directory = self._drainer.directory(location)
        try:
            local = local_commit.read_local_manifest(directory)
        except (ManifestError, StoreError) as error:
            # The commit quarantines it: the journal names its entries by that manifest.
            log.warning("%s: the local checkpoint is unreadable, a new save replaces it: %s", location, error)
            return False, self._attempts_in_journal(location)
        if local is None:
            return False, set()
        is_drained = local_commit.is_drained(directory, local.attempt)
        return True, {local.attempt, *(() if is_drained else local.replaces)}  # the shared tier may hold any of these

    def is_silent(self, location: Location) -> bool:
        """Whether the store keeps a save waiting, or did within ``SILENT_SECONDS``. Thread-safe."""
        key = store_key(location)
        is_asked = any(one == key for one, _, _ in self._asking)
        return is_asked or time.monotonic() < self._silent_until.get(key, 0.0)

    def stop_probing(self) -> None:
        for _, soon, limit in self._asking:
            if not limit.expired():
                limit.reschedule(max(soon, asyncio.get_running_loop().time()))

    @contextlib.asynccontextmanager
    async def _limit_probe(self, key: tuple[str, str], seconds: float) -> AsyncIterator[None]:
        async with asyncio.timeout(seconds) as limit:
            loop, breaker = asyncio.get_running_loop(), self._drainer.retries.breaker("://".join(key))
            deadline = key, loop.time() + PROBE_SILENT_SECONDS, limit
            self._asking.append(deadline)
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
                self._asking.remove(deadline)

    async def find(
        self, location: Location, here: tuple[bool, set[str]] | None = None, *, overwrite: bool
    ) -> tuple[str, ...]:
        """Return the attempts at ``location`` now: a new save replaces exactly these.

        If a shared tier does not answer in time, the drain finds an attempt there. If it refuses requests after this
        process has reached it (credentials may have expired), the save goes on.

        Raises:
            AlreadyCommittedError: there are attempts, and ``overwrite`` is False.
            StoreError: the shared tier refuses requests and was never reached.
        """
        is_local, local_ids = await asyncio.to_thread(self.local_attempts, location) if here is None else here
        if self._drainer.settings.drain:
            key = store_key(location)
            is_silent = time.monotonic() < self._silent_until.get(key, 0.0)
            try:
                async with self._limit_probe(key, PROBE_SILENT_SECONDS if is_silent else PROBE_TIMEOUT_SECONDS):
                    store = self._drainer.store(location)
                    if location.scheme == "file":
                        await asyncio.to_thread(lambda: refuse_file(nearest_existing(Path(location.path))))
                    self._warn_if_unguarded(store, location)
                    found = await shared_commit.current_attempts(store)
                    stock = not overwrite and not found and await catalog.is_stock(store)
                self._selector.reached.add(key)
                self._drainer.retries.accepted(location.parent.uri, "save")
                local_ids |= found
                if stock:
                    raise shared_commit.already_committed(location, "of stock DCP", Tier.SHARED)
            except (StoreUnavailableError, TimeoutError) as error:
                if not is_silent:
                    self._silent_until[key] = time.monotonic() + SILENT_SECONDS
                if isinstance(error, StoreUnavailableError):
                    self._drainer.breaker(location).report(error.message, error.hint, time.time())
                log.debug("%s: the shared tier does not answer, saving locally: %s", location.uri, error)
            except StoreError as error:
                if key not in self._selector.reached:
                    raise
                self._drainer.retries.refused(location.parent.uri, "save", error)
                log.debug("%s: the shared tier refuses requests, saving locally: %s", location.uri, error)
        if local_ids and not overwrite:
            raise shared_commit.already_committed(
                location, ", ".join(sorted(local_ids)), Tier.LOCAL if is_local else Tier.SHARED
            )
        return tuple(sorted(local_ids))

    def _attempts_in_journal(self, location: Location) -> set[str]:
        entries = [entry for entry in self._drainer.journal.entries() if entry.uri == location.uri]
        return {entry.manifest.attempt if entry.manifest else entry.token for entry in entries}

    def _warn_if_unguarded(self, store: Store, location: Location) -> None:
        """Warn once for each run if the store has no conditional puts to detect a second job."""
        run = location.parent
        if store.has_put_if_absent or run in self._blind:
            return
        self._blind.add(run)
        log.warning(
            "%s: this store has no conditional puts, so concurrent saves by another job or node cannot be detected and "
            "may replace each other. Make sure that only one job saves there",
            run.uri,
        )
