"""Which files this process has open: only those that a test names, as other threads and the collector close theirs."""

import os
from pathlib import Path


def open_files(start: Path | str) -> dict[int, str]:
    """Yield each descriptor of a file with a name that begins with ``start`` (a directory, or a memory name)."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        except FileNotFoundError:  # closed since the listing, as the listing's own is
            continue
        if name.startswith(str(start)):
            found[int(descriptor)] = name
    return found
