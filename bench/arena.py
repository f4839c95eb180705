"""Disk write speed from each kind of memory of docs/adr/0005-arena-memory.md.

    python bench/arena.py [--directory DIR] [--size-mib 1024] [--rounds 5]

Each row writes the same bytes to a new file: fallocate, O_DIRECT in pieces of 16 MiB from two threads, fsync. Only the
source memory differs. Rows alternate, with another first row in each round, so that a disk that slows down affects all
equally; the first round is a warm-up. Two controls consist of 4 KiB pages touched in random order: the worst case.
"bounced" first copies each piece from such shared memory into a private huge-page buffer. "run" is the average KiB of
contiguous physical memory, which is what the disk sees of 4 KiB pages (root only).

Missing kinds are named with the command that provides them; the program changes nothing. Prints a table and writes
bench/out/arena.json.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import platform
import queue
import random
import resource
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tierckpt.arena import pages
from tierckpt.arena.memory import Kind, Memory
from tierckpt.errors import CapacityError

MiB = 1 << 20
PIECE_BYTES = 16 * MiB
OUT = Path(__file__).parent / "out" / "arena.json"
MADV_NOHUGEPAGE = 15

Pass = Callable[[int], None]  # writes everything to this descriptor


@dataclass
class Row:
    """One kind of memory: whether it uses huge pages, and the times of each round."""

    name: str
    huge: bool
    run_kib: float | None
    wall_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def bytes_per_second(self, size_bytes: int) -> float:
        return size_bytes / statistics.median(self.wall_seconds)


def on_threads(count: int, size_bytes: int, work: Callable[[int, int], None]) -> None:
    """Call ``work(offset, thread)`` for each piece on ``count`` threads. Raises the first error of a thread."""
    offsets: queue.SimpleQueue[int] = queue.SimpleQueue()
    for offset in range(0, size_bytes, PIECE_BYTES):
        offsets.put(offset)
    errors: list[BaseException] = []

    def run(thread: int) -> None:
        try:
            while not errors:
                work(offsets.get_nowait(), thread)
        except queue.Empty:
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def write_at(fd: int, piece: memoryview, offset: int) -> None:
    if os.pwrite(fd, piece, offset) != len(piece):
        raise OSError("short write: is the disk full?")


def straight(source: memoryview, threads: int) -> Pass:
    def write(fd: int) -> None:
        on_threads(threads, len(source), lambda at, _: write_at(fd, source[at : at + PIECE_BYTES], at))

    return write


def bounced(source: memoryview, slots: list[Memory]) -> Pass:
    start = ctypes.addressof(ctypes.c_char.from_buffer(source))

    def write(fd: int) -> None:
        def piece(offset: int, thread: int) -> None:
            ctypes.memmove(slots[thread].address, start + offset, PIECE_BYTES)  # without the GIL
            write_at(fd, slots[thread].view, offset)

        on_threads(len(slots), len(source), piece)

    return write


def of_small_pages(size_bytes: int, *, shared: bool) -> memoryview:
    """Return control memory without huge pages, its pages scattered as on a node with a long uptime."""
    fd = os.memfd_create("bench") if shared else -1
    try:
        if shared:
            os.ftruncate(fd, size_bytes)
        mapped = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    finally:
        if shared:
            os.close(fd)
    mapped.madvise(MADV_NOHUGEPAGE)
    view, order = memoryview(mapped), list(range(0, size_bytes, mmap.PAGESIZE))
    random.shuffle(order)  # sequential touches would get adjacent pages
    for offset in order:
        view[offset] = 1
    return view


def physical_run_kib(view: memoryview) -> float | None:
    """Return the average KiB of contiguous physical memory, or None if the kernel does not show it."""
    address, count = ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        entries: tuple[int, ...] = struct.unpack(f"{count}Q", file.read(count * 8))
    frames = [entry & ((1 << 55) - 1) for entry in entries]
    if not any(frames):
        return None  # the kernel shows page frames to root only
    jumps = sum(after != before + 1 for before, after in itertools.pairwise(frames))
    return len(view) / (jumps + 1) / 1024


def candidates(size_bytes: int, block: bytes, stack: contextlib.ExitStack) -> list[tuple[Row, Pass]]:
    """Return every row that this machine can measure, its memory filled with copies of ``block``."""
    found: list[tuple[Row, Pass]] = []

    def row(name: str, huge: bool, view: memoryview) -> Row:
        for offset in range(0, size_bytes, PIECE_BYTES):
            view[offset : offset + PIECE_BYTES] = block
        return Row(name, huge, physical_run_kib(view))

    for kind in Kind:
        try:
            memory = stack.enter_context(Memory.allocate(size_bytes, kind=kind))
        except CapacityError as error:
            print(f"not measured: {error}", file=sys.stderr)
            continue
        found.append((row(f"{kind}", memory.huge, memory.view), straight(memory.view, 2)))
    private, shm = of_small_pages(size_bytes, shared=False), of_small_pages(size_bytes, shared=True)
    found.append((row("private, scattered 4 KiB pages (control)", False, private), straight(private, 2)))
    found.append((row("shm, scattered 4 KiB pages (control)", False, shm), straight(shm, 2)))
    for count in (2, 3):
        slots = [stack.enter_context(Memory.allocate(PIECE_BYTES)) for _ in range(count)]
        name = f"the same shm, bounced through private slots, {count} threads"
        found.append((Row(name, all(slot.huge for slot in slots), None), bounced(shm, slots)))
    return found


def timed(write: Pass, path: Path, size_bytes: int) -> tuple[float, float]:
    """Return the wall seconds until the file is durable, and the CPU seconds of this process for it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    begun = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        write(fd)
        os.fsync(fd)
    finally:
        os.close(fd)
    wall_seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    return wall_seconds, after.ru_utime - usage.ru_utime + after.ru_stime - usage.ru_stime


