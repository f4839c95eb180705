"""Read parts of many files into memory, in parallel and verified.

Each thread reads a part of a chunk into a small buffer, digests it in the processor's caches, and copies the wanted
bytes out. At most one thread per processor digests and copies at a time: otherwise all would do so at once, and none
would read.

``_Pull`` decides the number of threads (at most that of the disk's mode, disk/io_tuner.py), ``_split_jobs`` the parts.
A large load's own bytes measure the read modes of its device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from queue import SimpleQueue
from statistics import median
from typing import NamedTuple, Protocol, Self, TypeAlias, TypeVar

from ..arena.memory import Memory
from ..arena.slots import BounceBufferPool
from ..config import ranks_of_node
from ..disk.file_io import PAGE_BYTES
from ..disk.io_tuner import READ_MODES, ReadMode, ReadTuner
from ..errors import CapacityError, OperationTimeoutError, TierckptError
from ..quantities import round_up
from ..resources import start_thread
from ..telemetry import logger
from ..types import Buffer, ByteRange
from .replicated_file import LocalCopy, ReplicatedFile

log = logger("restore")

J = TypeVar("J")

BUFFER_SECONDS = 600.0
"""Other loads may hold all buffers."""


class Worker(NamedTuple):
    """A thread's work, and the size of its buffer (0: none)."""

    work: Callable[[Memory | None], None]
    name: str
    buffer_bytes: int = 0


