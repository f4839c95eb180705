"""Hands a staged save to the agent, so that the save outlives its rank (P6)."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Collection, Mapping
from typing import BinaryIO

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ...arena.memory import Memory
from ...arena.slots import Lease
from ...checkpoint import epoch as epochs
from ...config import Settings, ranks_of_node
from ...errors import TierckptError
from ...format.manifest import FileEntry
from ...ipc.agent_client import HANDOFF_NAME, is_known, shared_client
from ...telemetry import logger
from ..metadata_encoder import encode_plan
from ..planner import TierSavePlanner
from ..save_planning import ItemSource, PlannedShards, RankAssignment
from ..save_session import SaveSession
from ..stager import outlives_process
from . import description as descriptions
from .description import Results, SaveHandoff

log = logger("save")

PENDING_HANDOFFS_MAX = 2
"""Handoffs that wait for the coordinator; the oldest is revoked first."""

_open: deque[Handoff] = deque()


class Handoff:
    """Listens to one save, and has the agent finish it if this process ends. Thread-safe.

    A save with a name is always offered: every rank learns its outcome. A save that DCP drives is offered if its state
    is staged. Only CheckpointSkippedError fails a save: its staged copy was dropped.
    """

    handoff: SaveHandoff

    def __init__(self) -> None:
        self._name, self._is_held = "", False
        self._written: list[BinaryIO] = []

    def prepared(
        self,
        save: SaveSession,
        shards: PlannedShards | None,
        plan: SavePlan,
        source: ItemSource,
        metadata: Metadata | None,
    ) -> None:
        """Called when the shards have their positions, or this rank has none. No file exists yet."""
        description, name, uri = save.description, save.description.name, save.location.uri
        world_size = description.world_size
        shards = shards or PlannedShards("", "", [], [], set(), [], ())
        if not name:
            if not _is_worth_offering(save.settings, shards):
                return
            name = shards.token
            if description.use_collectives:
                assignment = plan.storage_data
                if not isinstance(assignment, RankAssignment) or not assignment.take():
                    return
                name, world_size = assignment.save, assignment.world_size
            if description.is_coordinator:
                metadata = _metadata_of(source)
                if metadata is None:
                    log.info("%s: staged by a planner of its own kind, so that it ends with this process", uri)
                    return
        described = descriptions.describe(shards.shards)
        if described is None or shards.streamed:
            log.info("%s: the agent cannot hold all of it while it is staged", uri)
            return
        try:
            epoch = epochs.current(save.settings.local_root, save.location.parent)
        except (OSError, TierckptError) as error:
            log.warning("%s is lost if this process ends before it is on the local tier: %s", uri, error)
            return
        pending, memories = described
        self.handoff = SaveHandoff(
            rank=description.rank,
            world_size=world_size,
            is_coordinator=description.is_coordinator,
            use_collectives=description.use_collectives,
            token=shards.token,
            uri=uri,
            settings=save.settings.model_dump_json(),
            save_id=save.save_id,
            replaces=save.lookup.attempts,
            epoch=epoch,
            shards=pending,
            results=Results.of(shards.results),
            parts=shards.parts,
            metadata=encode_plan(metadata) if metadata is not None else None,
            kinds={key: memory.kind for key, memory in memories.items()},
            notes=description.notes,
        )
        self._name, self._contact = name, shared_client(save.settings)
        self._offer(memories, shards.leases)

    def _offer(self, memories: Mapping[str, Memory], leases: Collection[Lease]) -> None:
        """From now on the memory of ``leases`` is dropped only after ``take_back``."""
        for lease in leases:
            lease.ask_before_drop(lambda: False)  # during the transfer
        self._is_held = True
        try:
            self.send(memories)
        except Exception as error:
            if not is_known(error):
                text = "%s is lost if this process ends before it is on the local tier: %s"
                log.warning(text, self.handoff.uri, error)
            self.ended()
        finally:
            for lease in leases:
                lease.ask_before_drop(self.take_back)

    def send(self, memories: Mapping[str, Memory]) -> None:
        """Send the handoff and all its memory in one message: no agent ever has a part of it."""
        written = self.handoff.written()
        left = {name: memory.fd for name, memory in memories.items() if memory.fd is not None}
        left[HANDOFF_NAME] = written.fileno()
        world_size = self.handoff.world_size if self.handoff.use_collectives else 1
        message = {"op": "hand_in", "save": self._name, "rank": self.handoff.rank, "world_size": world_size}
        message |= {"is_of_this_node": world_size <= ranks_of_node(), "names": list(left)}
        old = len(self._written)
        self._written.append(written)
        self._contact.ask(message, list(left.values()))
        self._revoke(old)

    def opened(self, lock_descriptor: int) -> bool:
        """Report the journal entry to the agent, and pass it the lock. False: the agent has no handoff.

        If True, the save outlives this process, which then notes durable shards.
        """
        if not self._is_held:
            return False
        message = {"op": "begun", "save": self._name, "rank": self.handoff.rank}
        try:
            self._contact.ask(message, [lock_descriptor], start=False)
        except (TierckptError, OSError) as error:
            if not is_known(error):
                log.warning("%s: the agent has lost its handoff: %s", self.handoff.uri, error)
            self.ended()
        return self._is_held

    def durable(self, files: tuple[FileEntry, ...]) -> None:
        """Replace the handoff by one that needs neither memory nor lock. For a rank that is not told the outcome."""
        if not self._is_held:
            return
        if files:
            self.handoff = self.handoff.durable(files)
            try:
                self.send({})
            except (TierckptError, OSError) as error:
                if not is_known(error):
                    log.warning("%s: could not report to the agent that it is durable: %s", self.handoff.uri, error)
                return  # the agent keeps the old one until this rank's save ends
        self._is_held = False
        _open.append(self)
        while len(_open) > PENDING_HANDOFFS_MAX:
            with contextlib.suppress(IndexError):
                _open.popleft().take_back()

    def ended(self) -> None:
        if self._is_held:
            self.take_back()

    def take_back(self) -> bool:
        """Revoke the handoffs of all ranks of the save. True: the memory may be used again."""
        self._is_held = False
        self._revoke()
        self._contact.tell({"op": "take_back", "save": self._name})
        return True

    def _revoke(self, count: int | None = None) -> None:
        for written in self._written[:count]:
            descriptions.revoke(written)
        del self._written[:count]


def _is_worth_offering(settings: Settings, planned: PlannedShards) -> bool:
    has_tensors = any(record.frame is not None for shard in planned.shards for record in shard.records)
    is_async = threading.current_thread() is not threading.main_thread()
    is_staged = bool(planned.leases) if has_tensors else is_async
    return is_staged and outlives_process(settings)


def _metadata_of(planner: ItemSource) -> Metadata | None:
    """Return None if the planner may have made other metadata than DCP passes to ``finish``."""
    made_by = getattr(type(planner), "create_global_plan", None)
    if made_by in (DefaultSavePlanner.create_global_plan, TierSavePlanner.create_global_plan):
        return getattr(planner, "metadata", None)
    return None
