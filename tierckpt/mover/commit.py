"""The commit on each tier: the only code that makes a checkpoint visible, or takes it away.

Local tier, under a flock on the checkpoint directory:
    1. every shard is already durable under a name no commit has used (P3)
    2. the attempt's metadata is written under a name of its own, fsynced
    3. ``.metadata`` is swapped by rename: stock PyTorch now reads the new checkpoint, all of whose files are durable
    4. ``manifest.json`` is swapped by rename: now it is committed
A crash before 4 leaves the old manifest, which names the old attempt's own files; nothing it names was touched.

Shared tier, where there are no locks and no rename:
    1. shards, the attempt's metadata and one part record per rank are put under names of their own
    2. ``claim.json`` is put if absent: the one arbiter between saves that race for an id. An attempt may take over a
       claim only from the attempts it was told to replace
    3. ``.metadata``, then ``manifest.json``: now it is committed
Every step is idempotent for one attempt, so whichever mover comes last, or comes back after a crash, repeats them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .. import manifest as manifests
from ..errors import (
    AlreadyCommittedError,
    BucketNotFoundError,
    IntegrityError,
    ManifestError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from ..layout import (
    CLAIM,
    DRAINED,
    MANIFEST,
    PARTS_DIR,
    PRIVATE_DIR,
    SHARD_SUFFIX,
    Location,
    attempt_metadata,
    part,
    pending,
)
from ..manifest import Digester, FileEntry, Manifest
from ..stores.base import Store
from ..stores.local import durable_write, make_dirs
from ..telemetry import logger
from ..types import Tier
from .lock import lock

log = logger("commit")

LOCK_TIMEOUT_SECONDS = 60.0


def read_local_manifest(directory: Path) -> Manifest | None:
    """Return the manifest committed in a local checkpoint directory, None when there is none.

    Raises ManifestError when there is one and it is damaged.
    """
    try:
        data = Path(directory, MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return manifests.decode(data, where=str(directory / MANIFEST))


async def read_shared_manifest(store: Store) -> Manifest | None:
    try:
        data = await store.get(MANIFEST)
    except BucketNotFoundError:
        raise  # a place that does not exist is not an empty place
    except ObjectNotFoundError:
        return None
    return manifests.decode(data, where=f"{store.uri}/{MANIFEST}")


async def replaced_by_claim(store: Store) -> frozenset[str]:
    """Return the attempts that the holder of the claim was told to replace: an attempt among them is superseded."""
    try:
        return frozenset(json.loads(await store.get(CLAIM)).get("replaces", ()))
    except ObjectNotFoundError:
        return frozenset()


async def read_claim(store: Store) -> str | None:
    """Return the attempt that owns this id on the shared tier, None when nobody has claimed it."""
    try:
        return str(json.loads(await store.get(CLAIM))["attempt"])
    except BucketNotFoundError:
        raise
    except ObjectNotFoundError:
        return None


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
        parts = sorted((directory / PARTS_DIR).glob(f"{fragment.attempt}-*.json"))
        if len(parts) < fragment.world_size:
            return None
        whole = manifests.merge([manifests.decode(path.read_bytes(), where=str(path)) for path in parts])
        _publish(directory, location, whole, {e.path: (directory / e.key).read_bytes() for e in whole.metadata})
        for path in parts:
            path.unlink(missing_ok=True)
        return whole


def keep_metadata(directory: Path, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    """Write the attempt's own copy of its metadata. Invisible: no commit names it yet."""
    for entry in manifest.metadata:
        make_dirs((directory / entry.key).parent)
        durable_write(directory / entry.key, metadata[entry.path])


