"""Peer agents as real processes at loopback addresses: join, leave, kill, stop and recovery."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.agents import get
from tests.agents import until as poll_until
from tests.compat.worker import launch
from tests.peer_node import secret_file
from tests.servers.fleet import Fleet, Process
from tests.services import free_port
from tierckpt.cache.file_set import FileSet, FileSpec
from tierckpt.cache.partial_entry import PartialEntry
from tierckpt.config import Settings
from tierckpt.errors import TierckptError
from tierckpt.ipc.agent_client import AgentClient, AgentUnavailableError
from tierckpt.peer.membership import member_of
from tierckpt.peer.peer_client import PeerClient
from tierckpt.types import Json

SECRET = "canary-4cf1a9d2-known-to-all-nodes"
WAIT_SECONDS = 90.0
CHUNK = 64 << 10

_hosts = itertools.count(random.randrange(1 << 20))


def address() -> str:
    """Return a loopback address that no other test uses."""
    rest, last = divmod(next(_hosts), 254)
    return f"127.{64 + rest // 256 % 64}.{rest % 256}.{last + 1}:7117"


@dataclass
class Node:
    """One node: its settings, its agent process and queries to it."""

    fleet: Fleet
    root: Path
    address: str
    peers: str
    more: dict[str, str] = field(default_factory=dict)
    agent: Process | None = None
    page: str = ""

    def environment(self) -> dict[str, str]:
        return {
            "TIERCKPT_LOCAL_ROOT": str(self.root),
            "TIERCKPT_PEERS": self.peers,
            "TIERCKPT_PEER_LISTEN": self.address,
            "TIERCKPT_PEER_SECRET_FILE": str(secret_file(self.root.parent, SECRET)),
            **self.more,
        }

    def start(self, *options: str) -> Node:
        self.agent = self.fleet.start(["agent", *options], self.environment())
        return self

    def start_with_page(self) -> Node:
        port = free_port()
        self.page = f"http://127.0.0.1:{port}/"
        return self.start("--metrics-port", str(port))

    def get(self, path: str) -> str:
        return get(self.page + path)

    def ask(self, op: str, **more: Any) -> Any:
        with self.contact() as contact:
            return contact.ask({"op": op, **more}, start=False)

    @contextmanager
    def contact(self) -> Iterator[AgentClient]:
        contact = AgentClient(Settings.load(local_root=self.root))
        try:
            yield contact
        finally:
            contact.close()

    @property
    def name(self) -> str:
        return str(self.ask("peers")["me"]["name"])

    def live(self) -> set[str]:
        """Return the addresses of the live nodes as this node sees them; empty while its agent does not answer."""
        try:
            return {row["address"] for row in self.ask("peers")["live"]}
        except TierckptError:
            return set()

    def states(self) -> set[str]:
        return {row["state"] for row in self.ask("peer_status")["members"]}

    def signal(self, number: signal.Signals) -> None:
        assert self.agent is not None
        self.agent.send(number)


NodesOf = Callable[..., list[Node]]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet.running(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
def nodes(fleet: Fleet, tmp_path: Path) -> Iterator[NodesOf]:
    started: list[Node] = []

    def make(count: int, peers: str = "", **more: str) -> list[Node]:
        addresses = [address() for _ in range(count)]
        listed = peers or ",".join(addresses[:2])  # two seeds are enough to find all nodes
        first = len(started)
        started.extend(Node(fleet, tmp_path / f"n{first + at}", it, listed, more) for at, it in enumerate(addresses))
        return started[first:]

    yield make
    for node in started:
        if node.agent is not None:
            node.agent.kill()


def until(condition: Callable[[], bool], what: str) -> None:
    poll_until(condition, what, WAIT_SECONDS)


def agree(some: Sequence[Node]) -> bool:
    everybody = {node.address for node in some}
    return all(node.live() == everybody for node in some)


def connected(nodes: list[Node], *options: str) -> list[Node]:
    """Start the agents of these nodes and wait until they know each other."""
    for node in nodes:
        node.start(*options)
    until(lambda: agree(nodes), f"{len(nodes)} connected agents")
    return nodes


def model(uri: str = "s3://models/tiny", chunks: int = 6) -> tuple[FileSet, bytes]:
    data = random.Random(7).randbytes(chunks * CHUNK)
    return FileSet(uri, (FileSpec("model.bin", "model.bin", len(data), '"etag"'),), CHUNK), data


def write_chunks(filling: PartialEntry, data: bytes, chunks: Sequence[int]) -> None:
    for chunk in chunks:
        filling.store_chunk(0, chunk, data[chunk * CHUNK : (chunk + 1) * CHUNK])


# --- membership ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_eight_agents_join_and_detect_kill_leave_and_return(nodes: NodesOf) -> None:
    *rest, killed, leaving = connected(nodes(8))
    name = killed.name
    killed.signal(signal.SIGKILL)
    until(lambda: agree([*rest, leaving]), "loss of the killed agent")
    leaving.signal(signal.SIGTERM)
    until(lambda: agree(rest), "departure of the stopped agent")
    until(lambda: rest[0].states() == {"live", "dead", "left"}, "dead state of the killed agent only")
    killed.address = address()
    killed.start()
    until(lambda: agree([*rest, killed]), "return of the killed agent at another address")
    assert killed.name == name


def test_node_with_another_secret_is_refused_with_the_reason(nodes: NodesOf) -> None:
    one, other = (node.start() for node in nodes(2))
    (stranger,) = nodes(1, peers=one.peers)
    another = secret_file(stranger.root.parent, "another-secret-of-enough-bytes")
    stranger.more["TIERCKPT_PEER_SECRET_FILE"] = str(another)
    stranger.start()
    until(lambda: agree([one, other]), "two agents with the secret")
    until(lambda: stranger.live() == {stranger.address}, "agent with another secret")
    until(
        lambda: "does not take this node for a member" in stranger.ask("peer_status")["problem"],
        "the reason in the status",
    )
    until(lambda: agree([one, other]), "two agents with the secret")


@pytest.mark.slow
def test_copied_local_root_gets_a_new_node_name(nodes: NodesOf) -> None:
    cluster = nodes(3)
    for node in cluster[1:]:
        (node.root / "agent").mkdir(parents=True, mode=0o700)
        (node.root / "agent" / "node-name").write_text("golden-image-1")
    assert len({node.name for node in connected(cluster)}) == 3


# --- an agent that cannot serve peers continues without them --------------------------------------------------------


@pytest.mark.slow
def test_port_in_use_is_reported_and_bound_when_free(nodes: NodesOf) -> None:
    (node,) = nodes(1)
    host, port = node.address.split(":")
    with socket.create_server((host, int(port))):
        node.start()
        until(lambda: runs(node), "the agent's start")
        until(lambda: "cannot serve" in node.ask("peer_status")["problem"], "the reason in the status")
        with pytest.raises(TierckptError, match=r"has not joined the cluster.*cannot serve"):
            node.ask("peers")
        assert node.ask("status")["errors"] == []
    until(lambda: node.live() == {node.address}, "use of the port")
    assert node.ask("peer_status")["problem"] == ""


@pytest.mark.parametrize(
    ("peers", "listen", "reason"),
    [
        ("169.254.169.254", "", "not an address of a node"),
        ("slurm", "", "SLURM_JOB_NODELIST"),
        ("127.0.0.1", "0.0.0.0:0", "without authentication"),
    ],
)
def test_unusable_peer_settings_are_reported_and_the_agent_continues(
    nodes: NodesOf, peers: str, listen: str, reason: str
) -> None:
    (node,) = nodes(1, peers=peers)
    if listen:
        node.more = {"TIERCKPT_PEER_LISTEN": listen, "TIERCKPT_PEER_SECRET_FILE": ""}
        node.environment = lambda env=node.environment: {k: v for k, v in env().items() if v}  # type: ignore[method-assign]
    node.start()
    until(lambda: runs(node) and reason in node.ask("peer_status")["problem"], "the reason in the status")


def test_agent_announces_its_advertised_address(nodes: NodesOf) -> None:
    (node,) = nodes(1)
    node.start("--advertise", "localhost:9")
    until(lambda: node.live() == {"127.0.0.1:9"}, "the advertised address")


def runs(node: Node) -> bool:
    try:
        return bool(node.ask("status"))
    except AgentUnavailableError:
        return False


# --- requests of local processes ----------------------------------------------------------------------------------


def test_partial_entry_is_served_while_its_process_is_connected(nodes: NodesOf, tmp_path: Path) -> None:
    """The directory is outside the local root, so only the process knows it."""
    (node,) = connected(nodes(1))
    frozen, data = model()
    filling = PartialEntry(tmp_path / "elsewhere" / "model", frozen, preallocate=False)
    write_chunks(filling, data, [2])
    settings = Settings.load(peer_secret_file=secret_file(tmp_path, SECRET))
    member = member_of(node.ask("peers")["me"])

    async def ordinals() -> list[int]:
        client = PeerClient(settings, "tester")
        try:
            report = await client.chunk_report(member, frozen.version, CHUNK)
            return [ordinal for ordinal, _ in report.new]
        finally:
            await client.close()

    assert asyncio.run(ordinals()) == []
    with node.contact() as contact:
        message = {"op": "peers", "version": frozen.version, "directory": str(filling.directory)}
        answer = contact.ask(message, start=False)
        assert answer["interested"] == [answer["me"]["name"]]
        assert asyncio.run(ordinals()) == [2]
        contact.ask({"op": "peers_done", "version": frozen.version}, start=False)
        until(lambda: asyncio.run(ordinals()) == [], "removal on request")
        contact.ask(message, start=False)
        assert asyncio.run(ordinals()) == [2]
    until(lambda: asyncio.run(ordinals()) == [], "removal after the disconnect")
    filling.close()
    with pytest.raises(TierckptError, match="must be absolute"):
        node.ask("peers", version=frozen.version, directory="relative")
    with pytest.raises(TierckptError, match="a version has 32 hex digits"):
        node.ask("peers", version="../etc", directory="/tmp")


@pytest.mark.slow
def test_slow_node_report_reaches_local_fetches_and_expires(nodes: NodesOf) -> None:
    (node,) = connected(nodes(1))
    member, version = member_of(node.ask("peers")["me"]), model()[0].version

    async def tell() -> None:
        client = PeerClient(Settings.load(peer_secret_file=secret_file(node.root.parent, SECRET)), "tester")
        try:
            await client.report_slow(member, version)
        finally:
            await client.close()

    assert node.ask("peers", version=version)["slow_to"] == []
    until(lambda: asyncio.run(tell()) or node.ask("peers", version=version)["slow_to"] == ["tester"], "the report")
    assert node.ask("peers", version="0" * 32)["slow_to"] == []
    until(lambda: node.ask("peers", version=version)["slow_to"] == [], "expiry of the report")


@pytest.mark.slow
def test_heartbeats_do_not_keep_an_idle_agent_but_a_fetch_does(nodes: NodesOf, tmp_path: Path) -> None:
    (staying,) = (node.start() for node in nodes(1))
    (leaving,) = nodes(1, peers=staying.address)
    leaving.start("--leave-when-idle", "--idle-seconds", "3")
    until(lambda: bool(leaving.live()), "the agent's start")
    with leaving.contact() as contact:
        contact.ask({"op": "peers", "version": "0" * 32, "directory": str(tmp_path / "model")}, start=False)
        until(lambda: agree([staying, leaving]), "two connected agents")
        time.sleep(4.5)  # longer than its own idle time
        assert runs(leaving)
    assert leaving.agent is not None
    ended = leaving.agent.wait(WAIT_SECONDS)
    assert ended is not None, "a heartbeat must not keep the agent running"
    assert ended.code == 0
    until(lambda: agree([staying]), "departure of the idle agent")


@pytest.mark.slow
@pytest.mark.distributed
def test_torchrun_job_introduces_the_agents_of_its_nodes(nodes: NodesOf) -> None:
    cluster = [node.start() for node in nodes(3, peers="torchrun")]
    until(lambda: all(node.live() == {node.address} for node in cluster), "three unconnected agents")
    launch("tests.integration.node_scenarios:meet", 3, roots=[str(node.root) for node in cluster])
    until(lambda: agree(cluster), "three connected agents")


def test_secret_reaches_a_started_agent_and_is_not_exposed(nodes: NodesOf, tmp_path: Path) -> None:
    (known,) = (node.start() for node in nodes(1))
    own = address()
    settings = Settings.load(
        local_root=tmp_path / "demand",
        peers=known.address,
        peer_listen=own,
        peer_secret_file=secret_file(tmp_path, SECRET),
    )
    contact = AgentClient(settings)
    try:
        until(lambda: len(contact.ask({"op": "peers"})["live"]) == 2, "two connected agents")
        pid = contact.ask({"op": "status"})["pid"]
        outputs = [json.dumps(contact.ask({"op": op})) for op in ("status", "peers", "peer_status")]
        outputs += [Path(f"/proc/{pid}/{name}").read_text() for name in ("cmdline", "environ")]
        outputs += [
            (tmp_path / "demand" / "agent" / "agent.log").read_text(),
            repr(settings),
            settings.model_dump_json(),
        ]
        assert all(SECRET not in text for text in outputs)
    finally:
        contact.ask({"op": "stop"})
        contact.close()


# --- output for people --------------------------------------------------------------------------------------------


def output_of(process: Process) -> Json:
    ended = process.wait(WAIT_SECONDS)
    assert ended is not None, process.log()
    assert ended.code == 0, process.log()
    return process.answer()


def test_status_shows_members_and_survivable_losses(nodes: NodesOf, fleet: Fleet) -> None:
    cluster = connected(nodes(4, TIERCKPT_REPLICAS="2"), "--network-bytes-per-second", "25MB")
    node, version = cluster[0], "ab" * 16
    with node.contact() as contact:
        report = {"by_source": {"peer": 3000, "shared": 1000}, "by_peer": {cluster[1].name: 3000}}
        for _ in range(2):  # each replaces the previous one
            contact.ask({"op": "fetched", "version": version, "report": report}, start=False)

    def with_live_members() -> Json | None:
        found = output_of(fleet.start(["status", "--peers", "--json"], node.environment()))
        return found if [row["state"] for row in found["members"]] == ["live"] * 3 else None

    document = poll_until(with_live_members, "live members", WAIT_SECONDS)
    assert {row["address"] for row in document["members"]} == {other.address for other in cluster[1:]}
    assert {row["weight"] for row in document["members"]} == {25e6}
    assert document["fetched_bytes_by_source"] == {"peer": 3000, "shared": 1000}
    assert sum(row["fetched_bytes"] for row in document["members"]) == 3000
    # Two of four lost, in groups of two: 2 of 6 pairs are groups. Three lost: they always include a group.
    assert document["survival"] == {"1": 1.0, "2": pytest.approx(4 / 6), "3": 0.0}

    def shown() -> str:
        people = fleet.start(["status", "--peers"], node.environment())
        assert people.wait(WAIT_SECONDS)
        return people.out.read_text()

    text = poll_until(lambda: text if "3 live" in (text := shown()) else None, "live members", WAIT_SECONDS)
    for word in ("2.9 KiB from peer", "2 at once: 66.67 %", cluster[1].address):
        assert word in text


def test_status_without_an_agent(nodes: NodesOf, fleet: Fleet) -> None:
    (node,) = nodes(1)
    assert "no agent runs" in output_of(fleet.start(["status", "--peers", "--json"], node.environment()))["problem"]


@pytest.mark.slow
def test_rollout_is_watched_until_all_nodes_are_complete(nodes: NodesOf, fleet: Fleet) -> None:
    one, other = cluster = connected(nodes(2))
    frozen, data = model()
    fillings = [PartialEntry(node.root / "cache" / frozen.name, frozen, preallocate=False) for node in cluster]
    write_chunks(fillings[0], data, [0, 1, 2])
    watching = fleet.start(["prefetch", "--watch"], one.environment())
    counting = fleet.start(["prefetch", "--watch", "--json"], other.environment())
    until(lambda: "25 % on 2 nodes" in watching.log(), "a progress line")
    for filling, chunks in zip(fillings, ([3, 4, 5], range(6)), strict=True):
        write_chunks(filling, data, chunks)
        assert filling.publish()
        filling.close()
    document = output_of(counting)
    assert (document["done"], document["uri"], document["share"]) == (True, frozen.uri, 1.0)
    assert {row["name"]: row["chunks"] for row in document["nodes"]} == {one.name: 6, other.name: 6}
    ended = watching.wait(WAIT_SECONDS)
    assert ended is not None
    assert ended.code == 0
    assert "100 % on 2 nodes" in watching.out.read_text()


@pytest.mark.slow
def test_page_shows_a_rollout_by_nodes_and_chunks_and_members(nodes: NodesOf) -> None:
    one, other = nodes(2)
    cluster = [one.start_with_page(), other.start()]
    until(lambda: agree(cluster), "two connected agents")
    until(lambda: 'tierckpt_peer_members{state="live"} 1.0' in one.get("metrics"), "the gauge")
    frozen, data = model()
    fillings = [PartialEntry(node.root / "cache" / frozen.name, frozen, preallocate=False) for node in cluster]
    write_chunks(fillings[0], data, [0, 1, 2])
    write_chunks(fillings[1], data, [5])
    with urllib.request.urlopen(f"{one.page}events", timeout=60) as events:
        for line in events:
            document = json.loads(line[6:]) if line.startswith(b"data: ") else {}
            rollout = document.get("rollout") or {"nodes": []}
            if {row["name"]: row["cells"] for row in rollout["nodes"]} != {one.name: "999000", other.name: "000009"}:
                continue
            if [row["state"] for row in document["peers"]["members"]] == ["live"]:
                break
    assert rollout["uri"] == frozen.uri
    assert [row["state"] for row in document["peers"]["members"]] == ["live"]
    assert document["peers"]["me"]["name"] == one.name
    for filling in fillings:
        filling.close()


@pytest.mark.slow
def test_watch_on_every_node_ends_when_all_nodes_are_complete(nodes: NodesOf, fleet: Fleet, tmp_path: Path) -> None:
    """The README's commands, the same one on each node."""
    cluster = connected(nodes(2))
    store = tmp_path / "store"
    store.mkdir()
    (store / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    commands = [
        fleet.start(["prefetch", f"file://{store}", "--watch", "--json"], node.environment()) for node in cluster
    ]
    for command in commands:
        document = output_of(command)
        assert document["done"] is True
        fetched = Path(document["fetched"]["directory"])
        assert (fetched / "model.safetensors").read_bytes() == (store / "model.safetensors").read_bytes()


def test_watch_ends_with_the_error_of_the_fetch(nodes: NodesOf, fleet: Fleet, tmp_path: Path) -> None:
    (node,) = [node.start() for node in nodes(1)]
    ended = fleet.start(["prefetch", f"file://{tmp_path}/none", "--watch"], node.environment()).wait(WAIT_SECONDS)
    assert ended is not None
    assert ended.code == 4
