"""Whether another job saves to the run of this one: found by the records that each process leaves there
(training/run_log.py).

Two jobs in one run are a mistake, or a node that was given up and comes back. The commit sees to it that neither
replaces what it has not seen; but steps of both lie side by side, and retention counts them all.

    O1  Another job is one whose records change, or appear, after this process has begun. What has ended, on this host
        or with a word, is none. So a job that is started again is alone.
    O2  Nothing here fails or delays a save: a store that does not answer says nothing.
"""

from __future__ import annotations

import math
import os
import socket
import time
from typing import Any

from ..checkpoint.run_log_reader import Lines, has_ended_here, parse_lines
from ..disk.processes import pid_namespace, start_ticks
from ..format.layout import HISTORY_DIR, Location
from ..mover import Mover
from ..telemetry import logger

log = logger("other jobs")

LOOKED_AT_MAX = 4
"""Records that are read in one look, the newest of them."""
REMEMBERED_SECONDS = 3600.0
"""For so long after the last sign of another job this one counts as not alone."""


class OtherJobs:
    """What rank 0 of a job knows of others in its run. One look at a time."""

    def __init__(self, location: Location, process_at: float) -> None:
        self._location, self._process_at = location, process_at
        self._versions: dict[str, tuple[str | None, int]] | None = None
        self._told: set[str] = set()
        self._seen_at = -math.inf

    @property
    def is_alone(self) -> bool:
        """As of the last listing."""
        return time.monotonic() - self._seen_at > REMEMBERED_SECONDS

    async def look(self, mover: Mover, own: frozenset[str]) -> bool:
        """Look at the run. True when there is news of another job. ``own`` names the records of this process.

        Cost: one listing, and a GET for each record that has changed since the last look.
        """
        store, found = mover.store(self._location), {}
        async for info in store.list(HISTORY_DIR):
            name = info.key.rpartition("/")[2]
            if name.endswith(".jsonl") and name not in own:
                found[name] = (info.etag, info.size_bytes)
        before, self._versions = self._versions, found
        changed = [name for name, version in found.items() if before is None or before.get(name) != version]
        news = False
        for name in sorted(changed)[-LOOKED_AT_MAX:]:
            lines = parse_lines(await store.get(f"{HISTORY_DIR}/{name}"))
            if lines and self._is_at_work(lines, is_first_look=before is None):
                self._seen_at = time.monotonic()
                news |= self._tell(name, lines)
        return news

    def _is_at_work(self, lines: Lines, *, is_first_look: bool) -> bool:
        first, last = lines[0], lines[-1]
        if last.get("what") == "end" or has_ended_here(first):
            return False
        at = last.get("at")
        return not is_first_look or (isinstance(at, int | float) and at > self._process_at)

    def _tell(self, name: str, lines: Lines) -> bool:
        """Say it, once for each of them."""
        if name in self._told:
            return False
        self._told.add(name)
        log.warning(
            "%s: this job is not alone: another one saves there too (host %s, process %s, begun %s, now at step %s). "
            "Neither replaces a step that it has not seen, but their steps lie side by side and a restore takes the "
            "newest of both. Stop one of them, or give it another URI. This job removes no checkpoints meanwhile",
            self._location.uri,
            lines[0].get("host", "unknown"),
            lines[0].get("pid", "unknown"),
            time.strftime("%F %T", time.localtime(float(lines[0].get("at", 0.0)))),
            lines[-1].get("step", "unknown"),
        )
        return True


def identity() -> dict[str, Any]:
    """The fields of a record that name its process; ``process`` tells it from those of other hosts and containers."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "process": f"{pid_namespace()}-{start_ticks(pid)}"}
