"""Data written before the flush, and its use by the flush (A1 to A5 of ``save/write_ahead.py``)."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.open_files import open_files
from tests.unit.save.conftest import refuse_unnamed_files
from tests.unit.save.test_flush import Item, KiB, MiB, check, items_of, reference, run, staged_in
from tierckpt.arena.memory import Memory
from tierckpt.disk.io_tuner import IoShape
from tierckpt.errors import CapacityError, OperationTimeoutError, StoreError, TierckptError
from tierckpt.format.manifest import Flushed
from tierckpt.poll import Poll
from tierckpt.quantities import round_up
from tierckpt.save import write_ahead as ahead_module
from tierckpt.save.shard_plan import Image, ShardRecord
from tierckpt.save.write_ahead import Span, TempFile, WriteAhead

UNIT = 8 * KiB
THREADS_MAX = 4


def span_of(items: list[Item], image: Image) -> Span:
    data = [(item.offset + len(item.head), item.offset + len(item.head) + len(item.data)) for item in items]
    return Span(image.address, image.size_bytes, data)


def begun(directory: Path, items: list[Item], image: Image) -> WriteAhead:
    ahead = WriteAhead(directory, image.memory, [span_of(items, image)], UNIT)
    ahead.start()
    return ahead


def file_of(ahead: WriteAhead, image: Image) -> TempFile:
    file = ahead.file(image.address, image.size_bytes)
    assert file is not None
    return file


def until(what: Callable[[], object]) -> None:
    assert any(what() for _ in Poll(60.0)), "it never came to that"


def flushed(path: Path, records: list[ShardRecord], image: Image, slots: list[Memory], **options: Any) -> Flushed:
    return run(path, records, slots, image=image, **{"chunk_size_bytes": UNIT, **options})


def one_large() -> list[Item]:
    """An item over many units; the first and the last contain more than data."""
    return items_of([(0, 448, 200_000, 337, False)])


def begun_large(directory: Path, arena: Memory) -> tuple[list[Item], list[ShardRecord], Image, WriteAhead, TempFile]:
    items = one_large()
    records, image = staged_in(arena, items)
    ahead = begun(directory, items, image)
    image.ahead = file_of(ahead, image)
    return items, records, image, ahead, image.ahead


# --- the file -----------------------------------------------------------------------------------------------------

SHAPES = st.tuples(
    st.sampled_from([0, 1, 4095, 4096]),
    st.sampled_from([1, 64, 448, 5000]),
    st.sampled_from([0, 300, 4096, 16_384, 50_000, 131_072]),
    st.sampled_from([8, 337]),
    st.just(False),
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    items=st.lists(SHAPES, min_size=1, max_size=6).map(items_of),
    threads=st.integers(1, THREADS_MAX),
    chunks=st.integers(1, 3),
    seed=st.integers(0, 1 << 16),
)
def test_the_file_is_the_same_whatever_was_written_ahead(
    tmp_path_factory: pytest.TempPathFactory,
    slots: list[Memory],
    arena: Memory,
    items: list[Item],
    threads: int,
    chunks: int,
    seed: int,
) -> None:
    """The flush comes at any time: before the first unit, between two, after the last."""
    directory, chance = tmp_path_factory.mktemp("ahead"), random.Random(seed)
    records, image = staged_in(arena, items)
    ahead = begun(directory, items, image)
    image.ahead = file_of(ahead, image)
    time.sleep(chance.choice([0, 0, 0.0005, 0.002, 0.01]))
    shape = IoShape(threads, chunks * UNIT)
    check(flushed(directory / "shard", records, image, slots, shape=shape), items, UNIT)
    ahead.discard()


def test_bytes_written_once(
    tmp_path: Path, slots: list[Memory], arena: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int]] = []
    real = os.pwrite

    def spy(fd: int, view: memoryview, offset: int) -> int:
        if fd in open_files(tmp_path):
            written.append((offset, len(view)))
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", spy)
    items, records, image, _, _ = begun_large(tmp_path, arena)
    units = list(span_of(items, image).units(UNIT))
    until(lambda: len(written) == len(units))
    assert sorted(written) == [(offset, UNIT) for offset in units]
    check(flushed(tmp_path / "shard", records, image, slots), items, UNIT)
    assert sum(count for _, count in written) == round_up(len(reference(items))), "every byte once"


def test_control_one_that_begins_before_the_copy_is_found(tmp_path: Path, slots: list[Memory], arena: Memory) -> None:
    """A1: the comparison sees bytes that were written too early."""
    items = one_large()
    records, image = staged_in(arena, items)
    (item,) = items
    arena.view[len(item.head) : len(item.head) + len(item.data)] = bytes(len(item.data))
    ahead = begun(tmp_path, items, image)  # the bug
    image.ahead = file = file_of(ahead, image)
    until(lambda: len(file.begun) == len(list(span_of(items, image).units(UNIT))))
    until(lambda: not file.writing)
    arena.view[len(item.head) : len(item.head) + len(item.data)] = item.data
    with pytest.raises(AssertionError):
        check(flushed(tmp_path / "shard", records, image, slots), items, UNIT)


@pytest.mark.parametrize("unit_bytes", [4 * KiB, 8 * KiB, 64 * KiB])
def test_a_unit_is_nothing_but_the_data_of_one_tensor(unit_bytes: int) -> None:
    span = Span(0, MiB, [(448, 60_000), (60_800, 262_144), (262_144, 300_000)])
    for offset in span.units(unit_bytes):
        assert offset % unit_bytes == 0
        assert sum(start <= offset and offset + unit_bytes <= end for start, end in span.data) == 1
    assert len(list(span.units(4 * KiB))) == 13 + 49 + 9


# --- a file without a name ------------------------------------------------------------------------------------------


def test_it_has_no_name_before_a_flush_takes_it(tmp_path: Path, slots: list[Memory], arena: Memory) -> None:
    """A2."""
    _, records, image, ahead, file = begun_large(tmp_path, arena)
    until(lambda: len(file.begun) > 5)
    assert not list(tmp_path.iterdir()) and ahead.reserved_bytes == image.size_bytes
    flushed(tmp_path / "shard", records, image, slots)
    assert [path.name for path in tmp_path.iterdir()] == ["shard"] and ahead.reserved_bytes == 0


def test_a_discarded_file_is_freed(tmp_path: Path, arena: Memory) -> None:
    items, _, _, ahead, file = begun_large(tmp_path, arena)
    until(lambda: file.fd >= 0)
    fd = file.fd
    assert os.fstat(fd).st_nlink == 0 and os.fstat(fd).st_blocks * 512 >= len(items[0].data)
    ahead.discard()
    until(lambda: file.fd < 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert file.take(tmp_path / "shard") is None, "and nobody gets it any more"
    assert not list(tmp_path.iterdir())


def test_a_child_has_no_hold_on_it(tmp_path: Path, arena: Memory) -> None:
    """DataLoader workers are forked at any time, and live long."""
    _, _, _, ahead, file = begun_large(tmp_path, arena)
    until(lambda: file.fd >= 0)
    fd = file.fd
    pid = os.fork()
    if pid == 0:
        try:
            os.fstat(fd)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.fstat(fd).st_nlink == 0, "and it is still the parent's"
    ahead.discard()


def test_a_name_that_is_there_is_not_taken_over(tmp_path: Path, slots: list[Memory], arena: Memory) -> None:
    _, records, image, _, _ = begun_large(tmp_path, arena)
    until(lambda: image.ahead is not None and image.ahead.fd >= 0)
    (tmp_path / "shard").write_text("another's")
    with pytest.raises(TierckptError, match="shard"):
        flushed(tmp_path / "shard", records, image, slots)
    assert (tmp_path / "shard").read_text() == "another's"


# --- wrong guesses --------------------------------------------------------------------------------------------------


def test_another_place_or_size_is_another_file(tmp_path: Path, arena: Memory) -> None:
    """A3."""
    items = one_large()
    _, image = staged_in(arena, items)
    ahead = begun(tmp_path, items, image)
    assert ahead.file(image.address + 4096, image.size_bytes) is None
    assert ahead.file(image.address, image.size_bytes + 4096) is None
    ahead.discard()


def test_a_head_where_data_was_expected_is_written(tmp_path: Path, slots: list[Memory], arena: Memory) -> None:
    """A3: the flush believes its own records. Here two items lie where one was staged."""
    items = items_of([(0, 448, 60_000, 337, False), (0, 448, 60_000, 337, False)])
    records, image = staged_in(arena, items)
    span = Span(image.address, image.size_bytes, [(0, image.size_bytes)])
    ahead = WriteAhead(tmp_path, arena, [span], UNIT)
    ahead.start()
    image.ahead = file = file_of(ahead, image)
    until(lambda: len(file.begun) == image.size_bytes // UNIT)
    check(flushed(tmp_path / "shard", records, image, slots), items, UNIT)


# --- errors ---------------------------------------------------------------------------------------------------------


class Failing:
    """Makes write-ahead writes fail; the flush's succeed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        self.fired = 0
        self.may_fail = threading.Event()
        self._code = code
        self._real = os.pwrite
        monkeypatch.setattr(os, "pwrite", self._pwrite)

    def _pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        if threading.current_thread().name == "tierckpt-ahead":
            assert self.may_fail.wait(60)
            self.fired += 1
            if self._code:
                raise OSError(self._code, os.strerror(self._code))
            return 0
        return self._real(fd, view, offset)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, 0])
