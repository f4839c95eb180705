"""A fleet: the agents and commands of several nodes on one machine, each a real process with an environment of its own.

Importing tierckpt takes most of a second of processor time; a fleet of sixteen nodes has two processes each. So they
are forked from one process with all imports (``python -m tests.servers.fleet``), which also records the end and cost of
each. Each runs one command line of tierckpt, as the shell would, and may enter a network namespace first. ``Fleet`` is
the caller's side.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PRELOAD = ("obstore.store", "tierckpt.agent.agent_server", "tierckpt.cli.ui.app", "tierckpt.mover")
OUR_ENV = ("TIERCKPT_", "AWS_", "AZURE_", "GOOGLE_")
NAMESPACES = Path("/run/netns")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x40000000, 1


@dataclass(frozen=True)
class Ended:
    """How a process went. ``seconds`` from its start to its end, as the one that forked it saw them."""

    code: int
    seconds: float
    cpu_seconds: float
    at: float
    """Of the monotonic clock."""


@dataclass
class Process:
    fleet: Fleet
    pid: int
    began: float
    out: Path
    err: Path

    def wait(self, timeout_seconds: float) -> Ended | None:
        """How it ended, None when it still runs after ``timeout_seconds``."""
        return self.fleet.wait([self], timeout_seconds)[0]

    def send(self, number: signal.Signals) -> bool:
        """Send it a signal. False if it has exited."""
        return bool(self.fleet.ask(verb="signal", pid=self.pid, number=int(number)))

    def kill(self) -> None:
        """Kill it, running or stopped, and wait until it exits."""
        self.send(signal.SIGKILL)
        self.wait(60)

    @property
    def cpu_seconds(self) -> float:
        """Return the resources used so far by the running process."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND

    def answer(self) -> dict[str, Any]:
        """The JSON document that it printed; {} when it printed none."""
        text = self.out.read_text()
        answer: dict[str, Any] = json.loads(text) if text.strip() else {}
        return answer

    def log(self, size: int = 3000) -> str:
        """Return its output so far."""
        return self.err.read_text(errors="replace")[-size:] if self.err.exists() else ""


class Fleet:
    """Starts commands of tierckpt. One for a run, or for a module of tests."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self.folder = process, folder
        self._started = 0

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, *modules: str) -> Iterator[Fleet]:
        """``modules`` are imported too; their ``BUGS`` are the seeded bugs."""
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        )
        try:
            fleet = cls(process, folder)
            folder.mkdir(parents=True, exist_ok=True)
            fleet.ask(verb="wait", pids=[], timeout_seconds=0)
            yield fleet
        finally:
            process.kill()  # those it forked go with it
            process.wait(60)

    def start(
        self, arguments: Sequence[str], env: Mapping[str, str], *, namespace: str = "", bug: str = "", name: str = ""
    ) -> Process:
        """Run ``tierckpt ARGUMENTS`` with ``env`` as all it has of settings and credentials."""
        self._started += 1
        out, err = (self.folder / f"{self._started:03}-{name or arguments[0]}.{end}" for end in ("out", "err"))
        answer = self.ask(
            verb="start",
            arguments=list(arguments),
            env=dict(env),
            namespace=namespace,
            bug=bug,
            out=str(out),
            err=str(err),
        )
        return Process(self, answer["pid"], answer["began"], out, err)

    def wait(self, processes: Sequence[Process], timeout_seconds: float) -> list[Ended | None]:
        """Wait for all of them. None for one that has not ended in time."""
        rows = self.ask(verb="wait", pids=[process.pid for process in processes], timeout_seconds=timeout_seconds)
        return [
            Ended(row["code"], row["at"] - process.began, row["cpu_seconds"], row["at"]) if row else None
            for process, row in zip(processes, rows, strict=True)
        ]

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fleet's process exited with {self._process.wait(60)}")
        return json.loads(line)


# --- the process that forks ---------------------------------------------------------------------------------------


class Nest:
    """Forks, reaps, answers. It has no thread, so that forking is sound."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = [importlib.import_module(name) for name in modules]
        self.ended: dict[int, dict[str, Any]] = {}
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        unread = b""
        while True:
            self._pause(0, None)
            data = os.read(0, 1 << 20)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                answer = getattr(self, f"_{request.pop('verb')}")(**request)
                sys.stdout.write(json.dumps(answer) + "\n")
                sys.stdout.flush()

    def _pause(self, descriptor: int, seconds: float | None) -> None:
        """Wait until ``descriptor`` is readable or time is up, and record processes that exit meanwhile."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([descriptor, self._woken], [], [], left)
            if self._woken in ready:
                os.read(self._woken, 4096)
                if self._reap() and deadline is not None:
                    return
            if descriptor in ready or left == 0.0:
                return

    def _reap(self) -> bool:
        reaped = False
        with contextlib.suppress(ChildProcessError):
            while (found := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, used = found
                self.ended[pid] = {
                    "code": os.waitstatus_to_exitcode(status),
                    "at": time.monotonic(),
                    "cpu_seconds": used.ru_utime + used.ru_stime,
                }
                reaped = True
        return reaped

    def _wait(self, pids: list[int], timeout_seconds: float) -> list[dict[str, Any] | None]:
        deadline = time.monotonic() + timeout_seconds
        while any(pid not in self.ended for pid in pids) and (left := deadline - time.monotonic()) > 0:
            self._pause(self._woken, left)
        return [self.ended.get(pid) for pid in pids]

    def _signal(self, pid: int, number: int) -> bool:
        if pid in self.ended:
            return False
        os.kill(pid, number)
        return True

    def _start(self, **request: Any) -> dict[str, Any]:
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._become(**request)
        self.ended.pop(pid, None)  # of a process that had the number before
        return {"pid": pid, "began": began}

    def _become(self, arguments: list[str], env: dict[str, str], namespace: str, bug: str, out: str, err: str) -> None:
        code = 1
        try:
            os.setsid()
            die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _redirect(out, err)
            if namespace:
                enter(namespace)
            for name in [name for name in os.environ if name.startswith(OUR_ENV)]:
                del os.environ[name]
            os.environ.update(env)
            if bug:
                next(module.BUGS[bug] for module in self.modules if bug in getattr(module, "BUGS", {}))()
            code = _run(arguments)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _run(arguments: list[str]) -> int:
    from tierckpt.cli.ui.app import run
    from tierckpt.client import close_all

    try:
        return run(arguments)
    finally:
        close_all()


def enter(namespace: str) -> None:
    """Move this process into a network namespace that `ip netns` made."""
    file = os.open(NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(file)


def _redirect(out: str, err: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for target, source in ((0, nothing), (1, os.open(out, flags, 0o644)), (2, os.open(err, flags, 0o644))):
        os.dup2(source, target)


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent goes, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOAD:
        importlib.import_module(name)
    nest = Nest(sys.argv[1:])
    if len(os.listdir("/proc/self/task")) != 1:  # noqa: PTH208
        raise RuntimeError("forking is not sound here: there is another thread")
    gc.freeze()
    nest.serve()


if __name__ == "__main__":
    main()
