"""Agents with a page, as processes of a test, and polling until something holds."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
        yield next(line.split()[-1] for line in process.stderr if "metrics on" in line).removesuffix("metrics")
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def until(holds: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """Wait until ``holds`` returns a true value and return it."""
    for _ in Poll(seconds):
        if found := holds():
            return found
    raise AssertionError(f"waited {seconds} s for {what}")


def get(url: str) -> str:
    """Return what a page answers."""
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        return str(answer.read().decode())
