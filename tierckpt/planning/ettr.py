"""Effective training time ratio: the share of time spent on training that is kept.

Assumes independent, exponential failures. Sources: docs/adr/0012-planning.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .checked_numbers import Checked, NotNegative, positive

DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class Level(Checked):
    """A place to restart from.

    ``mtbf_seconds``: between failures that need this level and no deeper one (inf: none do). ``latency_seconds``: until
    a new checkpoint can be restored from here.
    """

    name: str
    stall_seconds: NotNegative
    restart_seconds: NotNegative
    mtbf_seconds: float
    latency_seconds: NotNegative = 0.0
    interval_min_seconds: NotNegative = 0.0

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if not self.mtbf_seconds > 0:
            raise ConfigError(f"mtbf_seconds of {self.name} is {self.mtbf_seconds:g}: it must be above 0")


def mtbf_seconds(nodes: int, failures_per_node_day: float) -> float:
    return DAY_SECONDS / (positive(nodes, "nodes") * positive(failures_per_node_day, "failures per node and day"))


def exact(
    interval_seconds: float, stall_seconds: float, mtbf: float, restart_seconds: float, latency_seconds: float = 0.0
) -> float:
    """Return the ETTR of one level: Δ / (μ e^((R+τ)/μ) (e^((Δ+c)/μ) - 1)).

    The latency τ is equivalent to a restart longer by τ. A failure during a restart begins it again.
    """
    positive(interval_seconds, "interval")
    wall = _stretched(interval_seconds + stall_seconds, mtbf, restart_seconds + latency_seconds)
    return interval_seconds / wall


def nested(levels: Sequence[Level], interval_seconds: float, every: Sequence[int]) -> float:
    """Return the ETTR of several levels: ``exact`` applied recursively.

    Every ``every[i]``-th checkpoint of a level goes to the next.
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
    """Return the mean time to complete ``seconds``: μ e^(R/μ) (e^(x/μ) - 1)."""
    if math.isinf(mtbf):
        return seconds
    try:
        return mtbf * math.exp(restart_seconds / mtbf) * math.expm1(seconds / mtbf)
    except OverflowError:
        return math.inf
