"""One save of a Checkpointer: its record, and its stages from staging memory to the local tier."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ..dcp.handoff.client import HandoffHandle
from ..dcp.stager import StagedItems
from ..dcp.writer import TierStorageWriter
from .exchange import Exchange


@dataclass
class SaveRecord:
    """How one save went. Seconds count from the call of ``save``; None until known (or not known on this rank)."""

    step: int
    uri: str
    size_bytes: int = 0
    blocked_seconds: float = 0.0
    local_commit_seconds: float | None = None
    shared_commit_seconds: float | None = None
    error: str = ""
    is_sent: bool = True
    """False: it stays on the local tier; only newer ones go to shared storage."""
    is_straight: bool = False
    """True: it does not lie on the SSD on its way, or not all of it; its local and its shared commit are one."""
    begun_at: float = field(default_factory=time.monotonic, repr=False)

    @property
    def age_seconds(self) -> float:
        """Time since the call of ``save``."""
        return time.monotonic() - self.begun_at

    @property
    def drain_seconds(self) -> float | None:
        """Time from the local to the shared commit."""
        if self.shared_commit_seconds is None or self.local_commit_seconds is None:
            return None
        return max(0.0, self.shared_commit_seconds - self.local_commit_seconds)


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
    testament: Future[HandoffHandle | None] | None = None

    def will(self) -> HandoffHandle | None:
        """What the agent has, once it has it. Raises what went wrong while the save was prepared for that."""
        return self.testament.result() if self.testament is not None else None

    def take_back_will(self) -> None:
        with contextlib.suppress(Exception):  # it was raised where the save needed it
            will = self.will()
            if will is not None:
                will.take_back()

    def give_up(self) -> bool:
        """End a save that failed here. False when nobody here knows whether it failed as a whole.

        Then all this rank had to do is done, and the shards and the handoff stay: should the rest of the job be killed,
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
