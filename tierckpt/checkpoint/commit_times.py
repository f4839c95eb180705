"""Records when checkpoints reached peers and shared storage, for ``tierckpt report``: one file per node and run.

C1  Bounded: a file of more than ``LINES_MAX`` lines keeps the newer half, and a line that says so.
C2  Crash-safe: a line is written before the work counts as done. Readers take the earliest line of a save, and skip
    a torn one.
C3  An error here is logged and never fails a drain; the request to the store has a deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from pathlib import Path

from ..disk.durable import durable_write, make_dirs, matching, read_whole
from ..disk.file_lock import lock
from ..disk.quarantine import open_regular
from ..errors import ObjectNotFoundError, TierckptError
from ..format.layout import COMMITS_SUFFIX, HISTORY_DIR, MANIFEST, Location, local_dir, step_of
from ..format.manifest import Manifest
from ..stores.base import Store
from ..telemetry import logger
from ..types import Json, Tier
from . import branches
from .run_log_reader import has_ended_here, parse_lines

log = logger("history")

LINES_MAX = 2000
"""Of at most 200 bytes each."""
FILE_BYTES_MAX = 4 << 20
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
            path = _file_of(directory)
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
                await run.put(f"{HISTORY_DIR}/{path.name}", await asyncio.to_thread(read_whole, path, FILE_BYTES_MAX))
                await _send_ended(run, path.parent)
    except (TimeoutError, OSError, TierckptError) as error:  # C3
        log.info("the time of the commit of %s is on this node only: %s", location.uri, error)


async def _send_ended(run: Store, directory: Path) -> None:
    for path in matching(directory, "*.jsonl")[-STARTS_SENT:]:
        data, key = await asyncio.to_thread(read_whole, path, FILE_BYTES_MAX), f"{HISTORY_DIR}/{path.name}"
        lines = parse_lines(data.partition(b"\n")[0])
        if not lines or not await asyncio.to_thread(has_ended_here, lines[0]):
            continue
        try:
            is_sent = (await run.head(key)).size_bytes >= len(data)
        except ObjectNotFoundError:
            is_sent = False
        if not is_sent:
            await run.put(key, data)


def _file_of(directory: Path) -> Path:
    found = matching(directory, f"*{COMMITS_SUFFIX}")
    return found[-1] if found else directory / f"{int(time.time() * 1000):014d}-{uuid.uuid4().hex[:8]}{COMMITS_SUFFIX}"


def _append(path: Path, line: Json) -> None:
    # The leading newline ends a torn line: a crash loses at most that one.
    data = f"\n{json.dumps(line)}\n".encode()
    file = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, data)
        os.fsync(file)
        size_bytes = os.fstat(file).st_size
    finally:
        os.close(file)
    if size_bytes > LINES_MAX * len(data):
        lines = [text for text in read_whole(path, FILE_BYTES_MAX).splitlines() if text]
        kept = [json.dumps({"what": TRIMMED, "at": line["at"]}).encode(), *lines[-LINES_MAX // 2 :]]
        durable_write(path, b"\n".join(kept) + b"\n")  # C1
