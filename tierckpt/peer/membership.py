"""Membership: which other nodes there are, and which are live, suspect or dead. Pure: clocks are passed in.

Each member has a **beat**: a number that only it raises, at least twice a second, and that others pass on. Whose beat
has not risen for a while is suspect, then dead (van Renesse et al., "A Gossip-Style Failure Detection Service", 1998).
As in SWIM (Das et al., 2002) a suspect is asked itself before it is given up, and a member that hears wrong things of
itself raises its beat beyond them. A beat is the time in milliseconds, and more where it must be more: so a member
that comes back, even after it has forgotten everything and at another address, is believed over what it was.

Invariants:
    M1  Only a member's own silence, or its own goodbye, takes it from the list. What others say of it can make it
        be asked sooner, nothing else: its own word, at its own address, corrects theirs.
    M2  A member that this node itself cannot reach is not offered to anybody here, whatever others say.
    M3  Bounded: at most ``MEMBERS_MAX`` are known, an answer tells at most ``ROWS_MAX``, the dead are forgotten.
    M4  This node's own stall is not the others' silence, and while its own rounds come late it is more patient with
        others too (Dadgar et al., "Lifeguard", 2018).
    M5  Who asks us something, proven, is not gone, though its own word be late: where a link is full that waits behind
        what the node sends. Only for ``BUSY_SECONDS_MAX`` since it last answered us, so M2 holds; and not where its
        machine says that nobody listens.
"""

from __future__ import annotations

import ipaddress
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from ..checkpoint.peer_copies import Member as Member
from ..types import Json
from .peer_http import host_and_port

MEMBERS_MAX = 8192
ROWS_MAX = 512
ASK_ALL_MAX = 4
"""Up to so many others each is asked in every round; of more, ``ASKED`` at random."""
ASKED = 3
SUSPECTS_ASKED = 4
DEAD_ASKED = 1
FAILURES_MAX = 2
SUSPECT_ROUNDS = 2
"""A member is suspect so many rounds before it is dead: long enough to be asked itself."""
BUSY_SECONDS_MAX = 10.0
"""So long a member that asks us, and does not answer, is taken to be at the end of a full link."""
FORGET_SECONDS = 600.0
"""How long a dead member is remembered: a partition that heals before that heals by itself."""
BEAT_AHEAD_MAX_MS = 3_600_000
"""A beat further ahead of our clock is a lie: requests are signed with the time, so clocks are known to agree."""
WEIGHT_MAX = 1e13
WEIGHT_RATIO_MAX = 16.0
"""No member counts more than so many times the median: a wrong weight must not draw all the work to one node."""
PATIENCE_MAX = 4.0
PATIENCE_KEPT = 0.9
"""What is left of it after each round that comes in time."""
CONTESTED_MAX = 3
"""Another one that has spoken so often in our name, from elsewhere, is no memory of what we were."""

State: TypeAlias = Literal["live", "suspect", "dead", "left"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DOMAIN = re.compile(r"[\x20-\x7e]{0,128}")


def member_of(row: Any) -> Member:
    """Return the member that ``row`` describes. Raises ValueError for what cannot be one: rows come from strangers."""
    try:
        return _member(row["name"], row["address"], row.get("domain", ""), float(row.get("weight", 0.0)))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a member without {error}") from None


@lru_cache(maxsize=MEMBERS_MAX)
def _member(name: Any, address: Any, domain: Any, weight: float) -> Member:
    """Kept: the same rows come again and again."""
    if not is_member_name(name):
        raise ValueError("a member whose name is none")
    if not (isinstance(domain, str) and _DOMAIN.fullmatch(domain)):
        raise ValueError(f"the domain of {name} is none")
    if not (isinstance(address, str) and is_plain_address(address)):
        raise ValueError(f"the address of {name} is no IP address with a port")
    if not 0 <= weight <= WEIGHT_MAX:  # False for NaN
        raise ValueError(f"the weight of {name} is {weight}")
    return Member(name, address, weight, domain)


def is_member_name(name: Any) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def is_plain_address(address: str) -> bool:
    """True for ``IP:port`` and ``[IPv6]:port`` that a member may have.

    Never a name, which may mean another place tomorrow, nor link-local addresses, where clouds keep their credentials.
    """
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536 and len(address) <= 64):
        return False
    try:
        ip = ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    except ValueError:
        return False
    if (ip.version == 6) != host.startswith("["):
        return False
    return not is_forbidden(ip)


