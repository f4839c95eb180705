"""Peers as a source: a checkpoint is found, read and prefetched from a node after its local commit.

Agents are real processes with separate local roots. Nothing is drained here: shared storage is empty or holds other
data of the test, so only peers can have served the reads. A silent node may have the newest checkpoint: it is waited
for and named, or the restore raises (N4).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.agents import start_after
from tests.command_line import CommandLine
from tests.peer_node import secret_file
from tests.servers.fleet import Fleet
from tests.servers.nodes import PATIENT, Node, Nodes, cluster
from tests.services import free_port
from tests.states import load, same, save, small_state, zeros_like
from tierckpt import Checkpointer
from tierckpt.checkpoint import peer_copies
from tierckpt.checkpoint.catalog import Checkpoint
from tierckpt.checkpoint.local_commit import is_drained, read_local_manifest
from tierckpt.checkpoint.select import Selector
from tierckpt.client import Client, close_all, get_client
from tierckpt.config import Settings
from tierckpt.errors import CheckpointNotFoundError, PermissionDeniedError, StoreUnavailableError
from tierckpt.format.layout import Location, parse_uri
from tierckpt.mover import Mover
from tierckpt.peer import peer_catalog as cluster_module
from tierckpt.peer.membership import Member
from tierckpt.peer.peer_catalog import PeerReplicas
from tierckpt.stores import retry
from tierckpt.types import Tier

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet.running(tmp_path_factory.mktemp("agents"), "tests.servers.nodes") as fleet:
        yield fleet


@pytest.fixture(scope="module")
def nodes(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Three nodes that drain nothing; each test uses its own run."""
    with cluster(fleet, tmp_path_factory.mktemp("nodes"), 3, drain=False, chunk_size_bytes=65536, **PATIENT) as running:
        yield running
        close_all()


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "shared" / "run")


def local_files(node: Node, uri: str) -> dict[str, str]:
    """Map each file of the node's copy that stock PyTorch would see to its digest."""
    directory = node.directory(uri)
    files = [path for path in directory.iterdir() if path.is_file()] if directory.exists() else []
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def save_on(nodes: Nodes, index: int, uri: str, state: dict[str, Any]) -> None:
    """Save on one node and wait until another node finds the step."""
    save(uri, state, settings=nodes[index].settings)
    await_holders(nodes, index, uri, 1, nodes[(index + 1) % 3])


def await_holders(nodes: Nodes, index: int, uri: str, count: int, by: Node) -> None:
    """Wait until a node finds ``count`` holders of node ``index``'s data. Agents scan their disks twice a second."""
    location, manifest = parse_uri(uri), read_local_manifest(nodes[index].directory(uri))
    assert manifest is not None
    client = Client(by.settings)

    async def holders(mover: Mover) -> int:
        assert mover.peers is not None
        attempts = (await mover.peers.committed(location.parent)).get(location.name, {})
        return len(attempts.get(manifest.attempt, ()))

    try:
        nodes.until(lambda: client.run(holders(client.mover)) >= count, f"{uri} to be found")
    finally:
        client.close()
        close_all()


