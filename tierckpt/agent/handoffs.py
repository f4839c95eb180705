"""Handoffs: holds the staged saves of living trainers, and has those of dead ones finished (``dcp/handoff/finish.py``).

Each rank of a save hands in a *handoff* once its state is staged, all of it by descriptor: which bytes go where, and
the memory that holds them. When it begins to write, it passes the lock on its journal entry too, so that the lock
outlives the rank. The first rank that sees the save end, well or not, takes back the handoffs of all ranks.

When all owners of a save's handoffs have ended before that, the handoffs are executed, if every rank of the save has
handed one in, here or on another node (``dcp/handoff/multi_node.py``): nothing else can complete the save any more.
Otherwise the save never existed, and its memory is freed.

Invariants:
    E1  A handoff is executed only when nobody who could still finish or give up that save is alive.
    E2  Memory is held as long as a handoff that has not ended needs it; no longer.
    E3  Executing twice is harmless: the second finds the save committed, or its journal entry gone.
    E4  From when a rank reports that it has begun until its handoff has ended, no other process can take up or remove
        the rank's journal entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..ipc.agent_client import LOCK_NAME
from ..ipc.child_process import ended, start_with_order
from ..telemetry import logger
from ..types import Json

log = logger("agent")

EXECUTION_SECONDS_MAX = 1800.0
STRAGGLER_SECONDS = 3.0
"""How long a save whose other ranks are gone is kept for a rank that may still hand in its handoff."""
ENDED_MAX = 256
"""Saves whose end is remembered, for handoffs that come late."""


@dataclass(eq=False)
class ClientProcess:
    """A process that talks to the agent."""

    pid: int
    is_alive: bool = True


@dataclass(eq=False)
class HeldHandoff:
    """One rank's handoff, as the agent has it: descriptors by name (``dcp/handoff/description.py``)."""

    owner: ClientProcess
    descriptors: dict[str, int]
    has_begun: bool = False
    """There is a journal entry."""

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors = {}


@dataclass(eq=False)
class SaveHandoffs:
    """The handoffs of one save, by rank."""

    name: str
    world_size: int
    is_of_this_node: bool
    """No rank of it is on another node."""
    by_rank: dict[int, HeldHandoff] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.by_rank) == self.world_size

    @property
    def has_living_owner(self) -> bool:
        return any(handoff.owner.is_alive for handoff in self.by_rank.values())

    def close(self) -> None:
        for handoff in self.by_rank.values():
            handoff.close()


