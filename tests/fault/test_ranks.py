"""Ranks that fail or die, and concurrent saves of one checkpoint: no rank hangs, no mixed checkpoint is visible."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.compat.worker import launch
from tests.fault.runner import start
from tests.fault.scenario_tools import die, until
from tests.states import load, raises_ours, save
from tierckpt.checkpoint import shared_commit
from tierckpt.checkpoint.local_commit import read_local_manifest
from tierckpt.errors import AlreadyCommittedError
from tierckpt.format.layout import local_dir, parse_uri, pending
from tierckpt.stores import open_store


def race(uri: str, folder: Path, root: str, value: int, of: int) -> str:
    """Save when each of the ``of`` savers has found the id free. Returns the outcome."""
    writer = tierckpt.TierStorageWriter(uri, local_root=root)
    plan = writer.prepare_global_plan

    def late(plans: Any) -> Any:
        (folder.parent / f"ready.{value}").touch()
        until(lambda: len(list(folder.parent.glob("ready.*"))) == of)
        return plan(plans)

    writer.prepare_global_plan = late  # type: ignore[method-assign]
    try:
        with raises_ours():
            dcp.save({"w": torch.full((1000,), float(value))}, storage_writer=writer, no_dist=True)
        tierckpt.wait(uri, timeout_seconds=60, local_root=root)
        return "won"
    except AlreadyCommittedError as error:
        return f"lost {error.context['winner']}"


def die_before_the_shared_commit(uri: str, folder: Path) -> None:
    """Killed in the drain, when all files are there."""

    async def claim_and_die(store: Any, location: Any, manifest: Any) -> None:
        await shared_commit.put_claim(store, location, manifest)
        await store.put(pending(manifest.attempt), manifest.encode())
        die()

    shared_commit.commit_shared = claim_and_die
    dcp.save({"w": torch.zeros(1000)}, storage_writer=tierckpt.TierStorageWriter(uri), no_dist=True)
    tierckpt.wait(uri, timeout_seconds=60)


# --- the tests --------------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.distributed


SCENARIO = "tests.fault.rank_scenarios:save_with_a_failing_rank"


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_ranks_raise_if_one_cannot_write(failing: int, file_uri: str) -> None:
    outcome = launch(SCENARIO, 3, uri=file_uri, way="dcp.save", failing=failing)
    assert outcome["errors"] == ["CapacityError"] * 3
    assert outcome["latest"] == f"{file_uri}/step-1"
    assert (outcome["step"], outcome["right"]) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_raise_if_one_cannot_write_asynchronously(failing: int, s3_uri: str) -> None:
    outcome = launch(SCENARIO, 2, uri=s3_uri, way="Checkpointer", failing=failing)
    errors = outcome["errors"]
    assert errors[failing] == "CapacityError"
    assert errors[1 - failing] == "CommitAbandonedError"
    assert (outcome["step"], outcome["right"]) == (1, True)


def _race(folder: Path, uri: str, roots: list[Path]) -> list[str]:
    """Start one saver for each root, release them together, and return their outcomes."""
    options = {"uri": uri, "of": len(roots)}
    savers = [
        start(race, folder / str(index), **options, root=str(root), value=index) for index, root in enumerate(roots)
    ]
    return [saver.result(60) for saver in savers]


@pytest.mark.slow
@pytest.mark.parametrize("node", ["one", "many"])
def test_exactly_one_of_concurrent_saves_commits(node: str, shared_uri: str, tmp_path: Path) -> None:
    roots = [tmp_path / "local" if node == "one" else tmp_path / f"local-{index}" for index in range(4)]
    outcomes = _race(tmp_path / "race", f"{shared_uri}/step-1", roots)
    winners = [index for index, outcome in enumerate(outcomes) if outcome == "won"]
    assert len(winners) == 1, outcomes
    assert all(outcome.startswith("lost ") for index, outcome in enumerate(outcomes) if index not in winners), outcomes
    loaded = load(f"{shared_uri}/step-1", {"w": torch.zeros(1000)}, local_root=tmp_path / "fresh")
    assert loaded["w"].unique().tolist() == [float(winners[0])]


def test_next_save_removes_shared_leftovers_of_a_lost_node(s3_uri: str, local_root: Path, tmp_path: Path) -> None:
    """The node is lost after a shard was sent, before the commit; another node saves the same step."""
    uri = f"{s3_uri}/step-1"
    mover = start(die_before_the_shared_commit, tmp_path / "mover", uri=uri)
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
