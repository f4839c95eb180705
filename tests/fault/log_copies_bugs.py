"""Behaviour of agents in test_log_copies.py: stop within a frame, or count a frame before it is whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from tests.servers.nodes import newest_first
from tierckpt.peer.peer_catalog import PeerCatalog
from tierckpt.replication import log_copies
from tierckpt.save import log_segments

PIECES = "TIERCKPT_TEST_LOG_PIECES"


def stall() -> None:
    """Stop the copy of a log after ``PIECES`` pieces of a block each; a frame has several."""
    newest_first()
    log_copies.PIECE_BYTES = 4096
    original, left = PeerCatalog.segment, int(os.environ[PIECES])

    async def segment(self: PeerCatalog, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            await asyncio.sleep(3600)
        return await original(self, *arguments)

    PeerCatalog.segment = segment  # type: ignore[method-assign]


def counted_before_it_is_whole() -> None:
    """Seeded bug: a frame counts once its header is present."""
    stall()
    original = log_segments._place  # private: the bug is in it

    def place(segment: Any, file: int, at: int, size_bytes: int, previous: str) -> Any:
        return original(segment, file, at, size_bytes + (1 << 30), previous)

    def pieces(*_: Any, **__: Any) -> Any:
        return iter(())

    log_segments._place, log_segments.verified_pieces = place, pieces  # type: ignore[assignment]  # private: seeded


BUGS: dict[str, Callable[[], None]] = {"stall": stall, "counted before it is whole": counted_before_it_is_whole}
