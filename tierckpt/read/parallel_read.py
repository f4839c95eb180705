"""Bytes of many files into memory: in parallel, in the order of the files, each verified before it is copied.

A few threads take part after part of the chunks, in the order of the files. Each reads its part, or the blocks of it
that somebody wants, into a small buffer of its own (huge pages, past the page cache where the bytes are not in it),
digests it while it is in the processor's caches, and copies out what was asked for. What lies behind a store is read by
threads of its own, which wait for answers most of the time, and is copied out of the answers. Reading, digesting and
copying run without the interpreter lock.

Digesting and copying is done by as many threads at a time as there are processors, in turns: a disk that ends many
reads at once would otherwise have all of the threads do it side by side, each as slowly as all, and none to read.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeAlias, TypeVar

from ..arena.memory import Memory
from ..arena.slots import BounceBufferPool
from ..config import ranks_of_node
from ..disk.io_tuner import WAYS
from ..disk.page_cache import PAGE_BYTES
from ..errors import TierckptError
from ..quantities import round_up
from ..types import Buffer, ByteRange
from .file_copies import LocalCopy
from .read_benchmark import opened_disk, tried
from .read_threads import ReadThreads, Worker
from .replicated_file import ReplicatedFile

T = TypeVar("T")

REQUESTS_MAX = 8
"""Requests to stores that one load has under way: each holds a chunk, so this bounds its memory too."""

NEAR_BYTES = 1 << 20
"""Ranges of a remote file that are nearer to each other are one request: the bytes between cost less than it does."""

NEAR_LOCAL_BYTES = 64 << 10
"""The same of a file on a disk, which has no such cost to speak of."""

READ_BYTES = 2 << 20
"""What a thread reads at a time from a disk, where the digests of blocks are there to verify it by. Small, so that the
buffers of all threads stay in the processor's caches: 2 GiB took 0.57 s into eight buffers of 1 MiB, 0.88 into eight of
8 MiB, and digesting and copying out of them half as long again. Less gains nothing more, and costs a call each."""

THREADS_A_PROCESSOR = 4
"""Most threads that all ranks of a node together read with, for each of its processors. Two ranks became four on two
processors in 1.05 x the time of raw reads with two threads each, 1.19 with four and 1.36 with eight."""

THREADS_MIN = 2
"""Of one rank: while one digests, the other reads."""


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of a file, and the address they go to. Whoever makes it keeps that memory alive.

    Attributes:
        is_unverified: it is compared with what is known already, so that it need not be verified: nothing more is
            read for
            it, and where nothing can be read its memory stays as it is.
    """

    start: int
    stop: int
    address: int
    is_unverified: bool = False


OnError: TypeAlias = Callable[[TierckptError, ReplicatedFile, Piece], None]


class Pull(Protocol):
    """``pull``, or what does the same."""

    def __call__(
        self,
        wanted: Sequence[tuple[ReplicatedFile, Sequence[Piece]]],
        buffers: BounceBufferPool,
        /,
        *,
        on_error: OnError,
    ) -> None: ...


@dataclass(slots=True)
class _Job:
    """One chunk that is touched, and who wants what of it."""

    copies: ReplicatedFile
    index: int
    pieces: list[Piece] = field(default_factory=list)
    runs: list[ByteRange] = field(default_factory=list)
    """Whole blocks that hold all pieces but those that only peek."""

    @property
    def chunk(self) -> ByteRange:
        return self.copies.chunk_range(self.index)

    @property
    def is_wanted_whole(self) -> bool:
        return self.runs == [self.chunk]

    @property
    def has_parts(self) -> bool:
        """True when less than the chunk can be read at a time."""
        copies, index = self.copies, self.index
        return copies.takes_parts(index) if self.is_wanted_whole else copies.has_parts(index)

    @property
    def is_read_whole(self) -> bool:
        return self.is_wanted_whole or bool(self.runs and not self.has_parts)

    @property
    def disk(self) -> LocalCopy | None:
        return self.copies.disk

    @property
    def wanted_bytes(self) -> int:
        return sum(run.size_bytes for run in self.runs)

    @property
    def read_bytes_max(self) -> int:
        """The most that is read of it at a time, and of a disk, as far as is known without going anywhere for it."""
        if not self.runs:
            return 0
        is_cut = self.has_parts if self.is_wanted_whole else self.copies.may_have_parts
        return min(READ_BYTES, self.chunk.size_bytes) if is_cut else self.chunk.size_bytes

    def first_after(self, start: int, first: int) -> int:
        """The first of the pieces from ``first`` on that does not end before ``start``."""
        while first < len(self.pieces) and self.pieces[first].stop <= start:
            first += 1
        return first

    def parts(self) -> Iterator[ByteRange]:
        """What is read of it, in order: all of ``runs``, so that it can be verified."""
        if self.runs and not self.has_parts:
            yield self.chunk
        elif self.copies.is_remote:  # where each is a request
            yield from self.runs
        else:
            for run in self.runs:
                for start in range(run.start, run.stop, READ_BYTES):
                    yield ByteRange(start, min(start + READ_BYTES, run.stop))


