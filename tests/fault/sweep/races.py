"""Concurrent saves to one checkpoint: on one node, or each on a node of its own.

Each writer finds no checkpoint, waits for the others, and commits. Exactly one must succeed, all others must get
AlreadyCommittedError, and each tier must hold one whole save.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fault.sweep import checker
from tests.fault.sweep.child import Child, Ended
from tests.fault.sweep.child import run as run_child
from tests.fault.sweep.phases import LOCAL, SHARED, Job, World
from tierckpt.checkpoint import local_commit
from tierckpt.format.layout import CLAIM, MANIFEST
from tierckpt.stores.local import LocalStore

WRITERS = (2, 3, 5, 8, 13, 32)
ONE_NODE, NODE_PER_WRITER = "one node", "a node each"
DELAY_SECONDS = 0.3
LOSER_ERROR = "AlreadyCommittedError"


@dataclass(frozen=True)
class Node(World):
    """A world in which each writer may have its own local root."""

    name: str = "local"

    @property
    def local_root(self) -> Path:
        return self.root / self.name


def race(root: Path, writers: int, kind: str, turn: int, bug: str) -> list[str]:
    """Run one race and return its problems."""
    shutil.rmtree(root, ignore_errors=True)
    nodes = [Node(root, "local" if kind == ONE_NODE else f"node-{writer}") for writer in range(writers)]
    with starting_gate(writers) as (wait_for_all, planned):
        children = []
        for writer, node in enumerate(nodes):

            def act(writer: int = writer, node: Node = node) -> None:
                BUGS[bug]() if bug else None
                Job(node).save(1, f"writer-{writer}", planned=planned)

            children.append(Child(act, f"{turn}/{writer}"))
        for child in children:
            child.go()
        wait_for_all()
    ended = [child.end() for child in children]
    if kind == ONE_NODE:
        # A losing writer may have resumed the winner's journal entry, as any new process does, and ended with it.
        run_child(lambda: Job(nodes[0]).recover(), f"{turn}/after")
    return list(problems(nodes, ended))


@contextlib.contextmanager
def starting_gate(writers: int) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Yield a function that releases all writers once they wait, and ``planned``, in which a writer waits."""
    here, there = os.pipe()
    gate, opener = os.pipe()

    def planned() -> None:
        os.close(opener)
        os.write(there, b"x")
        os.read(gate, 1)  # returns when the last write end is closed

    def wait_for_all() -> None:
        os.close(there)
        waiting = 0
        while waiting < writers and (news := os.read(here, writers)):
            waiting += len(news)

    try:
        yield wait_for_all, planned
    finally:
        for file in (opener, here, gate):
            os.close(file)


def problems(nodes: list[Node], ended: list[Ended]) -> Iterator[str]:
    winners = [writer for writer, end in enumerate(ended) if end.code == 0]
    for writer, end in enumerate(ended):
        if end.code != 0 and end.error != LOSER_ERROR:
            yield f"writer {writer} of {len(ended)} ended with {end.code} {end.error}: {end.text[-1000:]}"
    if len(winners) != 1:
        yield f"{len(winners)} of {len(ended)} writers committed"
    try:
        shared = checker.committed_label(nodes[0].place("step-1", SHARED), may_lack=False)
        local = {checker.committed_label(node.place("step-1", LOCAL), may_lack=False) for node in nodes}
    except (checker.Violation, OSError) as violation:
        yield f"torn: {violation}"
        return
    if [shared] != [f"writer-{winner}" for winner in winners]:
        yield f"the shared tier holds {shared}, but {winners} committed"
    if shared not in local:
        yield f"{shared} is on the shared tier but on no local tier"


def no_lock() -> None:
    """Locks have no effect."""
    fcntl.flock = lambda *_: None  # type: ignore[assignment]


def no_precondition() -> None:
    """An existing claim of another writer is overwritten.

    Each writer is delayed between its last check and its commit.
    """
    real = LocalStore.put

    async def put(self: LocalStore, key: str, data: Any, *, if_absent: bool = False) -> None:
        if key in {CLAIM, MANIFEST}:
            await asyncio.sleep(DELAY_SECONDS * (random.random() if key == CLAIM else 1.0))
        await real(self, key, data)

    LocalStore.put = put  # type: ignore[method-assign, assignment]


def no_check_of_existing() -> None:
    """A local commit replaces an existing one unchecked."""
    local_commit.read_local_manifest = lambda *_: None  # type: ignore[assignment]


BUGS: dict[str, Callable[[], None]] = {
    "no lock": no_lock,
    "no precondition": no_precondition,
    "no check of the existing commit": no_check_of_existing,
}


def run_races(folder: Path, races: int, bug: str = "") -> dict[str, Any]:
    """Run ``races`` races, or until the bug is found."""
    found: list[str] = []
    run: Counter[str] = Counter()
    for turn in range(races):
        # Each number of writers on one node, then on nodes of their own.
        kind, writers = (ONE_NODE, NODE_PER_WRITER)[turn // len(WRITERS) % 2], WRITERS[turn % len(WRITERS)]
        found += [
            f"race {turn}, {writers} writers, {kind}: {text}"
            for text in race(folder / "world", writers, kind, turn, bug)
        ]
        run[kind] += 1
        if bug and found:
            break
    return {"races": run, "violations": found}
