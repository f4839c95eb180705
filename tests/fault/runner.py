"""Scenario runner: runs a function of the tests in real processes that need not import torch.

Importing torch takes seconds, and the tests start hundreds of processes. ``start`` asks a server process, one per test
process, to fork one process per rank. The server is this module run as a program. It imports the modules of the
scenarios and has a single thread, so forking it is safe. Each rank is the leader of its own session and ends with the
server, which ends with the test process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests import patience
from tests.services import ENVIRONMENT, REPOSITORY, die_with_parent, free_port

OUR_ENV = ("TIERCKPT_", "AWS_", "AZURE_", "AZURITE_", "GOOGLE_")

_server: subprocess.Popen[str] | None = None
_started: set[int] = set()


def start(
    scenario: Callable[..., Any],
    folder: Path,
    world_size: int = 1,
    *,
    env: Mapping[str, str] | None = None,
    threads: int | None = None,
    **arguments: Any,
) -> Job:
    """Start the ranks of ``scenario(folder=folder, **arguments)``. With several ranks there is a process group.

    The environment of a rank: the tests' at their start, the settings and credentials of this process, and ``env``.
    ``threads``: how many threads torch computes with; sums of another number of threads have other bits.
    The arguments are JSON; ``idle_seconds`` is for the agents that the ranks start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = Job([], folder)
    ours = {name: value for name, value in os.environ.items() if name.startswith(OUR_ENV)}
    request = {"module": scenario.__module__, "name": scenario.__qualname__, "folder": str(folder), "threads": threads}
    job.pids = _ask(verb="start", world_size=world_size, arguments=arguments, env=ours | dict(env or {}), **request)
    _started.update(job.pids)
    return job


def kill_all() -> None:
    """Kill every rank that is still running."""
    if _started:
        _ask(verb="kill", pids=sorted(_started))
        _started.clear()


