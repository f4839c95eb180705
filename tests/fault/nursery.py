"""Ranks and programs for tests: real processes, forked from one that has torch imported already.

Importing torch takes seconds; the tests start hundreds of processes. ``Nursery`` and ``Program`` are the test's side.
The other side, one for all tests of this process, is this module run as a program: it forks the ranks of a scenario (a
function of the module that the nursery was given) or a program (the ``main`` of a module), each the head of a session
of its own, and says how they ended. Nothing there has a thread, so that forking is sound.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.services import ENVIRONMENT, REPOSITORY, die_with_parent, free_port

OUR_ENV = ("TIERCKPT_", "AWS_", "AZURE_", "AZURITE_", "GOOGLE_")


@dataclass
class Job:
    """The ranks of one scenario."""

    nursery: Nursery
    pids: list[int]
    folder: Path

    def codes(self, timeout_seconds: float = 60.0, *, until_one_fails: bool = False) -> list[int | None]:
        """How each rank has ended (as ``Popen.returncode``), None for one that is alive when the time is up."""
        codes: list[int | None] = self.nursery.ask(
            verb="wait", pids=self.pids, timeout_seconds=timeout_seconds, until_one_fails=until_one_fails
        )
        return codes

    def output(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in self.folder.glob("*.log"))

    def kill(self) -> None:
        self.nursery.ask(verb="kill", pids=self.pids)


class Nursery:
    """Starts ranks. One for a module of tests, with whose end they end."""

    _process: subprocess.Popen[str] | None = None

    def __init__(self, scenarios: str) -> None:
        self._scenarios = scenarios
        self._pids: set[int] = set()

    @classmethod
    @contextmanager
    def running(cls, scenarios: str) -> Iterator[Nursery]:
        nursery = cls(scenarios)
        nursery.ask(verb="load", scenarios=scenarios)
        try:
            yield nursery
        finally:
            nursery.ask(verb="kill", pids=sorted(nursery._pids))

    @classmethod
    def ask(cls, **request: Any) -> Any:
        process = Nursery._process
        if process is None or process.poll() is not None:
            process = Nursery._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=die_with_parent,
                env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1"},
            )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def start(
        self,
        scenario: str,
        folder: Path,
        world_size: int = 1,
        *,
        env: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Job:
        """Start the ranks of ``<scenario>(folder=..., **arguments)``. Their logs are in ``folder``.

        They have this process's settings and credentials in their environment, and ``env``.
        """
        folder.mkdir(parents=True, exist_ok=True)
        env = {name: value for name, value in os.environ.items() if name.startswith(OUR_ENV)} | dict(env or {})
        arguments["folder"] = str(folder)
        request = {"scenario": scenario, "world_size": world_size, "arguments": arguments, "env": env}
        pids = self.ask(verb="start", scenarios=self._scenarios, **request)
        self._pids.update(pids)
        return Job(self, pids, folder)


class Program:
    """``python -m module arguments``, forked: what ``Popen(..., stdout=PIPE, text=True)`` is, as far as tests need it.

    ``module`` has a ``main()`` that looks at ``sys.argv``. ``env`` is the whole environment; what it has for its
    standard error is this process's.
    """

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        told, tells = os.pipe()
        self.stdout = os.fdopen(told)
        self.returncode: int | None = None
        streams = [f"/proc/{os.getpid()}/fd/{tells}", f"/proc/{os.getpid()}/fd/2"]
        request = {"env": dict(env or os.environ), "streams": streams, "threads": torch_threads()}
        try:
            [self.pid] = Nursery.ask(verb="program", scenarios=module, arguments=arguments, **request)
        finally:
            os.close(tells)

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float = 600) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, timeout_seconds: float) -> int | None:
        if self.returncode is None:
            request = {"pids": [self.pid], "timeout_seconds": timeout_seconds, "until_one_fails": False}
            [self.returncode] = Nursery.ask(verb="wait", **request)
        return self.returncode


def torch_threads() -> int:
    """As many as computed what a test compares with: sums have other bits with others."""
    import torch

    return torch.get_num_threads()


def _serve() -> None:
    import torch  # noqa: F401

    codes: dict[int, int | None] = {}
    """How each process has ended, by its number; None of one that is not known to have."""
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = None
        if request["verb"] in ("load", "start", "program"):
            scenarios = _loaded(request["scenarios"])
        if request["verb"] in ("start", "program"):
            answer = _start(request, scenarios) if request["verb"] == "start" else [_start_program(request, scenarios)]
            codes |= dict.fromkeys(answer)  # one that had the number before is forgotten
        elif request["verb"] == "wait":
            answer = _wait(request["pids"], request["timeout_seconds"], request["until_one_fails"], codes)
        elif request["verb"] == "kill":
            _kill(request["pids"], codes)
        print(json.dumps(answer), flush=True)


def _loaded(name: str) -> Any:
    scenarios = importlib.import_module(name)
    for preload in getattr(scenarios, "PRELOAD", ()):
        importlib.import_module(preload)
    if threading.active_count() != 1 or len(os.listdir("/proc/self/task")) != 1:  # noqa: PTH208
        raise RuntimeError("forking is not sound here: there is another thread")
    gc.freeze()  # or each child would copy, page by page, what its first collections look at
    return scenarios


def _start(request: dict[str, Any], scenarios: Any) -> list[int]:
    pids, port = [], str(free_port())
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            _become_rank(request, scenarios, rank, port)
        pids.append(pid)
    return pids


def _start_program(request: dict[str, Any], scenarios: Any) -> int:
    said, errors = (os.open(path, os.O_WRONLY | os.O_APPEND) for path in request["streams"])
    pid = os.fork()
    if pid == 0:
        _leave(said, errors)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = [str(scenarios.__file__), *request["arguments"]]
        sys.modules["torch"].set_num_threads(request["threads"])
        scenarios.main()
        sys.exit(0)
    os.close(said)
    os.close(errors)
    return pid


def _leave(said: int, errors: int) -> None:
    """Be a process of one's own."""
    os.setsid()
    die_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, said), (2, errors)):
        os.dup2(source, target)
    for file in {nothing, said, errors}:
        os.close(file)


