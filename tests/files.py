"""Files of a test: what a directory holds, damage to one of them, and a small file system of memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def contents(directory: Path) -> dict[str, bytes]:
    """Return the files below ``directory`` by their relative names, without those of tierckpt and huggingface_hub."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not {".tierckpt", ".cache"} & {*path.relative_to(directory).parts}
    }


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file. A hard link is broken, so that no other copy is damaged."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.unlink()
    path.write_bytes(data)


@contextmanager
def tmpfs(place: Path, options: str) -> Iterator[Path]:
    """Mount a file system of memory on ``place``. Needs root."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
