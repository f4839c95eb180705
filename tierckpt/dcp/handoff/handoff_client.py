"""Hands a staged save to the agent (``agent/handoffs.py``), and revokes the handoff when the save has ended (P6)."""

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
from ...ipc.agent_client import HANDOFF_NAME, AgentClient, contact_for, is_known
from ...resources import start_if_possible
from ...telemetry import logger
from . import description as descriptions
from .description import SaveHandoff

log = logger("save")

OPEN_MAX = 2
"""Handoffs of one process whose end nobody has told it of; of more, the oldest is taken back."""

_open: deque[HandoffHandle] = deque()


def is_wanted(settings: Settings) -> bool:
    """Whether staged checkpoints are to outlive this process: see ``Settings.staging_memory``."""
    if settings.staging_memory == "auto":
        return settings.mover == "agent" and memory.shared_is_huge()
    return settings.mover == "agent" and settings.staging_memory == "shared"


def announce(settings: Settings) -> None:
    """Have an agent there when the first handoff is handed in: it starts as slowly as Python. Returns at once."""

    def start() -> None:
        with contextlib.suppress(TierckptError, OSError):  # ``hand_in`` reports it
            contact_for(settings).ask({"op": "here"})

    start_if_possible(threading.Thread(target=start, name="tierckpt-announce", daemon=True))


class HandoffHandle:
    """A handoff that the agent has. Thread-safe.

    Args:
        save: what all ranks of the save call it, and no other save has been called. Every rank hands in one.
        handoff: this rank's.
    """

    def __init__(self, contact: AgentClient, save: str, handoff: SaveHandoff) -> None:
        self._contact, self._save, self._handoff = contact, save, handoff
        self._written: list[BinaryIO] = []
        """Those that the agent may have."""

    def take_back(self) -> bool:
        """The save has ended, for all its ranks. True: the memory may be used again.

        That holds even when the agent does not hear of it: it then keeps a revoked handoff until this process ends.
        """
        self._revoke()
        self._contact.tell({"op": "take_back", "save": self._save})
        return True

    def hand_in(self, memories: Mapping[str, Memory]) -> None:
        """All that the handoff needs goes along in one message, so that no agent ever has a part of it."""
        written = self._handoff.written()
        left = {name: memory.fd for name, memory in memories.items() if memory.fd is not None}
        left[HANDOFF_NAME] = written.fileno()
        world_size = self._handoff.world_size if self._handoff.use_collectives else 1  # without, each rank saves alone
        message = {"op": "hand_in", "save": self._save, "rank": self._handoff.rank, "world_size": world_size}
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
        """Tell the agent that there is a journal entry, and pass it the lock on that. False: it has no handoff."""
        message = {"op": "begun", "save": self._save, "rank": self._handoff.rank}
        try:
            self._contact.ask(message, [lock], start=False)
        except (TierckptError, OSError) as error:
            if not is_known(error):
                log.warning("%s: the agent has lost its handoff: %s", self._handoff.uri, error)
            self.take_back()
            return False
        return True

    def hand_in_durable(self, files: tuple[FileEntry, ...]) -> bool:
        """Replace the handoff by one that says that the shards are durable: it needs no memory any more, and no lock.

        False: the agent still has the old one.
        """
        self._handoff = self._handoff.durable(files)
        try:
            self.hand_in({})
        except (TierckptError, OSError) as error:
            if not is_known(error):
                log.warning("%s: could not report to the agent that it is durable: %s", self._handoff.uri, error)
            return False
        leave_open(self)
        return True


def leave_open(handle: HandoffHandle) -> None:
    """Leave it to the coordinator, which takes back the handoffs of all ranks, or to the end of this process."""
    _open.append(handle)
    while len(_open) > OPEN_MAX:
        with contextlib.suppress(IndexError):  # another thread was faster
            _open.popleft().take_back()


def hand_in(
    settings: Settings,
    save: str,
    handoff: SaveHandoff,
    memories: Mapping[str, Memory],
    leases: Iterable[Lease] = (),
) -> HandoffHandle | None:
    """Hand in the handoff of one rank. None when that cannot be done: then the save is as safe as this process, and the
    log says why. Never fails a save, but for one whose staged copy has been dropped (CheckpointSkippedError).

    Args:
        save: as ``HandoffHandle`` has it.
        leases: on the memory that the handoff needs. It is dropped only when the handoff has been taken back.
    """
    handle = HandoffHandle(contact_for(settings), save, handoff)
    for lease in leases:
        lease.ask_before_drop(lambda: False)  # while it is handed in
    try:
        handle.hand_in(memories)
    except Exception as error:
        if not is_known(error):
            log.warning("%s is lost if this process ends before it is on the local tier: %s", handoff.uri, error)
        handle.take_back()
        return None
    finally:
        for lease in leases:
            lease.ask_before_drop(handle.take_back)
    return handle
