"""What a node is doing, as one document: ``tierckpt status --json``, and the page. Asks the node's disk and agent, and
no store."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

from ..cache.pool import Pool
from ..cache.receipt import RECEIPT
from ..checkpoint import local_commit, marks
from ..checkpoint.catalog import file_size
from ..checkpoint.journal import ASIDE, LOCAL_ONLY, TO_DRAIN, Entry, Journal
from ..checkpoint.retention import marked_directories, nearest_existing
from ..checkpoint.run_log_reader import newest_lines
from ..checkpoint.verify import read_checks
from ..config import Settings
from ..drain.rate_limiter import UNCHANGED, read_control
from ..errors import ConfigError, ManifestError, StoreError, TierckptError
from ..format.layout import DRAINED, MANIFEST, REPLICATED, local_dir, location_at, parse_uri, step_of
from ..ipc.agent_client import AgentClient, AgentUnavailableError, NoneRunsError, has_socket
from ..planning.goodput import stalls_of
from ..telemetry import logger
from ..types import Json

log = logger("agent.document")

Known: TypeAlias = dict[Path, tuple[tuple[int, ...], Json | None]]
"""Of each local checkpoint, when its directory and records were changed, and what was read then."""

ANSWER_SECONDS = 2.0
STEPS_MAX = 64
STALLS_MAX = 60


def node_document(settings: Settings, known: Known | None = None) -> Json:
    """Return journal, local tier, cache, agent, free space, steps by tier, stalls, and the last verify and drill.

    Args:
        known: what an earlier call has read of checkpoints, which this one need not read again.

    Cost: 1.7 ms with eight checkpoints that are known, of which it takes four stats each; 6 ms when their manifests are
    read.
    """
    root = settings.local_root
    journal = [_entry(entry) for entry in Journal(root).entries()]
    found = [*marked_directories(root / "checkpoints")]
    local = [*checkpoints(root, found, {} if known is None else known), *_prefetched(root, found), *_cached(settings)]
    local.sort(key=lambda item: item["uri"])
    disk = shutil.disk_usage(nearest_existing(root))
    agent, problem = agent_status(settings)
    steps = _steps(journal, local, agent or {})
    waiting = [item for item in journal if item["state"] in TO_DRAIN]
    return {
        "at_unix_seconds": time.time(),
        "host": socket.gethostname(),
        "local_root": str(root),
        "journal": journal,
        "set_aside": sum(item["state"] in ASIDE for item in journal),
        "journal_bytes": sum(item["size_bytes"] for item in journal),
        "lag_seconds": max((item["age_seconds"] for item in waiting), default=0.0),
        "budget": _budget(settings),
        "agent": agent,
        "agent_problem": problem,
        "local": local,
        "local_bytes": sum(item["size_bytes"] for item in local),
        "free_bytes": disk.free,
        "total_bytes": disk.total,
        "steps": steps[:STEPS_MAX],
        "safe": _safe(steps),
        "stalls": _stalls(root, steps),
        "checks": read_checks(root),
    }


def agent_status(settings: Settings) -> tuple[Json | None, str | None]:
    """What the agent says of itself, None when none runs; and why it says nothing, when one may run all the same."""
    if not has_socket(settings.local_root):
        return None, None
    with contextlib.closing(AgentClient(settings)) as contact:
        try:
            return contact.ask({"op": "status"}, start=False, timeout_seconds=ANSWER_SECONDS), None
        except NoneRunsError:
            return None, None
        except TierckptError as error:
            return None, error.message


def _budget(settings: Settings) -> Json:
    """What the node's drains may take: its control file (`tierckpt drain --limit`, `--pause`) over the settings."""
    rate: int | None = settings.drain_bytes_per_second
    document: Json = {"bytes_per_second": rate, "concurrency": settings.concurrency, "paused": False, "problem": None}
    try:
        control = read_control(settings.local_root)
    except ConfigError as error:  # movers keep to what stood there before; `status` is how one learns of it
        return document | {"problem": error.message}
    if control.bytes_per_second is not UNCHANGED:
        document["bytes_per_second"] = control.bytes_per_second
    return document | {"concurrency": control.concurrency or settings.concurrency, "paused": control.paused}


def _entry(entry: Entry) -> Json:
    return {
        "uri": entry.uri,
        "rank": entry.rank,
        "state": entry.state,
        "size_bytes": entry.size_bytes,
        "created_unix_seconds": entry.created_unix_seconds,
        "age_seconds": max(0.0, time.time() - entry.created_unix_seconds),
        "failing_seconds": max(0.0, time.time() - entry.failing_since_unix_seconds)
        if entry.failing_since_unix_seconds
        else None,
        "last_error": entry.error,
    }


def checkpoints(root: Path, directories: Sequence[Path], known: Known) -> Iterator[Json]:
    """Yield a row for each committed checkpoint of the local tier. A manifest is read again when what is beside it has
    changed."""
    fresh: Known = {}
    for directory in directories:
        stamp = tuple(_changed_at(f"{directory}/{name}") for name in ("", MANIFEST, DRAINED, REPLICATED))
        before = known.get(directory)
        if before is None or before[0] != stamp:
            before = (stamp, _checkpoint(root, directory))
        fresh[directory] = before
    known.clear()
    known.update(fresh)
    yield from (row for _, row in fresh.values() if row is not None)


