"""The block that O_DIRECT reads and writes in."""

from __future__ import annotations

BLOCK_BYTES = 4096


def round_up(value: int, to: int = BLOCK_BYTES) -> int:
    return -(-value // to) * to
