"""Rows of ``bench/gpu.py``: multi-step saves, a gradient log, and the costs of their replay and checks."""

from __future__ import annotations

import functools
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from tierckpt.replay.checksum import digest_values, digests_of
from tierckpt.replay.link import Link
from tierckpt.replay.log import GradientLog
from tierckpt.replay.multi_step import MultiStepStager
from tierckpt.replay.redo import Snapshot

MULTI_STEP = "tierckpt: MultiStepStager, K = 7"
LOG = "tierckpt: GradientLog, each step"
REPLAY = "replay of a redo log"
CHECKSUM = "fingerprints of the state"
REPLAY_ROWS = (MULTI_STEP, LOG, REPLAY, CHECKSUM)
STEPS, LOGGED_STEPS_MAX = 7, 10
WAIT_SECONDS = 600.0
Sample = dict[str, float]


class Training(Protocol):
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def step(self) -> float: ...
    def wait(self) -> None: ...


def sample_of(row: str, training: Training, directory: Path, number: int, steps: int) -> Sample:
    usual = statistics.median(training.step() for _ in range(steps))
    if row == MULTI_STEP:
        taken, snapshot = _window(training)
        if number < 0:
            _check(snapshot)
        return {
            **_slowdown(taken, usual),
            "call_seconds": snapshot.blocked_seconds,
            "moved_bytes": snapshot.moved_bytes,
        }
    if row == LOG:
        return _logged(training, directory, steps, usual)
    if row == REPLAY:
        return _replayed(training)
    return _fingerprints(training)


@functools.cache
def _link() -> Link:
    """Return one link for all rounds, as in a job: the first round allocates its page-locked memory."""
    return Link()


def _slowdown(taken: list[float], usual: float) -> Sample:
    return {
        "blocked_seconds": sum(max(0.0, one - usual) for one in taken),
        "step_seconds": statistics.median(taken),
        "step_ratio": statistics.median(taken) / usual,
        "step_ratio_max": max(taken) / usual,
        "steps": len(taken),
    }


def _window(training: Training) -> tuple[list[float], Snapshot]:
    """Train a window and the next step, which waits for the last part. Returns step times and the parts."""
    with MultiStepStager(training.optimizer, STEPS, defers=True, link=_link()) as stager:
        pending, taken = stager.begin(training.optimizer.state_dict), []
        for _ in range(STEPS):
            begun = time.perf_counter()
            training.step()
            stager.end_of_step()
            training.wait()
            taken.append(time.perf_counter() - begun)
        return taken, pending.result(WAIT_SECONDS)


def _check(snapshot: Snapshot) -> None:
    if snapshot.redo is None:
        raise RuntimeError("the window was not kept")
    snapshot.redo.fold()  # raises if a bit differs from training


def _logged(training: Training, directory: Path, steps: int, usual: float) -> Sample:
    path = directory / "log"
    try:
        with GradientLog(training.optimizer, path, link=_link()) as log:
            log.begin("base")
            taken = []
            for number in range(1, min(steps, LOGGED_STEPS_MAX) + 1):
                begun = time.perf_counter()
                training.step()
                log.end_of_step(number)
                training.wait()
                taken.append(time.perf_counter() - begun)
            log.sync()
            size_bytes = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
            return {**_slowdown(taken, usual), "call_seconds": log.blocked_seconds, "moved_bytes": size_bytes}
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _replayed(training: Training) -> Sample:
    """Return the seconds of the replay of a window, and its rate relative to ``optimizer.step``."""
    _, snapshot = _window(training)
    redo: Any = snapshot.redo
    if redo is None:
        raise RuntimeError("the window was not kept")
    elements = sum(one.numel() for step in redo.steps for one in step.gradients.values())
    training.wait()
    begun = time.perf_counter()
    redo.fold()
    training.wait()
    taken = time.perf_counter() - begun
    weights = [one for group in training.optimizer.param_groups for one in group["params"]]
    for one in weights:
        one.grad = torch.zeros_like(one)
    alone = []
    for _ in range(5):
        training.wait()
        begun = time.perf_counter()
        training.optimizer.step()
        training.wait()
        alone.append(time.perf_counter() - begun)
    rate = sum(one.numel() for one in weights) / statistics.median(alone)
    return {"durable_seconds": taken, "replay_ratio": elements / taken / rate, "replay_rate": elements / taken}


def _fingerprints(training: Training) -> Sample:
    """Return the seconds until the device has the fingerprints; the call is the training thread's part."""
    states = [*training.model.parameters()]
    states += [one for state in training.optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
    training.wait()
    begun = time.perf_counter()
    found = digests_of(states)
    called = time.perf_counter() - begun
    numbers = digest_values(found)
    taken = time.perf_counter() - begun
    size_bytes = sum(one.numel() * one.element_size() for one in states)
    return {
        "call_seconds": called,
        "durable_seconds": taken,
        "check_rate": size_bytes / taken,
        "fingerprints": len(numbers),
    }
