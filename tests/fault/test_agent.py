"""The agent: what a killed trainer had staged or committed reaches both tiers without it (P6)."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.fault.agent_scenarios import state_of, whole_state
from tests.fault.nursery import Job, Nursery
from tests.servers.faultproxy import FaultProxy, Kind, Plan
from tests.services import S3Server, in_full
from tests.states import load, same, save, zeros_like
from tierckpt.checkpoint.journal import Journal
from tierckpt.checkpoint.local_commit import read_local_manifest
from tierckpt.checkpoint.marks import is_drained
from tierckpt.client import close_all, get_client
from tierckpt.config import Settings
from tierckpt.disk.file_lock import try_lock
from tierckpt.drain.rate_limiter import change_control
from tierckpt.errors import TierckptError
from tierckpt.format.layout import agent_dir, local_dir, parse_uri
from tierckpt.ipc import agent_client as contacts
from tierckpt.ipc.agent_client import SOCKET, AgentClient, AgentUnavailableError
from tierckpt.quantities import human_bytes

pytestmark = pytest.mark.distributed

IDLE_SECONDS = 0.7
GRACE_SECONDS = 6.0
"""The newest of two is drained by then, on a busy machine too. What is sent of the other hangs."""
SETTINGS = {"mover": "agent"}
JOB = {"idle_seconds": IDLE_SECONDS, **SETTINGS}


WAYS = ("Checkpointer", "async_save", "async_save, ours", "without collectives")
POINTS = ("not begun", "handed in", "half flushed", "flushed", "ready", "committed")
OF_ASYNC_SAVE = ("noted", "told")


@pytest.fixture(autouse=True)
def short_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that this process starts leave soon."""
    monkeypatch.setattr(contacts, "IDLE_SECONDS", IDLE_SECONDS)


def points_of(way: str, world_size: int) -> tuple[str, ...]:
    return POINTS + (OF_ASYNC_SAVE if way.startswith("async_save") and world_size > 1 else ())


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery.running("tests.fault.agent_scenarios") as running:
        yield running


@pytest.fixture(autouse=True)
def no_agent_is_left(tmp_path: Path) -> Iterator[None]:
    """Every agent of a test leaves by itself when the test's processes have ended."""
    yield
    close_all()
    for directory in [path.parent for path in tmp_path.rglob("agent.lock")]:
        root = directory.parent
        try:
            until(lambda root=root: not runs(root), 60, "the agent to leave")
        except AssertionError:
            log = (directory / "agent.log").read_text()[-2000:]
            os.kill(status(root)["pid"], signal.SIGKILL)
            pytest.fail(f"an agent is left behind for {root}\n{log}")


def until(is_true: Callable[[], Any], timeout_seconds: float, what: str) -> Any:
    deadline = time.monotonic() + timeout_seconds
    while not (value := is_true()):
        assert time.monotonic() < deadline, f"waited {timeout_seconds} s for {what}"
        time.sleep(0.03)
    return value


def runs(root: Path) -> bool:
    with try_lock(agent_dir(root) / "agent.lock") as free:
        return not free


def ask(root: Path, op: str, **message: Any) -> Any:
    contact = AgentClient(Settings.load(local_root=root, **SETTINGS))
    try:
        return contact.ask({"op": op, **message}, start=False)
    finally:
        contact.close()


def status(root: Path) -> dict[str, Any]:
    answer: dict[str, Any] = ask(root, "status")
    return answer


def answers(root: Path) -> bool:
    with contextlib.suppress(AgentUnavailableError):
        return bool(status(root))
    return False


def is_quiet(root: Path) -> bool:
    """The agent has nothing in its hands and nothing before it."""
    try:
        now = status(root)
    except AgentUnavailableError:
        return not Journal(root).entries()
    busy = now["staged_saves"] or now["memory_held_bytes"] or now["draining"] or now["processes"]
    return not busy and not Journal(root).entries()


def settle(root: Path, job: Job) -> None:
    """Wait until the agent has done all that is to do."""
    try:
        until(lambda: is_quiet(root), 170, "the agent to finish")
    except AssertionError as error:
        now = f"{status(root) if runs(root) else 'no agent'} {Journal(root).entries()}"
        raise AssertionError(f"{error}\n{now}\n{log_of(root)}\n{job.output()}") from None


def log_of(root: Path) -> str:
    return (agent_dir(root) / "agent.log").read_text()