def _publish(directory: Path, location: Location, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    current = read_local_manifest(directory)
    if current is not None and current.attempt != manifest.attempt and current.attempt not in manifest.replaces:
        raise already_committed(location, current.attempt, Tier.LOCAL)
    for entry in manifest.metadata:
        durable_write(directory / entry.path, metadata[entry.path])
    (directory / DRAINED).unlink(missing_ok=True)
    durable_write(directory / MANIFEST, manifest.encode())
    if current is not None:
        remove_local_files(directory, stale_files(current, manifest))


def adopt_local(directory: Path, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    """Record on this node a commit that happened elsewhere, unless a different one stands here."""
    with _locked(directory):
        current = read_local_manifest(directory)
        if current is not None and current.attempt == manifest.attempt:
            return
        if current is None or current.attempt in manifest.replaces or is_drained(directory, current.attempt):
            keep_metadata(directory, manifest, metadata)
            for entry in manifest.metadata:
                durable_write(directory / entry.path, metadata[entry.path])
            durable_write(directory / MANIFEST, manifest.encode())
            if current is not None:
                remove_local_files(directory, stale_files(current, manifest))


def mark_drained(directory: Path, attempt: str) -> None:
    """Note beside the local copy that the shared tier has committed ``attempt``. Losing the note costs one GET."""
    if (directory / PRIVATE_DIR).is_dir():
        durable_write(directory / DRAINED, json.dumps({"attempt": attempt}).encode())


def is_drained(directory: Path, attempt: str) -> bool:
    try:
        return bool(json.loads((directory / DRAINED).read_bytes())["attempt"] == attempt)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def stale_files(old: Manifest, new: Manifest) -> list[FileEntry]:
    """Files of ``old`` that ``new`` does not name. Only what a manifest of ours names is ever deleted."""
    kept = {entry.key for entry in new.entries}
    return [entry for entry in old.entries if entry.key not in kept]


def remove_local_files(directory: Path, entries: list[FileEntry]) -> None:
    for entry in entries:
        (directory / entry.key).unlink(missing_ok=True)


def remove_local(directory: Path) -> None:
    """Remove a local checkpoint: manifest first, so that a crash in the middle leaves it invisible, never half."""
    with _locked(directory):
        manifest = read_local_manifest(directory)
        (directory / MANIFEST).unlink(missing_ok=True)
        if manifest is not None:
            remove_local_files(directory, list(manifest.entries))
            for entry in manifest.metadata:
                (directory / entry.path).unlink(missing_ok=True)
        for path in sorted((directory / PRIVATE_DIR).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        for empty in (directory / PRIVATE_DIR, directory):
            try:
                empty.rmdir()
            except OSError:
                break  # somebody else's files are in it: leave them


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory against other processes of this node."""
    make_dirs(directory / PRIVATE_DIR)
    with lock(directory / PRIVATE_DIR / "lock", LOCK_TIMEOUT_SECONDS, str(directory)):
        yield


# --- shared tier -----------------------------------------------------------------------------------------------


async def commit_shared(store: Store, location: Location, manifest: Manifest) -> None:
    """Commit ``manifest`` on the shared tier, where all its files already are. Idempotent.

    Raises:
        AlreadyCommittedError: another attempt owns this id and this one was not told to replace it.
    """
    await _claim(store, location, manifest)
    current = await read_shared_manifest(store)
    if current is None or current.attempt != manifest.attempt:
        for entry in manifest.metadata:
            data = await store.get(entry.key)
            check_bytes(data, entry, manifest.chunk_size_bytes, store.uri)
            await store.put(entry.path, data)
        if await read_claim(store) != manifest.attempt:
            # A later save has taken the id over since: its manifest must not be covered by ours.
            raise already_committed(location, "that replaced this one", Tier.SHARED)
        await _put_manifest(store, location, manifest, is_first=current is None)
        log.info("committed %s on the shared tier (attempt %s)", location.uri, manifest.attempt)
    if current is not None and current.attempt != manifest.attempt:
        for entry in stale_files(current, manifest):
            await store.delete(entry.key)
    if manifest.replaces:
        await _remove_replaced(store, manifest)
    await store.delete(pending(manifest.attempt))
    for token in manifest.tokens:
        await store.delete(part(token))


async def _put_manifest(store: Store, location: Location, manifest: Manifest, *, is_first: bool) -> None:
    """Put the manifest; where none stood, only if none stands now: a save that overtook us must not be covered."""
    try:
        await store.put(MANIFEST, manifest.encode(), if_absent=is_first)
    except PreconditionFailedError:
        standing = await read_shared_manifest(store)
        if standing is None or standing.attempt != manifest.attempt:
            raise already_committed(location, standing.attempt if standing else "unknown", Tier.SHARED) from None


async def _remove_replaced(store: Store, manifest: Manifest) -> None:
    """Remove what the replaced attempts left, committed or not: a node that was lost cannot clean up after itself.

    Repeatable, because the manifest remembers whom it replaced. Only names that carry a replaced token are deleted.
    """
    tokens = set(manifest.replaces)
    for attempt in manifest.replaces:
        try:
            tokens |= manifests.decode(await store.get(pending(attempt)), where=pending(attempt)).tokens
        except (ObjectNotFoundError, ManifestError):
            pass  # it had one rank, or left no trace
    tokens -= manifest.tokens | {manifest.attempt}
    doomed = {name for token in tokens for name in (part(token), pending(token), attempt_metadata(token))}
    endings = tuple(f"-{token}{SHARD_SUFFIX}" for token in tokens)
    async for info in store.list():
        if info.key in doomed or info.key.endswith(endings):
            await store.delete(info.key)


def check_bytes(data: bytes, entry: FileEntry, chunk_size_bytes: int, where: str) -> None:
    """Raise IntegrityError unless ``data`` is the whole of ``entry``."""
    digester = Digester(chunk_size_bytes)
    digester.update(data)
    if digester.finish() != entry.digests:
        raise IntegrityError(
            f"{entry.key} is not what was saved",
            hint="It was damaged on its way or in the store",
            file=entry.path,
            where=where,
        )


async def _claim(store: Store, location: Location, manifest: Manifest) -> None:
    claim = json.dumps({"attempt": manifest.attempt, "replaces": sorted(manifest.replaces)}).encode()
    try:
        await store.put(CLAIM, claim, if_absent=True)
        return
    except PreconditionFailedError:
        pass
    holder = await read_claim(store)
    if holder == manifest.attempt:
        return  # ours already: an earlier try, or another rank's mover
    if holder is not None and holder not in manifest.replaces:
        raise already_committed(location, holder, Tier.SHARED)
    # We were started to replace exactly this holder. Two attempts that replace the same one race here without a
    # store-side condition; the reader is safe either way, because whichever manifest is last names its own files.
    await store.put(CLAIM, claim)


def already_committed(location: Location, winner: str, tier: Tier) -> AlreadyCommittedError:
    return AlreadyCommittedError(
        f"{location.uri} belongs to another save (attempt {winner})",
        hint="Two saves ran for one id and this one lost, or the id was taken with overwrite=False; nothing of the "
        "other save was touched. Save to another id, or start the save again to replace it",
        tier=tier,
        winner=winner,
    )
