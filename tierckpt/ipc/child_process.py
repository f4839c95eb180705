"""Starts child processes that run only our code.

A user with write access to the working directory, or to a relative entry of PYTHONPATH, could run code as this user. So
a child gets an absolute executable, ``-P``, root's working directory, and no relative or world-writable directory in
its environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..poll import Poll
from ..types import Json

DIRECTORY = "/"
DROPPED_VARIABLES = frozenset({"PYTHONPATH", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT", "PYTHONWARNINGS"})
"""They make Python import modules, or wait at a prompt. LD_PRELOAD stays, as torch may need it."""


def start_python(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    if not Path(sys.executable or "").is_absolute():
        raise FileNotFoundError(f"sys.executable is {sys.executable!r}, which does not say where Python is")
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.Popen(command, cwd=DIRECTORY, env=clean_environment(os.environ), **options)


def start_with_order(module: str, order: Json, descriptors: Sequence[int] = ()) -> tuple[subprocess.Popen[bytes], int]:
    """Start ``module`` with ``order`` as JSON on stdin. Raises OSError.

    Returns the process, and our end of the pipe ``order["life"]``: closing it ends the process.
    """
    child_end, own_end = os.pipe()
    with os.fdopen(child_end), tempfile.TemporaryFile() as file:  # not a pipe, to avoid waiting for the reader
        file.write(json.dumps({**order, "life": child_end}).encode())
        file.seek(0)
        try:
            return start_python(module, stdin=file, pass_fds=(child_end, *descriptors)), own_end
        except BaseException:
            os.close(own_end)
            raise


async def ended(process: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    """Wait for ``process`` to end with code 0; kill it after the timeout. Raises RuntimeError."""
    async for _ in Poll(timeout_seconds):
        if process.poll() is not None:
            break
    else:
        process.kill()
        await asyncio.to_thread(process.wait)
        raise RuntimeError(f"the process that executes it had not ended after {timeout_seconds:g} s")
    if process.returncode != 0:
        raise RuntimeError(f"the process that executes it ended with code {process.returncode}")


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if name not in DROPPED_VARIABLES}
    path = [*_search_path(environment.get("PYTHONPATH", ""))]
    return kept | {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def _search_path(search_path: str) -> Iterator[str]:
    home = str(Path(__file__).resolve().parent.parent.parent)
    for entry in search_path.split(os.pathsep):
        if entry != home and Path(entry).is_absolute() and not _is_open_to_all(Path(entry)):
            yield entry
    if home not in {*site.getsitepackages(), site.getusersitepackages()}:
        yield home


def _is_open_to_all(directory: Path) -> bool:
    """True also for a missing directory, which others could make. Its owner is trusted."""
    try:
        return bool(directory.stat().st_mode & 0o002)
    except OSError:
        return True
