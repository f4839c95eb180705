"""``tierckpt status``: tiers, queue, lag, rates and last errors of this node. Asks its agent, and no store."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live

from ..cache.pool import Pool
from ..cache.prefetch import RECEIPT
from ..checkpoint import marks
from ..checkpoint.catalog import file_size
from ..checkpoint.journal import READY, SET_ASIDE, Entry, Journal
from ..checkpoint.retention import local_checkpoints, nearest_existing
from ..config import Settings
from ..drain.budget import UNCHANGED, read_control
from ..errors import ConfigError, TierckptError
from ..format.layout import GRADIENTS_DIR, MANIFEST, Location, agent_dir, step_of
from ..ipc.client import SOCKET, AgentClient, NoneRunsError
from ..replay import segments
from ..types import Json
from . import peers as peers_view
from .ui.output import Report, facts, human_bytes, human_seconds, table
from .ui.session import JsonOption, LocalRootOption, load_settings

ANSWER_SECONDS = 2.0
GROUPED_MIN = 4
"""Cached objects of one place from which on they are one line."""

Watch = Annotated[bool, typer.Option("--watch", help="Draw it again and again until Ctrl-C.")]
Interval = Annotated[float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Between two pictures.")]
Peers = Annotated[bool, typer.Option("--peers", help="The other nodes: who is there, and what goes between us.")]


def status(
    watch: Watch = False,
    interval: Interval = 1.0,
    peers: Peers = False,
    as_json: JsonOption = False,
    local_root: LocalRootOption = None,
) -> Report:
    """Show the journal (what is not on shared storage yet, and why), the local tier, the agent, and free space."""
    settings = load_settings(local_root)
    if watch and as_json:
        raise ConfigError("--watch draws for people, --json is for programs", hint="Leave one out")
    if peers:
        if watch:
            _redraw(lambda: peers_view.view(peers_view.document(settings)), interval)
        document = peers_view.document(settings)
        return Report(document, peers_view.view(document))
    if watch:
        _redraw(_Rated(settings).view, interval)
    document = _document(settings)
    return Report(document, _view(document))


def _redraw(view: Callable[[], list[RenderableType]], interval_seconds: float) -> None:
    """Draw over and over until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
        while True:
            live.update(Group(*view()), refresh=True)
            time.sleep(interval_seconds)


