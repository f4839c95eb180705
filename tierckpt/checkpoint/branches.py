"""Branches of a run: a job that goes back to an older step and trains on begins a new branch.

B1  A branch is recorded when its first checkpoint commits. A job killed before resumes as if it had not gone back.
B2  A commit writes its note to ``layout.BRANCHES_DIR``, after the manifest; a crash in between can lose the note. Then
    the branch counts as not begun, for a restore and a removal alike, until the drain notes it on the shared tier.
B3  The last start decides. ``Branch.order`` exceeds every order that the process has seen, and is at least its
    clock in milliseconds.
B4  Only going back abandons steps: those after ``ends``. ``restore()`` without a step continues the branch.
B5  A step that is saved again replaces the abandoned checkpoint, in either order of their commits.
B6  A checkpoint without a note (``dcp.save``, ``adopt``) is a branch of its own, compared by step, unless it was
    present, and newer, when a job went back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..disk.durable import durable_write, make_dirs, matching, read_whole
from ..errors import ManifestError, ObjectNotFoundError, PreconditionFailedError, StoreError
from ..format import manifest as manifests
from ..format.layout import BRANCHES_DIR, WINDOWS_DIR, Location, step_of
from ..format.manifest import Manifest
from ..stores.base import Store
from ..stores.verified_read import if_present
from ..telemetry import logger
from ..types import Buffer

log = logger("branches")

Place = TypeVar("Place", Location, Path)

NOTE = "branch"
_FIELDS = frozenset({NOTE})
_END = r"[A-Za-z0-9_.-]{1,80}=\d{1,18}"
_ENCODED = re.compile(
    rf"(\d{{1,16}}) ([A-Za-z0-9_.-]{{1,80}})(?: went back to (\d{{1,18}}))?(?: ends ({_END}(?: {_END})*))?"
)


@dataclass(frozen=True, slots=True)
class Branch:
    id: str
    order: int = 0
    base: int | None = None
    ends: Mapping[str, int] = field(default_factory=dict)
    """The last step of each continued branch, by ``id``."""

    def holds(self, other: Branch, step: int | None) -> bool:
        if other.id == self.id:
            return True
        if other.id in self.ends:
            return step is None or step <= self.ends[other.id]
        return other.base is None  # B6

    def encode(self) -> str:
        base = f" went back to {self.base}" if self.base is not None else ""
        ends = " ".join(f"{name}={step}" for name, step in sorted(self.ends.items()))
        return f"{self.order} {self.id}{base}{f' ends {ends}' if ends else ''}"


def parse(note: object) -> Branch | None:
    match = _ENCODED.fullmatch(note) if isinstance(note, str) else None
    if match is None:
        return None
    order, name, base, ends = match.groups()
    pairs = (pair.rpartition("=") for pair in (ends or "").split())
    return Branch(name, int(order), None if base is None else int(base), {one: int(step) for one, _, step in pairs})


def branch_of(manifest: Manifest | None, name: str) -> Branch:
    if manifest is None:
        return Branch(f"stock-{manifests.digest_of(name.encode())[:16]}")
    return parse(manifest.notes.get(NOTE)) or Branch(manifest.attempt)


def order_of(manifest: Manifest) -> int:
    return branch_of(manifest, "").order


def current_branch(seen: Iterable[tuple[Branch, int | None]], *notes: Branch | None) -> Branch | None:
    """Return the branch that a job of this run continues, None if no checkpoint is abandoned.

    ``seen``: the branch and step of checkpoints. Only a note elects a branch that went back (B2).
    """
    known = list(seen)
    current = max((one for one in notes if one is not None and one.base is not None), key=_order, default=None)
    while current is not None:
        # Saved by processes that started later without having seen it.
        newest = max((step for one, step in known if step is not None and current.holds(one, step)), default=-1)
        behind = [(one, step) for one, step in known if step is not None and step > newest]
        later = [one for one, step in behind if one.order > current.order and not current.holds(one, step)]
        if not later:
            break
        current = max(later, key=_order)
    return current


def abandoned_here(checkpoints: Iterable[tuple[Path, Manifest]]) -> set[Path]:
    runs: dict[Path, list[tuple[Path, Branch, int | None]]] = {}
    for directory, manifest in checkpoints:
        one = directory, branch_of(manifest, directory.name), step_of(directory.name)
        runs.setdefault(run_of(directory), []).append(one)
    found = set[Path]()
    for run, known in runs.items():
        branch = current_branch(((one, step) for _, one, step in known), read_local(run))
        found |= {directory for directory, one, step in known if branch is not None and not branch.holds(one, step)}
    return found


def replaces_abandoned(manifest: Manifest, branch: Branch | None, name: str) -> bool:
    """Apply rule B5."""
    own_branch = parse(manifest.notes.get(NOTE))
    if own_branch is None or branch is None or own_branch.order <= branch.order:
        return False
    return not own_branch.holds(branch, step_of(name))


def may_replace(manifest: Manifest, committed: Manifest, name: str) -> bool:
    """Return whether ``manifest`` may take the place of the checkpoint ``committed`` under ``name``."""
    is_named = committed.attempt in {manifest.attempt, *manifest.replaces}
    return is_named or replaces_abandoned(manifest, branch_of(committed, name), name)


def next_order(*known: Branch | None) -> int:
    return max([time.time_ns() // 1_000_000, *(one.order + 1 for one in known if one is not None)])


def branch_going_back(name: str, base: Branch, step: int, current: Branch | None, newer: Iterable[Branch]) -> Branch:
    """``newer``: branches of all later steps."""
    newer = list(newer)
    before = current if current is not None and current.holds(base, step) else base
    ends = {**before.ends, before.id: step, base.id: step}
    ends |= {one.id: step for one in newer if one.base is None and one.id not in ends}
    kept = {one: min(end, step) for one, end in ends.items()}
    return Branch(name, next_order(current, base, *newer), step, kept)


def _order(branch: Branch) -> tuple[int, str]:
    return branch.order, branch.id


def run_of(checkpoint: Place) -> Place:
    return checkpoint.parent.parent if checkpoint.parent.name == WINDOWS_DIR else checkpoint.parent


def note_local(directory: Path, manifest: Manifest) -> None:
    """Write the note of a branch that went back (B2)."""
    branch = parse(manifest.notes.get(NOTE))
    if branch is None or branch.base is None:
        return
    path = run_of(directory) / BRANCHES_DIR / _name(branch)
    if not path.exists():
        make_dirs(path.parent)
        durable_write(path, manifests.seal({NOTE: branch.encode()}))
    for other in matching(path.parent, f"*-{branch.id}.json"):
        if other.name < path.name:
            other.unlink(missing_ok=True)


def read_local(run: Path) -> Branch | None:
    for path in matching(run / BRANCHES_DIR, "*.json")[::-1]:
        with suppress(ObjectNotFoundError):
            if (branch := _decoded(read_whole(path, manifests.RECORD_BYTES_MAX), str(path))) is not None:
                return branch
    return None


async def note_shared(store: Store, manifest: Manifest) -> None:
    """Write the note of the branch (B2). Idempotent."""
    branch = parse(manifest.notes.get(NOTE))
    if branch is None or branch.base is None:
        return
    key, names = f"{BRANCHES_DIR}/{_name(branch)}", [info.key async for info in store.list(BRANCHES_DIR)]
    if key not in names:
        with suppress(PreconditionFailedError):
            await store.put(key, manifests.seal({NOTE: branch.encode()}), if_absent=True)
    for other in names:
        if other.endswith(f"-{branch.id}.json") and other < key:
            await store.delete(other)


async def read_shared(store: Store) -> Branch | None:
    """Cost: one LIST, and a GET if there is a note."""
    for key in sorted([info.key async for info in store.list(BRANCHES_DIR)], reverse=True):
        data = await if_present(store.get(key))
        if data is not None and (branch := _decoded(data, f"{store.uri}/{key}")) is not None:
            return branch
    return None


def _name(branch: Branch) -> str:
    return f"{branch.order:016d}-{branch.id}.json"


def _decoded(data: Buffer, where: str) -> Branch | None:
    try:
        return parse(manifests.unseal(data, _FIELDS, where=where)[NOTE])
    except (ManifestError, StoreError) as error:
        log.warning("%s", error)
        return None
