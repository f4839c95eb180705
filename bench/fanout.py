"""Time until N nodes have one model, and the bytes the store sends. Uses namespaces with rate-limited links.

    python bench/fanout.py [--cases shared,direct,...] [--nodes 2,4,8,16] [--origin 1,4] [--size-mb 192] [--rate-mb 4]
    python bench/fanout.py clean        # remove the namespaces of a killed run

B is the rate of each node's link, each way; R that of the store; S the size of the model. Every node has a namespace, a
local root, an agent and one `tierckpt prefetch`; the store is tests/servers/origin.py. Times run from the first
prefetch to the last, with Python and tierckpt already imported, and every file of every node is compared. "direct" is
the same without peers, with a quarter of the bytes. All other cases have 8 nodes.

Needs root and iproute2. Prints a table and the verdicts, writes bench/out/fanout.json and docs/fanout.svg. Progress is
on stderr. Exit code: 0; 1 if a byte was wrong or a case failed, with --strict also if a figure is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # for the tests' servers and checks

from fanning import report  # noqa: E402
from fanning.cases import PLAYS, Setup, run  # noqa: E402
from fanning.network import ORIGIN, PREFIX, Network, is_running, remove_left  # noqa: E402

from tests.servers.cluster import Model  # noqa: E402
from tests.servers.fleet import Fleet  # noqa: E402

OUT = HERE / "out" / "fanout.json"
PLOT = HERE.parent / "docs" / "fanout.svg"
SMOKE_PLOT = HERE / "out" / "fanout.svg"
MB = 1e6
DIRECT_SHARE = 0.25
MANY = 8
FILES = 4
FULL_SIZE_MB = 128.0
"""A run with less is a smoke test: its picture goes to bench/out."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", nargs="?", choices=["run", "clean"], default="run")
    parser.add_argument("--cases", default=",".join(PLAYS), help="comma-separated, of: %(default)s")
    parser.add_argument("--nodes", default="2,4,8,16", help="for shared and direct; default %(default)s")
    parser.add_argument("--fault-nodes", type=int, default=8, help="for the other cases; default %(default)s")
    parser.add_argument("--origin", default="1,4", help="R / B, for shared and direct; default %(default)s")
    parser.add_argument("--fault-origin", type=float, default=4.0, help="R / B for the others; default %(default)s")
    parser.add_argument("--size-mb", type=float, default=192.0, help="S; default %(default)s")
    parser.add_argument("--rate-mb", type=float, default=4.0, help="B, per second; default %(default)s")
    parser.add_argument(
        "--rate-mb-of-many", type=float, default=2.0, help="B of more than 8 nodes, at most; default %(default)s"
    )
    parser.add_argument("--chunk-kb", type=int, default=256, help="of 1024 bytes; default %(default)s")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=None, help="for the nodes' disks; default: the temporary directory")
    parser.add_argument("--plot", type=Path, default=None, help="where the picture goes; default docs/fanout.svg")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a figure is missed")
    given = parser.parse_args()
    given.cases = given.cases.split(",")
    if unknown := set(given.cases) - set(PLAYS):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    return given


def setups(given: argparse.Namespace) -> Iterator[Setup]:
    size, chunk = int(given.size_mb * MB), given.chunk_kb * 1024
    for _ in range(given.rounds):
        for case in given.cases:
            if case not in ("direct", "shared"):
                yield Setup(case, given.fault_nodes, given.rate_mb * MB, given.fault_origin, size, chunk)
                continue
            share = DIRECT_SHARE if case == "direct" else 1.0
            for factor in map(float, given.origin.split(",")):
                for nodes, rate in rates(given, [int(nodes) for nodes in given.nodes.split(",")]):
                    yield Setup(case, nodes, rate * MB, factor, int(size * share), chunk)


def rates(given: argparse.Namespace, counts: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Yield the number of nodes of each run, and B. Runs with many nodes would be bound by the processors, so they and
    the runs they are compared with have slower links."""
    slow = min(given.rate_mb, given.rate_mb_of_many)
    for nodes in counts:
        yield nodes, slow if nodes > MANY else given.rate_mb
    if slow < given.rate_mb and 2 in counts and max(counts) > MANY:
        yield 2, slow


def links(rate: float, factor: float) -> dict[str, float]:
    """Return the rates of one bare connection over such links: the control of the network."""
    with Network.running(2, rate, rate * factor) as network:
        found = {"between nodes": network.measured(1, 2) / rate, "from the store": network.measured(ORIGIN, 1) / rate}
    for name, share in found.items():
        say(f"a link {name} carries {100 * share:.1f} % of {rate / MB:g} MB/s")
    return found


def measure(given: argparse.Namespace, folder: Path) -> list[report.Row]:
    rows: list[report.Row] = []
    models: dict[int, Model] = {}
    with Fleet.running(folder / "logs") as fleet:
        for setup in setups(given):
            size = setup.size_bytes
            if size not in models:
                sizes = {f"model-{number}.safetensors": size // FILES for number in range(FILES)}
                models[size] = Model.make(folder / "store" / "models", f"m-{size}", sizes)
            model = models[size]
            say(f"{setup.case}, N = {setup.nodes}, R = {setup.origin_factor:g} B: {setup.bound_seconds:.1f} s at best")
            began = time.monotonic()
            row = run(setup, fleet, model, folder / "nodes")
            came = row["error"] if "error" in row else f"{row['times_bound']:.2f} x"
            say(f"  {came} ({time.monotonic() - began:.0f} s in all)")
            if "logs" in row:
                say(row.get("told", "") + row["logs"])
            rows.append(row)
    return rows


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    given = arguments()
    if given.verb == "clean":
        for left in (*Path(tempfile.gettempdir()).glob(f"{PREFIX}-bench-*"), *_in(given.dir)):
            if not is_running(int(left.name.split("-")[2])):
                shutil.rmtree(left, ignore_errors=True)
                say(f"removed {left}")
        say(f"removed {len(remove_left())} namespaces")
        return 0
    if os.geteuid() or shutil.which("ip") is None:
        say("bench/fanout.py makes network namespaces: it needs root, and iproute2")
        return 2
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-bench-{os.getpid()}-", dir=given.dir))
    try:
        carried = links(given.rate_mb * MB, given.fault_origin)
        rows = measure(given, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.show(rows)
    found = report.verdicts(rows)
    report.show_verdicts(found)
    OUT.parent.mkdir(exist_ok=True)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    OUT.write_text(json.dumps({"machine": machine, "links": carried, "rows": rows, "verdicts": found}, indent=1))
    if any(row["case"] in ("direct", "shared") and "error" not in row for row in rows):
        report.draw(rows, given.plot or (PLOT if given.size_mb >= FULL_SIZE_MB else SMOKE_PLOT))
    is_wrong = any(row.get("problems") or "error" in row for row in rows)
    return int(is_wrong or (given.strict and not all(is_met for *_, is_met in found)))


def _in(folder: Path | None) -> Iterator[Path]:
    yield from folder.glob(f"{PREFIX}-bench-*") if folder is not None else ()


if __name__ == "__main__":
    sys.exit(main())
