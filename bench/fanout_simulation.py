"""Fan-out under a virtual clock: the nodes' real placement and schedule over simulated links.

    python bench/fanout_simulation.py                    N = 2 to 16, alike and with faults
    python bench/fanout_simulation.py --nodes 64 4096 --chunks 64
    python bench/fanout_simulation.py --owner-only       only owners serve

A transfer gets its share of the sender's uplink or of the receiver's downlink, whichever is less; its other transfers
share the unused part of a link. Requests take ``LATENCY_SECONDS`` each way. tierckpt/peer/fetch/scheduler.py
decides all else: which node requests which chunk, from which node, and when.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tierckpt.peer.fetch.peer_table import SHARED, ChunkRequest, PeerTable, Tuning, mask
from tierckpt.peer.fetch.scheduler import ChunkOwners, FetchScheduler, WaitUntil
from tierckpt.peer.membership import Member

LATENCY_SECONDS = 0.001
STORE_LATENCY_SECONDS = 0.02
CONNECT_SECONDS = 2.0
POLL_TIMEOUT_SECONDS = 1.5
DEAD_SECONDS = 5.0
MEET_SECONDS = 0.2
POLL_SECONDS = 0.1
INTEREST_SECONDS = 10.0
SLOW_SECONDS = 2.5
LINES_MAX = 64
MANY_FLOWS = 64


@dataclass(frozen=True)
class Case:
    """One run. Rates in bytes per second; a node's link is full duplex."""

    name: str
    nodes: int
    origin: float = 1.0
    """The store's rate, as a multiple of a node's."""
    chunks: int = 256
    chunk_bytes: int = 1 << 20
    node_rate: float = 25e6
    slow: int = 0
    """Nodes whose links have a tenth of the rate (``slow_up_only``: only their uplinks)."""
    slow_up_only: bool = False
    dead_at: float | None = None
    """One node falls silent then, as a share of the best time there can be."""
    killed: bool = False
    """It refuses connections instead."""
    late: int = 0
    late_at: float = 0.5
    corrupt: int = 0
    cut: tuple[float, float] | None = None
    """Half of the nodes cannot reach the others between these shares of the best time."""
    stagger_seconds: float = 0.02
    seed: int = 1
    owner_only: bool = False
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def size(self) -> float:
        return float(self.chunks * self.chunk_bytes)

    @property
    def best_seconds(self) -> float:
        return max(self.size / (self.origin * self.node_rate), self.size / self.node_rate)


@dataclass
class Outcome:
    case: Case
    seconds: float
    """Until the last node was whole that has full speed and was there at the beginning."""
    ratio: float
    store_ratio: float
    wrong: int
    unfinished: int
    late_seconds: float
    reasons: dict[str, int]
    cpu_seconds: float


class Link:
    __slots__ = ("applied", "flows", "level", "rate")

    def __init__(self, rate: float) -> None:
        self.rate, self.level, self.applied = rate, rate, rate
        self.flows: set[Flow] = set()


class Flow:
    __slots__ = ("dead", "done", "down", "left", "number", "rate", "since", "stamp", "up")

    def __init__(self, number: int, up: Link, down: Link, size: float, done: Callable[[], None]) -> None:
        self.number = number
        self.up, self.down, self.left, self.done = up, down, size, done
        self.rate, self.since, self.stamp, self.dead = 0.0, 0.0, 0, False


class OwnersOnly(FetchScheduler):
    """A seeded fault: takes each chunk from its owner only."""

    def _from_holder(self, now: float, near: int, open_: int) -> ChunkRequest | None:
        held = {name: peer.chunks for name, peer in self.table.peers.items()}
        for name, peer in self.table.peers.items():
            peer.chunks &= mask(chunk for chunk, owner in enumerate(self.chunk_owners) if owner == name)
        try:
            return super()._from_holder(now, near, open_)
        finally:
            for name, chunks in held.items():
                self.table.peers[name].chunks = chunks


