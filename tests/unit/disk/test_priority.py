"""Training comes first: a background flush rests while processors are busy, and only then (P8)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tierckpt.disk import priority
from tierckpt.disk.priority import CpuThrottle


class Clock:
    """Time as ``pace`` sees it: it passes when somebody says so."""

    def __init__(self) -> None:
        self.now = self.used = self.rested = 0.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.rested += seconds

    def spin(self, seconds: float) -> float:
        """This process works."""
        self.now += seconds
        self.used += seconds
        return seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A node with one processor and a kernel without information on other processes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(priority, "STAT", Path("/nonexistent"))
    clock = Clock()
    monkeypatch.setattr(priority, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("share_max", "busy", "idle", "written", "rested"),
    [
        (0.1, 0.03, 0.0, 0.01, 0.09),  # the training step
        (0.1, 0.03, 0.0, 0.03, 0.0),  # its own work
        (0.1, 0.0, 0.03, 0.01, 0.0),  # an idle node
        (1.0, 0.03, 0.0, 10.0, 0.0),  # no limit
        (0.001, 10.0, 0.0, 5.0, priority.REST_SECONDS_MAX),
    ],
)
def test_it_rests_while_this_process_is_busy_with_other_work(
    share_max: float, busy: float, idle: float, written: float, rested: float, clock: Clock
) -> None:
    steps = CpuThrottle(share_max)
    clock.spin(busy)
    clock.now += idle
    steps.throttle_after(written)
    assert clock.rested == pytest.approx(rested)
    assert steps.has_throttled == (rested > 0)


@pytest.mark.parametrize(("user", "niced", "rests"), [(90, 0, True), (0, 90, False), (20, 70, False)])
def test_other_processes_count_and_flushes_do_not(
    user: int, niced: int, rests: bool, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs at a low priority, as the flush of every other rank does, is no reason to rest."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  1000 1000 1000 1000 0 0 0 0 0 0\n")
    monkeypatch.setattr(priority, "STAT", stat)
    steps = CpuThrottle(0.1)
    stat.write_text(f"cpu  {1000 + user} {1000 + niced} 1000 {1000 + 100 - user - niced} 0 0 0 0 0 0\n")
    clock.now += priority.NODE_WINDOW_SECONDS
    steps.throttle_after(0.01)
    assert (clock.rested > 0) is rests


def test_all_threads_of_a_flush_share_it(clock: Clock) -> None:
    steps = CpuThrottle(0.5)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(steps.throttle_after, [0.0001] * 400))
    assert steps.used_seconds == pytest.approx(0.04)
