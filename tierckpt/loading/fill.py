"""Reads bytes of files into tensors, in large parallel reads, with as few copies as the layout allows.

Adjacent runs of bytes form an *extent*. A large extent is read straight into its tensors' memory, placed so that file
offset and address agree within a page, as O_DIRECT requires; or through a buffer that stays in the CPU caches, if that
is faster. All other bytes use the read buffers of the process. No thread holds the interpreter lock while it reads or
copies.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..arena import capacity
from ..arena.memory import HUGE_PAGE_BYTES, Kind, Memory, pin
from ..arena.pages import paging
from ..arena.slots import read_buffers
from ..errors import CapacityError, IntegrityError, TierckptError
from ..quantities import DISK_BLOCK_BYTES, human_bytes, round_up
from ..read.parallel_read import Worker, WorkerThreads, opened_disk, run_trials
from ..read.replicated_file import FileCopy, LocalCopy
from ..telemetry import BYTES
from ..types import ByteRange
from .header import TensorEntry, of_entry
from .model_files import ModelDirectory, ModelFile
from .tensor_parts import Bounds, Parts

READ_BYTES = 8 << 20
READS_A_BUFFER = 4
"""A few buffers let many processes fit on a node."""

BOUNCE_BYTES = 512 << 10
"""Twelve buffers of this size are no slower than raw reads into two of 8 MiB; larger ones are."""

DIRECT_BYTES_MIN = 1 << 20
"""Smaller extents are not worth a page of their own at either end."""

GAP_BYTES_MAX = 64 << 10
"""The disk reads this much in the time of a request."""

PIECE_GAP_BYTES_MIN = 8 << 10
"""Pieces of rows further apart are read singly from the page cache: a call takes the time of copying this."""

FILLERS_MAX = 2
"""Threads that allocate pages. Two hide more of the time than one."""

AHEAD_MAX = 8
"""Jobs with pages in advance are few: earlier jobs decide between huge and small pages."""

FILES_AT_ONCE = 64

RUN_BYTES_MIN = 1 << 20
"""Partly requested rows of this size are read singly; shorter ones in blocks."""


@dataclass(eq=False, slots=True)
class TensorRequest:
    name: str
    file: ModelFile
    entry: TensorEntry
    dtype: torch.dtype
    stored: tuple[int, ...]
    bounds: Bounds

    @classmethod
    def of(cls, name: str, file: ModelFile, entry: TensorEntry, parts: Parts) -> TensorRequest:
        dtype, stored = of_entry(entry)
        return cls(name, file, entry, dtype, stored, parts.of(name, stored))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def is_plain(self, run: RowRun) -> bool:
        return run.bounds is None and run.start % self.dtype.itemsize == 0

    def runs(self) -> Iterator[RowRun]:
        if not self.size_bytes:
            return iter(())
        # A last dimension of bytes makes every dtype alike.
        unit = self.dtype.itemsize
        return _runs((*self.stored, unit), (*self.bounds, (0, unit)), self.entry.start, 0)


@dataclass(slots=True)
class RowRun:
    """``rows`` consecutive rows of the file, with ``bounds`` as the requested part of each.

    ``start``: file offset of the first row. ``shape``: of one row, with its last dimension in bytes. ``into``: offset
    in the tensor, in bytes.
    """

    start: int
    rows: int
    shape: tuple[int, ...]
    bounds: Bounds | None
    into: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.row_bytes

    def parts(self, size_bytes: int) -> Iterator[RowRun]:
        out_bytes = self.row_bytes if self.bounds is None else _size(self.bounds)
        step = max(1, size_bytes // self.row_bytes)
        for row in range(0, self.rows, step):
            yield RowRun(
                self.start + row * self.row_bytes,
                min(step, self.rows - row),
                self.shape,
                self.bounds,
                self.into + row * out_bytes,
            )

    @property
    def piece(self) -> tuple[int, int]:
        (start, stop), *others = self.bounds or ((0, self.shape[0]),)
        if any(bound != (0, size) for bound, size in zip(others, self.shape[1:], strict=True)):
            return 0, self.row_bytes
        unit = math.prod(self.shape[1:])
        return start * unit, stop * unit

    def put(self, source: Tensor, target: Tensor) -> None:
        if self.bounds is None:
            target[self.into : self.into + len(source)].copy_(source, non_blocking=True)
            return
        part = source.view(self.rows, *self.shape)
        if target.is_cuda:  # else a strided copy is gathered in unpinned memory
            part = part.to(target.device, non_blocking=True)
        for dim, (start, stop) in enumerate(self.bounds, start=1):
            part = part.narrow(dim, start, stop - start)
        target[self.into : self.into + part.numel()].view(part.shape).copy_(part)


def _size(bounds: Bounds) -> int:
    return math.prod(stop - start for start, stop in bounds)


def _runs(shape: tuple[int, ...], bounds: Bounds, start: int, into: int) -> Iterator[RowRun]:
    row_bytes, (first, last) = math.prod(shape[1:]), bounds[0]
    if all(bound == (0, size) for bound, size in zip(bounds[1:], shape[1:], strict=True)):
        size_bytes = (last - first) * row_bytes
        yield RowRun(start + first * row_bytes, size_bytes, (1,), None, into)
    elif row_bytes < RUN_BYTES_MIN and last - first > 1:
        yield RowRun(start + first * row_bytes, last - first, shape[1:], bounds[1:], into)
    else:
        for row in range(first, last):
            offset = into + (row - first) * _size(bounds[1:])
            yield from _runs(shape[1:], bounds[1:], start + row * row_bytes, offset)


@dataclass(slots=True)
class Job:
    """Bytes to read to ``into`` (whole pages), or through a buffer. O_DIRECT needs ``start`` at a block."""

    copy: FileCopy
    start: int
    stop: int
    name: str
    into: memoryview | None = None
    puts: list[tuple[RowRun, Tensor]] = field(default_factory=list)
    memory: Memory | None = None
    pieces: tuple[int, int] | None = None
    """Size and distance of the pieces, if only these are read into the buffer."""

    @property
    def wanted_bytes(self) -> int:
        size, step = self.pieces or (1, 1)
        return -(-(self.stop - self.start) // step) * size

    def read(self, into: memoryview | None, bounce: memoryview | None) -> int:
        if self.pieces is not None and self.disk is not None and into is not None:
            return self.disk.read_pieces(self.start, *self.pieces, into[: self.wanted_bytes])
        return len(self.copy.read(ByteRange(self.start, self.stop), into, bounce))

    @property
    def disk(self) -> LocalCopy | None:
        return self.copy if isinstance(self.copy, LocalCopy) else None


class FileFill:
    def __init__(self, file: ModelFile, requests: Sequence[TensorRequest], device: torch.device) -> None:
        self.file, self.requests, self.device = file, requests, device
        self.copy = file.open()
        self.tensors: dict[str, Tensor] = {}
        self.jobs: list[Job] = []
        self._memory: Memory | None = None
        self._direct: list[tuple[TensorRequest, RowRun]] = []
        self._other: list[tuple[TensorRequest, list[RowRun]]] = []
        for request in sorted(requests, key=lambda request: request.entry.start):
            runs = list(request.runs())
            if device.type == "cpu" and len(runs) == 1 and request.is_plain(runs[0]):
                self._direct.append((request, runs[0]))
            else:
                self._other.append((request, runs))
        self._extents = self._lay_out()

    def _lay_out(self) -> list[list[tuple[TensorRequest, RowRun]]]:
        extents: list[list[tuple[TensorRequest, RowRun]]] = []
        for request, run in self._direct:
            if extents and extents[-1][-1][1].stop == run.start:
                extents[-1].append((request, run))
            else:
                extents.append([(request, run)])
        large = [extent for extent in extents if extent[-1][1].stop - extent[0][1].start >= DIRECT_BYTES_MIN]
        self._other += [(request, [run]) for extent in extents if extent not in large for request, run in extent]
        return large

    @property
    def size_bytes(self) -> int:
        blocks = sum(round_up(extent[-1][1].stop) - _block(extent[0][1].start) for extent in self._extents)
        gathered = sum(round_up(request.size_bytes) for request, _ in self._other if self._is_large(request))
        return round_up(blocks + gathered, HUGE_PAGE_BYTES)

    def _is_large(self, request: TensorRequest) -> bool:
        return self.device.type == "cpu" and request.size_bytes >= DIRECT_BYTES_MIN

    def prepare(self) -> None:
        if self.size_bytes:
            self._memory = Memory(self.size_bytes, Kind.PRIVATE, None)
        offset = 0
        for extent in self._extents:
            offset = self._place(extent, offset)
        pieces = []
        for request, runs in self._other:
            target = self._target(request, offset)
            offset += round_up(request.size_bytes) if self._is_large(request) else 0
            pieces += [(run, request.name, target) for run in runs]
        self._gather(sorted(pieces, key=lambda piece: piece[0].start))

    def finish(self) -> None:
        self.file.check_unchanged()
        if self._memory is not None:
            self._memory.keep_on_fork()

    def _place(self, extent: list[tuple[TensorRequest, RowRun]], offset: int) -> int:
        begin, end = _block(extent[0][1].start), extent[-1][1].stop
        view = self._view()[offset : offset + round_up(end) - begin]
        for start in range(begin - begin % READ_BYTES, end, READ_BYTES):
            first, last = max(start, begin), min(start + READ_BYTES, end)
            name = next(request.name for request, run in extent if run.stop > max(first, extent[0][1].start))
            into = view[first - begin : round_up(last) - begin]
            self.jobs.append(Job(self.copy, first, last, name, into, memory=self._memory))
        for request, run in extent:
            self.tensors[request.name] = _tensor(view, run.start - begin, request)
        return offset + round_up(end) - begin

    def _target(self, request: TensorRequest, offset: int) -> Tensor:
        if self._is_large(request):
            tensor = _tensor(self._view(), offset, request)
        else:
            # Torch overflows on the strides of (0, 2**63 - 1, 3), which a file may have.
            tensor = torch.empty(math.prod(request.shape), dtype=request.dtype, device=self.device).reshape(
                request.shape
            )
        self.tensors[request.name] = tensor
        return tensor.view(-1).view(torch.uint8)

    def _gather(self, pieces: Sequence[tuple[RowRun, str, Tensor]]) -> None:
        job: Job | None = None
        for run, name, target in pieces:
            start, stop = run.piece
            # A verified copy is read in blocks with digests.
            is_shared = type(self.copy) is LocalCopy and self.copy.mode.ranks > 0
            if is_shared and run.row_bytes - (stop - start) >= PIECE_GAP_BYTES_MIN:
                self._gather_pieces(run, name, target)
                continue
            for part in run.parts(READ_BYTES - 2 * DISK_BLOCK_BYTES):
                start = _block(part.start)
                if job is None or start > job.stop + GAP_BYTES_MAX or part.stop - job.start > READ_BYTES:
                    job = Job(self.copy, start, part.stop, name)
                    self.jobs.append(job)
                job.stop = max(job.stop, part.stop)
                job.puts.append((part, target))

    def _gather_pieces(self, run: RowRun, name: str, target: Tensor) -> None:
        start, stop = run.piece
        for part in run.parts(READ_BYTES):
            first, size = part.start + start, stop - start
            last = part.stop - run.row_bytes + stop
            put = RowRun(first, part.rows * size, (1,), None, part.into), target
            self.jobs.append(Job(self.copy, first, last, name, puts=[put], pieces=(size, run.row_bytes)))

    def _view(self) -> memoryview:
        if self._memory is None:
            raise RuntimeError("no memory is allocated yet: call prepare() first")
        return self._memory.view


def _block(offset: int) -> int:
    return offset - offset % DISK_BLOCK_BYTES


def _tensor(view: memoryview, offset: int, request: TensorRequest) -> Tensor:
    """Give the tensor its own storage of the same size, which keeps ``view`` alive."""
    count = math.prod(request.shape)
    return torch.frombuffer(view, dtype=request.dtype, count=count, offset=offset).view(request.shape)


def fill(
    requests: Sequence[TensorRequest], device: torch.device, stop: threading.Event | None = None
) -> dict[str, Tensor]:
    """Return the requested tensors by name. The memory of a file is freed with its last tensor.

    Raises IntegrityError: a file is shorter than before. CapacityError: nothing was read. Stopped: ``stop`` is set.
    """
    by_file: dict[int, list[TensorRequest]] = {}
    for request in requests:
        by_file.setdefault(id(request.file), []).append(request)
    file_fills = [FileFill(group[0].file, group, device) for group in by_file.values()]
    size_bytes = sum(
        max(file_fill.size_bytes, sum(w.size_bytes for w in file_fill.requests)) for file_fill in file_fills
    )
    if device.type == "cpu" and size_bytes >= DIRECT_BYTES_MIN:  # for less, the query costs more than the read
        _check_room(size_bytes)
    tensors: dict[str, Tensor] = {}
    for offset in range(0, len(file_fills), FILES_AT_ONCE):
        some = file_fills[offset : offset + FILES_AT_ONCE]
        for file_fill in some:
            file_fill.prepare()
        try:
            _read([job for file_fill in some for job in file_fill.jobs], some[0].file.directory, device, stop)
        finally:
            for file_fill in some:
                file_fill.copy.close()
        for file_fill in some:
            file_fill.finish()
            tensors |= file_fill.tensors
    return tensors


def _read(jobs: list[Job], directory: ModelDirectory, device: torch.device, stop: threading.Event | None) -> None:
    def run(some: list[Job], threads: int) -> None:
        _Reading(some, device, stop or threading.Event(), threads).run()

    run(run_trials(jobs, opened_disk(job for job in jobs if job.into is not None), run), directory.threads)


def _check_room(size_bytes: int) -> None:
    try:
        capacity.require(size_bytes, asked_bytes=size_bytes)
    except CapacityError as error:
        raise CapacityError(
            f"tensors of {human_bytes(size_bytes)} do not fit in memory: {error.message}",
            hint="Load a part of them (names=, shard=), or one after the other (lazy=True, stream_safetensors)",
            **error.context,
        ) from error


class Stopped(Exception):
    """The caller no longer needs the tensors."""


class _Reading(WorkerThreads):
    def __init__(self, jobs: Sequence[Job], device: torch.device, stop: threading.Event, threads: int) -> None:
        needs_buffers = any(job.into is None for job in jobs)
        self._fillers = FILLERS_MAX if len(jobs) > 1 and any(job.memory is not None for job in jobs) else 0
        self._filling = self._fillers
        self._readers = min(threads, len(jobs))
        if needs_buffers:
            self._readers = min(self._readers, max(2, len(jobs) // READS_A_BUFFER))
        self._jobs = _until(stop, jobs)
        self._ready: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(AHEAD_MAX)
        self._device = device
        self._inference = torch.is_inference_mode_enabled()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        workers = [
            Worker(partial(self._work, bounce), "tierckpt-load", READ_BYTES if needs_buffers else 0)
            for bounce in self._staging_views()
        ]
        workers += [Worker(self._fill_in, "tierckpt-pages")] * self._fillers
        super().__init__(workers, read_buffers())

    def fail(self, error: BaseException) -> None:
        """Wake all waiters: no other thread may be left to make or allocate pages."""
        super().fail(error)
        self._room.release(FILLERS_MAX)
        self._end_readers()

    def _end_readers(self) -> None:
        for _ in range(self._readers):
            self._ready.put(None)

    def _staging_views(self) -> list[memoryview | None]:
        if not self._fillers:
            return [None] * self._readers
        size_bytes = round_up(self._readers * BOUNCE_BYTES, HUGE_PAGE_BYTES)
        view = Memory(size_bytes, Kind.PRIVATE, None).view
        return [view[offset : offset + BOUNCE_BYTES] for offset in range(0, self._readers * BOUNCE_BYTES, BOUNCE_BYTES)]

    def _fill_in(self, _: Memory | None) -> None:
        jobs = self.iterate(self._jobs)
        while self._room.acquire() and (job := next(jobs, None)) is not None:
            put_pages(job)
            self._ready.put(job)
        with self._taking:
            self._filling -= 1
            is_last = not self._filling
        if is_last:
            self._end_readers()

    def _next_ready(self) -> Iterator[Job]:
        if not self._fillers:
            for job in self.iterate(self._jobs):
                put_pages(job)
                yield job
            return
        while (ready := self._ready.get()) is not None and self.error is None:  # an error drops pending jobs
            self._room.release()
            yield ready

    def _work(self, bounce: memoryview | None, memory: Memory | None) -> None:
        with torch.inference_mode(self._inference):
            buffer = self._buffer_of(memory)
            for job in self._next_ready():
                self._do(job, buffer, bounce)

    def _buffer_of(self, memory: Memory | None) -> _Buffer | None:
        if memory is None:
            return None
        return _Buffer(memory) if self._stream is None else _PinnedBuffer(memory, self._stream)

    def _do(self, job: Job, buffer: _Buffer | None, bounce: memoryview | None) -> None:
        into = job.into if job.into is not None or buffer is None else buffer.view
        try:
            count = job.read(into, bounce if job.into is not None else None)
        except TierckptError as error:
            error.context.setdefault("tensor", job.name)
            raise
        if count != job.wanted_bytes:
            raise IntegrityError(
                f"{job.copy.where} ends before byte {job.stop}: it became shorter while it was read",
                hint="Fetch it again",
                file=job.copy.where.rpartition("/")[2],
                tensor=job.name,
            )
        BYTES.emit(count, tier=job.copy.tier, direction="read")
        if buffer is not None:
            buffer.put(job)


def put_pages(job: Job) -> None:
    """Extents in the page cache get pages during the copy: earlier, each page would pass the CPU caches twice."""
    if job.memory is None or job.into is None:
        return
    is_huge, is_priced = paging.next()
    if not is_huge:
        job.memory.use_small_pages(job.into)
    if is_priced or not job.copy.is_in_memory(ByteRange(job.start, job.stop)):
        started_at = time.perf_counter()
        job.memory.fill_in(job.into)
        paging.learn(len(job.into), time.perf_counter() - started_at, is_huge=is_huge)


def _until(stop: threading.Event, jobs: Sequence[Job]) -> Iterator[Job]:
    for job in jobs:
        if stop.is_set():
            raise Stopped
        yield job


class _Buffer:
    def __init__(self, memory: Memory) -> None:
        self.view = memory.view[:READ_BYTES]
        self._bytes = torch.frombuffer(self.view, dtype=torch.uint8)

    def put(self, job: Job) -> None:
        for run, target in job.puts:
            run.put(self._bytes[run.start - job.start : run.stop - job.start], target)


class _PinnedBuffer(_Buffer):
    def __init__(self, memory: Memory, after: torch.cuda.Stream) -> None:
        super().__init__(memory)
        pin(memory)  # if unavailable, copies are slower but correct
        self._stream = torch.cuda.Stream(after.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(after)  # its pending work on the targets comes first

    def put(self, job: Job) -> None:
        with torch.cuda.stream(self._stream):
            super().put(job)
        self._stream.synchronize()  # the next read overwrites the source
