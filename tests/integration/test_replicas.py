"""Replicas at save: with ``replicas=2`` a checkpoint survives the loss of its node from its local commit on.

Agents are real processes, each with its own local root. Unless a test says so, shared storage is empty.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.command_line import CommandLine
from tests.compat.worker import launch
from tests.servers.fleet import Fleet
from tests.servers.nodes import PATIENT, Node, Nodes, cluster
from tests.services import HttpServer, S3Server
from tests.states import flip, load, same, save, small_state, zeros_like
from tierckpt.checkpoint import local_commit
from tierckpt.checkpoint.retention import Policy, Rule
from tierckpt.client import close_all, get_client
from tierckpt.format.layout import parse_uri

pytestmark = pytest.mark.distributed
SCENARIOS = "tests.integration.node_scenarios"


class EmptyBucket(HttpServer):
    """An object store that is empty, refuses writes and records requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(f"{request.command} {request.path}")
        is_listing = "list-type=2" in request.path
        body = b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'
        body = body if is_listing else b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>'
        self.say(request, 200 if is_listing else 404, body, {"Content-Type": "application/xml"})


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet.running(tmp_path_factory.mktemp("agents"), "tests.servers.nodes") as running:
        yield running


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmptyBucket]:
    server = EmptyBucket()
    for name, value in S3Server(server.endpoint, "key", "secret").environment().items():
        monkeypatch.setenv(name, value)
    yield server
    close_all()
    server.close()


def shards(node: Node) -> dict[str, str]:
    """Map each shard of the node's local tier to the digest of its bytes."""
    found = (node.root / "checkpoints").rglob("*.distcp")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def all_copied(nodes: Nodes, uri: str, *of: int) -> None:
    nodes.until(lambda: all(nodes[index].has_all_replicas(uri) for index in of), f"the copies of {uri}")


@pytest.mark.slow
def test_checkpoint_survives_a_node_lost_right_after_its_local_commit(
    bucket: EmptyBucket, fleet: Fleet, tmp_path: Path
) -> None:
    """A replaced, empty node restores the newest step and reads only commit records from shared storage."""
    uri = "s3://bucket/run"
    with cluster(fleet, tmp_path, 2, replicas=2, **PATIENT) as nodes:
        save(f"{uri}/step-7", small_state(7), settings=nodes[0].settings)
        all_copied(nodes, f"{uri}/step-7", 0)
        close_all()
        nodes[0].lose()
        nodes[0].start()
        nodes.meet(2)
        bucket.asked.clear()
        assert tierckpt.latest(uri, settings=nodes[0].settings) == f"{uri}/step-7"
        assert same(load(f"{uri}/step-7", zeros_like(small_state(7)), settings=nodes[0].settings), small_state(7))
        assert bucket.asked, "the tiers were not compared"
        data = [line for line in bucket.asked if ".distcp" in line or (line.endswith("/.metadata") and "GET" in line)]
        assert data == []
        assert shards(nodes[0]) == shards(nodes[1]), "a restore must leave local copies for the next restart"


@pytest.mark.slow
def test_all_ranks_of_a_job_restore_when_any_of_its_nodes_is_lost(fleet: Fleet, tmp_path: Path) -> None:
    """Each rank saved on its own node; only the coordinator's node had the manifest."""
    uri = str(tmp_path / "shared" / "run")
    with cluster(fleet, tmp_path, 3, replicas=2, drain=False, domains=("a", "a", "b"), **PATIENT) as nodes:
        ranks = [node.settings.model_dump_json() for node in nodes][:2]
        launch(f"{SCENARIOS}:save_locally", 2, uri=uri, nodes=ranks, step=1)
        all_copied(nodes, f"{uri}/step-1", 0, 1)
        assert sum(len(shards(node)) for node in nodes) == 4, "two copies of two shards"
        nodes[0].lose()
        nodes[0].start()
        nodes.meet(3)
        outcome = launch(f"{SCENARIOS}:restore", 2, uri=uri, nodes=ranks)
        assert outcome["outcomes"] == [[1, True], [1, True]]


@pytest.mark.slow
def test_old_copy_is_removed_only_when_all_holders_have_the_new_one(fleet: Fleet, tmp_path: Path) -> None:
    """Three copies: while one holder is down, the other keeps both steps."""
    uri = str(tmp_path / "shared" / "run")
    with cluster(fleet, tmp_path, 3, replicas=3, drain=False) as nodes:
        save(f"{uri}/step-1", small_state(1), settings=nodes[0].settings)
        all_copied(nodes, f"{uri}/step-1", 0)
        full = nodes[2].directory(f"{uri}/step-2")
        full.mkdir(parents=True)
        full.chmod(0o777)  # writable by others, so it takes no copy
        save(f"{uri}/step-2", small_state(2), settings=nodes[0].settings)
        nodes.until(lambda: len(shards(nodes[1])) == 2, "the second step on the working holder")
        nodes.until(lambda: nodes[2].replicas()["failed"] >= 2, "two failed copies on the other holder")
        assert len(shards(nodes[1])) == 2
        assert nodes[1].replicas()["removed"] == 0
        assert not nodes[0].has_all_replicas(f"{uri}/step-2")
        full.rmdir()
        all_copied(nodes, f"{uri}/step-2", 0)
        nodes.until(lambda: all(len(shards(node)) == 1 for node in (nodes[1], nodes[2])), "removal of the old copies")
        assert local_commit.read_local_manifest(nodes[1].directory(f"{uri}/step-1")) is None
        assert len(shards(nodes[0])) == 2, "a node's own saves are subject to retention only"


