"""One case in its own process (or one per rank), so that memory left by other cases does not affect it."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from . import training
from .meter import Meter, Results, Sample, combined, say, settle
from .rows import MEMCPY, RAW, Bench, Row, rows_of
from .states import CASES

RATIOS = {"durable_ratio": ("durable_seconds", RAW), "blocked_ratio": ("blocked_seconds", MEMCPY)}
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
STOLEN_MAX = 0.02
"""Samples in which the hypervisor gave more processor time than this to other guests are discarded."""
TRIES_MAX = 4


@dataclass(frozen=True)
class Task:
    """A worker's task. Rank and address come from the environment, as torchrun sets them."""

    case: str
    scale: float
    rounds: int
    directory: str
    result: str

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Task:
        return cls(**json.loads(text))


def run(task: Task) -> None:
    """Measure the case. Rank 0 writes ``{row: {metric: value}}`` to ``task.result``."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    try:
        table = _training_case(task) if task.case in training.CASES else _table(task, rank, world)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(task.result).write_text(json.dumps(table))


def _training_case(task: Task) -> dict[str, Any]:
    return training.CASES[task.case](Path(task.directory), task.scale, task.rounds)


def _table(task: Task, rank: int, world: int) -> dict[str, Any]:
    case = CASES[task.case]
    say(f"[{task.case}] building {case.title}, scale {task.scale:g}") if rank == 0 else None
    bench = Bench(task.case, case.build(task.scale), Path(task.directory), task.scale, case.copies, rank, world)
    rows = rows_of(bench)
    results = Results()
    visits = _Visits(bench, results)
    # The first pass warms up and loads every row's checkpoint back. It counts only in a smoke test, which has no other.
    for row in {row.name: row for row in rows}.values():
        visits.verify(row, counts=task.rounds == 0)
    for number in range(task.rounds):
        for row in rows if number % 2 == 0 else reversed(rows):
            visits.measure(row, number, task.rounds)
    for row in rows:
        row.close()
    return results.medians(list(dict.fromkeys(row.name for row in rows)), RATIOS)


class _Visits:
    """Runs rows on all ranks in step. A row that fails on any rank is skipped from then on, with the reason."""

    def __init__(self, bench: Bench, results: Results) -> None:
        self.bench, self.results = bench, results
        self._steps = itertools.count(1)

    def verify(self, row: Row, *, counts: bool) -> None:
        if row.missing:
            self.results.miss(row.name, row.missing)
            self._say(f"{row.name}: not measured: {row.missing}")
            return
        begun = time.perf_counter()
        sample = self._visit(row, check=True)
        if sample is None:
            return
        self._say(f"verified  {row.name} ({time.perf_counter() - begun:.1f} s)")
        if counts:
            self.results.add(row.name, 0, sample)

    def measure(self, row: Row, number: int, rounds: int) -> None:
        if row.name in self.results.absent:
            return
        sample = self._visit(row, check=False)
        for _ in range(TRIES_MAX - 1):
            if sample is None or sample["stolen_share"] <= STOLEN_MAX:
                break
            self._say(f"{row.name}: the host took {sample['stolen_share']:.0%} of the processors: repeating")
            sample = self._visit(row, check=False)
        if sample is not None:
            self.results.add(row.name, number, sample)
            self._say(
                f"{number + 1}/{rounds}  {row.name}: blocked {sample['blocked_seconds']:.3f} s, "
                f"durable {sample['durable_seconds']:.3f} s, cpu {sample['cpu_seconds']:.2f} s"
            )

    def _visit(self, row: Row, *, check: bool) -> Sample | None:
        path = self.bench.directory / f"step-{next(self._steps)}"
        sample: Sample = {}

        def visit() -> None:
            row.before()
            settle(self.bench.scale)
            self._barrier()
            with Meter() as meter:
                timing = row.save(path)
            sample.update(meter.sample(timing))
            self._barrier()  # no rank checks before all have written
            if check:
                row.check(path)

        error = _error_of(visit)
        error = error or _error_of(row.after)
        reports = self._gather((dict(sample), error))
        if self.bench.rank == 0:
            self.bench.remove(path)
        self._barrier()
        errors = [each for _, each in reports if each]
        if errors:
            self.results.fail(row.name, errors[0])
            self._say(f"{row.name}: FAILED: {errors[0]}")
            return None
        return combined([each for each, _ in reports])

    def _gather(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.bench.world
        dist.all_gather_object(everyone, mine)
        return everyone

    def _barrier(self) -> None:
        if not self.bench.alone:
            dist.barrier()

    def _say(self, text: str) -> None:
        if self.bench.rank == 0:
            say(f"[{self.bench.case}] {text}")


def _error_of(step: Callable[[], None]) -> str:
    """Run ``step``; return "" or the error in one line. CheckpointException derives from BaseException."""
    try:
        step()
    except (Exception, CheckpointException) as error:
        failures = error.failures if isinstance(error, CheckpointException) else {}
        cause = next(iter(failures.values()))[0] if failures else error  # one failure per rank
        lines = str(cause).strip().splitlines() or [""]
        return f"{type(cause).__name__}: {lines[0]}"[:300]
    return ""
