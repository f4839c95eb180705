"""Retention: which copies of a run's checkpoints may go (``Policy.judge``, pure), and removing one.

N1  The newest copy of a tier stays; if it is damaged, so do the newest sound copy and the newest complete one. The
    newest checkpoint that peers hold completely also stays until the shared tier has it.
N2  A local copy is removed only if it was drained and the shared tier holds that step, or a newer one, completely.
    Without drains (``drain=False``), N1 protects the newest copy.
N3  A checkpoint that a live process of this node reads, saves or drains is not removed.
N4  The manifest goes first, and a note lists the remaining files: after a crash, the checkpoint is whole, or
    invisible with a note that the next prune works off.
N5  Only files that a manifest of ours names are deleted. A directory without a mark of ours stays.
N6  Only the judged attempt is removed. A save that takes over its id meanwhile commits whole or fails.
N7  Abandoned steps count for no rule. Only a request removes them, or a new save of the step. A process judges by
    its own branch.
N8  The rule keeps as many of a process's own saves as of all saves.
N9  Each manifest of a Checkpointer carries the rule of its job (``NOTE``): a later mover prunes by the newest one.
    A job that shares its run saves without a rule.

Local-only checkpoints are saved between two drains, and kept on the SSD only. The newest of a run is drained when the
job ends or the node is preempted. A *superseded* one has no journal entry, and its files stay until a save needs the
room:

K0  Older means: abandoned by a job that went back to an older step (branches.py); otherwise, a lower step.
K1  Only two newer local commits of the same run and rank (D4), or one on shared storage, supersede a checkpoint.
K2  Only the holder of its journal entry promotes or supersedes it, so it never changes during a drain.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..disk import read_lease
from ..disk.durable import matching
from ..disk.processes import set_aside_name
from ..errors import ConfigError, ManifestError, TierckptError
from ..format import layout
from ..format.layout import CLAIM, DRAINED, MANIFEST, PARTS_DIR, PRIVATE_DIR, Location, local_dir, pending, step_of
from ..format.manifest import Manifest, decode, stale_files
from ..stores.base import Store
from ..stores.verified_read import if_present
from ..telemetry import logger
from ..types import Tier
from . import branches, local_commit, shared_commit
from .branches import Branch
from .catalog import file_size
from .journal import LOCAL_ONLY, READY, Journal, JournalEntry
from .select import age_of, newest_of

log = logger("retention")


LOCAL_ONLY_MAX = 2
"""Never superseded; the second one in case the first is damaged."""


def supersede_older(local_root: Path, journal: Journal, newest: JournalEntry) -> None:
    """Supersede local-only checkpoints older than ``newest``, which is committed here. Never fails a save."""
    try:
        entries = journal.entries()
        ages = _Ages(local_root, newest.location.parent, entries)
        older = [one for one in entries if _is_behind(one, newest, ages)]
        replaced = [one for one in older if one.uri == newest.uri]
        behind = sorted((one for one in older if one.uri != newest.uri), key=ages.of, reverse=True)
        for entry in replaced + behind[LOCAL_ONLY_MAX - 1 :]:
            _supersede(local_root, journal, entry)
    except (TierckptError, OSError) as error:
        log.warning("local-only checkpoints older than %s stay in the journal: %s", newest.uri, error)


def promote_newest(local_root: Path, journal: Journal, run: Location | None = None) -> list[JournalEntry]:
    """Schedule the newest local-only checkpoint of ``run`` (None: of every run), if shared storage has no newer."""
    promoted: list[JournalEntry] = []
    entries = journal.entries()
    for kept, ages in _local_only(local_root, entries, run):
        newest = max(map(ages.of, kept))
        sent = [ages.of(one) for one in entries if one.state == READY and one.location.parent == ages.run]
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
    drained_entries = [committed] if committed is not None else []
    for kept, ages in _local_only(local_root, [*journal.entries(), *drained_entries], run):
        drained = max([ages.newest_drained(), *map(ages.of, drained_entries)])
        for entry in kept:
            if ages.of(entry) < drained:
                _supersede(local_root, journal, entry)


def _supersede(local_root: Path, journal: Journal, entry: JournalEntry) -> None:
    directory = local_dir(local_root, entry.location)
    with journal.own(entry.token) as free:
        current = journal.read(entry.token)
        if not free or current is None or current.state != LOCAL_ONLY:
            return
        local = local_commit.read_local_manifest(directory)
        if local is not None and entry.token in {local.attempt, *local.tokens}:
            local_commit.mark_superseded(directory, local.attempt)
        else:
            with read_lease.removing(local_root, directory) as unread:
                if not unread:
                    return
                local_commit.remove_unfinished(directory, entry.token)
        journal.remove(entry.token)


def _is_behind(one: JournalEntry, newest: JournalEntry, ages: _Ages) -> bool:
    is_ours = one.state == LOCAL_ONLY and one.rank == newest.rank and one.token != newest.token
    return is_ours and one.location.parent == newest.location.parent and ages.of(one) <= ages.of(newest)


def _local_only(
    local_root: Path, entries: Sequence[JournalEntry], run: Location | None
) -> Iterator[tuple[list[JournalEntry], _Ages]]:
    """Yield the local-only entries of ``run`` (None: of every run), and the ages of all its checkpoints."""
    runs: dict[Location, list[JournalEntry]] = {}
    for entry in entries:
        if entry.state == LOCAL_ONLY and run in (None, entry.location.parent):
            runs.setdefault(entry.location.parent, []).append(entry)
    for parent, kept in runs.items():
        yield kept, _Ages(local_root, parent, entries)


class _Ages:
    """The order of the checkpoints of one run (K0): larger is newer."""

    def __init__(self, local_root: Path, run: Location, entries: Iterable[JournalEntry]) -> None:
        self.run, self._directory = run, local_dir(local_root, run)
        known = [(_branch(one), step_of(one.location.name)) for one in entries if one.location.parent == run]
        self._branch = branches.current_branch(known, branches.read_local(self._directory))

    def of(self, entry: JournalEntry) -> tuple[bool, bool, int]:
        return self._age(entry.location.name, _branch(entry))

    def newest_drained(self) -> tuple[bool, bool, int]:
        names = [step.name for step in matching(self._directory, "*") if (step / DRAINED).exists()]
        manifests = {name: local_commit.read_sound_manifest(self._directory / name) for name in names}
        ages = (self._age(name, branches.branch_of(manifest, name)) for name, manifest in manifests.items())
        return max(ages, default=(False, *age_of("")))

    def _age(self, name: str, branch: Branch) -> tuple[bool, bool, int]:
        return (self._branch is None or self._branch.holds(branch, step_of(name)), *age_of(name))


def _branch(entry: JournalEntry) -> Branch:
    return branches.parse(entry.branch) or Branch(entry.token)


NOTE = "retention"
_NOTED_RULE = r"(\d{1,9}|-)/(\d{1,9}|-)"
_NOTED = re.compile(rf"local {_NOTED_RULE} shared {_NOTED_RULE}")


class Health(enum.StrEnum):
    """Completeness of a committed copy by the sizes of its files."""

    WHOLE = "whole"
    PARTIAL = "partial"
    """All files of some ranks and none of others, as on each node of a multi-node job."""
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    name: str
    step: int
    tier: Tier
    health: Health | None = None
    """None: not checked, because a newer copy of the tier is whole."""
    is_drained: bool = False
    """The shared tier has at some time committed this attempt."""
    held: str = ""
    """The use by a live process."""
    attempt: str = ""
    size_bytes: int = 0
    is_replicated: bool = False
    """Not on the shared tier, and all its copies on other nodes are whole."""
    is_abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    copy: CheckpointCopy
    remove: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Rule:
    """The steps to keep on one tier: the newest ``last`` and those that ``every`` divides. Neither: all steps."""

    last: int | None = None
    every: int | None = None

    def __bool__(self) -> bool:
        return self.last is not None or self.every is not None

    def kept(self, steps: Iterable[int]) -> dict[int, str]:
        newest_first = sorted(set(steps), reverse=True)
        if not self:
            return dict.fromkeys(newest_first, "no rule for this tier")
        multiples = [step for step in newest_first if self.every and step % self.every == 0]
        kept = dict.fromkeys(multiples, f"a multiple of {self.every}")
        return kept | dict.fromkeys(newest_first[: self.last or 0], f"among the newest {self.last}")

    def kept_of(self, saved: Sequence[int]) -> set[int]:
        """Apply rule N8. ``saved``: by one process, the latest last."""
        if not self:
            return {*saved}
        latest_first = [*dict.fromkeys(reversed(saved))]
        return {*latest_first[: self.last or 1], *(step for step in saved if self.every and step % self.every == 0)}

    def encode(self) -> str:
        return f"{self.last or '-'}/{self.every or '-'}"

    def __str__(self) -> str:
        """Why this rule does not keep a step."""
        newest = [f"not among the newest {self.last}"] if self.last else []
        return ", ".join(newest + ([f"no multiple of {self.every}"] if self.every else []))


@dataclass(frozen=True, slots=True)
class Policy:
    local: Rule = field(default_factory=Rule)
    shared: Rule = field(default_factory=Rule)
    abandoned: frozenset[Tier] = frozenset()

    @classmethod
    def of(
        cls, keep_last: int | Mapping[str, int] | None = None, keep_every: int | Mapping[str, int] | None = None
    ) -> Policy:
        """Build from a number for both tiers, or one per tier. Raises ConfigError."""
        last, every = _by_tier("keep_last", keep_last), _by_tier("keep_every", keep_every)
        local, shared = (Rule(last.get(tier), every.get(tier)) for tier in ("local", "shared"))
        return cls(local, shared)

    def __bool__(self) -> bool:
        return bool(self.local or self.shared or self.abandoned)

    def encode(self) -> str:
        return f"local {self.local.encode()} shared {self.shared.encode()}"

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Policy:
        note = manifest.notes.get(NOTE)
        match = _NOTED.fullmatch(note) if isinstance(note, str) else None
        if match is None:
            return cls()
        last, every, shared_last, shared_every = (None if text == "-" else int(text) or None for text in match.groups())
        return cls(Rule(last, every), Rule(shared_last, shared_every))

    def judge(self, copies: Sequence[CheckpointCopy], *, drains: bool = True, own: Sequence[int] = ()) -> list[Verdict]:
        """Judge every copy of a run (N1, N2, N3), newest first, local before shared.

        ``drains``: False if the local tier is the last one. ``own``: this process's steps, the latest last.
        """
        shared = [copy for copy in copies if copy.tier is Tier.SHARED and not copy.is_abandoned]
        shared_whole = max((copy.step for copy in shared if copy.health is Health.WHOLE), default=None)
        verdicts = []
        for tier, rule in ((Tier.LOCAL, self.local), (Tier.SHARED, self.shared)):
            every = [copy for copy in copies if copy.tier is tier]
            here = [copy for copy in every if not copy.is_abandoned]
            verdicts += [self._judge_abandoned(copy, here, every) for copy in every if copy.is_abandoned]
            protected, steps = protect(here), {copy.step for copy in here}
            kept = rule.kept(steps)
            own_here = rule.kept_of([step for step in own if step in steps])
            kept = dict.fromkeys(own_here, "saved by this process") | kept
            for copy in here:
                needs_lower = tier is Tier.LOCAL and drains
                reason = (
                    protected.get(copy.name)
                    or kept.get(copy.step)
                    or copy.held
                    or (_not_lower(copy, shared_whole) if needs_lower else "")
                )
                verdicts.append(Verdict(copy, not reason, reason or str(rule)))
        return sorted(verdicts, key=lambda verdict: (-verdict.copy.step, verdict.copy.name, verdict.copy.tier))

    def _judge_abandoned(
        self, copy: CheckpointCopy, here: Sequence[CheckpointCopy], every: Sequence[CheckpointCopy]
    ) -> Verdict:
        reason = copy.held
        if not reason and not any(one.health in (Health.WHOLE, Health.PARTIAL) for one in here):
            reason = protect(every).get(copy.name, "")
        if not reason and copy.tier not in self.abandoned:
            reason = "abandoned; `tierckpt prune --abandoned` removes it"
        return Verdict(copy, not reason, reason or "abandoned: the job went back to an older step")


def protect(copies: Sequence[CheckpointCopy]) -> dict[str, str]:
    """Return the copies of one tier that no rule removes (N1), with reasons."""
    found: dict[str, str] = {}
    health_needed: dict[str, set[Health | None]] = {
        "the newest": {*Health, None},
        "the newest sound one": {Health.WHOLE, Health.PARTIAL},
        "the newest whole one": {Health.WHOLE},
    }
    for reason, healths in health_needed.items():
        for name in newest_of(copy.name for copy in copies if copy.health in healths):
            found.setdefault(name, reason)
    for name in newest_of(copy.name for copy in copies if copy.is_replicated):
        found.setdefault(name, "the newest that peers have whole too")
    return found


def _not_lower(copy: CheckpointCopy, shared_whole: int | None) -> str:
    if not copy.is_drained:
        return "not on the shared tier yet"
    if shared_whole is None or shared_whole < copy.step:
        return "the shared tier has lost it, and holds no newer one"
    return ""


def _by_tier(name: str, value: int | Mapping[str, int] | None) -> dict[str, int]:
    if value is None:
        return {}
    given = dict(value) if isinstance(value, Mapping) else {"local": value, "shared": value}
    for tier, count in given.items():
        if tier not in {"local", "shared"} or not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(
                f"{name} has {tier}={count!r}",
                hint=f'Write {name}=3 or {{"local": 2, "shared": 10}}, each at least 1. None keeps everything',
            )
    return given


def local_health(directory: Path, manifest: Manifest) -> Health:
    if any(file_size(directory / entry.key) != entry.size_bytes for entry in manifest.metadata):
        return Health.DAMAGED
    here: set[int] = set()
    missing: set[int] = set()
    for entry in manifest.files:
        path = directory / entry.key
        size_bytes = file_size(path)
        if size_bytes not in {entry.size_bytes, -1} or Path(set_aside_name(str(path))).exists():
            return Health.DAMAGED
        (here if size_bytes == entry.size_bytes else missing).add(entry.rank)
    if not missing:
        return Health.WHOLE
    return Health.PARTIAL if here and not here & missing else Health.DAMAGED


async def shared_health(store: Store, manifest: Manifest) -> Health:
    sizes = {info.key: info.size_bytes async for info in store.list()}
    whole = all(sizes.get(entry.key) == entry.size_bytes for entry in manifest.entries)
    return Health.WHOLE if whole else Health.DAMAGED


def local_checkpoints(local_root: Path) -> Iterator[tuple[Path, Manifest]]:
    for directory in marked_directories(Path(local_root, "checkpoints")):
        if (manifest := local_commit.read_usable_manifest(directory)) is not None:
            yield directory, manifest


def marked_directories(top: Path, mark: str = PRIVATE_DIR) -> Iterator[Path]:
    """Links are not followed."""
    for path, names, _ in os.walk(top):
        if mark in names:
            names.remove(mark)
            yield Path(path)


def nearest_existing(path: Path) -> Path:
    while not os.path.exists(path):  # noqa: PTH110  # Path.exists raises for unreachable paths
        path = path.parent
    return path


async def remove_shared(store: Store, manifest: Manifest) -> bool:
    """Remove a committed checkpoint from the shared tier (N4, N6). Returns False if another save took over its id.

    Names that a concurrent save may replace are deleted only in the version read, so one of the two loses cleanly. On a
    store without conditions, a save between the read and the delete can lose its manifest; on one node the journal
    prevents that (N3).
    """
    note = layout.removal_note(manifest.attempt)
    await store.put(note, manifest.encode())
    stock = {entry.path: await shared_commit.etag_of(store, entry.path) for entry in manifest.metadata}
    claim, manifest_etag = await shared_commit.etag_of(store, CLAIM), await shared_commit.etag_of(store, MANIFEST)
    now = await shared_commit.read_shared_manifest(store)
    is_ours = await shared_commit.read_claim(store) in {manifest.attempt, None}
    stands = now is not None and now.attempt == manifest.attempt
    if not (is_ours and stands and await shared_commit.remove(store, MANIFEST, manifest_etag)):
        if now is None or await shared_commit.read_shared_manifest(store) is None:
            # Another mover removes it, too: the shared note stays until all files that it names are deleted.
            await _finish(store, manifest, stock, claim)
        else:
            await store.delete(note)
        return False
    await _finish(store, manifest, stock, claim)
    return True


async def finish_shared(store: Store, removed: Manifest) -> None:
    """Delete the files that only ``removed`` names, then its removal note. Idempotent."""
    stock = {entry.path: await shared_commit.etag_of(store, entry.path) for entry in removed.metadata}
    claim = await shared_commit.etag_of(store, CLAIM)
    await _finish(store, removed, stock, claim)


async def _finish(store: Store, removed: Manifest, stock: Mapping[str, str | None], claim: str | None) -> None:
    """The claim goes last: until then, a crash leaves no directory that looks like a stock checkpoint."""
    committed = await shared_commit.read_shared_manifest(store)
    if committed is None or committed.attempt != removed.attempt:
        owns_id = committed is None and await shared_commit.read_claim(store) in {removed.attempt, None}
        for path, etag in stock.items() if owns_id else ():
            if etag is not None:
                await shared_commit.remove(store, path, etag)
        for entry in stale_files(removed, committed) if committed else removed.entries:
            if entry.key not in stock:
                await store.delete(entry.key)
        for directory in removed.adopted_dirs:
            await store.delete_dir(directory)
        await _delete_parts(store, removed)
        if owns_id and claim is not None:
            await shared_commit.remove(store, CLAIM, claim)
    await store.delete(layout.removal_note(removed.attempt))


async def _delete_parts(store: Store, removed: Manifest) -> None:
    async for info in store.list(PARTS_DIR):
        token = info.key.removeprefix(f"{PARTS_DIR}/").removesuffix(".json")
        if token in removed.tokens or token.startswith(f"{removed.attempt}-"):
            await store.delete(info.key)
    await store.delete(pending(removed.attempt))


async def unfinished_removals(store: Store) -> list[Manifest]:
    found = []
    async for info in store.list(layout.REMOVED_DIR):
        try:
            if (data := await if_present(store.get(info.key))) is not None:
                found.append(decode(data, where=f"{store.uri}/{info.key}"))
        except ManifestError as error:
            log.warning("%s; keeping the files that it names", error)
    return found
