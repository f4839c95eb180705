"""Plots of the planner's results. Imports matplotlib only to draw one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...disk.durable import translated
from ...errors import ConfigError, MissingExtraError
from ...planning import Sizing, ettr, size
from ...planning.sizer import TierRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ...planning.goodput import Goodput
    from ...planning.simulator import SimulationResult

SUFFIXES = (".svg", ".png", ".pdf")
CURVE_POINTS = 300
DASHES = ("-", "--", "-.", ":", (0, (6, 2, 1, 2, 1, 2)))
"""A style of each curve, so that curves that coincide are all seen."""
COLOURS = ("#9c9c9c", "#d98b2b", "#2b7bba", "#1f9e6e", "#8a5fb0")
PARTS = {
    "kept_seconds": ("kept", "#1f9e6e"),
    "lost_seconds": ("lost, trained again", "#c23b3b"),
    "stalled_seconds": ("stalled by checkpoints", "#d98b2b"),
    "restarting_seconds": ("restarting", "#9c9c9c"),
    "loading_seconds": ("loading", "#2b7bba"),
    "waiting_seconds": ("waiting for nodes", "#8a5fb0"),
}

STRETCHES = {
    "kept": ("kept", "#1f9e6e"),
    "unsaved": ("not saved yet", "#b5c94c"),
    "lost": ("lost by a failure", "#c23b3b"),
    "down": ("no process", "#ffffff"),
    "starting": ("starting", "#9c9c9c"),
    "loading": ("loading", "#2b7bba"),
    "warming": ("first step", "#8a5fb0"),
    "blocked": ("blocked by saves", "#d98b2b"),
    "other": ("after the last step", "#d0d0d0"),
}


def plot_sizing(path: Path, sizing: Sizing) -> Figure:
    """Raise MissingExtraError without matplotlib, ConfigError if the suffix is not of a picture."""
    with _figure(path, 3) as figure:
        for axis, draw in zip(figure.axes, (_draw_ettr, _draw_restores, _draw_stalls), strict=True):
            draw(axis, sizing)
    return figure


def plot_runs(path: Path, runs: Sequence[SimulationResult]) -> Figure:
    with _figure(path) as figure:
        axis = figure.axes[0]
        shares = {field: [100 * getattr(run, field) / run.wall_seconds for run in runs] for field in PARTS}
        kept = shares["kept_seconds"]
        expected = [(100 * run.expected_ettr, row) for row, run in enumerate(runs) if run.expected_ettr is not None]
        lowest = min(*kept, 99.999, *(share for share, _ in expected))
        begin = max(0.0, lowest - (100 - lowest) / 3)
        digits = max(2, 1 - math.floor(math.log10(100 - begin)))
        left = [0.0] * len(runs)
        for field, (label, colour) in PARTS.items():
            if max(shares[field]) > (100 - begin) / 1000:
                axis.barh(range(len(runs)), shares[field], left=left, color=colour, label=label)
            left = [before + width for before, width in zip(left, shares[field], strict=True)]
        across, down = zip(*expected, strict=True)
        axis.plot(across, [row - 0.44 for row in down], "v", color="black", markersize=5, label="kept, by formula")
        axis.set_yticks(
            range(len(runs)), [f"{run.name}\n{share:.{digits}f} % kept" for run, share in zip(runs, kept, strict=True)]
        )
        axis.invert_yaxis()
        days, failures = runs[0].wall_seconds / 86400, max(sum(run.failures.values()) for run in runs)
        axis.set(
            xlim=(begin, 100),
            xlabel="share of the wall-clock time, %" + (f" (axis from {begin:.{digits}f})" if begin else ""),
            title=f"Where the wall-clock time went: days simulated {days:g}, failures {failures}",
        )
    return figure


def plot_modes(path: Path, sizing: Sizing, runs: Sequence[SimulationResult]) -> Figure:
    points: dict[str, list[SimulationResult]] = {}
    for run in runs:
        points.setdefault(run.name, []).append(run)
    step = sizing.site.step_seconds
    longest = max(run.interval_seconds for run in runs)
    with _figure(path, 3) as figure:
        for row, (mode, colour) in enumerate(zip(sizing.modes, COLOURS, strict=False)):
            first = max(mode.interval_min_seconds, step)
            spans = [first * (longest / first) ** (part / 60) for part in range(61)]
            seen = points.get(mode.name, [])
            lines: list[tuple[list[float], list[float]]] = [
                (
                    [100 * mode.stalled_share(one) for one in spans],
                    [100 * one.stalled_seconds / (one.kept_seconds + one.lost_seconds) for one in seen],
                ),
                ([mode.lost_seconds(one) for one in spans], [one.lost_by_failure_seconds for one in seen]),
                (
                    [100 * mode.ettr(one, sizing.mtbf_seconds, sizing.copy_restart_seconds) for one in spans],
                    [100 * one.ettr for one in seen],
                ),
            ]
            for axis, (line, dots) in zip(figure.axes, lines, strict=True):
                axis.plot([one / step for one in spans], line, color=colour, linestyle=DASHES[row], label=mode.name)
                _add_dots(axis, [one.interval_seconds / step for one in seen], dots, colour, row)
        titles = {
            "Stalled time by save interval": "stall, % of the training time",
            "Time lost to one failure by save interval": "lost, seconds",
            "Useful training time by save interval": "ETTR, % of the wall-clock time",
        }
        across = "interval, steps (of a log: between its bases; dots: simulated)"
        for axis, (title, up) in zip(figure.axes, titles.items(), strict=True):
            axis.set(xscale="log", xlabel=across, ylabel=up, title=title)
        figure.axes[1].set_yscale("log")
    return figure


def plot_goodput(path: Path, found: Goodput) -> Figure:
    with _figure(path) as figure:
        axis = figure.axes[0]
        begin = found.starts[0].began_at
        unit, name = (3600.0, "hours") if found.wall_seconds > 7200 else (60.0, "minutes")
        if found.wall_seconds < 300:
            unit, name = 1.0, "seconds"
        labelled: set[str] = set()
        for stretch in found.stretches:
            label, colour = STRETCHES[stretch.what]
            left, right = ((at - begin) / unit for at in (stretch.began_at, stretch.ended_at))
            label = "_" if label in labelled else label
            axis.axvspan(left, right, facecolor=(colour, 0.25), edgecolor="#aaaaaa", linewidth=0.3, label=label)
            labelled.add(label)
        reached = "step reached"
        for start in found.starts:
            if start.work:
                span = max(start.ended_at - start.began_at - start.work[-1][1], 0.0)
                times = [(start.began_at - begin + span + seconds) / unit for _, seconds in start.work]
                steps = [step for step, _ in start.work]
                marker = "." if len(steps) < 50 else None
                axis.plot(times, steps, marker=marker, color="#1f4e79", linewidth=1.2, label=reached)
                reached = "_"
        axis.locator_params(axis="y", integer=True)
        counts = f"failures {len(found.failures)}, steps kept {found.kept_steps}"
        axis.set(
            xlim=(0, found.wall_seconds / unit),
            xlabel=f"time since the first start, {name}",
            ylabel="training step",
            title=f"Training step over time: ETTR {found.ettr:.1%}, {counts}",
        )
    return figure


def _draw_ettr(axis: Axes, sizing: Sizing) -> None:
    rows = [(row, row.interval_seconds(0) or 0.0) for row in sizing.tiers if row.schedule is not None]
    lowest = 100 * min(row.ettr for row, _ in rows)
    bottom, top = max(0.0, lowest - max(100 - lowest, 1e-3)), 100 * max(row.ettr for row, _ in rows)
    first, last = (find(chosen for _, chosen in rows) for find in (min, max))
    intervals = [first / 30 * (900 * last / first) ** (place / CURVE_POINTS) for place in range(CURVE_POINTS + 1)]
    shown: list[float] = []
    for place, (row, chosen) in enumerate(rows):
        curve = [(one, share) for one in intervals if (share := 100 * _ettr_at(row, one)) >= bottom]
        shown += [one for one, share in curve if share >= bottom + (top - bottom) / 50]
        colour = COLOURS[place]
        minutes, shares = [one / 60 for one, _ in curve], [share for _, share in curve]
        axis.plot(minutes, shares, color=colour, linestyle=DASHES[place], label=row.name)
        _add_dots(axis, [chosen / 60], [100 * row.ettr], colour, place)
    axis.set(
        xscale="log",
        xlim=(min(shown) / 60, max(shown) / 60),
        ylim=(bottom, min(100.0, top + (top - bottom) / 8)),
        xlabel="interval, minutes (dots: chosen)",
        ylabel="ETTR, % of the wall-clock time",
        title="Useful training time by save interval",
    )


def _ettr_at(row: TierRow, interval_seconds: float) -> float:
    every = [1] * len(row.levels)
    if row.schedule is not None and len(every) > 1:
        shared = row.interval_seconds(len(every) - 1) or interval_seconds
        every[-1] = max(1, round(shared / interval_seconds))
    return ettr.nested(row.levels, interval_seconds, every)


def _draw_restores(axis: Axes, sizing: Sizing) -> None:
    quiet = replace(sizing.site, mtbf_seconds=1e12, load_nodes=None)
    job = sizing.mesh
    meshes = [
        replace(job, dp=job.dp * times)
        for times in (1, 2, 4, 8, 16, 32, 64)
        if times == 1 or job.gpus * times <= job.gpus_per_node or job.gpus * times % job.gpus_per_node == 0
    ]
    sizes = [size(sizing.model, sizing.state, mesh, quiet) for mesh in meshes]
    gpus = [mesh.gpus for mesh in meshes]
    for index, colour in enumerate(COLOURS):
        seconds = [one.restores[index].seconds for one in sizes]
        axis.plot(gpus, seconds, marker=".", color=colour, linestyle=DASHES[index], label=sizing.restores[index].name)
    axis.set_xscale("log", base=2)
    axis.set(yscale="log", xlabel="GPUs", ylabel="restore, seconds", title="Restore time by number of GPUs")
    ticks = gpus if gpus[-1] < 1_000_000 else gpus[::2]
    axis.set_xticks(ticks, [f"{one:,}" for one in ticks], minor=False)
    axis.set_xticks([], minor=True)


def _draw_stalls(axis: Axes, sizing: Sizing) -> None:
    shared = sizing.site.rates.shared_write
    together = sizing.writing_nodes * sizing.site.rates.local_write
    slowest, fastest = min(shared, together) / 10, max(shared, together) * 10
    rates = (slowest, fastest)
    stalls = [sizing.checkpoint_bytes / one for one in rates]
    axis.plot([one / 1e9 for one in rates], stalls, color=COLOURS[0], label="blocking save")
    axis.axhline(sizing.stage_seconds, color=COLOURS[3], linestyle=DASHES[1], label="staged save")
    axis.axvline(shared / 1e9, color=COLOURS[1], label="shared storage")
    axis.axvline(together / 1e9, color=COLOURS[2], linestyle=DASHES[1], label="all local SSDs")
    axis.set(
        xscale="log",
        yscale="log",
        xlim=(slowest / 1e9, fastest / 1e9),
        xlabel="write bandwidth, GB/s",
        ylabel="stall, seconds",
        title="Stall of one checkpoint by write bandwidth",
    )


def _add_dots(axis: Axes, across: Sequence[float], up: Sequence[float], colour: str, row: int) -> None:
    """Shrink markers from curve to curve, so that coinciding dots stay visible."""
    axis.plot(across, up, "o", color=colour, markersize=max(3, 9 - 2 * row), label="_dots")


@contextmanager
def _figure(path: Path, panels: int = 1) -> Iterator[Figure]:
    """Yield a figure, and write it with its legends afterwards. The output is deterministic."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot is {path}: its name must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"--plot needs {error.name}", hint="pip install 'tierckpt[plot]'") from error
    with matplotlib.rc_context(
        {
            "svg.hashsalt": "tierckpt",
            "svg.fonttype": "path",
            "font.size": 9,
            "axes.formatter.useoffset": False,
            "axes.formatter.min_exponent": 7,  # 1000, not 10³
        }
    ):
        figure = Figure(figsize=(5 * panels, 4.4) if panels > 1 else (9, 3.8), dpi=110, layout="constrained")
        for axis in figure.subplots(1, panels, squeeze=False)[0]:
            axis.grid(visible=True, color="#dddddd", linewidth=0.5)
            axis.set_axisbelow(True)
        yield figure
        if panels == 1:
            figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
        else:
            for axis in figure.axes:
                axis.legend(fontsize=8)
        dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}
        with translated(path):
            figure.savefig(path, metadata=dated[path.suffix.lower()])
