"""Nodes that share a model, judged from outside: what the store gave, and what each node has on its disk.

Agents and prefetches are real processes with local roots of their own (tests/servers/cluster.py); the store paces what
it sends, so that they meet. ``TIERCKPT_TEST_SWEEP=full`` makes a hundred of the two rounds of faults at random.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.peer_node import secret_file
from tests.servers.cluster import SECRET, Cluster, Model, Node, Result, dumped, flip
from tests.servers.fleet import Fleet
from tests.servers.origin import Origin
from tests.services import free_port
from tierckpt.config import Settings
from tierckpt.errors import PeerBusyError
from tierckpt.format.manifest import digest_of
from tierckpt.peer.membership import Member
from tierckpt.peer.peer_client import ChunkAnswer, PeerClient

MiB = 1 << 20
CHUNK_BYTES = MiB
SIZES = {"model-1.safetensors": 14 * MiB + 5, "model-2.safetensors": 9 * MiB, "config.json": 1000, "empty": 0}
STORE_RATE = 24 * MiB
NODES = 5
TRIES = 3
CLIENTS = 256
SERVED_SECONDS = 60.0
POLL_SECONDS = 0.02
IN_FLIGHT_MAX = 16
"""Chunks that one node has on their way at a time: what it may have asked the store for and lost when it was killed."""
SETTINGS = {"TIERCKPT_CHUNK_SIZE_BYTES": str(CHUNK_BYTES)}
SWEEP_ROUNDS = 100 if os.environ.get("TIERCKPT_TEST_SWEEP") == "full" else 2


@dataclass
class Bench:
    """A cluster whose agents run from one test to the next; each has a model of its own."""

    cluster: Cluster
    store: Path
    models: int = 0

    def fresh(self, seed: int = 0, sizes: Mapping[str, int] = SIZES) -> Model:
        self.models += 1
        model = self.cluster.model = Model.make(self.store / "models", f"m{self.models}", sizes, seed)
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
        cluster.log_level = "info"
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


def test_four_nodes_together_read_a_model_from_the_store_once(bench: Bench, cluster: Cluster) -> None:
    """Who gets no processor for half a second is done without, and others read its part: so it is tried a few times."""
    nodes, tried = cluster.nodes[:4], []
    for seed in range(TRIES):
        size_bytes = bench.fresh(seed).size_bytes
        cluster.fetch(nodes)
        results = cluster.results(nodes)
        assert_right(results)
        assert sum(result.source("shared") for result in results) >= size_bytes
        tried.append(dumped(results))
        from_peers = sum(result.source("peer") for result in results)
        if store_bytes(cluster) <= most_from_store(cluster.model) and from_peers >= 3 * size_bytes - 2 * CHUNK_BYTES:
            return
    pytest.fail("\n".join([f"never once in {TRIES} tries", *tried]))


@pytest.mark.slow
def test_who_comes_late_reads_nothing_from_the_store(bench: Bench, cluster: Cluster) -> None:
    first, late, tried = cluster.nodes[:2], cluster.nodes[4], []
    for seed in range(TRIES):
        bench.fresh(seed)
        cluster.fetch(first)
        assert_right(cluster.results(first))
        before = store_bytes(cluster)
        cluster.fetch([late])
        results = cluster.results([late])
        assert_right(results)
        if store_bytes(cluster) == before and results[0].source("peer") == cluster.model.size_bytes:
            return
        tried.append(dumped(results))
    pytest.fail("\n".join([f"never once in {TRIES} tries", *tried]))


@pytest.mark.slow
def test_what_a_killed_node_owned_comes_from_elsewhere_and_it_goes_on_where_it_stopped(cluster: Cluster) -> None:
    nodes = cluster.nodes[:4]
    victim, *others = nodes
    cluster.fetch(nodes)
    cluster.until_sent(0.4)
    cluster.until_landed(victim)
    cluster.crash(victim)
    assert_right(cluster.results(others))
    cluster.start_agents([victim])
    cluster.fetch([victim])
    again = cluster.results([victim])
    assert_right(again)
    assert again[0].source("here") > 0, dumped(again)
    assert store_bytes(cluster) <= most_from_store(cluster.model, IN_FLIGHT_MAX)


@pytest.mark.slow
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


@pytest.mark.slow
def test_256_clients_of_one_agent_get_what_it_is_fetching_and_the_store_is_read_once(
    bench: Bench, cluster: Cluster
) -> None:
    model, node = bench.fresh(sizes={"model.safetensors": 24 * MiB}), cluster.nodes[0]
    cluster.origin.pace(3 * MiB)
    cluster.fetch([node])
    got, before_whole = asyncio.run(served_to(CLIENTS, member_of(cluster, node), node.local_root, model))
    assert_right(cluster.results([node]))
    assert got == CLIENTS * 8
    assert before_whole >= CLIENTS // 4, "they came when all had been fetched"
    ranges = sorted((start, stop) for _, _, _, start, stop in cluster.origin.counts()["ranges"])
    assert ranges == [(at, at + CHUNK_BYTES) for at in range(0, model.size_bytes, CHUNK_BYTES)]


def member_of(cluster: Cluster, node: Node) -> Member:
    """As its agent tells of itself."""
    live = cluster.ask(node, op="peers", version=None, directory=None)["live"]
    return next(Member(row["name"], row["address"]) for row in live if row["address"] == node.address)


async def served_to(count: int, member: Member, local_root: Path, model: Model) -> tuple[int, int]:
    """Have each of ``count`` clients get a third of the chunks from ``member``, which fetches them.

    Returns how many came, every byte of them right, and how many of them before the agent had all.
    """
    data = (model.bucket / model.name / "model.safetensors").read_bytes()
    wanted = [digest_of(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    settings = Settings.load(peer_secret_file=secret_file(local_root, SECRET), local_root=local_root)
    clients = [PeerClient(settings, f"client-{number}") for number in range(count)]

    async def version() -> str:
        while True:
            for fill in (await clients[0].status(member))["fills"]:
                if fill["uri"].rstrip("/") == model.uri:
                    return str(fill["version"])
            await asyncio.sleep(POLL_SECONDS)

    async def ask(client: PeerClient, ordinal: int, into: memoryview) -> ChunkAnswer:
        while True:
            with contextlib.suppress(PeerBusyError):
                return await client.chunk(
                    member, fetched, CHUNK_BYTES, ordinal, into, expected=wanted[ordinal], wait_seconds=10
                )

    async def one(number: int) -> list[ChunkAnswer]:
        into = memoryview(bytearray(CHUNK_BYTES))
        return [await ask(clients[number], ordinal, into) for ordinal in range(number % 3, len(wanted), 3)]

    try:
        async with asyncio.timeout(SERVED_SECONDS):
            fetched = await version()
            answers = [answer for some in await asyncio.gather(*map(one, range(count))) for answer in some]
    finally:
        for client in clients:
            await client.close()
    return len(answers), sum(not answer.held.whole for answer in answers)


@pytest.mark.slow
def test_a_node_whose_disk_lies_is_found_out_and_nothing_wrong_lands(cluster: Cluster) -> None:
    liar, *others = cluster.nodes[:4]
    damage(cluster, liar)
    cluster.fetch(others)
    results = cluster.results(others)
    assert_right(results)
    least, most = cluster.model.size_bytes - CHUNK_BYTES, most_from_store(cluster.model, IN_FLIGHT_MAX)
    assert least <= store_bytes(cluster) <= most, dumped(results)


@pytest.mark.slow
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
        if any(peer["banned"] for peer in results[0].answer["peers"]):
            return
        assert results[0].source("peer") < CHUNK_BYTES, results[0].answer  # what is not damaged: the ends of files
    pytest.fail(f"the peer was asked for nothing that is damaged in {TRIES} tries")


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


@pytest.mark.slow
def test_control_nodes_that_ignore_ownership_are_seen_at_the_store(cluster: Cluster) -> None:
    nodes = cluster.nodes[:4]
    cluster.fetch(nodes, bug="ownership ignored")
    results = cluster.results(nodes)
    assert_right(results)
    assert store_bytes(cluster) > most_from_store(cluster.model)


@pytest.mark.slow
def test_control_nodes_that_verify_nothing_are_found_to_have_wrong_bytes(bench: Bench, cluster: Cluster) -> None:
    liar, other = cluster.nodes[:2]
    for seed in range(1, 1 + TRIES):
        bench.fresh(seed)
        damage(cluster, liar)
        with unverified_agent(cluster, liar):
            cluster.fetch([other], bug="nothing is verified")
            results = cluster.results([other])
        if any("wrong bytes" in problem for problem in results[0].problems):
            return
        assert results[0].source("peer") < CHUNK_BYTES, dumped(results)
    pytest.fail(f"the peer was asked for nothing that is damaged in {TRIES} tries")


# --- at random -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nodes_that_are_killed_and_stopped_at_random_end_whole(bench: Bench) -> None:
    chance, cluster, fired = random.Random(7), bench.cluster, 0
    for number in range(2 * SWEEP_ROUNDS):
        if fired == SWEEP_ROUNDS:
            break
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
    assert fired == SWEEP_ROUNDS, f"only {fired} faults came before everything had ended"


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
