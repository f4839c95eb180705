"""Cost of a save to a training loop on a GPU: a real GPT, compared with PyTorch's pinned stager.

    python bench/gpu.py [--device cuda] [--width 1024] [--layers 12] [--steps 30] [--rounds 5] [--dir DIR]

A decoder trains with AdamW under bfloat16 autocast. A save has its weights and both moments, on the device. A row is a
method of saving: in each round it trains without a save, then saves at the start of a step and trains until the save is
durable. Rows are interleaved. Before that, each row saves once, and the checkpoint is loaded and compared.
More rows (gpu_replay.py): a multi-step save, a gradient log, the rates of their replay and checks.

Prints a table and the verdicts, and writes bench/out/gpu.json. ``--device cpu`` is for trying out the bench itself.

Exit code: 0; 1 if a row failed, with --strict also if a figure is missed; 2 usage.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from gpu_replay import REPLAY_ROWS, sample_of
from rich import box
from rich.console import Console
from rich.table import Table
from saving import limits
from saving.meter import Meter, Results, Sample, machine, say, settle
from saving.rows import Bench, ours_check, stock_check, tier_writer
from saving.states import GiB, MiB, State
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import tierckpt

OUT = Path(__file__).resolve().parent / "out" / "gpu.json"
NOTHING = "no save"
COPY = "device to pinned memory"
RAW = "raw O_DIRECT + fsync"
OURS = "tierckpt: TierStager()"
OURS_LAZY = 'tierckpt: TierStager(mode="lazy")'
STOCK = "async_save, pinned stager, warm"
STOCK_ASYNC = "async_save, pinned stager, async staging, fenced by hand"
OURS_ROWS = (OURS, OURS_LAZY)
WAIT_SECONDS = 600.0
SLOWER_MAX = 1.02
"""The goal: time of a step during a save, relative to a step without."""


class Block(torch.nn.Module):
    """Pre-norm attention and a feed-forward four times as wide (Radford et al. 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.feed = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm_2(x))


