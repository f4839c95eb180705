"""TierStorageWriter: DCP's StorageWriter that lands on the local tier and drains in the background.

Order of one save (DCP calls, on every rank unless noted):
    set_up_storage_writer   note rank and role; put away what a failed earlier save left open
    prepare_local_plan      coordinator: which attempts stand under this id now, and may we replace them?
    write_data              journal entry, shards, fsync; ranks other than the coordinator start to drain here
    finish (coordinator)    metadata and manifest: the local commit; then its own drain starts
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageInfo,
    _StoragePrefix,
    _StorageWriterTransforms,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..arena.memory import Memory
from ..arena.slots import Lease
from ..checkpoint import epoch as epochs
from ..checkpoint import in_flight as begun
from ..checkpoint import local_commit, local_only, marks
from ..checkpoint.catalog import file_size
from ..checkpoint.journal import KEPT, READY, WRITING, WRITTEN, Entry, Journal
from ..config import Settings
from ..disk import read_lease as leases
from ..disk.durable import make_dirs
from ..disk.local_root import check_local_root
from ..errors import CheckpointError, ConfigError, OperationTimeoutError, TierckptError
from ..format.layout import (
    METADATA,
    SHARD_SUFFIX,
    Location,
    attempt_metadata,
    blocks_file,
    local_dir,
    rank_metadata,
    shard_name,
)
from ..format.manifest import FileEntry, Manifest, digests_of
from ..save.shard_plan import Shard
from ..telemetry import COMMITS, logger
from ..tracebacks import short_traceback
from ..types import Tier
from . import split
from .gc_pause import gc_paused
from .handoff import client as testament
from .handoff import description as descriptions
from .handoff.client import HandoffHandle
from .handoff.description import Results, SaveHandoff
from .items import records
from .metadata_pickle import encode, share
from .planner import TierSavePlanner
from .shard_delivery import PlannedShards, Route, ShardDelivery
from .stager import StagedItems, TierStager
from .target import Mount

log = logger("save")

DCP_VERSION = "1.0.0"
ATTEMPT_TIMEOUT_SECONDS = 120.0

_OF_THIS_PROCESS = {"_save", "_delivery", "_begun", "_busy", "_stager", "_outcome"}
_saves_without_collectives: dict[str, int] = {}


@dataclass(frozen=True)
class TierWriteResult(WriteResult):
    """DCP's result for one item; the first of each rank also carries that rank's shards to the coordinator."""

    files: tuple[FileEntry, ...] = ()
    parts: tuple[split.Part, ...] = ()
    """Which of the items are parts of what other ranks hold too; the metadata must name them."""


@dataclass
class _Turn(_StoragePrefix):
    """What the coordinator tells a rank of one save."""

    save: str = ""
    """What all ranks call this save, and no other has been called."""
    world_size: int = 1
    uri: str = ""
    """Where the coordinator saves to."""
    is_checked: bool = False
    is_taken: bool = False
    """This process has seen it. A planner that keeps plans (``enable_plan_caching`` of torch) shows old ones again."""

    def take(self) -> bool:
        self.is_taken, was_taken = True, self.is_taken
        return not was_taken

    def check(self, uri: str, rank: int) -> None:
        """Raise ConfigError unless this rank saves to where the coordinator does: half a checkpoint in each of two
        places is none. What a planner shows again says where an earlier save went."""
        is_new, self.is_checked = not self.is_checked, True
        if is_new and self.uri != uri:
            raise ConfigError(
                f"the ranks of this save have different URIs: rank {rank} has {uri}, the coordinator has {self.uri}",
                hint="Give every rank the same one. A relative path is another place in another working directory",
                rank=rank,
            )


@dataclass
class _Save:
    """One save in progress on this rank: its journal entry, and the lock that says we are alive."""

    entry: Entry
    directory: Path
    delivery: ShardDelivery
    lock: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    lock_descriptor: int = -1
    outlives: bool = False
    """Somebody inherits it if this process ends: what is durable is noted as soon as it is."""
    testament: HandoffHandle | None = None
    """Of a save that is DCP's to drive: it ends with this."""


