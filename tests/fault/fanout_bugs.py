"""Mistakes put in on purpose, for the controls of test_fanout.py: each is made in a process of its own, by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def ownership_ignored() -> None:
    """Every node takes every chunk for its own, begins at the first, and does not care what others fetch just now."""
    from tierckpt.peer.fetch.peer_table import PeerTable
    from tierckpt.peer.fetch.scheduler import FetchScheduler

    real_plan, real_hear = FetchScheduler.plan, PeerTable.update

    def plan(self: Any, now: float = 0.0) -> None:
        self.chunk_owners = [self.table.me] * self.table.total
        real_plan(self, now)

    def hear(self: Any, name: str, now: float, **told: Any) -> None:
        real_hear(self, name, now, **told | {"fetching": None})

    FetchScheduler.plan, PeerTable.update = plan, hear  # type: ignore[method-assign]
    FetchScheduler.order_of = lambda self, name, chunks: chunks  # type: ignore[method-assign]
    FetchScheduler.store_slots = lambda self: self.tuning.slots  # type: ignore[method-assign]


def nothing_is_verified() -> None:
    """Neither who serves a chunk nor who gets it looks at its digest."""
    from tierckpt.cache import entry, partial_entry
    from tierckpt.peer import chunk_files, peer_client

    for module in (partial_entry, entry, peer_client):
        module.same_digest = lambda *_: True  # type: ignore[attr-defined]
    chunk_files.ChunkSource.verify = lambda self, file, index, at, digest: (
        digest
        or self.digest(  # type: ignore[method-assign]
            index, at.start // self.frozen.chunk_size_bytes, self.frozen.chunk_size_bytes
        )
    )


BUGS: dict[str, Callable[[], None]] = {
    "ownership ignored": ownership_ignored,
    "nothing is verified": nothing_is_verified,
}
