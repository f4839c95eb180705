"""Adoption: a directory that somebody else wrote becomes a committed checkpoint, and drains like any other.

    1. the journal entry (J1), then the files are taken into the local tier under names no commit has used (P3)
    2. they are made durable and digested there, and the directory is looked at again: it must be what it was
       (save/adopted_directory.py)
    3. the journal entry with the manifest, then the local commit, then the drain: as a save (docs/internals/commit.md)
A crash before 3 leaves an entry that the next process works off, and the writer's directory as it was.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cache import space
from .checkpoint import local_commit, marks
from .checkpoint.journal import READY, Journal
from .client import Client, get_client, wait
from .config import Settings
from .disk import read_lease
from .disk.durable import make_dirs
from .disk.local_root import make_local_root, use_local_root
from .errors import AlreadyCommittedError, CheckpointError, ConfigError, TierckptError
from .format.layout import Location, adopted_dir, local_dir, parse_uri
from .format.manifest import RANKS_MAX, FileEntry, Manifest, is_token
from .format.uris import local_path
from .rank_store import RankStore, ranks_of_job
from .save import adopted_directory as source
from .stores.schemes import check_location, check_mirrored_target
from .telemetry import COMMITS, ignore_progress, logger
from .tracebacks import short_traceback
from .types import Progress, ProgressListener, Tier

log = logger("save")

RANKS_SECONDS = 120.0
"""How long the ranks of a job wait for each other to have written."""


@dataclass(frozen=True)
class Adoption:
    """A directory that was adopted, by this rank as far as it has a part in it."""

    uri: str
    files: int
    size_bytes: int
    settings: Settings = dataclasses.field(repr=False)

    def wait(self, tier: str = "shared", timeout_seconds: float = 600.0) -> None:
        """Return when it is committed on ``tier``: what ``tierckpt.wait`` does, with its errors."""
        wait(self.uri, tier, timeout_seconds, settings=self.settings)


@dataclass(frozen=True)
class _Part:
    """What this rank has to do with an adoption."""

    attempt: str
    rank: int = 0
    world_size: int = 1
    is_idle: bool = False
    """Another rank adopts the directory that this one sees."""

    @property
    def token(self) -> str:
        return self.attempt if self.world_size == 1 else f"{self.attempt}-{self.rank}"


@short_traceback
def adopt(
    directory: str | os.PathLike[str],
    uri: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    links: bool = False,
    ranks: tuple[int, int] | None = None,
    attempt: str | None = None,
    settings: Settings | None = None,
    listener: ProgressListener = ignore_progress,
    **overrides: Any,
) -> Adoption:
    """Make a checkpoint of a directory that somebody else wrote; return when it is committed on the local tier.

    From then on the directory may be deleted or written to. Every byte is digested; the drain follows in the
    background, and ``.wait()`` of what is returned waits for it. All verbs know the checkpoint: ``tierckpt restore``
    gives the directory back, and what has a ``.metadata`` of DCP also loads by ``TierStorageReader``. On every tier the
    files lie in one folder of the checkpoint, ``files-<attempt>``, under the names that they had.

    Args:
        directory: must be closed and quiet. Links inside it become files; empty directories are left out.
        overwrite: replace what stands at ``uri``, which stays whole until this is committed. False refuses.
        links: take files in by hard links, so that no byte is copied. Only for files that are never written in place
            later, but deleted or replaced by rename; a violation is found by the digests. Where ``uri`` is a path this
            has no effect: the checkpoint there would share the files too.
        ranks: ``(rank, world_size)`` where several nodes adopt their own files into one checkpoint, which is committed
            when all have. In a job of ``torch.distributed`` every rank calls this and they find out by themselves
            which of them see the same directory; ``(0, 1)`` there says that this call is all of it.
        attempt: a name that all of ``ranks`` give, new for each adoption; needed outside a ``torch.distributed`` job.
        settings: a ``Settings``; ``overrides`` are single fields of it (``local_root=...``).
        listener: called with a ``Progress`` as what was taken in is digested, on this thread.

    Raises:
        ConfigError: no directory, nothing in it, a link out of it; ``ranks`` or a URI that cannot be.
        CheckpointError: the directory is still being written.
        AlreadyCommittedError: something stands at ``uri``, and ``overwrite`` is False.
        CapacityError, PermissionDeniedError, StoreError: as a save.
        OperationTimeoutError: other ranks of the job did not call this within 120 s.
    Cost: one read of every byte, and one write where neither reflinks nor ``links`` take it in.

    Example:
        >>> pathlib.Path("checkpoint-5").mkdir()
        >>> _ = pathlib.Path("checkpoint-5/model.bin").write_bytes(b"weights")
        >>> handle = tierckpt.adopt("checkpoint-5", "run/step-5")
        >>> handle.wait(timeout_seconds=60)
        >>> tierckpt.latest("run")
        '.../run/step-5'
    """
    configured = Settings.load(settings, **overrides)
    use_local_root(configured)  # makes nothing yet: the arguments may be wrong
    location, place = check_location(parse_uri(uri)), local_path(directory, "directory")
    check_mirrored_target(location, configured.local_root)
    if place.resolve().is_relative_to(configured.local_root):
        raise ConfigError(f"{place} lies inside local_root", hint="It belongs to tierckpt already")
    client = get_client(configured)
    if location.scheme == "file" and Path(location.path).resolve().is_relative_to(place.resolve()):
        raise ConfigError(f"{location.uri} lies in {place}, which is to be adopted", hint="Adopt it to a place outside")
    part = _part_of(location, place, ranks, attempt)
    if part.is_idle:
        return Adoption(location.uri, 0, 0, configured)
    make_local_root(configured)
    client.recover()
    files = source.look(place)
    source.check_quiet(place, files)
    source.check_names(files, adopted_dir(part.token), location)
    replaces = client.run(client.mover.replaced.find(location, overwrite=overwrite))
    if part.attempt in replaces:
        raise AlreadyCommittedError(
            f"Checkpoint already exists: {location.uri} has an attempt {part.attempt}",
            hint="The name of an attempt is used once",
        )
    links = links and location.scheme != "file"
    entries = _adopt(client, location, place, files, part, replaces, links, listener)
    return Adoption(location.uri, len(entries), sum(entry.size_bytes for entry in entries), configured)


def _adopt(
    client: Client,
    location: Location,
    place: Path,
    files: dict[str, source.SourceFile],
    part: _Part,
    replaces: tuple[str, ...],
    links: bool,
    listener: ProgressListener,
) -> tuple[FileEntry, ...]:
    settings, token = client.settings, part.token
    directory, journal = local_dir(settings.local_root, location), Journal(settings.local_root)
    sizes = {path: file.size_bytes for path, file in files.items()}
    space.make_room(settings, sum(sizes.values()), directory)
    with read_lease.reading(settings.local_root, directory), journal.own(token) as hold:
        if not hold or journal.read(token) is not None:
            raise CheckpointError(f"{location.uri}: an adoption of this name ({token}) is under way on this node")
        make_dirs(directory)
        entry = journal.open(token, location, part.rank, int(settings.chunk_size_bytes))
        try:
            if settings.peers is not None:
                marks.mark_origin(directory, token)
            adopted = directory / adopted_dir(token)
            with source.staying(place):
                source.take_in(files, adopted, links=links)
            what, total = f"adopt {location.uri}", sum(sizes.values())
            digests = source.settle(
                adopted, sizes, entry.chunk_size_bytes, lambda done: listener(Progress(what, done, total))
            )
            source.check_same(place, files, links)
            found = tuple(
                FileEntry(path, sizes[path], digests[path], part.rank, token, f"{adopted_dir(token)}/{path}")
                for path in sorted(files)
            )
            chunk, now = entry.chunk_size_bytes, time.time()
            manifest = Manifest(part.attempt, part.world_size, chunk, (), found, replaces, now)
            # Before the commit, as a save: the local manifest says whether a crash came before or after it.
            entry = journal.write(dataclasses.replace(entry, files=found, manifest=manifest, state=READY))
            if entry.is_fragment:
                local_commit.commit_local_fragment(directory, location, manifest)
            else:
                local_commit.commit_local(directory, location, manifest, {})
        except BaseException:
            if entry.manifest is None or local_commit.discard_attempt(directory, token, entry.manifest):
                local_commit.remove_unfinished(directory, token)
                journal.remove(token)
            raise
        if not settings.drain:
            journal.remove(token)
    # The hold on the entry has ended: from here on it is the drain's.
    COMMITS.emit(1, tier=Tier.LOCAL)
    log.info("adopted %s as %s (%d bytes)", place, location.uri, manifest.size_bytes)
    if settings.drain:
        try:
            client.drain_in_background(token)
        except TierckptError as error:  # this process ends: the journal has the entry, for the next one
            log.warning("%s: drained when a process next saves here: %s", location.uri, error)
    return found


# --- several ranks ---------------------------------------------------------------------------------------------


def _part_of(location: Location, place: Path, ranks: tuple[int, int] | None, attempt: str | None) -> _Part:
    """Agree with the other ranks by a few keys of the job's rendezvous store, and no collective: any thread may."""
    if attempt is not None and not (is_token(attempt) and len(attempt) <= 60):
        raise ConfigError(f"attempt is {attempt!r}", hint="Use letters, digits, '.', '_' and '-', at most 60")
    if ranks is not None and not (0 <= ranks[0] < ranks[1] <= RANKS_MAX):
        raise ConfigError(f"ranks is {ranks}", hint="It is (rank, world_size), as (0, 2)")
    of_job = ranks_of_job()
    rank, world_size = ranks or of_job or (0, 1)
    if world_size == 1 or attempt is not None:
        return _Part(attempt or secrets.token_hex(8), rank, world_size)
    if of_job is None:
        raise ConfigError(
            f"rank {rank} of {world_size} does not know what the others call this adoption",
            hint="Give all of them the same attempt='NAME', new each time, or call it in a torch.distributed job",
        )
    store = RankStore.numbered(f"tierckpt/adopt/{location.uri}/{world_size}", RANKS_SECONDS, (rank, world_size))
    late = f"some rank has not begun to adopt {location.uri}"
    hint = "Every rank calls adopt, in the same order, or one calls it with ranks=(0, 1)"
    attempts = store.all_gather("attempt", secrets.token_hex(8), late, hint)
    if ranks is not None:
        return _Part(attempts[0], rank, world_size)
    # Now every rank has written.
    places = store.all_gather("place", source.identity(place) or "none", late, hint)
    first = [number for number, name in enumerate(places) if name != "none" and places.index(name) == number]
    is_idle = rank not in first and bool(first)  # nobody has a directory: each says so
    return _Part(attempts[0], first.index(rank) if rank in first else 0, max(1, len(first)), is_idle)
