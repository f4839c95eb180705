"""Peer state during the fill of one version: which members are live, and which chunks each of them has.

Holdings are whole numbers used as sets: bit ``n`` is chunk ``n``. That makes "what does this member have that we lack
and have not asked for" a few machine instructions for each 64 chunks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..membership import Member
from .chunk_owners import ChunkOwners, fraction

EXACT_RANKS_MAX: Final = 64
"""Among more members a node's place in the ranks of a chunk is drawn, not worked out: among those that may know of it.
"""
EXACT_CHUNKS_MAX: Final = 1 << 14
"""And of more chunks."""
OWNERS_WATCHED: Final = 2
"""More would make many nodes ask few owners all the time."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What bench/fanout_simulation.py was used to find."""

    slots: int = 16
    """Chunks under way at a time."""
    settle_seconds: float = 0.25
    settle_seconds_max: float = 1.0
    """Length of the first pause while some member has not reported what it holds."""
    wait_seconds: float = 2.0
    """How long a request waits at the owner until the chunk has been written."""
    hedge_seconds_min: float = 0.5
    hedge_factor: float = 3.0
    hedges_max: int = 2
    fetch_seconds_min: float = 1.0
    fetch_factor: float = 4.0
    """An owner that takes this many times the median for a chunk is substituted."""
    slow_factor: float = 3.5
    """A member is slow when its answers take this many times the median, or one is outstanding for this many times the
    95th percentile: of many requests one is always the last."""
    stall_seconds: float = 2.0
    """After this long without a new chunk the next rank goes to the store, then the one after it."""
    stall_seconds_max: float = 10.0
    """Upper bound of ``stall_seconds`` while all nodes wait for the store."""
    answer_seconds_max: float = 5.0
    """Upper bound of the timeout of a request for holdings, where chunks take as long."""
    ranks_asked: int = 3
    retry_seconds_min: float = 0.5
    retry_seconds_max: float = 15.0
    poll_seconds: float = 0.15
    """Poll interval for holdings while there is nothing to request from peers,"""
    keep_seconds: float = 3.0
    """and otherwise."""
    polls_max: int = 4
    watched_max: int = 24
    steal_margin: int = 2
    """Batches that are left to a slow owner before its chunks are fetched here,"""
    still_seconds: float = 0.5
    """unless no chunk has arrived for this long."""
    copies_first: int = 3
    """A chunk with ``h`` holders may be requested by so many times ``h`` members; by ``h`` if all of them are slow."""
    turn_seconds: float = 1.0
    """After this long every member may request it,"""
    turn_answers: float = 2.0
    """or after this many times the median answer, where that is longer."""
    turn_slow_seconds: float = 30.0
    ahead_max: int = 16
    """Chunks without another holder that a node brings from the store before it prefers chunks of its peers."""
    takes_from_owner_only: bool = False
    """A seeded fault: only owners are ever asked. Tests find it."""


@dataclass(slots=True)
class Peer:
    member: Member
    held: int = 0
    """A bit for each chunk."""
    lacks: int = 0
    """Those that it said it has, and did not give: damaged there, or gone."""
    cursor: int = 0
    is_whole: bool = False
    fetching: dict[int, float] = field(default_factory=dict)
    """Chunks it fetches from the store, and since when that is known."""
    heard_at: float = -1.0
    asked_at: float = -1.0
    asked: dict[int, float] = field(default_factory=dict)
    """Chunks asked of it, and when."""
    waiting: set[int] = field(default_factory=set)
    seconds: float = 0.0
    """How long its answers take; 0: not known yet."""
    answers: int = 0
    failures: int = 0
    retry_at: float = 0.0
    is_banned: bool = False
    is_late: bool = False
    """An answer is late: see whether it is there at all."""

    @property
    def is_good(self) -> bool:
        """True unless it has sent wrong bytes, or could not be reached and has not been heard of since."""
        return not (self.is_banned or self.failures)

    def usable(self, now: float) -> bool:
        return self.is_good and now >= self.retry_at


