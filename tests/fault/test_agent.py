"""The agent brings saves that a killed trainer staged or committed to both tiers (P6)."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.agents import agent_runs, start_agent, status, until
from tests.fault import agent_scenarios
from tests.fault.agent_scenarios import state_of, whole_state
from tests.fault.runner import Job, start
from tests.servers.faultproxy import FaultProxy, Kind, Plan
from tests.services import S3Server, in_full
from tests.states import load, same, save, zeros_like
from tests.users import as_user
from tierckpt.checkpoint.journal import Journal
from tierckpt.checkpoint.local_commit import is_drained, read_local_manifest
from tierckpt.client import close_all, get_client
from tierckpt.config import Settings
from tierckpt.drain.rate_limiter import change_control
from tierckpt.errors import TierckptError
from tierckpt.format.layout import agent_dir, local_dir, parse_uri
from tierckpt.format.manifest import Manifest
from tierckpt.ipc import agent_client
from tierckpt.ipc.agent_client import SOCKET, AgentClient, AgentUnavailableError
from tierckpt.quantities import human_bytes

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("short_idle_time")]

IDLE_SECONDS = 0.7
GRACE_SECONDS = 30.0
"""Enough to drain the newer of two checkpoints on a loaded machine; sends of the older one hang."""
SETTINGS = {"mover": "agent"}
JOB = {"idle_seconds": IDLE_SECONDS, **SETTINGS}


SAVE_METHODS = ("Checkpointer", "async_save", "async_save, ours", "without collectives")
KILL_POINTS = ("not begun", "handed in", "half flushed", "flushed", "ready", "committed")
ASYNC_SAVE_KILL_POINTS = ("noted", "told")


def points_of(way: str, world_size: int) -> tuple[str, ...]:
    return KILL_POINTS + (ASYNC_SAVE_KILL_POINTS if way.startswith("async_save") and world_size > 1 else ())


@pytest.fixture(autouse=True)
def agents_exit(tmp_path: Path) -> Iterator[None]:
    """Check that every agent exits once the processes of the test have ended."""
    yield
    close_all()
    for directory in [path.parent for path in tmp_path.rglob("agent.lock")]:
        root = directory.parent
        try:
            until(lambda root=root: not agent_runs(root), "the agent to exit")
        except AssertionError:
            log = (directory / "agent.log").read_text()[-2000:]
            os.kill(status(root)["pid"], signal.SIGKILL)
            pytest.fail(f"the agent of {root} is still running\n{log}")


def settings_of(root: Path, **settings: Any) -> Settings:
    return Settings.load(local_root=root, **SETTINGS | settings)


def is_idle(root: Path) -> bool:
    """Return whether the agent holds no saves, memory or processes and the journal is empty."""
    try:
        now = status(root)
    except AgentUnavailableError:
        return not Journal(root).entries()
    busy = now["staged_saves"] or now["memory_held_bytes"] or now["draining"] or now["processes"]
    return not busy and not Journal(root).entries()


def wait_until_idle(root: Path, job: Job) -> None:
    """Wait until the agent has finished all saves and drains."""
    try:
        until(lambda: is_idle(root), "the agent to finish", 170)
    except AssertionError as error:
        now = f"{status(root) if agent_runs(root) else 'no agent'} {Journal(root).entries()}"
        raise AssertionError(f"{error}\n{now}\n{log_of(root)}\n{job.output()}") from None


def log_of(root: Path) -> str:
    return (agent_dir(root) / "agent.log").read_text()


def assert_newest_is(uri: str, step: int, root: Path, world_size: int = 1, *, one_metadata: bool = True) -> None:
    """Check that the newest checkpoint is ``step`` and holds that step's state.

    ``one_metadata``: False after a save without collectives, which has metadata for each rank.
    """
    assert tierckpt.latest(uri, local_root=root) == f"{uri}/step-{step}"
    if one_metadata:
        assert holds_step(uri, step, root, world_size)
        return
    for rank in range(world_size):
        expected = state_of(rank, step, world_size)
        reader = tierckpt.TierStorageReader(f"{uri}/step-{step}", local_root=root)
        reader.read_metadata = functools.partial(reader.read_metadata, rank=rank)  # type: ignore[method-assign]
        found = zeros_like(expected)
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert same(found, expected)


def holds_step(uri: str, step: int, root: Path, world_size: int = 1) -> bool:
    expected = whole_state(step, world_size)
    return same(load(f"{uri}/step-{step}", expected, local_root=root), expected)


def killed_at(point: str, folder: Path, uri: str, ranks: int = 1, **options: Any) -> Job:
    """Run ``all_die`` to its end: each rank was killed, and at the point."""
    job = start(agent_scenarios.all_die, folder / "job", ranks, uri=uri, point=point, **JOB | options)
    assert job.codes() == [-signal.SIGKILL] * ranks, job.output()
    assert len(list(job.folder.glob("killed.*"))) == ranks
    return job


def nodes_of(root: Path) -> list[Path]:
    """The local roots of the two nodes of a job (agent_scenarios.py)."""
    return [root.with_name(f"{root.name}-{node}") for node in range(2)]


def shards_of_step_2(root: Path, uri: str) -> list[Path]:
    return [*local_dir(root, parse_uri(f"{uri}/step-2")).glob("*.distcp")]


def manifest_of(root: Path, uri: str, step: int) -> Manifest | None:
    return read_local_manifest(local_dir(root, parse_uri(f"{uri}/step-{step}")))


def lives_on(folder: Path, uri: str, ranks: int, **options: Any) -> Job:
    """Start ``saves_and_lives_on``, and wait until its ranks have saved all steps."""
    job = start(agent_scenarios.saves_and_lives_on, folder / "job", ranks, uri=uri, **JOB | options)
    until(lambda: len(list(job.folder.glob("saved.*"))) == ranks, "the saves")
    return job


def leave(job: Job) -> None:
    (job.folder / "leave").touch()
    assert job.codes() == [0] * len(job.pids), job.output()


# --- starting -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_concurrent_clients_start_one_agent_under_a_long_local_root(tmp_path: Path) -> None:
    root = tmp_path / ("deep" * 20) / ("deeper" * 20)  # longer than the 108 bytes of a socket address
    clients = [start(agent_scenarios.ask, tmp_path / f"client-{number}", root=str(root), **JOB) for number in range(4)]
    pids = {int(client.until(client.lines, "the answer")[0]) for client in clients}
    assert len(pids) == 1
    (pid,) = pids
    directory = agent_dir(root)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / SOCKET).stat().st_mode) == 0o600
    assert log_of(root).count("is ready") == 1
    assert [child for client in clients for child in _children_of(client.pids[0])] == [pid]  # one start only
    assert status(root)["processes"] == 4
    (tmp_path / "leave").touch()
    assert [client.codes() for client in clients] == [[0]] * 4


@pytest.mark.slow
def test_waiting_client_starts_the_agent_if_the_starter_is_killed(local_root: Path, tmp_path: Path) -> None:
    directory = agent_client.private_directory(local_root)
    starter = start(agent_scenarios.hold_lock, tmp_path / "starter", path=str(directory / agent_client.START_LOCK))
    assert starter.until(starter.lines, "the lock") == ["True"]
    with contextlib.closing(AgentClient(settings_of(local_root))) as client, ThreadPoolExecutor(1) as waiting:
        answer = waiting.submit(client.ask, {"op": "status"})
        time.sleep(0.5)
        assert not (directory / agent_client.LOG).exists()  # the waiting client starts no agent
        starter.kill()
        assert answer.result(60)["pid"]


def _children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def _connect_as(uid: int, directory: Path) -> str:
    """Return '' after an answer to a request of ``uid`` to the socket in ``directory``, or the error."""
    held = os.open(directory, os.O_PATH)  # bypasses the private parent directories

    def request() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(f"/proc/self/fd/{held}/{SOCKET}")
            connection.sendall(agent_client.encode({"op": "status"}))
            if not connection.recv(100):
                raise ConnectionResetError

    try:
        return as_user(uid, request)
    finally:
        os.close(held)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_are_rejected_by_directory_and_agent(local_root: Path) -> None:
    with contextlib.closing(AgentClient(settings_of(local_root))) as client:
        client.ask({"op": "status"})
        directory = agent_dir(local_root)
        assert _connect_as(0, directory) == ""  # control
        assert "PermissionError" in _connect_as(65534, directory)
        directory.chmod(0o711)
        (directory / SOCKET).chmod(0o666)
        assert _connect_as(65534, directory).startswith(("ConnectionResetError", "BrokenPipeError"))
        assert "user 65534" in log_of(local_root)
        with pytest.raises(TierckptError, match="must belong to this user alone"):
            AgentClient(client.settings).ask({"op": "status"})  # the client rejects a directory open to others
        directory.chmod(0o700)


# --- all ranks killed -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "point", "world_size"),
    [
        ("Checkpointer", "handed in", 4),
        ("async_save", "half flushed", 2),
        ("async_save, ours", "told", 2),
        ("without collectives", "committed", 2),
        *in_full([(way, point, size) for way in SAVE_METHODS for size in (1, 2, 4) for point in points_of(way, size)]),
    ],
)
def test_agent_commits_a_staged_save_of_killed_ranks(
    way: str, point: str, world_size: int, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = killed_at(point, tmp_path, file_uri, world_size, way=way)
    assert (job.folder / "was committed.0").exists() == (point == "committed")
    wait_until_idle(local_root, job)
    one_metadata = way != "without collectives"
    assert_newest_is(file_uri, 2, local_root, world_size, one_metadata=one_metadata)
    assert_newest_is(file_uri, 2, tmp_path / "another node", world_size, one_metadata=one_metadata)  # from shared
    manifest = manifest_of(local_root, file_uri, 2)
    assert manifest is not None
    assert is_drained(local_dir(local_root, parse_uri(f"{file_uri}/step-2")), manifest.attempt)
    assert (point in ("not begun", "handed in", "half flushed")) == ("written from memory" in log_of(local_root))
    until(lambda: not agent_runs(local_root), "the agent to exit", 25)
    left = {path.name for path in agent_dir(local_root).glob("*")} - {"history"}  # kept once a minute
    assert left == {"agent.lock", "agent.log"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "point"),
    [("Checkpointer", "half flushed"), *in_full([(way, point) for way in SAVE_METHODS for point in points_of(way, 4)])],
)
def test_agents_commit_a_staged_save_of_killed_ranks_on_two_nodes(
    way: str, point: str, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """The agents of the two nodes exchange records on the shared tier and remove them."""
    job = killed_at(point, tmp_path, file_uri, 4, way=way, nodes=2)
    roots = nodes_of(local_root)
    for root in roots:
        wait_until_idle(root, job)
    one_metadata = way != "without collectives"
    assert_newest_is(file_uri, 2, tmp_path / "another node", 4, one_metadata=one_metadata)
    for root in roots:
        assert_newest_is(file_uri, 2, root, 4, one_metadata=one_metadata)
        until(lambda root=root: not agent_runs(root), "the agents to exit", 25)
    assert not list(Path(file_uri, "step-2").rglob("wills/*"))


@pytest.mark.slow
@pytest.mark.parametrize("late", [3, *in_full([0])])
def test_save_of_two_nodes_is_discarded_if_one_rank_had_not_staged_it(
    late: int, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = killed_at("handed in", tmp_path, file_uri, 4, nodes=2, late=late, commit_timeout_seconds=3.0)
    roots = nodes_of(local_root)
    for root in roots:
        wait_until_idle(root, job)
        assert_newest_is(file_uri, 1, root, 4)
        assert shards_of_step_2(root, file_uri) == []
    # The other node may take more than three seconds to write the record of rank 2.
    told = r"nobody says what ranks \[(2, )?3\] had written" if late == 3 else "had not staged it"
    assert re.search(told, log_of(roots[0]))
    assert "the node of its coordinator has not committed it" in log_of(roots[1])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["async_save", *in_full(["without collectives"])])
def test_agent_releases_a_finished_save_of_live_trainers(
    way: str, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """Only the coordinator of ``dcp.async_save`` learns the result; it withdraws the handoffs of all ranks."""
    job = lives_on(tmp_path, file_uri, 3, way=way)
    assert not list(job.folder.glob("failed-*"))
    assert len(list(job.folder.glob("handed in.*"))) == 3
    now = until(lambda: (now := status(local_root)) and not now["staged_saves"] and now, "the end of the handoffs")
    assert (now["memory_held_bytes"], now["processes"], now["handoffs_executed"]) == (0, 3, 0)
    leave(job)
    wait_until_idle(local_root, job)
    assert "written from memory" not in log_of(local_root)
    assert_newest_is(file_uri, 3, local_root, 3, one_metadata=way == "async_save")


@pytest.mark.slow
def test_clean_exit_on_two_nodes_leaves_no_staged_save(file_uri: str, local_root: Path, tmp_path: Path) -> None:
    """The second node never learns the result of a save: its agent finds everything drained."""
    job = lives_on(tmp_path, file_uri, 2, way="async_save", nodes=2)
    roots = nodes_of(local_root)
    until(lambda: not any(Journal(root).entries() for root in roots), "the drains")
    leave(job)
    for root in roots:
        wait_until_idle(root, job)
        assert "staged by a trainer that died" not in log_of(root)
        assert "cannot be written to the local tier" not in log_of(root)
    assert_newest_is(file_uri, 3, tmp_path / "another node", 2)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [1, *in_full([0])])
def test_agent_releases_a_save_that_failed_on_one_rank(
    fails: int, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = lives_on(tmp_path, file_uri, 3, way="async_save", fails=fails)
    assert sorted(path.name for path in job.folder.glob("failed-*")) == [f"failed-2.{rank}" for rank in range(3)]
    until(lambda: not status(local_root)["staged_saves"], "the end of the handoffs")
    assert status(local_root)["handoffs_executed"] == 0
    leave(job)
    assert_newest_is(file_uri, 3, local_root, 3)
    assert manifest_of(local_root, file_uri, 2) is None
    os.kill(status(local_root)["pid"], signal.SIGKILL)  # would drain the other ranks' shards, which no rank commits


@pytest.mark.slow
@pytest.mark.parametrize("point", ["handed in", *in_full(["flushed"])])
def test_agent_commits_an_interrupted_direct_put(point: str, file_uri: str, local_root: Path, tmp_path: Path) -> None:
    """Shards on the shared tier are committed there; the others are written to the SSD from memory."""
    job = killed_at(point, tmp_path, file_uri, 2, is_direct_put=True)
    wait_until_idle(local_root, job)
    on_the_ssd = bool(shards_of_step_2(local_root, file_uri))
    assert_newest_is(file_uri, 2, local_root, 2)
    assert_newest_is(file_uri, 2, tmp_path / "another node", 2)
    assert on_the_ssd == (point == "handed in") == ("written from memory" in log_of(local_root))


@pytest.mark.slow
def test_client_throttles_the_drains_of_the_agent(local_root: Path) -> None:
    client = get_client(settings_of(local_root))

    def limit() -> int | None:
        with contextlib.suppress(AgentUnavailableError):
            return status(local_root)["drain_bytes_per_second"]
        return 0

    client.throttle(1_000_000, 60.0)
    until(lambda: limit() == 1_000_000, "the limit to reach the agent")
    client.throttle(None, 0.0)
    until(lambda: limit() is None, "the limit to be lifted")


@pytest.mark.slow
def test_save_is_discarded_if_one_rank_had_not_staged_it(file_uri: str, local_root: Path, tmp_path: Path) -> None:
    job = killed_at("handed in", tmp_path, file_uri, 2, late=1)
    wait_until_idle(local_root, job)
    assert "1 of its 2 ranks had staged it" in log_of(local_root)
    assert_newest_is(file_uri, 1, local_root, 2)
    assert shards_of_step_2(local_root, file_uri) == []


@pytest.mark.slow
def test_agent_drains_the_newest_local_checkpoint_of_a_dead_job(
    file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = start(agent_scenarios.keeps_and_dies, tmp_path / "job", uri=file_uri, **JOB)
    assert job.codes() == [-signal.SIGKILL], job.output()
    until(lambda: not agent_runs(local_root), "the agent to exit")  # no status requests: they keep it running
    assert not Journal(local_root).entries()
    assert_newest_is(file_uri, 4, tmp_path / "another node")
    drained = [path.name for path in Path(file_uri).glob("step-*")]
    assert sorted(drained) == ["step-1", "step-4"], "older local checkpoints need no drain"
    assert "its job ended" in log_of(local_root)


# --- one rank killed ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_rank_fails_the_save_on_all_ranks(file_uri: str, local_root: Path, tmp_path: Path) -> None:
    """The coordinator reports the failure: nothing is committed, and memory is released while other ranks live."""
    job = start(agent_scenarios.one_dies, tmp_path / "job", 3, uri=file_uri, killed=2, point="handed in", **JOB)
    outcomes = _outcomes_of(job, [0, 1])
    assert {outcome for outcome, _ in outcomes} == {"OperationTimeoutError"}, job.output()
    assert max(float(seconds) for _, seconds in outcomes) < 40
    until(lambda: status(local_root)["memory_held_bytes"] == 0, "the memory to be released")
    assert status(local_root)["processes"] == 2  # while they live
    (job.folder / "leave").touch()
    assert job.codes() == [0, 0, -signal.SIGKILL]
    wait_until_idle(local_root, job)
    assert_newest_is(file_uri, 1, local_root, 3)
    assert shards_of_step_2(local_root, file_uri) == []


@pytest.mark.slow
@pytest.mark.parametrize(("point", "before", "after"), [("flushed", 1, 2), ("committed", 2, 2)])
def test_save_survives_a_coordinator_killed_before_or_after_its_commit(
    point: str, before: int, after: int, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """No living rank knows whether the save was committed. The agent commits it when the others have ended."""
    job = start(agent_scenarios.one_dies, tmp_path / "job", 3, uri=file_uri, killed=0, point=point, **JOB)
    outcomes = _outcomes_of(job, [1, 2])
    assert "no error" not in {outcome for outcome, _ in outcomes}
    assert_newest_is(file_uri, before, local_root, 3)  # while they live
    (job.folder / "leave").touch()
    assert job.codes() == [-signal.SIGKILL, 0, 0]
    wait_until_idle(local_root, job)
    for root in (local_root, tmp_path / "another node"):
        assert_newest_is(file_uri, after, root, 3)


def _outcomes_of(job: Job, ranks: list[int]) -> list[tuple[str, str]]:
    files = [job.folder / f"outcome.{rank}" for rank in ranks]
    job.until(lambda: all(file.exists() and file.read_text() for file in files), "the outcomes of the other ranks")
    told = [file.read_text().split("|") for file in files]
    return [(outcome, seconds) for outcome, seconds in told]


# --- reused memory --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "right", "wrong"),
    [
        ("killed_while_a_slot_is_used_again", {1: True, 2: True, 3: True}, {1: True, 2: False, 3: True}),
        ("killed_when_a_staged_one_was_dropped", {1: True, 2: True, 4: True}, {1: True, 2: True, 3: False, 4: True}),
    ],
)
def test_agent_commits_no_save_whose_memory_was_reused(
    scenario: str, right: dict[int, bool], wrong: dict[int, bool], tmp_path: Path
) -> None:
    jobs = {}
    for seeded in (False, True):
        place, run = tmp_path / str(seeded), getattr(agent_scenarios, scenario)
        environment = {"TIERCKPT_LOCAL_ROOT": str(place / "local")}
        jobs[seeded] = start(run, place / "job", env=environment, uri=str(place / "run"), seeded=seeded, **JOB)
    for job in jobs.values():
        assert job.codes() == [-signal.SIGKILL], job.output()
        assert (job.folder / "killed.0").exists()
        assert (job.folder / "memory used again.0").exists(), job.output()  # the tested situation occurred
    assert _committed_after(jobs[False]) == right
    assert _committed_after(jobs[True]) == wrong  # control: the seeded bug is found


@pytest.mark.slow
def test_withdrawn_handoff_is_void_even_if_the_agent_is_unreachable(
    file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    scenario = agent_scenarios.killed_when_a_staged_one_was_dropped
    job = start(scenario, tmp_path / "job", uri=file_uri, is_deaf=True, **JOB)
    assert job.codes() == [-signal.SIGKILL], job.output()
    assert (job.folder / "memory used again.0").exists(), job.output()
    wait_until_idle(local_root, job)
    assert manifest_of(local_root, file_uri, 3) is None
    assert_newest_is(file_uri, 4, local_root)


def _committed_after(job: Job) -> dict[int, bool]:
    """Return, for each committed step, whether it holds that step's state."""
    root, uri = job.folder.parent / "local", str(job.folder.parent / "run")
    wait_until_idle(root, job)
    steps = sorted(int(path.name.removeprefix("step-")) for path in local_dir(root, parse_uri(uri)).glob("step-*"))
    committed = [step for step in steps if manifest_of(root, uri, step)]
    return {step: holds_step(uri, step, root) for step in committed}


