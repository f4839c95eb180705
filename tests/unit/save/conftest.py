"""Memory of the tests of the flush."""

from __future__ import annotations

from collections.abc import Iterator

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
