"""The cases of bench/fanout.py, and their counters."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fanning.network import ORIGIN, Network
from tests.servers.cluster import Cluster, Model, Node, Result, dumped, flip
from tests.servers.fleet import Fleet
from tests.servers.origin import Origin

PORT, STORE_PORT = 7117, 9000
SLOW = 0.1
"""Of the others' rate."""
DEADLINE_FACTOR, DEADLINE_EXTRA_SECONDS = 6.0, 60.0
MEMBERS_SECONDS = 90.0


@dataclass(frozen=True)
class Setup:
    """A case, and the sizes it is run with."""

    case: str
    nodes: int
    rate: float
    """B: bytes per second of each node's link, each way."""
    origin_factor: float
    """R / B."""
    size_bytes: int
    chunk_bytes: int

    @property
    def bound_seconds(self) -> float:
        return self.size_bytes / (self.rate * min(1.0, self.origin_factor))

    @property
    def direct_seconds(self) -> float:
        """Expected seconds without sharing."""
        return max(self.size_bytes / self.rate, self.nodes * self.size_bytes / (self.rate * self.origin_factor))


@dataclass
class World:
    """The objects that a case can act on."""

    setup: Setup
    network: Network
    cluster: Cluster
    began: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)

    def number(self, node: Node) -> int:
        return self.cluster.nodes.index(node) + 1


Play = Callable[[World], Sequence[Result]]
"""Runs a case. Returns the results of the timed nodes."""


def shared(world: World) -> Sequence[Result]:
    world.cluster.fetch()
    return world.cluster.results()


def slow_uplink(world: World) -> Sequence[Result]:
    """One node sends at a tenth of the rate, unknown to the others."""
    world.network.shape(1, world.setup.rate * SLOW, world.setup.rate)
    return shared(world)


def slow(world: World) -> Sequence[Result]:
    """One node is slow both ways: only the others' time counts; its own may take ten times as long."""
    world.network.shape(1, world.setup.rate * SLOW)
    world.cluster.deadline_seconds = 2 * world.setup.bound_seconds / SLOW
    world.cluster.fetch()
    others = world.cluster.results(world.cluster.nodes[1:])
    world.notes["slow_node_seconds"] = world.cluster.results(world.cluster.nodes[:1])[0].seconds
    return others


def dead(world: World) -> Sequence[Result]:
    """A node is cut off during the transfer: its chunks must come from other nodes."""
    world.cluster.fetch()
    world.notes["dead_after_share"] = _when(world, 0.05)
    world.network.cut(1)
    return world.cluster.results(world.cluster.nodes[1:])


def stopped(world: World) -> Sequence[Result]:
    """The same, but the node still accepts connections: its processes are stopped."""
    world.cluster.fetch()
    world.notes["stopped_after_share"] = _when(world, 0.05)
    world.cluster.stop(world.cluster.nodes[0])
    return world.cluster.results(world.cluster.nodes[1:])


def late(world: World) -> Sequence[Result]:
    """One node starts when the others have half of the model. Its own time counts from its start."""
    *early, joiner = world.cluster.nodes
    world.cluster.fetch(early)
    _at(world, 0.5)
    world.cluster.fetch([joiner])
    results = world.cluster.results()
    world.notes["joiner_seconds"] = results[-1].seconds
    world.notes["joiner_from_store_bytes"] = _sent_to(world, joiner)
    return results[:-1]


def partition(world: World) -> Sequence[Result]:
    """One half of the nodes does not reach the other for a third of the time. All of them reach the store."""
    half = world.setup.nodes // 2
    one, other = range(1, half + 1), range(half + 1, world.setup.nodes + 1)
    world.cluster.fetch()
    _at(world, 0.2)
    world.network.part(one, other)
    world.notes["parted_at_seconds"] = time.monotonic() - world.began
    time.sleep(world.setup.bound_seconds / 3)
    world.network.heal(one, other)
    world.notes["healed_at_seconds"] = time.monotonic() - world.began
    return world.cluster.results()


def killed(world: World) -> Sequence[Result]:
    """kill -9 of a node's processes at 40 % of the time; they restart a second later."""
    victim = world.cluster.nodes[0]
    world.cluster.fetch()
    _at(world, 0.4)
    world.cluster.crash(victim)
    time.sleep(1.0)
    world.cluster.start_agent(victim)
    world.cluster.fetch([victim])
    results = world.cluster.results()
    world.notes["victim_seconds_again"] = results[0].seconds
    world.notes["victim_found_bytes"] = results[0].source("here")
    return results[1:]


def corrupt(world: World) -> Sequence[Result]:
    """One node has the model with every chunk damaged on its disk before the others start."""
    liar, *others = world.cluster.nodes
    world.cluster.fetch([liar])
    first = world.cluster.results([liar])[0]
    if not first.is_right:
        return [first]
    world.notes["bits_flipped"] = flip(Path(first.answer["directory"]), world.setup.chunk_bytes)
    world.cluster.origin.reset()
    world.began = time.monotonic()
    world.cluster.fetch(others)
    return world.cluster.results(others)


