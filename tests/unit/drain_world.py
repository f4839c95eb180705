"""A simulated node with an SSD and a shared store. Bandwidths come from a trace; a policy is compared with an oracle.

Units: GB, seconds. A save of 60 GB every 60 s. The cost of a run is in seconds of training: work lost with a node (the
age of the newest state on shared storage), work lost in a crash (the newest state anywhere), and a price per byte
sent.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tierckpt.planning import drain_policy
from tierckpt.planning.drain_policy import Decision, Rules, Situation, Version

Trace = Callable[[int], float]
Decide = Callable[[drain_policy.PolicyState, Rules, Situation], tuple[drain_policy.PolicyState, Decision]]

SIZE, INTERVAL = 60.0, 60
NODE_LOSS = CRASH = 1 / 86400
EVERY = 3
PRICE = NODE_LOSS * (EVERY * INTERVAL) ** 2 / 2  # of one drain: Young's formula then drains every third save
DECIDE_EVERY = 5


@dataclass
class Outcome:
    """What happened."""

    cost: float = 0.0
    age_max: float = 0.0
    sends: int = 0
    sent: list[int] = field(default_factory=list)
    direct: int = 0
    local_max: float = 0.0
    stalls: int = 0
    lost_newest: int = 0


def run(rules: Rules, seconds: int, shared: Trace, local: Trace, decide: Decide = drain_policy.decide) -> Outcome:
    """One tick is one second. The policy decides on saves, flushes and drains."""
    return _World(rules, shared, local, decide).run(seconds)


class _World:
    def __init__(self, rules: Rules, shared: Trace, local: Trace, decide: Decide) -> None:
        self.rules, self.shared, self.local, self.decide = rules, shared, local, decide
        self.state, self.result = drain_policy.PolicyState(), Outcome()
        self.versions: list[Version] = []
        self.flushing: list[tuple[int, float, int]] = []  # number, bytes left, start time
        self.waiting: int | None = None  # a direct save, in host memory until it is on shared storage
        self.sending: int | None = None
        self.measured = (0.0, 0)
        self.place = "local"

    def run(self, seconds: int) -> Outcome:
        for now in range(seconds):
            if now % INTERVAL == 0:
                self.save(now)
            changed = self.flush(now) | self.send(now)
            if changed or now % DECIDE_EVERY == 0:
                self.decide_next(now + 1)
            self.count(now + 1)
        return self.result

    def save(self, now: int) -> None:
        number = now // INTERVAL + 1
        direct = self.place == "shared"
        self.versions.append(Version(number, SIZE, now, on_local=False))
        if direct:
            self.result.direct += 1
            self.result.stalls += self.waiting is not None
            self.waiting = number
            if self.sending is None:
                self.sending, self.waiting = number, None
        else:
            self.flushing.append((number, SIZE, now))
            self.result.stalls += len(self.flushing) > 2

    def flush(self, now: int) -> bool:
        if not self.flushing:
            return False
        number, left, begun = self.flushing[0]
        left -= self.local(now)
        if left > 0:
            self.flushing[0] = (number, left, begun)
            return False
        del self.flushing[0]
        self.state = drain_policy.observe(self.state, self.rules, "local", SIZE, now + 1 - begun)
        self.change(number, on_local=True)
        if self.flushing:
            self.flushing[0] = (*self.flushing[0][:2], now + 1)
        return True

    def send(self, now: int) -> bool:
        if self.sending is None:
            return False
        version = next(one for one in self.versions if one.number == self.sending)
        moved = min(self.shared(now), version.size_bytes - version.sent_bytes)
        self.change(version.number, sent_bytes=version.sent_bytes + moved)
        done = version.sent_bytes + moved >= version.size_bytes
        bytes_, ticks = self.measured[0] + moved, self.measured[1] + 1
        if ticks >= DECIDE_EVERY or done:
            self.state = drain_policy.observe(self.state, self.rules, "shared", bytes_, ticks)
            bytes_, ticks = 0.0, 0
        self.measured = (bytes_, ticks)
        if not done:
            return False
        self.result.sent.append(version.number)
        self.change(version.number, on_shared=True)
        self.result.cost += PRICE
        self.sending, self.waiting = self.waiting, None
        return True

    def decide_next(self, now: int) -> None:
        used = sum(one.size_bytes for one in self.versions if one.on_local) + len(self.flushing) * SIZE
        self.result.local_max = max(self.result.local_max, used)
        seen = Situation(
            now=now,
            versions=self.versions,
            next_bytes=SIZE,
            interval_seconds=INTERVAL,
            sending=self.sending,
            local_queue_bytes=sum(left for _, left, _ in self.flushing),
            local_reserved_bytes=len(self.flushing) * SIZE,
        )
        newest = max((one.number for one in self.versions if one.on_local), default=None)
        self.state, decision = self.decide(self.state, self.rules, seen)
        self.place = decision.place
        self.result.lost_newest += newest is not None and newest in decision.remove
        if decision.send is not None:
            assert self.sending is None, "a second drain while one runs"
            self.sending = decision.send
            self.change(decision.send, sent_bytes=0.0)
        for number in decision.skip:
            self.change(number, skipped=True)
        for number in decision.remove:
            self.change(number, on_local=False)
        shared = max((one.number for one in self.versions if one.on_shared), default=0)
        self.versions = [
            one for one in self.versions if one.on_local or one.number >= shared or one.number == self.sending
        ]

    def count(self, now: int) -> None:
        on_shared = max((one.taken_at for one in self.versions if one.on_shared), default=0)
        anywhere = max((one.taken_at for one in self.versions if one.on_shared or one.on_local), default=0)
        self.result.cost += NODE_LOSS * (now - on_shared) + CRASH * (now - anywhere)
        self.result.age_max = max(self.result.age_max, now - on_shared)

    def change(self, number: int, **changes: object) -> None:
        self.versions = [replace(one, **changes) if one.number == number else one for one in self.versions]  # type: ignore[arg-type]


def oracle(rpo_seconds: float, seconds: int, shared: Trace, local: Trace) -> float | None:
    """Lower bound of the cost of any policy that knows the trace; None if even it exceeds the RPO.

    Chooses the saves to send by dynamic programming over all schedules. Sends never wait for the SSD. A label is
    (cost until its end, end) of a schedule ending with that version; dominated labels are dropped.
    """
    moved = list(itertools.accumulate((shared(now) for now in range(seconds)), initial=0.0))
    labels: dict[int, list[tuple[float, int]]] = {0: [(0.0, 0)]}
    best: float | None = None
    count = (seconds - 1) // INTERVAL + 1
    for last in range(count + 1):
        taken = (last - 1) * INTERVAL if last else 0
        for cost, end in labels.get(last, ()):
            if seconds - taken <= rpo_seconds:
                total = cost + NODE_LOSS * _ages(end, seconds, taken)
                best = total if best is None else min(best, total)
            for after in range(last + 1, min(count, last + 30) + 1):
                begin = max(end, (after - 1) * INTERVAL)
                finish = bisect.bisect_left(moved, moved[begin] + SIZE - 1e-9)
                if finish > seconds or finish - taken > rpo_seconds:
                    continue
                _add(labels.setdefault(after, []), (cost + PRICE + NODE_LOSS * _ages(end, finish, taken), finish))
    return None if best is None else best + CRASH * _ages_anywhere(seconds, shared, local)


def _ages(begin: int, end: int, taken: int) -> float:
    """Sum of the age over the ticks after ``begin`` up to ``end``."""
    return ((end - taken) * (end - taken + 1) - (begin - taken) * (begin - taken + 1)) / 2


def _ages_anywhere(seconds: int, shared: Trace, local: Trace) -> float:
    """Assumes that each version is written immediately, alone, to the faster tier."""
    total, newest = 0.0, 0
    for now in range(seconds):
        best = max(shared(now), local(now))
        while best > 0 and newest + INTERVAL + SIZE / best <= now + 1 and newest + INTERVAL < seconds:
            newest += INTERVAL
        total += now + 1 - newest
    return total


def _add(labels: list[tuple[float, int]], new: tuple[float, int]) -> None:
    if any(cost <= new[0] and end <= new[1] for cost, end in labels):
        return
    labels[:] = [one for one in labels if not (new[0] <= one[0] and new[1] <= one[1])] + [new]
