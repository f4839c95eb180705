"""The commit on the shared tier, which has no locks and no rename.

    1. shards, the attempt's metadata and one part record per rank are put under unique names
    2. ``claim.json`` is put if absent, or over exactly the claim that was read, whose attempt it replaces. It decides
       between saves that race for an id
    3. ``.metadata``, then ``manifest.json``, under the same conditions: now it is committed
Every step is idempotent for one attempt, so any mover may repeat them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ..errors import (
    AlreadyCommittedError,
    ManifestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
)
from ..format import manifest as manifests
from ..format.layout import (
    CLAIM,
    MANIFEST,
    SHARD_SUFFIX,
    Location,
    adopted_dir,
    part,
    pending,
    private_files,
    removal_note,
    step_of,
)
from ..format.manifest import FileEntry, Manifest, stale_files, stale_metadata
from ..stores.base import Conditional, Store
from ..stores.verified_read import check_bytes, if_present, stored_bytes, verified
from ..telemetry import logger
from ..types import Json, Tier
from . import branches

log = logger("commit")

CLAIM_TRIES = 8
CLAIM_FIELDS = frozenset({"attempt", "replaces"})
CLAIM_NEWER = frozenset({"uri", branches.NOTE})


async def read_shared_manifest(store: Store) -> Manifest | None:
    return await if_present(read_manifest_at(store, MANIFEST))


async def read_manifest_at(store: Store, key: str) -> Manifest:
    async def read() -> Manifest:
        return manifests.decode(await store.get(key), where=f"{store.uri}/{key}")

    return await verified(store, read)


async def replaced_by_claim(store: Store) -> frozenset[str]:
    claim = await _read_claim(store)
    return frozenset(claim["replaces"]) if claim else frozenset()


async def is_abandoned(store: Store, location: Location, manifest: Manifest) -> bool:
    """Return True if the owner of this id belongs to a job that abandoned ``manifest`` (B5)."""
    branch, claim = branches.branch_of(manifest, location.name), await _read_claim(store)
    holder = branches.parse(claim.get(branches.NOTE)) if claim else None
    return holder is not None and holder.order > branch.order and not holder.holds(branch, step_of(location.name))


async def read_claim(store: Store) -> str | None:
    """Raises ManifestError for a damaged claim: no attempt may take it over."""
    claim = await _read_claim(store)
    return str(claim["attempt"]) if claim else None


async def current_attempts(store: Store) -> set[str]:
    """Return the owners of this id, which a new save may replace: the claim's holder and the committed attempt."""
    found: set[str] = set()
    for read in (read_claim, read_shared_manifest):
        try:
            owner = await read(store)
        except ManifestError as error:
            log.warning("%s; a save that begins now will not replace it", error)
            continue
        if owner is not None:
            found.add(owner.attempt if isinstance(owner, Manifest) else owner)
    return found


async def _read_claim(store: Store) -> Json | None:
    """The claim names its URI, because no digest in it would reveal a wrong answer of the store.

    Another URI is believed if it comes twice: the checkpoint was copied, or the mount has another name.
    """
    where = f"{store.uri}/{CLAIM}"
    from_elsewhere: Json | None = None

    async def read() -> Json:
        nonlocal from_elsewhere
        claim = manifests.unseal(
            await store.get(CLAIM),
            CLAIM_FIELDS,
            where=where,
            newer=CLAIM_NEWER,
            size_bytes_max=manifests.MANIFEST_BYTES_MAX,
        )
        if not manifests.is_token(claim["attempt"]) or not manifests.is_tokens(claim["replaces"]):
            raise ManifestError(f"{where}: it names no attempt", hint="The claim was not written by tierckpt")
        if claim.get("uri", store.uri) != store.uri:
            from_elsewhere = claim
            raise ManifestError(f"{where} was written for {claim['uri']!r}")
        return claim

    try:
        return await if_present(verified(store, read))
    except ManifestError:
        if from_elsewhere is None:
            raise
        return from_elsewhere


async def commit_shared(store: Store, location: Location, manifest: Manifest) -> float | None:
    """Commit ``manifest`` on the shared tier, where all its files already are. Idempotent.

    Returns the time of the commit (Unix seconds), None if an earlier call had made it. Each put replaces exactly the
    version read before. Raises AlreadyCommittedError if another attempt owns this id and this one does not replace it.
    """
    await put_claim(store, location, manifest)
    current, etag = await _read_versioned(store)
    committed_at = None
    if current is not None and not branches.may_replace(manifest, current, location.name):
        # Its claim was lost to an overtaken removal, or on a store without conditional puts.
        raise already_committed(location, current.attempt, Tier.SHARED)
    if current is None or current.attempt != manifest.attempt:
        for entry in manifest.metadata:
            data = await store.get(entry.key)
            check_bytes(data, entry, manifest.chunk_size_bytes, store.uri)
            await store.put(entry.path, data)
        if await read_claim(store) != manifest.attempt:
            # A later save owns the id: our manifest must not cover its manifest.
            await _restore_stock_metadata(store, manifest)
            raise already_committed(location, "that replaced this one", Tier.SHARED)
        if current is not None:
            await store.put(removal_note(current.attempt), current.encode())
        await _put_manifest(store, location, manifest, etag)
        committed_at = time.time()
        log.debug("committed %s on the shared tier (attempt %s)", location.uri, manifest.attempt)
    if current is not None and current.attempt != manifest.attempt:
        await _remove_stale(store, current, manifest)
    if manifest.replaces:
        await _remove_replaced(store, manifest)
    await store.delete(pending(manifest.attempt))
    for token in manifest.tokens:
        await store.delete(part(token))
    return committed_at


