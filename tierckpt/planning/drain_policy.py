"""The drain policy: selects drains and their rate, evictions, and the next save's tier. Pure.

Numbers: docs/adr/0012-planning.md. Rules (tests cite them):
    D1  Newest first. A checkpoint older than the newest on the SSD, and not being sent, is superseded: never sent.
    D2  A running drain is never cancelled for a newer checkpoint: slow storage would then receive none at all.
    D3  Every ``every``-th checkpoint is sent, and earlier if the age of the newest state on shared storage would exceed
        ``rpo_seconds`` less ``outage_seconds``.
    D4  Only checkpoints that are on shared storage or superseded are evicted, except the newest ``keep_local`` and the
        one being sent: this node's newest state is always whole somewhere.
    D5  A save goes directly to shared storage if the SSD has no room; or if it is no faster, and the checkpoint is due
        or the SSD cannot keep up. A switch takes three votes in a row, or a factor of 1.5.
    D6  Saves never wait for bandwidth. The SSD needs room for ``keep_local`` + 2 checkpoints.
    D7  Drains leave training its bandwidth, unless the exposure bound needs more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from .checked_numbers import Checked, Count, NotNegative, Share, not_negative, positive

Place: TypeAlias = Literal["local", "shared"]
BANDWIDTH_SHARE_MIN = 0.05
"""Share of the measured bandwidth that training cannot take from a drain."""


@dataclass(frozen=True, slots=True)
class Rules(Checked):
    """Bytes are of one checkpoint, in the units of ``local_bytes_max``."""

    every: Count = 1
    rpo_seconds: float = math.inf
    outage_seconds: NotNegative = 0.0
    local_bytes_max: float = math.inf
    keep_local: Count = 2
    in_flight: Count = 2
    as_fast: float = 1.1
    votes_to_change: int = 3
    factor_to_change: float = 1.5
    weight: Share = 0.2
    step_slowdown_max: float = 0.03

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if not math.isinf(self.rpo_seconds):
            positive(self.rpo_seconds, "rpo_seconds")


@dataclass(frozen=True, slots=True)
class Version:
    number: int
    size_bytes: float
    taken_at: float
    on_local: bool = True
    on_shared: bool = False
    skipped: bool = False
    sent_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyState:
    """Throughputs are None until measured."""

    local_rate: float | None = None
    shared_rate: float | None = None
    direct: bool = False
    votes: int = 0


@dataclass(frozen=True, slots=True)
class Situation:
    """``versions``: those with a copy, now or soon, oldest first, and the newest on shared storage.

    ``began_at``: of the job. ``local_queue_bytes`` wait for a flush and will take ``local_reserved_bytes`` of the SSD.
    """

    now: float
    versions: Sequence[Version]
    next_bytes: float
    interval_seconds: float
    sending: int | None = None
    local_queue_bytes: float = 0.0
    local_reserved_bytes: float = 0.0
    training_bytes_per_second: float = 0.0
    step_slowdown: float = 0.0
    began_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """``rate_bytes_per_second`` None is unlimited."""

    place: Place
    send: int | None
    skip: tuple[int, ...]
    remove: tuple[int, ...]
    rate_bytes_per_second: float | None
    reason: str
    numbers: dict[str, float] = field(default_factory=dict)


def observe(
    state: PolicyState, rules: Rules, tier: Literal["local", "shared"], size_bytes: float, seconds: float
) -> PolicyState:
    """Record a transfer. Zero bytes are valid: an outage."""
    if seconds <= 0:
        return state
    rate = not_negative(size_bytes, "measured bytes") / seconds
    known = state.local_rate if tier == "local" else state.shared_rate
    mixed = rate if known is None else (1 - rules.weight) * known + rules.weight * rate
    return replace(state, local_rate=mixed) if tier == "local" else replace(state, shared_rate=mixed)


def decide(state: PolicyState, rules: Rules, now: Situation, *, votes: bool = True) -> tuple[PolicyState, Decision]:
    """``votes=False``: another decision at the same moment, which does not vote for a switch (D5)."""
    pending = _pending(now.versions)
    exposure = now.now - _newest_shared(now)
    due, why = _due(state, rules, now, pending)
    send = pending[-1].number if due and now.sending is None and pending else None
    newest_sent = send if send is not None else now.sending
    skip = _superseded(pending, newest_sent)
    remove = _room(rules, now, skip, newest_sent)
    voted, tier_decision = _next_tier(state, rules, now, remove, newest_sent)
    state = voted if votes else state
    numbers = {
        "exposure_seconds": exposure,
        "local_bytes_per_second": state.local_rate or 0.0,
        "shared_bytes_per_second": state.shared_rate or 0.0,
        "pending": len(pending),
        "free_bytes": _free(rules, now, remove),
    }
    rate = _rate(state, rules, now, exposure, send)
    return state, Decision(tier_decision, send, skip, remove, rate, why, numbers)


def _superseded(pending: Sequence[Version], sent: int | None) -> tuple[int, ...]:
    """Apply rule D1."""
    newest = max([one.number for one in pending] + [sent or 0])
    return tuple(one.number for one in pending if one.number < newest and one.number != sent)


def _due(state: PolicyState, rules: Rules, now: Situation, pending: Sequence[Version]) -> tuple[bool, str]:
    """Apply rule D3. Returns the reason as well."""
    if now.sending is not None:
        return False, f"checkpoint {now.sending} is being sent"
    if not pending:
        return False, "nothing to send"
    since = pending[-1].number - _newest_shared_number(now)
    if since >= rules.every:
        return True, f"{since} checkpoints since the last one on shared storage, every {rules.every} is sent"
    waiting = now.interval_seconds + _seconds(now.next_bytes, state.local_rate)
    done_if_waiting = now.now + waiting + _seconds(now.next_bytes, state.shared_rate)
    if done_if_waiting - _newest_shared(now) > rules.rpo_seconds - rules.outage_seconds:
        return True, f"waiting for the next one would break the bound of {rules.rpo_seconds:.0f} s"
    return False, f"{since} of {rules.every} checkpoints since the last one on shared storage"


def _next_tier(
    state: PolicyState, rules: Rules, now: Situation, remove: tuple[int, ...], sent: int | None
) -> tuple[PolicyState, Place]:
    """Apply rule D5."""
    free = _free(rules, now, remove)
    remote = _seconds(_seconds_left(now, now.sending) + now.next_bytes, state.shared_rate)
    local = _seconds(now.local_queue_bytes + now.next_bytes, state.local_rate)
    state = vote(state, rules, now, local, remote)
    if free < now.next_bytes:
        return state, "shared"
    newest = max((one.number for one in now.versions), default=0)
    is_due = newest + 1 - (sent or _newest_shared_number(now)) >= rules.every
    keeps_up = local <= rules.in_flight * now.interval_seconds  # host memory can hold saves for that long
    return state, "shared" if state.direct and (is_due or not keeps_up) else "local"


def vote(state: PolicyState, rules: Rules, now: Situation, local: float, remote: float) -> PolicyState:
    """Vote whether shared storage is as fast as the SSD, and keeps up with the checkpoints."""
    if state.local_rate is None or state.shared_rate is None:
        return replace(state, direct=False, votes=0)
    is_allowed = remote <= rules.as_fast * local and remote <= now.interval_seconds
    if is_allowed == state.direct:
        return replace(state, votes=0)
    slower, faster = (local, remote) if is_allowed else (remote, local)
    if state.votes + 1 >= rules.votes_to_change or slower >= rules.factor_to_change * faster:
        return replace(state, direct=is_allowed, votes=0)
    return replace(state, votes=state.votes + 1)


def _room(rules: Rules, now: Situation, skip: tuple[int, ...], sent: int | None) -> tuple[int, ...]:
    """Apply rule D4: return the checkpoints to evict, oldest first."""
    local = [one for one in now.versions if one.on_local]
    kept = {one.number for one in local[-rules.keep_local :]} | {sent}
    free = _free(rules, now)
    durable = _newest_shared_number(now)
    is_evictable = [
        one for one in local if one.number not in kept and (one.number <= durable or one.skipped or one.number in skip)
    ]
    removed = []
    for one in is_evictable:
        if free >= now.next_bytes:
            break
        free += one.size_bytes
        removed.append(one.number)
    return tuple(removed)


def _rate(state: PolicyState, rules: Rules, now: Situation, exposure: float, send: int | None) -> float | None:
    """Apply rule D7."""
    if state.shared_rate is None or (now.training_bytes_per_second <= 0 and now.step_slowdown <= 0):
        return None
    left = max(state.shared_rate - now.training_bytes_per_second, BANDWIDTH_SHARE_MIN * state.shared_rate)
    if now.step_slowdown > rules.step_slowdown_max:
        left = max(left * rules.step_slowdown_max / now.step_slowdown, BANDWIDTH_SHARE_MIN * state.shared_rate)
    bytes_left = _seconds_left(now, now.sending if now.sending is not None else send)
    seconds_left = rules.rpo_seconds - rules.outage_seconds - exposure
    if bytes_left and seconds_left <= 0:
        return None
    return max(left, bytes_left / seconds_left)


def _pending(versions: Sequence[Version]) -> list[Version]:
    """Return the candidates for shared storage, newer than its newest (D1)."""
    newest = max((one.number for one in versions if one.on_shared), default=0)
    return [one for one in versions if one.on_local and not one.skipped and one.number > newest]


def _newest_shared(now: Situation) -> float:
    return max((one.taken_at for one in now.versions if one.on_shared), default=now.began_at)


def _newest_shared_number(now: Situation) -> int:
    return max((one.number for one in now.versions if one.on_shared), default=0)


def _seconds_left(now: Situation, number: int | None) -> float:
    return next((one.size_bytes - one.sent_bytes for one in now.versions if one.number == number), 0.0)


def _free(rules: Rules, now: Situation, without: tuple[int, ...] = ()) -> float:
    used = sum(one.size_bytes for one in now.versions if one.on_local and one.number not in without)
    return rules.local_bytes_max - used - now.local_reserved_bytes


def _seconds(size_bytes: float, rate: float | None) -> float:
    """Infinite at rate zero (D6), 0 at an unknown rate."""
    if rate is None or size_bytes <= 0:
        return 0.0
    return size_bytes / rate if rate > 0 else math.inf