def test_an_error_before_the_flush(
    code: int, tmp_path: Path, slots: list[Memory], arena: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A4: another file is written, and that one is no longer used."""
    failing = Failing(monkeypatch, code)
    failing.may_fail.set()
    items, records, image, ahead, file = begun_large(tmp_path, arena)
    until(lambda: file.error is not None and not file.writing)
    check(flushed(tmp_path / "shard", records, image, slots), items, UNIT)
    assert 1 <= failing.fired <= ahead_module.THREADS
    ahead.discard()
    until(lambda: file.fd < 0)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, 0])
def test_an_error_after_the_flush_has_the_file(
    code: int, tmp_path: Path, slots: list[Memory], arena: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A4, F3."""
    failing = Failing(monkeypatch, code)
    _, records, image, _, file = begun_large(tmp_path, arena)
    until(lambda: file.writing > 0)
    end = TempFile.end

    def at_the_end(file: TempFile, timeout_seconds: float) -> bool:
        failing.may_fail.set()
        return end(file, timeout_seconds)

    monkeypatch.setattr(TempFile, "end", at_the_end)
    with pytest.raises(StoreError if code == errno.EIO else CapacityError, match="shard"):
        flushed(tmp_path / "shard", records, image, slots)
    assert 1 <= failing.fired <= ahead_module.THREADS
    assert file.writing == 0, "A5: nobody writes to a descriptor that was closed"


def test_a_hung_write(tmp_path: Path, slots: list[Memory], arena: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A5."""
    failing = Failing(monkeypatch, errno.EIO)
    _, records, image, _, file = begun_large(tmp_path, arena)
    until(lambda: file.writing > 0)
    end = TempFile.end
    monkeypatch.setattr(TempFile, "end", lambda file, _: end(file, 0.2))
    with pytest.raises(OperationTimeoutError, match="write to end"):
        flushed(tmp_path / "shard", records, image, slots, timeout_seconds=60)
    os.fstat(file.fd)
    failing.may_fail.set()
    until(lambda: not file.writing)
    os.close(file.fd)


@pytest.mark.parametrize("refuses", ["open", "allocate"])
def test_without_unnamed_files(
    refuses: str, tmp_path: Path, slots: list[Memory], arena: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS and others know no O_TMPFILE; a full disk says so at once."""

    def no_room(fd: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if refuses == "open":
        refuse_unnamed_files(monkeypatch)
    else:
        monkeypatch.setattr(ahead_module, "allocate", no_room)
    items, records, image, ahead, _ = begun_large(tmp_path, arena)
    until(lambda: ahead.is_stopped)
    check(flushed(tmp_path / "shard", records, image, slots), items, UNIT)
    ahead.discard()
