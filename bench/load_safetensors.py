"""Load speed of safetensors files, compared with raw reads and other loaders.

    python bench/load_safetensors.py [--rounds 5] [--scale 1.0] [--rows "raw/2;ours;..."] [--memory new] [--dir DIR]

4 GiB in 4 files of bf16. Each sample has its own process, with imports done. The page cache is dropped (cold; fincore
verifies that) or filled (warm), and one load is timed. The caller owns every tensor: lazy ones are touched or cloned
within the time. Then every byte is compared. Rounds are interleaved, their rows in random order.

A virtual machine may return free memory to its host, and any load then waits for each page; a physical machine does
not. So unless ``--memory new`` is given, a process fills memory just before each sample and exits: the load gets pages
that the machine has.

Prints a table, writes bench/out/safetensors.json. Needs root to drop the page cache. Progress is on stderr.

    pip install --no-deps runai-model-streamer fastsafetensors tensorizer redis hiredis libnacl psutil humanize
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saving.meter import Meter, Timing, drop_page_cache, say

import tierckpt
from tierckpt.arena.memory import Memory
from tierckpt.disk.durable import read_record
from tierckpt.format.layout import model_read_modes
from tierckpt.format.manifest import digest_of

HERE = Path(__file__).resolve().parent
OUT = HERE / "out" / "safetensors.json"
GiB, MiB = 1 << 30, 1 << 20
FILES, TENSORS, TENSOR_BYTES = 4, 16, 64 * MiB
SAMPLE_SECONDS = 600.0
LIMIT = 1.1
PAUSE_SECONDS = 2.5
"""Between samples: after a rest, the disk serves the next reader faster."""
USE_MEMORY = """
import mmap, sys
memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(14)  # MADV_HUGEPAGE
memory.madvise(23)  # MADV_POPULATE_WRITE
"""
_PR_SET_THP_DISABLE = 41
State = dict[str, torch.Tensor]
Load = Callable[[], State]
_kept: list[Any] = []


# --- rows: each prepares (imports, opens nothing) and returns the function to time ---------------------------------


def raw(threads_max: int, read_bytes: int = 8 * MiB, *, keeps: bool = False) -> Callable[[Path], Load]:
    """The limit: O_DIRECT into a few huge-page buffers, or into mapped memory for the whole state.

    Buffers are faster if a hypervisor copies disk data: they stay in the processor's caches.
    """

    def row(folder: Path) -> Load:
        files = sorted(folder.glob("*.safetensors"))
        places = [(path, at) for path in files for at in range(0, path.stat().st_size, read_bytes)]
        descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files}
        memory = Memory.allocate((len(places) if keeps else threads_max) * read_bytes)
        _kept.append(memory)
        todo, lock = iter(enumerate(places)), threading.Lock()

        def read(thread: int) -> None:
            while True:
                with lock:
                    number, (path, at) = next(todo, (0, (None, 0)))
                if path is None:
                    return
                start = (number if keeps else thread) * read_bytes
                os.preadv(descriptors[path], [memory.view[start : start + read_bytes]], at)

        def load() -> State:
            threads = [threading.Thread(target=read, args=(thread,)) for thread in range(threads_max)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return {}

        return load

    return row


def ours(folder: Path) -> Load:
    load_all = tierckpt.load_safetensors  # imported here, as the others' are
    return lambda: load_all(folder)


def ours_in_small_pages(folder: Path) -> Load:
    """The gain of huge pages, which may cost more than they save if a hypervisor reclaims free ones."""
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    return ours(folder)


def ours_streamed(folder: Path) -> Load:
    stream = tierckpt.stream_safetensors
    return lambda: dict(stream(folder))


def mmap_cloned(folder: Path) -> Load:
    return lambda: {
        name: value.clone() for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()
    }


def mmap_touched(folder: Path) -> Load:
    def load() -> State:
        found = {}
        for path in sorted(folder.glob("*.safetensors")):
            for name, value in load_file(path).items():
                value.view(-1).view(torch.uint8)[::4096].sum()
                found[name] = value
        return found

    return load


def pread(folder: Path) -> Load:
    def load() -> State:
        found = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt", backend="pread") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return found

    return load


def runai(folder: Path) -> Load:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> State:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in sorted(folder.glob("*.safetensors"))])
            return {name: value.clone() for name, value in streamer.get_tensors()}

    return load


def fastsafetensors(folder: Path) -> Load:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load() -> State:
        loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: [str(path) for path in sorted(folder.glob("*.safetensors"))]})
        buffers = loader.copy_files_to_device()
        _kept.extend([loader, buffers])  # the tensors are views of it
        return {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}

    return load


def tensorizer(folder: Path) -> Load:
    from tensorizer import TensorDeserializer

    def load() -> State:
        found = {}
        for path in sorted(folder.glob("*.tensors")):
            deserializer = TensorDeserializer(str(path), device="cpu", num_readers=2)
            found |= dict(deserializer.items())
            _kept.append(deserializer)
        return found

    return load


def torch_load(folder: Path) -> Load:
    def load() -> State:
        found = {}
        for path in sorted(folder.glob("*.pt")):
            found |= torch.load(path, weights_only=True)
        return found

    return load


ROWS: dict[str, tuple[Callable[[Path], Load], str, str]] = {
    "raw/2": (raw(2), "", "safetensors"),
    "raw/12, 512 KiB": (raw(12, 512 << 10), "", "safetensors"),
    "raw/2, kept": (raw(2, keeps=True), "", "safetensors"),
    "ours": (ours, "", "safetensors"),
    "ours, 4 KiB pages": (ours_in_small_pages, "", "safetensors"),
    "ours, streamed": (ours_streamed, "", "safetensors"),
    "load_file, cloned": (mmap_cloned, "", "safetensors"),
    "load_file, touched": (mmap_touched, "", "safetensors"),
    "safe_open, pread": (pread, "", "safetensors"),
    "runai streamer": (runai, "runai_model_streamer", "safetensors"),
    "fastsafetensors": (fastsafetensors, "fastsafetensors", "safetensors"),
    "tensorizer": (tensorizer, "tensorizer", "tensors"),
    "torch.load": (torch_load, "", "pt"),
}
"""Name: description, required package, suffix of its files."""


# --- samples -------------------------------------------------------------------------------------------------------


def save_all(folder: Path, scale: float, wanted: list[str]) -> None:
    """Write the model in every format, and return the bytes of each tensor."""
    digests: dict[str, str] = {}
    numel = max(4096, int(TENSOR_BYTES * scale) // 2 // 4096 * 4096)
    for number in range(FILES):
        generator = torch.Generator().manual_seed(number)
        state = {
            f"layer.{number}.{index}": torch.randint(
                -(1 << 15), 1 << 15, (numel,), dtype=torch.int16, generator=generator
            )
            .view(torch.bfloat16)
            .view(64, -1)
            for index in range(TENSORS)
        }
        digests |= {name: digest_of(value.view(torch.uint8).numpy()) for name, value in state.items()}
        save_file(state, folder / f"model-{number}.safetensors")
        if "torch.load" in wanted:
            torch.save(state, folder / f"model-{number}.pt")
        if "tensorizer" in wanted and is_installed("tensorizer"):
            from tensorizer import TensorSerializer

            serializer = TensorSerializer(str(folder / f"model-{number}.tensors"))
            serializer.write_state_dict(state)
            serializer.close()
    (folder / "digests.json").write_text(json.dumps(digests))


def is_installed(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None


def sample(folder: Path, row: str, temperature: str, memory: str) -> dict[str, float]:
    make, _, ending = ROWS[row]
    load = make(folder)
    torch.ones(8, 8) @ torch.ones(8, 8)
    files = sorted(folder.glob(f"*.{ending}"))
    os.sync()
    drop_page_cache()
    if temperature == "warm":
        for path in files:
            path.read_bytes()
    elif (held := cached_bytes(files)) > MiB:
        raise SystemExit(f"the page cache was not dropped: {held} bytes of {folder} are in it")
    if memory == "used":  # a read through the page cache needs twice the memory
        size_bytes = 2 * sum(path.stat().st_size for path in files)
        subprocess.run([sys.executable, "-c", USE_MEMORY, str(size_bytes)], check=True)
    with Meter() as meter:
        begun = time.perf_counter()
        got = load()
        seconds = time.perf_counter() - begun
    if not row.startswith("raw"):
        compare(got, json.loads((folder / "digests.json").read_text()), row)
    found = meter.sample(Timing(seconds, seconds))
    return {
        "seconds": seconds,
        "cpu_seconds": found["cpu_seconds"],
        "peak_extra_bytes": found["peak_extra_bytes"],
        "minor_faults": found["minor_faults"],
    }


def compare(got: State, digests: dict[str, str], row: str) -> None:
    if got.keys() != digests.keys():
        raise SystemExit(f"{row} loaded other tensors than were saved")
    for name, digest in digests.items():
        if digest_of(got[name].contiguous().view(-1).view(torch.uint8).numpy()) != digest:
            raise SystemExit(f"{row} loaded something else than was saved as {name}")


def cached_bytes(files: list[Path]) -> int:
    """Return the bytes of ``files`` in the page cache, from fincore(1)."""
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, files)]
    return sum(map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()))


def measured(given: argparse.Namespace, folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    samples: dict[str, list[dict[str, float]]] = defaultdict(list)
    rounds: list[dict[str, float]] = []
    order = [
        (name, heat) for name in names for heat in ("cold", "warm") if heat == "cold" or not name.startswith("raw")
    ]
    for name in names:
        if not is_installed(ROWS[name][1]):
            table[name] = {"missing": "not installed"}
            order = [(other, heat) for other, heat in order if other != name]
    _run(["--save", str(folder)], given)
    _run(["--sample", str(folder), "ours", "cold", given.memory], given)  # this load measures how to read the disk
    for number in range(given.rounds):
        this_round: dict[str, dict[str, float]] = {}
        random.shuffle(order)
        for name, heat in order:
            time.sleep(PAUSE_SECONDS)
            label = name if heat == "cold" else f"{name}, warm"
            if "error" in table.get(label, {}):
                continue
            try:
                this_round[label] = json.loads(_run(["--sample", str(folder), name, heat, given.memory], given))
                samples[label].append(this_round[label])
            except SystemExit as error:
                table[label] = {"error": str(error)[-300:]}
        rounds.append({label: one["seconds"] for label, one in this_round.items()})
        say(f"round {number + 1} of {given.rounds}")
    for label, taken in samples.items():
        if "error" not in table.get(label, {}):
            table[label] = {key: statistics.median(one[key] for one in taken) for key in taken[0]}
    limits = [name for name in names if name.startswith("raw") and "seconds" in table.get(name, {})]
    limit = min(limits, key=lambda name: table[name]["seconds"], default="")
    for label in samples:
        ratios = [one[label] / one[limit] for one in rounds if label in one and limit in one]
        if "seconds" in table[label] and ratios:
            table[label]["times_raw"] = statistics.median(ratios)
    return table


def _run(words: list[str], given: argparse.Namespace) -> str:
    command = [
        sys.executable,
        str(HERE / "load_safetensors.py"),
        "--scale",
        str(given.scale),
        "--rows",
        given.rows,
        *words,
    ]
    environment = {"TIERCKPT_LOCAL_ROOT": str(given.dir / "local")} | os.environ
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAMPLE_SECONDS, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout.strip().rpartition("\n")[2]


# --- the program ---------------------------------------------------------------------------------------------------


def table_of(rows: dict[str, dict[str, Any]], size_bytes: float, memory: str) -> Table:
    table = Table(title=f"{size_bytes / GiB:g} GiB of safetensors in {FILES} files to CPU, {memory} memory")
    for column in ("", "s", "x raw", "CPU-s", "extra RSS, MiB", "faults"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in sorted(rows.items(), key=lambda item: item[1].get("seconds", float("inf"))):
        if "seconds" not in row:
            table.add_row(name, row.get("missing") or "failed", *[""] * 4)
            continue
        extra = f"{row['peak_extra_bytes'] / MiB:.0f}"
        cpu, faults = f"{row['cpu_seconds']:.2f}", f"{row['minor_faults']:.0f}"
        table.add_row(name, f"{row['seconds']:.2f}", f"{row.get('times_raw', math.nan):.2f}", cpu, extra, faults)
    return table


def figures(rows: dict[str, dict[str, Any]], size_bytes: float) -> dict[str, bool]:
    """The verdicts: limits of the measured figures."""
    if "seconds" not in rows.get("ours", {}) or "times_raw" not in rows["ours"]:
        return {}
    mine = rows["ours"]
    cold = {
        name: row["seconds"]
        for name, row in rows.items()
        if "seconds" in row and not name.startswith(("raw", "ours")) and not name.endswith(", warm")
    }
    return {
        f"cold <= {LIMIT} x raw": mine["times_raw"] <= LIMIT,
        "cold, no slower than any other": all(mine["seconds"] <= seconds for seconds in cold.values()),
        "extra RSS <= 1 x the tensors + 32 MiB": mine["peak_extra_bytes"] <= size_bytes + 32 * MiB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=";".join(ROWS), help="names, between semicolons")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--dir", type=Path, default=Path.home() / ".cache" / "tierckpt-bench")
    parser.add_argument("--save", help=argparse.SUPPRESS)
    parser.add_argument("--memory", choices=("used", "new"), default="used", help="see above")
    parser.add_argument("--sample", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.rows.split(";")
    if given.save:
        save_all(Path(given.save), given.scale, names)
        return
    if given.sample:
        folder, row, temperature, memory = given.sample
        print(json.dumps(sample(Path(folder), row, temperature, memory)))
        return
    if not drop_page_cache():
        raise SystemExit("the page cache cannot be dropped: run as root")
    given.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="safetensors-", dir=given.dir))
    try:
        rows = measured(given, folder, names)
        size_bytes = float(sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    finally:
        ways = [entry["mode"] for entry in read_record(model_read_modes(given.dir / "local")).values()]
        for path in (folder, given.dir / "local"):
            shutil.rmtree(path, ignore_errors=True)
    Console(width=100).print(table_of(rows, size_bytes, given.memory))
    print("measured by the first load to be the way to read this disk:", *ways or ["nothing"])
    verdicts = figures(rows, size_bytes)
    for what, holds in verdicts.items():
        print(f"{'ok  ' if holds else 'MISS'} {what}")
    OUT.parent.mkdir(exist_ok=True)
    document = {
        "rounds": given.rounds,
        "scale": given.scale,
        "memory": given.memory,
        "ways": ways,
        "rows": rows,
        "figures": verdicts,
    }
    OUT.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
