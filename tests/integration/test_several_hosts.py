"""Several hosts, or containers of one host, prefetch into one shared directory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuse_mount import mounted
from tests.hosts import container, needs_namespaces, other_host
from tierckpt.cache.file_set import FileSet
from tierckpt.cache.partial_entry import HOST, PartialEntry
from tierckpt.cache.prefetch import from_listing
from tierckpt.poll import LOCAL, Poll
from tierckpt.stores.local import LocalStore

pytestmark = needs_namespaces

KINDS = pytest.mark.parametrize("kind", ["container", "host"])
FILES, FILE_BYTES = 4, 24 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for number in range(FILES):
        (directory / f"{number}.bin").write_bytes(os.urandom(1 << 20) * (FILE_BYTES >> 20))
    return directory


class Node:
    """A prefetch on a separate host or in a separate container."""

    def __init__(self, kind: str, number: int, model: Path, to: Path) -> None:
        there = model.parent / f"node-{number}"
        there.mkdir()
        wrap = container() if kind == "container" else other_host(there)
        command = ["prefetch", str(model), "--to", str(to), "--json"]
        self.process = subprocess.Popen(
            [*wrap, sys.executable, "-m", "tierckpt", *command],
            env={**os.environ, "TIERCKPT_LOCAL_ROOT": str(there / "local"), "TIERCKPT_CONCURRENCY": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self) -> dict[str, Any]:
        out, errors = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, errors
        return dict(json.loads(out))


def check_whole(model: Path, to: Path) -> None:
    for number in range(FILES):
        assert (to / f"{number}.bin").read_bytes() == (model / f"{number}.bin").read_bytes()
    assert not list(to.parent.glob("*.incoming")) and not list(to.parent.glob(".*.incoming"))


@KINDS
def test_two_concurrent_prefetches_fetch_each_byte_once(model: Path, kind: str) -> None:
    to = model.parent / "to"
    nodes = [Node(kind, number, model, to) for number in range(2)]
    fetched = [node.result()["fetched_bytes"] for node in nodes]
    check_whole(model, to)
    assert sum(fetched) == FILES * FILE_BYTES
    assert kind == "container" or 0 in fetched, "one host must fetch while the other waits"


@pytest.mark.slow
@pytest.mark.parametrize("no", [(), ("flock",), ("flock", "link", "symlink")], ids=lambda no: "no " + ", ".join(no))
def test_four_hosts_with_separate_mounts_fetch_each_byte_once(model: Path, no: tuple[str, ...]) -> None:
    """Locks do not reach other mounts, and files removed by others disappear: as on NFS without locks."""
    shared = model.parent / "shared"
    shared.mkdir()
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in range(4):
            (base := model.parent / f"mount-{number}").mkdir()
            mount = stack.enter_context(mounted(base, shared, no=no))
            nodes.append(Node("host", number, model, mount.path / "to"))
        fetched = [node.result()["fetched_bytes"] for node in nodes]
    check_whole(model, shared / "to")
    assert sorted(fetched) == [0, 0, 0, FILES * FILE_BYTES]


@pytest.mark.parametrize("has_locks", [True, False])
def test_processes_on_a_mount_without_locks_act_as_hosts(model: Path, has_locks: bool) -> None:
    """With locks, claims divide the work between processes; without, one fetches and the others wait."""
    store = LocalStore(model)
    frozen = FileSet(store.uri, tuple(asyncio.run(from_listing(store))), FILE_BYTES)
    with mounted(model.parent, no=() if has_locks else ("flock", "lock", "link", "symlink")) as mount:
        first, second = (PartialEntry(mount.path / "to", frozen, preallocate=False) for _ in range(2))
        assert first.host.take() and second.host.take() == has_locks
        first.close()
        assert second.host.take()
        second.close()
        assert not (second.incoming / HOST).exists()


def test_waiting_host_reads_the_receipt_of_the_published_directory(model: Path) -> None:
    """The other host has published and removed the list that this one has open."""
    shared, to = model.parent / "shared", "to"
    shared.mkdir()
    (base := model.parent / "mount").mkdir()
    with mounted(base, shared) as mount:
        store = LocalStore(model)
        frozen = FileSet(store.uri, tuple(asyncio.run(from_listing(store))), FILE_BYTES)
        waits = PartialEntry(mount.path / to, frozen, preallocate=False)
        Node("host", 0, model, shared / to).result()
        waits.refresh()
        assert waits.has_all() and waits.is_published() and waits.landed_bytes == FILES * FILE_BYTES
        waits.close()


@KINDS
@pytest.mark.slow
def test_other_host_continues_after_a_kill(model: Path, kind: str) -> None:
    to = model.parent / "to"
    first = Node(kind, 0, model, to)
    for _ in Poll(60, LOCAL):
        if any(path.stat().st_size for path in model.parent.glob(".to.*.incoming/.tierckpt/filling/progress-*")):
            break
    first.process.kill()
    first.process.communicate()
    Node(kind, 1, model, to).result()
    check_whole(model, to)
