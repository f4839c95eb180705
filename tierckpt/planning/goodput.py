"""Measures how a job spent its time, and times its saves to each tier, from the records of its processes. Pure.

A *start* is one life of the job, until its last record. A crash loses at most the time after it. Trained steps are

    lost     a later start resumed before them
    unsaved  in no checkpoint, no start has resumed, and the last one was not closed
    kept     all others; also steps after the newest save of a closed job, until another start resumes

Each commit is timed by the clock of its node or store. A negative difference of clocks makes a time unknown.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import Any, Literal, TypeAlias

from ..errors import ConfigError
from . import ettr

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
        untimed: the part of ``reached`` without a recorded time, or with contradictory clocks.
        skipped_steps: will not get there.
        unknown_steps: in neither the records nor the tier.
    """

    tier: str
    is_used: bool
    reached: int
    untimed: int
    median_seconds: float | None
    p90_seconds: float | None
    maximum_seconds: float | None
    waiting_steps: tuple[int, ...]
    oldest_waiting_seconds: float | None
    skipped_steps: tuple[int, ...]
    unknown_steps: tuple[int, ...]

    @property
    def saves(self) -> int:
        return self.reached + len(self.waiting_steps) + len(self.skipped_steps) + len(self.unknown_steps)


Key: TypeAlias = tuple[int, int]
"""Index of a start, and of a save in it."""


def commits_of(starts: Sequence[Start], commits: Iterable[Line], tier: str) -> dict[Key, float | None]:
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


def tier_times(starts: Sequence[Start], commits: Sequence[Line], seen: Seen, now: float) -> tuple[TierTimes, ...]:
    """Return the times of the local, the peer and the shared tier. ``now``: Unix seconds.

    ``commits``: lines of ``checkpoint/run_records.py``, and those that the shared tier lists now.
    """
    return _Tiers(starts, commits, seen, now).times()


class _Tiers:
    def __init__(self, starts: Sequence[Start], commits: Sequence[Line], seen: Seen, now: float) -> None:
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
        copies = any(start.replicas > 1 for start in self._starts)
        drains = any(start.drain for start in self._starts)
        return (
            self._of("local", True, on_ssd, local, self._on_local),
            self._of("peer", copies or bool(self._peers), on_ssd, self._peers, self._on_peers),
            self._of("shared", drains or bool(self._shared), self._saves, self._shared, self._on_shared),
        )

    def _on_local(self, key: Key, save: Save) -> str:
        """Saves are written in sequence: an uncommitted save before a committed one has failed."""
        start, later = self._starts[key[0]], self._starts[key[0]].made[key[1] + 1 :]
        is_over = key[0] + 1 < len(self._starts) or start.end or any(one.local_seconds is not None for one in later)
        return "skipped" if is_over else "waiting"

    def _on_peers(self, key: Key, save: Save) -> str:
        if save.local_seconds is None or save.at < self._newest_at or self._starts[key[0]].replicas == 1:
            return "skipped"  # peers copy the newest checkpoint of a run
        return "waiting" if self._seen.is_here else "unknown"

    def _on_shared(self, key: Key, save: Save) -> str:
        last = self._last_of_step.get(save.step, key)
        if last == key and save.step in self._seen.to_drain:
            return "waiting"
        if last > key or not save.is_sent or not self._starts[key[0]].drain:
            return "skipped"
        if save.local_seconds is None:
            return self._on_local(key, save)
        if not self._seen.is_asked or save.at < self._recorded_from:
            return "unknown"
        return "skipped" if self._seen.is_here else "waiting"

    def _of(
        self,
        tier: str,
        is_used: bool,
        saves: Sequence[tuple[Key, Save]],
        reached: Mapping[Key, float | None],
        state_of: Callable[[Key, Save], str],
    ) -> TierTimes:
        known = {key: save for key, save in saves if key in reached}
        took = [at - save.at for key, save in known.items() if (at := reached[key]) is not None]
        seconds = sorted(max(0.0, one) for one in took if one >= -CLOCK_SECONDS)
        states: dict[str, list[Save]] = {"waiting": [], "skipped": [], "unknown": []}
        for key, save in saves if is_used else ():
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
        )


def _keyed(starts: Sequence[Start]) -> Iterator[tuple[Key, Save]]:
    for index, start in enumerate(starts):
        for number, save in enumerate(start.made):
            yield (index, number), save


def _number(value: Any) -> float | None:
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15
    return float(value) if is_one else None


