"""Effective training time ratio: the share of time spent on training that is kept.

Assumes independent failures with exponential times between them. ``exact`` is exact under that assumption.

Sources: Young 1974 and Daly 2006 (intervals), Moody et al. 2010 (levels). ``exact`` with a latency, and ``nested``, are
derived here: docs/adr/0012-planning.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .checked_numbers import not_negative, positive

DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class Level:
    """A place to restart from, as used by the model.

    ``mtbf_seconds`` is the mean time between failures that need this level and no deeper one (inf: none do),
    ``stall_seconds`` the training stall of one checkpoint, ``restart_seconds`` the time from such a failure until
    training resumes, ``latency_seconds`` the time until a new checkpoint can be restored from here, and
    ``interval_min_seconds`` the shortest possible interval (by throughput or permitted wear).
    """

    name: str
    stall_seconds: float
    restart_seconds: float
    mtbf_seconds: float
    latency_seconds: float = 0.0
    interval_min_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in ("stall_seconds", "restart_seconds", "latency_seconds", "interval_min_seconds"):
            not_negative(getattr(self, field), f"{field} of {self.name}")
        if not self.mtbf_seconds > 0:
            raise ConfigError(f"mtbf_seconds of {self.name} is {self.mtbf_seconds:g}: it must be above 0")


def mtbf_seconds(nodes: int, failures_per_node_day: float) -> float:
    """Return the mean time between failures of a job, which fails with any of its nodes."""
    return DAY_SECONDS / (positive(nodes, "nodes") * positive(failures_per_node_day, "failures per node and day"))


def exact(
    interval_seconds: float, stall_seconds: float, mtbf: float, restart_seconds: float, latency_seconds: float = 0.0
) -> float:
    """Return the ETTR of one level: Δ / (μ e^((R+τ)/μ) (e^((Δ+c)/μ) - 1)).

    Of a run that ends after Exp(μ), only checkpoints durable by then count: the latency τ delays each, which is
    equivalent to a restart longer by τ. A failure during a restart begins it again.
    """
    positive(interval_seconds, "interval")
    wall = _stretched(interval_seconds + stall_seconds, mtbf, restart_seconds + latency_seconds)
    return interval_seconds / wall


def nested(levels: Sequence[Level], interval_seconds: float, every: Sequence[int]) -> float:
    """Return the ETTR of several levels: a checkpoint on the first every ``interval_seconds``.

    Every ``every[i]``-th checkpoint of a level goes to the next. The time for one period of a level, failures included,
    is the work of the period of the next: ``exact`` applied recursively. Treating these times as constant costs less
    than 1 % (tests).
    """
    positive(interval_seconds, "interval")
    work, wall = interval_seconds, interval_seconds
    for level, times in zip(levels, every, strict=True):
        work *= times
        wall = _stretched(
            times * wall + level.stall_seconds, level.mtbf_seconds, level.restart_seconds + level.latency_seconds
        )
    return work / wall


def _stretched(seconds: float, mtbf: float, restart_seconds: float) -> float:
    """Return the mean time to complete ``seconds`` with a restart after each failure: μ e^(R/μ) (e^(x/μ) - 1)."""
    if math.isinf(mtbf):
        return seconds
    try:
        return mtbf * math.exp(restart_seconds / mtbf) * math.expm1(seconds / mtbf)
    except OverflowError:
        return math.inf  # it never completes
