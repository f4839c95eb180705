"""Results of a flush on disk, for every shape: the file, its digests and CRCs (invariants F1 to F4)."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.open_files import open_files
from tierckpt.arena.memory import Memory
from tierckpt.disk import priority
from tierckpt.disk.io_tuner import IoShape
from tierckpt.errors import OperationTimeoutError, StoreError
from tierckpt.format.manifest import Flushed, blocks_of, digest_of
from tierckpt.poll import Poll
from tierckpt.quantities import round_up
from tierckpt.save import flush as flush_module
from tierckpt.save.flush import flush
from tierckpt.save.shard_plan import Image, Shard, ShardRecord

KiB, MiB = 1 << 10, 1 << 20
THREADS_MAX = 8
STALE = 0xAB


@dataclass(frozen=True)
class Frame:
    """The part of an item's frame that a flush knows: a tail that holds the CRC-32 of the data, twice."""

    tail: bytes
    size_bytes: int

    def tail_with(self, crc: int) -> bytes:
        value = crc.to_bytes(4, "little")
        return (value * 2 + self.tail[8:])[: len(self.tail)]


@dataclass(frozen=True)
class Item:
    """One record to be: where its head goes, and its bytes. ``tail_bytes`` None: a head and nothing else."""

    offset: int
    head: bytes
    data: bytes = b""
    tail_bytes: int | None = None
    fetched: bool = False

    @property
    def frame(self) -> Frame | None:
        return None if self.tail_bytes is None else Frame(bytes(self.tail_bytes), len(self.data))

    @property
    def whole(self) -> bytes:
        """The naive way to make the item."""
        return self.head + self.data + (self.frame.tail_with(zlib.crc32(self.data)) if self.frame else b"")


def items_of(shapes: list[tuple[int, int, int, int | None, bool]], seed: int = 0) -> list[Item]:
    """Items after one another. A shape: gap before it, bytes of head, of data, of tail (None: no frame), fetched?"""
    generator, items, position = random.Random(seed), [], 0
    for gap, head, data, tail, fetched in shapes:
        size = 0 if tail is None else data
        item = Item(position + gap, generator.randbytes(head), generator.randbytes(size), tail, fetched)
        items.append(item)
        position = item.offset + len(item.whole)
    return items


def reference(items: list[Item]) -> bytes:
    """The expected file: every item at its offset, zeros between them."""
    content = bytearray(items[-1].offset + len(items[-1].whole) if items else 0)
    for item in items:
        content[item.offset : item.offset + len(item.whole)] = item.whole
    return bytes(content)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flush")


def records_of(items: list[Item]) -> list[ShardRecord]:
    """Each item's data in a buffer of its own, or returned by a fetch."""
    records = []
    for item in items:
        buffer = ctypes.create_string_buffer(item.data, max(len(item.data), 1))
        address = ctypes.addressof(buffer)

        def fetch(target: int, start: int, count: int, address: int = address) -> None:
            ctypes.memmove(target, address + start, count)

        if item.fetched:
            records.append(ShardRecord(item.offset, item.head, item.frame, owner=buffer, fetch=fetch))
        else:
            records.append(ShardRecord(item.offset, item.head, item.frame, address, owner=buffer))
    return records


def staged_in(arena: Memory, items: list[Item], at: int = 0) -> tuple[list[ShardRecord], Image]:
    """Each item's data where the file will have it, in memory that is stale everywhere else."""
    size_bytes = round_up(len(reference(items)))
    arena.view[at : at + size_bytes] = bytes([STALE]) * size_bytes
    records = []
    for item in items:
        start = at + item.offset + len(item.head)
        arena.view[start : start + len(item.data)] = item.data
        records.append(ShardRecord(item.offset, item.head, item.frame, arena.address + start))
    return records, Image(arena, arena.address + at, size_bytes)