class Node:
    def __init__(self, world: World, name: str, up: float, down: float, start: float) -> None:
        case = world.case
        self.world, self.name = world, name
        self.up, self.down, self.start = Link(up), Link(down), start
        self.member = Member(name, name, 1.0)
        self.table = PeerTable(case.chunks, name, tuning=case.tuning, rng=random.Random(f"{case.seed} {name}"))
        scheduler = OwnersOnly if case.owner_only else FetchScheduler
        self.schedule = scheduler(self.table, "5" * 32, placement=world.placement)
        self.log: list[int] = []
        self.has: set[int] = set()
        self.from_store: set[int] = set()
        self.interest: dict[str, float] = {}
        self.slow_to: dict[str, float] = {}
        self.waiters: dict[int, list[Callable[[], None]]] = {}
        self.busy = 0
        self.under_way: dict[int, list[tuple[ChunkRequest, Flow | None]]] = {}
        self.begun = False
        self.dead = False
        self.corrupt = False
        self.slow = False
        self.late = False
        self.done_at: float | None = None
        self.next_wake = -1.0
        self.met = (-1, False)

    # --- the session -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.begun = True
        self.meet()
        self.poll()
        self.pump()

    def is_idle(self) -> bool:
        return self.dead or self.done_at is not None

    def meet(self) -> None:
        if not self.is_idle():
            self._meet()
            self.world.at(self.world.now + MEET_SECONDS, self.meet)

    def _meet(self) -> None:
        world, now = self.world, self.world.now
        if len(world.nodes) > MANY_FLOWS:
            if self.met != (seen := world.members_at()):
                self.met = seen
                self.schedule.set_members(*world.many(seen), now)
            return
        live = [n.member for n in world.nodes if not (n.dead and now - world.dead_at > DEAD_SECONDS)]
        names = {self.name, *(name for name, at in self.interest.items() if now - at < INTEREST_SECONDS)}
        for name in self.table.slow:
            world.send(self, name, lambda other: other.slow_to.update({self.name: world.now}), lambda: None)
        slow_to = {name for name, at in self.slow_to.items() if now - at < SLOW_SECONDS}
        self.schedule.set_members(live, names, now, slow_to=slow_to)

    def poll(self) -> None:
        if self.is_idle():
            return
        for name, cursor in self.table.due_polls(self.world.now, is_idle=self.schedule.is_idle):
            self.world.send(
                self,
                name,
                lambda other, cursor=cursor: self._polled(other, cursor),
                lambda name=name: self._unreached(name),
                POLL_TIMEOUT_SECONDS,
            )
        self.world.at(self.world.now + POLL_SECONDS, self.poll)

    def _unreached(self, name: str) -> None:
        if not self.is_idle():
            self.table.mark_unreachable(name, self.world.now)
            self.pump()

    def _polled(self, other: Node, cursor: int) -> None:
        """Handle a poll on the other side."""
        world = self.world
        other.interest[self.name] = world.now
        new, whole, fetching = other.log[cursor:], len(other.has) == world.case.chunks, list(other.from_store)
        heard: list[str] = []
        if len(world.nodes) <= MANY_FLOWS:
            heard = [name for name, at in other.interest.items() if world.now - at < INTEREST_SECONDS]
            heard += [other.name] if other.begun else []
        world.after(LATENCY_SECONDS, lambda: self._heard(other, new, cursor + len(new), whole, fetching, heard))

    def _heard(
        self, other: Node, new: list[int], cursor: int, whole: bool, fetching: list[int] | None, interest: list[str]
    ) -> None:
        if self.is_idle():
            return
        now = self.world.now
        fresh = {name: now for name in interest if name != self.name}
        has_news = not fresh.keys() <= self.interest.keys()
        self.interest |= fresh
        if has_news:
            self._meet()
        self.table.update(other.name, now, new=new, fetching=fetching, whole=whole, cursor=cursor)
        self.pump()

    def pump(self) -> None:
        now = self.world.now
        for ask in self.schedule.take_unwanted():
            self.give_up(ask)
        while not self.is_idle() and self.busy < self.table.tuning.slots:
            ask = self.schedule.choose(now)
            if isinstance(ask, WaitUntil):
                if self.next_wake <= now or self.next_wake > ask.until:
                    self.next_wake = ask.until
                    self.world.at(ask.until, self.pump)
                return
            if ask is None:
                return
            self.busy += 1
            self.go(ask)

    def go(self, ask: ChunkRequest) -> None:
        world = self.world
        self.under_way.setdefault(ask.chunk, []).append((ask, None))
        if ask.source is SHARED:
            world.reasons[ask.reason] = world.reasons.get(ask.reason, 0) + 1
            self.from_store.add(ask.chunk)
            world.after(STORE_LATENCY_SECONDS, lambda: self._flow(ask, world.origin, None))
        else:
            world.send(self, ask.source, lambda other: other.give(self, ask), lambda: self.failed(ask, "unreachable"))
        world.at(self.schedule.hedge_at(ask), lambda: self.late_check(ask))

    def late_check(self, ask: ChunkRequest) -> None:
        if self.is_idle() or not self._is_under_way(ask):
            return
        due = self.schedule.hedge_at(ask)
        if due > self.world.now + 1e-6:
            self.world.at(due, lambda: self.late_check(ask))
            return
        other = self.schedule.hedge(ask.chunk, self.world.now)
        if other is not None:
            self.world.hedges += 1
            self.go(other)
        else:
            self.world.at(self.world.now + 0.25, lambda: self.late_check(ask))

    def _is_under_way(self, ask: ChunkRequest) -> bool:
        return any(other is ask for other, _ in self.under_way.get(ask.chunk, ()))

    def _flow(self, ask: ChunkRequest, up: Link, source: Node | None) -> None:
        if self.dead or not self._is_under_way(ask):
            return
        flow = self.world.flow(up, self.down, lambda: self.completed(ask, source))
        entries = self.under_way[ask.chunk]
        self.under_way[ask.chunk] = [(other, flow if other is ask else was) for other, was in entries]

    def completed(self, ask: ChunkRequest, source: Node | None) -> None:
        if self.dead:
            return
        world, chunk = self.world, ask.chunk
        if source is None:
            world.store_bytes += world.case.chunk_bytes
        elif source.corrupt:
            world.wrong += 1
            self.failed(ask, "wrong")
            return
        for other, flow in self.under_way.pop(chunk, []):
            if other is not ask:
                if flow is not None:
                    world.drop(flow)
                self.schedule.failed(other, world.now, "cancelled")
        self.busy -= 1
        self.from_store.discard(chunk)
        if chunk not in self.has:
            self.has.add(chunk)
            self.log.append(chunk)
        self.schedule.completed(ask, world.now)
        if source is not None:
            cursor = self.table.peers[source.name].cursor if source.name in self.table.peers else 0
            new = source.log[cursor : cursor + LINES_MAX]
            self.table.update(source.name, world.now, new=new, cursor=cursor + len(new))
        for give in self.waiters.pop(chunk, []):
            give()
        if len(self.has) == world.case.chunks:
            self.done_at = world.now
            world.left.discard(self)
        self.pump()

    def give_up(self, ask: ChunkRequest) -> None:
        for other, flow in self.under_way.get(ask.chunk, []):
            if other is ask and flow is not None:
                self.world.drop(flow)
        self.failed(ask, "cancelled")

    def failed(self, ask: ChunkRequest, why: str) -> None:
        if self.is_idle() or not self._is_under_way(ask):
            return
        chunk = ask.chunk
        self.under_way[chunk] = [(other, flow) for other, flow in self.under_way[chunk] if other is not ask]
        self.schedule.failed(ask, self.world.now, why)
        if not self.under_way[chunk]:
            del self.under_way[chunk]
            self.busy -= 1
        self.pump()

    # --- the agent -------------------------------------------------------------------------------------------------

    def give(self, to: Node, ask: ChunkRequest) -> None:
        world = self.world
        if ask.chunk in self.has:
            to._flow(ask, self.up, self)
            return
        if not ask.wait_seconds:
            world.after(LATENCY_SECONDS, lambda: to.failed(ask, "missing"))
            return
        state = {"open": True}

        def landed() -> None:
            if state["open"]:
                state["open"] = False
                to._flow(ask, self.up, self)

        def expired() -> None:
            if state["open"]:
                state["open"] = False
                to.failed(ask, "missing")

        self.waiters.setdefault(ask.chunk, []).append(landed)
        world.after(ask.wait_seconds, expired)