Line: TypeAlias = Mapping[str, Any]
What: TypeAlias = Literal["kept", "unsaved", "lost", "blocked", "down", "starting", "loading", "warming", "other"]

TOTALS = ("productive", "blocked", "starting", "loading", "warming")
"""Seconds since the processes of the start began."""

NUMBERS = ("at", "saves", "replayed_steps", "replicas")

PLANNED = "closed"
"""An end that is no failure."""


@dataclass(frozen=True, slots=True)
class Start:
    """``restored_step`` None: it began without a checkpoint."""

    began_at: float
    ended_at: float
    world_size: int
    restored_step: int | None
    first_step: int | None
    last_step: int | None
    end: str
    spent: dict[str, float]
    saves: int
    size_bytes: int
    made: tuple[Save, ...]
    """The recorded saves: not all of ``saves`` in a long start."""
    work: tuple[tuple[int, float], ...]
    """Steps, and the productive seconds of this start at their end."""
    replayed_steps: int = 0
    """Steps that came from a gradient log."""
    drain: bool = False
    replicas: int = 1
    has_gradient_log: bool = False
    begins_with_save: bool = False
    """The loop calls only ``save``."""

    @property
    def did_nothing(self) -> bool:
        """It restored no checkpoint, so the work of the previous start was not undone."""
        return self.restored_step is None and not self.work

    @property
    def is_planned_end(self) -> bool:
        return self.end == PLANNED


@dataclass(frozen=True, slots=True)
class Stretch:
    what: What
    began_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Failure:
    at: float
    last_step: int
    restored_step: int | None
    lost_seconds: float
    lost_steps: int
    away_seconds: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """``spent`` adds up to ``wall_seconds``."""

    ettr: float
    goodput: float
    wall_seconds: float
    kept_seconds: float
    kept_steps: int
    unsaved_steps: int
    lost_steps: int
    trained_steps: int
    """A step that was trained twice counts twice."""
    after_save_steps: int
    spent: dict[What, float]
    failures: tuple[Failure, ...]
    starts: tuple[Start, ...]
    stretches: tuple[Stretch, ...]
    saves: int
    interval_seconds: float | None
    blocked_seconds: float | None
    local_commit_seconds: float | None
    mtbf_seconds: float | None
    restart_seconds: float | None
    expected_ettr: float | None
    steps_per_hour: float
    replayed_steps: int
    """Steps that a gradient log saved from being lost."""


@dataclass(frozen=True, slots=True)
class Stall:
    step: int
    at: float
    seconds: float


def stalls_of(lines: Iterable[Line]) -> list[Stall]:
    """Return the saves of a start, with the training wait of each; for thinned-out lines, the mean."""
    rows = [line for line in lines if _is_line(line)]
    saves = [row for row in rows if row["what"] == "save" and row.get("step") is not None]
    found = []
    for row, after in zip_longest(saves, saves[1:]):
        until = after or max(rows, key=lambda line: float(line.get("blocked_seconds", 0.0)) * (line["what"] != "end"))
        count = max(1, int(until.get("saves", 0)) - int(row.get("saves", 0))) if after else 1
        waited = float(until.get("blocked_seconds", 0.0)) - float(row.get("blocked_seconds", 0.0))
        found.append(Stall(int(row["step"]), float(row["at"]), max(0.0, waited) / count))
    return found


def read_start(lines: Iterable[Line]) -> Start | None:
    rows = [line for line in lines if _is_line(line)]
    first = next((row for row in rows if row["what"] == "start"), None)
    if first is None:
        return None
    totals = {name: max(float(row.get(f"{name}_seconds", 0.0)) for row in rows) for name in TOTALS}
    end = next((str(row.get("reason", "")) for row in reversed(rows) if row["what"] == "end"), "")
    sizes = [int(row["size_bytes"]) for row in rows if row["what"] == "durable" and "size_bytes" in row]
    restored: int | None = None
    replayed = 0
    work: list[tuple[int, float]] = []
    made: list[Save] = []
    for row in rows:
        _note_save(made, row)
        if row["what"] == "restored" and not work:
            restored, replayed = int(row["step"]), int(row.get("replayed_steps", 0))
        step = row.get("reached_step" if row["what"] == "durable" else "step")
        # After going back within one life, ignore steps below the highest one.
        if row["what"] in ("step", "save", "end", "durable") and step is not None and (not work or step >= work[-1][0]):
            work.append((int(step), float(row.get("productive_seconds", 0.0))))
    first_step = first.get("step")
    if first_step is None and work:
        first_step = work[0][0]
    began_at = float(first.get("process_at", first["at"]))
    ended_at = max(float(row["at"]) for row in rows)
    spent = {**totals, "other": max(0.0, ended_at - began_at - sum(totals.values()))}
    return Start(
        began_at, ended_at, int(first.get("world_size", 1)), restored, first_step,
        work[-1][0] if work else restored, end, spent, max(int(row.get("saves", 0)) for row in rows),
        sizes[-1] if sizes else 0, tuple(made), tuple(work), replayed,
        first.get("drain") is True, int(first.get("replicas", 1)), first.get("gradient_log") is True,
        first.get("begins_with") == "save",
    )  # fmt: skip


