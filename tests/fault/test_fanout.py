"""Nodes that share a model: checks the bytes sent by the store and the files on each node's disk.

Agents and prefetches are processes with their own local roots (tests/servers/cluster.py). The store limits its rate, so
that the prefetches overlap. ``TIERCKPT_TEST_SWEEP=full`` runs 100 rounds of random faults instead of two.
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
from typing import Any

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
SERVED_SECONDS = 150.0
POLL_SECONDS = 0.02
IN_FLIGHT_MAX = 16
"""Chunks in flight on one node, which the store may have sent in vain to a killed node."""
SETTINGS = {"TIERCKPT_CHUNK_SIZE_BYTES": str(CHUNK_BYTES)}
SWEEP_ROUNDS = 100 if os.environ.get("TIERCKPT_TEST_SWEEP") == "full" else 2


@dataclass
class Bench:
    """A cluster whose agents live for the module; each test has its own model."""

    cluster: Cluster
    store: Path
    models: int = 0

    def new_model(self, seed: int = 0, sizes: Mapping[str, int] = SIZES) -> Model:
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
    """A cluster with live agents and a model that no node has."""
    bench.new_model()
    yield bench.cluster
    for node in bench.cluster.nodes:
        if node.fetch is not None:
            node.fetch.kill()


def whole(cluster: Cluster, nodes: list[Node]) -> list[Result]:
    """Wait for the fetches of ``nodes``, and check every byte of each."""
    results = cluster.results(nodes)
    assert all(result.is_right for result in results), dumped(results)
    return results


def fetched(cluster: Cluster, nodes: list[Node], **options: Any) -> list[Result]:
    cluster.fetch(nodes, **options)
    return whole(cluster, nodes)


def store_bytes_max(model: Model, chunks: int = NODES) -> int:
    """Return 1.02 x the model's size plus ``chunks``: two nodes may fetch the same chunk at the end."""
    return int(1.02 * model.size_bytes) + chunks * CHUNK_BYTES


def tries(bench: Bench, chunks: int) -> Iterator[None]:
    """Yield with a new model until the store has sent few enough bytes after all; fail after several tries.

    If a node gets no CPU for half a second, others fetch its part.
    """
    sent_bytes = []
    for seed in range(TRIES):
        bench.new_model(seed)
        yield
        sent_bytes.append(bench.cluster.origin.sent_bytes())
        if sent_bytes[-1] <= store_bytes_max(bench.cluster.model, chunks):
            return
    pytest.fail(f"the store sent too many bytes in each try: {sent_bytes}")


@pytest.mark.slow
def test_four_nodes_read_a_model_from_the_store_once(bench: Bench, cluster: Cluster) -> None:
    """Several tries: if a node gets no CPU for half a second, others fetch its part."""
    nodes, failures = cluster.nodes[:4], []
    for seed in range(TRIES):
        size_bytes = bench.new_model(seed).size_bytes
        results = fetched(cluster, nodes)
        assert sum(result.source("shared") for result in results) >= size_bytes
        failures.append(dumped(results))
        from_peers = sum(result.source("peer") for result in results)
        if (
            cluster.origin.sent_bytes() <= store_bytes_max(cluster.model)
            and from_peers >= 3 * size_bytes - 2 * CHUNK_BYTES
        ):
            return
    pytest.fail("\n".join([f"not in {TRIES} tries", *failures]))


@pytest.mark.slow
def test_late_node_reads_nothing_from_the_store(bench: Bench, cluster: Cluster) -> None:
    first, late, failures = cluster.nodes[:2], cluster.nodes[4], []
    for seed in range(TRIES):
        bench.new_model(seed)
        fetched(cluster, first)
        before = cluster.origin.sent_bytes()
        results = fetched(cluster, [late])
        if cluster.origin.sent_bytes() == before and results[0].source("peer") == cluster.model.size_bytes:
            return
        failures.append(dumped(results))
    pytest.fail("\n".join([f"not in {TRIES} tries", *failures]))


