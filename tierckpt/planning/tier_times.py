"""Times of a run's saves to each tier, from the records of its processes. Pure.

Each commit is timed by the clock of its node or store. A negative difference of clocks makes a time unknown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Line: TypeAlias = Mapping[str, Any]

CLOCK_SECONDS = 1.5
"""Stores have whole seconds: a commit up to this much before its save counts as 0 s."""
ROUNDING_SECONDS = 0.01
TRIMMED = "trimmed"


@dataclass(frozen=True, slots=True)
class Save:
    """``local_seconds`` None: no local commit is recorded."""

    step: int
    at: float
    local_seconds: float | None = None
    is_sent: bool = True
    is_direct_put: bool = False


class Life(Protocol):
    """``drain`` and ``replicas`` are None in records of older releases."""

    @property
    def made(self) -> Sequence[Save]: ...
    @property
    def saves(self) -> int: ...
    @property
    def end(self) -> str: ...
    @property
    def drain(self) -> bool | None: ...
    @property
    def replicas(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """Facts of the reporting process that are not in the records.

    Attributes:
        is_here: the newest start ran on this node, so its journal has all pending drains.
        to_drain: steps in that journal.
        is_asked: the shared tier has listed its steps.
    """

    is_here: bool = False
    to_drain: frozenset[int] = frozenset()
    is_asked: bool = True


@dataclass(frozen=True, slots=True)
class TierTimes:
    """The saves of a run on one tier. Seconds count from the call of ``save``; None without a time.

    Attributes:
        is_used: None if the records do not say.
        untimed: the part of ``reached`` without a recorded time, or with contradictory clocks.
        skipped_steps: will not get there.
        unknown_steps: in neither the records nor the tier.
        unlisted: saves of long runs without a record; no other number counts them.
    """

    tier: str
    is_used: bool | None
    reached: int
    untimed: int
    median_seconds: float | None
    p90_seconds: float | None
    maximum_seconds: float | None
    waiting_steps: tuple[int, ...]
    oldest_waiting_seconds: float | None
    skipped_steps: tuple[int, ...]
    unknown_steps: tuple[int, ...]
    unlisted: int

    @property
    def saves(self) -> int:
        return self.reached + len(self.waiting_steps) + len(self.skipped_steps) + len(self.unknown_steps)


Key: TypeAlias = tuple[int, int]
"""Index of a start, and of a save in it."""


def commits_of(starts: Sequence[Life], commits: Iterable[Line], tier: str) -> dict[Key, float | None]:
    """Return when each save reached ``tier`` (Unix seconds); None if the time is not recorded.

    Its manifest was created between its call and the next one for that step, by the same clock.
    """
    by_step: dict[int, list[tuple[float, Key]]] = {}
    for key, save in _keyed(starts):
        by_step.setdefault(save.step, []).append((save.at, key))
    found: dict[Key, float | None] = {}
    for line in commits:
        step, created_at = line.get("step"), _number(line.get("created_at"))
        if line.get("what") != tier or not isinstance(step, int) or created_at is None:
            continue
        before = [one for one in by_step.get(step, ()) if one[0] <= created_at + ROUNDING_SECONDS]
        if not before:
            continue
        key, at = max(before)[1], _number(line.get("at"))
        known = found.get(key)
        found[key] = at if known is None else known if at is None else min(at, known)
    return found


def tier_times(starts: Sequence[Life], commits: Sequence[Line], seen: Seen, now: float) -> tuple[TierTimes, ...]:
    """Return the times of the local, the peer and the shared tier. ``now``: Unix seconds.

    ``commits``: lines of ``checkpoint/run_records.py``, and those that the shared tier lists now.
    """
    return _Tiers(starts, commits, seen, now).times()


class _Tiers:
    def __init__(self, starts: Sequence[Life], commits: Sequence[Line], seen: Seen, now: float) -> None:
        self._starts, self._seen, self._now = starts, seen, now
        self._saves = list(_keyed(starts))
        self._shared, self._peers = commits_of(starts, commits, "shared"), commits_of(starts, commits, "peer")
        self._newest_at = max((save.at for _, save in self._saves if save.local_seconds is not None), default=-math.inf)
        committed = [(key, save) for key, save in self._saves if save.local_seconds is not None or key in self._shared]
        self._last_of_step = {save.step: key for key, save in committed}
        trimmed = any(line.get("what") == TRIMMED for line in commits)
        shared = [_number(line.get("created_at")) for line in commits if line.get("what") == "shared"]
        created = [at for at in shared if at is not None]
        self._recorded_from = min(created, default=-math.inf) if trimmed else -math.inf

    def times(self) -> tuple[TierTimes, ...]:
        local = {key: save.at + save.local_seconds for key, save in self._saves if save.local_seconds is not None}
        on_ssd = [(key, save) for key, save in self._saves if not save.is_direct_put]
        copies = [None if start.replicas is None else start.replicas > 1 for start in self._starts]
        drains = [start.drain for start in self._starts]
        return (
            self._of("local", True, on_ssd, local, self._on_local),
            self._of("peer", _is_used(copies, self._peers), on_ssd, self._peers, self._on_peers),
            self._of("shared", _is_used(drains, self._shared), self._saves, self._shared, self._on_shared),
        )

    def _on_local(self, key: Key, save: Save) -> str:
        """Saves are written in sequence: an uncommitted save before a committed one has failed."""
        start, later = self._starts[key[0]], self._starts[key[0]].made[key[1] + 1 :]
        is_over = key[0] + 1 < len(self._starts) or start.end or any(one.local_seconds is not None for one in later)
        return "skipped" if is_over else "waiting"

    def _on_peers(self, key: Key, save: Save) -> str:
        replicas = self._starts[key[0]].replicas
        if save.local_seconds is None or save.at < self._newest_at or replicas == 1:
            return "skipped"  # peers copy the newest checkpoint of a run
        return "waiting" if replicas and self._seen.is_here else "unknown"

    def _on_shared(self, key: Key, save: Save) -> str:
        drain, last = self._starts[key[0]].drain, self._last_of_step.get(save.step, key)
        if last == key and save.step in self._seen.to_drain:
            return "waiting"
        if last > key or not save.is_sent or drain is False:
            return "skipped"
        if save.local_seconds is None:
            return self._on_local(key, save)
        if drain is None or not self._seen.is_asked or save.at < self._recorded_from:
            return "unknown"
        return "skipped" if self._seen.is_here else "waiting"

    def _of(
        self,
        tier: str,
        is_used: bool | None,
        saves: Sequence[tuple[Key, Save]],
        reached: Mapping[Key, float | None],
        state_of: Callable[[Key, Save], str],
    ) -> TierTimes:
        known = {key: save for key, save in saves if key in reached}
        took = [at - save.at for key, save in known.items() if (at := reached[key]) is not None]
        seconds = sorted(max(0.0, one) for one in took if one >= -CLOCK_SECONDS)
        states: dict[str, list[Save]] = {"waiting": [], "skipped": [], "unknown": []}
        for key, save in saves if is_used is not False else ():
            if key not in reached:
                states[state_of(key, save)].append(save)
        waiting, skipped, unknown = (sorted({save.step for save in states[name]}) for name in states)
        return TierTimes(
            tier=tier,
            is_used=is_used,
            reached=len(known),
            untimed=len(known) - len(seconds),
            median_seconds=statistics.median(seconds) if seconds else None,
            p90_seconds=seconds[math.ceil(0.9 * len(seconds)) - 1] if seconds else None,
            maximum_seconds=seconds[-1] if seconds else None,
            waiting_steps=tuple(waiting),
            oldest_waiting_seconds=max((max(0.0, self._now - save.at) for save in states["waiting"]), default=None),
            skipped_steps=tuple(skipped),
            unknown_steps=tuple(unknown),
            unlisted=sum(max(0, start.saves - len(start.made)) for start in self._starts),
        )


def _is_used(flags: Sequence[bool | None], reached: Mapping[Key, float | None]) -> bool | None:
    if any(flags) or reached:
        return True
    return None if None in flags else False


def _keyed(starts: Sequence[Life]) -> Iterator[tuple[Key, Save]]:
    for index, start in enumerate(starts):
        for number, save in enumerate(start.made):
            yield (index, number), save


def _number(value: Any) -> float | None:
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15
    return float(value) if is_one else None
