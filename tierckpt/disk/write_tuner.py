"""What a device likes, found out while saving: how many writes at a time, and how large.

Every flush that is large enough to tell is a measurement. The first ones try each shape once, the rest use the
cheapest of those that are as good as the best, and now and then another shape gets a second chance, because devices and
neighbours change. No test writes: the only bytes on the disk are checkpoints.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

MiB = 1 << 20

MEASURED_BYTES_MIN = 64 * MiB
TRIES_MIN = 1
TRIES_KEPT = 5
RETRY_EVERY = 8


@dataclass(frozen=True, slots=True)
class IoShape:
    """Threads, how many of them may write at a time, and the bytes of one write.

    A thread that does not write prepares its next segment: with one more thread than writes the disk never waits, and
    no processor is taken from training for nothing.
    """

    threads: int
    size_bytes: int
    writes: int = 0

    @property
    def writes_max(self) -> int:
        return self.writes or self.threads


SHAPES = (IoShape(2, 8 * MiB, 1), IoShape(3, 8 * MiB, 2), IoShape(4, 16 * MiB, 3), IoShape(8, 8 * MiB))
"""From the cheapest to the dearest in processor time. Measured: docs/adr/0007-flush.md."""

WRITE_BYTES_MAX = max(shape.size_bytes for shape in SHAPES)
WRITE_THREADS_MAX = max(shape.threads for shape in SHAPES)


def segment_bytes(chunk_size_bytes: int, io_size_bytes: int) -> int:
    """The size of one write: as many whole chunks as make about ``io_size_bytes``."""
    return chunk_size_bytes * max(1, round(io_size_bytes / chunk_size_bytes))


AS_GOOD = 0.95
"""A shape as fast as this part of the fastest is as good: the difference is noise, and cheaper is better."""


@dataclass
class Tuner:
    """Chooses the shape of the next flush to one device. Thread-safe."""

    shapes: tuple[IoShape, ...]
    flushes: int = 0
    _rates: dict[IoShape, deque[float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, size_bytes: int) -> IoShape:
        with self._lock:
            if size_bytes < MEASURED_BYTES_MIN:
                return self._best()
            self.flushes += 1
            fewest = min(self.shapes, key=lambda shape: len(self._rates.get(shape, ())))
            if len(self._rates.get(fewest, ())) < TRIES_MIN:
                return fewest
            if self.flushes % RETRY_EVERY == 0:
                return self.shapes[self.flushes // RETRY_EVERY % len(self.shapes)]
            return self._best()

    def learn(self, shape: IoShape, size_bytes: int, seconds: float) -> None:
        """Note how a flush went. Small ones say more about the caller than about the device."""
        if size_bytes < MEASURED_BYTES_MIN or seconds <= 0:
            return
        with self._lock:
            self._rates.setdefault(shape, deque(maxlen=TRIES_KEPT)).append(size_bytes / seconds)

    def _best(self) -> IoShape:
        if not self._rates:
            return self.shapes[0]
        medians = {shape: statistics.median(rates) for shape, rates in self._rates.items()}
        fastest = max(medians.values())
        return next(shape for shape in self.shapes if medians.get(shape, 0.0) >= AS_GOOD * fastest)


_tuners: dict[int, Tuner] = {}
_lock = threading.Lock()


def _start_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _tuners.clear()


os.register_at_fork(after_in_child=_start_anew)


def tuner_for(directory: Path) -> Tuner:
    """The process's tuner for the device that holds ``directory``."""
    device = directory.stat().st_dev
    with _lock:
        return _tuners.setdefault(device, Tuner(SHAPES))
