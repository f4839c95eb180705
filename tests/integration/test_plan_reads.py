"""Reads of a load: only the requested rows, verified, from any tier, to their destination, without parsing items."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from xxhash import xxh3_128

import tierckpt
from tests.reads import PartPlanner, asked, part, read_parts, told
from tests.states import flip, load, raises_ours, same, save, save_drained
from tierckpt.client import close_all
from tierckpt.dcp import reader as readers
from tierckpt.errors import IntegrityError
from tierckpt.format import manifest as manifests
from tierckpt.format.layout import MANIFEST, blocks_file, local_dir, parse_uri
from tierckpt.read.parallel_read import Piece

CHUNK = 64 * 1024
ROWS, COLUMNS = 1000, 250


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
def matrix(file_uri: str) -> tuple[str, torch.Tensor]:
    """A tensor of a million bytes in sixteen chunks."""
    tensor = torch.randn(ROWS, COLUMNS)
    save(f"{file_uri}/step-1", {"matrix": tensor}, chunk_size_bytes=CHUNK)
    return f"{file_uri}/step-1", tensor


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
def test_columns_are_read_by_rows(matrix: tuple[str, torch.Tensor], target: torch.Tensor, parsed: list[str]) -> None:
    uri, tensor = matrix
    read_parts(uri, [part("matrix", (600, 50), (300, 100))], PartPlanner(matrix=target))
    assert torch.equal(target, tensor[600:900, 50:150].to(target.dtype))
    assert parsed == []


def test_items_of_stock_dcp_are_read_without_parsing(file_uri: str, parsed: list[str]) -> None:
    state = {"w": torch.randn(100, 10), "b": torch.randn(7).bfloat16(), "n": torch.tensor(3), "e": torch.empty(0, 4)}
    dcp.save(state, storage_writer=FileSystemWriter(f"{file_uri}/stock"), no_dist=True)
    assert same(load(f"{file_uri}/stock", state), state)
    assert parsed == []


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """Record the pieces that a load requests of files."""
    requested: list[Piece] = []
    real = readers.pull

    def pull(wanted: Any, *args: Any, **options: Any) -> None:
        requested.extend(piece for _, pieces in wanted for piece in pieces)
        real(wanted, *args, **options)

    monkeypatch.setattr(readers, "pull", pull)
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
    assert same(load(f"{file_uri}/step-1", state), state)
    filled = [piece for piece in pieces if not piece.is_unverified]
    assert len(filled) == 1
    assert parsed == []


def test_unrequested_small_tensors_are_not_read(file_uri: str, pieces: list[Piece]) -> None:
    state = {f"t.{n}": torch.full((2048,), n) for n in range(100)}
    save(f"{file_uri}/step-1", state)
    some = dict([*state.items()][:50:10])
    assert same(load(f"{file_uri}/step-1", some), some)
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
    """Stock DCP stores a conjugate view as such: its raw bytes are not its values."""
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
    flip(shard, 5 * CHUNK + 100)
    with pytest.raises(IntegrityError) as caught:
        load_into(f"{file_uri}/step-1", state)
    assert caught.value.context["checkpoint"] == f"{file_uri}/step-1"
    metadata = tierckpt.TierStorageReader(f"{file_uri}/step-1").read_metadata()
    [place] = [info for index, info in metadata.storage_data.items() if index.fqn == caught.value.context["tensor"]]
    assert place.offset < 6 * CHUNK
    assert place.offset + place.length > 5 * CHUNK


def test_buffered_reads_use_windows(matrix: tuple[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
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
    planner = PartPlanner()
    monkeypatch.setattr(planner, "resolve_tensor", lambda item: loaded[f"part-{item.storage_offsets[0]}"])
    read_parts(uri, [part("matrix", (at, 5), (100, 10)) for at in range(0, ROWS, 100)], planner)
    assert windows == [2, 2, 2, 2, 2]
    assert all(torch.equal(loaded[f"part-{at}"], tensor[at : at + 100, 5:15]) for at in range(0, ROWS, 100))


def test_a_part_beyond_the_tensor_is_refused(matrix: tuple[str, torch.Tensor]) -> None:
    uri, _ = matrix
    with pytest.raises(IntegrityError, match="less than its metadata says"):
        read_parts(uri, [part("matrix", (900, 0), (200, COLUMNS))], PartPlanner(matrix=torch.empty(200, COLUMNS)))


# --- parts of tensors from each tier ----------------------------------------------------------------------------------

MiB = 1 << 20
STATE_ROWS, ROW_BYTES = 24, MiB
NAMES = ("a", "b")
FIRST, COUNT = 7, 8
"""A dim-0 shard: a third of the rows of each tensor, not at its edge."""
NEEDED = len(NAMES) * COUNT * ROW_BYTES


def read_rows(uri: str, first: int = FIRST, count: int = COUNT) -> dict[str, torch.Tensor]:
    targets = {name: torch.zeros(count, ROW_BYTES // 4) for name in NAMES}
    with raises_ours():
        read_parts(uri, [part(name, (first, 0), (count, ROW_BYTES // 4)) for name in NAMES], PartPlanner(**targets))
    return targets


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(STATE_ROWS, ROW_BYTES // 4) for name in NAMES}


def is_right(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor], first: int = FIRST) -> bool:
    return all(torch.equal(value, state[name][first : first + len(value)]) for name, value in found.items())


def lose_local() -> None:
    close_all()
    shutil.rmtree(Path(os.environ["TIERCKPT_LOCAL_ROOT"]))


def local(uri: str) -> Path:
    return local_dir(Path(os.environ["TIERCKPT_LOCAL_ROOT"]), parse_uri(uri))


@pytest.mark.parametrize("place", ["ssd", "mount", "s3"])
def test_bytes_read_for_a_shard(
    place: str, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    uri = f"{request.getfixturevalue('s3_uri' if place == 's3' else 'file_uri')}/step-1"
    tier, counter = "local" if place == "ssd" else "shared", "stores" if place == "s3" else "files"
    save_drained(uri, state)
    if place != "ssd":
        lose_local()
    with told() as read, asked(monkeypatch) as got:
        assert is_right(read_rows(uri), state)
    assert NEEDED <= got[counter] <= 1.1 * NEEDED
    assert NEEDED <= read[tier] <= 1.1 * NEEDED
    if place == "s3":
        chunks = len(NAMES) * (COUNT * ROW_BYTES // (8 * MiB) + 1)
        assert got["requests"] <= chunks + len(NAMES) + 3  # plus heads, block digests and metadata
    else:
        assert read.total() == read[tier]
        assert abs(got["files"] - read.total()) < 100_000  # small metadata reads are not in the telemetry
    assert place == "ssd" or not list(local(uri).glob("*.distcp"))


@pytest.mark.slow
def test_whole_file_is_cached(s3_uri: str, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"{s3_uri}/step-1"
    save_drained(uri, state)
    lose_local()
    with asked(monkeypatch) as got:
        assert is_right(read_rows(uri, 2, 16), state, 2)
    assert got["stores"] > 0.99 * len(NAMES) * STATE_ROWS * ROW_BYTES
    with told() as read:
        assert is_right(read_rows(uri, 0, 20), state, 0)
    assert read["shared"] < 100_000


def test_a_damaged_block_is_found_by_a_partial_read(file_uri: str, state: dict[str, torch.Tensor]) -> None:
    """Control of the byte counts: fewer bytes are read, and all of them are verified."""
    uri = f"{file_uri}/step-1"
    save(uri, state, drain=False)
    [shard] = local(uri).glob("*.distcp")
    flip(shard, (FIRST + 1) * ROW_BYTES)  # in the first tensor's rows
    with pytest.raises(IntegrityError) as caught:
        read_rows(uri)
    assert caught.value.context["tensor"] in NAMES
    assert shard.with_name(f"{shard.name}.bad").exists()


def test_manifests_without_block_digests_load(file_uri: str, state: dict[str, torch.Tensor]) -> None:
    """They have one digest for each whole chunk and no file of block digests."""
    uri = f"{file_uri}/step-1"
    save(uri, state, drain=False)
    directory = local(uri)
    body = json.loads((directory / MANIFEST).read_bytes())
    del body["self_digest"]
    body["digest"] = "xxh3-128"
    body["files"] = [file for file in body["files"] if file["path"] != blocks_file(file["token"])]
    for file in body["files"]:
        content, chunk = (directory / file["path"]).read_bytes(), body["chunk_size_bytes"]
        file["digests"] = [xxh3_128(content[at : at + chunk]).hexdigest() for at in range(0, len(content), chunk)]
    (directory / MANIFEST).write_bytes(manifests.seal(body))
    assert is_right(read_rows(uri), state)
    assert same(load(uri, state), state)


def test_parts_of_stock_files(file_uri: str, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without digests, the smallest read is a page."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{file_uri}/stock"), no_dist=True)
    with asked(monkeypatch) as got:
        assert is_right(read_rows(f"{file_uri}/stock"), state)
    assert NEEDED <= got["files"] <= NEEDED + 200_000
