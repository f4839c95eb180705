"""The records of a run: reads those of its processes; writes and reads the times of its commits."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ..disk.durable import closing_file, durable_write, make_dirs, matching, read_whole
from ..disk.file_lock import lock
from ..disk.processes import has_ended
from ..disk.quarantine import open_regular
from ..errors import ManifestError, ObjectNotFoundError, StoreError, TierckptError
from ..format.layout import COMMITS_SUFFIX, HISTORY_DIR, MANIFEST, Location, local_dir, step_of
from ..format.manifest import Manifest
from ..stores.base import Store
from ..stores.verified_read import stored_bytes
from ..telemetry import log_failure, logger
from ..types import Json, Tier
from . import branches, shared_commit

log = logger("history")

FILE_BYTES_MAX = 16 << 20
FILES_MAX = 10_000
TAIL_BYTES = 1 << 16
CONCURRENT_GETS = 16
CHECKPOINTS_MAX = 1000

SUFFIXES = (".jsonl", COMMITS_SUFFIX)

Lines = list[dict[str, Any]]


async def read_history(directory: Path, store: Store) -> dict[str, Lines]:
    """Return the lines of each record file of the run, by name. The longer copy of a file counts.

    Damaged lines and unreadable files are left out. Cost: one listing, and one GET for each file that is incomplete
    here.
    """
    here = await asyncio.to_thread(local_records, directory)
    try:
        found = {info.key.rpartition("/")[2]: info async for info in store.list(HISTORY_DIR)}
    except StoreError as error:
        log_failure(log, error, "looking on this node only: %s", error, level=logging.WARNING)
        found = {}
    gate = asyncio.Semaphore(CONCURRENT_GETS)

    async def get(name: str) -> bytes | None:
        async with gate:
            try:
                return await store.get(f"{HISTORY_DIR}/{name}")
            except ObjectNotFoundError:
                return None
            except StoreError as error:
                log_failure(log, error, "%s is left out: %s", name, error, level=logging.WARNING)
                return None

    names = sorted(name for name in found if name.endswith(SUFFIXES))[-FILES_MAX:]
    names_to_read = [name for name in names if len(here.get(name, b"")) < found[name].size_bytes <= FILE_BYTES_MAX]
    for name, data in zip(names_to_read, await asyncio.gather(*map(get, names_to_read)), strict=True):
        if data is not None:
            here[name] = data
    return {name: parse_lines(data) for name, data in sorted(here.items())}


async def read_shared_commits(store_at: Callable[[str], Store], run: Store, names: Collection[str]) -> Lines | None:
    """Return a line, as ``commit_times`` writes it, for each of ``names`` on the shared tier; None if that is silent.

    Cost: one listing; a GET and a HEAD for each of the newest ``CHECKPOINTS_MAX`` that are there.
    """
    gate = asyncio.Semaphore(CONCURRENT_GETS)

    async def look(name: str) -> Lines:
        async with gate:
            store = store_at(name)
            manifest = await shared_commit.read_shared_manifest(store)
            if manifest is None:
                return []
            at = (await store.head(MANIFEST)).modified_unix_seconds
            created = {"created_at": manifest.created_unix_seconds, "at": at}
            return [{"what": str(Tier.SHARED), "step": step_of(name), **created}]

    try:
        there = sorted(set(names) & {*await run.list_dirs()}, key=lambda name: step_of(name) or 0)[-CHECKPOINTS_MAX:]
        return [line for lines in await asyncio.gather(*map(look, there)) for line in lines]
    except (StoreError, ManifestError) as error:
        log.warning("which checkpoints shared storage has is not known: %s", error)
        return None


def local_records(directory: Path) -> dict[str, bytes]:
    found = {}
    for path in [one for one in matching(directory / HISTORY_DIR, "*") if one.suffix in SUFFIXES][-FILES_MAX:]:
        try:
            found[path.name] = read_whole(path, FILE_BYTES_MAX)
        except (ManifestError, StoreError) as error:
            log.warning("%s is left out: %s", path, error)
    return found


def newest_drained(directory: Path) -> dict[str, Any] | None:
    """Return the line of the newest drained checkpoint, evicted or not. Blocking; reads at most ``TAIL_BYTES``."""
    lines = [line for line in newest_lines(directory, f"*{COMMITS_SUFFIX}") if line.get("what") == Tier.SHARED]
    good = [line for line in lines if isinstance(line.get("step"), int) and isinstance(line.get("created_at"), float)]
    return max(good, key=lambda line: float(line["created_at"]), default=None)


def newest_lines(directory: Path, pattern: str = "*.jsonl") -> Lines:
    """Blocking; reads at most ``TAIL_BYTES``."""
    for path in matching(directory / HISTORY_DIR, pattern)[:-2:-1]:
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                return parse_lines(file.read(TAIL_BYTES))
        except OSError as error:
            log.debug("%s: %s", path, error)
    return []


def has_ended_here(first: dict[str, Any]) -> bool:
    match = re.fullmatch(r"(\d{1,20})-(\d{1,20})", str(first.get("process")))
    pid = first.get("pid")
    if match is None or not isinstance(pid, int) or pid <= 0:
        return False
    return has_ended(pid, int(match[2]), int(match[1])) is True


def parse_lines(data: bytes) -> Lines:
    """Skips torn lines."""
    lines = []
    for text in data.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


LINES_MAX = 2000
"""Of at most 200 bytes each."""
HISTORY_BYTES_MAX = 4 << 20
LOCK_SECONDS = 5.0
SEND_SECONDS = 5.0
STARTS_SENT = 2
"""Earlier drains sent the records of older starts."""
TRIMMED = "trimmed"


def note(local_root: Path, location: Location, manifest: Manifest, tier: Tier, at: float) -> Path | None:
    """Record a commit at ``at`` (Unix seconds). Blocking; never raises.

    Returns None for a checkpoint that no ``Checkpointer`` saved.
    """
    step = step_of(location.name)
    if step is None or branches.NOTE not in manifest.notes:
        return None
    line = {"what": str(tier), "step": step, "created_at": round(manifest.created_unix_seconds, 3), "at": round(at, 3)}
    directory = local_dir(local_root, branches.run_of(location)) / HISTORY_DIR
    try:
        make_dirs(directory)
        with lock(directory / "commits.lock", LOCK_SECONDS, str(directory)):
            found = matching(directory, f"*{COMMITS_SUFFIX}")
            new = f"{int(time.time() * 1000):014d}-{uuid.uuid4().hex[:8]}{COMMITS_SUFFIX}"
            path = found[-1] if found else directory / new
            _append(path, line)
            return path
    except (OSError, TierckptError) as error:  # C3
        log.warning("cannot record the commit of %s on the %s tier: %s", location.uri, tier, error)
        return None


async def note_shared(
    local_root: Path, location: Location, manifest: Manifest, store: Store, run: Store, committed_at: float | None
) -> None:
    """Record a commit on the shared tier and copy the records to ``run``, the store of the run.

    ``committed_at``: Unix seconds, None to ask ``store``, the checkpoint's. Cost: two PUTs and two HEADs at most.
    """
    try:
        async with asyncio.timeout(SEND_SECONDS):
            if committed_at is None:
                committed_at = (await store.head(MANIFEST)).modified_unix_seconds
            if committed_at is None:
                return  # it may be hours after the commit
            path = await asyncio.to_thread(note, local_root, location, manifest, Tier.SHARED, committed_at)
            if path is not None:
                await run.put(
                    f"{HISTORY_DIR}/{path.name}", await asyncio.to_thread(read_whole, path, HISTORY_BYTES_MAX)
                )
                await _send_ended(run, path.parent)
    except (TimeoutError, OSError, TierckptError) as error:  # C3
        log.info("the time of the commit of %s is on this node only: %s", location.uri, error)


async def _send_ended(run: Store, directory: Path) -> None:
    for path in matching(directory, "*.jsonl")[-STARTS_SENT:]:
        data, key = await asyncio.to_thread(read_whole, path, HISTORY_BYTES_MAX), f"{HISTORY_DIR}/{path.name}"
        lines = parse_lines(data.partition(b"\n")[0])
        if not lines or not await asyncio.to_thread(has_ended_here, lines[0]):
            continue
        if await stored_bytes(run, key) < len(data):
            await run.put(key, data)


def _append(path: Path, line: Json) -> None:
    # The leading newline ends a torn line: a crash loses at most that one.
    data = f"\n{json.dumps(line)}\n".encode()
    with closing_file(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)) as file:
        os.write(file, data)
        os.fsync(file)
        size_bytes = os.fstat(file).st_size
    if size_bytes > LINES_MAX * len(data):
        lines = [text for text in read_whole(path, HISTORY_BYTES_MAX).splitlines() if text]
        kept = [json.dumps({"what": TRIMMED, "at": line["at"]}).encode(), *lines[-LINES_MAX // 2 :]]
        durable_write(path, b"\n".join(kept) + b"\n")  # C1