class TierStorageWriter(Mount, StorageWriter):
    """Saves DCP checkpoints to node-local SSD and drains them to ``uri`` in the background.

    When ``dcp.save`` returns the checkpoint is committed on the local tier: files and directories are fsynced, digests
    taken, the manifest in place. The shared tier follows (``tierckpt.wait``); where ``uri`` lies on the same file
    system as ``local_root`` it is committed there by hard links before the call returns. An existing checkpoint under
    the same id stays whole until the new one is committed.

    Args:
        uri: ``s3://bucket/key``, ``az://container/key``, ``gs://bucket/key``, a path, or any fsspec URL.
        settings: a ``Settings``; ``overrides`` are single fields of it (``local_root=...``, ``drain=False``).
        single_file_per_rank: False writes one shard per item.
        sync_files: False skips fsync of shards: faster, and a power cut may lose the checkpoint on the local tier.
        thread_count, per_thread_copy_ahead, cache_staged_state_dict: taken because DCP's writer takes them; threads
            are chosen by measurement (8 at most), and staging memory is always kept.
        overwrite: False refuses an id that holds a checkpoint already.
        serialization_format: only TORCH_SAVE; for safetensors use ``tierckpt export``.

    Raises (inside DCP's CheckpointException, by rank):
        AlreadyCommittedError, CapacityError, PermissionDeniedError, ConfigError, StateMismatchError (meta tensors).
    Cost: one copy of the state to staging memory, one write of it to the SSD.

    Example:
        >>> state = {"weight": torch.ones(4)}
        >>> metadata = dcp.save(state, storage_writer=TierStorageWriter("run/step-1"))
        >>> future = dcp.async_save(state, storage_writer=TierStorageWriter("run/step-2"))  # returns when copied
        >>> metadata = future.result()  # committed on the local tier
        >>> tierckpt.wait("run/step-2", tier="shared")
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        path: str | os.PathLike[str] | None = None,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
        if serialization_format != SerializationFormat.TORCH_SAVE:
            raise ConfigError(
                "serialization_format must be TORCH_SAVE: DCP's own reader cannot load a safetensors checkpoint",
                hint="Save as usual, then `tierckpt export URI --to DIR` writes safetensors",
            )
        if thread_count < 1:
            raise ConfigError(f"thread_count is {thread_count}, it must be at least 1")
        self.settings = Settings.load(settings, **overrides)
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.cache_staged_state_dict = cache_staged_state_dict
        self.overwrite = overwrite
        self.transforms = _StorageWriterTransforms(_extensions)
        self.save_id = str(uuid.uuid4())
        self.rank = 0
        self.is_coordinator = True
        self.use_collectives = True
        self.world_size = 1
        self._replaces: tuple[str, ...] = ()
        self._save: _Save | None = None
        self._delivery: ShardDelivery | None = None
        self._begun: tuple[PlannedShards, _Save] | None = None
        self._holds_back = False
        self._is_kept: bool | None = None
        self._has_straight_ranks = False
        self._stands_in = False
        self._epoch: str | None = None
        self._route: Route = "local"
        self._busy = threading.Lock()
        self._stager: TierStager | None = None
        self._outcome: begun.Begun | None = None
        """This save, as those see it who wait for it in this process."""
        self._point_to(uri if uri is not None else path)

    # --- contract of StorageWriter ------------------------------------------------------------------------------

    @short_traceback
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Get ready for a new save, to ``checkpoint_id`` if one is given.

        Raises CheckpointError while another thread still writes with this object.
        """
        with self._working():
            self._abort()
        self._abandon()
        if checkpoint_id is not None:
            self._point_to(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save. An unfinished one of this object is given up; what it committed stays."""
        with self._working():
            self._abort()
        rank = kwargs.get("rank")
        self.rank = rank if rank is not None else (dist.get_rank() if dist.is_initialized() else 0)
        self.use_collectives = kwargs.get("use_collectives", True)
        self.is_coordinator = is_coordinator or not self.use_collectives
        self.world_size = _world_size()
        self._abandon()
        root = self.settings.local_root
        self._outcome = begun.begin(root, self.path, self, is_of_thread=not self._holds_back)

    @short_traceback
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check ``local_root`` and the target, and return ``plan``.

        Raises:
            ConfigError, PermissionDeniedError: this node cannot save there.
            AlreadyCommittedError: the id holds a checkpoint, and ``overwrite`` is False.
        """
        with self._telling():
            check_local_root(self.settings)
            self._client.enter(self.location.parent, trains=True)  # what is about to be committed here must be known
            if self.is_coordinator:
                location, overwrite = self.location, self.overwrite
                self._replaces = self._client.run(lambda e: e.attempts_to_replace(location, overwrite=overwrite))
        if not self.use_collectives:
            return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))
        if _world_size() > 1:
            return split.put_aside(plan)
        return plan

    @short_traceback
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans, with replicated items spread evenly over ranks and a token of this save. On the
        coordinator."""
        plans, save = split.balance_replicated(plans), secrets.token_hex(8)
        return [
            dataclasses.replace(plan, storage_data=_Turn(f"__{rank}_", save, len(plans), self.path))
            if plan.storage_data is None
            else plan
            for rank, plan in enumerate(plans)
        ]

    @short_traceback
    def write_data(self, plan: SavePlan, planner: SavePlanner | StagedItems) -> Future[list[WriteResult]]:
        """Write this rank's shards to the SSD, durably. The future that it returns is done.

        Raises:
            CapacityError: the SSD is full, and eviction cannot make room.
            PermissionDeniedError, ConfigError, StateMismatchError (meta tensors).
        """
        future: Future[list[WriteResult]] = Future()
        with self._telling(), self._working():
            if isinstance(plan.storage_data, _Turn):
                plan.storage_data.check(self.path, self.rank)
            if plan.items or self.is_coordinator:
                (laid_out, save), self._begun = self._begun or self._begin_plain_save(plan, planner), None
                try:
                    with _held(laid_out.leases):
                        try:
                            results, files = save.delivery.write(laid_out, planner, self._route)
                            self._note(save, files)
                        except BaseException:
                            # Before the staging memory may be used again the journal says that the shards are durable,
                            # or that there is no such save: who inherits this one must never write them from what
                            # another has put there.
                            self._abort()
                            raise
                    future.set_result(self._written(save, results, files, laid_out.parts))
                except BaseException:
                    self._abort()
                    raise
            else:
                left = self._leave_plain_will(None, plan, planner)
                if left is not None:
                    testament.leave_open(left)
                future.set_result([])
        if not (self.is_coordinator or self._holds_back):
            self.settle()  # its part is done, and nobody tells this rank how the save ends
        return future

    def _note(self, save: _Save, files: tuple[FileEntry, ...]) -> None:
        """The shards are durable. Note that where a crash cannot take it, if anybody will ask."""
        is_held_back = (self._holds_back or save.outlives) and not self.is_coordinator and bool(files)
        save.entry = dataclasses.replace(save.entry, files=files, state=WRITTEN if is_held_back else save.entry.state)
        if is_held_back or save.outlives:
            self._journal.write(save.entry)

    def _written(
        self, save: _Save, results: list[WriteResult], files: tuple[FileEntry, ...], parts: tuple[split.Part, ...]
    ) -> list[WriteResult]:
        """The shards are durable: tell the coordinator, and give them to the mover unless they are held back."""
        if not (self.is_coordinator or self._holds_back):
            if save.testament is not None and save.testament.hand_in_durable(files):
                save.testament = None  # it is the coordinator that ends it
            self.hand_over_save(save)
        return told(results, files, parts)

    def _lay_out(self, plan: SavePlan, planner: SavePlanner | StagedItems) -> PlannedShards:
        token, directory = self._token(), local_dir(self.settings.local_root, self.location)
        prefix = plan.storage_data.prefix if plan.storage_data is not None else f"__{self.rank}_"
        items, streamed = (plan.items, []) if not self.transforms.extensions else ([], list(plan.items))
        with gc_paused():
            sources = records.resolve(items, planner)
            streamed += sources.others
            plans = records.lay_out(
                sources,
                shard_bytes_max=self.settings.shard_size_bytes_max,
                chunk_size_bytes=self.settings.chunk_size_bytes,
                one_file=self.single_file_per_rank,
            )
            shards = [
                Shard(directory / shard_name(prefix, index, token), shard.records, shard.image)
                for index, shard in enumerate(plans)
            ]
            results = [result for shard in shards for result in _results(shard)]
        parts = tuple(item.part for item in plan.items if isinstance(item, split.PartItem))
        return PlannedShards(token, prefix, shards, results, sources.leases, streamed, parts)

    @short_traceback
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit on the local tier. Raises AlreadyCommittedError when another save took this id meanwhile."""
        with self._telling(), self._working():
            self._finish(metadata, results)
        self.settle()

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = self._save
        if save is None:
            raise RuntimeError("finish() was called without write_data(): a StorageWriter is driven by dcp.save")
        try:
            with gc_paused():
                data = self._encode_metadata(metadata, results)
                manifest = self._manifest(save, data, results)
            metadata_bytes = {manifest.metadata[0].path: data}
            local_commit.write_attempt_metadata(save.directory, manifest, metadata_bytes)
            files, state = save.entry.files + manifest.metadata, self._state_when_committed
            save.entry = dataclasses.replace(save.entry, files=files, manifest=manifest, state=state)
            # Before the commit, so that a crash after it still finds the drain to do; a crash between the two leaves an
            # entry that the local manifest does not name, which the mover forgets.
            self._journal.write(save.entry)
            with self._fence():
                if save.entry.is_fragment:
                    local_commit.commit_local_fragment(save.directory, self.location, manifest, metadata_bytes)
                else:
                    local_commit.commit_local(save.directory, self.location, manifest, metadata_bytes)
        except BaseException:
            self._abort()
            raise
        if self.is_direct_put or self._has_straight_ranks:
            # What is committed here names shards that lie there: the checkpoint is one when that tier says so too.
            size_bytes = manifest.size_bytes
            log.info("%s (%d bytes) lies on the shared tier; it is committed there next", self.path, size_bytes)
        else:
            COMMITS.emit(1, tier=Tier.LOCAL)
            log.info("committed %s on the local tier (%d bytes)", self.path, manifest.size_bytes)
        self.hand_over_save(save)

    def _fence(self) -> contextlib.AbstractContextManager[None]:
        """What is finished for others is committed only while their job has not been started again."""
        if self._epoch is None:
            return contextlib.nullcontext()
        return epochs.committing(self.settings.local_root, self.location.parent, self._epoch)

    def storage_meta(self) -> StorageMeta:
        """Return the id and the save's token, which DCP puts into the metadata."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def settle(self, error: BaseException | None = None) -> None:
        """Tell who waits for this save that it is on the local tier, or that it failed with ``error``."""
        if self._outcome is not None:
            self._outcome.ended(error)
        self._outcome = None

    def _abandon(self) -> None:
        if self._outcome is not None:
            self._outcome.abandon()
        self._outcome = None

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell who waits for this save that it failed here."""
        try:
            yield
        except BaseException as error:
            self.settle(error)
            raise

    # --- staging ------------------------------------------------------------------------------------------------

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: ``stage`` is complete when it returns."""
        return self._synchronize_after_execute

    @short_traceback
    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copy ``state_dict`` to the process's arena, as ``TierStager`` does: ``dcp.async_save`` calls this."""
        if self._stager is None:
            self._stager = TierStager(settings=self.settings)
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: ``stage`` returns when the copy is complete."""

    def close(self) -> None:
        """Nothing to release: staging memory belongs to the process."""

    # --- one save -----------------------------------------------------------------------------------------------

    def _begin(self, token: str) -> _Save:
        """Open the journal entry of this rank's save and hold it: from now on every file has a name there (J1)."""
        self._client.recover()
        return self._open(token)

    def _open(self, token: str) -> _Save:
        directory = local_dir(self.settings.local_root, self.location)
        lock = contextlib.ExitStack()
        # What stands there may be removed meanwhile, but not the directory that we are about to write to.
        lock.enter_context(leases.reading(self.settings.local_root, directory))
        make_dirs(directory)
        hold = lock.enter_context(self._journal.own(token))
        if not hold:
            lock.close()
            raise CheckpointError(f"{self.path}: somebody else has begun what this rank was to write ({token})")
        entry = self._journal.open(token, self.location, self.rank, int(self.settings.chunk_size_bytes))
        if self.settings.peers is not None:
            marks.mark_own(directory, token)
        return self._hold(entry, directory, lock, hold.descriptor)

    def _hold(self, entry: Entry, directory: Path, lock: contextlib.ExitStack, descriptor: int) -> _Save:
        """The save in progress, from now on."""
        self._delivery = ShardDelivery(
            self._client,
            self.settings,
            self.location,
            entry,
            directory,
            self.rank,
            self.transforms,
            self.sync_files,
        )
        self._save = _Save(entry, directory, self._delivery, lock, descriptor)
        return self._save

    def _encode_metadata(self, metadata: Metadata, results: list[list[WriteResult]]) -> bytes:
        metadata.version = DCP_VERSION
        split.amend(metadata, [part for rank in results for result in rank for part in getattr(result, "parts", ())])
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        if self._stands_in:
            _require_whole(metadata, self.path)
        metadata.storage_meta = self.storage_meta()
        return encode(metadata)

    def _manifest(self, save: _Save, data: bytes, results: list[list[WriteResult]]) -> Manifest:
        collected = {file.path: file for rank in results for result in rank for file in getattr(result, "files", ())}
        if not {file.path for file in save.entry.files} <= collected.keys():
            raise CheckpointError(
                f"two saves used one TierStorageWriter at the same time (now at {self.path})",
                hint="Wait for an async_save before starting the next with the same writer; this one was not committed",
            )
        token, chunk = save.entry.token, save.entry.chunk_size_bytes
        alone = not self.use_collectives
        attempt = token.rpartition("-")[0] if alone else token
        return Manifest(
            attempt=attempt,
            world_size=self.world_size if alone else max(len(results), 1),
            chunk_size_bytes=chunk,
            metadata=(_metadata_entry(data, chunk, self.rank, token if alone else attempt, alone),),
            files=tuple(collected[path] for path in sorted(collected)),
            replaces=self._replaces,
            created_unix_seconds=time.time(),
        )

    # --- wills --------------------------------------------------------------------------------------------------

    def leave_will(
        self, plan: SavePlan, planner: SavePlanner | StagedItems, metadata: Metadata | None, save: str
    ) -> HandoffHandle | None:
        """Lay out what ``write_data`` with these arguments writes, and have the agent do it should this process end.

        None when the agent cannot. Every rank leaves a will, and the caller takes it back.

        Args:
            metadata: the coordinator's.
            save: what all ranks call this save, and no other has been called.
        """
        with self._working():
            if not (plan.items or self.is_coordinator):
                return self._leave_will(None, metadata, save)
            laid_out = self._lay_out(plan, planner)
            left = self._leave_will(laid_out, metadata, save)
            self._begun = laid_out, self._begin_with(left, laid_out.token)
            return left if self._begun[1].outlives else None

    def _begin_plain_save(self, plan: SavePlan, planner: SavePlanner | StagedItems) -> tuple[PlannedShards, _Save]:
        """The same where DCP drives the save: no rank is told how it ends, but the coordinator."""
        laid_out = self._lay_out(plan, planner)
        left = self._leave_plain_will(laid_out, plan, planner)
        save = self._begin_with(left, laid_out.token)
        save.testament = left if save.outlives else None
        return laid_out, save

    def _leave_plain_will(
        self, laid_out: PlannedShards | None, plan: SavePlan, planner: SavePlanner | StagedItems
    ) -> HandoffHandle | None:
        shards = laid_out.shards if laid_out is not None else ()
        has_tensors = any(record.frame is not None for shard in shards for record in shard.records)
        is_async = threading.current_thread() is not threading.main_thread()
        is_staged = bool(laid_out and laid_out.leases) if has_tensors else is_async
        if not (is_staged and testament.is_wanted(self.settings)):
            return None
        save = laid_out.token if laid_out is not None else ""
        if self.use_collectives:
            turn = plan.storage_data
            if not isinstance(turn, _Turn) or not turn.take():
                return None
            save, self.world_size = turn.save, turn.world_size
        metadata = _metadata_of(planner) if self.is_coordinator else None
        if self.is_coordinator and metadata is None:
            log.info("%s: staged by a planner of its own kind, so that it ends with this process", self.path)
            return None
        return self._leave_will(laid_out, metadata, save)

    def _begin_with(self, left: HandoffHandle | None, token: str) -> _Save:
        """Begin the save of which ``left`` is the will, and leave the agent the lock on its journal entry.

        The will comes first: making an entry durable takes a moment, above all beside a write of another checkpoint, in
        which what is staged would be nobody's but this process's.
        """
        try:
            save = self._begin(token)
        except BaseException:
            if left is not None:
                left.take_back()
            raise
        save.outlives = left is not None and left.has_begun(save.lock_descriptor)
        return save

    def _leave_will(self, laid_out: PlannedShards | None, metadata: Metadata | None, save: str) -> HandoffHandle | None:
        described = descriptions.describe(laid_out.shards if laid_out is not None else ())
        if described is None or (laid_out is not None and laid_out.streamed):
            log.info("%s: the agent cannot hold all of it while it is staged", self.path)
            return None
        shards, memories = described
        try:
            epoch = epochs.current(self.settings.local_root, self.location.parent)
        except (OSError, TierckptError) as error:
            log.warning("%s is lost if this process ends before it is on the local tier: %s", self.path, error)
            return None
        if metadata is not None:
            share(metadata)
        will = SaveHandoff(
            rank=self.rank,
            world_size=self.world_size,
            is_coordinator=self.is_coordinator,
            use_collectives=self.use_collectives,
            token=laid_out.token if laid_out is not None else "",
            uri=self.path,
            settings=self.settings.model_dump_json(),
            save_id=self.save_id,
            replaces=self._replaces,
            epoch=epoch,
            shards=shards,
            results=Results.of(laid_out.results if laid_out is not None else ()),
            parts=laid_out.parts if laid_out is not None else (),
            metadata=metadata,
            kinds={name: memory.kind for name, memory in memories.items()},
        )
        leases = laid_out.leases if laid_out is not None else ()
        return testament.hand_in(self.settings, save, will, memories, leases)

    def finish_for_dead_rank(
        self, will: SaveHandoff, memories: Mapping[str, Memory], lock: int | None, *, has_begun: bool
    ) -> list[WriteResult] | None:
        """Bring the shards of a rank that has ended to the SSD. None when its save is settled already.

        Those that its journal entry calls durable are taken as they are: the memory they were written from may hold
        another checkpoint by now. Else all are written from memory: how much of one was durable nobody knows.

        Args:
            lock: the rank's hold on its journal entry, if it was left to us; closed with the save.
            has_begun: the rank has had a journal entry, as far as it said; without one there is no shard of it.
        """
        self.rank, self.is_coordinator = will.rank, will.is_coordinator
        self.world_size, self.use_collectives = will.world_size, will.use_collectives
        self._replaces, self.save_id, self._epoch = will.replaces, will.save_id, will.epoch
        self._holds_back = self._stands_in = True
        directory = local_dir(self.settings.local_root, self.location)
        if will.files is not None:
            self._require(directory, will.files)
            return told(will.results.list(), will.files, will.parts)
        save = self._take_over(will.token, directory, lock) if has_begun else self._open(will.token)
        if save is None:
            return None
        try:
            files = self._durable(save, will)
            if files is None:
                files = self._write_again(save, will, memories)
            self._note(save, files)
            return self._written(save, will.results.list(), files, will.parts)
        except BaseException:
            self._abort()
            raise

    def _take_over(self, token: str, directory: Path, lock: int | None) -> _Save | None:
        stack = contextlib.ExitStack()
        hold = stack.enter_context(self._journal.own(token, lock))
        entry = self._journal.read(token)
        if not hold or entry is None:
            stack.close()
            return None
        return self._hold(dataclasses.replace(entry, manifest=None), directory, stack, hold.descriptor)

    def _durable(self, save: _Save, will: SaveHandoff) -> tuple[FileEntry, ...] | None:
        """The shards of ``will``, if the journal calls them durable. Raises CheckpointError if they are not there."""
        noted = {file.path: file for file in save.entry.files}
        if any(shard.name not in noted for shard in will.shards):
            return None
        names = [*(shard.name for shard in will.shards), blocks_file(will.token)]
        files = tuple(noted[name] for name in names if name in noted)
        save.delivery.is_direct_put = not self._require(save.directory, files)
        return files

    def _require(self, directory: Path, files: tuple[FileEntry, ...]) -> bool:
        """Whether the SSD has these files. Raises CheckpointError when shared storage has not got the others."""
        elsewhere = [file for file in files if file_size(directory / file.key) != file.size_bytes]
        for file in elsewhere:
            if not self._is_shared(file):
                raise CheckpointError(f"{file.key} of {self.path} was durable and is gone", hint="Who removed it?")
        return not elsewhere

    def _is_shared(self, file: FileEntry) -> bool:
        return self._client.run(lambda engine: engine.holds(self.location, file))

    def _write_again(self, save: _Save, will: SaveHandoff, memories: Mapping[str, Memory]) -> tuple[FileEntry, ...]:
        log.info("%s: rank %d is written from memory", self.path, self.rank)
        return save.delivery.write_from_memory(will.shards_in(save.directory, memories))

    @property
    def is_direct_put(self) -> bool:
        """Whether this rank's shards of the last save went to the shared tier past the SSD (``route``)."""
        return self._delivery is not None and self._delivery.is_direct_put

    @property
    def replaces(self) -> tuple[str, ...]:
        """The attempts this save was told to replace, on the coordinator."""
        return self._replaces

    def hold_back(self) -> None:
        """Keep this rank's shards from the mover until ``hand_over``: for callers that tell every rank the outcome."""
        self._holds_back = True

    def keep(self, is_kept: bool) -> None:
        """Say whether this save stays on the local tier instead of being drained. Every rank says the same."""
        self._is_kept = is_kept

    def send_after_all(self) -> None:
        """Some rank's shards went straight to the shared tier: all ranks' follow, whatever was to stay here."""
        self._has_straight_ranks = True
        self._is_kept = False if self._is_kept is not None else None

    def route(self, route: Route) -> None:
        """Say which way this rank's shards go: to the SSD, straight to the shared tier, or there if the SSD is full.

        Each rank's may differ. Shards that cannot go straight go to the SSD (T2).
        """
        self._route = route

    @property
    def _state_when_committed(self) -> str:
        return KEPT if self._is_kept and self.settings.drain else READY

    def hand_over(self) -> None:
        """Give the shards held back to the mover: the coordinator has committed."""
        if self._save is not None:
            self.hand_over_save(self._save)
        self.settle()

    def let_go(self) -> bool:
        """End a save whose outcome is not known here: what a commit may name stays, and all else is put away.

        The coordinator, or its store, has gone silent. Shards that a commit of this node names are handed over; if
        there is none yet the mover finds out (``Engine.recover``). Returns False in that case.
        """
        save, self._begun = self._save, None
        if save is None:
            return True
        manifest = local_commit.read_local_manifest(save.directory)
        if manifest is not None and save.entry.token in manifest.tokens:
            self.hand_over_save(save)
        elif save.entry.state == WRITTEN:
            self._release()
            return False
        else:
            self._abort()
        return True

    def hand_over_save(self, save: _Save) -> None:
        """Give the entry to the mover. Where links can, the shared commit is done before this returns.

        Nothing here fails a save that is durable on the local tier: the mover tries again, and ``wait`` says why not.
        """
        entry = save.entry
        try:
            if not self.settings.drain:
                self._journal.remove(entry.token)
                return
            if entry.state != self._state_when_committed:
                entry = self._journal.write(dataclasses.replace(entry, state=self._state_when_committed))
        except (TierckptError, OSError) as error:
            # The commit names the shards, so they stay; recovering finds that and tries again.
            log.warning("%s: the journal cannot be written: %s", entry.uri, error)
            return
        finally:
            self._release()  # from here on the entry is the mover's, whatever happens
        if self._is_kept is not None and not self.is_direct_put:  # nothing newer stands on this SSD (K1)
            local_only.pass_over(self.settings.local_root, self._journal, entry)
        if entry.state == KEPT:
            return
        try:
            linked = not self.is_direct_put and self._client.run(lambda engine: engine.send_linked(entry))
            is_coordinator = entry.manifest is not None and not entry.is_fragment
            if linked and is_coordinator and self._client.run(lambda engine: engine.drain_now(entry.token)):
                return
        except (TierckptError, OSError) as error:
            log.warning("%s: the shared tier has to wait: %s", entry.uri, error)
        self._client.submit(entry.token)

    def _abort(self) -> None:
        """Put away a save that is not to be committed. One that is, whatever its error says, goes on to the mover.

        Called at the start of the next save, and from within a failing one.
        """
        if self._save is None:
            return
        save, token = self._save, self._save.entry.token
        self._begun = None
        if save.entry.state != WRITING:
            # A crash in what follows must not leave an entry that says its files are there.
            save.entry = self._journal.write(dataclasses.replace(save.entry, state=WRITING))
        if save.entry.manifest is None:
            local_commit.remove_unfinished(save.directory, token)
        elif not self._forget(save):
            # The error came after the commit, and it could not be taken back: it stands, and its files with it. The
            # mover drains it, or forgets it if it is not what stands there (D0).
            log.warning("%s: the save has failed, and its commit may stand on the local tier all the same", self.path)
            self.hand_over_save(save)
            return
        if self.is_direct_put:
            save.delivery.discard([file.path for file in save.entry.files if file.path.endswith(SHARD_SUFFIX)])
        self._journal.remove(token)
        self._release()

    def _forget(self, save: _Save) -> bool:
        """Remove a save that has tried to commit. False when the commit stands, or when nobody can know."""
        try:
            return local_commit.discard_attempt(save.directory, save.entry.token, save.entry.manifest)
        except TierckptError as error:
            log.warning("%s: whether it is committed cannot be known (%s); its files stay", self.path, error)
            return False

    def _release(self) -> None:
        if self._save is not None:
            self._save.lock.close()
            if self._save.testament is not None:
                self._save.testament.take_back()
            self._save = None

    def _token(self) -> str:
        """A name no save has used. Without collectives all ranks of a save share its first part, through the
        rendezvous store: one small key, no collective."""
        if self.use_collectives:
            return secrets.token_hex(8)
        return f"{self._agreed_attempt()}-{self.rank}"

    def _agreed_attempt(self) -> str:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return secrets.token_hex(8)
        count = _saves_without_collectives[self.path] = _saves_without_collectives.get(self.path, 0) + 1
        store = dist.distributed_c10d._get_default_store()
        key = f"tierckpt/attempt/{self.path}/{count}"
        if dist.get_rank() == 0:
            store.set(key, secrets.token_hex(8))
        try:
            store.wait([key], timedelta(seconds=ATTEMPT_TIMEOUT_SECONDS))
        except Exception as error:
            raise OperationTimeoutError(
                f"rank 0 has not begun to save {self.path}",
                hint="Every rank must save, in the same order",
                rank=self.rank,
                waited_seconds=ATTEMPT_TIMEOUT_SECONDS,
            ) from error
        return str(store.get(key).decode())

    # --- odds and ends ------------------------------------------------------------------------------------------

    def _point_to(self, uri: str | os.PathLike[str] | None) -> None:
        super()._point_to(uri)
        check_target(self.location, self.settings.local_root)

    @property
    def _journal(self) -> Journal:
        return Journal(self.settings.local_root)

    def __getstate__(self) -> dict[str, Any]:
        """Pickles for process-based async saves: everything but a save in progress."""
        return {key: value for key, value in self.__dict__.items() if key not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            state, _save=None, _delivery=None, _begun=None, _busy=threading.Lock(), _stager=None, _outcome=None
        )

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """One thread at a time: a second save must not put away the shards of the first while they are written."""
        if not self._busy.acquire(blocking=False):
            raise CheckpointError(
                f"this TierStorageWriter is still saving to {self.path} in another thread",
                hint="Wait for the async_save before starting the next, or use another writer",
            )
        try:
            yield
        finally:
            self._busy.release()