def check(path: Path, size_bytes: int, block: bytes) -> None:
    """Raise if a row wrote wrong bytes."""
    with path.open("rb") as file:
        pieces = [file.read(PIECE_BYTES) == block for _ in range(0, size_bytes, PIECE_BYTES)]
        if not all(pieces) or file.read(1):
            raise SystemExit(f"{path}: not the bytes that were to be written")


def print_table(rows: list[Row], size_bytes: int) -> None:
    print("| memory | huge pages | run | GB/s, median | min to max | CPU-s per GiB | time, against private |")
    print("|---|---|---|---|---|---|---|")
    reference = statistics.median(rows[0].wall_seconds)
    for row in rows:
        slowest, fastest = size_bytes / max(row.wall_seconds) / 1e9, size_bytes / min(row.wall_seconds) / 1e9
        cpu_seconds = statistics.median(row.cpu_seconds) * (1 << 30) / size_bytes
        print(
            f"| {row.name} | {'yes' if row.huge else 'no'} "
            f"| {'-' if row.run_kib is None else f'{row.run_kib:.0f} KiB'} "
            f"| {row.bytes_per_second(size_bytes) / 1e9:.2f} | {slowest:.2f} to {fastest:.2f} | {cpu_seconds:.3f} "
            f"| {statistics.median(row.wall_seconds) / reference:.2f}x |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=OUT.parent, help="on the disk to measure (not tmpfs)")
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    size_bytes = -(-arguments.size_mib * MiB // PIECE_BYTES) * PIECE_BYTES
    OUT.parent.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory)))
        block = os.urandom(PIECE_BYTES)
        measured = candidates(size_bytes, block, stack)
        for number in range(arguments.rounds + 1):
            first = number % len(measured)
            for row, write in measured[first:] + measured[:first]:
                path = directory / "file"
                wall_seconds, cpu_seconds = timed(write, path, size_bytes)
                if number == 0:
                    check(path, size_bytes, block)
                else:
                    row.wall_seconds.append(wall_seconds)
                    row.cpu_seconds.append(cpu_seconds)
                path.unlink()
    rows = [row for row, _ in measured]
    print_table(rows, size_bytes)
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}
    body = {**machine, "size_bytes": size_bytes, "piece_bytes": PIECE_BYTES, "advice": pages.advice()}
    OUT.write_text(json.dumps({**body, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    print(f"written to {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}", file=sys.stderr)


if __name__ == "__main__":
    main()
