"""The page's other documents: history, one run, one checkpoint, the cluster and its drains; as JSON, by path.

D1  A run or a checkpoint is read only if the node's document contains it: a URL cannot select a path or bucket.
D2  A document is cached for ``KEEP_SECONDS``, and an answer takes at most ``AGENT_SECONDS``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..checkpoint.journal import DRAIN_STATES, JournalEntry
from ..config import Settings
from ..errors import ObjectNotFoundError, TierckptError
from ..mover import Mover
from ..peer.membership import Member
from ..peer.peer_http import host_and_port
from ..redaction import redact_all
from ..types import Json, Progress
from . import history
from .history import RINGS, History
from .node_document import NO_AGENT, Known, ask_agent, node_document
from .peer_service import PeerService
from .run_catalog import RANKED, RunCatalog, step_rows

ASK_SECONDS = 5.0
ANSWER_SECONDS = 1.0
ASKED_AT_A_TIME = 64
NODES_MAX = 512
OWN_SECONDS = 2.0
RUNS_MAX = 16
TEXT_MAX = 300
PAUSED, IDLE = "paused", "nothing to drain"
NO_PEERS = "This node has no peers: set peers (TIERCKPT_PEERS) for all nodes of the cluster."


def summary(document: Json) -> Json:
    waiting = [row for row in document["journal"] if row["state"] in DRAIN_STATES]
    drains = [row["drain"] for row in document["journal"] if row["drain"] is not None]
    worst = max(drains, key=lambda drain: RANKED.index(drain["state"]), default=None)
    state = IDLE if worst is None else worst["state"]
    if document["budget"]["paused"] and waiting:
        state = PAUSED
    return {
        **{name: document[name] for name in ("host", "lag_bytes", "lag_seconds", "free_bytes")},
        "state": state,
        "cause": worst["cause"][:TEXT_MAX] if worst is not None else "",
        "entries": len(waiting),
        "bytes_per_second": (document["agent"] or {}).get("bytes_per_second", 0.0),
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
    """The drains of all nodes, from ``/v1/drains`` of their agents. Runs on the agent's loop.

    Requests go to each node at most every ``ASK_SECONDS``. ``peers``: None without a cluster.
    """

    def __init__(self, settings: Settings, status: Callable[[], Json], peers: PeerService | None) -> None:
        self._settings, self._status, self._peers = settings, status, peers
        self._known: Known = {}
        self._own: Json = {}
        self._own_until = float("-inf")
        self._making = asyncio.Lock()
        self._told: dict[str, _Told] = {}

    async def own(self) -> Json:
        async with self._making:
            if time.monotonic() >= self._own_until:
                self._own = await asyncio.to_thread(self._make, self._status())
                self._own_until = time.monotonic() + OWN_SECONDS
        return self._own

    def _make(self, status: Json) -> Json:
        found: Json = redact_all(summary(node_document(self._settings, self._known, agent=status)))
        return found

    async def document(self) -> Json:
        own = await self.own()
        members = self._peers.members()[:NODES_MAX] if self._peers is not None else []
        with contextlib.suppress(TimeoutError):  # of many silent nodes the next documents ask the rest
            async with asyncio.timeout(2 * ANSWER_SECONDS):
                await self._ask(member for member, state, _ in members if state != "left")
        me = self._peers.gossip.me if self._peers is not None and self._peers.gossip is not None else None
        unreachable = self._peers.unreachable_nodes() if self._peers is not None else []
        known = {place for member, _, _ in members for place in (member.address, host_and_port(member.address)[0])}
        rows = [self._row(member, state, last_seen) for member, state, last_seen in members]
        self._told = {member.name: self._told[member.name] for member, _, _ in members if member.name in self._told}
        this: Json = {
            "name": me.name if me is not None else own["host"], "address": me.address if me is not None else "",
            "is_this": True, "state": "live", "answers": True, "silent_since_unix_seconds": None, "problem": "",
            "at_unix_seconds": time.time(), "drains": own,
        }  # fmt: skip
        return {
            "at_unix_seconds": time.time(),
            "problem": self._peers.problem if self._peers is not None else NO_PEERS,
            "nodes": sorted([this, *rows], key=_need, reverse=True),
            "unreachable": [place for place in unreachable if place not in known],
        }

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
        since, gate = time.monotonic() - ASK_SECONDS, asyncio.Semaphore(ASKED_AT_A_TIME)
        due = [member for member in members if self._told.setdefault(member.name, _Told()).asked_at <= since]
        due.sort(key=lambda member: self._told[member.name].asked_at)
        await asyncio.gather(*(self._ask_one(member, self._told[member.name], gate) for member in due))

    async def _ask_one(self, member: Member, reply: _Told, gate: asyncio.Semaphore) -> None:
        assert self._peers is not None
        try:
            async with gate, asyncio.timeout(ANSWER_SECONDS):
                reply.asked_at = time.monotonic()
                reply.drains = checked(await self._peers.ask_drains(member))
        except ObjectNotFoundError:
            reply.problem, reply.silent_since_unix_seconds = "its agent's version does not report drains", None
        except (TierckptError, OSError, TimeoutError, ValueError) as error:
            reply.problem = str(error)[:TEXT_MAX] or f"no answer in {ANSWER_SECONDS:g} s"
            reply.silent_since_unix_seconds = reply.silent_since_unix_seconds or reply.at_unix_seconds or time.time()
        else:
            reply.at_unix_seconds, reply.problem, reply.silent_since_unix_seconds = time.time(), "", None


def _need(row: Json) -> tuple[bool, int, float, bool]:
    drains, is_silent = row["drains"] or {}, not row["answers"] and row["state"] != "left"
    state = RANKED.index(drains["state"]) if drains.get("state") in RANKED else -1
    return is_silent, state, float(drains.get("lag_seconds", 0.0)), row["is_this"]


DRAIN = "drain "
SLOT_MARGIN_SECONDS = 0.05
"""Margin for a timer that fires early."""


class PageSource:
    """Answers the page, on the agent's loop. ``peers``: None without a cluster."""

    def __init__(self, mover: Mover, status: Callable[[], Json], peers: PeerService | None) -> None:
        self._root = mover.settings.local_root
        self.history = History.read(self._root)
        self.runs = RunCatalog(mover)
        self.cluster = ClusterDrains(mover.settings, status, peers)
        self.entries: Sequence[JournalEntry] = ()

    def moved(self, progress: Progress, size_bytes: int) -> None:
        if progress.what.startswith(DRAIN):
            self.history.count_sent(progress.what.removeprefix(DRAIN), size_bytes)

    async def run(self) -> None:
        written_at = time.monotonic()
        while True:
            await asyncio.sleep(history.SAMPLE_SECONDS - time.time() % history.SAMPLE_SECONDS + SLOT_MARGIN_SECONDS)
            self.history.sample(self.entries, time.time())
            if time.monotonic() - written_at >= history.WRITE_SECONDS:
                written_at = time.monotonic()
                await self.write()

    async def write(self) -> None:
        if (data := self.history.unwritten()) is not None:
            await asyncio.to_thread(history.write, self._root, data)

    async def answer(self, what: str, request: Json) -> Json:
        """Raises ValueError: unknown page."""
        if what == "history":
            return self.history.to_json(str(request.get("run", "")), request.get("after"))
        if what == "run":
            return await self.runs.run(str(request["uri"]))
        if what == "checkpoint":
            return await self.runs.checkpoint(str(request["uri"]), str(request.get("filter", "")))
        if what == "cluster":
            return await self.cluster.document()
        raise ValueError(f"no page {what!r}")