class _Read(NamedTuple):
    """What a thread does at a time."""

    job: _Job
    parts: Iterable[ByteRange]
    """What is read of the chunk."""
    first: int = 0
    """The first of the pieces that may want something of it."""


def _reads(jobs: Iterable[_Job]) -> Iterator[_Read]:
    """Of a disk, chunks that are wanted whole are shared out in parts, so that it is read in order.

    Any other is one thread's: what verifies a part of it may have to be fetched, and nobody else should wait for that.
    """
    for job in jobs:
        if job.copies.is_remote or not job.is_wanted_whole:
            yield _Read(job, job.parts())
            continue
        first = 0
        for part in job.parts():
            first = job.first_after(part.start, first)
            yield _Read(job, (part,), first)


def pull(
    wanted: Sequence[tuple[ReplicatedFile, Sequence[Piece]]],
    buffers: BounceBufferPool,
    *,
    on_error: OnError = lambda *_: None,
) -> None:
    """Copy all pieces to where they go. Returns when all of them are there.

    Args:
        wanted: each file once, its pieces in order of ``start``; they may overlap.
        buffers: for threads that read from disks, at most one each.
        on_error: may add to the error of a chunk, given the first piece that wanted it.

    Raises:
        IntegrityError: some chunk has no good copy. Pieces of other chunks may have been copied.
    Cost: each block that a piece touches (each chunk, where the file has no block digests) is read, digested and
        copied from once; a page or two for what is only peeked at.
    """
    local: list[_Job] = []
    remote: list[_Job] = []
    for copies, pieces in wanted:
        (remote if copies.is_remote else local).extend(_jobs(copies, pieces))
    disk = opened_disk(local)
    local = tried(local, disk, lambda jobs, threads: _Pull(jobs, threads, buffers, on_error).run())
    _Pull(local, _threads(disk), buffers, on_error, remote).run()


def windows(things: Iterable[T], bytes_of: Callable[[T], int], size_bytes_max: int) -> Iterator[list[T]]:
    """Cut ``things`` into runs of at most ``size_bytes_max`` in memory, or of one thing."""
    window: list[T] = []
    size_bytes = 0
    for thing in things:
        more = bytes_of(thing)
        if window and size_bytes + more > size_bytes_max:
            yield window
            window, size_bytes = [], 0
        window.append(thing)
        size_bytes += more
    if window:
        yield window


