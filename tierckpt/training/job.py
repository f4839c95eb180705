"""One save of a Checkpointer on its way from staging memory to the local tier."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ..dcp.handoff.client import Testament
from ..dcp.stager import StagedItems
from ..dcp.writer import TierStorageWriter
from .exchange import Exchange
from .record import SaveRecord


@dataclass
class Job:
    """One save on its way from staging memory to the local tier."""

    writer: TierStorageWriter
    plan: SavePlan
    staged: StagedItems
    metadata: Metadata | None
    record: SaveRecord
    exchange: Exchange
    begun: float
    testament: Future[Testament | None] | None = None

    def will(self) -> Testament | None:
        """What the agent has, once it has it. Raises what went wrong while the save was prepared for that."""
        return self.testament.result() if self.testament is not None else None

    def take_back_will(self) -> None:
        with contextlib.suppress(Exception):  # it was raised where the save needed it
            will = self.will()
            if will is not None:
                will.take_back()

    def give_up(self) -> bool:
        """End a save that failed here. False when nobody here knows whether it failed as a whole.

        Then all this rank had to do is done, and the shards and the will stay: should the rest of the job be killed,
        what every rank had staged is still a checkpoint.
        """
        with contextlib.suppress(Exception):
            self.will()  # until then another thread has the writer
        if self.exchange.may_be_done:
            return self.writer.let_go()
        self.writer.reset()
        return True

    def let_go(self) -> None:
        """Drop the staged copies: their memory is free for the next checkpoint, whoever keeps the future of this."""
        self.staged = StagedItems()
        self.metadata = None