def run(
    path: Path, records: list[ShardRecord], slots: list[Memory], *, image: Image | None = None, **options: Any
) -> Flushed:
    options = {"shape": IoShape(3, 8 * KiB), "chunk_size_bytes": 4096, "durable": False, **options}
    for slot in slots:
        slot.view[: 256 * KiB] = bytes([STALE]) * (256 * KiB)
    (flushed,) = flush([Shard(path, records, image)], slots=slots, **options)
    return flushed


def check(flushed: Flushed, items: list[Item], chunk_size_bytes: int) -> None:
    """The file is byte-identical to the reference, and the digests are those of its chunks."""
    content, expected = flushed.path.read_bytes(), reference(items)
    assert len(content) == len(expected) == flushed.size_bytes
    assert content == expected
    chunks = [content[at : at + chunk_size_bytes] for at in range(0, len(content), chunk_size_bytes)]
    assert list(flushed.digests) == [digest_of(chunk) for chunk in chunks]


def flush_and_check(
    directory: Path,
    slots: list[Memory],
    arena: Memory | None,
    items: list[Item],
    *,
    threads: int = 3,
    chunk_size_bytes: int = 4096,
    chunks: int = 2,
    given: int = THREADS_MAX,
) -> None:
    path = directory / "shard"
    path.unlink(missing_ok=True)
    slots = slots[:given]
    options = {"shape": IoShape(threads, chunks * chunk_size_bytes), "chunk_size_bytes": chunk_size_bytes}
    if arena is None:
        flushed = run(path, records_of(items), slots, **options)
    else:
        records, image = staged_in(arena, items)
        flushed = run(path, records, slots, image=image, **options)
    check(flushed, items, chunk_size_bytes)


# --- the file, for any records ------------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(0, 70), st.integers(0, 9000), st.sampled_from([4095, 4096, 4097, 8192, 20_000, 50_000]))
SHAPES = st.tuples(
    st.sampled_from([0, 0, 1, 63, 64, 4095, 4096, 9001]),
    st.sampled_from([0, 1, 64, 448, 4096, 5000]),
    SIZES,
    st.one_of(st.none(), st.sampled_from([8, 90, 337, 4097])),
    st.booleans(),
)
CASES = st.fixed_dictionaries(
    {
        "items": st.lists(SHAPES, max_size=14).map(items_of),
        "threads": st.integers(1, THREADS_MAX),
        "chunk_size_bytes": st.sampled_from([4096, 8192]),
        "chunks": st.integers(1, 4),
        "given": st.integers(1, THREADS_MAX),
    }
)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(case=CASES, in_place=st.booleans())
def test_the_file_is_what_a_naive_writer_would_have_made(
    directory: Path, slots: list[Memory], arena: Memory, case: dict[str, Any], in_place: bool
) -> None:
    items = case.pop("items")
    if in_place:
        items = [replace(item, fetched=False) for item in items]
    flush_and_check(directory, slots, arena if in_place else None, items, **case)


def some_cases() -> Iterator[tuple[list[Item], bool]]:
    generator = random.Random(5)
    for _ in range(12):
        shapes = [
            (generator.choice([0, 100]), 448, generator.choice([0, 300, 3000, 20_000]), 337, False)
            for _ in range(generator.randrange(3, 12))
        ]
        yield items_of(shapes), generator.random() < 0.5


overlapping = flush_module.overlapping

SEEDED: dict[str, tuple[str, Callable[..., Any]]] = {
    "gaps are left as they were": ("_Place.zero", lambda self, start, end: None),
    "a CRC of some of the parts": ("ShardRecord.crc", lambda self: max(self.crcs.items())[1][0]),
    "the size is not cut": ("ShardFile.finish", lambda self, durable: None),
    "digests of something else": ("blocks_of", lambda data: blocks_of(bytes(len(data)))),
    "an item is overlooked": ("overlapping", lambda records, start, end: overlapping(records, start, end)[1:]),
    "data that is not brought": ("FlushJob._copy_data", lambda self, record, target, start, count: None),
}


