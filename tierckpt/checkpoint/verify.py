"""Verify a checkpoint on every tier that has it: presence and sizes, or every byte."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from ..disk.durable import durable_write, read_record
from ..errors import EndpointError, IntegrityError, ObjectNotFoundError, StoreError, TierckptError
from ..format.layout import CLAIM, DRAINED, MANIFEST, Location, checks_file
from ..format.manifest import FileEntry, Manifest
from ..stores.base import RangeSource, Store
from ..stores.verified_read import LocalFiles, check_file
from ..telemetry import ProgressCounter, ignore_progress, logger
from ..types import Json, ProgressListener, Tier
from . import local_commit, shared_commit
from .catalog import Checkpoint, file_size
from .peer_copies import PeerCopies
from .select import Selector

log = logger("verify")

OnBytes: TypeAlias = Callable[[int], None]
"""Called with the number of bytes read. None: only existence and sizes are checked."""


@dataclass
class VerifyReport:
    """``problems`` maps ``(tier, path)`` to a sentence."""

    checked_files: int = 0
    checked_bytes: int = 0
    read_data: bool = False
    problems: dict[tuple[Tier, str], str] = field(default_factory=dict)
    records: dict[tuple[Tier, str], str] = field(default_factory=dict)
    """Damaged manifest, claim or drained mark: the files may all be good."""
    lost: list[str] = field(default_factory=list)
    """Files with no good copy on any tier."""

    def to_json(self) -> Json:
        found = {**self.records, **self.problems}
        return {
            "checked_files": self.checked_files,
            "checked_bytes": self.checked_bytes,
            "read_data": self.read_data,
            "problems": [{"tier": str(tier), "file": path, "problem": text} for (tier, path), text in found.items()],
            "lost": self.lost,
        }


def record_check(local_root: Path, verb: str, document: Json) -> None:
    """``verb``: verify or drill. Blocking. A lost record is harmless."""
    seen = {name: document[name] for name in ("uri", "good", "seconds") if name in document}
    try:
        body: Json = {**read_checks(local_root), verb: {**seen, "at_unix_seconds": time.time()}}
        durable_write(checks_file(local_root), json.dumps(body).encode())
    except (OSError, TierckptError) as error:
        log.warning("the %s is not noted: %s", verb, error)


def read_checks(local_root: Path) -> Json:
    found = read_record(checks_file(local_root))
    return {verb: row if isinstance(row := found.get(verb), dict) else None for verb in ("verify", "drill")}


async def verify(
    selector: Selector, location: Location, *, read_data: bool, listener: ProgressListener = ignore_progress
) -> tuple[Checkpoint, VerifyReport]:
    """Check every file on each tier that has it, and our records. Reports all problems.

    Cost: three GETs and one HEAD a file; with ``read_data`` every byte of every copy is read once.
    """
    checkpoint, report = await selector.find(location), VerifyReport(read_data=read_data)
    if checkpoint.manifest is None:
        return checkpoint, report
    report.records = await _damaged_records(checkpoint, checkpoint.manifest)
    gate = asyncio.Semaphore(selector.settings.concurrency)
    total = checkpoint.manifest.size_bytes * len(checkpoint.tiers)
    chunk_size = checkpoint.manifest.chunk_size_bytes
    progress = ProgressCounter(listener, f"verify {checkpoint.location.uri}", total)
    progress.add(0)

    async def one(tier: Tier, entry: FileEntry) -> None:
        async with gate:
            try:
                with progress.moving(entry.path, entry.size_bytes) as on_file:
                    on_bytes = on_file if read_data else None
                    if tier is Tier.PEER and checkpoint.elsewhere is not None:
                        await _verify_on_peers(checkpoint.elsewhere, entry, chunk_size, on_bytes)
                    else:
                        await _verify_file(checkpoint, tier, entry, chunk_size, on_bytes)
            except TierckptError as error:
                if error.retryable or isinstance(error, EndpointError):
                    raise  # an unreachable store says nothing about the files
                report.problems[(tier, entry.path)] = str(error)
        report.checked_files += 1
        report.checked_bytes += entry.size_bytes
        if not read_data:
            progress.add(entry.size_bytes)

    # Stock PyTorch reads the metadata under its own name, tierckpt the attempt's copy: both count.
    stock = tuple(replace(entry, source="") for entry in checkpoint.manifest.metadata if entry.source)
    entries = checkpoint.manifest.entries + stock
    if checkpoint.elsewhere is not None:
        await checkpoint.elsewhere.query_files()
    copies = [(tier, entry) for tier in sorted(checkpoint.tiers) for entry in entries]
    await asyncio.gather(*(one(tier, entry) for tier, entry in copies if tier is not Tier.PEER or entry not in stock))
    bad = {path: [tier for tier, name in report.problems if name == path] for _, path in report.problems}
    report.lost = sorted(path for path, tiers in bad.items() if len(tiers) == len(checkpoint.tiers))
    return checkpoint, report


async def _damaged_records(checkpoint: Checkpoint, manifest: Manifest) -> dict[tuple[Tier, str], str]:
    directory, store = checkpoint.directory, checkpoint.store
    committed = Tier.SHARED in checkpoint.tiers
    reads: dict[tuple[Tier, str], Callable[[], Awaitable[Any]]] = {
        (Tier.LOCAL, MANIFEST): lambda: asyncio.to_thread(local_commit.read_local_manifest, directory),
        (Tier.LOCAL, DRAINED): lambda: asyncio.to_thread(local_commit.read_drained, directory),
        (Tier.SHARED, MANIFEST): lambda: _check_shared_manifest(store, directory, manifest),
        (Tier.SHARED, CLAIM): lambda: _check_claim(store, manifest, committed=committed),
    }
    damaged = {}
    for (tier, name), read in reads.items():
        try:
            await read()
        except IntegrityError as error:
            damaged[(tier, name)] = str(error)
        except StoreError:
            # Without a shared tier the files on this node can still be verified.
            if tier in checkpoint.tiers:
                raise
    return damaged


async def _check_shared_manifest(store: Store, directory: Path, manifest: Manifest) -> None:
    shared = await shared_commit.read_shared_manifest(store)
    if (
        shared is not None
        and shared.attempt in manifest.replaces
        and local_commit.is_drained(directory, manifest.attempt)
    ):
        raise IntegrityError(f"{store.uri}/{MANIFEST} is of {shared.attempt}, which was replaced by {manifest.attempt}")


async def _check_claim(store: Store, manifest: Manifest, *, committed: bool) -> None:
    claim = await shared_commit.read_claim(store)
    if committed and claim in (None, *manifest.replaces):
        raise IntegrityError(f"{store.uri}/{CLAIM} names {claim or 'nobody'}; committed is {manifest.attempt}")


async def _verify_file(
    checkpoint: Checkpoint, tier: Tier, entry: FileEntry, chunk_size_bytes: int, on_bytes: OnBytes | None
) -> None:
    source: RangeSource = LocalFiles(checkpoint.directory) if tier is Tier.LOCAL else checkpoint.store
    if tier is Tier.LOCAL:
        size_bytes = await asyncio.to_thread(file_size, checkpoint.directory / entry.key)
    else:
        size_bytes = (await checkpoint.store.head(entry.key)).size_bytes
    where = f"{source.uri}/{entry.key}"
    if size_bytes < 0:
        raise ObjectNotFoundError(f"{where} is missing", file=entry.path)
    if size_bytes != entry.size_bytes:
        raise StoreError(f"{where} has {size_bytes} bytes, the manifest says {entry.size_bytes}", file=entry.path)
    if on_bytes is not None:
        await check_file(source, entry, chunk_size_bytes, on_bytes)


async def _verify_on_peers(
    copies: PeerCopies, entry: FileEntry, chunk_size_bytes: int, on_bytes: OnBytes | None
) -> None:
    """One whole copy may be spread over several nodes."""
    if not (holders := copies.holders(entry)):
        raise ObjectNotFoundError(f"no other node has {entry.path}", file=entry.path)
    for index, (byte_range, _) in enumerate(entry.chunks(chunk_size_bytes) if on_bytes is not None else ()):
        await copies.chunk(holders[0], entry, index)
        if on_bytes is not None:
            on_bytes(byte_range.size_bytes)
