"""Forked processes that do one thing and are gone: alone, or under strace, which counts, kills, answers for the kernel.

Whoever imports this has one thread and forks children that have one thread: what the n-th system call of a name is
stays the same from one child to the next.
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
    """How a child ended: its exit code (below 0: the signal) and what it left, an answer or an error."""

    code: int
    answer: Any
    error: str = ""
    text: str = ""
    is_typed: bool = False


class Child:
    """A process that does ``act`` once told to go. ``role`` seeds the names it invents."""

    def __init__(self, act: Callable[[], Any], role: str) -> None:
        ready, self._go = os.pipe()
        self._answer, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            # The parent's ends stay open here: strace may attach before this line, and what is closed is counted.
            _live(act, role, ready, answer)
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


def _live(act: Callable[[], Any], role: str, ready: int, answer: int) -> None:
    signal.alarm(CHILD_SECONDS)
    try:
        made = random.Random(role)
        secrets.token_hex = lambda count=16: made.randbytes(count).hex()  # type: ignore[assignment, misc]
        asyncio.to_thread = inline  # type: ignore[assignment]
        # No read: whether strace sees one that began before it attached depends on the clock, and reads are counted.
        select.select([ready], [], [])
        found = {"answer": act()}
        code = 0
    except BaseException as error:
        from tierckpt.errors import TierckptError

        found = {"answer": None, "error": type(error).__name__, "text": _text(error)}
        found["is_typed"] = isinstance(error, TierckptError)
        code = 1
    _tell(answer, json.dumps(found).encode())
    os._exit(code)


def _text(error: BaseException) -> str:
    """What is injected may hit this as well: it reads the sources."""
    for _ in range(TRIES):
        with contextlib.suppress(Exception):
            return "".join(traceback.format_exception(error))[-3000:]
    return repr(error)


def _tell(answer: int, data: bytes) -> None:
    """And this, where an earlier error has left out some of the calls that are counted."""
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
    """``run`` under strace, attached before the child goes on. What it saw is in ``log``."""
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
