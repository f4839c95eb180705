"""``tierckpt status --peers``: who the other nodes are, what goes between them and this one, and what would survive."""

from __future__ import annotations

from rich.console import RenderableType

from ..types import Json
from .ui.output import facts, human_bytes, human_seconds, table

STATES = ("live", "suspect", "dead", "left")


def view(document: Json) -> list[RenderableType]:
    """The same for people."""
    serves, counts = document.get("serves") or {}, document.get("members_by_state", {})
    fetched, me = document.get("fetched_bytes_by_source", {}), document.get("me")
    summary = {
        "peers": document["peers"],
        "this node": f"{me['name']} on {me['address']}" if me else "takes no part",
        "members": ", ".join(f"{counts[state]} {state}" for state in STATES if counts.get(state))
        or "none but this one",
        "fetched": _by_source(fetched),
        "served": _served(serves),
    }
    copies = document.get("copies")
    if copies and document["replicas"] > 1:
        summary["copies"] = _copies(copies, me["name"] if me else "")
    if document.get("survival"):
        summary["survives"] = _survival(document["survival"], document["replicas"])
    if slowest := document.get("slowest_chunk"):
        summary["slowest chunk"] = f"{slowest['what']}, {slowest['seconds']:.2f} s, from {slowest['from']}"
    problems = {"problem": document.get("problem"), "names": document.get("lookup_problem")}
    summary |= {name: text for name, text in problems.items() if text}
    parts: list[RenderableType] = [facts(summary)]
    if document.get("members"):
        columns = "member state address domain >network >heard >fetched_from >served_to >serving"
        parts.append(table(columns, [_line(row) for row in document["members"]]))
    if serves.get("fills"):
        rows = [(row["uri"], _share(row), human_bytes(row["size_bytes"])) for row in serves["fills"]]
        parts.append(table("on_its_way >here >size", rows))
    return parts


def _line(row: Json) -> tuple[object, ...]:
    return (
        row["name"],
        row["state"],
        row["address"],
        row["domain"] or None,
        f"{human_bytes(row['weight'])}/s" if row["weight"] else None,
        f"{f'{heard:.1f} s' if (heard := row['heard_seconds_ago']) < 60 else human_seconds(heard)} ago",
        human_bytes(row["fetched_bytes"]),
        human_bytes(row["served_bytes"]),
        f"{human_bytes(row['served_bytes_per_second'])}/s" if row["served_bytes_per_second"] else None,
    )


def _share(row: Json) -> str:
    return f"{100 * row['landed_bytes'] / max(1, row['size_bytes']):.0f} %"


def _by_source(fetched: Json) -> str:
    parts = [f"{human_bytes(size)} from {name}" for name, size in sorted(fetched.items()) if size]
    return ", ".join(parts) or "nothing since this agent began"


def _served(serves: Json) -> str:
    if not serves:
        return "nothing"
    requests, total = serves["requests"], sum(serves["served_bytes"].values())
    rate = sum(serves["bytes_per_second"].values())
    text = f"{human_bytes(total)} in {requests.get('chunks', 0)} chunks, {human_bytes(rate)}/s now"
    refused = requests.get("refused", 0) + requests.get("malformed", 0)
    return text + (f"; {refused} requests refused" if refused else "")


def _copies(copies: Json, me: str) -> str:
    """Whose fresh checkpoints are here, who holds ours, and whether the newest is held by all of them."""
    held = f"{human_bytes(copies['copied_bytes'])} copied here for {', '.join(copies['sources']) or 'nobody'}"
    holders = [name for name in copies["holders"] if name != me]
    newest = list(copies["newest"].values())
    safe = sum(row["has_all_replicas"] for row in newest)
    return (
        f"{held}; ours are held by {', '.join(holders) or 'nobody else'}: the newest of {safe} of {len(newest)} runs"
        + (f"; {copies['last_error']}" if copies["last_error"] else "")
    )


def _survival(survival: Json, replicas: int) -> str:
    """The share of losses that the newest checkpoint survives with ``replicas`` copies of each shard."""
    odds = ", ".join(f"{lost} at once: {100 * value:.4g} %" for lost, value in survival.items())
    return f"the loss of nodes, with {replicas} {'copy' if replicas == 1 else 'copies'} of each shard: {odds}"
