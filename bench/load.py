"""Load speed of checkpoints, compared with raw reads, stock PyTorch and safetensors.

    python bench/load.py [--cases large,many,small,rows,columns,model] [--rounds 5] [--scale 1.0] [--dir DIR]

Each sample is a separate process: the destination is allocated and touched, the page cache is dropped (cold; mincore
verifies it) or filled (warm), one load is timed, and its result compared. Rounds are interleaved. Prints a table for
each case and the verdicts, and writes bench/out/load.json. Needs root to drop the page cache. Progress is on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from saving.meter import Meter, Timing, drop_page_cache, machine, read_bytes, say
from saving.report import Verdict, verdict_table
from saving.states import scaled, tensors
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import tierckpt
from tierckpt.arena.memory import Memory
from tierckpt.disk.file_io import Resident
from tierckpt.types import ByteRange

HERE = Path(__file__).resolve().parent
OUT = HERE / "out" / "load.json"
GiB, MiB = 1 << 30, 1 << 20
READ_BYTES, READ_THREADS = 8 * MiB, 2
SAMPLE_SECONDS = 300.0
CASES = {
    "large": (32, 64 * MiB, "2 GiB in 32 tensors"),
    "many": (4000, MiB // 2, "2 GiB in 4,000 tensors"),
    "small": (50_000, 256, "50,000 tensors of 256 bytes"),
    "rows": (32, 64 * MiB, "the second quarter of the rows of 32 tensors, 512 MiB of 2 GiB"),
    "columns": (32, 64 * MiB, "half of the columns of 32 tensors, 1 GiB of 2 GiB"),
    "model": (32, 64 * MiB, "a seventh of the tensors: the model without its optimizer"),
}
MEASURED = ("cpu_seconds", "peak_extra_bytes", "times_read", "reader_seconds")
READER_CALLS = ("read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")
State = dict[str, torch.Tensor]


class Place:
    """Files of a case, in the format of each row."""

    def __init__(self, folder: Path, case: str, scale: float) -> None:
        self.folder, self.case = folder, case
        self.reader_seconds = 0.0
        """Of the load that was timed, how long the reader had it. DCP walks the state dict and plans in the rest."""
        count, size_bytes, self.title = CASES[case]
        self.count, self.size_bytes = (
            (count, scaled(size_bytes, scale)) if case != "small" else (scaled(count, scale), 256)
        )

    def state(self) -> State:
        state = tensors(self.count, self.size_bytes)
        return {name: value.reshape(64, -1) for name, value in state.items()} if self.is_part else state

    @property
    def is_part(self) -> bool:
        """True if the case loads a part of each tensor."""
        return self.case in {"rows", "columns"}

    def wanted(self) -> State:
        """Return the bytes that a load of this case returns."""
        state = self.state()
        if self.case == "model":
            return dict(list(state.items())[: self.count // 7])
        return {name: value[self.part(value)].clone() for name, value in state.items()} if self.is_part else state

    def part(self, value: torch.Tensor) -> tuple[slice, slice]:
        rows, columns = value.shape
        return (slice(16, 32), slice(0, columns)) if self.case == "rows" else (slice(0, rows), slice(0, columns // 2))

    def files(self, row: str) -> list[Path]:
        place = {"tierckpt": self.folder / "local", "raw": self.folder / "stock"}.get(row, self.folder / row)
        return [path for path in place.rglob("*") if path.is_file()] if place.is_dir() else [place]

    @property
    def uri(self) -> str:
        return f"{self.folder}/shared/step-1"


def save_all(place: Place) -> None:
    """Save the state in each row's format."""
    state = place.state()
    with_settings = {"local_root": place.folder / "local", "mover": "inline"}
    dcp.save(state, storage_writer=tierckpt.TierStorageWriter(place.uri, **with_settings), no_dist=True)
    tierckpt.wait(place.uri, **with_settings)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{place.folder}/stock", thread_count=2), no_dist=True)
    if place.case in WHOLE:
        from safetensors.torch import save_file

        torch.save(state, place.folder / "torch.load")
        save_file(state, place.folder / "safetensors")


# --- rows --------------------------------------------------------------------------------------------------------


