"""``tierckpt prune`` as a separate process, leases between processes, and retention in training and after its end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.agents import until
from tests.integration.test_cli import Done, flip, for_people, tierckpt_
from tests.services import S3Server
from tests.states import load, same, save, small_state
from tierckpt import Checkpointer
from tierckpt.checkpoint import retention, shared_commit
from tierckpt.checkpoint.description import describe_run
from tierckpt.checkpoint.journal import Journal
from tierckpt.checkpoint.prune import REMOVED, Pruner, PruneResult, has_due
from tierckpt.checkpoint.retention import Policy
from tierckpt.cli.ui.app import run
from tierckpt.client import close_all, get_client
from tierckpt.config import Settings
from tierckpt.disk import read_lease
from tierckpt.drain.rate_limiter import change_control
from tierckpt.errors import StoreUnavailableError
from tierckpt.format.layout import HISTORY_DIR, local_dir, parse_uri
from tierckpt.mover import Mover
from tierckpt.poll import Poll
from tierckpt.restore import restore as module
from tierckpt.stores import retry
from tierckpt.stores.obstore_store import RemoteStore

RUNS = ["file", pytest.param("s3", marks=pytest.mark.server)]


@pytest.fixture(params=RUNS)
def run_uri(request: pytest.FixtureRequest) -> str:
    uri: str = request.getfixturevalue(f"{request.param}_uri")
    return uri


def save_steps(uri: str, *steps: int, **options: Any) -> None:
    for step in steps:
        save(f"{uri}/step-{step}", small_state(step), **options)
        if options.get("drain", True):
            tierckpt.wait(f"{uri}/step-{step}", timeout_seconds=60, **options)
    close_all()


def directory_of(uri: str) -> Path:
    return local_dir(Path(os.environ["TIERCKPT_LOCAL_ROOT"]), parse_uri(uri))


def on_shared(uri: str) -> list[int]:
    """Return the steps committed on the shared tier, as seen from a node with an empty local tier."""
    mover = Mover(Settings.load(local_root=os.environ["TIERCKPT_LOCAL_ROOT"] + "-elsewhere"))

    async def steps() -> list[int]:
        rows = await describe_run(mover.selector, parse_uri(uri))
        await mover.close()
        return [row.step for row in rows if row.shared == "committed" and row.step is not None]

    return asyncio.run(steps())


def on_local(uri: str) -> list[int]:
    names = directory_of(uri).glob("*/.tierckpt/manifest.json")
    return sorted(int(path.parent.parent.name.rpartition("-")[2]) for path in names)


def steps_stored(moto: S3Server, uri: str) -> set[str]:
    """Return the steps with any object in the bucket."""
    listed = moto.client().list_objects_v2(Bucket=parse_uri(uri).authority, Prefix="run/step-")["Contents"]
    return {item["Key"].split("/")[1] for item in listed}


def outcomes(done: Done) -> dict[tuple[str, str], tuple[str, str]]:
    return {(one["name"], one["tier"]): (one["outcome"], one["reason"]) for one in done.document["copies"]}


@pytest.mark.slow
@pytest.mark.server
def test_concurrent_prunes_leave_no_remains(s3_uri: str, moto: S3Server) -> None:
    """As an agent and a trainer do, or the coordinator's node and the committing node."""
    save_steps(s3_uri, *range(1, 7))
    movers = [Mover(Settings.load(local_root=f"{os.environ['TIERCKPT_LOCAL_ROOT']}-{n}")) for n in range(2)]

    async def both() -> list[PruneResult]:
        found = await asyncio.gather(*(one.pruner.prune(parse_uri(s3_uri), Policy.of(keep_last=2)) for one in movers))
        for one in movers:
            await one.close()
        return found

    results = asyncio.run(both())
    assert [result.errors for result in results] == [[], []]
    assert {one.copy.step for result in results for one in result.only(REMOVED)} == {1, 2, 3, 4}
    assert steps_stored(moto, s3_uri) == {"step-5", "step-6"}


