"""Bit rot in the node cache: no reader returns a flipped bit of a model's files, and the files are repaired.

TIERCKPT_TEST_CACHE_FLIPS sets the number of random flips for each reader, in addition to edge cases.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import tierckpt
from tests import files
from tests.states import flip, same, save, small_state
from tierckpt.cache import verifier
from tierckpt.cache.entry import CacheEntry
from tierckpt.cache.partial_entry import BLOCKS
from tierckpt.cache.receipt import RECEIPT, read_receipt
from tierckpt.client import close_all
from tierckpt.disk.io_tuner import MODEL_READ_MODES, ReadMode, ReadTuner
from tierckpt.errors import IntegrityError
from tierckpt.format.layout import local_dir, parse_uri
from tierckpt.loading.cached_view import open_cached
from tierckpt.read.replicated_file import LocalCopy
from tierckpt.telemetry import QUARANTINES, Metric, listen

FLIPS = int(os.environ.get("TIERCKPT_TEST_CACHE_FLIPS", "1"))
KIB = 1024
FILE = "model-00001-of-00002.safetensors"
OTHER_FILE = "model-00002-of-00002.safetensors"


class Model:
    """A model of two files in a directory as store, and its contents."""

    def __init__(self, root: Path) -> None:
        self.store, self.local_root = root / "store" / "model", root / "local"
        self.store.mkdir(parents=True)
        generator = torch.Generator().manual_seed(7)
        self.tensors = {f"w{index}": torch.randn(96, 2048, generator=generator) for index in range(4)}  # 768 KiB each
        self.tensors["small"] = torch.randn(17, generator=generator)
        weight_map = {name: OTHER_FILE if name == "w3" else FILE for name in self.tensors}
        for file in (FILE, OTHER_FILE):
            save_file({name: self.tensors[name] for name in weight_map if weight_map[name] == file}, self.store / file)
        (self.store / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        self.uri = self.store.as_uri()
        self.bytes = {path.name: path.read_bytes() for path in self.store.iterdir()}

    def tensor_range(self) -> tuple[int, int]:
        """Return the start of the tensors in FILE, and the size of FILE."""
        data = self.bytes[FILE]
        return 8 + int.from_bytes(data[:8], "little"), len(data)

    def offsets(self, rng: random.Random) -> list[int]:
        begin, end = self.tensor_range()
        edge_cases = [0, 9, begin - 1, begin, end - 1, end // 2]
        return edge_cases + [rng.randrange(end) for _ in range(FLIPS)]


@pytest.fixture(params=["64KiB", "1MiB"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("TIERCKPT_CHUNK_SIZE_BYTES", request.param)
    fsspec.get_filesystem_class("tierckpt").clear_instance_cache()
    return Model(tmp_path)


@pytest.fixture
def quarantined() -> Iterator[list[float]]:
    counted: list[float] = []

    def count(metric: Metric, value: float, labels: Any) -> None:
        if metric is QUARANTINES:
            counted.append(value)

    stop = listen(count)
    yield counted
    stop()


# --- readers -----------------------------------------------------------------------------------------------------

Reader = Callable[[Model, Path], bool]
"""Reads all of FILE and returns whether it is correct."""


def load_uri(model: Model, _: Path) -> bool:
    return same(tierckpt.load_safetensors(model.uri), model.tensors)


def load_directory(model: Model, entry: Path) -> bool:
    return same(tierckpt.load_safetensors(entry), model.tensors)


def with_read_mode(way: ReadMode, reader: Reader) -> Reader:
    """Read the disk in one mode, whatever is in the page cache."""

    def read(model: Model, entry: Path) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ReadTuner, "mode", lambda *_: way)
            patch.setattr(ReadTuner, "is_known", lambda *_: True)
            patch.setattr(LocalCopy, "is_in_memory", lambda *_: False)
            return reader(model, entry)

    return read


def load_file(model: Model, entry: Path) -> bool:
    return all(same(tensor, model.tensors[name]) for name, tensor in tierckpt.load_safetensors(entry / FILE).items())


def stream_tensors(model: Model, _: Path) -> bool:
    return same(dict(tierckpt.stream_safetensors(model.uri, bytes_in_flight_max=2 << 20)), model.tensors)


def load_lazily(model: Model, entry: Path) -> bool:
    with tierckpt.load_safetensors(model.uri, lazy=True) as found:
        return same(dict(found), model.tensors)


def load_parts(model: Model, entry: Path) -> bool:
    """Read rows of each tensor, and columns: each part is smaller than a block."""
    parts = [tierckpt.load_safetensors(entry, shard=(rank, 3, 0)) for rank in range(3)]
    columns = [tierckpt.load_safetensors(model.uri, shard=(rank, 2, 1), prefix="w") for rank in range(2)]
    rows = all(same(torch.cat([part[name] for part in parts]), tensor) for name, tensor in model.tensors.items())
    return rows and all(same(torch.cat([one[n] for one in columns], 1), model.tensors[n]) for n in columns[0])


def read_view(model: Model, _: Path) -> bool:
    with open_cached(model.uri) as view:
        return bytes(view.read(FILE)) == model.bytes[FILE]


def read_view_in_pieces(model: Model, _: Path) -> bool:
    data, into = model.bytes[FILE], bytearray(31 * KIB)
    with open_cached(model.uri) as view:
        for start in range(0, len(data), len(into)):
            part = memoryview(into)[: min(len(into), len(data) - start)]
            view.read_into(FILE, start, part)
            if part != data[start : start + len(part)]:
                return False
    return True


def read_stream(model: Model, _: Path) -> bool:
    fs = fsspec.filesystem("tierckpt", skip_instance_cache=True)
    with fs.open(f"tierckpt://file{model.store}/{FILE}") as stream:
        return bool(stream.read() == model.bytes[FILE])


def cat_file(model: Model, _: Path) -> bool:
    fs = fsspec.filesystem("tierckpt", skip_instance_cache=True)
    return bool(fs.cat_file(f"tierckpt://file{model.store}/{FILE}") == model.bytes[FILE])


READERS: dict[str, Reader] = {
    "uri": load_uri,
    **{f"uri, {way}": with_read_mode(way, load_uri) for way in MODEL_READ_MODES},
    "directory": load_directory,
    **{f"directory, {way}": with_read_mode(way, load_directory) for way in MODEL_READ_MODES},
    "file": load_file,
    "stream": stream_tensors,
    "lazy": load_lazily,
    "parts": load_parts,
    "view": read_view,
    "view in pieces": read_view_in_pieces,
    "open": read_stream,
    "cat": cat_file,
}


# --- whole entries -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_flipped_bit_is_detected_and_the_file_repaired(name: str, model: Model, quarantined: list[float]) -> None:
    entry, read = tierckpt.prefetch(model.uri), READERS[name]
    for offset in model.offsets(random.Random(name)):
        before = len(quarantined)
        flip(entry / FILE, offset)
        assert read(model, entry), f"byte {offset}"
        assert (entry / FILE).read_bytes() == model.bytes[FILE], f"byte {offset} is not repaired"
        assert len(quarantined) > before


@pytest.mark.parametrize("model", ["1MiB"], indirect=True)
@pytest.mark.parametrize("name", READERS)
def test_control_without_verification_flips_are_read(
    name: str, model: Model, monkeypatch: pytest.MonkeyPatch, quarantined: list[float]
) -> None:
    monkeypatch.setattr(verifier.Checker, "is_good", lambda *_: True)
    entry, read = tierckpt.prefetch(model.uri), READERS[name]
    flip(entry / FILE, model.tensor_range()[0] + 100_000)
    assert not read(model, entry)
    assert not quarantined


@pytest.mark.parametrize("name", ["directory", "file", "parts"])
def test_error_without_the_store_names_file_entry_and_tier(name: str, model: Model) -> None:
    entry = tierckpt.prefetch(model.uri)
    model.store.rename(model.store.with_name("away"))
    for offset in model.offsets(random.Random(name)):
        flip(entry / FILE, offset)
        with pytest.raises(IntegrityError) as caught:
            READERS[name](model, entry)
        assert caught.value.context["file"] == FILE
        assert caught.value.context["tier"] == "local"
        assert str(caught.value.context["entry"]) == str(entry)
        flip(entry / FILE, offset)
    assert same(tierckpt.load_safetensors(entry), model.tensors)


def test_open_view_without_the_store_names_the_file(model: Model) -> None:
    entry = tierckpt.prefetch(model.uri)
    with open_cached(model.uri) as view:
        model.store.rename(model.store.with_name("away"))
        flip(entry / FILE, 5000)
        with pytest.raises(IntegrityError, match="node cache") as caught:
            view.read(FILE, 4990, 5010)
        assert caught.value.context["file"] == FILE
        assert bytes(view.read(OTHER_FILE, 10, 20)) == model.bytes[OTHER_FILE][10:20]


def test_changed_store_object_repairs_nothing(model: Model) -> None:
    entry = tierckpt.prefetch(model.uri)
    status = (model.store / FILE).stat()
    (model.store / FILE).write_bytes(bytes(len(model.bytes[FILE])))
    os.utime(model.store / FILE, ns=(status.st_atime_ns, status.st_mtime_ns))
    flip(entry / FILE, 100_000)
    damaged = (entry / FILE).read_bytes()
    with pytest.raises(IntegrityError):
        tierckpt.load_safetensors(entry)
    assert (entry / FILE).read_bytes() == damaged


def test_small_read_reads_a_block_not_a_chunk(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    read_here = CacheEntry.read_here

    def counted(self: CacheEntry, index: int, byte_range: Any, into: memoryview) -> bool:
        read.append(byte_range.size_bytes)
        return read_here(self, index, byte_range, into)

    monkeypatch.setattr(CacheEntry, "read_here", counted)
    tierckpt.prefetch(model.uri)
    with open_cached(model.uri) as view:
        assert bytes(view.read(FILE, 700_000, 701_024)) == model.bytes[FILE][700_000:701_024]
    assert sum(read) <= 256 * KIB


# --- missing digests -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["lost", "zeros", "torn"])
def test_lost_or_damaged_block_digests_fall_back_to_chunks(damage: str, model: Model) -> None:
    entry = tierckpt.prefetch(model.uri)
    blocks = entry / BLOCKS
    if not blocks.exists():
        assert os.environ["TIERCKPT_CHUNK_SIZE_BYTES"] == "64KiB"  # every chunk is a block
    elif damage == "lost":
        blocks.unlink()
    else:
        blocks.write_bytes(bytes(blocks.stat().st_size) if damage == "zeros" else blocks.read_bytes()[:21])
    assert load_parts(model, entry)
    flip(entry / FILE, 70_000)
    assert load_parts(model, entry)
    assert (entry / FILE).read_bytes() == model.bytes[FILE]


def test_entry_without_digests_is_loaded_unverified(model: Model) -> None:
    """Such an entry cannot be verified."""
    entry = tierckpt.prefetch(model.uri)
    receipt = read_receipt(entry)
    assert receipt is not None
    (entry / RECEIPT).write_bytes(receipt.frozen.encode())
    assert same(tierckpt.load_safetensors(entry), model.tensors)
    close_all()
    assert same(tierckpt.load_safetensors(model.uri), model.tensors)


# --- partial entries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["uri", f"uri, {MODEL_READ_MODES[-1]}", "stream", "view", "view in pieces", "open"])
def test_partial_entry_is_verified(name: str, model: Model, quarantined: list[float]) -> None:
    """Of an incomplete, unpublished entry."""
    with open_cached(model.uri) as view:
        view.read(FILE, 200_000, 400_000)
        [incoming] = model.local_root.glob("cache/.model-*.incoming")
        flip(incoming / FILE, 300_001)
        assert READERS[name](model, incoming)
        assert len(quarantined) == 1
    whole = tierckpt.prefetch(model.uri)
    assert (whole / FILE).read_bytes() == model.bytes[FILE]


# --- prefetched directories -------------------------------------------------------------------------------------------


def test_prefetched_directory_is_verified_in_place(model: Model, tmp_path: Path) -> None:
    directory = tierckpt.prefetch(model.store.parent.as_uri(), tmp_path / "mine" / "models") / "model"
    assert same(tierckpt.load_safetensors(directory), model.tensors)
    for offset in model.offsets(random.Random(1)):
        flip(directory / FILE, offset)
        with pytest.raises(IntegrityError, match="prefetched") as caught:
            tierckpt.load_safetensors(directory)
        assert caught.value.context["tier"] == "local"
        assert str(tmp_path / "mine" / "models" / RECEIPT) in str(caught.value.hint)
        flip(directory / FILE, offset)
    assert same(tierckpt.load_safetensors(directory), model.tensors)
    save_file({"mine": torch.ones(3)}, directory / "added.safetensors")
    assert same(tierckpt.load_safetensors(directory / "added.safetensors"), {"mine": torch.ones(3)})


def test_changed_file_is_loaded_after_removal_of_the_receipt(model: Model, tmp_path: Path) -> None:
    directory = tierckpt.prefetch(model.uri, tmp_path / "mine")
    save_file({"mine": torch.ones(3)} | model.tensors, directory / FILE)
    with pytest.raises(IntegrityError):
        tierckpt.load_safetensors(directory / FILE)
    save_file({"mine": torch.ones(3)}, directory / FILE)
    with pytest.raises(IntegrityError):
        tierckpt.load_safetensors(directory / FILE)
    (directory / RECEIPT).unlink()
    assert same(tierckpt.load_safetensors(directory / FILE), {"mine": torch.ones(3)})


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_damaged_local_shard_is_read_from_the_store(tmp_path: Path) -> None:
    location = parse_uri(tmp_path / "shared" / "run" / "step-1")
    save(location.uri, small_state(1))
    tierckpt.wait(location.uri, timeout_seconds=60)
    local_root = Path(os.environ["TIERCKPT_LOCAL_ROOT"])
    [shard] = local_dir(local_root, location).glob("*.distcp")
    good = shard.read_bytes()
    files.flip(shard)
    fs = fsspec.filesystem("tierckpt", skip_instance_cache=True)
    with fs.open(f"tierckpt://file{location.path}/{shard.name}") as stream:
        assert stream.read() == good
