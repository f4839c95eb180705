"""Faults of the agents of test_replica_faults.py: SIGKILL at a chosen operation, or a seeded bug."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.servers.nodes import newest_first
from tierckpt.disk import file_io
from tierckpt.drain import file_transfer
from tierckpt.replication import replicator
from tierckpt.stores import verified_read

AT = "TIERCKPT_TEST_KILL_AT"
LOG = "TIERCKPT_TEST_KILL_LOG"
ON = "TIERCKPT_TEST_KILL_ON"
"""Count only operations on file names with this part."""
EVENTS = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"})


def kill_at() -> None:
    """Kill this process just before its n-th operation on a file of a checkpoint; each is logged before it is done."""
    newest_first()
    left, log = int(os.environ[AT]), os.open(os.environ[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def count(operation: str, path: str) -> None:
        nonlocal left
        if "/checkpoints/" not in path or os.environ.get(ON, "") not in path:
            return
        left -= 1
        os.write(log, f"{operation} {Path(path).name}\n".encode())
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS or (event == "open" and not _writes(arguments)):
            return
        if isinstance(arguments[0], str | bytes | os.PathLike):
            count(event, os.fsdecode(arguments[0]))

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(file: int, *rest: Any) -> Any:
            count(name, str(Path(f"/proc/self/fd/{file}").readlink()))
            return real(file, *rest)

        return call

    for name in ("pwrite", "fsync"):
        setattr(os, name, counted(name))
    sys.addaudithook(heard)


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def names_before_bytes() -> None:
    """The bug: a file has its name, and its size, before its bytes are there."""
    kill_at()

    async def fetch(store: Any, entry: Any, path: Path, chunk_size_bytes: int, on_bytes: Any, concurrency: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = file_transfer.create_file(path, entry.size_bytes)
        try:
            for byte_range, digest in entry.chunks(chunk_size_bytes):
                data = await verified_read.get_checked(store, entry, byte_range, digest)
                file_io.pwrite_all(file, data, byte_range.start, path)
                on_bytes(byte_range.size_bytes)
            os.fsync(file)
        finally:
            os.close(file)

    replicator.fetch = fetch  # type: ignore[assignment]


BUGS: dict[str, Callable[[], None]] = {"kill": kill_at, "names before bytes": names_before_bytes}
