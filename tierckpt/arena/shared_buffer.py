"""Shared memory for shared reads: one rank fills a unit, all ranks copy it.

W1  A unit has one filler at a time: the holder of the lock on its byte, which ends with the process. Each member
    opens the file itself, since a record lock belongs to the open file.
W2  A slot is reused only when every living member has passed the unit in it: no copy is torn.
W3  The filler marks a unit as filled after its bytes; a filler that dies leaves it unmarked.
W4  Every member fills and copies in the order of the units, so the slowest member never waits for a slot.
W5  Members that do not join in time are not awaited, and can no longer join.
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

DEATH_CHECK_SECONDS = 0.1
JOIN_LOCK_SECONDS = 5.0

_WORDS_AT, _JOINED_AT, _CLOSED_AT, _DOOR_AT, _UNITS_AT = 0, 2048, 2304, 2305, 4096


@dataclass(frozen=True, slots=True)
class Process:
    """Distinct from a later one with the same pid."""

    pid: int
    began: int

    @classmethod
    def this(cls) -> Process:
        return cls(os.getpid(), start_ticks(os.getpid()))

    def is_alive(self) -> bool:
        return start_ticks(self.pid) == self.began


def reserve(slots_bytes: int) -> Memory:
    return Memory.reserve(HEADER_BYTES + slots_bytes)


class SharedWindow:
    """One member's view. Thread-safe, except that two threads must not claim the same unit."""

    def __init__(self, memory: Memory, members: Sequence[Process], own_index: int, slot_bytes: int) -> None:
        if memory.fd is None or len(members) > MEMBERS_MAX:
            raise ConfigError(f"no window for {len(members)} members in {memory!r}", hint="Use shared memory")
        self.slot_bytes = slot_bytes
        self.slots = (memory.size_bytes - HEADER_BYTES) // slot_bytes
        self._memory, self._members, self._member = memory, members, own_index
        self._is_own = True
        self._file: int = memory.fd
        self._words = memory.view[_WORDS_AT : _WORDS_AT + 8 * MEMBERS_MAX].cast("Q")
        self._dead: set[int] = set()
        self._ready: set[int] = set()
        self._checked = 0.0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, name: str, members: Sequence[Process], own_index: int, slot_bytes: int) -> SharedWindow:
        """Raises ConfigError: the memory ``name`` cannot be opened."""
        window = cls(Memory.open(name, fill=False), members, own_index, slot_bytes)
        window._is_own = False
        return window

    def join(self) -> bool:
        with self._join_lock():
            if self._memory.view[_CLOSED_AT]:
                return False
            self._memory.view[_JOINED_AT + self._member] = 1
            return True

    def close_joining(self) -> None:
        with self._join_lock():
            self._memory.view[_CLOSED_AT] = 1

    def awaited(self) -> bool:
        view = self._memory.view
        return not view[_CLOSED_AT] and any(not view[_JOINED_AT + one] for one in self._live_ranks())

    @contextlib.contextmanager
    def _join_lock(self) -> Iterator[None]:
        with self._lock:  # the threads of one member share its locks
            if not any(self._try_lock(_DOOR_AT) for _ in Poll(JOIN_LOCK_SECONDS, BRIEF)):  # held for two instructions
                raise OperationTimeoutError(
                    "another rank of this node is stuck holding the lock of the shared window",
                    waited_seconds=JOIN_LOCK_SECONDS,
                )
            try:
                yield
            finally:
                self._unlock(_DOOR_AT)

    def advance(self, unit: int) -> None:
        """Announce that this member will copy no unit before ``unit``. Never moves back."""
        if unit > self._words[self._member]:
            self._words[self._member] = unit

    @property
    def passed(self) -> int:
        """The first unit that this member may still copy."""
        return self._words[self._member]

    def _live_ranks(self) -> list[int]:
        with self._lock:
            if (now := time.monotonic()) - self._checked > DEATH_CHECK_SECONDS:
                self._checked = now
                self._dead |= {n for n, one in enumerate(self._members) if n not in self._dead and not one.is_alive()}
            return [number for number in range(len(self._members)) if number not in self._dead]

    def is_there(self, unit: int) -> bool:
        return bool(self._memory.view[_UNITS_AT + unit])

    def has_slot(self, unit: int) -> bool:
        if unit < self.slots:
            return True
        view, left = self._memory.view, unit - self.slots
        behind = [n for n in range(len(self._members)) if self._words[n] <= left]
        if not behind:
            return True
        closed = view[_CLOSED_AT]
        return not any(view[_JOINED_AT + n] or not closed for n in set(behind) & set(self._live_ranks()))

    def claim(self, unit: int) -> bool:
        """Become the filler of ``unit``. False if it has another filler or is filled."""
        if self.is_there(unit) or not self._try_lock(_UNITS_AT + unit):
            return False
        if self.is_there(unit):
            self._unlock(_UNITS_AT + unit)
            return False
        return True

    def slot(self, unit: int) -> memoryview:
        start = HEADER_BYTES + unit % self.slots * self.slot_bytes
        return self._memory.view[start : start + self.slot_bytes]

    def address(self, unit: int) -> int:
        return self._memory.address + HEADER_BYTES + unit % self.slots * self.slot_bytes

    def make_ready(self, unit: int, size_bytes: int) -> None:
        slot = unit % self.slots
        if slot not in self._ready:
            self._ready.add(slot)
            self._memory.make_huge(HEADER_BYTES + slot * self.slot_bytes, size_bytes)

    def release(self, unit: int, *, filled: bool) -> None:
        """End a claim. The system call orders the bytes before the mark."""
        if filled:
            self._memory.view[_UNITS_AT + unit] = 1
        self._unlock(_UNITS_AT + unit)

    def _try_lock(self, offset: int) -> bool:
        try:
            return lock_record(self._file, fcntl.F_WRLCK, offset)
        except OSError as error:
            raise CapacityError(f"shared memory cannot be locked: {error.strerror}") from error

    def _unlock(self, offset: int) -> None:
        lock_record(self._file, fcntl.F_UNLCK, offset)

    def leave(self) -> None:
        """The last member frees the pages. The own memory stays open for late members."""
        self.advance(PASSED_ALL)
        if all(self._words[one] == PASSED_ALL for one in self._live_ranks()):
            self._memory.discard()
        if not self._is_own:
            self._memory.close()
