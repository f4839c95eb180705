"""The commit on the local tier: the only code that makes a checkpoint visible there, or removes it.

Under a flock on the checkpoint directory:
    1. every shard is already durable under a name that no commit has used (P3)
    2. the attempt's metadata is written under a name of its own, fsynced
    3. a rename replaces ``.metadata``: stock PyTorch now reads the new checkpoint, whose files are all durable
    4. a rename replaces ``manifest.json``: now it is committed
A crash before 4 leaves the old manifest, whose files are untouched; drain/recovery.py removes those of the attempt.

Marks are small files that record the state of an attempt. A damaged mark means unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..disk.durable import durable_write, fsync_dir, make_dirs, matching, read_whole, remove_tree, translated
from ..disk.file_lock import lock
from ..disk.processes import set_aside_name
from ..errors import ManifestError, ObjectNotFoundError, StoreError, TierckptError
from ..format import manifest as manifests
from ..format.layout import (
    BLOCKS_DIR,
    DRAINED,
    INCOMING_DIR,
    MANIFEST,
    METADATA_DIR,
    ORIGIN_DIR,
    PARTS_DIR,
    PENDING_DIR,
    PRIVATE_DIR,
    REMOVED_DIR,
    REPLICA,
    REPLICATED,
    SHARD_SUFFIX,
    SUPERSEDED,
    Location,
    adopted_dir,
    origin_file,
    part,
    private_files,
    removal_note,
)
from ..format.manifest import FileEntry, Manifest, stale_files, stale_metadata
from ..stores.verified_read import check_bytes
from ..telemetry import ERRORS, logger
from ..types import Tier
from . import branches
from .shared_commit import already_committed

MARK_TRIES = 5

DRAINED_FIELDS = frozenset({"attempt"})


def mark_origin(directory: Path, token: str) -> None:
    """Note that a rank of this node makes the save ``token``, for peers. Not durable: losing the note costs a copy."""
    for _ in range(MARK_TRIES):
        with suppress(OSError, TierckptError):
            make_dirs(directory / ORIGIN_DIR)
            (directory / origin_file(token)).touch()
            return  # a concurrent commit removed the empty directory
    log.warning("%s: peers will not learn that this node saves it", directory)


def origins(directory: Path) -> frozenset[str]:
    with suppress(OSError):
        return frozenset(os.listdir(directory / ORIGIN_DIR))  # noqa: PTH208
    return frozenset()


def mark_drained(directory: Path, attempt: str) -> None:
    """A lost mark costs one GET."""
    _note(directory, DRAINED, attempt)


def is_drained(directory: Path, attempt: str) -> bool:
    return _read_mark(directory / DRAINED) == attempt


def mark_superseded(directory: Path, attempt: str) -> None:
    _note(directory, SUPERSEDED, attempt)


def mark_replicated(directory: Path, attempt: str) -> None:
    """All known copies of ``attempt`` are whole: older ones are no longer needed."""
    _note(directory, REPLICATED, attempt)


def is_replicated(directory: Path, attempt: str) -> bool:
    return _read_mark(directory / REPLICATED) == attempt


def is_evictable(directory: Path, attempt: str) -> bool:
    return is_drained(directory, attempt) or _read_mark(directory / SUPERSEDED) == attempt


def read_drained(directory: Path) -> str | None:
    """Raises ManifestError if damaged."""
    return _read(directory / DRAINED)


def _note(directory: Path, name: str, attempt: str) -> None:
    if (directory / PRIVATE_DIR).is_dir():
        durable_write(directory / name, manifests.seal({"attempt": attempt}))


def _read_mark(path: Path) -> str | None:
    try:
        return _read(path)
    except (ManifestError, StoreError) as error:
        log.warning("%s", error)
        return None


def _read(path: Path) -> str | None:
    try:
        data = read_whole(path, manifests.RECORD_BYTES_MAX)
    except ObjectNotFoundError:
        return None
    return str(manifests.unseal(data, DRAINED_FIELDS, where=str(path))["attempt"])


log = logger("commit")

LOCK_TIMEOUT_SECONDS = 60.0
DAMAGED_SUFFIX = ".bad"


PRIVATE_DIRS = (REMOVED_DIR, PARTS_DIR, PENDING_DIR, METADATA_DIR, BLOCKS_DIR, ORIGIN_DIR)
MARKS = (DRAINED, SUPERSEDED, REPLICATED)


def read_local_manifest(directory: Path) -> Manifest | None:
    """Raises ManifestError if it is damaged, StoreError if it cannot be read."""
    try:
        return _read_manifest(directory / MANIFEST)
    except ObjectNotFoundError:
        return None


def read_sound_manifest(directory: Path) -> Manifest | None:
    """As ``read_local_manifest``. A damaged manifest counts as none: a running save may be replacing it."""
    with suppress(ManifestError):
        return read_local_manifest(directory)
    return None


def read_usable_manifest(directory: Path) -> Manifest | None:
    """As ``read_local_manifest``. A damaged or unreadable manifest is logged, and counts as none."""
    try:
        return read_local_manifest(directory)
    except (ManifestError, StoreError) as error:
        log.warning("%s", error)
        return None


def _read_manifest(path: Path) -> Manifest:
    return manifests.decode(read_whole(path, manifests.MANIFEST_BYTES_MAX), where=str(path))


def commit_local(directory: Path, location: Location, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    """Commit ``manifest``. Its metadata and its journal entry exist, so a crash leaves nothing that cannot be drained.

    Raises AlreadyCommittedError if another attempt is committed here that ``manifest`` does not replace.
    """
    with _locked(directory):
        _publish(directory, location, manifest, metadata)


def commit_local_fragment(directory: Path, location: Location, fragment: Manifest) -> Manifest | None:
    """Write one rank's fragment. Commits and returns the merged manifest once all ranks' fragments are here."""
    with _locked(directory):
        make_dirs(directory / PARTS_DIR)
        durable_write(directory / part(f"{fragment.attempt}-{fragment.entries[0].rank}"), fragment.encode())
        parts = matching(directory / PARTS_DIR, f"{fragment.attempt}-*.json")
        if len(parts) < fragment.world_size:
            return None
        whole = manifests.merge([_read_manifest(path) for path in parts])
        _publish(
            directory,
            location,
            whole,
            {entry.path: _read_metadata(directory, entry, whole) for entry in whole.metadata},
        )
        for path in parts:
            with suppress(OSError):  # removed with the checkpoint
                path.unlink(missing_ok=True)
        return whole


def write_attempt_metadata(directory: Path, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    for entry in manifest.metadata:
        make_dirs((directory / entry.key).parent)
        durable_write(directory / entry.key, metadata[entry.path])


def _read_metadata(directory: Path, entry: FileEntry, manifest: Manifest) -> bytes:
    data = read_whole(directory / entry.key, manifests.SIZE_BYTES_MAX)
    check_bytes(data, entry, manifest.chunk_size_bytes, str(directory))
    return data


def _publish(directory: Path, location: Location, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    had_manifest = (directory / MANIFEST).exists()
    current = _read_or_set_aside(directory)
    if current is not None and not branches.may_replace(manifest, current, location.name):
        raise already_committed(location, current.attempt, Tier.LOCAL)
    _replace(directory, current, manifest, metadata)
    for attempt in manifest.replaces if had_manifest and current is None else ():
        remove_unfinished(directory, attempt)  # the list of its files is lost, but its shards bear its name


def _read_or_set_aside(directory: Path) -> Manifest | None:
    """Needs the lock. Renames a damaged manifest, because a good one follows."""
    try:
        return read_local_manifest(directory)
    except (ManifestError, StoreError) as error:
        if isinstance(error, StoreError) and not (directory / MANIFEST).is_dir():
            raise
        _set_aside(directory / MANIFEST, str(error))
        return None


def _set_aside(path: Path, reason: str) -> None:
    aside = path.with_name(f"{path.name}.{time.time_ns()}{DAMAGED_SUFFIX}")
    path.replace(aside)
    fsync_dir(aside.parent)
    ERRORS.emit(1, operation="local tier", error="SetAside")
    log.error("%s is damaged and was renamed to %s: %s", path, aside.name, reason)


def _replace(directory: Path, current: Manifest | None, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    """Swap the stock metadata, then the manifest; then delete the files of ``current`` alone, noted against a crash.

    An error before the commit restores the stock metadata: the caller deletes the new shards it would name.
    """
    if current is not None and current.attempt != manifest.attempt:
        note = directory / removal_note(current.attempt)
        make_dirs(note.parent)
        durable_write(note, current.encode())
    try:
        for name in (*MARKS, *(entry.path for entry in manifest.metadata)):
            if (directory / name).is_dir():
                _set_aside(directory / name, "it is a directory")
        for entry in manifest.metadata:
            durable_write(directory / entry.path, metadata[entry.path])
        for name in MARKS:
            (directory / name).unlink(missing_ok=True)
        durable_write(directory / MANIFEST, manifest.encode())
        branches.note_local(directory, manifest)
    except BaseException:
        with suppress(OSError, TierckptError):
            undo_commit(directory, current, manifest)
        raise
    try:
        finish_locked_removal(directory)
    except (OSError, TierckptError) as error:
        # It is committed: an error would make the caller delete its shards.
        log.warning("%s: files of the replaced checkpoint stay for now: %s", directory, error)


def undo_commit(directory: Path, current: Manifest | None, failed: Manifest) -> None:
    committed = read_local_manifest(directory)
    if committed is not None and committed.attempt == failed.attempt:
        if current is None:
            (directory / MANIFEST).unlink(missing_ok=True)
        else:
            durable_write(directory / MANIFEST, current.encode())
    _restore_stock_metadata(directory, failed)


def _restore_stock_metadata(directory: Path, unfinished: Manifest) -> None:
    committed = read_local_manifest(directory)
    if committed is not None and committed.attempt == unfinished.attempt:
        return
    kept = {entry.path: entry for entry in committed.metadata} if committed is not None else {}
    for path in {entry.path for entry in unfinished.metadata} | kept.keys():
        if committed is None or path not in kept:
            (directory / path).unlink(missing_ok=True)
        else:
            durable_write(directory / path, _read_metadata(directory, kept[path], committed))


def discard_attempt(directory: Path, token: str, manifest: Manifest | None = None) -> bool:
    """Delete the files of one rank's save that never committed. ``manifest``: of the failed save.

    Returns False if the committed manifest names some: they stay. Raises ManifestError if that is damaged.
    """
    if not directory.is_dir():
        return True
    with _locked(directory):
        if manifest is not None:
            _restore_stock_metadata(directory, manifest)
        committed = read_local_manifest(directory)
        if not _is_named_by(committed, token):
            _remove_fragment(directory, token)
        named = {entry.key for entry in committed.entries} if committed is not None else set()
        for path in (*matching(directory, f"*-{token}{SHARD_SUFFIX}"), *map(directory.joinpath, private_files(token))):
            if str(path.relative_to(directory)) not in named:
                path.unlink(missing_ok=True)
        if not _is_named_by(committed, token):
            remove_tree(directory / adopted_dir(token), ignore_errors=True)
        return not _is_named_by(committed, token)


def is_committed(directory: Path, token: str) -> bool:
    return _is_named_by(read_local_manifest(directory), token) or (directory / part(token)).exists()


def _is_named_by(committed: Manifest | None, token: str) -> bool:
    return committed is not None and token in committed.tokens | {committed.attempt}


def remove_unfinished(directory: Path, token: str) -> None:
    """The directory stays for the next save."""
    _remove_fragment(directory, token)
    for path in (*matching(directory, f"*-{token}{SHARD_SUFFIX}"), *map(directory.joinpath, private_files(token))):
        path.unlink(missing_ok=True)
    remove_tree(directory / adopted_dir(token), ignore_errors=True)


def _remove_fragment(directory: Path, token: str) -> None:
    """Remove it before its files: else a merge of all ranks could still commit it."""
    fragment = directory / part(token)
    with suppress(FileNotFoundError):
        fragment.unlink()
        fsync_dir(fragment.parent)


def remove_empty(directory: Path) -> None:
    """Hold the lease of ``directory``: a save makes it before its first file."""
    if (directory / PRIVATE_DIR).is_dir():
        with _locked(directory):
            _remove_empty(directory)


def record_commit(directory: Path, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    """Record a commit of another node, unless this node has a different one."""
    with _locked(directory):
        current = _read_or_set_aside(directory)
        if current is not None and current.attempt == manifest.attempt:
            return
        if (
            current is None
            or is_drained(directory, current.attempt)
            or branches.may_replace(manifest, current, directory.name)
        ):
            write_attempt_metadata(directory, manifest, metadata)
            _replace(directory, current, manifest, metadata)


def remove_local(directory: Path, attempt: str | None = None) -> bool:
    """Remove a local checkpoint. Returns False if there is none, or its attempt is not ``attempt``.

    A rename turns the manifest into a removal note, which ``finish_removal`` works off after a crash. Only files of the
    manifest are deleted, so a running save keeps its own. Cost: one fsync for each directory touched.
    """
    with translated(directory), _locked(directory):
        manifest = read_local_manifest(directory)
        stands = manifest is not None and attempt in {None, manifest.attempt}
        if manifest is not None and stands:
            note = directory / removal_note(manifest.attempt)
            make_dirs(note.parent)
            (directory / MANIFEST).replace(note)
            fsync_dir(note.parent)
            fsync_dir(directory / PRIVATE_DIR)
        finish_locked_removal(directory)
        return stands


def finish_removal(directory: Path) -> bool:
    """Finish the removal of a killed ``remove_local``. True if there was a note."""
    if not (directory / PRIVATE_DIR).is_dir():
        return False
    with translated(directory), _locked(directory):
        return finish_locked_removal(directory)


def finish_locked_removal(directory: Path) -> bool:
    """Needs the lock. Files of the committed manifest stay."""
    committed = read_local_manifest(directory)
    notes = matching(directory / REMOVED_DIR, "*.json")
    for note in notes:
        try:
            removed = _read_manifest(note)
        except ManifestError as error:
            log.warning("%s; keeping the files that it names", error)
            continue
        doomed = [entry.key for entry in (stale_files(removed, committed) if committed else removed.entries)]
        doomed += [set_aside_name(key) for key in doomed]  # renamed by a restore
        dead = removed.tokens - (committed.tokens if committed else set())
        if (directory / ORIGIN_DIR).is_dir():
            doomed += [f"{ORIGIN_DIR}/{token}" for token in dead]
        # Durable before the shards go: stock PyTorch trusts it (P1).
        stock = stale_metadata(removed, committed) if committed else [entry.path for entry in removed.metadata]
        _unlink_all([directory / path for path in stock])
        if committed is None:
            remove_tree(directory / INCOMING_DIR, ignore_errors=True)
            doomed += [*MARKS, REPLICA]
            doomed += [f"{PRIVATE_DIR}/{path.name}" for path in matching(directory / PRIVATE_DIR, f"*{DAMAGED_SUFFIX}")]
        _unlink_all(
            [directory / name for name in doomed] + matching(directory / PARTS_DIR, f"{removed.attempt}-*.json")
        )
        for attempt in {removed.attempt, *dead} if committed is None or committed.attempt != removed.attempt else ():
            remove_tree(directory / adopted_dir(attempt), ignore_errors=True)
        note.unlink(missing_ok=True)  # last: it is the only list of the remaining files
    _remove_empty(directory)
    return bool(notes)


def _unlink_all(paths: list[Path]) -> None:
    """Durable. Cost: one fsync for each directory."""
    for path in paths:
        if path.name.endswith(DAMAGED_SUFFIX) and path.is_dir():
            remove_tree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for parent in {path.parent for path in paths}:
        with suppress(ObjectNotFoundError):
            fsync_dir(parent)


def _remove_empty(directory: Path) -> None:
    """Needs the lock. Any other file keeps the directory."""
    private = directory / PRIVATE_DIR
    for empty in PRIVATE_DIRS:
        with suppress(OSError):
            (directory / empty).rmdir()
    names = [path.name for path in (*matching(directory, "*"), *matching(private, "*"))]
    if names != [private.name, "lock"]:
        return
    (private / "lock").unlink(missing_ok=True)  # a waiting process finds the name gone and makes a new file (K3)
    with suppress(OSError):
        private.rmdir()
        directory.rmdir()
        fsync_dir(directory.parent)


@contextmanager
def _closed_quietly() -> Iterator[ExitStack]:
    """Ignore errors of the release: the work is done, and the locks end with the process."""
    stack = ExitStack()
    try:
        yield stack
    finally:
        with suppress(OSError):
            stack.close()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Translates OS errors."""
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    with translated(directory, is_above=True), _closed_quietly() as stack:
        while True:
            make_dirs(directory / PRIVATE_DIR)
            try:
                stack.enter_context(lock(directory / PRIVATE_DIR / "lock", LOCK_TIMEOUT_SECONDS, str(directory)))
                break
            except FileNotFoundError:  # a removal took the empty directory away
                if time.monotonic() > deadline:
                    raise
        yield
