"""Cost of a multi-step save, compared with a synchronous save and a lazy one.

    python bench/replay.py [--parameters-m 8] [--rounds 3] [--copy-ms 400] [--step-ms 100]

A throttled link simulates the link between an accelerator and its host: the copy of the state (float32 parameters and
both moments, 12 bytes a parameter) takes ``copy-ms``, the forward and backward passes ``step-ms``. Gradients are
reduced and sent in bfloat16. Each row trains before, during and after one save; its stall is the time that the training
thread waited for the save. The first save of a row allocates the memory that later saves reuse; it is not counted.
"synchronous" waits for the whole copy. "lazy" copies during the next forward and backward passes and waits before the
update. The others are windows of K steps, the last one on a link of twice the bandwidth, which fits a part and all
gradients into one step. Every copy is compared with its state. The table shows the predicted stall next to the measured
one: the bytes of parts and gradients that do not fit into the steps, and 1 + r (K - 1) / 2.

The second table has the time of a step during a window, and with a gradient log, relative to a plain step, and to a
step during which a bare thread moves the same bytes at the same rate, as a device's copy engine would. Samples are
interleaved; figures are medians of single steps without the waits for the link, and CPU seconds of a step.

The third table needs no link: the rate of replay relative to the optimizer itself, and the size of a step in the log.
Prints the tables, and writes bench/out/replay.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tierckpt.planning.transfer_times import Traffic
from tierckpt.replay.apply import Replay
from tierckpt.replay.capture import Capture, Step
from tierckpt.replay.frame import Frame, encode
from tierckpt.replay.link import CATCH_UP_SECONDS, CHUNK_BYTES, GRADIENTS, PARTS, Link, TensorCopy
from tierckpt.replay.log import GradientLog
from tierckpt.replay.multi_step import MultiStepStager
from tierckpt.replay.optimizers import layout_digest, parameters_of

OUT = Path(__file__).parent / "out" / "replay.json"
TENSORS = 256
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
}
WINDOWS = (2, 3, 4, 5, 6, 7, 8)
NOTHING, WINDOW, LOG = "nothing", "consecutive windows, K = 7", "a gradient log"
SHARE = 2 / 12
BACKGROUND_ROUNDS = 4
"""For each of the others: steps are compared within a few percent."""


class Job:
    """AdamW over float32 parameters, with gradients that were reduced in bfloat16, and a step of a fixed time."""

    def __init__(self, parameters: int, step_seconds: float, **options: Any) -> None:
        torch.manual_seed(0)
        count = parameters // TENSORS
        self.weights = [torch.nn.Parameter(torch.randn(count)) for _ in range(TENSORS)]
        self.gradients = [torch.randn(count).bfloat16().float() for _ in range(TENSORS)]
        self.optimizer = torch.optim.AdamW(self.weights, **options)
        self.step_seconds = step_seconds
        self.train()

    def train(self) -> None:
        """Run forward and backward passes of a fixed time, then the update."""
        self.optimizer.zero_grad()
        ends = time.perf_counter() + self.step_seconds
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            weight.grad = gradient
        time.sleep(max(0.0, ends - time.perf_counter()))
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "weights": list(self.weights)}

    def tensors(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[one] for one in self.weights]
        return [one.detach() for one in self.weights] + [
            s[n] for s in states for n in ("step", "exp_avg", "exp_avg_sq")
        ]

    @property
    def state_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.tensors())


def synchronous(job: Job, link: Link, _: int) -> tuple[float, float]:
    begun = time.perf_counter()
    copied = link.copy(job.tensors(), PARTS)
    copied.done.result()
    stall = time.perf_counter() - begun
    check(copied.result, job.tensors())
    return stall, copied.size_bytes / job.state_bytes


def lazy(job: Job, link: Link, _: int) -> tuple[float, float]:
    wanted = [one.clone() for one in job.tensors()]
    stalls: list[float] = []
    copied = link.copy(job.tensors(), PARTS)

    def wait(*_: Any) -> None:
        begun = time.perf_counter()
        copied.done.result()
        stalls.append(time.perf_counter() - begun)

    hook = job.optimizer.register_step_pre_hook(wait)
    job.train()
    hook.remove()
    check(copied.result, wanted)
    return sum(stalls), copied.size_bytes / job.state_bytes


def windowed(job: Job, link: Link, steps: int) -> tuple[float, float]:
    with MultiStepStager(job.optimizer, steps, link=link) as stager:
        pending = stager.begin(job.state)
        kept: dict[int, list[torch.Tensor]] = {}
        for number in range(1, steps + 2):
            job.train()
            kept[number] = [one.clone() for one in job.tensors()[: 2 * TENSORS]]
            stager.end_of_step()
        snapshot = pending.result()
    check(snapshot.state["weights"], kept[snapshot.steps][:TENSORS])
    return snapshot.blocked_seconds, snapshot.moved_bytes / job.state_bytes


class NotedLink(Link):
    """Counts the bytes that it moves in each step, by priority."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.step = 0
        self.notes: dict[tuple[int, int], int] = {}

    def copy(self, sources: Sequence[torch.Tensor], priority: int, *, yields_to_update: bool = False) -> TensorCopy:
        made, place = super().copy(sources, priority, yields_to_update=yields_to_update), (self.step, priority)
        made.done.add_done_callback(lambda _: self.notes.update({place: made.size_bytes}))
        return made


