"""The drain rate and the lag of the last ten minutes and of the last day, of the node and of each run.

A slot has the series that are not zero, at most ``RUNS_MAX`` runs. A file, written at most once in ``WRITE_SECONDS``,
keeps them over a restart.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from ..checkpoint.journal import DRAIN_STATES, JournalEntry
from ..disk.durable import durable_write, read_whole
from ..errors import ObjectNotFoundError, TierckptError
from ..format.layout import agent_dir, parse_uri, step_of
from ..format.manifest import seal, unseal
from ..telemetry import logger
from ..types import Json

log = logger("agent.history")

SAMPLE_SECONDS = 2
RINGS = {"recent": (SAMPLE_SECONDS, 300), "day": (60, 1440)}
"""Seconds of a slot, and number of slots."""
RUNS_MAX = 16
"""With more, a slot has those that drained the most."""
FIELDS = ("bytes_per_second", "lag_bytes", "lag_seconds")
RATE_SLOTS = 5
WRITE_SECONDS = 60.0
NODE = ""
"""The series of the whole node; others have the name of their run."""
FILE = "history"
FILE_BYTES_MAX = 8 << 20

Values: TypeAlias = tuple[float, ...]
NOTHING: Values = (0.0, 0.0, 0.0)


class Ring:
    """The newest ``count`` slots of one length, each with the values by series. Not thread-safe."""

    def __init__(self, seconds: int, count: int) -> None:
        self.seconds, self.count = seconds, count
        self.slots: dict[int, dict[str, Values]] = {}

    def put(self, slot: int, values: dict[str, Values]) -> None:
        self.slots[slot] = values
        self.slots = {at: kept for at, kept in self.slots.items() if slot - self.count < at <= slot}

    def since(self, name: str, after: int, now: float) -> Json:
        """Return the values of the slots after ``after``, until ``now``. A series in no slot has none."""
        last = int(now) // self.seconds
        first = max(after + 1, last - self.count + 1)
        slots = self.slots if name == NODE or any(name in values for values in self.slots.values()) else {}
        rows = [slots[slot].get(name, NOTHING) if slot in slots else (None,) * 3 for slot in range(first, last + 1)]
        fields = {field: [row[index] for row in rows] for index, field in enumerate(FIELDS)}
        return {"seconds": self.seconds, "slots": self.count, "first": first, **fields}


class History:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.rings = {name: Ring(seconds, count) for name, (seconds, count) in RINGS.items()}
        self._sent: Counter[str] = Counter()
        self._sampled_at = clock()
        self._is_written = True

    def count_sent(self, uri: str, size_bytes: int) -> None:
        self._sent[uri] += size_bytes

    def sample(self, entries: Iterable[JournalEntry], now: float) -> None:
        """Add the bytes sent since the last sample, and the lag of ``entries`` at ``now``."""
        before, self._sampled_at = self._sampled_at, self._clock()
        seconds = max(1e-3, self._sampled_at - before)
        totals: dict[str, Values] = {}
        for uri, size_bytes in self._sent.items():
            for name in _series_of(uri):
                rate, *lag = totals.get(name, NOTHING)
                totals[name] = (rate + size_bytes / seconds, *lag)
        self._sent.clear()
        for entry in entries:
            for name in _series_of(entry.uri) if entry.state in DRAIN_STATES else ():
                rate, lag_bytes, lag_seconds = totals.get(name, NOTHING)
                age_seconds = now - entry.created_unix_seconds
                totals[name] = rate, lag_bytes + entry.size_bytes, max(lag_seconds, age_seconds)
        values = {name: tuple(round(value, 1) for value in row) for name, row in totals.items()}
        recent, day = self.rings["recent"], self.rings["day"]
        recent.put(int(now) // recent.seconds, _largest(values))
        minute = int(now) // day.seconds
        day.put(minute, _of_minute([row for at, row in recent.slots.items() if at * recent.seconds // 60 == minute]))
        self._is_written = self._is_written and not values

    @property
    def bytes_per_second(self) -> float:
        now = time.time()
        rates = self.rings["recent"].since(NODE, int(now) // SAMPLE_SECONDS - RATE_SLOTS - 1, now)["bytes_per_second"]
        known = [rate for rate in rates if rate is not None]
        return sum(known) / len(known) if known else 0.0

    def to_json(self, run: str = NODE, after: Mapping[str, int] | None = None, now: float | None = None) -> Json:
        now, after = time.time() if now is None else now, after or {}
        rings = {name: ring.since(run, int(after.get(name, -1)), now) for name, ring in self.rings.items()}
        return {"run": run, "at_unix_seconds": now, **rings}

    # --- on disk --------------------------------------------------------------------------------------------------

    def unwritten(self) -> bytes | None:
        """Return the bytes to write for the next agent; None if nothing changed since the last call."""
        if self._is_written:
            return None
        self._is_written = True
        return self.encode()

    def encode(self) -> bytes:
        return seal({name: [*ring.slots.items()] for name, ring in self.rings.items()})

    @classmethod
    def read(cls, local_root: Path) -> History:
        """Return the history of an earlier agent; empty if its file is missing or damaged. Blocking."""
        found, path = cls(), agent_dir(local_root) / FILE
        try:
            data = read_whole(path, FILE_BYTES_MAX)
            body = unseal(data, frozenset(RINGS), where=str(path), size_bytes_max=FILE_BYTES_MAX)
        except ObjectNotFoundError:
            return found
        except (OSError, TierckptError) as error:
            log.info("the history of the drains starts empty: %s", error)
            return found
        for name, ring in found.rings.items():
            ring.slots = {slot: {run: tuple(row) for run, row in values.items()} for slot, values in body[name]}
        return found


def _series_of(uri: str) -> Iterator[str]:
    yield NODE
    location = parse_uri(uri)
    if step_of(location.name) is not None:
        yield location.parent.uri


def _largest(values: dict[str, Values]) -> dict[str, Values]:
    runs = sorted(values.keys() - {NODE}, key=lambda run: values[run], reverse=True)[:RUNS_MAX]
    return {name: values[name] for name in (NODE, *runs) if name in values}


def _of_minute(samples: list[dict[str, Values]]) -> dict[str, Values]:
    """Return the mean rates, and the largest lags."""
    found = {}
    for name in set[str]().union(*samples):
        rates, *lags = zip(*(sample.get(name, NOTHING) for sample in samples), strict=True)
        found[name] = round(sum(rates) / len(samples), 1), *map(max, lags)
    return _largest(found)


def write(local_root: Path, data: bytes) -> None:
    """Blocking. A crash costs at most ``WRITE_SECONDS``."""
    try:
        durable_write(agent_dir(local_root) / FILE, data)
    except (OSError, TierckptError) as error:
        log.warning("cannot write the history of the drains: %s", error)