async def _read_versioned(store: Store) -> tuple[Manifest | None, str | None]:
    """The etag is read first: newer bytes then only fail a condition."""
    etag = await etag_of(store, MANIFEST)
    current = await read_shared_manifest(store)
    return current, etag if current is not None else None


async def _put_manifest(store: Store, location: Location, manifest: Manifest, etag: str | None) -> None:
    """Put the manifest over the version ``etag`` (None, or removed meanwhile: over none)."""
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
    committed = await read_shared_manifest(store)
    if committed is None or committed.attempt != manifest.attempt:
        await _restore_stock_metadata(store, manifest)
        raise already_committed(location, committed.attempt if committed else "unknown", Tier.SHARED)


async def _restore_stock_metadata(store: Store, loser: Manifest) -> None:
    try:
        committed = await read_shared_manifest(store)
        for entry in committed.metadata if committed is not None and committed.attempt != loser.attempt else ():
            await store.put(entry.path, await store.get(entry.key))
    except (StoreError, ManifestError) as error:  # the caller must see the lost race
        log.warning("%s: stock PyTorch may not be able to read the checkpoint: %s", store.uri, error)


async def replace(store: Store, key: str, data: bytes, etag: str | None) -> None:
    """Raises PreconditionFailedError without the version ``etag``."""
    if isinstance(store, Conditional) and etag is not None:
        await store.replace(key, data, etag=etag)
        return
    await _check_version(store, key, etag)
    await store.put(key, data)


async def remove(store: Store, key: str, etag: str | None) -> bool:
    """Delete the version ``etag`` of ``key``. Returns False if another version exists; it stays."""
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
    if await etag_of(store, key) != etag:
        raise PreconditionFailedError(f"{store.uri}/{key} has changed", uri=store.uri, key=key)


async def etag_of(store: Store, key: str) -> str | None:
    found = await if_present(store.head(key))
    return found.etag if found is not None else None


async def _remove_replaced(store: Store, manifest: Manifest) -> None:
    """Remove the files of the replaced attempts, committed or not: a lost node cannot clean up after itself.

    Idempotent, because the manifest names them. Only names with a replaced token are deleted.
    """
    tokens = set(manifest.replaces)
    last = []
    for attempt in manifest.replaces:
        for name in (removal_note(attempt), pending(attempt)):
            try:
                replaced = manifests.decode(await store.get(name), where=f"{store.uri}/{name}")
            except (ObjectNotFoundError, ManifestError):
                continue
            tokens |= replaced.tokens
            last.append(name)
            if name == removal_note(attempt):
                await _remove_stale(store, replaced, manifest)
    tokens -= manifest.tokens | {manifest.attempt}
    doomed = {name for token in tokens for name in (part(token), pending(token), *private_files(token))} - {*last}
    endings = tuple(f"-{token}{SHARD_SUFFIX}" for token in tokens)
    adopted = tuple(f"{adopted_dir(token)}/" for token in tokens)
    async for info in store.list():
        if info.key in doomed or info.key.endswith(endings) or info.key.startswith(adopted):
            await store.delete(info.key)
    for name in last:  # the list of leftover files is deleted after them
        await store.delete(name)


async def _remove_stale(store: Store, old: Manifest, new: Manifest) -> None:
    for name in (*stale_metadata(old, new), *(entry.key for entry in stale_files(old, new))):
        await store.delete(name)
    for directory in old.adopted_dirs:
        await store.delete_dir(directory)
    await store.delete(removal_note(old.attempt))


async def put_claim(store: Store, location: Location, manifest: Manifest) -> None:
    """Take the id, if it is free or held by exactly the holder that was read and is to be replaced.

    A removed attempt, or an unseen one of an abandoned branch (B5), does not count.
    """
    body = {"attempt": manifest.attempt, "replaces": sorted(manifest.replaces), "uri": store.uri}
    if branches.NOTE in manifest.notes:
        body[branches.NOTE] = str(manifest.notes[branches.NOTE])
    claim = manifests.seal(body)
    for _ in range(CLAIM_TRIES):
        try:
            await store.put(CLAIM, claim, if_absent=True)
            return
        except PreconditionFailedError:
            pass
        etag = await etag_of(store, CLAIM)
        current = await _read_claim(store)
        if current is None:
            continue  # a removal took it away between the two requests
        holder = str(current["attempt"])
        if holder == manifest.attempt:
            return
        if holder not in manifest.replaces and not branches.replaces_abandoned(
            manifest, branches.parse(current.get(branches.NOTE)), location.name
        ):
            raise already_committed(location, holder, Tier.SHARED)
        try:
            await replace(store, CLAIM, claim, etag)
            return
        except PreconditionFailedError:
            continue
    raise StoreUnavailableError(
        f"the claim of {location.uri} changes faster than it can be read",
        hint="Other saves to this id and removals of it are under way; it is tried again",
        tier=Tier.SHARED,
    )


def already_committed(location: Location, winner: str, tier: Tier) -> AlreadyCommittedError:
    return AlreadyCommittedError(
        f"Checkpoint already exists: {location.uri} belongs to another save (attempt {winner})",
        hint="Its files are unchanged. Two saves ran for one id and this one lost, or overwrite=False "
        "refuses to replace it. Save to another id, or again with overwrite=True (the default) to replace it",
        tier=tier,
        winner=winner,
    )


async def has_file(store: Store, file: FileEntry) -> bool:
    return await stored_bytes(store, file.key) == file.size_bytes


async def discard(store: Store, names: Iterable[str]) -> None:
    for name in names:
        await store.delete(name)
