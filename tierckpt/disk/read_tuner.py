"""How a device likes to be read: past the page cache, or through it, into place or through buffers. Found out while
loading.

The first large load from a device tries each way on a part of its own bytes, and goes on in the best. What was found is
kept under the local root and serves every later load of the node, until it boots again. What ``disk/write_tuner.py``
is for
writes: no test reads, and a load that cannot tell (small, or its bytes are in memory) teaches nothing.

Chunks of a checkpoint are read into buffers, to be verified there. Model files are verified where they end, so there
is one way more for them: straight into the tensors. That copies nothing, and yet is not always the fastest: the few
buffers stay in the processor's caches, which a disk, or a hypervisor that copies what the disk has, may fill faster
than memory.

Source: the order of the ways is that of their cost in processor time, measured in docs/internals/load.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..config import Settings
from ..errors import TierckptError
from ..format.layout import model_read_ways, read_ways
from ..telemetry import logger
from ..types import Json
from .durable import durable_write, make_dirs, read_whole
from .file_lock import try_lock
from .local_root import use_local_root

log = logger("restore")

AS_GOOD = 0.95
"""A way as fast as this part of the fastest is as good: the difference is noise, and the cheaper is better."""

BUFFERED_GAIN_MIN = 1.25
"""How much faster the page cache must be: it costs five times the processor time, and throws out what lies there."""


@dataclass(frozen=True, slots=True)
class ReadMode:
    """Read with O_DIRECT (``direct``) or with readahead through the page cache, by so many threads.

    ``straight``: into the memory that is to have the bytes, which else are copied there from small buffers.
    """

    direct: bool
    threads: int
    straight: bool = False

    @property
    def mode(self) -> str:
        """Its name, in records and logs."""
        return "straight" if self.straight else "direct" if self.direct else "buffered"

    def __str__(self) -> str:
        return f"{self.mode}/{self.threads}"

    @classmethod
    def parse(cls, text: str) -> ReadMode:
        """Raises ValueError."""
        mode, _, threads = text.partition("/")
        if mode not in ("direct", "buffered", "straight") or not 1 <= int(threads) <= 256:
            raise ValueError(f"{text!r} is no way to read")
        return cls(mode != "buffered", int(threads), mode == "straight")


WAYS = (ReadMode(True, 8), ReadMode(False, 4))
"""What is tried, from the cheapest to the dearest in processor time. Eight threads keep a disk busy while some of them
digest and copy; the page cache is read ahead by the kernel, which needs fewer."""

MODEL_WAYS = (ReadMode(True, 8, straight=True), ReadMode(True, 12), ReadMode(False, 4))
"""The same for model files."""

READ_THREADS_MAX = max(way.threads for way in WAYS + MODEL_WAYS)


class ReadTuner:
    """Knows how to read checkpoints, or model files, from each device of this node. Thread-safe.

    Args:
        settings: ``local_root`` is where the result is kept.
        ways: ``WAYS`` or ``MODEL_WAYS``: what there is to try.
    """

    def __init__(self, settings: Settings, ways: tuple[ReadMode, ...] = WAYS) -> None:
        use_local_root(settings)
        self.ways = ways
        """What there is to try."""
        self.path = (model_read_ways if ways == MODEL_WAYS else read_ways)(settings.local_root)
        self._known: dict[str, ReadMode] = {}
        self._lock = threading.Lock()

    def way(self, device: str) -> ReadMode:
        """How to read ``device`` as far as is known."""
        with self._lock:
            if device not in self._known and (found := self._recorded().get(device)) is not None:
                self._known[device] = found
            return self._known.get(device, self.ways[0])

    def is_known(self, device: str) -> bool:
        """True when nothing is to be tried: it was, or there is one way."""
        self.way(device)
        return device in self._known or len(self.ways) < 2

    @contextlib.contextmanager
    def trial(self) -> Iterator[bool]:
        """Yield True when no other process of the node tries now: two at a time would measure each other."""
        with contextlib.ExitStack() as stack:
            try:
                make_dirs(self.path.parent)
                is_ours = bool(stack.enter_context(try_lock(self.path.with_suffix(".lock"))))
            except (OSError, TierckptError) as error:
                log.debug("nothing is tried: %s", error)
                is_ours = False
            yield is_ours

    def decide(self, device: str, rates: Mapping[ReadMode, float], where: str) -> ReadMode:
        """Choose by bytes per second, remember it, and say so."""
        way = best(rates)
        with self._lock:
            self._known[device] = way
        found = ", ".join(f"{tried} {rate / 1e9:.2f} GB/s" for tried, rate in rates.items())
        log.info("%s is read %s from now on (measured: %s)", where, way, found)
        self._record(device, way, rates)
        return way

    def _recorded(self) -> dict[str, ReadMode]:
        ways = {}
        for device, entry in recorded(self.path).items():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                ways[device] = ReadMode.parse(entry["way"])
        return ways

    def _record(self, device: str, way: ReadMode, rates: Mapping[ReadMode, float]) -> None:
        """A result that cannot be kept is measured again by the next process."""
        entry = {"way": str(way), "bytes_per_second": {str(tried): round(rate) for tried, rate in rates.items()}}
        boot = device.rpartition(" ")[2]
        kept = {known: value for known, value in recorded(self.path).items() if known.endswith(boot)}
        try:
            durable_write(self.path, json.dumps({**kept, device: entry}, indent=1).encode())
        except (OSError, TierckptError) as error:
            log.debug("%s: %s", self.path, error)


def best(rates: Mapping[ReadMode, float]) -> ReadMode:
    """The cheapest of ``rates`` that is as good as the fastest, where the page cache has to be faster by a quarter."""
    worth = {way: rate if way.direct else rate / BUFFERED_GAIN_MIN for way, rate in rates.items()}
    fastest = max(worth.values())
    return next(way for way, rate in worth.items() if rate >= AS_GOOD * fastest)


RECORD_BYTES_MAX = 1 << 20


def recorded(path: Path) -> dict[str, Any]:
    """What is kept at ``path``, by device; nothing when it is not there or is not ours."""
    try:
        found: Json = json.loads(read_whole(path, RECORD_BYTES_MAX))
    except (TierckptError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def device_of(file: int) -> str:
    """A name of what an open file lies on: device and mount, and the boot that they are of."""
    mount = "?"
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/self/fdinfo/{file}").read_text().splitlines()
        mount = next((line.split()[1] for line in lines if line.startswith("mnt_id:")), "?")
    status = os.fstat(file).st_dev
    return f"{os.major(status)}:{os.minor(status)} {mount} {boot_id()}"


tuners: dict[tuple[Path, tuple[ReadMode, ...]], ReadTuner] = {}
_making = threading.Lock()


def _start_anew() -> None:
    global _making
    _making = threading.Lock()
    tuners.clear()


os.register_at_fork(after_in_child=_start_anew)


def read_tuner_for(settings: Settings, ways: tuple[ReadMode, ...] = WAYS) -> ReadTuner:
    """The process's tuner for these settings."""
    with _making:
        return tuners.setdefault((settings.local_root, ways), ReadTuner(settings, ways))


@lru_cache(maxsize=1)
def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "?"
