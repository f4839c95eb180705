"""Readable sizes, durations and lists, and the block size of a disk."""

from __future__ import annotations

from collections.abc import Sequence

DISK_BLOCK_BYTES = 4096
"""Block size of O_DIRECT."""


def round_up(size_bytes: int, to: int = DISK_BLOCK_BYTES) -> int:
    return -(-size_bytes // to) * to


def human_bytes(size_bytes: float) -> str:
    """Return ``512 B``, ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} PiB"


def human_seconds(seconds: float) -> str:
    """Return ``12 s``, ``3.5 min``, ``2.0 h``, ``4.2 d``."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def first_of(items: Sequence[str], count: int, separator: str = ", ") -> str:
    """Return the first ``count`` items, and the number of the others."""
    more = f" and {len(items) - count} more" if len(items) > count else ""
    return separator.join(items[:count]) + more