class Handoffs:
    """All handoffs of a node. One per agent; its methods run on the agent's event loop.

    Args:
        on_ended: called when a save that dead ranks have left is finished or given up.
    """

    def __init__(self, on_ended: Callable[[], None] = lambda: None) -> None:
        self._on_ended = on_ended
        self._saves: dict[str, SaveHandoffs] = {}
        self._ended: deque[str] = deque(maxlen=ENDED_MAX)
        self._finishing: set[SaveHandoffs] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._executing: dict[int, int] = {}
        """Processes that execute handoffs, and the pipe at whose end each ends."""
        self.executed = 0

    @property
    def is_empty(self) -> bool:
        return not self._saves and not self._tasks

    @property
    def saves(self) -> list[SaveHandoffs]:
        return [*self._saves.values(), *self._finishing]

    @property
    def size_bytes(self) -> int:
        """Memory that the handoffs keep, each piece counted once."""
        kept = [
            os.fstat(fd)
            for save in self.saves
            for handoff in save.by_rank.values()
            for fd in handoff.descriptors.values()
        ]
        return sum({(status.st_dev, status.st_ino): status.st_size for status in kept}.values())

    def progress(self) -> Json:
        """What is being executed, and a number that changes as long as something comes of it."""
        return {
            "saves": len(self._finishing),
            "size_bytes": self.size_bytes,
            "work": sum(_work_of(pid) for pid in self._executing),
        }

    def has_handoff_of(self, owner: ClientProcess) -> bool:
        return any(handoff.owner is owner for save in self._saves.values() for handoff in save.by_rank.values())

    def hand_in(
        self,
        owner: ClientProcess,
        name: str,
        rank: int,
        world_size: int,
        is_of_this_node: bool,
        descriptors: dict[str, int],
    ) -> None:
        """Take in a handoff, and own its descriptors. A second one of a rank replaces the first."""
        handoff = HeldHandoff(owner, descriptors)
        if name in self._ended:  # another rank has failed meanwhile
            handoff.close()
            return
        save = self._saves.setdefault(name, SaveHandoffs(name, world_size, is_of_this_node))
        old, save.by_rank[rank] = save.by_rank.get(rank), handoff
        if old is not None:
            old.close()

    def begun(self, name: str, rank: int, lock: int | None) -> None:
        """The rank has a journal entry now, and this is the lock on it: kept here from now on.

        Raises KeyError when there is no such handoff, and the save has not ended either.
        """
        save = self._saves.get(name)
        if save is None or rank not in save.by_rank:
            if lock is not None:
                os.close(lock)
            if name not in self._ended:
                raise KeyError(f"no handoff of rank {rank}")
            return
        save.by_rank[rank].has_begun = True
        if lock is not None:
            save.by_rank[rank].descriptors[LOCK_NAME] = lock

    def take_back(self, name: str) -> None:
        """The save has ended: there is nothing to execute any more, whichever rank it was that saw it."""
        self._ended.append(name)
        save = self._saves.pop(name, None)
        if save is None:
            return
        save.close()
        if not all(handoff.owner.is_alive for handoff in save.by_rank.values()):
            self._on_ended()

    def gone(self, owner: ClientProcess) -> None:
        """``owner`` has ended. Finishes every save that nobody alive can end any more."""
        owner.is_alive = False
        for save in list(self._saves.values()):
            if not save.has_living_owner and any(handoff.owner is owner for handoff in save.by_rank.values()):
                self._start(save)

    def _start(self, save: SaveHandoffs) -> None:
        task = asyncio.create_task(self._finish(save), name=f"handoff {save.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def leave(self) -> None:
        """The agent ends in order: let what is being executed go on."""
        for life in self._executing.values():
            with contextlib.suppress(OSError):
                os.write(life, b".")

    async def finished(self) -> None:
        """Return when nothing is being executed."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _finish(self, save: SaveHandoffs) -> None:
        if not save.is_complete:
            await asyncio.sleep(STRAGGLER_SECONDS)
        if save.has_living_owner or self._saves.get(save.name) is not save:
            return  # a straggler has come, and its own end brings us back here; or that end was faster
        del self._saves[save.name]
        self._finishing.add(save)
        try:
            await self._finish_now(save)
        except Exception as error:
            log.error("a staged save could not be brought to the local tier: %s", error)
        finally:
            save.close()
            self._finishing.discard(save)
            self._on_ended()

    async def _finish_now(self, save: SaveHandoffs) -> None:
        if save.is_complete or not save.is_of_this_node:
            await self._execute(save)
            self.executed += 1
            return
        log.warning(
            "a staged save is lost: %d of its %d ranks had staged it on this node when they ended",
            len(save.by_rank),
            save.world_size,
        )

    async def _execute(self, save: SaveHandoffs) -> None:
        """Flush and commit in a process of its own: it needs torch, and the agent stays small and alive all the same.

        Should the agent be told to end meanwhile, it goes on (``leave``): it has all that it needs. Should the agent be
        killed, it ends: the job that is started again would not wait for it.
        """
        process, life = start_executor(save)
        self._executing[process.pid] = life
        try:
            await ended(process, EXECUTION_SECONDS_MAX)
        finally:
            os.close(self._executing.pop(process.pid))


def _work_of(pid: int) -> int:
    """What a process has done so far: nanoseconds on processors, and bytes written."""
    done = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        done = int(Path(f"/proc/{pid}/io").read_text().split()[3])  # wchar
        for task in Path(f"/proc/{pid}/task").iterdir():
            done += int((task / "schedstat").read_text().split()[0])
    return done


def start_executor(save: SaveHandoffs) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and our end of the pipe that its life hangs on."""
    left = [save.by_rank[rank] for rank in sorted(save.by_rank)]
    told = [{"descriptors": handoff.descriptors, "has_begun": handoff.has_begun} for handoff in left]
    descriptors = tuple(fd for handoff in save.by_rank.values() for fd in handoff.descriptors.values())
    order: Json = {"save": save.name, "descriptions": told}
    return start_with_order("tierckpt.dcp.handoff.finish", order, descriptors)
