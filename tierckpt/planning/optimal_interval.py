"""Checkpoint intervals: the published optima, and the interval of a running job. Pure functions.

Intervals are seconds of training, without the stall.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..errors import ConfigError
from . import ettr
from .checked_numbers import Checked, NotNegative, Positive, not_negative, positive
from .ettr import Level

OVERHEAD_MAX = 0.035
"""CheckFreq's bound on the overhead, as a share of training time."""

_HALVINGS = 200


def young(stall_seconds: float, mtbf_seconds: float) -> float:
    """√(2Cμ), Young 1974: first order."""
    return math.sqrt(2 * not_negative(stall_seconds, "stall of a checkpoint") * positive(mtbf_seconds, "MTBF"))


def daly(stall_seconds: float, mtbf_seconds: float) -> float:
    """Daly 2006: two more terms; μ itself from C = 2μ on."""
    first_order, ratio = young(stall_seconds, mtbf_seconds), stall_seconds / (2 * mtbf_seconds)
    return mtbf_seconds if ratio >= 1 else first_order * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds


def exact(stall_seconds: float, mtbf_seconds: float) -> float:
    """Return the interval that maximises ``ettr.exact``: the root of e^((Δ+C)/μ) (1 - Δ/μ) = 1."""
    ratio = not_negative(stall_seconds, "stall of a checkpoint") / positive(mtbf_seconds, "MTBF")
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):  # falls from C/μ to minus infinity: one root
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if middle + ratio + math.log1p(-middle) > 0 else (low, middle)
    return low * mtbf_seconds


def to_steps(interval_seconds: float, step_seconds: float, stall_seconds: float, mtbf_seconds: float) -> int:
    """Return the neighbouring number of whole steps with the higher ETTR."""
    steps = interval_seconds / positive(step_seconds, "step time")
    nearest = sorted({max(1, math.floor(steps)), max(1, math.ceil(steps))})
    return max(nearest, key=lambda k: ettr.exact(k * step_seconds, stall_seconds, mtbf_seconds, 0.0))


def two_level(
    local_stall_seconds: float, local_mtbf_seconds: float, shared_stall_seconds: float, shared_mtbf_seconds: float
) -> tuple[float, int]:
    """Return the local interval, and how many make a shared one: W = √(2C/λ) (Benoit et al.)."""
    local = young(local_stall_seconds, local_mtbf_seconds)
    shared = young(shared_stall_seconds, shared_mtbf_seconds)
    return local, max(1, round(shared / local)) if local > 0 else 1


def checkfreq_steps(
    step_seconds: float, blocked_seconds: float, durable_seconds: float, overhead_max: float = OVERHEAD_MAX
) -> int:
    """CheckFreq: one checkpoint is durable before the next, and blocking stays below ``overhead_max``."""
    step = positive(step_seconds, "step time")
    hidden = max(0.0, not_negative(durable_seconds, "time to durable") - not_negative(blocked_seconds, "blocked time"))
    return max(1, _ceil(hidden / step), _ceil(blocked_seconds / (positive(overhead_max, "overhead_max") * step)))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The first level is saved every ``steps`` steps, level ``i`` at every ``every[i]``-th save of the one before.

    ``bound_by``: ``cost`` (the optimum), ``throughput`` (the level's maximum) or ``step`` (every step, or every
    checkpoint of the previous level).
    """

    levels: tuple[Level, ...]
    step_seconds: float
    steps: int
    every: tuple[int, ...]
    ettr: float

    @property
    def steps_by_level(self) -> tuple[int, ...]:
        return tuple(self.steps * math.prod(self.every[: level + 1]) for level in range(len(self.levels)))

    @property
    def bound_by(self) -> tuple[str, ...]:
        steps, found = self.steps_by_level, []
        for level, count, before in zip(self.levels, steps, (1, *steps), strict=False):
            is_least = (count - before) * self.step_seconds < level.interval_min_seconds
            found.append("step" if count == before else "throughput" if is_least else "cost")
        return tuple(found)


def plan(levels: Sequence[Level], step_seconds: float) -> Schedule:
    """Return the intervals in whole steps with the highest sustainable ``ettr.nested``, the longer ones if equal.

    ``levels``: in order of the failures that they survive. Deterministic. Raises ConfigError: no
    levels, or failures come too fast for any progress.
    """
    if not levels:
        raise ConfigError("there are no levels to plan for: give at least one")
    positive(step_seconds, "step time")
    levels = tuple(levels)
    repaired, rank = partial(_repaired, levels, step_seconds), partial(_rank, levels, step_seconds)
    best = repaired(_first_guess(levels, step_seconds))
    while rank(better := max(map(repaired, _neighbours(best)), key=rank)) > rank(best):
        best = better
    reached = ettr.nested(levels, best[0] * step_seconds, (1, *best[1:]))
    if reached < 1e-6:
        raise ConfigError(
            "failures come faster than this job can restart, so it would make no progress at any interval",
            hint="Give a longer MTBF or a shorter restart, or size a smaller job",
        )
    return Schedule(levels, step_seconds, best[0], (1, *best[1:]), reached)


def _first_guess(levels: tuple[Level, ...], step_seconds: float) -> tuple[int, ...]:
    rate = sum(1 / level.mtbf_seconds for level in levels)
    base = young(levels[0].stall_seconds, 1 / rate) if rate else math.inf
    counts = [max(1, round(min(base, LONGEST_SECONDS) / step_seconds))]
    for upper, lower in zip(levels[1:], levels, strict=False):
        alone = [young(level.stall_seconds, min(level.mtbf_seconds, LONGEST_SECONDS)) for level in (lower, upper)]
        counts.append(max(1, round(alone[1] / alone[0])) if alone[0] > 0 else 1)
    return tuple(counts)


LONGEST_SECONDS = 30 * ettr.DAY_SECONDS
"""Without failures, no interval would be optimal."""


_FACTORS = (0.5, 0.7, 0.8, 0.9, 0.97, 0.997, 1.003, 1.03, 1.1, 1.2, 1.4, 2.0)


def _neighbours(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return variants with one count changed, and the next by one or inversely: alone, neither might look better."""
    result = []
    for level, count in enumerate(counts):
        for other in {count - 1, count, count + 1, *(round(count * factor) for factor in _FACTORS)}:
            changed = (*counts[:level], max(1, other), *counts[level + 1 :])
            result.append(changed)
            if level + 1 < len(counts):
                alone, made_up = counts[level + 1], round(counts[level + 1] * count / max(1, other))
                moves = {max(1, moved) for moved in (alone - 1, alone + 1, made_up - 1, made_up, made_up + 1)}
                result += [(*changed[: level + 1], moved, *counts[level + 2 :]) for moved in moves]
    return result


