"""Save and restore of a state with many small tensors, compared with torch.save, torch.load and stock DCP.

    python bench/state.py [--parameters 13000] [--rounds 5] [--dir DIR] [--profile FILE]

A module of so many parameters of 64 elements and its AdamW (50,000 tensors) are saved and restored into new objects.
Rounds are interleaved in one process. The medians of wall and processor time, and their ratios to torch.save and
torch.load with load_state_dict, are printed and written to bench/out/state.json. Each restored state is compared.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tierckpt import Checkpointer

OUT = Path(__file__).resolve().parent / "out" / "state.json"
AIMS = {"save to commit": 0.5, "blocked": 0.1, "restore": 0.4}
State = tuple[nn.Module, torch.optim.Optimizer]


class Parameters(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList(torch.randn(64) for _ in range(min(100, count - at)))
                                    for at in range(0, count, 100))  # fmt: skip


def fresh(count: int, *, stepped: bool = False) -> State:
    model = Parameters(count)
    optimizer = torch.optim.AdamW(model.parameters())
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def same(one: State, other: State) -> bool:
    pairs = list(zip(one[0].parameters(), other[0].parameters(), strict=True))
    weights = all(torch.equal(a, b) for a, b in pairs)
    return weights and all(
        torch.equal(one[1].state[a][key], value) for a, b in pairs for key, value in other[1].state[b].items()
    )


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class TorchSave:
    def __init__(self, home: Path, *, durable: bool) -> None:
        self.path, self.durable = home / f"torch-{durable}.pt", durable

    def save(self, state: State) -> dict[str, tuple[float, float]]:
        begun = clock()
        torch.save({"model": state[0].state_dict(), "optimizer": state[1].state_dict()}, self.path)
        if self.durable:
            sync(self.path)
        return {"save to commit": since(begun), "blocked": since(begun)}

    def restore(self, state: State) -> None:
        found = torch.load(self.path, weights_only=True)
        state[0].load_state_dict(found["model"])
        state[1].load_state_dict(found["optimizer"])


class StockDCP:
    def __init__(self, home: Path) -> None:
        self.home, self.count = home / "dcp", 0

    def save(self, state: State) -> dict[str, tuple[float, float]]:
        shutil.rmtree(self.home, ignore_errors=True)
        begun = clock()
        model, optimizer = get_state_dict(*state)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=self.home, no_dist=True)
        return {"save to commit": since(begun), "blocked": since(begun)}

    def restore(self, state: State) -> None:
        model, optimizer = get_state_dict(*state)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=self.home, no_dist=True)
        set_state_dict(*state, model_state_dict=model, optim_state_dict=optimizer)


class Tierckpt:
    def __init__(self, home: Path) -> None:
        self.uri, self.root, self.step = str(home / "run"), str(home / "root"), 0
        self.saver = Checkpointer(self.uri, local_root=self.root, drain=False, keep_last=2)

    def save(self, state: State) -> dict[str, tuple[float, float]]:
        self.step += 1
        begun = clock()
        committed = self.saver.save(self.step, {"model": state[0], "optimizer": state[1]})
        blocked = since(begun)
        committed.result()
        return {"save to commit": since(begun), "blocked": blocked}

    def restore(self, state: State) -> None:
        assert self.saver.restore({"model": state[0], "optimizer": state[1]}) == self.step


def clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(begun: tuple[float, float]) -> tuple[float, float]:
    wall, processor = clock()
    return wall - begun[0], processor - begun[1]


def measure(ways: dict[str, Any], count: int, rounds: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the medians of wall and processor seconds by method and figure. The first round is a checked warm-up."""
    state = fresh(count, stepped=True)
    found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(rounds + 1):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            gc.collect()
            figures = ways[name].save(state)
            target = fresh(count)
            gc.collect()
            begun = clock()
            ways[name].restore(target)
            figures["restore"] = since(begun)
            if not turn:
                assert same(state, target), f"{name} restored another state"
                continue
            for figure, seconds in figures.items():
                found[name][figure].append(seconds)
        print(f"round {turn} of {rounds}", file=sys.stderr)
    return {
        name: {
            figure: (statistics.median(wall for wall, _ in taken), statistics.median(cpu for _, cpu in taken))
            for figure, taken in figures.items()
        }
        for name, figures in found.items()
    }


def profile(way: Tierckpt, count: int, path: Path) -> None:
    """Write a profile of the calling thread, sorted by each function's own time."""
    state = fresh(count, stepped=True)
    way.save(state)

    def profiled(what: str, call: Callable[[], object]) -> None:
        profiler = cProfile.Profile()
        profiler.runcall(call)
        with path.open("a") as stream:
            stream.write(f"== {what}\n")
            statistics_ = pstats.Stats(profiler, stream=stream).strip_dirs()
            statistics_.sort_stats("tottime").print_stats(30)
            statistics_.sort_stats("cumtime").print_stats(60)

    profiled("save", lambda: way.save(state))
    target = fresh(count)
    profiled("restore", lambda: way.restore(target))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=13_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to measure; default: the user's cache")
    parser.add_argument("--profile", type=Path, default=None, help="append a profile of tierckpt instead of measuring")
    given = parser.parse_args()
    parent = given.dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierckpt-bench"
    parent.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="state-", dir=parent))
    ours = Tierckpt(home)
    try:
        if given.profile is not None:
            profile(ours, given.parameters, given.profile)
            return 0
        base = "torch.save, fsync"
        ways = {base: TorchSave(home, durable=True), "torch.save": TorchSave(home, durable=False),
                "stock DCP": StockDCP(home), "tierckpt": ours}  # fmt: skip
        found = measure(ways, given.parameters, given.rounds)
    finally:
        ours.saver.close()
        shutil.rmtree(home, ignore_errors=True)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"torch": torch.__version__, "parameters": given.parameters, **found}, indent=2) + "\n")
    for figure, aim in AIMS.items():
        print(f"{figure} (aim: {aim} x {base})")
        for name, figures in found.items():
            (wall, cpu), (limit, limit_cpu) = figures[figure], found[base][figure]
            print(f"  {name:20} {wall:7.3f} s {wall / limit:6.2f} x   CPU {cpu:7.3f} s {cpu / limit_cpu:6.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
