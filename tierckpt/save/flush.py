"""Flush: writes memory to the node's SSD, durably, taking digests and CRCs in the same pass.

A shard is an ordered list of records (head, raw data somewhere in memory, tail). Its file is cut in segments of one or
more chunks. Workers take segments in file order. A worker

    1. gathers the segment's bytes: in place if the arena holds an image of the file, otherwise in the worker's slot of
       huge pages;
    2. computes the CRC-32 of the data in it, and fills the tails that are then known;
    3. digests each chunk;
    4. writes the whole segment with one O_DIRECT write.

In steps 2 and 3 the bytes of step 1 are still in the processor's cache. Memory use does not depend on the size.

Invariants (tests cite them):
    F1  The digests are of the bytes handed to the kernel, excluding padding.
    F2  A tail waits only for earlier segments of the same file, which are taken first: no deadlock.
    F3  After any error the shard is useless: the error is raised, and the same file is never retried. In particular,
        a failed fsync may have dropped the pages it could not write (Rebello et al., ATC'20).
    F4  When ``flush`` returns, every shard's bytes are durable if ``durable``; the caller syncs its directory.

Runs in the process that owns the data or in another one that maps the same memory: addresses count from ``base``.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import memmove
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

_ZEROS = bytes(64 * 1024)
HOT_BYTES = 2 * DIGEST_BLOCK_BYTES
"""A quarter of the smallest second-level cache of current servers, which also holds source, target and other data."""

SMALL_BYTES = 16 * 1024
"""Copied without releasing the interpreter lock: reacquiring it takes longer than the copy."""


def flush(
    shards: Sequence[Shard],
    *,
    slots: Sequence[Memory],
    shape: IoShape,
    chunk_size_bytes: int,
    durable: bool = True,
    base: int = 0,
    nice: int = 0,
    pace: CpuThrottle | None = None,
    cached: bool = False,
    timeout_seconds: float = 1800.0,
) -> list[Flushed]:
    """Write ``shards``, each to a new file. Return size and chunk digests, in order.

    The caller's thread is one of the workers, unless ``nice`` requests a low priority, which applies to new threads
    only. ``slots``: memory for a segment each, used for data outside an image.

    ``cached`` writes through the page cache: slower, but later readers find the shards in memory.

    With a ``pace``, workers rest between segments while the node's processors are busy (``disk/priority.py``).

    Raises:
        CapacityError: the disk is full (detected by fallocate before the first byte, if the file system supports it).
        TierckptError: any other error of a worker, of the first failed shard (F3). Files are not removed.
        OperationTimeoutError: a worker did not end within ``timeout_seconds``.
    Cost: one pass over cached data for CRC and digest, one more copy if there is no image; memory: the slots.
    """
    deadline = time.monotonic() + timeout_seconds
    pace = pace or CpuThrottle()
    foreground = not nice and pace.share >= 1.0
    job = FlushJob(shards, slots, shape, chunk_size_bytes, durable, base, pace, deadline, cached, foreground)
    try:
        threads = job.open(nice)
        try:
            for thread in threads:
                job.start(thread)
            if not nice:
                job.work(0)
            job.join()
        except BaseException as error:
            # An interrupt, or no thread available. On return the caller reuses the slots, so wait for the workers:
            # each finishes its current segment and takes no other.
            job.fail(error)
            job.join()
            raise
        if job.failure is not None:
            raise job.failure
    finally:
        job.close()
    return [file.flushed() for file in job.files]


class Stream:
    """A shard as a stream of bytes, to be sent instead of written. ``slot`` must hold a chunk."""

    def __init__(self, shard: Shard, slot: Memory, chunk_size_bytes: int, timeout_seconds: float = 1800.0) -> None:
        for record in shard.records:
            record.clear_crcs()
        deadline = time.monotonic() + timeout_seconds
        one_by_one = IoShape(1, chunk_size_bytes)
        self._job = FlushJob(
            [shard], [slot], one_by_one, chunk_size_bytes, False, 0, CpuThrottle(), deadline, True, True
        )
        self._slot = slot

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes of the file in order, chunk by chunk. Each piece is valid until the next iteration."""
        for file in self._job.files:
            for index in range(file.segments):
                start = index * self._job.segment_bytes
                end = min(start + self._job.segment_bytes, file.shard.size_bytes)
                records = overlapping(file.shard.records, start, end)
                place = self._job.in_place(file, records, start, end) or _place_in(self._slot, start, end)
                self._job.assemble(file, records, place, end)
                yield place.part(start, end)

    def flushed(self) -> Flushed:
        """Return size and digests of the shard, after all pieces were consumed."""
        return self._job.files[0].flushed()


