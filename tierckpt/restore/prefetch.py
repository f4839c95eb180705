"""Prefetch: puts a checkpoint, a model or any files on this node before they are needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cache.file_set import Receipt
from ..cache.hub_layout import check_hub_cache, fill_hub_cache, hub_of
from ..cache.node_cache import CacheCheck, ResolvedUri, retry_until_available
from ..cache.prefetch import ALL_FILES, FileFilter, PrefetchResult, check_size, fill_directory
from ..cache.reuse import CopySource
from ..cache.space import AdmissionPlan, plan_prefetch
from ..checkpoint.catalog import Checkpoint
from ..client import Client
from ..config import Settings
from ..disk import read_lease
from ..disk.durable import refuse_file
from ..errors import ConfigError
from ..format.layout import Location, parse_uri
from ..format.uris import local_path
from ..mover import Mover
from ..read.replicated_file import NearestSource
from ..stores.hub.api import hub_cache
from ..stores.schemes import check_location
from ..telemetry import ignore_progress
from ..tracebacks import short_traceback
from ..types import ProgressListener, Tier
from . import restore


@dataclass(frozen=True, slots=True)
class PrefetchRequest:
    location: Location
    directory: Path | None = None
    files: FileFilter = ALL_FILES
    pin: bool = False
    keep: bool = False
    """Protect it from eviction while this process lives."""
    hf_cache: bool = False
    size_bytes_max: int | None = None
    wait_seconds: float | None = None

    def target_directory(self, mover: Mover, resolved: ResolvedUri) -> Path | None:
        """Return None for the node cache, also for an adopted checkpoint."""
        manifest = resolved.manifest
        is_ours = manifest is not None and not resolved.is_filtered and not manifest.adopted_dirs
        return self.directory or (mover.directory(resolved.location) if is_ours else None)


@short_traceback
def prefetch(
    uri: str | os.PathLike[str],
    to: str | os.PathLike[str] | None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    pin: bool = False,
    wait_seconds: float | None = None,
    hf_cache: bool = False,
    settings: Settings | None = None,
    listener: ProgressListener = ignore_progress,
    **overrides: Any,
) -> Path:
    """Fill a directory of this node with a checkpoint or the files of a model; return the directory.

    On return, every file is present, complete and durable. Until then the directory does not exist, or has no receipt.
    A killed prefetch is resumed; processes of a node that request the same files share the work. The files are not
    evicted while this process lives.

    Args:
        to: the directory. Default: the node cache; for a tierckpt checkpoint the local tier.
        include: globs of paths under ``uri``; none means all. ``*`` matches slashes too.
        exclude: globs of files to leave out.
        pin: keep it in the node cache until it is unpinned; other versions of ``uri`` are unpinned.
        wait_seconds: maximum wait for files that are missing or not committed. None: raise an error.
        hf_cache: for ``hf://org/name``: fill the Hugging Face cache (``HF_HUB_CACHE``, or ``to``), where
            ``from_pretrained("org/name")`` finds it. Returns the snapshot's directory.
        settings: ``overrides`` replace single fields of it (``local_root=...``).
        listener: called as bytes arrive, on the client's thread; it must not block.

    Raises:
        PartialTransferError: some files could not be fetched; ``.failures`` names them.
        CheckpointNotFoundError, ObjectNotFoundError, UncommittedCheckpointError: nothing usable at ``uri``.
        CapacityError: the files do not fit on the disk; nothing was fetched.
        IntegrityError, StoreError, ConfigError: damage, a failed request, an invalid setting.
        OperationTimeoutError: ``wait_seconds`` have passed.
    Cost: each byte is read from shared storage once per cluster.

    Example:
        >>> save_file({"weight": torch.ones(4)}, "model.safetensors")
        >>> directory = tierckpt.prefetch(pathlib.Path.cwd(), to="copy", include=["*.safetensors"])
        >>> tierckpt.load_safetensors(directory)["weight"].sum().item()
        4.0
    """
    request = PrefetchRequest(
        check_location(parse_uri(uri)),
        local_path(to, "to") if to is not None else None,
        FileFilter(_globs(include), _globs(exclude)),
        pin=pin,
        keep=True,
        hf_cache=hf_cache,
        wait_seconds=wait_seconds,
    )
    with contextlib.closing(Client(Settings.load(settings, **overrides), listener)) as client:
        return client.run(fetch(client.mover, request)).directory


def _globs(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def fetch(mover: Mover, request: PrefetchRequest) -> Coroutine[Any, Any, PrefetchResult]:
    """Raises the errors of ``tierckpt.prefetch``."""
    if request.wait_seconds is None:
        return _fetch(mover, request)
    return retry_until_available(lambda: _fetch(mover, request), request.wait_seconds, request.location.uri)


async def _fetch(mover: Mover, request: PrefetchRequest) -> PrefetchResult:
    location = request.location
    if request.directory is not None:
        await asyncio.to_thread(refuse_file, request.directory)
    resolved, checkpoint = await _freeze(mover, request)
    check_size(resolved.frozen, request.size_bytes_max)
    target = (
        (request.directory or hub_cache()).absolute() if request.hf_cache else request.target_directory(mover, resolved)
    )
    if target is None:
        return await mover.node_cache.fill(resolved, pin=request.pin, keep=request.keep)
    if request.pin:
        raise ConfigError(
            "a Hugging Face cache has no pins"
            if request.hf_cache
            else f"{location.uri} is a tierckpt checkpoint: it goes to the local tier, which has no pins",
            hint="Omit --pin (retention keeps a checkpoint), or use a separate directory with --to",
        )
    if location.scheme == "file" and target.absolute() == Path(location.path):
        raise ConfigError(f"{target} is both source and target of the prefetch", hint="Use another --to")
    with contextlib.ExitStack() as leases:
        local_copies = await asyncio.to_thread(_local_copies, mover, resolved, target, leases)
        common: dict[str, Any] = {
            "chunk_size_bytes": (local_copies[-1][1] if local_copies else resolved).frozen.chunk_size_bytes,
            "concurrency": mover.settings.concurrency * 2,
            "listener": mover.listener,
            "peer_join": mover.sharing,
            "stall_seconds": mover.node_cache.stall_seconds,
            "copy_sources": local_copies,
        }
        files = resolved.frozen.files
        if request.hf_cache:
            return await fill_hub_cache(hub_of(resolved.store), files, target, **common)
        nearest = NearestSource(resolved.store, checkpoint.elsewhere) if checkpoint is not None else resolved.store
        result = await fill_directory(nearest, files, target, files=request.files, **common)
    if resolved.manifest is not None and request.directory is None:
        tiers = frozenset({Tier.SHARED})
        await restore.adopt(checkpoint or Checkpoint(location, resolved.manifest, target, resolved.store, tiers))
    return result


async def check(mover: Mover, request: PrefetchRequest) -> CacheCheck:
    """In a Hugging Face cache it reads every byte."""
    if request.hf_cache:
        resolved = await mover.node_cache.freeze(request.location, files=request.files)
        cache = (request.directory or hub_cache()).absolute()
        return await check_hub_cache(hub_of(resolved.store), resolved.frozen, cache)
    return await mover.node_cache.check_at(
        request.location, lambda resolved: request.target_directory(mover, resolved), request.files
    )


async def plan(mover: Mover, request: PrefetchRequest) -> AdmissionPlan | None:
    """Return None if ``request`` does not go to the cache."""
    resolved = await mover.node_cache.freeze(request.location, files=request.files)
    if request.target_directory(mover, resolved) is not None:
        return None
    return await asyncio.to_thread(plan_prefetch, mover.node_cache.pool, resolved.frozen)


def _local_copies(mover: Mover, resolved: ResolvedUri, target: Path, leases: contextlib.ExitStack) -> list[CopySource]:
    copies = mover.node_cache.copy_sources(resolved, leases)
    if resolved.manifest is None:
        return copies
    directory = mover.directory(resolved.location)
    if directory != target:
        leases.enter_context(read_lease.reading(mover.settings.local_root, directory))
        copies.append((directory, Receipt(resolved.frozen, tuple(item.digests for item in resolved.frozen.files))))
    return [one for one in copies if one[1].frozen.chunk_size_bytes == resolved.frozen.chunk_size_bytes]


async def _freeze(mover: Mover, request: PrefetchRequest) -> tuple[ResolvedUri, Checkpoint | None]:
    location = request.location
    if mover.peers is not None and location.name in await mover.peers.committed(location.parent):
        checkpoint = await mover.selector.find(location)
        if checkpoint.manifest is not None and checkpoint.elsewhere is not None:
            await checkpoint.elsewhere.query_files()
            resolve = mover.node_cache.resolve_checkpoint
            return resolve(location, checkpoint.store, checkpoint.manifest, request.files), checkpoint
    return await mover.node_cache.freeze(location, files=request.files), None
