"""The checks of a disk after a cut. Mounting it makes the file system replay its journal."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fault.powercut.events import (
    BLOCK_BYTES,
    EVENT_BLOCKS,
    LOCAL,
    REMOVABLE,
    SHARED,
    Event,
    acknowledged,
    allowed,
    decode,
)
from tests.fault.sweep import checker, child
from tests.fault.sweep.checker import Violation
from tests.fault.sweep.phases import Job, State, World
from tierckpt.checkpoint.description import describe_run
from tierckpt.checkpoint.verify import verify
from tierckpt.errors import CommitAbandonedError
from tierckpt.format.layout import step_of


class LostSaveError(Violation):
    """An acknowledged save is missing."""


class JudgeWorld(World):
    @property
    def acknowledgements(self) -> Path:
        return self.root.parents[1] / "acknowledged"


@dataclass(frozen=True)
class Verdict:
    """The result of the checks; ``wrong``: the kind of violation, "" if there is none."""

    acknowledged: int
    wrong: str = ""
    text: str = ""
    is_between: bool = False
    """Stock metadata belongs to the next or previous save: cut between S7 and S8, or D6 and D7, of commit.md."""


def events_on(disk: Path) -> list[Event]:
    """Return the events recorded after the file system."""
    with disk.open("rb") as file:
        file.seek(-EVENT_BLOCKS * BLOCK_BYTES, 2)
        data = file.read()
    found = [decode(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    return [event for event in found if event is not None]


def judge(disk: Path, file_system: str, mount: Path) -> Verdict:
    """Mount ``disk`` and check it in a separate process. Consumes the disk."""
    events = events_on(disk)
    count = len(acknowledged(events))
    try:
        with mounted(disk, file_system, mount):
            ended = child.run(lambda: check_disk(JudgeWorld(mount / "world"), events), "judge")
    except subprocess.CalledProcessError as error:
        return Verdict(count, "NotMounted", f"{error}: {error.stderr}")
    wrong = "" if ended.code == 0 else ended.error or f"ended by {ended.code}"
    return Verdict(count, wrong, ended.text, bool(ended.answer))


@contextlib.contextmanager
def mounted(disk: Path, file_system: str, mount: Path) -> Iterator[None]:
    mount.mkdir(parents=True, exist_ok=True)
    # xfs mounts no two disks with the same UUID, and all disks are copies of one.
    options = "loop,nouuid" if file_system == "xfs" else "loop"
    _run("mount", "-t", file_system, "-o", options, disk, mount)
    try:
        yield
    finally:
        _run("umount", mount)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def check_disk(world: World, events: Sequence[Event]) -> bool:
    """Raise LostSaveError or Violation unless all invariants hold, before and after recovery by the next process.

    Returns whether stock metadata belonged to another save than the manifest before recovery.
    """
    permitted, required = allowed(events), acknowledged(events)
    names = {name for name, _ in permitted}
    found = checker.committed_labels(world, names)
    _compare(found, permitted, required)
    bad = _check_reading(world, found)
    checker.age_files(world)
    checker.recover(world)
    after = checker.committed_labels(world, names)
    _compare(after, permitted, required)
    if still := _check_reading(world, after):
        raise Violation(f"problems found by verify after the restart: {still}")
    pruned = {event.name for event in events if event.kind == REMOVABLE}
    for (name, tier), label in after.items():
        if tier == LOCAL and name not in pruned and after.get((name, SHARED)) != label:
            raise Violation(f"{name} is not drained after the restart: {after}")
    _check_new_saves(world, after)
    return bool(bad)


def _compare(
    found: State, permitted: Mapping[tuple[str, str], set[str | None]], required: Mapping[tuple[str, str], str]
) -> None:
    for key in {*found, *permitted}:
        now = found.get(key)
        if now not in permitted.get(key, {None}):
            kind = LostSaveError if key in required else Violation
            raise kind(f"{key} is {now!r}, allowed: {permitted.get(key)}")


def _check_reading(world: World, found: State) -> list[str]:
    """Check that ``latest``, ``list``, ``verify``, ``restore`` and stock PyTorch agree with ``found``.

    Returns the problems of stock metadata, which may belong to an interrupted save until recovery.
    """
    job = Job(world)
    for name, tier in found:
        checker.stock_label(world.place(name, tier), may_lack=False)
    checker.check_latest(job, found)
    rows = job.wait(describe_run(job.mover.selector, world.run))
    listed = {
        (row.location.name, tier) for row in rows for tier in (LOCAL, SHARED) if getattr(row, tier) == "committed"
    }
    if listed != set(found):
        raise Violation(f"listed as committed: {sorted(listed)}; committed: {sorted(found)}")
    bad = []
    for name in {name for name, _ in found}:
        checkpoint, report = job.wait(verify(job.mover.selector, world.run.child(name), read_data=True))
        stock = {entry.path for entry in checkpoint.manifest.metadata}
        if report.records or not {path for _, path in report.problems} <= stock:
            raise Violation(f"verify of {name}: {report.records} {report.problems}")
        bad += [f"{name} {tier} {path}" for tier, path in report.problems]
    return bad


def _check_new_saves(world: World, found: State) -> None:
    """Check that new saves work, over the newest step and as a new step."""
    newest = max(step_of(name) or 0 for name, _ in found)
    job = Job(world)
    for step in (newest, newest + 1):
        with contextlib.suppress(CommitAbandonedError):  # the entry of one rank of the interrupted save stays
            job.save(step, "afterwards", ranks=2)
        for tier in (LOCAL, SHARED):
            if checker.committed_label(world.place(f"step-{step}", tier), may_lack=False) != "afterwards":
                raise Violation(f"step-{step} cannot be saved after the cut")
    job.wait(job.mover.drains.idle(10.0))