class PeerState:
    """What is known of the peers of one fetch. ``Schedule`` decides by it."""

    def __init__(
        self,
        version: str,
        total: int,
        me: str,
        *,
        tuning: Tuning | None = None,
        rng: random.Random | None = None,
        placement: Callable[[str, Sequence[Member]], ChunkOwners] = ChunkOwners,
        wanted: Iterable[int] | None = None,
    ) -> None:
        """``wanted``: the chunks to fetch; None: all."""
        self.version, self.total, self.me = version, total, me
        self.tuning = tuning or Tuning()
        self.rng = rng or random.Random()
        self._place = placement
        self._all = (1 << total) - 1
        self.missing = self._all if wanted is None else mask(wanted)
        self.peers: dict[str, Peer] = {}
        self.live: dict[str, Member] = {}
        self.interested: frozenset[str] = frozenset()
        self.placed: frozenset[str] = frozenset()
        """Those that chunks are placed on: the interested ones, from the end of the first moment on."""
        self._placement: ChunkOwners | None = None
        self.chunk_owners: list[str] = []
        self.copies = bytearray(total)
        """How many members are known to hold each chunk."""
        self.held_anywhere = 0
        """Chunks that somebody is known to hold."""
        self.allowed = 0
        """Those that it is our turn to ask for."""
        self.allowed_slow = 0
        """The same where only slow members hold them."""
        self._turns: deque[tuple[float, int]] = deque()
        """When somebody was first heard to hold which: some time later they are everybody's turn."""
        self._turns_slow: deque[tuple[float, int]] = deque()
        self._my_ranks: dict[int, int] = {}
        self._settled_at: float | None = None
        self.moved_at = 0.0
        self.is_hungry = False
        """The last choice found nothing to ask a peer for."""
        self.slow: frozenset[str] = frozenset()
        """Members that take far longer to answer than others do. They should be told."""
        self.is_changed = False
        """Who counts has changed since ``Schedule`` worked out what is ours to fetch."""
        self.am_slow = False
        """Others say so."""

    # --- who is there --------------------------------------------------------------------------------------------

    def set_members(
        self, live: Sequence[Member], interested: Iterable[str], now: float, *, slow_to: Iterable[str] = ()
    ) -> None:
        """Take in who is there, and who of them fills this version too. Call it again whenever either may change.

        ``slow_to``: members that have said lately that we are slow.
        """
        if self._settled_at is None:
            self._settled_at = self.moved_at = now
        by_name = {member.name: member for member in live}
        by_name.setdefault(self.me, Member(self.me, ""))
        for name in [name for name in self.peers if name not in by_name]:
            self._forget(name)
        self.live = by_name
        self._watch()
        self.interested = frozenset(name for name in interested if name in by_name) | {self.me}
        self._step_back(len(self.interested.intersection(slow_to)), now)

    def _step_back(self, slow_to: int, now: float) -> None:
        """Own no chunks while two thirds of the others find us slow: they fetch them instead, and what we would bring
        from the store would wait here for our turn to send it, or be fetched twice.

        Fewer will not do: when a partition heals, each half finds the other slow, and somebody has to own the chunks.
        """
        is_slow = slow_to >= 2 and 3 * slow_to >= 2 * (len(self.interested) - 1)
        if is_slow != self.am_slow:
            self.am_slow = is_slow
            self.is_changed = True

    def assign_owners(self, now: float) -> bool:
        """Say whose each chunk is, anew when members came or went. False while too little is known to decide by."""
        if self._is_early(now):
            return False
        if self.placed != self.interested:
            self.placed = self.interested
            self._placement = self._place(self.version, [self.live[name] for name in sorted(self.placed)])
            self.chunk_owners = self._placement.owners(self.total)
            self._watch_owners()
            self._my_ranks.clear()
            self.allowed = self.allowed_slow = 0
            self.recount()
            self.is_changed = True
        return True

    def _is_early(self, now: float) -> bool:
        """True in the first moment, in which members tell what they hold."""
        if self._settled_at is None:
            return True
        since = now - self._settled_at
        if not self.peers or since >= self.tuning.settle_seconds_max:
            return False
        is_waited_for = any(peer.heard_at < 0 and peer.is_good for peer in self.peers.values())
        return since < self.tuning.settle_seconds or is_waited_for

    def _watch(self) -> None:
        """Keep an eye on some members, drawn at random where there are many: who watches whom is then a graph in which
        everything is a few steps away."""
        room = self.tuning.watched_max - len(self.peers)
        if room <= 0 or len(self.live) <= len(self.peers) + 1:
            return
        others = [name for name in self.live if name not in self.peers and name != self.me]
        for name in others if len(others) <= room else self.rng.sample(others, room):
            self.peers[name] = Peer(self.live[name])

    def _watch_owners(self) -> None:
        """Of far more nodes than chunks few fetch anything: who hears of none of them takes the store to be asleep."""
        owners = {name for name in self.chunk_owners if name in self.live} - {self.me}
        unknown = sorted(owners - self.peers.keys())
        room = min(len(unknown), OWNERS_WATCHED - (len(owners) - len(unknown)))
        for name in self.rng.sample(unknown, max(0, room)):
            self.peers[name] = Peer(self.live[name])

    def may_own(self, name: str, now: float) -> bool:
        """True for a member that may own chunks: one that answers, and is not slow."""
        if name == self.me:
            return not self.am_slow
        return self.is_usable(name, now) and name not in self.slow

    def is_usable(self, name: str, now: float) -> bool:
        peer = self.peers.get(name)
        return name in self.live and (peer is None or peer.is_good)

    def ranks(self, chunk: int) -> tuple[str, ...]:
        return self._placement.ranks(chunk) if self._placement is not None else (self.me,)

    def owner(self, chunk: int, now: float) -> str:
        if not self.chunk_owners:
            return self.me
        first = self.chunk_owners[chunk]
        if self.may_own(first, now):
            return first
        return next((name for name in self.ranks(chunk) if self.may_own(name, now)), self.me)

    # --- what they hold ------------------------------------------------------------------------------------------

    def update(
        self,
        name: str,
        now: float,
        *,
        new: Iterable[int] = (),
        fetching: Iterable[int] | None = None,
        whole: bool = False,
        cursor: int | None = None,
    ) -> None:
        """Take in what a member holds (``new``: besides what was heard before), and fetches from the store."""
        peer = self.peers.get(name)
        if peer is None:
            return
        peer.heard_at = now
        if peer.failures:
            peer.failures, peer.retry_at = 0, 0.0
            self.forget_owners()
        if whole and not peer.is_whole:
            peer.is_whole, peer.fetching = True, {}
            for chunk in bits(self._all & ~peer.held & ~peer.lacks):
                self.add_holding(peer, chunk, now)
        elif not peer.is_whole:
            for chunk in new:
                if 0 <= chunk < self.total and not (peer.held | peer.lacks) >> chunk & 1:
                    self.add_holding(peer, chunk, now)
        if cursor is not None:
            peer.cursor = max(peer.cursor, cursor)
        if fetching is not None and not peer.is_whole:
            known = peer.fetching
            peer.fetching = {chunk: known.get(chunk, now) for chunk in fetching if 0 <= chunk < self.total}

    def add_holding(self, peer: Peer, chunk: int, now: float) -> None:
        bit = 1 << chunk
        peer.held |= bit
        peer.fetching.pop(chunk, None)
        if not self.held_anywhere & bit:
            self.held_anywhere |= bit
            self.moved_at = now
            self._turns.append((now, bit))
            self._turns_slow.append((now, bit))
        self._counted(chunk)

    def _counted(self, chunk: int) -> None:
        """One more holds it. Copies spread as a tree does, each chunk's its own: first to a few, who pass it on."""
        count = self.copies[chunk] = min(255, self.copies[chunk] + 1)
        rank = self.my_rank(chunk)
        if rank <= count * self.tuning.copies_first:
            self.allowed |= 1 << chunk
            if rank <= count:
                self.allowed_slow |= 1 << chunk

    def my_rank(self, chunk: int) -> int:
        if not self.chunk_owners or len(self.placed) <= self.tuning.copies_first + 1:
            return 0
        rank = self._my_ranks.get(chunk)
        if rank is None:
            nodes = len(self.placed)
            if nodes > EXACT_RANKS_MAX or self.total > EXACT_CHUNKS_MAX:
                rank = int(fraction(f"{self.version}/{chunk}/{self.me}") * min(nodes, self.tuning.watched_max))
            else:
                rank = self.ranks(chunk).index(self.me)
            self._my_ranks[chunk] = rank
        return rank

    def take_turns(self, now: float, answer_seconds: float) -> None:
        """``answer_seconds``: what an answer takes. Before two have been given those whose turn it is cannot have
        passed on what they got, and who does not wait for them asks the one holder there is."""
        turn_seconds = max(self.tuning.turn_seconds, self.tuning.turn_answers * answer_seconds)
        while self._turns and self._turns[0][0] + turn_seconds <= now:
            self.allowed |= self._turns.popleft()[1]
        while self._turns_slow and self._turns_slow[0][0] + self.tuning.turn_slow_seconds <= now:
            self.allowed_slow |= self._turns_slow.popleft()[1]

    def reset_holdings(self, name: str) -> None:
        """A member's list has begun anew (its agent did): what it holds is not known any more."""
        peer = self.peers.get(name)
        if peer is not None:
            peer.held, peer.lacks, peer.cursor, peer.is_whole, peer.fetching = 0, 0, 0, False, {}
            self.recount()

    def _forget(self, name: str) -> None:
        del self.peers[name]
        self.recount()

    def recount(self) -> None:
        self.held_anywhere, self.copies = 0, bytearray(self.total)
        for peer in self.peers.values():
            if peer.is_good:
                self.held_anywhere |= peer.held
                for chunk in bits(peer.held & self.missing):
                    self._counted(chunk)

    def due_polls(self, now: float) -> list[tuple[str, int]]:
        """Members whose holdings should be asked for now, each with how far its list is known. Marks them as asked."""
        tuning = self.tuning
        is_early = self._is_early(now)
        patience = tuning.poll_seconds if self.is_hungry or is_early else tuning.keep_seconds
        due = [
            peer
            for peer in self.peers.values()
            if not peer.is_banned
            and now >= peer.retry_at
            and now - max(peer.heard_at, peer.asked_at) >= (tuning.poll_seconds if peer.is_late else patience)
            and (not peer.is_whole or peer.is_late or now - peer.heard_at >= tuning.keep_seconds)
        ]
        first = [peer for peer in due if peer.heard_at < 0 or is_early]
        if len(first) < tuning.polls_max:
            rest = sorted((peer for peer in due if peer not in first), key=lambda peer: peer.heard_at)
            first += rest[: tuning.polls_max - len(first)]
        for peer in first:
            peer.asked_at, peer.is_late = now, False
        return [(peer.member.name, peer.cursor) for peer in first]

    # --- whom to believe -----------------------------------------------------------------------------------------

    def mark_unreachable(self, name: str, now: float) -> None:
        """A member did not answer at all. It is asked what it holds, less and less often, and nothing else, till it
        does."""
        peer = self.peers.get(name)
        if peer is None or now < peer.retry_at:
            return  # requests that were under way together fail together
        peer.failures += 1
        wait = self.tuning.retry_seconds_min * 2 ** (peer.failures - 1)
        peer.retry_at = now + min(wait, self.tuning.retry_seconds_max) * (0.5 + self.rng.random())
        if peer.failures == 1:
            self.forget_owners()

    def ban(self, name: str) -> None:
        """A member has lied: it is not asked for anything any more."""
        peer = self.peers.get(name)
        if peer is not None and not peer.is_banned:
            peer.is_banned = True
            self.forget_owners()

    def trust(self, name: str) -> None:
        """A member was right after all."""
        peer = self.peers.get(name)
        if peer is not None and peer.is_banned:
            peer.is_banned = False
            self.forget_owners()

    def forget_owners(self) -> None:
        """Some member counts no more: who owns what, and what is held, is worked out again."""
        self.recount()
        self.is_changed = True


def mask(chunks: Iterable[int]) -> int:
    bits = 0
    for chunk in chunks:
        bits |= 1 << chunk
    return bits


def bits(bits: int) -> list[int]:
    """The places of all ones, least first."""
    text = bin(bits)[:1:-1]
    found, at = [], text.find("1")
    while at >= 0:
        found.append(at)
        at = text.find("1", at + 1)
    return found


def span(window: range) -> int:
    return ((1 << len(window)) - 1) << window.start if len(window) else 0


def any_bit(bits: int, rng: random.Random) -> int:
    """The place of some one."""
    start = rng.randrange(bits.bit_length())
    above = bits >> start
    return start + ((above & -above).bit_length() - 1)


def quantile(times: Iterable[float], share: float) -> float:
    known = sorted(times)
    return known[min(len(known) - 1, int(share * len(known)))] if known else 0.0
