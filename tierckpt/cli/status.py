"""``tierckpt status``. Queries the node's agent, and no store."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import RenderableType
from typer import Option

from ..agent.node_document import ask_agent, node_document, peers_document
from ..checkpoint.catalog import file_size
from ..config import Settings
from ..drain.active_drain import SENDING
from ..errors import ConfigError
from ..format.layout import GRADIENTS_DIR, location_at, step_of
from ..save import log_segments
from ..types import Json
from .ui.output import Report, facts, human_bytes, human_seconds, redrawing, table
from .ui.session import Session

SHOWN = 3
SET_ASIDE_LINE = (
    "{set_aside} entries whose drain failed for too long: `tierckpt drain --retry` retries them, "
    "`tierckpt drain --forget URI` drops them"
)
GROUPED_MIN = 4
"""Fewer cached objects of one location get a line each."""


def status(
    session: Session,
    watch: Annotated[bool, Option(help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[float, Option(metavar="SECONDS", min=0.1, help="Between two refreshes.")] = 1.0,
    peers: Annotated[bool, Option(help="Show the other nodes, and the traffic with them.")] = False,
    web: Annotated[bool, Option(help="Show a web page: the agent's (--metrics-port), else until Ctrl-C.")] = False,
    listen: Annotated[
        str | None, Option(metavar="HOST[:PORT]", help="With --web: address to serve. Beyond loopback with a token.")
    ] = None,
) -> Report:
    """Show the journal (checkpoints not yet on shared storage, and why), the local tier, the agent, and free space."""
    settings = session.settings()
    if watch and session.as_json:
        raise ConfigError("--watch draws for people, --json is for programs", hint="Leave one out")
    if listen is not None and not web:
        raise ConfigError("--listen is the address of the page", hint="Give --web too")
    if web:
        return _web(settings, listen, as_json=session.as_json)
    read, view = (peers_document, _peers_view) if peers else (_document, _view)
    if watch:
        with contextlib.suppress(KeyboardInterrupt), redrawing(sys.stdout) as draw:
            while True:
                draw(*view(read(settings)))
                time.sleep(interval)
    document = read(settings)
    return Report(document, view(document))


def _web(settings: Settings, listen: str | None, *, as_json: bool) -> Report:
    """Return the address of the agent's page. Without one, or with ``listen``, serve a page until Ctrl-C."""
    agent, _ = ask_agent(settings, {"op": "status"})
    if listen is None and agent is not None and (url := agent.get("page")):
        return Report({"url": url}, [url, _from_elsewhere(url)])
    if as_json:
        raise ConfigError(
            "this node's agent serves no page, and --json cannot serve one until Ctrl-C",
            hint="Leave --json out, or start the agent with --metrics-port",
        )
    from ..agent.web import WebServer

    host, port = _host_and_port(listen)
    server = WebServer(settings, host=host, port=port)

    async def serve() -> None:
        await server.start()
        typer.echo(f"{server.url}\n{_from_elsewhere(server.url)}")
        try:
            await asyncio.Event().wait()
        finally:
            await server.close()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())
    return Report({"url": server.url}, ["The page is no longer served."])


def _host_and_port(listen: str | None) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{listen or '127.0.0.1'}")
        return parts.hostname or "", parts.port or 0
    except ValueError:
        raise ConfigError(f"--listen is {listen!r}", hint="Write it like 127.0.0.1:8642") from None


def _from_elsewhere(url: str) -> str:
    port = urlsplit(url).port
    return f"From elsewhere: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, then the same address."


def _document(settings: Settings) -> Json:
    document = node_document(settings)
    copies = (document["agent"] or {}).get("replicas") or {}
    return {**document, "gradient_logs": list(_gradient_logs(settings.local_root, copies.get("logs", [])))}


def _gradient_logs(root: Path, copied: Sequence[Json]) -> Iterator[Json]:
    base, peers = root / "checkpoints", {(row["uri"], row["rank"]): row["peers_step"] for row in copied}
    for directory in sorted(base.rglob(f"{GRADIENTS_DIR}/rank-*")) if base.is_dir() else ():
        sizes = [file_size(path) for path in log_segments.paths_in(directory)]
        location = location_at(root, directory.parent.parent)
        if sizes and location is not None:
            steps = [one.newest_step for one in log_segments.list_chains(directory) if one.newest_step is not None]
            yield {
                "uri": location.uri,
                "rank": step_of(directory.name),
                "size_bytes": sum(size for size in sizes if size > 0),
                "newest_step": max(steps, default=None),
                "peers_step": peers.get((location.uri, step_of(directory.name))),
            }


