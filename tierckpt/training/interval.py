"""The interval of ``Checkpointer(interval=...)``: when to save, and which saves are drained, alike on all ranks.

At a save the ranks gather measurements, and rank 0 decides and broadcasts the result: two small collectives on the
caller's thread (P8).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal, TypeAlias

from ..errors import ConfigError
from ..planning import optimal_interval
from ..planning.optimal_interval import OVERHEAD_MAX, Goal, JobProfile, MeasuredSpan, Pace, Steps
from ..telemetry import logger
from .drain_decider import DrainDecider, RankView, SaveDirective
from .rank_exchange import all_gather, broadcast
from .saves import SaveRecord

log = logger("interval")

Interval: TypeAlias = "int | Literal['auto'] | AutoInterval | None"
Phase: TypeAlias = Literal["plain", "draining", "flushing"]

PROFILE_STEPS = 10
"""Steps before the first save, and between saves until the first outcome."""
WARM_UP_STEPS = 2
"""These steps are not measured: compilation, caches, connections."""
SAMPLES_MAX = 2048
RECORDS_MAX = 5


@dataclass(frozen=True, kw_only=True)
class AutoInterval:
    """``Checkpointer(interval=...)``: the best interval by measured times. "auto" is ``AutoInterval()``.

    Args:
        overhead_max: maximum share of training time spent on checkpoints.
        mtbf_seconds: mean time between failures of the job, if known; or ``{"local": ..., "shared": ...}``: between
            failures that an SSD survives, and between all others.

    Raises ConfigError: a share that is not between 0 and 1, or a time that is not positive.

    Example:
        >>> interval = tierckpt.AutoInterval(overhead_max=0.02, mtbf_seconds=6 * 3600)
        >>> with tierckpt.Checkpointer("run", interval=interval) as checkpointer:
        ...     committed = checkpointer.step(1, {"x": torch.zeros(1)})
    """

    overhead_max: float = OVERHEAD_MAX
    mtbf_seconds: float | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        Goal.of(self.overhead_max, self.mtbf_seconds)


@dataclass
class _Kind:
    count: int = 0
    seconds: float = 0.0
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.samples.append(seconds)

    def steps(self) -> Steps:
        return Steps(self.count, self.seconds, statistics.median(self.samples) if self.samples else None)


class IntervalController:
    """Decides for one Checkpointer. All ranks must call the same methods in the same order. Raises ConfigError."""

    def __init__(self, interval: Interval, sending: DrainDecider) -> None:
        auto = interval if isinstance(interval, AutoInterval) else AutoInterval()
        self.interval = "auto" if isinstance(interval, AutoInterval) else interval
        is_number = isinstance(self.interval, Integral) and not isinstance(self.interval, bool)
        if self.interval not in (None, "auto") and not (is_number and int(self.interval) >= 1):
            raise ConfigError(f"interval is {interval!r}: use 'auto' or a whole number of steps, at least 1")
        self.goal = Goal.of(auto.overhead_max, auto.mtbf_seconds)
        self.pace: Pace | None = None
        self.step_seconds: float | None = None
        """The duration of an undisturbed step."""
        self._drain_decider = sending
        self._seen = 0
        self._mark: float | None = None
        self._forget_window()

    def stepped(self, phase: Phase, now: float) -> None:
        self._since += 1
        self._seen += 1
        if self._mark is not None and self._seen > WARM_UP_STEPS:
            self._kinds[phase].add(now - self._mark)
        self._mark = None

    def resumed(self, blocked_seconds: float = 0.0, now: float | None = None) -> None:
        self._mark = time.monotonic() if now is None else now
        self._blocked_seconds += blocked_seconds

    def _forget_window(self) -> None:
        self._kinds: dict[Phase, _Kind] = {"plain": _Kind(), "draining": _Kind(), "flushing": _Kind()}
        self._blocked_seconds = 0.0
        self._since = 0

    def _window(self) -> MeasuredSpan:
        plain, draining, flushing = (kind.steps() for kind in self._kinds.values())
        return MeasuredSpan(plain, draining, flushing, self._blocked_seconds)

    @property
    def keeps_some(self) -> bool:
        return self._drain_decider.drains and (self.interval == "auto" or self._drain_decider.is_adaptive)

    @property
    def is_adaptive(self) -> bool:
        return self._drain_decider.is_adaptive

    def is_due(self, step: int) -> bool:
        if self.interval is None:
            return False
        if self.interval == "auto":
            return self._since >= (self.pace.steps if self.pace is not None else PROFILE_STEPS)
        return step % self.interval == 0

    def before_save(self, step: int, records: Sequence[SaveRecord], *, is_asked: bool = False) -> SaveDirective:
        """Decide the next interval, and return the directive for this save.

        Collective, unless the interval is fixed and all saves are drained.
        """
        if self.interval != "auto" and not self._drain_decider.is_adaptive:
            self._forget_window()
            return SaveDirective()
        window = self._window()
        self.step_seconds = window.baseline(self.step_seconds)
        profile = self._profile(window, records)
        share = window.overhead(self.step_seconds) if self.step_seconds else 0.0
        is_measurable = self.step_seconds and window.plain.count and window.draining.count
        view = self._drain_decider.measure(
            records, window.drain_slowdown(self.step_seconds or 0.0) if is_measurable else None
        )
        self._forget_window()
        measured = all_gather((profile, share, view))
        self.pace, order = broadcast(lambda: self._decide(step, measured, records, is_asked))
        return order

    def _decide(
        self,
        step: int,
        measured: list[tuple[JobProfile | None, float, RankView]],
        records: Sequence[SaveRecord],
        is_asked: bool,
    ) -> tuple[Pace | None, SaveDirective]:
        profiles = [profile for profile, _, _ in measured if profile is not None]
        share = max(share for _, share, _ in measured)
        view = RankView.of_all([views for _, _, views in measured])
        every = 1
        if self.interval == "auto" and len(profiles) == len(measured):
            every = self._adapt(profiles, share)
        steps = self.pace.steps if self.pace is not None else self.interval if isinstance(self.interval, int) else 1
        seconds = steps * (self.step_seconds or 0.0)
        order = self._drain_decider.decide(step, records, every, seconds, is_asked=is_asked, view=view)
        return self.pace, order

    def _adapt(self, profiles: list[JobProfile], share: float) -> int:
        profile = optimal_interval.slowest(profiles)
        choice = optimal_interval.choose(profile, self.goal, drains=self._drain_decider.drains)
        pace = optimal_interval.adapt(self.pace, choice, share, self.goal.overhead_max)
        if self.pace is None or (pace.steps, pace.every) != (self.pace.steps, self.pace.every):
            self._explain(pace, profile, share)
        self.pace = pace
        return pace.every

    def _explain(self, pace: Pace, profile: JobProfile, share: float) -> None:
        fields = {
            "interval_steps": pace.steps,
            "interval_seconds": pace.steps * profile.step_seconds,
            "shared_every": pace.every,
            "reason": pace.reason,
            "step_seconds": profile.step_seconds,
            "blocked_seconds": profile.blocked_seconds,
            "durable_seconds": profile.durable_seconds,
            "overhead": share,
            "overhead_max": self.goal.overhead_max,
        }
        log.info(
            "a checkpoint every %(interval_steps)d steps (%(interval_seconds).3g s), one of %(shared_every)d to shared "
            "storage: %(reason)s; a step takes %(step_seconds).3g s, a save blocks %(blocked_seconds).3g s and is "
            "durable after %(durable_seconds).3g s, overhead %(overhead).2g of at most %(overhead_max).2g",
            fields,
            extra=fields,
        )

    def _profile(self, window: MeasuredSpan, records: Sequence[SaveRecord]) -> JobProfile | None:
        usable = [record for record in records if not record.error]
        if not usable or not self.step_seconds:
            return None
        usual = usable[1:] or usable
        blocked = statistics.median(one.blocked_seconds for one in usual[-RECORDS_MAX:])
        durable = _recent([(one.local_commit_seconds, one.age_seconds) for one in usual])
        if durable is None:
            return None
        sent = [one for one in usual if one.is_sent]
        shared = _recent([(one.drain_seconds, one.age_seconds) for one in sent]) if self._drain_decider.drains else None
        slowdown = window.drain_slowdown(self.step_seconds)
        return JobProfile(self.step_seconds, blocked, durable, shared, slowdown * (shared or 0.0))


def _recent(times: Sequence[tuple[float | None, float]]) -> float | None:
    known = [seconds for seconds, _ in times if seconds is not None][-RECORDS_MAX:]
    pending = [age for seconds, age in times[-RECORDS_MAX:] if seconds is None]
    return max([statistics.median(known), *pending] if known else pending, default=None)
