"""The state of a node as one document. Reads the node's disk and agent, no store."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

from .. import errors
from ..cache.pool import Pool
from ..checkpoint import local_commit
from ..checkpoint.catalog import file_size
from ..checkpoint.journal import DRAIN_STATES, SET_ASIDE, SET_ASIDE_STATES, Journal, JournalEntry
from ..checkpoint.retention import marked_directories, nearest_existing
from ..checkpoint.run_records import newest_drained, newest_lines
from ..checkpoint.verify import read_checks
from ..config import Settings
from ..drain.active_drain import COMMITTING, QUEUED, SENDING, STORE
from ..drain.rate_limiter import read_control, stamp_of
from ..errors import ConfigError, TierckptError
from ..format.layout import DRAINED, MANIFEST, REPLICATED, local_dir, location_at, parse_uri
from ..ipc.agent_client import AgentClient, NoneRunsError, has_socket
from ..planning.goodput import stalls_of
from ..quantities import human_seconds
from ..telemetry import logger
from ..types import Json
from .run_catalog import REFUSED, run_rows, step_rows

log = logger("agent.document")

Known: TypeAlias = dict[Path, tuple[tuple[object, ...], Json | None]]
"""By local checkpoint: stamps of its files, and the row read at that time."""

ANSWER_SECONDS = 2.0
PEERS_SECONDS = 10.0
NO_AGENT = "no agent runs on this node: `tierckpt agent`, or the first process of a job, starts one"
STEPS_MAX = 64
STALLS_MAX = 60


def node_document(settings: Settings, known: Known | None = None, *, agent: Json | None = None) -> Json:
    """Return journal, local tier, cache, agent, free space, steps by tier, stalls, and the last verify and drill.

    ``known``: cached rows, updated in place. ``agent``: its status; None: requested.

    Cost: 1.7 ms with eight cached checkpoints, 6 ms if their manifests must be read.
    """
    root = settings.local_root
    entries = Journal(root).entries()
    directories = marked_directories(root / "checkpoints")
    local = [*checkpoints(root, directories, {} if known is None else known), *_cached(settings)]
    local.sort(key=lambda item: item["uri"])
    disk = shutil.disk_usage(nearest_existing(root))
    agent, problem = (agent, None) if agent is not None else ask_agent(settings, {"op": "status"})
    journal = [_entry(entry, agent or {}) for entry in entries]
    steps = step_rows(journal, local, agent or {})
    waiting = [item for item in journal if item["state"] in DRAIN_STATES]
    return {
        "at_unix_seconds": time.time(),
        "host": socket.gethostname(),
        "local_root": str(root),
        "journal": journal,
        "set_aside": sum(item["state"] in SET_ASIDE_STATES for item in journal),
        "journal_bytes": sum(item["size_bytes"] for item in journal),
        "lag_bytes": sum(item["size_bytes"] for item in waiting),
        "lag_seconds": max((item["age_seconds"] for item in waiting), default=0.0),
        "budget": _budget(settings),
        "agent": agent,
        "agent_problem": problem,
        "stores": _stores(journal),
        "local": local,
        "local_bytes": sum(item["size_bytes"] for item in local),
        "free_bytes": disk.free,
        "total_bytes": disk.total,
        "steps": steps[:STEPS_MAX],
        "runs": run_rows(steps, lambda run: newest_drained(local_dir(root, parse_uri(run)))),
        "stalls": _stalls(root, steps),
        "checks": read_checks(root),
    }


def ask_agent(
    settings: Settings, message: Json, timeout_seconds: float = ANSWER_SECONDS
) -> tuple[Json | None, str | None]:
    """Return the agent's answer, or None and the reason. (None, None): no agent runs."""
    if not has_socket(settings.local_root):
        return None, None
    with contextlib.closing(AgentClient(settings)) as contact:
        try:
            return contact.ask(message, start=False, timeout_seconds=timeout_seconds), None
        except NoneRunsError:
            return None, None
        except TierckptError as error:
            return None, error.message


def _budget(settings: Settings) -> Json:
    rate: int | None = settings.drain_bytes_per_second
    document: Json = {"bytes_per_second": rate, "concurrency": settings.concurrency, "paused": False, "problem": None}
    try:
        return document | read_control(settings.local_root).to_json()
    except ConfigError as error:
        return document | {"problem": error.message}


def _entry(entry: JournalEntry, agent: Json) -> Json:
    now, failing_since = time.time(), entry.failing_since_unix_seconds
    return {
        "uri": entry.uri,
        "rank": entry.rank,
        "state": entry.state,
        "drain": _drain_of(entry, agent) if entry.state in (*DRAIN_STATES, *SET_ASIDE_STATES) else None,
        "size_bytes": entry.size_bytes,
        "created_unix_seconds": entry.created_unix_seconds,
        "age_seconds": max(0.0, now - entry.created_unix_seconds),
        "failing_seconds": max(0.0, now - failing_since) if failing_since else None,
        "last_error": entry.error,
    }


IDLE_SECONDS = 4.0
"""A drain that has sent nothing for this long is shown as waiting for its store."""
TRY_SECONDS = 10.0
"""During this time a retried drain still shows its last failure."""


