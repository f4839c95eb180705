"""What must hold on a disk after a cut. The disk is mounted here, so that the file system replays its journal."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fault.powercut.events import BLOCK_BYTES, LOCAL, MARKS, MAY_GO, SHARED, Event, acknowledged, allowed, decode
from tests.fault.sweep import checker, child
from tests.fault.sweep.checker import Violation
from tests.fault.sweep.phases import Job, World
from tierckpt.checkpoint.description import describe_run
from tierckpt.checkpoint.verify import verify
from tierckpt.errors import CommitAbandonedError
from tierckpt.format.layout import step_of
from tierckpt.restore.restore import restore

State = dict[tuple[str, str], str]


class Lost(Violation):
    """Something was acknowledged and is not there."""


class JudgeWorld(World):
    @property
    def acknowledgements(self) -> Path:
        return self.root.parents[1] / "acknowledged"


@dataclass(frozen=True)
class Verdict:
    """What was found: ``wrong`` is empty when all is well."""

    acknowledged: int
    wrong: str = ""
    text: str = ""
    is_between: bool = False
    """Stock metadata was of the next save already, or still: between S7 and S8, or D6 and D7, of commit.md."""


def events_on(disk: Path) -> list[Event]:
    """What the guest has said behind the file system."""
    with disk.open("rb") as file:
        file.seek(-MARKS * BLOCK_BYTES, 2)
        data = file.read()
    found = [decode(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    return [event for event in found if event is not None]


def judge(disk: Path, file_system: str, mount: Path) -> Verdict:
    """Mount ``disk``, which is used up by it, and look, in a process of its own."""
    events = events_on(disk)
    count = len(acknowledged(events))
    try:
        with mounted(disk, file_system, mount):
            ended = child.run(lambda: look(JudgeWorld(mount / "world"), events), "judge")
    except subprocess.CalledProcessError as error:
        return Verdict(count, "NotMounted", f"{error}: {error.stderr}")
    wrong = "" if ended.code == 0 else ended.error or f"ended by {ended.code}"
    return Verdict(count, wrong, ended.text, bool(ended.answer))


@contextlib.contextmanager
def mounted(disk: Path, file_system: str, mount: Path) -> Iterator[None]:
    mount.mkdir(parents=True, exist_ok=True)
    # All disks are copies of one: xfs mounts no two with the same UUID, which several jobs would do.
    options = "loop,nouuid" if file_system == "xfs" else "loop"
    _run("mount", "-t", file_system, "-o", options, disk, mount)
    try:
        yield
    finally:
        _run("umount", mount)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def look(world: World, events: Sequence[Event]) -> bool:
    """Raise Lost or Violation unless all that must hold does: before, and after, the next process has taken it up.

    Returns whether stock metadata was another save's than the commit beside it, until then.
    """
    may, must = allowed(events), acknowledged(events)
    found = state_of(world, may)
    _compare(found, may, must)
    bad = _check_reading(world, found)
    checker.an_hour_passes(world)
    checker.recover(world)
    after = state_of(world, may)
    _compare(after, may, must)
    if still := _check_reading(world, after):
        raise Violation(f"after the restart verify says {still}")
    pruned = {event.name for event in events if event.kind == MAY_GO}
    for (name, tier), label in after.items():
        if tier == LOCAL and name not in pruned and after.get((name, SHARED)) != label:
            raise Violation(f"{name} is not drained after the restart: {after}")
    _save_on(world, after)
    return bool(bad)


def state_of(world: World, names: Mapping[tuple[str, str], Any]) -> State:
    """What is committed where, every byte of it compared. Raises Violation when anything is torn."""
    found: State = {}
    for name in {name for name, _ in names}:
        for tier in (LOCAL, SHARED):
            label = checker.committed_in(world.place(name, tier), may_lack=False)
            if label is not None:
                found[name, tier] = label
    return found


def _compare(found: State, may: Mapping[tuple[str, str], set[str | None]], must: Mapping[tuple[str, str], str]) -> None:
    for key in {*found, *may}:
        now = found.get(key)
        if now not in may.get(key, {None}):
            kind = Lost if key in must else Violation
            raise kind(f"{key} is {now!r} and may be {may.get(key)}")


def _check_reading(world: World, found: State) -> list[str]:
    """``latest``, ``list``, ``verify`` and ``restore`` say what stands there; stock PyTorch sees whole checkpoints.

    Returns what ``verify`` has against stock metadata: it may belong to a save that was cut, until that is put right.
    """
    job = Job(world)
    for name, tier in found:
        checker.stock_view(world.place(name, tier), may_lack=False)
    newest = max({name for name, _ in found}, key=lambda name: step_of(name) or 0)
    latest = job.wait(job.mover.selector.newest(world.run)).checkpoint
    if latest is None or latest.location.name != newest:
        raise Violation(f"latest is {latest and latest.location.name}, {newest} is committed")
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
    _check_restore(job, world, newest, found)
    return bad


def _check_restore(job: Job, world: World, newest: str, found: State) -> None:
    scratch = world.root.parent / "scratch"
    job.wait(restore(job.mover, world.run.child(newest), scratch))
    if checker.stock_view(scratch, may_lack=False) not in {found.get((newest, LOCAL)), found.get((newest, SHARED))}:
        raise Violation(f"{newest} restores to another save than stands there")
    shutil.rmtree(scratch)


def _save_on(world: World, found: State) -> None:
    """The next save works, over the newest and under a new name."""
    newest = max(step_of(name) or 0 for name, _ in found)
    job = Job(world)
    for step in (newest, newest + 1):
        with contextlib.suppress(CommitAbandonedError):  # one rank of the save that was cut: its entry stays
            job.save(step, "afterwards", ranks=2)
        for tier in (LOCAL, SHARED):
            if checker.committed_in(world.place(f"step-{step}", tier), may_lack=False) != "afterwards":
                raise Violation(f"step-{step} cannot be saved after the cut")
    job.wait(job.mover.drains.idle(10.0))