class World:
    """The clock, the links and their transfers."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = itertools.count()
        self.origin = Link(case.origin * case.node_rate)
        self.store_bytes = 0
        self.wrong = self.hedges = 0
        self.reasons: dict[str, int] = {}
        self._placements: dict[tuple[str, ...], ChunkOwners] = {}
        self._many: dict[tuple[int, bool], tuple[list[Member], list[str]]] = {}
        rng = random.Random(case.seed)
        self.nodes: list[Node] = []
        for index in range(case.nodes):
            is_slow, is_late = index < case.slow, index >= case.nodes - case.late
            up = case.node_rate / (10 if is_slow else 1)
            down = case.node_rate / (10 if is_slow and not case.slow_up_only else 1)
            start = case.late_at * case.best_seconds if is_late else rng.random() * case.stagger_seconds
            node = Node(self, f"n{index}", up, down, start)
            node.slow, node.late = is_slow, is_late
            node.corrupt = case.nodes // 2 <= index < case.nodes // 2 + case.corrupt
            self.nodes.append(node)
        self.by_name = {node.name: node for node in self.nodes}
        self.left = set(self.nodes)
        self.dead_at = float("inf")

    def placement(self, version: str, members: Sequence[Member]) -> ChunkOwners:
        """Return one placement for all nodes with the same view."""
        key = tuple(member.name for member in members)
        if key not in self._placements:
            found = ChunkOwners(version, members)
            owners = found.owners(self.case.chunks)
            found.owners = lambda total: owners  # type: ignore[method-assign]
            self._placements[key] = found
        return self._placements[key]

    def members_at(self) -> tuple[int, bool]:
        """Return the members of a large simulation, all known at once, as discovery is not simulated."""
        return sum(node.start <= self.now for node in self.nodes if node.late), self.now - self.dead_at > DEAD_SECONDS

    def many(self, seen: tuple[int, bool]) -> tuple[list[Member], list[str]]:
        if seen not in self._many:
            there = [n for n in self.nodes if not (n.dead and seen[1]) and not (n.late and n.start > self.now)]
            self._many[seen] = [n.member for n in there], [n.name for n in there]
        return self._many[seen]

    # --- the clock -----------------------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (max(when, self.now), next(self.number), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def run(self, most_seconds: float) -> None:
        for node in self.nodes:
            self.at(node.start, node.begin)
        if self.case.dead_at is not None:
            self.at(self.case.dead_at * self.case.best_seconds, self.kill)
        while self.events and self.left:
            when, _, what = heapq.heappop(self.events)
            if when > most_seconds:
                return
            self.now = when
            what()

    def kill(self) -> None:
        node = self.nodes[self.case.nodes // 2]
        node.dead, self.dead_at = True, self.now
        self.left.discard(node)
        for flow in sorted(node.up.flows | node.down.flows, key=lambda flow: flow.number):
            self.drop(flow)
            flow.dead = True
        if self.case.killed:  # or waiting nodes get no answer
            for other in self.nodes:
                for ask in [ask for asks in other.under_way.values() for ask, _ in asks if ask.source == node.name]:
                    self.after(LATENCY_SECONDS, lambda other=other, ask=ask: other.failed(ask, "unreachable"))

    # --- messages ------------------------------------------------------------------------------------------------

    def send(
        self,
        sender: Node,
        name: str | None,
        arrive: Callable[[Node], None],
        lost: Callable[[], None],
        timeout_seconds: float = CONNECT_SECONDS,
    ) -> None:
        other = self.by_name[str(name)]
        if other.dead and self.case.killed:
            self.after(LATENCY_SECONDS, lost)
        elif other.dead or self._is_cut(sender, other):
            self.after(timeout_seconds, lost)
        else:
            self.after(LATENCY_SECONDS, lambda: arrive(other))

    def _is_cut(self, one: Node, other: Node) -> bool:
        if self.case.cut is None:
            return False
        begin, end = (share * self.case.best_seconds for share in self.case.cut)
        half = self.case.nodes // 2
        apart = (int(one.name[1:]) < half) != (int(other.name[1:]) < half)
        return apart and begin <= self.now < end

    # --- links ---------------------------------------------------------------------------------------------------

    def flow(self, up: Link, down: Link, done: Callable[[], None]) -> Flow:
        flow = Flow(next(self.number), up, down, float(self.case.chunk_bytes), done)
        flow.since = self.now
        up.flows.add(flow)
        down.flows.add(flow)
        self._share(up)
        self._share(down)
        return flow

    def drop(self, flow: Flow) -> None:
        flow.stamp += 1
        if flow in flow.up.flows:
            flow.up.flows.discard(flow)
            flow.down.flows.discard(flow)
            self._share(flow.up)
            self._share(flow.down)

    def _share(self, link: Link) -> None:
        """Divide a link equally among its transfers, less for those limited by their other end."""
        flows = link.flows
        if not flows:
            link.level = link.applied = link.rate
            return
        if len(flows) > MANY_FLOWS:
            link.level = link.rate / len(flows)
            if 0.9 < link.level / link.applied < 1.1:
                flows = {flow for flow in flows if not flow.rate}
            else:
                link.applied = link.level
            for flow in flows:
                other = flow.down if flow.up is link else flow.up
                self._move(flow, min(link.level, other.level))
            return
        pairs = sorted(
            (((f.down if f.up is link else f.up).level, f.number, f) for f in flows), key=lambda one: one[:2]
        )
        room, left = link.rate, len(pairs)
        for cap, _, flow in pairs:
            rate = min(cap, room / left)
            room -= rate
            left -= 1
            link.level = max(rate, room / left if left else rate)
            self._move(flow, rate)
        link.level = max(link.level, link.rate / len(pairs))
        link.applied = link.level

    def _move(self, flow: Flow, rate: float) -> None:
        if flow.rate and abs(rate - flow.rate) < 0.02 * flow.rate:
            return
        flow.left -= flow.rate * (self.now - flow.since)
        flow.since, flow.rate = self.now, max(rate, 1.0)
        flow.stamp += 1
        stamp = flow.stamp
        self.at(self.now + max(0.0, flow.left) / flow.rate, lambda: self._arrived(flow, stamp))

    def _arrived(self, flow: Flow, stamp: int) -> None:
        if flow.stamp != stamp or flow.dead:
            return
        flow.up.flows.discard(flow)
        flow.down.flows.discard(flow)
        flow.stamp += 1
        self._share(flow.up)
        self._share(flow.down)
        flow.done()


def simulate(case: Case, most: float = 20.0) -> Outcome:
    """Run ``case`` until every node is complete, or ``most`` times the best time."""
    begun = time.process_time()
    world = World(case)
    world.run(most * case.best_seconds + 60.0)
    counted = [node for node in world.nodes if not (node.dead or (node.slow and not case.slow_up_only) or node.late)]
    unfinished = sum(node.done_at is None for node in world.nodes if not node.dead)
    seconds = max(node.done_at if node.done_at is not None else world.now for node in counted)
    late = [node for node in world.nodes if node.late]
    late_seconds = max(((node.done_at or world.now) - node.start for node in late), default=0.0)
    return Outcome(
        case,
        seconds,
        seconds / case.best_seconds,
        world.store_bytes / case.size,
        world.wrong,
        unfinished,
        late_seconds / case.best_seconds,
        world.reasons,
        time.process_time() - begun,
    )


def cases(base: Case) -> list[Case]:
    found = [
        replace(base, name="alike", nodes=nodes, origin=origin) for origin in (1.0, 4.0) for nodes in (2, 4, 8, 16)
    ]
    for origin in (1.0, 4.0):
        found += [
            replace(base, name="one slow", origin=origin, slow=1),
            replace(base, name="one sends slowly", origin=origin, slow=1, slow_up_only=True),
            replace(base, name="dead owner", origin=origin, dead_at=0.3),
            replace(base, name="killed owner", origin=origin, dead_at=0.3, killed=True),
            replace(base, name="late joiner", origin=origin, late=1),
            replace(base, name="partition heals", origin=origin, cut=(0.2, 0.6)),
            replace(base, name="corrupt peer", origin=origin, corrupt=1),
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", help="homogeneous runs of so many nodes, instead of the table")
    parser.add_argument("--origin", type=float, nargs="*", default=[1.0, 4.0])
    parser.add_argument("--chunks", type=int, default=256)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--owner-only", action="store_true")
    options = parser.parse_args()
    tuning = Tuning(slots=options.slots)
    base = Case("alike", 8, chunks=options.chunks, tuning=tuning, seed=options.seed, owner_only=options.owner_only)
    if options.nodes:
        todo = [replace(base, nodes=nodes, origin=origin) for origin in options.origin for nodes in options.nodes]
    else:
        todo = cases(base)
    print(
        f"{'case':18}{'N':>6}{'R/B':>6}{'time/best':>11}{'store/S':>9}{'late':>7}{'left':>6}{'cpu s':>8}"
        "  from the store"
    )
    for case in todo:
        out = simulate(case)
        why = ", ".join(f"{count} {name}" for name, count in sorted(out.reasons.items(), key=lambda one: -one[1]))
        print(
            f"{case.name:18}{case.nodes:6}{case.origin:6.0f}{out.ratio:11.3f}{out.store_ratio:9.3f}"
            f"{out.late_seconds:7.2f}{out.unfinished:6}{out.cpu_seconds:8.1f}  {why}",
            flush=True,
        )


if __name__ == "__main__":
    main()
