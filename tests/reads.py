"""Bytes read by a load: by our own telemetry, and by the kernel's counters."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

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
