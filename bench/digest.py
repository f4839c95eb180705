"""Cost of the digests of docs/adr/0006-digest-xxh3.md on this machine.

    python bench/digest.py [--buffer-mib 256] [--passes 3]

Speed is bytes per second of the hashing thread's CPU time, which other work on the machine affects little. To see
whether a digest releases the GIL, a second Python thread counts during one call over the whole buffer; its speed is
compared with its speed during a sleep. A control that holds the GIL is measured the same way. Prints a table and writes
bench/out/digest.json.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MiB = 1 << 20
GiB = 1 << 30
CHUNK_BYTES = 8 * MiB
OUT = Path(__file__).parent / "out" / "digest.json"

Digest = Callable[[bytes], Any]


@dataclass(frozen=True)
class Row:
    """Costs of one digest. Speeds are bytes per second of CPU time of one core."""

    name: str
    version: str
    bits: int
    cryptographic: bool
    one_thread_bytes_per_cpu_second: float
    one_thread_spread: float
    two_threads_bytes_per_cpu_second: float
    two_threads_bytes_per_second: float
    other_thread_share: float

    @property
    def cpu_seconds_per_gib(self) -> float:
        return GiB / self.one_thread_bytes_per_cpu_second


def candidates() -> list[tuple[str, str, int, bool, Digest]]:
    """Return name, version, bits, cryptographic, function. Missing packages are reported and skipped."""
    found: list[tuple[str, str, int, bool, Digest]] = []

    def add(package: str, name: str, bits: int, cryptographic: bool, load: Callable[[], Digest]) -> None:
        try:
            found.append((name, importlib.metadata.version(package), bits, cryptographic, load()))
        except ImportError:
            print(f"not measured: {name} (pip install {package})", file=sys.stderr)

    add("blake3", "blake3", 256, True, _blake3)
    add("xxhash", "xxh3_128", 128, False, _xxh3_128)
    add("google-crc32c", "crc32c", 32, False, _crc32c)
    add("zlib-ng", "crc32, zlib-ng", 32, False, _crc32_zlib_ng)
    add("isal", "crc32, isal", 32, False, _crc32_isal)
    found.append(("crc32, zlib", zlib.ZLIB_RUNTIME_VERSION, 32, False, zlib.crc32))
    found.append(
        ("sha256", f"hashlib {platform.python_version()}", 256, True, lambda data: hashlib.sha256(data).digest())
    )
    return found


def _blake3() -> Digest:
    from blake3 import blake3

    return lambda chunk: blake3(chunk).digest()


def _xxh3_128() -> Digest:
    from xxhash import xxh3_128

    def digest(
        chunk: bytes,
    ) -> bytes:  # by update, as tierckpt does: before xxhash 4 the one-shot function holds the GIL
        state = xxh3_128()
        state.update(chunk)
        return state.digest()

    return digest


def _crc32c() -> Digest:
    import google_crc32c

    return google_crc32c.value


def _crc32_zlib_ng() -> Digest:
    from zlib_ng import zlib_ng

    return zlib_ng.crc32


def _crc32_isal() -> Digest:
    from isal import isal_zlib

    return isal_zlib.crc32


def cpu_seconds(digest: Digest, chunks: Sequence[bytes]) -> float:
    """CPU seconds of the calling thread for one pass over ``chunks``."""
    begun = time.thread_time()
    for chunk in chunks:
        digest(chunk)
    return time.thread_time() - begun


def two_threads(digest: Digest, chunks: Sequence[bytes]) -> tuple[float, float]:
    """Return CPU seconds of both threads together, and wall seconds, for one pass shared by two threads."""
    spent: list[float] = []
    halves = (chunks[::2], chunks[1::2])
    threads = [threading.Thread(target=lambda half=half: spent.append(cpu_seconds(digest, half))) for half in halves]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(spent), time.perf_counter() - begun


def other_thread_share(digest: Digest, buffer: bytes, passes: int) -> float:
    """Share of its undisturbed speed that a second Python thread keeps during one call of ``digest``.

    0 if the call holds the GIL. The best of ``passes``, because other load can only lower it.
    """
    count, stop = 0, threading.Event()

    def spin() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1

    def counted_per_second(work: Callable[[], object]) -> float:
        before, begun = count, time.perf_counter()
        work()
        return (count - before) / (time.perf_counter() - begun)

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        time.sleep(0.05)
        shares = []
        for _ in range(passes):
            undisturbed = counted_per_second(lambda: time.sleep(0.1))
            shares.append(counted_per_second(lambda: digest(buffer)) / undisturbed)
    finally:
        stop.set()
        thread.join()
    return min(1.0, max(shares))


def measure(
    name: str,
    version: str,
    bits: int,
    cryptographic: bool,
    digest: Digest,
    chunks: list[bytes],
    buffer: bytes,
    passes: int,
) -> Row:
    total_bytes = sum(map(len, chunks))
    cpu_seconds(digest, chunks[:2])  # the first call loads code and picks the instruction set
    one = [total_bytes / cpu_seconds(digest, chunks) for _ in range(passes)]
    both = [two_threads(digest, chunks) for _ in range(passes)]
    return Row(
        name,
        version,
        bits,
        cryptographic,
        statistics.median(one),
        (max(one) - min(one)) / statistics.median(one),
        statistics.median(total_bytes / cpu for cpu, _ in both),
        statistics.median(total_bytes / wall for _, wall in both),
        other_thread_share(digest, buffer, 2 * passes),
    )


def print_table(rows: list[Row], control_share: float) -> None:
    print("| digest | bits | GB/s per core, 1 thread | 2 threads | CPU-s per GiB | a second Python thread runs at |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.name} ({row.version}) | {row.bits}{', cryptographic' if row.cryptographic else ''} "
            f"| {row.one_thread_bytes_per_cpu_second / 1e9:.1f} | {row.two_threads_bytes_per_cpu_second / 1e9:.1f} "
            f"| {row.cpu_seconds_per_gib:.3f} | {row.other_thread_share:.0%} |"
        )
    print(f"| control: bytes.count, holds the GIL | - | - | - | - | {control_share:.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffer-mib", type=int, default=256, help="bytes hashed in one pass; larger than the cache")
    parser.add_argument("--passes", type=int, default=3)
    arguments = parser.parse_args()
    block = os.urandom(CHUNK_BYTES)
    # Different chunks at different addresses, so that the buffer does not stay in the cache.
    chunks = [bytes([index % 256]) + block[1:] for index in range(max(2, arguments.buffer_mib * MiB // CHUNK_BYTES))]
    buffer = b"".join(chunks)
    rows = [measure(*candidate, chunks, buffer, arguments.passes) for candidate in candidates()]
    control_share = other_thread_share(lambda data: data.count(0), buffer, arguments.passes)
    print_table(rows, control_share)
    OUT.parent.mkdir(exist_ok=True)
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    body = {"chunk_bytes": CHUNK_BYTES, "buffer_bytes": sum(map(len, chunks)), **machine}
    OUT.write_text(
        json.dumps({**body, "control_share": control_share, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
    )
    print(f"written to {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}", file=sys.stderr)


if __name__ == "__main__":
    main()
