"""``Flushed``: name, size and digests of a shard file that has been written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a shard has become."""

    path: Path
    size_bytes: int
    digests: tuple[str, ...]
    blocks: bytes = b""
    """The digests of the blocks of all chunks (``manifest.blocks_of``)."""
