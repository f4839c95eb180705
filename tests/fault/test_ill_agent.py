"""An agent in any bad state costs training at most 0.5 s: it is bypassed, reported once, and replaced.

The limit applies to the sum of waits of the trainer's thread. The tests measure requests to the agent, not wall-clock
time, which depends on the load of the machine.
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
from tests.agents import agent_runs, is_gone, listening, status, until
from tests.states import same, small_state, zeros_like
from tierckpt import client, poll
from tierckpt.checkpoint.journal import Journal
from tierckpt.client import close_all
from tierckpt.config import Settings
from tierckpt.disk import illness
from tierckpt.disk.local_root import use_local_root
from tierckpt.drain.rate_limiter import change_control
from tierckpt.format.layout import agent_dir
from tierckpt.ipc import agent_client
from tierckpt.ipc.agent_client import (
    LOCK,
    PATIENCE_SECONDS,
    STARVED_SECONDS,
    AgentClient,
    AgentUnavailableError,
    encode,
)

pytestmark = [pytest.mark.ill, pytest.mark.usefixtures("short_idle_time")]

BUDGET_SECONDS = 0.5
MARGIN = 6.0
SETTINGS: dict[str, Any] = {"mover": "agent", "staging_memory": "shared"}
WARNING = "does not answer"


@pytest.fixture(autouse=True)
def healthy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, no save is skipped."""
    monkeypatch.setattr(poll, "HANG_SECONDS", 60.0)
    monkeypatch.setattr(illness, "ILL_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def kill_leftover_agent(local_root: Path) -> Iterator[None]:
    use_local_root(Settings.load(local_root=local_root))
    yield
    close_all()
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid = int((agent_dir(local_root) / LOCK).read_text())
        if agent_runs(local_root):
            os.kill(pid, signal.SIGKILL)


@dataclass
class FailedWaits:
    """Seconds that each thread waited for requests that failed."""

    by_thread: dict[str, list[float]] = field(default_factory=dict)

    def trainer_seconds(self) -> float:
        return sum(self.by_thread.get(threading.main_thread().name, []))

    def total_seconds(self) -> float:
        return sum(seconds for waits in self.by_thread.values() for seconds in waits)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> FailedWaits:
    measured, real = FailedWaits(), AgentClient.ask

    def ask(agent: AgentClient, message: Any, *args: Any, **options: Any) -> Any:
        started = time.monotonic()
        try:
            return real(agent, message, *args, **options)
        except AgentUnavailableError:
            if threading.current_thread().name != "tierckpt-breaker":
                waited = measured.by_thread.setdefault(threading.current_thread().name, [])
                waited.append(time.monotonic() - started)
            raise

    monkeypatch.setattr(AgentClient, "ask", ask)
    return measured


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those about the agent: a busy machine causes others."""
    texts = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("tierckpt")]
    return [text for text in texts if "the agent" in text]


def train(uri: str, root: Path) -> list[float]:
    """Save in both ways, find, restore, wait and close as a job does. Returns the seconds of each call."""
    call_seconds: list[float] = []

    def timed(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        started = time.monotonic()
        try:
            return call(*args, **options)
        finally:
            call_seconds.append(time.monotonic() - started)

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
    until(lambda: Journal(root).entries() == [], "the drains")
    return call_seconds


def assert_bounded_cost(waits: FailedWaits, caplog: pytest.LogCaptureFixture, call_seconds: list[float]) -> None:
    assert waits.trainer_seconds() < BUDGET_SECONDS * MARGIN
    assert waits.total_seconds() < BUDGET_SECONDS * MARGIN + STARVED_SECONDS  # plus one of the pool
    assert len([w for waited in waits.by_thread.values() for w in waited if w >= PATIENCE_SECONDS / 2]) <= 2, (
        waits.by_thread
    )
    assert len([text for text in warnings_of(caplog) if WARNING in text]) == 1, warnings_of(caplog)
    assert max(call_seconds) < 10.0 * MARGIN  # 10 to 420 s without the breaker


@pytest.fixture
def real_agent(s3_uri: str, local_root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """An agent that stays alive while idle."""
    monkeypatch.setattr(agent_client, "IDLE_SECONDS", 60.0)
    with contextlib.closing(AgentClient(Settings.load(local_root=local_root, **SETTINGS))) as agent:
        return int(agent.ask({"op": "status"})["pid"])


# --- a real agent ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stopped_agent_costs_half_a_second_and_is_replaced(
    real_agent: int, s3_uri: str, local_root: Path, waits: FailedWaits, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierckpt")
    os.kill(real_agent, signal.SIGSTOP)
    assert_bounded_cost(waits, caplog, train(s3_uri, local_root))
    until(lambda: is_gone(real_agent), "the end of the stopped agent")
    assert len([text for text in warnings_of(caplog) if f"process {real_agent}) did not respond" in text]) == 1


@pytest.mark.slow
def test_agent_without_descriptors_costs_half_a_second(
    real_agent: int, s3_uri: str, local_root: Path, waits: FailedWaits, caplog: pytest.LogCaptureFixture
) -> None:
    resource.prlimit(real_agent, resource.RLIMIT_NOFILE, (6, 6))  # it cannot accept connections
    assert_bounded_cost(waits, caplog, train(s3_uri, local_root))
    assert not is_gone(real_agent)  # it may recover, and its entries could be drained


def test_recovered_agent_is_used_again(
    real_agent: int, local_root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_client, "STOPPED_SECONDS", 60.0)  # before it would be killed
    agent = agent_client.shared_client(Settings.load(local_root=local_root, **SETTINGS))
    os.kill(real_agent, signal.SIGSTOP)
    for _ in range(5):
        with pytest.raises(agent_client.NotAnsweringError):
            agent.ask({"op": "here"})
    os.kill(real_agent, signal.SIGCONT)

    def answers() -> bool:
        with contextlib.suppress(AgentUnavailableError):
            return bool(agent.ask({"op": "status"})["pid"] == real_agent)
        return False

    until(answers, "the next request to it")
    assert len([text for text in warnings_of(caplog) if WARNING in text]) == 1


@pytest.mark.slow
def test_entries_of_a_stopped_agent_are_drained_while_the_job_waits(
    real_agent: int, s3_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_control(local_root, paused=True)
    with tierckpt.Checkpointer(s3_uri, local_root=local_root, **SETTINGS) as checkpointer:
        checkpointer.save(1, small_state(1)).result(60)
        until(lambda: status(local_root)["draining"] == 1, "the agent to take it")
        os.kill(real_agent, signal.SIGSTOP)
        change_control(local_root, paused=False)
        checkpointer.wait(timeout_seconds=60)  # the drain has to kill the agent first
    until(lambda: is_gone(real_agent), "the end of the stopped agent")
    assert tierckpt.latest(s3_uri, local_root=local_root / "another node") == f"{s3_uri}/step-1"


@pytest.mark.slow
def test_cli_reports_a_stopped_agent(real_agent: int, local_root: Path) -> None:
    os.kill(real_agent, signal.SIGSTOP)
    command = [sys.executable, "-m", "tierckpt.cli"]
    run = subprocess.run([*command, "status", "--json"], capture_output=True, timeout=120, check=True)
    document = json.loads(run.stdout)
    assert document["agent"] is None
    assert "not answered" in document["agent_problem"]
    subprocess.run([*command, "drain", "--wait"], timeout=120, check=True)
    assert not is_gone(real_agent)  # there was no work that needed its death


# --- fake agents ----------------------------------------------------------------------------------------------------


def stays_silent(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def sends_garbage(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        connection.sendall(b"\xff" * 100)


def sends_slowly(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    for byte in encode({"ok": "x" * 10_000}):
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def disconnects(connection: socket.socket) -> None:
    connection.recv(1 << 16)


@contextlib.contextmanager
def fake_agent(answer: Callable[[socket.socket], None], root: Path) -> Iterator[None]:
    with listening(root) as listener:

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                answer(connection)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("answer", [stays_silent, sends_garbage, sends_slowly, disconnects])
def test_fake_agent_costs_half_a_second(
    answer: Callable[[socket.socket], None],
    s3_uri: str,
    local_root: Path,
    waits: FailedWaits,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fake_agent(answer, local_root):
        assert_bounded_cost(waits, caplog, train(s3_uri, local_root))
    others = [text for text in warnings_of(caplog) if WARNING not in text]
    assert others == []  # no message for each call


def test_directory_with_wrong_mode_costs_one_warning(
    s3_uri: str, local_root: Path, waits: FailedWaits, caplog: pytest.LogCaptureFixture
) -> None:
    agent_client.private_directory(local_root).chmod(0o755)
    assert_bounded_cost(waits, caplog, train(s3_uri, local_root))
    agent_dir(local_root).chmod(0o700)


def test_full_backlog_costs_nothing(
    s3_uri: str, local_root: Path, waits: FailedWaits, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as open_sockets:
        open_sockets.enter_context(listening(local_root, backlog=1))
        with agent_client.socket_path(agent_dir(local_root)) as path, pytest.raises(BlockingIOError):
            while True:
                other = open_sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                other.setblocking(False)
                other.connect(path)
        assert_bounded_cost(waits, caplog, train(s3_uri, local_root))


# --- busy agents ----------------------------------------------------------------------------------------------------


def is_busy_for(seconds: float, *, makes_progress: bool) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        started, work = time.monotonic(), 0
        while time.monotonic() - started < seconds:
            connection.sendall(encode({"busy": {"work": work, "saves": 1, "size_bytes": 5}}))
            work += makes_progress
            time.sleep(0.05)
        connection.sendall(encode({"ok": None}))
        connection.recv(1 << 16)

    return serve


@pytest.mark.slow
def test_latest_waits_for_a_busy_agent_and_logs_the_reason(
    s3_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "WARNING_SECONDS", 0.2)
    monkeypatch.setattr(client, "STALLED_SECONDS", 0.5)
    monkeypatch.setattr(agent_client, "PATIENCE_SECONDS", 30.0)
    with fake_agent(is_busy_for(2.0, makes_progress=True), local_root):
        started = time.monotonic()
        assert tierckpt.latest(s3_uri, local_root=local_root, **SETTINGS) is None
        assert time.monotonic() - started > 1.9
    assert [text for text in warnings_of(caplog) if "waiting for the agent" in text and "up to 300 s" in text]


def test_agent_without_progress_is_not_waited_for(
    s3_uri: str, local_root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STALLED_SECONDS", 0.5)
    monkeypatch.setattr(agent_client, "PATIENCE_SECONDS", 30.0)
    with fake_agent(is_busy_for(1000.0, makes_progress=False), local_root):
        assert tierckpt.latest(s3_uri, local_root=local_root, **SETTINGS) is None
    assert [text for text in warnings_of(caplog) if "makes no progress" in text]


# --- kills ----------------------------------------------------------------------------------------------------------


def test_only_the_process_that_holds_the_lock_is_killed(local_root: Path) -> None:
    lock = agent_client.private_directory(local_root) / LOCK
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        for content in ("", "no number", "-1", "0", str(os.getpid()), "4194000", str(bystander.pid)):
            lock.write_text(content)
            with lock.open():  # this process has the file open too, and must not be killed
                assert agent_client.kill_agent(local_root) is None
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
