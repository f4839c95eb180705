"""Flush: writes memory to the node's SSD, durably, taking digests and CRCs in the same pass.

Workers take segments of a file (one or more chunks) in order, and write each with one O_DIRECT write.

    F1  The digests are of the bytes handed to the kernel, excluding padding.
    F2  A tail waits only for earlier segments of the same file, which are taken first: no deadlock.
    F3  After any error the shard is useless, and the same file is never retried: a failed fsync may have dropped the
        pages it could not write (Rebello et al., ATC'20).
    F4  When ``flush`` returns, every shard's bytes are durable if ``durable``; the caller syncs its directory.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import memmove
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from ..arena.memory import Memory
from ..disk import priority
from ..disk.durable import translated
from ..disk.file_io import DirectFile, allocate, copy_small
from ..disk.io_tuner import IoShape, segment_bytes
from ..disk.priority import CpuThrottle
from ..errors import OperationTimeoutError
from ..format.manifest import DIGEST_BLOCK_BYTES, Flushed, block_digest, blocks_of, digest_of_blocks
from ..quantities import DISK_BLOCK_BYTES, round_up
from ..resources import start_thread
from .shard_plan import Shard, ShardRecord

TIMEOUT_SECONDS = 1800.0
_ZEROS = bytes(64 * 1024)
HOT_BYTES = 2 * DIGEST_BLOCK_BYTES
"""A quarter of the smallest second-level cache of current servers."""

SMALL_BYTES = 16 * 1024
"""Reacquiring the interpreter lock takes longer than a copy of this size."""


def flush(
    shards: Sequence[Shard],
    *,
    slots: Sequence[Memory],
    shape: IoShape,
    chunk_size_bytes: int,
    durable: bool = True,
    nice: int = 0,
    pace: CpuThrottle | None = None,
    cached: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Flushed]:
    """Write ``shards``, each to a new file. Return size and chunk digests, in order.

    Args:
        slots: memory for a segment each, used for data outside an image.
        nice: of new threads; 0: the caller's thread is a worker.
        cached: write through the page cache, so that later readers find the shards in memory.

    Raises:
        CapacityError: the disk is full. If the file system supports fallocate, nothing was written.
        TierckptError: the error of the first failed shard (F3). Files are not removed.
        OperationTimeoutError: a worker did not end within ``timeout_seconds``.
    """
    deadline = time.monotonic() + timeout_seconds
    pace = pace or CpuThrottle()
    foreground = not nice and pace.share >= 1.0
    job = FlushJob(shards, slots, shape, chunk_size_bytes, deadline, pace, durable, cached, foreground)
    try:
        threads = job.open(nice)
        try:
            for thread in threads:
                job.start(thread)
            if not nice:
                job.work(0)
            job.join()
        except BaseException as error:
            # The caller reuses the slots, so wait for the workers.
            job.fail(error)
            job.join()
            raise
        if job.failure is not None:
            raise job.failure
    finally:
        job.close()
    return [file.flushed() for file in job.files]


class Stream:
    """A shard as a stream of bytes, to be sent. ``slot`` must hold a chunk."""

    def __init__(self, shard: Shard, slot: Memory, chunk_size_bytes: int) -> None:
        for record in shard.records:
            record.clear_crcs()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        self._job = FlushJob([shard], [slot], IoShape(1, chunk_size_bytes), chunk_size_bytes, deadline)
        self._slot = slot

    def pieces(self) -> Iterator[memoryview]:
        """Yield the file's bytes, chunk by chunk. Each piece is valid until the next iteration."""
        for file in self._job.files:
            for index in range(file.segments):
                start = index * self._job.segment_bytes
                end = min(start + self._job.segment_bytes, file.shard.size_bytes)
                records = overlapping(file.shard.records, start, end)
                place = self._job.in_place(file, records, start, end) or _place_in(self._slot, start, end)
                self._job.assemble(file, records, place, end)
                yield place.part(start, end)

    def flushed(self) -> Flushed:
        return self._job.files[0].flushed()


