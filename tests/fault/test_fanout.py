"""Nodes that share a model, judged from outside: what the store gave, and what each node has on its disk.

Agents and prefetches are real processes with local roots of their own (tests/servers/cluster.py); the store paces what
it sends, so that they meet. ``TIERCKPT_TEST_SWEEP=full`` makes a hundred of the two rounds of faults at random.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers.cluster import Cluster, Model, Node, Result, dumped, flip
from tests.servers.fleet import Fleet
from tests.servers.origin import Origin
from tests.services import free_port

MiB = 1 << 20
CHUNK_BYTES = MiB
SIZES = {"model-1.safetensors": 14 * MiB + 5, "model-2.safetensors": 9 * MiB, "config.json": 1000, "empty": 0}
STORE_RATE = 24 * MiB
NODES = 5
TRIES = 3
IN_FLIGHT_MAX = 16
"""Chunks that one node has on their way at a time: what it may have asked the store for and lost when it was killed."""
SETTINGS = {"TIERCKPT_CHUNK_SIZE_BYTES": str(CHUNK_BYTES), "TIERCKPT_LOG_LEVEL": "info"}
SWEEP_ROUNDS = 100 if os.environ.get("TIERCKPT_TEST_SWEEP") == "full" else 2


@dataclass
class Bench:
    """A cluster whose agents run from one test to the next; each has a model of its own."""

    cluster: Cluster
    store: Path
    models: int = 0

    def fresh(self, seed: int = 0) -> Model:
        self.models += 1
        model = self.cluster.model = Model.make(self.store / "models", f"m{self.models}", SIZES, seed)
        self.cluster.origin.reset()
        self.cluster.origin.pace(STORE_RATE)
        return model


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("fanout")
    store = folder / "store"
    (store / "models").mkdir(parents=True)
    with Origin.running(store) as origin, Fleet.running(folder / "logs", "tests.fault.fanout_bugs") as fleet:
        cluster = Cluster(fleet, origin, Model(store, "none", {}, 0), folder / "nodes")
        cluster.add([f"127.0.0.1:{free_port()}" for _ in range(NODES)], SETTINGS)
        try:
            cluster.start_agents()
            yield Bench(cluster, store)
        finally:
            cluster.close()


@pytest.fixture
def cluster(bench: Bench) -> Iterator[Cluster]:
    """With a model that nobody has, and every agent alive."""
    bench.fresh()
    yield bench.cluster
    for node in bench.cluster.nodes:
        if node.fetch is not None:
            node.fetch.kill()


def assert_right(results: list[Result]) -> None:
    assert all(result.is_right for result in results), dumped(results)


def store_bytes(cluster: Cluster) -> int:
    return cluster.origin.sent_bytes()


def most_from_store(model: Model, chunks: int = NODES) -> int:
    """1.02 x what it has, and some chunks: at the end two may go for the same one, which is little of a real model."""
    return int(1.02 * model.size_bytes) + chunks * CHUNK_BYTES


def test_four_nodes_together_read_a_model_from_the_store_once(cluster: Cluster) -> None:
    nodes = cluster.nodes[:4]
    cluster.fetch(nodes)
    results = cluster.results(nodes)
    assert_right(results)
    assert store_bytes(cluster) <= most_from_store(cluster.model), dumped(results)
    assert sum(result.source("shared") for result in results) >= cluster.model.size_bytes
    assert sum(result.source("peer") for result in results) >= 3 * cluster.model.size_bytes - 2 * CHUNK_BYTES


def test_who_comes_late_reads_nothing_from_the_store(cluster: Cluster) -> None:
    first, late = cluster.nodes[:2], cluster.nodes[4]
    cluster.fetch(first)
    assert_right(cluster.results(first))
    before = store_bytes(cluster)
    cluster.fetch([late])
    results = cluster.results([late])
    assert_right(results)
    assert store_bytes(cluster) == before, dumped(results)
    assert results[0].source("peer") == cluster.model.size_bytes


def test_what_a_killed_node_owned_comes_from_elsewhere_and_it_goes_on_where_it_stopped(cluster: Cluster) -> None:
    nodes = cluster.nodes[:4]
    victim, *others = nodes
    cluster.fetch(nodes)
    cluster.until_sent(0.4)
    cluster.crash(victim)
    assert_right(cluster.results(others))
    cluster.start_agents([victim])
    cluster.fetch([victim])
    again = cluster.results([victim])
    assert_right(again)
    assert again[0].source("here") > 0, "it had nothing yet when it was killed: the fault has not fired"
    assert store_bytes(cluster) <= most_from_store(cluster.model, IN_FLIGHT_MAX)


def test_an_owner_that_stands_still_holds_nobody_up(cluster: Cluster) -> None:
    nodes = cluster.nodes[:4]
    victim, *others = nodes
    cluster.fetch(nodes)
    cluster.until_sent(0.2)
    cluster.stop(victim)
    try:
        assert_right(cluster.results(others))
    finally:
        cluster.resume(victim)
    assert_right(cluster.results([victim]))
    assert store_bytes(cluster) <= most_from_store(cluster.model, IN_FLIGHT_MAX)
    cluster.await_members(NODES)


def test_a_node_whose_disk_lies_is_found_out_and_nothing_wrong_lands(cluster: Cluster) -> None:
    liar, *others = cluster.nodes[:4]
    damage(cluster, liar)
    cluster.fetch(others)
    results = cluster.results(others)
    assert_right(results)
    assert cluster.model.size_bytes - CHUNK_BYTES <= store_bytes(cluster) <= most_from_store(cluster.model), dumped(
        results
    )


def test_a_peer_that_sends_wrong_bytes_is_banned_and_nothing_wrong_lands(bench: Bench, cluster: Cluster) -> None:
    """On a busy machine all may be fetched before the peer, which has just begun to lie, is asked for anything."""
    liar, other = cluster.nodes[:2]
    for seed in range(1, 1 + TRIES):
        bench.fresh(seed)
        damage(cluster, liar)
        with unverified_agent(cluster, liar):
            cluster.fetch([other])
            results = cluster.results([other])
        assert_right(results)
        if peers := results[0].answer["peers"]:
            assert any(peer["banned"] for peer in peers), results[0].answer
            return
    pytest.fail(f"the peer was asked for nothing in {TRIES} tries")


@contextlib.contextmanager
def unverified_agent(cluster: Cluster, node: Node) -> Iterator[None]:
    """Meanwhile the agent of ``node`` serves what it has without a look at it."""
    cluster.crash(node)
    cluster.start_agents([node], bug="nothing is verified")
    try:
        yield
    finally:
        cluster.crash(node)
        cluster.start_agents([node])


def damage(cluster: Cluster, node: Node) -> None:
    """Let one node have the model, and then flip a bit of every chunk there."""
    cluster.origin.pace(None)
    cluster.fetch([node])
    results = cluster.results([node])
    assert_right(results)
    assert flip(Path(results[0].answer["directory"]), CHUNK_BYTES // 2) >= cluster.model.size_bytes // CHUNK_BYTES
    cluster.origin.reset()


# --- controls ------------------------------------------------------------------------------------------------------


def test_control_nodes_that_ignore_ownership_are_seen_at_the_store(cluster: Cluster) -> None:
    nodes = cluster.nodes[:4]
    cluster.fetch(nodes, bug="ownership ignored")
    results = cluster.results(nodes)
    assert_right(results)
    assert store_bytes(cluster) > most_from_store(cluster.model)


def test_control_nodes_that_verify_nothing_are_found_to_have_wrong_bytes(cluster: Cluster) -> None:
    liar, other = cluster.nodes[:2]
    damage(cluster, liar)
    with unverified_agent(cluster, liar):
        cluster.fetch([other], bug="nothing is verified")
        results = cluster.results([other])
    assert any("wrong bytes" in problem for problem in results[0].problems), dumped(results)


# --- at random -----------------------------------------------------------------------------------------------------


def test_nodes_that_are_killed_and_stopped_at_random_end_whole(bench: Bench) -> None:
    chance, cluster, fired = random.Random(7), bench.cluster, 0
    for number in range(SWEEP_ROUNDS):
        model, fault = bench.fresh(number), chance.choice(FAULTS)
        nodes = chance.sample(cluster.nodes, chance.randint(2, NODES))
        cluster.fetch(nodes)
        cluster.until_sent(chance.random() * 0.8)
        fired += not all(node.fetch is not None and node.fetch.wait(0) for node in nodes)
        print(f"round {number}: {fault.__name__}, {len(nodes)} nodes", flush=True)
        fault(cluster, chance.choice(nodes), chance)
        results, round_ = cluster.results(nodes), f"round {number}, {fault.__name__}"
        assert all(result.is_right for result in results), f"{round_}\n{dumped(results)}"
        assert store_bytes(cluster) <= most_from_store(model, 2 * IN_FLIGHT_MAX), f"{round_}\n{dumped(results)}"
        cluster.await_members(NODES)
    assert fired >= SWEEP_ROUNDS * 0.9, f"only {fired} faults came before everything had ended"


def _kill(cluster: Cluster, node: Node, chance: random.Random) -> None:
    cluster.crash(node)
    time.sleep(chance.random())
    cluster.start_agent(node)
    cluster.fetch([node])


def _kill_the_agent(cluster: Cluster, node: Node, chance: random.Random) -> None:
    assert node.agent is not None
    node.agent.kill()
    time.sleep(chance.random())
    cluster.start_agent(node)


def _stop_a_while(cluster: Cluster, node: Node, chance: random.Random) -> None:
    cluster.stop(node, fetch=chance.random() < 0.5)
    time.sleep(4 * chance.random())
    cluster.resume(node)


FAULTS: list[Callable[[Cluster, Node, random.Random], None]] = [_kill, _kill_the_agent, _stop_a_while]