class BareLink:
    """Only the link: a thread that moves as many bytes, in equal pieces, at the same rate."""

    def __init__(self, rate: float, size_bytes: int) -> None:
        self._memory = [torch.ones(size_bytes, dtype=torch.uint8) for _ in range(2)]
        self._rate, self._size_bytes = rate, size_bytes
        self._asked: queue.Queue[int | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def move(self, size_bytes: int) -> None:
        self._asked.put(size_bytes)

    def wait(self) -> None:
        self._asked.join()

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _work(self) -> None:
        free_at, at = 0.0, 0
        target, source = (one.data_ptr() for one in self._memory)
        while (left := self._asked.get()) is not None:
            while left:
                count = min(left, CHUNK_BYTES, self._size_bytes - at)
                free_at = max(free_at, time.monotonic() - CATCH_UP_SECONDS) + count / self._rate
                time.sleep(max(0.0, free_at - time.monotonic()))
                ctypes.memmove(target + at, source + at, count)
                left, at = left - count, (at + count) % self._size_bytes
            self._asked.task_done()


class BackgroundCosts:
    """Time a step with each mechanism, interleaved with plain steps and with steps during which only the link is busy:
    it moves the same bytes after the same steps, as a device's copy engine would."""

    STEPS = 7

    def __init__(self, job: Job, rate: float) -> None:
        self.job = job
        self.links, self.bare = {WINDOW: NotedLink(rate), LOG: NotedLink(rate)}, BareLink(rate, job.state_bytes)
        self.rows: dict[str, Callable[[], None]] = {
            NOTHING: lambda: self.steps(NOTHING, lambda _: None),
            WINDOW: self.window,
            f"the link alone, as for {WINDOW}": lambda: self.alone(WINDOW),
            LOG: self.log,
            f"the link alone, as for {LOG}": lambda: self.alone(LOG),
        }
        self.seconds: dict[str, list[float]] = {name: [] for name in self.rows}
        self.cpu_seconds: dict[str, list[float]] = {name: [] for name in self.rows}

    def run(self, rounds: int) -> dict[str, dict[str, float]]:
        for number in range(rounds):
            for name, row in list(self.rows.items())[:: -1 if number % 2 else 1]:
                cpu = time.process_time()
                row()
                self.cpu_seconds[name].append((time.process_time() - cpu) / self.STEPS)
        for link in (*self.links.values(), self.bare):
            link.close()
        return {
            name: {"step_seconds": statistics.median(seconds), "cpu_seconds": statistics.median(self.cpu_seconds[name])}
            for name, seconds in self.seconds.items()
        }

    def steps(self, name: str, end_of_step: Callable[[int], None], waited: Callable[[], float] = lambda: 0.0) -> None:
        for number in range(1, self.STEPS + 1):
            begun, before = time.perf_counter(), waited()
            self.job.train()
            end_of_step(number)
            self.seconds[name].append(time.perf_counter() - begun - (waited() - before))

    def window(self) -> None:
        link = self.links[WINDOW]

        def end_of_step(number: int) -> None:
            link.step = number
            stager.end_of_step()

        with MultiStepStager(self.job.optimizer, self.STEPS, link=link) as stager:
            link.step = 0
            pending = stager.begin(self.job.state)
            self.steps(WINDOW, end_of_step, lambda: stager.waited_seconds)
            pending.result(60)

    def log(self) -> None:
        link = self.links[LOG]

        def end_of_step(number: int) -> None:
            link.step = number
            gradients.end_of_step(number)

        with (
            tempfile.TemporaryDirectory(dir=OUT.parent) as directory,
            GradientLog(self.job.optimizer, Path(directory), link=link) as gradients,
        ):
            link.step = 0
            gradients.begin("base")
            self.steps(LOG, end_of_step)
            gradients.sync()

    def alone(self, what: str) -> None:
        link, notes, step = self.bare, self.links[what].notes, 0

        def end_of_step(number: int) -> None:
            nonlocal step
            step = number
            link.move(notes.get((step, PARTS), 0))

        hook = self.job.optimizer.register_step_pre_hook(lambda *_: link.move(notes.get((step, GRADIENTS), 0)))
        end_of_step(0)
        self.steps(f"the link alone, as for {what}", end_of_step)
        hook.remove()
        link.wait()


def check(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    if not all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)):
        raise RuntimeError("a copy differs from its state")


