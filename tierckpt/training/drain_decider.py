"""Decides each drain, its route and its rate (by ``planning/drain_policy.py``).

A checkpoint on shared storage needs every rank's part. So rank 0 decides at the save, from measurements of all ranks,
and broadcasts the directive. With ``exposure_seconds_max`` the policy decides (D1 to D7).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cache.space import room_bytes
from ..config import Settings, ranks_of_node
from ..disk.illness import Errands
from ..errors import CheckpointSkippedError
from ..format.layout import MANIFEST, local_dir, parse_uri
from ..planning import drain_policy
from ..planning.drain_policy import Decision, Rules, Situation, Version
from ..telemetry import logger
from .saves import SaveRecord

log = logger("policy")

VERSIONS_MAX = 64
SLOWDOWN_WEIGHT = 0.5
THROTTLED_SHARE = 0.8
"""From this share of its throttle on, a drain does not measure shared storage."""
THROTTLE_SECONDS_MIN = 60.0
THROTTLE_INTERVALS = 4.0


@dataclass(frozen=True, slots=True)
class SaveDirective:
    """The directive for a save. ``bytes_per_second`` limits the job's drains; None: unlimited."""

    is_sent: bool = True
    is_direct_put: bool = False
    bytes_per_second: float | None = None
    throttle_seconds: float = 0.0

    def throttle_of_node(self) -> int | None:
        return None if self.bytes_per_second is None else max(1, int(self.bytes_per_second * _share_of_node()))


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank's measurements. ``free_checkpoints`` counts more that fit on its SSD."""

    free_checkpoints: float = math.inf
    drain_slowdown: float | None = None

    @classmethod
    def of_all(cls, views: Sequence[RankView]) -> RankView:
        slow = (one.drain_slowdown for one in views if one.drain_slowdown is not None)
        return cls(min(one.free_checkpoints for one in views), max(slow, default=None))


