"""Load speed with another number of ranks: four save and two load, and the other way round.

    python bench/load_ranks.py [--cases "4 to 2,2 to 4"] [--rounds 5] [--scale 1.0] [--dir DIR]

1 GiB in 32 tensors, each a DTensor in rows over all ranks. Each sample is a separate job: its ranks have their tensors
and a process group, the page cache is dropped, all ranks load at once, and every value is compared. Seconds are those
of the slowest rank, CPU is the sum. Rounds are interleaved. Prints a table for each case and writes
bench/out/load_ranks.json. Needs root to drop the page cache. Progress is on stderr.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from saving.meter import Meter, Timing, combined, drop_page_cache, read_bytes, say
from saving.states import scaled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tierckpt
from tierckpt.arena.memory import Memory

OUT = Path(__file__).resolve().parent / "out" / "load_ranks.json"
MiB = 1 << 20
CASES = {"4 to 2": (4, 2), "2 to 4": (2, 4), "4 to 4": (4, 4)}
TENSORS, COLUMNS, FLOAT_BYTES = 32, 1024, 4
READ_BYTES = 8 * MiB
JOB_SECONDS = 300.0
State = dict[str, DTensor]


def state_of(scale: float, *, filled: bool) -> State:
    """Return tensors whose values encode their position (16,777,216 distinct ones); ones unless ``filled``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = scaled(32 * MiB // COLUMNS // FLOAT_BYTES // 4, scale) * 4
    mine = rows // dist.get_world_size()
    first = dist.get_rank() * mine * COLUMNS
    state = {}
    for number in range(TENSORS):
        if filled:
            local = (torch.arange(first, first + mine * COLUMNS, dtype=torch.float32) + number).view(mine, COLUMNS)
        else:
            local = torch.ones(mine, COLUMNS)
        state[f"layer.{number}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return state


def save(folder: Path, scale: float) -> None:
    """Save the state in each row's format."""
    state, settings = state_of(scale, filled=True), {"local_root": folder / "local", "mover": "inline"}
    dcp.save(state, storage_writer=tierckpt.TierStorageWriter(uri_of(folder), **settings))
    tierckpt.wait(uri_of(folder), **settings)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "stock"))


def uri_of(folder: Path) -> str:
    return f"{folder}/shared/step-1"


# --- rows ----------------------------------------------------------------------------------------------------------


def raw(folder: Path, _: State) -> Callable[[], None]:
    """The limit: each rank reads its share of all bytes with O_DIRECT into huge pages; four threads in total."""
    files = sorted((folder / "stock").glob("*.distcp"))
    jobs = [(path, at) for path in files for at in range(0, path.stat().st_size, READ_BYTES)]
    jobs = jobs[dist.get_rank() :: dist.get_world_size()]
    opened = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files}
    memories = [Memory.allocate(READ_BYTES) for _ in range(max(1, 4 // dist.get_world_size()))]

    def run() -> None:
        todo, lock = iter(jobs), threading.Lock()

        def work(memory: Memory) -> None:
            while True:
                with lock:
                    job = next(todo, None)
                if job is None:
                    return
                os.preadv(opened[job[0]], [memory.view], job[1])

        with ThreadPoolExecutor(len(memories)) as pool:
            for done in [pool.submit(work, memory) for memory in memories]:
                done.result()

    return run


def by_reader(make: Callable[[Path], Any], folder: Path, into: State) -> Callable[[], None]:
    make(folder).read_metadata()
    return lambda: dcp.load(into, storage_reader=make(folder))


def ours(folder: Path) -> Any:
    return tierckpt.TierStorageReader(uri_of(folder), local_root=folder / "local", mover="inline")


ROWS: dict[str, Callable[[Path, State], Callable[[], None]]] = {
    "raw": raw,
    "tierckpt": partial(by_reader, ours),
    "stock": partial(by_reader, lambda folder: dcp.FileSystemReader(folder / "stock")),
}


# --- jobs ----------------------------------------------------------------------------------------------------------


def job(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``work`` as every rank of a job and return the results."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as meeting:
        answers = context.SimpleQueue()
        ranks = [
            context.Process(target=_rank, args=(rank, world, f"{meeting}/store", answers, work, arguments))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(JOB_SECONDS)
            if rank.exitcode != 0:
                for one in ranks:
                    one.kill()
                raise SystemExit(f"a rank ended with {rank.exitcode}")
        return [answers.get() for _ in ranks]


def _rank(
    rank: int, world: int, store: str, answers: Any, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world)  # as a launcher sets it
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    answers.put(work(*arguments))
    dist.barrier()
    dist.destroy_process_group()


def sample(folder: Path, scale: float, row: str) -> dict[str, float]:
    """Return the figures of one rank's load."""
    into = state_of(scale, filled=False)
    load = ROWS[row](folder, into)
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
        drop_page_cache()
    dist.barrier()
    before = read_bytes()
    with Meter() as meter:
        begun = time.perf_counter()
        load()
        seconds = time.perf_counter() - begun
    read = read_bytes() - before
    if row != "raw":
        for name, value in state_of(scale, filled=True).items():
            if not torch.equal(into[name].to_local(), value.to_local()):
                raise SystemExit(f"{row} loaded another state: {name}")
    return meter.sample(Timing(seconds, seconds, {"read_bytes": float(read)}))


def samples(case: str, folder: Path, rounds: int, scale: float) -> dict[str, dict[str, float]]:
    savers, loaders = CASES[case]
    job(savers, save, folder, scale)
    size_bytes = sum(path.stat().st_size for path in (folder / "stock").iterdir())
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds):
        for row in ROWS if number % 2 == 0 else reversed(ROWS):
            found[row].append(combined(job(loaders, sample, folder, scale, row)))
            say(f"[{case}] {number + 1}/{rounds} {row}: {found[row][-1]['durable_seconds']:.2f} s")
    against = {
        row: statistics.median(
            one["durable_seconds"] / limit["durable_seconds"] for one, limit in zip(all_of, found["raw"], strict=True)
        )
        for row, all_of in found.items()
    }
    return {
        row: {
            "seconds": statistics.median(one["durable_seconds"] for one in all_of),
            "times_raw": against[row],
            "cpu_seconds": statistics.median(one["cpu_seconds"] for one in all_of),
            "peak_extra_bytes": statistics.median(one["peak_extra_bytes"] for one in all_of),
            "times_read": statistics.median(one["read_bytes"] for one in all_of) / size_bytes,
        }
        for row, all_of in found.items()
    }


# --- the program ---------------------------------------------------------------------------------------------------


def table_of(case: str, rows: dict[str, dict[str, float]]) -> Table:
    table = Table(title=f"{case} ranks")
    for column in ("", "s", "x raw", "CPU-s", "extra RSS, MiB", "read, x saved"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rows.items():
        times = [f"{row[key]:.2f}" for key in ("seconds", "times_raw", "cpu_seconds")]
        table.add_row(name, *times, f"{row['peak_extra_bytes'] / MiB:.0f}", f"{row['times_read']:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--dir", type=Path, default=Path.home() / ".cache" / "tierckpt-bench")
    given = parser.parse_args()
    if not drop_page_cache():
        raise SystemExit("the page cache cannot be dropped: run as root")
    tables = {}
    for case in given.cases.split(","):
        given.dir.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="load-ranks-", dir=given.dir))
        try:
            tables[case] = samples(case, folder, given.rounds, given.scale)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        Console(width=100).print(table_of(case, tables[case]))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"rounds": given.rounds, "scale": given.scale, **tables}, indent=2) + "\n")


if __name__ == "__main__":
    main()
