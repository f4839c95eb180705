"""Write-back of single files: durable locally at close, drained later.

Order of one write, under the lock of its journal entry:
    1. the bytes, durable under a temporary name, which is removed with its process
    2. the journal entry: after a crash from here on the file has a name (J1)
    3. the name in the entry: the file exists on this node, and is acknowledged
Invariants (earlier and later are in the journal's order, J5):
    W1  The later of two writes of one file wins on every tier, whichever process drains them, and in any order.
    W2  On the shared tier, the files of a directory appear in the order in which this node closed them, and a file
        next to directories (such as a completion mark) appears after all files closed in those before. ``.metadata``
        of stock DCP, which also names shards of other nodes, waits for those.
    W3  A file that was removed while it drains does not reappear: its removal is an entry that drains after it.
    W4  A file is locked while it is sent. So a rewrite or removal cancels only sends that have not begun: the later
        entry is durable by then, and an entry without its bytes is incomplete.
    W5  A file removed with its directory is removed after all files that were closed next to the directory before the
        latest removal there: a job that keeps the newest steps does not remove the last one before newer ones drain.
    W6  A removal after its own file (``after_uri`` is its ``uri``) cancels nothing: the file is sent and removed in
        turn, and so is on the shared tier until a newer one is.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.journal import FILE, SET_ASIDE_STATES, Journal, JournalEntry, is_uri
from ..checkpoint.namespace import root_of
from ..checkpoint.prune import remove_empty
from ..config import Settings
from ..disk.durable import make_dirs, publish, read_whole, temporary_next_to, translated
from ..disk.file_lock import try_lock
from ..errors import CommitAbandonedError, ObjectNotFoundError, TierckptError
from ..format.layout import METADATA, Location, written_file
from ..format.manifest import FileEntry, is_safe_path
from ..poll import LOCAL, SHARED, Poll
from ..stores.verified_read import again, stored_bytes
from .file_transfer import send

if TYPE_CHECKING:
    from .drainer import Drainer

METADATA_BYTES_MAX = 1 << 30
_SHARD = re.compile(rb"__\d+_\d+\.distcp")


def can_write_back(location: Location) -> bool:
    """Return False for a name that the journal cannot hold."""
    return is_uri(location.uri) and is_safe_path(location.name) and is_safe_path(root_of(location)[1])


def write(settings: Settings, location: Location, size_bytes: int, keep_as: Callable[[Path], tuple[str, ...]]) -> str:
    """Keep a file at ``location``, durable on this node. Return the token to drain.

    ``keep_as`` stores the file under a new name, durably, and returns its chunk digests.
    """
    journal = Journal(settings.local_root)
    token, earlier = journal.next_file_token(location.uri)
    path = written_file(settings.local_root, token)
    make_dirs(path.parent)
    with translated(path, is_above=True), journal.own(token), temporary_next_to(path, is_owned=True) as temporary:
        found = FileEntry(location.name, size_bytes, keep_as(temporary), token=token)
        journal.write(_entry(token, location, int(settings.chunk_size_bytes), (found,)))
        publish(temporary, path)
    _cancel(journal, earlier)
    return token


def remove(settings: Settings, location: Location, after: Location | None = None) -> str:
    """Record the removal of ``location``, to be drained after all under ``after`` (W5, W6). Returns its token."""
    journal = Journal(settings.local_root)
    token, earlier = journal.next_file_token(location.uri)
    entry = _entry(token, location, int(settings.chunk_size_bytes), (), after.uri if after is not None else "")
    journal.write(entry)
    if not _is_waiting_for_file(entry):
        _cancel(journal, earlier)
    return token


def _cancel(journal: Journal, tokens: list[str]) -> None:
    """Drop the writes of ``tokens`` that are not being sent (W4)."""
    for token in tokens:
        with suppress(OSError, TierckptError):
            entry = journal.read(token)
            if entry is None or not entry.files:
                continue
            path = written_file(journal.directory.parent, token)
            with try_lock(_lock_of(path), remove=True) as idle:
                if idle:
                    path.unlink(missing_ok=True)
            with journal.own(token) as free:
                if free:  # else its mover detects the missing bytes
                    journal.drop(entry)


def _is_waiting_for_file(entry: JournalEntry) -> bool:
    return entry.after_uri == entry.uri


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _entry(
    token: str, location: Location, chunk_size_bytes: int, files: tuple[FileEntry, ...], after_uri: str = ""
) -> JournalEntry:
    return JournalEntry(token, location.uri, 0, FILE, time.time(), chunk_size_bytes, files, after_uri=after_uri)


async def drain(drainer: Drainer, entry: JournalEntry, patient: bool) -> str:
    """Send or remove one file, in its turn (W2)."""
    root, path = drainer.settings.local_root, written_file(drainer.settings.local_root, entry.token)
    with translated(path):
        wait_seconds = drainer.settings.commit_timeout_seconds if patient else 0.0
        previous, look_at = None, 0.0
        async for _ in Poll(wait_seconds, LOCAL):
            if entry.files and not path.exists():
                return "superseded"  # cancelled; or a crash between 2 and 3: not acknowledged
            # Of many entries that wait for each other, only one looks for more than its predecessor.
            if previous is not None and previous.exists() and time.monotonic() < look_at:
                continue
            while before := await asyncio.to_thread(_predecessors, drainer.journal, entry):
                if before[0].state in SET_ASIDE_STATES:
                    raise _wait_error(entry, f"{before[0].uri}, which was set aside,", 0.0)
                drained = None
                with suppress(CommitAbandonedError):
                    drained = await drainer.drain(before[0].token, patient=False)
                if drained is None or drained.outcome == "held":
                    break
            if not before:
                break
            previous, look_at = drainer.journal.path(before[-1].token), time.monotonic() + SHARED.longest_seconds
        else:
            raise _wait_error(entry, "an earlier write there", wait_seconds)
        at, key = root_of(entry.location)
        store = drainer.store(at)
        written = await asyncio.to_thread(drainer.journal.files, entry.uri)
        later = [one for one in written if one.token == entry.token or not _is_waiting_for_file(one)]
        is_last = not later or later[-1].token == entry.token
        if is_last and not entry.files:
            await store.delete(key)
            await asyncio.to_thread(_remove_empty, entry)
        elif is_last:
            await _await_shards(drainer, entry, path, wait_seconds)
            flow, (file,) = drainer.limiter.flow(entry.created_unix_seconds), entry.files
            drainer.active[entry.token].flow = flow
            on_bytes = drainer.progress_of(entry).add
            async with flow.slot():
                await flow.spend(0)  # a paused drain has not begun
                with try_lock(_lock_of(path), remove=True) as idle:
                    if is_last := bool(idle) and path.exists():
                        named = replace(file, path=key)
                        put = partial(send, store, path, named, entry.chunk_size_bytes, on_bytes, flow, replaces=True)
                        await again(store, put)
        # An entry without bytes is incomplete, and is removed too.
        await asyncio.to_thread(lambda: written_file(root, entry.token).unlink(missing_ok=True))
    return "committed" if is_last else "superseded"


def _remove_empty(entry: JournalEntry) -> None:
    location = entry.location.parent
    while entry.after_uri and location.uri.startswith(f"{entry.after_uri.rstrip('/')}/"):
        remove_empty(location)
        location = location.parent


def _predecessors(journal: Journal, entry: JournalEntry) -> list[JournalEntry]:
    """Return the entries closed before ``entry`` in its directory (W5: next to it) or under it.

    Files that a removal must wait for may have been removed before they drained, and written again. So the removal
    waits for all files closed before the latest removal there, except those that wait for this one.
    """
    is_in_turn = not entry.after_uri or _is_waiting_for_file(entry)
    above = f"{(entry.location.parent.uri if is_in_turn else entry.after_uri).rstrip('/')}/"
    if is_in_turn:
        return [other for other in journal.files(before=entry.token) if other.uri.startswith(above)]
    found = [other for other in journal.files() if other.uri.startswith(above)]
    index = next((number for number, other in enumerate(found) if other.token == entry.token), len(found))
    last = max((number for number, other in enumerate(found) if other.after_uri == entry.after_uri), default=index)
    waiting, later = _parents_of(entry), []
    for other in found[index + 1 : last]:
        if other.after_uri or other.location.parent.uri.rstrip("/") in waiting:
            waiting |= _parents_of(other)
        elif other.files:
            later.append(other)
    return found[:index] + later


def _parents_of(entry: JournalEntry) -> set[str]:
    names = entry.uri.split("/")
    return {"/".join(names[:count]) for count in range(1, len(names))}


async def _await_shards(drainer: Drainer, entry: JournalEntry, path: Path, wait_seconds: float) -> None:
    """Wait until the shared tier has the shards that a ``.metadata`` names (W2)."""
    if entry.location.name != METADATA:
        return
    at, key = root_of(entry.location)
    try:
        named = set(_SHARD.findall(await asyncio.to_thread(read_whole, path, METADATA_BYTES_MAX)))
    except ObjectNotFoundError:
        return  # cancelled
    missing = {f"{key.removesuffix(METADATA)}{name.decode()}" for name in named}
    async for _ in Poll(wait_seconds, SHARED):
        for shard in sorted(missing):
            if await stored_bytes(drainer.store(at), shard) >= 0:
                missing.discard(shard)
        if not missing:
            return
    raise _wait_error(entry, f"{len(missing)} shards of other nodes", wait_seconds)


def _wait_error(entry: JournalEntry, what: str, seconds: float) -> CommitAbandonedError:
    return CommitAbandonedError(
        f"{entry.uri} stays on this node: {what} is not on the shared tier yet",
        hint="`tierckpt drain --wait` on each node retries",
        waited_seconds=seconds or None,
    )
