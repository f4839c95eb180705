"""Pages are allocated ahead of disk reads, in order; any failure ends the whole load."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tierckpt
from tests.states import same
from tierckpt.arena.pages import Paging
from tierckpt.config import Settings
from tierckpt.disk.io_tuner import READ_THREADS_MAX
from tierckpt.errors import CapacityError, StoreError
from tierckpt.loading import fill
from tierckpt.loading.model_files import Directory
from tierckpt.loading.safetensors import WantedTensors
from tierckpt.loading.tensor_parts import Parts
from tierckpt.read.replicated_file import LocalCopy
from tierckpt.types import Buffer, ByteRange

MIB = 1 << 20
JOBS = 24
READERS = 2
DEADLINE_SECONDS = 30.0

_libc = ctypes.CDLL(None)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def pages_in_place(view: memoryview) -> float:
    """The share of its pages that are resident."""
    pages = ctypes.create_string_buffer(-(-len(view) // mmap.PAGESIZE))
    assert _libc.mincore(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view), pages) == 0
    return pages.raw.count(b"\1") / len(pages)


class Watched(LocalCopy):
    """Records what reads found. Uses class attributes, because a load opens the files of a model itself."""

    at_hand = False
    found: list[tuple[int, float]]
    after_each_read = staticmethod(lambda: None)

    def read(
        self, byte_range: ByteRange, into: memoryview | None = None, through: memoryview | None = None, /
    ) -> Buffer:
        if into is not None and byte_range.start:
            self.found.append((byte_range.start, pages_in_place(into[: byte_range.size_bytes])))
        data = super().read(byte_range, into, through)
        self.after_each_read()
        return data

    def is_in_memory(self, byte_range: ByteRange, /) -> bool:
        return self.at_hand


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    class Own(Watched):
        found: list[tuple[int, float]] = []

    monkeypatch.setattr(Directory, "open", lambda place, name: Own(place.path / name, tuner=place.tuner))
    monkeypatch.setattr(Directory, "threads", READERS)
    monkeypatch.setattr(fill, "paging", Paging())
    return Own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_file({"w": torch.arange(JOBS * 2 * MIB, dtype=torch.int32)}, folder / "model.safetensors")
    return folder


def test_disk_reads_find_their_pages_allocated(model: Path, watched: type[Watched]) -> None:
    loaded = tierckpt.load_safetensors(model)
    assert len(watched.found) >= JOBS - 1
    assert {part for _, part in watched.found} == {1.0}
    assert same(loaded["w"], torch.arange(JOBS * 2 * MIB, dtype=torch.int32))


def test_cached_files_allocate_pages_on_read_except_two_measured_ones(model: Path, watched: type[Watched]) -> None:
    watched.at_hand = True
    loaded = tierckpt.load_safetensors(model)
    assert sum(part == 1.0 for _, part in watched.found) <= 2
    assert same(loaded["w"], torch.arange(JOBS * 2 * MIB, dtype=torch.int32))


def test_pages_are_not_allocated_far_ahead(
    model: Path, watched: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier pieces then show which page size is cheaper."""
    most, given, ahead = 4, [], []
    monkeypatch.setattr(fill, "AHEAD_MAX", most)
    monkeypatch.setattr(fill, "put_pages", given.append)  # immediate, so that only the limit delays them

    def look() -> None:
        ahead.append(len(given) - len(watched.found))
        time.sleep(0.005)

    watched.after_each_read = staticmethod(look)
    tierckpt.load_safetensors(model)
    assert len(given) >= JOBS
    # The first job is not counted as found, and each reader may have one that it has not begun to read.
    assert max(ahead) <= most + 1 + READERS


def test_a_failed_read_ends_the_load_during_allocation(model: Path, watched: type[Watched]) -> None:
    def fail_once_on_the_way() -> None:
        if len(watched.found) >= 3:
            raise StoreError("seeded", file="model.safetensors")

    watched.after_each_read = staticmethod(fail_once_on_the_way)
    with pytest.raises(StoreError, match="seeded") as found:
        _within_deadline(lambda: tierckpt.load_safetensors(model))
    assert found.value.context["tensor"] == "w"
    assert len(watched.found) < JOBS / 2


def test_a_failed_allocation_ends_the_load(
    model: Path, watched: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: fill.Job) -> None:
        if job.start > 8 * fill.READ_BYTES:
            raise MemoryError("seeded")

    monkeypatch.setattr(fill, "put_pages", refuse)
    with pytest.raises(CapacityError, match="seeded"):
        _within_deadline(lambda: tierckpt.load_safetensors(model))


@pytest.mark.parametrize("refused", ["tierckpt-load", "tierckpt-pages"])
def test_a_thread_that_cannot_start_ends_the_load(
    refused: str, model: Path, watched: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    with pytest.raises(CapacityError, match="new thread"):
        _within_deadline(lambda: tierckpt.load_safetensors(model))


def test_an_interrupted_load_returns_nothing(model: Path, watched: type[Watched]) -> None:
    stop = threading.Event()
    wanted = WantedTensors(model, "cpu", None, "", Parts(), Settings.load())

    def stop_on_the_way() -> None:
        if len(watched.found) >= 3:
            stop.set()

    watched.after_each_read = staticmethod(stop_on_the_way)
    with pytest.raises(fill.Stopped):
        _within_deadline(lambda: fill.fill(wanted.requests, wanted.device, stop))
    assert len(watched.found) <= 3 + fill.AHEAD_MAX + fill.FILLERS_MAX + READ_THREADS_MAX


def _within_deadline(load: Callable[[], object]) -> None:
    """Run ``load`` and raise its error. All of its threads must have ended."""
    threads = ThreadPoolExecutor(1)
    try:
        threads.submit(load).result(timeout=DEADLINE_SECONDS)
    finally:
        threads.shutdown(wait=False)
        left = [thread.name for thread in threading.enumerate()]
        assert not {"tierckpt-load", "tierckpt-pages"} & set(left)
