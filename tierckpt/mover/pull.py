"""Bytes of many files into memory: in large reads, in parallel, every chunk verified before a byte of it is copied.

A few threads take chunk after chunk, in the order of the files. Each reads its chunk into a buffer of its own (huge
pages, past the page cache where the bytes are not in it), digests it while it is in the processor's caches, and copies
out what was asked for. Reading, digesting and copying run without the interpreter lock.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..arena.slots import Bounce
from ..errors import TierckptError
from ..telemetry import BYTES
from ..types import Tier
from .copies import Copies
from .flush import round_up

BUFFER_SECONDS = 600.0
"""How long to wait for the buffers, which other loads of this process may have."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``start`` to ``stop`` of a file, and the address they go to. Whoever makes it keeps that memory alive."""

    start: int
    stop: int
    address: int


@dataclass(frozen=True, slots=True)
class _Job:
    copies: Copies
    index: int
    pieces: list[Piece]


def pull(
    wanted: Sequence[tuple[Copies, Sequence[Piece]]],
    buffers: Bounce,
    *,
    on_error: Callable[[TierckptError, Copies, Piece], None] = lambda *_: None,
) -> None:
    """Copy all pieces to where they go. Returns when all of them are there.

    Args:
        wanted: each file once, its pieces in order of ``start``; they may overlap.
        buffers: one thread for each that it has.
        on_error: may add to the error of a chunk, given the first piece that wanted it.

    Raises:
        IntegrityError: some chunk has no good copy. Pieces of other chunks may have been copied.
    Cost: each chunk that a piece touches is read, digested and copied from once.
    """
    jobs = [job for copies, pieces in wanted for job in _jobs(copies, pieces)]
    if not jobs:
        return
    chunk_bytes = max(round_up(job.copies.chunk_range(job.index).size_bytes) for job in jobs)
    with buffers.take(min(buffers.count_max, len(jobs)), chunk_bytes, BUFFER_SECONDS) as slots:
        _Pull(jobs, on_error).run([slot.view[:chunk_bytes] for slot in slots])


def _jobs(copies: Copies, pieces: Sequence[Piece]) -> Iterator[_Job]:
    """One job for each chunk that is touched, in order."""
    touched: dict[int, list[Piece]] = {}
    size = copies.chunk_size_bytes
    for piece in pieces:
        for index in range(piece.start // size, -(-piece.stop // size)):
            touched.setdefault(index, []).append(piece)
    return (_Job(copies, index, touched[index]) for index in sorted(touched))


class _Pull:
    def __init__(self, jobs: Sequence[_Job], on_error: Callable[[TierckptError, Copies, Piece], None]) -> None:
        self._jobs = iter(jobs)
        self._on_error = on_error
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, buffers: Sequence[memoryview]) -> None:
        threads = [threading.Thread(target=self._work, args=(buffer,), name="tierckpt-pull") for buffer in buffers[1:]]
        for thread in threads:
            thread.start()
        try:
            self._work(buffers[0])
        except BaseException as error:  # an interrupt: the others stop at their next chunk
            self._error = self._error or error
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _next(self) -> _Job | None:
        with self._lock:
            return None if self._error is not None else next(self._jobs, None)

    def _work(self, buffer: memoryview) -> None:
        while (job := self._next()) is not None:
            try:
                _do(job, buffer)
            except BaseException as error:
                if isinstance(error, TierckptError):
                    self._on_error(error, job.copies, job.pieces[0])
                with self._lock:
                    self._error = self._error or error


def _do(job: _Job, buffer: memoryview) -> None:
    chunk = job.copies.chunk(job.index, buffer)
    BYTES.emit(len(chunk), tier=job.copies.tier or Tier.SHARED, direction="read")
    base, at = ctypes.addressof(ctypes.c_char.from_buffer(buffer)), job.copies.chunk_range(job.index)
    for piece in job.pieces:
        start, stop = max(piece.start, at.start), min(piece.stop, at.stop)
        ctypes.memmove(piece.address + start - piece.start, base + start - at.start, stop - start)