def assert_is_step(uri: str, step: int, root: Path, world_size: int = 1, *, is_one: bool = True) -> None:
    """The newest checkpoint is ``step``, and it is what was saved as that.

    ``is_one``: False when it was saved without collectives, so that each rank has metadata of its own.
    """
    assert tierckpt.latest(uri, local_root=root) == f"{uri}/step-{step}"
    if is_one:
        assert holds(uri, step, root, world_size)
        return
    for rank in range(world_size):
        wanted, reader = (
            state_of(rank, step, world_size),
            tierckpt.TierStorageReader(f"{uri}/step-{step}", local_root=root),
        )
        reader.read_metadata = functools.partial(reader.read_metadata, rank=rank)  # type: ignore[method-assign]
        found = zeros_like(wanted)
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert same(found, wanted)


def holds(uri: str, step: int, root: Path, world_size: int = 1) -> bool:
    wanted = whole_state(step, world_size)
    return same(load(f"{uri}/step-{step}", wanted, local_root=root), wanted)


# --- starting -------------------------------------------------------------------------------------------------------

ASKS = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from tierckpt.config import Settings\n"
    "from tierckpt.ipc import agent_client as client\n"
    "folder, root = map(Path, sys.argv[1:])\n"
    "client.IDLE_SECONDS = 0.7\n"
    "contact = client.shared_client(Settings.load(local_root=root, mover='agent'))\n"
    "(folder / f'ready.{id(folder)}.{time.monotonic_ns()}').touch()\n"
    "while len(list(folder.glob('ready.*'))) < 4: time.sleep(0.001)\n"
    "print(contact.ask({'op': 'status'})['pid'], flush=True)\n"
    "sys.stdin.readline()\n"
)


@pytest.mark.slow
def test_four_processes_that_need_it_at_once_get_one_agent_under_any_local_root(tmp_path: Path) -> None:
    root = tmp_path / ("deep" * 20) / ("deeper" * 20)  # more than the 108 bytes of a socket's address
    folder = tmp_path / "ready"
    folder.mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ASKS, str(folder), str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        pids = {int(process.stdout.readline()) for process in processes if process.stdout is not None}
        assert len(pids) == 1
        (pid,) = pids
        directory = agent_dir(root)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / SOCKET).stat().st_mode) == 0o600
        assert log_of(root).count("is ready") == 1
        assert [child for process in processes for child in _children_of(process.pid)] == [pid]  # who waits starts none
        assert status(root)["processes"] == 4
    finally:
        for process in processes:
            process.communicate("\n", timeout=60)
    assert [process.returncode for process in processes] == [0] * 4


HOLDS = (
    "import fcntl, os, sys, time\n"
    "fcntl.flock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)\n"
    "print(flush=True)\n"
    "time.sleep(60)\n"
)


@pytest.mark.slow
def test_the_start_of_a_process_that_was_killed_is_made_by_who_waited_for_it(local_root: Path) -> None:
    directory = contacts.private_directory(local_root)
    command = [sys.executable, "-c", HOLDS, str(directory / contacts.START_LOCK)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as starter,
        contextlib.closing(AgentClient(Settings.load(local_root=local_root, **SETTINGS))) as contact,
        ThreadPoolExecutor(1) as waiting,
    ):
        assert starter.stdout is not None
        starter.stdout.readline()
        answer = waiting.submit(contact.ask, {"op": "status"})
        time.sleep(0.5)
        assert not (directory / contacts.LOG).exists()  # who waits has started none
        starter.kill()
        assert answer.result(60)["pid"]


