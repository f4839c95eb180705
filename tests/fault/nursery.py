"""Ranks for tests: real processes, forked from one that has torch imported already.

Importing torch takes seconds; the tests start dozens of ranks. ``Nursery`` is the test's side. The other side is this
module run as a program: it forks the ranks of a scenario (a function of the module that the nursery was given), each
the head of a session of its own, and says how they ended. Nothing there has a thread, so that forking is sound.
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

from tests.services import REPOSITORY, die_with_parent, free_port

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
    """Starts ranks. One for a module of tests."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def running(cls, scenarios: str) -> Iterator[Nursery]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, scenarios],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1"},
        )
        try:
            nursery = cls(process)
            nursery.ask(verb="wait", pids=[], timeout_seconds=0, until_one_fails=False)
            yield nursery
        finally:
            process.kill()
            process.wait(60)

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

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
        pids = self.ask(verb="start", scenario=scenario, world_size=world_size, arguments=arguments, env=env)
        return Job(self, pids, folder)


def _serve() -> None:
    import torch  # noqa: F401

    scenarios = importlib.import_module(sys.argv[1])
    for name in getattr(scenarios, "PRELOAD", ()):
        importlib.import_module(name)

    if threading.active_count() != 1 or len(os.listdir("/proc/self/task")) != 1:  # noqa: PTH208
        raise RuntimeError("forking is not sound here: there is another thread")
    gc.freeze()  # or each child would copy, page by page, what its first collections look at
    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request["verb"] == "start":
            answer: Any = _start(request, scenarios)
            for pid in answer:
                ended.pop(pid, None)  # of a process that had the number before
        elif request["verb"] == "wait":
            answer = _wait(request["pids"], request["timeout_seconds"], request["until_one_fails"], ended)
        else:
            answer = _kill(request["pids"], ended)
        print(json.dumps(answer), flush=True)


def _start(request: dict[str, Any], scenarios: Any) -> list[int]:
    pids, port = [], str(free_port())
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            _become_rank(request, scenarios, rank, port)
        pids.append(pid)
    return pids


def _become_rank(request: dict[str, Any], scenarios: Any, rank: int, port: str) -> None:
    os.setsid()
    die_with_parent()
    log = os.open(Path(request["arguments"]["folder"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
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


def _wait(pids: list[int], timeout_seconds: float, until_one_fails: bool, ended: dict[int, int]) -> list[int | None]:
    deadline = time.monotonic() + timeout_seconds
    while True:
        for pid in [pid for pid in pids if pid not in ended]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status)
        has_failed = until_one_fails and any(ended.get(pid) for pid in pids)
        if has_failed or all(pid in ended for pid in pids) or time.monotonic() > deadline:
            return [ended.get(pid) for pid in pids]
        time.sleep(0.02)


def _kill(pids: list[int], ended: dict[int, int]) -> None:
    """All at once: who is left while others are waited for would fail by itself, and not be killed."""
    alive = [pid for pid in pids if pid not in ended]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    for pid in alive:
        _, status = os.waitpid(pid, 0)
        ended[pid] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    _serve()