def _agent_line(agent: Json | None, problem: str | None) -> str:
    if problem is not None:
        return f"does not answer: {problem}"
    if agent is None:
        return "not running (one starts when there is something to drain)"
    rate = f", {human_bytes(int(agent['bytes_per_second']))}/s" if agent["draining"] else ""
    return (
        f"process {agent['pid']}, {agent['processes']} connected, drains {agent['draining']}{rate}; holds "
        f"{human_bytes(agent['memory_held_bytes'])} of staging memory, {agent['staged_saves']} staged saves"
    )


def _copies_line(copies: Json) -> str:
    if copies["replicas"] < 2:
        return "none (replicas=1)"
    newest = [
        f"{row['uri']} is {'on all' if row['has_all_replicas'] else 'not yet on all'} of {len(copies['holders'])} nodes"
        for row in copies["newest"].values()
    ]
    lacking = f"; {copies['without_room']} times no space here for a peer's" if copies["without_room"] else ""
    return ("; ".join(newest) or "nothing of this node's own to copy") + lacking


def _budget_line(budget: Json) -> str:
    if budget["problem"]:
        return str(budget["problem"])
    rate = budget["bytes_per_second"]
    allowed = f"{human_bytes(rate)}/s" if rate else "as fast as the store accepts it"
    return f"{'paused; ' if budget['paused'] else ''}{allowed}, {budget['concurrency']} files at a time"


def _grouped(local: Sequence[Json]) -> Iterator[Json]:
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


def _drain_text(item: Json) -> str:
    drain = item["drain"]
    if drain is None or drain["state"] != SENDING:
        return str(item["state"] if drain is None else drain["state"])
    share, rate = drain["done_bytes"] / max(1, item["size_bytes"]), drain["bytes_per_second"]
    left = f", {human_seconds((item['size_bytes'] - drain['done_bytes']) / rate)} left" if rate >= 1 else ""
    return f"sending, {100 * share:.0f} %, {human_bytes(int(rate))}/s{left}"


def _cause_text(item: Json) -> str:
    drain = item["drain"]
    if drain is None or not drain["cause"]:
        return str(item["last_error"]) if drain is None else ""
    since = human_seconds(time.time() - drain["since_unix_seconds"])
    return f"for {since}: {drain['cause']}"


def _waiting_rows(journal: Sequence[Json]) -> Iterator[object]:
    groups: dict[tuple[str, str], list[Json]] = {}
    for item in journal:
        state = item["state"] if item["drain"] is None else item["drain"]["state"]
        groups.setdefault((item["uri"].rpartition("/")[0], state), []).append(item)
    for (run, state), items in groups.items():
        shown = items if len(items) <= SHOWN + 1 else items[:SHOWN]
        yield from (item | {"state": _drain_text(item), "cause": _cause_text(item)} for item in shown)
        if more := items[len(shown) :]:
            size_bytes = sum(item["size_bytes"] for item in more)
            yield f"{run}/ ({len(more)} more)", "", state, size_bytes, more[-1]["age_seconds"], ""