@pytest.mark.slow
def test_killed_node_is_replaced_and_resumes_its_own_fetch(bench: Bench, cluster: Cluster) -> None:
    nodes = cluster.nodes[:4]
    victim, *others = nodes
    for _ in tries(bench, IN_FLIGHT_MAX):
        cluster.fetch(nodes)
        cluster.until_sent(0.4)
        cluster.until_landed(victim)
        cluster.crash(victim)
        whole(cluster, others)
        cluster.start_agents([victim])
        again = fetched(cluster, [victim])
        assert again[0].source("here") > 0, dumped(again)


@pytest.mark.slow
def test_stopped_owner_does_not_block_other_nodes(bench: Bench, cluster: Cluster) -> None:
    nodes = cluster.nodes[:4]
    victim, *others = nodes
    for _ in tries(bench, IN_FLIGHT_MAX):
        cluster.fetch(nodes)
        cluster.until_sent(0.2)
        cluster.stop(victim)
        try:
            whole(cluster, others)
        finally:
            cluster.resume(victim)
        whole(cluster, [victim])
        cluster.await_members(NODES)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_agent_serves_256_clients_during_its_only_read_of_the_store(bench: Bench, cluster: Cluster) -> None:
    model, node = bench.new_model(sizes={"model.safetensors": 24 * MiB}), cluster.nodes[0]
    cluster.origin.pace(3 * MiB)
    cluster.fetch([node])
    got, before_whole = asyncio.run(requests_during_fetch(CLIENTS, member_of(cluster, node), node.local_root, model))
    whole(cluster, [node])
    assert got == CLIENTS * 8
    assert before_whole >= CLIENTS // 4, "the clients came after the fetch"
    ranges = sorted((start, stop) for _, _, _, start, stop in cluster.origin.counts()["ranges"])
    assert ranges == [(at, at + CHUNK_BYTES) for at in range(0, model.size_bytes, CHUNK_BYTES)]


def member_of(cluster: Cluster, node: Node) -> Member:
    """Return the node's member entry, as its agent reports it."""
    live = cluster.ask(node, op="peers", version=None, directory=None)["live"]
    return next(Member(row["name"], row["address"]) for row in live if row["address"] == node.address)


