"""Tables of the medians, and a verdict for each promised figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import training
from .rows import LIMIT, MEMCPY, OURS, OURS_ASYNC, OURS_SAVE, RAW
from .states import CASES, MiB

Tables = dict[str, dict[str, dict[str, Any]]]

_LIMITS = {RAW, MEMCPY, training.NOTHING, training.DISK}


def kind_of(row: str) -> str:
    return LIMIT if row in _LIMITS else OURS if row.startswith("tierckpt") else "stock"


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    metric: str
    title: str
    show: Callable[[float], str]


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


def _mib(value: float) -> str:
    return f"{round(value / MiB):,}"  # rounded first: no "-0"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.1f}"


def _number(value: float) -> str:
    return f"{value:,.0f}"


_SAVE = [
    Column("blocked_seconds", "blocked s", _seconds),
    Column("blocked_ratio", "x memcpy", _ratio),
    Column("durable_seconds", "durable s", _seconds),
    Column("durable_seconds_min", "min", _seconds),
    Column("durable_seconds_max", "max", _seconds),
    Column("durable_ratio", "x raw", _ratio),
    Column("cpu_seconds", "CPU s", lambda value: f"{value:.2f}"),
    Column("peak_extra_bytes", "RSS +MiB", _mib),
    Column("minor_faults", "faults", _number),
]
_WRITE_DATA = [Column("write_data_microseconds_per_tensor", "write_data us/tensor", lambda value: f"{value:.1f}")]
_STEPS = [
    Column("step_seconds", "step ms", lambda value: f"{value * 1e3:.2f}"),
    Column("step_seconds_p95", "p95 ms", lambda value: f"{value * 1e3:.2f}"),
    Column("ratio_to_nothing", "x nothing", lambda value: f"{value:.3f}x"),
    Column("ratio_to_disk", "x disk alone", lambda value: f"{value:.3f}x"),
    Column("steps", "steps a round", _number),
]
_LAZY = [
    Column("blocked_seconds", "blocked ms", _milliseconds),
    Column("call_seconds", "of it: call", _milliseconds),
    Column("fence_seconds", "fence", _milliseconds),
    Column("step_seconds", "step alone ms", _milliseconds),
    Column("step_with_save_seconds", "step with save ms", _milliseconds),
    Column("durable_seconds", "durable s", _seconds),
    Column("peak_extra_bytes", "RSS +MiB", _mib),
]
_RSS = [
    Column("durable_seconds", "durable s", _seconds),
    Column("resident_extra_bytes", "resident MiB, first to last", _mib),
    Column("growth_bytes", "from save 5 on", lambda value: f"{value / MiB:+.1f}"),
    Column("peak_extra_bytes", "peak in a save +MiB", lambda value: f"{value / MiB:.1f}"),
    Column("minor_faults_first", "faults, first save", _number),
    Column("minor_faults", "then, each", _number),
    Column("minor_faults_max", "at most", _number),
]
_COLUMNS = {"small": _SAVE + _WRITE_DATA, "steps": _STEPS, "lazy": _LAZY, "rss": _RSS}
_STYLE = {LIMIT: "cyan", OURS: "bold", "stock": ""}


def table_of(case: str, rows: dict[str, dict[str, Any]]) -> Table:
    title = f"{case}: {CASES[case].title if case in CASES else training.TITLES[case]}"
    columns = _COLUMNS.get(case, _SAVE)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("row", overflow="fold")
    for column in columns:
        table.add_column(column.title, justify="right")
    for row, metrics in rows.items():
        if "error" in metrics or "missing" in metrics:
            continue
        values = [_cell(row, column, metrics) for column in columns]
        table.add_row(Text(row), *values, style=_STYLE[kind_of(row)])
    return table


def _cell(row: str, column: Column, metrics: dict[str, Any]) -> str:
    value = metrics.get(column.metric)
    # The raw writer blocks no caller. memcpy takes the better of two passes, but its CPU counts both.
    beside_the_point = {RAW: ("blocked",), MEMCPY: ("durable", "cpu")}.get(row, ())
    if value is None or column.metric.startswith(beside_the_point) or math.isnan(value):
        return "-"
    return column.show(value)


def absences(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each failed or missing row."""
    for row, metrics in rows.items():
        if "error" in metrics:
            yield f"{row}: failed: {metrics['error']}"
        if "missing" in metrics:
            yield f"{row}: not measured: {metrics['missing']}"


# --- verdicts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One promised figure: ``value`` must not exceed ``limit``. None means not measured, which does not pass."""

    figure: str
    value: float | None
    limit: float
    unit: str

    @property
    def outcome(self) -> str:
        if self.value is None:
            return "not measured"
        return "pass" if self.value <= self.limit else "FAIL"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"outcome": self.outcome}


def verdicts(tables: Tables) -> list[Verdict]:
    """Return the verdicts for the cases that were run."""
    found = []
    for case, judge in _JUDGES.items():
        if case in tables:
            found += list(judge(_Medians(tables[case])))
    return found


