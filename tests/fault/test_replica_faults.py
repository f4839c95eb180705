"""Kills of the agent that copies replicas, at any operation: no wrong byte, and no incomplete copy counts (R1).

``TIERCKPT_TEST_REPLICA_KILLS=N`` sets the number of kills.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.fault.replica_kills import AT, LOG, ON
from tests.files import flip
from tests.servers.fleet import Fleet
from tests.servers.nodes import Nodes, cluster
from tests.states import save
from tierckpt.checkpoint import local_commit
from tierckpt.client import close_all
from tierckpt.format.layout import location_at
from tierckpt.replication.replicator import complete_saves

pytestmark = pytest.mark.distributed

KILLS = int(os.environ.get("TIERCKPT_TEST_REPLICA_KILLS", "4"))
SHARDS = 12
OPERATIONS = 90
"""Kills happen up to this operation; a copy of one step takes more."""
SETTINGS = {"replicas": 2, "drain": False, "chunk_size_bytes": 16384, "shard_size_bytes_max": 40_000}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("agents")
    with Fleet.running(folder, "tests.servers.nodes", "tests.fault.replica_kills") as running:
        yield running


@dataclass
class Kills:
    """A node whose agent is killed repeatedly while it copies the saves of another node."""

    nodes: Nodes
    folder: Path
    bug: str = "kill"
    step: int = 0
    killed: int = 0
    killed_at: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source, self.holder = self.nodes[0], self.nodes[1]

    def save(self) -> None:
        self.step += 1
        state = {f"t{index}": torch.full((9_000,), 100.0 * self.step + index) for index in range(SHARDS)}
        save(f"{self.folder}/run/step-{self.step}", state, settings=self.source.settings)
        close_all()

    def kill(self, operation: int) -> bool:
        """Run the holder's agent until it is killed, then check its files. False: it did not reach the operation."""
        log = self.folder / "operations"
        log.unlink(missing_ok=True)
        self.holder.env |= {AT: str(operation), LOG: str(log)}
        self.holder.bug = self.bug
        self.holder.start()
        assert self.holder.process is not None
        ended = self.holder.process.wait(60)
        self.holder.kill()
        killed = ended is not None and ended.code == -signal.SIGKILL
        if killed:
            self.killed += 1
            self.killed_at.append(log.read_text().splitlines()[-1])
        self.problems += self.judge()
        return killed

    def judge(self) -> list[str]:
        """Return the problems on the holder's disk: wrong bytes, or counted shards without files."""
        good = {path.name: _digest(path) for path in (self.source.root / "checkpoints").rglob("*.distcp")}
        copies = (self.holder.root / "checkpoints").rglob("*.distcp")
        wrong = [path.name for path in copies if _digest(path) != good.get(path.name)]
        problems = [f"step {self.step}: {name} has wrong bytes" for name in wrong]
        for directory in (self.holder.root / "checkpoints").rglob("step-*"):
            manifest, location = local_commit.read_local_manifest(directory), location_at(self.holder.root, directory)
            if manifest is None or location is None:
                continue
            held = complete_saves(directory, location, manifest).held
            lacking = [e.key for e in manifest.files if e.token in held and not (directory / e.key).exists()]
            problems += [f"step {self.step}: {key} counts but is missing" for key in lacking]
        return problems

    def finish(self) -> None:
        """Run the agent without kills: it completes the newest copy and leaves no temporary files."""
        self.holder.bug = "none, but hurry"
        self.holder.start()
        uri = f"{self.folder}/run/step-{self.step}"
        self.nodes.until(lambda: self.source.has_all_replicas(uri), "complete copies")
        newest = self.holder.directory(uri)
        left = [path.name for path in newest.rglob("*") if path.name.endswith((".tmp", ".incoming"))]
        self.problems += self.judge() + [f"temporary file {name} left" for name in left]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(fleet: Fleet, folder: Path, operations: Sequence[int], bug: str, on: str = "") -> Kills:
    with cluster(fleet, folder, 2, **SETTINGS) as nodes:
        result = Kills(nodes, folder, bug)
        nodes[1].env[ON] = on
        nodes[1].kill()
        for operation in operations:
            result.save()  # new data to copy
            if not result.kill(operation):
                result.save()
                result.kill(operation // 2)
        if bug == "kill":
            result.finish()
    return result


@pytest.mark.slow
def test_interrupted_copy_has_no_wrong_bytes_and_does_not_count(fleet: Fleet, tmp_path: Path) -> None:
    rng = random.Random(KILLS)
    result = run(fleet, tmp_path, [rng.randint(1, OPERATIONS) for _ in range(KILLS)], "kill")
    assert result.problems == []
    assert result.killed == KILLS, f"{result.killed} of {KILLS} kills fired, at {result.killed_at}"


@pytest.mark.slow
def test_control_file_name_before_its_bytes_is_found(fleet: Fleet, tmp_path: Path) -> None:
    """The kill comes after the first of three pieces of the first shard."""
    result = run(fleet, tmp_path, [3], "names before bytes", on=".distcp")
    assert result.killed == 1, result.killed_at
    assert any("wrong bytes" in problem for problem in result.problems), result.killed_at


@pytest.mark.slow
def test_damaged_bytes_are_not_copied(fleet: Fleet, tmp_path: Path) -> None:
    """The source's disk lost a bit after the save: the holder rejects the bytes and reports no copy."""
    with cluster(fleet, tmp_path, 2, **SETTINGS) as nodes:
        nodes[1].kill()
        uri = f"{tmp_path}/run/step-1"
        save(uri, {"t": torch.arange(9_000, dtype=torch.float32)}, settings=nodes[0].settings)
        close_all()
        (shard,) = nodes[0].directory(uri).glob("*.distcp")
        flip(shard)
        nodes[1].start()
        nodes.meet(2)
        nodes.until(lambda: nodes[1].replicas()["failed"] >= 2, "two tries")
        assert not nodes[0].has_all_replicas(uri)
        assert list(nodes[1].directory(uri).glob("*.distcp")) == []