def _children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def _connect_as(uid: int, directory: Path) -> str:
    """What a process of ``uid`` meets at the socket in ``directory``."""
    held = os.open(directory, os.O_PATH)  # a way past the directories above it, which are private too
    outcomes = ["answered", "refused", "may not", "failed"]
    child = os.fork()
    if child == 0:
        outcome = "failed"
        with contextlib.suppress(Exception):
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            outcome = _meet(f"/proc/self/fd/{held}/{SOCKET}")
        os._exit(outcomes.index(outcome))
    os.close(held)
    return outcomes[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def _meet(path: str) -> str:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    try:
        connection.connect(path)
        connection.sendall(contacts.encode({"op": "status"}))
        return "answered" if connection.recv(100) else "refused"
    except ConnectionError:
        return "refused"
    except PermissionError:
        return "may not"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_by_the_directory_and_by_the_agent(local_root: Path) -> None:
    with contextlib.closing(AgentClient(Settings.load(local_root=local_root, **SETTINGS))) as contact:
        contact.ask({"op": "status"})
        directory = agent_dir(local_root)
        assert _connect_as(0, directory) == "answered"  # control: the way is right
        assert _connect_as(65534, directory) == "may not"
        directory.chmod(0o711)
        (directory / SOCKET).chmod(0o666)
        assert _connect_as(65534, directory) == "refused"
        assert "user 65534" in log_of(local_root)
        with pytest.raises(TierckptError, match="must belong to this user alone"):
            AgentClient(contact.settings).ask({"op": "status"})  # nor is a directory used that others may look into
        directory.chmod(0o700)


# --- staged, not flushed --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "point", "world_size"),
    [
        ("Checkpointer", "handed in", 4),
        ("async_save", "half flushed", 2),
        ("async_save, ours", "told", 2),
        ("without collectives", "committed", 2),
        *in_full([(way, point, size) for way in WAYS for size in (1, 2, 4) for point in points_of(way, size)]),
    ],
)
def test_what_was_staged_when_all_ranks_were_killed_is_committed(
    way: str, point: str, world_size: int, nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = nursery.start("all_die", tmp_path / "job", world_size, uri=file_uri, way=way, point=point, **JOB)
    assert job.codes() == [-signal.SIGKILL] * world_size, job.output()
    assert len(list(job.folder.glob("killed.*"))) == world_size  # every kill hit where it was meant to
    assert (job.folder / "was committed.0").exists() == (point == "committed")
    settle(local_root, job)
    is_one = way != "without collectives"
    assert_is_step(file_uri, 2, local_root, world_size, is_one=is_one)
    assert_is_step(file_uri, 2, tmp_path / "another node", world_size, is_one=is_one)  # on the shared tier too
    assert is_drained(local_dir(local_root, parse_uri(f"{file_uri}/step-2")), _attempt(local_root, file_uri))
    assert (point in ("not begun", "handed in", "half flushed")) == ("written from memory" in log_of(local_root))
    until(lambda: not runs(local_root), 25, "the agent to leave")
    left = {path.name for path in agent_dir(local_root).glob("*")} - {"history"}  # kept once a minute
    assert left == {"agent.lock", "agent.log"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "point"),
    [
        ("Checkpointer", "half flushed"),
        *in_full([(way, point) for way in WAYS for point in points_of(way, 4)]),
    ],
)
def test_what_was_staged_on_two_nodes_when_all_ranks_were_killed_is_committed(
    way: str, point: str, nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """The nodes meet on the shared tier; nothing of that is left there."""
    job = nursery.start("all_die", tmp_path / "job", 4, uri=file_uri, way=way, point=point, nodes=2, **JOB)
    assert job.codes() == [-signal.SIGKILL] * 4, job.output()
    assert len(list(job.folder.glob("killed.*"))) == 4
    roots = [local_root.with_name(f"{local_root.name}-{node}") for node in range(2)]
    for root in roots:
        settle(root, job)
    is_one = way != "without collectives"
    assert_is_step(file_uri, 2, tmp_path / "another node", 4, is_one=is_one)
    for root in roots:
        assert_is_step(file_uri, 2, root, 4, is_one=is_one)
        until(lambda root=root: not runs(root), 25, "the agents to leave")
    assert not list(Path(file_uri, "step-2").rglob("wills/*"))


@pytest.mark.slow
@pytest.mark.parametrize("late", [3, *in_full([0])])
def test_a_save_of_two_nodes_that_one_rank_had_not_staged_is_none(
    late: int, nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    patience = {"commit_timeout_seconds": 3.0}
    job = nursery.start(
        "all_die", tmp_path / "job", 4, uri=file_uri, point="handed in", nodes=2, late=late, **JOB | patience
    )
    assert job.codes() == [-signal.SIGKILL] * 4, job.output()
    roots = [local_root.with_name(f"{local_root.name}-{node}") for node in range(2)]
    for root in roots:
        settle(root, job)
        assert_is_step(file_uri, 1, root, 4)
        assert list(local_dir(root, parse_uri(f"{file_uri}/step-2")).glob("*.distcp")) == []
    # The other node may need longer than the three seconds to write the record of rank 2.
    told = r"nobody says what ranks \[(2, )?3\] had written" if late == 3 else "had not staged it"
    assert re.search(told, log_of(roots[0]))
    assert "the node of its coordinator has not committed it" in log_of(roots[1])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["async_save", *in_full(["without collectives"])])
def test_the_agent_keeps_nothing_of_a_save_that_has_ended_though_its_trainers_live_on(
    way: str, nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """Only the coordinator of ``dcp.async_save`` hears how it ends: it takes back the handoffs of all."""
    job = nursery.start("saves_and_lives_on", tmp_path / "job", 3, uri=file_uri, way=way, **JOB)
    until(lambda: len(list(job.folder.glob("saved.*"))) == 3, 60, "the saves")
    assert not list(job.folder.glob("failed-*"))
    assert len(list(job.folder.glob("handed in.*"))) == 3
    now = until(lambda: (now := status(local_root)) and not now["staged_saves"] and now, 60, "the handoffs to go")
    assert (now["memory_held_bytes"], now["processes"], now["wills_executed"]) == (0, 3, 0)
    (job.folder / "leave").touch()
    assert job.codes() == [0, 0, 0], job.output()
    settle(local_root, job)
    assert "written from memory" not in log_of(local_root)
    assert_is_step(file_uri, 3, local_root, 3, is_one=way == "async_save")


@pytest.mark.slow
def test_a_job_of_two_nodes_that_ends_in_order_leaves_no_will_to_execute(
    nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """The second node never hears how a save ends: its agent finds that all of it is drained."""
    job = nursery.start("saves_and_lives_on", tmp_path / "job", 2, uri=file_uri, way="async_save", nodes=2, **JOB)
    until(lambda: len(list(job.folder.glob("saved.*"))) == 2, 60, "the saves")
    roots = [local_root.with_name(f"{local_root.name}-{node}") for node in range(2)]
    until(lambda: not any(Journal(root).entries() for root in roots), 60, "the drains")
    (job.folder / "leave").touch()
    assert job.codes() == [0, 0], job.output()
    for root in roots:
        settle(root, job)
        assert "staged by a trainer that has ended" not in log_of(root)
        assert "cannot be written to the local tier" not in log_of(root)
    assert_is_step(file_uri, 3, tmp_path / "another node", 2)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [1, *in_full([0])])
def test_the_agent_keeps_nothing_of_a_save_that_failed_on_one_rank(
    fails: int, nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = nursery.start("saves_and_lives_on", tmp_path / "job", 3, uri=file_uri, way="async_save", fails=fails, **JOB)
    until(lambda: len(list(job.folder.glob("saved.*"))) == 3, 60, "the saves")
    assert sorted(path.name for path in job.folder.glob("failed-*")) == [f"failed-2.{rank}" for rank in range(3)]
    until(lambda: not status(local_root)["staged_saves"], 60, "the handoffs to go")
    assert status(local_root)["wills_executed"] == 0
    (job.folder / "leave").touch()
    assert job.codes() == [0, 0, 0], job.output()
    assert_is_step(file_uri, 3, local_root, 3)
    assert read_local_manifest(local_dir(local_root, parse_uri(f"{file_uri}/step-2"))) is None
    os.kill(status(local_root)["pid"], signal.SIGKILL)  # it drains what the other ranks wrote, which nobody commits


@pytest.mark.slow
@pytest.mark.parametrize("point", ["handed in", *in_full(["flushed"])])
def test_what_was_on_its_way_straight_to_the_shared_tier_is_committed(
    point: str, nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """Shards that had arrived are taken as they are; those that had not are written from memory, to the SSD."""
    job = nursery.start("all_die", tmp_path / "job", 2, uri=file_uri, point=point, is_direct_put=True, **JOB)
    assert job.codes() == [-signal.SIGKILL] * 2, job.output()
    assert len(list(job.folder.glob("killed.*"))) == 2
    settle(local_root, job)
    on_the_ssd = bool(list(local_dir(local_root, parse_uri(f"{file_uri}/step-2")).glob("*.distcp")))
    assert_is_step(file_uri, 2, local_root, 2)
    assert_is_step(file_uri, 2, tmp_path / "another node", 2)
    assert on_the_ssd == (point == "handed in") == ("written from memory" in log_of(local_root))


@pytest.mark.slow
def test_a_job_throttles_the_drains_of_the_agent(local_root: Path) -> None:
    client = get_client(Settings.load(local_root=local_root, **SETTINGS))

    def limit() -> int | None:
        return status(local_root)["drain_bytes_per_second"]

    client.throttle(1_000_000, 60.0)
    until(lambda: answers(local_root), 60, "the agent to start")
    until(lambda: limit() == 1_000_000, 60, "the agent to hear of it")
    client.throttle(None, 0.0)
    until(lambda: limit() is None, 60, "the agent to hear that it is over")


def _attempt(root: Path, uri: str) -> str:
    manifest = read_local_manifest(local_dir(root, parse_uri(f"{uri}/step-2")))
    assert manifest is not None
    return manifest.attempt


@pytest.mark.parametrize("world_size", [2])
def test_a_save_that_one_rank_had_not_staged_is_none(
    world_size: int, nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = nursery.start("one_never_stages", tmp_path / "job", world_size, uri=file_uri, **JOB)
    assert job.codes() == [-signal.SIGKILL] * world_size, job.output()
    assert len(list(job.folder.glob("killed.*"))) == world_size
    settle(local_root, job)
    assert "1 of its 2 ranks had staged it" in log_of(local_root)
    assert_is_step(file_uri, 1, local_root, world_size)
    assert list(local_dir(local_root, parse_uri(f"{file_uri}/step-2")).glob("*.distcp")) == []


@pytest.mark.slow
def test_the_newest_that_a_dead_job_has_kept_on_the_ssd_is_drained(
    nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = nursery.start("keeps_and_dies", tmp_path / "job", uri=file_uri, **JOB)
    assert job.codes() == [-signal.SIGKILL], job.output()
    until(lambda: not runs(local_root), 60, "the agent to leave")  # unasked: who asks it keeps it busy
    assert not Journal(local_root).entries()
    assert_is_step(file_uri, 4, tmp_path / "another node")
    drained = [path.name for path in Path(file_uri).glob("step-*")]
    assert sorted(drained) == ["step-1", "step-4"], "what is behind it is worth nothing any more"
    assert "its job has ended" in log_of(local_root)


# --- one rank killed ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_is_killed_fails_the_save_on_all(
    nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """The coordinator lives and says so: nothing is committed, and no memory is kept while the others live on."""
    job = nursery.start("one_dies", tmp_path / "job", 3, uri=file_uri, killed=2, point="handed in", **JOB)
    outcomes = _outcomes_of(job, [0, 1])
    assert {outcome for outcome, _ in outcomes} == {"OperationTimeoutError"}, job.output()
    assert max(float(seconds) for _, seconds in outcomes) < 40
    until(lambda: status(local_root)["memory_held_bytes"] == 0, 60, "the memory to be released")
    assert status(local_root)["processes"] == 2  # while they live
    (job.folder / "leave").touch()
    assert job.codes() == [0, 0, -signal.SIGKILL]
    settle(local_root, job)
    assert_is_step(file_uri, 1, local_root, 3)
    assert list(local_dir(local_root, parse_uri(f"{file_uri}/step-2")).glob("*.distcp")) == []


@pytest.mark.slow
def test_when_the_coordinator_is_killed_what_the_others_wrote_is_not_thrown_away(
    nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """Nobody alive knows whether it was committed. It was not, and when the others have ended too, it is."""
    job = nursery.start("one_dies", tmp_path / "job", 3, uri=file_uri, killed=0, point="flushed", **JOB)
    outcomes = _outcomes_of(job, [1, 2])
    assert "no error" not in {outcome for outcome, _ in outcomes}
    assert tierckpt.latest(file_uri) == f"{file_uri}/step-1"
    (job.folder / "leave").touch()
    assert job.codes() == [-signal.SIGKILL, 0, 0]
    settle(local_root, job)
    assert_is_step(file_uri, 2, local_root, 3)


@pytest.mark.slow
def test_when_the_coordinator_is_killed_after_its_commit_the_others_keep_what_it_names(
    nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = nursery.start("one_dies", tmp_path / "job", 3, uri=file_uri, killed=0, point="committed", **JOB)
    outcomes = _outcomes_of(job, [1, 2])
    assert "no error" not in {outcome for outcome, _ in outcomes}  # they cannot know
    assert_is_step(file_uri, 2, local_root, 3)  # while they live
    (job.folder / "leave").touch()
    assert job.codes() == [-signal.SIGKILL, 0, 0]
    settle(local_root, job)
    assert_is_step(file_uri, 2, tmp_path / "another node", 3)


def _outcomes_of(job: Job, ranks: list[int]) -> list[tuple[str, str]]:
    files = [job.folder / f"outcome.{rank}" for rank in ranks]
    try:
        until(
            lambda: all(file.exists() and file.read_text() for file in files), 60, "the others to say what became of it"
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.output()}") from None
    told = [file.read_text().split("|") for file in files]
    return [(outcome, seconds) for outcome, seconds in told]


# --- memory that is used again --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "right", "wrong"),
    [
        ("killed_while_a_slot_is_used_again", {1: True, 2: True, 3: True}, {1: True, 2: False, 3: True}),
        ("killed_when_a_staged_one_was_dropped", {1: True, 2: True, 4: True}, {1: True, 2: True, 3: False, 4: True}),
    ],
)
def test_no_checkpoint_is_ever_made_of_memory_that_another_one_has_taken(
    scenario: str,
    right: dict[int, bool],
    wrong: dict[int, bool],
    nursery: Nursery,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = {}
    for seeded in (False, True):
        place = tmp_path / str(seeded)
        monkeypatch.setenv("TIERCKPT_LOCAL_ROOT", str(place / "local"))
        jobs[seeded] = nursery.start(scenario, place / "job", uri=str(place / "run"), seeded=seeded, **JOB)
    for job in jobs.values():
        assert job.codes() == [-signal.SIGKILL], job.output()
        assert (job.folder / "killed.0").exists()
        assert (job.folder / "memory used again.0").exists(), job.output()  # what this is about did happen
    assert _committed_after(jobs[False]) == right
    assert _committed_after(jobs[True]) == wrong  # the control: this harness can find it


@pytest.mark.slow
def test_a_will_is_worth_nothing_once_it_is_taken_back_though_the_agent_could_not_be_told(
    nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    scenario = "killed_when_a_staged_one_was_dropped"
    job = nursery.start(scenario, tmp_path / "job", uri=file_uri, is_deaf=True, **JOB)
    assert job.codes() == [-signal.SIGKILL], job.output()
    assert (job.folder / "memory used again.0").exists(), job.output()
    settle(local_root, job)
    assert read_local_manifest(local_dir(local_root, parse_uri(f"{file_uri}/step-3"))) is None
    assert_is_step(file_uri, 4, local_root)


def _committed_after(job: Job) -> dict[int, bool]:
    """For each step that is committed then: whether it holds what was saved as that step."""
    root, uri = job.folder.parent / "local", str(job.folder.parent / "run")
    settle(root, job)
    steps = sorted(int(path.name.removeprefix("step-")) for path in local_dir(root, parse_uri(uri)).glob("step-*"))
    committed = [step for step in steps if read_local_manifest(local_dir(root, parse_uri(f"{uri}/step-{step}")))]
    return {step: holds(uri, step, root) for step in committed}


# --- restart --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_restarted_trainer_waits_for_what_was_staged_though_workers_of_the_dead_one_live_on(
    nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = nursery.start("killed_while_workers_live_on", tmp_path / "job", uri=file_uri, **JOB)
    assert job.codes() == [-signal.SIGKILL], job.output()
    assert (job.folder / "killed.0").exists()
    workers = [int((job.folder / name).read_text()) for name in ("worker", "forked")]
    try:
        again = nursery.start("restarts", tmp_path / "again", uri=file_uri, **JOB)
        assert again.codes() == [0], again.output()
        step, is_same, _ = (again.folder / "restored").read_text().split("|")
        assert (step, is_same) == ("2", "True"), log_of(local_root)
        assert all(_state_of(worker) != "Z" for worker in workers)  # they did live on
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
    settle(local_root, again)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["ready", *in_full(["not begun"])])
def test_who_looks_for_the_newest_waits_for_what_was_staged(
    point: str, nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    """And who saves under the same id again replaces it."""
    job = nursery.start("all_die", tmp_path / "job", uri=file_uri, way="async_save", point=point, **JOB)
    assert job.codes() == [-signal.SIGKILL], job.output()
    again = nursery.start("restarts_plainly", tmp_path / "again", uri=file_uri, **JOB)
    assert again.codes() == [0], again.output()
    assert (again.folder / "restored").read_text() == f"{file_uri}/step-2"
    settle(local_root, again)
    assert_is_step(file_uri, 2, local_root)


# --- the drain ------------------------------------------------------------------------------------------------------


class Puts:
    """Requests that put a shard, counted at the server."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def __call__(self, verb: str, path: str, head: bytes) -> None:
        if verb == "PUT" and ".distcp" in path:
            self.of[path.partition("?")[0]] += 1


@pytest.mark.slow
def test_the_drain_outlives_trainer_and_agent_and_sends_no_finished_shard_again(
    nursery: Nursery, moto: S3Server, s3_uri: str, local_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, puts = FaultProxy(moto.endpoint), Puts()
    proxy.answer = puts
    slow = {"shard_size_bytes_max": 150_000, "concurrency": 1, "staging_memory": "private"}
    with proxy.running() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        settings = JOB | slow | {"drain_bytes_per_second": 500_000}
        job = nursery.start("saves_and_stays", tmp_path / "job", uri=s3_uri, **settings)
        until(lambda: len(puts.of) >= 2, 60, "the drain to begin")
        job.kill()
        assert job.codes() == [-signal.SIGKILL]
        after_trainer = len(puts.of)
        (entry,) = Journal(local_root).entries()
        until(lambda: len(puts.of) >= after_trainer + 2, 60, "the agent to go on without the trainer")
        os.kill(status(local_root)["pid"], signal.SIGKILL)
        until(lambda: not runs(local_root), 60, "the agent to be gone")
        finished = len(puts.of)
        shards = [file for file in entry.files if file.path.endswith(".distcp")]
        assert finished < len(shards)  # both were killed in the middle of it
        assert Journal(local_root).entries() == [entry]
        nursery.start("restarts", tmp_path / "again", uri=s3_uri, **JOB | slow).codes()
        until(lambda: is_quiet(local_root), 60, "the next agent to finish")
    assert len(puts.of) == len(shards)
    assert sum(puts.of.values()) <= len(shards) + 1, puts.of  # the one that was on its way when the agent was killed
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    close_all()
    assert_is_step(s3_uri, 1, tmp_path / "another node")


@pytest.mark.slow
def test_a_job_that_ends_in_order_leaves_nothing_to_do(
    nursery: Nursery, s3_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = nursery.start("saves_and_ends", tmp_path / "job", uri=s3_uri, **JOB)
    assert job.codes() == [0], job.output()
    assert_is_step(s3_uri, 1, tmp_path / "another node")
    assert Journal(local_root).entries() == []
    until(lambda: not runs(local_root), 25, "the agent to leave")
    assert "lost" not in log_of(local_root)


@pytest.mark.slow
def test_sigterm_drains_newest_first_as_far_as_the_grace_period_allows(
    s3_uri: str, local_root: Path, moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_control(local_root, paused=True)  # what is saved stays in the journal
    for step in (1, 2):
        save(f"{s3_uri}/step-{step}", whole_state(step))
    close_all()
    (_, oldest) = Journal(local_root).entries()
    proxy = FaultProxy(moto.endpoint)
    proxy.plans[s3_uri.split("/")[2]] = Plan(Kind.HANG, 1.0, only=lambda verb, path: verb == "PUT" and "step-1" in path)
    with proxy.running() as endpoint, monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", endpoint)
        process = _agent(local_root, grace_seconds=GRACE_SECONDS, concurrency=1)
        until((agent_dir(local_root) / SOCKET).exists, 60, "the agent to start")
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        change_control(local_root, paused=False)
        assert process.wait(60) == 3
        assert time.monotonic() - begun > GRACE_SECONDS - 0.5
    assert [entry.uri for entry in Journal(local_root).entries()] == [oldest.uri]
    assert f"{oldest.uri} ({human_bytes(oldest.size_bytes)}) is not on the shared tier yet" in log_of(local_root)

    process = _agent(local_root, grace_seconds=60.0)
    until((agent_dir(local_root) / SOCKET).exists, 60, "the next agent to start")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert Journal(local_root).entries() == []
    for step in (1, 2):
        assert holds(s3_uri, step, local_root.parent / "another node")


def _agent(root: Path, **settings: Any) -> subprocess.Popen[bytes]:
    """An agent that is a child of ours, so that we see its exit code."""
    agent_dir(root).mkdir(mode=0o700, exist_ok=True)
    with (agent_dir(root) / "agent.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tierckpt.agent", str(IDLE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(Settings.load(local_root=root, **SETTINGS | settings).model_dump_json().encode())
    return process
