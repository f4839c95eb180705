"""The commit on each tier: the only code that makes a checkpoint visible, or takes it away.

Local tier, under a flock on the checkpoint directory:
    1. every shard is already durable under a name no commit has used (P3)
    2. the attempt's metadata is written under a name of its own, fsynced
    3. ``.metadata`` is swapped by rename: stock PyTorch now reads the new checkpoint, all of whose files are durable
    4. ``manifest.json`` is swapped by rename: now it is committed
A crash before 4 leaves the old manifest, which names the old attempt's own files; nothing it names was touched.

Shared tier, where there are no locks and no rename:
    1. shards, the attempt's metadata and one part record per rank are put under names of their own
    2. ``claim.json`` is put if absent, or in place of exactly the claim that was read: the arbiter between saves that
       race for an id. An attempt may take over a claim only from the attempts it was told to replace
    3. ``.metadata``, then ``manifest.json``, on the same conditions: now it is committed
Every step is idempotent for one attempt, so whichever mover comes last, or comes back after a crash, repeats them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..disk.file_lock import lock
from ..disk.local_root import typed_errors
from ..errors import (
    AlreadyCommittedError,
    BucketNotFoundError,
    IntegrityError,
    ManifestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from ..format import manifest as manifests
from ..format.layout import (
    BLOCKS_DIR,
    BRINGING,
    CLAIM,
    DRAINED,
    MANIFEST,
    METADATA_DIR,
    OWN_DIR,
    PARTS_DIR,
    PASSED,
    PENDING_DIR,
    PRIVATE_DIR,
    REPLICA,
    REPLICATED,
    SHARD_SUFFIX,
    Location,
    own_file,
    part,
    pending,
    private_files,
)
from ..format.manifest import FileEntry, Manifest, has_digest
from ..stores.base import Conditional, Store
from ..stores.local import durable_write, fsync_dir, make_dirs, matching, read_whole, translate_os_error
from ..stores.verified_read import verified
from ..telemetry import ERRORS, logger
from ..types import Json, Tier

log = logger("commit")

LOCK_TIMEOUT_SECONDS = 60.0
MARK_TRIES = 5
CLAIM_TRIES = 8
SET_ASIDE = ".bad"

REMOVED_DIR = f"{PRIVATE_DIR}/removed"
"""Notes of removals under way, on either tier: the manifest that stood there, which says what is still to go."""

PRIVATE_DIRS = (REMOVED_DIR, PARTS_DIR, PENDING_DIR, METADATA_DIR, BLOCKS_DIR, OWN_DIR)

CLAIM_FIELDS = frozenset({"attempt", "replaces"})
DRAINED_FIELDS = frozenset({"attempt"})


def removal_note(attempt: str) -> str:
    return f"{REMOVED_DIR}/{attempt}.json"


def read_local_manifest(directory: Path) -> Manifest | None:
    """Return the manifest committed in a local checkpoint directory, None when there is none.

    Raises ManifestError when there is one and it is damaged, StoreError when it cannot be read.
    """
    try:
        return _read_manifest(directory / MANIFEST)
    except ObjectNotFoundError:
        return None


def _read_manifest(path: Path) -> Manifest:
    return manifests.decode(read_whole(path, manifests.MANIFEST_BYTES_MAX), where=str(path))


async def read_shared_manifest(store: Store) -> Manifest | None:
    async def read() -> Manifest:
        return manifests.decode(await store.get(MANIFEST), where=f"{store.uri}/{MANIFEST}")

    try:
        return await verified(store, read)
    except BucketNotFoundError:
        raise  # a place that does not exist is not an empty place
    except ObjectNotFoundError:
        return None


async def replaced_by_claim(store: Store) -> frozenset[str]:
    """Return the attempts that the holder of the claim was told to replace: an attempt among them is superseded."""
    claim = await _read_claim(store)
    return frozenset(claim["replaces"]) if claim else frozenset()


async def read_claim(store: Store) -> str | None:
    """Return the attempt that owns this id on the shared tier, None when nobody has claimed it.

    Raises ManifestError when the claim is damaged: nobody may take it over for what it is not.
    """
    claim = await _read_claim(store)
    return str(claim["attempt"]) if claim else None


async def attempts_standing(store: Store) -> set[str]:
    """The attempts that own this id on the shared tier now: a save that begins may replace these and no others.

    The holder of the claim is mostly also the one that is committed. Both are looked at, because either can be without
    the other: a save between its claim and its commit, and a claim that was lost. A damaged one names nobody.
    """
    found: set[str] = set()
    for read in (read_claim, _standing_attempt):
        try:
            attempt = await read(store)
        except ManifestError as error:
            log.warning("%s; a save that begins now is not told to replace it", error)
            continue
        found |= {attempt} if attempt else set()
    return found


async def _standing_attempt(store: Store) -> str | None:
    manifest = await read_shared_manifest(store)
    return manifest.attempt if manifest is not None else None


async def _read_claim(store: Store) -> Json | None:
    """A verdict against a save hangs on the claim, and it names no file whose digest would tell a wrong answer. So it
    says where it belongs; one from elsewhere is asked for again, and believed when it comes again: the checkpoint was
    copied here, or this mount has another name on the node that wrote it.
    """
    where = f"{store.uri}/{CLAIM}"
    from_elsewhere: Json | None = None

    async def read() -> Json:
        nonlocal from_elsewhere
        claim = manifests.unseal(
            await store.get(CLAIM),
            CLAIM_FIELDS,
            where=where,
            newer=frozenset({"uri"}),
            size_bytes_max=manifests.MANIFEST_BYTES_MAX,
        )
        if not manifests.is_token(claim["attempt"]) or not manifests.is_tokens(claim["replaces"]):
            raise ManifestError(f"{where}: it names no attempt", hint="The claim was not written by tierckpt")
        if claim.get("uri", store.uri) != store.uri:
            from_elsewhere = claim
            raise ManifestError(f"{where} was written for {claim['uri']!r}")
        return claim

    try:
        return await verified(store, read)
    except BucketNotFoundError:
        raise
    except ObjectNotFoundError:
        return None
    except ManifestError:
        if from_elsewhere is None:
            raise
        return from_elsewhere


# --- local tier ------------------------------------------------------------------------------------------------


def commit_local(directory: Path, location: Location, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    """Commit ``manifest`` on the local tier. ``metadata`` holds the bytes of each of its metadata files, by path.

    Raises:
        AlreadyCommittedError: another attempt that this one was not told to replace stands here.
    """
    with _locked(directory):
        keep_metadata(directory, manifest, metadata)
        _publish(directory, location, manifest, metadata)


def commit_local_fragment(
    directory: Path, location: Location, fragment: Manifest, metadata: Mapping[str, bytes]
) -> Manifest | None:
    """Keep one rank's fragment; commit the merged manifest when all ranks' fragments lie here. Returns that, if so."""
    with _locked(directory):
        keep_metadata(directory, fragment, metadata)
        make_dirs(directory / PARTS_DIR)
        durable_write(
            directory
            / part(f"{fragment.attempt}-{fragment.files[0].rank if fragment.files else fragment.metadata[0].rank}"),
            fragment.encode(),
        )
        parts = matching(directory / PARTS_DIR, f"{fragment.attempt}-*.json")
        if len(parts) < fragment.world_size:
            return None
        whole = manifests.merge([_read_manifest(path) for path in parts])
        _publish(directory, location, whole, {entry.path: _kept(directory, entry, whole) for entry in whole.metadata})
        for path in parts:
            with suppress(OSError):  # it is committed; what stays here goes with the checkpoint
                path.unlink(missing_ok=True)
        return whole


def keep_metadata(directory: Path, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    """Write the attempt's own copy of its metadata. Invisible: no commit names it yet."""
    for entry in manifest.metadata:
        make_dirs((directory / entry.key).parent)
        durable_write(directory / entry.key, metadata[entry.path])


