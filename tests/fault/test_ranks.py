"""Ranks that fail or die, and saves that race for one id: nobody hangs, nothing mixed is ever visible."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tierckpt
from tests.compat.worker import launch
from tests.fault import rank_scenarios, single_scenarios
from tests.fault.runner import start
from tests.states import load, save
from tierckpt.checkpoint.journal import Journal
from tierckpt.checkpoint.local_commit import read_local_manifest
from tierckpt.client import close_all
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.stores import open_store

pytestmark = pytest.mark.distributed


SCENARIO = "tests.fault.rank_scenarios:save_with_a_failing_rank"


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_when_one_rank_cannot_write_all_ranks_raise(failing: int, file_uri: str) -> None:
    outcome = launch(SCENARIO, 3, uri=file_uri, way="dcp.save", failing=failing)
    assert outcome["errors"] == ["CapacityError"] * 3
    assert outcome["latest"] == f"{file_uri}/step-1"
    assert (outcome["step"], outcome["right"]) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_in_the_background_too(failing: int, s3_uri: str) -> None:
    outcome = launch(SCENARIO, 2, uri=s3_uri, way="Checkpointer", failing=failing)
    errors = outcome["errors"]
    assert errors[failing] == "CapacityError"
    assert errors[1 - failing] == "CommitAbandonedError"
    assert (outcome["step"], outcome["right"]) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_when_a_rank_dies_the_others_raise_within_the_deadline(killed: int, file_uri: str, tmp_path: Path) -> None:
    # The rank that hosts the rendezvous store takes it along when it dies; the others then lose the store at once.
    options = {"uri": file_uri, "way": "Checkpointer", "phase": "flush", "victim": killed}
    job = start(rank_scenarios.lose_a_rank, tmp_path / "job", 2, **options)
    assert job.codes(60)[killed] == -signal.SIGKILL, job.output()
    told, seconds = json.loads((job.folder / f"told-{1 - killed}").read_text())
    assert told.startswith("ok, ") and seconds < 45
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-1"


def test_a_lock_held_while_a_worker_forks_is_released(tmp_path: Path) -> None:
    """The child has a copy of the descriptor; the lock must not stay with it."""
    journal = Journal(tmp_path)
    journal.open("aa", parse_uri("/somewhere"), 0, 4096)
    with journal.own("aa") as held:
        assert held
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])  # control: exec closes it
        forked = os.fork()
        if forked == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with journal.own("aa") as again:
            assert again
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
        child.kill()
        child.wait()


def _race(folder: Path, uri: str, roots: list[Path]) -> list[str]:
    """Start one saver a root, let all go at once, return each one's outcome."""
    options = {"uri": uri, "of": len(roots)}
    savers = [
        start(single_scenarios.race, folder / str(index), **options, root=str(root), value=index)
        for index, root in enumerate(roots)
    ]
    return [saver.result(60) for saver in savers]


@pytest.mark.slow
@pytest.mark.parametrize("node", ["one", "many"])
def test_of_saves_that_race_for_one_id_exactly_one_wins(node: str, shared_uri: str, tmp_path: Path) -> None:
    roots = [tmp_path / "local" if node == "one" else tmp_path / f"local-{index}" for index in range(4)]
    outcomes = _race(tmp_path / "race", f"{shared_uri}/step-1", roots)
    winners = [index for index, outcome in enumerate(outcomes) if outcome == "won"]
    assert len(winners) == 1, outcomes
    assert all(outcome.startswith("lost ") for index, outcome in enumerate(outcomes) if index not in winners), outcomes
    loaded = load(f"{shared_uri}/step-1", {"w": torch.zeros(1000)}, local_root=tmp_path / "fresh")
    assert loaded["w"].unique().tolist() == [float(winners[0])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "survivor"),
    [
        ("before shards", 1.0),
        ("in a shard", 1.0),
        ("before the commit", 1.0),
        ("between metadata and manifest", 1.0),
        ("after the commit", 2.0),
    ],
)
def test_a_saver_killed_at_any_point_leaves_the_old_checkpoint_or_the_new(
    point: str, survivor: float, s3_uri: str, local_root: Path, tmp_path: Path
) -> None:  # P2, P3
    uri = f"{s3_uri}/step-1"
    save(uri, {"w": torch.full((100_000,), 1.0)})
    tierckpt.wait(uri, timeout_seconds=60)
    saver = start(single_scenarios.die_at, tmp_path / "saver", uri=uri, point=point)
    assert saver.codes() == [-signal.SIGKILL], saver.output()  # the fault really fired
    assert load(uri, {"w": torch.zeros(100_000)})["w"].unique().tolist() == [survivor]
    close_all()  # what a restarted job is: a process that reads the journal anew
    save(uri, {"w": torch.full((100_000,), 3.0)})  # the next save works and puts the leftovers away
    tierckpt.wait(uri, timeout_seconds=60)
    assert load(uri, {"w": torch.zeros(100_000)})["w"].unique().tolist() == [3.0]
    deadline = time.monotonic() + 60
    while Journal(local_root).entries() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert Journal(local_root).entries() == []
    assert len(list(local_dir(local_root, parse_uri(uri)).glob("*.distcp"))) == 1


def test_a_mover_killed_in_the_drain_publishes_nothing_and_the_next_one_finishes(
    s3_uri: str, local_root: Path, tmp_path: Path
) -> None:
    uri = f"{s3_uri}/step-1"
    for number in range(2):
        mover = start(single_scenarios.die_after_the_first_file, tmp_path / str(number), uri=uri)
        assert mover.codes() == [-signal.SIGKILL], mover.output()
        assert len(Journal(local_root).entries()) >= 1
    tierckpt.wait(uri, timeout_seconds=60)
    loaded = load(uri, {"w5": torch.zeros(10_000)}, local_root=local_root.parent / "other")
    assert loaded["w5"].unique().tolist() == [5.0]


def test_a_fork_leaves_the_parents_client_alone(file_uri: str) -> None:
    """DataLoader workers fork: the child must neither hang nor drain what is the parent's."""
    save(f"{file_uri}/step-1", {"w": torch.ones(10)})
    child = os.fork()
    if child == 0:
        try:
            fine = tierckpt.latest(file_uri) == f"{file_uri}/step-1"
            os._exit(0 if fine else 3)
        except BaseException:
            os._exit(4)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.02)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the forked child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-1"


def test_what_a_lost_node_left_on_the_shared_tier_goes_with_the_next_save(
    s3_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """Killed in the drain, after the shard and before the commit; its node is lost; the id is saved again elsewhere."""
    uri = f"{s3_uri}/step-1"
    mover = start(single_scenarios.die_before_the_shared_commit, tmp_path / "mover", uri=uri)
    assert mover.codes() == [-signal.SIGKILL], mover.output()
    shutil.rmtree(local_root)
    save(uri, {"w": torch.ones(1000)})
    tierckpt.wait(uri, timeout_seconds=60)
    store = open_store(parse_uri(uri), tierckpt.Settings.load())

    async def keys() -> set[str]:
        return {info.key async for info in store.list()}

    manifest = read_local_manifest(local_dir(local_root, parse_uri(uri)))
    assert manifest is not None
    named = {entry.key for entry in manifest.entries} | {".metadata"}
    assert asyncio.run(keys()) == named | {".tierckpt/manifest.json", ".tierckpt/claim.json"}
