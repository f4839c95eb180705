"""Messages between executors on several nodes about the save of an ended job (W6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from tierckpt.client import Client
from tierckpt.config import Settings
from tierckpt.dcp import split
from tierckpt.dcp.handoff.finish import ResultExchange
from tierckpt.dcp.save_session import TierWriteResult, attach_files
from tierckpt.errors import ManifestError, OperationTimeoutError
from tierckpt.format.layout import HANDOFF_DIR, parse_uri
from tierckpt.format.manifest import FileEntry, digests_of

CHUNK = 1 << 20
RESULTS = [
    WriteResult(MetadataIndex("model.w", torch.Size([4, 0]), 1), 640, _StorageInfo("__1_0-ab.distcp", 0, 640)),
    WriteResult(MetadataIndex("model.scalar", torch.Size([])), 12, _StorageInfo("__1_0-ab.distcp", 640, 12)),
    WriteResult(MetadataIndex("note"), 7, _StorageInfo("__1_0-ab.distcp", 652, 7)),
]
FILES = (FileEntry("__1_0-ab.distcp", 659, digests_of(bytes(659), CHUNK), 1, "ab"),)
PARTS = (split.Part("model.w", ((0, 0), (8, 2)), ((4, 0), (4, 2))),)


@pytest.fixture
def exchange(file_uri: str, local_root: Path) -> Iterator[ResultExchange]:
    """An exchange with the results of rank 1."""
    client = Client(Settings.load(local_root=local_root))
    made = ResultExchange(client, parse_uri(file_uri), "job/7", CHUNK, wait_seconds=0.2)
    made.write(1, attach_files(list(RESULTS), FILES, PARTS))
    yield made
    client.close()


def record(uri: str) -> Path:
    (path,) = Path(uri, HANDOFF_DIR).iterdir()
    return path


def test_reported_results_are_received(exchange: ResultExchange) -> None:
    exchange.write(2, [])
    heard = exchange.read({1, 2})
    assert heard[2] == []
    first = heard[1][0]
    assert isinstance(first, TierWriteResult)
    assert (first.files, first.parts) == (FILES, PARTS)
    for result, wanted in zip(heard[1], RESULTS, strict=True):
        assert (result.index, result.index.index) == (wanted.index, wanted.index.index)
        assert (result.size_in_bytes, result.storage_data) == (wanted.size_in_bytes, wanted.storage_data)


def test_the_error_names_ranks_without_results(exchange: ResultExchange) -> None:
    with pytest.raises(OperationTimeoutError, match=r"what ranks \[0, 3\] had written"):
        exchange.read({0, 1, 3})


def test_results_of_another_save_are_ignored(exchange: ResultExchange) -> None:
    with pytest.raises(OperationTimeoutError):
        dataclasses.replace(exchange, save="job/8").read({1})


def test_a_record_with_another_chunk_size_is_rejected(exchange: ResultExchange) -> None:
    with pytest.raises(ManifestError, match="another save"):
        dataclasses.replace(exchange, chunk_size_bytes=2 * CHUNK).read({1})


def test_damage_to_any_byte_of_a_record_is_detected(exchange: ResultExchange, file_uri: str) -> None:
    path = record(file_uri)
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(ManifestError):
            exchange.read({1})
    path.write_bytes(data)
    assert len(exchange.read({1})[1]) == len(RESULTS)


def test_forget_removes_the_records(exchange: ResultExchange, file_uri: str) -> None:
    assert record(file_uri)
    exchange.remove([1, 2])
    assert not list(Path(file_uri).rglob("*.json"))
