"""Fixtures of several tests with faults."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.services import shared_memory_alone
from tierckpt.ipc import agent_client


@pytest.fixture
def short_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make agents started by this process exit soon."""
    monkeypatch.setattr(agent_client, "IDLE_SECONDS", 0.7)


@pytest.fixture
def shared(request: pytest.FixtureRequest) -> Iterator[str]:
    """Shared storage on another file system than the SSD, in memory: nothing can be linked. A parameter: elsewhere."""
    folder = tempfile.mkdtemp(prefix="shared-", dir=getattr(request, "param", "/dev/shm"))
    with shared_memory_alone():
        yield f"file://{folder}/run"
        shutil.rmtree(folder)
