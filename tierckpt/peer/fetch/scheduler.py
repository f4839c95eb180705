"""Decides which chunk is fetched next, and from whom, while a node fills one version. fetch_session.py does it. Pure.

It decides by ``PeerState``: which members are there, what each holds, what each fetches from shared storage, and how
fast each has answered. That may be out of date, so a decision may be poor; it is never wrong: every chunk is verified.

1.  Each chunk has an owner among the members that fetch this version (chunk_owners.py). The owner fetches it from
    shared storage; the others fetch it from any holder. While many of the chunks that this node brought from the store
    have no other holder yet, chunks that other members hold come first.
2.  Rarest first, within the window that the reader needs next, else anywhere. Of two holders drawn at random the less
    loaded one gets the request (M. Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS
    12(10), 2001). A slow member is asked only for chunks that no other member holds.
3.  A chunk without a holder is requested from its owner, which answers when the chunk has been written. Few requests
    wait like that.
4.  Chunks of an owner that is unreachable, or much slower than the others, go to the next rank. A substitute starts at
    the end of the owner's list, so the two overlap at most once. A member that two thirds of the others find slow owns
    no chunks.
5.  A node without chunks of its own left takes chunks of the owner that lags most.
6.  A request that takes longer than most is hedged with another holder; the first answer wins.
7.  When nothing arrives at all, the missing chunks are fetched from shared storage, by one rank after the other.

A member that has sent wrong bytes gets no more requests. At the start there is a short pause in which members report
what they hold, so that nodes that start together do not all start at the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from .chunk_owners import fraction
from .peer_state import Peer, PeerState, Tuning, any_bit, bits, mask, quantile, span
from .ramp import Ramp

__all__ = ["SHARED", "ChunkRequest", "Decision", "FetchScheduler", "Tuning", "WaitUntil"]

SHARED: Final = None
"""The source that is shared storage."""
SAMPLES: Final = 6
PEERS_SAMPLED: Final = 3
"""Of so many members so many chunks are drawn; the one that fewest hold is taken."""
IDLE_SECONDS: Final = 0.05
SETTLE_PAUSE_SECONDS: Final = 0.02
OWN_ROUNDS: Final = 32
"""Rounds in which a node's own chunks come, at least: the first of them can be passed on after one."""
FETCHES_MIN: Final = 3
"""Where so many are under way and all take long, it is the store that is slow, and no owner."""


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """One request to make: ``chunk`` of ``source``, a member's name or ``SHARED``."""

    chunk: int
    source: str | None
    reason: str
    """Why this source. For ``SHARED``: ``owned`` and ``no peers`` are as it should be, others are fallbacks."""
    wait_seconds: float = 0.0
    """How long the other side may wait for it to land there."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """There is nothing to do before ``until``, unless something is heard."""

    until: float


Decision: TypeAlias = ChunkRequest | WaitUntil | None


class FetchScheduler:
    """One fill of one version on one node."""

    def __init__(self, state: PeerState) -> None:
        self.state = state
        self.flying: dict[int, list[tuple[ChunkRequest, float]]] = {}
        """What is under way, by chunk: each request, and when it was made."""
        self._flying = 0
        self._own: deque[int] = deque()
        """Chunks that are ours to fetch from the store, in this order."""
        self._times: deque[float] = deque(maxlen=64)
        self._store_times: deque[float] = deque(maxlen=16)
        self._store = self._waits = 0
        self._ramp = Ramp()
        self._unwanted: list[ChunkRequest] = []
        self._brought = 0
        """Chunks that we have fetched from the store."""
        self._bad: set[int] = set()
        """Chunks whose digests members do not agree on: the store decides."""
        self._looked_at = self._planned_at = -1.0
        self._ages: list[float] = []
        """How long each chunk that is known to be fetched from the store has been on its way."""

    # --- what became of it ---------------------------------------------------------------------------------------

    def completed(self, ask: ChunkRequest, now: float) -> None:
        """The chunk is here, verified, by this request. Others for it need not be waited for."""
        asked_at = self._ended(ask)
        seconds = now - asked_at if asked_at is not None else 0.0
        if ask.source is SHARED:
            self._store_times.append(seconds)
            self._ramp.completed(seconds, self.store_slots(), self.state.tuning.slots // 2)
            self._brought |= 1 << ask.chunk
        else:
            peer = self.state.peers.get(ask.source)
            if peer is not None:
                self.state.update(ask.source, now)
                if not ask.wait_seconds:
                    peer.answers += 1
                    peer.seconds = seconds if not peer.seconds else 0.7 * peer.seconds + 0.3 * seconds
                    self._times.append(seconds)
                if not peer.held >> ask.chunk & 1:
                    self.state.add_holding(peer, ask.chunk, now)
        self.landed(ask.chunk, now)

    def landed(self, chunk: int, now: float) -> None:
        """The chunk is here, whoever brought it."""
        if self.state.missing >> chunk & 1:
            self.state.missing &= ~(1 << chunk)
            self.state.moved_at = now

    def failed(self, ask: ChunkRequest, now: float, why: str) -> None:
        """The request brought nothing.

        Args:
            why: ``missing`` (the peer does not have the chunk), ``busy``, ``cancelled`` (by this node), ``wrong`` (its
                bytes are not the chunk's); anything else means that the peer could not be reached.
        """
        asked_at = self._ended(ask)
        if self.state.owner(ask.chunk, now) == self.state.me:
            self._own.append(ask.chunk)  # it was left out of it while it was under way
        if ask.source is SHARED:
            return
        peer = self.state.peers.get(ask.source)
        if peer is None:
            return
        if why == "cancelled" and asked_at is not None and not ask.wait_seconds:
            peer.seconds = max(peer.seconds, now - asked_at)  # it would have taken longer than that
        if why == "missing":
            if peer.held >> ask.chunk & 1:
                peer.held &= ~(1 << ask.chunk)
                peer.lacks |= 1 << ask.chunk
                self.state.copies[ask.chunk] = max(0, self.state.copies[ask.chunk] - 1)
                if not any(other.is_good and other.held >> ask.chunk & 1 for other in self.state.peers.values()):
                    self.state.held_anywhere &= ~(1 << ask.chunk)
        elif why == "wrong":
            self.state.ban(ask.source)
        elif why == "busy":
            peer.retry_at = now + self.state.tuning.retry_seconds_min * (0.5 + self.state.rng.random())
        elif why != "cancelled":
            self.state.mark_unreachable(ask.source, now)

    def set_missing(self, chunks: Iterable[int]) -> None:
        """These are the chunks to fetch, and no others."""
        self.state.missing = mask(chunks)
        self.state.recount()
        self.plan()

    def distrust(self, chunk: int, names: Iterable[str]) -> None:
        """Members do not agree on what a chunk is: it comes from the store, and they are not asked for anything."""
        self._bad.add(chunk)
        for name in names:
            if name in self.state.peers:
                self.state.peers[name].is_banned = True
        self.state.forget_owners()

    def _ended(self, ask: ChunkRequest) -> float | None:
        asked_at = None
        requests = self.flying.get(ask.chunk, [])
        for position, (other, at) in enumerate(requests):
            if other is ask:
                asked_at = at
                del requests[position]
                break
        if asked_at is None:
            return None
        if not requests:
            self.flying.pop(ask.chunk, None)
            self._flying &= ~(1 << ask.chunk)
        if ask.source is SHARED:
            self._store -= 1
        else:
            self._waits -= ask.wait_seconds > 0
            peer = self.state.peers.get(ask.source)
            if peer is not None:
                peer.asked.pop(ask.chunk, None)
                peer.waiting.discard(ask.chunk)
        return asked_at

    # --- deciding ------------------------------------------------------------------------------------------------

    def choose(self, now: float, window: range | None = None) -> Decision:
        """Say what to do with a free slot: a request (it counts as made), a pause, or None: nothing is left to ask for.

        Args:
            window: the chunks that are needed next.
        """
        open_ = self.state.missing & ~self._flying
        if not open_:
            return None
        if not self.state.assign_owners(now):
            return WaitUntil(now + SETTLE_PAUSE_SECONDS)
        self._look(now)
        if self.state.is_changed:
            self.plan(now)
        self.state.take_turns(now, self._usual(0.5))
        near = open_ & span(window) if window is not None else 0
        if self._is_ahead():
            found = self._from_holder(now, near, open_) or self._from_store(now)
        else:
            found = self._from_store(now) or self._from_holder(now, near, open_)
        if found is None:
            found = self._from_laggard(now, open_) or self._from_store_at_last(now, open_)
            found = found or self._from_owner(now, open_)
        self.state.is_hungry = found is None or found.source is SHARED
        if found is None:
            if not self._own and now - self._planned_at > self.state.tuning.turn_seconds:
                self.plan(now)
            return WaitUntil(now + IDLE_SECONDS)
        return self._begin(found, now)

    def source(self, chunk: int, now: float, tried: Iterable[str | None] = ()) -> ChunkRequest | WaitUntil:
        """Say whom to ask for a chunk that somebody waits for, be it under way or not. It counts as asked."""
        tried = {*tried, *(ask.source for ask, _ in self.flying.get(chunk, ()))}
        if not self.state.assign_owners(now):
            return WaitUntil(now + SETTLE_PAUSE_SECONDS)
        holders = [peer for peer in self._holders(chunk, now) if peer.member.name not in tried]
        if holders:
            return self._begin(ChunkRequest(chunk, self._better(holders).member.name, "holder"), now)
        if SHARED not in tried and self.state.owner(chunk, now) == self.state.me:
            return self._begin(ChunkRequest(chunk, SHARED, self._why_mine(chunk)), now)
        for name in self.state.ranks(chunk)[: self.state.tuning.ranks_asked]:
            if name not in tried and name != self.state.me and self.state.is_usable(name, now):
                return self._begin(ChunkRequest(chunk, name, "owner", self.state.tuning.wait_seconds), now)
        if SHARED in tried:
            return WaitUntil(now + self.state.tuning.retry_seconds_min)
        return self._begin(ChunkRequest(chunk, SHARED, "no holder"), now)

    def hedge(self, chunk: int, now: float) -> ChunkRequest | None:
        """Another source for a chunk that is late; None when there is no better one now. It counts as asked."""
        requests = self.flying.get(chunk, [])
        if requests and not any(ask.source is SHARED or self.state.is_usable(ask.source, now) for ask, _ in requests):
            again = self.source(chunk, now)  # nobody will answer
            return again if isinstance(again, ChunkRequest) else None
        for ask, _ in requests:
            if ask.source in self.state.peers:
                self.state.peers[ask.source].is_late = True
        if len(requests) != 1 or sum(len(known) > 1 for known in self.flying.values()) >= self.state.tuning.hedges_max:
            return None
        tried = {ask.source for ask, _ in requests}
        holders = [peer for peer in self._holders(chunk, now) if peer.member.name not in tried]
        if holders:
            return self._begin(ChunkRequest(chunk, self._better(holders).member.name, "hedge"), now)
        return None

    def hedge_at(self, ask: ChunkRequest) -> float:
        """When ``ask`` is late."""
        asked_at = next((at for other, at in self.flying.get(ask.chunk, ()) if other is ask), 0.0)
        return asked_at + max(self.state.tuning.hedge_seconds_min, self.state.tuning.hedge_factor * self._usual(0.95))

    def is_under_way(self, ask: ChunkRequest) -> bool:
        return any(other is ask for other, _ in self.flying.get(ask.chunk, ()))

    def _begin(self, ask: ChunkRequest, now: float) -> ChunkRequest:
        self.flying.setdefault(ask.chunk, []).append((ask, now))
        self._flying |= 1 << ask.chunk
        if ask.source is SHARED:
            self._store += 1
        else:
            self._waits += ask.wait_seconds > 0
            peer = self.state.peers.get(ask.source) or self.state.peers.setdefault(
                ask.source, Peer(self.state.live[ask.source])
            )
            peer.asked[ask.chunk] = now
            if ask.wait_seconds:
                peer.waiting.add(ask.chunk)
        return ask

    # --- the store -----------------------------------------------------------------------------------------------

    def store_slots(self) -> int:
        """Chunks to fetch from the store at a time. Few, where there are many nodes and few chunks: what all of them
        have under way comes at the same time, at the end, and till then nobody can pass on any of it. More, where that
        does not make each take longer (ramp.py): then they wait for the store's answers, not for its bandwidth."""
        nodes = len(self.state.interested)
        if nodes <= 1:
            return self.state.tuning.slots
        return min(self.state.tuning.slots // 2, max(1, self.state.total // (OWN_ROUNDS * nodes)) * self._ramp.factor)

    def _is_ahead(self) -> bool:
        """True when much of what we brought from the store is still ours alone: what the others hold comes first.

        Who sends slowly finds out so at once, while the others can still bring what it would have to send.
        """
        return (self._brought & ~self.state.held_anywhere).bit_count() >= self.state.tuning.ahead_max

    def _from_store(self, now: float) -> ChunkRequest | None:
        if self._store >= self.store_slots():
            return None
        later: list[int] = []
        found, fetched = None, self._fetched(now)
        while self._own and found is None and len(later) < 32:
            chunk = self._own.popleft()
            bit = 1 << chunk
            if not self.state.missing & bit or self._flying & bit:
                continue
            if self.state.held_anywhere & bit and chunk not in self._bad and self._holders(chunk, now):
                continue
            if chunk in fetched:
                later.append(chunk)
                continue
            found = chunk
        self._own.extend(later)
        return None if found is None else ChunkRequest(found, SHARED, self._why_mine(found))

    def _why_mine(self, chunk: int) -> str:
        if chunk in self._bad:
            return "digest conflict"
        if len(self.state.interested) <= 1:
            return "no peers"
        return "owned" if self.state.chunk_owners[chunk] == self.state.me else "owner unreachable"

    def _fetched(self, now: float) -> set[int]:
        """Chunks that other members fetch from the store, and not for too long."""
        return {
            chunk
            for peer in self.state.peers.values()
            if peer.fetching and peer.usable(now)
            for chunk, since in peer.fetching.items()
            if now - since < self._fetch_patience(peer)
        }

    def _fetch_patience(self, peer: Peer) -> float:
        """How long a member may take for a chunk of the store's; less when it is slow anyhow."""
        usual = quantile(self._store_times, 0.5)
        if len(self._ages) >= FETCHES_MIN:
            usual = max(usual, quantile(self._ages, 0.5))
        if peer.member.name in self.state.slow:
            return max(self.state.tuning.fetch_seconds_min / 2, usual)
        return max(self.state.tuning.fetch_seconds_min, self.state.tuning.fetch_factor * usual)

    def _from_laggard(self, now: float, open_: int) -> ChunkRequest | None:
        """A chunk that its owner would come to last, when it has many before it, and we have none left."""
        if self._store >= self.store_slots() or self._own:
            return None
        for peer in self.state.peers.values():
            late = self._fetch_patience(peer) if peer.fetching else 0.0
            for chunk, since in peer.fetching.items():
                is_late = open_ >> chunk & 1 and now - since >= late and not self.state.held_anywhere >> chunk & 1
                if is_late and self.standin(chunk, peer.member.name, now) == self.state.me:
                    return ChunkRequest(chunk, SHARED, "owner timed out")
        by_owner: dict[str, list[int]] = {}
        fetched = self._fetched(now)
        for chunk in bits(open_ & ~self.state.held_anywhere):
            if chunk not in fetched:
                by_owner.setdefault(self.state.chunk_owners[chunk], []).append(chunk)
        for name, chunks in sorted(by_owner.items(), key=lambda item: -len(item[1])):
            owner = self.state.peers.get(name)
            if owner is None or now - owner.heard_at > 4 * self.state.tuning.poll_seconds:
                continue
            is_still = now - self.state.moved_at >= self.state.tuning.still_seconds
            margin = 0 if is_still else self.state.tuning.steal_margin * self.store_slots()
            if len(chunks) <= margin:
                break
            for chunk in reversed(self.order_of(name, chunks)[margin:]):
                if self.standin(chunk, name, now) == self.state.me:
                    return ChunkRequest(chunk, SHARED, "owner lags")
        return None

    def standin(self, chunk: int, name: str, now: float) -> str | None:
        return next(
            (other for other in self.state.ranks(chunk) if other != name and self.state.may_own(other, now)), None
        )

    def _from_store_at_last(self, now: float, open_: int) -> ChunkRequest | None:
        """Nothing has moved for some time: one rank after the other goes to the store."""
        tuning, still = self.state.tuning, now - self.state.moved_at
        # While all that is fetched takes long, the store has enough to do: one more request helps nobody.
        patience = max(
            tuning.stall_seconds, min(tuning.fetch_factor * quantile(self._ages, 0.5), tuning.stall_seconds_max)
        )
        if still < patience or self._store >= self.store_slots():
            return None
        turn = int(still / patience)
        for _ in range(8):
            chunk = any_bit(open_, self.state.rng)
            ranks = self.state.ranks(chunk)
            if turn > self.state.tuning.ranks_asked or self.state.me in ranks[: turn + 1]:
                return ChunkRequest(chunk, SHARED, "stalled")
        return None

    # --- the others ----------------------------------------------------------------------------------------------

    def _from_holder(self, now: float, near: int, open_: int) -> ChunkRequest | None:
        holding = [peer for peer in self.state.peers.values() if peer.held and peer.usable(now)]
        most = max(2, -(-3 * self.state.tuning.slots // (2 * max(1, len(holding)))))
        ready = [peer for peer in holding if len(peer.asked) < (1 if peer.member.name in self.state.slow else most)]
        self.state.rng.shuffle(ready)
        turn_slow = self.state.allowed_slow
        if self.state.slow:  # what others hold comes from them: who sends slowly needs its uplink for its own requests
            for peer in holding:
                if peer.member.name not in self.state.slow:
                    turn_slow &= ~peer.held
        for within in (near, open_) if near else (open_,):
            best, best_count, looked = -1, 1 << 30, 0
            for peer in ready:
                turn = turn_slow if peer.member.name in self.state.slow else self.state.allowed
                useful = peer.held & within & turn
                if self.state.tuning.takes_from_owner_only:
                    useful = mask(chunk for chunk in bits(useful) if self.state.chunk_owners[chunk] == peer.member.name)
                if not useful:
                    continue
                for _ in range(SAMPLES):
                    chunk = any_bit(useful, self.state.rng)
                    if self.state.copies[chunk] < best_count and chunk not in self._bad:
                        best, best_count = chunk, self.state.copies[chunk]
                looked += 1
                if looked >= PEERS_SAMPLED:
                    break
            if best >= 0:
                holders = [peer for peer in ready if peer.held >> best & 1]
                if self.state.tuning.takes_from_owner_only:
                    holders = [peer for peer in holders if peer.member.name == self.state.chunk_owners[best]]
                return ChunkRequest(best, self._better(holders).member.name, "holder")
        return None

    def _holders(self, chunk: int, now: float) -> list[Peer]:
        if chunk in self._bad:
            return []
        return [peer for peer in self.state.peers.values() if peer.held >> chunk & 1 and peer.usable(now)]

    def _better(self, holders: Sequence[Peer]) -> Peer:
        """The less loaded of two drawn at random, of those that are not slow if there are any."""
        drawn = [peer for peer in holders if peer.member.name not in self.state.slow] or holders
        if len(drawn) == 1:
            return drawn[0]
        one, other = self.state.rng.sample(drawn, 2)
        return min(one, other, key=self._load)

    def _load(self, peer: Peer) -> float:
        return (len(peer.asked) + 1) * (peer.seconds or self._usual(0.5))

    def _from_owner(self, now: float, open_: int) -> ChunkRequest | None:
        """A chunk that nobody holds, of an owner that is going to have it soon."""
        if self._waits >= max(1, self.state.tuning.slots // 2):
            return None
        unheld = open_ & ~self.state.held_anywhere
        if not unheld:
            return None
        peers = [
            peer
            for peer in self.state.peers.values()
            if peer.usable(now) and not peer.is_whole and not peer.waiting and peer.member.name not in self.state.slow
        ]
        self.state.rng.shuffle(peers)
        for peer in peers:
            patience = self._fetch_patience(peer) if peer.fetching else 0.0
            for chunk, since in peer.fetching.items():
                is_next = unheld >> chunk & 1 and self.state.my_rank(chunk) < self.state.tuning.copies_first
                if is_next and now - since < patience:
                    return ChunkRequest(chunk, peer.member.name, "fetching", self.state.tuning.wait_seconds)
        return None

    # --- who counts ----------------------------------------------------------------------------------------------

    def plan(self, now: float = 0.0) -> None:
        """Work out which chunks are ours to fetch from the store, in which order."""
        mine: list[int] = []
        if not self.state.am_slow:
            own = [
                chunk
                for chunk in bits(self.state.missing)
                if self.state.chunk_owners and self.state.chunk_owners[chunk] == self.state.me
            ]
            mine = self.order_of(self.state.me, own)
        instead: list[int] = []
        if any(not self.state.may_own(name, now) for name in self.state.placed):
            others = [
                chunk
                for chunk in bits(self.state.missing & ~self.state.held_anywhere)
                if self.state.chunk_owners[chunk] != self.state.me and self.state.owner(chunk, now) == self.state.me
            ]
            by_owner: dict[str, list[int]] = {}
            for chunk in others:
                by_owner.setdefault(self.state.chunk_owners[chunk], []).append(chunk)
            for name, chunks in by_owner.items():
                instead += reversed(self.order_of(name, chunks))
        self._own = deque(_interleaved(mine, instead))
        self._planned_at, self.state.is_changed = now, False

    def order_of(self, name: str, chunks: list[int]) -> list[int]:
        """The order in which a member fetches its own: each begins at another place."""
        start = int(fraction(f"{self.state.version}/{name}") * self.state.total)
        return [c for c in chunks if c >= start] + [c for c in chunks if c < start]

    def _look(self, now: float) -> None:
        """See who is slow, now and then."""
        if now - self._looked_at < 0.2:
            return
        self._looked_at = now
        self._ages = self._ages_of_fetches(now)
        self._ramp.under_way(self._ages_of_ours(now))
        usual, longest = self._usual(0.5), self._usual(0.95)
        slow = set()
        if usual and len(self.state.peers) >= 2:
            for peer in self.state.peers.values():
                oldest = min((at for chunk, at in peer.asked.items() if chunk not in peer.waiting), default=now)
                factor = self.state.tuning.slow_factor / (2 if peer.member.name in self.state.slow else 1)
                takes = max(peer.seconds / usual, (now - oldest) / longest)
                if takes > factor and max(peer.seconds, now - oldest) > 0.1:
                    slow.add(peer.member.name)
        if slow != self.state.slow:
            for name in slow - self.state.slow:
                self._leave(self.state.peers[name])
            self.state.slow = frozenset(slow)
            self.plan(now)

    def _ages_of_fetches(self, now: float) -> list[float]:
        ages = [
            now - since for peer in self.state.peers.values() if peer.usable(now) for since in peer.fetching.values()
        ]
        return ages + self._ages_of_ours(now)

    def _ages_of_ours(self, now: float) -> list[float]:
        return [now - at for asks in self.flying.values() for ask, at in asks if ask.source is SHARED]

    def _leave(self, peer: Peer) -> None:
        """Ask a member that turned out to be slow for one chunk at a time: what others hold comes from them, and of the
        rest each node asks for another one."""
        chunks = sorted(
            peer.asked, key=lambda chunk: (not self.state.allowed_slow >> chunk & 1, self.state.copies[chunk])
        )
        for chunk in chunks[1:] if chunks and self.state.allowed_slow >> chunks[0] & 1 else chunks:
            self._unwanted += [ask for ask, _ in self.flying[chunk] if ask.source == peer.member.name]

    def take_unwanted(self) -> list[ChunkRequest]:
        """Requests that are to be broken off; say of each that it has failed: ``cancelled``."""
        found, self._unwanted = self._unwanted, []
        return found

    @property
    def usual_seconds(self) -> float:
        """What nearly all answers take, at most ``answer_seconds_max``: where links are full even a short one waits."""
        return min(self._usual(0.95), self.state.tuning.answer_seconds_max)

    def _usual(self, share: float) -> float:
        return quantile(self._times or self._store_times, share)


def _interleaved(first: Sequence[int], second: Sequence[int]) -> list[int]:
    mixed: list[int] = []
    for position in range(max(len(first), len(second))):
        mixed += first[position : position + 1]
        mixed += second[position : position + 1]
    return mixed