def _repaired(levels: tuple[Level, ...], step_seconds: float, counts: tuple[int, ...]) -> tuple[int, ...]:
    result: list[int] = []
    interval = step_seconds
    for level, count in zip(levels, counts, strict=True):
        count = max(1, count, _ceil(level.interval_min_seconds / interval))
        result.append(count)
        interval *= count
    return tuple(result)


def _rank(levels: tuple[Level, ...], step_seconds: float, counts: tuple[int, ...]) -> tuple[float, int]:
    """Greater is better. Beyond twelve digits, the model's precision, fewer checkpoints win."""
    interval = math.prod(counts) * step_seconds
    if interval > LONGEST_SECONDS and counts != (1,) * len(counts):
        return (-interval, 0)
    reached = round(ettr.nested(levels, counts[0] * step_seconds, (1, *counts[1:])), 12)
    return (reached, math.prod(counts) if reached else -math.prod(counts))


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)


GROWTH = 1.25
CALM_WINDOWS = 3
"""Windows below half of the bound before the interval is shortened."""
STEPS_FACTOR_MAX = 16
"""Maximum ratio to the chosen interval: a noisy machine must not end checkpoints."""
NODE_LOSS_SHARE = 0.5
"""Share of failures that lose the SSD too, if one MTBF is given."""


@dataclass(frozen=True, slots=True)
class JobProfile(Checked):
    """Measurements of the slowest rank. ``shared_seconds`` None: no finished drain."""

    step_seconds: Positive
    blocked_seconds: NotNegative
    durable_seconds: NotNegative
    shared_seconds: float | None = None
    shared_stall_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Goal:
    """The permitted cost, and the rates of failures that an SSD does and does not survive (None: unknown)."""

    overhead_max: float = OVERHEAD_MAX
    local_mtbf_seconds: float | None = None
    shared_mtbf_seconds: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.overhead_max < 1:
            raise ConfigError(f"overhead_max is {self.overhead_max:g}: it is a share of training, like 0.035")

    @classmethod
    def of(cls, overhead_max: float, mtbf_seconds: float | Mapping[str, float] | None) -> Goal:
        """For one MTBF, or ``{"local": ..., "shared": ...}``. Raises ConfigError."""
        if mtbf_seconds is None:
            return cls(overhead_max)
        if isinstance(mtbf_seconds, Mapping):
            unknown = mtbf_seconds.keys() - {"local", "shared"}
            if unknown or not mtbf_seconds:
                raise ConfigError(
                    f"mtbf_seconds is {mtbf_seconds}: a number, or one for 'local' (failures that the SSD survives), "
                    "for 'shared' (those that it does not), or for both"
                )
            given = {tier: positive(value, f"mtbf_seconds of {tier!r}") for tier, value in mtbf_seconds.items()}
            return cls(overhead_max, given.get("local"), given.get("shared"))
        mtbf = positive(mtbf_seconds, "mtbf_seconds")
        return cls(overhead_max, mtbf / (1 - NODE_LOSS_SHARE), mtbf / NODE_LOSS_SHARE)

    @property
    def knows_failures(self) -> bool:
        return self.local_mtbf_seconds is not None or self.shared_mtbf_seconds is not None


