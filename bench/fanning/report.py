"""Results of bench/fanout.py: a table, verdicts and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MB = 1e6
WIDTH = 120
Row = dict[str, Any]
COLUMNS = (
    "case",
    "N",
    "B, MB/s",
    "R/B",
    "S, MB",
    "time / bound",
    "seconds",
    "store / S",
    "peers / S",
    "CPU-s",
    "wrong",
)
STORE_MOST = 1.02
AIMS: tuple[tuple[str, str, float, Callable[[Row], float]], ...] = (
    ("time against the bound, N = 8", "shared", 1.15, lambda row: row["times_bound"]),
    ("the same, one slow uplink", "slow uplink", 1.3, lambda row: row["times_bound"]),
    ("the same, one slow node, of the others", "slow", 1.3, lambda row: row["times_bound"]),
    ("the same, a dead owner", "dead", 1.3, lambda row: row["times_bound"]),
    ("the same, a stopped owner", "stopped", 1.3, lambda row: row["times_bound"]),
    ("bytes from shared storage, N = 8", "shared", STORE_MOST, lambda row: row["store_times_size"]),
)
AIM_NODES = 8
GROWTH_MOST = 1.1
Verdict = tuple[str, float, float, bool]


def show(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print one line for each case."""
    console = console or Console(width=WIDTH)
    if not rows:
        return
    table = Table(title=f"chunks of {rows[0]['chunk_bytes'] // 1024} KiB")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        table.add_row(
            row["case"],
            str(row["nodes"]),
            f"{row['rate_bytes_per_second'] / MB:g}",
            f"{row['origin_factor']:g}",
            f"{row['size_bytes'] / MB:g}",
            *_cells(row),
        )
    console.print(table)
    for row in rows:
        if notes := row.get("notes"):
            told = ", ".join(f"{name} {_number(value)}" for name, value in notes.items())
            console.print(f"{row['case']}, N = {row['nodes']}: {told}")


def _cells(row: Row) -> list[str]:
    if "error" in row:
        return ["failed", *[""] * 5]
    size = row["size_bytes"]
    return [
        f"{row['times_bound']:.2f}",
        f"{row['seconds']:.1f}",
        f"{row['store_times_size']:.3f}",
        f"{row['bytes_by_source'].get('peer', 0) / size:.2f}",
        f"{row['cpu_seconds']:.1f}",
        str(len(row["problems"])) if row["problems"] else "0",
    ]


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Return name, limit, measured value and whether it passes, for each measured figure."""
    found: list[Verdict] = []
    good = [row for row in rows if "error" not in row]
    for name, case, most, figure in AIMS:
        values = [figure(row) for row in good if row["case"] == case and row["nodes"] == AIM_NODES]
        if values:
            found.append((name, most, max(values), max(values) <= most))
    for factor in sorted({row["origin_factor"] for row in good}):
        alike = [row for row in good if row["case"] == "shared" and row["origin_factor"] == factor]
        for rate in sorted({row["rate_bytes_per_second"] for row in alike}):
            few, many = (
                [row["times_bound"] for row in alike if (row["rate_bytes_per_second"], row["nodes"]) == (rate, count)]
                for count in (2, 16)
            )
            if few and many:
                growth = statistics.median(many) / statistics.median(few)
                name = f"time of N = 16 against N = 2, R = {factor:g} B"
                found.append((name, GROWTH_MOST, growth, growth <= GROWTH_MOST))
    wrong = sum(len(row.get("problems", ())) for row in rows) + sum("error" in row for row in rows)
    found.append(("wrong or missing files, and cases that failed", 0, wrong, wrong == 0))
    return found


def show_verdicts(found: Sequence[Verdict], console: Console | None = None) -> None:
    table = Table()
    for name in ("figure", "must reach", "measured", ""):
        table.add_column(name, justify="right" if name in ("must reach", "measured") else "left")
    for name, most, value, is_met in found:
        table.add_row(name, f"{most:g}", f"{value:.3f}", "met" if is_met else "missed")
    (console or Console(width=WIDTH)).print(table)


def _is(row: Row, case: str, factor: float, nodes: int) -> bool:
    return bool(row["case"] == case and row["origin_factor"] == factor and row["nodes"] == nodes)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw time against N in units of the bound, with and without sharing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axis = figure.add_subplot()
    good = [row for row in rows if "error" not in row and row["case"] in ("direct", "shared")]
    colours = {"direct": "#d98b2b", "shared": "#2b7bba"}
    styles = {1.0: "-", 4.0: "--"}
    for case in ("direct", "shared"):
        for factor in sorted({row["origin_factor"] for row in good if row["case"] == case}):
            counts = sorted({row["nodes"] for row in good if _is(row, case, factor, row["nodes"])})
            values = [
                statistics.median(row["times_bound"] for row in good if _is(row, case, factor, count))
                for count in counts
            ]
            label = f"{'each for itself' if case == 'direct' else 'sharing'}, R = {factor:g} B"
            axis.plot(counts, values, styles.get(factor, ":"), marker="o", color=colours[case], label=label)
    axis.axhline(1.0, color="#888888", linewidth=0.8)
    counts = sorted({row["nodes"] for row in good})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    top = max((row["times_bound"] for row in good), default=1.0)
    ticks = [2**power for power in range(8) if 2**power <= 2 * top]
    axis.set_yticks(ticks, [f"{tick}x" for tick in ticks])
    axis.set_xlabel("nodes")
    axis.set_ylabel("time until all have it, of max(S/R, S/B)")
    axis.set_title("One model to N nodes")
    axis.legend(frameon=False)
    figure.savefig(path)