KEEP_SECONDS = 10.0
DOCUMENT_SECONDS = 2.0
CLUSTER_SECONDS = 2.0
AGENT_SECONDS = 20.0
KEPT_MAX = 32
MADE_AT_A_TIME = 8
FILTER_MAX = 200
NO_CHECKPOINTS: Json = {"checkpoints": [], "checkpoints_of_run": 0, "report": None, "retention": None}
NO_NODES: Json = {"nodes": [], "unreachable": []}

Query: TypeAlias = Mapping[str, str]


class NotNamedError(Exception):
    """The node's document does not contain it."""


class BusyError(Exception):
    """The limit of concurrent documents is reached."""


class PageDocuments:
    """Makes the documents. Blocking; any thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: Known = {}
        self._kept: OrderedDict[tuple[str, ...], tuple[float, Json]] = OrderedDict()
        self._locks: dict[tuple[str, ...], threading.Lock] = {}
        self._lock = threading.Lock()
        self._gate = threading.BoundedSemaphore(MADE_AT_A_TIME)
        self.paths: Mapping[str, Callable[[Query], Json]] = {
            "/history.json": self._history,
            "/run.json": lambda query: self._run(query.get("uri", "")),
            "/checkpoint.json": self._checkpoint,
            "/cluster.json": lambda query: self._kept_answer(CLUSTER_SECONDS, NO_NODES, "cluster"),
        }

    def make(self, path: str, query: Query) -> Json:
        """Raises NotNamedError: D1. BusyError: ``MADE_AT_A_TIME`` are being made."""
        if not self._gate.acquire(blocking=False):
            raise BusyError
        try:
            return self.paths[path](query)
        finally:
            self._gate.release()

    def _once(self, key: tuple[str, ...], seconds: float, make: Callable[[], Json]) -> Json:
        """Return the document of ``key``, at most ``seconds`` old. One thread makes it, the others wait."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            at, found = self._kept.get(key, (float("-inf"), {}))
            if time.monotonic() - at > seconds:
                found = redact_all(make())
                with self._lock:
                    self._kept[key] = time.monotonic(), found
                    while len(self._kept) > KEPT_MAX:
                        self._locks.pop(self._kept.popitem(last=False)[0], None)
            return found

    def _ask(self, what: str, **request: object) -> tuple[Json | None, str | None]:
        return ask_agent(self._settings, {"op": "page", "what": what, "request": request}, AGENT_SECONDS)

    def _kept_answer(self, seconds: float, nothing: Json, what: str, **request: str) -> Json:
        """Return the agent's document, at most ``seconds`` old; without an agent ``nothing``, and the problem."""

        def ask() -> Json:
            answer, problem = self._ask(what, **request)
            return answer or {"problem": problem or NO_AGENT, "at_unix_seconds": time.time(), **request, **nothing}

        return self._once((what, *request.values()), seconds, ask)

    def _document(self) -> Json:
        return self._once(("node",), DOCUMENT_SECONDS, lambda: node_document(self._settings, self._known))

    # --- history --------------------------------------------------------------------------------------------------

    def _history(self, query: Query) -> Json:
        after = {}
        for name in RINGS:
            with contextlib.suppress(ValueError):
                after[name] = int(query.get(f"{name}_after", "-1"))
        run = query.get("run", "")
        answer, _ = self._ask("history", run=run, after=after)
        return answer if answer is not None else History.read(self._settings.local_root).to_json(run, after)

    # --- runs -----------------------------------------------------------------------------------------------------

    def _run(self, uri: str) -> Json:
        document = self._document()
        about = next((row for row in document["runs"] if row["run"] == uri), None)
        if about is None:
            raise NotNamedError  # D1
        found = self._kept_answer(KEEP_SECONDS, NO_CHECKPOINTS, "run", uri=uri)
        steps = step_rows(document["journal"], document["local"], document["agent"] or {})
        own = {row["uri"]: row for row in steps if row["run"] == uri}
        rows = [row | {"drain": own.pop(row["uri"], {}).get("drain")} for row in found["checkpoints"]]
        rows += [_own_row(row) for row in own.values()]
        return found | {
            "run": about,
            "checkpoints": sorted(rows, key=lambda row: (row["step"], row["name"]), reverse=True),
            "checkpoints_of_run": found["checkpoints_of_run"] + len(own),
            "checks": {verb: row if _is_in(row, uri) else None for verb, row in document["checks"].items()},
            "pins": [item for item in document["local"] if item.get("pinned") and _is_in(item, uri)],
        }

    def _checkpoint(self, query: Query) -> Json:
        uri, text = query.get("uri", ""), query.get("filter", "")[:FILTER_MAX]
        run = next((row["run"] for row in self._document()["runs"] if _is_in({"uri": uri}, row["run"])), None)
        if run is None or uri not in {row["uri"] for row in self._run(run)["checkpoints"]}:
            raise NotNamedError  # D1
        return self._kept_answer(KEEP_SECONDS, {}, "checkpoint", uri=uri, filter=text)


def _is_in(row: Json | None, run: str) -> bool:
    return row is not None and str(row.get("uri", "")).startswith(f"{run.rstrip('/')}/")


def _own_row(row: Json) -> Json:
    """Return a run's row for a step that only the node's document contains."""
    return {
        **{name: row[name] for name in ("uri", "step", "size_bytes", "local", "drain")},
        "name": row["uri"].rpartition("/")[2],
        "attempt": "",
        "created_unix_seconds": row["at_unix_seconds"],
        "files": 0,
        "files_here": 0,
        "peers": [],
        "shared": "committed" if row["shared"] == "committed" else None,
        "abandoned": False,
    }