class _Medians:
    """Medians of one case. A figure of a missing row is None, and so are the figures derived from it."""

    def __init__(self, rows: dict[str, dict[str, Any]]) -> None:
        self.rows = rows

    def of(self, row: str, metric: str) -> float | None:
        return self.rows.get(row, {}).get(metric)

    def best_stock(self, metric: str, *, only: Callable[[str], bool] = lambda row: True) -> float | None:
        values = [
            metrics[metric]
            for row, metrics in self.rows.items()
            if kind_of(row) == "stock" and metric in metrics and only(row)
        ]
        return min(values, default=None)

    def share(self, row: str, metric: str, base: float | None) -> float | None:
        value = self.of(row, metric)
        return value / base if value is not None and base else None


def _large(medians: _Medians) -> Iterator[Verdict]:
    cpu = medians.best_stock("cpu_seconds")
    blocked = medians.best_stock("blocked_seconds", only=lambda row: row.startswith("async_save"))
    yield Verdict("dcp.save to durable, 32 tensors", medians.of(OURS_SAVE, "durable_ratio"), 1.25, "x raw")
    yield Verdict(
        "dcp.save CPU, 32 tensors", medians.share(OURS_SAVE, "cpu_seconds", cpu), 0.35, "x the best stock row"
    )
    pytorch = medians.best_stock("cpu_seconds", only=lambda row: not row.startswith("safetensors"))
    yield Verdict(
        "dcp.save CPU, 32 tensors", medians.share(OURS_SAVE, "cpu_seconds", pytorch), 0.35, "x the best row of PyTorch"
    )
    yield Verdict("async_save blocked, warm", medians.of(OURS_ASYNC, "blocked_ratio"), 1.2, "x memcpy")
    yield Verdict(
        "async_save blocked, warm", medians.share(OURS_ASYNC, "blocked_seconds", blocked), 1.0, "x the best stock row"
    )
    yield Verdict("async_save to durable, warm", medians.of(OURS_ASYNC, "durable_ratio"), 1.3, "x raw")
    peak = medians.of(OURS_ASYNC, "peak_extra_bytes")
    yield Verdict("extra memory of a warm async_save", peak / MiB if peak is not None else None, 64, "MiB")


def _medium(medians: _Medians) -> Iterator[Verdict]:
    yield Verdict("dcp.save to durable, 4,000 tensors", medians.of(OURS_SAVE, "durable_ratio"), 1.5, "x raw")


def _small(medians: _Medians) -> Iterator[Verdict]:
    value = medians.of(OURS_SAVE, "write_data_microseconds_per_tensor")
    yield Verdict("write_data, 50,000 small tensors", value, 10.0, "us per tensor")


def _ddp(medians: _Medians) -> Iterator[Verdict]:
    value = medians.of(OURS_SAVE, "durable_ratio")
    yield Verdict("DDP 4 ranks, dcp.save to durable", value, 1.3, "x raw of one copy")


def _steps(medians: _Medians) -> Iterator[Verdict]:
    yield Verdict("step time while flushing", medians.of(training.OURS_STEPS, "ratio_to_disk"), 1.05, "x disk alone")


def _lazy(medians: _Medians) -> Iterator[Verdict]:
    blocked = medians.of(training.OURS_LAZY, "blocked_seconds")
    yield Verdict("async_save blocked, lazy", blocked * 1e3 if blocked is not None else None, 10.0, "ms")


def _rss(medians: _Medians) -> Iterator[Verdict]:
    for row, how in ((OURS_ASYNC, "async_save"), (OURS_SAVE, "dcp.save")):
        grown = medians.of(row, "growth_bytes")
        state = medians.of(row, "state_bytes")
        value = grown / state if grown is not None and state else None
        yield Verdict(f"growth over {training.SAVES} saves, {how}", value, 0.01, "x the state")


_JUDGES: dict[str, Callable[[_Medians], Iterator[Verdict]]] = {
    "large": _large,
    "medium": _medium,
    "small": _small,
    "ddp": _ddp,
    "steps": _steps,
    "lazy": _lazy,
    "rss": _rss,
}


def verdict_table(found: list[Verdict]) -> Table:
    table = Table(title="verdicts", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for title, justify in (("figure", "left"), ("measured", "right"), ("must reach", "right"), ("", "left")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    colour = {"pass": "green", "FAIL": "bold red", "not measured": "yellow"}
    for each in found:
        measured = "-" if each.value is None else f"{each.value:.2f} {each.unit}"
        table.add_row(
            each.figure, measured, f"<= {each.limit:g} {each.unit}", Text(each.outcome, style=colour[each.outcome])
        )
    return table


def show(tables: Tables, found: list[Verdict], console: Console) -> None:
    for case, rows in tables.items():
        console.print(table_of(case, rows))
        for line in absences(rows):
            console.print(line, style="yellow", markup=False, highlight=False)
        console.print()
    console.print(verdict_table(found))