class _Rated:
    """The state of the node, with the rate of its agent since the picture before."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._before: tuple[float, int] | None = None

    def view(self) -> list[RenderableType]:
        document, now = _document(self._settings), time.monotonic()
        agent = document["agent"]
        if agent is not None:
            if self._before is not None:
                moved = max(0, agent["moved_bytes"] - self._before[1])
                agent["bytes_per_second"] = moved / max(now - self._before[0], 1e-3)
            self._before = (now, agent["moved_bytes"])
        return _view(document)


def _document(settings: Settings) -> Json:
    root = settings.local_root
    journal = [_entry(entry) for entry in Journal(root).entries()]
    local = sorted([*_checkpoints(root), *_prefetched(root), *_cached(settings)], key=lambda item: item["uri"])
    disk = shutil.disk_usage(nearest_existing(root))
    agent, problem = _agent(settings)
    waiting = [item for item in journal if item["state"] == READY]
    return {
        "local_root": str(root),
        "journal": journal,
        "set_aside": sum(item["state"] == SET_ASIDE for item in journal),
        "journal_bytes": sum(item["size_bytes"] for item in journal),
        "lag_seconds": max((item["age_seconds"] for item in waiting), default=0.0),
        "budget": _budget(settings),
        "agent": agent,
        "agent_problem": problem,
        "local": local,
        "local_bytes": sum(item["size_bytes"] for item in local),
        "gradient_logs": list(_gradient_logs(root)),
        "free_bytes": disk.free,
        "total_bytes": disk.total,
    }


def _agent(settings: Settings) -> tuple[Json | None, str | None]:
    """What the agent says of itself, None when none runs; and why it says nothing, when one may run all the same."""
    if not (agent_dir(settings.local_root) / SOCKET).exists():
        return None, None
    contact = AgentClient(settings)
    try:
        answer: Json = contact.ask({"op": "status"}, start=False, timeout_seconds=ANSWER_SECONDS)
    except NoneRunsError:
        return None, None
    except TierckptError as error:
        return None, error.message
    finally:
        contact.close()
    return answer, None


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
        "age_seconds": max(0.0, time.time() - entry.created_unix_seconds),
        "failing_seconds": max(0.0, time.time() - entry.failing_since_unix_seconds)
        if entry.failing_since_unix_seconds
        else None,
        "last_error": entry.error,
    }


def _checkpoints(root: Path) -> Iterator[Json]:
    for directory, manifest in local_checkpoints(root):
        here = [entry for entry in manifest.entries if file_size(directory / entry.key) == entry.size_bytes]
        yield {
            "uri": _location(root, directory).uri,
            "kind": "checkpoint",
            "files": len(here),
            "files_of_checkpoint": len(manifest.entries),
            "size_bytes": sum(entry.size_bytes for entry in here),
            "drained": marks.is_drained(directory, manifest.attempt),
        }


def _gradient_logs(root: Path) -> Iterator[Json]:
    """What lies behind the checkpoints of this node, of each rank."""
    base = root / "checkpoints"
    for directory in sorted(base.rglob(f"{GRADIENTS_DIR}/rank-*")) if base.is_dir() else ():
        sizes = [file_size(path) for path in segments.paths_in(directory)]
        if sizes:
            yield {
                "uri": _location(root, directory.parent.parent).uri,
                "rank": step_of(directory.name),
                "size_bytes": sum(size for size in sizes if size > 0),
                "newest_step": segments.newest_step(directory),
            }


def _prefetched(root: Path) -> Iterator[Json]:
    base = root / "checkpoints"
    for receipt in base.rglob(RECEIPT) if base.is_dir() else ():
        directory = receipt.parent.parent
        if (directory / MANIFEST).exists():
            continue  # listed as a checkpoint
        sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file() and path != receipt]
        yield {
            "uri": _location(root, directory).uri,
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


def _location(root: Path, directory: Path) -> Location:
    """The inverse of ``layout.local_dir``."""
    scheme, authority, *path = directory.relative_to(root / "checkpoints").parts
    leading = "/" if scheme == "file" else ""
    return Location(scheme, "" if authority == "_" else authority, leading + "/".join(path))


def _agent_line(agent: Json | None, problem: str | None) -> str:
    if problem is not None:
        return f"does not answer: {problem}"
    if agent is None:
        return "none runs (one is started when there is something to drain)"
    rate = f", {human_bytes(int(agent['bytes_per_second']))}/s" if "bytes_per_second" in agent else ""
    return (
        f"process {agent['pid']}, {agent['processes']} connected, drains {agent['draining']}{rate}; holds "
        f"{human_bytes(agent['memory_held_bytes'])} of staging memory, {agent['staged_saves']} staged saves"
    )


def _copies_line(copies: Json) -> str:
    """Whether the newest steps of this node are on all the nodes that are to hold them."""
    if copies["replicas"] < 2:
        return "none (replicas=1)"
    newest = [
        f"{row['uri']} is {'on all' if row['has_all_replicas'] else 'not yet on all'} of {len(copies['holders'])} nodes"
        for row in copies["newest"].values()
    ]
    lacking = f"; {copies['without_room']} times no room here for a peer's" if copies["without_room"] else ""
    return ("; ".join(newest) or "nothing of this node's own to copy") + lacking


def _budget_line(budget: Json) -> str:
    if budget["problem"]:
        return str(budget["problem"])
    rate = budget["bytes_per_second"]
    allowed = f"{human_bytes(rate)}/s" if rate else "as fast as the store takes it"
    return f"{'paused; ' if budget['paused'] else ''}{allowed}, {budget['concurrency']} files at a time"


def _grouped(local: Sequence[Json]) -> Iterator[Json]:
    """Cached objects of one place are one line: shards of a data set are read by the hundred."""
    below: dict[tuple[str, str], list[Json]] = {}
    for item in local:
        where = item["uri"].rpartition("/")[0] if "leases" in item else item["uri"]
        below.setdefault((where, item["kind"]), []).append(item)
    for (where, _), items in below.items():
        if len(items) < GROUPED_MIN:
            yield from items
            continue
        yield items[0] | {
            "uri": f"{where}/ ({len(items)} objects)",
            "files": sum(item["files"] for item in items),
            "size_bytes": sum(item["size_bytes"] for item in items),
        }


def _view(document: Json) -> list[RenderableType]:
    summary = {
        "local root": document["local_root"],
        "free": f"{human_bytes(document['free_bytes'])} of {human_bytes(document['total_bytes'])}",
        "to drain": f"{human_bytes(document['journal_bytes'])} in {len(document['journal'])} entries, "
        f"the oldest {human_seconds(document['lag_seconds'])} old",
        "local tier": f"{human_bytes(document['local_bytes'])} in {len(document['local'])} directories",
        "drains": _budget_line(document["budget"]),
        "agent": _agent_line(document["agent"], document["agent_problem"]),
    }
    if document["set_aside"]:
        summary["set aside"] = (
            f"{document['set_aside']} entries, which no mover tries any more: `tierckpt drain --retry` puts them back, "
            "`tierckpt drain --forget URI` gives them up"
        )
    if copies := (document["agent"] or {}).get("replicas"):
        summary["copies"] = _copies_line(copies)
    waiting = [
        (
            item["uri"],
            item["rank"],
            item["state"],
            human_bytes(item["size_bytes"]),
            human_seconds(item["age_seconds"]),
            item["last_error"],
        )
        for item in document["journal"]
    ]
    here = [
        (item["uri"], item["kind"], item["files"], human_bytes(item["size_bytes"]), "yes" if item["drained"] else "no")
        for item in _grouped(document["local"])
    ]
    view: list[RenderableType] = [facts(summary)]
    moving = (document["agent"] or {}).get("moving", [])
    if moving:
        rows = [
            (
                item["what"],
                f"{100 * item['done_bytes'] / max(1, item['total_bytes']):.0f} %",
                human_bytes(item["total_bytes"]),
            )
            for item in moving
        ]
        view.append(table("moving >done >size", rows))
    errors = (document["agent"] or {}).get("errors", [])
    if errors:
        told = [(human_seconds(time.time() - item["at_unix_seconds"]), item["message"]) for item in errors[-5:]]
        view.append(table(">ago last_errors_of_the_agent", told))
    if waiting:
        view.append(table("to_drain >rank state >size >age last_error", waiting))
    if here:
        view.append(table("on_this_node kind >files >size on_shared_tier", here))
    if document["gradient_logs"]:
        logs = [
            (item["uri"], item["rank"], human_bytes(item["size_bytes"]), item["newest_step"])
            for item in document["gradient_logs"]
        ]
        view.append(table("gradient_log >rank >size >newest_step", logs))
    return view