def check_target(location: Location, local_root: Path) -> None:
    """Raise ConfigError when nothing can be saved to ``location``: HTTP is for reading, and inside the local root the
    local tier would shadow it."""
    if location.scheme in ("http", "https"):
        raise ConfigError(
            f"{location.uri} can be read and not written: HTTP stores nothing",
            hint="Save to s3://BUCKET/KEY, az://CONTAINER/KEY, gs://BUCKET/KEY or a path",
        )
    if location.scheme == "file" and Path(location.path).is_relative_to(local_root):
        raise ConfigError(
            f"{location.path} lies inside local_root {local_root}",
            hint="Save to a directory outside it; local_root belongs to tierckpt",
        )


@contextlib.contextmanager
def _held(leases: set[Lease]) -> Iterator[None]:
    """Keep the staging memory of a save while its shards are written; after that another checkpoint may have it."""
    begun: list[Lease] = []
    written = False
    try:
        for lease in leases:
            lease.begin_flush()
            begun.append(lease)
        yield
        written = True
    finally:
        for lease in begun:
            lease.end_flush(written=written)


def told(results: list[WriteResult], files: tuple[FileEntry, ...], parts: tuple[split.Part, ...]) -> list[WriteResult]:
    """A rank's results as the coordinator gets them: the first carries what is the rank's and no item's."""
    if results:
        first = results[0]
        results[0] = TierWriteResult(first.index, first.size_in_bytes, first.storage_data, files, parts)
    return results


