"""Agents with a page, as processes of a test, and polling until something holds."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierckpt.config import Settings
from tierckpt.disk.file_lock import try_lock
from tierckpt.format.layout import agent_dir
from tierckpt.ipc import agent_client
from tierckpt.poll import Poll

PATIENCE_SECONDS = 60.0


@contextmanager
def agent_with_page(**environment: str) -> Iterator[str]:
    """Run an agent, with more variables than this process has. Yields the URL of its page."""
    command = [sys.executable, "-m", "tierckpt", "agent", "--metrics-port", "0"]
    environment = os.environ | environment
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        url = next(line.split()[-1] for line in process.stderr if "metrics on" in line).removesuffix("metrics")
        next(line for line in process.stderr if "is ready" in line)  # its socket exists
        yield url
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def start_agent(settings: Settings, idle_seconds: float, **environment: str) -> subprocess.Popen[bytes]:
    """Start an agent without a page as a child of this process, and wait until it can be reached."""
    directory = agent_client.private_directory(settings.local_root)
    command = [sys.executable, "-m", "tierckpt.agent", str(idle_seconds)]
    with (directory / "agent.log").open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=os.environ | environment
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(settings.model_dump_json().encode())
    until((directory / agent_client.SOCKET).exists, "the agent to start")
    return process


@contextmanager
def listening(root: Path, backlog: int = 128) -> Iterator[socket.socket]:
    """Yield a socket at the place of the agent's, for a test that answers in its stead."""
    directory = agent_client.private_directory(root)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with agent_client.socket_path(directory) as path:
            listener.bind(path)
        listener.listen(backlog)
        yield listener
    (directory / agent_client.SOCKET).unlink()


def status(root: Path) -> dict[str, Any]:
    with contextlib.closing(agent_client.AgentClient(Settings.load(local_root=root, mover="agent"))) as client:
        answer: dict[str, Any] = client.ask({"op": "status"}, start=False)
        return answer


def agent_runs(root: Path) -> bool:
    """Return whether a process holds the lock of the agent of this local root."""
    with try_lock(agent_dir(root) / agent_client.LOCK) as free:
        return not free


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except OSError:
        return True


def until(holds: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """Wait until ``holds`` returns a true value and return it."""
    for _ in Poll(seconds):
        if found := holds():
            return found
    raise AssertionError(f"waited {seconds} s for {what}")


def start_after(holds: Callable[[], Any], act: Callable[[], object]) -> threading.Thread:
    """Start a thread that calls ``act`` once ``holds`` returns a true value, or could not for long."""

    def wait_and_act() -> None:
        any(holds() for _ in Poll(PATIENCE_SECONDS))
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def get(url: str) -> str:
    """Return what a page answers."""
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        return str(answer.read().decode())
