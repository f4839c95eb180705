"""Bytes of many files into memory: in large reads, in parallel, every one verified before a byte of it is copied.

A few threads take chunk after chunk, in the order of the files. Each reads its chunk, or the blocks of it that somebody
wants, into a buffer of its own (huge pages, past the page cache where the bytes are not in it), digests it while it is
in the processor's caches, and copies out what was asked for. What lies behind a store is read by threads of its own,
which wait for answers most of the time, and is copied out of the answers. Reading, digesting and copying run without
the interpreter lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeAlias, TypeVar

from ..arena.slots import Bounce
from ..errors import TierckptError
from ..types import Buffer, ByteRange
from .copies import Copies, LocalCopy
from .flush import round_up
from .read_tuner import TRIED_BYTES, TRIED_ROUNDS_MAX, WAYS, ReadTuner, Way
from .resident import PAGE_BYTES

T = TypeVar("T")

BUFFER_SECONDS = 600.0
"""How long to wait for the buffers, which other loads of this process may have."""

REQUESTS_MAX = 8
"""Requests to stores that one load has under way: each holds a chunk, so this bounds its memory too."""

NEAR_BYTES = 1 << 20
"""Ranges of a remote file that are nearer to each other are one request: the bytes between cost less than it does."""

NEAR_LOCAL_BYTES = 64 << 10
"""The same of a file on a disk, which has no such cost to speak of."""

TELLING_SHARE = 0.9
"""A trial tells something of a device when it had to give at least this part of the bytes."""


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of a file, and the address they go to. Whoever makes it keeps that memory alive.

    Attributes:
        is_peek: it is compared with what is known already, so that it need not be verified: nothing more is read for
            it, and where nothing can be read its memory stays as it is.
    """

    start: int
    stop: int
    address: int
    is_peek: bool = False


OnError: TypeAlias = Callable[[TierckptError, Copies, Piece], None]


@dataclass(slots=True)
class _Job:
    """One chunk that is touched, and who wants what of it."""

    copies: Copies
    index: int
    pieces: list[Piece] = field(default_factory=list)
    runs: list[ByteRange] = field(default_factory=list)
    """Whole blocks that hold all pieces but those that only peek."""


