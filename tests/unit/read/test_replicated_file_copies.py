"""Pieces of files into memory: each chunk is read once, verified, and copied to its targets."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tierckpt.arena.slots import BounceBufferPool
from tierckpt.disk.file_io import Resident
from tierckpt.errors import CapacityError, IntegrityError, ObjectNotFoundError, TierckptError
from tierckpt.format.manifest import FileEntry, digest_of
from tierckpt.read.parallel_read import Piece, WorkerThreads, pull
from tierckpt.read.replicated_file import FileCopy, LocalCopy, RemoteCopy, ReplicatedFile
from tierckpt.types import ByteRange

CHUNK = 16 * 1024
SIZE = 10 * CHUNK + 123


@pytest.fixture(scope="module")
def buffers() -> BounceBufferPool:
    return BounceBufferPool(3, "read")


def content(size: int = SIZE) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A file with the content of ``content()``."""
    (tmp_path / "shard").write_bytes(content())
    return tmp_path / "shard"


def entry_of(data: bytes) -> FileEntry:
    return FileEntry("shard", len(data), tuple(digest_of(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)))


class Counted(LocalCopy):
    """A copy that records its reads."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[tuple[int, int]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def read(self, byte_range: ByteRange, into: memoryview | None = None, /) -> memoryview | bytes:
        self.asked.append((byte_range.start, byte_range.stop))
        if byte_range.start:
            assert self.may_go_on.wait(60)
        return super().read(byte_range, into)  # type: ignore[return-value]


def pieces_of(spans: Sequence[tuple[int, int]], peeks: Sequence[int] = ()) -> tuple[list[bytearray], list[Piece]]:
    """Memory for each of ``spans`` and the pieces to read into it. Those in ``peeks`` are not verified."""
    memories = [bytearray(stop - start) for start, stop in spans]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
    places = enumerate(zip(spans, addresses, strict=True))
    return memories, [Piece(*span, address, is_unverified=index in peeks) for index, (span, address) in places]


def pulled(
    copies: ReplicatedFile, spans: Sequence[tuple[int, int]], buffers: BounceBufferPool, peeks: Sequence[int] = ()
) -> list[bytes]:
    memories, pieces = pieces_of(spans, peeks)
    with contextlib.closing(copies):
        pull([(copies, pieces)], buffers)
    return [bytes(memory) for memory in memories]


SPANS = [
    (0, 1),
    (5, CHUNK),
    (CHUNK - 1, CHUNK + 1),
    (3 * CHUNK, 6 * CHUNK + 7),
    (SIZE - 1, SIZE),
    (4 * CHUNK, 4 * CHUNK + 9),
]


def is_right(buffers: BounceBufferPool, *copies: FileCopy) -> bool:
    """Whether the spans come right from these copies of the content."""
    found = pulled(ReplicatedFile(entry_of(content()), CHUNK, [*copies]), SPANS, buffers)
    return found == [content()[start:stop] for start, stop in SPANS]


@pytest.mark.parametrize("cached", [True, False])
def test_each_needed_chunk_is_read_once(cached: bool, shard: Path, buffers: BounceBufferPool) -> None:
    if not cached:
        forget(shard)
    copy = Counted(shard)
    assert is_right(buffers, copy)
    assert [start // CHUNK for start, _ in sorted(copy.asked)] == [0, 1, 3, 4, 5, 6, 10]


def test_chunks_that_are_no_blocks_are_read_too(tmp_path: Path, buffers: BounceBufferPool) -> None:
    data, path = content(5000), tmp_path / "shard"
    path.write_bytes(data)
    entry = FileEntry("shard", len(data), tuple(digest_of(data[at : at + 1000]) for at in range(0, len(data), 1000)))
    assert pulled(ReplicatedFile(entry, 1000, [LocalCopy(path)]), [(999, 4321)], buffers) == [data[999:4321]]


def damaged(data: bytes, index: int) -> bytes:
    return data[: index * CHUNK] + b"\0" * 8 + data[index * CHUNK + 8 :]


def test_two_copies_with_damage_in_different_chunks_give_all_of_them(tmp_path: Path, buffers: BounceBufferPool) -> None:
    (tmp_path / "shard").write_bytes(damaged(content(), 4))
    other = damaged(content(), 5)
    store = RemoteCopy("s3://bucket/shard", lambda byte_range: other[byte_range.start : byte_range.stop])
    assert is_right(buffers, LocalCopy(tmp_path / "shard"), store)
    assert [found.name for found in tmp_path.iterdir()] == ["shard.bad"]


def test_an_error_of_a_file_with_damage_names_the_range_that_is_bad(tmp_path: Path) -> None:
    """Another thread reading a good range of the only copy after it is given up gets its bytes, without an error."""
    data, path = content(), tmp_path / "shard"
    path.write_bytes(damaged(data, 4))
    copies = ReplicatedFile(entry_of(data), CHUNK, [LocalCopy(path)])
    for _ in range(2):
        with pytest.raises(IntegrityError, match=rf"bytes {4 * CHUNK}-{5 * CHUNK}\)") as caught:
            copies.chunk(4)
        assert caught.value.context["tier"] == "local"
        assert bytes(copies.chunk(5)) == data[5 * CHUNK : 6 * CHUNK]
    copies.close()


@pytest.mark.parametrize("size", [0, 3 * CHUNK, SIZE - 1])
def test_a_short_copy_is_a_bad_one(size: int, shard: Path, buffers: BounceBufferPool) -> None:
    os.truncate(shard, size)
    with pytest.raises(IntegrityError, match="no good copy of shard"):
        is_right(buffers, LocalCopy(shard))


def missing(_: ByteRange) -> bytes:
    raise ObjectNotFoundError("it is gone")


def test_a_copy_that_cannot_be_read_is_passed_over_and_stays(shard: Path, buffers: BounceBufferPool) -> None:
    assert is_right(buffers, RemoteCopy("s3://bucket/shard", missing), LocalCopy(shard))
    assert shard.exists()


def test_an_error_ends_the_load(tmp_path: Path, buffers: BounceBufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another file: the one that is damaged has no copy left to read."""
    data = content(1000 * CHUNK)
    (tmp_path / "bad").write_bytes(bytes(CHUNK))
    (tmp_path / "good").write_bytes(data)
    good = Counted(tmp_path / "good")
    good.may_go_on.clear()

    def fail(threads: WorkerThreads, error: BaseException) -> None:
        known(threads, error)
        good.may_go_on.set()

    known = WorkerThreads.fail
    monkeypatch.setattr(WorkerThreads, "fail", fail)
    memory = bytearray(CHUNK + len(data))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    bad_piece, piece = Piece(0, CHUNK, address), Piece(0, len(data), address + CHUNK)
    bad = ReplicatedFile(entry_of(data[:CHUNK]), CHUNK, [LocalCopy(tmp_path / "bad")])
    whole = ReplicatedFile(entry_of(data), CHUNK, [good])
    named: list[Piece] = []

    def name(error: TierckptError, _: ReplicatedFile, piece: Piece) -> None:
        named.append(piece)
        error.context["tensor"] = "weight"

    with pytest.raises(IntegrityError) as caught:
        pull([(bad, [bad_piece]), (whole, [piece])], buffers, on_error=name)
    bad.close()
    whole.close()
    assert caught.value.context["tensor"] == "weight"
    assert named == [bad_piece]
    assert len(good.asked) < 10


