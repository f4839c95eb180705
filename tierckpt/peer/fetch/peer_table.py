"""Measures the peers of one fetch: their chunks, their response times, and the slow ones. Pure.

A set of chunks is a whole number with bit ``n`` for chunk ``n``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..membership import Member

SHARED: Final = None
OWNERS_WATCHED: Final = 2
"""Limit if there are more nodes than chunks: more would make many nodes poll few owners."""
MEASURE_SECONDS: Final = 0.2
FETCHES_MIN: Final = 3
"""If this many fetches all take long, shared storage is slow, and not an owner."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants, chosen with bench/fanout_simulation.py."""

    slots: int = 16
    settle_seconds: float = 0.25
    settle_seconds_max: float = 1.0
    """Length of the first pause."""
    wait_seconds: float = 2.0
    """Maximum wait of a request at the owner."""
    hedge_seconds_min: float = 0.5
    hedge_factor: float = 3.0
    hedges_max: int = 2
    fetch_seconds_min: float = 1.0
    fetch_factor: float = 4.0
    """Multiple of the median after which an owner is substituted."""
    slow_factor: float = 3.5
    """A member is slow if its answers take this many times the median, or one is late by this many times the 95th
    percentile.
    """
    stall_seconds: float = 2.0
    """After each such time without a new chunk one more rank goes to the store."""
    stall_seconds_max: float = 10.0
    """Upper bound while all nodes wait for the store."""
    answer_seconds_max: float = 5.0
    ranks_asked: int = 3
    retry_seconds_min: float = 0.5
    retry_seconds_max: float = 15.0
    poll_seconds: float = 0.15
    """Poll interval while there is nothing to request from peers,"""
    keep_seconds: float = 3.0
    """and otherwise."""
    polls_max: int = 4
    watched_max: int = 24
    steal_margin: int = 2
    """A slow owner keeps so many batches,"""
    still_seconds: float = 0.5
    """unless no chunk has arrived for this long."""
    copies_first: int = 3
    """A chunk with ``h`` holders may be requested by so many times ``h`` members; by ``h`` if all holders are slow."""
    turn_seconds: float = 1.0
    """After this long every member may request it,"""
    turn_answers: float = 2.0
    """or after this many times the median answer, if longer."""
    turn_slow_seconds: float = 30.0
    ahead_max: int = 16
    """A node with this many chunks that have no other holder prefers chunks of its peers to the store."""


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    chunk: int
    source: str | None
    reason: str
    """For ``SHARED`` all but ``owned`` and ``no peers`` are fallbacks."""
    wait_seconds: float = 0.0


@dataclass(slots=True)
class Peer:
    member: Member
    chunks: int = 0
    withdrawn: int = 0
    """Chunks that it reported and did not give."""
    cursor: int = 0
    """Lines of its list that it has reported."""
    is_whole: bool = False
    fetching: dict[int, float] = field(default_factory=dict)
    """Chunks that it reads from the store, with the time of the first report."""
    reported_at: float = -1.0
    polled_at: float = -1.0
    requests: dict[int, float] = field(default_factory=dict)
    """Chunks in flight from it, with the time of the request."""
    waiting: set[int] = field(default_factory=set)
    """Those of them for which the peer waits itself."""
    response_seconds: float = 0.0
    """Moving average; 0: unknown."""
    failures: int = 0
    retry_at: float = 0.0
    is_banned: bool = False
    is_late: bool = False
    """Poll it soon, to see whether it is alive."""

    @property
    def is_good(self) -> bool:
        """False after wrong bytes, or while it is unreachable."""
        return not (self.is_banned or self.failures)

    def usable(self, now: float) -> bool:
        return self.is_good and now >= self.retry_at