class ShardFile(DirectFile):
    """A shard being written: its descriptor, and the number of pending segments."""

    def __init__(self, shard: Shard, segment_bytes: int, *, direct: bool) -> None:
        super().__init__(direct=direct)
        self.shard = shard
        self.blocks: dict[int, bytes] = {}
        """The digests of each chunk's blocks."""
        self.ahead = shard.image.ahead if direct and shard.image is not None else None
        self.segments = -(-shard.size_bytes // segment_bytes)
        self.left = self.segments

    def open(self) -> None:
        with translated(self.shard.path):
            if not self._take():
                self.open_file()
            allocate(self.fd, round_up(self.shard.size_bytes))

    def _take(self) -> bool:
        fd = self.ahead.take(self.shard.path) if self.ahead is not None else None
        if fd is None:
            self.ahead = None
            return False
        self.fd = fd
        return True

    def has(self, place: _Place) -> bool:
        """Whether the segment at ``place`` is written ahead: it is in the image and is one record's data (A3)."""
        image = self.shard.image
        if self.ahead is None or image is None or place.address != image.address + place.start:
            return False
        record, *others = overlapping(self.shard.records, place.start, place.end)
        first, last = record.data_offset, record.data_offset + record.size_bytes
        return not others and first <= place.start and place.end <= last and self.ahead.covers(place.start, place.end)

    def flushed(self) -> Flushed:
        blocks = [self.blocks[index] for index in sorted(self.blocks)]
        return Flushed(self.shard.path, self.shard.size_bytes, tuple(map(digest_of_blocks, blocks)), b"".join(blocks))

    def open_file(self) -> None:
        self.create(self.shard.path)

    def finish(self, durable: bool) -> None:
        self.cut(self.shard.size_bytes, durable=durable)


class FlushJob:
    """The workers of one ``flush`` call and their shared state."""

    def __init__(
        self,
        shards: Sequence[Shard],
        slots: Sequence[Memory],
        shape: IoShape,
        chunk_size_bytes: int,
        durable: bool,
        base: int,
        pace: CpuThrottle,
        deadline: float,
        cached: bool,
        foreground: bool,
    ) -> None:
        self.chunk_size_bytes = chunk_size_bytes
        self.segment_bytes = segment_bytes(chunk_size_bytes, shape.size_bytes)
        self.files = [ShardFile(shard, self.segment_bytes, direct=not cached) for shard in shards]
        self.threads = shape.threads
        self.durable = durable
        self.base = base
        self.deadline = deadline
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.working = 0
        self.threads_started: list[threading.Thread] = []
        self.pace = pace
        # In the foreground, copy, CRC and digest process pieces that fit the core's own cache: an eighth less processor
        # time. In the background they process whole segments, since each call must reacquire the GIL.
        whole_blocks = not chunk_size_bytes % DIGEST_BLOCK_BYTES
        self.hot_bytes = HOT_BYTES if foreground and whole_blocks else 0
        self._queue = deque(self._segments())
        self._free = list(slots)
        self._writing = threading.BoundedSemaphore(shape.writes_max)

    def _segments(self) -> Iterator[tuple[ShardFile, int]]:
        for file in self.files:
            for index in range(file.segments):
                yield file, index * self.segment_bytes

    def open(self, nice: int) -> list[threading.Thread]:
        """Open the files. Return the threads to start besides the caller's, or instead of it (``nice``)."""
        for file in self.files:
            file.open()
            if not file.segments:
                self._finish(file)
        count = min(self.threads, max(1, sum(file.segments for file in self.files)))
        return [
            threading.Thread(target=self._run, args=(nice,), name="tierckpt-flush", daemon=True)
            for _ in range(count if nice else count - 1)
        ]

    def join(self) -> None:
        """Wait until no worker uses a slot or a file.

        Uses a counter, as an interrupted ``Thread.join`` marks a running thread as ended (CPython issue 89437).
        """
        with self.changed:
            ended = self.changed.wait_for(lambda: not self.working, max(0.0, self.deadline - time.monotonic()))
        if ended:
            for thread in self.threads_started:  # they are about to return: leave none for interpreter shutdown
                thread.join(1.0)
            return
        # A thread hangs in the kernel and still uses its slot and its file: neither may be reused.
        late = self._late("a write to end")
        self.fail(late)
        raise late

    def start(self, thread: threading.Thread) -> None:
        with self.changed:
            self.working += 1
        try:
            start_thread(thread)
            self.threads_started.append(thread)
        except BaseException:
            if thread.ident is None:  # it never ran, so it does not call ``_leave``
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
                if self._queue:  # after the last segment only the commit remains
                    self.pace.throttle_after(time.thread_time() - begun)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def _next(self) -> _Segment | None:
        """Return the next segment, with a slot if it needs one; None at the end or after an error.

        Segments are taken strictly in order, also if the first must wait for a slot: a tail waits for the CRCs of
        earlier segments, which must all have their slots.
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
                    raise self._late("a buffer")
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
                    raise self._late("another write to end")
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
        """Assemble the bytes up to ``end`` at ``place``, padded to whole blocks, and note their digests."""
        self._gather(records, place)
        start = place.start
        for index, offset in enumerate(range(start, end, self.chunk_size_bytes), start // self.chunk_size_bytes):
            file.blocks[index] = place.blocks(offset, min(offset + self.chunk_size_bytes, end))

    def _finish(self, file: ShardFile) -> None:
        with translated(file.shard.path):
            if file.ahead is not None:
                if not file.ahead.end(max(0.0, self.deadline - time.monotonic())):
                    raise self._late("a write to end")
                if file.ahead.error is not None:
                    raise file.ahead.error
            file.finish(self.durable)

    def in_place(self, file: ShardFile, records: Sequence[ShardRecord], start: int, end: int) -> _Place | None:
        """Return the place of these bytes in the image; None if the image does not hold them contiguously."""
        image, padded = file.shard.image, round_up(end)
        if image is None or padded > image.size_bytes:
            return None
        moved = self.base - image.address
        for record in records:
            if record.size_bytes and (
                record.fetch is not None or record.address + moved != record.offset + record.head_bytes
            ):
                return None
        position = image.address + start - image.memory.address
        return _Place(image.memory.view[position : position + padded - start], image.address + start, start, padded)

    def _gather(self, records: Sequence[ShardRecord], place: _Place) -> None:
        """Gather the bytes of a segment. Tails come last: their CRC may depend on another worker."""
        cursor = place.start
        tails = []
        view, start, shift, last = place.view, place.start, place.address - place.start, place.end
        moved = self.base - shift
        for record in records:
            offset, frame = record.offset, record.frame
            gap, end = offset - cursor, offset + record.total_bytes
            if frame is not None and offset >= start and end <= last and gap < DISK_BLOCK_BYTES:
                # The segment has the whole item: the common case with many small items.
                data = offset + record.head_bytes
                tail = data + record.size_bytes
                view[cursor - start : data - start] = _ZEROS[:gap] + record.head if gap else record.head
                if record.fetch is not None or record.address + moved != data:
                    self._bring(record, shift + data, 0, record.size_bytes)
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
        """Copy the record's data in this segment, unless it is there already, and note its CRC."""
        first = max(record.data_offset, place.start)
        last = min(record.data_offset + record.size_bytes, place.end)
        if first >= last:
            return
        crc = 0
        for start, end in _pieces(first, last, self.hot_bytes):
            self._bring(record, place.address + start - place.start, start - record.data_offset, end - start)
            crc = crc32(place.part(start, end), crc)
            if self.hot_bytes:
                place.digest(start, end)
        with self.changed:
            record.set_crc(first, last - first, crc)
            self.changed.notify_all()

    def _bring(self, record: ShardRecord, target: int, start: int, count: int) -> None:
        if record.fetch is not None:
            record.fetch(target, start, count)
            return
        source = self.base + record.address + start
        if source != target:
            (copy_small if count < SMALL_BYTES else memmove)(target, source, count)

    def _crc_of(self, record: ShardRecord) -> int:
        with self.changed:
            while record.known_bytes < record.size_bytes:
                if self.failure is not None:
                    raise self.failure
                if not self.changed.wait(max(0.0, self.deadline - time.monotonic())):
                    raise self._late("the CRC of an item")
        return record.crc()

    def _late(self, what: str) -> OperationTimeoutError:
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
    """Memory for a segment: ``view`` begins at file offset ``start`` and memory ``address``."""

    __slots__ = ("address", "digests", "end", "start", "view")

    def __init__(self, view: memoryview, address: int, start: int, end: int) -> None:
        self.view, self.address, self.start, self.end = view, address, start, end
        self.digests: dict[int, bytes] = {}
        """Digests of blocks by file offset, taken while their bytes were in the cache."""

    def part(self, start: int, end: int) -> memoryview:
        return self.view[start - self.start : end - self.start]

    def digest(self, start: int, end: int) -> None:
        """Digest the whole blocks within ``[start, end)``, after their bytes are final."""
        for offset in range(start + -start % DIGEST_BLOCK_BYTES, end - DIGEST_BLOCK_BYTES + 1, DIGEST_BLOCK_BYTES):
            self.digests[offset] = block_digest(self.part(offset, offset + DIGEST_BLOCK_BYTES))

    def blocks(self, start: int, end: int) -> bytes:
        """Return the block digests of the chunk ``[start, end)``, which is complete."""
        if not self.digests:
            return blocks_of(self.part(start, end))
        return b"".join(
            self.digests.get(offset) or block_digest(self.part(offset, min(offset + DIGEST_BLOCK_BYTES, end)))
            for offset in range(start, end, DIGEST_BLOCK_BYTES)
        )

    def put(self, data: Any, offset: int) -> None:
        """Copy the part of ``data`` (which begins at file ``offset``) that is in this segment."""
        first, last = max(offset, self.start), min(offset + len(data), self.end)
        if first < last:
            self.view[first - self.start : last - self.start] = data[first - offset : last - offset]

    def zero(self, start: int, end: int) -> None:
        """Zero these bytes, so that no stale memory reaches a file."""
        while start < end:
            count = min(end - start, len(_ZEROS))
            self.view[start - self.start : start - self.start + count] = _ZEROS[:count]
            start += count


def _pieces(start: int, end: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ``[start, end)`` cut at multiples of ``size_bytes``; whole if that is 0."""
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
    """The slot that ``place`` uses; None in the image."""


def overlapping(records: Sequence[ShardRecord], start: int, end: int) -> Sequence[ShardRecord]:
    """Return the records with a byte in [start, end)."""
    first = bisect_right(records, start, key=lambda record: record.end)
    return records[first : bisect_left(records, end, first, key=lambda record: record.offset)]
