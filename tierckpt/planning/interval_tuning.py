"""The interval of a running job: chosen from what was measured, and adapted while it runs. Pure.

Three steps, each of which a test calls by itself:
    choose    the best interval and every how manieth checkpoint goes to shared storage, for a profile (CheckFreq's:
              step, blocked, time to durable) and, where failure rates are known, for them
    Window    what the last stretch of training cost beyond its steps
    adapt     more seldom at once when that is above the bound, more often again when it stays well below it

CheckFreq (FAST'21) only ever makes the interval longer, and takes its baseline from steps that a save slows down. Here
it moves both ways (additive and multiplicative, as TCP does), and the baseline is the median of undisturbed steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import ConfigError
from . import optimal_interval
from .checked_numbers import not_negative, positive
from .ettr import Level
from .optimal_interval import OVERHEAD_MAX

GROWTH = 1.25
CALM_WINDOWS = 3
"""So many windows in a row below half of the bound make the interval shorter."""
STEPS_FACTOR_MAX = 16
"""The interval is never longer than so many times the one chosen: a noisy machine must not end checkpoints."""
NODE_LOSS_SHARE = 0.5
"""Of failures, those that take the SSD with them, where one MTBF is given for both."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured of this job, the slowest rank's. ``shared_seconds`` None: nothing goes to shared storage, or
    nothing has arrived there yet. ``shared_stall_seconds`` is what one drain slows training by, all told."""

    step_seconds: float
    blocked_seconds: float
    durable_seconds: float
    shared_seconds: float | None = None
    shared_stall_seconds: float = 0.0

    def __post_init__(self) -> None:
        positive(self.step_seconds, "step time", "seconds")
        not_negative(self.blocked_seconds, "blocked time")
        not_negative(self.durable_seconds, "time to durable")


@dataclass(frozen=True, slots=True)
class Goal:
    """What checkpoints may cost, and how often failures come: those that an SSD survives, and those that it does not.
    None: not known."""

    overhead_max: float = OVERHEAD_MAX
    local_mtbf_seconds: float | None = None
    shared_mtbf_seconds: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.overhead_max < 1:
            raise ConfigError(f"overhead_max is {self.overhead_max:g}: it is a share of training, like 0.035")

    @classmethod
    def of(cls, overhead_max: float, mtbf_seconds: float | Mapping[str, float] | None) -> Goal:
        """Accept one MTBF, or ``{"local": ..., "shared": ...}``. Raises ConfigError."""
        if mtbf_seconds is None:
            return cls(overhead_max)
        if isinstance(mtbf_seconds, Mapping):
            unknown = mtbf_seconds.keys() - {"local", "shared"}
            if unknown or not mtbf_seconds:
                raise ConfigError(
                    f"mtbf_seconds is {mtbf_seconds}: a number, or one for 'local' (failures that the SSD survives), "
                    "for 'shared' (those that it does not), or for both"
                )
            given = {
                tier: positive(value, f"mtbf_seconds of {tier!r}", "seconds") for tier, value in mtbf_seconds.items()
            }
            return cls(overhead_max, given.get("local"), given.get("shared"))
        mtbf = positive(mtbf_seconds, "mtbf_seconds", "seconds")
        return cls(overhead_max, mtbf / (1 - NODE_LOSS_SHARE), mtbf / NODE_LOSS_SHARE)

    @property
    def knows_failures(self) -> bool:
        return self.local_mtbf_seconds is not None or self.shared_mtbf_seconds is not None


@dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint every ``steps``, each ``every``-th of them to shared storage, and why."""

    steps: int
    every: int
    reason: str


def choose(profile: Profile, goal: Goal, *, drains: bool = True) -> Choice:
    """The interval that is best for ``profile``. Deterministic.

    Without a failure rate: as often as one checkpoint is durable before the next begins and what they block stays below
    the bound (CheckFreq). With it: the maximum of the exact exponential model, never more often than that.
    """
    least = optimal_interval.checkfreq_steps(
        profile.step_seconds, profile.blocked_seconds, profile.durable_seconds, goal.overhead_max
    )
    is_tiered = drains and profile.shared_seconds is not None
    if not goal.knows_failures:
        return Choice(least, _keeps_up(profile, least) if is_tiered else 1, "as often as the bounds allow")
    levels = [
        Level(
            "local",
            profile.blocked_seconds,
            0.0,
            _rate_to_mtbf(goal.local_mtbf_seconds, None if is_tiered else goal.shared_mtbf_seconds),
            profile.durable_seconds,
            least * profile.step_seconds,
        )
    ]
    if is_tiered:
        seconds = profile.shared_seconds or 0.0
        levels.append(
            Level(
                "shared", profile.shared_stall_seconds, 0.0, _rate_to_mtbf(goal.shared_mtbf_seconds), seconds, seconds
            )
        )
    try:
        schedule = optimal_interval.plan(levels, profile.step_seconds)
    except ConfigError as error:
        return Choice(least, _keeps_up(profile, least) if is_tiered else 1, f"as often as possible: {error.message}")
    every = schedule.every[1] if is_tiered else 1
    return Choice(schedule.steps, every, f"best for the failure rate, bound by {schedule.bound_by[0]}")