PLAYS: dict[str, Play] = {
    "direct": shared,
    "shared": shared,
    "slow uplink": slow_uplink,
    "slow": slow,
    "dead": dead,
    "stopped": stopped,
    "late": late,
    "partition": partition,
    "killed": killed,
    "corrupt": corrupt,
}


def run(setup: Setup, fleet: Fleet, model: Model, folder: Path) -> dict[str, Any]:
    """Run one case in its own network. Returns its figures."""
    with _world(setup, fleet, model, folder) as world:
        agents_before = world.cluster.agents_cpu_seconds()
        world.cluster.origin.reset()
        world.began = time.monotonic()
        try:
            results = PLAYS[setup.case](world)
        except TimeoutError as error:
            return {**_of(setup), "error": str(error), "logs": _logs(world)}
        seconds = max(result.seconds for result in results)
        agents = world.cluster.agents_cpu_seconds() - agents_before
        row = _row(world, results, seconds, agents)
        return row if not row["problems"] else {**row, "told": dumped(results), "logs": _logs(world)}


@contextmanager
def _world(setup: Setup, fleet: Fleet, model: Model, folder: Path) -> Iterator[World]:
    store = model.bucket.parent
    with Network.running(setup.nodes, setup.rate, setup.rate * setup.origin_factor) as network:
        at = network.address(ORIGIN)
        with Origin.running(store, host=at, port=STORE_PORT, within=network.within(ORIGIN)) as origin:
            cluster = Cluster(fleet, origin, model, folder)
            cluster.deadline_seconds = DEADLINE_FACTOR * setup.direct_seconds + DEADLINE_EXTRA_SECONDS
            cluster.agent_options = ("--network-bytes-per-second", str(int(setup.rate)))
            numbers = range(1, setup.nodes + 1)
            cluster.add(
                [f"{network.address(number)}:{PORT}" for number in numbers],
                {"TIERCKPT_CHUNK_SIZE_BYTES": str(setup.chunk_bytes)},
                namespaces=[network.namespace(number) for number in numbers],
                peers=setup.case != "direct",
            )
            try:
                if setup.case != "direct":
                    cluster.start_agents(timeout_seconds=MEMBERS_SECONDS)
                yield World(setup, network, cluster)
            finally:
                cluster.close()


def _when(world: World, share: float) -> float:
    """Wait until the store has sent this share of the model. Returns the share sent."""
    deadline_seconds = world.cluster.deadline_seconds
    return world.cluster.until_sent(share, deadline_seconds) / world.setup.size_bytes


def _at(world: World, share: float) -> None:
    """Wait until this share of the shortest time has passed."""
    time.sleep(max(0.0, world.began + share * world.setup.bound_seconds - time.monotonic()))


def _sent_to(world: World, node: Node) -> int:
    """Return the bytes that a node has requested from the store."""
    address = world.network.address(world.number(node))
    return sum(
        stop - start for _, client, _, start, stop in world.cluster.origin.counts()["ranges"] if client == address
    )


def _row(world: World, results: Sequence[Result], seconds: float, agents_cpu_seconds: float) -> dict[str, Any]:
    counts = world.cluster.origin.counts()
    lost = {world.cluster.nodes[0].name} if world.setup.case == "dead" else set()  # cut off: it must fail
    nodes = [node for node in world.cluster.nodes if node.name not in lost]
    ended = [node for node in nodes if node.fetch is not None and node.fetch.wait(0.0) is not None]
    everybody = [*world.cluster.results(ended), *(result for result in results if result.code is None)]
    sources: dict[str, int] = {}
    fallbacks: Counter[str] = Counter()
    for one in everybody:
        fallbacks.update(one.answer.get("fallbacks", {}))
        for name, value in one.answer.get("bytes_by_source", {}).items():
            sources[name] = sources.get(name, 0) + (value if isinstance(value, int) else 0)
    return {
        **_of(world.setup),
        "seconds": seconds,
        "times_bound": seconds / world.setup.bound_seconds,
        "store_times_size": counts["sent_bytes"] / world.setup.size_bytes,
        "store_requests": counts["requests"],
        "bytes_by_source": sources,
        "fallbacks": dict(fallbacks),
        "cpu_seconds": sum(one.cpu_seconds for one in everybody) + agents_cpu_seconds,
        "agents_cpu_seconds": agents_cpu_seconds,
        "seconds_of_nodes": [one.seconds for one in results],
        "problems": [problem for one in everybody for problem in _problems(one)],
        "dropped_segments": world.network.dropped(),
        "notes": world.notes,
    }


def _problems(result: Result) -> list[str]:
    code = [] if result.code == 0 else [f"{result.node} ended with {result.code}"]
    return code + result.problems


def _of(setup: Setup) -> dict[str, Any]:
    return {
        "case": setup.case,
        "nodes": setup.nodes,
        "origin_factor": setup.origin_factor,
        "rate_bytes_per_second": setup.rate,
        "size_bytes": setup.size_bytes,
        "chunk_bytes": setup.chunk_bytes,
        "bound_seconds": setup.bound_seconds,
    }


def _logs(world: World) -> str:
    with suppress(OSError):
        return "\n".join(node.log() for node in world.cluster.nodes)
    return ""
