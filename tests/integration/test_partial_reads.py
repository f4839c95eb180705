"""A load of part of a tensor reads that part, from whichever tier has it, and verifies every byte."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from xxhash import xxh3_128

import tierckpt
from tests.reads import asked, told
from tests.states import raises_ours, save
from tierckpt.client import close_all
from tierckpt.errors import IntegrityError
from tierckpt.format import manifest as manifests
from tierckpt.format.layout import MANIFEST, blocks_file, local_dir, parse_uri
from tierckpt.format.manifest import DIGEST_BLOCK_BYTES

MiB = 1 << 20
ROWS, ROW_BYTES = 24, MiB
NAMES = ("a", "b")
FIRST, COUNT = 7, 8
"""A dim-0 shard: a third of the rows of each tensor, not at its edge."""
NEEDED = len(NAMES) * COUNT * ROW_BYTES


class TensorPlanner:
    """A planner that reads into given tensors."""

    def __init__(self, targets: dict[str, torch.Tensor]) -> None:
        self.targets = targets

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.targets[item.storage_index.fqn]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing."""


def rows_of(name: str, first: int, count: int) -> ReadItem:
    index, zero = MetadataIndex(name, torch.Size([0, 0])), torch.Size([0, 0])
    return ReadItem(
        LoadItemType.TENSOR, index, zero, index, torch.Size([first, 0]), torch.Size([count, ROW_BYTES // 4])
    )


def read_rows(uri: str, first: int = FIRST, count: int = COUNT) -> dict[str, torch.Tensor]:
    targets = {name: torch.zeros(count, ROW_BYTES // 4) for name in NAMES}
    with raises_ours():
        reader = tierckpt.TierStorageReader(uri)
        reader.set_up_storage_reader(reader.read_metadata(), True)
        reader.read_data(LoadPlan([rows_of(name, first, count) for name in NAMES]), TensorPlanner(targets))  # type: ignore[arg-type]
    return targets


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(ROWS, ROW_BYTES // 4) for name in NAMES}


def is_right(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor], first: int = FIRST) -> bool:
    return all(torch.equal(value, state[name][first : first + len(value)]) for name, value in found.items())


def lose_local(uri: str) -> None:
    """Remove the node's local copy."""
    close_all()
    shutil.rmtree(Path(os.environ["TIERCKPT_LOCAL_ROOT"]))


def local(uri: str) -> Path:
    return local_dir(Path(os.environ["TIERCKPT_LOCAL_ROOT"]), parse_uri(uri))


@pytest.mark.parametrize("place", ["ssd", "mount"])
def test_dim_0_shard_reads_at_most_a_tenth_more_than_its_bytes(
    place: str, file_uri: str, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{file_uri}/step-1"
    save(uri, state)
    tierckpt.wait(uri)
    if place == "mount":
        lose_local(uri)
    with told() as read, asked(monkeypatch) as got:
        assert is_right(read_rows(uri), state)
    assert NEEDED <= got["files"] <= 1.1 * NEEDED
    tier = "local" if place == "ssd" else "shared"
    assert NEEDED <= read[tier] <= 1.1 * NEEDED
    assert read.total() == read[tier]
    assert abs(got["files"] - read.total()) < 100_000  # small metadata reads are not in the telemetry
    assert list(local(uri).glob("*.distcp")) == [] or place == "ssd"


def test_store_reads_only_the_part_in_few_requests(
    s3_uri: str, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{s3_uri}/step-1"
    save(uri, state)
    tierckpt.wait(uri)
    lose_local(uri)
    with told() as read, asked(monkeypatch) as got:
        assert is_right(read_rows(uri), state)
    assert NEEDED <= got["stores"] <= 1.1 * NEEDED
    assert NEEDED <= read["shared"] <= 1.1 * NEEDED
    chunks = len(NAMES) * (COUNT * ROW_BYTES // (8 * MiB) + 1)
    assert got["requests"] <= chunks + len(NAMES) + 3  # plus heads, block digests and metadata
    assert not list(local(uri).glob("*.distcp"))


@pytest.mark.slow
def test_load_of_most_of_a_file_caches_the_file(
    s3_uri: str, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{s3_uri}/step-1"
    save(uri, state)
    tierckpt.wait(uri)
    lose_local(uri)
    with asked(monkeypatch) as got:
        assert is_right(read_rows(uri, 2, 16), state, 2)
    assert got["stores"] > 0.99 * len(NAMES) * ROWS * ROW_BYTES
    with told() as read:
        assert is_right(read_rows(uri, 0, 20), state, 0)
    assert read["shared"] < 100_000


@pytest.mark.parametrize("harm", ["lost", "damaged"])
def test_without_block_digests_a_load_reads_more(harm: str, file_uri: str, state: dict[str, torch.Tensor]) -> None:
    uri = f"{file_uri}/step-1"
    save(uri, state, drain=False)
    [kept] = local(uri).glob(".tierckpt/blocks/*")
    if harm == "lost":
        kept.unlink()
    else:
        kept.write_bytes(bytes(kept.stat().st_size))
    with told() as read:
        assert is_right(read_rows(uri), state)
    assert read.total() > 1.1 * NEEDED


def test_a_damaged_block_is_found_by_a_partial_read(file_uri: str, state: dict[str, torch.Tensor]) -> None:
    """Control of the byte counts: fewer bytes are read, and all of them are verified."""
    uri = f"{file_uri}/step-1"
    save(uri, state, drain=False)
    [shard] = local(uri).glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[(FIRST + 1) * ROW_BYTES] ^= 1  # in the first tensor's rows
    shard.write_bytes(content)
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
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    with raises_ours():
        dcp.load(loaded, storage_reader=tierckpt.TierStorageReader(uri), no_dist=True)
    assert is_right(loaded, state, 0)


def test_stock_dcp_checkpoint_is_read_in_parts(
    file_uri: str, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without digests, the smallest read is a page."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{file_uri}/stock"), no_dist=True)
    with asked(monkeypatch) as got:
        assert is_right(read_rows(f"{file_uri}/stock"), state)
    assert NEEDED <= got["files"] <= NEEDED + 200_000


def test_block_digests_are_a_file_on_every_tier(file_uri: str, state: dict[str, torch.Tensor]) -> None:
    uri = f"{file_uri}/step-1"
    save(uri, state)
    tierckpt.wait(uri)
    found = manifests.decode((local(uri) / MANIFEST).read_bytes())
    [entry] = [file for file in found.files if file.path == blocks_file(file.token)]
    blocks = sum(
        manifests.block_count(file.size_bytes, found.chunk_size_bytes) for file in found.files if file != entry
    )
    assert entry.size_bytes == 16 * blocks == 16 * -(-(found.size_bytes - entry.size_bytes) // DIGEST_BLOCK_BYTES)
    assert (Path(uri) / entry.path).read_bytes() == (local(uri) / entry.path).read_bytes()
