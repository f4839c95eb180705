"""Forked processes that run one function: alone, or under strace, which counts calls, kills and injects results.

The importing process has one thread and forks children with one thread, so that the n-th system call of a name is the
same in every child.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import select
import signal
import subprocess
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fault.sweep.saver import inline

CHILD_SECONDS = 60
TRIES = 4


@dataclass(frozen=True)
class Ended:
    """The end of a child: its exit code (negative: signal), and its answer or error."""

    code: int
    answer: Any
    error: str = ""
    text: str = ""
    is_typed: bool = False


class Child:
    """A process that runs ``act`` after ``go``.

    ``role`` seeds its random names and makes it work in one thread; "": neither.
    """

    def __init__(self, act: Callable[[], Any], role: str) -> None:
        ready, self._go = os.pipe()
        self._answer, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            # Leaves the parent's ends open: strace may attach before this line, and it counts calls of close.
            _run_in_child(act, role, ready, answer)
        os.close(ready)
        os.close(answer)

    def go(self) -> None:
        os.write(self._go, b"x")
        os.close(self._go)

    def end(self) -> Ended:
        pieces = []
        while piece := os.read(self._answer, 1 << 16):
            pieces.append(piece)
        os.close(self._answer)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return Ended(code, **json.loads(b"".join(pieces))) if pieces else Ended(code, None)


def _run_in_child(act: Callable[[], Any], role: str, ready: int, answer: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest may have a handler
    signal.alarm(CHILD_SECONDS)
    try:
        if role:
            rng = random.Random(role)
            secrets.token_hex = lambda count=16: rng.randbytes(count).hex()  # type: ignore[assignment, misc]
            asyncio.to_thread = inline  # type: ignore[assignment]
        # select, not read: strace may or may not count a call that began before it attached, and reads are injected.
        select.select([ready], [], [])
        found = {"answer": act()}
        code = 0
    except BaseException as error:
        from tierckpt.errors import TierckptError

        found = {"answer": None, "error": type(error).__name__, "text": _text(error)}
        found["is_typed"] = isinstance(error, TierckptError)
        code = 1
    _write_all(answer, json.dumps(found).encode())
    os._exit(code)


def _text(error: BaseException) -> str:
    """Format ``error``. Retries: the injected error may also hit the reads of the source files."""
    for _ in range(TRIES):
        with contextlib.suppress(Exception):
            return "".join(traceback.format_exception(error))[-3000:]
    return repr(error)


def _write_all(answer: int, data: bytes) -> None:
    """Write ``data``. Retries: the injected error may hit this write too."""
    for _ in range(TRIES):
        with contextlib.suppress(OSError):
            data = data[os.write(answer, data) :]
        if not data:
            return


def run(act: Callable[[], Any], role: str) -> Ended:
    child = Child(act, role)
    child.go()
    return child.end()


def trace(act: Callable[[], Any], role: str, log: Path, injections: Sequence[str] = (), calls: str = "all") -> Ended:
    """``run`` under strace, attached before the child continues. Its log goes to ``log``."""
    child = Child(act, role)
    inject = [word for injection in injections for word in ("-e", f"inject={injection}")]
    command = ["strace", "-y", "-s", "0", "-o", str(log), "-e", f"trace={calls}", *inject, "-p", str(child.pid)]
    tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        attached = tracer.stderr.readline() if tracer.stderr else ""
        if "attached" not in attached:
            raise RuntimeError(f"strace did not attach: {attached}")
    finally:
        child.go()
        ended = child.end()
        tracer.communicate(timeout=60)
    return ended
