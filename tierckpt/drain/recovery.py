"""Recovers journal entries of dead processes: drains them, leaves them for later, or removes their shards."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from ..checkpoint import local_commit
from ..checkpoint.journal import ASIDE, AWAITING_COMMIT, LOCAL_ONLY, READY, TO_DRAIN, Entry
from ..disk.durable import matching
from ..errors import ManifestError, TierckptError
from ..format.layout import SHARD_SUFFIX
from ..format.manifest import Manifest
from ..telemetry import log_failure, logger
from .drainer import Drainer

log = logger("recovery")

LOOK_SECONDS_MAX = 10.0
"""A save that waits for recovery does not wait for a store that is away."""


async def recover_entry(entry: Entry, drainer: Drainer) -> bool:
    """Return True when ``entry`` is to be drained.

    The shards of a save that never finished are removed, and the entry with them. What cannot be known yet stays as it
    is; what a live process holds is left alone.
    """
    if entry.state in (LOCAL_ONLY, *TO_DRAIN, *ASIDE):
        return entry.state in TO_DRAIN
    try:
        if entry.state == AWAITING_COMMIT:
            return await _take_up_written(entry, drainer)
        return await _give_up(entry, drainer)
    except ManifestError as error:
        log.warning("%s: cannot tell whether it was committed (%s); keeping its files", entry.uri, error)
        return False


async def _take_up_written(entry: Entry, drainer: Drainer) -> bool:
    """A rank that ended between its last shard and the news of the commit: find out what became of the save.

    The commit is known by a manifest that names the entry: the one of this node, or what the coordinator's mover has
    left on the shared tier. While there is none the shards stay, because the coordinator's node may be slow or away;
    after ``commit_timeout_seconds`` no mover waits for them any more.
    """
    local = await asyncio.to_thread(local_commit.read_local_manifest, drainer.directory(entry.location))
    named = local is not None and entry.token in local.tokens
    if not named and drainer.settings.drain:
        try:
            async with asyncio.timeout(LOOK_SECONDS_MAX):
                named = await drainer.is_named(entry)
        except (TierckptError, TimeoutError) as error:
            text = "%s: cannot tell yet whether it was committed (%s)"
            log_failure(log, error, text, entry.uri, error, level=logging.WARNING)
            return False
    if not named:
        is_old = time.time() - entry.created_unix_seconds > drainer.settings.commit_timeout_seconds
        return is_old and await _give_up(entry, drainer)
    with drainer.journal.own(entry.token) as dead:
        if not dead:
            return False
        is_kept = local is not None and await asyncio.to_thread(_is_kept, drainer, local)
        await asyncio.to_thread(drainer.journal.write, replace(entry, state=LOCAL_ONLY if is_kept else READY))
        return not is_kept


def _is_kept(drainer: Drainer, manifest: Manifest) -> bool:
    """True when the coordinator's entry of this save, which has its attempt for a name, stays on this node."""
    coordinators = drainer.journal.read(manifest.attempt)
    return coordinators is not None and coordinators.state == LOCAL_ONLY


async def _give_up(entry: Entry, drainer: Drainer) -> bool:
    """Remove a save that never finished. One that has no shard here may have gone straight to the shared tier."""
    directory = drainer.directory(entry.location)
    had_shards = await asyncio.to_thread(lambda: bool(matching(directory, f"*-{entry.token}{SHARD_SUFFIX}")))
    if await asyncio.to_thread(_put_away, entry, drainer):
        return True
    still_held = await asyncio.to_thread(drainer.journal.read, entry.token) is not None
    if had_shards or still_held or not drainer.settings.drain:
        return False
    try:
        async with asyncio.timeout(LOOK_SECONDS_MAX):
            await drainer.remove_unnamed(entry)
    except (TierckptError, TimeoutError) as error:
        text = "%s: shards that no commit names may be left on the shared tier: %s"
        log_failure(log, error, text, entry.uri, error, level=logging.WARNING)
    return False


def _put_away(entry: Entry, drainer: Drainer) -> bool:
    """Remove a save that never finished, unless a commit names it: then it did, and True is returned."""
    journal, directory = drainer.journal, drainer.directory(entry.location)
    with journal.own(entry.token) as dead:
        current = journal.read(entry.token)
        if not dead or current is None or current.state != entry.state:
            return False
        local = local_commit.read_local_manifest(directory)
        if local is not None and entry.token in local.tokens | {local.attempt}:
            # The disk gave back an old state of the entry. What a later one said is in the manifest as well.
            files = tuple(file for file in local.entries if file.token == entry.token)
            manifest = local if local.attempt == entry.token else None
            journal.write(replace(entry, state=READY, files=files, manifest=manifest))
            log.warning("%s: an old state of its journal entry was found; it is committed", entry.uri)
            return True
        local_commit.remove_unfinished(directory, entry.token)
        journal.remove(entry.token)
        log.info("removed the shards of a save to %s that never finished", entry.uri)
        return False
