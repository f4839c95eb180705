"""Memory of the tests of the flush, and a file system that knows no O_TMPFILE."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tierckpt.arena.memory import Memory

MiB = 1 << 20
THREADS_MAX = 8


@pytest.fixture(scope="session")
def slots() -> Iterator[list[Memory]]:
    memories = [Memory.allocate(2 * MiB) for _ in range(THREADS_MAX)]
    yield memories
    for memory in memories:
        memory.close()


@pytest.fixture(scope="session")
def arena() -> Iterator[Memory]:
    with Memory.allocate(2 * MiB) as memory:
        yield memory


def refuse_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refused(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refused)
