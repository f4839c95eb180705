"""The phases: preparation, the act that a fault interrupts, and the states before and after.

A state maps ``(place, tier)`` to the label of the save committed there; a missing key is an empty place.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fault.sweep.saver import CHUNK_BYTES, Saver, link_fails
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
"""Commit timeout if ranks may be dead."""
PATIENT_WAIT_SECONDS = 30.0
"""Commit timeout if all ranks live, on a loaded machine."""
drainer.SHARED = Pauses(0.1, 2.0)
"""Longer than other ranks take: the number of polls must not depend on the speed of the machine."""

LOCAL, SHARED, TARGET = "local", "shared", "target"
State = dict[tuple[str, str], str]


@dataclass(frozen=True)
class World:
    """One directory with all files of a phase. The file of acknowledgements is outside."""

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
    """The parts of a child: saver, mover, event loop and the file of acknowledgements."""

    wait_seconds = WAIT_SECONDS

    def __init__(self, world: World, *, drain: bool = True, **overrides: Any) -> None:
        self.world = world
        retry.PAUSE_SECONDS_MAX = 0.01  # only in this child
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
        """Record outside of the world that ``place`` is committed on ``tier``: no fault may revert it."""
        os.write(self._file, f"{place} {tier}\n".encode())

    def save(self, step: int, label: str, **options: Any) -> None:
        name = f"step-{step}"
        location = self.world.step(step)
        self.saver.save(location, label, committed=lambda: self.acknowledge(name, LOCAL), **options)
        if self.saver.settings.drain and options.get("send", True):
            self.drain()

    def drain(self) -> None:
        """Drain the journal once: acknowledge committed checkpoints, raise the first error."""
        results, errors = self.wait(self.mover.drains.drain_all(patient=True))
        for result in results:
            if result.outcome == "committed":
                self.acknowledge(result.uri.rpartition("/")[2], SHARED)
        if errors:
            raise errors[0]

    def recover(self) -> None:
        """Recover as the next process."""
        check_local_root(self.saver.settings)
        self.saver.recover()
        self.wait(self.mover.drains.idle(10.0))
        self.drain()


@dataclass(frozen=True)
class Phase:
    """Preparation, the act that a fault interrupts, and the states before it, after it and after a restart."""

    name: str
    prepare: Callable[[World], None]
    act: Callable[[World], None]
    before: State
    after: State
    after_restart: State = field(default_factory=dict)
    """The state after another process drained the rest; empty: equal to ``after``."""
    links: bool = True
    """The shared tier is on the same file system; False: links fail, files are copied."""
    damaged: frozenset[tuple[str, str]] = frozenset()
    """Places that may lack files: prepared so, or their files are only on the shared tier."""
    again: Callable[[World], None] = lambda world: Job(world).recover()
    """The recovery by the next process, which may be killed too."""

    @property
    def end(self) -> State:
        return self.after_restart or self.after


def disable_links() -> None:
    LocalStore.link = link_fails  # type: ignore[method-assign]


# --- the phases ---------------------------------------------------------------------------------------------------

STEP_1: State = {("step-1", LOCAL): "1", ("step-1", SHARED): "1"}
STEPS_1_2: State = {**STEP_1, ("step-2", LOCAL): "2", ("step-2", SHARED): "2"}
OVERWRITTEN: State = {**STEP_1, ("step-2", LOCAL): "over", ("step-2", SHARED): "over"}


def save_step_1(world: World) -> None:
    Job(world).save(1, "1")


def save_steps_1_2(world: World) -> None:
    job = Job(world)
    job.save(1, "1")
    job.save(2, "2", ranks=2)


def save_steps_1_to_3(world: World) -> None:
    job = Job(world)
    for step in (1, 2, 3):
        job.save(step, str(step))


def prepare_restore(world: World) -> None:
    """A node that lost a shard."""
    save_steps_1_2(world)
    next(world.place("step-2", LOCAL).glob("__1_0*.distcp")).unlink()


def restore(world: World) -> None:
    """Restore this step: a restore of the run may rightly fall back to an older step (test_set_cover.py)."""
    job = Job(world)
    job.wait(restore_directory(job.mover, world.step(2), world.place("", TARGET)))
    job.acknowledge("step-2", TARGET)


def prepare_fetch(world: World) -> None:
    """A node without any files."""
    save_steps_1_2(world)
    shutil.rmtree(world.local_root)


def fetch(world: World) -> None:
    """Fetch as a node does before a job starts."""
    job = Job(world)
    job.wait(prefetch.fetch(job.mover, prefetch.PrefetchRequest(world.step(2))))


def prepare_drain(world: World) -> None:
    """A save of two ranks with a local commit, not drained yet."""
    save_steps_1_2(world)
    Job(world).save(2, "over", ranks=2, send=False)


def prepare_resume(world: World) -> None:
    """One partly drained save, and one that was killed while it wrote shards."""
    save_steps_1_2(world)
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
        save_step_1,
        lambda world: Job(world).save(2, "2", send=False),
        before=STEP_1,
        after={**STEP_1, ("step-2", LOCAL): "2"},
        after_restart=STEPS_1_2,
    ),
    Phase(
        "overwrite",
        save_steps_1_2,
        lambda world: Job(world).save(2, "over", send=False),
        before=STEPS_1_2,
        after={**STEPS_1_2, ("step-2", LOCAL): "over"},
        after_restart=OVERWRITTEN,
    ),
    Phase(
        "save straight",
        save_step_1,
        lambda world: Job(world).save(2, "2", is_direct_put=True),
        before=STEP_1,
        after={**STEP_1, ("step-2", LOCAL): "2", ("step-2", SHARED): "2"},
        after_restart={**STEP_1, ("step-2", SHARED): "2"},
        damaged=frozenset({("step-2", LOCAL)}),
    ),
    Phase(
        "save and drain by links",
        save_steps_1_2,
        lambda world: Job(world).save(2, "over"),
        before=STEPS_1_2,
        after=OVERWRITTEN,
    ),
    Phase(
        "save without collectives",
        save_steps_1_2,
        lambda world: Job(world).save(2, "over", ranks=2, alone=True),
        before=STEPS_1_2,
        after=OVERWRITTEN,
    ),
    Phase(
        "drain by copies",
        prepare_drain,
        lambda world: Job(world).drain(),
        before={**STEPS_1_2, ("step-2", LOCAL): "over"},
        after=OVERWRITTEN,
        links=False,
    ),
    Phase(
        "restore",
        prepare_restore,
        restore,
        before=STEPS_1_2,
        after={**STEPS_1_2, ("step-2", TARGET): "2"},
        damaged=frozenset({("step-2", LOCAL)}),
        again=restore,
    ),
    Phase(
        "fetch",
        prepare_fetch,
        fetch,
        before={key: label for key, label in STEPS_1_2.items() if key[1] == SHARED},
        after={key: label for key, label in STEPS_1_2.items() if key != ("step-1", LOCAL)},
        again=fetch,
    ),
    Phase(
        "retention",
        save_steps_1_to_3,
        retain,
        before={(f"step-{step}", tier): str(step) for step in (1, 2, 3) for tier in (LOCAL, SHARED)},
        after={("step-3", LOCAL): "3", ("step-3", SHARED): "3", ("step-2", SHARED): "2"},
        again=retain,
    ),
    Phase(
        "resume",
        prepare_resume,
        lambda world: Job(world).recover(),
        before={**STEPS_1_2, ("step-2", LOCAL): "over"},
        after=OVERWRITTEN,
        links=False,
    ),
)
BY_NAME = {phase.name: phase for phase in PHASES}