@pytest.mark.server
def test_late_prune_completes_the_removal_of_a_killed_one(
    s3_uri: str, moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read the manifest; the killed one deleted it. Both write the same removal note."""
    save_steps(s3_uri, 1, 2)
    mover = Mover(Settings.load(local_root=f"{os.environ['TIERCKPT_LOCAL_ROOT']}-elsewhere"))
    store = mover.store(parse_uri(f"{s3_uri}/step-1"))

    async def killed(self: RemoteStore, key: str) -> None:
        raise StoreUnavailableError("killed")

    async def both() -> None:
        manifest = await shared_commit.read_shared_manifest(store)
        assert manifest is not None
        with monkeypatch.context() as patch:
            patch.setattr(RemoteStore, "delete", killed)
            with pytest.raises(StoreUnavailableError):
                await retention.remove_shared(store, manifest)
        assert not await retention.remove_shared(store, manifest)
        await mover.close()

    asyncio.run(both())
    assert steps_stored(moto, s3_uri) == {"step-2"}


# --- dry run and removal ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dry_run_lists_removals_and_removes_nothing(run_uri: str) -> None:
    save_steps(run_uri, 10, 20, 25, 30)
    done = tierckpt_("prune", run_uri, "--keep-last", 1, "--keep-every", 20)
    assert done.code == 0
    assert done.document["dry_run"]
    assert outcomes(done) == {
        (f"step-{step}", tier): verdict
        for tier in ("local", "shared")
        for step, verdict in {
            10: ("would go", "not among the newest 1, no multiple of 20"),
            20: ("kept", "a multiple of 20"),
            25: ("would go", "not among the newest 1, no multiple of 20"),
            30: ("kept", "the newest"),
        }.items()
    }
    assert done.document["going"] == 4
    assert done.document["going_bytes"] > 4 * 1000
    assert on_local(run_uri) == on_shared(run_uri) == [10, 20, 25, 30]
    text = for_people("prune", run_uri, "--keep-last", 1).out
    assert "Nothing was removed. --yes removes 6 of 8 copies" in text
    assert "not among the newest 1" in text


@pytest.mark.slow
def test_yes_removes_all_files(run_uri: str, moto: S3Server) -> None:
    save_steps(run_uri, 1, 2, 3)
    done = tierckpt_("prune", run_uri, "--keep-last", 2, "--yes")
    assert done.code == 0
    assert outcomes(done)["step-1", "shared"][0] == outcomes(done)["step-1", "local"][0] == "removed"
    assert on_local(run_uri) == on_shared(run_uri) == [2, 3]
    assert sorted(path.name for path in directory_of(run_uri).iterdir()) == ["step-2", "step-3"]
    if run_uri.startswith("s3"):
        assert steps_stored(moto, run_uri) == {"step-2", "step-3"}
    else:
        assert sorted(path.name for path in Path(run_uri).iterdir()) == ["step-2", "step-3"]
    for step in (2, 3):
        assert same(load(f"{run_uri}/step-{step}", small_state(step)), small_state(step))
    again = tierckpt_("prune", run_uri, "--keep-last", 2, "--yes")
    assert again.document["going"] == 0
    assert not again.document["leftovers"]


@pytest.mark.parametrize(("tier", "local", "shared"), [("local", [3], [1, 2, 3]), ("shared", [1, 2, 3], [3])])
def test_prune_of_one_tier(tier: str, local: list[int], shared: list[int], file_uri: str) -> None:
    save_steps(file_uri, 1, 2, 3)
    assert tierckpt_("prune", file_uri, "--keep-last", 1, "--tier", tier, "--yes").code == 0
    assert (on_local(file_uri), on_shared(file_uri)) == (local, shared)


def test_without_a_rule_nothing_is_removed(file_uri: str) -> None:
    save_steps(file_uri, 1, 2)
    done = tierckpt_("prune", file_uri, "--yes")
    assert done.code == 0
    assert done.document["going"] == 0
    assert "Without a rule everything is kept" in for_people("prune", file_uri).out
    assert on_local(file_uri) == on_shared(file_uri) == [1, 2]


@pytest.mark.parametrize("option", [("--keep-last", 0), ("--keep-every", -5), ("--tier", "attic")])
def test_invalid_rule_is_exit_2(option: tuple[str, Any], file_uri: str) -> None:
    save_steps(file_uri, 1)
    assert tierckpt_("prune", file_uri, *option, "--yes").code == 2


# --- foreign files ----------------------------------------------------------------------------------------------


def test_directory_without_tierckpt_files_is_exit_4_and_untouched(tmp_path: Path) -> None:
    """A directory as Orbax writes it: numbered directories with files, without a tierckpt manifest."""
    root = tmp_path / "orbax"
    for step in (1, 2, 3):
        (root / f"{step}/default").mkdir(parents=True)
        (root / f"{step}/default/array").write_text("theirs")
    (root / "4").mkdir()
    before = sorted(root.rglob("*"))
    done = tierckpt_("prune", root, "--keep-last", 1, "--yes")
    assert done.code == 4
    assert "nothing to remove" in done.error["message"]
    assert sorted(root.rglob("*")) == before
    assert tierckpt_("prune", "/", "--keep-last", 1, "--yes").code == 4


@pytest.mark.slow
def test_foreign_entries_of_a_run_stay_and_are_listed(file_uri: str) -> None:
    save_steps(file_uri, 1, 2, 3)
    dcp.save(small_state(0), checkpoint_id=f"{file_uri}/step-0", no_dist=True)
    (Path(file_uri) / "export-0").mkdir()
    (Path(file_uri) / "export-0/model.safetensors").write_text("theirs")
    (Path(file_uri) / "step-1/notes.txt").write_text("why this run diverged")
    (Path(file_uri) / "best").symlink_to("step-2")
    done = tierckpt_("prune", file_uri, "--keep-last", 1, "--yes")
    assert done.code == 0
    assert done.document["others"] == {
        "step-0": "saved by stock PyTorch",
        "export-0": "without a commit of tierckpt",
        "best": "a link",
    }
    assert outcomes(done)["step-2", "shared"] == ("kept", "best links to it")
    assert on_shared(file_uri) == [2, 3]
    assert [path.name for path in (Path(file_uri) / "step-1").rglob("*")] == ["notes.txt"]
    target = small_state(0)
    dcp.load(target, checkpoint_id=f"{file_uri}/step-0", no_dist=True)
    assert same(target, small_state(0))


def test_a_checkpoint_is_not_a_run(file_uri: str) -> None:
    save_steps(file_uri, 1)
    done = tierckpt_("prune", f"{file_uri}/step-1", "--keep-last", 1, "--yes")
    assert done.code == 2
    assert file_uri in done.error["hint"]


@pytest.mark.slow
def test_unreachable_storage_is_exit_7_and_nothing_is_removed(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(s3_uri, 1, 2)
    with monkeypatch.context() as away:
        away.setattr(retry, "RETRIES_MAX", 0)
        away.setenv("TIERCKPT_STORE_TIMEOUT_SECONDS", "2")
        away.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert tierckpt_("prune", s3_uri, "--keep-last", 1, "--yes").code == 7
    assert on_local(s3_uri) == on_shared(s3_uri) == [1, 2]


# --- protected checkpoints --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_damaged_newest_checkpoint_keeps_the_newest_good_one(run_uri: str) -> None:
    save_steps(run_uri, 1, 2, 3)
    client = get_client(Settings.load())
    store = client.mover.store(parse_uri(f"{run_uri}/step-3"))
    shard = next(path.name for path in directory_of(f"{run_uri}/step-3").glob("*.distcp"))
    client.run(store.delete(shard))
    close_all()
    done = tierckpt_("prune", run_uri, "--keep-last", 1, "--tier", "shared", "--yes")
    assert outcomes(done)["step-2", "shared"] == ("kept", "the newest sound one")
    assert {one["name"]: one["health"] for one in done.document["copies"] if one["tier"] == "shared"} == {
        "step-3": "damaged",
        "step-2": "whole",
        "step-1": None,
    }
    assert on_shared(run_uri) == [2, 3]
    shutil.rmtree(os.environ["TIERCKPT_LOCAL_ROOT"])
    assert tierckpt.latest(run_uri) == f"{run_uri}/step-2"
    assert same(load(f"{run_uri}/step-2", small_state(2)), small_state(2))


def test_undrained_checkpoint_stays_until_it_is_drained(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_EXIT_TIMEOUT_SECONDS", "0")
    save_steps(s3_uri, 1)
    with monkeypatch.context() as stuck:
        stuck.setattr("tierckpt.drain.background_drains.BackgroundDrains.submit", lambda self, token: None)
        for step in (2, 3):
            save(f"{s3_uri}/step-{step}", small_state(step))
        close_all()
    done = tierckpt_("prune", s3_uri, "--keep-last", 1, "--yes")
    assert outcomes(done)["step-2", "local"] == ("kept", "being saved or drained")
    assert on_local(s3_uri) == [2, 3]
    for entry in Journal(Settings.load().local_root).entries():
        Journal(Settings.load().local_root).remove(entry.token)  # a lost journal does not permit a removal
    done = tierckpt_("prune", s3_uri, "--keep-last", 1, "--yes")
    assert outcomes(done)["step-2", "local"] == ("kept", "not on the shared tier yet")
    assert on_local(s3_uri) == [2, 3]


def test_without_drains_the_local_tier_is_pruned_independently(file_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(file_uri, 1, 2, 3, drain=False)
    assert tierckpt_("prune", file_uri, "--keep-last", 1, "--yes").document["going"] == 0
    monkeypatch.setenv("TIERCKPT_DRAIN", "false")
    assert tierckpt_("prune", file_uri, "--keep-last", 1, "--yes").document["going"] == 2
    assert on_local(file_uri) == [3]


def test_last_copies_stay_if_the_shared_tier_is_lost(file_uri: str) -> None:
    save_steps(file_uri, 1, 2, 3)
    shutil.rmtree(file_uri)
    done = tierckpt_("prune", file_uri, "--keep-last", 1, "--yes")
    assert done.code == 0
    assert outcomes(done)["step-1", "local"] == ("kept", "the shared tier has lost it, and holds no newer one")
    assert on_local(file_uri) == [1, 2, 3]


def test_new_save_of_the_same_id_keeps_the_checkpoint_it_replaces(file_uri: str) -> None:
    save_steps(file_uri, 1, 2)
    claim = Path(file_uri) / "step-1/.tierckpt/claim.json"
    client = get_client(Settings.load())
    store = client.mover.store(parse_uri(f"{file_uri}/step-1"))
    standing = client.run(shared_commit.read_shared_manifest(store))
    assert standing is not None
    claim.unlink()
    later = replace(standing, attempt="later", replaces=(standing.attempt,))
    client.run(shared_commit.put_claim(store, parse_uri(f"{file_uri}/step-1"), later))
    close_all()
    done = tierckpt_("prune", file_uri, "--keep-last", 1, "--tier", "shared", "--yes")
    assert outcomes(done)["step-1", "shared"] == ("kept", "another save has claimed it")
    assert on_shared(file_uri) == [1, 2]
    assert json.loads(claim.read_text())["attempt"] == "later"
    assert not [*(Path(file_uri) / "step-1/.tierckpt").glob("removed/*")]


def test_one_failed_removal_is_exit_3_and_the_others_proceed(file_uri: str) -> None:
    save_steps(file_uri, 1, 2, 3)
    (Path(file_uri) / "step-1/.tierckpt/removed").write_text("in the way")
    done = tierckpt_("prune", file_uri, "--keep-last", 1, "--yes")
    assert done.code == 3
    assert outcomes(done)["step-1", "shared"][0] == "failed"
    assert done.document["failed"] == 1
    assert len(done.document["errors"]) == 1
    assert on_local(file_uri) == [3]
    assert on_shared(file_uri) == [1, 3]


# --- leases -----------------------------------------------------------------------------------------------------

READER = """
import sys, time
from pathlib import Path
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.disk import read_lease as leases
root = Path(sys.argv[1])
with leases.reading(root, local_dir(root, parse_uri(sys.argv[2]))):
    print("reading", flush=True)
    time.sleep(120)
"""


@contextmanager
def reader(uri: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds a lease on the checkpoint at ``uri``, as a restore does."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER, os.environ["TIERCKPT_LOCAL_ROOT"], uri], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_checkpoint_being_read_stays_until_its_reader_ends(run_uri: str) -> None:
    save_steps(run_uri, 1, 2, 3)
    with reader(f"{run_uri}/step-1") as process:
        done = tierckpt_("prune", run_uri, "--keep-last", 1, "--yes")
        assert outcomes(done)["step-1", "local"] == outcomes(done)["step-1", "shared"] == ("kept", "being read")
        assert on_local(run_uri) == on_shared(run_uri) == [1, 3]
        process.send_signal(signal.SIGKILL)  # no chance to release the lease
        process.wait()
        assert tierckpt_("prune", run_uri, "--keep-last", 1, "--yes").code == 0
    assert on_local(run_uri) == on_shared(run_uri) == [3]
    assert not list((Path(os.environ["TIERCKPT_LOCAL_ROOT"]) / "leases").iterdir())


def test_restore_holds_a_lease(s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention runs during a restore from the only copies."""
    save_steps(s3_uri, 1, 2)
    shutil.rmtree(os.environ["TIERCKPT_LOCAL_ROOT"])
    client, location, seen = get_client(Settings.load()), parse_uri(s3_uri), []
    fill = module.fill_directory

    async def pruned_meanwhile(*arguments: Any, **options: Any) -> Any:
        result = await client.mover.pruner.prune(location, Policy.of(keep_last=1))
        seen.extend(result.outcomes)
        return await fill(*arguments, **options)

    monkeypatch.setattr(module, "fill_directory", pruned_meanwhile)
    done = client.run(module.restore(client.mover, location.child("step-1"), tmp_path / "out"))
    assert done.files > 0
    assert [(one.copy.name, one.outcome, one.reason) for one in seen if one.copy.step == 1] == [
        ("step-1", "kept", "being read")
    ]
    monkeypatch.setattr(module, "fill_directory", fill)
    result = client.run(client.mover.pruner.prune(location, Policy.of(keep_last=1)))
    assert [one.copy.step for one in result.only("removed")] == [1]


def test_removal_before_the_lease_restarts_the_selection(
    file_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(file_uri, 1, 2)
    client = get_client(Settings.load())
    real, calls = read_lease.reading_async, []

    def late(root: Path, directory: Path) -> Any:
        calls.append(directory.name)
        if len(calls) == 1:  # between selection and lease
            shutil.rmtree(directory)
            shutil.rmtree(Path(file_uri) / "step-2")
        return real(root, directory)

    monkeypatch.setattr(read_lease, "reading_async", late)
    client.run(module.restore(client.mover, parse_uri(file_uri), tmp_path / "out"))
    assert calls == ["step-2", "step-1"]
    target = small_state(1)
    dcp.load(target, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert same(target, small_state(1))


def test_readers_share_a_lease_and_a_removal_does_not_wait(tmp_path: Path) -> None:
    directory = tmp_path / "step-1"
    with read_lease.reading(tmp_path, directory), read_lease.reading(tmp_path, directory):
        with read_lease.removing(tmp_path, directory) as free:  # this thread holds the read leases
            assert not free
        assert read_lease.is_read(tmp_path, directory)
    assert not read_lease.is_read(tmp_path, directory)
    with read_lease.removing(tmp_path, directory) as free:
        assert free


def test_reader_waits_for_a_removal_in_progress(tmp_path: Path) -> None:
    directory, order = tmp_path / "step-1", []

    async def read() -> None:
        async with read_lease.reading_async(tmp_path, directory):
            order.append("read")

    async def both() -> None:
        with read_lease.removing(tmp_path, directory) as free:
            assert free
            waiting = asyncio.create_task(read())
            await asyncio.sleep(0.1)
            order.append("removed")
        await waiting

    asyncio.run(both())
    assert order == ["removed", "read"]


def test_read_only_local_root_permits_reads(tmp_path: Path) -> None:
    (tmp_path / "leases").write_text("no directory can be made here")
    with read_lease.reading(tmp_path, tmp_path / "step-1"):
        pass


# --- in training ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "every", "local", "shared"),
    [
        (1, 4, [4, 6], [4, 6]),
        ({"local": 1, "shared": 2}, {"shared": 3}, [6], [3, 5, 6]),
        (None, {"shared": 2}, [1, 2, 3, 4, 5, 6], [2, 4, 6]),
    ],
)
def test_checkpointer_retention_by_last_and_every(
    last: Any, every: Any, local: list[int], shared: list[int], run_uri: str
) -> None:
    with Checkpointer(run_uri, keep_last=last, keep_every=every) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, {"value": torch.full((10,), step)})
            checkpointer.wait()
    assert on_local(run_uri) == local
    assert on_shared(run_uri) == shared


def test_quarantined_copy_is_removed_with_its_checkpoint(s3_uri: str) -> None:
    save_steps(s3_uri, 1, 2)
    directory = directory_of(f"{s3_uri}/step-1")
    shard = next(directory.glob("*.distcp"))
    flip(shard)
    load(f"{s3_uri}/step-1", small_state(1))
    close_all()
    assert shard.with_name(f"{shard.name}.bad").exists()
    assert tierckpt_("prune", s3_uri, "--keep-last", 1, "--yes").code == 0
    assert not directory.exists()


# --- after the trainer's end ------------------------------------------------------------------------------------------

SECONDS = 120.0
TRAINER = textwrap.dedent("""\
    import json, os, sys
    import torch
    import torch.distributed as dist
    import tierckpt

    uri, steps, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    checkpointer = tierckpt.Checkpointer(uri, interval=1, **options)
    for step in steps:
        checkpointer.save(step, {"model": model}).result()
    os._exit(0)  # no wait, no close: the drains are left to the agent
""")


@pytest.fixture
def paused(local_root: Path) -> None:
    """No drain before the trainer has exited."""
    change_control(local_root, paused=True)


def train(uri: str, steps: list[int], ranks: int = 1, *, mover: str = "agent", **options: Any) -> None:
    command = [sys.executable, "-c", TRAINER, uri, json.dumps(steps), json.dumps({"mover": mover, **options})]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]
        command = [sys.executable, *torchrun, *command]
    subprocess.run(command, check=True, timeout=SECONDS)


