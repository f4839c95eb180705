"""Seeded bugs for the controls of test_fanout.py; a process plants one by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def ownership_ignored() -> None:
    """Every node owns every chunk, begins with the first, and ignores the chunks that others fetch."""
    from tierckpt.peer.fetch.peer_table import PeerTable
    from tierckpt.peer.fetch.scheduler import FetchScheduler

    real_plan, real_update = FetchScheduler.plan, PeerTable.update

    def plan(self: Any, now: float = 0.0) -> None:
        self.chunk_owners = [self.table.me] * self.table.total
        real_plan(self, now)

    def update(self: Any, name: str, now: float, **fields: Any) -> None:
        real_update(self, name, now, **fields | {"fetching": None})

    FetchScheduler.plan, PeerTable.update = plan, update  # type: ignore[method-assign]
    FetchScheduler.order_of = lambda self, name, chunks: chunks  # type: ignore[method-assign]
    FetchScheduler.store_slots = lambda self: self.tuning.slots  # type: ignore[method-assign]


def no_verification() -> None:
    """Neither the server of a chunk nor its client checks the digest."""
    from tierckpt.cache import entry, partial_entry
    from tierckpt.peer import chunk_files, peer_client

    for module in (partial_entry, entry, peer_client):
        module.same_digest = lambda *_: True  # type: ignore[attr-defined]
    chunk_files.ChunkSource.verify = lambda self, _, index, chunk: self.digest(index, chunk)  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {"ownership ignored": ownership_ignored, "no verification": no_verification}