def _view(document: Json) -> list[RenderableType]:
    agent: Json = document["agent"] or {}
    checks = {
        verb: f"{row['uri']}, {'good' if row.get('good') else 'DAMAGED'}, "
        f"{human_seconds(time.time() - row['at_unix_seconds'])} ago"
        for verb, row in document["checks"].items()
        if row is not None
    }
    summary = {
        "local root": "{local_root}",
        "free": "{free_bytes:bytes} of {total_bytes:bytes}",
        "to drain": "{journal_bytes:bytes} in {journal:count} entries, the oldest {lag_seconds:seconds} old",
        "local tier": "{local_bytes:bytes} in {local:count} directories",
        "drains": "{budget_line}",
        "agent": "{agent_line}",
        **{f"last {verb}": f"{{last_{verb}}}" for verb in checks},
        "set aside": SET_ASIDE_LINE if document["set_aside"] else "",
        "copies": "{copies}",
    }
    lines = {
        **{f"last_{verb}": text for verb, text in checks.items()},
        "budget_line": _budget_line(document["budget"]),
        "agent_line": _agent_line(document["agent"], document["agent_problem"]),
        "copies": _copies_line(agent["replicas"]) if agent.get("replicas") else "",
    }
    stores = [row | {"cause": f"{row['cause']}. {row['remedy']}".rstrip(". ") + "."} for row in document["stores"]]
    moving = [
        (item["what"], (item["done_bytes"], item["total_bytes"]), item["total_bytes"])
        for item in agent.get("moving", ())
        if not item["what"].startswith("drain ")
    ]
    rows = {
        "run >newest=newest_step >safe=safe_step:none >age_of_safe=safe_unix_seconds:since "
        "if_this_node_dies_now=if_this_node_dies": document["runs"],
        "store state >for=since_unix_seconds:since >next_try_in=next_try_seconds:seconds "
        ">waiting=size_bytes:bytes >entries cause": stores,
        "moving >done:of >size:bytes": moving,
        ">ago=at_unix_seconds:since last_errors_of_the_agent=message": agent.get("errors", ())[-5:],
        "to_drain=uri >rank state >size=size_bytes:bytes >age=age_seconds:seconds waits_for=cause": _waiting_rows(
            document["journal"]
        ),
        "on_this_node=uri kind >files >size=size_bytes:bytes on_shared_tier=drained:yes": _grouped(document["local"]),
        "gradient_log=uri >rank >size=size_bytes:bytes >newest_step >step_on_peers=peers_step": document[
            "gradient_logs"
        ],
    }
    return [facts(summary, document, **lines), *(table(columns, found) for columns, found in rows.items())]


# --- --peers -----------------------------------------------------------------------------------------------------

MEMBER_STATES = ("live", "suspect", "dead", "left")


def _peers_view(document: Json) -> list[RenderableType]:
    serves, counts = document.get("serves") or {}, document.get("members_by_state", {})
    fetched, me, copies = document.get("fetched_bytes_by_source", {}), document.get("me"), document.get("copies")
    sources = [f"{human_bytes(size)} from {name}" for name, size in sorted(fetched.items()) if size]
    summary = {
        "peers": document["peers"],
        "this node": f"{me['name']} on {me['address']}" if me else "takes no part",
        "members": ", ".join(f"{counts[state]} {state}" for state in MEMBER_STATES if counts.get(state))
        or "none but this one",
        "fetched": ", ".join(sources) or "nothing since this agent started",
        "served": _served(serves),
        "copies": _copies(copies, me["name"] if me else "") if copies and document["replicas"] > 1 else "",
        "survives": _survival(document["survival"], document["replicas"]) if document.get("survival") else "",
        "problem": document.get("problem") or "",
        "names": document.get("lookup_problem") or "",
    }
    columns = (
        "member=name state address domain:- >network=weight:rate >heard_ago=heard_seconds_ago:short "
        ">fetched_from=fetched_bytes:bytes >served_to=served_bytes:bytes"
    )
    fills = [
        (row["uri"], (row["landed_bytes"], row["size_bytes"]), row["size_bytes"]) for row in serves.get("fills", ())
    ]
    return [
        facts(summary),
        table(columns, document.get("members", ())),
        table("on_its_way >here:of >size:bytes", fills),
    ]


def _served(serves: Json) -> str:
    if not serves:
        return "nothing"
    requests, total = serves["requests"], sum(serves["served_bytes"].values())
    text = f"{human_bytes(total)} in {requests.get('chunks', 0)} chunks, {serves['serving']} under way"
    refused = requests.get("refused", 0) + requests.get("malformed", 0)
    return text + (f"; {refused} requests refused" if refused else "")


def _copies(copies: Json, me: str) -> str:
    text = f"{human_bytes(copies['copied_bytes'])} copied here for {', '.join(copies['sources']) or 'nobody'}"
    holders = [name for name in copies["holders"] if name != me]
    newest = list(copies["newest"].values())
    safe = sum(row["has_all_replicas"] for row in newest)
    return (
        f"{text}; ours are held by {', '.join(holders) or 'nobody else'}: the newest of {safe} of {len(newest)} runs"
        + (f"; {copies['last_error']}" if copies["last_error"] else "")
    )


def _survival(survival: Json, replicas: int) -> str:
    odds = ", ".join(f"{lost} at once: {100 * value:.4g} %" for lost, value in survival.items())
    return f"the loss of nodes, with {replicas} {'copy' if replicas == 1 else 'copies'} of each shard: {odds}"