class GPT(torch.nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(context, width)
        self.blocks = torch.nn.Sequential(*(Block(width, max(1, width // 64)) for _ in range(layers)))
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


class Training:
    """The job. Every step ends with an idle device, so its seconds are those of the whole step."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(1)
        self.device = torch.device(given.device)
        self.model = GPT(given.layers, given.width, given.vocabulary, given.context).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randint(given.vocabulary, (given.batch, given.context + 1), device=self.device)
        for _ in range(3):  # kernels are chosen, and the optimizer makes its state
            self.step()

    def step(self) -> float:
        """One step. Returns the seconds it took."""
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            guess = self.model(self.batch[:, :-1])
        torch.nn.functional.cross_entropy(guess.float().flatten(0, 1), self.batch[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.wait()
        return time.perf_counter() - begun

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def state(self) -> State:
        moments = {
            f"optimizer.{name}.{key}": self.optimizer.state[parameter][key]
            for name, parameter in self.model.named_parameters()
            for key in ("exp_avg", "exp_avg_sq")
        }
        return {f"model.{name}": value for name, value in self.model.state_dict().items()} | moments


class KeptStager(DefaultStager):
    """PyTorch's stager, kept warm. In 2.11 and 2.12 it closes parts of itself after a save, and the next save fails."""

    def __init__(self, options: StagingOptions) -> None:
        super().__init__(options)
        self._end = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None  # type: ignore[method-assign]

    def close(self) -> None:
        super().close()
        self._end()


class Savers:
    """The methods. Stagers live for the whole bench, as in a job."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._pending: list[AsyncSaveResponse] = []
        self._stagers: dict[str, Any] = {}
        training.optimizer.register_step_pre_hook(self._wait_for_staging)

    def save(self, row: str, bench: Bench, path: Path) -> Future[Any]:
        """Start a save. The future completes when the save is durable."""
        if row not in self._stagers:
            self._stagers[row] = self._make(row, bench)
        writer = tier_writer(bench, path) if row in OURS_ROWS else FileSystemWriter(path)
        saved = dcp.async_save(bench.state, storage_writer=writer, async_stager=self._stagers[row], no_dist=True)
        if not isinstance(saved, AsyncSaveResponse):
            return saved
        if row == STOCK_ASYNC:
            self._pending.append(saved)
        return saved.upload_completion

    def close(self) -> None:
        self._wait_for_staging()
        for stager in self._stagers.values():
            stager.close()

    def _make(self, row: str, bench: Bench) -> Any:
        if row == OURS:
            return tierckpt.TierStager(local_root=bench.local_root)
        if row == OURS_LAZY:
            return tierckpt.TierStager(mode="lazy", optimizers=[self._training.optimizer], local_root=bench.local_root)
        is_cuda = self._training.device.type == "cuda"  # without it PyTorch refuses all but plain staging
        return KeptStager(StagingOptions(is_cuda, False, row == STOCK_ASYNC, is_cuda))

    def _wait_for_staging(self, *unused: Any) -> None:
        """The bench provides the fence that stock PyTorch leaves to the caller."""
        while self._pending:
            self._pending.pop().staging_completion.result(timeout=WAIT_SECONDS)


def measure(given: argparse.Namespace, directory: Path) -> dict[str, dict[str, Any]]:
    training = Training(given)
    bench = Bench("gpu", training.state(), directory)
    weights = sum(parameter.numel() for parameter in training.model.parameters())
    say(f"{weights:,} weights, {bench.total_bytes / GiB:.2f} GiB of state on {training.device}")
    savers, results, image = Savers(training), Results(), limits.Image(bench.total_bytes)
    target = {name: _pinned(tensor) for name, tensor in bench.state.items()}
    rows: dict[str, Callable[[int], Sample]] = {
        NOTHING: lambda number: _step_times([training.step() for _ in range(given.steps)]),
        COPY: lambda number: {"blocked_seconds": _copy_out(training, bench.state, target)},
        RAW: lambda number: {"durable_seconds": _raw(directory / "raw", image, bench.total_bytes)},
        **{row: _saving(row, bench, training, savers, given.steps) for row in (OURS, OURS_LAZY, STOCK, STOCK_ASYNC)},
        **{row: partial(_replay, row, training, directory, given.steps) for row in REPLAY_ROWS},
    }
    try:
        for number in range(-1, given.rounds):  # the first pass warms up, and is loaded back
            for row in list(rows)[:: 1 if number % 2 == 0 else -1]:
                if row in results.absent:
                    continue
                settle()
                try:
                    sample = rows[row](number)
                except Exception as error:
                    results.fail(row, f"{type(error).__name__}: {error}")
                    say(f"{row}: FAILED: {error}")
                    continue
                if number >= 0:
                    results.add(row, number, sample)
                    say(f"{number + 1}/{given.rounds}  {row}: " + ", ".join(_shown(sample)))
    finally:
        savers.close()
    return results.medians(
        list(rows), {"blocked_ratio": ("blocked_seconds", COPY), "durable_ratio": ("durable_seconds", RAW)}
    )


def _saving(row: str, bench: Bench, training: Training, savers: Savers, steps: int) -> Callable[[int], Sample]:
    check = ours_check if row in OURS_ROWS else stock_check

    def sample(number: int) -> Sample:
        """Train, save, and train until the save is durable."""
        path = bench.directory / f"step-{time.monotonic_ns()}"
        alone = [training.step() for _ in range(steps)]
        bench.state = training.state()
        before = {name: tensor.cpu().clone() for name, tensor in bench.state.items()} if number < 0 else {}
        training.wait()
        with Meter() as meter:
            begun = time.perf_counter()
            done = savers.save(row, bench, path)
            called = time.perf_counter()
            ended: list[float] = []
            done.add_done_callback(lambda _: ended.append(time.perf_counter()))
            beside = [training.step()]
            while not done.done():
                beside.append(training.step())
            done.result(timeout=WAIT_SECONDS)
        if before:
            bench.state = before  # a save has the state of its call, whatever later steps changed
            check(bench)(path)
        bench.remove(path)
        usual = statistics.median(alone)
        return {
            # A stream may wait although the caller does not: the excess of the first step is waiting time, too.
            "blocked_seconds": called - begun + max(0.0, beside[0] - usual),
            "call_seconds": called - begun,
            "durable_seconds": ended[0] - begun,
            "cpu_seconds": meter.cpu_seconds,
            "peak_extra_bytes": meter.peak_extra_bytes,
            # The blocked time includes the first step.
            **_step_times(beside[1:] or beside, usual),
        }

    return sample


def _replay(row: str, training: Training, directory: Path, steps: int, number: int) -> Sample:
    return sample_of(row, training, directory, number, steps)


def _step_times(taken: list[float], usual: float | None = None) -> Sample:
    usual = usual or statistics.median(taken)
    return {
        "step_seconds": statistics.median(taken),
        "step_ratio": statistics.median(taken) / usual,
        "step_ratio_max": max(taken) / usual,
        "steps": len(taken),
    }


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copy_out(training: Training, state: State, target: State) -> float:
    """Return the seconds of consecutive copies from the device to pinned memory: the minimum blocked time."""
    training.wait()
    begun = time.perf_counter()
    for name, tensor in state.items():
        target[name].copy_(tensor, non_blocking=True)
    training.wait()
    return time.perf_counter() - begun


def _raw(path: Path, image: limits.Image, count: int) -> float:
    try:
        return limits.raw_write(path, image, count)
    finally:
        path.unlink(missing_ok=True)


# --- results ------------------------------------------------------------------------------------------------------


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "blocked_seconds": ("blocked ms", lambda value: f"{value * 1e3:.1f}"),
    "call_seconds": ("of it: call", lambda value: f"{value * 1e3:.1f}"),
    "blocked_ratio": ("x copy", lambda value: f"{value:.2f}x"),
    "durable_seconds": ("durable s", lambda value: f"{value:.3f}"),
    "durable_ratio": ("x raw", lambda value: f"{value:.2f}x"),
    "step_seconds": ("step ms", lambda value: f"{value * 1e3:.2f}"),
    "step_ratio": ("x alone", lambda value: f"{value:.3f}x"),
    "step_ratio_max": ("slowest", lambda value: f"{value:.3f}x"),
    "steps": ("steps", lambda value: f"{value:.0f}"),
    "replay_rate": ("M updates/s", lambda value: f"{value / 1e6:,.0f}"),
    "replay_ratio": ("x optimizer", lambda value: f"{value:.2f}x"),
    "check_rate": ("checked GB/s", lambda value: f"{value / 1e9:.1f}"),
    "moved_bytes": ("moved MiB", lambda value: f"{value / MiB:,.0f}"),
    "cpu_seconds": ("CPU s", lambda value: f"{value:.2f}"),
    "peak_extra_bytes": ("RSS +MiB", lambda value: f"{value / MiB:,.0f}"),
}


def _shown(sample: Sample) -> list[str]:
    return [f"{title} {show(sample[key])}" for key, (title, show) in COLUMNS.items() if key in sample]


def table_of(medians: dict[str, dict[str, Any]]) -> Table:
    table = Table(
        title="a GPT that trains while it is saved", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("row", overflow="fold")
    for title, _ in COLUMNS.values():
        table.add_column(title, justify="right")
    for row, metrics in medians.items():
        if "error" not in metrics:
            values = [show(metrics[key]) if key in metrics else "-" for key, (_, show) in COLUMNS.items()]
            table.add_row(row, *values, style="bold" if row in OURS_ROWS else "")
    return table


def verdicts(medians: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Yield, for each of our rows, whether steps during a save reach the goal. An unmeasured row does not reach it."""
    return {
        f"{row}, steps while saving [x alone]": {
            "value": (value := medians.get(row, {}).get("step_ratio")),
            "limit": SLOWER_MAX,
            "outcome": "not measured" if value is None else "pass" if value <= SLOWER_MAX else "FAIL",
        }
        for row in OURS_ROWS
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    for name, default in (("layers", 12), ("width", 1024), ("vocabulary", 32768), ("context", 1024), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default, help="of the model; default: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="without a save, before each; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to measure; default: the user's cache")
    parser.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a figure is missed")
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu tries out the bench, its figures mean nothing")
    if min(given.layers, given.width, given.vocabulary, given.context, given.batch, given.steps, given.rounds) < 1:
        parser.error("sizes, --steps and --rounds must be above 0")
    return given


def main() -> int:
    given = arguments()
    logging.disable(logging.INFO)
    parent = given.dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierckpt-bench"
    parent.mkdir(parents=True, exist_ok=True)
    directory, begun = Path(tempfile.mkdtemp(prefix="gpu-", dir=parent)), time.monotonic()
    try:
        medians = measure(given, directory)
        about = machine(directory, 1.0, given.rounds, time.monotonic() - begun)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    about["device"] = torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device
    found = verdicts(medians)
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps({"machine": about, "verdicts": found, "gpu": medians}, indent=2) + "\n")
    console = Console(width=200 if not sys.stdout.isatty() else None)
    console.print(table_of(medians))
    for row, metrics in medians.items():
        if "error" in metrics:
            console.print(f"{row}: failed: {metrics['error']}", markup=False)
    for figure, verdict in found.items():
        value = "-" if verdict["value"] is None else f"{verdict['value']:.3f}"
        console.print(f"{figure}: {value} (at most {verdict['limit']}): {verdict['outcome']}", markup=False)
    failed = any("error" in medians.get(row, {"error": ""}) for row in OURS_ROWS)
    missed = any(verdict["outcome"] != "pass" for verdict in found.values())
    return int(failed or (given.strict and missed))


if __name__ == "__main__":
    sys.exit(main())