# --- restart --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_restarted_trainer_waits_for_the_staged_save_despite_live_workers(
    file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = start(agent_scenarios.killed_while_workers_live_on, tmp_path / "job", uri=file_uri, **JOB)
    assert job.codes() == [-signal.SIGKILL], job.output()
    assert (job.folder / "killed.0").exists()
    workers = [int((job.folder / name).read_text()) for name in ("worker", "forked")]
    try:
        again = start(agent_scenarios.restarts, tmp_path / "again", uri=file_uri, **JOB)
        assert again.result() == [2, True], log_of(local_root)
        assert all(_state_of(worker) != "Z" for worker in workers)  # the workers are alive
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
    wait_until_idle(local_root, again)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["ready", *in_full(["not begun"])])
def test_latest_waits_for_a_staged_save(point: str, file_uri: str, local_root: Path, tmp_path: Path) -> None:
    """A new save of the same id replaces it."""
    killed_at(point, tmp_path, file_uri, way="async_save")
    (tmp_path / "again").mkdir()
    (tmp_path / "again/go").touch()
    saved = {"way": "async_save", "step": 2, "as_step": 2}
    again = start(agent_scenarios.restarts_and_saves, tmp_path / "again", uri=file_uri, **saved, **JOB)
    assert again.result() == f"{file_uri}/step-2"
    wait_until_idle(local_root, again)
    assert_newest_is(file_uri, 2, local_root)


