"""The state of a running drain, for status reports."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from ..errors import TierckptError
from ..redaction import redact
from ..types import Json
from .rate_limiter import DrainFlow

RATES_MAX = 10
SILENT_SECONDS = 8.0
"""A store that receives nothing for this long is logged as an outage."""
QUEUED, SENDING, COMMITTING = "queued", "sending", "committing"
OTHER_RANKS, STORE = "waiting for other ranks", "waiting for the store"


@dataclass
class ActiveDrain:
    uri: str
    rank: int
    size_bytes: int
    state: str = SENDING
    done_bytes: int = 0
    cause: str = ""
    remedy: str = ""
    since_unix_seconds: float = field(default_factory=time.time)
    next_try_at: float = 0.0
    note_at: float = 0.0
    """Time of the next note in the journal that its store is away."""
    flow: DrainFlow | None = None
    moved_at: float = field(default_factory=time.monotonic)
    """Time of the last byte sent, or when ``state`` began."""
    _rates: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATES_MAX))

    def enter(self, state: str, error: TierckptError | None = None) -> None:
        """An unchanged state keeps its start time."""
        self.cause, self.remedy = (redact(error.message), redact(error.hint)) if error is not None else ("", "")
        self.next_try_at = time.monotonic()
        if state != self.state:
            self.state, self.since_unix_seconds, self.moved_at = state, time.time(), time.monotonic()

    def add_progress(self, done_bytes: int) -> None:
        self.enter(SENDING)
        self.done_bytes, self.moved_at = done_bytes, time.monotonic()
        if not self._rates or self.moved_at - self._rates[-1][0] >= 1.0:
            self._rates.append((self.moved_at, done_bytes))

    @property
    def silent_seconds(self) -> float:
        """Time without a byte sent; 0 while the drain waits for anything but its store."""
        row = self.to_json()
        return float(row["idle_seconds"]) if row["state"] in (SENDING, COMMITTING) else 0.0

    def to_json(self) -> Json:
        now, (then, before) = time.monotonic(), self._rates[0] if self._rates else (self.moved_at, self.done_bytes)
        rate = max(0, self.done_bytes - before) / max(now - then, 1.0)
        state, moved_at = self.state, self.moved_at
        if state == SENDING and self.flow is not None:
            moved_at = max(moved_at, self.flow.granted_at)
            if self.flow.sending <= 0:  # it waits for a slot, the rate, or the end of a pause
                state, moved_at = QUEUED, now
        return {
            "uri": self.uri, "rank": self.rank, "state": state, "cause": self.cause, "remedy": self.remedy,
            "size_bytes": self.size_bytes, "done_bytes": self.done_bytes, "bytes_per_second": rate,
            "since_unix_seconds": self.since_unix_seconds, "idle_seconds": now - moved_at,
            "next_try_seconds": max(0.0, self.next_try_at - now),
        }  # fmt: skip