@pytest.mark.slow
def test_full_ssd_takes_no_copies_and_keeps_its_own_checkpoints(fleet: Fleet, tmp_path: Path) -> None:
    uri = str(tmp_path / "shared" / "run")
    other = str(tmp_path / "shared" / "other")
    with cluster(fleet, tmp_path, 2, replicas=2, drain=False, local_bytes_max=400_000) as nodes:
        save(f"{other}/step-1", small_state(1), settings=nodes[1].settings)
        save(f"{other}/step-2", small_state(2), settings=nodes[1].settings)
        all_copied(nodes, f"{other}/step-2", 1)
        own = shards(nodes[1])
        save(f"{uri}/step-1", small_state(3), settings=nodes[0].settings)
        nodes.until(lambda: nodes[1].replicas()["without_room"] >= 1, "refusal of the copy")
        assert "only this node's own saves could be evicted" in nodes[1].replicas()["last_error"]
        assert not nodes[0].has_all_replicas(f"{uri}/step-1")
        assert shards(nodes[1]) == own


@pytest.mark.slow
def test_damaged_peer_copy_is_never_returned(fleet: Fleet, tmp_path: Path) -> None:
    uri = str(tmp_path / "shared" / "run" / "step-1")
    with cluster(fleet, tmp_path, 2, replicas=2, drain=False) as nodes:
        save(uri, small_state(1), settings=nodes[0].settings)
        all_copied(nodes, uri, 0)
        good = shards(nodes[0])
        nodes[0].lose()
        (damaged,) = (nodes[1].root / "checkpoints").rglob("*.distcp")
        nodes[1].kill()
        flip(damaged)
        nodes[1].start()
        nodes[0].start()
        nodes.meet(2)
        state = zeros_like(small_state(1))
        with pytest.raises(tierckpt.TierckptError):
            load(uri, state, settings=nodes[0].settings)
        assert shards(nodes[0]) == {}
        shutil.copy(next((tmp_path).glob("node-0.lost-*/checkpoints/file/**/*.distcp")), damaged)
        assert shards(nodes[1]) == good


@pytest.mark.slow
def test_retention_keeps_the_newest_step_complete_on_a_peer(fleet: Fleet, tmp_path: Path) -> None:
    """Losing a node while its newest step is being copied must leave the previous step."""
    uri = str(tmp_path / "shared" / "run")

    def steps_after_prune(node: Node) -> list[str]:
        get_client(node.settings).run(get_client(node.settings).mover.pruner.prune(parse_uri(uri), Policy(Rule(1))))
        return sorted(path.name for path in node.directory(uri).iterdir())

    with cluster(fleet, tmp_path, 2, replicas=2, drain=False) as nodes:
        save(f"{uri}/step-1", small_state(1), settings=nodes[0].settings)
        all_copied(nodes, f"{uri}/step-1", 0)
        nodes[1].kill()
        save(f"{uri}/step-2", small_state(2), settings=nodes[0].settings)
        assert steps_after_prune(nodes[0]) == ["step-1", "step-2"]
        nodes[1].start()
        all_copied(nodes, f"{uri}/step-2", 0)
        nodes.until(lambda: steps_after_prune(nodes[0]) == ["step-2"], "removal of the older step")


@pytest.mark.slow
def test_report_has_the_time_when_all_holders_had_a_step(fleet: Fleet, tmp_path: Path, cli: CommandLine) -> None:
    """A save without other nodes gets its copies when one returns; the older of two saves is skipped."""
    uri, away_seconds = str(tmp_path / "shared" / "run"), 4.0

    def report(node: Node) -> dict[str, Any]:
        return cli.answer("report", uri, "--local-root", node.root)["tiers"]["peer"]  # type: ignore[no-any-return]

    with cluster(fleet, tmp_path, 2, replicas=2, drain=False) as nodes:
        nodes[1].kill()
        with tierckpt.Checkpointer(uri, settings=nodes[0].settings) as checkpointer:
            checkpointer.save(1, small_state(1)).result(60)
            began = time.time()
            checkpointer.save(2, small_state(2)).result(60)
            close_to = report(nodes[0])
            assert (close_to["is_used"], close_to["reached"], close_to["waiting_steps"]) == (True, 0, [2])
            assert 0 < close_to["oldest_waiting_seconds"] < 30
            time.sleep(away_seconds)
            nodes[1].start()
            all_copied(nodes, f"{uri}/step-2", 0)
            nodes.until(lambda: report(nodes[0])["reached"] == 1, "the record")
        took = time.time() - began
        found = report(nodes[0])
        assert (found["saves"], found["skipped_steps"], found["waiting_steps"]) == (2, [1], [])
        assert away_seconds <= found["maximum_seconds"] <= took
        shutil.rmtree(nodes[0].directory(f"{uri}/step-2"))  # evicted, including its marker
        assert report(nodes[0]) == found
