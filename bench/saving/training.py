"""Effects of saves on a training loop: steps during a flush, lazy staging, memory over many saves. One process each."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import tierckpt

from . import limits
from .meter import Meter, Results, Sample, Timing, say, settle, status_bytes
from .rows import OURS_ASYNC, OURS_SAVE, OURS_WRITER, PLAIN, Bench, finished, ours_check, stock_check, tier_writer
from .states import MiB, State, local, scaled, size_bytes, tensors

NOTHING = "nothing beside it"
DISK = "raw O_DIRECT writer, another process"
OURS_STEPS = "tierckpt: async_save flushing"
STOCK_STEPS = "async_save, DefaultStager warm, writing"
OURS_LAZY = 'tierckpt: TierStager(mode="lazy")'
OURS_BLOCKING = "tierckpt: TierStager()"
STOCK_LAZY = "DefaultStager, async staging, fenced by hand"
STOCK_KEPT = "async_save, DefaultStager, warm"

STEPS_MIN = 150
SMOKE_SCALE = 0.5
FLUSHES_MAX = 30
SAVES = 50
SETTLED_AFTER = 5


# --- steps: the cost of a flush to a CPU-bound loop -------------------------------------------------------------------


class TinyTraining:
    """A real training step of a few milliseconds on one thread, sensitive to the GIL and to caches."""

    def __init__(self) -> None:
        layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(8)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(128, 256)

    def step(self) -> float:
        """One step. Returns the seconds it took."""
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - begun


class DiskLoad:
    """A process that writes bytes with O_DIRECT on request: the disk's own share of the cost."""

    def __init__(self, path: Path, size: int) -> None:
        program = [sys.executable, limits.__file__, str(path), str(size)]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self) -> str:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"the raw writer ended with {self._process.wait()}")
        return line

    def write(self) -> Future[str]:
        self._process.stdin.write("go\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        future: Future[str] = Future()

        def wait() -> None:
            try:
                future.set_result(self._answer())
            except RuntimeError as error:
                future.set_exception(error)

        threading.Thread(target=wait, daemon=True).start()
        return future

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(timeout=30)
        self._process.stdout.close()  # type: ignore[union-attr]


def steps(directory: Path, scale: float, rounds: int) -> dict[str, Any]:
    """Return step times during a flush, without the call that starts it, which is ``blocked``."""
    bench = Bench("steps", tensors(32, scaled(32 * MiB // 4096, scale) * 4096), directory)
    torch.set_num_threads(1)
    training, results = TinyTraining(), Results()
    disk = DiskLoad(directory / "raw", bench.total_bytes)
    numbers = itertools.count(1)
    enough = STEPS_MIN if scale >= SMOKE_SCALE else STEPS_MIN // 5
    stager, stock = tierckpt.TierStager(), DefaultStager(PLAIN)

    def ours(path: Path) -> Future[Any]:
        return _upload(
            dcp.async_save(bench.state, storage_writer=tier_writer(bench, path), async_stager=stager, no_dist=True)
        )

    def theirs(path: Path) -> Future[Any]:
        return _upload(
            dcp.async_save(bench.state, storage_writer=FileSystemWriter(path), async_stager=stock, no_dist=True)
        )

    def while_running(start: Callable[[Path], Future[Any]]) -> list[float]:
        taken: list[float] = []
        for _ in range(FLUSHES_MAX):
            path = directory / f"step-{next(numbers)}"
            running = start(path)
            while not running.done():
                taken.append(training.step())
            running.result()
            bench.remove(path)
            if len(taken) >= enough:
                break
        return taken

    rows: dict[str, Callable[[], list[float]]] = {
        NOTHING: lambda: [training.step() for _ in range(2 * enough)],
        DISK: lambda: while_running(lambda path: disk.write()),
        OURS_STEPS: lambda: while_running(ours),
        STOCK_STEPS: lambda: while_running(theirs),
    }
    try:
        for number in range(-1, max(1, rounds)):  # the first pass warms up
            for row in list(rows)[:: 1 if number % 2 == 0 else -1]:
                settle(scale)
                taken = rows[row]()
                if number >= 0:
                    results.add(row, number, _step_times(taken))
                    say(f"[steps] {number + 1}/{max(1, rounds)}  {row}: {statistics.mean(taken) * 1e3:.2f} ms")
    finally:
        disk.close()
        stager.close()
        stock.close()
    return results.medians(
        list(rows), {"ratio_to_nothing": ("step_seconds", NOTHING), "ratio_to_disk": ("step_seconds", DISK)}
    )


def _step_times(taken: list[float]) -> Sample:
    return {
        "step_seconds": statistics.mean(taken),
        "step_seconds_p95": statistics.quantiles(taken, n=20)[-1] if len(taken) > 1 else taken[0],
        "steps": len(taken),
    }


def _upload(save: Any) -> Future[Any]:
    return save.upload_completion if isinstance(save, AsyncSaveResponse) else save


# --- lazy: staging that overlaps the next step ------------------------------------------------------------------------


class SlowTraining:
    """A model whose step takes several times as long as a copy of its state, on all threads."""

    def __init__(self, scale: float) -> None:
        torch.manual_seed(1)
        blocks = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(scaled(32, scale))]
        self.model = torch.nn.Sequential(*blocks)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.batch = torch.randn(256, 1024)
        self.step()  # allocates the optimizer state

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def state(self) -> State:
        moments = {
            f"momentum.{index}": self.optimizer.state[parameter]["momentum_buffer"]
            for index, parameter in enumerate(self.model.parameters())
        }
        return dict(self.model.state_dict()) | moments


class Fence:
    """Measures how long other step hooks hold ``optimizer.step`` up."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._begun, self.seconds = optimizer, 0.0, 0.0
        optimizer.register_step_pre_hook(self._enter)
        self._last = optimizer.register_step_pre_hook(self._leave)

    def arm(self) -> None:
        """Register ``_leave`` again, after every other hook."""
        self._last.remove()
        self._last = self._optimizer.register_step_pre_hook(self._leave)

    def _enter(self, *unused: Any) -> None:
        self._begun = time.perf_counter()

    def _leave(self, *unused: Any) -> None:
        self.seconds = time.perf_counter() - self._begun


def lazy(directory: Path, scale: float, rounds: int) -> dict[str, Any]:
    """Return the milliseconds a save takes from training if its copies may overlap the next step."""
    results = Results()
    rows = {OURS_BLOCKING: _blocking_stager, OURS_LAZY: _lazy_stager, STOCK_LAZY: _stock_async_stager}
    for row, make in rows.items():
        training = SlowTraining(scale)
        fence = Fence(training.optimizer)
        pending: list[AsyncSaveResponse] = []
        try:
            stager = make(training.optimizer, pending)
        except (TypeError, tierckpt.TierckptError) as error:
            results.miss(row, f"not in this version: {error}")
            say(f"[lazy] {row}: {error}")
            continue
        try:
            for number in range(-1, max(1, rounds)):
                bench = Bench("lazy", training.state(), directory, scale)
                sample = _lazy_save(bench, row, training, fence, stager, pending)
                if number >= 0:
                    results.add(row, number, sample)
                    say(
                        f"[lazy] {number + 1}/{max(1, rounds)}  {row}: blocked {sample['blocked_seconds'] * 1e3:.1f} ms"
                    )
        except Exception as error:
            results.fail(row, f"{type(error).__name__}: {error}")
            say(f"[lazy] {row}: FAILED: {error}")
        finally:
            stager.close()
    return results.medians(list(rows), {})


def _blocking_stager(optimizer: torch.optim.Optimizer, pending: list[Any]) -> Any:
    return tierckpt.TierStager()


def _lazy_stager(optimizer: torch.optim.Optimizer, pending: list[Any]) -> Any:
    return tierckpt.TierStager(mode="lazy", optimizers=[optimizer])


def _stock_async_stager(optimizer: torch.optim.Optimizer, pending: list[Any]) -> Any:
    """The bench provides the fence that stock PyTorch leaves to the caller."""

    def wait(*unused: Any) -> None:
        while pending:
            pending.pop().staging_completion.result()

    optimizer.register_step_pre_hook(wait)
    return DefaultStager(StagingOptions(False, False, True, False))


def _lazy_save(bench: Bench, row: str, training: SlowTraining, fence: Fence, stager: Any, pending: list[Any]) -> Sample:
    settle(bench.scale)
    training.step()
    step_begun = time.perf_counter()
    training.step()
    step_seconds = time.perf_counter() - step_begun
    before = {name: local(tensor).detach().clone() for name, tensor in bench.state.items()}
    path = bench.directory / f"step-{time.monotonic_ns()}"
    ours = row != STOCK_LAZY
    writer = tier_writer(bench, path) if ours else FileSystemWriter(path)
    with Meter() as meter:
        begun = time.perf_counter()
        save = dcp.async_save(bench.state, storage_writer=writer, async_stager=stager, no_dist=True)
        call_seconds = time.perf_counter() - begun
        fence.arm()
        if isinstance(save, AsyncSaveResponse):
            pending.append(save)
        training.step()
        step_with_save = time.perf_counter() - begun
        durable_seconds = finished(begun, save).durable_seconds
    pending.clear()
    bench.state = before  # a save has the state of its call, whatever the step changed
    (ours_check(bench) if ours else stock_check(bench))(path)
    bench.remove(path)
    more = {
        "call_seconds": call_seconds,
        "fence_seconds": fence.seconds,
        "step_seconds": step_seconds,
        "step_with_save_seconds": step_with_save,
    }
    return meter.sample(Timing(call_seconds + fence.seconds, durable_seconds, more))


# --- memory: fifty consecutive saves ----------------------------------------------------------------------------------


def rss(directory: Path, scale: float, rounds: int) -> dict[str, Any]:
    """Return resident memory and faults of this process over 50 saves of one state (fewer in a smoke test)."""
    bench = Bench("rss", tensors(32, scaled(16 * MiB // 4096, scale) * 4096), directory)
    stager, stock = tierckpt.TierStager(), DefaultStager(PLAIN)
    numbers, count = itertools.count(1), SAVES if scale >= SMOKE_SCALE else SAVES // 5
    saves: dict[str, Callable[[Path], object]] = {
        OURS_ASYNC: lambda path: dcp.async_save(
            bench.state, storage_writer=tier_writer(bench, path), async_stager=stager, no_dist=True
        ),
        OURS_WRITER: lambda path: dcp.async_save(bench.state, storage_writer=tier_writer(bench, path), no_dist=True),
        OURS_SAVE: lambda path: dcp.save(bench.state, storage_writer=tier_writer(bench, path), no_dist=True),
        STOCK_KEPT: lambda path: dcp.async_save(
            bench.state, storage_writer=FileSystemWriter(path), async_stager=stock, no_dist=True
        ),
    }

    table: dict[str, Any] = {}
    for row, save in saves.items():
        settle(scale)
        table[row] = _many_saves(bench, save, [next(numbers) for _ in range(count)])
        grown = table[row]["growth_bytes"] / MiB
        say(f"[rss] {row}: {count} saves, {grown:+.1f} MiB between save {SETTLED_AFTER} and the last")
    stager.close()
    stock.close()
    return table


def _many_saves(bench: Bench, save: Callable[[Path], object], numbers: Sequence[int]) -> dict[str, Any]:
    before = status_bytes("VmRSS")
    resident, faults, seconds, peaks = [], [], [], []
    for number in numbers:
        path = bench.directory / f"step-{number}"
        with Meter() as meter:
            begun = time.perf_counter()
            handle = save(path)
            if isinstance(handle, (Future, AsyncSaveResponse)):
                _upload(handle).result()
            seconds.append(time.perf_counter() - begun)
        faults.append(meter.minor_faults)
        peaks.append(meter.peak_extra_bytes)
        resident.append(status_bytes("VmRSS"))
        bench.remove(path)
    warm = slice(SETTLED_AFTER, None)
    return {
        "saves": len(numbers),
        "state_bytes": size_bytes(bench.state),
        "resident_extra_bytes": resident[-1] - before,
        "growth_bytes": resident[-1] - resident[SETTLED_AFTER - 1],
        "peak_extra_bytes": statistics.median(peaks[warm]),
        "minor_faults_first": faults[0],
        "minor_faults": statistics.median(faults[warm]),
        "minor_faults_max": max(faults[warm]),
        "durable_seconds": statistics.median(seconds[warm]),
    }


CASES: dict[str, Callable[[Path, float, int], dict[str, Any]]] = {"steps": steps, "lazy": lazy, "rss": rss}
TITLES = {
    "steps": "a CPU-bound training loop while 1 GiB is being flushed",
    "lazy": "256 MiB of model and momentum, saved during a step",
    "rss": f"{SAVES} saves in a row of 512 MiB",
}