def _metadata_of(planner: SavePlanner | StagedItems) -> Metadata | None:
    """The metadata that DCP passes to ``finish``; None with a planner that may have made another than it keeps."""
    made_by = getattr(type(planner), "create_global_plan", None)
    if made_by in (DefaultSavePlanner.create_global_plan, TierSavePlanner.create_global_plan):
        return getattr(planner, "metadata", None)
    return None


def _require_whole(metadata: Metadata, uri: str) -> None:
    """Raise CheckpointError when something that the metadata names has not been written: where all ranks are alive, DCP
    has seen to that."""
    for fqn, stored in metadata.state_dict_metadata.items():
        wanted = [MetadataIndex(fqn)]
        if isinstance(stored, TensorStorageMetadata):
            wanted = [MetadataIndex(fqn, chunk.offsets) for chunk in stored.chunks]
        if any(index not in metadata.storage_data for index in wanted):
            raise CheckpointError(f"{fqn} of {uri} was not written by any rank", hint="The checkpoint before it stands")


def _results(shard: Shard) -> list[WriteResult]:
    name = shard.path.name
    return [
        WriteResult(record.item.index, record.total_bytes, _StorageInfo(name, record.offset, record.total_bytes))
        for record in shard.records
    ]


def _metadata_entry(data: bytes, chunk_size_bytes: int, rank: int, attempt: str, alone: bool) -> FileEntry:
    digests = digests_of(data, chunk_size_bytes)
    path = rank_metadata(rank) if alone else METADATA
    return FileEntry(path, len(data), digests, rank, attempt, source=attempt_metadata(attempt))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
