"""The page's other documents: history, one run, one checkpoint, the cluster; as JSON, by path.

D1  A run or a checkpoint is read only if the node's document contains it: a URL cannot select a path or bucket.
D2  A document is cached for ``KEEP_SECONDS``, and an answer takes at most ``AGENT_SECONDS``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ..checkpoint.journal import JournalEntry
from ..config import Settings
from ..mover import Mover
from ..redaction import redact_all
from ..types import Json, Progress
from . import history
from .cluster_drains import ClusterDrains
from .history import RINGS, History
from .node_document import Known, ask_agent, node_document
from .peer_service import PeerService
from .run_catalog import RunCatalog, step_rows

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

    async def close(self) -> None:
        await self.cluster.close()
        await self.write()

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
NO_AGENT = "No agent runs on this node (`tierckpt agent` starts one)"

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
            "/cluster.json": lambda query: self._cluster(),
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

    def _ask(self, what: str, **request: object) -> tuple[Json | None, str]:
        message = {"op": "page", "what": what, "request": request}
        answer, problem = ask_agent(self._settings, message, AGENT_SECONDS)
        return answer, "" if answer is not None else problem or NO_AGENT

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
        found = self._once(("run", uri), KEEP_SECONDS, lambda: self._read_run(uri))
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

    def _read_run(self, uri: str) -> Json:
        answer, problem = self._ask("run", uri=uri)
        nothing = {"checkpoints": [], "checkpoints_of_run": 0, "report": None, "retention": None}
        return answer or {"uri": uri, "at_unix_seconds": time.time(), "problem": problem, **nothing}

    def _checkpoint(self, query: Query) -> Json:
        uri, text = query.get("uri", ""), query.get("filter", "")[:FILTER_MAX]
        run = next((row["run"] for row in self._document()["runs"] if _is_in({"uri": uri}, row["run"])), None)
        if run is None or uri not in {row["uri"] for row in self._run(run)["checkpoints"]}:
            raise NotNamedError  # D1
        return self._once(("checkpoint", uri, text), KEEP_SECONDS, lambda: self._read_checkpoint(uri, text))

    def _read_checkpoint(self, uri: str, text: str) -> Json:
        answer, problem = self._ask("checkpoint", uri=uri, filter=text)
        return answer or {"uri": uri, "problem": problem}

    # --- cluster --------------------------------------------------------------------------------------------------

    def _cluster(self) -> Json:
        def ask() -> Json:
            answer, problem = self._ask("cluster")
            return answer or {"at_unix_seconds": time.time(), "problem": problem, "nodes": [], "unreachable": []}

        return self._once(("cluster",), CLUSTER_SECONDS, ask)


def _is_in(row: Json | None, run: str) -> bool:
    return row is not None and str(row.get("uri", "")).startswith(f"{run.rstrip('/')}/")


def _own_row(row: Json) -> Json:
    """Return a run's row for a step that only the node's document contains."""
    return {
        "name": row["uri"].rpartition("/")[2],
        "uri": row["uri"],
        "step": row["step"],
        "attempt": "",
        "created_unix_seconds": row["at_unix_seconds"],
        "size_bytes": row["size_bytes"],
        "files": 0,
        "files_here": 0,
        "local": row["local"],
        "peers": [],
        "shared": "committed" if row["shared"] == "committed" else None,
        "abandoned": False,
        "drain": row["drain"],
    }
