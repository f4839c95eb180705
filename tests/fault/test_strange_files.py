"""Unexpected files in the local root: each small state file and directory is replaced by another kind of file.

As after a copy without links, an unpacked archive, or fsck. Each operation runs in a child with a time limit and must
succeed or raise a TierckptError: no hang, no OSError, no other traceback.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.fault.sweep import child
from tests.states import raises_ours
from tierckpt import TierStorageReader, TierStorageWriter, latest, ownership, prefetch
from tierckpt.agent.agent_server import run as run_agent
from tierckpt.agent.options import AgentOptions
from tierckpt.cli.prune import prune
from tierckpt.cli.status import status
from tierckpt.cli.ui.session import Session
from tierckpt.client import Client, close_all
from tierckpt.config import Settings
from tierckpt.disk.priority import flushing
from tierckpt.disk.read_lease import lease_path
from tierckpt.format.layout import parse_uri
from tierckpt.mover import Mover

IS_FULL = os.environ.get("TIERCKPT_TEST_STRANGE_FILES") == "all"
SAMPLE_SIZE = 4
"""Default: this many pairs of place and kind, the same in every run, with four operations each."""

Verb = Callable[["Node"], Any]


class Node:
    """A local root with a drained checkpoint, an undrained one, and a cached model."""

    def __init__(self, root: Path, shared: Path) -> None:
        self.root, self.shared = root, shared
        self.run, self.model = str(shared / "run"), str(shared / "model")
        self.settings: dict[str, Any] = {"local_root": root, "mover": "inline", "exit_timeout_seconds": 5}

    @property
    def step(self) -> Path:
        return Path(f"{self.root}/checkpoints/file/_{self.run}/step-1")

    def save(self, step: int, **settings: Any) -> None:
        writer = TierStorageWriter(f"{self.run}/step-{step}", overwrite=True, **{**self.settings, **settings})
        dcp.save({"x": torch.arange(64.0)}, storage_writer=writer, no_dist=True)
        close_all()

    def load(self) -> None:
        state = {"x": torch.zeros(64)}
        reader = TierStorageReader(f"{self.run}/step-1", **self.settings)
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert torch.equal(state["x"], torch.arange(64.0)), "wrong bytes"

    def client(self, work: Callable[[Any], Any]) -> None:
        client = Client(Settings.load(**self.settings))
        try:
            client.run(work(client.mover))
        finally:
            client.close()

    def fetch(self) -> None:
        directory = prefetch(self.model, **self.settings)
        assert (directory / "weights.bin").read_bytes() == b"w" * 100_000, "wrong bytes"


async def _evict(mover: Mover, uri: str) -> None:
    mover.node_cache.evict(parse_uri(uri))


def _agent(node: Node) -> None:
    run_agent(Settings.load(**{**node.settings, "mover": "agent"}), AgentOptions(idle_seconds=0.05))


VERBS: dict[str, Verb] = {
    "status": lambda node: status(Session(as_json=True, local_root=node.root)),
    "latest": lambda node: latest(node.run, **node.settings),
    "restore": Node.load,
    "prefetch": Node.fetch,
    "prune": lambda node: prune(Session(local_root=node.root), node.run, keep_last=1, yes=True),
    "drain": lambda node: node.client(lambda mover: mover.drains.drain_all(patient=False)),
    "recover": lambda node: node.client(lambda mover: mover.drains.recover()),
    "evict": lambda node: node.client(lambda mover: _evict(mover, node.model)),
    "save": lambda node: node.save(1),
    "agent": _agent,
}


# --- kinds ----------------------------------------------------------------------------------------------------------


def _directory(path: Path) -> None:
    path.mkdir()
    (path / "in it").write_text("x")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.open(path.parent, os.O_PATH)
        one.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


KINDS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_bytes(b"\xffnothing of ours"),
    "directory": _directory,
    "dangling": lambda path: path.symlink_to(path.parent / "nowhere" / "at all"),
    "loop": lambda path: path.symlink_to(path.name),
    "link_to_a_file": lambda path: path.symlink_to("/etc/hostname"),
    "link_to_a_directory": lambda path: path.symlink_to("/etc"),
    "fifo": os.mkfifo,
    "socket": _socket,
}

# --- places ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files that each case starts with a copy of. All cases have the same URIs, which the local tier mirrors."""
    base = tmp_path_factory.mktemp("strange")
    shared = base / "shared"
    (shared / "model").mkdir(parents=True)
    (shared / "model" / "weights.bin").write_bytes(b"w" * 100_000)
    node = Node(base / "local", shared)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TIERCKPT_") and "_TEST_" not in name]:
            patch.delenv(name)
        for step in (1, 2):
            node.save(step, drain=step == 1)
            if step == 1:
                node.client(lambda mover: mover.drains.drain_all(patient=True))
        node.fetch()
        with flushing(node.root):
            pass
        _agent(node)
        for verb in ("restore", "prune", "status"):
            VERBS[verb](node)
        close_all()
    (base / "local").rename(base / "as it was")
    shared.rename(base / "shared as it was")
    return base


