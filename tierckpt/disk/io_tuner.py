"""Measures on real loads and flushes how a device is read and written fastest. No test I/O.

Large flushes try each shape, then use the cheapest of those as good as the best; now and then another one is retried.
The first large load from a device tries each mode on a part of its bytes, for all loads until the node reboots.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..config import Settings
from ..errors import TierckptError
from ..format.layout import model_read_modes, read_modes
from ..telemetry import logger
from .durable import durable_write, make_dirs, read_record
from .file_lock import try_lock
from .local_root import use_local_root
from .processes import boot_id

log = logger("restore")

MiB = 1 << 20

EQUAL_RATE_SHARE = 0.95
"""Share of the fastest rate that counts as equal (noise)."""

T = TypeVar("T")


def cheapest(rates: Mapping[T, float]) -> T:
    """Return the first of ``rates``, ordered by processor time, that is as good as the fastest."""
    fastest = max(rates.values())
    return next(one for one, rate in rates.items() if rate >= EQUAL_RATE_SHARE * fastest)


MEASURED_BYTES_MIN = 64 * MiB
TRIES_MIN = 1
SHAPE_SAMPLES_MAX = 5
SHAPE_RETRY_INTERVAL = 8


@dataclass(frozen=True, slots=True)
class IoShape:
    """Threads, how many of them may write at a time, and the bytes of one write.

    With one more thread than writes the disk never waits, at the least processor time.
    """

    threads: int
    size_bytes: int
    writes: int = 0

    @property
    def writes_max(self) -> int:
        return self.writes or self.threads


SHAPES = (IoShape(2, 8 * MiB, 1), IoShape(3, 8 * MiB, 2), IoShape(4, 16 * MiB, 3), IoShape(8, 8 * MiB))
"""Ordered by processor time. Measured: docs/adr/0007-flush.md."""

WRITE_BYTES_MAX = max(shape.size_bytes for shape in SHAPES)
WRITE_THREADS_MAX = max(shape.threads for shape in SHAPES)


def segment_bytes(chunk_size_bytes: int, io_size_bytes: int) -> int:
    return chunk_size_bytes * max(1, round(io_size_bytes / chunk_size_bytes))


@dataclass
class WriteTuner:
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
            if self.flushes % SHAPE_RETRY_INTERVAL == 0:
                return self.shapes[self.flushes // SHAPE_RETRY_INTERVAL % len(self.shapes)]
            return self._best()

    def learn(self, shape: IoShape, size_bytes: int, seconds: float) -> None:
        """Small flushes say more about the caller than about the device."""
        if size_bytes < MEASURED_BYTES_MIN or seconds <= 0:
            return
        with self._lock:
            self._rates.setdefault(shape, deque(maxlen=SHAPE_SAMPLES_MAX)).append(size_bytes / seconds)

    def _best(self) -> IoShape:
        if not self._rates:
            return self.shapes[0]
        medians = {shape: statistics.median(self._rates[shape]) for shape in self.shapes if shape in self._rates}
        return cheapest(medians)


BUFFERED_GAIN_MIN = 1.25
"""The page cache costs five times the processor time, and evicts other data."""


@dataclass(frozen=True, slots=True)
class ReadMode:
    """Read with O_DIRECT (``direct``) or with readahead through the page cache, on several threads.

    ``in_place``: without buffers. ``ranks``: processes of this node that read the same files now; 0: unknown.
    """

    direct: bool
    threads: int
    in_place: bool = False
    ranks: int = 0

    @property
    def mode(self) -> str:
        return "straight" if self.in_place else "direct" if self.direct else "buffered"

    def __str__(self) -> str:
        return f"{self.mode}/{self.threads}"

    @classmethod
    def parse(cls, text: str) -> ReadMode:
        mode, _, threads = text.partition("/")
        if mode not in ("direct", "buffered", "straight") or not 1 <= int(threads) <= 256:
            raise ValueError(f"{text!r} is not a read mode")
        return cls(mode != "buffered", int(threads), mode == "straight")


READ_MODES = (ReadMode(True, 8), ReadMode(False, 4))
"""Ordered by processor time. Eight threads keep a disk busy while some digest; readahead needs fewer."""

MODEL_READ_MODES = (ReadMode(True, 8, in_place=True), ReadMode(True, 12), ReadMode(False, 4))

SHARED_READ_MODES = (ReadMode(False, 4),)
"""The page cache reads each byte of a model file once for several processes."""

READ_THREADS_MAX = max(way.threads for way in READ_MODES + MODEL_READ_MODES)


class ReadTuner:
    """Chooses how to read checkpoints, or model files, from each device. Thread-safe."""

    def __init__(self, settings: Settings, modes: tuple[ReadMode, ...] = READ_MODES) -> None:
        use_local_root(settings)
        self.modes = modes
        self.path = (model_read_modes if modes == MODEL_READ_MODES else read_modes)(settings.local_root)
        """Valid until the node reboots."""
        self._known: dict[str, ReadMode] = {}
        self._lock = threading.Lock()

    def mode(self, device: str) -> ReadMode:
        if len(self.modes) < 2:
            return self.modes[0]
        with self._lock:
            if device not in self._known and (found := self._recorded().get(device)) is not None:
                self._known[device] = found
            return self._known.get(device, self.modes[0])

    def is_known(self, device: str) -> bool:
        self.mode(device)
        return device in self._known or len(self.modes) < 2

    @contextlib.contextmanager
    def trial(self) -> Iterator[bool]:
        """Yield True if no other process of the node tries now: two would measure each other."""
        with contextlib.ExitStack() as stack:
            try:
                make_dirs(self.path.parent)
                is_ours = bool(stack.enter_context(try_lock(self.path.with_suffix(".lock"))))
            except (OSError, TierckptError) as error:
                log.debug("nothing is tried: %s", error)
                is_ours = False
            yield is_ours

    def decide(self, device: str, rates: Mapping[ReadMode, float], where: str) -> ReadMode:
        mode = best(rates)
        with self._lock:
            self._known[device] = mode
        found = ", ".join(f"{tried} {rate / 1e9:.2f} GB/s" for tried, rate in rates.items())
        log.info("%s is read %s from now on (measured: %s)", where, mode, found)
        self._record(device, mode, rates)
        return mode

    def _recorded(self) -> dict[str, ReadMode]:
        modes = {}
        for device, entry in read_record(self.path).items():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                modes[device] = ReadMode.parse(entry["mode"])
        return modes

    def _record(self, device: str, mode: ReadMode, rates: Mapping[ReadMode, float]) -> None:
        entry = {"mode": str(mode), "bytes_per_second": {str(tried): round(rate) for tried, rate in rates.items()}}
        boot = device.rpartition(" ")[2]
        kept = {known: value for known, value in read_record(self.path).items() if known.endswith(boot)}
        try:
            durable_write(self.path, json.dumps({**kept, device: entry}, indent=1).encode())
        except (OSError, TierckptError) as error:
            log.debug("%s: %s", self.path, error)


def best(rates: Mapping[ReadMode, float]) -> ReadMode:
    """The page cache must be faster by a quarter."""
    worth = {mode: rate if mode.direct else rate / BUFFERED_GAIN_MIN for mode, rate in rates.items()}
    return cheapest(worth)


def device_of(file: int) -> str:
    mount = boot = "?"
    with contextlib.suppress(OSError):
        boot = boot_id()
        lines = Path(f"/proc/self/fdinfo/{file}").read_text().splitlines()
        mount = next((line.split()[1] for line in lines if line.startswith("mnt_id:")), "?")
    status = os.fstat(file).st_dev
    return f"{os.major(status)}:{os.minor(status)} {mount} {boot}"


tuners: dict[tuple[Path, tuple[ReadMode, ...]], ReadTuner] = {}
_write_tuners: dict[int, WriteTuner] = {}


def read_tuner_for(settings: Settings, modes: tuple[ReadMode, ...] = READ_MODES) -> ReadTuner:
    return tuners.setdefault((settings.local_root, modes), ReadTuner(settings, modes))


def write_tuner_for(directory: Path) -> WriteTuner:
    return _write_tuners.setdefault(directory.stat().st_dev, WriteTuner(SHAPES))


def _reset_after_fork() -> None:
    tuners.clear()
    _write_tuners.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