def let_drain(local_root: Path) -> None:
    """Return when the journal is empty and no run needs pruning."""
    change_control(local_root, paused=False)
    for _ in Poll(SECONDS):
        if not Journal(local_root).entries() and not has_due(local_root):
            return
    raise AssertionError(f"not drained and pruned: {Journal(local_root).entries()}, due: {has_due(local_root)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "local", "shared"),
    [
        ({"keep_last": 3}, [7, 8, 9], [7, 8, 9]),
        ({"keep_last": {"local": 1, "shared": 4}}, [9], [6, 7, 8, 9]),
        ({"keep_last": {"shared": 2}, "keep_every": {"shared": 4}}, [*range(1, 10)], [4, 8, 9]),
        ({}, [*range(1, 10)], [*range(1, 10)]),
        pytest.param({"keep_last": 2, "ranks": 2}, [8, 9], [8, 9], id="two ranks"),  # after the last one has drained
    ],
)
@pytest.mark.usefixtures("paused")
def test_agent_applies_the_retention_rule(
    options: dict[str, Any], local: list[int], shared: list[int], s3_uri: str, local_root: Path
) -> None:
    train(s3_uri, [*range(1, 10)], **options)
    assert on_local(s3_uri) == [*range(1, 10)]
    let_drain(local_root)
    assert (on_local(s3_uri), on_shared(s3_uri)) == (local, shared)