def _drain_of(entry: JournalEntry, agent: Json) -> Json:
    """Return the state of the drain of ``entry``, from the agent's drain, its store, or the journal."""
    drains = (one for one in agent.get("drains", ()) if (one["uri"], one["rank"]) == (entry.uri, entry.rank))
    drain: Json | None = next(drains, None)
    location = entry.location
    store = f"{location.scheme}://{location.authority}"
    trouble: Json | None = next((one for one in agent.get("stores", ()) if one["store"] == store), None)
    found: Json = {
        "state": QUEUED, "cause": "", "remedy": "", "since_unix_seconds": entry.created_unix_seconds,
        "next_try_seconds": None, "done_bytes": 0, "bytes_per_second": 0.0,
    }  # fmt: skip
    name, _, text = entry.error.partition(": ")
    kind = vars(errors).get(name)
    cause, _, rest = (text if kind is not None else entry.error).partition(" [")
    document = {
        "cause": cause,
        "remedy": rest.rpartition("]. ")[2] if "]. " in rest else "",
        "since_unix_seconds": entry.failing_since_unix_seconds or entry.created_unix_seconds,
    }
    if entry.state in SET_ASIDE_STATES:
        remedy = "`tierckpt drain --retry` retries it, `tierckpt drain --forget URI` drops it"
        return found | document | {"state": SET_ASIDE, "remedy": remedy}
    if drain is not None and entry.error and time.time() - drain["since_unix_seconds"] < TRY_SECONDS:
        drain = None  # a retry, which may fail again at once
    if drain is not None:
        found |= {name: drain[name] for name in found}
        if drain["state"] in (SENDING, COMMITTING) and drain["idle_seconds"] >= IDLE_SECONDS:
            silent = f"{store} has not answered for {human_seconds(drain['idle_seconds'])}"
            since = time.time() - drain["idle_seconds"]
            found |= {"state": STORE, "cause": silent, "since_unix_seconds": since, "remedy": _REMEDY}
    is_moving = drain is not None and drain["state"] == SENDING and drain["idle_seconds"] < 1.0  # requests succeed
    waits = drain is None or (found["state"] in (STORE, COMMITTING, SENDING) and not is_moving)
    if trouble is not None and waits:
        found |= {name: trouble[name] for name in trouble.keys() & found.keys()} | {"state": STORE}
    elif drain is None and entry.error:
        found |= document | {"state": STORE if getattr(kind, "retryable", False) else REFUSED}
    return found


_REMEDY = "Check the store and the network; the drain continues when the store answers (`tierckpt doctor URI`)"


def _stores(journal: Sequence[Json]) -> list[Json]:
    found: dict[str, Json] = {}
    for item in journal:
        drain = item["drain"]
        if drain is None or drain["state"] not in (STORE, REFUSED):
            continue
        location = parse_uri(item["uri"])
        store = f"{location.scheme}://{location.authority}"
        row = found.setdefault(store, {
            "store": store, **{name: drain[name] for name in ("state", "cause", "remedy", "next_try_seconds")},
            "since_unix_seconds": drain["since_unix_seconds"], "entries": 0, "size_bytes": 0, "runs": [],
        })  # fmt: skip
        row["since_unix_seconds"] = min(row["since_unix_seconds"], drain["since_unix_seconds"])
        row["entries"] += 1
        row["size_bytes"] += item["size_bytes"]
        if (run := location.parent.uri) not in row["runs"]:
            row["runs"].append(run)
    return [*found.values()]


def checkpoints(root: Path, directories: Iterable[Path], known: Known) -> Iterator[Json]:
    """Yield a row for each committed local checkpoint. Those in ``known`` are used until their directory changes."""
    fresh: Known = {}
    for directory in directories:
        stamp = tuple(stamp_of(directory / name) for name in ("", MANIFEST, DRAINED, REPLICATED))
        found = known.get(directory)
        if found is None or found[0] != stamp:
            found = stamp, _checkpoint(root, directory)
        fresh[directory] = found
    known.clear()
    known.update(fresh)
    yield from (row for _, row in fresh.values() if row is not None)


def _checkpoint(root: Path, directory: Path) -> Json | None:
    manifest = local_commit.read_usable_manifest(directory)
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
        "drained": local_commit.is_drained(directory, manifest.attempt),
        "replicated": local_commit.is_replicated(directory, manifest.attempt),
        "saved_unix_seconds": manifest.created_unix_seconds,
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


def _stalls(root: Path, steps: Sequence[Json]) -> list[Json]:
    if not steps:
        return []
    lines = newest_lines(local_dir(root, parse_uri(steps[0]["run"])))
    return [{"run": steps[0]["run"], **asdict(one)} for one in stalls_of(lines)][-STALLS_MAX:]


# --- peers ------------------------------------------------------------------------------------------------------------


def peers_document(settings: Settings) -> Json:
    """Return the state of this node's peers. Does not start an agent. Raises ConfigError: no ``peers``."""
    if settings.peers is None:
        raise ConfigError(
            "no peers are set", hint="Set peers (TIERCKPT_PEERS): host[:port],..., slurm, dns:NAME, torchrun"
        )
    answer, problem = ask_agent(settings, {"op": "peer_status"}, PEERS_SECONDS)
    if answer is not None:
        status, _ = ask_agent(settings, {"op": "status"})
        answer["copies"] = (status or {}).get("replicas")
    return {"peers": settings.peers, "replicas": settings.replicas, **(answer or {"problem": problem or NO_AGENT})}
