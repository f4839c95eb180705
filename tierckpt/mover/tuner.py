"""What a device likes, found out while saving: how many writes at a time, and how large.

Every flush that is large enough to tell is a measurement. The first ones try each shape once or twice, the rest use the
best median, and now and then another shape gets a second chance, because devices and neighbours change. No test writes:
the only bytes on the disk are checkpoints.
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
TRIES_MIN = 2
TRIES_KEPT = 5
RETRY_EVERY = 16


@dataclass(frozen=True, slots=True)
class IoShape:
    """Writes at a time, and bytes of each."""

    threads: int
    size_bytes: int


SHAPES = (IoShape(3, 16 * MiB), IoShape(2, 16 * MiB), IoShape(4, 8 * MiB), IoShape(8, 8 * MiB))
ONE_AT_A_TIME = IoShape(1, 16 * MiB)
"""Tried too where the kernel says that the disk turns (virtual ones say so too): several writers may make it seek."""


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
        return max(self._rates, key=lambda shape: statistics.median(self._rates[shape]))


_tuners: dict[tuple[int, int], Tuner] = {}
_lock = threading.Lock()


def tuner_for(directory: Path, threads_max: int) -> Tuner:
    """The process's tuner for the device that holds ``directory``, with at most ``threads_max`` writes at a time."""
    device = directory.stat().st_dev
    with _lock:
        key = (device, threads_max)
        if key not in _tuners:
            shapes = (*SHAPES, ONE_AT_A_TIME) if _turns(device) else SHAPES
            fitting = tuple(shape for shape in shapes if shape.threads <= threads_max)
            _tuners[key] = Tuner(fitting or (IoShape(threads_max, 16 * MiB),))
        return _tuners[key]


def _turns(device: int) -> bool:
    """True for a rotating disk. Partitions have no queue of their own: their disk's is one directory up."""
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (block / "queue", block / ".." / "queue"):
        try:
            return (queue / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return False
