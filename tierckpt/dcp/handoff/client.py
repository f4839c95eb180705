"""Hands a staged save to the agent, and revokes the handoff when the save has ended (P6)."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import BinaryIO

from ...arena import memory
from ...arena.memory import Memory
from ...arena.slots import Lease
from ...config import Settings, ranks_of_node
from ...errors import TierckptError
from ...format.manifest import FileEntry
from ...ipc.client import WILL_NAME, AgentClient, contact_for, is_known
from ...telemetry import logger
from . import description as descriptions
from .description import SaveHandoff

log = logger("save")

OPEN_MAX = 2
"""Wills of one process whose end nobody has told it of; of more, the oldest is taken back."""

_open: deque[HandoffHandle] = deque()


def is_wanted(settings: Settings) -> bool:
    """Whether staged checkpoints are to outlive this process: see ``Settings.staging_memory``."""
    if settings.staging_memory == "auto":
        return settings.mover == "agent" and memory.shared_is_huge()
    return settings.mover == "agent" and settings.staging_memory == "shared"


def announce(settings: Settings) -> None:
    """Have an agent there when the first will is handed in: it starts as slowly as Python. Returns at once."""

    def start() -> None:
        with contextlib.suppress(TierckptError, OSError):  # who hands in the will says so
            contact_for(settings).ask({"op": "here"})

    threading.Thread(target=start, name="tierckpt-announce", daemon=True).start()


class HandoffHandle:
    """A will that the agent has. Thread-safe.

    Args:
        save: what all ranks of the save call it, and no other save has been called. Every rank leaves a will.
        will: this rank's.
    """

    def __init__(self, contact: AgentClient, save: str, will: SaveHandoff) -> None:
        self._contact, self._save, self._will = contact, save, will
        self._written: list[BinaryIO] = []
        """Those that the agent may have."""

    def take_back(self) -> bool:
        """The save has ended, for all its ranks. True: the memory may be used again.

        That holds even when the agent cannot be told: it keeps a will that counts for nothing until this process ends.
        """
        self._revoke()
        self._contact.tell({"op": "take_back", "save": self._save})
        return True

    def hand_in(self, memories: Mapping[str, Memory]) -> None:
        """All that the will needs goes along in one message, so that no agent ever has a part of it."""
        written = self._will.written()
        left = {name: memory.fd for name, memory in memories.items() if memory.fd is not None}
        left[WILL_NAME] = written.fileno()
        world_size = self._will.world_size if self._will.use_collectives else 1  # without, each rank saves alone
        message = {"op": "hand_in", "save": self._save, "rank": self._will.rank, "world_size": world_size}
        message |= {"is_of_this_node": world_size <= ranks_of_node(), "names": list(left)}
        old = len(self._written)
        self._written.append(written)
        self._contact.ask(message, list(left.values()))
        self._revoke(old)

    def _revoke(self, count: int | None = None) -> None:
        for written in self._written[:count]:
            descriptions.revoke(written)
        del self._written[:count]

    def has_begun(self, lock: int) -> bool:
        """Tell the agent that there is a journal entry, and leave it the lock on that. False: it has no such will."""
        message = {"op": "begun", "save": self._save, "rank": self._will.rank}
        try:
            self._contact.ask(message, [lock], start=False)
        except (TierckptError, OSError) as error:
            if not is_known(error):
                log.warning("%s: the agent has lost its handoff: %s", self._will.uri, error)
            self.take_back()
            return False
        return True

    def hand_in_durable(self, files: tuple[FileEntry, ...]) -> bool:
        """Replace the will by one that says that the shards are durable: it needs no memory any more, and no lock.

        False: the agent still has the old one.
        """
        self._will = self._will.durable(files)
        try:
            self.hand_in({})
        except (TierckptError, OSError) as error:
            if not is_known(error):
                log.warning("%s: could not report to the agent that it is durable: %s", self._will.uri, error)
            return False
        leave_open(self)
        return True


def leave_open(testament: HandoffHandle) -> None:
    """Nobody tells this rank when the save ends: the coordinator takes back the wills of all, or this process ends."""
    _open.append(testament)
    while len(_open) > OPEN_MAX:
        with contextlib.suppress(IndexError):  # another thread was faster
            _open.popleft().take_back()


def hand_in(
    settings: Settings,
    save: str,
    will: SaveHandoff,
    memories: Mapping[str, Memory],
    leases: Iterable[Lease] = (),
) -> HandoffHandle | None:
    """Hand in the will of one rank. None when that cannot be done: then the save is as safe as this process, and the
    log says why. Never fails a save, but for one whose staged copy has been dropped (CheckpointSkippedError).

    Args:
        save: as ``HandoffHandle`` has it.
        leases: on the memory that the will needs. It is dropped only when the will has been taken back.
    """
    testament = HandoffHandle(contact_for(settings), save, will)
    for lease in leases:
        lease.ask_before_drop(lambda: False)  # while it is handed in
    try:
        testament.hand_in(memories)
    except Exception as error:
        if not is_known(error):
            log.warning("%s is lost if this process ends before it is on the local tier: %s", will.uri, error)
        testament.take_back()
        return None
    finally:
        for lease in leases:
            lease.ask_before_drop(testament.take_back)
    return testament
