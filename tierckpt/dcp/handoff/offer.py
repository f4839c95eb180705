"""Offers a rank's staged save to the agent (handoff_client.py), so that the save outlives its rank (P6)."""

from __future__ import annotations

import threading

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ...checkpoint import epoch as epochs
from ...errors import TierckptError
from ...format.manifest import FileEntry
from ...telemetry import logger
from ..metadata_pickle import encode_plan
from ..planner import TierSavePlanner
from ..save_planning import ItemSource, PlannedShards, RankAssignment
from ..save_session import SaveSession
from . import description as descriptions
from . import handoff_client
from .description import Results, SaveHandoff
from .handoff_client import HandoffHandle

log = logger("save")


class Handoff:
    """Listens to one save, and has the agent finish it should this process end. The log says where that fails.

    A save with a name (``SaveDescription.name``) is offered whatever it holds: its caller stages every save, and tells
    every rank how it ends. Of the saves that DCP drives, those of staged state are.
    """

    def __init__(self) -> None:
        self._handle: HandoffHandle | None = None

    def prepared(
        self,
        save: SaveSession,
        shards: PlannedShards | None,
        plan: SavePlan,
        source: ItemSource,
        metadata: Metadata | None,
    ) -> None:
        description, name, world_size = save.description, save.description.name, save.description.world_size
        if not name:
            if not _is_worth_offering(save, shards):
                return
            name = shards.token if shards is not None else ""
            if description.use_collectives:
                assignment = plan.storage_data
                if not isinstance(assignment, RankAssignment) or not assignment.take():
                    return
                name, world_size = assignment.save, assignment.world_size
            if description.is_coordinator:
                metadata = _metadata_of(source)
                if metadata is None:
                    uri = save.location.uri
                    log.info("%s: staged by a planner of its own kind, so that it ends with this process", uri)
                    return
        self._handle = _offer(save, shards, metadata, name, world_size)

    def opened(self, lock_descriptor: int) -> bool:
        if self._handle is not None and not self._handle.has_begun(lock_descriptor):
            self._handle = None
        return self._handle is not None

    def durable(self, files: tuple[FileEntry, ...]) -> None:
        handle = self._handle
        if handle is not None and not files:
            handoff_client.leave_open(handle)
        elif handle is None or not handle.hand_in_durable(files):
            return
        self._handle = None  # the coordinator takes it back

    def ended(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.take_back()


def _offer(
    save: SaveSession, shards: PlannedShards | None, metadata: Metadata | None, name: str, world_size: int
) -> HandoffHandle | None:
    """Hand in this rank's part of a save. None when the agent cannot have it."""
    location, settings, description = save.location, save.settings, save.description
    described = descriptions.describe(shards.shards if shards is not None else ())
    if described is None or (shards is not None and shards.streamed):
        log.info("%s: the agent cannot hold all of it while it is staged", location.uri)
        return None
    pending, memories = described
    try:
        epoch = epochs.current(settings.local_root, location.parent)
    except (OSError, TierckptError) as error:
        log.warning("%s is lost if this process ends before it is on the local tier: %s", location.uri, error)
        return None
    handoff = SaveHandoff(
        rank=description.rank,
        world_size=world_size,
        is_coordinator=description.is_coordinator,
        use_collectives=description.use_collectives,
        token=shards.token if shards is not None else "",
        uri=location.uri,
        settings=settings.model_dump_json(),
        save_id=save.save_id,
        replaces=save.lookup.attempts,
        epoch=epoch,
        shards=pending,
        results=Results.of(shards.results if shards is not None else ()),
        parts=shards.parts if shards is not None else (),
        metadata=encode_plan(metadata) if metadata is not None else None,
        kinds={key: memory.kind for key, memory in memories.items()},
        notes=description.notes,
    )
    return handoff_client.hand_in(settings, name, handoff, memories, shards.leases if shards is not None else ())


def _is_worth_offering(save: SaveSession, planned: PlannedShards | None) -> bool:
    """Whether a save that DCP drives is one of staged state: training does not wait for it."""
    shards = planned.shards if planned is not None else ()
    has_tensors = any(record.frame is not None for shard in shards for record in shard.records)
    is_async = threading.current_thread() is not threading.main_thread()
    is_staged = bool(planned and planned.leases) if has_tensors else is_async
    return is_staged and handoff_client.is_wanted(save.settings)


def _metadata_of(planner: ItemSource) -> Metadata | None:
    """The metadata that DCP passes to ``finish``; None with a planner that may have made another than it keeps."""
    made_by = getattr(type(planner), "create_global_plan", None)
    if made_by in (DefaultSavePlanner.create_global_plan, TierSavePlanner.create_global_plan):
        return getattr(planner, "metadata", None)
    return None