def _note_save(made: list[Save], row: Line) -> None:
    if row.get("step") is None:
        return
    step, at = int(row["step"]), float(row["at"])
    if row["what"] == "save":
        made.append(Save(step, float(row.get("save_at", at)), is_sent=row.get("is_sent") is not False))
    elif row["what"] == "durable":
        seconds, is_direct_put = float(row["durable_seconds"]), row.get("is_direct_put") is True
        for index, one in reversed(list(enumerate(made))):
            if one.step == step and one.local_seconds is None:
                made[index] = replace(one, local_seconds=seconds, is_direct_put=is_direct_put)
                return
        made.append(Save(step, at - seconds, seconds, is_direct_put=is_direct_put))


@dataclass
class _Kept:
    """Work that was not undone: steps, and the seconds of work up to each."""

    steps: list[int]
    seconds: list[float] = field(default_factory=lambda: [0.0])
    saved: list[int] = field(default_factory=list)
    """The steps in a checkpoint or a gradient log, in order."""

    def at(self, step: int) -> float:
        """Interpolates."""
        index = bisect.bisect_right(self.steps, step) - 1
        if index < 0:
            return 0.0
        if index + 1 == len(self.steps):
            return self.seconds[index]
        share = (step - self.steps[index]) / (self.steps[index + 1] - self.steps[index])
        return self.seconds[index] + share * (self.seconds[index + 1] - self.seconds[index])

    def back_to(self, step: int) -> float:
        """Return the seconds of work dropped after ``step``."""
        stays = self.at(step)
        lost = self.seconds[-1] - stays
        index = bisect.bisect_right(self.steps, step)
        self.steps, self.seconds = self.steps[:index], self.seconds[:index]
        if not self.steps or self.steps[-1] < step:
            self.steps.append(step)
            self.seconds.append(stays)
        self.saved = [one for one in self.saved if one < step] + [step]
        return lost

    def add(self, work: Iterable[tuple[int, float]], saved: Iterable[int]) -> None:
        base = self.seconds[-1]
        for step, productive in work:
            if step > self.steps[-1]:
                self.steps.append(step)
                self.seconds.append(base + productive)
            else:
                self.seconds[-1] = max(self.seconds[-1], base + productive)
        self.saved = sorted({*self.saved, *(step for step in saved if step <= self.steps[-1])})


def analyse(starts: Iterable[Start], commits: Sequence[Line] = ()) -> Goodput:
    """Combine the starts of one job. Raises ConfigError: there is no start, or all have no duration."""
    ordered = sorted(starts, key=lambda one: one.began_at)
    if not ordered or ordered[-1].ended_at <= ordered[0].began_at:
        raise ConfigError("there is no record of any training", hint="Records begin with the first `Checkpointer`")
    origin = _origin(ordered[0], ())
    kept = _Kept([origin], saved=[origin])
    drained = commits_of(ordered, commits, "shared")
    failures: list[Failure] = []
    lost_of: list[float] = []
    for index, start in enumerate(ordered):
        if index:
            before = ordered[index - 1]
            last = kept.steps[-1]
            resumed = last if start.did_nothing else _origin(start, kept.saved)
            lost = 0.0 if start.did_nothing else kept.back_to(resumed)
            lost_of[-1] = lost
            if not before.is_planned_end or lost > 0:
                restart = sum(start.spent[what] for what in ("starting", "loading", "warming"))
                away = max(0.0, start.began_at - before.ended_at) + restart
                failures.append(Failure(before.ended_at, last, start.restored_step, lost, max(0, last - resumed), away))
        steps = [one.step for n, one in enumerate(start.made) if one.local_seconds is not None or (index, n) in drained]
        kept.add(start.work, [kept.steps[-1], *(step for step, _ in start.work)] if start.has_gradient_log else steps)
        lost_of.append(0.0)
    return _summed(ordered, origin, kept, failures, lost_of)