@dataclass(frozen=True, slots=True)
class Pace:
    """A save every ``steps``, a drain every ``every`` saves. ``calm``: consecutive windows well below the bound."""

    steps: int
    every: int
    reason: str = ""
    calm: int = 0


def choose(profile: JobProfile, goal: Goal, *, drains: bool = True) -> Pace:
    """Return the best interval: CheckFreq's, or with a failure rate the model's, which is never shorter."""
    least = checkfreq_steps(profile.step_seconds, profile.blocked_seconds, profile.durable_seconds, goal.overhead_max)
    least_seconds = least * profile.step_seconds
    shared = profile.shared_seconds if drains else None
    # Shared storage keeps up with every n-th.
    every = max(1, _ceil(shared / least_seconds)) if shared is not None else 1
    if not goal.knows_failures:
        return Pace(least, every, "as often as the bounds allow")
    mtbf = _rate_to_mtbf(goal.local_mtbf_seconds, goal.shared_mtbf_seconds if shared is None else None)
    levels = [Level("local", profile.blocked_seconds, 0.0, mtbf, profile.durable_seconds, least_seconds)]
    if shared is not None:
        mtbf = _rate_to_mtbf(goal.shared_mtbf_seconds)
        levels.append(Level("shared", profile.shared_stall_seconds, 0.0, mtbf, shared, shared))
    try:
        schedule = plan(levels, profile.step_seconds)
    except ConfigError as error:
        return Pace(least, every, f"as often as possible: {error.message}")
    reason = f"best for the failure rate, bound by {schedule.bound_by[0]}"
    return Pace(schedule.steps, schedule.every[-1], reason)


def _rate_to_mtbf(*mtbfs: float | None) -> float:
    rate = sum(1 / mtbf for mtbf in mtbfs if mtbf is not None)
    return 1 / rate if rate > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Steps:
    count: int = 0
    seconds: float = 0.0
    median_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """Training between two saves."""

    plain: Steps = Steps()
    draining: Steps = Steps()
    flushing: Steps = Steps()
    blocked_seconds: float = 0.0

    @property
    def count(self) -> int:
        return self.plain.count + self.draining.count + self.flushing.count

    def baseline(self, last_step_seconds: float | None = None) -> float | None:
        """Return the median undisturbed step, else ``last_step_seconds``, else the least disturbed."""
        candidates = (self.plain.median_seconds, last_step_seconds, self.draining.median_seconds)
        return next((one for one in candidates if one is not None), self.flushing.median_seconds)

    def overhead(self, step_seconds: float) -> float:
        if not self.count:
            return 0.0
        positive(step_seconds, "step time")
        beside = (self.draining, self.flushing)
        slower = sum(steps.seconds - steps.count * step_seconds for steps in beside)
        return max(0.0, self.blocked_seconds + slower) / (self.count * step_seconds)

    def drain_slowdown(self, step_seconds: float) -> float:
        median = self.draining.median_seconds
        return max(0.0, median / positive(step_seconds, "step time") - 1) if median is not None else 0.0


def adapt(pace: Pace | None, choice: Pace, overhead_share: float, overhead_max: float) -> Pace:
    """Longer by a quarter if too costly, shorter step by step if cheap, never shorter than ``choice``."""
    if pace is None:
        return choice
    if overhead_share > overhead_max:
        steps = min(max(math.ceil(GROWTH * pace.steps), choice.steps), STEPS_FACTOR_MAX * choice.steps)
        return Pace(steps, choice.every, f"overhead {overhead_share:.1%} is above {overhead_max:.1%}")
    if pace.steps <= choice.steps:
        return choice
    calm = pace.calm + 1 if overhead_share < overhead_max / 2 else 0
    if calm < CALM_WINDOWS:
        return replace(pace, every=choice.every, calm=calm, reason=f"overhead {overhead_share:.1%}, waiting")
    steps = max(choice.steps, pace.steps - max(1, pace.steps // 16))
    return Pace(steps, choice.every, f"overhead {overhead_share:.1%} in {CALM_WINDOWS} windows")


def slowest(profiles: Sequence[JobProfile]) -> JobProfile:
    """Ranks wait for each other: the maximum of each value."""
    shared = [one.shared_seconds for one in profiles if one.shared_seconds is not None]
    return JobProfile(
        max(one.step_seconds for one in profiles),
        max(one.blocked_seconds for one in profiles),
        max(one.durable_seconds for one in profiles),
        max(shared) if shared else None,
        max(one.shared_stall_seconds for one in profiles),
    )