def pull(
    wanted: Sequence[tuple[Copies, Sequence[Piece]]],
    buffers: Bounce,
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
    disk = _disk(local)
    is_trial = disk is not None and disk.is_untried and _size_bytes(local) > TRIED_BYTES * len(WAYS)
    with contextlib.ExitStack() as stack:
        memories = _memories(local, buffers, max(way.threads for way in WAYS) if is_trial else _threads(disk), stack)
        if disk is not None and is_trial:
            local = _tried(local, disk, memories, on_error)
        chunks, requests = iter(local), iter(remote)
        workers = [_Worker(chunks, memory) for memory in memories[: min(_threads(disk), len(local))]]
        workers += [_Worker(requests, None) for _ in range(min(REQUESTS_MAX, len(remote)))]
        if workers:
            _Pull(workers, on_error).run()


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


def _memories(jobs: Sequence[_Job], buffers: Bounce, count: int, stack: contextlib.ExitStack) -> list[memoryview]:
    """One buffer for each thread that reads from disks."""
    if not jobs:
        return []
    chunk_bytes = max(round_up(job.copies.chunk_range(job.index).size_bytes) for job in jobs)
    slots = stack.enter_context(buffers.take(min(count, buffers.count_max, len(jobs)), chunk_bytes, BUFFER_SECONDS))
    return [slot.view[:chunk_bytes] for slot in slots]


def _disk(jobs: Sequence[_Job]) -> LocalCopy | None:
    """The first file on a disk, whose device is taken for that of all."""
    for job in jobs:
        if (disk := job.copies.disk) is not None:
            with contextlib.suppress(TierckptError):  # whoever reads it finds out
                disk.open()
                return disk
    return None


def _threads(disk: LocalCopy | None) -> int:
    return disk.way.threads if disk is not None else WAYS[0].threads


def _tried(jobs: list[_Job], disk: LocalCopy, memories: Sequence[memoryview], on_error: OnError) -> list[_Job]:
    """Read the first of ``jobs`` in each way there is, unless another process does so now. Returns the rest."""
    if disk.tuner is None:
        return jobs
    with disk.tuner.trial() as is_ours:
        return _try(jobs, disk.tuner, disk, memories, on_error) if is_ours else jobs


def _try(
    jobs: list[_Job], tuner: ReadTuner, first: LocalCopy, memories: Sequence[memoryview], on_error: OnError
) -> list[_Job]:
    """Return what is left to read. Nothing is learned from bytes that came from memory, or from another device.

    A device is not equally fast at all times, so a load that is large enough tries each way several times, in turn.
    """
    rounds = min(TRIED_ROUNDS_MAX, max(1, _size_bytes(jobs) // (2 * TRIED_BYTES * len(tuner.ways))))
    rates: dict[Way, list[float]] = {way: [] for way in tuner.ways}
    for way in tuner.ways * rounds:
        part, jobs = _part(jobs, TRIED_BYTES)
        disks = {job.copies.disk for job in part}
        cold_bytes = -sum(disk.cold_bytes for disk in disks if disk)
        for disk in disks:
            if disk is not None:
                disk.is_direct = way.direct
        todo, begun = iter(part), time.monotonic()
        _Pull([_Worker(todo, memory) for memory in memories[: way.threads]], on_error).run()
        seconds = time.monotonic() - begun
        cold_bytes += sum(disk.cold_bytes for disk in disks if disk)
        if cold_bytes < TELLING_SHARE * _size_bytes(part) or any(
            not disk or disk.device != first.device for disk in disks
        ):
            return jobs
        rates[way].append(cold_bytes / seconds)
    chosen = tuner.decide(first.device, {way: median(found) for way, found in rates.items()}, first.where)
    for job in jobs:
        if job.copies.disk is not None:
            job.copies.disk.is_direct = chosen.direct
    return jobs


def _part(jobs: list[_Job], size_bytes: int) -> tuple[list[_Job], list[_Job]]:
    """The first of ``jobs`` that make up ``size_bytes``, and the others."""
    for count, job in enumerate(jobs, 1):
        size_bytes -= _size_bytes([job])
        if size_bytes <= 0:
            return jobs[:count], jobs[count:]
    return jobs, []


def _size_bytes(jobs: Sequence[_Job]) -> int:
    return sum(run.size_bytes for job in jobs for run in job.runs)


def _jobs(copies: Copies, pieces: Sequence[Piece]) -> list[_Job]:
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
    copies.expect_parts(job.index for job in jobs.values() if job.runs != [copies.chunk_range(job.index)])
    return [jobs[index] for index in sorted(jobs)]


def _runs(job: _Job) -> list[ByteRange]:
    """The blocks of a chunk that are wanted, those near to each other together."""
    chunk, grain, is_remote = job.copies.chunk_range(job.index), job.copies.grain_bytes, job.copies.is_remote
    near = NEAR_BYTES if is_remote else NEAR_LOCAL_BYTES
    runs: list[tuple[int, int, bool]] = []
    for piece in job.pieces:
        if piece.is_peek and not is_remote:
            continue
        start = (max(piece.start, chunk.start) - chunk.start) // grain * grain + chunk.start
        stop = min(chunk.stop, round_up(min(piece.stop, chunk.stop) - chunk.start, grain) + chunk.start)
        if runs and start <= runs[-1][1] + near:
            runs[-1] = (runs[-1][0], max(runs[-1][1], stop), runs[-1][2] and piece.is_peek)
        else:
            runs.append((start, stop, piece.is_peek))
    return [ByteRange(start, stop) for start, stop, only_peeks in runs if not only_peeks]


@dataclass(frozen=True, slots=True)
class _Worker:
    """What one thread works off, and the memory it reads into: none of its own for what comes from a store."""

    jobs: Iterator[_Job]
    buffer: memoryview | None


class _Pull:
    def __init__(self, workers: Sequence[_Worker], on_error: OnError) -> None:
        self._workers = workers
        self._on_error = on_error
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._work, args=(worker,), name="tierckpt-pull") for worker in self._workers[1:]
        ]
        for thread in threads:
            thread.start()
        try:
            self._work(self._workers[0])
        except BaseException as error:  # an interrupt: the others stop at their next chunk
            self._error = self._error or error
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _next(self, worker: _Worker) -> _Job | None:
        with self._lock:
            return None if self._error is not None else next(worker.jobs, None)

    def _work(self, worker: _Worker) -> None:
        while (job := self._next(worker)) is not None:
            try:
                self._do(job, worker.buffer)
            except BaseException as error:
                with self._lock:
                    self._error = self._error or error

    def _do(self, job: _Job, buffer: memoryview | None) -> None:
        copies, runs = job.copies, job.runs
        chunk = copies.chunk_range(job.index)
        if runs and runs != [chunk] and not copies.has_parts(job.index):
            runs = [chunk]
        for run in runs:
            try:
                _give(job.pieces, run, copies.part(job.index, run, buffer))
            except TierckptError as error:
                first = next(piece for piece in job.pieces if piece.start < run.stop and run.start < piece.stop)
                self._on_error(error, copies, first)
                raise
        if runs != [chunk]:
            for piece in job.pieces:
                if piece.is_peek:
                    _peek(piece, job, runs, buffer)


def _peek(piece: Piece, job: _Job, runs: Sequence[ByteRange], buffer: memoryview | None) -> None:
    """Look at what is in none of ``runs``."""
    chunk = job.copies.chunk_range(job.index)
    start, stop = max(piece.start, chunk.start), min(piece.stop, chunk.stop)
    if any(run.start <= start and stop <= run.stop for run in runs):
        return
    pages = _pages(job.copies, start, stop)
    fits = buffer is not None and round_up(pages.size_bytes) <= len(buffer)
    data = job.copies.peek(pages, buffer if fits else None)
    _give([piece], ByteRange(pages.start, pages.start + len(data)), data)


def _pages(copies: Copies, start: int, stop: int) -> ByteRange:
    """What is read to peek at some bytes: what a disk reads anyway, or just those."""
    if copies.is_remote:
        return ByteRange(start, stop)
    return ByteRange(start // PAGE_BYTES * PAGE_BYTES, min(round_up(stop, PAGE_BYTES), copies.entry.size_bytes))


def _give(pieces: Sequence[Piece], run: ByteRange, data: Buffer) -> None:
    """Copy to each piece what ``data``, which is ``run`` of the file, has of it."""
    with _address_of(data) as base:
        for piece in pieces:
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