async def requests_during_fetch(count: int, member: Member, local_root: Path, model: Model) -> tuple[int, int]:
    """Let each of ``count`` clients get a third of the chunks from ``member`` during its fetch.

    Returns the number of answers, all verified, and the number sent before the agent had the whole model.
    """
    data = (model.bucket / model.name / "model.safetensors").read_bytes()
    expected = [digest_of(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
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
                    member, fetched, CHUNK_BYTES, ordinal, into, expected=expected[ordinal], wait_seconds=10
                )

    async def one(number: int) -> list[ChunkAnswer]:
        into = memoryview(bytearray(CHUNK_BYTES))
        return [await ask(clients[number], ordinal, into) for ordinal in range(number % 3, len(expected), 3)]

    try:
        async with asyncio.timeout(SERVED_SECONDS):
            fetched = await version()
            answers = [answer for some in await asyncio.gather(*map(one, range(count))) for answer in some]
    finally:
        for client in clients:
            await client.close()
    return len(answers), sum(not answer.held.whole for answer in answers)


@pytest.mark.slow
def test_damaged_files_of_a_peer_are_detected_before_they_are_served(bench: Bench, cluster: Cluster) -> None:
    damaged, *others = cluster.nodes[:4]
    for _ in tries(bench, IN_FLIGHT_MAX):
        damage(cluster, damaged)
        results = fetched(cluster, others)
        assert cluster.origin.sent_bytes() >= cluster.model.size_bytes - CHUNK_BYTES, dumped(results)


@pytest.mark.slow
def test_peer_that_sends_wrong_bytes_is_banned(bench: Bench, cluster: Cluster) -> None:
    for result in results_with_a_lying_peer(bench, cluster):
        assert result.is_right, dumped([result])
        if any(peer["banned"] for peer in result.answer["peers"]):
            return


def results_with_a_lying_peer(bench: Bench, cluster: Cluster, **options: Any) -> Iterator[Result]:
    """Yield a node's results of fetches; the other node has damaged files and an agent without verification.

    Several tries: on a loaded machine the fetch may end before the damaged peer gets a request.
    """
    damaged, other = cluster.nodes[:2]
    for seed in range(1, 1 + TRIES):
        bench.new_model(seed)
        damage(cluster, damaged)
        cluster.crash(damaged)
        cluster.start_agents([damaged], bug="no verification")
        try:
            cluster.fetch([other], **options)
            [result] = cluster.results([other])
        finally:
            cluster.crash(damaged)
            cluster.start_agents([damaged])
        yield result
        assert result.source("peer") < CHUNK_BYTES, dumped([result])  # only undamaged ends of files
    pytest.fail(f"no damaged chunk was requested from the peer in {TRIES} tries")


def damage(cluster: Cluster, node: Node) -> None:
    """Let ``node`` fetch the model, then flip a bit of each of its chunks."""
    cluster.origin.pace(None)
    results = fetched(cluster, [node])
    assert flip(Path(results[0].answer["directory"]), CHUNK_BYTES // 2) >= cluster.model.size_bytes // CHUNK_BYTES
    cluster.origin.reset()


# --- controls ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_control_ignored_ownership_causes_more_store_reads(cluster: Cluster) -> None:
    nodes = cluster.nodes[:4]
    fetched(cluster, nodes, bug="ownership ignored")
    assert cluster.origin.sent_bytes() > store_bytes_max(cluster.model)


@pytest.mark.slow
def test_control_missing_verification_leaves_wrong_bytes(bench: Bench, cluster: Cluster) -> None:
    for result in results_with_a_lying_peer(bench, cluster, bug="no verification"):
        if any("wrong bytes" in problem for problem in result.problems):
            return


# --- random faults -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nodes_killed_and_stopped_at_random_end_with_whole_models(bench: Bench) -> None:
    rng, cluster, interrupted, excesses = random.Random(7), bench.cluster, 0, list[str]()
    for number in range(2 * SWEEP_ROUNDS):
        if interrupted == SWEEP_ROUNDS:
            break
        model, fault = bench.new_model(number), rng.choice(FAULTS)
        nodes = rng.sample(cluster.nodes, rng.randint(2, NODES))
        cluster.fetch(nodes)
        cluster.until_sent(rng.random() * 0.8)
        cluster.origin.pace(MiB)  # the fetches go on until the fault
        interrupted += not all(node.fetch is not None and node.fetch.wait(0) for node in nodes)
        print(f"round {number}: {fault.__name__}, {len(nodes)} nodes", flush=True)
        fault(cluster, rng.choice(nodes), rng)
        cluster.origin.pace(STORE_RATE)
        results, round_ = cluster.results(nodes), f"round {number}, {fault.__name__}"
        assert all(result.is_right for result in results), f"{round_}\n{dumped(results)}"
        if cluster.origin.sent_bytes() > store_bytes_max(model, 2 * IN_FLIGHT_MAX):
            excesses.append(f"{round_}: the store sent too many bytes\n{dumped(results)}")
        cluster.await_members(NODES)
    assert len(excesses) < min(TRIES, SWEEP_ROUNDS), "\n".join(excesses)  # as in ``tries``
    assert interrupted == SWEEP_ROUNDS, f"only {interrupted} faults interrupted a fetch"


def _kill(cluster: Cluster, node: Node, rng: random.Random) -> None:
    cluster.crash(node)
    time.sleep(rng.random())
    cluster.start_agent(node)
    cluster.fetch([node])


def _kill_the_agent(cluster: Cluster, node: Node, rng: random.Random) -> None:
    assert node.agent is not None
    node.agent.kill()
    time.sleep(rng.random())
    cluster.start_agent(node)


def _pause(cluster: Cluster, node: Node, rng: random.Random) -> None:
    cluster.stop(node, fetch=rng.random() < 0.5)
    time.sleep(4 * rng.random())
    cluster.resume(node)


FAULTS: list[Callable[[Cluster, Node, random.Random], None]] = [_kill, _kill_the_agent, _pause]
