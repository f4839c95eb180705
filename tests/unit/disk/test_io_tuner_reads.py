"""How a device is read is found out once, by the first large load, on its own bytes; and the user has the last word."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tierckpt
from tierckpt.arena.slots import BounceBufferPool
from tierckpt.config import Settings
from tierckpt.disk import io_tuner
from tierckpt.disk.file_lock import try_lock
from tierckpt.disk.io_tuner import MODEL_READ_MODES, READ_MODES, ReadMode, ReadTuner, best, device_of
from tierckpt.errors import StoreError
from tierckpt.format.layout import model_read_modes, read_modes
from tierckpt.format.manifest import FileEntry
from tierckpt.loading import fill
from tierckpt.read import parallel_read
from tierckpt.read.parallel_read import Piece, pull
from tierckpt.read.replicated_file import LocalCopy, ReplicatedFile
from tierckpt.types import ByteRange

KiB = 1024
CHUNK = 64 * KiB
SIZE = 4 * 4 * CHUNK


def tuner(root: Path, ways: tuple[ReadMode, ...] = READ_MODES, **settings: Any) -> ReadTuner:
    return ReadTuner(Settings.load(None, local_root=root, **settings), ways)


DIRECT, CACHE = READ_MODES


@pytest.mark.parametrize(
    ("rates", "expected"),
    [((2.0, 1.0), DIRECT), ((1.0, 1.0), DIRECT), ((1.0, 1.2), DIRECT), ((1.0, 1.4), CACHE), ((1.0, 3.0), CACHE)],
)
def test_the_page_cache_must_be_a_quarter_faster_than_direct_reads(
    rates: tuple[float, ...], expected: ReadMode
) -> None:
    assert best(dict(zip(READ_MODES, rates, strict=True))) == expected


def test_a_decision_is_known_to_other_processes_until_a_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tmp_path.joinpath("file").open("wb") as file:
        device = device_of(file.fileno())
    first = tuner(tmp_path)
    assert not first.is_known(device) and first.mode(device) == DIRECT
    first.decide(device, {DIRECT: 1e9, CACHE: 2e9}, "here")
    assert tuner(tmp_path).is_known(device) and tuner(tmp_path).mode(device) == CACHE
    assert not tuner(tmp_path).is_known(f"{device} of another boot")
    monkeypatch.setattr(io_tuner, "boot_id", lambda: "later")
    with tmp_path.joinpath("file").open("wb") as file:
        later = device_of(file.fileno())
    assert not tuner(tmp_path).is_known(later)
    tuner(tmp_path).decide(later, {DIRECT: 1e9}, "here")
    assert json.loads(read_modes(tmp_path).read_bytes()).keys() == {later}  # entries of an older boot are dropped


@pytest.mark.parametrize(
    "kept", [b"", b"[]", b"{", b'{"d": 3}', b'{"d": {"mode": "direct/0"}}', b'{"d": {"mode": "x/4"}}']
)
def test_a_damaged_result_is_no_result(kept: bytes, tmp_path: Path) -> None:
    read_modes(tmp_path).write_bytes(kept)
    assert not tuner(tmp_path).is_known("d") and tuner(tmp_path).mode("d") == DIRECT


class Noted(LocalCopy):
    """A copy with no bytes in the page cache that records the mode of each read."""

    def __init__(self, path: Path, tuner: ReadTuner, *, cached: bool = False) -> None:
        super().__init__(path, tuner=tuner)
        self.cached = cached
        self.read_in: list[bool] = []

    def is_in_memory(self, byte_range: ByteRange) -> bool:
        return self.cached

    def read(self, byte_range: ByteRange, into: memoryview | None = None, through: memoryview | None = None, /) -> Any:
        data = super().read(byte_range, into, through)
        self.read_in.append(self.is_direct)
        return data


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_read, "TRIAL_BYTES", 2 * CHUNK)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "shard").write_bytes(random.Random(2).randbytes(SIZE))
    yield tmp_path / "shard"


def load(copy: LocalCopy, path: Path, size: int = SIZE) -> None:
    memory = bytearray(size)
    copies = ReplicatedFile(FileEntry("shard", SIZE, ()), CHUNK, [copy])
    pull([(copies, [Piece(0, size, ctypes.addressof(ctypes.c_char.from_buffer(memory)))])], BounceBufferPool(8, "read"))
    copies.close()
    is_right = memory == path.read_bytes()[:size]
    assert is_right


def test_the_first_large_load_tries_each_way_on_its_own_bytes(small: None, path: Path) -> None:
    root = path.parent
    first = Noted(path, tuner(root))
    load(first, path)
    assert len(first.read_in) == SIZE // CHUNK  # no byte twice
    assert first.read_in[:8] == ([True] * 2 + [False] * 2) * 2  # twice, in turn
    [entry] = json.loads(read_modes(root).read_bytes()).values()
    assert entry["bytes_per_second"].keys() == {"direct/8", "buffered/4"}
    chosen = ReadMode.parse(entry["mode"])
    assert set(first.read_in[8:]) == {chosen.direct}
    second = Noted(path, tuner(root))
    load(second, path)
    assert set(second.read_in) == {chosen.direct}


def test_a_load_that_can_tell_nothing_tries_nothing(small: None, path: Path) -> None:
    root = path.parent
    load(Noted(path, tuner(root)), path, 4 * CHUNK)  # too small
    load(Noted(path, tuner(root), cached=True), path)  # from memory
    with try_lock(read_modes(root).with_suffix(".lock")) as held:  # another process is at it
        assert held
        load(Noted(path, tuner(root)), path)
    assert not read_modes(root).exists()
    load(Noted(path, tuner(root)), path)
    assert read_modes(root).exists()


def test_what_cannot_be_kept_does_not_stop_the_load(small: None, path: Path) -> None:
    root = path.parent / "no directory"
    root.write_bytes(b"")
    load(Noted(path, tuner(root)), path)
    assert root.is_file()


# --- model files: there is one way more ------------------------------------------------------------------------------

MiB = 1 << 20
Reads = list[tuple[int, ReadMode]]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(parallel_read, "TRIAL_BYTES", 2 * MiB)
    monkeypatch.setattr(fill, "READ_BYTES", MiB)
    monkeypatch.setattr(LocalCopy, "is_in_memory", lambda *_: False)
    (tmp_path / "model").mkdir()
    save_file(
        {name: torch.arange(3 * MiB + odd, dtype=torch.int32) for odd, name in enumerate(("a", "b"))},
        tmp_path / "model" / "model.safetensors",
    )
    return tmp_path / "model"


def load_model(folder: Path, root: Path, **settings: Any) -> None:
    loaded = tierckpt.load_safetensors(folder, local_root=root, **settings)
    for odd, name in enumerate(("a", "b")):
        assert torch.equal(loaded[name], torch.arange(3 * MiB + odd, dtype=torch.int32))


@pytest.fixture
def ways_taken(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Offset and mode of each read, headers excluded."""
    taken: Reads = []
    real = LocalCopy.read

    def read(copy: LocalCopy, byte_range: ByteRange, *given: Any) -> Any:
        copy.open()
        if byte_range.size_bytes > MiB // 2:
            mode = "buffered" if not copy.is_direct else "straight" if copy.is_straight else "direct"
            taken.append((byte_range.start, next(way for way in MODEL_READ_MODES if way.mode == mode)))
        return real(copy, byte_range, *given)

    monkeypatch.setattr(LocalCopy, "read", read)
    return taken


