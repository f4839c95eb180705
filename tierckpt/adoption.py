"""Adoption: makes a committed checkpoint of a directory that another program wrote.

    1. the journal entry (J1); then the files are taken into the local tier, under names that no commit has used (P3)
    2. the files are made durable and digested there; the directory must be unchanged since
    3. the journal entry with the manifest, the local commit, and the drain, like a save
A crash before 3 leaves an entry that the next process finishes, and the writer's directory unchanged.
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
from .checkpoint import local_commit
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


@dataclass(frozen=True)
class Adoption:
    uri: str
    files: int
    size_bytes: int
    settings: Settings = dataclasses.field(repr=False)

    def wait(self, tier: str = "shared", timeout_seconds: float = 600.0) -> None:
        """Wait as ``tierckpt.wait``."""
        wait(self.uri, tier, timeout_seconds, settings=self.settings)


@dataclass(frozen=True)
class _RankPart:
    attempt: str
    rank: int = 0
    world_size: int = 1
    is_idle: bool = False

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
    """Make a checkpoint of a directory that another program wrote; return when it is committed on the local tier.

    After that, the directory may be deleted or written to, and the drain runs in the background. A directory with a
    ``.metadata`` of DCP also loads by ``TierStorageReader``. The files keep their names, below ``files-<attempt>``.

    Args:
        directory: must be closed and quiet. Links inside it become files; empty directories are left out.
        overwrite: replace an existing checkpoint at ``uri``, which stays intact until this is committed.
        links: take files in by hard links, without a copy. Only for files that are never written in place later; the
            digests detect a violation. No effect if ``uri`` is a path.
        ranks: ``(rank, world_size)`` if several nodes adopt their own files into one checkpoint. In a job of
            ``torch.distributed`` every rank calls this, and the ranks find out which see the same directory; ``(0, 1)``
            there makes this call adopt alone.
        attempt: a name common to all of ``ranks``, new for each adoption; required outside a ``torch.distributed`` job.
        listener: called with a ``Progress`` during the digests, on this thread.

    Raises:
        ConfigError: no directory, an empty one, a link out of it; invalid ``ranks`` or URI.
        CheckpointError: the directory is still being written.
        AlreadyCommittedError: a checkpoint exists at ``uri``, and ``overwrite`` is False.
        CapacityError, PermissionDeniedError, StoreError: as in a save.
        OperationTimeoutError: other ranks of the job did not call this within 120 s.
    Cost: one read of every byte, and one write unless reflinks or ``links`` are used.

    Example:
        >>> pathlib.Path("checkpoint-5").mkdir()
        >>> _ = pathlib.Path("checkpoint-5/model.bin").write_bytes(b"weights")
        >>> handle = tierckpt.adopt("checkpoint-5", "run/step-5")
        >>> handle.wait(timeout_seconds=60)
        >>> tierckpt.latest("run")
        '.../run/step-5'
    """
    configured = Settings.load(settings, **overrides)
    use_local_root(configured)  # creates nothing yet
    location, path = check_location(parse_uri(uri)), local_path(directory, "directory")
    check_mirrored_target(location, configured.local_root)
    if path.resolve().is_relative_to(configured.local_root):
        raise ConfigError(f"{path} is inside local_root", hint="Adopt a directory outside local_root")
    client = get_client(configured)
    if location.scheme == "file" and Path(location.path).resolve().is_relative_to(path.resolve()):
        raise ConfigError(f"{location.uri} is inside {path}, the adopted directory", hint="Use a URI outside it")
    part = _part_of(location, path, ranks, attempt)
    if part.is_idle:
        return Adoption(location.uri, 0, 0, configured)
    make_local_root(configured)
    client.recover()
    files = source.scan(path)
    source.check_quiet(path, files)
    source.check_names(files, adopted_dir(part.token), location)
    replaces = client.run(client.mover.replaced.find(location, overwrite=overwrite))
    if part.attempt in replaces:
        raise AlreadyCommittedError(
            f"Checkpoint already exists: {location.uri} has an attempt {part.attempt}",
            hint="Use a new attempt name for each adoption",
        )
    links = links and location.scheme != "file"
    entries = _adopt(client, location, path, files, part, replaces, links, listener)
    return Adoption(location.uri, len(entries), sum(entry.size_bytes for entry in entries), configured)


def _adopt(
    client: Client,
    location: Location,
    place: Path,
    files: dict[str, source.SourceFile],
    part: _RankPart,
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
            raise CheckpointError(f"{location.uri}: an adoption with this name ({token}) is running on this node")
        make_dirs(directory)
        entry = journal.open(token, location, part.rank, int(settings.chunk_size_bytes))
        try:
            if settings.peers is not None:
                local_commit.mark_origin(directory, token)
            adopted = directory / adopted_dir(token)
            with source.locked_directory(place):
                source.import_files(files, adopted, links=links)
            what, total = f"adopt {location.uri}", sum(sizes.values())
            digests = source.make_durable(
                adopted, sizes, entry.chunk_size_bytes, lambda done: listener(Progress(what, done, total))
            )
            source.check_same(place, files, links)
            found = tuple(
                FileEntry(path, sizes[path], digests[path], part.rank, token, f"{adopted_dir(token)}/{path}")
                for path in sorted(files)
            )
            chunk, now = entry.chunk_size_bytes, time.time()
            manifest = Manifest(part.attempt, part.world_size, chunk, (), found, replaces, now)
            # Before the commit: the local manifest shows whether a crash came before or after it.
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
    # From here on the drain owns the entry.
    COMMITS.emit(1, tier=Tier.LOCAL)
    log.info("adopted %s as %s (%d bytes)", place, location.uri, manifest.size_bytes)
    if settings.drain:
        try:
            client.drain_in_background(token)
        except TierckptError as error:  # the entry stays in the journal for the next process
            log.warning("%s: drained when a process next saves here: %s", location.uri, error)
    return found


# --- several ranks ---------------------------------------------------------------------------------------------


def _part_of(location: Location, path: Path, ranks: tuple[int, int] | None, attempt: str | None) -> _RankPart:
    """Any thread may call this: it is not a collective."""
    if attempt is not None and not (is_token(attempt) and len(attempt) <= 60):
        raise ConfigError(f"attempt is {attempt!r}", hint="Use at most 60 letters, digits, '.', '_' and '-'")
    if ranks is not None and not (0 <= ranks[0] < ranks[1] <= RANKS_MAX):
        raise ConfigError(f"ranks is {ranks}", hint="Pass (rank, world_size), like (0, 2)")
    of_job = ranks_of_job()
    rank, world_size = ranks or of_job or (0, 1)
    if world_size == 1 or attempt is not None:
        return _RankPart(attempt or secrets.token_hex(8), rank, world_size)
    if of_job is None:
        hint = "Pass all of them the same attempt='NAME', new each time, or call it in a torch.distributed job"
        raise ConfigError(f"rank {rank} of {world_size} has no common attempt name with the other ranks", hint=hint)
    store = RankStore.numbered(f"tierckpt/adopt/{location.uri}/{world_size}", RANKS_SECONDS, (rank, world_size))
    late = f"some ranks have not called adopt for {location.uri}"
    hint = "Every rank must call adopt, in the same order, or one calls it with ranks=(0, 1)"
    attempts = store.all_gather("attempt", secrets.token_hex(8), late, hint)
    if ranks is not None:
        return _RankPart(attempts[0], rank, world_size)
    # Now every rank has written.
    paths = store.all_gather("place", source.identity(path) or "none", late, hint)
    first = [number for number, name in enumerate(paths) if name != "none" and paths.index(name) == number]
    is_idle = rank not in first and bool(first)  # without any directory, each rank raises the error
    return _RankPart(attempts[0], first.index(rank) if rank in first else 0, max(1, len(first)), is_idle)
