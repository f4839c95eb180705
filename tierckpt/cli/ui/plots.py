"""Pictures of what the planner found. matplotlib is imported only here, and only when a picture is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...disk.durable import translated
from ...errors import ConfigError, MissingExtraError
from ...planning import Sizing, ettr, size
from ...planning.sizer import TierRow
from ...planning.training_state import Component, State

if TYPE_CHECKING:
    from ...planning.goodput import Goodput
    from ...planning.simulator import Run

SUFFIXES = (".svg", ".png", ".pdf")
GREY = "#888888"
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
    "lost": ("lost by a failure", "#c23b3b"),
    "down": ("no process", "#ffffff"),
    "starting": ("starting", "#9c9c9c"),
    "loading": ("loading", "#2b7bba"),
    "warming": ("first step", "#8a5fb0"),
    "blocked": ("blocked by saves", "#d98b2b"),
    "other": ("after the last step", "#d0d0d0"),
}


def plot_sizing(path: Path, sizing: Sizing) -> None:
    """Draw ETTR against interval, restore time against nodes, and stall against bandwidth.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: a suffix that is no kind of picture.
    """
    with _figure(path, 3) as axes:
        _draw_ettr(axes[0], sizing)
        _draw_restores(axes[1], sizing)
        _draw_stalls(axes[2], sizing)


def plot_runs(path: Path, runs: Sequence[Run]) -> None:
    """Draw where the time of each simulated configuration went, and what the formula had expected.

    The axis begins where the worst configuration has lost more than it kept back: what all have in common says nothing.
    """
    with _figure(path, 1) as axes:
        axis = axes[0]
        names = [run.name for run in runs]
        shares = {field: [100 * getattr(run, field) / run.wall_seconds for run in runs] for field in PARTS}
        kept = shares["kept_seconds"]
        begin = max(0.0, min(kept) - (100 - min(kept)) / 3)
        left = [0.0] * len(runs)
        for field, (label, colour) in PARTS.items():
            if max(shares[field]) > (100 - begin) / 1000:
                bars = axis.barh(names, shares[field], left=left, color=colour, label=label)
                if field != "kept_seconds":
                    wide = [f"{share:.2g}" if share > (100 - begin) / 25 else "" for share in shares[field]]
                    axis.bar_label(bars, wide, label_type="center", fontsize=7, color="white")
            left = [before + width for before, width in zip(left, shares[field], strict=True)]
        for name, share in zip(names, kept, strict=True):
            axis.annotate(
                f"{share:.2f} %", (begin, name), (4, 0), textcoords="offset points", va="center", color="white"
            )
        expected = [(100 * run.expected_ettr, run.name) for run in runs if run.expected_ettr is not None]
        axis.plot(*zip(*expected, strict=True), "|", color="black", markersize=22, label="kept, by formula")
        axis.invert_yaxis()
        axis.set_xlim(begin, 100)
        axis.set_xlabel(f"share of the wall clock, % (from {begin:.3g})")
        axis.set_title(f"{runs[0].wall_seconds / 86400:g} simulated days: training kept, and where the rest went")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, fontsize=8, frameon=False)


def plot_modes(path: Path, sizing: Sizing, runs: Sequence[Run]) -> None:
    """Draw stall, lost work and ETTR of each way to take checkpoints against its interval; dots are simulated."""
    points: dict[str, list[Run]] = {}
    for run in runs:
        points.setdefault(run.name, []).append(run)
    step = sizing.site.step_seconds
    longest = max(run.interval_seconds for run in runs)
    with _figure(path, 3) as axes:
        for mode, colour in zip(sizing.modes, COLOURS, strict=False):
            first = max(mode.interval_min_seconds, step)
            spans = [first * (longest / first) ** (place / 60) for place in range(61)]
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
            for axis, (line, dots) in zip(axes, lines, strict=True):
                axis.plot([one / step for one in spans], line, color=colour, label=mode.name)
                axis.plot([one.interval_seconds / step for one in seen], dots, "o", color=colour, markersize=3)
        titles = ("Stall, % of training", "Lost by a failure, seconds", "ETTR, %")
        for axis, title in zip(axes, titles, strict=True):
            axis.set_xscale("log")
            axis.set_xlabel("interval, steps (of a log: between its bases)")
            axis.set_title(title)
        axes[1].set_yscale("log")
        axes[0].legend(fontsize=8, frameon=False)


def plot_goodput(path: Path, found: Goodput) -> None:
    """Draw a run as it was: the step that training had come to, over time, and what each stretch of time was."""
    with _figure(path, 1) as axes:
        axis = axes[0]
        begin = found.starts[0].began_at
        unit, name = (3600.0, "hours") if found.wall_seconds > 7200 else (60.0, "minutes")
        if found.wall_seconds < 300:
            unit, name = 1.0, "seconds"
        told: set[str] = set()
        for stretch in found.stretches:
            label, colour = STRETCHES[stretch.what]
            left, right = ((at - begin) / unit for at in (stretch.began_at, stretch.ended_at))
            axis.axvspan(left, right, color=colour, alpha=0.25, linewidth=0, label=None if label in told else label)
            told.add(label)
        for start in found.starts:
            if start.work:
                span = max(start.ended_at - start.began_at - start.work[-1][1], 0.0)
                times = [(start.began_at - begin + span + seconds) / unit for _, seconds in start.work]
                axis.plot(times, [step for step, _ in start.work], color="#1f4e79", linewidth=1.2)
        axis.set_xlim(0, found.wall_seconds / unit)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(name)
        axis.set_ylabel("step")
        axis.set_title(f"ETTR {found.ettr:.1%}, {len(found.failures)} failures, {found.kept_steps} steps kept")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, fontsize=8, frameon=False)


def _draw_ettr(axis: Any, sizing: Sizing) -> None:
    for row, colour in zip(sizing.tiers, COLOURS, strict=False):
        if row.schedule is None:
            continue
        chosen = row.schedule.steps * row.schedule.step_seconds
        intervals = [chosen * 10 ** (power / 20) for power in range(-30, 31)]
        axis.plot(
            [one / 60 for one in intervals],
            [100 * _ettr_at(row, one) for one in intervals],
            color=colour,
            label=row.name,
        )
        axis.plot([chosen / 60], [100 * row.ettr], "o", color=colour)
    axis.set_xscale("log")
    top = max(row.ettr for row in sizing.tiers) * 100
    axis.set_ylim(max(0.0, top - 12), min(100.0, top + 2))
    axis.set_xlabel("interval, minutes (dot: chosen)")
    axis.set_ylabel("ETTR, %")
    axis.set_title("How often")
    axis.legend(fontsize=8, frameon=False, loc="lower left")


def _ettr_at(row: TierRow, interval_seconds: float) -> float:
    """ETTR if the first level took checkpoints at this interval, and the others as often in time as was chosen."""
    schedule = row.schedule
    every = [1]
    shared = row.interval_seconds(len(row.levels) - 1) or interval_seconds
    if schedule is not None and len(row.levels) > 1:
        every = [1] * (len(row.levels) - 1) + [max(1, round(shared / interval_seconds))]
    return ettr.nested(row.levels, interval_seconds, every)


def _draw_restores(axis: Any, sizing: Sizing) -> None:
    """The same model on more nodes: more data-parallel replicas."""
    state = State(tuple(_component(row) for row in sizing.components))
    quiet = replace(sizing.site, mtbf_seconds=1e12, load_nodes=None)
    meshes = [replace(sizing.mesh, dp=sizing.mesh.dp * times) for times in (1, 2, 4, 8, 16, 32, 64)]
    sizes = [size(sizing.model, state, mesh, quiet) for mesh in meshes]
    nodes = [one.mesh.nodes for one in sizes]
    for place, (name, colour) in enumerate(
        zip(("naive", "sharded", "fanned out", "peer", "local"), COLOURS, strict=True)
    ):
        style = "--" if name in {"sharded", "peer"} else "-"
        axis.plot(nodes, [one.restores[place].seconds for one in sizes], style, color=colour, label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("nodes")
    axis.set_ylabel("restore, seconds")
    axis.set_title("Coming back")
    axis.legend(fontsize=8, frameon=False)


def _component(row: Any) -> Component:
    kind = "weights" if row.name == "weights" else "gradients" if not row.saved else "optimizer"
    return Component(row.name, row.bytes_per_parameter, kind)  # type: ignore[arg-type]


def _draw_stalls(axis: Any, sizing: Sizing) -> None:
    bandwidths = [10 ** (power / 10) * 1e9 for power in range(41)]
    axis.plot(
        [one / 1e9 for one in bandwidths],
        [sizing.checkpoint_bytes / one for one in bandwidths],
        color=COLOURS[0],
        label="blocking save",
    )
    axis.axhline(sizing.stage_seconds, color=COLOURS[3], label="staged, the rest in the background")
    axis.axvline(sizing.site.rates.shared_write / 1e9, color=GREY, linestyle=":", label="this shared storage")
    together = sizing.writing_nodes * sizing.site.rates.local_write / 1e9
    axis.axvline(together, color=COLOURS[2], linestyle=":", label="all local SSDs together")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("write bandwidth, GB/s")
    axis.set_ylabel("stall of one checkpoint, seconds")
    axis.set_title("What a stall budget takes")
    axis.set_ylim(bottom=sizing.stage_seconds / 30)
    axis.legend(fontsize=8, frameon=False, loc="lower left")


@contextmanager
def _figure(path: Path, panels: int) -> Iterator[Any]:
    """Yield the axes of a figure; write it when they are drawn. The same numbers give the same file."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot is {path}: its name must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"--plot needs {error.name}", hint="pip install 'tierckpt[plot]'") from error
    with matplotlib.rc_context({"svg.hashsalt": "tierckpt", "font.size": 9, "svg.fonttype": "path"}):
        figure = Figure(figsize=(5 * panels, 4) if panels > 1 else (9, 3.6), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for axis in axes:
            axis.grid(visible=True, color="#dddddd", linewidth=0.5)
            axis.set_axisbelow(True)
        yield axes
        dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}
        with translated(path):
            figure.savefig(path, metadata=dated[path.suffix.lower()], dpi=110)
