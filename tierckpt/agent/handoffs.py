"""Handoffs: staged saves of living trainers, which the agent finishes if the trainers die (``dcp/handoff/finish.py``).

Each rank hands in its staged memory and a description of its files; later also the lock on its journal entry. The first
rank that sees the save end withdraws all handoffs. If all owners end before, the agent executes them, if every rank has
handed one in; else it frees the memory.

    E1  A handoff is executed only when no live process can finish or abandon the save.
    E2  Memory is held exactly until its handoff ends.
    E3  Executing twice is harmless: the second run finds the save committed, or its journal entry gone.
    E4  From the report that a rank has started to write until its handoff ends, no other process can adopt or
        remove the rank's journal entry.
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
from ..process_start import ended, start_with_order
from ..resources import Tasks
from ..telemetry import logger
from ..types import Json

log = logger("agent")

EXECUTION_SECONDS_MAX = 1800.0
STRAGGLER_SECONDS = 3.0
"""A save waits this long for another handoff after its owners exited."""
ENDED_MAX = 256


@dataclass(eq=False)
class ClientProcess:
    pid: int
    is_alive: bool = True


@dataclass(eq=False)
class HeldHandoff:
    owner: ClientProcess
    descriptors: dict[str, int]
    has_begun: bool = False

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors = {}


@dataclass(eq=False)
class SaveHandoffs:
    name: str
    world_size: int
    is_of_this_node: bool
    """All ranks run on this node."""
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
    """All handoffs of a node, on the agent's event loop.

    ``on_ended`` is called when a save of dead ranks is finished or abandoned.
    """

    def __init__(self, on_ended: Callable[[], object] = lambda: None) -> None:
        self._on_ended = on_ended
        self._saves: dict[str, SaveHandoffs] = {}
        self._ended: deque[str] = deque(maxlen=ENDED_MAX)
        self._finishing: set[SaveHandoffs] = set()
        self._tasks = Tasks()
        self._executing: dict[int, int] = {}
        """Write end of the life pipe of each executor, by process id."""
        self.executed = 0

    @property
    def is_empty(self) -> bool:
        return not self._saves and not self._tasks

    @property
    def saves(self) -> list[SaveHandoffs]:
        return [*self._saves.values(), *self._finishing]

    @property
    def size_bytes(self) -> int:
        """Shared files count once."""
        kept = [
            os.fstat(fd)
            for save in self.saves
            for handoff in save.by_rank.values()
            for fd in handoff.descriptors.values()
        ]
        return sum({(status.st_dev, status.st_ino): status.st_size for status in kept}.values())

    def progress(self) -> Json:
        """``work`` increases while an executor makes progress."""
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
        """Take ownership of the descriptors. A rank's second handoff replaces its first."""
        handoff = HeldHandoff(owner, descriptors)
        if name in self._ended:  # another rank has failed
            handoff.close()
            return
        save = self._saves.setdefault(name, SaveHandoffs(name, world_size, is_of_this_node))
        old, save.by_rank[rank] = save.by_rank.get(rank), handoff
        if old is not None:
            old.close()

    def write_started(self, name: str, rank: int, lock: int | None) -> None:
        """Keep the lock on the rank's journal entry. Raises KeyError: unknown handoff."""
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
        self._ended.append(name)
        save = self._saves.pop(name, None)
        if save is None:
            return
        save.close()
        if not all(handoff.owner.is_alive for handoff in save.by_rank.values()):
            self._on_ended()

    def process_exited(self, owner: ClientProcess) -> None:
        owner.is_alive = False
        for save in list(self._saves.values()):
            if not save.has_living_owner and any(handoff.owner is owner for handoff in save.by_rank.values()):
                self._tasks.spawn(self._finish(save), f"handoff {save.name}")

    def leave(self) -> None:
        for life in self._executing.values():
            with contextlib.suppress(OSError):
                os.write(life, b".")

    async def finished(self) -> None:
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _finish(self, save: SaveHandoffs) -> None:
        if not save.is_complete:
            await asyncio.sleep(STRAGGLER_SECONDS)
        if save.has_living_owner or self._saves.get(save.name) is not save:
            return  # a late handoff arrived: its owner's exit calls this again; or the save ended
        del self._saves[save.name]
        self._finishing.add(save)
        try:
            if save.is_complete or not save.is_of_this_node:
                await self._execute(save)
                self.executed += 1
            else:
                log.warning(
                    "a staged save is lost: only %d of its %d ranks had staged it on this node when they ended",
                    len(save.by_rank),
                    save.world_size,
                )
        except Exception as error:
            log.error("a staged save cannot be written to the local tier: %s", error)
        finally:
            save.close()
            self._finishing.discard(save)
            self._on_ended()

    async def _execute(self, save: SaveHandoffs) -> None:
        """Flush and commit in a child process, which imports torch.

        It outlives an agent that exits in order (``leave``), but not a killed one: a restarted job would not wait for
        it.
        """
        process, life = start_executor(save)
        self._executing[process.pid] = life
        try:
            await ended(process, EXECUTION_SECONDS_MAX)
        finally:
            os.close(self._executing.pop(process.pid))


def _work_of(pid: int) -> int:
    """Return CPU nanoseconds plus bytes written."""
    done = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        done = int(Path(f"/proc/{pid}/io").read_text().split()[3])
        for task in Path(f"/proc/{pid}/task").iterdir():
            done += int((task / "schedstat").read_text().split()[0])
    return done


def start_executor(save: SaveHandoffs) -> tuple[subprocess.Popen[bytes], int]:
    """Return the process, and the pipe that ends it when closed without a byte."""
    left = [save.by_rank[rank] for rank in sorted(save.by_rank)]
    descriptions = [{"descriptors": handoff.descriptors, "has_begun": handoff.has_begun} for handoff in left]
    descriptors = tuple(fd for handoff in save.by_rank.values() for fd in handoff.descriptors.values())
    order: Json = {"save": save.name, "descriptions": descriptions}
    return start_with_order("tierckpt.dcp.handoff.finish", order, descriptors)
