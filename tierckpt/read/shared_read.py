"""Shared reads: ranks of a node read common bytes once, through shared memory.

One rank divides into units the byte ranges that several ranks of a node read. Each rank copies them from the window
(arena/shared_buffer.py) in order, and reads and verifies those that no rank has claimed.

No rank depends on another: another rank reads the unit of a killed one, and a rank without progress for some time reads
the remaining units itself.
"""

from __future__ import annotations

import bisect
import ctypes
import heapq
import itertools
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ..arena.memory import Memory
from ..arena.shared_buffer import PASSED_ALL, UNITS_MAX, Process, SharedWindow
from ..arena.slots import BounceBufferPool
from ..errors import CapacityError, OperationTimeoutError, TierckptError
from ..poll import Pauses, Poll
from ..quantities import round_up
from ..telemetry import READS_ALONE, logger
from ..types import ByteRange
from .parallel_read import REQUESTS_MAX, OnError, Piece, Pull, Wanted, Worker, WorkerThreads, pull
from .replicated_file import ReplicatedFile

log = logger("restore")

T = TypeVar("T")

UNIT_BYTES = 8 << 20
"""Size of a unit, unless chunks are larger."""
SLOTS, SLOTS_MIN = 16, 4
"""Slots of a small window, and of the smallest useful one."""
JOIN_SECONDS = 10.0
"""Maximum wait of idle ranks for one that has not begun to read."""
THREADS = 4
"""Threads of one rank for files on disks."""
UNIT_PAUSES = Pauses(0.0003, 0.005)

Ranges: TypeAlias = Sequence[tuple[int, int]]

Spans: TypeAlias = Callable[[Any], tuple[str, list[tuple[int, int]]]]
"""Returns the file of an item, and the wanted bytes of it, in order."""


@dataclass(frozen=True, slots=True)
class ReadInterest:
    """The ranges that one rank wants to read.

    Attributes:
        group: equal for ranks of one node, checkpoint and unit size.
        window: name of the memory that this rank has reserved.
        wanted: byte ranges of each file, in order, not adjacent.
        unit_bytes: largest unit. No chunk spans two units.
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
    """The ranges that ``members`` of one node read together, in the first one's window."""

    members: tuple[Process, ...]
    me: int
    window: str
    unit_bytes: int
    ranges: Mapping[str, Ranges]