def raw(place: Place, _: State) -> Callable[[], State]:
    """The limit: O_DIRECT into huge pages, two threads, 8 MiB a read; for a part, only its bytes."""
    share = {"rows": 4, "model": 7}.get(place.case, 1)  # columns are in all rows
    jobs = [
        (path, at, min(READ_BYTES, path.stat().st_size - at))
        for path in place.files("raw")
        for at in range(0, path.stat().st_size // share, READ_BYTES)
    ]
    todo, lock = iter(jobs), threading.Lock()
    files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _, _ in jobs}
    memories = [Memory.allocate(READ_BYTES) for _ in range(READ_THREADS)]

    def read(memory: Memory) -> None:
        while True:
            with lock:
                job = next(todo, None)
            if job is None:
                return
            path, at, size_bytes = job
            os.preadv(files[path], [memory.view[: -(-size_bytes // 4096) * 4096]], at)

    def run() -> State:
        threads = [threading.Thread(target=read, args=(memory,)) for memory in memories]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {}

    return run


def by_reader(make: Callable[[Place], Any]) -> Callable[[Place, State], Callable[[], State]]:
    def row(place: Place, into: State) -> Callable[[], State]:
        make(place).read_metadata()  # imports and per-process starts are not part of a load

        def load() -> State:
            reader = timed(make(place), place)
            if place.is_part:
                whole = place.size_bytes // 4 // 64
                items = [_part(name, place.part(torch.empty(64, whole, device="meta"))) for name in into]
                reader.set_up_storage_reader(reader.read_metadata(), True)
                reader.read_data(LoadPlan(items), _Into(into)).wait()
            else:
                dcp.load(into, storage_reader=reader, no_dist=True)
            return into

        return load

    return row


def timed(reader: Any, place: Place) -> Any:
    """Return ``reader`` with its seconds added up in ``place``, including its few calls of the planner."""

    def clocked(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                place.reader_seconds += time.perf_counter() - begun

        return run

    for name in READER_CALLS:
        setattr(reader, name, clocked(getattr(reader, name)))
    return reader


class _Into:
    """The planner of a rank that loads some rows."""

    def __init__(self, state: State) -> None:
        self.state = state

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.state[item.storage_index.fqn]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing."""


def _part(name: str, part: tuple[slice, slice]) -> ReadItem:
    index, zero = MetadataIndex(name, torch.Size([0, 0])), torch.Size([0, 0])
    offsets = torch.Size([one.start for one in part])
    lengths = torch.Size([one.stop - one.start for one in part])
    return ReadItem(LoadItemType.TENSOR, index, zero, index, offsets, lengths)


def torch_load(place: Place, _: State) -> Callable[[], State]:
    return lambda: torch.load(place.folder / "torch.load", weights_only=True)


def safetensors_load(place: Place, _: State) -> Callable[[], State]:
    from safetensors.torch import load_file

    return lambda: {name: value.clone() for name, value in load_file(place.folder / "safetensors").items()}


ROWS: dict[str, Callable[[Place, State], Callable[[], State]]] = {
    "raw": raw,
    "tierckpt": by_reader(
        lambda place: tierckpt.TierStorageReader(place.uri, local_root=place.folder / "local", mover="inline")
    ),
    "stock": by_reader(lambda place: dcp.FileSystemReader(f"{place.folder}/stock")),
    "torch.load": torch_load,
    "safetensors": safetensors_load,
}
WARM = {"tierckpt", "stock", "safetensors"}
WHOLE = {"large", "many", "small"}
"""Cases that other formats than DCP's can show too."""


# --- samples -----------------------------------------------------------------------------------------------------


def sample(place: Place, row: str, temperature: str) -> dict[str, float]:
    wanted = place.wanted()
    load = ROWS[row](place, {name: torch.ones_like(value) for name, value in wanted.items()})
    files = place.files(row)
    os.sync()
    drop_page_cache()
    if temperature == "warm":
        for path in files:
            path.read_bytes()
    elif any(is_cached(path) for path in files):
        raise SystemExit("the page cache was not dropped")
    read_before = read_bytes()
    with Meter() as meter:
        begun = time.perf_counter()
        got = load()
        seconds = time.perf_counter() - begun
    read = (read_bytes() - read_before) / sum(value.nbytes for value in wanted.values())
    if row != "raw" and not all(torch.equal(got[name], value) for name, value in wanted.items()):
        raise SystemExit(f"{row} loaded another state")
    found = meter.sample(Timing(seconds, seconds, {"times_read": read, "reader_seconds": place.reader_seconds}))
    return {key: found[key] for key in ("durable_seconds", *MEASURED)}


def is_cached(path: Path) -> bool:
    with path.open("rb") as file:
        return path.stat().st_size > MiB and Resident(file.fileno()).has(ByteRange(0, MiB))


def samples(given: argparse.Namespace, case: str, folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    _run(["--save", case, str(folder)], given)
    for number in range(given.rounds):
        rows = list(_rows(case))
        this_round: dict[str, dict[str, float]] = {}
        for row, temperature in rows if number % 2 == 0 else reversed(rows):
            name = row if temperature == "cold" else f"{row}, warm"
            this_round[name] = json.loads(_run(["--sample", case, str(folder), row, temperature], given))
            found[name].append(this_round[name])
        for name, one in this_round.items():
            ratios[name].append(one["durable_seconds"] / this_round["raw"]["durable_seconds"])
        say(f"[{case}] round {number + 1} of {given.rounds}")
    return {
        name: {
            "seconds": statistics.median(one["durable_seconds"] for one in found[name]),
            "times_raw": statistics.median(ratios[name]),
            **{key: statistics.median(one[key] for one in found[name]) for key in MEASURED},
        }
        for name, _ in ((row if heat == "cold" else f"{row}, warm", heat) for row, heat in _rows(case))
    }


def _rows(case: str) -> Iterator[tuple[str, str]]:
    for row in ROWS:
        if case not in WHOLE and row in {"torch.load", "safetensors"}:
            continue
        yield row, "cold"
        if row in WARM:
            yield row, "warm"


def _run(words: list[str], given: argparse.Namespace) -> str:
    command = [sys.executable, str(HERE / "load.py"), "--scale", str(given.scale), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAMPLE_SECONDS)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout.strip().rpartition("\n")[2]


# --- the program -------------------------------------------------------------------------------------------------


def table_of(case: str, rows: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=CASES[case][2])
    for column in ("", "s", "of it: reader", "x raw", "CPU-s", "extra RSS, MiB", "read, x wanted"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rows.items():
        extra = f"{row['peak_extra_bytes'] / MiB:.0f}"
        times = [f"{row[key]:.2f}" for key in ("seconds", "reader_seconds", "times_raw", "cpu_seconds")]
        table.add_row(name, *times, extra, f"{row['times_read']:.2f}")
    return table


def verdicts(tables: dict[str, dict[str, Any]]) -> Iterator[Verdict]:
    """Yield the verdicts for the cases that were run."""

    def of(case: str, metric: str, row: str = "tierckpt") -> float:
        return float(tables[case][row][metric])

    if "large" in tables:
        yield Verdict("dcp.load, 32 tensors, verified", of("large", "times_raw"), 1.2, "x raw")
        share = of("large", "cpu_seconds") / of("large", "cpu_seconds", "stock")
        yield Verdict("its CPU", share, 1 / 3, "x stock's")
        yield Verdict("its memory besides the tensors", of("large", "peak_extra_bytes") / MiB, 64, "MiB")
    if "many" in tables:
        yield Verdict("dcp.load, 4,000 tensors", of("many", "times_raw"), 1.4, "x raw")
    if "small" in tables:
        each = of("small", "reader_seconds") / CASES["small"][0] * 1e6
        yield Verdict("the reader, 50,000 small tensors", each, 20, "us each")
    if "rows" in tables:
        yield Verdict("bytes read for a part of the rows", of("rows", "times_read"), 1.1, "x wanted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--dir", type=Path, default=Path.home() / ".cache" / "tierckpt-bench")
    parser.add_argument("--save", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--sample", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.save:
        save_all(Place(Path(given.save[1]), given.save[0], given.scale))
        return
    if given.sample:
        case, folder, row, temperature = given.sample
        print(json.dumps(sample(Place(Path(folder), case, given.scale), row, temperature)))
        return
    if not drop_page_cache():
        raise SystemExit("the page cache cannot be dropped: run as root")
    tables: dict[str, Any] = {}
    begun = time.monotonic()
    for case in given.cases.split(","):
        given.dir.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"load-{case}-", dir=given.dir))
        try:
            tables[case] = samples(given, case, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        Console(width=100).print(table_of(case, tables[case]))
    found = list(verdicts(tables))
    Console(width=100).print(verdict_table(found))
    about = machine(given.dir, given.scale, given.rounds, time.monotonic() - begun)
    judged = {f"{each.figure} [{each.unit}]": each.as_json() for each in found}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"machine": about, "verdicts": judged, **tables}, indent=2) + "\n")


if __name__ == "__main__":
    main()
