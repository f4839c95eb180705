"""Limits of the machine: raw O_DIRECT writes and warm memcpy, from one huge-page buffer.

    python bench/saving/limits.py PATH BYTES

writes BYTES to PATH each time a line arrives on stdin and answers with the seconds it took. Run as a separate process,
it is the disk load during which a training loop is timed. Needs the standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MiB = 1 << 20
WRITE_BYTES = 16 * MiB
WRITE_THREADS = 2
HUGE_PAGE_BYTES = 2 * MiB
BLOCK_BYTES = 4096

_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}


class Image:
    """A huge-page buffer, touched once so that copies and writes cause no page faults."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(1, -(-size_bytes // WRITE_BYTES)) * WRITE_BYTES
        self._map = mmap.mmap(-1, self.size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        offset = -begin % HUGE_PAGE_BYTES
        self.address = begin + offset
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            pass  # without huge pages the limit is lower for all rows
        # Random bytes: some storage writes repeated ones faster.
        noise = os.urandom(min(self.size_bytes, 4 * WRITE_BYTES))
        for begin in range(0, self.size_bytes, len(noise)):
            ctypes.memmove(self.address + begin, noise, min(len(noise), self.size_bytes - begin))
        self.view = memoryview(self._map)[offset : offset + self.size_bytes]

    def piece(self, offset: int, size_bytes: int) -> memoryview:
        """Return the bytes at ``offset`` of a file that may be longer than the buffer, which repeats."""
        begin = offset % self.size_bytes
        return self.view[begin : begin + size_bytes]


def raw_write(path: Path, image: Image, size_bytes: int) -> float:
    """Write ``size_bytes``, rounded up to a block, and fsync: fallocate, 16 MiB requests, two threads. Returns seconds.

    Raises OSError if the file system refuses O_DIRECT; check with ``takes_direct`` first.
    """
    size_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
    begun = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(file, 0, size_bytes)
        offsets = _shared(iter(range(0, size_bytes, WRITE_BYTES)))

        def write() -> None:
            while (offset := offsets()) is not None:
                piece = image.piece(offset, min(WRITE_BYTES, size_bytes - offset))
                if os.pwrite(file, piece, offset) != len(piece):
                    raise OSError(errno.EIO, "short write", str(path))

        with ThreadPoolExecutor(WRITE_THREADS) as pool:
            for done in [pool.submit(write) for _ in range(WRITE_THREADS)]:
                done.result()
        os.fsync(file)
    finally:
        os.close(file)
    return time.perf_counter() - begun


def raw_matches(path: Path, image: Image, size_bytes: int) -> bool:
    """Return whether the file holds the bytes of ``raw_write``."""
    with path.open("rb") as file:
        for offset in range(0, size_bytes, WRITE_BYTES):
            piece = image.piece(offset, min(WRITE_BYTES, size_bytes - offset))
            if file.read(len(piece)) != piece:
                return False
    return True


def memcpy(image: Image, sources: Sequence[tuple[int, int]], threads: int) -> float:
    """Copy ``sources`` (address, size) consecutively into ``image`` with ``threads`` threads. Returns seconds."""
    pieces = [
        (target + at, source + at, min(WRITE_BYTES, size_bytes - at))
        for (source, size_bytes), target in zip(sources, _targets(image, sources), strict=True)
        for at in range(0, size_bytes, WRITE_BYTES)
    ]
    shares = [pieces[index * len(pieces) // threads : (index + 1) * len(pieces) // threads] for index in range(threads)]

    def copy(share: list[tuple[int, int, int]]) -> None:
        for target, source, size_bytes in share:
            ctypes.memmove(target, source, size_bytes)  # releases the GIL

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(abs, range(threads)))  # start the threads before the timing
        begun = time.perf_counter()
        list(pool.map(copy, shares))
        return time.perf_counter() - begun


def _targets(image: Image, sources: Sequence[tuple[int, int]]) -> Iterator[int]:
    used = 0
    for _, size_bytes in sources:
        yield image.address + used
        used += size_bytes
    if used > image.size_bytes:
        raise ValueError(f"{used} bytes do not fit in an image of {image.size_bytes}")


def _shared(offsets: Iterator[int]) -> Callable[[], int | None]:
    lock = threading.Lock()

    def take() -> int | None:
        with lock:
            return next(offsets, None)

    return take


def filesystem_type(path: Path) -> str:
    """Return the type of the file system that holds ``path``, or "" if unknown."""
    best, kind = "", ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()[4].replace("\\040", " ")
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def is_memory(path: Path) -> bool:
    return filesystem_type(path) in _MEMORY_FILESYSTEMS


def takes_direct(directory: Path) -> bool:
    """Return whether files in ``directory`` can be written with O_DIRECT."""
    probe = directory / "probe"
    image = Image(WRITE_BYTES)
    try:
        raw_write(probe, image, BLOCK_BYTES)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def main() -> None:
    path, size_bytes = Path(sys.argv[1]), int(sys.argv[2])
    image = Image(min(size_bytes, 4 * WRITE_BYTES))
    print("ready", flush=True)
    for _ in sys.stdin:
        print(raw_write(path, image, size_bytes), flush=True)
        path.unlink()


if __name__ == "__main__":
    main()