def replay_rates(parameters: int) -> list[dict[str, Any]]:
    rows = []
    for name, options in {
        "foreach": {"foreach": True},
        "for-loop": {"foreach": False},
        "fused": {"fused": True},
    }.items():
        job = Job(parameters, 0.0, **options)
        capture = Capture(job.optimizer)
        keys = [one.key for one in parameters_of(job.optimizer)]
        states = {key: {n: v.clone() for n, v in job.optimizer.state[w].items()}
                  for key, w in zip(keys, job.weights, strict=True)}  # fmt: skip
        replay = Replay(type(job.optimizer), {k: w.detach().clone() for k, w in zip(keys, job.weights, strict=True)},
                        states, 0)  # fmt: skip
        job.train()
        capture.close()
        steps = capture.take_steps()
        replay.apply(steps[0])
        again, itself = [], []
        for number in range(12):
            begun = time.perf_counter()
            job.optimizer.step()
            itself.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            replay.apply(Step(number + 2, steps[0].hyperparameters, steps[0].gradients))
            again.append(time.perf_counter() - begun)
        link = Link()
        copied = link.copy(list(steps[0].gradients.values()), GRADIENTS)
        copied.done.result()
        link.close()
        narrow = Step(1, steps[0].hyperparameters, dict(zip(steps[0].gradients, copied.result, strict=True)))
        head, views, _ = encode(Frame(1, {"": narrow}, {"": layout_digest(job.optimizer)}))
        size = len(head) + sum(map(len, views))
        own, replayed = statistics.median(itself), statistics.median(again)
        rows.append({"implementation": name, "step_seconds": own, "replay_seconds": replayed, "ratio": own / replayed,
                     "frame_bytes_per_parameter": size / (job.state_bytes / 12)})  # fmt: skip
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parameters-m", type=float, default=8.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--copy-ms", type=float, default=400.0)
    options.add_argument("--step-ms", type=float, default=100.0)
    options.add_argument("--threads", type=int, default=1, help="of torch, for the update and for replayed steps")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    parameters = int(given.parameters_m * 1e6) // TENSORS * TENSORS
    job = Job(parameters, given.step_ms / 1e3)
    rate, seconds = job.state_bytes / (given.copy_ms / 1e3), given.step_ms / 1e3
    rows = [
        ("synchronous", synchronous, 1, rate),
        ("lazy", lazy, 1, rate),
        *((f"K = {k}", windowed, k, rate) for k in WINDOWS),
        ("K = 7, twice the bandwidth", windowed, 7, 2 * rate),
    ]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name, *_ in rows}
    links = {name: Link(width) for name, *_, width in rows}
    for number in range(1 + given.rounds):
        for name, save, steps, _ in rows if number % 2 == 0 else rows[::-1]:
            sample = save(job, links[name], steps)
            if number:  # the first save allocates memory
                found[name].append(sample)
            job.train()
    for link in links.values():
        link.close()
    console = Console()
    table = Table("a save", "stall, ms", "spread", "by arithmetic", "bytes moved / state", "1 + r (K - 1) / 2")
    results = []
    for name, _, steps, width in rows:
        stalls = [1e3 * one for one, _ in found[name]]
        moved = statistics.median(one for _, one in found[name])
        uniform = 1 + SHARE * (steps - 1) / 2
        traffic = Traffic(
            job.state_bytes, int(SHARE * job.state_bytes), width, 0.0 if name == "synchronous" else seconds
        )
        computed = 1e3 * traffic.stall_seconds([1.0] * steps)
        table.add_row(name, f"{statistics.median(stalls):.0f}", f"{min(stalls):.0f} to {max(stalls):.0f}",
                      f"{computed:.0f}", f"{moved:.3f}", f"{uniform:.3f}")  # fmt: skip
        results.append({"save": name, "stall_ms": stalls, "computed_ms": computed, "moved": moved, "formula": uniform})
    console.print(f"{parameters / 1e6:.0f} M parameters, {job.state_bytes / 1e6:.0f} MB of state, copied in "
                  f"{given.copy_ms:.0f} ms; forward and backward {given.step_ms:.0f} ms")  # fmt: skip
    console.print(table)
    OUT.parent.mkdir(exist_ok=True)
    loops = BackgroundCosts(job, rate).run(BACKGROUND_ROUNDS * given.rounds)
    table = Table("a step with", "ms", "x a plain step", "x a step with the link", "processor seconds of a step")
    for name, row in loops.items():
        link = loops.get(f"the link alone, as for {name}")
        table.add_row(name, f"{1e3 * row['step_seconds']:.1f}",
                      f"{row['step_seconds'] / loops[NOTHING]['step_seconds']:.3f}",
                      f"{row['step_seconds'] / link['step_seconds']:.3f}" if link else "",
                      f"{row['cpu_seconds']:.3f}")  # fmt: skip
    console.print(table)
    rates = replay_rates(parameters)
    table = Table("AdamW", "its own step, ms", "made again, ms", "ratio", "bytes of a step in the log, a parameter")
    for row in rates:
        table.add_row(row["implementation"], f"{1e3 * row['step_seconds']:.1f}", f"{1e3 * row['replay_seconds']:.1f}",
                      f"{row['ratio']:.2f}", f"{row['frame_bytes_per_parameter']:.4f}")  # fmt: skip
    console.print(table)
    OUT.write_text(json.dumps({"saves": results, "loops": loops, "replay": rates, "options": vars(given)}, indent=1))


if __name__ == "__main__":
    main()
