"""The agent: what a killed trainer had staged or committed reaches both tiers without it (P6)."""

from __future__ import annotations

import contextlib
import json
import os
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

import tierckpt
from tests.fault.agent_ranks import Job, Nursery
from tests.fault.agent_scenarios import whole_state
from tests.servers.faultproxy import FaultProxy
from tests.services import S3Server
from tests.states import load, same, save
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.errors import TierckptError
from tierckpt.layout import agent_dir, local_dir, parse_uri
from tierckpt.mover import contact as contacts
from tierckpt.mover.budget import change_control
from tierckpt.mover.commit import is_drained, read_local_manifest
from tierckpt.mover.contact import SOCKET, Contact, NoAgentError
from tierckpt.mover.journal import READY, Journal
from tierckpt.mover.lock import try_lock

pytestmark = pytest.mark.distributed

IDLE_SECONDS = 0.7
SETTINGS = {"agent_idle_seconds": IDLE_SECONDS, "mover": "agent"}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery.running() as running:
        yield running


@pytest.fixture(autouse=True)
def no_agent_is_left(tmp_path: Path) -> Iterator[None]:
    """Every agent of a test leaves by itself when the test's processes have ended."""
    yield
    close_all()
    for directory in [path.parent for path in tmp_path.rglob("agent.lock")]:
        root = directory.parent
        try:
            until(lambda root=root: not runs(root), 15.0, "the agent to leave")
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
    contact = Contact(Settings.load(local_root=root, **SETTINGS))
    try:
        return contact.ask({"op": op, **message}, start=False)
    finally:
        contact.close()


def status(root: Path) -> dict[str, Any]:
    answer: dict[str, Any] = ask(root, "status")
    return answer


def is_quiet(root: Path) -> bool:
    """The agent has nothing in its hands and nothing before it."""
    try:
        now = status(root)
    except NoAgentError:
        return not Journal(root).entries()
    busy = now["staged_saves"] or now["memory_held_bytes"] or now["draining"] or now["processes"]
    return not busy and not Journal(root).entries()


def settle(root: Path, job: Job) -> None:
    """Wait until the agent has done all that is to do."""
    try:
        until(lambda: is_quiet(root), 40, "the agent to finish")
    except AssertionError as error:
        now = f"{status(root) if runs(root) else 'no agent'} {Journal(root).entries()}"
        raise AssertionError(f"{error}\n{now}\n{log_of(root)}\n{job.output()}") from None


def log_of(root: Path) -> str:
    return (agent_dir(root) / "agent.log").read_text()


def assert_is_step(uri: str, step: int, root: Path, world_size: int = 1) -> None:
    """The newest checkpoint is ``step``, and it is what was saved as that."""
    assert tierckpt.latest(uri, local_root=root) == f"{uri}/step-{step}"
    assert holds(uri, step, root, world_size)


def holds(uri: str, step: int, root: Path, world_size: int = 1) -> bool:
    wanted = whole_state(step, world_size)
    return same(load(f"{uri}/step-{step}", wanted, local_root=root), wanted)


# --- starting -------------------------------------------------------------------------------------------------------

ASKS = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from tierckpt.config import Settings\n"
    "from tierckpt.mover.contact import contact_for\n"
    "folder, root = map(Path, sys.argv[1:])\n"
    "contact = contact_for(Settings.load(local_root=root, mover='agent', agent_idle_seconds=0.7))\n"
    "(folder / f'ready.{id(folder)}.{time.monotonic_ns()}').touch()\n"
    "while len(list(folder.glob('ready.*'))) < 4: time.sleep(0.001)\n"
    "print(contact.ask({'op': 'status'})['pid'], flush=True)\n"
    "sys.stdin.readline()\n"
)


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
        others = [child for process in processes for child in _children_of(process.pid) if child != pid]
        until(lambda: all(_state_of(child) == "Z" for child in others), 15, "the others to leave")
        assert status(root)["processes"] == 4
    finally:
        for process in processes:
            process.communicate("\n", timeout=10)
    assert [process.returncode for process in processes] == [0] * 4


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
    with contextlib.closing(Contact(Settings.load(local_root=local_root, **SETTINGS))) as contact:
        contact.ask({"op": "status"})
        directory = agent_dir(local_root)
        assert _connect_as(0, directory) == "answered"  # control: the way is right
        assert _connect_as(65534, directory) == "may not"
        directory.chmod(0o711)
        (directory / SOCKET).chmod(0o666)
        assert _connect_as(65534, directory) == "refused"
        assert "user 65534" in log_of(local_root)
        with pytest.raises(TierckptError, match="must belong to this user alone"):
            Contact(contact.settings).ask({"op": "status"})  # nor is a directory used that others may look into
        directory.chmod(0o700)


# --- staged, not flushed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "world_size"),
    [
        ("handed in", 1),
        ("ready", 1),
        ("handed in", 4),
        ("half flushed", 4),
        ("flushed", 4),
        ("committed", 4),
    ],
)
def test_what_was_staged_when_all_ranks_were_killed_is_committed(
    point: str, world_size: int, nursery: Nursery, file_uri: str, local_root: Path, tmp_path: Path
) -> None:
    job = nursery.start("all_die", tmp_path / "job", world_size, uri=file_uri, point=point, **SETTINGS)
    assert job.codes() == [-signal.SIGKILL] * world_size, job.output()
    assert len(list(job.folder.glob("killed.*"))) == world_size  # every kill hit where it was meant to
    manifest = read_local_manifest(local_dir(local_root, parse_uri(f"{file_uri}/step-2")))
    assert (manifest is not None) == (point == "committed")
    settle(local_root, job)
    assert_is_step(file_uri, 2, local_root, world_size)
    assert_is_step(file_uri, 2, tmp_path / "another node", world_size)  # on the shared tier too
    assert is_drained(local_dir(local_root, parse_uri(f"{file_uri}/step-2")), _attempt(local_root, file_uri))
    assert sorted(path.name for path in agent_dir(local_root).glob("*")) == _files_of_an_agent(local_root)
    flushed_again = "half flushed" if point in ("handed in", "half flushed") else ""
    assert bool(flushed_again) == ("written from memory" in log_of(local_root))
    until(lambda: not runs(local_root), IDLE_SECONDS + 4, "the agent to leave")


def _attempt(root: Path, uri: str) -> str:
    manifest = read_local_manifest(local_dir(root, parse_uri(f"{uri}/step-2")))
    assert manifest is not None
    return manifest.attempt


def _files_of_an_agent(root: Path) -> list[str]:
    return ["agent.lock", "agent.log", *([SOCKET] if runs(root) else [])]
