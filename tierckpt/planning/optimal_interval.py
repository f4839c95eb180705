"""How often to take a checkpoint: the published optima, and the one this package decides by.

Pure functions: the sizer, the simulator and the trainer call the same ones. Intervals are seconds of training between
two checkpoints, without the stall of the checkpoint itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from . import ettr
from .checked_numbers import not_negative, positive
from .ettr import Level

OVERHEAD_MAX = 0.035
"""CheckFreq's bound on what checkpoints may cost of the training time."""

_HALVINGS = 200


def young(stall_seconds: float, mtbf_seconds: float) -> float:
    """√(2Cμ), Young 1974: right to first order, while the stall is short beside the time between failures."""
    return math.sqrt(2 * _stall(stall_seconds) * _mtbf(mtbf_seconds))


def daly(stall_seconds: float, mtbf_seconds: float) -> float:
    """Daly 2006: two more terms of the series; μ itself where C reaches 2μ and the series ends."""
    if _stall(stall_seconds) >= 2 * _mtbf(mtbf_seconds):
        return mtbf_seconds
    ratio = stall_seconds / (2 * mtbf_seconds)
    return young(stall_seconds, mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds


def exact(stall_seconds: float, mtbf_seconds: float) -> float:
    """The interval that maximises ``ettr.exact``: the root of e^((Δ+C)/μ) (1 - Δ/μ) = 1.

    Neither restart nor latency moves it: they cost the same at every interval.
    """
    ratio = _stall(stall_seconds) / _mtbf(mtbf_seconds)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):  # x + C/μ + log(1 - x) falls from C/μ to minus infinity: one root
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if middle + ratio + math.log1p(-middle) > 0 else (low, middle)
    return low * mtbf_seconds


def to_steps(interval_seconds: float, step_seconds: float, stall_seconds: float, mtbf_seconds: float) -> int:
    """The whole number of steps, below or above ``interval_seconds``, whose ETTR is higher; at least 1."""
    steps = interval_seconds / positive(step_seconds, "step time")
    nearest = sorted({max(1, math.floor(steps)), max(1, math.ceil(steps))})
    return max(nearest, key=lambda k: ettr.exact(k * step_seconds, stall_seconds, mtbf_seconds, 0.0))


def two_level(
    local_stall_seconds: float, local_mtbf_seconds: float, shared_stall_seconds: float, shared_mtbf_seconds: float
) -> tuple[float, int]:
    """Local interval, and every how manieth goes to shared storage: W = √(2C/λ) of each level alone (Benoit et al.).

    ``plan`` starts from it and finds what is better, with bounds and whole steps.
    """
    local = young(local_stall_seconds, local_mtbf_seconds)
    shared = young(shared_stall_seconds, shared_mtbf_seconds)
    return local, max(1, round(shared / local)) if local > 0 else 1


def checkfreq_steps(
    step_seconds: float, blocked_seconds: float, durable_seconds: float, overhead_max: float = OVERHEAD_MAX
) -> int:
    """CheckFreq's interval from a profile, for who knows no failure rate: as often as the bounds allow.

    One checkpoint is durable before the next begins, and what they block stays below ``overhead_max`` of training.
    """
    step = positive(step_seconds, "step time")
    hidden = max(0.0, not_negative(durable_seconds, "time to durable") - not_negative(blocked_seconds, "blocked time"))
    return max(1, _ceil(hidden / step), _ceil(blocked_seconds / (positive(overhead_max, "overhead_max") * step)))


@dataclass(frozen=True, slots=True)
class Schedule:
    """What ``plan`` decided: the first level every ``steps`` steps, each next every ``every[i]``-th time.

    ``bound_by`` says for each level what its interval is bounded by: ``cost`` (the optimum), ``throughput`` (it could
    not take more) or ``step`` (there is no shorter one: every step, or every one of the level before).
    """

    levels: tuple[Level, ...]
    step_seconds: float
    steps: int
    every: tuple[int, ...]
    ettr: float

    @property
    def steps_by_level(self) -> tuple[int, ...]:
        return tuple(self.steps * math.prod(self.every[: place + 1]) for place in range(len(self.levels)))

    @property
    def bound_by(self) -> tuple[str, ...]:
        return tuple(self._bound(place) for place in range(len(self.levels)))

    def _bound(self, place: int) -> str:
        steps = self.steps_by_level[place]
        fewer = steps - (self.steps_by_level[place - 1] if place else 1)
        if fewer < 1:
            return "step"
        return "throughput" if fewer * self.step_seconds < self.levels[place].interval_min_seconds else "cost"


