"""Tunes the number of concurrent chunk requests to shared storage, by trial. Pure: no clock, no thread.

All nodes share the store, and try at the same time: what one of them measures, others may have caused. So each compares
with the best it has seen with few under way, not with what it had just before, or all of them would creep up together
until no request moves any more; and it goes back whenever they take longer, however late that is.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

GROWTH_MAX = 1.4
"""Twice as many at a time are worth it while each takes no longer than so many times."""
LATE = 2.0
"""Those under way are late when half of them have been for so many times as long as that."""


class Ramp:
    """``factor`` times as many as at first are worth having under way. One fill's."""

    def __init__(self) -> None:
        self.factor = 1
        self._few_seconds = 0.0
        """The least that a chunk has taken with few under way: the median of a round."""
        self._round: list[float] = []
        self._has_tried = False

    def completed(self, seconds: float, slots: int, slots_max: int) -> None:
        """A chunk came after ``seconds``, with at most ``slots`` under way at a time."""
        self._round.append(seconds)
        if len(self._round) < 2 * slots:
            return
        took, self._round = median(self._round), []
        if self.factor == 1:
            self._few_seconds = min(self._few_seconds or took, took)
        if self.factor > 1 and took > GROWTH_MAX * self._few_seconds:
            self.factor, self._has_tried = self.factor // 2, True
        elif not self._has_tried:
            self.factor *= 2
            self._has_tried = 2 * slots >= slots_max

    def under_way(self, ages: Iterable[float]) -> None:
        """Go back at once when those under way are late: none of them may ever come."""
        if self.factor > 1 and median([*ages, 0.0]) > LATE * GROWTH_MAX * self._few_seconds:
            self.factor, self._has_tried, self._round = 1, True, []
