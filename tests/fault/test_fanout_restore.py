"""A job restores on several nodes at once: shared storage sends each byte of the checkpoint once for all nodes.

Eight ranks on four nodes (with their own local roots and agents), a model with two data-parallel replicas of
each shard, and replicated tensors. The store counts the bytes that it sends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tierckpt
from tests.compat.worker import launch
from tests.fault.scenario_tools import of_each_rank
from tests.servers.cluster import Cluster, Model
from tests.servers.fleet import Fleet
from tests.servers.origin import Origin
from tests.services import free_port

REPLICAS = 2
"""Data-parallel groups: this many ranks hold each shard."""
ROWS, COLUMNS, SHARDED = 1024, 512, 4
"""Each tensor has 2 MiB."""
REPLICATED = 4


def whole_state() -> dict[str, torch.Tensor]:
    counts = {"sharded": SHARDED, "replicated": REPLICATED}
    names = [f"{kind}-{number}" for kind, count in counts.items() for number in range(count)]
    return {name: _value(number) for number, name in enumerate(names)}


def part_of(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the part of ``state`` of this rank: tensors with hybrid sharding, and replicated ones."""
    mesh = init_device_mesh("cpu", (REPLICAS, dist.get_world_size() // REPLICAS))
    placements = [Replicate(), Shard(0)]
    return {
        name: distribute_tensor(value, mesh, placements, src_data_rank=None) if name.startswith("sharded") else value
        for name, value in state.items()
    }


def _value(number: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(number))


def save_whole(uri: str, root: str) -> dict[str, Any]:
    """Save as an earlier job of one rank, and wait for the shared tier."""
    writer = tierckpt.TierStorageWriter(uri, local_root=root, mover="inline")
    dcp.save(whole_state(), storage_writer=writer)
    tierckpt.wait(uri, tier="shared", timeout_seconds=60, local_root=root, mover="inline")
    return {"size_bytes": (SHARDED + REPLICATED) * ROWS * COLUMNS * 4}


def load_parts(uri: str, nodes: list[dict[str, str]]) -> dict[str, Any]:
    """Restore with the settings of this rank's node (ranks in blocks). Returns correctness and seconds by rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ.update(nodes[rank * len(nodes) // world_size])
    wanted = part_of(whole_state())
    loaded = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dist.barrier()
    begun = time.monotonic()
    dcp.load(loaded, storage_reader=tierckpt.TierStorageReader(uri))
    seconds = time.monotonic() - begun
    right = all(torch.equal(_local(loaded[name]), _local(value)) for name, value in wanted.items())
    outcomes = of_each_rank({"right": right, "seconds": seconds})
    return {name: [one[name] for one in outcomes] for name in outcomes[0]}


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


# --- the tests --------------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.distributed

MiB = 1 << 20
RANKS, NODES, TRIES = 8, 4, 3
CHUNK_BYTES = MiB // 4
STORE_RATE = 48 * MiB
SETTINGS = {"TIERCKPT_CHUNK_SIZE_BYTES": str(CHUNK_BYTES), "TIERCKPT_MOVER": "agent"}
SCENARIOS = "tests.fault.test_fanout_restore"


@dataclass
class Saved:
    """A checkpoint on a store that counts the bytes sent."""

    fleet: Fleet
    origin: Origin
    store: Path
    uri: str
    size_bytes: int


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    folder = tmp_path_factory.mktemp("restore")
    uri = f"{folder}/store/bucket/run/step-1"
    size = launch(f"{SCENARIOS}:save_whole", 1, uri=uri, root=str(folder / "saver"))
    with Origin.running(folder / "store", rate=STORE_RATE) as origin, Fleet.running(folder / "logs") as fleet:
        yield Saved(fleet, origin, folder / "store", "s3://bucket/run/step-1", size["size_bytes"])


def restore(saved: Saved, root: Path, *, peers: bool) -> dict[str, int]:
    """Restore on all of some new nodes at once. Returns the bytes sent by the store, of shards and in total."""
    saved.origin.reset()
    with closing(Cluster(saved.fleet, saved.origin, Model(saved.store, "none", {}, 0), root)) as cluster:
        cluster.add([f"127.0.0.1:{free_port()}" for _ in range(NODES)], SETTINGS, peers=peers)
        if peers:
            cluster.start_agents()
        outcome = launch(f"{SCENARIOS}:load_parts", RANKS, uri=saved.uri, nodes=[node.env for node in cluster.nodes])
        assert outcome["right"] == [True] * RANKS
        sent = saved.origin.counts()["sent_bytes_by_key"]
    return {"shards": sum(size for key, size in sent.items() if key.endswith(".distcp")), "all": sum(sent.values())}


@pytest.mark.slow
def test_four_nodes_read_each_byte_from_the_store_once(saved: Saved, tmp_path: Path) -> None:
    """Several tries: a node silent for a second counts as absent, and others read its part, which a loaded machine
    causes now and then."""
    tried = []
    for number in range(TRIES):
        sent = restore(saved, tmp_path / f"try-{number}", peers=True)
        tried.append(sent)
        assert sent["shards"] >= saved.size_bytes
        most = {"shards": 1.02 * saved.size_bytes + CHUNK_BYTES, "all": 1.05 * saved.size_bytes + CHUNK_BYTES}
        if all(sent[kind] <= most[kind] for kind in most):
            return
    pytest.fail(f"not in {TRIES} runs: {tried}")


@pytest.mark.slow
def test_control_nodes_without_peers_read_more(saved: Saved, tmp_path: Path) -> None:
    assert restore(saved, tmp_path / "nodes", peers=False)["shards"] > 2 * saved.size_bytes