@pytest.mark.slow
def test_rollout_node_prefetches_a_step_from_the_training_node(nodes: Nodes, uri: str) -> None:
    trainer, rollout = nodes[0], nodes[2]
    step = f"{uri}/step-1"
    save_on(nodes, 0, step, small_state(1))
    directory = tierckpt.prefetch(step, settings=rollout.settings)
    assert directory == rollout.directory(step)
    assert local_files(rollout, step) == local_files(trainer, step)
    assert not Path(step).exists(), "shared storage must be empty"
    stock = zeros_like(small_state(1))
    dcp.load(stock, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    assert same(stock, small_state(1))
    manifest = read_local_manifest(directory)
    assert manifest is not None
    assert not is_drained(directory, manifest.attempt), "the copy must not count as drained, or it may be evicted"
    trainer.kill()
    try:
        assert same(load(step, zeros_like(small_state(1)), settings=rollout.settings), small_state(1))
    finally:
        trainer.start()
        nodes.meet(3)


@pytest.mark.slow
def test_two_rollout_nodes_share_the_chunks_of_a_large_step(nodes: Nodes, uri: str) -> None:
    """Large enough for nodes to exchange chunks during the fetch; shared storage stays empty."""
    step = f"{uri}/step-1"
    state = {f"t{index}": torch.randn(200_000, generator=torch.Generator().manual_seed(index)) for index in range(6)}
    save_on(nodes, 0, step, state)
    with ThreadPoolExecutor() as pool:
        done = [pool.submit(tierckpt.prefetch, step, settings=nodes[index].settings) for index in (1, 2)]
    assert [future.result() for future in done] == [nodes[1].directory(step), nodes[2].directory(step)]
    assert local_files(nodes[1], step) == local_files(nodes[2], step) == local_files(nodes[0], step)
    assert not Path(step).exists()


def test_cli_restores_a_step_from_a_peer(
    nodes: Nodes, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    save_on(nodes, 0, f"{uri}/step-3", small_state(3))
    for name, value in nodes[1].env.items():
        monkeypatch.setenv(name, value)
    document = cli.answer("restore", uri, "--to", tmp_path / "out")
    assert document["shared_bytes"] == 0 < document["peer_bytes"]
    state = zeros_like(small_state(3))
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    assert same(state, small_state(3))


def test_cli_verifies_copies_on_peers(
    nodes: Nodes, uri: str, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    step = f"{uri}/step-4"
    save_on(nodes, 0, step, small_state(4))

    def verify(node: Node) -> dict[str, Any]:
        for name, value in node.env.items():
            monkeypatch.setenv(name, value)
        found = cli.answer("verify", step, "--read-data")
        close_all()
        return found

    manifest = read_local_manifest(nodes[0].directory(step))
    assert manifest is not None
    found = verify(nodes[1])
    assert (found["tiers"], found["problems"]) == (["peer"], [])
    assert found["checked_bytes"] == manifest.size_bytes
    tierckpt.prefetch(step, settings=nodes[1].settings)
    close_all()
    await_holders(nodes, 1, step, 1, nodes[0])
    for shard in nodes[0].directory(step).glob("*.distcp"):
        shard.unlink()
    found = verify(nodes[0])
    assert (found["tiers"], found["problems"]) == (["local", "peer"], [])
    assert found["absent_on_this_node"], "its shards are only on the other node"


def test_newest_step_of_ssd_peers_and_shared_storage_wins(nodes: Nodes, uri: str) -> None:
    """Neither the local tier nor shared storage is assumed to be newer."""
    here = nodes[0].settings
    save_on(nodes, 0, f"{uri}/step-1", small_state(1))
    assert tierckpt.latest(uri, settings=here) == f"{uri}/step-1"
    save(f"{uri}/step-2", small_state(2), local_root=nodes[0].root / "elsewhere", mover="inline", drain=True)
    assert Path(uri, "step-2", ".tierckpt", "manifest.json").exists()
    assert tierckpt.latest(uri, settings=here) == f"{uri}/step-2"
    save_on(nodes, 1, f"{uri}/step-3", small_state(3))
    assert tierckpt.latest(uri, settings=here) == f"{uri}/step-3"
    assert same(load(f"{uri}/step-3", zeros_like(small_state(3)), settings=here), small_state(3))
    found = get_client(here).run(get_client(here).mover.selector.find(parse_uri(f"{uri}/step-2")))
    assert found.tiers == {Tier.SHARED}


def test_newest_complete_save_of_one_name_wins(nodes: Nodes, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    step = f"{uri}/step-1"
    save_on(nodes, 0, step, small_state(1))
    save_on(nodes, 1, step, small_state(2))
    with caplog.at_level(logging.WARNING, "tierckpt.catalog"):
        assert same(load(step, zeros_like(small_state(2)), settings=nodes[2].settings), small_state(2))
    assert "2 different saves under it" in caplog.text
    close_all()
    for node in (nodes[1], nodes[2]):
        for shard in node.directory(step).glob("*.distcp"):
            shard.unlink()
    nodes[1].kill()
    nodes[2].kill()
    nodes[1].start()
    nodes[2].start()
    nodes.meet(3)
    client = get_client(nodes[0].settings)
    found = client.run(client.mover.selector.newest(parse_uri(step)))
    assert found is not None
    assert found.manifest == read_local_manifest(nodes[0].directory(step))


def test_load_of_a_few_rows_fetches_only_their_bytes_from_peers(nodes: Nodes, uri: str) -> None:
    rows = torch.arange(400_000, dtype=torch.float32).reshape(1000, 400)
    save_on(nodes, 0, uri, {"wanted": rows[:10].clone(), "other": rows})
    state: dict[str, Any] = {"wanted": torch.zeros(10, 400)}
    assert same(load(uri, state, settings=nodes[2].settings), {"wanted": rows[:10]})
    assert local_files(nodes[2], uri) == {}


def test_step_that_no_node_has_is_reported_missing(nodes: Nodes, uri: str) -> None:
    with pytest.raises(CheckpointNotFoundError):
        load(f"{uri}/step-9", zeros_like(small_state(1)), settings=nodes[1].settings)
    assert tierckpt.latest(uri, settings=nodes[1].settings) is None


def test_peer_lost_during_a_read_is_replaced_by_another_holder(
    nodes: Nodes, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first chunk its agent is killed: the other holder serves the rest."""
    step = f"{uri}/step-5"
    save_on(nodes, 1, step, small_state(5))
    tierckpt.prefetch(step, settings=nodes[2].settings)
    await_holders(nodes, 1, step, 2, nodes[0])
    killed: list[str] = []
    real = PeerReplicas.chunk

    async def chunk(self: PeerReplicas, member: Member, *arguments: Any) -> Any:
        data = await real(self, member, *arguments)
        if not killed:
            killed.append(member.address)
            node = next(node for node in nodes if node.settings.peer_listen == member.address)
            await asyncio.to_thread(node.kill)
        return data

    monkeypatch.setattr(PeerReplicas, "chunk", chunk)
    monkeypatch.setattr(cluster_module, "LIVE_SECONDS", 3600.0)  # the reader does not learn that the peer is down
    try:
        assert same(load(step, zeros_like(small_state(5)), settings=nodes[0].settings), small_state(5))
        assert killed, "no peer received a request"
    finally:
        close_all()
        for node in nodes:
            if node.process is None:
                node.start()
        nodes.meet(3)


# --- a silent node: step 1 is on shared storage, step 2 only on node 1 ------------------------------------------------


@pytest.fixture
def pair(fleet: Fleet, tmp_path: Path) -> Iterator[Nodes]:
    with cluster(fleet, tmp_path / "nodes", 2, drain=False, **PATIENT) as pair:
        yield pair
        close_all()


@pytest.fixture
def saved(pair: Nodes, tmp_path: Path) -> str:
    uri = str(tmp_path / "shared" / "run")
    for step, settings in ((1, Settings.load(local_root=tmp_path / "drained")), (2, pair[1].settings)):
        with Checkpointer(uri, settings=settings) as checkpointer:
            checkpointer.save(step, {"w": torch.full((4,), float(step))}).result(60)
        close_all()
    return uri


def signal_to(node: Node, number: int) -> None:
    assert node.process is not None
    node.process.send(signal.Signals(number))


def restored(uri: str, node: Node, **changed: Any) -> tuple[int | None, float]:
    state = {"w": torch.zeros(4)}
    settings = node.settings.model_copy(update=changed)
    with Checkpointer(uri, settings=settings) as checkpointer:
        return checkpointer.restore(state), float(state["w"][0])


def impatient(node: Node) -> Settings:
    return node.settings.model_copy(update={"store_wait_seconds": 3.0})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "starts late"])
def test_late_peer_is_waited_for(how: str, pair: Nodes, saved: str, caplog: pytest.LogCaptureFixture) -> None:
    back: Callable[[], None]
    if how == "stopped":
        signal_to(pair[1], signal.SIGSTOP)
        back = lambda: signal_to(pair[1], signal.SIGCONT)  # noqa: E731
    else:
        pair[1].kill()
        back = pair[1].start
    later = start_after(lambda: "to say which checkpoints of" in caplog.text, back)
    try:
        assert restored(saved, pair[0], store_wait_seconds=90.0) == (2, 2.0)
        assert "to say which checkpoints of" in caplog.text
        assert pair[1].settings.peer_listen in caplog.text
    finally:
        later.join()


@pytest.mark.slow
def test_silent_peer_is_named_with_the_restored_step(pair: Nodes, saved: str, caplog: pytest.LogCaptureFixture) -> None:
    pair[1].kill()
    pair[0].settings = impatient(pair[0])
    assert restored(saved, pair[0]) == (1, 1.0)
    warnings = [line for line in caplog.messages if "a newer one may be on" in line]
    assert len(warnings) == 1
    assert "step-1" in warnings[0]
    assert pair[1].settings.peer_listen in warnings[0]
    with pytest.raises(CheckpointNotFoundError) as caught:
        restored_step_2 = Checkpointer(saved, settings=pair[0].settings)
        restored_step_2.restore({"w": torch.zeros(4)}, step=2)
    assert pair[1].settings.peer_listen in str(caught.value.context["not_heard"])


def test_no_wait_if_all_peers_answer(pair: Nodes, saved: str, caplog: pytest.LogCaptureFixture) -> None:
    assert restored(saved, pair[0]) == (2, 2.0)
    assert "may be on" not in caplog.text


def test_step_replaced_by_a_peer_after_the_listing(
    pair: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent still lists a removed step for a moment, and not yet the next one."""
    uri = str(tmp_path / "shared" / "peers alone")

    def save(step: int) -> None:
        with Checkpointer(uri, settings=pair[1].settings, keep_last=1) as checkpointer:
            checkpointer.save(step, {"w": torch.full((4,), float(step))}).result(60)

    save(1)
    pair.until(lambda: tierckpt.latest(uri, settings=pair[0].settings) is not None, "step 1 to be found")
    find, left = Selector.find, [2]

    async def after_the_next(self: Selector, location: Location) -> Checkpoint:
        if location.name == "step-1" and left:
            await asyncio.to_thread(save, left.pop())
        return await find(self, location)

    monkeypatch.setattr(Selector, "find", after_the_next)
    assert tierckpt.latest(uri, settings=pair[0].settings) == f"{uri}/step-2"
    assert not left


@pytest.mark.slow
def test_other_secret_error_names_the_peer_and_the_setting(
    pair: Nodes, saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_copies, "DENIED_SECONDS", 1.0)
    new, other = pair[0], secret_file(tmp_path, "another secret than theirs, of a new node")
    new.lose()
    new.settings = new.settings.model_copy(update={"peer_secret_file": other})
    new.env["TIERCKPT_PEER_SECRET_FILE"] = str(other)
    new.start()
    caplog.set_level(logging.INFO)
    with pytest.raises(PermissionDeniedError) as caught:
        restored(saved, new)
    assert pair[1].settings.peer_listen in str(caught.value)
    assert "peer_secret_file" in str(caught.value)
    with pytest.raises(PermissionDeniedError):
        tierckpt.latest(saved, settings=new.settings)


@pytest.mark.slow
def test_outage_error_names_the_peers_step_and_the_call_to_restore_it(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other nodes may have continued from it; only the user can exclude that."""
    monkeypatch.setattr(retry, "RETRIES_MAX", 1)
    away = {"ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for name, value in away.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    run, pair[0].settings = "s3://bucket/run", impatient(pair[0])
    for step in (1, 2):
        with Checkpointer(run, settings=pair[1].settings) as checkpointer:
            checkpointer.save(step, {"w": torch.full((4,), float(step))}).result(60)
    close_all()
    for call in (lambda: restored(run, pair[0]), lambda: tierckpt.latest(run, settings=pair[0].settings)):
        with pytest.raises(StoreUnavailableError) as caught:
            call()
        assert "Other nodes have step-2 complete" in str(caught.value)
        assert "restore(state, step=2)" in str(caught.value)
    state = {"w": torch.zeros(4)}
    with Checkpointer(run, settings=pair[0].settings) as checkpointer:
        assert checkpointer.restore(state, step=2) == 2
    assert state["w"][0] == 2