class PeerTable:
    """Watched peers, requests in flight, and missing chunks.

    ``total``: chunks of the version. ``wanted``: chunks to fetch; None: all.
    """

    def __init__(
        self,
        total: int,
        me: str,
        *,
        tuning: Tuning | None = None,
        rng: random.Random | None = None,
        chunks_wanted: Iterable[int] | None = None,
    ) -> None:
        self.total, self.me = total, me
        self.tuning = tuning or Tuning()
        self.rng = rng or random.Random()
        self.missing = (1 << total) - 1 if chunks_wanted is None else mask(chunks_wanted)
        self.members: dict[str, Member] = {}
        self.peers: dict[str, Peer] = {}
        """The watched members: all of a few, some of many."""
        self.copies = bytearray(total)
        self.available = 0
        """Chunks that at least one peer holds."""
        self.requests: dict[int, list[tuple[ChunkRequest, float]]] = {}
        self.in_flight = 0
        self.store_requests = self.waiting_requests = 0
        self.from_store = 0
        self.progress_at = 0.0
        """When a chunk last arrived, here or at the first peer."""
        self.slow: frozenset[str] = frozenset()
        self.fetch_ages: list[float] = []
        self.generation = 0
        """Rises when owners of chunks change."""
        self._new_copies: dict[int, int] = {}
        self._first_copies: list[tuple[float, int]] = []
        self._settled_at: float | None = None
        self._measured_at = -1.0
        self._times: deque[float] = deque(maxlen=64)
        self._store_times: deque[float] = deque(maxlen=16)

    # --- members -------------------------------------------------------------------------------------------------

    def set_members(self, members: Sequence[Member], now: float) -> None:
        """Replace the list of live members, and watch a few of them."""
        if self._settled_at is None:
            self._settled_at = self.progress_at = now
        self.members = {member.name: member for member in members}
        self.members.setdefault(self.me, Member(self.me, ""))
        removed = self.peers.keys() - self.members.keys()
        for name in removed:
            del self.peers[name]
        if removed:
            self.recount()
        room = self.tuning.watched_max - len(self.peers)
        if room > 0 and len(self.members) > len(self.peers) + 1:
            others = [name for name in self.members if name not in self.peers and name != self.me]
            self._watch(others if len(others) <= room else self.rng.sample(others, room))

    def watch_owners(self, names: Iterable[str]) -> None:
        """Watch some owners: without them a node would take shared storage to be stalled."""
        owners = self.members.keys() & set(names) - {self.me}
        unknown = sorted(owners - self.peers.keys())
        room = min(len(unknown), OWNERS_WATCHED - (len(owners) - len(unknown)))
        self._watch(self.rng.sample(unknown, max(0, room)))

    def _watch(self, names: Iterable[str]) -> None:
        self.peers.update({name: Peer(self.members[name]) for name in names})

    def is_settling(self, now: float) -> bool:
        """True in the first moment, while members report their chunks."""
        if self._settled_at is None:
            return True
        since = now - self._settled_at
        if not self.peers or since >= self.tuning.settle_seconds_max:
            return False
        return since < self.tuning.settle_seconds or any(
            peer.reported_at < 0 and peer.is_good for peer in self.peers.values()
        )

    def is_usable(self, name: str) -> bool:
        peer = self.peers.get(name)
        return name in self.members and (peer is None or peer.is_good)

    # --- chunks --------------------------------------------------------------------------------------------------

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
        """Add a report of a member: ``new`` chunks since its last one, and fetches from the store."""
        peer = self.peers.get(name)
        if peer is None:
            return
        peer.reported_at = now
        if peer.failures:
            peer.failures, peer.retry_at = 0, 0.0
            self._peer_changed()
        if not peer.is_whole:
            chunks = (1 << self.total) - 1 if whole else mask(chunk for chunk in new if 0 <= chunk < self.total)
            self._add_chunks(peer, chunks & ~peer.chunks & ~peer.withdrawn, now)
            if whole:
                peer.is_whole, peer.fetching = True, {}
            elif fetching is not None:
                since = peer.fetching
                peer.fetching = {chunk: since.get(chunk, now) for chunk in fetching if 0 <= chunk < self.total}
        if cursor is not None:
            peer.cursor = max(peer.cursor, cursor)

    def _add_chunks(self, peer: Peer, chunks: int, now: float) -> None:
        peer.chunks |= chunks
        first = chunks & ~self.available
        if first:
            self.available |= first
            self.progress_at = now
            self._first_copies.append((now, first))
        if peer.fetching:
            peer.fetching = {chunk: since for chunk, since in peer.fetching.items() if not chunks >> chunk & 1}
        self._count(chunks)

    def _count(self, chunks: int) -> None:
        copies, new_copies = self.copies, self._new_copies
        for chunk in positions(chunks):
            if copies[chunk] < 255:
                copies[chunk] += 1
            if copies[chunk] > new_copies.get(chunk, 0):
                new_copies[chunk] = copies[chunk]

    def take_new_copies(self) -> tuple[dict[int, int], list[tuple[float, int]]]:
        """Return the copies of chunks with a new one, and the first copies by time, since the last call."""
        found = self._new_copies, self._first_copies
        self._new_copies, self._first_copies = {}, []
        return found

    def reset_chunks(self, name: str) -> None:
        peer = self.peers.get(name)
        if peer is not None:
            peer.chunks, peer.withdrawn, peer.cursor, peer.is_whole, peer.fetching = 0, 0, 0, False, {}
            self.recount()

    def recount(self) -> None:
        self.available, self.copies = 0, bytearray(self.total)
        for peer in self.peers.values():
            if peer.is_good:
                self.available |= peer.chunks
                self._count(peer.chunks & self.missing)

    def landed(self, chunk: int, now: float) -> None:
        if self.missing >> chunk & 1:
            self.missing &= ~(1 << chunk)
            self.progress_at = now

    def holders(self, chunk: int, now: float) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.chunks >> chunk & 1 and peer.usable(now)]

    def due_polls(self, now: float, *, is_idle: bool) -> list[tuple[str, int]]:
        """Return the members to poll now, each with its cursor. Marks them as polled."""
        tuning, is_settling = self.tuning, self.is_settling(now)
        interval = tuning.poll_seconds if is_idle or is_settling else tuning.keep_seconds
        due = [
            peer
            for peer in self.peers.values()
            if not peer.is_banned
            and now >= peer.retry_at
            and now - max(peer.reported_at, peer.polled_at) >= (tuning.poll_seconds if peer.is_late else interval)
            and (not peer.is_whole or peer.is_late or now - peer.reported_at >= tuning.keep_seconds)
        ]
        first = [peer for peer in due if peer.reported_at < 0 or is_settling]
        if len(first) < tuning.polls_max:
            rest = sorted((peer for peer in due if peer not in first), key=lambda peer: peer.reported_at)
            first += rest[: tuning.polls_max - len(first)]
        for peer in first:
            peer.polled_at, peer.is_late = now, False
        return [(peer.member.name, peer.cursor) for peer in first]

    # --- requests ------------------------------------------------------------------------------------------------

    def begin(self, request: ChunkRequest, now: float) -> None:
        self.requests.setdefault(request.chunk, []).append((request, now))
        self.in_flight |= 1 << request.chunk
        if request.source is SHARED:
            self.store_requests += 1
            return
        self.waiting_requests += request.wait_seconds > 0
        if request.source not in self.peers:
            self._watch([request.source])
        peer = self.peers[request.source]
        peer.requests[request.chunk] = now
        if request.wait_seconds:
            peer.waiting.add(request.chunk)

    def _end(self, request: ChunkRequest) -> float | None:
        requests = self.requests.get(request.chunk, [])
        entry = next((one for one in requests if one[0] is request), None)
        if entry is None:
            return None
        self.requests[request.chunk] = requests = [one for one in requests if one is not entry]
        if not requests:
            del self.requests[request.chunk]
            self.in_flight &= ~(1 << request.chunk)
        if request.source is SHARED:
            self.store_requests -= 1
        else:
            self.waiting_requests -= request.wait_seconds > 0
            peer = self.peers.get(request.source)
            if peer is not None:
                peer.requests.pop(request.chunk, None)
                peer.waiting.discard(request.chunk)
        return entry[1]

    def completed(self, request: ChunkRequest, now: float) -> float:
        """Record a verified chunk. Return its response time in seconds."""
        begun = self._end(request)
        seconds = now - begun if begun is not None else 0.0
        if request.source is SHARED:
            self._store_times.append(seconds)
            self.from_store |= 1 << request.chunk
        elif (peer := self.peers.get(request.source)) is not None:
            self.update(request.source, now)
            if not request.wait_seconds:
                average = peer.response_seconds
                peer.response_seconds = 0.7 * average + 0.3 * seconds if average else seconds
                self._times.append(seconds)
            self._add_chunks(peer, 1 << request.chunk & ~peer.chunks, now)
        self.landed(request.chunk, now)
        return seconds

    def failed(self, request: ChunkRequest, now: float, why: str) -> None:
        """Record a request without a result. ``why``: see ``FetchScheduler.failed``."""
        begun = self._end(request)
        peer = self.peers.get(request.source) if request.source is not SHARED else None
        if peer is None:
            return
        chunk, name = request.chunk, peer.member.name
        if why == "cancelled":
            if begun is not None and not request.wait_seconds:
                peer.response_seconds = max(peer.response_seconds, now - begun)  # it would have taken longer
        elif why == "missing":
            if peer.chunks >> chunk & 1:
                peer.chunks &= ~(1 << chunk)
                peer.withdrawn |= 1 << chunk
                self.recount()
        elif why == "wrong":
            self.set_banned(name, True)
        elif why == "busy":
            peer.retry_at = now + self.tuning.retry_seconds_min * (0.5 + self.rng.random())
        else:
            self.mark_unreachable(name, now)

    def mark_unreachable(self, name: str, now: float) -> None:
        """Only poll a member, less and less often, until it reports again."""
        peer = self.peers.get(name)
        if peer is None or now < peer.retry_at:
            return  # requests in flight fail together
        peer.failures += 1
        wait = self.tuning.retry_seconds_min * 2 ** (peer.failures - 1)
        peer.retry_at = now + min(wait, self.tuning.retry_seconds_max) * (0.5 + self.rng.random())
        if peer.failures == 1:
            self._peer_changed()

    def set_banned(self, name: str, is_banned: bool) -> None:
        peer = self.peers.get(name)
        if peer is not None and peer.is_banned != is_banned:
            peer.is_banned = is_banned
            self._peer_changed()

    def _peer_changed(self) -> None:
        self.generation += 1
        self.recount()

    # --- times ---------------------------------------------------------------------------------------------------

    def response_seconds(self, share: float) -> float:
        """Return a quantile of the answers of peers, or of the store while there is none."""
        return quantile(self._times or self._store_times, share)

    @property
    def poll_timeout_seconds(self) -> float:
        """On a full link even a short answer waits."""
        return min(self.response_seconds(0.95), self.tuning.answer_seconds_max)

    @property
    def fetch_seconds(self) -> float:
        return quantile(self.fetch_ages, 0.5)

    def fetch_timeout(self, peer: Peer) -> float:
        usual = quantile(self._store_times, 0.5)
        if len(self.fetch_ages) >= FETCHES_MIN:
            usual = max(usual, self.fetch_seconds)
        if peer.member.name in self.slow:
            return max(self.tuning.fetch_seconds_min / 2, usual)
        return max(self.tuning.fetch_seconds_min, self.tuning.fetch_factor * usual)

    def fetched_by_peers(self, now: float) -> set[int]:
        return {
            chunk
            for peer in self.peers.values()
            if peer.fetching and peer.usable(now)
            for chunk, since in peer.fetching.items()
            if now - since < self.fetch_timeout(peer)
        }

    def store_ages(self, now: float) -> list[float]:
        return [now - at for requests in self.requests.values() for one, at in requests if one.source is SHARED]

    def find_slow_peers(self, now: float) -> bool:
        """Update ``slow``. Return False, without a change, if that was done recently."""
        if now - self._measured_at < MEASURE_SECONDS:
            return False
        self._measured_at = now
        self.fetch_ages = [
            now - since for peer in self.peers.values() if peer.usable(now) for since in peer.fetching.values()
        ] + self.store_ages(now)
        usual, longest = self.response_seconds(0.5), self.response_seconds(0.95)
        slow = set()
        if usual and len(self.peers) >= 2:
            for name, peer in self.peers.items():
                oldest = min((at for chunk, at in peer.requests.items() if chunk not in peer.waiting), default=now)
                factor = self.tuning.slow_factor / (2 if name in self.slow else 1)
                is_slower = max(peer.response_seconds / usual, (now - oldest) / longest) > factor
                if is_slower and max(peer.response_seconds, now - oldest) > 0.1:
                    slow.add(name)
        if slow != self.slow:
            self.slow = frozenset(slow)
            self.generation += 1
        return True


# --- sets of chunks ----------------------------------------------------------------------------------------------

_POSITIONS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]


def mask(chunks: Iterable[int]) -> int:
    found = 0
    for chunk in chunks:
        found |= 1 << chunk
    return found


def positions(chunks: int) -> list[int]:
    skipped = max(0, (chunks & -chunks).bit_length() - 1) // 8
    octets = (chunks >> 8 * skipped).to_bytes((chunks.bit_length() + 7) // 8 - skipped, "little")
    return [8 * index + bit for index, byte in enumerate(octets, skipped) if byte for bit in _POSITIONS[byte]]


def span(window: range) -> int:
    return ((1 << len(window)) - 1) << window.start if len(window) else 0


def any_of(chunks: int, rng: random.Random) -> int:
    start = rng.randrange(chunks.bit_length())
    above = chunks >> start
    return start + ((above & -above).bit_length() - 1)


def quantile(times: Iterable[float], share: float) -> float:
    known = sorted(times)
    return known[min(len(known) - 1, int(share * len(known)))] if known else 0.0
