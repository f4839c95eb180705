"""Sizes and durations as people read them."""

from __future__ import annotations


def human_bytes(size_bytes: float) -> str:
    """Return a size as people read it: ``512 B``, ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} PiB"


def human_seconds(seconds: float) -> str:
    """Return a duration in its largest fitting unit: ``12 s``, ``3.5 min``, ``2.0 h``, ``4.2 d``."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
