"""Writes a rank's shards: to the SSD, or by direct put from memory to the shared tier. Decided in drain_decider.py.

T1 and T2 are in docs/internals/commit.md: a shard that was put directly is named by the same manifest as any other, and
one that cannot be goes to the SSD.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, TypeAlias

from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ..arena.slots import Lease, write_buffers
from ..cache import space
from ..checkpoint.journal import Entry
from ..client import Client
from ..config import Settings
from ..disk.cpu_throttle import BACKGROUND_CPU_SHARE, CpuThrottle
from ..disk.durable import fsync_dir
from ..disk.flush_lock import flushing
from ..disk.io_tuner import WRITE_BYTES_MAX, segment_bytes, write_tuner_for
from ..disk.priority import BACKGROUND_NICE
from ..errors import CapacityError, TierckptError
from ..format.layout import Location, shard_name
from ..format.manifest import FileEntry
from ..format.shard import Flushed
from ..quantities import round_up
from ..read import block_digests
from ..save import direct_put
from ..save.flush import flush
from ..save.shard_plan import Shard
from ..telemetry import logger
from ..torch_internals import StorageWriterTransforms
from . import split
from .items.streamed import streamed_shards
from .stager import StagedItems

log = logger("save")

Route: TypeAlias = Literal["local", "direct put", "local if it fits"]
Written: TypeAlias = tuple[list[WriteResult], tuple[FileEntry, ...]]
"""DCP's result for each item, and the manifest's entry for each file."""


@dataclass
class PlannedShards:
    """Shards in which every record has its place; ``streamed`` are the items whose size is known once they are written.

    ``leases`` are on the staging memory that they are written from; ``parts`` are items that other ranks hold as well.
    """

    token: str
    prefix: str
    shards: list[Shard]
    results: list[WriteResult]
    leases: set[Lease]
    streamed: list[WriteItem]
    parts: tuple[split.Part, ...]


@dataclass
class ShardDelivery:
    """Brings the shards of one save of one rank to where they are to be. One thread at a time."""

    client: Client
    settings: Settings
    location: Location
    entry: Entry
    """The save's entry in the journal: its token and chunk size, and since when it is under way."""
    directory: Path
    """The checkpoint's on the local tier."""
    rank: int
    transforms: StorageWriterTransforms
    sync_files: bool
    is_direct_put: bool = False
    """Whether they went to the shared tier past the SSD."""

    def write(self, laid_out: PlannedShards, planner: SavePlanner | StagedItems, route: Route) -> Written:
        """Return when the shards are durable, wherever they are; or raise, and take back what was sent straight."""
        if laid_out.streamed:
            route = "local"
        if route == "direct put":
            try:
                return laid_out.results, self._direct_put(laid_out)
            except (TierckptError, OSError) as error:
                log.warning(
                    "%s cannot go straight to the shared tier, it goes to the SSD: %s", self.location.uri, error
                )
                self._take_back(laid_out)
            except BaseException:
                self._take_back(laid_out)
                raise
        try:
            return self._write_local(laid_out, planner)
        except CapacityError as error:
            if route != "local if it fits":
                raise
            log.warning("%s goes straight to the shared tier: %s", self.location.uri, error.message)
        for shard in laid_out.shards:
            shard.path.unlink(missing_ok=True)
        try:
            return laid_out.results, self._direct_put(laid_out)
        except BaseException:
            self._take_back(laid_out)
            raise

    def write_from_memory(self, shards: list[Shard]) -> tuple[FileEntry, ...]:
        """Write to the SSD what a rank that has ended left in memory."""
        for shard in shards:
            shard.path.unlink(missing_ok=True)
        space.make_room(self.settings, sum(shard.size_bytes for shard in shards), self.directory)
        flushed = self._flush(shards, cached=True)
        fsync_dir(self.directory)
        return self._entries(flushed)

    def discard(self, names: Sequence[str]) -> None:
        """Remove shards that no commit names, and none will, from the shared tier. Never fails: they harm nobody."""
        self.is_direct_put = False
        try:
            self.client.run(self.client.mover.discard(self.location, names))
        except TierckptError as error:
            log.warning("%s: shards of a save that failed may be left on the shared tier: %s", self.location.uri, error)

    # --- direct put ---------------------------------------------------------------------------------------------

    def _direct_put(self, laid_out: PlannedShards) -> tuple[FileEntry, ...]:
        """Send the shards from memory to the shared tier (T1). Only their block digests are written here."""
        chunk, begun = self.settings.chunk_size_bytes, time.monotonic()
        for lease in laid_out.leases:
            lease.give_up_ahead()
        largest = max((shard.size_bytes for shard in laid_out.shards), default=0)
        slot_bytes = min(chunk, round_up(max(largest, 1)))
        with write_buffers().take(1, slot_bytes, self.settings.commit_timeout_seconds) as [slot]:
            flushed = self.client.run(
                direct_put.send(
                    self.client.mover.store(self.location),
                    laid_out.shards,
                    slot,
                    chunk,
                    self.client.mover.limiter.flow(self.entry.created_unix_seconds),
                )
            )
        files = self._entries(flushed)
        self.is_direct_put = True
        size_bytes = sum(file.size_bytes for file in files)
        log.info(
            "%s: %d bytes went straight to shared storage, %.2f s",
            self.location.uri,
            size_bytes,
            time.monotonic() - begun,
        )
        return files

    def _take_back(self, laid_out: PlannedShards) -> None:
        """What has been sent is not wanted there; the shards may be written from the beginning again."""
        for shard in laid_out.shards:
            for record in shard.records:
                record.forget()
        self.discard([shard.path.name for shard in laid_out.shards])

    # --- to the SSD ---------------------------------------------------------------------------------------------

    def _write_local(self, laid_out: PlannedShards, planner: SavePlanner | StagedItems) -> Written:
        shards, results, streamed = laid_out.shards, laid_out.results, laid_out.streamed
        size_bytes = sum(shard.size_bytes for shard in shards) + sum(map(_item_bytes, streamed))
        reserved_bytes = sum(lease.ahead.reserved_bytes for lease in laid_out.leases if lease.ahead is not None)
        space.make_room(self.settings, size_bytes, self.directory, reserved_bytes=reserved_bytes)
        flushed = self._flush(shards)
        for lease in laid_out.leases:
            lease.in_place = all(shard.image for shard in shards)
        if streamed:
            names = (shard_name(laid_out.prefix, number, self.entry.token) for number in count(len(shards)))
            for name, record, more in streamed_shards(self.transforms, names, streamed, planner):
                flushed += self._flush([Shard(self.directory / name, [record])])
                results = results + more
                del record  # and its bytes, before there are others
        if self.sync_files:
            fsync_dir(self.directory)
        return results, self._entries(flushed)

    def _entries(self, flushed: Sequence[Flushed]) -> tuple[FileEntry, ...]:
        """The entries of the shards, and of their block digests, which are durable when this returns."""
        token, chunk = self.entry.token, self.entry.chunk_size_bytes
        shards = [FileEntry(f.path.name, f.size_bytes, f.digests, self.rank, token) for f in flushed]
        return (*shards, *block_digests.keep(self.directory, flushed, self.rank, token, chunk))

    def _flush(self, shards: list[Shard], *, cached: bool = False) -> list[Flushed]:
        """Write the shards with what threads the disk likes, and note how fast it was."""
        settings, size_bytes = self.settings, sum(shard.size_bytes for shard in shards)
        if not shards:
            return []
        tuner = write_tuner_for(self.directory)
        shape = tuner.choose(size_bytes)
        segment = segment_bytes(settings.chunk_size_bytes, WRITE_BYTES_MAX)  # of any shape: slots serve them all
        slot_bytes = min(segment, round_up(max(max(shard.size_bytes for shard in shards), 1)))
        timeout = settings.commit_timeout_seconds
        background = threading.current_thread() is not threading.main_thread()
        pace = CpuThrottle(BACKGROUND_CPU_SHARE, shape.threads) if background else CpuThrottle()
        is_begun = any(shard.image is not None and shard.image.ahead is not None for shard in shards)
        # What lies in an image needs none; beside it there are only objects.
        wanted = 1 if any(shard.image is not None for shard in shards) else shape.threads
        with write_buffers().take(wanted, slot_bytes, timeout) as slots:
            begun = time.monotonic()
            with flushing(settings.local_root, size_bytes):
                flushed = flush(
                    shards,
                    slots=slots,
                    shape=shape,
                    chunk_size_bytes=settings.chunk_size_bytes,
                    durable=self.sync_files,
                    nice=BACKGROUND_NICE if background else 0,
                    pace=pace,
                    cached=cached,
                    timeout_seconds=timeout,
                )
            if not (pace.rested or cached or is_begun) and len(slots) == wanted:
                tuner.learn(shape, size_bytes, time.monotonic() - begun)
        return flushed


def _item_bytes(item: WriteItem) -> int:
    """Bytes of one plan item (its own chunk of the tensor), 1 for an object whose size nobody knows yet."""
    if item.tensor_data is None:
        return 1
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