def _become_rank(request: dict[str, Any], scenarios: Any, rank: int, port: str) -> None:
    log = os.open(Path(request["arguments"]["folder"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _leave(log, log)
    for name in [name for name in os.environ if name.startswith(OUR_ENV)]:
        del os.environ[name]
    world_size = str(request["world_size"])
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update(request["env"] | ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    try:
        _run(request, scenarios)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.exit(0)  # with all that Python does at the end of a program


def _run(request: dict[str, Any], scenarios: Any) -> None:
    import logging

    import torch.distributed as dist

    from tierckpt.ipc import agent_client

    logging.basicConfig(level=logging.INFO)
    agent_client.IDLE_SECONDS = request["arguments"].pop("idle_seconds", agent_client.IDLE_SECONDS)
    if request["world_size"] > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=scenarios.COLLECTIVE_TIMEOUT_SECONDS))
    getattr(scenarios, request["scenario"])(**request["arguments"])
    if dist.is_initialized():
        dist.destroy_process_group()


def _wait(
    pids: list[int], timeout_seconds: float, until_one_fails: bool, codes: dict[int, int | None]
) -> list[int | None]:
    deadline = time.monotonic() + timeout_seconds
    while True:
        for pid in [pid for pid in pids if codes[pid] is None]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        has_failed = until_one_fails and any(codes[pid] for pid in pids)
        if has_failed or all(codes[pid] is not None for pid in pids) or time.monotonic() > deadline:
            return [codes[pid] for pid in pids]
        time.sleep(0.02)


def _kill(pids: list[int], codes: dict[int, int | None]) -> None:
    """All at once: who is left while others are waited for would fail by itself, and not be killed."""
    alive = [pid for pid in pids if codes.get(pid, 0) is None]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    for pid in alive:
        _, status = os.waitpid(pid, 0)
        codes[pid] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    _serve()
