"""Reads of a load: only the requested rows, directly to their destination, without parsing items."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import tierckpt
from tests.states import raises_ours, save
from tierckpt.dcp import reader
from tierckpt.dcp import reader as readers
from tierckpt.errors import IntegrityError
from tierckpt.read.parallel_read import Piece
from tierckpt.read.replicated_file import LocalCopy
from tierckpt.types import ByteRange

CHUNK = 64 * 1024
ROWS, COLUMNS = 1000, 250


class PartPlanner:
    """A planner that requests parts of tensors."""

    def __init__(self, **targets: torch.Tensor) -> None:
        self.targets, self.committed = targets, []  # type: ignore[var-annotated]

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.targets[item.storage_index.fqn]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(item.storage_index.fqn)

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("nothing here is an object")


def part(name: str, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> ReadItem:
    index = MetadataIndex(name, torch.Size([0] * len(offsets)))
    sizes = torch.Size(lengths), torch.Size(offsets)
    return ReadItem(LoadItemType.TENSOR, index, torch.Size([0] * len(offsets)), index, sizes[1], sizes[0])


def read(uri: str, items: list[ReadItem], **targets: torch.Tensor) -> None:
    reader = tierckpt.TierStorageReader(uri)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    planner = PartPlanner(**targets)
    reader.read_data(LoadPlan(items), planner)  # type: ignore[arg-type]
    assert sorted(planner.committed) == sorted(item.storage_index.fqn for item in items)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of tensors that torch parses."""
    names: list[str] = []
    real = readers.load_tensor

    def load_tensor(stream: Any, name: str, **options: Any) -> torch.Tensor:
        names.append(name)
        return real(stream, name, **options)

    monkeypatch.setattr(readers, "load_tensor", load_tensor)
    return names


