"""Many processes that save to one id at the same moment: on one node, or each on a node of its own.

    python -m tests.fault.sweep.races FOLDER RACES [BUG]      writes FOLDER/outcome.json

Each has learnt that nothing stands under the id, waits for the others, and goes. Exactly one must be told that it has
committed, all others AlreadyCommittedError, and what stands on each tier is, byte for byte, one save.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import os
import random
import shutil
import sys
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
ONE_NODE, NODES = "one node", "a node each"
LATE_SECONDS = 0.3
LOSERS_ARE_TOLD = "AlreadyCommittedError"


@dataclass(frozen=True)
class Node(World):
    """A world in which each writer may have a local root of its own."""

    name: str = "local"

    @property
    def local_root(self) -> Path:
        return self.root / self.name


def race(root: Path, writers: int, kind: str, turn: int, bug: str) -> list[str]:
    """What is wrong after one race."""
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
        # A writer that lost may have taken up the winner's entry, as whoever starts does, and have ended with it.
        run_child(lambda: Job(nodes[0]).recover(), f"{turn}/after")
    return list(problems(nodes, ended))


@contextlib.contextmanager
def starting_gate(writers: int) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """``planned``, in which each writer waits, and what lets them go when all of them do."""
    here, there = os.pipe()
    gate, opener = os.pipe()

    def planned() -> None:
        os.close(opener)
        os.write(there, b"x")
        os.read(gate, 1)  # ends when all that can open it have let go of it

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
        if end.code != 0 and end.error != LOSERS_ARE_TOLD:
            yield f"writer {writer} of {len(ended)} ended with {end.code} {end.error}: {end.text[-1000:]}"
    if len(winners) != 1:
        yield f"{len(winners)} of {len(ended)} were told that they had committed"
    try:
        stands = checker.committed_in(nodes[0].place("step-1", SHARED), may_lack=False)
        local = {checker.committed_in(node.place("step-1", LOCAL), may_lack=False) for node in nodes}
    except (checker.Violation, OSError) as violation:
        yield f"torn: {violation}"
        return
    if [stands] != [f"writer-{winner}" for winner in winners]:
        yield f"{stands} stands on the shared tier, told were {winners}"
    if stands not in local:
        yield f"{stands} stands on the shared tier and not where it was saved"


def no_lock() -> None:
    """Locks hold nobody up."""
    fcntl.flock = lambda *_: None  # type: ignore[assignment]


def no_precondition() -> None:
    """A claim that is there already is taken over, whoever's it is.

    The writers come one after the other, each while those before it are between their last look and the commit.
    """
    real = LocalStore.put

    async def put(self: LocalStore, key: str, data: Any, *, if_absent: bool = False) -> None:
        if key in {CLAIM, MANIFEST}:
            await asyncio.sleep(LATE_SECONDS * (random.random() if key == CLAIM else 1.0))
        await real(self, key, data)

    LocalStore.put = put  # type: ignore[method-assign, assignment]


def no_look_at_what_stands() -> None:
    """A local commit replaces whatever stands."""
    local_commit.read_local_manifest = lambda *_: None  # type: ignore[assignment]


BUGS: dict[str, Callable[[], None]] = {
    "no lock": no_lock,
    "no precondition": no_precondition,
    "no look at what stands": no_look_at_what_stands,
}


def main() -> None:
    folder, races = Path(sys.argv[1]), int(sys.argv[2])
    bug = sys.argv[3] if len(sys.argv) > 3 else ""
    folder.mkdir(parents=True, exist_ok=True)
    gc.freeze()
    found: list[str] = []
    run: Counter[str] = Counter()
    for turn in range(races):
        # Each number of writers on one node, then each on nodes of their own.
        kind, writers = (ONE_NODE, NODES)[turn // len(WRITERS) % 2], WRITERS[turn % len(WRITERS)]
        found += [
            f"race {turn}, {writers} writers, {kind}: {text}"
            for text in race(folder / "world", writers, kind, turn, bug)
        ]
        run[kind] += 1
        if bug and found:
            break
    (folder / "outcome.json").write_text(json.dumps({"races": run, "violations": found}))


if __name__ == "__main__":
    main()
