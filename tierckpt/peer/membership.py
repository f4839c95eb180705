"""Membership: the list of other nodes, each live, suspect, dead or left. Pure: clocks are arguments. See gossip.py.

A heartbeat is a number that only its member raises: the time in milliseconds, or the last heartbeat plus one if that
is greater. A member whose heartbeat has not risen for a while is suspect, then dead (van Renesse et al., "A
Gossip-Style Failure Detection Service", 1998), unless it answers a probe (SWIM, Das et al., 2002).

    M1  Only a member's own silence, or its own goodbye, takes it from the list. Rows from others can only make this
        node probe it sooner: its own row, from its own address, corrects theirs.
    M2  A member that this node itself cannot reach is not offered here, whatever others report.
    M3  Bounded: at most ``MEMBERS_MAX`` members, ``ROWS_MAX`` rows in an answer; dead members are forgotten.
    M4  A stall of this node is not silence of the others; while its own rounds are late it gives others more time
        (Dadgar et al., "Lifeguard", 2018).
    M5  A member that sends this node authenticated requests is not dead although its heartbeat is late: on a full link
        it waits behind the data. Only for ``BUSY_SECONDS_MAX`` after its last answer, and not if its machine refuses
        the connection.
"""

from __future__ import annotations

import ipaddress
import math
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

from ..checkpoint.peer_copies import Member as Member
from ..types import Json
from .peer_http import host_and_port

MEMBERS_MAX = 8192
ROWS_MAX = 512
ALL_TARGETS_MAX = 4
"""More live members are probed at random, ``LIVE_TARGETS`` per round."""
LIVE_TARGETS = 3
SUSPECT_TARGETS = 4
DEAD_TARGETS = 1
FAILURES_MAX = 2
SUSPECT_ROUNDS = 2
"""Rounds in which a suspect is probed before it is dead."""
BUSY_SECONDS_MAX = 10.0
"""A member that sends requests but does not answer may have a full link for this long."""
FORGET_SECONDS = 600.0
"""A partition that heals before a dead member is forgotten heals by itself."""
HEARTBEAT_AHEAD_MAX_MS = 3_600_000
"""A heartbeat further ahead of this node's clock is false."""
WEIGHT_MAX = 1e13
WEIGHT_RATIO_MAX = 16.0
"""Multiple of the median: a wrong weight must not draw all the work to one node."""
PATIENCE_MAX = 4.0
PATIENCE_DECAY = 0.9
"""Factor per round in time."""
CONTESTED_MAX = 3
"""After this many rows with this node's name and another address, another node has its name."""

