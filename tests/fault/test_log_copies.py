"""A node is lost with its gradient log: the job resumes elsewhere at the step of the peer's copy, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault import step_log_scenarios
from tests.fault.log_copies_bugs import PIECES
from tests.fault.runner import start
from tests.fault.test_step_log_kills import JobOutput
from tests.servers.fleet import Fleet
from tests.servers.nodes import Node, Nodes, cluster
from tierckpt.format.layout import GRADIENTS_DIR
from tierckpt.save import log_segments

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RANKS = 2
SETTINGS = {"replicas": 2, "drain": False}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    modules = "tests.servers.nodes", "tests.fault.log_copies_bugs"
    with Fleet.running(tmp_path_factory.mktemp("agents"), *modules) as running:
        yield running


def acknowledged(node: Node) -> int:
    """Return the step up to which the peer has the logs of all ranks, by this node's status."""
    return min((row["peers_step"] for row in node.replicas()["logs"]), default=-1)


def train(node: Node, folder: Path, steps: int, ranks: int = 1, **options: Any) -> JobOutput:
    job = start(
        step_log_scenarios.train, folder, ranks, env=node.env, uri=f"{folder}/run", steps=steps, interval=20, **options
    )
    assert job.codes(120) == [0] * ranks, job.output()[-3000:]
    return JobOutput(folder, ranks)


def copies(node: Node, folder: Path) -> list[Path]:
    found = node.directory(f"{folder}/run") / GRADIENTS_DIR / "copies"
    return sorted(found.rglob("*.gradients"))


def all_copied(nodes: Nodes, folder: Path, step: int) -> None:
    uri = f"{folder}/run/step-{step}"
    nodes.until(lambda: nodes[0].has_all_replicas(uri), f"a copy of step {step}")


def test_lost_node_loses_only_steps_without_a_copy(fleet: Fleet, tmp_path: Path) -> None:
    with cluster(fleet, tmp_path, 2, **SETTINGS) as nodes:
        train(nodes[0], tmp_path, 47, RANKS)
        all_copied(nodes, tmp_path, 40)
        nodes.until(lambda: acknowledged(nodes[0]) >= 46, "a copy of the log")
        # This node needs two checkpoints for its newest step; one that both nodes have suffices there.
        nodes.until(
            lambda: [log_segments.step_of_path(one) for one in copies(nodes[1], tmp_path)] == [40] * RANKS,
            "the removal of older logs",
        )
        job = start(step_log_scenarios.train, tmp_path, RANKS, env=nodes[0].env, uri=f"{tmp_path}/run", steps=10**6)
        nodes.until(lambda: acknowledged(nodes[0]) >= 60, "a longer copy of the log")
        job.kill()
        at = acknowledged(nodes[0])
        nodes[0].lose()
        assert at <= train(nodes[1], tmp_path, 0, RANKS).resumed(), job.output()[-3000:]


@pytest.mark.parametrize("bug", ["stall", "counted before it is whole"])
def test_only_whole_frames_count(fleet: Fleet, tmp_path: Path, bug: str) -> None:
    """The peer's agent is killed within a segment, then the node that it copies from is lost."""
    with cluster(fleet, tmp_path, 2, **SETTINGS) as nodes:
        nodes[1].kill()
        train(nodes[0], tmp_path, 9)
        [own] = (nodes[0].directory(f"{tmp_path}/run") / GRADIENTS_DIR / "rank-0").glob("*.gradients")
        frame = (own.stat().st_size - 4096) // own.read_bytes().count(log_segments.FRAME)
        blocks = 1 + 5 * frame // 4096 + frame // 8192  # the head, five frames and half of one
        nodes[1].env[PIECES], nodes[1].bug = str(blocks), bug
        nodes[1].start()
        nodes.meet(2)
        all_copied(nodes, tmp_path, 1)
        copied_step = 6 if bug == "stall" else 7
        nodes.until(lambda: acknowledged(nodes[0]) == copied_step, "copies of five steps after the first")
        nodes[1].kill()
        [copy] = copies(nodes[1], tmp_path)
        assert copy.stat().st_size == 4096 * blocks, "the kill was not within a frame"
        nodes[0].lose()
        nodes[1].bug = "none, but hurry"
        nodes[1].start()
        seen = train(nodes[1], tmp_path, 0)
        assert (seen.resumed() >= copied_step) == (bug == "stall"), f"resumed at {seen.resumed()}"
