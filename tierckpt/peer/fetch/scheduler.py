"""Decides which chunk a node fetches next, and its source, while it fills one version. Pure.

A decision from an outdated table may be poor, but never wrong, because every chunk is verified.

1.  The owner of a chunk (``ChunkOwners``) fetches it from shared storage; the others fetch it from any holder.
2.  Rarest first, within the window that the reader needs next, else anywhere. The less loaded of two random holders
    gets the request (M. Mitzenmacher, IEEE TPDS 12(10), 2001), a slow one only if no other member holds the chunk.
3.  A chunk without a holder is requested from its owner, which answers when the chunk has been written.
4.  Chunks of an unreachable or slow owner go to the next rank, which starts at the end of the owner's list.
5.  A node without chunks of its own left takes chunks of the owner that lags most.
6.  A late request is hedged with another holder; the first answer wins.
7.  If nothing arrives at all, one rank after the other fetches the missing chunks from shared storage.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import zip_longest
from statistics import median
from typing import Final, TypeAlias

import xxhash

from ..membership import Member
from .peer_table import SHARED, ChunkRequest, Peer, PeerTable, Tuning, any_of, mask, positions, span

OWNERS_MAX = 256
"""More owners cost more scores, and make no store faster."""

_ONE = float(1 << 64)


def ranked(key: str, members: Sequence[Member]) -> list[Member]:
    data = key.encode()
    return sorted(members, key=lambda member: (_cost(data, _seed(member.name), member.weight), member.name))


class ChunkOwners:
    """The ranks of the chunks of one version, by weighted rendezvous hashing.

        W1  The same members, in any order, give the same ranks on every node.
        W2  When a member joins or leaves, only its own chunks change owner.
        W3  The expected number of chunks of a member is in proportion to its weight.

    Cost: 0.3 microseconds per chunk and member.
    Source: D. Thaler, C. Ravishankar, IEEE/ACM Transactions on Networking 6(1), 1998. The score is ln(u) / weight with
        u uniform in (0, 1) (J. Resch, SNIA SDC 2015).
    """

    def __init__(self, version: str, members: Sequence[Member]) -> None:
        self.version = version
        known = sorted(members, key=lambda member: member.name)
        if len(known) > OWNERS_MAX:  # the same on every node (W1), and nearly so when one joins or leaves (W2)
            chosen = nsmallest(OWNERS_MAX, known, key=lambda m: _cost(version.encode(), _seed(m.name), m.weight))
            known = sorted(chosen, key=lambda member: member.name)
        self.members = tuple(known)
        self._seeds = [_seed(member.name) for member in known]
        self._is_even = len({_sane(member.weight) for member in known}) <= 1
        self._ranks: dict[int, tuple[str, ...]] = {}

    def ranks(self, chunk: int) -> tuple[str, ...]:
        found = self._ranks.get(chunk)
        if found is None:
            found = tuple(member.name for member in ranked(f"{self.version}/{chunk}", self.members))
            self._ranks[chunk] = found
        return found

    def owners(self, total: int) -> list[str]:
        names = [member.name for member in self.members]
        if not names:
            raise ValueError("no member to place chunks on")
        if len(names) == 1:
            return names * total
        digest, found = xxhash.xxh3_64_intdigest, list[str]()
        costs: list[float]
        pairs = [(seed, member.weight) for seed, member in zip(self._seeds, self.members, strict=True)]
        for key in (f"{self.version}/{chunk}".encode() for chunk in range(total)):
            if self._is_even:  # ln is monotonic: the greatest hash has the least cost, and ties go to the first name
                costs = [-digest(key, seed) for seed in self._seeds]
            else:
                costs = [_cost(key, seed, weight) for seed, weight in pairs]
            found.append(names[costs.index(min(costs))])
        return found


def fraction(text: str) -> float:
    return xxhash.xxh3_64_intdigest(text.encode()) / _ONE


def _seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def _cost(key: bytes, seed: int, weight: float) -> float:
    return -math.log((xxhash.xxh3_64_intdigest(key, seed) + 1) / (_ONE + 2)) / _sane(weight)


def _sane(weight: float) -> float:
    """An invalid weight, from another node, becomes the minimum."""
    return weight if 1e-9 <= weight <= 1e18 else 1e-9


__all__ = ["SHARED", "ChunkRequest", "Decision", "FetchScheduler", "StoreSlots", "Tuning", "WaitUntil"]

SAMPLES: Final = 6
PEERS_SAMPLED: Final = 3
IDLE_SECONDS: Final = 0.05
SETTLE_PAUSE_SECONDS: Final = 0.02
OWN_ROUNDS: Final = 32
"""A node fetches its own chunks for so many rounds: peers can have the first after one."""
EXACT_RANKS_MAX: Final = 64
"""With more members or chunks, a node's rank for a chunk is random."""
EXACT_CHUNKS_MAX: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing to do before ``until``, unless a report or a chunk arrives."""

    until: float


Decision: TypeAlias = ChunkRequest | WaitUntil | None


class FetchScheduler:
    """The fill of one version on one node. Records its requests in ``table``."""

    def __init__(
        self, table: PeerTable, version: str, *, placement: Callable[[str, Sequence[Member]], ChunkOwners] = ChunkOwners
    ) -> None:
        self.table, self.version = table, version
        self.tuning = table.tuning
        self.chunk_owners: list[str] = []
        self.allowed = 0
        """Chunks that this node may request from peers now."""
        self.allowed_slow = 0
        """The same, of chunks that only slow peers hold."""
        self.is_idle = False
        self.is_slow = False
        """Two thirds of the others find this node slow."""
        self._place = placement
        self._placement: ChunkOwners | None = None
        self._filling: frozenset[str] = frozenset()
        self._placed: frozenset[str] = frozenset()
        """Members that filled when owners were last assigned."""
        self._ranks: dict[int, int] = {}
        self._first_copies: deque[tuple[float, int]] = deque()
        self._first_copies_slow: deque[tuple[float, int]] = deque()
        self._own: deque[int] = deque()
        self._planned_at, self._planned_generation = -1.0, -1
        self._disputed: set[int] = set()
        self._unwanted: list[ChunkRequest] = []
        self._slots = StoreSlots()

    # --- members and owners --------------------------------------------------------------------------------------

    def set_members(
        self, members: Sequence[Member], filling: Iterable[str], now: float, *, slow_to: Iterable[str] = ()
    ) -> None:
        """Replace the list of live members, with those that fill this version too.

        A node that two thirds of the others find slow owns no chunks. Fewer are not enough: when a partition heals,
        each half finds the other slow.
        """
        self.table.set_members(members, now)
        self._filling = frozenset(self.table.members.keys() & {*filling, self.table.me})
        count = len(self._filling.intersection(slow_to))
        is_slow = count >= 2 and 3 * count >= 2 * (len(self._filling) - 1)
        if is_slow != self.is_slow:
            self.is_slow = is_slow
            self._planned_generation = -1

    def assign_owners(self, now: float) -> bool:
        """Assign owners to the chunks. False while members still report."""
        table = self.table
        if table.is_settling(now):
            return False
        if self._placed != self._filling:
            self._count_copies()
            self._placed = self._filling
            self._placement = self._place(self.version, [table.members[name] for name in sorted(self._placed)])
            self.chunk_owners = self._placement.owners(table.total)
            table.watch_owners(self.chunk_owners)
            self._ranks.clear()
            self.allowed = self.allowed_slow = 0
            table.recount()
            self._planned_generation = -1
        return True

    def may_own(self, name: str) -> bool:
        if name == self.table.me:
            return not self.is_slow
        return self.table.is_usable(name) and name not in self.table.slow

    def ranks(self, chunk: int) -> tuple[str, ...]:
        return self._placement.ranks(chunk) if self._placement is not None else (self.table.me,)

    def owner(self, chunk: int) -> str:
        if not self.chunk_owners:
            return self.table.me
        first = self.chunk_owners[chunk]
        return first if self.may_own(first) else self.substitute(chunk, first) or self.table.me

    def substitute(self, chunk: int, name: str) -> str | None:
        return next((other for other in self.ranks(chunk) if other != name and self.may_own(other)), None)

    def my_rank(self, chunk: int) -> int:
        nodes = len(self._placed)
        if not self.chunk_owners or nodes <= self.tuning.copies_first + 1:
            return 0
        rank = self._ranks.get(chunk)
        if rank is None:
            if nodes > EXACT_RANKS_MAX or self.table.total > EXACT_CHUNKS_MAX:
                share = fraction(f"{self.version}/{chunk}/{self.table.me}")
                rank = int(share * min(nodes, self.tuning.watched_max))
            else:
                rank = self.ranks(chunk).index(self.table.me)
            self._ranks[chunk] = rank
        return rank

    def order_of(self, name: str, chunks: list[int]) -> list[int]:
        """Each member starts at another chunk."""
        start = int(fraction(f"{self.version}/{name}") * self.table.total)
        return [c for c in chunks if c >= start] + [c for c in chunks if c < start]

    def plan(self, now: float = 0.0) -> None:
        table, me = self.table, self.table.me
        own_chunks: list[int] = []
        if not self.is_slow and self.chunk_owners:
            own_chunks = self.order_of(
                me, [chunk for chunk in positions(table.missing) if self.chunk_owners[chunk] == me]
            )
        instead: list[int] = []
        if not all(map(self.may_own, self._placed)):
            by_owner: dict[str, list[int]] = {}
            for chunk in positions(table.missing & ~table.available):
                if self.chunk_owners[chunk] != me and self.owner(chunk) == me:
                    by_owner.setdefault(self.chunk_owners[chunk], []).append(chunk)
            for name, chunks in by_owner.items():
                instead += reversed(self.order_of(name, chunks))
        self._own = deque(chunk for pair in zip_longest(own_chunks, instead) for chunk in pair if chunk is not None)
        self._planned_at, self._planned_generation = now, table.generation

    # --- results -------------------------------------------------------------------------------------------------

    def completed(self, request: ChunkRequest, now: float) -> None:
        """Record a verified chunk. Other requests for it can be cancelled."""
        seconds = self.table.completed(request, now)
        if request.source is SHARED:
            self._slots.completed(seconds, self.store_slots(), self.tuning.slots // 2)

    def failed(self, request: ChunkRequest, now: float, why: str) -> None:
        """Record a request without a result.

        ``why``: ``missing``, ``busy``, ``cancelled`` (by this node), ``wrong`` (bytes), or unreachable.
        """
        if self.owner(request.chunk) == self.table.me:
            self._own.append(request.chunk)
        self.table.failed(request, now, why)

    def set_missing(self, chunks: Iterable[int]) -> None:
        self.table.missing = mask(chunks)
        self.table.recount()
        self.plan()

    def distrust(self, chunk: int, names: Iterable[str]) -> None:
        """Fetch a chunk with conflicting digests from the store, and ban the members."""
        self._disputed.add(chunk)
        for name in names:
            self.table.set_banned(name, True)
        self._planned_generation = -1

    # --- decisions -----------------------------------------------------------------------------------------------

    def choose(self, now: float, window: range | None = None) -> Decision:
        """Return the use of a free slot: a request, recorded as in flight; a pause; None at the end."""
        table = self.table
        open_ = table.missing & ~table.in_flight
        if not open_:
            return None
        if not self.assign_owners(now):
            return WaitUntil(now + SETTLE_PAUSE_SECONDS)
        self._measure(now)
        if self._planned_generation != table.generation:
            self.plan(now)
        self.take_turns(now)
        near = open_ & span(window) if window is not None else 0
        if (table.from_store & ~table.available).bit_count() >= self.tuning.ahead_max:
            # If this node sends slowly, the others must find out while the store can still help.
            found = self._from_holder(now, near, open_) or self._from_store(now)
        else:
            found = self._from_store(now) or self._from_holder(now, near, open_)
        if found is None:
            found = self._from_laggard(now, open_) or self._from_store_at_last(now, open_)
            found = found or self._from_owner(now, open_)
        self.is_idle = found is None or found.source is SHARED
        if found is None:
            if not self._own and now - self._planned_at > self.tuning.turn_seconds:
                self.plan(now)
            return WaitUntil(now + IDLE_SECONDS)
        return self._begin(found, now)

    def source(self, chunk: int, now: float, tried: Iterable[str | None] = ()) -> ChunkRequest | WaitUntil:
        """Return a source for a chunk that a reader waits for. Records the request."""
        table = self.table
        tried = {*tried, *(request.source for request, _ in table.requests.get(chunk, ()))}
        if not self.assign_owners(now):
            return WaitUntil(now + SETTLE_PAUSE_SECONDS)
        holders = [peer for peer in self._holders(chunk, now) if peer.member.name not in tried]
        if holders:
            return self._begin(ChunkRequest(chunk, self._better(holders), "holder"), now)
        if SHARED not in tried and self.owner(chunk) == table.me:
            return self._begin(self._own_request(chunk), now)
        for name in self.ranks(chunk)[: self.tuning.ranks_asked]:
            if name not in tried and name != table.me and table.is_usable(name):
                return self._begin(ChunkRequest(chunk, name, "owner", self.tuning.wait_seconds), now)
        if SHARED in tried:
            return WaitUntil(now + self.tuning.retry_seconds_min)
        return self._begin(ChunkRequest(chunk, SHARED, "no holder"), now)

    def hedge(self, chunk: int, now: float) -> ChunkRequest | None:
        """Return another source for a late chunk, if any. Records the request."""
        table = self.table
        requests = [request for request, _ in table.requests.get(chunk, [])]
        if requests and not any(one.source is SHARED or table.is_usable(one.source) for one in requests):
            again = self.source(chunk, now)
            return again if isinstance(again, ChunkRequest) else None
        for one in requests:
            if one.source in table.peers:
                table.peers[one.source].is_late = True
        if len(requests) != 1 or sum(len(each) > 1 for each in table.requests.values()) >= self.tuning.hedges_max:
            return None
        holders = [peer for peer in self._holders(chunk, now) if peer.member.name != requests[0].source]
        if not holders:
            return None
        return self._begin(ChunkRequest(chunk, self._better(holders), "hedge"), now)

    def hedge_at(self, request: ChunkRequest) -> float:
        begun = next((at for one, at in self.table.requests.get(request.chunk, ()) if one is request), 0.0)
        usual = self.table.response_seconds(0.95)
        return begun + max(self.tuning.hedge_seconds_min, self.tuning.hedge_factor * usual)

    def is_in_flight(self, request: ChunkRequest) -> bool:
        return any(one is request for one, _ in self.table.requests.get(request.chunk, ()))

    def take_unwanted(self) -> list[ChunkRequest]:
        """Return the requests to cancel; report each as failed: ``cancelled``."""
        found, self._unwanted = self._unwanted, []
        return found

    def _begin(self, request: ChunkRequest, now: float) -> ChunkRequest:
        self.table.begin(request, now)
        return request

    def _measure(self, now: float) -> None:
        before = self.table.slow
        self._count_copies()
        if self.table.find_slow_peers(now):
            self._slots.in_flight(self.table.store_ages(now))
            for name in self.table.slow - before:
                self._cancel_most(self.table.peers[name])

    def _cancel_most(self, peer: Peer) -> None:
        table = self.table
        chunks = sorted(peer.requests, key=lambda chunk: (not self.allowed_slow >> chunk & 1, table.copies[chunk]))
        for chunk in chunks[1:] if chunks and self.allowed_slow >> chunks[0] & 1 else chunks:
            self._unwanted += [one for one, _ in table.requests[chunk] if one.source == peer.member.name]

    # --- turns ---------------------------------------------------------------------------------------------------

    def _count_copies(self) -> None:
        """Allow this node the chunks with enough copies for its rank: each chunk spreads as a tree of its own."""
        new_copies, first_copies = self.table.take_new_copies()
        self._first_copies += first_copies
        self._first_copies_slow += first_copies
        first = self.tuning.copies_first
        for chunk, count in new_copies.items():
            rank = self.my_rank(chunk)
            if rank <= count * first:
                self.allowed |= 1 << chunk
                if rank <= count:
                    self.allowed_slow |= 1 << chunk

    def take_turns(self, now: float) -> None:
        """Allow every node the chunks with an old first copy."""
        self._count_copies()
        tuning = self.tuning
        turn_seconds = max(tuning.turn_seconds, tuning.turn_answers * self.table.response_seconds(0.5))
        while self._first_copies and self._first_copies[0][0] + turn_seconds <= now:
            self.allowed |= self._first_copies.popleft()[1]
        while self._first_copies_slow and self._first_copies_slow[0][0] + tuning.turn_slow_seconds <= now:
            self.allowed_slow |= self._first_copies_slow.popleft()[1]

    # --- from the store ------------------------------------------------------------------------------------------

    def store_slots(self) -> int:
        """Return the number of chunks to fetch from the store at a time.

        Few: chunks that all nodes have in flight arrive together, at the end, and until then no node can pass on
        any. More if that does not make each take longer (``StoreSlots``).
        """
        nodes = len(self._filling)
        if nodes <= 1:
            return self.tuning.slots
        return min(self.tuning.slots // 2, max(1, self.table.total // (OWN_ROUNDS * nodes)) * self._slots.factor)

    def _from_store(self, now: float) -> ChunkRequest | None:
        table = self.table
        if table.store_requests >= self.store_slots():
            return None
        later: list[int] = []
        found, fetched = None, table.fetched_by_peers(now)
        while self._own and found is None and len(later) < 32:
            chunk = self._own.popleft()
            bit = 1 << chunk
            if not table.missing & bit or table.in_flight & bit:
                continue
            if table.available & bit and self._holders(chunk, now):
                continue
            if chunk in fetched:
                later.append(chunk)
            else:
                found = chunk
        self._own.extend(later)
        return None if found is None else self._own_request(found)

    def _own_request(self, chunk: int) -> ChunkRequest:
        if chunk in self._disputed:
            return ChunkRequest(chunk, SHARED, "digest conflict")
        if len(self._filling) <= 1:
            return ChunkRequest(chunk, SHARED, "no peers")
        is_mine = self.chunk_owners[chunk] == self.table.me
        return ChunkRequest(chunk, SHARED, "owned" if is_mine else "owner unreachable")

    def _from_laggard(self, now: float, open_: int) -> ChunkRequest | None:
        table = self.table
        if table.store_requests >= self.store_slots() or self._own:
            return None
        unheld = open_ & ~table.available
        for name, peer in table.peers.items():
            for chunk, since in peer.fetching.items():
                is_late = unheld >> chunk & 1 and now - since >= table.fetch_timeout(peer)
                if is_late and self.substitute(chunk, name) == table.me:
                    return ChunkRequest(chunk, SHARED, "owner timed out")
        by_owner: dict[str, list[int]] = {}
        fetched = table.fetched_by_peers(now)
        for chunk in positions(unheld):
            if chunk not in fetched:
                by_owner.setdefault(self.chunk_owners[chunk], []).append(chunk)
        is_still = now - table.progress_at >= self.tuning.still_seconds
        margin = 0 if is_still else self.tuning.steal_margin * self.store_slots()
        for name, chunks in sorted(by_owner.items(), key=lambda item: -len(item[1])):
            owner = table.peers.get(name)
            if owner is None or now - owner.reported_at > 4 * self.tuning.poll_seconds:
                continue
            if len(chunks) <= margin:
                break
            for chunk in reversed(self.order_of(name, chunks)[margin:]):
                if self.substitute(chunk, name) == table.me:
                    return ChunkRequest(chunk, SHARED, "owner lags")
        return None

    def _from_store_at_last(self, now: float, open_: int) -> ChunkRequest | None:
        table, tuning = self.table, self.tuning
        # While all fetches take long, the store is overloaded, and one more request helps no node.
        patience = max(tuning.stall_seconds, min(tuning.fetch_factor * table.fetch_seconds, tuning.stall_seconds_max))
        round_number = int((now - table.progress_at) / patience)
        if round_number < 1 or table.store_requests >= self.store_slots():
            return None
        for _ in range(8):
            chunk = any_of(open_, table.rng)
            if round_number > tuning.ranks_asked or table.me in self.ranks(chunk)[: round_number + 1]:
                return ChunkRequest(chunk, SHARED, "stalled")
        return None

    # --- from peers ----------------------------------------------------------------------------------------------

    def _from_holder(self, now: float, near: int, open_: int) -> ChunkRequest | None:
        table, slow = self.table, self.table.slow
        holding = [peer for peer in table.peers.values() if peer.chunks and peer.usable(now)]
        most = max(2, -(-3 * self.tuning.slots // (2 * max(1, len(holding)))))
        ready = [peer for peer in holding if len(peer.requests) < (1 if peer.member.name in slow else most)]
        table.rng.shuffle(ready)
        allowed_slow = self.allowed_slow
        if slow:
            for peer in holding:
                if peer.member.name not in slow:
                    allowed_slow &= ~peer.chunks
        for within in (near, open_) if near else (open_,):
            best, best_count, sampled = -1, 1 << 30, 0
            for peer in ready:
                useful = peer.chunks & within & (allowed_slow if peer.member.name in slow else self.allowed)
                if not useful:
                    continue
                for _ in range(SAMPLES):
                    chunk = any_of(useful, table.rng)
                    if table.copies[chunk] < best_count and chunk not in self._disputed:
                        best, best_count = chunk, table.copies[chunk]
                sampled += 1
                if sampled >= PEERS_SAMPLED:
                    break
            if best >= 0:
                holders = [peer for peer in ready if peer.chunks >> best & 1]
                return ChunkRequest(best, self._better(holders), "holder")
        return None

    def _holders(self, chunk: int, now: float) -> list[Peer]:
        return [] if chunk in self._disputed else self.table.holders(chunk, now)

    def _better(self, holders: Sequence[Peer]) -> str:
        drawn = [peer for peer in holders if peer.member.name not in self.table.slow] or holders
        if len(drawn) > 1:
            usual = self.table.response_seconds(0.5)
            drawn = [
                min(
                    self.table.rng.sample(drawn, 2),
                    key=lambda peer: (len(peer.requests) + 1) * (peer.response_seconds or usual),
                )
            ]
        return drawn[0].member.name

    def _from_owner(self, now: float, open_: int) -> ChunkRequest | None:
        table = self.table
        unheld = open_ & ~table.available
        if not unheld or table.waiting_requests >= max(1, self.tuning.slots // 2):
            return None
        peers = [
            peer
            for name, peer in table.peers.items()
            if peer.usable(now) and not peer.is_whole and not peer.waiting and name not in table.slow
        ]
        table.rng.shuffle(peers)
        for peer in peers:
            for chunk, since in peer.fetching.items():
                is_next = unheld >> chunk & 1 and self.my_rank(chunk) < self.tuning.copies_first
                if is_next and now - since < table.fetch_timeout(peer):
                    return ChunkRequest(chunk, peer.member.name, "fetching", self.tuning.wait_seconds)
        return None


class StoreSlots:
    """Tunes the number of concurrent requests to shared storage by trial. ``factor`` multiplies the first number.

    All nodes try at the same time. If each compared with its last time, and not with the best one, all would raise
    the number together.
    """

    GROWTH_MAX: Final = 1.4
    """Acceptable increase of the time for twice as many requests."""
    LATE: Final = 2.0
    """Requests are late when half of them are older than so many times that."""

    def __init__(self) -> None:
        self.factor = 1
        self._best_seconds = 0.0
        self._round: list[float] = []
        self._has_tried = False

    def completed(self, seconds: float, slots: int, slots_max: int) -> None:
        self._round.append(seconds)
        if len(self._round) < 2 * slots:
            return
        took, self._round = median(self._round), []
        if self.factor == 1:
            self._best_seconds = min(self._best_seconds or took, took)
        if self.factor > 1 and took > self.GROWTH_MAX * self._best_seconds:
            self.factor, self._has_tried = self.factor // 2, True
        elif not self._has_tried:
            self.factor *= 2
            self._has_tried = 2 * slots >= slots_max

    def in_flight(self, ages: Iterable[float]) -> None:
        """Return to the first number when requests are late: they may never complete."""
        if self.factor > 1 and median([*ages, 0.0]) > self.LATE * self.GROWTH_MAX * self._best_seconds:
            self.factor, self._has_tried, self._round = 1, True, []