def test_the_first_large_load_of_a_model_tries_each_way(model: Path, ways_taken: Reads) -> None:
    root = model.parent
    load_model(model, root)
    assert len({start for start, _ in ways_taken}) == len(ways_taken)  # no byte twice
    assert [way for _, way in ways_taken[:12]] == [way for way in MODEL_READ_MODES for _ in range(2)] * 2
    [entry] = json.loads(model_read_modes(root).read_bytes()).values()
    assert entry["bytes_per_second"].keys() == {str(way) for way in MODEL_READ_MODES}
    assert {way for _, way in ways_taken[12:]} == {ReadMode.parse(entry["mode"])}
    assert not read_modes(root).exists()  # of checkpoints nothing was found out
    ways_taken.clear()
    io_tuner.tuners.clear()  # another process
    load_model(model, root)
    assert {way for _, way in ways_taken} == {ReadMode.parse(entry["mode"])}


@pytest.mark.parametrize("way", MODEL_READ_MODES, ids=str)
def test_each_way_reads_a_model(model: Path, way: ReadMode, ways_taken: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadTuner, "mode", lambda *_: way)
    monkeypatch.setattr(ReadTuner, "is_known", lambda *_: True)
    load_model(model, model.parent)
    assert {taken for _, taken in ways_taken} == {way}
    assert not model_read_modes(model.parent).exists()


def test_a_failed_trial_fails_the_load(model: Path, ways_taken: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seeded = LocalCopy.read, [StoreError("seeded")]

    def fail_in_the_second_way(copy: LocalCopy, byte_range: ByteRange, *given: Any) -> Any:
        found = real(copy, byte_range, *given)
        if (byte_range.start, MODEL_READ_MODES[1]) in ways_taken:
            with contextlib.suppress(IndexError):
                raise seeded.pop()  # once: a second read does not raise
        return found

    monkeypatch.setattr(LocalCopy, "read", fail_in_the_second_way)
    with pytest.raises(StoreError, match="seeded"):
        load_model(model, model.parent)
    assert len(ways_taken) <= 4  # nothing was read again
    assert not model_read_modes(model.parent).exists()


def test_what_passes_through_a_buffer_goes_no_further_than_the_file(path: Path, tmp_path: Path) -> None:
    """The last block of a file is read whole or not at all."""
    (tmp_path / "odd").write_bytes(path.read_bytes()[: 5 * 4096 + 100])
    copy = LocalCopy(tmp_path / "odd", tuner=tuner(tmp_path, (ReadMode(True, 12),)))
    into, through = memoryview(mmap.mmap(-1, 8 * 4096)), memoryview(mmap.mmap(-1, 2 * 4096))
    found = copy.read(ByteRange(4096, 5 * 4096 + 100), into, through)
    is_right = found == path.read_bytes()[4096 : 5 * 4096 + 100]
    assert is_right and not any(into[5 * 4096 :])
    short = copy.read(ByteRange(4096, 7 * 4096), into, through)
    is_right = short == path.read_bytes()[4096 : 5 * 4096 + 100]
    assert is_right
    copy.close()
