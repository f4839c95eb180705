"""Verify a checkpoint on every tier that has it: presence and sizes, or every byte."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import ObjectNotFoundError, StoreError, TierckptError
from ..manifest import FileEntry
from ..stores.base import Store
from ..types import ByteRange, Json, Progress, ProgressListener, Tier
from .catalog import Checkpoint
from .transfer import check


@dataclass
class VerifyReport:
    """Files checked and the problems found. ``problems`` maps ``(tier, path)`` to a sentence."""

    checked_files: int = 0
    checked_bytes: int = 0
    read_data: bool = False
    problems: dict[tuple[Tier, str], str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    """Files with no good copy on any tier."""

    def to_json(self) -> Json:
        return {
            "checked_files": self.checked_files,
            "checked_bytes": self.checked_bytes,
            "read_data": self.read_data,
            "problems": [
                {"tier": str(tier), "file": path, "problem": text} for (tier, path), text in self.problems.items()
            ],
            "lost": self.lost,
        }


async def verify(
    checkpoint: Checkpoint, *, read_data: bool, chunk_size_bytes: int, concurrency: int, listener: ProgressListener
) -> VerifyReport:
    """Check every file of ``checkpoint`` on each tier that claims it. Never stops at the first problem.

    Cost: one HEAD a file; with ``read_data`` every byte of every copy is read once.
    """
    report = VerifyReport(read_data=read_data)
    if checkpoint.manifest is None:
        return report
    gate = asyncio.Semaphore(concurrency)
    total = checkpoint.manifest.size_bytes * len(checkpoint.tiers)  # the stock copy of the metadata is small change
    chunk_size = checkpoint.manifest.chunk_size_bytes

    async def one(tier: Tier, entry: FileEntry) -> None:
        async with gate:
            try:
                if tier is Tier.LOCAL:
                    await _verify_local(checkpoint.directory / entry.key, entry, chunk_size, read_data)
                else:
                    await _verify_shared(checkpoint.store, entry, chunk_size, read_data)
            except TierckptError as error:
                if error.retryable:
                    raise  # a store that is away says nothing about the files
                report.problems[(tier, entry.path)] = str(error)
        report.checked_files += 1
        report.checked_bytes += entry.size_bytes
        listener(Progress(f"verify {checkpoint.location.uri}", report.checked_bytes, total))

    # Stock PyTorch reads the metadata under its own name, tierckpt the attempt's copy: both count.
    stock = tuple(replace(entry, source="") for entry in checkpoint.manifest.metadata if entry.source)
    entries = checkpoint.manifest.entries + stock
    await asyncio.gather(*(one(tier, entry) for tier in sorted(checkpoint.tiers) for entry in entries))
    bad = {path: [tier for tier, name in report.problems if name == path] for _, path in report.problems}
    report.lost = sorted(path for path, tiers in bad.items() if len(tiers) == len(checkpoint.tiers))
    return report


async def _verify_local(path: Path, entry: FileEntry, chunk_size_bytes: int, read_data: bool) -> None:
    size = await asyncio.to_thread(lambda: path.stat().st_size if path.exists() else -1)
    _expect_size(size, entry, str(path))
    if not read_data:
        return
    file = await asyncio.to_thread(path.open, "rb", buffering=0)
    with file:
        for byte_range, digest in entry.chunks(chunk_size_bytes):
            data = await asyncio.to_thread(file.read, byte_range.size_bytes)
            await check(data or b"", digest, entry, byte_range, Tier.LOCAL, str(path))


async def _verify_shared(store: Store, entry: FileEntry, chunk_size_bytes: int, read_data: bool) -> None:
    _expect_size((await store.head(entry.key)).size_bytes, entry, f"{store.uri}/{entry.key}")
    if not read_data:
        return
    for byte_range, digest in entry.chunks(chunk_size_bytes):
        data = await store.get_range(entry.key, ByteRange(byte_range.start, byte_range.stop))
        await check(data, digest, entry, byte_range, Tier.SHARED, store.uri)


def _expect_size(size_bytes: int, entry: FileEntry, where: str) -> None:
    if size_bytes < 0:
        raise ObjectNotFoundError(f"{where} is missing", file=entry.path)
    if size_bytes != entry.size_bytes:
        raise StoreError(f"{where} has {size_bytes} bytes, the manifest says {entry.size_bytes}", file=entry.path)
