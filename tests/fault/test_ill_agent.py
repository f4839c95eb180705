"""An agent in any state costs training nothing: who needs it does without, says so once, and puts another in its place.

The trainer's thread may wait 0.5 s in all for an agent that is ill. What counts is measured where it would wait, in the
questions it asks, and not on a wall clock that the rest of the machine moves too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import tierckpt
from tests.states import same, small_state, zeros_like
from tierckpt import client
from tierckpt.checkpoint.journal import Journal
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.disk.file_lock import try_lock
from tierckpt.disk.local_root import use_local_root
from tierckpt.drain.rate_limiter import change_control
from tierckpt.format.layout import agent_dir
from tierckpt.ipc import agent_breaker
from tierckpt.ipc import agent_client as contacts
from tierckpt.ipc.agent_breaker import LOCK, PATIENCE_SECONDS, STARVED_SECONDS
from tierckpt.ipc.agent_client import SOCKET, AgentClient, AgentUnavailableError, encode

BUDGET_SECONDS = 0.5
MARGIN = 6.0
SETTINGS: dict[str, Any] = {"mover": "agent", "staging_memory": "shared"}
WARNING = "does not answer"


@pytest.fixture(autouse=True)
def short_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that this process starts leave soon."""
    monkeypatch.setattr(contacts, "IDLE_SECONDS", 0.7)


def until(is_true: Callable[[], Any], timeout_seconds: float, what: str) -> Any:
    deadline = time.monotonic() + timeout_seconds
    while not (value := is_true()):
        assert time.monotonic() < deadline, f"waited {timeout_seconds} s for {what}"
        time.sleep(0.03)
    return value


@pytest.fixture(autouse=True)
def no_agent_is_left(local_root: Path) -> Iterator[None]:
    use_local_root(Settings.load(local_root=local_root))
    yield
    close_all()
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid = int((agent_dir(local_root) / LOCK).read_text())
        if is_held(local_root):
            os.kill(pid, signal.SIGKILL)


def is_held(root: Path) -> bool:
    with try_lock(agent_dir(root) / LOCK) as free:
        return not free


def status_of(root: Path, *, start: bool = False) -> dict[str, Any]:
    with contextlib.closing(AgentClient(Settings.load(local_root=root, **SETTINGS))) as contact:
        answer: dict[str, Any] = contact.ask({"op": "status"}, start=start)
        return answer


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except OSError:
        return True


@dataclass
class Waits:
    """How long each thread of this process has waited for answers of the agent that were none."""

    of: dict[str, list[float]] = field(default_factory=dict)

    def of_trainer(self) -> float:
        return sum(self.of.get(threading.main_thread().name, []))

    def of_all(self) -> float:
        return sum(seconds for waits in self.of.values() for seconds in waits)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    measured, real = Waits(), AgentClient.ask

    def ask(contact: AgentClient, message: Any, *args: Any, **options: Any) -> Any:
        begun = time.monotonic()
        try:
            return real(contact, message, *args, **options)
        except AgentUnavailableError:
            if threading.current_thread().name != "tierckpt-breaker":
                waited = measured.of.setdefault(threading.current_thread().name, [])
                waited.append(time.monotonic() - begun)
            raise

    monkeypatch.setattr(AgentClient, "ask", ask)
    return measured


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("tierckpt")]


