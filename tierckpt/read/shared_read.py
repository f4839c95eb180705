"""Shared reads: of bytes that several ranks of a node want, one rank reads each unit, and all copy it from memory.

They agree before the load on which bytes those are (``agree``), from the byte ranges that each of them wants. Then each
walks through the units that it needs, in one order: copies what is there, else reads and verifies what nobody reads and
puts it into the window (arena/shared_buffer.py), else waits. So the reading divides by speed: a slow rank reads
less, and
the unit that a killed one had begun is read by another.

Nobody depends on another rank: who waits longer than ``timeout_seconds`` without taking anything reads the rest for
itself. That costs time and reads, and nothing else.
"""

from __future__ import annotations

import bisect
import ctypes
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..arena.memory import Memory
from ..arena.shared_buffer import PASSED_ALL, UNITS_MAX, Process, Window
from ..arena.slots import BounceBufferPool
from ..errors import CapacityError, OperationTimeoutError, TierckptError
from ..poll import Pauses, Poll
from ..quantities import round_up
from ..telemetry import READS_ALONE, logger
from ..types import ByteRange
from .parallel_read import REQUESTS_MAX, OnError, Piece, pull
from .read_threads import ReadThreads, Worker
from .replicated_file import ReplicatedFile

log = logger("restore")

UNIT_BYTES = 8 << 20
"""What is read at once, where chunks are not larger."""
SLOTS, SLOTS_MIN = 16, 4
"""Slots of a small window, and of the smallest that is of use."""
JOIN_SECONDS = 10.0
"""How long the others wait, when they could go on, for a rank that has not begun to read."""
THREADS = 4
"""Of one rank: they read, digest and copy; others wait for the answers of stores."""
UNIT_PAUSES = Pauses(0.0003, 0.005)

Ranges: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ReadInterest:
    """What one rank says of itself before a load.

    Attributes:
        group: who may read together: the same node, the same checkpoint, cut in the same way.
        window: the name of the memory it has made, should it be the one to be used.
        wanted: the bytes of each file that it wants, in order, apart from each other.
        verify_block_bytes: what is read of a file begins and ends at multiples of this.
        unit_bytes: what one unit has at most; no chunk lies in two units.
    """

    group: str
    process: Process
    window: str
    window_bytes: int
    wanted: Mapping[str, Ranges]
    verify_block_bytes: int
    unit_bytes: int


@dataclass(frozen=True, slots=True)
class SharedReadPlan:
    """What the ranks of one node read together through the window of the first: these files, then these ranges."""

    members: tuple[Process, ...]
    me: int
    window: str
    unit_bytes: int
    ranges: Mapping[str, Ranges]