@pytest.mark.parametrize("bug", SEEDED)
def test_seeded_bugs_are_found(
    bug: str, directory: Path, slots: list[Memory], arena: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    name, wrong = SEEDED[bug]
    monkeypatch.setattr(f"tierckpt.save.flush.{name}", wrong)
    found = 0
    for items, in_place in some_cases():
        try:
            flush_and_check(directory, slots, arena if in_place else None, items)
        except AssertionError:
            found += 1
    assert found


def test_images_in_place(directory: Path, slots: list[Memory], arena: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the data itself is unchanged: only the gaps are filled."""
    written: list[int] = []
    real = os.pwrite

    def spy(fd: int, view: memoryview, offset: int) -> int:
        if fd in open_files(directory):
            written.append(ctypes.addressof(ctypes.c_char.from_buffer(view)))
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", spy)
    items = items_of([(3648, 448, 100_000, 337, False), (0, 448, 50_000, 337, False)])
    flush_and_check(directory, slots, arena, items)
    assert written
    assert all(arena.address <= address < arena.address + arena.size_bytes for address in written)
    for item in items:
        start = item.offset + len(item.head)
        assert arena.view[start : start + len(item.data)] == item.data


def test_only_segments_outside_the_image_are_copied(directory: Path, slots: list[Memory], arena: Memory) -> None:
    """Objects follow the tensors: the file is longer than the staged data."""
    tensor, *_ = items = items_of([(0, 448, 60_000, 337, False), (0, 9000, 0, None, False)])
    records, image = staged_in(arena, [tensor])
    records.append(ShardRecord(items[1].offset, items[1].head))
    path = directory / "longer"
    check(run(path, records, slots[:1], image=image), items, 4096)


def test_an_image_takes_no_slot(directory: Path, arena: Memory) -> None:
    items = items_of([(0, 448, 60_000, 337, False), (0, 448, 9000, 337, False)])
    records, image = staged_in(arena, items)
    check(run(directory / "staged", records, [], image=image), items, 4096)


@pytest.mark.parametrize("given", [1, 2, THREADS_MAX])
@pytest.mark.parametrize("threads", range(1, THREADS_MAX + 1))
def test_a_tail_waits_for_earlier_segments_only(directory: Path, slots: list[Memory], threads: int, given: int) -> None:
    """F2: an item over many segments with its first part last, for any number of workers and slots."""
    (item,) = items_of([(0, 448, 200_000, 337, False)])
    buffer = ctypes.create_string_buffer(item.data, len(item.data))

    def slow_at_first(target: int, start: int, count: int) -> None:
        if start == 0:
            time.sleep(0.1)
        ctypes.memmove(target, ctypes.addressof(buffer) + start, count)

    path = directory / f"late-{threads}-{given}"
    record = ShardRecord(0, item.head, item.frame, owner=buffer, fetch=slow_at_first)
    check(run(path, [record], slots[:given], shape=IoShape(threads, 8 * KiB), timeout_seconds=60), [item], 4096)


def test_several_shards_come_back_in_order(directory: Path, slots: list[Memory]) -> None:
    shards = {directory / f"shard-{n}": items_of([(0, 448, 700 * n, 337, False)] * n, seed=n) for n in range(7)}
    flushed = flush(
        [Shard(path, records_of(items)) for path, items in shards.items()],
        slots=slots,
        shape=IoShape(4, 4096),
        chunk_size_bytes=4096,
        durable=False,
    )
    assert [one.path for one in flushed] == list(shards)
    for one, items in zip(flushed, shards.values(), strict=True):
        check(one, items, 4096)
    assert flushed[0].digests == () and flushed[0].path.read_bytes() == b""


# --- durability, and what file systems refuse ---------------------------------------------------------------------


class Calls:
    """The calls on files of ``folder``, in order, as (call, name). ``fail`` decides by call and number what goes wrong.

    Background threads of this process write other files meanwhile.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._folder = folder
        self.made: list[tuple[str, str]] = []
        self.fired = 0
        self.fail: Callable[[str, int], OSError | None] = lambda call, number: None
        self._unpatched = {name: getattr(os, name) for name in ("pwrite", "fsync", "ftruncate")}
        self._real = dict(self._unpatched)
        self._lock = threading.Lock()
        for name in self._real:
            monkeypatch.setattr(os, name, lambda fd, *rest, name=name: self._call(name, fd, *rest))

    def _call(self, name: str, fd: int, *rest: Any) -> Any:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
        if path.parent != self._folder:
            return self._unpatched[name](fd, *rest)
        with self._lock:
            self.made.append((name, path.name))
            fault = self.fail(name, self.count(name))
            self.fired += fault is not None
        if fault is not None:
            raise fault
        return self._real[name](fd, *rest)

    def count(self, name: str) -> int:
        return sum(made == name for made, _ in self.made)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    return Calls(monkeypatch, tmp_path)


def plain_items(count: int = 5) -> list[Item]:
    return items_of([(0, 448, 9000, 337, False)] * count)


def test_every_file_is_fsynced_once_after_its_last_write(tmp_path: Path, slots: list[Memory], calls: Calls) -> None:
    """F4."""
    shards = [Shard(tmp_path / f"shard-{n}", records_of(plain_items())) for n in range(3)]
    flush(shards, slots=slots, shape=IoShape(4, 4096), chunk_size_bytes=4096)
    for shard in shards:
        of_file = [call for call, name in calls.made if name == shard.path.name]
        assert of_file[-2:] == ["ftruncate", "fsync"] and of_file.count("fsync") == 1


def test_not_durable_means_no_fsync(tmp_path: Path, slots: list[Memory], calls: Calls) -> None:
    run(tmp_path / "shard", records_of(plain_items()), slots, durable=False)
    assert calls.count("pwrite") and not calls.count("fsync")


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The errors that a flush knows of."""
    known: list[BaseException] = []
    fail = flush_module.FlushJob.fail

    def note(job: flush_module.FlushJob, error: BaseException) -> None:
        fail(job, error)
        known.append(error)

    monkeypatch.setattr(flush_module.FlushJob, "fail", note)
    return known


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("number", [1, 2, 5, 12])
def test_write_error_ends_flush(
    tmp_path: Path, slots: list[Memory], calls: Calls, failures: list[BaseException], number: int, threads: int
) -> None:
    """F3: no write is repeated, no segment is started, no fsync is issued; no descriptor stays open."""
    failed = OSError(errno.EIO, "Input/output error")
    calls.fail = lambda call, count: failed if call == "pwrite" and count == number else None
    real = calls._real["pwrite"]

    def write(*given: Any) -> Any:
        assert not calls.fired or any(failures for _ in Poll(60.0))
        return real(*given)

    calls._real["pwrite"] = write
    with pytest.raises(StoreError, match="Input/output error"):
        run(tmp_path / "shard", records_of(plain_items(20)), slots, shape=IoShape(threads, 4096), durable=True)
    assert calls.fired == 1
    assert calls.count("pwrite") < number + threads, "each other worker ended the write it was in"
    assert not calls.count("fsync")
    assert open_files(tmp_path) == {}


def test_data_that_cannot_be_had(tmp_path: Path, slots: list[Memory]) -> None:
    """Whatever a fetch raises reaches the caller, and workers that wait for its CRC end too."""
    (item,) = items_of([(0, 448, 200_000, 337, False)])

    def fetch(target: int, start: int, count: int) -> None:
        if start == 0:
            time.sleep(0.05)  # the others are waiting by now
            raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="device is gone"):
        run(tmp_path / "shard", [ShardRecord(0, item.head, item.frame, fetch=fetch)], slots, timeout_seconds=60)


def alive() -> list[threading.Thread]:
    """Workers that still run, a moment after they have said that they are done."""
    for _ in Poll(60.0):
        found = [thread for thread in threading.enumerate() if thread.name == "tierckpt-flush"]
        if not found:
            break
    return found


def test_waiting_has_a_deadline_and_what_hangs_keeps_its_file(
    tmp_path: Path, slots: list[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7. A descriptor that is closed under a thread would make its next write go to another file."""
    (item,) = items_of([(0, 448, 100_000, 337, False)])
    hangs, release, join = threading.Event(), threading.Event(), flush_module.FlushJob.join

    def fetch(target: int, start: int, count: int) -> None:
        if start == 0:
            hangs.set()
            release.wait(60)

    def soon(job: flush_module.FlushJob) -> None:
        assert hangs.wait(60)
        job.deadline = time.monotonic() + 0.3
        join(job)

    monkeypatch.setattr(flush_module.FlushJob, "join", soon)
    try:
        with pytest.raises(OperationTimeoutError, match="waited for"):
            record = ShardRecord(0, item.head, item.frame, fetch=fetch)
            run(tmp_path / "shard", [record], slots, nice=1, timeout_seconds=60)
        kept = open_files(tmp_path)
        assert list(kept.values()) == [str(tmp_path / "shard")]
    finally:
        release.set()
        for thread in alive():
            thread.join()
    assert not alive()
    os.close(*kept)


@pytest.mark.parametrize("nice", [0, 1], ids=["the caller writes", "the caller waits"])
def test_no_worker_outlives_an_interrupt(
    tmp_path: Path, slots: list[Memory], calls: Calls, failures: list[BaseException], nice: int
) -> None:
    """Ctrl-C, then a last save: it gets the same slots, so nobody else may still be writing to them."""
    items, real, once = plain_items(60), calls._real["pwrite"], threading.Lock()

    def slow(fd: int, view: memoryview, offset: int) -> int:
        time.sleep(0.02)
        if calls.count("pwrite") >= 6 and once.acquire(blocking=False):
            signal.pthread_kill(main, signal.SIGALRM)
        assert not once.locked() or any(failures for _ in Poll(60.0))
        return real(fd, view, offset)

    calls._real["pwrite"] = slow
    main = threading.main_thread().ident or 0
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "shard", records_of(items), slots, shape=IoShape(3, 4096), nice=nice)
        written = calls.count("pwrite")
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not alive()
    assert calls.count("pwrite") == written
    assert 0 < calls.count("pwrite") < len(reference(items)) // 4096


# --- threads and memory -------------------------------------------------------------------------------------------


def test_low_priority(tmp_path: Path, slots: list[Memory], calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """P8, and the caller's thread, which is the trainer's, stays as it was: a priority cannot be raised again."""
    mine, seen = threading.get_native_id(), set()
    real = calls._real["pwrite"]

    def note(fd: int, view: memoryview, offset: int) -> int:
        thread = threading.get_native_id()
        seen.add((thread, os.getpriority(os.PRIO_PROCESS, thread), io_priority(thread)))
        return real(fd, view, offset)

    calls._real["pwrite"] = note
    before = os.getpriority(os.PRIO_PROCESS, mine), io_priority(mine)
    lowered = min(before[0] + 7, 19)
    run(tmp_path / "shard", records_of(plain_items(20)), slots, nice=lowered)
    assert seen and {(nice, io) for _, nice, io in seen} == {(lowered, priority.BEST_EFFORT_LOWEST)}
    assert mine not in {thread for thread, _, _ in seen}
    assert (os.getpriority(os.PRIO_PROCESS, mine), io_priority(mine)) == before


def io_priority(thread: int) -> int:
    return int(ctypes.CDLL(None).syscall({251: 252, 30: 31}[priority.IOPRIO_SET[os.uname().machine]], 1, thread))
