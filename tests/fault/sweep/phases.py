"""The phases: what is done before the fault, what the fault meets, and what stands under each name before and after.

A state maps ``(place, tier)`` to the label of the save that is committed there; what is not in it holds nothing.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fault.sweep.saver import CHUNK_BYTES, Saver
from tierckpt.checkpoint.retention import Policy, Rule
from tierckpt.config import Settings
from tierckpt.disk.durable import translated
from tierckpt.disk.local_root import check_local_root
from tierckpt.drain import drainer, file_transfer
from tierckpt.format.layout import Location, local_dir, parse_uri
from tierckpt.poll import Pauses
from tierckpt.restore import prefetch
from tierckpt.restore.restore import restore as restore_directory
from tierckpt.stores import retry
from tierckpt.stores.local import LocalStore

WAIT_SECONDS = 1.5
"""For ranks that may never come."""
PATIENT_WAIT_SECONDS = 30.0
"""For ranks that do come, on a machine that has much to do."""
drainer.SHARED = Pauses(0.1, 2.0)
"""Long enough for the other ranks to be done: how often a mover looks must not depend on how fast this machine is."""

LOCAL, SHARED, TARGET = "local", "shared", "target"
State = dict[tuple[str, str], str]


@dataclass(frozen=True)
class World:
    """One directory with all a phase needs. What a process acknowledges goes to a file outside of it."""

    root: Path

    @property
    def local_root(self) -> Path:
        return self.root / "local"

    @property
    def run(self) -> Location:
        return parse_uri(self.root / "shared" / "run")

    def step(self, number: int) -> Location:
        return self.run.child(f"step-{number}")

    def place(self, name: str, tier: str) -> Path:
        if tier == TARGET:
            return self.root / "target"
        location = self.run.child(name)
        return local_dir(self.local_root, location) if tier == LOCAL else Path(location.path)

    @property
    def acknowledgements(self) -> Path:
        return self.root.parent / "acknowledged"


class Job:
    """What a child works with: a saver, a mover, a loop, and a file to acknowledge in."""

    wait_seconds = WAIT_SECONDS

    def __init__(self, world: World, *, drain: bool = True, **overrides: Any) -> None:
        self.world = world
        retry.PAUSE_SECONDS_MAX = 0.01  # of this child
        settings = Settings.load(
            local_root=world.local_root,
            drain=drain,
            chunk_size_bytes=CHUNK_BYTES,
            concurrency=1,
            commit_timeout_seconds=Job.wait_seconds,
            **overrides,
        )
        self._runner = asyncio.Runner()
        self.saver = Saver(settings, self.wait)
        self.mover = self.saver.mover
        self._file = os.open(world.acknowledgements, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        with translated(self.world.local_root, is_above=True):  # as the client does
            return self._runner.run(work)

    def acknowledge(self, place: str, tier: str) -> None:
        """Say outside of the world that this has happened: from now on nothing may take it back."""
        os.write(self._file, f"{place} {tier}\n".encode())

    def save(self, step: int, label: str, **options: Any) -> None:
        name = f"step-{step}"
        location = self.world.step(step)
        self.saver.save(location, label, committed=lambda: self.acknowledge(name, LOCAL), **options)
        if self.saver.settings.drain and options.get("send", True):
            self.drain()

    def drain(self) -> None:
        """What the journal holds, once; raises the first thing that went wrong, acknowledges what went well."""
        results, errors = self.wait(self.mover.drains.drain_all(patient=True))
        for result in results:
            if result.outcome == "committed":
                self.acknowledge(result.uri.rpartition("/")[2], SHARED)
        if errors:
            raise errors[0]

    def recover(self) -> None:
        """What the next process does first."""
        check_local_root(self.saver.settings)
        self.saver.recover()
        self.wait(self.mover.drains.idle(10.0))
        self.drain()


@dataclass(frozen=True)
class Phase:
    """What is prepared, what the fault meets, and the states before it, after it, and after a restart."""

    name: str
    prepare: Callable[[World], None]
    act: Callable[[World], None]
    before: State
    after: State
    settled: State = field(default_factory=dict)
    """What another process makes of it that drains what it finds; ``after`` where that is all the same."""
    links: bool = True
    """The shared tier is on the same file system; False: it is told that it cannot link."""
    damaged: frozenset[tuple[str, str]] = frozenset()
    """Places with files missing: prepared so, or as long as what stands there has its files on the shared tier only."""
    again: Callable[[World], None] = lambda world: Job(world).recover()
    """What the next process does after a kill, and is killed in."""

    @property
    def end(self) -> State:
        return self.settled or self.after


def cannot_link() -> None:
    """The shared tier is on another file system, so that files are copied."""

    async def link(self: LocalStore, key: str, source: Path) -> bool:
        return False

    LocalStore.link = link  # type: ignore[method-assign]


# --- the phases ---------------------------------------------------------------------------------------------------

ONE: State = {("step-1", LOCAL): "1", ("step-1", SHARED): "1"}
TWO: State = {**ONE, ("step-2", LOCAL): "2", ("step-2", SHARED): "2"}
OVER: State = {**ONE, ("step-2", LOCAL): "over", ("step-2", SHARED): "over"}


def save_one(world: World) -> None:
    Job(world).save(1, "1")


def save_two(world: World) -> None:
    job = Job(world)
    job.save(1, "1")
    job.save(2, "2", ranks=2)


def save_three(world: World) -> None:
    job = Job(world)
    for step in (1, 2, 3):
        job.save(step, str(step))


def restore_prepared(world: World) -> None:
    """A node that has lost one of its shards."""
    save_two(world)
    next(world.place("step-2", LOCAL).glob("__1_0*.distcp")).unlink()


def restore(world: World) -> None:
    """Of this step. Of the run it would rightly be an older one where this one cannot be read (set_cover.py)."""
    job = Job(world)
    job.wait(restore_directory(job.mover, world.step(2), world.place("", TARGET)))
    job.acknowledge("step-2", TARGET)


def fetch_prepared(world: World) -> None:
    """A node that has nothing."""
    save_two(world)
    shutil.rmtree(world.local_root)


def fetch(world: World) -> None:
    """What a node does before a job starts on it."""
    job = Job(world)
    job.wait(prefetch.fetch(job.mover, prefetch.PrefetchRequest(world.step(2))))


def drain_prepared(world: World) -> None:
    """A save of two ranks that was committed here, and of which nothing has been sent."""
    save_two(world)
    Job(world).save(2, "over", ranks=2, send=False)


def resume_prepared(world: World) -> None:
    """One save to drain of which a file is there already, another that was killed while it wrote shards."""
    save_two(world)
    job = Job(world)
    job.save(2, "over", send=False)
    [entry] = job.mover.journal.entries()
    file = entry.files[0]
    path = job.mover.directory(entry.location) / file.key
    job.wait(file_transfer.send(job.mover.store(entry.location), path, file, CHUNK_BYTES, lambda _: None))
    job.saver.leave_unfinished(world.step(3), "3")


def retain(world: World) -> None:
    job = Job(world)
    job.wait(job.mover.pruner.prune(world.run, Policy(Rule(1), Rule(2))))


PHASES = (
    Phase(
        "save",
        save_one,
        lambda world: Job(world).save(2, "2", send=False),
        before=ONE,
        after={**ONE, ("step-2", LOCAL): "2"},
        settled=TWO,
    ),
    Phase(
        "overwrite",
        save_two,
        lambda world: Job(world).save(2, "over", send=False),
        before=TWO,
        after={**TWO, ("step-2", LOCAL): "over"},
        settled=OVER,
    ),
    Phase(
        "save straight",
        save_one,
        lambda world: Job(world).save(2, "2", is_direct_put=True),
        before=ONE,
        after={**ONE, ("step-2", LOCAL): "2", ("step-2", SHARED): "2"},
        settled={**ONE, ("step-2", SHARED): "2"},
        damaged=frozenset({("step-2", LOCAL)}),
    ),
    Phase("save and drain by links", save_two, lambda world: Job(world).save(2, "over"), before=TWO, after=OVER),
    Phase(
        "save without collectives",
        save_two,
        lambda world: Job(world).save(2, "over", ranks=2, alone=True),
        before=TWO,
        after=OVER,
    ),
    Phase(
        "drain by copies",
        drain_prepared,
        lambda world: Job(world).drain(),
        before={**TWO, ("step-2", LOCAL): "over"},
        after=OVER,
        links=False,
    ),
    Phase(
        "restore",
        restore_prepared,
        restore,
        before=TWO,
        after={**TWO, ("step-2", TARGET): "2"},
        damaged=frozenset({("step-2", LOCAL)}),
        again=restore,
    ),
    Phase(
        "fetch",
        fetch_prepared,
        fetch,
        before={key: label for key, label in TWO.items() if key[1] == SHARED},
        after={key: label for key, label in TWO.items() if key != ("step-1", LOCAL)},
        again=fetch,
    ),
    Phase(
        "retention",
        save_three,
        retain,
        before={(f"step-{step}", tier): str(step) for step in (1, 2, 3) for tier in (LOCAL, SHARED)},
        after={("step-3", LOCAL): "3", ("step-3", SHARED): "3", ("step-2", SHARED): "2"},
        again=retain,
    ),
    Phase(
        "resume",
        resume_prepared,
        lambda world: Job(world).recover(),
        before={**TWO, ("step-2", LOCAL): "over"},
        after=OVER,
        links=False,
    ),
)
BY_NAME = {phase.name: phase for phase in PHASES}
