"""Benchmarks the read modes of a device on a large load's own bytes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Protocol, TypeVar

from ..disk.io_tuner import ReadMode, ReadTuner
from ..errors import TierckptError
from .file_copies import LocalCopy

MiB = 1 << 20

TRIAL_BYTES = 128 * MiB

TRIAL_ROUNDS_MAX = 3

DISK_SHARE_MIN = 0.9
"""A trial counts only if the device delivered at least this part."""


class Request(Protocol):
    """A pending read."""

    @property
    def wanted_bytes(self) -> int: ...

    @property
    def disk(self) -> LocalCopy | None:
        """The file if it is on a disk."""


R = TypeVar("R", bound=Request)


def opened_disk(jobs: Iterable[Request]) -> LocalCopy | None:
    """Open and return the first copy that is on a disk; the others are assumed to be on the same device."""
    for job in jobs:
        if (disk := job.disk) is not None:
            with contextlib.suppress(TierckptError):
                disk.open()
                return disk
    return None


def run_trials(jobs: list[R], first_disk: LocalCopy | None, run: Callable[[list[R], int], None]) -> list[R]:
    """Read the first of ``jobs`` in each mode, unless the best is known. Return the remaining jobs."""
    if first_disk is None or first_disk.tuner is None or not first_disk.is_untried:
        return jobs
    if _size_bytes(jobs) <= TRIAL_BYTES * len(first_disk.tuner.modes):
        return jobs
    with first_disk.tuner.trial() as is_ours:
        return _trial(jobs, first_disk.tuner, first_disk, run) if is_ours else jobs


def _trial(jobs: list[R], tuner: ReadTuner, first_disk: LocalCopy, run: Callable[[list[R], int], None]) -> list[R]:
    rounds = min(TRIAL_ROUNDS_MAX, max(1, _size_bytes(jobs) // (2 * TRIAL_BYTES * len(tuner.modes))))
    rates: dict[ReadMode, list[float]] = {way: [] for way in tuner.modes}
    for way in tuner.modes * rounds:
        part, jobs = _split_off(jobs, TRIAL_BYTES)
        disks = {job.disk for job in part}
        cold_bytes = -sum(disk.cold_bytes for disk in disks if disk)
        for disk in disks:
            if disk is not None:
                disk.set_mode(way)
        begun = time.monotonic()
        run(part, way.threads)
        seconds = time.monotonic() - begun
        cold_bytes += sum(disk.cold_bytes for disk in disks if disk)
        if cold_bytes < DISK_SHARE_MIN * _size_bytes(part) or any(
            not disk or disk.device != first_disk.device for disk in disks
        ):
            return jobs
        rates[way].append(cold_bytes / seconds)
    chosen = tuner.decide(first_disk.device, {way: median(found) for way, found in rates.items()}, first_disk.where)
    for job in jobs:
        if job.disk is not None:
            job.disk.set_mode(chosen)
    return jobs


def _split_off(jobs: list[R], wanted_bytes: int) -> tuple[list[R], list[R]]:
    for count, job in enumerate(jobs, 1):
        wanted_bytes -= job.wanted_bytes
        if wanted_bytes <= 0:
            return jobs[:count], jobs[count:]
    return jobs, []


def _size_bytes(jobs: list[R]) -> int:
    return sum(job.wanted_bytes for job in jobs)