def unit_bytes(chunk_size_bytes: int, window_bytes: int) -> int:
    """What one unit has at most, of a checkpoint of these chunks: whole ones."""
    return chunk_size_bytes * max(1, min(UNIT_BYTES, window_bytes // SLOTS) // chunk_size_bytes)


def agree(offers: Sequence[ReadInterest | None]) -> list[SharedReadPlan | None]:
    """Return for each rank what it reads together with others; None: nothing. Pure, and cheap: it sees ranges only."""
    pacts: list[SharedReadPlan | None] = [None] * len(offers)
    groups: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        if offer is not None:
            groups.setdefault(offer.group, []).append(rank)
    for ranks in groups.values():
        members = [offer for rank in ranks if (offer := offers[rank]) is not None]
        if len(members) < 2 or members[0].unit_bytes * SLOTS_MIN > members[0].window_bytes:
            continue
        ranges = _common(members)
        if not ranges:
            continue
        processes = tuple(offer.process for offer in members)
        for number, rank in enumerate(ranks):
            pacts[rank] = SharedReadPlan(processes, number, members[0].window, members[0].unit_bytes, ranges)
    return pacts


def _common(offers: Sequence[ReadInterest]) -> dict[str, Ranges]:
    """The ranges of each file that more than one of ``offers`` wants, cut to the grain. No more than a window counts.

    Bytes that only the grain has in common are not: two ranks that want neighbouring rows read them apart.
    """
    grain, unit = offers[0].verify_block_bytes, offers[0].unit_bytes
    room = UNITS_MAX
    common: dict[str, Ranges] = {}
    for name in sorted(set(itertools.chain.from_iterable(offer.wanted for offer in offers))):
        ranges: list[tuple[int, int]] = []
        for start, stop in overlaps(offer.wanted.get(name, ()) for offer in offers):
            start, stop = start // grain * grain, round_up(stop, grain)
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
            else:
                ranges.append((start, stop))
        room -= sum(stop // unit - start // unit + 1 for start, stop in ranges)
        if room < 0:
            log.info("from %s on every rank reads for itself: more than %d units", name, UNITS_MAX)
            break
        if ranges:
            common[name] = ranges
    return common


def overlaps(lists: Iterable[Ranges]) -> list[tuple[int, int]]:
    """The ranges that at least two of ``lists`` have. Each list is in order, and no two of its ranges meet."""
    edges = heapq.merge(*([edge for start, stop in ranges for edge in ((start, 1), (stop, -1))] for ranges in lists))
    found: list[tuple[int, int]] = []
    depth = begun = 0
    for at, step in edges:
        depth += step
        if depth == 2 and step == 1:
            begun = at
        elif depth == 1 and step == -1 and at > begun:
            found.append((begun, at))
    return found


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """``ranges`` in order, those that meet as one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif stop > start:
            found.append((start, stop))
    return found


class Units:
    """The units of a pact: numbered through the files in order of their names."""

    def __init__(self, pact: SharedReadPlan) -> None:
        size, number = pact.unit_bytes, 0
        self._starts: dict[str, list[int]] = {}
        self._stops: dict[str, list[int]] = {}
        self._first: dict[str, int] = {}
        for name in sorted(pact.ranges):
            cuts = [cut for start, stop in pact.ranges[name] for cut in _cut(start, stop, size)]
            self._starts[name], self._stops[name] = [cut[0] for cut in cuts], [cut[1] for cut in cuts]
            self._first[name] = number
            number += len(cuts)

    def first_of(self, name: str, start: int, stop: int) -> int | None:
        """The first unit that has some of these bytes."""
        if name not in self._starts:
            return None
        at = bisect.bisect_right(self._stops[name], start)
        return self._first[name] + at if at < len(self._starts[name]) and self._starts[name][at] < stop else None

    def cut(self, name: str, start: int, stop: int) -> list[tuple[int, int, int | None]]:
        """These bytes, as parts that lie in one unit or in none: (start, stop, unit)."""
        if name not in self._starts:
            return [(start, stop, None)]
        parts: list[tuple[int, int, int | None]] = []
        starts, stops, first = self._starts[name], self._stops[name], self._first[name]
        at = bisect.bisect_right(stops, start)
        while start < stop:
            begin, end = (starts[at], stops[at]) if at < len(starts) else (stop, stop)
            if start < begin:
                parts.append((start, min(begin, stop), None))
            else:
                parts.append((start, min(end, stop), first + at))
                at += 1
            start = parts[-1][1]
        return parts

    def range(self, name: str, unit: int) -> ByteRange:
        at = unit - self._first[name]
        return ByteRange(self._starts[name][at], self._stops[name][at])


def _cut(start: int, stop: int, size: int) -> Iterable[tuple[int, int]]:
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end


@dataclass(slots=True)
class _Job:
    """One unit of this rank: where it comes from, and the pieces of it that are wanted."""

    copies: ReplicatedFile
    at: ByteRange
    pieces: list[Piece] = field(default_factory=list)


class SharedRead:
    """One rank's part in a load that it does with others of its node. ``leave`` when nothing more is to be read."""

    def __init__(self, pact: SharedReadPlan, window: Window, timeout_seconds: float) -> None:
        self.units = Units(pact)
        self._window, self._timeout_seconds = window, timeout_seconds
        self._alone = not self._try(window.join)
        if self._alone:
            self._give_up("the others have begun without this one")

    @property
    def is_alone(self) -> bool:
        """True when this rank has given up on the others."""
        return self._alone

    def leave(self) -> None:
        """Take no part any more. The window stays good for the others."""
        self._window.leave()

    def pull(
        self,
        wanted: Sequence[tuple[ReplicatedFile, Sequence[Piece]]],
        buffers: BounceBufferPool,
        *,
        later: int | None,
        on_error: OnError = lambda *_: None,
    ) -> None:
        """``read.parallel_read.pull``, but bytes of the pact are read once for all ranks of the node.

        Args:
            later: the first unit that a later call may need (again); None: there is no such call.
        """
        origins: dict[int, Piece] = {}
        jobs, own = self._divide(wanted, origins)
        # What this call needs itself must not wait for a later one: then the unit is read again.
        after = PASSED_ALL if later is None else max(later, max(jobs, default=0))

        def blame(error: TierckptError, copies: ReplicatedFile, piece: Piece) -> None:
            on_error(error, copies, origins.get(id(piece), piece))

        if jobs:
            left = Crew(self._window, jobs, after, buffers, blame).copied(self._timeout_seconds)
            if left:
                self._give_up(f"nothing has come from them for {self._timeout_seconds:g} s")
                for job in left:
                    own.setdefault(job.copies, []).extend(job.pieces)
        if not self._alone:
            self._window.advance(after)
        for pieces in own.values():
            pieces.sort(key=lambda piece: piece.start)
        pull(list(own.items()), buffers, on_error=blame)

    def _divide(
        self, wanted: Sequence[tuple[ReplicatedFile, Sequence[Piece]]], origins: dict[int, Piece]
    ) -> tuple[dict[int, _Job], dict[ReplicatedFile, list[Piece]]]:
        """What is to be read together, by unit, and what by this rank alone. ``origins``: what parts are parts of."""
        jobs: dict[int, _Job] = {}
        own: dict[ReplicatedFile, list[Piece]] = {}
        for copies, pieces in wanted:
            name = copies.entry.path
            for piece in pieces:
                for start, stop, unit in self.units.cut(name, piece.start, piece.stop):
                    part = piece
                    if (start, stop) != (piece.start, piece.stop):
                        part = piece._replace(start=start, stop=stop, address=piece.address + start - piece.start)
                        origins[id(part)] = piece
                    if unit is None or self._alone or unit < self._window.passed:
                        own.setdefault(copies, []).append(part)
                        continue
                    if unit not in jobs:
                        at = self.units.range(name, unit)
                        jobs[unit] = _Job(copies, ByteRange(at.start, min(at.stop, copies.entry.size_bytes)))
                    jobs[unit].pieces.append(part)
        return jobs, own

    def _try(self, action: Callable[[], bool]) -> bool:
        try:
            return action()
        except (OperationTimeoutError, CapacityError) as error:
            log.debug("%s", error)
            return False

    def _give_up(self, reason: str) -> None:
        """From here on this rank reads for itself."""
        self._alone = True
        self._window.advance(PASSED_ALL)
        READS_ALONE.emit(1)
        log.warning("this rank reads alone what other ranks of its node read too: %s", reason)


class _Patience:
    """A wait that ends ``seconds`` after the last sign of progress."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.begin()

    def begin(self) -> None:
        self._last, self._poll = time.monotonic(), Poll(self._seconds, UNIT_PAUSES)

    @property
    def waited_seconds(self) -> float:
        return time.monotonic() - self._last

    def go_on(self) -> bool:
        """Sleep a little. False when the time is up."""
        return self._poll.pause()


class Crew(ReadThreads):
    """The threads of one rank, on the units of one window of its load."""

    def __init__(
        self, window: Window, jobs: Mapping[int, _Job], after: int, buffers: BounceBufferPool, on_error: OnError
    ) -> None:
        is_remote = any(job.copies.is_remote for job in jobs.values())
        count = min(REQUESTS_MAX if is_remote else THREADS, buffers.count_max, len(jobs))
        super().__init__([Worker(self._work, "tierckpt-together")] * count, buffers)
        self._window, self._jobs, self._after, self._on_error = window, jobs, after, on_error
        self._order = sorted(jobs)
        self._open = set(jobs)
        """Units that are not copied yet; ``_order`` from ``_at`` on has all of them."""
        self._busy: set[int] = set()
        self._at = 0
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._patience = _Patience(0)
        self._is_over = False
        """Nothing has come for too long."""

    def copied(self, timeout_seconds: float) -> list[_Job]:
        """Copy all units. Return what was not had within ``timeout_seconds`` of the unit before."""
        self._patience = _Patience(timeout_seconds)
        self._advance()
        self.run()
        return [self._jobs[unit] for unit in sorted(self._open)]

    def _work(self, _: Memory | None) -> None:
        while (task := self._next()) is not None:
            unit, is_claimed = task
            if is_claimed:
                self._fill(unit)
            self.take_unit(unit)

    def _next(self) -> tuple[int, bool] | None:
        """Wait for a unit to copy, or to read first (True). None: there is nothing more to do. One thread looks."""
        with self._turn:
            while not self._is_over and self.error is None:
                task = self._look()
                if task is not None:
                    return task
                with self._lock:
                    if not self._open - self._busy:
                        return None
                    if self._busy:
                        self._patience.begin()  # a thread of ours is at work: a wait for the disk, not for others
                if self._patience.waited_seconds > JOIN_SECONDS and self._window.awaited():
                    self._window.close_door()
                elif not self._patience.go_on():
                    self._is_over = True
        return None

    def _look(self) -> tuple[int, bool] | None:
        """What can be done now: a unit that is there before one that is to be read, earlier ones first."""
        with self._lock:
            near = [unit for unit in self._near() if unit not in self._busy]
            found = next(((unit, False) for unit in near if self._window.is_there(unit)), None)
            if found is None:
                found = next(
                    ((unit, True) for unit in near if self._window.has_slot(unit) and self._window.claim(unit)), None
                )
            if found is not None:
                self._busy.add(found[0])
            return found

    def _near(self) -> Iterable[int]:
        """The units still to be copied that a slot may hold."""
        near = [unit for unit in self._order[self._at : self._at + self._window.slots] if unit in self._open]
        return itertools.takewhile(lambda unit: unit < near[0] + self._window.slots, near)

    def _fill(self, unit: int) -> None:
        job, filled = self._jobs[unit], False
        try:
            self._window.make_ready(unit, job.at.stop - job.at.start)
            whole = Piece(job.at.start, job.at.stop, self._window.address(unit))
            pull(
                [(job.copies, [whole])],
                self._buffers,
                on_error=lambda error, copies, _: self._on_error(error, copies, job.pieces[0]),
            )
            filled = True
        finally:
            self._window.release(unit, filled=filled)

    def take_unit(self, unit: int) -> None:
        job, base = self._jobs[unit], self._window.address(unit)
        for piece in job.pieces:
            ctypes.memmove(piece.address, base + piece.start - job.at.start, piece.stop - piece.start)
        with self._lock:
            self._open.discard(unit)
            self._busy.discard(unit)
            self._patience.begin()
            self._advance()

    def _advance(self) -> None:
        while self._at < len(self._order) and self._order[self._at] not in self._open:
            self._at += 1
        ahead = self._order[self._at] if self._at < len(self._order) else PASSED_ALL
        self._window.advance(min(ahead, self._after))
