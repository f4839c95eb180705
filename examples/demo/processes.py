"""Start, follow and kill the demo's processes. None outlives ``Processes``, and every wait has a deadline."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


class DemoFailed(Exception):
    """A claim of the demo is false, or a part of it failed."""


class Processes:
    """The demo's processes. Leaving the ``with`` block kills those still running, and their descendants."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._started):
            kill_tree(process)

    def start(self, name: str, *command: str | Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start ``command`` in its own process group, with output in ``NAME.out`` and errors in ``NAME.log``."""
        with self.log(name).open("wb") as errors, self.log(name).with_suffix(".out").open("wb") as output:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        self._started.append(process)
        return process

    def run(self, name: str, *command: str | Path, environment: dict[str, str], timeout_seconds: float = 90) -> str:
        """Run ``command`` to completion and return its output. Raises DemoFailed with the end of its log."""
        process = self.start(name, *command, environment=environment)
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            kill_tree(process)
            raise DemoFailed(f"{name} did not end within {timeout_seconds:.0f} s{self.tail(name)}") from None
        self.check_exit(name, process)
        return self.log(name).with_suffix(".out").read_text(errors="replace")

    def check_exit(self, name: str, process: subprocess.Popen[bytes]) -> None:
        if process.returncode != 0:
            raise DemoFailed(f"{name} ended with exit code {process.returncode}{self.tail(name)}")

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def tail(self, name: str, lines: int = 40) -> str:
        text = self.log(name).read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"; the end of {self.log(name)}:", *text])


def follow(
    path: Path, process: subprocess.Popen[bytes], *, until: Callable[[dict[str, Any]], bool], timeout_seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines that ``process`` appends to ``path`` as they arrive.

    Stops after the first event for which ``until`` is true, or when the process has exited and all lines are read.
    """
    deadline = time.monotonic() + timeout_seconds
    position = 0
    while True:
        ended = process.poll() is not None  # before the read, so that its last lines are not missed
        lines = path.read_bytes()[position:].splitlines(keepends=True) if path.exists() else []
        for line in lines:
            if not line.endswith(b"\n"):
                break  # an incomplete line; the rest follows
            position += len(line)
            event = json.loads(line)
            yield event
            if until(event):
                return
        if ended:
            return
        if time.monotonic() > deadline:
            raise DemoFailed(f"nothing more in {path.name} after {timeout_seconds:.0f} s")
        time.sleep(0.005)


def kill_tree(process: subprocess.Popen[bytes]) -> list[int]:
    """SIGKILL ``process`` and all its descendants, wait for their exit, and return the descendants' ids.

    torchrun starts each rank in its own session, so killing its process group would leave them running.
    """
    descendants = _descendants(process.pid)
    for pid in [process.pid, *descendants] if process.poll() is None else descendants:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(10)
    deadline = time.monotonic() + 10
    while alive := [pid for pid in descendants if is_running(pid)]:
        if time.monotonic() > deadline:
            raise DemoFailed(f"processes {alive} still run 10 s after SIGKILL")
        time.sleep(0.01)
    return descendants


def is_running(pid: int) -> bool:
    """Return whether ``pid`` runs; False for a zombie."""
    return pid in {child for child, _, state in _process_table() if state != "Z"}


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for child, parent, state in _process_table():
        if state != "Z":
            children.setdefault(parent, []).append(child)
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _process_table() -> list[tuple[int, int, str]]:
    """Return (pid, parent, state letter) of every process, from /proc or else from ps."""
    if not Path("/proc/self/stat").exists():
        rows = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
        return [(int(pid), int(parent), state[0]) for pid, parent, state in map(str.split, rows.splitlines())]
    table = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended during the scan
        table.append((int(path.parent.name), int(parent), state))
    return table


def _die_with_parent() -> None:
    """Linux: die with the demo, even if it is killed without cleaning up."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], *, timeout_seconds: float) -> bool:
    """Return whether ``port`` accepts connections before the deadline and before ``process`` exits."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.05)
    return False
