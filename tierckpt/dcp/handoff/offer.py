"""Makes the handoff of a rank's staged save and hands it in (handoff_client.py), so that it outlives its rank (P6)."""

from __future__ import annotations

import threading

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from ...checkpoint import epoch as epochs
from ...config import Settings
from ...errors import TierckptError
from ...format.layout import Location
from ...telemetry import logger
from ..metadata_pickle import encode_plan
from ..planner import TierSavePlanner
from ..save_session import SaveRole
from ..shard_delivery import PlannedShards
from ..stager import StagedItems
from . import description as descriptions
from . import handoff_client
from .description import Results, SaveHandoff
from .handoff_client import HandoffHandle

log = logger("save")


def offer(
    settings: Settings,
    location: Location,
    role: SaveRole,
    planned: PlannedShards | None,
    metadata: Metadata | None,
    save: str,
) -> HandoffHandle | None:
    """Have the agent finish this rank's save should this process end. None when the agent cannot, and the log says so.

    Args:
        planned: the rank's shards, None where it has none.
        metadata: the coordinator's.
        save: what all ranks call this save, and no other has been called.
    """
    described = descriptions.describe(planned.shards if planned is not None else ())
    if described is None or (planned is not None and planned.streamed):
        log.info("%s: the agent cannot hold all of it while it is staged", location.uri)
        return None
    shards, memories = described
    try:
        epoch = epochs.current(settings.local_root, location.parent)
    except (OSError, TierckptError) as error:
        log.warning("%s is lost if this process ends before it is on the local tier: %s", location.uri, error)
        return None
    handoff = SaveHandoff(
        rank=role.rank,
        world_size=role.world_size,
        is_coordinator=role.is_coordinator,
        use_collectives=role.use_collectives,
        token=planned.token if planned is not None else "",
        uri=location.uri,
        settings=settings.model_dump_json(),
        save_id=role.save_id,
        replaces=role.replaces,
        epoch=epoch,
        shards=shards,
        results=Results.of(planned.results if planned is not None else ()),
        parts=planned.parts if planned is not None else (),
        metadata=encode_plan(metadata) if metadata is not None else None,
        kinds={name: memory.kind for name, memory in memories.items()},
        notes=role.notes,
    )
    return handoff_client.hand_in(settings, save, handoff, memories, planned.leases if planned is not None else ())


def is_worth_offering(settings: Settings, planned: PlannedShards | None) -> bool:
    """Whether a save that DCP drives is one of staged state, which training does not wait for."""
    shards = planned.shards if planned is not None else ()
    has_tensors = any(record.frame is not None for shard in shards for record in shard.records)
    is_async = threading.current_thread() is not threading.main_thread()
    is_staged = bool(planned and planned.leases) if has_tensors else is_async
    return is_staged and handoff_client.is_wanted(settings)


def metadata_of(planner: SavePlanner | StagedItems) -> Metadata | None:
    """The metadata that DCP passes to ``finish``; None with a planner that may have made another than it keeps."""
    made_by = getattr(type(planner), "create_global_plan", None)
    if made_by in (DefaultSavePlanner.create_global_plan, TierSavePlanner.create_global_plan):
        return getattr(planner, "metadata", None)
    return None