@pytest.mark.slow
@pytest.mark.usefixtures("paused")
def test_pruning_survives_agent_kills(s3_uri: str, local_root: Path) -> None:
    """It is killed repeatedly while draining and pruning; a new one continues each time."""
    train(s3_uri, [*range(1, 13)], keep_last=2, mover="inline")
    change_control(local_root, paused=False)
    lock = local_root / "agent" / "agent.lock"
    for left in (12, 9, 6, 3, 0, -1):  # checkpoints to drain when it is killed
        agent = [sys.executable, "-m", "tierckpt", "agent"]
        process = subprocess.Popen(agent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: lock.exists() and lock.read_text() == f"{process.pid}\n", "the agent to start")  # noqa: B023
        if left < 0:
            break
        until(lambda: len(Journal(local_root).entries()) <= left, "the agent to drain")  # noqa: B023
        process.kill()
        process.wait(SECONDS)
    let_drain(local_root)
    process.terminate()
    process.wait(SECONDS)
    assert on_local(s3_uri) == on_shared(s3_uri) == [11, 12]


def drain_by_command(local_root: Path) -> None:
    change_control(local_root, paused=False)
    assert run(["drain", "--wait"]) == 0
    close_all()


@pytest.mark.slow
@pytest.mark.usefixtures("paused")
@pytest.mark.parametrize(("later", "left"), [([], [3]), ([4, 5], [1, 2, 3, 4, 5])])
def test_drain_command_applies_the_rule_of_the_latest_job_start(
    later: list[int], left: list[int], s3_uri: str, local_root: Path
) -> None:
    train(s3_uri, [1, 2, 3], keep_last=1, mover="inline")
    if later:
        train(s3_uri, later, mover="inline")  # keeps everything
    drain_by_command(local_root)
    assert on_local(s3_uri) == on_shared(s3_uri) == left and not has_due(local_root)


@pytest.mark.slow
@pytest.mark.usefixtures("paused")
def test_job_that_shares_its_run_records_no_rule(file_uri: str, local_root: Path) -> None:
    uri, other = f"{file_uri}/run", {"what": "start", "host": "elsewhere", "pid": 1, "process": "1-1"}
    records = Path(uri, HISTORY_DIR)
    records.mkdir(parents=True)
    line = json.dumps({**other, "at": time.time() + SECONDS, "step": 3})
    (records / "elsewhere.jsonl").write_text(f"{line}\n")
    train(uri, [1, 2, 3, 4, 5], keep_last=1)
    let_drain(local_root)
    assert on_local(uri) == on_shared(uri) == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.usefixtures("paused")
def test_control_mover_without_pruning_is_detected(
    s3_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded bug of this file."""

    async def nothing(self: Pruner) -> bool:
        return False

    monkeypatch.setattr(Pruner, "prune_due", nothing)
    train(s3_uri, [1, 2, 3, 4], keep_last=1, mover="inline")
    drain_by_command(local_root)
    assert on_shared(s3_uri) == [1, 2, 3, 4] and has_due(local_root)