# --- the drain ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_drain_resumes_after_trainer_and_agent_die_without_resending(
    moto: S3Server, s3_uri: str, local_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, puts = FaultProxy(moto.endpoint), Counter[str]()
    trainer_is_dead, agent_is_dead = threading.Event(), threading.Event()
    holds = {3: trainer_is_dead, 6: agent_is_dead}

    def count(verb: str, path: str, head: bytes) -> None:
        if verb == "PUT" and ".distcp" in path:
            puts[path.partition("?")[0]] += 1
            if len(puts) in holds:
                holds[len(puts)].wait(60)

    proxy.answer = count
    slow = {"shard_size_bytes_max": 150_000, "concurrency": 1, "staging_memory": "private"}
    with proxy.running() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        settings = JOB | slow | {"drain_bytes_per_second": 500_000}
        job = start(agent_scenarios.saves_and_stays, tmp_path / "job", uri=s3_uri, **settings)
        until(lambda: len(puts) >= 2, "the drain to begin")
        job.kill()
        assert job.codes() == [-signal.SIGKILL]
        after_trainer = len(puts)
        trainer_is_dead.set()
        (entry,) = Journal(local_root).entries()
        until(lambda: len(puts) >= after_trainer + 2, "the agent to continue without the trainer")
        os.kill(status(local_root)["pid"], signal.SIGKILL)
        until(lambda: not agent_runs(local_root), "the agent to die")
        agent_is_dead.set()
        finished = len(puts)
        shards = [file for file in entry.files if file.path.endswith(".distcp")]
        assert finished < len(shards)  # the kills interrupted the drain
        assert Journal(local_root).entries() == [entry]
        start(agent_scenarios.restarts, tmp_path / "again", uri=s3_uri, **JOB | slow).codes()
        until(lambda: is_idle(local_root), "the next agent to finish")
    assert len(puts) == len(shards)
    assert sum(puts.values()) <= len(shards) + 1, puts  # one was in flight at the kill
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    close_all()
    assert_newest_is(s3_uri, 1, tmp_path / "another node")