def train(uri: str, root: Path) -> list[float]:
    """Save in both ways, look, restore, wait and close, as a job does. Returns how long each call took."""
    took: list[float] = []

    def timed(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        begun = time.monotonic()
        try:
            return call(*args, **options)
        finally:
            took.append(time.monotonic() - begun)

    checkpointer = tierckpt.Checkpointer(uri, local_root=root, **SETTINGS)
    futures = [timed(checkpointer.save, step, small_state(step)) for step in (2, 3)]
    for future in futures:
        future.result(60)
    writer = tierckpt.TierStorageWriter(f"{uri}/step-4", local_root=root, **SETTINGS)
    timed(dcp.async_save, small_state(4), storage_writer=writer).result(60)
    assert timed(tierckpt.latest, uri, local_root=root, **SETTINGS) == f"{uri}/step-4"
    found = zeros_like(small_state(4))
    assert timed(checkpointer.restore, found) == 4
    assert same(found, small_state(4))
    checkpointer.wait()
    tierckpt.wait(f"{uri}/step-4", local_root=root, **SETTINGS)
    checkpointer.close()
    until(lambda: Journal(root).entries() == [], 60, "all to be drained")
    return took


def assert_cost_nothing(waits: Waits, caplog: pytest.LogCaptureFixture, took: list[float]) -> None:
    assert waits.of_trainer() < BUDGET_SECONDS * MARGIN
    assert waits.of_all() < BUDGET_SECONDS * MARGIN + STARVED_SECONDS  # the pool's, which a future waits for: once
    assert len([waited for waited in waits.of.values() for w in waited if w >= PATIENCE_SECONDS / 2]) <= 2, waits.of
    assert len([text for text in warnings_of(caplog) if WARNING in text]) == 1, warnings_of(caplog)
    assert max(took) < 10.0 * MARGIN  # each of these was 10 to 420 s


@pytest.fixture
def real_agent(s3_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """One that has drained a first step, and stays."""
    monkeypatch.setattr(contacts, "IDLE_SECONDS", 60.0)
    with contextlib.closing(AgentClient(Settings.load(local_root=local_root, **SETTINGS))) as it:
        return int(it.ask({"op": "status"})["pid"])


# --- a real agent ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_that_is_stopped_costs_half_a_second_and_is_replaced(
    real_agent: int, s3_uri: str, local_root: Path, waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierckpt")
    os.kill(real_agent, signal.SIGSTOP)
    assert_cost_nothing(waits, caplog, train(s3_uri, local_root))
    until(lambda: is_gone(real_agent), 60, "the stopped agent to be ended")
    assert len([text for text in warnings_of(caplog) if f"process {real_agent}) has said nothing" in text]) == 1


@pytest.mark.slow
def test_one_without_descriptors_costs_half_a_second(
    real_agent: int, s3_uri: str, local_root: Path, waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    resource.prlimit(real_agent, resource.RLIMIT_NOFILE, (6, 6))  # it accepts no connection any more
    assert_cost_nothing(waits, caplog, train(s3_uri, local_root))
    assert not is_gone(real_agent)  # it may yet come back, and what it owned could be drained


def test_one_that_comes_back_works_again(real_agent: int, local_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    contact = contacts.shared_client(Settings.load(local_root=local_root, **SETTINGS))
    os.kill(real_agent, signal.SIGSTOP)
    for _ in range(5):
        with pytest.raises(contacts.NotAnsweringError):
            contact.ask({"op": "here"})
    os.kill(real_agent, signal.SIGCONT)

    def answers() -> bool:
        with contextlib.suppress(AgentUnavailableError):
            return bool(contact.ask({"op": "status"})["pid"] == real_agent)
        return False

    until(answers, 60, "it to be asked again")
    assert len([text for text in warnings_of(caplog) if WARNING in text]) == 1


@pytest.mark.slow
def test_what_a_stopped_one_owns_is_drained_while_its_job_waits(
    real_agent: int, s3_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_control(local_root, paused=True)
    with tierckpt.Checkpointer(s3_uri, local_root=local_root, **SETTINGS) as checkpointer:
        checkpointer.save(1, small_state(1)).result(60)
        until(lambda: status_of(local_root)["draining"] == 1, 60, "the agent to take it")
        os.kill(real_agent, signal.SIGSTOP)
        change_control(local_root, paused=False)
        checkpointer.wait(timeout_seconds=60)  # for the drain: here the agent has to be out of the way first
    assert is_gone(real_agent)
    assert tierckpt.latest(s3_uri, local_root=local_root / "another node") == f"{s3_uri}/step-1"


RESTARTS = (
    "import sys, time, tierckpt\n"
    "from tests.states import small_state, zeros_like\n"
    "import logging; logging.basicConfig(format='%(message)s')\n"
    "uri, begun = sys.argv[1], time.monotonic()\n"
    "checkpointer = tierckpt.Checkpointer(uri)\n"
    "step = checkpointer.restore(zeros_like(small_state(0)))\n"
    "print(step, time.monotonic() - begun, flush=True)\n"
)


@pytest.mark.slow
def test_a_new_process_restores_beside_a_stopped_one_and_says_so_once(
    real_agent: int, s3_uri: str, local_root: Path
) -> None:
    with contextlib.closing(tierckpt.Checkpointer(s3_uri, local_root=local_root, mover="inline")) as checkpointer:
        checkpointer.save(7, small_state(7)).result(60)
    os.kill(real_agent, signal.SIGSTOP)
    environment = os.environ | {"TIERCKPT_MOVER": "agent", "TIERCKPT_LOCAL_ROOT": str(local_root)}
    run = subprocess.run(
        [sys.executable, "-c", RESTARTS, s3_uri],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    step, seconds = run.stdout.split()
    assert step == "7"
    assert float(seconds) < 10.0 * MARGIN  # it was 421 s
    assert run.stderr.count(WARNING) == 1, run.stderr


@pytest.mark.slow
def test_the_commands_tell_of_a_stopped_one(real_agent: int, local_root: Path) -> None:
    os.kill(real_agent, signal.SIGSTOP)
    command = [sys.executable, "-m", "tierckpt.cli"]
    run = subprocess.run(
        [*command, "status", "--json", "--local-root", str(local_root)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    document = json.loads(run.stdout)
    assert document["agent"] is None
    assert "not answered" in document["agent_problem"]
    drained = subprocess.run([*command, "drain", "--wait", "--local-root", str(local_root)], timeout=120, check=False)
    assert drained.returncode == 0
    assert not is_gone(real_agent)  # nothing was in its way


# --- what only looks like one ---------------------------------------------------------------------------------------


def says_nothing(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def says_nonsense(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        connection.sendall(b"\xff" * 100)


def drips(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    for byte in encode({"ok": "x" * 10_000}):
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def hangs_up(connection: socket.socket) -> None:
    connection.recv(1 << 16)


@contextlib.contextmanager
def standing_in(answer: Callable[[socket.socket], None], root: Path) -> Iterator[None]:
    directory = contacts.private_directory(root)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with contacts.socket_path(directory) as path:
            listener.bind(path)
        listener.listen()

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                answer(connection)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield
        (directory / SOCKET).unlink()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("answer", [says_nothing, says_nonsense, drips, hangs_up])
def test_whoever_answers_like_that_costs_half_a_second(
    answer: Callable[[socket.socket], None],
    s3_uri: str,
    local_root: Path,
    waits: Waits,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with standing_in(answer, local_root):
        assert_cost_nothing(waits, caplog, train(s3_uri, local_root))
    others = [text for text in warnings_of(caplog) if WARNING not in text]
    assert others == []  # nothing is said at each call


def test_a_directory_of_somebody_else_costs_a_warning(
    s3_uri: str, local_root: Path, waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    contacts.private_directory(local_root).chmod(0o755)
    assert_cost_nothing(waits, caplog, train(s3_uri, local_root))
    agent_dir(local_root).chmod(0o700)


def test_a_backlog_that_is_full_costs_nothing(
    s3_uri: str, local_root: Path, waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    directory = contacts.private_directory(local_root)
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with contacts.socket_path(directory) as path:
            listener.bind(path)
            listener.listen(1)
            with pytest.raises(BlockingIOError):
                while True:
                    other = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    other.setblocking(False)
                    other.connect(path)
        assert_cost_nothing(waits, caplog, train(s3_uri, local_root))
        (directory / SOCKET).unlink()


# --- one that works -------------------------------------------------------------------------------------------------


def works_for(seconds: float, *, comes_on: bool) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        begun, work = time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            connection.sendall(encode({"busy": {"work": work, "saves": 1, "size_bytes": 5}}))
            work += comes_on
            time.sleep(0.05)
        connection.sendall(encode({"ok": None}))
        connection.recv(1 << 16)

    return serve


@pytest.mark.slow
def test_one_that_works_on_what_was_staged_is_waited_for_and_it_is_said_what_for(
    s3_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TOLD_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(client, "STALLED_SECONDS", 0.5)
    with standing_in(works_for(2.0, comes_on=True), local_root):
        begun = time.monotonic()
        assert tierckpt.latest(s3_uri, local_root=local_root, **SETTINGS) is None
        assert time.monotonic() - begun > 1.9
    assert [text for text in warnings_of(caplog) if "waiting for the agent" in text and "300 s at most" in text]


def test_one_that_answers_and_of_whose_work_nothing_comes_is_not_waited_for(
    s3_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STALLED_SECONDS", 0.5)
    with standing_in(works_for(1000.0, comes_on=False), local_root):
        assert tierckpt.latest(s3_uri, local_root=local_root, **SETTINGS) is None
    assert [text for text in warnings_of(caplog) if "makes no progress" in text]


# --- who is killed ---------------------------------------------------------------------------------------------------


def test_nobody_is_killed_but_the_process_that_has_the_lock_open(local_root: Path) -> None:
    lock = contacts.private_directory(local_root) / LOCK
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        for said in ("", "no number", "-1", "0", str(os.getpid()), "4194000", str(bystander.pid)):
            lock.write_text(said)
            with lock.open():  # this process has it open, and is never meant
                assert agent_breaker.kill_agent(local_root) is None
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