_METADATA = frozenset(map(ipaddress.ip_address, ("169.254.169.254", "fd00:ec2::254", "100.100.100.200")))


def is_forbidden(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """True for addresses at which no member can be: where requests to them end up is not for a peer to say."""
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return is_forbidden(ip.ipv4_mapped)
    scoped = isinstance(ip, ipaddress.IPv6Address) and ip.scope_id is not None
    if ip.is_loopback:
        return False
    return scoped or ip in _METADATA or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved


def is_loopback(host: str) -> bool:
    """True for an address of this machine's loopback interface; False for a name, which may mean another tomorrow."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_on_loopback(address: str) -> bool:
    return is_loopback(host_and_port(address)[0])


@dataclass(frozen=True)
class Pace:
    """How often members are asked, and after what silence they count as gone."""

    interval_seconds: float = 0.5
    ask_timeout_seconds: float = 1.0
    dead_seconds: float = 2.5

    def dead_after(self, members: int) -> float:
        """Grows with the number of members as news needs longer: by a round per doubling, and in proportion once an
        answer does not hold them all."""
        if members <= 16:
            return self.dead_seconds
        rounds = math.log2(members / 16) + 4 * max(0.0, members / ROWS_MAX - 1)
        return self.dead_seconds + self.interval_seconds * rounds


@dataclass
class MemberRecord:
    """What this node knows of another one. Times are of the monotonic clock."""

    member: Member
    beat: int
    heard_at: float
    """When its beat last rose, whoever told."""
    is_confirmed: bool = False
    """It has spoken itself, or its beat has risen since it was first heard of: it is no tale of the past."""
    answered_at: float | None = None
    asked_at: float = -math.inf
    """When it last asked us for anything."""
    failures: int = 0
    """Questions of ours in a row that it has not answered."""
    has_left: bool = False
    is_leaving: bool = False
    """Somebody says that it says goodbye."""


class Table:
    """The members that this node knows. Not thread-safe: one event loop has it.

    Args:
        me: this node.
        clock: monotonic seconds.
        unix: seconds since 1970.
    """

    def __init__(
        self,
        me: Member,
        *,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self.me = me
        self.pace = pace or Pace()
        self.records: dict[str, MemberRecord] = {}
        self.refused = 0
        """Rows that were none, or lies that could be told."""
        self.contested = 0
        """How often another one spoke in our name from another address."""
        self._clock, self._unix = clock, unix
        self._beat = 0
        self._is_leaving = False
        self.patience = 1.0
        """How much more time than usual others get (M4): from 1 to ``PATIENCE_MAX``."""
        self._ticked_at = clock()
        self._is_full = False

    # --- this node -----------------------------------------------------------------------------------------------

    def my_row(self) -> Json:
        """This node's own word. Each has a higher beat than the one before."""
        self._beat = max(self._beat + 1, int(self._unix() * 1000))
        return {**self.me.to_json(), "beat": self._beat, **({"left": True} if self._is_leaving else {})}

    def leave(self) -> None:
        """From now on this node's own word is goodbye."""
        self._is_leaving = True

    def tick(self) -> None:
        """Begin a round: forget who is long dead, and do not hold a stall of ours against the others (M4)."""
        now = self._clock()
        before, self._ticked_at, self._is_full = self._ticked_at, now, False
        stalled = now - before - 3 * self.pace.interval_seconds
        late = min(PATIENCE_MAX, (now - before) / (1.5 * self.pace.interval_seconds))
        dead_seconds = self._dead_seconds()
        self.patience = max(1.0, late, self.patience * PATIENCE_KEPT)
        for record in self.records.values() if stalled > 0 else ():
            if before - record.heard_at < dead_seconds:
                record.heard_at = min(now, record.heard_at + stalled)
        for name, record in list(self.records.items()):
            if self.state(record) in ("dead", "left") and now - record.heard_at >= FORGET_SECONDS:
                del self.records[name]

    # --- what is heard -------------------------------------------------------------------------------------------

    def take(self, answer: Any, asked: str) -> None:
        """Take in what the member at address ``asked`` has answered: ``{"me": row, "members": [row, ...]}``."""
        if not isinstance(answer, dict) or not isinstance(answer.get("members"), list):
            self.refused += 1
            return
        self.hear(answer.get("me"), asked=asked)
        for row in answer["members"][:ROWS_MAX]:
            self.hear(row)

    def hear(self, row: Any, *, asked: str | None = None) -> None:
        """Take in one row. ``asked``: it is the word of whoever answered at this address, about itself."""
        try:
            member, beat = member_of(row), int(row["beat"])
        except (ValueError, KeyError, TypeError, OverflowError):
            self.refused += 1
            return
        has_left = row.get("left") is True
        if member.name == self.me.name:
            self._hear_of_me(member, beat, asked)
        elif beat > self._unix() * 1000 + BEAT_AHEAD_MAX_MS or (
            _is_on_loopback(member.address) and not _is_on_loopback(self.me.address)
        ):
            self.refused += 1
        else:
            self._hear(member, beat, asked, has_left=has_left)

    def _hear_of_me(self, member: Member, beat: int, asked: str | None) -> None:
        if member.address != self.me.address:
            # Its own word elsewhere settles it; what others tell may be a memory of what we were.
            self.contested += CONTESTED_MAX if asked is not None else beat > self._beat
        if beat > self._beat and asked != self.me.address and beat <= self._unix() * 1000 + BEAT_AHEAD_MAX_MS:
            self._beat = beat  # the next word of ours goes beyond

    def _hear(self, member: Member, beat: int, asked: str | None, *, has_left: bool) -> None:
        now, record = self._clock(), self.records.get(member.name)
        if record is None:
            if (has_left and asked is None) or not self._make_room():
                return
            record = self.records[member.name] = MemberRecord(member, beat, now)
        elif has_left and asked is None:
            record.is_leaving |= beat >= record.beat  # so it is asked next; its own word or silence decides (M1)
            return
        elif beat > record.beat:
            if record.member.address != member.address:
                record.failures = 0
            record.member, record.beat, record.heard_at = member, beat, now
            record.is_confirmed, record.has_left = True, False
        if asked is not None and asked == member.address == record.member.address:
            self._hear_itself(record, member, beat, has_left=has_left)

    def _hear_itself(self, record: MemberRecord, member: Member, beat: int, *, has_left: bool) -> None:
        """Its own word, at the address we know: it holds even against a higher beat that others have told (M1)."""
        now = self._clock()
        record.member, record.beat = member, beat
        record.heard_at = record.answered_at = now
        record.failures, record.is_confirmed = 0, True
        record.is_leaving, record.has_left = False, has_left

    def failed(self, address: str, *, refused: bool = False) -> None:
        """A question to ``address`` had no answer. ``refused``: its machine says that nobody listens there, which is
        proof enough not to offer it here; when it comes back it says so itself."""
        for record in self.records.values():
            if record.member.address == address:
                record.failures = max(record.failures + 1, FAILURES_MAX if refused else 0)
                record.has_left = record.has_left or (refused and record.is_leaving)
                record.answered_at = None if refused else record.answered_at

    def asked(self, name: str) -> None:
        """A member has asked this node for something, and proven that it is that member (M5)."""
        record = self.records.get(name)
        if record is not None:
            record.asked_at = self._clock()

    def _make_room(self) -> bool:
        if len(self.records) < MEMBERS_MAX:
            return True
        if self._is_full:
            return False  # nobody had gone when the round began: a flood of names costs one look a round
        gone = [name for name, record in self.records.items() if self.state(record) in ("dead", "left")]
        if gone:
            gone.sort(key=lambda name: self.records[name].heard_at)
            for name in gone[: 1 + len(gone) // 2]:
                del self.records[name]
        self._is_full = not gone
        return bool(gone)

    # --- what is told --------------------------------------------------------------------------------------------

    def state(self, record: MemberRecord) -> State:
        if record.has_left:
            return "left"
        silent, dead_seconds = self._clock() - record.heard_at, self._dead_seconds()
        if silent >= dead_seconds:
            return "suspect" if self._is_busy(record) else "dead"
        is_late = silent >= dead_seconds - SUSPECT_ROUNDS * self.pace.interval_seconds
        return "suspect" if is_late or record.failures >= FAILURES_MAX else "live"

    def _is_busy(self, record: MemberRecord) -> bool:
        """M5."""
        now, answered_at = self._clock(), record.answered_at
        is_near = answered_at is not None and now - answered_at < BUSY_SECONDS_MAX
        return is_near and now - record.asked_at < self._dead_seconds()

    def _dead_seconds(self) -> float:
        return self.pace.dead_after(len(self.records)) * self.patience

    def states(self) -> dict[State, int]:
        """How many others there are of each state."""
        counts: dict[State, int] = {"live": 0, "suspect": 0, "dead": 0, "left": 0}
        for record in self.records.values():
            counts[self.state(record)] += 1
        return counts

    def is_usable(self, record: MemberRecord) -> bool:
        """True when others may be sent to it: a suspect too, unless we could not reach it ourselves (M2)."""
        if not record.is_confirmed or (record.failures >= FAILURES_MAX and not self._is_busy(record)):
            return False
        return self.state(record) in ("live", "suspect")

    def live(self) -> list[Member]:
        """Everybody who can be asked for something, this node included (unless it leaves), by name.

        A weight that nobody knows (0) becomes the median of those that are known; none is more than
        ``WEIGHT_RATIO_MAX`` times the median.
        """
        found = [record.member for record in self.records.values() if self.is_usable(record)]
        if not self._is_leaving:
            found.append(self.me)
        return balanced(sorted(found, key=lambda member: member.name))

    def answer(self, rng: random.Random) -> Json:
        """What this node tells whoever asks: itself, and those it holds for alive; of many, a random part."""
        told = [
            record
            for record in self.records.values()
            if record.is_confirmed and self.state(record) in ("live", "suspect")
        ]
        if len(told) > ROWS_MAX:
            told = rng.sample(told, ROWS_MAX)
        rows = [
            {**record.member.to_json(), "beat": record.beat, **({"left": True} if record.is_leaving else {})}
            for record in told
        ]
        return {"me": self.my_row(), "members": rows}

    def to_ask(self, rng: random.Random, seeds: Sequence[str] = ()) -> list[str]:
        """The addresses to ask in this round.

        Everybody while they are few, else some at random; suspects first, as their life hangs on it; a dead one now
        and then, and seeds at which nobody is known, so that a partition heals. Bounded, however many there are.
        """
        by_state: dict[State, list[MemberRecord]] = {"live": [], "suspect": [], "dead": [], "left": []}
        for record in self.records.values():
            doubtful = record.is_leaving or not record.is_confirmed
            state = self.state(record)
            by_state["suspect" if state == "live" and doubtful else state].append(record)
        live, gone = by_state["live"], by_state["dead"] + by_state["left"]
        few = len(live) <= ASK_ALL_MAX
        chosen = _some(rng, by_state["suspect"], SUSPECTS_ASKED) + (live if few else _some(rng, live, ASKED))
        chosen += _some(rng, gone, DEAD_ASKED)
        known = {record.member.address for record in self.records.values()} | {self.me.address}
        unknown = [seed for seed in seeds if seed not in known]
        return [record.member.address for record in chosen] + rng.sample(unknown, min(ASKED, len(unknown)))


def balanced(members: Sequence[Member]) -> list[Member]:
    """The members with weights that can be compared (see ``Table.live``)."""
    known = [member.weight for member in members if member.weight > 0]
    median = statistics.median_low(known) if known else 1.0
    most = median * WEIGHT_RATIO_MAX
    return [replace(member, weight=min(member.weight or median, most)) for member in members]


def _some(rng: random.Random, records: Iterable[MemberRecord], count: int) -> list[MemberRecord]:
    found = list(records)
    return rng.sample(found, min(count, len(found)))