def unit_bytes(chunk_size_bytes: int, window_bytes: int) -> int:
    return chunk_size_bytes * max(1, min(UNIT_BYTES, window_bytes // SLOTS) // chunk_size_bytes)


def plan_shared_reads(interests: Sequence[ReadInterest | None]) -> list[SharedReadPlan | None]:
    plans: list[SharedReadPlan | None] = [None] * len(interests)
    groups: dict[str, list[int]] = {}
    for rank, interest in enumerate(interests):
        if interest is not None:
            groups.setdefault(interest.group, []).append(rank)
    for ranks in groups.values():
        members = [interest for rank in ranks if (interest := interests[rank]) is not None]
        if len(members) < 2 or members[0].unit_bytes * SLOTS_MIN > members[0].window_bytes:
            continue
        ranges = _common_ranges(members)
        if not ranges:
            continue
        processes = tuple(member.process for member in members)
        for number, rank in enumerate(ranks):
            plans[rank] = SharedReadPlan(processes, number, members[0].window, members[0].unit_bytes, ranges)
    return plans


def _common_ranges(members: Sequence[ReadInterest]) -> dict[str, Ranges]:
    """Return the ranges that several ranks want, aligned; at most as many units as a window counts.

    An overlap by alignment alone does not count.
    """
    block, unit = members[0].verify_block_bytes, members[0].unit_bytes
    units_left = UNITS_MAX
    common: dict[str, Ranges] = {}
    for name in sorted(set(itertools.chain.from_iterable(member.wanted for member in members))):
        shared = overlaps(member.wanted.get(name, ()) for member in members)
        ranges = merge_ranges((start // block * block, round_up(stop, block)) for start, stop in shared)
        units_left -= sum(stop // unit - start // unit + 1 for start, stop in ranges)
        if units_left < 0:
            log.info("from %s on, each rank reads for itself: more than %d units", name, UNITS_MAX)
            break
        if ranges:
            common[name] = ranges
    return common


def overlaps(lists: Iterable[Ranges]) -> list[tuple[int, int]]:
    """Return the ranges that two or more of ``lists`` have. Each list is from ``merge_ranges``."""
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


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif stop > start:
            found.append((start, stop))
    return found


class Units:
    """The units of a shared plan, in the order of file names."""

    def __init__(self, plan: SharedReadPlan) -> None:
        self._cuts: dict[str, list[tuple[int, int]]] = {}
        self._first: dict[str, int] = {}
        number = 0
        for name in sorted(plan.ranges):
            cuts = [cut for start, stop in plan.ranges[name] for cut in _cut_range(start, stop, plan.unit_bytes)]
            self._cuts[name], self._first[name] = cuts, number
            number += len(cuts)

    def first_of(self, name: str, start: int, stop: int) -> int | None:
        cuts = self._cuts.get(name, [])
        at = bisect.bisect_right(cuts, start, key=_STOP)
        return self._first[name] + at if at < len(cuts) and cuts[at][0] < stop else None

    def cut(self, name: str, start: int, stop: int) -> list[tuple[int, int, int | None]]:
        """Return these bytes as parts, each inside one unit or outside all of them."""
        parts: list[tuple[int, int, int | None]] = []
        cuts, first = self._cuts.get(name, []), self._first.get(name, 0)
        at = bisect.bisect_right(cuts, start, key=_STOP)
        while start < stop:
            begin, end = cuts[at] if at < len(cuts) else (stop, stop)
            if start < begin:
                parts.append((start, min(begin, stop), None))
            else:
                parts.append((start, min(end, stop), first + at))
                at += 1
            start = parts[-1][1]
        return parts

    def range(self, name: str, unit: int) -> ByteRange:
        return ByteRange(*self._cuts[name][unit - self._first[name]])


_STOP = operator.itemgetter(1)


def _cut_range(start: int, stop: int, size: int) -> Iterable[tuple[int, int]]:
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end


@dataclass(slots=True)
class _UnitJob:
    copies: ReplicatedFile
    at: ByteRange
    pieces: list[Piece] = field(default_factory=list)


class SharedRead:
    """One rank's part in a shared read. ``timeout_seconds``: longest wait for the next unit."""

    def __init__(self, plan: SharedReadPlan, window: SharedWindow, timeout_seconds: float, spans_of: Spans) -> None:
        self.units = Units(plan)
        self._window, self._timeout_seconds, self._spans_of = window, timeout_seconds, spans_of
        self.is_alone = False
        try:
            has_joined = window.join()
        except (OperationTimeoutError, CapacityError) as error:
            log.debug("%s", error)
            has_joined = False
        if not has_joined:
            self._read_alone("the others began without this one")

    def stop_sharing(self) -> None:
        """Stop sharing. The window stays usable for the others."""
        self._window.leave()

    def order(self, items: Iterable[T]) -> list[T]:
        """Return ``items`` by file and offset, shared ones first: no rank waits while another reads its own."""

        def key(item: T) -> tuple[bool, str, int]:
            name, ranges = self._spans_of(item)
            return self._first_unit(item) is None, name, ranges[0][0]

        return sorted(items, key=key)

    def pull_before(self, then: Any) -> Pull:
        """Return ``pull`` for the items before ``then`` in ``order``. None: for the last ones."""
        return partial(self.pull, later=self._first_unit(then) if then is not None else None)

    def _first_unit(self, item: Any) -> int | None:
        name, ranges = self._spans_of(item)
        units = (self.units.first_of(name, start, stop) for start, stop in ranges)
        return next((unit for unit in units if unit is not None), None)

    def pull(
        self, wanted: Wanted, buffers: BounceBufferPool, on_error: OnError = lambda *_: None, *, later: int | None
    ) -> None:
        """As ``parallel_read.pull``, with each byte of the plan read once for all ranks of the node.

        ``later``: the first unit that a later call may need again. None: this is the last call.
        """
        origins: dict[int, Piece] = {}
        jobs, own = self._split_by_unit(wanted, origins)
        # No call waits for a later one, which re-reads the units that this one has passed.
        after = PASSED_ALL if later is None else max(later, max(jobs, default=0))

        def blame(error: TierckptError, copies: ReplicatedFile, piece: Piece) -> None:
            on_error(error, copies, origins.get(id(piece), piece))

        if jobs:
            left = UnitThreads(self._window, jobs, after, buffers, blame, self._timeout_seconds).copied()
            if left:
                self._read_alone(f"no unit has arrived from them for {self._timeout_seconds:g} s")
                for job in left:
                    own.setdefault(job.copies, []).extend(job.pieces)
        if not self.is_alone:
            self._window.advance(after)
        for pieces in own.values():
            pieces.sort(key=lambda piece: piece.start)
        pull(list(own.items()), buffers, blame)

    def _split_by_unit(
        self, wanted: Wanted, origins: dict[int, Piece]
    ) -> tuple[dict[int, _UnitJob], dict[ReplicatedFile, list[Piece]]]:
        """Return the shared part of ``wanted``, by unit, and the rest. Adds the piece of each part to ``origins``."""
        jobs: dict[int, _UnitJob] = {}
        own: dict[ReplicatedFile, list[Piece]] = {}
        for copies, pieces in wanted:
            name = copies.entry.path
            for piece in pieces:
                for start, stop, unit in self.units.cut(name, piece.start, piece.stop):
                    part = piece
                    if (start, stop) != (piece.start, piece.stop):
                        part = piece._replace(start=start, stop=stop, address=piece.address + start - piece.start)
                        origins[id(part)] = piece
                    if unit is None or self.is_alone or unit < self._window.passed:
                        own.setdefault(copies, []).append(part)
                        continue
                    if unit not in jobs:
                        at = self.units.range(name, unit)
                        jobs[unit] = _UnitJob(copies, ByteRange(at.start, min(at.stop, copies.entry.size_bytes)))
                    jobs[unit].pieces.append(part)
        return jobs, own

    def _read_alone(self, reason: str) -> None:
        self.is_alone = True
        self._window.advance(PASSED_ALL)
        READS_ALONE.emit(1)
        log.warning("this rank reads alone what other ranks of its node read too: %s", reason)


class UnitThreads(WorkerThreads):
    def __init__(
        self,
        window: SharedWindow,
        jobs: Mapping[int, _UnitJob],
        after: int,
        buffers: BounceBufferPool,
        on_error: OnError,
        timeout_seconds: float,
    ) -> None:
        is_remote = any(job.copies.is_remote for job in jobs.values())
        count = min(REQUESTS_MAX if is_remote else THREADS, buffers.count_max, len(jobs))
        super().__init__([Worker(self._run_thread, "tierckpt-shared-read")] * count, buffers)
        self._window, self._jobs, self._after, self._on_error = window, jobs, after, on_error
        self._order = sorted(jobs)
        self._open = set(jobs)
        self._busy: set[int] = set()
        self._at = 0
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._timeout_seconds = timeout_seconds
        self._note_progress()
        self._is_over = False

    def copied(self) -> list[_UnitJob]:
        """Copy all units. Return those that did not arrive in time."""
        self._advance()
        self.run()
        return [self._jobs[unit] for unit in sorted(self._open)]

    def _note_progress(self) -> None:
        self._progressed_at, self._idle = time.monotonic(), Poll(self._timeout_seconds, UNIT_PAUSES)

    def _run_thread(self, _: Memory | None) -> None:
        while (task := self._next()) is not None:
            unit, is_claimed = task
            if is_claimed:
                self._fill(unit)
            self.copy_unit(unit)

    def _next(self) -> tuple[int, bool] | None:
        """Wait for a unit to copy, or to read first (True). None: no work is left."""
        with self._turn:
            while not self._is_over and self.error is None:
                task = self._find_unit()
                if task is not None:
                    return task
                with self._lock:
                    if not self._open - self._busy:
                        return None
                    if self._busy:
                        self._note_progress()  # the disk is slow, not another rank
                if time.monotonic() - self._progressed_at > JOIN_SECONDS and self._window.awaited():
                    self._window.close_joining()
                elif not self._idle.pause():
                    self._is_over = True
        return None

    def _find_unit(self) -> tuple[int, bool] | None:
        """Return a unit in the window, else one that can be claimed."""
        with self._lock:
            near = [unit for unit in self._units_in_window() if unit not in self._busy]
            found = next(((unit, False) for unit in near if self._window.is_there(unit)), None)
            if found is None:
                found = next(
                    ((unit, True) for unit in near if self._window.has_slot(unit) and self._window.claim(unit)), None
                )
            if found is not None:
                self._busy.add(found[0])
            return found

    def _units_in_window(self) -> Iterable[int]:
        near = [unit for unit in self._order[self._at : self._at + self._window.slots] if unit in self._open]
        return itertools.takewhile(lambda unit: unit < near[0] + self._window.slots, near)

    def _fill(self, unit: int) -> None:
        job, filled = self._jobs[unit], False

        def blame(error: TierckptError, copies: ReplicatedFile, _: Piece) -> None:
            self._on_error(error, copies, job.pieces[0])

        try:
            self._window.make_ready(unit, job.at.stop - job.at.start)
            whole = Piece(job.at.start, job.at.stop, self._window.address(unit))
            pull([(job.copies, [whole])], self._buffers, blame)
            filled = True
        finally:
            self._window.release(unit, filled=filled)

    def copy_unit(self, unit: int) -> None:
        job, base = self._jobs[unit], self._window.address(unit)
        for piece in job.pieces:
            ctypes.memmove(piece.address, base + piece.start - job.at.start, piece.stop - piece.start)
        with self._lock:
            self._open.discard(unit)
            self._busy.discard(unit)
            self._note_progress()
            self._advance()

    def _advance(self) -> None:
        while self._at < len(self._order) and self._order[self._at] not in self._open:
            self._at += 1
        ahead = self._order[self._at] if self._at < len(self._order) else PASSED_ALL
        self._window.advance(min(ahead, self._after))
