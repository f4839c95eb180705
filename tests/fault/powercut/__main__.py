"""The command line of the power-cut harness; see the package."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fault.powercut import initrd, machine
from tests.fault.powercut.bugs import BUGS
from tests.fault.powercut.campaign import BUG_KILLS, Figures, unshare_mounts, work

KILLS_PER_TASK = 5
"""Kills of one task; the figures are printed after each task."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if os.geteuid() != 0:
        print("mounting disks needs root: run as root", file=sys.stderr)
        return 2
    unshare_mounts()
    folder = Path(tempfile.mkdtemp(prefix="powercut-", dir=options.folder))
    try:
        return _run(options, folder)
    except initrd.MissingDependencyError as missing:
        print(f"missing dependency: {missing}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tests.fault.powercut", description="power cuts of a virtual machine that saves"
    )
    parser.add_argument("--cuts", type=int, default=100, help="kills of a machine, over all file systems")
    parser.add_argument("--replays", type=int, default=5, help="replays of each kill's log with a volatile disk cache")
    parser.add_argument("--file-systems", default="ext4,xfs", type=lambda text: text.split(","))
    parser.add_argument("--bug", default=[], action="append", choices=[*BUGS, "all"], help="find this seeded bug too")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", default="/dev/shm", help="for disks and memory: 1 GiB, and 100 MiB a job")
    parser.add_argument(
        "--kernels", type=Path, default=Path.home() / ".cache/tierckpt-powercut", help="kept between runs"
    )
    parser.add_argument("--report", type=Path, help="write the figures here, as JSON")
    return parser


def _run(options: argparse.Namespace, folder: Path) -> int:
    print(f"seed {options.seed}", flush=True)
    kernel, modules = initrd.unpack_kernel(options.kernels)
    mount = folder / "mount"
    start = initrd.build(folder, modules, mount)
    found: list[Figures] = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, context, initializer=unshare_mounts) as workers:
        for number, kind in enumerate(options.file_systems):
            frozen = machine.boot(folder / kind, kind, kernel, start)
            print(f"{kind}: booted and frozen", flush=True)
            share = (options.cuts + number) // len(options.file_systems)  # the last one gets the remainder
            kills = [min(KILLS_PER_TASK, share - at) for at in range(0, share, KILLS_PER_TASK)]
            tasks = [(frozen, folder, mount, options, "", count, number) for number, count in enumerate(kills)]
            found.append(_collect(workers, tasks, Figures(kind)))
            bugs = list(BUGS) if "all" in options.bug else options.bug
            found += [
                _collect(workers, [(frozen, folder, mount, options, bug, BUG_KILLS, 0)], Figures(kind, bug))
                for bug in bugs
            ]
    if options.report:
        options.report.write_text(json.dumps([figures.to_json() for figures in found], indent=2))
    return _summarise(found, options.cuts)


def _collect(workers: concurrent.futures.Executor, tasks: Sequence[tuple[Any, ...]], whole: Figures) -> Figures:
    for done in concurrent.futures.as_completed([workers.submit(work, *task) for task in tasks]):
        whole.merge(done.result())
        print(whole.line(), flush=True)
    for example in [] if whole.bug else whole.examples:
        print(example, flush=True)
    return whole


def _summarise(found: Sequence[Figures], planned: int) -> int:
    """Print the sum; return 0 if it is as planned, else 1."""
    real = [figures for figures in found if not figures.bug]
    kills = sum(figures.kills for figures in real)
    wrong = sum(figures.wrong.total() for figures in real)
    print(
        f"{kills} kills and {sum(figures.replays for figures in real)} replays, "
        f"{sum(figures.acknowledged for figures in real)} acknowledged places, {wrong} cuts with a violation"
    )
    missed = {figures.bug for figures in found if figures.bug} - {figures.bug for figures in found if figures.wrong}
    for figures in found:
        if figures.bug:
            print(f"seeded on {figures.file_system}: {figures.bug}: {_bug_result(figures)}")
    if kills < planned:
        print(f"only {kills} of {planned} kills interrupted an action")
    if missed:
        print(f"seeded bugs not found on any file system: {', '.join(sorted(missed))}")
    return int(bool(wrong or missed or kills < planned))


def _bug_result(figures: Figures) -> str:
    if not figures.wrong:
        return f"not found in {figures.cuts} cuts"
    kinds = ", ".join(f"{count} {name}" for name, count in figures.wrong.items())
    return f"found ({kinds}) within {figures.cuts} cuts, by {', '.join(sorted(figures.by_way))}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