def _kept(directory: Path, entry: FileEntry, manifest: Manifest) -> bytes:
    """Read back the metadata that another rank has kept here."""
    data = read_whole(directory / entry.key, manifests.SIZE_BYTES_MAX)
    check_bytes(data, entry, manifest.chunk_size_bytes, str(directory))
    return data


def _publish(directory: Path, location: Location, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    had_manifest = (directory / MANIFEST).exists()
    current = _read_or_set_aside(directory)
    if current is not None and current.attempt != manifest.attempt and current.attempt not in manifest.replaces:
        raise already_committed(location, current.attempt, Tier.LOCAL)
    _replace(directory, current, manifest, metadata)
    for attempt in manifest.replaces if had_manifest and current is None else ():
        remove_unfinished(directory, attempt)  # no list of its files can be read, but its shards bear its name


def _read_or_set_aside(directory: Path) -> Manifest | None:
    """The standing manifest; a damaged one is set aside, the directory locked, by whoever is about to put a good one.

    A crash right after the rename leaves what no manifest names, as one before it did: the damaged one named nothing.
    """
    try:
        return read_local_manifest(directory)
    except (ManifestError, StoreError) as error:
        if isinstance(error, StoreError) and not (directory / MANIFEST).is_dir():
            raise  # not damaged: it cannot be read now
        _set_aside(directory / MANIFEST, str(error))
        return None


def _set_aside(path: Path, reason: str) -> None:
    """Give a file of ours that is damaged, or no file, a name that nobody looks for. It goes with the checkpoint."""
    aside = path.with_name(f"{path.name}.{time.time_ns()}{SET_ASIDE}")
    path.replace(aside)
    fsync_dir(aside.parent)
    ERRORS.emit(1, operation="local tier", error="SetAside")
    log.error("%s is damaged and was set aside as %s: %s", path, aside.name, reason)


def _replace(directory: Path, current: Manifest | None, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    """Swap the stock metadata, then the manifest, then delete what only ``current`` names, by a note a crash leaves.

    An error before the commit puts the stock metadata back: the caller deletes the new shards it would name.
    """
    if current is not None and current.attempt != manifest.attempt:
        note = directory / removal_note(current.attempt)
        make_dirs(note.parent)
        durable_write(note, current.encode())
    try:
        for name in (DRAINED, PASSED, REPLICATED, *(entry.path for entry in manifest.metadata)):
            if (directory / name).is_dir():
                _set_aside(directory / name, "it is a directory")
        for entry in manifest.metadata:
            durable_write(directory / entry.path, metadata[entry.path])
        for name in (DRAINED, PASSED, REPLICATED):
            (directory / name).unlink(missing_ok=True)
        durable_write(directory / MANIFEST, manifest.encode())
    except BaseException:
        with suppress(OSError, TierckptError):  # the first error is the one to tell
            _take_back(directory, current, manifest)
        raise
    try:
        _finish_removal(directory)
    except (OSError, TierckptError) as error:
        # It is committed: the caller must not take this for a failed save and delete its shards. The note stays.
        log.warning("%s: files of the replaced checkpoint stay for now: %s", directory, error)


def _take_back(directory: Path, current: Manifest | None, failed: Manifest) -> None:
    """Undo a commit that was made and could not be made durable: it is reported as failed, and its shards will go."""
    standing = read_local_manifest(directory)
    if standing is not None and standing.attempt == failed.attempt:
        if current is None:
            (directory / MANIFEST).unlink(missing_ok=True)
        else:
            durable_write(directory / MANIFEST, current.encode())
    _put_back(directory, failed)


def _put_back(directory: Path, unfinished: Manifest) -> None:
    """Let stock PyTorch read what stands here again, after a save that got as far as ``.metadata`` and no further.

    Nothing is done when ``unfinished`` is committed after all.
    """
    standing = read_local_manifest(directory)
    if standing is not None and standing.attempt == unfinished.attempt:
        return
    kept = {entry.path: entry for entry in standing.metadata} if standing is not None else {}
    for path in {entry.path for entry in unfinished.metadata} | kept.keys():
        if standing is None or path not in kept:
            (directory / path).unlink(missing_ok=True)
        else:
            durable_write(directory / path, _kept(directory, kept[path], standing))


def forget_local(directory: Path, token: str, manifest: Manifest | None = None) -> bool:
    """Delete the files of one rank's save that never committed, and what points at them.

    Files that the standing manifest names stay, whatever the caller believes of that save; False when there are any.

    Args:
        manifest: what the save was to commit, if it came that far: stock metadata that names it is put back.

    Raises ManifestError when the standing manifest is damaged, so that nobody can know; nothing was deleted.
    """
    if not directory.is_dir():
        return True
    with _locked(directory):
        if manifest is not None:
            _put_back(directory, manifest)
        standing = read_local_manifest(directory)
        if not _names(standing, token):
            _remove_fragment(directory, token)
        named = {entry.key for entry in standing.entries} if standing is not None else set()
        for path in (*matching(directory, f"*-{token}{SHARD_SUFFIX}"), *map(directory.joinpath, private_files(token))):
            if str(path.relative_to(directory)) not in named:
                path.unlink(missing_ok=True)
        return not _names(standing, token)


def is_committed(directory: Path, token: str) -> bool:
    """Whether the local tier has the commit of a save of which ``token`` is a part, or the fragment of that rank."""
    return _names(read_local_manifest(directory), token) or (directory / part(token)).exists()


def _names(standing: Manifest | None, token: str) -> bool:
    return standing is not None and token in standing.tokens | {standing.attempt}


def remove_unfinished(directory: Path, token: str) -> None:
    """Delete the files of one rank's save that has no commit.

    The directory stays: the next save may be at work in it.
    """
    _remove_fragment(directory, token)
    for path in (*matching(directory, f"*-{token}{SHARD_SUFFIX}"), *map(directory.joinpath, private_files(token))):
        path.unlink(missing_ok=True)


def _remove_fragment(directory: Path, token: str) -> None:
    """Before the files that it names: with it and those of the other ranks somebody would commit all of them."""
    fragment = directory / part(token)
    with suppress(FileNotFoundError):
        fragment.unlink()
        fsync_dir(fragment.parent)


def remove_empty(directory: Path) -> None:
    """Remove ``directory`` if nothing of anybody is in it. Hold its lease: who saves makes it before its first file."""
    if (directory / PRIVATE_DIR).is_dir():
        with _locked(directory):
            _remove_empty(directory)


def adopt_local(directory: Path, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    """Record on this node a commit that happened elsewhere, unless a different one stands here."""
    with _locked(directory):
        current = _read_or_set_aside(directory)
        if current is not None and current.attempt == manifest.attempt:
            return
        if current is None or current.attempt in manifest.replaces or is_drained(directory, current.attempt):
            keep_metadata(directory, manifest, metadata)
            _replace(directory, current, manifest, metadata)


def mark_own(directory: Path, token: str) -> None:
    """Note that a rank of this node makes the save ``token``: its files are for peers to copy, and it hears of its
    commit from them. Not durable: losing the note costs a copy."""
    for _ in range(MARK_TRIES):
        with suppress(OSError, TierckptError):
            make_dirs(directory / OWN_DIR)
            (directory / own_file(token)).touch()
            return  # else a commit beside us has taken the empty directory away between the two lines
    log.warning("%s: peers are not told that this node saves it", directory)


def mark_drained(directory: Path, attempt: str) -> None:
    """Note beside the local copy that the shared tier has committed ``attempt``. Losing the note costs one GET."""
    if (directory / PRIVATE_DIR).is_dir():
        durable_write(directory / DRAINED, manifests.seal({"attempt": attempt}))


def is_drained(directory: Path, attempt: str) -> bool:
    """True when the shared tier is known to have ``attempt``. A note that is lost, or damaged, says nothing."""
    try:
        return read_drained(directory) == attempt
    except (ManifestError, StoreError) as error:
        log.warning("%s", error)
        return False


def mark_passed(directory: Path, attempt: str) -> None:
    """Note beside the local copy that ``attempt`` was left undrained and that newer ones stand on this node."""
    if (directory / PRIVATE_DIR).is_dir():
        durable_write(directory / PASSED, manifests.seal({"attempt": attempt}))


def mark_replicated(directory: Path, attempt: str) -> None:
    """Note that all copies of ``attempt`` that this node knows of are whole: older ones are not needed any more."""
    if (directory / PRIVATE_DIR).is_dir():
        durable_write(directory / REPLICATED, manifests.seal({"attempt": attempt}))


def is_replicated(directory: Path, attempt: str) -> bool:
    """True when ``mark_replicated`` was called for ``attempt``. A damaged note says nothing."""
    return _noted(directory / REPLICATED) == attempt


def may_go(directory: Path, attempt: str) -> bool:
    """True when nobody is to drain the local copy of ``attempt`` any more. A damaged note says nothing."""
    return is_drained(directory, attempt) or _noted(directory / PASSED) == attempt


def _noted(path: Path) -> str | None:
    """The attempt that a note is about, None without one. A damaged note says nothing."""
    try:
        data = read_whole(path, manifests.RECORD_BYTES_MAX)
        return str(manifests.unseal(data, DRAINED_FIELDS, where=str(path))["attempt"])
    except ObjectNotFoundError:
        return None
    except (ManifestError, StoreError) as error:
        log.warning("%s", error)
        return None


def read_drained(directory: Path) -> str | None:
    """Return the attempt that was noted as drained, None when none was. Raises ManifestError when damaged."""
    try:
        data = read_whole(directory / DRAINED, manifests.RECORD_BYTES_MAX)
    except ObjectNotFoundError:
        return None
    return str(manifests.unseal(data, DRAINED_FIELDS, where=str(directory / DRAINED))["attempt"])


def stale_files(old: Manifest, new: Manifest) -> list[FileEntry]:
    """Files of ``old`` that ``new`` does not name. Only what a manifest of ours names is ever deleted."""
    kept = {entry.key for entry in new.entries}
    return [entry for entry in old.entries if entry.key not in kept]


def stale_metadata(old: Manifest, new: Manifest) -> list[str]:
    """Stock metadata of ``old`` that ``new`` does not write over: the one was saved with collectives, the other not."""
    kept = {entry.path for entry in new.metadata}
    return [entry.path for entry in old.metadata if entry.path not in kept]


def remove_local(directory: Path, attempt: str | None = None) -> bool:
    """Remove a local checkpoint. Returns False when none stands there, or another attempt than ``attempt``.

    The manifest goes first, by a rename that makes the checkpoint invisible and keeps the list of what is still to go:
    a crash before it leaves the checkpoint whole, one after it a note that ``finish_removal`` works off. Only what the
    manifest names is deleted, so a save to the same id that is under way keeps its files.

    Cost: one fsync for each directory touched, no matter how many files.
    """
    try:
        with _locked(directory):
            manifest = read_local_manifest(directory)
            stands = manifest is not None and attempt in {None, manifest.attempt}
            if manifest is not None and stands:
                note = directory / removal_note(manifest.attempt)
                make_dirs(note.parent)
                (directory / MANIFEST).replace(note)
                fsync_dir(note.parent)
                fsync_dir(directory / PRIVATE_DIR)
            _finish_removal(directory)
            return stands
    except OSError as error:
        raise translate_os_error(error, directory, Tier.LOCAL) from error


def finish_removal(directory: Path) -> bool:
    """Remove what a killed ``remove_local`` left, and empty directories of ours. True when there was such a note."""
    if not (directory / PRIVATE_DIR).is_dir():
        return False
    try:
        with _locked(directory):
            return _finish_removal(directory)
    except OSError as error:
        raise translate_os_error(error, directory, Tier.LOCAL) from error


def _finish_removal(directory: Path) -> bool:
    """Work off every note of a removal, the directory locked. What a standing manifest names stays."""
    standing = read_local_manifest(directory)
    notes = matching(directory / REMOVED_DIR, "*.json")
    for note in notes:
        try:
            gone = _read_manifest(note)
        except ManifestError as error:
            log.warning("%s; what it names stays on the disk", error)
            continue
        doomed = [entry.key for entry in (stale_files(gone, standing) if standing else gone.entries)]
        doomed += [f"{key}.bad" for key in doomed]  # put aside by a restore
        if (directory / OWN_DIR).is_dir():
            doomed += [own_file(token) for token in gone.tokens - (standing.tokens if standing else set())]
        # Durably before the shards, or a power cut could keep it and lose them: stock PyTorch goes by it (P1).
        stock = stale_metadata(gone, standing) if standing else [entry.path for entry in gone.metadata]
        _unlink_all([directory / path for path in stock])
        if standing is None:
            shutil.rmtree(directory / BRINGING, ignore_errors=True)
            doomed += [DRAINED, PASSED, REPLICA, REPLICATED]
            doomed += [f"{PRIVATE_DIR}/{path.name}" for path in matching(directory / PRIVATE_DIR, f"*{SET_ASIDE}")]
        _unlink_all([directory / name for name in doomed] + matching(directory / PARTS_DIR, f"{gone.attempt}-*.json"))
        note.unlink(missing_ok=True)  # last: without it nobody would know what to look for
    _remove_empty(directory)
    return bool(notes)


def _unlink_all(paths: list[Path]) -> None:
    """Remove files, durably. Cost: one fsync for each directory."""
    for path in paths:
        if path.name.endswith(SET_ASIDE) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for parent in {path.parent for path in paths}:
        with suppress(ObjectNotFoundError):  # gone, with its names
            fsync_dir(parent)


def _remove_empty(directory: Path) -> None:
    """Remove our private directory and ``directory`` if nothing is left in them but the lock we hold."""
    private = directory / PRIVATE_DIR
    for empty in PRIVATE_DIRS:
        with suppress(OSError):
            (directory / empty).rmdir()
    names = [path.name for path in (*matching(directory, "*"), *matching(private, "*"))]
    if names != [private.name, "lock"]:
        return  # a save that goes on here, or somebody else's files
    (private / "lock").unlink(missing_ok=True)  # who waits for it finds the name gone and takes another (K3)
    with suppress(OSError):
        private.rmdir()
        directory.rmdir()
        fsync_dir(directory.parent)


@contextmanager
def _closed_quietly() -> Iterator[ExitStack]:
    """Giving up a lock ends with the process at the latest: failing at it is no failure of what was done under it."""
    held = ExitStack()
    try:
        yield held
    finally:
        with suppress(OSError):
            held.close()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory against other processes of this node. What the system refuses inside is told as our errors."""
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    with typed_errors(directory), _closed_quietly() as held:
        while True:
            make_dirs(directory / PRIVATE_DIR)
            try:
                held.enter_context(lock(directory / PRIVATE_DIR / "lock", LOCK_TIMEOUT_SECONDS, str(directory)))
                break
            except FileNotFoundError:  # a removal took the empty directory away between the two lines
                if time.monotonic() > deadline:
                    raise
        yield


# --- shared tier -----------------------------------------------------------------------------------------------


async def commit_shared(store: Store, location: Location, manifest: Manifest) -> None:
    """Commit ``manifest`` on the shared tier, where all its files already are. Idempotent.

    What is put takes the place of exactly what was read before, and of that only what ``replaces`` names: an attempt
    that was committed is never replaced by one that did not see it, whatever comes between.

    Raises:
        AlreadyCommittedError: another attempt owns this id and this one was not told to replace it.
    """
    await _claim(store, location, manifest)
    current, etag = await _read_versioned(store)
    if current is not None and current.attempt not in {manifest.attempt, *manifest.replaces}:
        # Its claim was lost: to a removal that was overtaken, or on a store without conditional puts.
        raise already_committed(location, current.attempt, Tier.SHARED)
    if current is None or current.attempt != manifest.attempt:
        for entry in manifest.metadata:
            data = await store.get(entry.key)
            check_bytes(data, entry, manifest.chunk_size_bytes, store.uri)
            await store.put(entry.path, data)
        if await read_claim(store) != manifest.attempt:
            # A later save has taken the id over since: its manifest must not be covered by ours.
            await _restore_stock_metadata(store, manifest)
            raise already_committed(location, "that replaced this one", Tier.SHARED)
        if current is not None:
            await store.put(removal_note(current.attempt), current.encode())  # for whoever cleans up after a crash
        await _put_manifest(store, location, manifest, etag)
        log.info("committed %s on the shared tier (attempt %s)", location.uri, manifest.attempt)
    if current is not None and current.attempt != manifest.attempt:
        await _remove_stale(store, current, manifest)
    if manifest.replaces:
        await _remove_replaced(store, manifest)
    await store.delete(pending(manifest.attempt))
    for token in manifest.tokens:
        await store.delete(part(token))


async def _read_versioned(store: Store) -> tuple[Manifest | None, str | None]:
    """The manifest that stands, and its etag, which comes first: newer bytes can then only fail a condition."""
    etag = await etag_of(store, MANIFEST)
    current = await read_shared_manifest(store)
    return current, etag if current is not None else None


async def _put_manifest(store: Store, location: Location, manifest: Manifest, etag: str | None) -> None:
    """Put the manifest in the place of the version ``etag``, or where none was (None): a save that overtook us must not
    be covered. One that stood is gone when retention was faster: then it is the same as if none had stood."""
    try:
        if etag is not None:
            try:
                await replace(store, MANIFEST, manifest.encode(), etag)
            except PreconditionFailedError:
                if await read_shared_manifest(store) is not None:
                    raise
                await store.put(MANIFEST, manifest.encode(), if_absent=True)
        else:
            await store.put(MANIFEST, manifest.encode(), if_absent=True)
        if store.has_put_if_absent:
            return
    except PreconditionFailedError:
        pass
    standing = await read_shared_manifest(store)
    if standing is None or standing.attempt != manifest.attempt:
        await _restore_stock_metadata(store, manifest)
        raise already_committed(location, standing.attempt if standing else "unknown", Tier.SHARED)


async def _restore_stock_metadata(store: Store, loser: Manifest) -> None:
    """``loser`` has put its stock metadata over that of an attempt that stands: let stock PyTorch read that again."""
    try:
        standing = await read_shared_manifest(store)
        for entry in standing.metadata if standing is not None and standing.attempt != loser.attempt else ():
            await store.put(entry.path, await store.get(entry.key))
    except (StoreError, ManifestError) as error:  # that it has lost is what its caller must hear
        log.warning("%s: stock PyTorch may not read what stands there: %s", store.uri, error)


async def replace(store: Store, key: str, data: bytes, etag: str | None) -> None:
    """Put ``data`` over the version ``etag`` of ``key``. Raises PreconditionFailedError when that is not there."""
    if isinstance(store, Conditional) and etag is not None:
        await store.replace(key, data, etag=etag)
        return
    await _check_version(store, key, etag)
    await store.put(key, data)


async def remove(store: Store, key: str, etag: str | None) -> bool:
    """Delete the version ``etag`` of ``key``. False when another one is there, which stays."""
    try:
        if isinstance(store, Conditional) and etag is not None:
            await store.remove(key, etag=etag)
        else:
            await _check_version(store, key, etag)
            await store.delete(key)
    except PreconditionFailedError:
        return False
    return True


async def _check_version(store: Store, key: str, etag: str | None) -> None:
    """Look, where there are no conditions: what comes between this and the next request is not seen."""
    try:
        now = (await store.head(key)).etag
    except BucketNotFoundError:
        raise
    except ObjectNotFoundError:
        now = None
    if now != etag:
        raise PreconditionFailedError(f"{store.uri}/{key} has changed", uri=store.uri, key=key)


async def etag_of(store: Store, key: str) -> str | None:
    """The version of ``key`` that stands now, None without one (or without versions)."""
    try:
        return (await store.head(key)).etag
    except BucketNotFoundError:
        raise
    except ObjectNotFoundError:
        return None


async def _remove_replaced(store: Store, manifest: Manifest) -> None:
    """Remove what the replaced attempts left, committed or not: a node that was lost cannot clean up after itself.

    Repeatable, because the manifest remembers whom it replaced. Only names that carry a replaced token are deleted.
    """
    tokens = set(manifest.replaces)
    last = []
    for attempt in manifest.replaces:
        for name in (removal_note(attempt), pending(attempt)):
            try:
                gone = manifests.decode(await store.get(name), where=f"{store.uri}/{name}")
            except (ObjectNotFoundError, ManifestError):
                continue  # it had one rank, or left no trace
            tokens |= gone.tokens
            last.append(name)
            if name == removal_note(attempt):
                await _remove_stale(store, gone, manifest)
    tokens -= manifest.tokens | {manifest.attempt}
    doomed = {name for token in tokens for name in (part(token), pending(token), *private_files(token))} - {*last}
    endings = tuple(f"-{token}{SHARD_SUFFIX}" for token in tokens)
    async for info in store.list():
        if info.key in doomed or info.key.endswith(endings):
            await store.delete(info.key)
    for name in last:  # what says which files are left over goes when they have gone
        await store.delete(name)


async def _remove_stale(store: Store, old: Manifest, new: Manifest) -> None:
    for name in (*stale_metadata(old, new), *(entry.key for entry in stale_files(old, new))):
        await store.delete(name)
    await store.delete(removal_note(old.attempt))


def check_bytes(data: bytes, entry: FileEntry, chunk_size_bytes: int, where: str) -> None:
    """Raise IntegrityError unless ``data`` is the whole of ``entry``."""
    view = memoryview(data)
    good = len(data) == entry.size_bytes and all(
        has_digest(view[chunk.start : chunk.stop], digest) for chunk, digest in entry.chunks(chunk_size_bytes)
    )
    if not good:
        raise IntegrityError(
            f"{entry.key} is not what was saved",
            hint="It was damaged on its way or in the store",
            file=entry.path,
            where=where,
        )


async def _claim(store: Store, location: Location, manifest: Manifest) -> None:
    """Take the id for this attempt: from nobody, or from exactly the holder that was seen and is to be replaced.

    An attempt that it was to replace and that retention has removed meanwhile is nobody: nothing that stands is lost.
    """
    claim = manifests.seal({"attempt": manifest.attempt, "replaces": sorted(manifest.replaces), "uri": store.uri})
    for _ in range(CLAIM_TRIES):
        try:
            await store.put(CLAIM, claim, if_absent=True)
            return
        except PreconditionFailedError:
            pass
        etag = await etag_of(store, CLAIM)
        holder = await read_claim(store)
        if holder == manifest.attempt:
            return  # ours already: an earlier try, or another rank's mover
        if holder is None:
            continue  # a removal took it away between the two requests
        if holder not in manifest.replaces:
            raise already_committed(location, holder, Tier.SHARED)
        try:
            await replace(store, CLAIM, claim, etag)
            return
        except PreconditionFailedError:
            continue  # another save, or a removal, was faster: look again at whose it is
    raise StoreUnavailableError(
        f"the claim of {location.uri} changes faster than it can be read",
        hint="Other saves to this id and removals of it are under way; it is tried again",
        tier=Tier.SHARED,
    )


def already_committed(location: Location, winner: str, tier: Tier) -> AlreadyCommittedError:
    return AlreadyCommittedError(
        f"Checkpoint already exists: {location.uri} belongs to another save (attempt {winner})",
        hint="Nothing of it was touched. Two saves ran for one id and this one lost, or overwrite=False "
        "refuses to replace it. Save to another id, or again with overwrite=True (the default) to replace it",
        tier=tier,
        winner=winner,
    )