class Job:
    """The processes of one scenario. ``folder`` has the output of each: ``rank-N.out`` and ``rank-N.log``."""

    def __init__(self, pids: list[int], folder: Path) -> None:
        self.pids, self.folder = pids, folder
        self._out = folder / "rank-0.out"
        self._skipped_bytes = self._out.stat().st_size if self._out.exists() else 0

    def codes(self, timeout_seconds: float = 60.0, *, until_one_fails: bool = False) -> list[int | None]:
        """The exit codes by rank, as ``Popen.returncode``; None for a rank that still runs after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            codes: list[int | None] = _ask(verb="poll", pids=self.pids)
            if None not in codes or (until_one_fails and any(codes)) or time.monotonic() > deadline:
                return codes
            time.sleep(0.02)

    def result(self, timeout_seconds: float = 120.0) -> Any:
        """Wait until all ranks have succeeded, and return what rank 0 returned. On failure, kill the other ranks."""
        codes = self.codes(timeout_seconds, until_one_fails=True)
        try:
            if None in codes and not any(codes):
                for pid, code in zip(self.pids, codes, strict=True):
                    if code is None:
                        os.kill(pid, signal.SIGABRT)  # faulthandler prints the stack of each thread
                time.sleep(2)
                raise AssertionError(f"still running after {timeout_seconds:g} s\n{self.output()}")
            assert not any(codes), f"exit codes by rank: {codes}\n{self.output()}"
            path = self.folder / "result-0.json"
            return json.loads(path.read_text()) if path.exists() else None
        finally:
            self.kill()
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def results(self) -> dict[int, Any]:
        """The return values by rank, of the ranks that have returned."""
        paths = {rank: self.folder / f"result-{rank}.json" for rank in range(len(self.pids))}
        return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}

    def lines(self) -> list[str]:
        """The complete lines that rank 0 has printed to standard output."""
        data = self._out.read_bytes()[self._skipped_bytes :] if self._out.exists() else b""
        return data[: data.rfind(b"\n") + 1].decode().splitlines()

    def until(self, is_true: Callable[[], Any], what: str, timeout_seconds: float = 60.0) -> Any:
        """Wait until ``is_true()`` is, and return its value."""
        deadline = time.monotonic() + timeout_seconds
        while not (value := is_true()):
            assert time.monotonic() < deadline, f"waited {timeout_seconds:g} s for {what}\n{self.output()}"
            time.sleep(0.005)
        return value

    def output(self) -> str:
        logs = sorted(path for path in self.folder.glob("rank-*.*") if path.suffix in (".out", ".log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in logs)

    def kill(self) -> None:
        _ask(verb="kill", pids=self.pids)


def _ask(**request: Any) -> Any:
    global _server
    if _server is None or _server.poll() is not None:
        _server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
            env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1"},
        )
    assert _server.stdin is not None
    assert _server.stdout is not None
    _server.stdin.write(json.dumps(request) + "\n")
    _server.stdin.flush()
    return json.loads(_server.stdout.readline())


# --- the server -------------------------------------------------------------------------------------------------------


def _serve() -> None:
    # Else each rank would import them: tierckpt imports the Checkpointer when it is first used.
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    import tierckpt.ipc.agent_client
    import tierckpt.training.checkpointer  # noqa: F401

    codes: dict[int, int | None] = {}
    """The exit code of each process; None while it runs."""
    for line in sys.stdin:
        request = json.loads(line)
        if request["verb"] == "start":
            answer: Any = _start(request)
            codes |= dict.fromkeys(answer)  # a number that is used again is of the new process
        else:
            running = [pid for pid in request["pids"] if codes.get(pid, 0) is None]
            is_kill = request["verb"] == "kill"
            for pid in running if is_kill else ():  # all before the first wait: a rank fails without its peers
                os.kill(pid, signal.SIGKILL)
            for pid in running:
                found, status = os.waitpid(pid, 0 if is_kill else os.WNOHANG)
                codes[pid] = os.waitstatus_to_exitcode(status) if found else None
            answer = [codes.get(pid) for pid in request["pids"]]
        print(json.dumps(answer), flush=True)


def _start(request: dict[str, Any]) -> list[int]:
    module = importlib.import_module(request["module"])
    for preload in getattr(module, "PRELOAD", ()):
        importlib.import_module(preload)
    if threading.active_count() != 1 or len(os.listdir("/proc/self/task")) != 1:  # noqa: PTH208
        raise RuntimeError("the server has more than one thread, so it cannot fork safely")
    gc.freeze()  # else the first collection of each child copies every page
    pids, port = [], str(free_port())
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            _become_rank(request, module, rank, port)
        pids.append(pid)
    return pids


def _become_rank(request: dict[str, Any], module: Any, rank: int, port: str) -> None:
    folder = Path(request["folder"])
    os.setsid()
    die_with_parent()
    result = folder / f"result-{rank}.json"
    result.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [
        os.open(os.devnull, os.O_RDONLY),
        *(os.open(folder / f"rank-{rank}.{suffix}", flags, 0o666) for suffix in ("out", "log")),
    ]
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    for name in [name for name in os.environ if name.startswith(OUR_ENV)]:
        del os.environ[name]
    world_size = str(request["world_size"])
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update(request["env"] | ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    try:
        value = _run(request, module, folder)
        if value is not None:
            result.write_text(json.dumps(value))
    except (KeyboardInterrupt, SystemExit):
        raise  # ends the process as it ends a program
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if getattr(module, "EXITS_AT_ONCE", False):
        os._exit(0)
    sys.exit(0)  # with all that Python does at the end of a program


def _run(request: dict[str, Any], module: Any, folder: Path) -> Any:
    import logging

    import torch
    import torch.distributed as dist

    from tierckpt.ipc import agent_client

    logging.basicConfig(level=logging.INFO)
    logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False  # logs every step of every save
    if request["threads"] is not None:
        torch.set_num_threads(request["threads"])
    patience.extend_if_told()
    agent_client.IDLE_SECONDS = request["arguments"].pop("idle_seconds", agent_client.IDLE_SECONDS)
    if request["world_size"] > 1:
        timeout = timedelta(seconds=getattr(module, "COLLECTIVE_TIMEOUT_SECONDS", 60.0))
        dist.init_process_group("gloo", timeout=timeout)
    value = getattr(module, request["name"])(folder=folder, **request["arguments"])
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


if __name__ == "__main__":
    _serve()