class WorkerThreads:
    """Runs ``workers`` in parallel, the first of them in the caller's thread."""

    def __init__(self, workers: Sequence[Worker], buffers: BounceBufferPool) -> None:
        self._workers, self._buffers = workers, buffers
        self._taking = threading.Lock()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run all workers to their end. Raises the first error of any, interrupts included.

        Raises OperationTimeoutError, CapacityError: no buffer for the first worker; nothing was read.
        """
        # Break the cycle from workers to this object, to free sources and targets.
        workers, self._workers = self._workers, ()
        if not workers:
            return
        with self._buffer(workers[0], BUFFER_SECONDS) as buffer:
            started: list[threading.Thread] = []
            try:
                for worker in workers[1:]:
                    thread = threading.Thread(target=self._run_helper, args=(worker,), name=worker.name)
                    start_thread(thread)
                    started.append(thread)
                workers[0].work(buffer)
            except BaseException as error:
                self.fail(error)
            try:
                for thread in started:
                    thread.join()
            except BaseException as error:  # the caller then closes sources and targets
                self.fail(error)
                for thread in started:
                    thread.join()
            if self.error is not None:
                raise self.error

    def iterate(self, jobs: Iterator[J]) -> Iterator[J]:
        """Yield the ``jobs`` that no other thread has taken, in order; none after an error."""
        while True:
            with self._taking:
                job = None if self.error is not None else next(jobs, None)
            if job is None:
                return
            yield job

    def fail(self, error: BaseException) -> None:
        with self._taking:
            self.error = self.error or error

    def _run_helper(self, worker: Worker) -> None:
        """Run an additional thread. Without another buffer, the load has one less."""
        with contextlib.ExitStack() as stack:
            try:
                buffer = stack.enter_context(self._buffer(worker, 0.0))
            except (OperationTimeoutError, CapacityError) as error:
                log.info("a load reads with one thread less: %s", error)
                return
            except BaseException as error:
                self.fail(error)
                return
            try:
                worker.work(buffer)
            except BaseException as error:
                self.fail(error)

    @contextlib.contextmanager
    def _buffer(self, worker: Worker, timeout_seconds: float) -> Iterator[Memory | None]:
        if not worker.buffer_bytes:
            yield None
            return
        with self._buffers.take(1, worker.buffer_bytes, timeout_seconds) as [memory]:
            yield memory


MiB = 1 << 20

TRIAL_BYTES = 128 * MiB

TRIAL_ROUNDS_MAX = 3

DISK_SHARE_MIN = 0.9
"""A trial counts only if the device delivered at least this part."""


class Request(Protocol):
    """A pending read."""

    @property
    def wanted_bytes(self) -> int: ...

    @property
    def disk(self) -> LocalCopy | None:
        """The file if it is on a disk."""


R = TypeVar("R", bound=Request)


def opened_disk(jobs: Iterable[Request]) -> LocalCopy | None:
    """Open and return the first copy that is on a disk; the others are assumed to be on the same device."""
    for job in jobs:
        if (disk := job.disk) is not None:
            with contextlib.suppress(TierckptError):
                disk.open()
                return disk
    return None


def run_trials(jobs: list[R], first_disk: LocalCopy | None, run: Callable[[list[R], int], None]) -> list[R]:
    """Read the first of ``jobs`` in each mode, unless the best is known. Return the remaining jobs."""
    if first_disk is None or first_disk.tuner is None or not first_disk.is_untried:
        return jobs
    if _size_bytes(jobs) <= TRIAL_BYTES * len(first_disk.tuner.modes):
        return jobs
    with first_disk.tuner.trial() as is_ours:
        return _trial(jobs, first_disk.tuner, first_disk, run) if is_ours else jobs


def _trial(jobs: list[R], tuner: ReadTuner, first_disk: LocalCopy, run: Callable[[list[R], int], None]) -> list[R]:
    rounds = min(TRIAL_ROUNDS_MAX, max(1, _size_bytes(jobs) // (2 * TRIAL_BYTES * len(tuner.modes))))
    rates: dict[ReadMode, list[float]] = {way: [] for way in tuner.modes}
    for way in tuner.modes * rounds:
        part, jobs = _split_off(jobs, TRIAL_BYTES)
        disks = {job.disk for job in part}
        cold_bytes = -sum(disk.cold_bytes for disk in disks if disk)
        for disk in disks:
            if disk is not None:
                disk.set_mode(way)
        begun = time.monotonic()
        run(part, way.threads)
        seconds = time.monotonic() - begun
        cold_bytes += sum(disk.cold_bytes for disk in disks if disk)
        if cold_bytes < DISK_SHARE_MIN * _size_bytes(part) or any(
            not disk or disk.device != first_disk.device for disk in disks
        ):
            return jobs
        rates[way].append(cold_bytes / seconds)
    chosen = tuner.decide(first_disk.device, {way: median(found) for way, found in rates.items()}, first_disk.where)
    for job in jobs:
        if job.disk is not None:
            job.disk.set_mode(chosen)
    return jobs


def _split_off(jobs: list[R], wanted_bytes: int) -> tuple[list[R], list[R]]:
    for count, job in enumerate(jobs, 1):
        wanted_bytes -= job.wanted_bytes
        if wanted_bytes <= 0:
            return jobs[:count], jobs[count:]
    return jobs, []


def _size_bytes(jobs: list[R]) -> int:
    return sum(job.wanted_bytes for job in jobs)


T = TypeVar("T")

REQUESTS_MAX = 8
"""Of one load to stores. Each request holds a chunk."""

NEAR_BYTES = 1 << 20
"""Maximum gap between ranges of a remote file in one request."""

NEAR_LOCAL_BYTES = 64 << 10
"""Maximum gap in one read from a disk."""

READ_BYTES = 2 << 20
"""Size of a disk read with block digests: the buffers of all threads stay in the processor's caches."""

THREADS_PER_PROCESSOR = 4
"""A node's ranks together have at most this many."""

