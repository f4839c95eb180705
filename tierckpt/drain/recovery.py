"""The recovery of saves of dead processes: whether a journal entry is drained, kept for later, or removed.

The agent recovers at its start, every minute, and after the end of a process; without an agent, each process at its
first use of a mover. A save that is staged but not on the SSD is finished by ``dcp.handoff.finish``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from ..checkpoint import local_commit
from ..checkpoint.journal import AWAITING_COMMIT, DRAIN_STATES, LOCAL_ONLY, READY, SET_ASIDE_STATES, JournalEntry
from ..disk.durable import matching
from ..errors import ManifestError, TierckptError
from ..format.layout import SHARD_SUFFIX
from ..format.manifest import Manifest
from ..telemetry import log_failure, logger
from .drainer import Drainer

log = logger("drain")

STORE_TIMEOUT_SECONDS = 10.0
"""Recovery blocks a save, so its store requests time out early."""


async def recover_entry(entry: JournalEntry, drainer: Drainer) -> bool:
    """Return whether ``entry`` must be drained; remove a save that never finished.

    Skips entries with an unknown outcome, and those that a live process holds.
    """
    if entry.state in (LOCAL_ONLY, *DRAIN_STATES, *SET_ASIDE_STATES):
        return entry.state in DRAIN_STATES
    try:
        if entry.state == AWAITING_COMMIT:
            return await _recover_written(entry, drainer)
        return await _remove_unfinished(entry, drainer)
    except ManifestError as error:
        log.warning("%s: cannot tell whether it was committed (%s); keeping its files", entry.uri, error)
        return False


async def _recover_written(entry: JournalEntry, drainer: Drainer) -> bool:
    """Determine the outcome of a save after the end of its rank, which did not learn of a commit.

    A manifest that names the entry proves the commit. Without one the shards stay until ``commit_timeout_seconds`` have
    passed: the coordinator's node may be slow or unreachable.
    """
    local = await asyncio.to_thread(local_commit.read_local_manifest, drainer.directory(entry.location))
    named = local is not None and entry.token in local.tokens
    if not named and drainer.settings.drain:
        try:
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                named = await drainer.is_named(entry)
        except (TierckptError, TimeoutError) as error:
            text = "%s: unknown yet whether it was committed (%s)"
            log_failure(log, error, text, entry.uri, error, level=logging.WARNING)
            return False
    if not named:
        is_old = time.time() - entry.created_unix_seconds > drainer.settings.commit_timeout_seconds
        return is_old and await _remove_unfinished(entry, drainer)
    with drainer.journal.own(entry.token) as dead:
        if not dead:
            return False
        is_kept = local is not None and await asyncio.to_thread(_is_kept, drainer, local)
        await asyncio.to_thread(drainer.journal.write, replace(entry, state=LOCAL_ONLY if is_kept else READY))
        return not is_kept


def _is_kept(drainer: Drainer, manifest: Manifest) -> bool:
    coordinators = drainer.journal.read(manifest.attempt)
    return coordinators is not None and coordinators.state == LOCAL_ONLY


async def _remove_unfinished(entry: JournalEntry, drainer: Drainer) -> bool:
    """Without shards on this node the save may have used direct put."""
    directory = drainer.directory(entry.location)
    had_shards = await asyncio.to_thread(lambda: bool(matching(directory, f"*-{entry.token}{SHARD_SUFFIX}")))
    if await asyncio.to_thread(_remove_unless_named, entry, drainer):
        return True
    still_held = await asyncio.to_thread(drainer.journal.read, entry.token) is not None
    if had_shards or still_held or not drainer.settings.drain:
        return False
    try:
        async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
            await drainer.remove_unnamed(entry)
    except (TierckptError, TimeoutError) as error:
        text = "%s: shards without a commit may be left on the shared tier: %s"
        log_failure(log, error, text, entry.uri, error, level=logging.WARNING)
    return False


def _remove_unless_named(entry: JournalEntry, drainer: Drainer) -> bool:
    """Return True, and keep the save, if a commit names it."""
    journal, directory = drainer.journal, drainer.directory(entry.location)
    with journal.own(entry.token) as dead:
        current = journal.read(entry.token)
        if not dead or current is None or current.state != entry.state:
            return False
        local = local_commit.read_local_manifest(directory)
        if local is not None and entry.token in local.tokens | {local.attempt}:
            # The disk returned an old version of the entry. The manifest has the later fields too.
            files = tuple(file for file in local.entries if file.token == entry.token)
            manifest = local if local.attempt == entry.token else None
            journal.write(replace(entry, state=READY, files=files, manifest=manifest))
            log.warning("%s: its journal entry was outdated; it is committed", entry.uri)
            return True
        local_commit.remove_unfinished(directory, entry.token)
        journal.remove(entry.token)
        log.info("removed the shards of an unfinished save to %s", entry.uri)
        return False
