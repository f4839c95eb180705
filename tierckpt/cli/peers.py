"""``tierckpt status --peers``: who the other nodes are, what goes between them and this one, and what would survive."""

from __future__ import annotations

from rich.console import RenderableType

from ..types import Json
from .ui.output import facts, human_bytes, table

STATES = ("live", "suspect", "dead", "left")


def view(document: Json) -> list[RenderableType]:
    """The same for people."""
    serves, counts = document.get("serves") or {}, document.get("members_by_state", {})
    fetched, me, copies = document.get("fetched_bytes_by_source", {}), document.get("me"), document.get("copies")
    sources = [f"{human_bytes(size)} from {name}" for name, size in sorted(fetched.items()) if size]
    slowest = document.get("slowest_chunk")
    summary = {
        "peers": document["peers"],
        "this node": f"{me['name']} on {me['address']}" if me else "takes no part",
        "members": ", ".join(f"{counts[state]} {state}" for state in STATES if counts.get(state))
        or "none but this one",
        "fetched": ", ".join(sources) or "nothing since this agent began",
        "served": _served(serves),
        "copies": _copies(copies, me["name"] if me else "") if copies and document["replicas"] > 1 else "",
        "survives": _survival(document["survival"], document["replicas"]) if document.get("survival") else "",
        "slowest chunk": f"{slowest['what']}, {slowest['seconds']:.2f} s, from {slowest['from']}" if slowest else "",
        "problem": document.get("problem") or "",
        "names": document.get("lookup_problem") or "",
    }
    columns = (
        "member=name state address domain:- >network=weight:rate >heard_ago=heard_seconds_ago:short "
        ">fetched_from=fetched_bytes:bytes >served_to=served_bytes:bytes >serving=served_bytes_per_second:rate"
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
