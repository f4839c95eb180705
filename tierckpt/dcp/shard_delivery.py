"""Writes a rank's shards: to the SSD, or by direct put from memory to the shared tier.

T1 and T2 are in docs/internals/commit.md.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .. import torch_internals
from ..arena.slots import write_buffers
from ..cache import space
from ..checkpoint import shared_commit
from ..checkpoint.journal import JournalEntry
from ..client import Client
from ..config import Settings
from ..disk.durable import fsync_dir
from ..disk.io_tuner import WRITE_BYTES_MAX, segment_bytes, write_tuner_for
from ..disk.priority import BACKGROUND_CPU_SHARE, BACKGROUND_NICE, CpuThrottle, flushing
from ..errors import CapacityError, TierckptError
from ..format.layout import Location, shard_name
from ..format.manifest import FileEntry, Flushed
from ..quantities import round_up
from ..read import replicated_file
from ..save import direct_put
from ..save.flush import flush
from ..save.shard_plan import Shard, ShardRecord
from ..telemetry import logger
from ..torch_internals import StorageWriterTransforms
from . import split
from .save_planning import ItemSource, PlannedShards, SaveDescription
from .stager import StagedItems

log = logger("save")

Written: TypeAlias = tuple[list[WriteResult], tuple[FileEntry, ...]]

STREAMED_BYTES = 256 << 20
"""Maximum size of a shard of streamed items, which stays in memory until written."""


@dataclass
class ShardDelivery:
    """Writes the shards of one save of one rank. One thread at a time."""

    client: Client
    settings: Settings
    location: Location
    entry: JournalEntry
    directory: Path
    description: SaveDescription
    is_direct_put: bool = False

    def write(self, planned: PlannedShards, source: ItemSource) -> Written:
        """Write the shards by the description's route, durably. On an error, discard a direct put's uploads."""
        route = "local" if planned.streamed else self.description.route
        if route == "direct put":
            try:
                return planned.results, self._direct_put(planned)
            except (TierckptError, OSError) as error:
                text = "%s cannot go straight to the shared tier, it goes to the SSD: %s"
                log.warning(text, self.location.uri, error)
        shards, results = planned.shards, planned.results
        size_bytes = sum(shard.size_bytes for shard in shards)
        size_bytes += sum(split.size_bytes_of(item.tensor_data) if item.tensor_data else 1 for item in planned.streamed)
        reserved_bytes = sum(lease.ahead.reserved_bytes for lease in planned.leases if lease.ahead is not None)
        try:
            space.make_room(self.settings, size_bytes, self.directory, reserved_bytes=reserved_bytes)
            flushed = self._flush(shards)
            for lease in planned.leases:
                lease.in_place = all(shard.image for shard in shards)
            if planned.streamed:
                names = (shard_name(planned.prefix, number, self.entry.token) for number in count(len(shards)))
                for name, record, more in _streamed_shards(
                    self.description.transforms, names, planned.streamed, source
                ):
                    flushed += self._flush([Shard(self.directory / name, [record])])
                    results = results + more
                    del record  # frees its bytes before the next
            if self.description.sync_files:
                fsync_dir(self.directory)
            return results, self._entries(flushed)
        except CapacityError as error:
            if route != "local if it fits":
                raise
            log.warning("%s goes straight to the shared tier: %s", self.location.uri, error.message)
        for shard in shards:
            shard.path.unlink(missing_ok=True)
        return results, self._direct_put(planned)

    def write_from_memory(self, shards: list[Shard]) -> tuple[FileEntry, ...]:
        """Write to the SSD the shards that a rank left in memory when it ended."""
        for shard in shards:
            shard.path.unlink(missing_ok=True)
        space.make_room(self.settings, sum(shard.size_bytes for shard in shards), self.directory)
        flushed = self._flush(shards, cached=True)
        fsync_dir(self.directory)
        return self._entries(flushed)

    def discard(self, names: Sequence[str]) -> None:
        """Remove shards that no commit will name from the shared tier. Never fails: a leftover does no harm."""
        self.is_direct_put = False
        try:
            self.client.run(shared_commit.discard(self.client.mover.store(self.location), names))
        except TierckptError as error:
            log.warning("%s: shards of a save that failed may be left on the shared tier: %s", self.location.uri, error)

    # --- direct put ---------------------------------------------------------------------------------------------

    def _direct_put(self, planned: PlannedShards) -> tuple[FileEntry, ...]:
        """Send the shards from memory to the shared tier (T1); on an error, discard them there."""
        try:
            chunk, begun = self.settings.chunk_size_bytes, time.monotonic()
            for lease in planned.leases:
                lease.discard_ahead()
            largest = max((shard.size_bytes for shard in planned.shards), default=0)
            slot_bytes = min(chunk, round_up(max(largest, 1)))
            with write_buffers().take(1, slot_bytes, self.settings.commit_timeout_seconds) as [slot]:
                store = self.client.mover.store(self.location)
                flow = self.client.mover.limiter.flow(self.entry.created_unix_seconds)
                flushed = self.client.run(direct_put.send(store, planned.shards, slot, chunk, flow))
            files = self._entries(flushed)
        except BaseException:
            for shard in planned.shards:
                for record in shard.records:
                    record.clear_crcs()  # they may be rewritten
            self.discard([shard.path.name for shard in planned.shards])
            raise
        self.is_direct_put = True
        log.info(
            "%s: %d bytes went straight to shared storage, %.2f s",
            self.location.uri,
            sum(file.size_bytes for file in files),
            time.monotonic() - begun,
        )
        return files

    # --- to the SSD ---------------------------------------------------------------------------------------------

    def _entries(self, flushed: Sequence[Flushed]) -> tuple[FileEntry, ...]:
        token, chunk = self.entry.token, self.entry.chunk_size_bytes
        shards = [FileEntry(f.path.name, f.size_bytes, f.digests, self.description.rank, token) for f in flushed]
        return (*shards, *replicated_file.write_digests(self.directory, flushed, self.description.rank, token, chunk))

    def _flush(self, shards: list[Shard], *, cached: bool = False) -> list[Flushed]:
        settings, size_bytes = self.settings, sum(shard.size_bytes for shard in shards)
        if not shards:
            return []
        tuner = write_tuner_for(self.directory)
        shape = tuner.choose(size_bytes)
        segment = segment_bytes(settings.chunk_size_bytes, WRITE_BYTES_MAX)
        slot_bytes = min(segment, round_up(max(max(shard.size_bytes for shard in shards), 1)))
        timeout = settings.commit_timeout_seconds
        background = threading.current_thread() is not threading.main_thread()
        pace = CpuThrottle(BACKGROUND_CPU_SHARE, shape.threads) if background else CpuThrottle()
        is_begun = any(shard.image is not None and shard.image.ahead is not None for shard in shards)
        # Records in an image need no slot; all others are objects.
        wanted = 1 if any(shard.image is not None for shard in shards) else shape.threads
        with write_buffers().take(wanted, slot_bytes, timeout) as slots:
            begun = time.monotonic()
            with flushing(settings.local_root, size_bytes):
                flushed = flush(
                    shards,
                    slots=slots,
                    shape=shape,
                    chunk_size_bytes=settings.chunk_size_bytes,
                    durable=self.description.sync_files,
                    nice=BACKGROUND_NICE if background else 0,
                    pace=pace,
                    cached=cached,
                    timeout_seconds=timeout,
                )
            if not (pace.has_throttled or cached or is_begun) and len(slots) == wanted:
                tuner.learn(shape, size_bytes, time.monotonic() - begun)
        return flushed


def _streamed_shards(
    transforms: StorageWriterTransforms, names: Iterator[str], items: Sequence[WriteItem], planner: ItemSource
) -> Iterator[tuple[str, ShardRecord, list[WriteResult]]]:
    """Yield name, bytes and DCP's results of each shard of ``items`` that need torch's serialization.

    One shard and one item are in memory.
    """
    name, stream, results = next(names), io.BytesIO(), list[WriteResult]()
    for item in items:
        data = _item_data(item, planner)
        results.append(torch_internals.write_item(transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE))
        if stream.tell() >= STREAMED_BYTES:
            yield name, ShardRecord(0, stream.getbuffer()), results
            name, stream, results = next(names), io.BytesIO(), []
    if results:
        yield name, ShardRecord(0, stream.getbuffer()), results


def _item_data(item: WriteItem, planner: ItemSource) -> Any:
    if item.type is WriteItemType.BYTE_IO:
        return planner.resolve_data(item)
    tensor = planner.tensor(item) if isinstance(planner, StagedItems) else split.resolve(planner, item)
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor.cpu()
    # torch.save writes the whole storage of a view.
    whole = tensor.untyped_storage().size() == tensor.nbytes
    return tensor if whole else tensor.clone()