def _origin(start: Start, saved: Sequence[int]) -> int:
    if start.restored_step is not None:
        return start.restored_step
    if start.first_step is None:
        return 0
    if start.begins_with_save:
        return max((step for step in saved if step < start.first_step), default=0)
    return start.first_step - 1


def _summed(
    starts: Sequence[Start], origin: int, kept: _Kept, failures: Sequence[Failure], lost_of: Sequence[float]
) -> Goodput:
    wall = starts[-1].ended_at - starts[0].began_at
    down = sum(max(0.0, b.began_at - a.ended_at) for a, b in pairwise(starts))
    total = {name: sum(start.spent[name] for start in starts) for name in (*TOTALS, "other")}
    stays = kept.steps[-1] if starts[-1].is_planned_end else kept.saved[-1]
    kept_seconds = kept.at(stays)
    unsaved_seconds = kept.seconds[-1] - kept_seconds
    lost = max(0.0, total["productive"] - kept.seconds[-1])
    spent: dict[What, float] = {"kept": kept_seconds, "unsaved": unsaved_seconds, "lost": lost}
    spent |= {"blocked": total["blocked"], "down": down}
    spent |= {name: total[name] for name in ("starting", "loading", "warming", "other")}
    saves = sum(start.saves for start in starts)
    durable = [one.local_seconds for start in starts for one in start.made if one.local_seconds is not None]
    interval = total["productive"] / saves if saves else None
    blocked = total["blocked"] / saves if saves else None
    mtbf = wall / len(failures) if failures else None
    restart = sum(one.away_seconds for one in failures) / len(failures) if failures else None
    latency = sum(durable) / len(durable) if durable else None
    expected: float | None = None
    if interval and blocked is not None:
        expected = interval / (interval + blocked)
        if mtbf is not None:
            expected = ettr.exact(interval, blocked, mtbf, restart or 0.0, latency or 0.0)
    steps, unsaved = stays - origin, kept.steps[-1] - stays
    lost_steps = sum(one.lost_steps for one in failures)
    return Goodput(
        ettr=kept_seconds / wall,
        goodput=kept_seconds / max(wall - down, 1e-9),
        wall_seconds=wall,
        kept_seconds=kept_seconds,
        kept_steps=steps,
        unsaved_steps=unsaved,
        lost_steps=lost_steps,
        after_save_steps=kept.steps[-1] - kept.saved[-1],
        trained_steps=steps + unsaved + lost_steps,
        spent=spent,
        failures=tuple(failures),
        starts=tuple(starts),
        stretches=tuple(_stretches(starts, lost_of, unsaved_seconds)),
        saves=saves,
        interval_seconds=interval,
        blocked_seconds=blocked,
        local_commit_seconds=latency,
        mtbf_seconds=mtbf,
        restart_seconds=restart,
        expected_ettr=expected,
        steps_per_hour=3600 * steps / wall,
        replayed_steps=sum(start.replayed_steps for start in starts),
    )


def _stretches(starts: Sequence[Start], lost_of: Sequence[float], unsaved_seconds: float) -> Iterable[Stretch]:
    previous: float | None = None
    last = max((place for place, start in enumerate(starts) if start.work), default=-1)
    for place, (start, lost) in enumerate(zip(starts, lost_of, strict=True)):
        gone: What = "lost"
        if place == last and unsaved_seconds > 0:
            gone, lost = "unsaved", unsaved_seconds
        if previous is not None and start.began_at > previous:
            yield Stretch("down", previous, start.began_at)
        at = start.began_at
        for what in ("starting", "loading", "warming"):
            if start.spent[what] > 0:
                yield Stretch(what, at, at + start.spent[what])
                at += start.spent[what]
        work = start.spent["productive"]
        share = min(1.0, lost / work) if work > 0 else 0.0
        turn = max(at, start.ended_at - share * (start.ended_at - at))
        if turn > at:
            yield Stretch("kept", at, turn)
        if start.ended_at > turn:
            yield Stretch(gone, turn, start.ended_at)
        previous = start.ended_at


def _is_line(line: Line) -> bool:
    """Reject invalid lines: other users may write to this directory."""
    numbers = [value for name, value in line.items() if name.endswith(("_seconds", "_at")) or name in NUMBERS]
    steps = [step for name in ("step", "reached_step") if (step := line.get(name)) is not None]
    are_whole = all(isinstance(step, int) and not isinstance(step, bool) for step in steps)
    are_numbers = "at" in line and all(_number(value) is not None for value in numbers)
    return isinstance(line.get("what"), str) and are_whole and are_numbers