class ShardFile(DirectFile):
    def __init__(self, shard: Shard, segment_bytes: int, *, direct: bool) -> None:
        super().__init__(direct=direct)
        self.shard = shard
        self.blocks: dict[int, bytes] = {}
        self.ahead = shard.image.ahead if direct and shard.image is not None else None
        self.segments = -(-shard.size_bytes // segment_bytes)
        self.left = self.segments

    def open(self) -> None:
        with translated(self.shard.path):
            fd = self.ahead.take(self.shard.path) if self.ahead is not None else None
            if fd is None:
                self.ahead = None
                self.create(self.shard.path)
            else:
                self.fd = fd
            allocate(self.fd, round_up(self.shard.size_bytes))

    def has(self, place: _Place) -> bool:
        """Return whether write-ahead has this segment: one record's data in the image (A3)."""
        image = self.shard.image
        if self.ahead is None or image is None or place.address != image.address + place.start:
            return False
        record, *others = overlapping(self.shard.records, place.start, place.end)
        first, last = record.data_offset, record.data_offset + record.size_bytes
        return not others and first <= place.start and place.end <= last and self.ahead.covers(place.start, place.end)

    def flushed(self) -> Flushed:
        blocks = [self.blocks[index] for index in sorted(self.blocks)]
        return Flushed(self.shard.path, self.shard.size_bytes, tuple(map(digest_of_blocks, blocks)), b"".join(blocks))

    def finish(self, durable: bool) -> None:
        self.cut(self.shard.size_bytes, durable=durable)


@dataclass(eq=False)
class FlushJob:
    shards: Sequence[Shard]
    slots: Sequence[Memory]
    shape: IoShape
    chunk_size_bytes: int
    deadline: float
    pace: CpuThrottle = field(default_factory=CpuThrottle)
    durable: bool = False
    cached: bool = True
    foreground: bool = True

    def __post_init__(self) -> None:
        self.segment_bytes = segment_bytes(self.chunk_size_bytes, self.shape.size_bytes)
        self.files = [ShardFile(shard, self.segment_bytes, direct=not self.cached) for shard in self.shards]
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.working = 0
        self.threads_started: list[threading.Thread] = []
        # In the foreground, pieces that fit the core's cache take an eighth less processor time. In the background,
        # whole segments: each call reacquires the GIL.
        whole_blocks = not self.chunk_size_bytes % DIGEST_BLOCK_BYTES
        self.hot_bytes = HOT_BYTES if self.foreground and whole_blocks else 0
        self._queue = deque((file, index * self.segment_bytes) for file in self.files for index in range(file.segments))
        self._free = list(self.slots)
        self._writing = threading.BoundedSemaphore(self.shape.writes_max)

    def open(self, nice: int) -> list[threading.Thread]:
        for file in self.files:
            file.open()
            if not file.segments:
                self._finish(file)
        count = min(self.shape.threads, max(1, sum(file.segments for file in self.files)))
        return [
            threading.Thread(target=self._run, args=(nice,), name="tierckpt-flush", daemon=True)
            for _ in range(count if nice else count - 1)
        ]

    def join(self) -> None:
        """Wait until no worker uses a slot or a file.

        Uses a counter: an interrupted ``Thread.join`` marks a running thread as ended (CPython issue 89437).
        """
        with self.changed:
            ended = self.changed.wait_for(lambda: not self.working, max(0.0, self.deadline - time.monotonic()))
        if ended:
            for thread in self.threads_started:  # about to return: leave none for interpreter shutdown
                thread.join(1.0)
            return
        # A thread hangs in the kernel: its slot and its file must not be reused.
        late = self._timeout_error("a write to end")
        self.fail(late)
        raise late

    def start(self, thread: threading.Thread) -> None:
        with self.changed:
            self.working += 1
        try:
            start_thread(thread)
            self.threads_started.append(thread)
        except BaseException:
            if thread.ident is None:
                self._leave()
            raise

    def _leave(self) -> None:
        with self.changed:
            self.working -= 1
            self.changed.notify_all()

    def _run(self, nice: int) -> None:
        try:
            self.work(nice)
        finally:
            self._leave()

    def work(self, nice: int) -> None:
        try:
            if nice:
                priority.lower_this_thread(nice)
            while (segment := self._next()) is not None:
                begun = time.thread_time()
                try:
                    self._write_segment(segment)
                finally:
                    self._give_back(segment.slot)
                if self._queue:
                    self.pace.throttle_after(time.thread_time() - begun)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def _next(self) -> _Segment | None:
        """Return the next segment, with a slot if it needs one; None at the end or after an error.

        Strictly in order: a tail waits for earlier segments (F2).
        """
        with self.changed:
            while self.failure is None and self._queue:
                file, start = self._queue[0]
                end = min(start + self.segment_bytes, file.shard.size_bytes)
                records = overlapping(file.shard.records, start, end)
                place, slot = self.in_place(file, records, start, end), None
                if place is None and self._free:
                    slot = self._free.pop()
                    place = _place_in(slot, start, end)
                if place is not None:
                    self._queue.popleft()
                    return _Segment(file, records, place, end, slot)
                if not self.changed.wait(max(0.0, self.deadline - time.monotonic())):
                    raise self._timeout_error("a buffer")
        return None

    def _give_back(self, slot: Memory | None) -> None:
        if slot is not None:
            with self.changed:
                self._free.append(slot)
                self.changed.notify_all()

    def _write_segment(self, segment: _Segment) -> None:
        file, place, end = segment.file, segment.place, segment.end
        start = place.start
        self.assemble(file, segment.records, place, end)
        with translated(file.shard.path):
            if not file.has(place):
                if not self._writing.acquire(timeout=max(0.0, self.deadline - time.monotonic())):
                    raise self._timeout_error("another write to end")
                try:
                    file.write(place.part(start, place.end if file.direct else end), start)
                finally:
                    self._writing.release()
            with self.changed:
                file.left -= 1
                last = not file.left
            if last:
                self._finish(file)

    def assemble(self, file: ShardFile, records: Sequence[ShardRecord], place: _Place, end: int) -> None:
        self._gather(records, place)
        start = place.start
        for index, offset in enumerate(range(start, end, self.chunk_size_bytes), start // self.chunk_size_bytes):
            file.blocks[index] = place.blocks(offset, min(offset + self.chunk_size_bytes, end))

    def _finish(self, file: ShardFile) -> None:
        with translated(file.shard.path):
            if file.ahead is not None:
                if not file.ahead.end(max(0.0, self.deadline - time.monotonic())):
                    raise self._timeout_error("a write to end")
                if file.ahead.error is not None:
                    raise file.ahead.error
            file.finish(self.durable)

    def in_place(self, file: ShardFile, records: Sequence[ShardRecord], start: int, end: int) -> _Place | None:
        image, padded = file.shard.image, round_up(end)
        if image is None or padded > image.size_bytes:
            return None
        for record in records:
            placed_at = record.offset + record.head_bytes
            if record.size_bytes and (record.fetch is not None or record.address - image.address != placed_at):
                return None
        position = image.address + start - image.memory.address
        return _Place(image.memory.view[position : position + padded - start], image.address + start, start, padded)

    def _gather(self, records: Sequence[ShardRecord], place: _Place) -> None:
        """Gather the bytes of a segment, tails last: their CRC may depend on another worker."""
        cursor = place.start
        tails = []
        view, start, shift, last = place.view, place.start, place.address - place.start, place.end
        for record in records:
            offset, frame = record.offset, record.frame
            gap, end = offset - cursor, offset + record.total_bytes
            if frame is not None and offset >= start and end <= last and gap < DISK_BLOCK_BYTES:
                data = offset + record.head_bytes
                tail = data + record.size_bytes
                view[cursor - start : data - start] = _ZEROS[:gap] + record.head if gap else record.head
                if record.fetch is not None or record.address - shift != data:
                    self._copy_data(record, shift + data, 0, record.size_bytes)
                view[tail - start : end - start] = frame.tail_with(crc32(view[data - start : tail - start]))
                cursor = end
                continue
            if gap > 0:
                place.zero(cursor, offset)
            cursor = end
            place.put(record.head, offset)
            self._put_data(record, place)
            if record.tail_bytes and cursor > place.start and cursor - record.tail_bytes < place.end:
                tails.append(record)
            cursor = min(cursor, place.end)
        if cursor < place.end:
            place.zero(cursor, place.end)
        for record in tails:
            place.put(record.frame.tail_with(self._crc_of(record)), record.end - record.tail_bytes)

    def _put_data(self, record: ShardRecord, place: _Place) -> None:
        first = max(record.data_offset, place.start)
        last = min(record.data_offset + record.size_bytes, place.end)
        if first >= last:
            return
        crc = 0
        for start, end in _pieces(first, last, self.hot_bytes):
            self._copy_data(record, place.address + start - place.start, start - record.data_offset, end - start)
            crc = crc32(place.part(start, end), crc)
            if self.hot_bytes:
                place.digest(start, end)
        with self.changed:
            record.set_crc(first, last - first, crc)
            self.changed.notify_all()

    def _copy_data(self, record: ShardRecord, target: int, start: int, count: int) -> None:
        if record.fetch is not None:
            record.fetch(target, start, count)
            return
        source = record.address + start
        if source != target:
            (copy_small if count < SMALL_BYTES else memmove)(target, source, count)

    def _crc_of(self, record: ShardRecord) -> int:
        with self.changed:
            while record.known_bytes < record.size_bytes:
                if self.failure is not None:
                    raise self.failure
                if not self.changed.wait(max(0.0, self.deadline - time.monotonic())):
                    raise self._timeout_error("the CRC of an item")
        return record.crc()

    def _timeout_error(self, what: str) -> OperationTimeoutError:
        where = self.files[0].shard.path.parent if self.files else ""
        return OperationTimeoutError(
            f"waited for {what} under {where}", hint="Look for a hung disk; the previous checkpoint is whole"
        )

    def close(self) -> None:
        if self.working:
            return  # a late write could go to another file that reuses the descriptor (A5)
        for file in self.files:
            if file.ahead is not None and not file.ahead.end(max(0.0, self.deadline - time.monotonic())):
                continue  # same (A5)
            file.close()


class _Place:
    __slots__ = ("address", "digests", "end", "start", "view")

    def __init__(self, view: memoryview, address: int, start: int, end: int) -> None:
        self.view, self.address, self.start, self.end = view, address, start, end
        self.digests: dict[int, bytes] = {}

    def part(self, start: int, end: int) -> memoryview:
        return self.view[start - self.start : end - self.start]

    def digest(self, start: int, end: int) -> None:
        """Digest the whole blocks within ``[start, end)``, which must be final."""
        for offset in range(start + -start % DIGEST_BLOCK_BYTES, end - DIGEST_BLOCK_BYTES + 1, DIGEST_BLOCK_BYTES):
            self.digests[offset] = block_digest(self.part(offset, offset + DIGEST_BLOCK_BYTES))

    def blocks(self, start: int, end: int) -> bytes:
        if not self.digests:
            return blocks_of(self.part(start, end))
        return b"".join(
            self.digests.get(offset) or block_digest(self.part(offset, min(offset + DIGEST_BLOCK_BYTES, end)))
            for offset in range(start, end, DIGEST_BLOCK_BYTES)
        )

    def put(self, data: Any, offset: int) -> None:
        first, last = max(offset, self.start), min(offset + len(data), self.end)
        if first < last:
            self.view[first - self.start : last - self.start] = data[first - offset : last - offset]

    def zero(self, start: int, end: int) -> None:
        """Zero these bytes: no stale memory reaches a file."""
        while start < end:
            count = min(end - start, len(_ZEROS))
            self.view[start - self.start : start - self.start + count] = _ZEROS[:count]
            start += count


def _pieces(start: int, end: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    while size_bytes and end - start > size_bytes:
        cut = start + size_bytes - start % size_bytes
        yield start, cut
        start = cut
    yield start, end


def _place_in(slot: Memory, start: int, end: int) -> _Place:
    return _Place(slot.view, slot.address, start, round_up(end))


class _Segment(NamedTuple):
    file: ShardFile
    records: Sequence[ShardRecord]
    place: _Place
    end: int
    slot: Memory | None
    """The memory of ``place``; None in the image."""


def overlapping(records: Sequence[ShardRecord], start: int, end: int) -> Sequence[ShardRecord]:
    first = bisect_right(records, start, key=lambda record: record.end)
    return records[first : bisect_left(records, end, first, key=lambda record: record.offset)]
