"""Shared memory through which the ranks of a node read files: one rank fills a unit, all ranks copy it.

A memory file of one rank, without a name in any file system, which the others open through ``/proc/PID/fd/N``. Its
pages come with their first use. It holds, one after another: a word for each member that says how far it is, a byte for
each unit that says whether it is there, and the slots. Unit ``n`` goes to slot ``n`` modulo their number.

Invariants:
    W1  A unit has one filler at a time: who has locked its byte. The kernel takes the lock back when a process ends.
    W2  A slot gets its next unit when every living member has gone past the one in it: nobody's copy is torn.
    W3  A unit is declared there by its filler, after its bytes; a filler that died leaves it as not there.
    W4  Every member fills and takes in the order of the units, so whoever is furthest behind never waits for a slot.
    W5  Who does not come in time is not waited for, and does not get in any more (``join``).

W1: each member opens the file for itself, since a record lock belongs to the open file (``disk/file_lock.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..disk.file_lock import lock_record
from ..disk.processes import start_ticks
from ..errors import CapacityError, ConfigError, OperationTimeoutError
from ..poll import BRIEF, Poll
from .memory import HUGE_PAGE_BYTES, Memory

MEMBERS_MAX = 256
HEADER_BYTES = HUGE_PAGE_BYTES
UNITS_MAX = HEADER_BYTES - 4096
PASSED_ALL = (1 << 64) - 1
"""How far a member is that will take nothing more."""

DEATH_CHECK_SECONDS = 0.1
DOOR_SECONDS = 5.0

_WORDS_AT, _JOINED_AT, _CLOSED_AT, _DOOR_AT, _UNITS_AT = 0, 2048, 2304, 2305, 4096


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine, distinct from a later one with the same pid."""

    pid: int
    began: int

    @classmethod
    def this(cls) -> Process:
        return cls(os.getpid(), start_ticks(os.getpid()))

    def lives(self) -> bool:
        return start_ticks(self.pid) == self.began


def reserve(slots_bytes: int) -> Memory:
    """Return the memory of a new window. It costs addresses; memory comes with use.

    Raises:
        CapacityError: the node has not got that much to give.
    """
    return Memory.reserve(HEADER_BYTES + slots_bytes)


