"""The steps and the runs of a node: their state on each tier, and the loss if the node dies. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

from ..checkpoint.journal import LOCAL_ONLY
from ..drain.active_drain import COMMITTING, OTHER_RANKS, QUEUED, SENDING, STORE
from ..format.layout import parse_uri, step_name, step_of
from ..quantities import human_bytes, human_seconds
from ..types import Json

REFUSED, SET_ASIDE = "refused", "set aside"
"""Further states of a drain (``ActiveDrain`` has the others)."""
RANKED = (QUEUED, SENDING, COMMITTING, OTHER_RANKS, STORE, REFUSED, SET_ASIDE)
"""The states of a drain; the last needs a person most."""


def step_rows(journal: Sequence[Json], local: Sequence[Json], agent: Json) -> list[Json]:
    """A row for each step of this node, newest first, with its state on each tier."""
    rows: dict[str, Json] = {}
    done_bytes: Counter[str] = Counter()
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
        if item["state"] == LOCAL_ONLY:
            row["shared"] = "local only"
            continue
        if (drain := item["drain"]) is None:
            row["local"] = row["local"] or "writing"
            continue
        if row["drain"] is None or RANKED.index(drain["state"]) > RANKED.index(row["drain"]["state"]):
            row["drain"], row["shared"] = drain, drain["state"]  # of several ranks that which needs a person most
        done_bytes[item["uri"]] += drain["done_bytes"]
    for row in rows.values():
        if row["drain"] is not None and done_bytes[row["uri"]]:
            row["share"] = min(1.0, done_bytes[row["uri"]] / max(1, row["size_bytes"]))
    return sorted(rows.values(), key=lambda row: (row["at_unix_seconds"], row["step"]), reverse=True)


def _row(rows: dict[str, Json], uri: str, at_unix_seconds: float) -> Json | None:
    """The row of ``uri``; None when it is no step of a run."""
    run, step = _run_and_step(uri)
    if step is None:
        return None
    new = {
        "run": run, "step": step, "uri": uri, "at_unix_seconds": at_unix_seconds, "size_bytes": 0,
        "local": None, "peers": None, "shared": None, "share": None, "drain": None,
    }  # fmt: skip
    return rows.setdefault(uri, new)


@lru_cache(maxsize=8192)
def _run_and_step(uri: str) -> tuple[str, int | None]:
    location = parse_uri(uri)
    return location.parent.uri, step_of(location.name)


def run_rows(steps: Sequence[Json], newest_drained: Callable[[str], Json | None] = lambda run: None) -> list[Json]:
    """A row for each run of this node, newest first: its safe step, and the loss if this node dies.

    Args:
        newest_drained: the line of ``run_log_reader.newest_drained`` of a run: the local copy may be gone.
    """
    by_run: dict[str, list[Json]] = {}
    for row in steps:
        by_run.setdefault(row["run"], []).append(row)
    return [_run(run, rows, newest_drained(run)) for run, rows in by_run.items()]


def _run(run: str, rows: Sequence[Json], drained: Json | None) -> Json:
    """``rows`` are newest first. Steps that are newer than the newest safe one are lost with this node."""
    safe = next((row for row in rows if row["shared"] == "committed"), None)
    lost = [*(rows[: rows.index(safe)] if safe is not None else rows)]
    if drained is not None and (safe is None or drained["created_at"] > safe["at_unix_seconds"]):
        uri = f"{run.rstrip('/')}/{step_name(drained['step'])}"
        safe = {"step": drained["step"], "uri": uri, "at_unix_seconds": drained["created_at"]}
        lost = [row for row in rows if row["at_unix_seconds"] > drained["created_at"] and row["uri"] != uri]
    on_peers = next((row for row in lost if row["peers"] == "committed"), None)
    gone = lost[: lost.index(on_peers)] if on_peers is not None else lost
    kept = on_peers or safe
    lag_seconds = rows[0]["at_unix_seconds"] - safe["at_unix_seconds"] if safe is not None else None
    return {
        "run": run,
        "steps": len(rows),
        "newest_step": rows[0]["step"],
        "newest_unix_seconds": rows[0]["at_unix_seconds"],
        "safe_step": safe["step"] if safe is not None else None,
        "safe_uri": safe["uri"] if safe is not None else None,
        "safe_unix_seconds": safe["at_unix_seconds"] if safe is not None else None,
        "lag_steps": len(lost),
        "lag_seconds": lag_seconds,
        "lag_bytes": sum(row["size_bytes"] for row in lost),
        "if_this_node_dies": _loss(gone, kept, on_peers is not None),
    }


def _loss(gone: Sequence[Json], kept: Json | None, is_on_peers: bool) -> str:
    where = "other nodes" if is_on_peers else "shared storage"
    if not gone and kept is not None:
        return f"nothing is lost: step {kept['step']} is on {where}"
    size = human_bytes(sum(row["size_bytes"] for row in gone))
    if kept is None:
        return f"all {len(gone)} steps of this node are lost ({size}): none is on shared storage"
    names = f"step {gone[0]['step']} is" if len(gone) == 1 else f"{len(gone)} steps up to {gone[0]['step']} are"
    seconds = human_seconds(max(0.0, gone[0]["at_unix_seconds"] - kept["at_unix_seconds"]))
    return f"{names} lost ({size}, {seconds} of training): step {kept['step']} is the newest on {where}"