def _threads(disk: LocalCopy | None) -> int:
    """As many as the disk likes, or fewer: ranks of a node load at the same time, and have one disk for all."""
    liked = disk.way.threads if disk is not None else WAYS[0].threads
    return min(liked, max(THREADS_MIN, THREADS_A_PROCESSOR * (os.cpu_count() or 1) // ranks_of_node()))


def _jobs(copies: ReplicatedFile, pieces: Sequence[Piece]) -> list[_Job]:
    """One job for each chunk that is touched, in order."""
    jobs: dict[int, _Job] = {}
    size = copies.chunk_size_bytes
    for piece in pieces:
        for index in range(piece.start // size, -(-piece.stop // size)):
            if index not in jobs:
                jobs[index] = _Job(copies, index)
            jobs[index].pieces.append(piece)
    for job in jobs.values():
        job.runs = _runs(job)
    copies.expect_parts(
        job.index for job in jobs.values() if job.runs and not (copies.is_remote and job.is_wanted_whole)
    )
    return [jobs[index] for index in sorted(jobs)]


def _runs(job: _Job) -> list[ByteRange]:
    """The blocks of a chunk that are wanted, those near to each other together."""
    chunk, grain, is_remote = job.copies.chunk_range(job.index), job.copies.verify_block_bytes, job.copies.is_remote
    near = NEAR_BYTES if is_remote else NEAR_LOCAL_BYTES
    runs: list[tuple[int, int, bool]] = []
    for piece in job.pieces:
        if piece.is_unverified and not is_remote:
            continue
        start = (max(piece.start, chunk.start) - chunk.start) // grain * grain + chunk.start
        stop = min(chunk.stop, round_up(min(piece.stop, chunk.stop) - chunk.start, grain) + chunk.start)
        if runs and start <= runs[-1][1] + near:
            runs[-1] = (runs[-1][0], max(runs[-1][1], stop), runs[-1][2] and piece.is_unverified)
        else:
            runs.append((start, stop, piece.is_unverified))
    return [ByteRange(start, stop) for start, stop, only_peeks in runs if not only_peeks]


class _Turns:
    """How many threads digest and copy at a time. (``threading.Semaphore`` does the same in Python, and is felt.)"""

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self.give_back()

    def take(self) -> None:
        """Wait for a turn. It comes: whoever has one gives it back, after a read of the next copy at most."""
        self._free.get()

    def give_back(self) -> None:
        self._free.put(None)


class _Turn:
    """A thread's turn to digest and copy, from when it is called to its end."""

    def __init__(self, turns: _Turns) -> None:
        self._turns, self._is_ours = turns, False

    def __call__(self) -> None:
        if not self._is_ours:
            self._is_ours = True  # before: an interrupt that comes between them gives a turn too many, not too few
            self._turns.take()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_ours:
            self._turns.give_back()


class _Pull(ReadThreads):
    """Does jobs, those of disks by up to ``threads``, and requests beside them."""

    def __init__(
        self,
        local: Sequence[_Job],
        threads: int,
        buffers: BounceBufferPool,
        on_error: OnError,
        remote: Sequence[_Job] = (),
    ) -> None:
        buffer_bytes = max((round_up(job.read_bytes_max) for job in local), default=0)
        count = min(threads, buffers.count_max, sum(max(1, -(-job.wanted_bytes // READ_BYTES)) for job in local))
        disks = Worker(partial(self._work, _reads(local)), "tierckpt-pull", buffer_bytes)
        # What comes from a store comes in memory of the store's own.
        stores = Worker(partial(self._work, _reads(remote)), "tierckpt-pull")
        super().__init__([disks] * count + [stores] * min(REQUESTS_MAX, len(remote)), buffers)
        self._on_error = on_error
        self._turns = _Turns(len(os.sched_getaffinity(0)))

    def _work(self, reads: Iterator[_Read], memory: Memory | None) -> None:
        buffer = memory.view if memory is not None else None
        for job, parts, first in self.each(reads):
            for part in parts:
                first = job.first_after(part.start, first)
                try:
                    with _Turn(self._turns) as turn:
                        data = job.copies.part(job.index, part, _room(buffer, part), turn)
                        _scatter(islice(job.pieces, first, None), part, data)
                except TierckptError as error:
                    self._on_error(error, job.copies, job.pieces[min(first, len(job.pieces) - 1)])
                    raise
            if not job.is_read_whole:
                for piece in job.pieces:
                    if piece.is_unverified:
                        _read_unverified(piece, job, buffer)


def _room(buffer: memoryview | None, part: ByteRange) -> memoryview | None:
    """``buffer`` where it is large enough: a copy that is given up may leave one that is read by whole chunks."""
    return buffer if buffer is not None and round_up(part.size_bytes) <= len(buffer) else None


def _read_unverified(piece: Piece, job: _Job, buffer: memoryview | None) -> None:
    """Look at what nothing was read for."""
    start, stop = max(piece.start, job.chunk.start), min(piece.stop, job.chunk.stop)
    if any(run.start <= start and stop <= run.stop for run in job.runs):
        return
    pages = _pages(job.copies, start, stop)
    data = job.copies.read_unverified(pages, _room(buffer, pages))
    _scatter([piece], ByteRange(pages.start, pages.start + len(data)), data)


def _pages(copies: ReplicatedFile, start: int, stop: int) -> ByteRange:
    """What is read to peek at some bytes: what a disk reads anyway, or just those."""
    if copies.is_remote:
        return ByteRange(start, stop)
    return ByteRange(start // PAGE_BYTES * PAGE_BYTES, min(round_up(stop, PAGE_BYTES), copies.entry.size_bytes))


def _scatter(pieces: Iterable[Piece], run: ByteRange, data: Buffer) -> None:
    """Copy to each piece, in order of ``start``, what ``data``, which is ``run`` of the file, has of it."""
    with _address_of(data) as base:
        for piece in pieces:
            if piece.start >= run.stop:
                break
            start, stop = max(piece.start, run.start), min(piece.stop, run.stop)
            if start < stop:
                ctypes.memmove(piece.address + start - piece.start, base + start - run.start, stop - start)


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer (PEP 3118), of which only ``buf`` is looked at."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


@contextlib.contextmanager
def _address_of(data: Buffer) -> Iterator[int]:
    """Where ``data`` lies, while it is held. Read-only memory too, of which ctypes itself tells nothing."""
    found = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(found), 0)
    try:
        yield found.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