def _rate_to_mtbf(*mtbfs: float | None) -> float:
    """Mean time between failures of several kinds together; infinite without any."""
    rate = sum(1 / mtbf for mtbf in mtbfs if mtbf is not None)
    return 1 / rate if rate > 0 else math.inf


def _keeps_up(profile: Profile, steps: int) -> int:
    """Every how manieth checkpoint shared storage has taken before the next for it is due."""
    return max(1, math.ceil((profile.shared_seconds or 0.0) / (steps * profile.step_seconds) - 1e-9))


@dataclass(frozen=True, slots=True)
class Steps:
    """Training steps of one kind: how many, all their seconds, and the median."""

    count: int = 0
    seconds: float = 0.0
    median_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Training between two saves: steps beside nothing, beside a drain, beside a flush; and what calls blocked."""

    plain: Steps = Steps()
    draining: Steps = Steps()
    flushing: Steps = Steps()
    blocked_seconds: float = 0.0

    @property
    def count(self) -> int:
        return self.plain.count + self.draining.count + self.flushing.count

    def baseline(self, known_seconds: float | None = None) -> float | None:
        """Seconds of an undisturbed step: the value before where each was disturbed, else the least disturbed."""
        candidates = (self.plain.median_seconds, known_seconds, self.draining.median_seconds)
        return next((one for one in candidates if one is not None), self.flushing.median_seconds)

    def overhead(self, step_seconds: float) -> float:
        """Share by which checkpoints made it longer: blocked time, and steps that flushes and drains slowed down."""
        if not self.count:
            return 0.0
        positive(step_seconds, "step time", "seconds")
        beside = (self.draining, self.flushing)
        slower = sum(steps.seconds - steps.count * step_seconds for steps in beside)
        return max(0.0, self.blocked_seconds + slower) / (self.count * step_seconds)

    def drain_slowdown(self, step_seconds: float) -> float:
        """Share by which a step beside a drain was slower."""
        median = self.draining.median_seconds
        return max(0.0, median / positive(step_seconds, "step time", "seconds") - 1) if median is not None else 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """The interval in force. ``calm`` counts the windows in a row that were well below the bound."""

    steps: int
    every: int
    calm: int = 0
    reason: str = ""


def adapt(pace: Pace | None, choice: Choice, overhead_share: float, overhead_max: float) -> Pace:
    """The next interval: never shorter than chosen, longer by a quarter when too dear, shorter step by step when cheap.

    Additive and multiplicative: it leaves what hurts quickly, and tries what may hurt carefully.
    """
    if pace is None:
        return Pace(choice.steps, choice.every, 0, choice.reason)
    longest = STEPS_FACTOR_MAX * choice.steps
    if overhead_share > overhead_max:
        steps = min(max(math.ceil(GROWTH * pace.steps), choice.steps), max(longest, choice.steps))
        return Pace(steps, choice.every, 0, f"overhead {overhead_share:.1%} is above {overhead_max:.1%}")
    if pace.steps <= choice.steps:
        return Pace(choice.steps, choice.every, 0, choice.reason)
    calm = pace.calm + 1 if overhead_share < overhead_max / 2 else 0
    if calm < CALM_WINDOWS:
        return replace(pace, every=choice.every, calm=calm, reason=f"overhead {overhead_share:.1%}, waiting")
    steps = max(choice.steps, pace.steps - max(1, pace.steps // 16))
    return Pace(steps, choice.every, 0, f"overhead {overhead_share:.1%} in {CALM_WINDOWS} windows")


def slowest(profiles: Sequence[Profile]) -> Profile:
    """What the job as a whole sees: ranks wait for each other, so the largest of each."""
    shared = [one.shared_seconds for one in profiles if one.shared_seconds is not None]
    return Profile(
        max(one.step_seconds for one in profiles),
        max(one.blocked_seconds for one in profiles),
        max(one.durable_seconds for one in profiles),
        max(shared) if shared else None,
        max(one.shared_stall_seconds for one in profiles),
    )