@pytest.fixture
def node(template: Path) -> Iterator[Node]:
    _restore_template(template)
    yield Node(template / "local", template / "shared")


def _restore_template(template: Path) -> None:
    for name, origin in (("local", "as it was"), ("shared", "shared as it was")):
        shutil.rmtree(template / name, ignore_errors=True)
        shutil.copytree(template / origin, template / name, symlinks=True)


def places(node: Node) -> list[Path]:
    """Return all small state files and directories, and temporary ones: claims, locks, leases, marks."""
    standing = [path for path in sorted(node.root.rglob("*")) if not path.name.endswith((".distcp", ".bin"))]
    entry = next(path for path in (node.root / "cache").iterdir() if not path.name.startswith((".", "index")))
    state = node.root / "cache" / ".state" / entry.name
    step, agent = node.step, node.root / "agent"
    passing = [
        *(node.root / "cache" / name for name in (".leases", f".leases/{entry.name}.lock")),
        *(state / name for name in ("reserved", "reserved.new", "used", "pinned", "leases")),
        *(step / ".tierckpt" / name for name in ("lock", "incoming", "origin", "removed", "parts", "superseded.json")),
        *(step.parent / "step-3", step / "__0_0-strange.distcp"),
        lease_path(node.root, step),
        *(node.root / "journal" / name for name in ("strange.json", "strange.lock")),
        *(node.root / name for name in ("leases", "control.json", "control.lock", "admission.lock", "flush.mark")),
        node.root / "quarantine",
        *(node.root / name for name in ("read-modes.json", "model-read-modes.json", "read-modes.lock")),
        *(agent / name for name in ("agent.lock", "agent.log", "agent.sock", "agent.starting", "node")),
    ]
    return sorted({*standing, *passing})


def plant(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    KINDS[kind](path)


# --- judging --------------------------------------------------------------------------------------------------------


def judge(node: Node, verb: str) -> str:
    """Return "" if ``verb`` succeeded or raised a TierckptError in time, else the problem."""

    def act() -> None:
        ownership.roots.clear()
        logging.disable(logging.CRITICAL)
        with raises_ours():
            VERBS[verb](node)

    ended = child.run(act, "")  # killed after a minute
    return "" if ended.code == 0 or ended.is_typed else f"{verb}: {ended.code} {ended.error} {ended.text}"


@pytest.mark.slow
def test_no_operation_hangs_or_fails_untyped_on_unexpected_files(node: Node, template: Path) -> None:
    assert not [wrong for verb in VERBS if (wrong := judge(node, verb))], "fails on the unchanged local root"
    _restore_template(template)  # one of the operations evicts
    problems, done, started = [], 0, time.monotonic()
    cases = [(path.relative_to(template / "local"), kind) for path in places(node) for kind in KINDS]
    chosen = sorted(cases, key=_sample_number)[: None if IS_FULL else SAMPLE_SIZE]
    for place, kind in chosen:
        _restore_template(template)
        plant(node.root / place, kind)
        verbs = list(VERBS) if IS_FULL else itertools.islice(itertools.cycle(VERBS), done, done + 4)
        problems += [f"{kind} at {place}: {wrong}" for verb in verbs if (wrong := judge(node, verb))]
        done += 1
    print(f"{done} cases in {time.monotonic() - started:.0f} s")
    assert not problems, "\n".join(problems)


def _sample_number(case: tuple[Path, str]) -> int:
    """Return a number that depends only on names that are the same in every run (not on tokens)."""
    place = "/".join(part for part in case[0].parts if len(part) < 14)
    return int(hashlib.sha256(f"{place} {case[1]}".encode()).hexdigest(), 16)
