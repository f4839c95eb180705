"""Plans one rank's save: its description, the attempts that it replaces, and the layout of its shards."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ..arena.slots import Lease
from ..client import get_client
from ..config import Settings
from ..disk.illness import HINT, Errands, ill_disk
from ..disk.local_root import check_local_root
from ..errors import ConfigError, OperationTimeoutError
from ..format.layout import Location, shard_name
from ..poll import wait_while
from ..save.shard_plan import Shard
from ..torch_internals import StorageInfo, StorageWriterTransforms
from ..types import Tier
from . import split
from .bulk_objects import gc_paused, result_of
from .items import records
from .stager import StagedItems

Route: TypeAlias = Literal["local", "direct put", "local if it fits"]
"""A direct put goes from memory to the shared tier, or to the SSD if that fails (T2)."""
ItemSource: TypeAlias = SavePlanner | StagedItems


@dataclass(frozen=True)
class SaveDescription:
    rank: int = 0
    world_size: int = 1
    is_coordinator: bool = True
    use_collectives: bool = True
    name: str = ""
    """Unique, and the same on all ranks; "": the plan names the save."""
    overwrite: bool = True
    route: Route = "local"
    is_sent: bool = True
    """False: the checkpoint is not drained. The same on all ranks."""
    keeps_some: bool = False
    """Some saves of the run stay on the local tier until a newer one replaces them there."""
    awaits_verdict: bool = False
    """The caller reports the outcome to every rank; until then the shards are not drained."""
    disk: Errands | None = None
    """Checks the disk during planning: the caller does not wait for a hung disk."""
    is_first: bool = False
    """The first save makes the directories under ``local_root``; a slow disk does not fail its planning."""
    notes: Mapping[str, str | int | bool] = field(default_factory=dict)
    epoch: str | None = None
    """Set if this process replaces an ended rank: it commits only in this epoch."""
    trust_pickle: bool = False
    one_file: bool = True
    sync_files: bool = True
    transforms: StorageWriterTransforms = field(default_factory=StorageWriterTransforms)


@dataclass
class RankAssignment:
    """``SavePlan.storage_data`` of a rank: the prefix of its file names, and the coordinator's message."""

    prefix: str
    save: str = ""
    world_size: int = 1
    uri: str = ""
    is_checked: bool = False
    is_taken: bool = False
    """A planner that caches plans returns old assignments again."""

    def take(self) -> bool:
        self.is_taken, was_taken = True, self.is_taken
        return not was_taken

    def check(self, uri: str, rank: int) -> None:
        is_new, self.is_checked = not self.is_checked, True
        if is_new and self.save and self.uri != uri:
            raise ConfigError(
                f"the ranks of this save have different URIs: rank {rank} has {uri}, the coordinator has {self.uri}",
                hint="Give every rank the same one. A relative path is another place in another working directory",
                rank=rank,
            )


class TargetLookup:
    """Checks ``local_root``, and finds the attempts that a save replaces: on the SSD, then on the shared tier.

    With ``SaveDescription.disk``, planning waits for neither a hung disk nor a silent store. The writing thread waits
    for the disk before the journal entry, and for the store before the commit.
    """

    def __init__(
        self, settings: Settings, location: Location, description: SaveDescription, attempts: tuple[str, ...]
    ) -> None:
        self.attempts = attempts
        self._settings, self._location, self._description = settings, location, description
        self._local: Future[tuple[bool, set[str]] | None] | None = None
        self._shared: Future[tuple[str, ...]] | None = None

    def start(self) -> None:
        """Check the disk and, on the coordinator, the shared tier.

        Raises:
            ConfigError, PermissionDeniedError: this node cannot save there.
            AlreadyCommittedError: the id holds a checkpoint, and ``overwrite`` is False.
            CheckpointSkippedError: the disk hangs.
        """
        disk = self._description.disk
        if disk is None:
            if (here := self._find_local()) is not None:
                self.attempts = get_client(self._settings).run(self._ask(here))
            return
        self._local = disk.begin(self._find_local)
        if disk.wait_for_progress():
            is_silent = get_client(self._settings).mover.replaced.is_silent(self._location)
            self.await_local()
            if self._shared is not None and not is_silent and wait_while([self._shared], lambda: 0):
                self.await_shared()
        elif not self._description.is_first:
            raise ill_disk(self._settings.local_root)

    def _find_local(self) -> tuple[bool, set[str]] | None:
        check_local_root(self._settings)
        client = get_client(self._settings)
        client.enter(self._location.parent, trains=True)  # before any commit of the run here
        return client.mover.replaced.local_attempts(self._location) if self._description.is_coordinator else None

    def _ask(self, here: tuple[bool, set[str]]) -> Coroutine[Any, Any, tuple[str, ...]]:
        mover = get_client(self._settings).mover
        return mover.replaced.find(self._location, here, overwrite=self._description.overwrite)

    def await_local(self) -> None:
        """Raises OperationTimeoutError."""
        if self._local is None:
            return
        seconds = self._settings.commit_timeout_seconds
        if futures.wait([self._local], seconds).not_done:
            raise OperationTimeoutError(
                f"the save to {self._location.uri} could not begin: {self._settings.local_root} cannot be read",
                hint=f"{HINT.capitalize()}; the next save is tried again",
                checkpoint=self._location.uri,
                rank=self._description.rank,
                tier=Tier.LOCAL,
                waited_seconds=seconds,
            )
        here, self._local = self._local.result(), None
        if here is not None:
            self.attempts = tuple(sorted(here[1]))
            self._shared = get_client(self._settings).start(self._ask(here))

    def await_shared(self) -> None:
        if self._shared is not None:
            shared, self._shared = self._shared, None
            self.attempts = shared.result()


@dataclass
class PlannedShards:
    """Writing ``streamed`` items determines their size. Other ranks hold ``parts`` as well."""

    token: str
    prefix: str
    shards: list[Shard]
    results: list[WriteResult]
    leases: set[Lease]
    streamed: list[WriteItem]
    parts: tuple[split.Part, ...]


def plan_shards(
    description: SaveDescription, settings: Settings, directory: Path, token: str, plan: SavePlan, source: ItemSource
) -> PlannedShards:
    prefix = plan.storage_data.prefix if plan.storage_data is not None else f"__{description.rank}_"
    written = source.items if isinstance(source, StagedItems) else split.keep_subclasses_whole(plan.items, source)
    items, streamed = (written, []) if not description.transforms.extensions else ([], list(written))
    with gc_paused():
        sources = records.resolve(items, source)
        streamed += sources.others
        plans = records.plan_shards_of(
            sources,
            shard_bytes_max=settings.shard_size_bytes_max,
            chunk_size_bytes=settings.chunk_size_bytes,
            one_file=description.one_file,
        )
        shards = [
            Shard(directory / shard_name(prefix, index, token), written_records, image)
            for index, (written_records, image) in enumerate(plans)
        ]
        results = [
            result_of(
                record.item.index, record.total_bytes, StorageInfo(shard.path.name, record.offset, record.total_bytes)
            )
            for shard in shards
            for record in shard.records
        ]
    parts = tuple(item.part for item in written if isinstance(item, split.PartItem))
    return PlannedShards(token, prefix, shards, results, sources.leases, streamed, parts)
