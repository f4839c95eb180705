"""Local-only checkpoints: saved between two drains, and kept on the SSD only.

The newest of a run is drained when the job ends or the node is preempted. A *superseded* one has no journal entry, and
its files stay until a save needs the room.

    K0  Older means: abandoned by a job that went back to an older step (branches.py); otherwise, a lower step.
    K1  Only two newer local commits of the same run and rank (D4), or one on shared storage, supersede a checkpoint.
    K2  Only the holder of its journal entry promotes or supersedes it, so it never changes during a drain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..disk import read_lease
from ..disk.durable import matching
from ..errors import ManifestError, TierckptError
from ..format.layout import DRAINED, Location, local_dir, step_of
from ..telemetry import logger
from . import branches, local_commit
from .branches import Branch
from .journal import LOCAL_ONLY, READY, Journal, JournalEntry
from .select import age_of

log = logger("local_only")

LOCAL_ONLY_MAX = 2
"""Never superseded; the second one in case the first is damaged."""


def supersede_older(local_root: Path, journal: Journal, newest: JournalEntry) -> list[str]:
    """Supersede local-only checkpoints older than ``newest``, which is committed here. Never fails a save."""
    superseded: list[str] = []
    try:
        entries = journal.entries()
        ages = _Ages(local_root, newest.location.parent, entries)
        superseded_entries = [one for one in entries if _is_behind(one, newest, ages)]
        replaced = [one for one in superseded_entries if one.uri == newest.uri]
        behind = sorted((one for one in superseded_entries if one.uri != newest.uri), key=ages.of, reverse=True)
        candidates = replaced + behind[LOCAL_ONLY_MAX - 1 :]
        superseded.extend(entry.uri for entry in candidates if _supersede(local_root, journal, entry))
    except (TierckptError, OSError) as error:
        log.warning("local-only checkpoints older than %s stay in the journal: %s", newest.uri, error)
    return superseded


def promote_newest(local_root: Path, journal: Journal, run: Location | None = None) -> list[JournalEntry]:
    """Schedule the newest local-only checkpoint of ``run`` (None: of every run), if shared storage has no newer."""
    promoted: list[JournalEntry] = []
    entries = journal.entries()
    for parent, kept in _by_run(one for one in entries if one.state == LOCAL_ONLY).items():
        if run is not None and parent != run:
            continue
        ages = _Ages(local_root, parent, entries)
        newest = max(map(ages.of, kept))
        sent = [ages.of(one) for one in entries if one.state == READY and one.location.parent == parent]
        if max([*sent, ages.newest_drained()]) > newest:
            continue
        for entry in (one for one in kept if ages.of(one) == newest):
            with journal.own(entry.token) as free:
                if free:
                    promoted.append(journal.write(replace(entry, state=READY)))
    return promoted


def drop_superseded(
    local_root: Path, journal: Journal, run: Location | None = None, committed: JournalEntry | None = None
) -> None:
    """Supersede local-only checkpoints older than the newest on shared storage.

    ``committed``: a save known to be on shared storage without a trace on this SSD.
    """
    all_entries = journal.entries()
    for parent, entries in _by_run(one for one in all_entries if one.state == LOCAL_ONLY).items():
        if run is not None and parent != run:
            continue
        ages = _Ages(local_root, parent, [*all_entries, *([committed] if committed is not None else [])])
        drained = max([ages.newest_drained(), *([ages.of(committed)] if committed is not None else [])])
        for entry in entries:
            if ages.of(entry) < drained:
                _supersede(local_root, journal, entry)


def _supersede(local_root: Path, journal: Journal, entry: JournalEntry) -> bool:
    directory = local_dir(local_root, entry.location)
    with journal.own(entry.token) as free:
        current = journal.read(entry.token)
        if not free or current is None or current.state != LOCAL_ONLY:
            return False
        local = local_commit.read_local_manifest(directory)
        if local is not None and entry.token in {local.attempt, *local.tokens}:
            local_commit.mark_superseded(directory, local.attempt)
        else:
            with read_lease.removing(local_root, directory) as unread:
                if not unread:
                    return False
                local_commit.remove_unfinished(directory, entry.token)
        journal.remove(entry.token)
        return True


def _is_behind(one: JournalEntry, newest: JournalEntry, ages: _Ages) -> bool:
    is_ours = one.state == LOCAL_ONLY and one.rank == newest.rank and one.token != newest.token
    return is_ours and one.location.parent == newest.location.parent and ages.of(one) <= ages.of(newest)


def _by_run(entries: Iterable[JournalEntry]) -> dict[Location, list[JournalEntry]]:
    runs: dict[Location, list[JournalEntry]] = {}
    for entry in entries:
        runs.setdefault(entry.location.parent, []).append(entry)
    return runs


class _Ages:
    """The order of the checkpoints of one run (K0): larger is newer."""

    def __init__(self, local_root: Path, run: Location, entries: Iterable[JournalEntry]) -> None:
        self._directory = local_dir(local_root, run)
        known = [(_branch(one), step_of(one.location.name)) for one in entries if one.location.parent == run]
        noted = branches.read_local(self._directory)
        self._branch = branches.current_branch([*known, *([(noted, None)] if noted is not None else [])])

    def of(self, entry: JournalEntry) -> tuple[bool, bool, int]:
        return self._age(entry.location.name, _branch(entry))

    def newest_drained(self) -> tuple[bool, bool, int]:
        names = [step.name for step in matching(self._directory, "*") if (step / DRAINED).exists()]
        return max((self._age(name, self._branch_at(name)) for name in names), default=(False, *age_of("")))

    def _branch_at(self, name: str) -> Branch:
        try:
            return branches.branch_of(local_commit.read_local_manifest(self._directory / name), name)
        except ManifestError:
            return Branch(name)

    def _age(self, name: str, branch: Branch) -> tuple[bool, bool, int]:
        return (self._branch is None or self._branch.holds(branch, step_of(name)), *age_of(name))


def _branch(entry: JournalEntry) -> Branch:
    return branches.parse(entry.branch) or Branch(entry.token)