@pytest.fixture
def chunks_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the chunks read from files on the SSD, except metadata."""
    indices: list[int] = []
    real = LocalCopy.read

    def note(self: LocalCopy, byte_range: ByteRange, into: memoryview | None = None) -> Any:
        if into is not None:
            indices.append(byte_range.start // CHUNK)
        return real(self, byte_range, into)

    monkeypatch.setattr(LocalCopy, "read", note)
    return indices


@pytest.fixture
def matrix(file_uri: str) -> tuple[str, torch.Tensor]:
    """A tensor of a million bytes in sixteen chunks."""
    tensor = torch.randn(ROWS, COLUMNS)
    save(f"{file_uri}/step-1", {"matrix": tensor}, chunk_size_bytes=CHUNK)
    return f"{file_uri}/step-1", tensor


def test_only_requested_rows_are_read(
    matrix: tuple[str, torch.Tensor], parsed: list[str], chunks_read: list[int]
) -> None:
    uri, tensor = matrix
    target = torch.empty(300, COLUMNS)
    read(uri, [part("matrix", (500, 0), (300, COLUMNS))], matrix=target)
    assert torch.equal(target, tensor[500:800])
    first, last = 500 * COLUMNS * 4 // CHUNK, (800 * COLUMNS * 4 + 4096) // CHUNK
    assert sorted(chunks_read) == [0, *range(first, last + 1)]  # chunk 0 holds the item's head
    assert parsed == []


@pytest.mark.parametrize(
    "target",
    [
        torch.empty(300, 100),
        torch.empty(100, 300).t(),
        torch.empty(300, 100, dtype=torch.float64),
        torch.empty(300, 100, dtype=torch.complex64),
        torch.empty(600, 200)[::2, ::2],
    ],
    ids=["contiguous", "transposed", "wider", "complex", "strided"],
)
def test_columns_are_read_through_rows(
    matrix: tuple[str, torch.Tensor], target: torch.Tensor, parsed: list[str]
) -> None:
    uri, tensor = matrix
    read(uri, [part("matrix", (600, 50), (300, 100))], matrix=target)
    assert torch.equal(target, tensor[600:900, 50:150].to(target.dtype))
    assert parsed == []


def test_items_of_stock_dcp_are_read_without_parsing(file_uri: str, parsed: list[str]) -> None:
    state = {"w": torch.randn(100, 10), "b": torch.randn(7).bfloat16(), "n": torch.tensor(3), "e": torch.empty(0, 4)}
    dcp.save(state, storage_writer=FileSystemWriter(f"{file_uri}/stock"), no_dist=True)
    loaded = {name: torch.ones_like(value) for name, value in state.items()}
    with raises_ours():
        dcp.load(loaded, storage_reader=tierckpt.TierStorageReader(f"{file_uri}/stock"), no_dist=True)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert parsed == []


def test_item_that_does_not_match_its_metadata_is_parsed(file_uri: str, parsed: list[str]) -> None:
    """Stock DCP stores a conjugate view as such: its raw bytes are not its values."""
    state = {"plain": torch.randn(10), "view": torch.randn(50, dtype=torch.complex64).conj()}
    dcp.save(state, storage_writer=FileSystemWriter(f"{file_uri}/stock"), no_dist=True)
    loaded = {name: torch.ones_like(value) for name, value in state.items()}
    with raises_ours():
        dcp.load(loaded, storage_reader=tierckpt.TierStorageReader(f"{file_uri}/stock"), no_dist=True)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert parsed == ["view"]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """Record the pieces that a load requests of files."""
    requested: list[Piece] = []
    real = reader.pull

    def pull(wanted: Any, *args: Any, **options: Any) -> None:
        requested.extend(piece for _, pieces in wanted for piece in pieces)
        real(wanted, *args, **options)

    monkeypatch.setattr(reader, "pull", pull)
    return requested


def small_tensors(count: int) -> dict[str, torch.Tensor]:
    """Return tensors of alternating shapes, dtypes and sizes, including an empty one."""
    kinds = [((5,), torch.float32), ((), torch.int64), ((3, 7), torch.bfloat16), ((0, 4), torch.int8)]
    return {f"t.{n}": torch.full(*kinds[n % 4][:1], n % 100, dtype=kinds[n % 4][1]) for n in range(count)}


def load_into(uri: str, into: dict[str, Any], **planner: Any) -> None:
    with raises_ours():
        dcp.load(into, storage_reader=tierckpt.TierStorageReader(uri), no_dist=True, **planner)


def test_adjacent_small_tensors_are_one_read(file_uri: str, pieces: list[Piece], parsed: list[str]) -> None:
    state = small_tensors(1000)
    save(f"{file_uri}/step-1", state)
    loaded = {name: torch.ones_like(value) for name, value in state.items()}
    load_into(f"{file_uri}/step-1", loaded)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    filled = [piece for piece in pieces if not piece.is_unverified]
    assert len(filled) == 1
    assert parsed == []


def test_group_ends_at_a_chunk_boundary(file_uri: str, pieces: list[Piece]) -> None:
    state = small_tensors(1000)
    save(f"{file_uri}/step-1", state, chunk_size_bytes=CHUNK)
    load_into(f"{file_uri}/step-1", state)
    groups = [piece for piece in pieces if piece.stop - piece.start > 4096]
    assert len(groups) > 5
    assert all(piece.start // CHUNK == (piece.stop - 1) // CHUNK for piece in groups)


def test_unrequested_small_tensors_are_not_read(file_uri: str, pieces: list[Piece]) -> None:
    state = {f"t.{n}": torch.full((2048,), n) for n in range(100)}
    save(f"{file_uri}/step-1", state)
    loaded = {name: torch.zeros_like(value) for name, value in list(state.items())[:50:10]}
    load_into(f"{file_uri}/step-1", loaded)
    assert all(torch.equal(value, state[name]) for name, value in loaded.items())
    assert len(pieces) == 5


def test_small_tensors_into_other_memory_layouts(file_uri: str) -> None:
    state = {f"t.{n}": torch.randn(6, 4) for n in range(8)}
    save(f"{file_uri}/step-1", state)
    into: dict[str, Any] = {
        "t.0": torch.zeros(6, 4),
        "t.1": torch.zeros(4, 6).t(),
        "t.2": torch.nn.Parameter(torch.zeros(6, 4)),
        "t.3": torch.zeros(6, 4, dtype=torch.float64),
        "t.4": torch.zeros(12, 4)[::2],
        "t.5": torch.zeros(6, 4, requires_grad=True),
        "t.6": torch.zeros(6, 4, dtype=torch.complex64).imag,
        "t.7": torch.zeros(6, 4),
    }
    load_into(f"{file_uri}/step-1", into)
    for name, value in state.items():
        assert torch.equal(into[name].detach(), value.to(into[name].dtype)), name
    assert into["t.5"].requires_grad


@pytest.mark.parametrize("by", ["its class", "an attribute"])
def test_custom_planner_resolves_small_tensors(file_uri: str, by: str) -> None:
    """It may store them outside the state dict."""
    elsewhere = torch.zeros(3)

    class Elsewhere(DefaultLoadPlanner):
        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            return elsewhere

    planner = Elsewhere() if by == "its class" else DefaultLoadPlanner()
    if by == "an attribute":
        planner.lookup_tensor = lambda index: elsewhere  # type: ignore[method-assign]
    state = {"t": torch.tensor([1.0, 2.0, 3.0])}
    save(f"{file_uri}/step-1", state)
    loaded = {"t": torch.zeros(3)}
    load_into(f"{file_uri}/step-1", loaded, planner=planner)
    assert loaded["t"].tolist() == [0.0, 0.0, 0.0]
    assert elsewhere.tolist() == [1.0, 2.0, 3.0]


def test_only_mismatched_items_of_a_group_are_parsed(file_uri: str, parsed: list[str]) -> None:
    state = {f"t.{n}": torch.randn(40, dtype=torch.complex64) for n in range(9)}
    state["t.4"] = state["t.4"].conj()
    dcp.save(state, storage_writer=FileSystemWriter(f"{file_uri}/stock"), no_dist=True)
    loaded = {name: torch.ones_like(value) for name, value in state.items()}
    load_into(f"{file_uri}/stock", loaded)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert parsed == ["t.4"]


def test_bad_chunk_error_names_a_small_tensor_in_it(file_uri: str) -> None:
    state = {f"t.{n}": torch.full((512,), n) for n in range(100)}
    save(f"{file_uri}/step-1", state, chunk_size_bytes=CHUNK)
    [shard] = Path(file_uri).rglob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[5 * CHUNK + 100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        load_into(f"{file_uri}/step-1", state)
    metadata = tierckpt.TierStorageReader(f"{file_uri}/step-1").read_metadata()
    [place] = [info for index, info in metadata.storage_data.items() if index.fqn == caught.value.context["tensor"]]
    assert place.offset < 6 * CHUNK
    assert place.offset + place.length > 5 * CHUNK


def test_reads_that_need_a_buffer_use_windows(
    matrix: tuple[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, tensor = matrix
    windows: list[int] = []
    real = readers.batches

    def counted(*given: Any) -> Any:
        for window in real(*given):
            windows.append(len(window))
            yield window

    monkeypatch.setattr(readers, "WINDOW_BYTES", 2 * 100 * COLUMNS * 4)
    monkeypatch.setattr(readers, "batches", counted)
    loaded = {f"part-{at}": torch.empty(100, 10) for at in range(0, ROWS, 100)}
    planner = PartPlanner(**loaded)

    def resolve(item: ReadItem) -> torch.Tensor:
        return loaded[f"part-{item.storage_offsets[0]}"]

    monkeypatch.setattr(planner, "resolve_tensor", resolve)
    reader = tierckpt.TierStorageReader(uri)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    items = [part("matrix", (at, 5), (100, 10)) for at in range(0, ROWS, 100)]
    reader.read_data(LoadPlan(items), planner)  # type: ignore[arg-type]
    assert windows == [2, 2, 2, 2, 2]
    assert all(torch.equal(loaded[f"part-{at}"], tensor[at : at + 100, 5:15]) for at in range(0, ROWS, 100))


def test_a_part_beyond_the_tensor_is_refused(matrix: tuple[str, torch.Tensor]) -> None:
    uri, _ = matrix
    with pytest.raises(IntegrityError, match="less than its metadata says"):
        read(uri, [part("matrix", (900, 0), (200, COLUMNS))], matrix=torch.empty(200, COLUMNS))


def test_bad_chunk_error_names_tensor_and_checkpoint(file_uri: str) -> None:
    state = {"first": torch.randn(100_000), "second": torch.randn(100_000)}
    save(f"{file_uri}/step-1", state, chunk_size_bytes=CHUNK)
    [shard] = Path(file_uri).rglob("*.distcp")  # a hard link to the SSD's file, so both copies are bad
    data = bytearray(shard.read_bytes())
    data[-3 * CHUNK] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError) as caught, raises_ours():
        dcp.load(state, storage_reader=tierckpt.TierStorageReader(f"{file_uri}/step-1"), no_dist=True)
    assert caught.value.context["tensor"] == "second"
    assert caught.value.context["checkpoint"] == f"{file_uri}/step-1"