def test_threads_that_digest(shard: Path, buffers: BounceBufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    now, reading, digesting, met = Counter[str](), [0], [0], threading.Condition()

    def doing(what: str, most: list[int], wanted: int) -> None:
        """Each waits until the expected number has met once; an extra one would arrive within the wait after it."""
        with met:
            now[what] += 1
            most[0] = max(most[0], now[what])
            met.notify_all()
            met.wait_for(lambda: most[0] >= wanted, timeout=60)
        time.sleep(0.002)
        with met:
            now[what] -= 1

    class Slow(LocalCopy):
        def read(self, byte_range: ByteRange, into: memoryview | None = None, /) -> memoryview | bytes:
            doing("read", reading, buffers.count_max)
            return super().read(byte_range, into)  # type: ignore[return-value]

    class Watched(ReplicatedFile):
        def _matches_digest(self, *given: object) -> bool:
            doing("digest", digesting, 1)
            return True

    pulled(Watched(entry_of(content()), CHUNK, [Slow(shard)]), SPANS, buffers)
    assert (reading, digesting) == ([buffers.count_max], [1])


@pytest.mark.parametrize(("ranks", "processors", "threads"), [("1", 2, 8), ("2", 2, 4), ("8", 2, 2), ("8", 64, 8)])
def test_ranks_of_a_node_share_the_threads_that_its_disk_likes(
    ranks: str, processors: int, threads: int, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    buffers, seen, met = BounceBufferPool(8, "read"), set[int](), threading.Condition()

    class Slow(LocalCopy):
        def read(self, byte_range: ByteRange, into: memoryview | None = None, /) -> memoryview | bytes:
            # No second read before all have arrived, even if a busy machine starts the last one late; an extra thread
            # would arrive within the wait that follows.
            with met:
                seen.add(threading.get_ident())
                met.notify_all()
                met.wait_for(lambda: len(seen) >= threads, timeout=60)
            time.sleep(0.03)
            return super().read(byte_range, into)  # type: ignore[return-value]

    [found] = pulled(ReplicatedFile(entry_of(content()), CHUNK, [Slow(shard)]), [(0, SIZE)], buffers)
    assert (found, len(seen)) == (content(), threads)


def test_a_load_takes_the_buffers_that_other_loads_leave_and_waits_for_one_only(shard: Path) -> None:
    buffers = BounceBufferPool(3, "read")
    with buffers.take(2, CHUNK, 0.0):
        assert is_right(buffers, LocalCopy(shard))
    with buffers.take(3, CHUNK, 0.0) as all_of_them:
        assert len(all_of_them) == 3, "the load returned its memory"


def test_a_thread_that_cannot_start(shard: Path, buffers: BounceBufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = list[threading.Thread](), threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    with pytest.raises(CapacityError, match="new thread"):
        is_right(buffers, LocalCopy(shard))
    assert not started[0].is_alive(), "its target memory would be freed"


def test_files_without_digests_are_taken_as_they_are(shard: Path, buffers: BounceBufferPool) -> None:
    """Stock DCP's."""
    copies = ReplicatedFile(FileEntry("shard", SIZE, ()), CHUNK, [LocalCopy(shard)])
    assert pulled(copies, [(5, SIZE)], buffers) == [content()[5:]]


# --- the page cache ----------------------------------------------------------------------------------------------


def forget(path: Path) -> None:
    """Evict ``path`` from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_cached_ranges_are_known(shard: Path) -> None:
    with shard.open("rb") as file:
        assert Resident(file.fileno()).has(ByteRange(0, SIZE))
        assert not Resident(file.fileno()).has(ByteRange(0, SIZE + 1))
        forget(shard)
        assert not Resident(file.fileno()).has(ByteRange(0, SIZE))
        os.pread(file.fileno(), 1, 2 * CHUNK)
        assert not Resident(file.fileno()).has(ByteRange(0, SIZE))


def test_an_empty_file_is_not_cached(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file:
        assert not Resident(file.fileno()).has(ByteRange(0, 1))
