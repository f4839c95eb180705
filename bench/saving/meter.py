"""Cost of one save, and the comparison of rows: interleaved rounds, medians, ratios within a round."""

from __future__ import annotations

import gc
import os
import platform
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import limits

SETTLE_SECONDS = 0.2
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_OF_THE_WORST = ("blocked_seconds", "durable_seconds", "write_data_seconds", "stolen_share")

Sample = dict[str, float]


@dataclass
class Timing:
    """The figures that a row reports. Seconds count from the call; ``more`` are further metrics of the row."""

    blocked_seconds: float
    durable_seconds: float
    more: Sample = field(default_factory=dict)


class Meter:
    """Costs of a ``with`` block: CPU seconds and minor faults of this process, its threads and children; the peak of
    this process's resident memory above its start, without page cache and children. ``stolen_share``: the share of all
    processor time that the hypervisor gave to other guests (steal, proc_stat(5))."""

    def __enter__(self) -> Meter:
        self._stolen, self._begun_at = _stolen_seconds(), time.perf_counter()
        self._peak_is_ours = _write("/proc/self/clear_refs", "5")
        self._resident = status_bytes("VmRSS")
        self._begun = _cpu_and_faults()
        return self

    def __exit__(self, *exc: object) -> None:
        cpu, faults = _cpu_and_faults()
        elapsed = time.perf_counter() - self._begun_at
        self.stolen_share = (_stolen_seconds() - self._stolen) / (elapsed * (os.cpu_count() or 1))
        self.cpu_seconds = cpu - self._begun[0]
        self.minor_faults = faults - self._begun[1]
        # Without clear_refs the peak covers the whole process, so it is not reported.
        self.peak_extra_bytes = status_bytes("VmHWM") - self._resident if self._peak_is_ours else float("nan")

    def sample(self, timing: Timing) -> Sample:
        return {
            "blocked_seconds": timing.blocked_seconds,
            "durable_seconds": timing.durable_seconds,
            "cpu_seconds": self.cpu_seconds,
            "peak_extra_bytes": self.peak_extra_bytes,
            "minor_faults": self.minor_faults,
            "stolen_share": self.stolen_share,
            **timing.more,
        }


def status_bytes(key: str) -> int:
    """Return one of the sizes in ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def read_bytes() -> int:
    """Return the bytes that this process read from disks, by the kernel's account, in any way."""
    return int(Path("/proc/self/io").read_text().partition("\nread_bytes: ")[2].partition("\n")[0])


def _stolen_seconds() -> float:
    return int(Path("/proc/stat").read_text().partition("\n")[0].split()[8]) / _TICKS_PER_SECOND


def _cpu_and_faults() -> tuple[float, int]:
    own, reaped = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = own.ru_utime + own.ru_stime + reaped.ru_utime + reaped.ru_stime
    faults = own.ru_minflt + reaped.ru_minflt
    for child in _living_descendants(os.getpid()):
        cpu += sum(map(int, child[13:17])) / _TICKS_PER_SECOND
        faults += int(child[9])
    return cpu, faults


def _living_descendants(pid: int) -> list[list[str]]:
    """Return the fields of ``/proc/PID/stat`` of every living descendant, in the order of proc(5)."""
    children: dict[int, list[list[str]]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(") ")
        except OSError:
            continue  # ended during the scan
        fields = [head.partition(" ")[0], head, *tail.split()]
        children[int(fields[3])].append(fields)
    found, todo = [], [pid]
    while todo:
        born = children.get(todo.pop(), [])
        found += born
        todo += [int(fields[0]) for fields in born]
    return found


def settle(scale: float = 1.0) -> None:
    """Wait until data of earlier rows is on the disk, so that they do not affect the next row."""
    gc.collect()
    os.sync()
    drop_page_cache()
    time.sleep(SETTLE_SECONDS * min(scale, 1.0))


def drop_page_cache() -> bool:
    """Drop clean page cache if permitted (root). Returns whether it was."""
    return _write("/proc/sys/vm/drop_caches", "1")


def _write(path: str, text: str) -> bool:
    try:
        Path(path).write_text(text)
    except OSError:
        return False
    return True


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def combined(samples: Sequence[Sample]) -> Sample:
    """Return the sample of all ranks: the slowest one's seconds, the sum of the costs."""
    return {
        key: max(sample[key] for sample in samples) if key in _OF_THE_WORST else sum(sample[key] for sample in samples)
        for key in samples[0]
    }


class Results:
    """Samples of every row and round, and their summary."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        self.absent: dict[str, dict[str, str]] = {}

    def add(self, row: str, number: int, sample: Sample) -> None:
        self.samples[row][number].append(sample)

    def fail(self, row: str, error: str) -> None:
        self.samples.pop(row, None)
        self.absent[row] = {"error": error}

    def miss(self, row: str, why: str) -> None:
        self.absent[row] = {"missing": why}

    def medians(self, order: Sequence[str], ratios: dict[str, tuple[str, str]]) -> dict[str, dict[str, Any]]:
        """Return ``{row: {metric: median}}`` in this order. ``ratios`` adds ``{name: (metric, divisor row)}``; each is
        the median of the ratios within rounds, which cancels a drift of the disk."""
        table: dict[str, dict[str, Any]] = {}
        for row in order:
            if row in self.absent:
                table[row] = dict(self.absent[row])
            elif row in self.samples:
                table[row] = self._median(row) | {
                    name: value
                    for name, (metric, limit) in ratios.items()
                    if (value := self._ratio(row, metric, limit)) is not None
                }
        return table

    def _median(self, row: str) -> dict[str, Any]:
        taken = [sample for samples in self.samples[row].values() for sample in samples]
        middle = {key: statistics.median(sample[key] for sample in taken) for key in taken[0]}
        durable = [sample["durable_seconds"] for sample in taken if "durable_seconds" in sample]
        spread = {"durable_seconds_min": min(durable), "durable_seconds_max": max(durable)} if durable else {}
        return middle | spread

    def _ratio(self, row: str, metric: str, limit: str) -> float | None:
        if limit not in self.samples or metric not in next(iter(self.samples[row].values()))[0]:
            return None
        shares = [
            sample[metric] / statistics.mean(base[metric] for base in self.samples[limit][number])
            for number, samples in self.samples[row].items()
            for sample in samples
            if self.samples[limit].get(number)
        ]
        return statistics.median(shares) if shares else None


def machine(directory: Path, scale: float, rounds: int, seconds: float) -> dict[str, Any]:
    """Return facts about the machine on which the numbers depend."""
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "file_system": limits.filesystem_type(directory),
        "huge_pages": huge.read_text().strip() if huge.exists() else "none",
        "page_cache_dropped": drop_page_cache(),
        "load_average": os.getloadavg()[0],
        "scale": scale,
        "rounds": rounds,
        "seconds": round(seconds, 1),
    }
