"""The drains of all nodes, as their agents answer ``/v1/drains``, for the page of the cluster.

Requests go to each node at most every ``ASK_SECONDS``, and at most ``ASKED_PER_SECOND`` in all: with 512 nodes an
answer is at most 21 s old.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.journal import DRAIN_STATES
from ..config import Settings
from ..errors import ObjectNotFoundError, TierckptError
from ..peer.membership import Member
from ..peer.peer_http import host_and_port
from ..redaction import redact_all
from ..types import Json
from .node_document import Known, node_document
from .peer_service import PeerService
from .run_catalog import RANKED

ASK_SECONDS = 5.0
ANSWER_SECONDS = 1.0
ASKED_AT_A_TIME = 64
ASKED_PER_SECOND = 25
NODES_MAX = 512
OWN_SECONDS = 2.0
CPU_SHARE = 0.004
RUNS_MAX = 16
TEXT_MAX = 300
PAUSED, IDLE = "paused", "nothing to drain"


def summary(document: Json) -> Json:
    waiting = [row for row in document["journal"] if row["state"] in DRAIN_STATES]
    drains = [row["drain"] for row in document["journal"] if row["drain"] is not None]
    worst = max(drains, key=lambda drain: RANKED.index(drain["state"]), default=None)
    state = IDLE if worst is None else worst["state"]
    if document["budget"]["paused"] and waiting:
        state = PAUSED
    return {
        "host": document["host"],
        "state": state,
        "cause": worst["cause"][:TEXT_MAX] if worst is not None else "",
        "entries": len(waiting),
        "lag_bytes": document["lag_bytes"],
        "lag_seconds": document["lag_seconds"],
        "bytes_per_second": (document["agent"] or {}).get("bytes_per_second", 0.0),
        "free_bytes": document["free_bytes"],
        "runs": [
            {name: run[name] for name in ("run", "newest_step", "safe_step", "if_this_node_dies")}
            for run in document["runs"][:RUNS_MAX]
        ],
        "runs_of_node": len(document["runs"]),
    }


def checked(answer: Any) -> Json:
    """Validate another node's ``summary``. Raises ValueError."""
    try:
        texts = {name: str(answer[name])[:TEXT_MAX] for name in ("host", "state", "cause")}
        names = ("entries", "lag_bytes", "lag_seconds", "bytes_per_second", "free_bytes", "runs_of_node")
        runs = [
            {
                "run": str(run["run"])[: 4 * TEXT_MAX],
                "newest_step": None if run["newest_step"] is None else int(run["newest_step"]),
                "safe_step": None if run["safe_step"] is None else int(run["safe_step"]),
                "if_this_node_dies": str(run["if_this_node_dies"])[:TEXT_MAX],
            }
            for run in answer["runs"][:RUNS_MAX]
        ]
        return texts | {name: _number(answer[name]) for name in names} | {"runs": runs}
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a valid answer about drains: {type(error).__name__}") from None


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise ValueError(f"{value!r:.40} is not a number from 0 to 1e18")
    return value


@dataclass(slots=True)
class _Told:
    drains: Json | None = None
    at_unix_seconds: float = 0.0
    asked_at: float = float("-inf")
    problem: str = ""
    silent_since_unix_seconds: float | None = field(default=None)