def _changed_at(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0


def _checkpoint(root: Path, directory: Path) -> Json | None:
    try:
        manifest = local_commit.read_local_manifest(directory)
    except (ManifestError, StoreError) as error:
        log.warning("%s", error)
        return None
    location = location_at(root, directory)
    if manifest is None or location is None:
        return None
    here = [entry for entry in manifest.entries if file_size(directory / entry.key) == entry.size_bytes]
    return {
        "uri": location.uri,
        "kind": "checkpoint",
        "files": len(here),
        "files_of_checkpoint": len(manifest.entries),
        "size_bytes": sum(entry.size_bytes for entry in here),
        "drained": marks.is_drained(directory, manifest.attempt),
        "replicated": marks.is_replicated(directory, manifest.attempt),
        "saved_unix_seconds": manifest.created_unix_seconds,
    }


def _prefetched(root: Path, directories: Sequence[Path]) -> Iterator[Json]:
    for directory in directories:
        receipt = directory / RECEIPT
        if not receipt.exists() or (directory / MANIFEST).exists():
            continue  # no prefetched model, or listed as a checkpoint
        if (location := location_at(root, directory)) is None:
            continue
        sizes = [size for path in directory.rglob("*") if path != receipt and (size := file_size(path)) >= 0]
        yield {
            "uri": location.uri,
            "kind": "prefetched",
            "files": len(sizes),
            "size_bytes": sum(sizes),
            "drained": True,
        }


def _cached(settings: Settings) -> Iterator[Json]:
    pool = Pool(settings)
    for row in pool.rows():
        yield {
            "uri": row.uri,
            "kind": "prefetched" if row.state == "complete" else "partial",
            "directory": str(pool.directory(row.name)),
            "files": row.files,
            "size_bytes": row.size_bytes if row.state == "complete" else row.reserved_bytes,
            "drained": True,
            "pinned": row.is_pinned,
            "leases": len(pool.leases(row.name)),
        }


# --- steps ----------------------------------------------------------------------------------------------------------


def _steps(journal: Sequence[Json], local: Sequence[Json], agent: Json) -> list[Json]:
    """A row for each step that this node knows of, newest first: what each tier has of it."""
    rows: dict[str, Json] = {}
    moving = {row["what"].removeprefix("drain "): row for row in agent.get("moving", ())}
    newest = (agent.get("replicas") or {}).get("newest") or {}
    copied = {row["uri"] for row in newest.values() if row["has_all_replicas"]}
    for item in local:
        if item["kind"] == "checkpoint" and (row := _row(rows, item["uri"], item["saved_unix_seconds"])) is not None:
            row["local"] = "committed"
            row["size_bytes"] = item["size_bytes"]
            row["shared"] = "committed" if item["drained"] else None
            row["peers"] = "committed" if item["replicated"] or item["uri"] in copied else None
    for item in journal:
        row = _row(rows, item["uri"], item["created_unix_seconds"])
        if row is None:
            continue
        row["size_bytes"] = max(row["size_bytes"], item["size_bytes"])
        row["error"] = row["error"] or item["last_error"]
        if item["state"] not in _WAITING:
            row["local"] = row["local"] or "writing"
            continue
        row["shared"] = "failed" if item["last_error"] and item["state"] in TO_DRAIN else _WAITING[item["state"]]
        if (drain := moving.get(item["uri"])) is not None and item["state"] in TO_DRAIN:
            row["shared"], row["share"] = "draining", drain["done_bytes"] / max(1, drain["total_bytes"])
    return sorted(rows.values(), key=lambda row: (row["at_unix_seconds"], row["step"]), reverse=True)


_WAITING = {LOCAL_ONLY: "local only", **dict.fromkeys(TO_DRAIN, "waiting"), **dict.fromkeys(ASIDE, "set aside")}


def _row(rows: dict[str, Json], uri: str, at_unix_seconds: float) -> Json | None:
    """The row of ``uri``; None when it is no step of a run."""
    location = parse_uri(uri)
    if (step := step_of(location.name)) is None:
        return None
    new = {
        "run": location.parent.uri, "step": step, "uri": uri, "at_unix_seconds": at_unix_seconds, "size_bytes": 0,
        "local": None, "peers": None, "shared": None, "share": None, "error": "",
    }  # fmt: skip
    return rows.setdefault(uri, new)


def _safe(steps: Sequence[Json]) -> list[Json]:
    """The newest step of each run that shared storage has."""
    newest: dict[str, Json] = {}
    for row in steps:
        if row["shared"] == "committed":
            newest.setdefault(row["run"], row)
    return [{name: row[name] for name in ("run", "step", "uri", "at_unix_seconds")} for row in newest.values()]


def _stalls(root: Path, steps: Sequence[Json]) -> list[Json]:
    """How long each of the latest saves of the newest run kept its training waiting, oldest first."""
    if not steps:
        return []
    lines = newest_lines(local_dir(root, parse_uri(steps[0]["run"])))
    return [{"run": steps[0]["run"], **asdict(one)} for one in stalls_of(lines)][-STALLS_MAX:]


# --- peers ------------------------------------------------------------------------------------------------------------


def peers_document(settings: Settings) -> Json:
    """What this node's agent knows of its peers. Starts none.

    Raises:
        ConfigError: there are no ``peers`` in the settings.
    """
    if settings.peers is None:
        raise ConfigError(
            "no peers are set", hint="Set peers (TIERCKPT_PEERS): host[:port],..., slurm, dns:NAME, torchrun"
        )
    answer: Json = {
        "problem": "no agent runs on this node: `tierckpt agent`, or the first process of a job, starts one"
    }
    with contextlib.closing(AgentClient(settings)) as contact:
        try:
            answer = contact.ask({"op": "peer_status"}, start=False)
            answer["copies"] = contact.ask({"op": "status"}, start=False).get("replicas")
        except AgentUnavailableError:
            pass
        except TierckptError as error:
            answer = {"problem": error.message}
    return {"peers": settings.peers, "replicas": settings.replicas, **answer}