def plan(levels: Sequence[Level], step_seconds: float) -> Schedule:
    """The intervals, in whole steps, with the highest ``ettr.nested`` that every level can keep up with.

    ``levels`` come in the order of what they survive, the first takes every checkpoint. Deterministic, so all ranks
    that ask with the same numbers decide the same. Where two are equal, the longer interval is taken.

    Raises:
        ConfigError: no levels, or no interval with which the job would get anywhere.
    """
    if not levels:
        raise ConfigError("there is no level to plan for: give at least one")
    positive(step_seconds, "step time")
    levels = tuple(levels)
    best = _repaired(levels, step_seconds, _first_guess(levels, step_seconds))
    while True:
        better = max(
            (_repaired(levels, step_seconds, tried) for tried in _neighbours(best)),
            key=lambda found: _rank(levels, step_seconds, found),
        )
        if _rank(levels, step_seconds, better) <= _rank(levels, step_seconds, best):
            break
        best = better
    reached = ettr.nested(levels, best[0] * step_seconds, (1, *best[1:]))
    if reached < 1e-6:
        raise ConfigError(
            "failures come faster than this job can restart, so it would get nowhere at any interval",
            hint="Give a longer MTBF or a shorter restart, or size a smaller job",
        )
    return Schedule(levels, step_seconds, best[0], (1, *best[1:]), reached)


def _first_guess(levels: tuple[Level, ...], step_seconds: float) -> tuple[int, ...]:
    """Each level alone, as ``two_level`` has it; the first one against all failures."""
    rate = sum(1 / level.mtbf_seconds for level in levels)
    base = young(levels[0].stall_seconds, 1 / rate) if rate else math.inf
    counts = [max(1, round(min(base, LONGEST_SECONDS) / step_seconds))]
    for upper, lower in zip(levels[1:], levels, strict=False):
        alone = [young(level.stall_seconds, min(level.mtbf_seconds, LONGEST_SECONDS)) for level in (lower, upper)]
        counts.append(max(1, round(alone[1] / alone[0])) if alone[0] > 0 else 1)
    return tuple(counts)


LONGEST_SECONDS = 30 * ettr.DAY_SECONDS
"""No interval is longer: without failures none would be the best."""


_FACTORS = (0.5, 0.7, 0.8, 0.9, 0.97, 0.997, 1.003, 1.03, 1.1, 1.2, 1.4, 2.0)


def _neighbours(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The same with one count changed, by one or by up to a factor of two, and the next with it: by one or to make up.

    By one, since from 3 to 2 is a third: neither alone nor wholly made up for would it ever look worth it.
    """
    result = []
    for place, count in enumerate(counts):
        for other in {count - 1, count, count + 1, *(round(count * factor) for factor in _FACTORS)}:
            changed = (*counts[:place], max(1, other), *counts[place + 1 :])
            result.append(changed)
            if place + 1 < len(counts):
                alone, made_up = counts[place + 1], round(counts[place + 1] * count / max(1, other))
                moves = {max(1, moved) for moved in (alone - 1, alone + 1, made_up - 1, made_up, made_up + 1)}
                result += [(*changed[: place + 1], moved, *counts[place + 2 :]) for moved in moves]
    return result


def _repaired(levels: tuple[Level, ...], step_seconds: float, counts: tuple[int, ...]) -> tuple[int, ...]:
    """``counts`` raised to where every level keeps up."""
    result: list[int] = []
    interval = step_seconds
    for level, count in zip(levels, counts, strict=True):
        count = max(1, count, _ceil(level.interval_min_seconds / interval))
        result.append(count)
        interval *= count
    return tuple(result)


def _rank(levels: tuple[Level, ...], step_seconds: float, counts: tuple[int, ...]) -> tuple[float, int]:
    """What is better is greater. Beyond twelve digits the model says nothing, and the fewer checkpoints win."""
    interval = math.prod(counts) * step_seconds
    if interval > LONGEST_SECONDS and counts != (1,) * len(counts):
        return (-interval, 0)
    reached = round(ettr.nested(levels, counts[0] * step_seconds, (1, *counts[1:])), 12)
    return (reached, math.prod(counts) if reached else -math.prod(counts))


def _ceil(value: float) -> int:
    """Up to the next whole number, except from where rounding of the division put it just above one."""
    return math.ceil(value - 1e-9)


def _stall(seconds: float) -> float:
    return not_negative(seconds, "stall of a checkpoint")


def _mtbf(seconds: float) -> float:
    return positive(seconds, "MTBF", "seconds")
