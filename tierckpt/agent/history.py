"""The drain rate and the lag of the last ten minutes and of the last day, of the node and of each run.

Memory: 21 KB a series, 370 KB with ``RUNS_MAX`` runs. A file, written at most once in ``WRITE_SECONDS``, keeps them
over a restart.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from ..checkpoint.journal import DRAIN_STATES, JournalEntry
from ..disk.durable import durable_write, read_whole
from ..errors import ObjectNotFoundError, TierckptError
from ..format.layout import agent_dir, parse_uri, step_of
from ..format.manifest import digest_of
from ..telemetry import logger
from ..types import Json

log = logger("agent.history")

SAMPLE_SECONDS = 2
RINGS = {"recent": (SAMPLE_SECONDS, 300), "day": (60, 1440)}
"""Seconds of a slot, and number of slots."""
RUNS_MAX = 16
"""With more, the least recently active one is dropped."""
FIELDS = ("bytes_per_second", "lag_bytes", "lag_seconds")
RATE_SLOTS = 5
WRITE_SECONDS = 60.0
NODE = ""
"""The series of the whole node; others have the name of their run."""
FILE = "history"
FILE_BYTES_MAX = 4 << 20

Values: TypeAlias = tuple[float, float, float]
NOTHING: Values = (0.0, 0.0, 0.0)


class Ring:
    """Series over slots of one length. Not thread-safe."""

    def __init__(self, seconds: int, count: int) -> None:
        self.seconds, self.count = seconds, count
        self.slots = array("q", [-1]) * count
        self.series: dict[str, list[array[float]]] = {}

    @property
    def columns(self) -> list[array[Any]]:
        return [self.slots, *(column for name in sorted(self.series) for column in self.series[name])]

    def put(self, slot: int, values: Mapping[str, Values]) -> None:
        at = slot % self.count
        self.slots[at] = slot
        for name in values.keys() - self.series.keys():
            self.series[name] = [array("f", [math.nan]) * self.count for _ in FIELDS]
        for name, columns in self.series.items():
            for column, value in zip(columns, values.get(name, NOTHING), strict=True):
                column[at] = value

    def since(self, name: str, after: int, now: float) -> Json:
        """Return the values of the slots after ``after``, until ``now``."""
        last = int(now) // self.seconds
        first = max(after + 1, last - self.count + 1)
        columns = self.series.get(name)
        found: Json = {"seconds": self.seconds, "slots": self.count, "first": first}
        for index, field in enumerate(FIELDS):
            values = [self._value(columns, index, slot) for slot in range(first, last + 1)]
            found[field] = values
        return found

    def _value(self, columns: Sequence[array[float]] | None, index: int, slot: int) -> float | None:
        at = slot % self.count
        if columns is None or self.slots[at] != slot or math.isnan(value := columns[index][at]):
            return None
        return round(value, 1)


class History:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.rings = {name: Ring(seconds, count) for name, (seconds, count) in RINGS.items()}
        self._sent: Counter[str] = Counter()
        self._sampled_at = clock()
        self._minute = -1
        self._minute_seconds = 0.0
        self._sums: dict[str, Values] = {}
        self._busy_at: dict[str, int] = {}
        self._is_written = True

    def count_sent(self, uri: str, size_bytes: int) -> None:
        self._sent[uri] += size_bytes

    def sample(self, entries: Iterable[JournalEntry], now: float) -> None:
        """Add the bytes sent since the last sample, and the lag of ``entries`` at ``now``."""
        before, self._sampled_at = self._sampled_at, self._clock()
        seconds = max(1e-3, self._sampled_at - before)
        sent, lags = self._sums_by_run(entries, now)
        values = {name: (sent[name] / seconds, *lags.get(name, (0.0, 0.0))) for name in {NODE, *sent, *lags}}
        slot, minute = (int(now) // self.rings[name].seconds for name in ("recent", "day"))
        values = self._bounded(values, slot)
        if minute != self._minute:
            self._minute, self._minute_seconds, self._sums = minute, 0.0, {}
        self._minute_seconds += seconds
        for name, (rate, *lag) in values.items():
            total, *worst = self._sums.get(name, NOTHING)
            self._sums[name] = (total + rate * seconds, max(worst[0], lag[0]), max(worst[1], lag[1]))
        means = {name: (total / self._minute_seconds, *worst) for name, (total, *worst) in self._sums.items()}
        self.rings["recent"].put(slot, values)
        self.rings["day"].put(minute, means)  # type: ignore[arg-type]
        self._is_written = self._is_written and not any(map(any, values.values()))

    def _sums_by_run(
        self, entries: Iterable[JournalEntry], now: float
    ) -> tuple[Counter[str], dict[str, tuple[float, float]]]:
        sent: Counter[str] = Counter()
        for uri, size_bytes in self._sent.items():
            for name in _series_of(uri):
                sent[name] += size_bytes
        self._sent.clear()
        lags: dict[str, tuple[float, float]] = {}
        for entry in entries:
            if entry.state in DRAIN_STATES:
                for name in _series_of(entry.uri):
                    size, age = lags.get(name, (0.0, 0.0))
                    lags[name] = size + entry.size_bytes, max(age, now - entry.created_unix_seconds)
        return sent, lags

    def _bounded(self, values: dict[str, Values], slot: int) -> dict[str, Values]:
        self._busy_at |= dict.fromkeys(values.keys() - {NODE}, slot)
        for name in sorted(self._busy_at, key=lambda name: self._busy_at[name], reverse=True)[RUNS_MAX:]:
            del self._busy_at[name]
            values.pop(name, None)
            for ring in self.rings.values():
                ring.series.pop(name, None)
            self._sums.pop(name, None)
        return values

    @property
    def bytes_per_second(self) -> float:
        now = time.time()
        rates = self.rings["recent"].since(NODE, int(now) // SAMPLE_SECONDS - RATE_SLOTS - 1, now)["bytes_per_second"]
        known = [rate for rate in rates if rate is not None]
        return sum(known) / len(known) if known else 0.0

    def to_json(self, run: str = NODE, after: Mapping[str, int] | None = None, now: float | None = None) -> Json:
        now, after = time.time() if now is None else now, after or {}
        rings = {name: ring.since(run, int(after.get(name, -1)), now) for name, ring in self.rings.items()}
        return {"run": run, "runs": sorted(self._busy_at), "at_unix_seconds": now, **rings}

    # --- on disk --------------------------------------------------------------------------------------------------

    def unwritten(self) -> bytes | None:
        """Return the bytes to write for the next agent; None if nothing changed since the last call."""
        if self._is_written:
            return None
        self._is_written = True
        return self.encode()

    def encode(self) -> bytes:
        rings = [ring for _, ring in sorted(self.rings.items())]
        body = b"".join(column.tobytes() for ring in rings for column in ring.columns)
        head = {"series": [sorted(ring.series) for ring in rings], "busy_at": self._busy_at, "digest": digest_of(body)}
        return json.dumps(head).encode() + b"\n" + body

    @classmethod
    def read(cls, local_root: Path) -> History:
        """Return the history of an earlier agent; empty if its file is missing or damaged. Blocking."""
        try:
            return cls._decoded(read_whole(agent_dir(local_root) / FILE, FILE_BYTES_MAX))
        except ObjectNotFoundError:
            return cls()
        except (OSError, TierckptError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.info("the history of the drains starts empty: %s", error)
            return cls()

    @classmethod
    def _decoded(cls, data: bytes) -> History:
        found = cls()
        text, _, body = data.partition(b"\n")
        head = json.loads(text)
        if head["digest"] != digest_of(body):
            raise ValueError("its digest does not match its data")
        for (_, ring), names in zip(sorted(found.rings.items()), head["series"], strict=True):
            ring.series = {str(name): [array("f", [math.nan]) * ring.count for _ in FIELDS] for name in names}
            for column in ring.columns:
                size = len(column) * column.itemsize
                column[:], body = array(column.typecode, body[:size]), body[size:]
                if len(column) != ring.count:
                    raise ValueError("its slots have another length or number")
        found._busy_at = {str(name): int(slot) for name, slot in head["busy_at"].items()}
        return found


def write(local_root: Path, data: bytes) -> None:
    """Blocking. A crash costs at most ``WRITE_SECONDS``."""
    try:
        durable_write(agent_dir(local_root) / FILE, data)
    except (OSError, TierckptError) as error:
        log.warning("cannot write the history of the drains: %s", error)


@lru_cache(maxsize=4096)
def _series_of(uri: str) -> tuple[str, ...]:
    location = parse_uri(uri)
    return (NODE,) if step_of(location.name) is None else (NODE, location.parent.uri)