class ClusterDrains:
    """Runs on the agent's loop. ``peers``: None without a cluster."""

    def __init__(self, settings: Settings, status: Callable[[], Json], peers: PeerService | None) -> None:
        self._settings, self._status, self._peers = settings, status, peers
        self._known: Known = {}
        self._own: Json = {}
        self._own_until = float("-inf")
        self._making = asyncio.Lock()
        self._told: dict[str, _Told] = {}
        self._asking: asyncio.Task[None] | None = None

    async def own(self) -> Json:
        async with self._making:
            if time.monotonic() >= self._own_until:
                self._own, cpu_seconds = await asyncio.to_thread(self._make, self._status())
                self._own_until = time.monotonic() + max(OWN_SECONDS, cpu_seconds / CPU_SHARE)
        return self._own

    def _make(self, status: Json) -> tuple[Json, float]:
        begun = time.thread_time()
        found: Json = redact_all(summary(node_document(self._settings, self._known, agent=status)))
        return found, time.thread_time() - begun

    async def document(self) -> Json:
        own = await self.own()
        members = self._peers.members()[:NODES_MAX] if self._peers is not None else []
        if self._asking is None or self._asking.done():
            queried = [member for member, state, _ in members if state != "left"]
            self._asking = asyncio.create_task(self._ask(queried))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * ANSWER_SECONDS):
                await asyncio.shield(self._asking)
        me = self._peers.gossip.me if self._peers is not None and self._peers.gossip is not None else None
        rows = [self._row(member, state, last_seen) for member, state, last_seen in members]
        self._told = {member.name: self._told[member.name] for member, _, _ in members if member.name in self._told}
        this: Json = {
            "name": me.name if me is not None else own["host"], "address": me.address if me is not None else "",
            "is_this": True, "state": "live", "answers": True, "silent_since_unix_seconds": None, "problem": "",
            "at_unix_seconds": time.time(), "drains": own,
        }  # fmt: skip
        return {
            "at_unix_seconds": time.time(),
            "problem": self._problem(),
            "nodes": sorted([this, *rows], key=_need, reverse=True),
            "unreachable": self._unreachable(members),
        }

    def _unreachable(self, members: Iterable[tuple[Member, str, float]]) -> list[str]:
        known = {place for member, _, _ in members for place in (member.address, host_and_port(member.address)[0])}
        return [
            place
            for place in (self._peers.unreachable_nodes() if self._peers is not None else ())
            if place not in known
        ]

    def _problem(self) -> str:
        if self._peers is None:
            return "This node has no peers: set peers (TIERCKPT_PEERS) for all nodes of the cluster."
        return self._peers.problem

    def _row(self, member: Member, state: str, heard_seconds_ago: float) -> Json:
        reply = self._told.get(member.name, _Told())
        is_silent = state in ("suspect", "dead") or reply.silent_since_unix_seconds is not None
        since = reply.silent_since_unix_seconds or time.time() - heard_seconds_ago
        return {
            "name": member.name, "address": member.address, "is_this": False, "state": state,
            "answers": state != "left" and not is_silent,
            "silent_since_unix_seconds": since if is_silent and state != "left" else None,
            "problem": reply.problem, "at_unix_seconds": reply.at_unix_seconds, "drains": reply.drains,
        }  # fmt: skip

    async def _ask(self, members: Iterable[Member]) -> None:
        now, period = time.monotonic(), ASK_SECONDS
        due = [member for member in members if now - self._told.setdefault(member.name, _Told()).asked_at >= period]
        due.sort(key=lambda member: self._told[member.name].asked_at)
        gate = asyncio.Semaphore(ASKED_AT_A_TIME)

        async def one(member: Member) -> None:
            async with gate:
                await self._ask_one(member, self._told[member.name])

        await asyncio.gather(*(one(member) for member in due[: int(ASKED_PER_SECOND * period)]))

    async def _ask_one(self, member: Member, reply: _Told) -> None:
        assert self._peers is not None
        reply.asked_at = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reply.drains = checked(await self._peers.ask_drains(member))
        except ObjectNotFoundError:
            reply.problem, reply.silent_since_unix_seconds = "its agent's version does not report drains", None
        except (TierckptError, OSError, TimeoutError, ValueError) as error:
            reply.problem = str(error)[:TEXT_MAX] or f"no answer in {ANSWER_SECONDS:g} s"
            reply.silent_since_unix_seconds = reply.silent_since_unix_seconds or reply.at_unix_seconds or time.time()
        else:
            reply.at_unix_seconds, reply.problem, reply.silent_since_unix_seconds = time.time(), "", None

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])


def _need(row: Json) -> tuple[bool, int, float, bool]:
    drains, is_silent = row["drains"] or {}, not row["answers"] and row["state"] != "left"
    state = RANKED.index(drains["state"]) if drains.get("state") in RANKED else -1
    return is_silent, state, float(drains.get("lag_seconds", 0.0)), row["is_this"]
