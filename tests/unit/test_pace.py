"""Training comes first: a background flush rests while processors are busy, and only then (P8)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tierckpt.mover import pace
from tierckpt.mover.pace import Pace


def spin(seconds: float) -> float:
    begun, used = time.monotonic(), time.thread_time()
    while time.monotonic() - begun < seconds:
        pass
    return time.thread_time() - used


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


@pytest.fixture
def one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that one thread keeps busy, and whose kernel says nothing of others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(pace, "STAT", Path("/nonexistent"))


def test_it_rests_while_this_process_is_busy(one_processor: None) -> None:
    steps = Pace(0.1)
    spin(0.03)  # the training step
    assert 0.08 < seconds_of(lambda: steps.rest_after(0.01)) < 0.3


def test_it_does_not_rest_for_its_own_work(one_processor: None) -> None:
    steps = Pace(0.1)
    used = spin(0.03)
    assert seconds_of(lambda: steps.rest_after(used)) < 0.02


def test_it_does_not_rest_on_an_idle_node(one_processor: None) -> None:
    steps = Pace(0.1)
    time.sleep(0.03)
    assert seconds_of(lambda: steps.rest_after(0.01)) < 0.02


def test_without_a_limit_it_never_rests(one_processor: None) -> None:
    steps = Pace(1.0)
    spin(0.03)
    assert seconds_of(lambda: steps.rest_after(10.0)) < 0.02


def test_a_rest_is_bounded(one_processor: None) -> None:
    steps = Pace(0.001)
    spin(0.03)
    assert seconds_of(lambda: steps.rest_after(5.0)) < pace.REST_SECONDS_MAX + 0.3


@pytest.mark.parametrize(("user", "niced", "rests"), [(90, 0, True), (0, 90, False), (20, 70, False)])
def test_other_processes_count_and_flushes_do_not(
    user: int, niced: int, rests: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs at a low priority, as the flush of every other rank does, is no reason to rest."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  1000 1000 1000 1000 0 0 0 0 0 0\n")
    monkeypatch.setattr(pace, "STAT", stat)
    monkeypatch.setattr(pace, "OWN_WINDOW_SECONDS", 3600.0)
    steps = Pace(0.1)
    stat.write_text(f"cpu  {1000 + user} {1000 + niced} 1000 {1000 + 100 - user - niced} 0 0 0 0 0 0\n")
    time.sleep(pace.NODE_WINDOW_SECONDS)
    assert (seconds_of(lambda: steps.rest_after(0.01)) > 0.05) is rests


def test_all_threads_of_a_flush_share_it(one_processor: None) -> None:
    steps = Pace(0.5)
    threads = [threading.Thread(target=lambda: [steps.rest_after(0.0001) for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert steps._used_seconds == pytest.approx(0.04)


def test_it_knows_whether_it_ever_rested(one_processor: None) -> None:
    steps = Pace(0.1)
    steps.rest_after(spin(0.03))
    assert not steps.rested
    spin(0.03)
    steps.rest_after(0.001)
    assert steps.rested
