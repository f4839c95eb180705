"""Invariants that hold after any fault, and after the next process recovered.

Right after the fault: every visible checkpoint is whole, byte for byte; everything acknowledged is present; checkpoints
that were not being replaced or removed are unchanged; ``latest`` finds the newest, and it restores.
After a restart: the interrupted phase can be repeated, and the result equals a run without a fault, down to the list of
files; no shard on the shared tier was sent again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Set
from pathlib import Path

from tests.fault.sweep.phases import LOCAL, PATIENT_WAIT_SECONDS, SHARED, TARGET, WAIT_SECONDS, Job, Phase, State, World
from tests.fault.sweep.saver import content
from tierckpt.checkpoint import journal, local_commit
from tierckpt.disk.local_root import LEFTOVER_SECONDS
from tierckpt.errors import CommitAbandonedError
from tierckpt.format.layout import METADATA, SHARD_SUFFIX, step_of
from tierckpt.restore.restore import restore

_SHARD = re.compile(rf"^__(\d+)_(\d+)-.*\{SHARD_SUFFIX}$")
_TOKEN = re.compile(r"[0-9a-f]{16}")


PERMITTED_LEFTOVERS = {
    re.compile(r"^shared/.*/\..+\.tmp$"): "other nodes write to the mount too: the owner is unknown",
    re.compile(r"^local/flush\.mark$"): "a lock file stays; a save that an error diverted creates it",
}
"""Files that a kill may leave for good, and why."""


class Violation(Exception):
    """An invariant does not hold."""


def acknowledged(world: World) -> list[tuple[str, str]]:
    lines = world.acknowledgements.read_text().splitlines() if world.acknowledgements.exists() else []
    return [(name, tier) for name, _, tier in (line.partition(" ") for line in lines)]


# --- the current state --------------------------------------------------------------------------------------------


def state_of(world: World, phase: Phase) -> State:
    """Return the label of each place, the target of a restore included. Raises Violation if one is torn."""
    found = committed_labels(world, {"step-1", "step-2", "step-3"}, phase.damaged)
    target = world.place("", TARGET)
    if target.exists():
        found["step-2", TARGET] = stock_label(target, may_lack=False) or "nothing"
    return found


def committed_labels(world: World, names: Set[str], damaged: Set[tuple[str, str]] = frozenset()) -> State:
    """Return the label committed at each place, after a comparison of every byte. Raises Violation if one is torn."""
    labels = {
        (name, tier): committed_label(world.place(name, tier), may_lack=(name, tier) in damaged)
        for name in names
        for tier in (LOCAL, SHARED)
    }
    return {place: label for place, label in labels.items() if label is not None}


def committed_label(directory: Path, *, may_lack: bool) -> str | None:
    manifest = local_commit.read_local_manifest(directory)
    if manifest is None:
        return None
    labels = {json.loads(_read(directory / entry.key))["label"] for entry in manifest.metadata}
    if len(labels) != 1:
        raise Violation(f"{directory}: one commit names saves {sorted(labels)}")
    label = str(labels.pop())
    for entry in manifest.files:
        if not (may_lack and not (directory / entry.key).exists()):
            check_shard(directory / entry.key, label)
    return label


def stock_label(directory: Path, *, may_lack: bool) -> str | None:
    """Return the label that plain PyTorch loads from ``directory``: checks ``.metadata`` and every shard it names."""
    found = [directory / METADATA, *sorted(directory.glob(f"__*_{METADATA}")), *sorted(directory.glob("__*.metadata"))]
    metadata = [json.loads(path.read_bytes()) for path in dict.fromkeys(found) if path.exists()]
    for one in metadata:
        for name in one["files"]:
            if not (may_lack and not (directory / name).exists()):
                check_shard(directory / name, one["label"])
    return str(metadata[0]["label"]) if metadata else None


def check_shard(path: Path, label: str) -> None:
    match = _SHARD.match(path.name)
    if match is None or _read(path) != content(label, int(match[1]), int(match[2])):
        raise Violation(f"{path} does not hold the bytes of save {label!r}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise Violation(f"a commit names {path}, which is missing") from None


# --- right after the fault ----------------------------------------------------------------------------------------


def check_after(world: World, phase: Phase) -> State:
    found = state_of(world, phase)
    done = set(acknowledged(world))
    for key in {*phase.before, *phase.after, *found}:
        before, after, end, now = (state.get(key) for state in (phase.before, phase.after, phase.end, found))
        if key in done and now not in (after, end):
            raise Violation(f"{key} was acknowledged as {after!r} but is {now!r}")
        if now not in (before, after, end):
            raise Violation(f"{key} is {now!r}: it was {before!r} and was to become {after!r}")
    _check_stock(world, phase, found)
    check_latest(Job(world), found)
    return found


def _check_stock(world: World, phase: Phase, found: State) -> None:
    """Check that plain PyTorch, too, sees one whole save in each directory: this one or the next."""
    for name, tier in found:
        if tier != TARGET:
            stock_label(world.place(name, tier), may_lack=(name, tier) in phase.damaged)


def check_latest(job: Job, found: State) -> None:
    """Check that ``latest`` is the newest commit of any tier and restores a committed save."""
    newest = max((name for name, tier in found if tier != TARGET), key=lambda name: step_of(name) or 0)
    checkpoint = job.wait(job.mover.selector.newest(job.world.run))
    if checkpoint is None or checkpoint.location.name != newest:
        raise Violation(f"latest is {checkpoint and checkpoint.location.name}, but {newest} is committed")
    scratch = job.world.root.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    job.wait(restore(job.mover, checkpoint.location, scratch))
    if stock_label(scratch, may_lack=False) not in {found.get((newest, LOCAL)), found.get((newest, SHARED))}:
        raise Violation(f"{newest} restores a save that is committed on no tier")
    shutil.rmtree(scratch)


# --- after a restart ----------------------------------------------------------------------------------------------


def check_restart(world: World, phase: Phase, golden: Iterable[str] | None) -> list[str]:
    """Recover, drain and repeat the phase. Returns the names of all files, which must equal ``golden`` if given."""
    shards = shard_stamps(world)
    age_files(world)
    abandoned = recover(world)
    again = {path: stamp for path, stamp in shard_stamps(world).items() if path in shards and stamp != shards[path]}
    if again:
        raise Violation(f"sent again after the restart: {sorted(again)}")
    found = check_after(world, phase)
    for name, tier in found:
        if tier == LOCAL and (name, SHARED) in phase.end and found.get((name, SHARED)) != found[name, LOCAL]:
            raise Violation(f"{name} is not drained after the restart: {found}")
    Job.wait_seconds = PATIENT_WAIT_SECONDS
    phase.act(world)
    Job.wait_seconds = WAIT_SECONDS
    abandoned |= recover(world)
    found = state_of(world, phase)
    if found != phase.end:
        raise Violation(f"the repeated phase ends with {found}, not {phase.end}")
    names = file_names(world)
    if golden is not None and not abandoned:
        more, fewer = Counter(names) - Counter(golden), Counter(golden) - Counter(names)
        if more or fewer:
            raise Violation(f"leaked: {sorted(more.elements())}; missing: {sorted(fewer.elements())}")
    return names


def recover(world: World) -> bool:
    """Recover as the next process. True: an entry without a commit of its coordinator stays."""
    job = Job(world)
    try:
        job.recover()
    except CommitAbandonedError:
        return True
    return any(entry.state in journal.SET_ASIDE_STATES for entry in job.mover.journal.entries())


def age_files(world: World) -> None:
    """Make all files old: leftovers are recognised by their age."""
    past = time.time() - LEFTOVER_SECONDS - 60
    for path in world.root.rglob("*"):
        if path.suffix != SHARD_SUFFIX:
            os.utime(path, (past, past), follow_symlinks=False)


def shard_stamps(world: World) -> dict[str, tuple[int, int]]:
    """Return the shards on the shared tier with inode and mtime, which identify one upload."""
    paths = Path(world.run.path).rglob(f"*{SHARD_SUFFIX}")
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths if path.name[0] != "."}


def file_names(world: World) -> list[str]:
    """Return the names of all files, with random parts replaced."""
    paths = (str(path.relative_to(world.root)) for path in world.root.rglob("*") if path.is_file())
    return sorted(
        _TOKEN.sub("TOKEN", path) for path in paths if not any(known.match(path) for known in PERMITTED_LEFTOVERS)
    )