THREADS_MIN = 2


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of a file, and their target address. The creator keeps that memory alive.

    ``is_unverified``: the caller compares the bytes with known ones. A read error leaves the memory unchanged.
    """

    start: int
    stop: int
    address: int
    is_unverified: bool = False


Wanted: TypeAlias = Sequence[tuple[ReplicatedFile, Sequence[Piece]]]
"""Each file once, its pieces in order of ``start``; they may overlap."""

OnError: TypeAlias = Callable[[TierckptError, ReplicatedFile, Piece], None]

Pull: TypeAlias = Callable[[Wanted, BounceBufferPool, OnError], None]
"""``pull`` or an equivalent."""


@dataclass(slots=True)
class _ChunkJob:
    copies: ReplicatedFile
    index: int
    pieces: list[Piece] = field(default_factory=list)
    runs: list[ByteRange] = field(default_factory=list)

    @property
    def chunk(self) -> ByteRange:
        return self.copies.chunk_range(self.index)

    @property
    def is_wanted_whole(self) -> bool:
        return self.runs == [self.chunk]

    @property
    def has_parts(self) -> bool:
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
        if not self.runs:
            return 0
        is_cut = self.has_parts if self.is_wanted_whole else self.copies.may_have_parts
        return min(READ_BYTES, self.chunk.size_bytes) if is_cut else self.chunk.size_bytes

    def first_after(self, start: int, first: int) -> int:
        """Return the first piece from ``first`` on that ends after ``start``."""
        while first < len(self.pieces) and self.pieces[first].stop <= start:
            first += 1
        return first

    def parts(self) -> Iterator[ByteRange]:
        if self.runs and not self.has_parts:
            yield self.chunk
        elif self.copies.is_remote:
            yield from self.runs
        else:
            for run in self.runs:
                for start in range(run.start, run.stop, READ_BYTES):
                    yield ByteRange(start, min(start + READ_BYTES, run.stop))


class _Read(NamedTuple):
    job: _ChunkJob
    parts: Iterable[ByteRange]
    first: int = 0


def _split_jobs(jobs: Iterable[_ChunkJob]) -> Iterator[_Read]:
    """Split chunks of a disk that are wanted whole into parts.

    One thread reads any other chunk: the others should not wait for its digests.
    """
    for job in jobs:
        if job.copies.is_remote or not job.is_wanted_whole:
            yield _Read(job, job.parts())
            continue
        first = 0
        for part in job.parts():
            first = job.first_after(part.start, first)
            yield _Read(job, (part,), first)


def pull(wanted: Wanted, buffers: BounceBufferPool, on_error: OnError = lambda *_: None) -> None:
    """Copy all pieces to their targets.

    Args:
        buffers: for threads that read from disks, at most one each.
        on_error: may extend the error of a chunk, given its first piece.

    Raises IntegrityError: a chunk has no good copy. Pieces of other chunks may have been copied.
    Cost: each block that a piece overlaps (each chunk without block digests) is read, digested and copied from once.
    """
    local: list[_ChunkJob] = []
    remote: list[_ChunkJob] = []
    for copies, pieces in wanted:
        (remote if copies.is_remote else local).extend(_chunk_jobs(copies, pieces))
    disk = opened_disk(local)
    local = run_trials(local, disk, lambda jobs, threads: _Pull(jobs, threads, buffers, on_error).run())
    _Pull(local, _thread_count(disk), buffers, on_error, remote).run()


def batches(items: Iterable[T], bytes_of: Callable[[T], int], size_bytes_max: int) -> Iterator[list[T]]:
    """Cut ``items`` into runs of at most ``size_bytes_max``, or of one thing."""
    window: list[T] = []
    size_bytes = 0
    for item in items:
        more = bytes_of(item)
        if window and size_bytes + more > size_bytes_max:
            yield window
            window, size_bytes = [], 0
        window.append(item)
        size_bytes += more
    if window:
        yield window


def _thread_count(disk: LocalCopy | None) -> int:
    liked = disk.mode.threads if disk is not None else READ_MODES[0].threads
    return min(liked, max(THREADS_MIN, THREADS_PER_PROCESSOR * (os.cpu_count() or 1) // ranks_of_node()))


def _chunk_jobs(copies: ReplicatedFile, pieces: Sequence[Piece]) -> list[_ChunkJob]:
    jobs: dict[int, _ChunkJob] = {}
    size = copies.chunk_size_bytes
    for piece in pieces:
        for index in range(piece.start // size, -(-piece.stop // size)):
            if index not in jobs:
                jobs[index] = _ChunkJob(copies, index)
            jobs[index].pieces.append(piece)
    for job in jobs.values():
        job.runs = _missing_ranges(job)
    copies.expect_parts(
        job.index for job in jobs.values() if job.runs and not (copies.is_remote and job.is_wanted_whole)
    )
    return [jobs[index] for index in sorted(jobs)]


def _missing_ranges(job: _ChunkJob) -> list[ByteRange]:
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


class _Turn:
    """One of ``turns``, which limit the threads that digest and copy. (``threading.Semaphore`` is slower.)"""

    def __init__(self, turns: SimpleQueue[None]) -> None:
        self._turns, self._is_ours = turns, False

    def __call__(self) -> None:
        if not self._is_ours:
            self._is_ours = True  # set first: an interrupt then adds a turn instead of losing one
            self._turns.get()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            self._turns.put(None)


class _Pull(WorkerThreads):
    def __init__(
        self,
        local: Sequence[_ChunkJob],
        threads: int,
        buffers: BounceBufferPool,
        on_error: OnError,
        remote: Sequence[_ChunkJob] = (),
    ) -> None:
        buffer_bytes = max((round_up(job.read_bytes_max) for job in local), default=0)
        count = min(threads, buffers.count_max, sum(max(1, -(-job.wanted_bytes // READ_BYTES)) for job in local))
        disks = Worker(partial(self._read_jobs, _split_jobs(local)), "tierckpt-pull", buffer_bytes)
        stores = Worker(partial(self._read_jobs, _split_jobs(remote)), "tierckpt-pull")
        super().__init__([disks] * count + [stores] * min(REQUESTS_MAX, len(remote)), buffers)
        self._on_error = on_error
        self._turns: SimpleQueue[None] = SimpleQueue()
        for _ in os.sched_getaffinity(0):
            self._turns.put(None)

    def _read_jobs(self, reads: Iterator[_Read], memory: Memory | None) -> None:
        buffer = memory.view if memory is not None else None
        for job, parts, first in self.iterate(reads):
            for part in parts:
                first = job.first_after(part.start, first)
                try:
                    with _Turn(self._turns) as turn:
                        data = job.copies.part(job.index, part, _buffer_if_large_enough(buffer, part), turn)
                        _scatter(islice(job.pieces, first, None), part, data)
                except TierckptError as error:
                    self._on_error(error, job.copies, job.pieces[min(first, len(job.pieces) - 1)])
                    raise
            if not job.is_read_whole:
                for piece in job.pieces:
                    if piece.is_unverified:
                        _read_unverified(piece, job, buffer)


def _buffer_if_large_enough(buffer: memoryview | None, part: ByteRange) -> memoryview | None:
    """Return ``buffer`` if large enough: the next copy may be read by whole chunks."""
    return buffer if buffer is not None and round_up(part.size_bytes) <= len(buffer) else None


def _read_unverified(piece: Piece, job: _ChunkJob, buffer: memoryview | None) -> None:
    start, stop = max(piece.start, job.chunk.start), min(piece.stop, job.chunk.stop)
    if any(run.start <= start and stop <= run.stop for run in job.runs):
        return
    if not job.copies.is_remote:
        start = start // PAGE_BYTES * PAGE_BYTES
        stop = min(round_up(stop, PAGE_BYTES), job.copies.entry.size_bytes)
    pages = ByteRange(start, stop)
    data = job.copies.read_unverified(pages, _buffer_if_large_enough(buffer, pages))
    _scatter([piece], ByteRange(pages.start, pages.start + len(data)), data)


def _scatter(pieces: Iterable[Piece], run: ByteRange, data: Buffer) -> None:
    with _address_of(data) as base:
        for piece in pieces:
            if piece.start >= run.stop:
                break
            start, stop = max(piece.start, run.start), min(piece.stop, run.stop)
            if start < stop:
                ctypes.memmove(piece.address + start - piece.start, base + start - run.start, stop - start)


_PyBuffer = ctypes.c_void_p * 11
"""CPython's Py_buffer (PEP 3118): nine words and two integers. Only ``buf``, the first, is used."""


@contextlib.contextmanager
def _address_of(data: Buffer) -> Iterator[int]:
    """Yield the address of ``data``, also of read-only memory."""
    found = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(found), 0)
    try:
        yield found[0] or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