@pytest.mark.slow
def test_sigterm_drains_newest_first_within_the_grace_period(
    s3_uri: str, local_root: Path, moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_control(local_root, paused=True)  # saves stay in the journal
    for step in (1, 2):
        save(f"{s3_uri}/step-{step}", whole_state(step))
    close_all()
    (_, oldest) = Journal(local_root).entries()
    proxy = FaultProxy(moto.endpoint)
    proxy.plans[s3_uri.split("/")[2]] = Plan(Kind.HANG, 1.0, only=lambda verb, path: verb == "PUT" and "step-1" in path)
    with proxy.running() as endpoint, monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", endpoint)
        process = start_agent(settings_of(local_root, grace_seconds=GRACE_SECONDS, concurrency=1), IDLE_SECONDS)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        change_control(local_root, paused=False)
        until(lambda: len(Journal(local_root).entries()) == 1, "the drain of the newer")
        assert process.wait(60) == 3
        assert time.monotonic() - started > GRACE_SECONDS - 0.5
    assert [entry.uri for entry in Journal(local_root).entries()] == [oldest.uri]
    assert f"{oldest.uri} ({human_bytes(oldest.size_bytes)}) is not on the shared tier yet" in log_of(local_root)

    process = start_agent(settings_of(local_root, grace_seconds=60.0), IDLE_SECONDS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert Journal(local_root).entries() == []
    for step in (1, 2):
        assert holds_step(s3_uri, step, local_root.parent / "another node")
