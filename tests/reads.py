"""Bytes read by a load: by our own telemetry, and by the kernel's counters; loads of parts of tensors."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import tierckpt
from tierckpt.stores.obstore_store import RemoteStore
from tierckpt.telemetry import BYTES, Labels, Metric, listen


@contextlib.contextmanager
def told() -> Iterator[Counter[str]]:
    """Bytes read by tier, as telemetry tells them."""
    read: Counter[str] = Counter()

    def note(metric: Metric, value: float, labels: Labels, /) -> None:
        if metric is BYTES and labels["direction"] == "read":
            read[labels["tier"]] += int(value)

    stop = listen(note)
    try:
        yield read
    finally:
        stop()


@contextlib.contextmanager
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Bytes that this process got from the kernel by ``pread`` and ``preadv``, and from stores by ``get_range``."""
    read: Counter[str] = Counter()
    pread, preadv, get_range = os.pread, os.preadv, RemoteStore.get_range

    def noted(data: bytes) -> bytes:
        read["files"] += len(data)
        return data

    def noted_count(count: int) -> int:
        read["files"] += count
        return count

    async def noted_range(self: RemoteStore, *arguments: Any, **options: Any) -> Any:
        data = await get_range(self, *arguments, **options)
        read["stores"] += len(data)
        read["requests"] += 1
        return data

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *arguments: noted(pread(*arguments)))
        patch.setattr(os, "preadv", lambda *arguments: noted_count(preadv(*arguments)))
        patch.setattr(RemoteStore, "get_range", noted_range)
        yield read


class PartPlanner:
    """A planner that reads parts of tensors into given ones."""

    def __init__(self, **targets: torch.Tensor) -> None:
        self.targets = targets
        self.committed: list[str] = []

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.targets[item.storage_index.fqn]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(item.storage_index.fqn)


def part(name: str, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> ReadItem:
    index, zero = MetadataIndex(name, torch.Size([0] * len(offsets))), torch.Size([0] * len(offsets))
    return ReadItem(LoadItemType.TENSOR, index, zero, index, torch.Size(offsets), torch.Size(lengths))


def read_parts(uri: str, items: list[ReadItem], planner: PartPlanner) -> None:
    reader = tierckpt.TierStorageReader(uri)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    reader.read_data(LoadPlan(items), planner)  # type: ignore[arg-type]
    assert sorted(planner.committed) == sorted(item.storage_index.fqn for item in items)
