"""A cancelled caller leaves nothing open or locked, although a thread still opens it for that caller."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.peer_node import CHUNK, model, publish, serving, until
from tierckpt.cache.entry import CacheEntry
from tierckpt.config import Settings
from tierckpt.disk.file_lock import HostLease
from tierckpt.drain import file_transfer
from tierckpt.format.layout import parse_uri
from tierckpt.format.manifest import FileEntry, digests_of
from tierckpt.mover import Mover
from tierckpt.peer.inventory import Holdings
from tierckpt.restore import prefetch
from tierckpt.stores.local import LocalStore

DATA = os.urandom(3 * CHUNK)
FILE = FileEntry("model.bin", len(DATA), digests_of(DATA, CHUNK))


class Held:
    """A blocking function that waits before or after it has its effect."""

    def __init__(self, real: Callable[..., Any], *, after: bool) -> None:
        self._real, self._after = real, after
        self.begun, self.go_on, self.ended = threading.Event(), threading.Event(), threading.Event()

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        return (lambda *given, **named: self(instance, *given, **named)) if instance is not None else self

    def __call__(self, *given: Any, **named: Any) -> Any:
        result = self._real(*given, **named) if self._after else None
        self.begun.set()
        self.go_on.wait(60)
        result = result if self._after else self._real(*given, **named)
        self.ended.set()
        return result


class Node:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "shared").mkdir()
        (root / "shared" / "model.bin").write_bytes(DATA)
        self.mover = Mover(Settings.load(local_root=root / "local", mover="inline"))
        self.store, self.location = LocalStore(root / "shared"), parse_uri(str(root / "shared"))

    async def fill_directory(self) -> None:
        await prefetch.fetch(self.mover, prefetch.PrefetchRequest(self.location, self.root / "target"))

    async def open_entry(self) -> None:
        await (await self.mover.node_cache.open_at(self.location)).close()

    async def fetch(self) -> None:
        await file_transfer.fetch(self.store, FILE, self.root / "fetched", CHUNK, lambda _: None, 2)

    async def send(self) -> None:
        other = LocalStore(self.root / "other")
        await file_transfer.send(other, self.root / "shared" / "model.bin", FILE, CHUNK, lambda _: None, replaces=True)

    def left(self) -> list[str]:
        """What is open below the root, and what a cancelled transfer should have removed."""
        return [*open_below(self.root), *heartbeats(), *map(str, self.root.glob(".fetched*.tmp"))]


def heartbeats() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "tierckpt-lease"]


def open_below(root: Path) -> list[str]:
    found = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(file.readlink()))
    return [name for name in found if name.startswith(f"{root}/")]


OPENINGS: dict[str, tuple[Any, str, Callable[[Node], Coroutine[Any, Any, None]]]] = {
    "a directory of a prefetch": (CacheEntry, "begin", Node.fill_directory),
    "the lease of its host": (HostLease, "take", Node.fill_directory),
    "a cache entry": (CacheEntry, "begin", Node.open_entry),
    "a fetched file": (file_transfer, "create_file", Node.fetch),
    "a sent file": (file_transfer, "open_file", Node.send),
}


@pytest.mark.parametrize("after", [False, True], ids=["before it is open", "after"])
@pytest.mark.parametrize("opening", OPENINGS)
async def test_a_cancelled_caller_leaves_nothing_open(
    opening: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, work = OPENINGS[opening]
    node = Node(tmp_path)
    await until(lambda: not heartbeats())  # of the test before
    before = node.left()
    held = Held(getattr(owner, name), after=after)
    monkeypatch.setattr(owner, name, held)
    task = asyncio.ensure_future(work(node))
    await until(held.begun.is_set)
    task.cancel()
    await asyncio.wait([task], timeout=0.2)  # a caller that waits for the thread does not end
    held.go_on.set()
    await until(held.ended.is_set)
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: node.left() == before)
    monkeypatch.undo()
    await work(node)  # nothing that was left excludes the next caller
    await node.mover.close()


async def test_a_cancelled_close_ends_a_fill_and_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path)
    await until(lambda: not heartbeats())  # of the test before
    before = node.left()
    held = Held(HostLease.take, after=False)
    monkeypatch.setattr(HostLease, "take", held)
    cached = await node.mover.node_cache.open_at(node.location)
    filling = asyncio.ensure_future(cached.fill())
    await until(held.begun.is_set)
    closing = asyncio.ensure_future(cached.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing, filling], timeout=0.2)
    held.go_on.set()
    await until(held.ended.is_set)
    await asyncio.wait([closing, filling])
    assert filling.cancelled() and closing.cancelled()
    await until(lambda: node.left() == before)
    await node.mover.close()


async def test_a_peer_that_stops_leaves_no_chunk_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = model()
    frozen = publish(tmp_path, data)
    held = Held(Holdings.open, after=True)
    monkeypatch.setattr(Holdings, "open", held)
    async with serving(tmp_path) as node:
        into = memoryview(bytearray(CHUNK))
        task = asyncio.ensure_future(node.client().chunk(node.member, frozen.version, CHUNK, 0, into, expected=""))
        await until(held.begun.is_set)
        closing = asyncio.ensure_future(node.server.close())
        await asyncio.wait([closing], timeout=0.2)
        held.go_on.set()
        await closing
        await asyncio.wait([task])
        assert task.exception() is not None
    await until(lambda: not open_below(tmp_path / "cache" / frozen.name))
