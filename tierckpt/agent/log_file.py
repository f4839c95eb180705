"""The log of an agent that was started on demand: its standard error, a file of bounded size.

    <local_root>/agent/agent.log      appended to
    <local_root>/agent/agent.log.1    the previous file

Both files together take twice ``LOG_BYTES_MAX``, plus the output between two checks (a second).
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

from ..disk.quarantine import open_regular
from ..ipc.agent_client import LOG, LOG_BYTES_MAX

OUTPUTS = (1, 2)


class LogFile:
    """The log in ``directory``; none if the site started the agent."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOG
        self._outputs = [file for file in OUTPUTS if _is(file, self._path)]

    def keep_small(self) -> None:
        """After a failure the next call retries."""
        if not self._outputs or os.fstat(self._outputs[0]).st_size <= LOG_BYTES_MAX:
            return
        with contextlib.suppress(OSError):
            if _is(self._outputs[0], self._path):  # otherwise another agent's start has rotated it
                self._path.replace(self._path.with_name(f"{LOG}.1"))
            file = open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                sys.stderr.flush()
                for output in self._outputs:
                    os.dup2(file, output)
            finally:
                os.close(file)


def _is(file: int, path: Path) -> bool:
    try:
        status = os.fstat(file)
        return stat.S_ISREG(status.st_mode) and os.path.samestat(status, path.lstat())
    except OSError:
        return False
