"""Which saves go to shared storage, decided when they are taken.

A checkpoint is on shared storage only when every rank's part is, so the movers of the nodes cannot each decide for
themselves. Rank 0 decides at the save, the other ranks hear of it, and the journal carries it to each node's mover: an
entry is ``ready`` to be drained, or ``kept`` on its SSD until newer checkpoints stand there (``mover/kept.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..config import Settings
from ..planning import policy
from ..planning.policy import Rules, Situation, Version
from ..telemetry import logger
from .record import SaveRecord

log = logger("policy")

VERSIONS_MAX = 64


class Sending:
    """The state of these decisions on rank 0."""

    def __init__(self, settings: Settings) -> None:
        self.drains = settings.drain
        self.is_adaptive = settings.drain and settings.drain_policy == "adaptive"
        self._settings = settings
        self._since_sent = math.inf
        self._state = policy.State()
        self._observed: set[tuple[str, int]] = set()

    @property
    def decides(self) -> bool:
        return self.is_adaptive

    def decide(
        self,
        step: int,
        records: Sequence[SaveRecord],
        every: int,
        interval_seconds: float,
        *,
        is_asked: bool = False,
    ) -> bool:
        """Whether the save that is about to be taken goes to shared storage. On rank 0 only.

        One that somebody has asked for does, unless it is the policy that is to decide.
        """
        if not self.drains:
            return True  # the settings say it already
        if not self.is_adaptive:
            self._since_sent += 1
            is_sent = is_asked or self._since_sent >= every
            self._since_sent = 0 if is_sent else self._since_sent
            return is_sent
        return self._ask(step, records, every, interval_seconds)

    def _ask(self, step: int, records: Sequence[SaveRecord], every: int, interval_seconds: float) -> bool:
        """Ask the policy about the checkpoint that is about to be taken, as if it stood on the SSD already."""
        good = [(number, one) for number, one in enumerate(records, 1) if not one.error][-VERSIONS_MAX:]
        for number, one in good:
            self._observe(number, one)
        size_bytes = good[-1][1].size_bytes if good else 0
        versions = [
            Version(
                number,
                float(one.size_bytes),
                -one.age_seconds,
                on_shared=one.shared_commit_seconds is not None,
                skipped=not one.is_sent,
            )
            for number, one in good
        ]
        arrived = max((version.number for version in versions if version.on_shared), default=0)
        under_way = [n for n, one in good if one.is_sent and one.shared_commit_seconds is None and n > arrived]
        rules = Rules(every=every, rpo_seconds=self._settings.exposure_seconds_max or math.inf)
        oldest = max((one.age_seconds for _, one in good), default=0.0)
        situation = Situation(
            now=0.0,
            versions=[*versions, Version(len(records) + 1, float(size_bytes), 0.0)],
            next_bytes=float(size_bytes),
            interval_seconds=interval_seconds,
            sending=under_way[0] if under_way else None,
            began_at=-oldest,
        )
        self._state, decision = policy.decide(self._state, rules, situation)
        is_sent = decision.send == len(records) + 1
        numbers = {name: round(value, 3) for name, value in decision.numbers.items()}
        log.info(
            "step %d %s: %s (%s)",
            step,
            "goes to shared storage" if is_sent else "stays on the SSD",
            decision.reason,
            ", ".join(f"{name} {value:g}" for name, value in numbers.items()),
            extra={"step": step, "is_sent": is_sent, "rpo": decision.rpo, **numbers},
        )
        return is_sent

    def _observe(self, number: int, one: SaveRecord) -> None:
        """Tell the policy how fast each tier took a checkpoint, once."""
        rules = Rules()
        local, shared = one.local_commit_seconds, one.shared_commit_seconds
        if local is not None and ("local", number) not in self._observed:
            self._observed.add(("local", number))
            self._state = policy.observe(self._state, rules, "local", one.size_bytes, local, 0.0)
        if local is not None and shared is not None and one.is_sent and ("shared", number) not in self._observed:
            self._observed.add(("shared", number))
            seconds = max(shared - local, 1e-3)
            self._state = policy.observe(self._state, rules, "shared", one.size_bytes, seconds, 0.0)
        if len(self._observed) > 4 * VERSIONS_MAX:
            self._observed = {seen for seen in self._observed if seen[1] > number - VERSIONS_MAX}
