"""The one owner of the retries of a drain (tierckpt/drain/background_drains.py)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tierckpt.checkpoint.journal import READY, JournalEntry
from tierckpt.config import Settings
from tierckpt.drain import background_drains
from tierckpt.drain.background_drains import BackgroundDrains
from tierckpt.drain.drainer import Drainer, DrainResult
from tierckpt.errors import PermissionDeniedError
from tierckpt.telemetry import ignore_progress

URI = "s3://bucket/run/step-1"


class Node:
    """One ready entry, with a drain that fails while ``error`` is set."""

    def __init__(self, local_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tries = 0
        self.error: Exception | None = PermissionDeniedError("no permission", tier="shared")
        drainer = Drainer(Settings.load(local_root=local_root), ignore_progress)
        self.entry = JournalEntry("token", URI, 0, READY, 1.0, 4096, ())
        drainer.journal.write(self.entry)

        async def drain(token: str, *, patient: bool = True) -> DrainResult:
            self.tries += 1
            if self.error is not None:
                raise self.error
            return DrainResult(token, URI, "committed")

        monkeypatch.setattr(drainer, "drain", drain)
        clock = SimpleNamespace(monotonic=lambda: self.now, time=time.time)
        monkeypatch.setattr(background_drains, "time", clock)
        self.now = 1000.0
        self.drains = BackgroundDrains(drainer.settings, drainer)

    async def look(self) -> int:
        """Submit due entries and wait for them. Returns the attempts so far."""
        self.drains.submit_due([self.entry])
        await self.end()
        return self.tries

    async def end(self) -> None:
        if self.drains.draining:
            await asyncio.wait([self.drains.submit("token")])


@pytest.fixture
def node(local_root: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(local_root, monkeypatch)


async def test_a_failed_drain_is_tried_again_after_a_pause_that_doubles(node: Node) -> None:
    assert await node.look() == 1
    for pause_seconds, tries in ((5.0, 2), (10.0, 3), (20.0, 4)):
        node.now += pause_seconds - 0.1
        assert await node.look() == tries - 1
        node.now += 0.2
        assert await node.look() == tries
    for _ in range(20):
        node.now += 300.1
        await node.look()
    assert node.tries == 24, "300 seconds are the longest pause"
    assert len(node.drains.errors) == background_drains.ERRORS_MAX


@pytest.mark.parametrize("error", [PermissionDeniedError("no permission"), RuntimeError("a bug")])
async def test_what_is_retried_keeps_an_agent_and_a_success_lets_it_go(node: Node, error: Exception) -> None:
    node.error = error
    await node.look()
    assert not node.drains.is_idle and not node.drains.draining
    node.error, node.now = None, node.now + 5.1
    await node.look()
    assert node.drains.is_idle


async def test_a_submitted_drain_waits_for_no_pause_nor_do_any_before_the_end(node: Node) -> None:
    await node.look()
    node.drains.submit("token")
    await node.end()
    assert node.tries == 2
    await node.drains.prefer_newest()
    assert await node.look() == 3


async def test_an_entry_that_is_set_aside_is_retried_no_longer(node: Node) -> None:
    await node.look()
    node.drains.submit_due([replace(node.entry, state="set aside")])
    assert node.drains.is_idle


async def test_only_a_successful_drain_sets_the_event(node: Node) -> None:
    for node.error in (PermissionDeniedError("no permission"), RuntimeError("a bug"), None):
        with contextlib.suppress(PermissionDeniedError, RuntimeError):
            await node.drains.submit("token")
        assert node.drains.drained.is_set() is (node.error is None)