class DrainDecider:
    def __init__(self, settings: Settings) -> None:
        self.drains = settings.drain
        self.is_adaptive = settings.drain and settings.exposure_seconds_max is not None
        self._settings, self._disk_worker = settings, Errands(settings.local_root)
        self._since_sent = math.inf
        self._state = drain_policy.PolicyState()
        self._observed: set[tuple[str, float]] = set()
        self._throttle: float | None = None
        self._slowdown = 0.0

    def measure(self, records: Sequence[SaveRecord], drain_slowdown: float | None) -> RankView:
        free_checkpoints = math.inf
        if self.is_adaptive and (size_bytes := _usual_bytes(records)):
            with contextlib.suppress(CheckpointSkippedError):  # planning raises it next, on all ranks
                room = self._disk_worker.run(lambda: room_bytes(self._settings))
                free_checkpoints = room / (size_bytes * _share_of_node())
        return RankView(free_checkpoints, drain_slowdown)

    def decide(
        self,
        step: int,
        records: Sequence[SaveRecord],
        every: int,
        interval_seconds: float,
        *,
        is_asked: bool = False,
        view: RankView | None = None,
    ) -> SaveDirective:
        if not self.drains:
            return SaveDirective()
        if not self.is_adaptive:
            self._since_sent += 1
            is_sent = is_asked or self._since_sent >= every
            self._since_sent = 0 if is_sent else self._since_sent
            return SaveDirective(is_sent)
        return self._query_policy(step, records, every, interval_seconds, view or RankView())

    def _query_policy(
        self, step: int, records: Sequence[SaveRecord], every: int, interval_seconds: float, view: RankView
    ) -> SaveDirective:
        usable = [(number, one) for number, one in enumerate(records, 1) if not one.error][-VERSIONS_MAX:]
        for _, one in usable:
            self._observe(one)
        self._learn_slowdown(view.drain_slowdown)
        size_bytes = float(_usual_bytes(records))
        on_ssd = {number for number, _ in usable}
        with contextlib.suppress(CheckpointSkippedError):
            on_ssd = self._disk_worker.run(lambda: {number for number, one in usable if self._is_on_ssd(one)})
        versions = [self._version(number, one, number in on_ssd) for number, one in usable]
        arrived = max((version.number for version in versions if version.on_shared), default=0)
        under_way = [n for n, one in usable if one.is_sent and one.shared_commit_seconds is None and n > arrived]
        flushing = [one for _, one in usable if one.local_commit_seconds is None and not one.is_direct_put]
        queue = sum(one.size_bytes or size_bytes for one in flushing)
        used = sum(version.size_bytes for version in versions if version.on_local)
        rules = Rules(
            every=every,
            rpo_seconds=self._settings.exposure_seconds_max or math.inf,
            local_bytes_max=used + view.free_checkpoints * size_bytes if size_bytes else math.inf,
        )
        before = Situation(
            now=0.0,
            versions=versions,
            next_bytes=size_bytes,
            interval_seconds=interval_seconds,
            sending=under_way[0] if under_way else None,
            local_queue_bytes=queue,
            local_reserved_bytes=queue,
            step_slowdown=self._slowdown,
            began_at=-max((one.age_seconds for _, one in usable), default=0.0),
        )
        number = len(records) + 1
        self._state, where = drain_policy.decide(self._state, rules, before)
        if where.place == "shared":
            is_full = where.numbers["free_bytes"] < size_bytes
            why = "the SSD has no room for it" if is_full else "the SSD is no faster"
            order, self._throttle = SaveDirective(True, is_direct_put=True), None
            self._log_decision(step, "goes straight to shared storage", why, where, order)
            return order
        here = Version(number, size_bytes, 0.0)
        policy_input = replace(before, versions=[*before.versions, here])
        self._state, decision = drain_policy.decide(self._state, rules, policy_input, votes=False)
        is_sent = decision.send == number
        throttle_seconds = max(THROTTLE_SECONDS_MIN, THROTTLE_INTERVALS * interval_seconds)
        is_slowed = self._slowdown > rules.step_slowdown_max
        order = SaveDirective(is_sent, False, decision.rate_bytes_per_second if is_slowed else None, throttle_seconds)
        self._throttle = order.bytes_per_second
        what = "goes to shared storage" if is_sent else "stays on the SSD"
        self._log_decision(step, what, decision.reason, decision, order)
        return order

    def _log_decision(self, step: int, what: str, why: str, decision: Decision, order: SaveDirective) -> None:
        numbers = {name: round(value, 3) for name, value in decision.numbers.items()}
        numbers["step_slowdown"] = round(self._slowdown, 4)
        if order.bytes_per_second is not None:
            numbers["drain_bytes_per_second"] = round(order.bytes_per_second)
        shown = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
        directive = {"step": step, "is_sent": order.is_sent, "is_direct_put": order.is_direct_put}
        log.info("step %d %s: %s (%s)", step, what, why, shown, extra={**directive, **numbers})

    def _version(self, number: int, one: SaveRecord, stands_here: bool) -> Version:
        return Version(
            number,
            float(one.size_bytes),
            -one.age_seconds,
            on_local=not one.is_direct_put and one.local_commit_seconds is not None and stands_here,
            on_shared=one.shared_commit_seconds is not None,
            skipped=not one.is_sent,
        )

    def _is_on_ssd(self, one: SaveRecord) -> bool:
        return not one.uri or (local_dir(self._settings.local_root, parse_uri(one.uri)) / MANIFEST).exists()

    def _observe(self, one: SaveRecord) -> None:
        rules = Rules()
        local, shared = one.local_commit_seconds, one.shared_commit_seconds
        if local is not None and not one.is_direct_put and ("local", one.begun_at) not in self._observed:
            self._observed.add(("local", one.begun_at))
            self._state = drain_policy.observe(self._state, rules, "local", one.size_bytes, local)
        if shared is not None and one.is_sent and ("shared", one.begun_at) not in self._observed:
            self._observed.add(("shared", one.begun_at))
            seconds = max(shared - (0.0 if one.is_direct_put else local or 0.0), 1e-3)
            throttle = math.inf if self._throttle is None or one.is_direct_put else self._throttle
            if one.size_bytes / seconds <= THROTTLED_SHARE * throttle:
                self._state = drain_policy.observe(self._state, rules, "shared", one.size_bytes, seconds)
        if len(self._observed) > 4 * VERSIONS_MAX:
            self._observed = set(sorted(self._observed, key=lambda seen: seen[1])[-2 * VERSIONS_MAX :])

    def _learn_slowdown(self, measured: float | None) -> None:
        if measured is None:
            return
        rate = self._state.shared_rate
        free = measured * rate / self._throttle if rate and self._throttle and self._throttle < rate else measured
        self._slowdown += SLOWDOWN_WEIGHT * (free - self._slowdown)


def _usual_bytes(records: Sequence[SaveRecord]) -> int:
    return next((one.size_bytes for one in reversed(records) if one.size_bytes), 0)


def _share_of_node() -> float:
    return ranks_of_node() / max(1, int(os.environ.get("WORLD_SIZE", 1)))
