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
import uuid
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..checkpoint import in_flight
from ..config import Settings
from ..disk.illness import HINT, Errands, ill_disk
from ..disk.local_root import check_local_root
from ..errors import CheckpointError, ConfigError, OperationTimeoutError
from ..format.layout import (
    local_dir,
    shard_name,
)
from ..poll import wait_while
from ..rank_store import RankStore
from ..save.shard_plan import Shard
from ..stores.schemes import check_mirrored_target
from ..telemetry import logger
from ..torch_internals import StorageInfo, StorageWriterTransforms
from ..tracebacks import short_traceback
from ..types import Tier
from . import split
from .frozen import result_of
from .gc_pause import gc_paused
from .handoff.handoff_client import HandoffHandle, leave_open
from .handoff.offer import is_worth_offering, metadata_of, offer
from .items import records
from .save_session import SaveRole, SaveSession
from .shard_delivery import PlannedShards, Route
from .stager import StagedItems, TierStager
from .target import Mount

log = logger("save")

ATTEMPT_TIMEOUT_SECONDS = 120.0

_OF_THIS_PROCESS = {"_session", "_planned", "_busy", "_stager", "_errands", "_looks", "_asks", "_outcome"}


@dataclass
class _Prefix:
    """``SavePlan.storage_data`` of a rank that saves by itself: how the names of its files begin."""

    prefix: str