class Window:
    """One member's view of a window. Thread-safe, but for claims: two threads of a member must not claim one unit."""

    def __init__(self, memory: Memory, members: Sequence[Process], me: int, slot_bytes: int) -> None:
        if memory.fd is None or len(members) > MEMBERS_MAX:
            raise ConfigError(f"no window for {len(members)} members in {memory!r}", hint="It takes shared memory")
        self.slot_bytes = slot_bytes
        self.slots = (memory.size_bytes - HEADER_BYTES) // slot_bytes
        self._memory, self._members, self._me = memory, members, me
        self._is_own = True
        self._file: int = memory.fd
        self._words = memory.view[_WORDS_AT : _WORDS_AT + 8 * MEMBERS_MAX].cast("Q")
        self._dead: set[int] = set()
        self._ready: set[int] = set()
        self._checked = 0.0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, name: str, members: Sequence[Process], me: int, slot_bytes: int) -> Window:
        """Return the window in the memory that another member calls ``name``.

        Raises:
            ConfigError: there is none: its owner has ended, or may not be looked into.
        """
        window = cls(Memory.open(name, fill=False), members, me, slot_bytes)
        window._is_own = False
        return window

    # --- who takes part -----------------------------------------------------------------------------------------

    def join(self) -> bool:
        """Take part from here on. False: the others have begun without."""
        with self._door():
            if self._memory.view[_CLOSED_AT]:
                return False
            self._memory.view[_JOINED_AT + self._me] = 1
            return True

    def close_door(self) -> None:
        """Go on without those who have not joined."""
        with self._door():
            self._memory.view[_CLOSED_AT] = 1

    def awaited(self) -> bool:
        """True while a living member has not joined and still may."""
        view = self._memory.view
        return not view[_CLOSED_AT] and any(not view[_JOINED_AT + one] for one in self._living())

    @contextlib.contextmanager
    def _door(self) -> Iterator[None]:
        with self._lock:  # the threads of one member share its locks
            if not any(self._try_lock(_DOOR_AT) for _ in Poll(DOOR_SECONDS, BRIEF)):  # held for two instructions
                raise OperationTimeoutError(
                    "another rank of this node stands still between two instructions", waited_seconds=DOOR_SECONDS
                )
            try:
                yield
            finally:
                self._unlock(_DOOR_AT)

    def advance(self, unit: int) -> None:
        """Say that this member will take nothing before ``unit``. It never goes back."""
        if unit > self._words[self._me]:
            self._words[self._me] = unit

    @property
    def passed(self) -> int:
        """The first unit that this member has not said to be past."""
        return self._words[self._me]

    def _living(self) -> list[int]:
        with self._lock:
            if (now := time.monotonic()) - self._checked > DEATH_CHECK_SECONDS:
                self._checked = now
                self._dead |= {n for n, one in enumerate(self._members) if n not in self._dead and not one.lives()}
            return [number for number in range(len(self._members)) if number not in self._dead]

    # --- units --------------------------------------------------------------------------------------------------

    def is_there(self, unit: int) -> bool:
        return bool(self._memory.view[_UNITS_AT + unit])

    def has_slot(self, unit: int) -> bool:
        """True when everybody is past the unit that lies in the slot of ``unit``."""
        if unit < self.slots:
            return True
        view, left = self._memory.view, unit - self.slots
        behind = [n for n in range(len(self._members)) if self._words[n] <= left]
        if not behind:
            return True
        closed = view[_CLOSED_AT]
        return not any(view[_JOINED_AT + n] or not closed for n in set(behind) & set(self._living()))

    def claim(self, unit: int) -> bool:
        """Become the filler of ``unit``. False: another one is, or it is there."""
        if self.is_there(unit) or not self._try_lock(_UNITS_AT + unit):
            return False
        if self.is_there(unit):  # its filler was done between the two
            self._unlock(_UNITS_AT + unit)
            return False
        return True

    def slot(self, unit: int) -> memoryview:
        start = HEADER_BYTES + unit % self.slots * self.slot_bytes
        return self._memory.view[start : start + self.slot_bytes]

    def address(self, unit: int) -> int:
        return self._memory.address + HEADER_BYTES + unit % self.slots * self.slot_bytes

    def make_ready(self, unit: int, size_bytes: int) -> None:
        """Put the memory in place for ``size_bytes`` of a claimed unit, in huge pages if there are any to be had."""
        slot = unit % self.slots
        if slot not in self._ready:
            self._ready.add(slot)
            self._memory.make_huge(HEADER_BYTES + slot * self.slot_bytes, size_bytes)

    def release(self, unit: int, *, filled: bool) -> None:
        """End a claim; ``filled`` declares the unit to be there. The system call orders the bytes before the word."""
        if filled:
            self._memory.view[_UNITS_AT + unit] = 1
        self._unlock(_UNITS_AT + unit)

    # --- locks --------------------------------------------------------------------------------------------------

    def _try_lock(self, at: int) -> bool:
        try:
            return lock_record(self._file, fcntl.F_WRLCK, at)
        except OSError as error:
            raise CapacityError(f"shared memory cannot be locked: {error.strerror}") from error

    def _unlock(self, at: int) -> None:
        lock_record(self._file, fcntl.F_UNLCK, at)

    def leave(self) -> None:
        """Take no part any more. The last to leave gives the pages back. Own memory stays open, for those to come."""
        self.advance(PASSED_ALL)
        if all(self._words[one] == PASSED_ALL for one in self._living()):
            self._memory.discard()
        if not self._is_own:
            self._memory.close()