State: TypeAlias = Literal["live", "suspect", "dead", "left"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DOMAIN = re.compile(r"[\x20-\x7e]{0,128}")


def member_of(row: Any) -> Member:
    """Raises ValueError: an invalid row."""
    try:
        return _member(row["name"], row["address"], row.get("domain", ""), float(row.get("weight", 0.0)))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a member without {error}") from None


@lru_cache(maxsize=MEMBERS_MAX)
def _member(name: Any, address: Any, domain: Any, weight: float) -> Member:
    if not is_member_name(name):
        raise ValueError("not a member's name")
    if not (isinstance(domain, str) and _DOMAIN.fullmatch(domain)):
        raise ValueError(f"the domain of {name} is invalid")
    if not (isinstance(address, str) and is_plain_address(address)):
        raise ValueError(f"the address of {name} is not an IP address with a port")
    if not 0 <= weight <= WEIGHT_MAX:  # False for NaN
        raise ValueError(f"the weight of {name} is {weight}")
    return Member(name, address, weight, domain)


def is_member_name(name: Any) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return None for a name, which may resolve to another address tomorrow."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_plain_address(address: str) -> bool:
    """True for ``IP:port`` and ``[IPv6]:port`` that a member may have.

    False for a name, and for link-local addresses, where clouds serve credentials.
    """
    try:
        host, port = host_and_port(address)
    except ValueError:
        return False
    is_bracketed, ip = address.startswith("["), ip_of(host)
    is_known = ip is not None and (ip.version == 6) == is_bracketed and not is_forbidden(ip)
    return is_known and port > 0 and len(address) <= 64


_METADATA = frozenset(map(ipaddress.ip_address, ("169.254.169.254", "fd00:ec2::254", "100.100.100.200")))


def is_forbidden(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """True for addresses that no member can have: a peer must not redirect requests to them."""
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return is_forbidden(ip.ipv4_mapped)
    scoped = isinstance(ip, ipaddress.IPv6Address) and ip.scope_id is not None
    if ip.is_loopback:
        return False
    return scoped or ip in _METADATA or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved


def is_loopback(host: str) -> bool:
    ip = ip_of(host)
    return ip is not None and ip.is_loopback


def _is_on_loopback(address: str) -> bool:
    return is_loopback(host_and_port(address)[0])


@dataclass(frozen=True)
class GossipTiming:
    interval_seconds: float = 0.5
    timeout_seconds: float = 1.0
    dead_seconds: float = 2.5

    def dead_after(self, members: int) -> float:
        """Rows need a round more per doubling beyond 16 members."""
        if members <= 16:
            return self.dead_seconds
        rounds = math.log2(members / 16) + 4 * max(0.0, members / ROWS_MAX - 1)
        return self.dead_seconds + self.interval_seconds * rounds


@dataclass
class MemberRecord:
    """State of another member. Times are of the monotonic clock."""

    member: Member
    heartbeat: int
    heartbeat_at: float
    is_confirmed: bool = False
    """It has answered, or its heartbeat has risen since the first row, so the row is not an old one."""
    answered_at: float | None = None
    request_at: float = -math.inf
    failures: int = 0
    has_left: bool = False
    is_leaving: bool = False


class MemberList:
    """The other nodes. Not thread-safe: it belongs to one event loop.

    ``clock``: monotonic seconds. ``unix``: seconds since 1970.
    """

    def __init__(
        self,
        me: Member,
        *,
        timing: GossipTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self.me = me
        self.timing = timing or GossipTiming()
        self.records: dict[str, MemberRecord] = {}
        self.refused = 0
        self.contested = 0
        """Rows with this node's name and another address."""
        self._clock, self._unix = clock, unix
        self._heartbeat = 0
        self._is_leaving = False
        self.patience = 1.0
        """Factor of all times that others get (M4)."""
        self._round_at = clock()
        self._is_full = False

    # --- this node -----------------------------------------------------------------------------------------------

    def my_row(self) -> Json:
        """Return this node's row, with a higher heartbeat than the last one."""
        self._heartbeat = max(self._heartbeat + 1, int(self._unix() * 1000))
        return {**self.me.to_json(), "heartbeat": self._heartbeat, **({"left": True} if self._is_leaving else {})}

    def leave(self) -> None:
        self._is_leaving = True

    def begin_round(self) -> None:
        """Forget members that died long ago, and excuse the others for a stall of this node (M4)."""
        now = self._clock()
        before, self._round_at, self._is_full = self._round_at, now, False
        stalled = now - before - 3 * self.timing.interval_seconds
        late = min(PATIENCE_MAX, (now - before) / (1.5 * self.timing.interval_seconds))
        dead_seconds = self._dead_seconds()
        self.patience = max(1.0, late, self.patience * PATIENCE_DECAY)
        for record in self.records.values() if stalled > 0 else ():
            if before - record.heartbeat_at < dead_seconds:
                record.heartbeat_at = min(now, record.heartbeat_at + stalled)
        for name, record in list(self.records.items()):
            if self.state(record) in ("dead", "left") and now - record.heartbeat_at >= FORGET_SECONDS:
                del self.records[name]

    # --- rows in -------------------------------------------------------------------------------------------------

    def merge_answer(self, answer: Any, address: str) -> None:
        """Merge the answer of the member at ``address``: ``{"me": row, "members": [row, ...]}``."""
        if not isinstance(answer, dict) or not isinstance(answer.get("members"), list):
            self.refused += 1
            return
        self.merge(answer.get("me"), address=address)
        for row in answer["members"][:ROWS_MAX]:
            self.merge(row)

    def merge(self, row: Any, *, address: str | None = None) -> None:
        """Merge one row. ``address``: of the node that sent the row about itself."""
        try:
            member, heartbeat = member_of(row), int(row["heartbeat"])
        except (ValueError, KeyError, TypeError, OverflowError):
            self.refused += 1
            return
        has_left, is_ahead = row.get("left") is True, heartbeat > self._unix() * 1000 + HEARTBEAT_AHEAD_MAX_MS
        if member.name == self.me.name:
            if member.address != self.me.address:
                # Only an answer from another address is certain; a row from others may be outdated.
                self.contested += CONTESTED_MAX if address is not None else heartbeat > self._heartbeat
            if heartbeat > self._heartbeat and address != self.me.address and not is_ahead:
                self._heartbeat = heartbeat
        elif is_ahead or (_is_on_loopback(member.address) and not _is_on_loopback(self.me.address)):
            self.refused += 1
        else:
            self._merge(member, heartbeat, address, has_left=has_left)

    def _merge(self, member: Member, heartbeat: int, address: str | None, *, has_left: bool) -> None:
        now, record = self._clock(), self.records.get(member.name)
        if record is None:
            if (has_left and address is None) or not self._make_room():
                return
            record = self.records[member.name] = MemberRecord(member, heartbeat, now)
        elif has_left and address is None:
            record.is_leaving |= heartbeat >= record.heartbeat  # probed next: its own answer or silence decides (M1)
            return
        elif heartbeat > record.heartbeat:
            if record.member.address != member.address:
                record.failures = 0
            record.member, record.heartbeat, record.heartbeat_at = member, heartbeat, now
            record.is_confirmed, record.has_left = True, False
        if address is not None and address == member.address == record.member.address:
            # Its own row, at its own address, overrides a higher heartbeat in rows of others (M1).
            record.member, record.heartbeat = member, heartbeat
            record.heartbeat_at = record.answered_at = now
            record.failures, record.is_confirmed = 0, True
            record.is_leaving, record.has_left = False, has_left

    def failed(self, address: str, *, refused: bool = False) -> None:
        """Record a request to ``address`` without an answer.

        ``refused``: the machine refuses connections, so the member is not offered until it announces itself.
        """
        for record in self.records.values():
            if record.member.address == address:
                record.failures = max(record.failures + 1, FAILURES_MAX if refused else 0)
                record.has_left = record.has_left or (refused and record.is_leaving)
                record.answered_at = None if refused else record.answered_at

    def received_request(self, name: str) -> None:
        record = self.records.get(name)
        if record is not None:
            record.request_at = self._clock()

    def _make_room(self) -> bool:
        if len(self.records) < MEMBERS_MAX:
            return True
        if self._is_full:
            return False  # a flood of names costs one scan per round
        departed = [name for name, record in self.records.items() if self.state(record) in ("dead", "left")]
        if departed:
            departed.sort(key=lambda name: self.records[name].heartbeat_at)
            for name in departed[: 1 + len(departed) // 2]:
                del self.records[name]
        self._is_full = not departed
        return bool(departed)

    # --- state ---------------------------------------------------------------------------------------------------

    def state(self, record: MemberRecord) -> State:
        if record.has_left:
            return "left"
        silent, dead_seconds = self._clock() - record.heartbeat_at, self._dead_seconds()
        if silent >= dead_seconds:
            return "suspect" if self._is_busy(record) else "dead"
        is_late = silent >= dead_seconds - SUSPECT_ROUNDS * self.timing.interval_seconds
        return "suspect" if is_late or record.failures >= FAILURES_MAX else "live"

    def _is_busy(self, record: MemberRecord) -> bool:
        now, answered_at = self._clock(), record.answered_at
        is_near = answered_at is not None and now - answered_at < BUSY_SECONDS_MAX
        return is_near and now - record.request_at < self._dead_seconds()

    def _dead_seconds(self) -> float:
        return self.timing.dead_after(len(self.records)) * self.patience

    def states(self) -> dict[State, int]:
        counts = Counter(map(self.state, self.records.values()))
        return {state: counts[state] for state in get_args(State)}

    def is_usable(self, record: MemberRecord) -> bool:
        """True for a live member or a suspect, unless this node could not reach it itself (M2)."""
        if not record.is_confirmed or (record.failures >= FAILURES_MAX and not self._is_busy(record)):
            return False
        return self.state(record) in ("live", "suspect")

    def live(self) -> list[Member]:
        """Return all usable members by name, with this node (unless it leaves).

        An unknown weight (0) becomes the median; each is at most ``WEIGHT_RATIO_MAX`` times the median.
        """
        found = [record.member for record in self.records.values() if self.is_usable(record)]
        if not self._is_leaving:
            found.append(self.me)
        return balanced(sorted(found, key=lambda member: member.name))

    # --- rows out ------------------------------------------------------------------------------------------------

    def answer(self, rng: random.Random) -> Json:
        """Return this node and live members; of many, a random part."""
        alive = [
            record
            for record in self.records.values()
            if record.is_confirmed and self.state(record) in ("live", "suspect")
        ]
        if len(alive) > ROWS_MAX:
            alive = rng.sample(alive, ROWS_MAX)
        rows = [
            {**record.member.to_json(), "heartbeat": record.heartbeat, **({"left": True} if record.is_leaving else {})}
            for record in alive
        ]
        return {"me": self.my_row(), "members": rows}

    def targets(self, rng: random.Random, seeds: Sequence[str] = ()) -> list[str]:
        """Return the addresses to probe in this round, bounded for any number of members.

        Dead members and seeds are probed so that a partition heals.
        """
        by_state: dict[State, list[MemberRecord]] = {"live": [], "suspect": [], "dead": [], "left": []}
        for record in self.records.values():
            state = self.state(record)
            is_doubtful = record.is_leaving or not record.is_confirmed
            by_state["suspect" if state == "live" and is_doubtful else state].append(record)
        live, departed = by_state["live"], by_state["dead"] + by_state["left"]
        chosen = rng.sample(by_state["suspect"], min(SUSPECT_TARGETS, len(by_state["suspect"])))
        chosen += live if len(live) <= ALL_TARGETS_MAX else rng.sample(live, LIVE_TARGETS)
        chosen += rng.sample(departed, min(DEAD_TARGETS, len(departed)))
        known = {record.member.address for record in self.records.values()} | {self.me.address}
        unknown = [seed for seed in seeds if seed not in known]
        return [record.member.address for record in chosen] + rng.sample(unknown, min(LIVE_TARGETS, len(unknown)))


def balanced(members: Sequence[Member]) -> list[Member]:
    known = [member.weight for member in members if member.weight > 0]
    median = statistics.median_low(known) if known else 1.0
    most = median * WEIGHT_RATIO_MAX
    return [replace(member, weight=min(member.weight or median, most)) for member in members]
