"""Save speed and its effect on training, compared with the machine's limits, stock PyTorch and other libraries.

    python bench/save.py [--cases large,medium,...] [--scale 1.0] [--rounds 5] [--dir DIR]

Each case has its own processes. Rounds of rows are interleaved, alternating forwards and backwards. Before the
measurement, each row's result is loaded back and compared. Prints a table for each case and the verdicts, writes
bench/out/save.json and docs/save.svg. Progress is on stderr.

Exit code: 0; 1 if a case or a row of tierckpt failed, or with --strict if a figure is missed; 2 usage.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from saving import limits, report, training, worker
from saving.meter import machine, say
from saving.plot import draw
from saving.states import CASES, GiB

HERE = Path(__file__).resolve().parent
OUT = HERE / "out" / "save.json"
PLOT = HERE.parent / "docs" / "save.svg"
SMOKE_PLOT = HERE / "out" / "save.svg"
CASE_TIMEOUT_SECONDS = 1800.0
ALL_CASES = [*CASES, *training.CASES]
SPACE_BYTES = 8 * GiB
MEMORY_BYTES = 18 * GiB

# DCP's checkpoint process imports this file, and would log several lines for each save.
logging.disable(logging.INFO)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(ALL_CASES), help="comma-separated, of: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="of the bytes of every case; 0.05 is a smoke test")
    parser.add_argument(
        "--rounds", type=int, help="default 5; below scale 0.5 it is 0: one pass that verifies, nothing warm"
    )
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to measure; default: the user's cache")
    parser.add_argument("--plot", type=Path, default=None, help="where the picture goes; default docs/save.svg")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a figure is missed")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.cases = [case.strip() for case in given.cases.split(",") if case.strip()]
    if unknown := sorted(set(given.cases) - set(ALL_CASES)):
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(ALL_CASES)}")
    if given.rounds is None:
        given.rounds = 5 if given.scale >= 0.5 else 0
    if given.scale <= 0 or given.rounds < 0:
        parser.error("--scale must be above 0, --rounds not below")
    return given


def disk(given: argparse.Namespace, parser_error: Any) -> Path:
    """Return a new directory on the disk to measure. Raises for a memory file system."""
    parent = (
        given.dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierckpt-bench"
    ).absolute()
    if limits.is_memory(parent):
        parser_error(f"{parent} is on {limits.filesystem_type(parent)}, which is memory. Give --dir on a disk")
    parent.mkdir(parents=True, exist_ok=True)
    need, free = SPACE_BYTES * min(given.scale, 1.0), shutil.disk_usage(parent).free
    if free < need:
        parser_error(f"{parent} has {free / GiB:.1f} GiB free, this needs {need / GiB:.1f}. Give --dir or --scale")
    if (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")) < MEMORY_BYTES * given.scale:
        say(f"only {memory / GiB:.0f} GiB of memory free: stagers and page cache may not fit, consider --scale")
    directory = Path(tempfile.mkdtemp(prefix="save-", dir=parent))
    if not limits.takes_direct(directory):
        directory.rmdir()
        parser_error(f"{parent} ({limits.filesystem_type(parent)}) refuses O_DIRECT, the limit here. Give --dir")
    return directory


def run_case(case: str, given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return the medians of a case, ``{row: {metric: value}}``; or a row ``case`` with its error."""
    home = directory / case
    home.mkdir()
    begun, result = time.monotonic(), home / "result.json"
    task = worker.Task(case, given.scale, given.rounds, str(home), str(result))
    world = CASES[case].world if case in CASES else 1
    ranks = [_start(task, rank, world, address) for address in [_free_port()] for rank in range(world)]
    try:
        codes = _wait(ranks)
        if any(codes) or not result.exists():
            return {"case": {"error": f"workers ended with {codes}; see stderr"}}
        say(f"[{case}] done in {time.monotonic() - begun:.0f} s")
        return dict(json.loads(result.read_text()))
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
        shutil.rmtree(home, ignore_errors=True)


def _start(task: worker.Task, rank: int, world: int, port: int) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    environment = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"} | {k: str(v) for k, v in place.items()}
    command = [sys.executable, str(HERE / "save.py"), "--worker", task.encode()]
    return subprocess.Popen(command, env=os.environ | environment, stdout=sys.stderr)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Return the exit codes. If a rank dies, the others are killed, as they would wait for it."""
    deadline = time.monotonic() + CASE_TIMEOUT_SECONDS
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return [rank.poll() for rank in ranks]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_json(tables: report.Tables, about: dict[str, Any], found: list[report.Verdict]) -> None:
    verdicts = {f"{each.figure} [{each.unit}]": each.as_json() for each in found}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"machine": about, "verdicts": verdicts, **tables}, indent=2) + "\n")
    say(f"figures written to {OUT}")


def failed(tables: report.Tables, found: list[report.Verdict], *, strict: bool) -> bool:
    broken = any(
        "error" in metrics and report.kind_of(row) != "stock"
        for rows in tables.values()
        for row, metrics in rows.items()
    )
    lost = any("case" in rows for rows in tables.values())
    return broken or lost or (strict and any(each.outcome != "pass" for each in found))


def main() -> int:
    given = arguments()
    if given.worker:
        worker.run(worker.Task.decode(given.worker))
        return 0
    begun = time.monotonic()

    def usage(problem: str) -> None:
        say(f"bench/save.py: {problem}")
        raise SystemExit(2)

    directory = disk(given, usage)
    try:
        # A smoke test measures nothing, so its cases may run concurrently.
        with ThreadPoolExecutor(1 if given.rounds else os.cpu_count()) as pool:
            done = pool.map(lambda case: run_case(case, given, directory), given.cases)
            tables = dict(zip(given.cases, done, strict=True))
        about = machine(directory, given.scale, given.rounds, time.monotonic() - begun)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    found = report.verdicts(tables)
    report.show(tables, found, Console(width=None if sys.stdout.isatty() else 170))
    if given.scale < 1 or not given.rounds:
        print(f"Scale {given.scale:g}, {given.rounds} rounds: the figures say nothing about the promises.")
    write_json(tables, about, found)
    plot = given.plot or (PLOT if given.scale >= 1 else SMOKE_PLOT)
    label = f"{about['cores']} cores, {about['file_system']}, torch {about['torch']}, median of {given.rounds}"
    if draw(tables, label, plot):
        say(f"picture written to {plot}")
    return 1 if failed(tables, found, strict=given.strict) else 0


if __name__ == "__main__":
    sys.exit(main())