@dataclass
class _Turn(_Prefix):
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
        thread_count: taken because DCP's writer takes it; threads are chosen by measurement, 8 at most.
        per_thread_copy_ahead: likewise.
        cache_staged_state_dict: likewise; staging memory is always kept.
        overwrite: False refuses an id that holds a checkpoint already.
        serialization_format: only TORCH_SAVE; for safetensors use ``tierckpt export``.
        trust_pickle: accept a planner that puts classes of its own into the metadata (Megatron's does). Only
            ``TierStorageReader(uri, trust_pickle=True)`` loads such a checkpoint; without it the save fails.

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
        trust_pickle: bool = False,
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
        self.transforms = StorageWriterTransforms(_extensions)
        self._role = SaveRole(save_id=str(uuid.uuid4()), trust_pickle=trust_pickle)
        self._session: SaveSession | None = None
        self._planned: PlannedShards | None = None
        """The shards of a save that has begun before ``write_data``."""
        self._busy = threading.Lock()
        self._stager: TierStager | None = None
        self._errands: Errands | None = None
        self._is_first = False
        self._looks: futures.Future[tuple[bool, set[str]] | None] | None = None
        """What planning asks the disk for, until that is taken: what stands under this id there, on the coordinator."""
        self._asks: futures.Future[tuple[str, ...]] | None = None
        """What it asks the shared tier for, likewise: the attempts that this save replaces."""
        self._outcome: in_flight.Begun | None = None
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
        self._role.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save. An unfinished one of this object is given up; what it committed stays."""
        with self._working():
            self._abort()
        rank = kwargs.get("rank")
        self._role.rank = rank if rank is not None else (dist.get_rank() if dist.is_initialized() else 0)
        self._role.use_collectives = kwargs.get("use_collectives", True)
        self._role.is_coordinator = is_coordinator or not self._role.use_collectives
        self._role.world_size = _world_size()
        self._abandon()
        root = self.settings.local_root
        self._outcome = in_flight.begin(root, self.path, self, is_of_thread=not self._role.holds_back)

    @short_traceback
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check ``local_root`` and the target, and return ``plan``.

        Raises:
            ConfigError, PermissionDeniedError: this node cannot save there.
            AlreadyCommittedError: the id holds a checkpoint, and ``overwrite`` is False.
        """

        def look() -> tuple[bool, set[str]] | None:
            check_local_root(self.settings)
            self._client.enter(self.location.parent, trains=True)  # what is about to be committed here must be known
            return self._client.mover.standing_here(self.location) if self._role.is_coordinator else None

        with self._telling():
            if self._errands is None:
                if (here := look()) is not None:
                    self._role.replaces = self._client.run(self._standing(here))
            else:
                self._looks = self._errands.begin(look)
                if self._errands.gets_on():
                    is_silent = self._client.mover.is_silent(self.location)
                    self._take_look()
                    if self._asks is not None and not is_silent and wait_while([self._asks], lambda: 0):
                        self._take_answer()
                elif not self._is_first:
                    raise ill_disk(self.settings.local_root)
        if not self._role.use_collectives:
            return dataclasses.replace(plan, storage_data=_Prefix(f"__{self._role.rank}_"))
        if _world_size() > 1:
            return split.put_aside(plan)
        return plan

    @short_traceback
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans, with replicated items spread evenly over ranks and a token of this save. On the
        coordinator."""
        plans, save = split.balance_replicated(plans), secrets.token_hex(8)
        self._role.save_id = save  # in the metadata: each rank knows by what name the checkpoint will be found
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
            PermissionDeniedError, ConfigError: the local root.
            StateMismatchError: tensors on the meta device.
        """
        future: Future[list[WriteResult]] = Future()
        with self._telling(), self._working():
            self._take_look()
            if isinstance(plan.storage_data, _Turn):
                plan.storage_data.check(self.path, self._role.rank)
            if plan.items or self._role.is_coordinator:
                planned, self._planned = self._planned or self._begin_plain_save(plan, planner), None
                session = self._open_session()
                with session.writing(planned.leases):
                    results, files = session.delivery.write(planned, planner, self._role.route)
                    session.note(files)
                future.set_result(session.report(results, files, planned.parts))
            else:
                handle = self._offer_plain(None, plan, planner)
                if handle is not None:
                    leave_open(handle)
                future.set_result([])
        if not (self._role.is_coordinator or self._role.holds_back):
            self.report_outcome()  # its part is done, and nobody tells this rank how the save ends
        return future

    def _standing(self, here: tuple[bool, set[str]]) -> Coroutine[Any, Any, tuple[str, ...]]:
        return self._client.mover.attempts_to_replace(self.location, here, overwrite=self.overwrite)

    def _take_look(self) -> None:
        """Wait for what planning asks the disk for, and ask the shared tier what stands there.

        Where the caller of the save did not wait for it, the threads that write do: nothing is written, and the agent
        is offered nothing, before the run is entered and ``local_root`` checked.
        """
        if self._looks is None:
            return
        seconds = self.settings.commit_timeout_seconds
        if futures.wait([self._looks], seconds).not_done:
            raise OperationTimeoutError(
                f"the save to {self.path} could not begin: {self.settings.local_root} cannot be looked at",
                hint=f"{HINT.capitalize()}; the next save is tried again",
                checkpoint=self.path,
                rank=self._role.rank,
                tier=Tier.LOCAL,
                waited_seconds=seconds,
            )
        here, self._looks = self._looks.result(), None
        if here is not None:
            self._role.replaces = tuple(sorted(here[1]))  # what a save is offered with before the answer
            self._asks = self._client.start(self._standing(here))

    def _take_answer(self) -> None:
        """Wait for what the shared tier has; one that does not say it in ``PROBE_TIMEOUT_SECONDS`` is passed over."""
        if self._asks is not None:
            asks, self._asks = self._asks, None
            self._role.replaces = asks.result()

    def _lay_out(self, plan: SavePlan, planner: SavePlanner | StagedItems) -> PlannedShards:
        token, directory = self._token(), local_dir(self.settings.local_root, self.location)
        prefix = plan.storage_data.prefix if plan.storage_data is not None else f"__{self._role.rank}_"
        written = planner.items if isinstance(planner, StagedItems) else split.kept_whole(plan.items, planner)
        items, streamed = (written, []) if not self.transforms.extensions else ([], list(written))
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
        parts = tuple(item.part for item in written if isinstance(item, split.PartItem))
        return PlannedShards(token, prefix, shards, results, sources.leases, streamed, parts)

    @short_traceback
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit on the local tier. Raises AlreadyCommittedError when another save took this id meanwhile."""
        with self._telling(), self._working():
            self._take_answer()
            self._open_session().commit(metadata, results)
        self.report_outcome()

    def storage_meta(self) -> StorageMeta:
        """Return the id and the save's token, which DCP puts into the metadata."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._role.save_id)

    def report_outcome(self, error: BaseException | None = None) -> None:
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
            self.report_outcome(error)
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

    # --- for callers that tell every rank how the save ends ------------------------------------------------------

    @property
    def is_direct_put(self) -> bool:
        """Whether this rank's shards of the last save went to the shared tier past the SSD (``route``)."""
        return self._session is not None and self._session.delivery.is_direct_put

    def hold_back(self, errands: Errands | None = None, *, is_first: bool = False) -> None:
        """Keep this rank's shards from the drain until ``hand_over``.

        ``errands`` ask the disk while it is planned; one that hangs fails the planning. Not that of the first save of a
        process (``is_first``), which makes what is below ``local_root`` and waits for what others left: ``write_data``
        waits for the rest of it, as ``finish`` does for a shared tier that does not answer in a moment.
        """
        self._role.holds_back, self._errands, self._is_first = True, errands, is_first

    def keep(self, is_kept: bool) -> None:
        """Say whether this save stays on the local tier instead of being drained. Every rank says the same."""
        self._role.is_kept = is_kept

    def annotate(self, notes: Mapping[str, str | int | bool]) -> None:
        """Have the manifest say ``notes``. Every rank says the same."""
        self._role.notes = notes

    def send_after_all(self) -> None:
        """Some rank's shards went straight to the shared tier: all ranks' follow, whatever was to stay here."""
        self._role.has_direct_put_ranks = True
        self._role.is_kept = False if self._role.is_kept is not None else None

    def route(self, route: Route) -> None:
        """Say which way this rank's shards go: to the SSD, straight to the shared tier, or there if the SSD is full.

        Each rank's may differ. Shards that cannot go straight go to the SSD (T2).
        """
        self._role.route = route

    def hand_over(self) -> None:
        """Give the shards held back to the drain: the coordinator has committed."""
        if self._session is not None:
            self._session.hand_over()
        self.report_outcome()

    def let_go(self) -> bool:
        """End a save whose outcome is not known here, as ``SaveSession.let_go`` does."""
        self._planned = None
        return self._session is None or self._session.let_go()

    def offer_handoff(
        self, plan: SavePlan, planner: SavePlanner | StagedItems, metadata: Metadata | None, save: str
    ) -> HandoffHandle | None:
        """Lay out what ``write_data`` with these arguments writes, and have the agent do it should this process end.

        None when the agent cannot. Every rank makes an offer, and the caller takes it back.

        Args:
            metadata: the coordinator's.
            save: what all ranks call this save, and no other has been called.
        """
        with self._working():
            self._take_look()
            if not (plan.items or self._role.is_coordinator):
                return offer(self.settings, self.location, self._role, None, metadata, save)
            planned = self._lay_out(plan, planner)
            handle = offer(self.settings, self.location, self._role, planned, metadata, save)
            session, self._planned = self.begin_save(handle, planned.token), planned
            return handle if session.outlives else None

    # --- one save -----------------------------------------------------------------------------------------------

    def _begin_plain_save(self, plan: SavePlan, planner: SavePlanner | StagedItems) -> PlannedShards:
        """Begin a save that DCP drives: no rank is told how it ends, but the coordinator."""
        planned = self._lay_out(plan, planner)
        handle = self._offer_plain(planned, plan, planner)
        session = self.begin_save(handle, planned.token)
        session.handoff = handle if session.outlives else None
        return planned

    def _offer_plain(
        self, planned: PlannedShards | None, plan: SavePlan, planner: SavePlanner | StagedItems
    ) -> HandoffHandle | None:
        if not is_worth_offering(self.settings, planned):
            return None
        save = planned.token if planned is not None else ""
        if self._role.use_collectives:
            turn = plan.storage_data
            if not isinstance(turn, _Turn) or not turn.take():
                return None
            save, self._role.world_size = turn.save, turn.world_size
        metadata = metadata_of(planner) if self._role.is_coordinator else None
        if self._role.is_coordinator and metadata is None:
            log.info("%s: staged by a planner of its own kind, so that it ends with this process", self.path)
            return None
        return offer(self.settings, self.location, self._role, planned, metadata, save)

    def begin_save(self, handle: HandoffHandle | None, token: str) -> SaveSession:
        """Begin the save that ``handle`` is of, and leave the agent the lock on its journal entry.

        The agent comes first: making an entry durable takes a moment, above all beside a write of another checkpoint,
        in which what is staged would be nobody's but this process's.
        """
        try:
            self._client.recover()
            session = self._session = SaveSession.open(
                self._client, self.location, self._role, token, self.transforms, sync_files=self.sync_files
            )
        except BaseException:
            if handle is not None:
                handle.take_back()
            raise
        session.outlives = handle is not None and handle.has_begun(session.lock_descriptor)
        return session

    def _open_session(self) -> SaveSession:
        if self._session is None or not self._session.is_open:
            raise RuntimeError("finish() was called without write_data(): a StorageWriter is driven by dcp.save")
        return self._session

    def _abort(self) -> None:
        """Put away what an earlier save left open."""
        self._planned = self._looks = self._asks = None
        if self._session is not None:
            self._session.abort()

    def _token(self) -> str:
        """A name no save has used. Without collectives all ranks of a save share its first part, through the
        rendezvous store: one small key, no collective."""
        if self._role.use_collectives:
            return secrets.token_hex(8)
        return f"{self._agreed_attempt()}-{self._role.rank}"

    def _agreed_attempt(self) -> str:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return secrets.token_hex(8)
        store = RankStore.numbered(f"tierckpt/attempt/{self.path}", ATTEMPT_TIMEOUT_SECONDS)
        return store.broadcast(
            "name",
            lambda: secrets.token_hex(8),
            f"rank 0 has not begun to save {self.path}",
            "Every rank must save, in the same order",
        )

    # --- odds and ends ------------------------------------------------------------------------------------------

    def _point_to(self, uri: str | os.PathLike[str] | None) -> None:
        super()._point_to(uri)
        check_mirrored_target(self.location, self.settings.local_root)

    def __getstate__(self) -> dict[str, Any]:
        """Pickles for process-based async saves: everything but a save in progress."""
        return {key: value for key, value in self.__dict__.items() if key not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _session=None, _planned=None, _busy=threading.Lock())
        self._stager = self._errands = self._looks = self._asks = self._outcome = None

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


def _results(shard: Shard) -> list[WriteResult]:
    name = shard.path.name
    return [
        result_of(record.item.index, record.total_bytes, StorageInfo(name, record.offset, record.total_bytes))
        for record in shard.records
    ]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
