"""Figures of ``--plot`` as a reader sees them, for jobs from one GPU to thousands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

matplotlib = pytest.importorskip("matplotlib")

import numpy as np  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

from tierckpt.cli.ui.planning_options import PlanningOptions  # noqa: E402
from tierckpt.cli.ui.plots import plot_goodput, plot_modes, plot_runs, plot_sizing  # noqa: E402
from tierckpt.planning.goodput import Save, Start, analyse  # noqa: E402
from tierckpt.planning.simulator import Cluster, FailureKind, configuration_of, configurations_of, failures_of, simulate  # noqa: E402

JOBS: dict[str, dict[str, Any]] = {
    "one GPU, tiny model": {"gpus": 1, "params": "1e6"},
    "64 GPUs": {"gpus": 64},
    "64 GPUs, fast store": {"gpus": 64, "params": "1b", "shared": "10TB/s"},
    "1024 GPUs without ZeRO": {"params": "175e9", "tp": 8, "pp": 16, "dp": 8},
    "4096 GPUs, slow store": {"params": "1e12", "tp": 8, "pp": 16, "dp": 32, "shared": "5GB/s"},
}


def each(figure: Figure) -> Iterator[tuple[Any, list[Line2D]]]:
    """Each panel, and the curves that its legend names."""
    for axis in figure.axes:
        yield axis, [line for line in axis.get_lines() if not str(line.get_label()).startswith("_")]


def hidden(figure: Figure) -> list[tuple[str, str]]:
    """The curves that are hardly visible: fewer than 50 pixels have their colour, without the dots."""
    for axis in figure.axes:
        for dots in axis.get_lines():
            dots.set_marker("None")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3].astype(int)
    found = []
    for axis, lines in each(figure):
        left, bottom, right, top = map(int, axis.bbox.extents)
        inside = pixels[bottom + 3 : top - 3, left + 3 : right - 3]
        for line in lines:
            colour = [255 * part for part in to_rgb(line.get_color())]  # type: ignore[arg-type]
            if (abs(inside - colour).max(axis=2) < 25).sum() < 50:
                found.append((axis.get_title(), str(line.get_label())))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_curve_of_a_sizing_is_seen_and_fills_its_panel(job: dict[str, Any], tmp_path: Path) -> None:
    sizing = PlanningOptions(**job).sizing()
    figure = plot_sizing(tmp_path / "size.png", sizing)
    assert [(axis.get_title(), axis.get_xlabel(), axis.get_ylabel()) for axis in figure.axes] == [
        ("Useful training time by save interval", "interval, minutes (dots: chosen)", "ETTR, % of the wall-clock time"),
        ("Restore time by number of GPUs", "GPUs", "restore, seconds"),
        ("Stall of one checkpoint by write bandwidth", "write bandwidth, GB/s", "stall, seconds"),
    ]
    chosen = [100 * row.ettr for row in sizing.tiers if row.schedule]
    low, high = figure.axes[0].get_ylim()
    assert low <= min(chosen) <= max(chosen) <= high
    assert high - low <= 4 * max(100 - min(chosen), 1e-3), "the axis is much longer than its data"
    assert hidden(figure) == []


@pytest.mark.slow
@pytest.mark.parametrize("job", ["one GPU, tiny model", "64 GPUs", "4096 GPUs, slow store"])
@pytest.mark.parametrize("days", [1.0, 20.0])
def test_where_time_went_is_on_the_axis_with_the_expectation(job: str, days: float, tmp_path: Path) -> None:
    sizing = PlanningOptions(**JOBS[job]).sizing()
    cluster = Cluster(sizing.mesh.nodes, sizing.site.rates, failures_of(sizing, 16))
    runs = [simulate(cluster, one, days=days) for one in configurations_of(sizing)]
    figure = plot_runs(tmp_path / "runs.png", runs)
    [axis] = figure.axes
    begin, end = axis.get_xlim()
    assert axis.get_xlabel().startswith("share of the wall-clock time, %")
    assert f"days simulated {days:g}" in axis.get_title()
    [marks] = axis.get_lines()
    assert [*marks.get_xdata()] == pytest.approx([100 * (run.expected_ettr or 0) for run in runs])
    assert begin <= min(marks.get_xdata()) and max(marks.get_xdata()) <= end == 100
    worst = min(100 * min(run.ettr, run.expected_ettr or 1) for run in runs)
    assert begin == 0 or worst - begin < 0.4 * (end - begin), "the axis begins long before the data"
    assert [label.get_text().split("\n")[0] for label in axis.get_yticklabels()] == [run.name for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["one GPU, tiny model", "64 GPUs"])
def test_every_way_to_take_checkpoints_is_seen_by_interval(job: str, tmp_path: Path) -> None:
    sizing = PlanningOptions(**JOBS[job], mtbf="1d").sizing()
    failures = FailureKind("process", 1 / sizing.mesh.nodes, wipes=False)
    cluster = Cluster(sizing.mesh.nodes, sizing.site.rates, (failures,))
    spans = (mode.best_interval_seconds(sizing.mtbf_seconds) for mode in sizing.modes)
    points = [configuration_of(mode, sizing, 4 * span) for mode, span in zip(sizing.modes, spans, strict=True)]
    figure = plot_modes(tmp_path / "modes.png", sizing, [simulate(cluster, one, days=1) for one in points])
    assert [axis.get_ylabel() for axis in figure.axes] == [
        "stall, % of the training time",
        "lost, seconds",
        "ETTR, % of the wall-clock time",
    ]
    for axis, lines in each(figure):
        assert [line.get_label() for line in lines] == ["async", "lazy", "multi-step", "gradient log"], axis.get_title()
    assert hidden(figure) == []


@pytest.mark.parametrize("first", [0, 100_000])
def test_a_run_is_drawn_from_the_step_that_it_began_with(first: int, tmp_path: Path) -> None:
    def start(at: float, step: int, end: str) -> Start:
        work = tuple((step + place, 2.0 * place) for place in range(1, 301))
        made = (Save(step + 250, at + 540, 3.0),)
        spent = {"productive": 600.0, "blocked": 5.0, "starting": 20.0, "loading": 10.0, "warming": 8.0, "other": 0.0}
        return Start(at, at + 643, 8, step or None, step + 1, step + 300, end, spent, 5, 1 << 30, made, work)

    found = analyse([start(1000, first, ""), start(1900, first + 250, "closed")])
    figure = plot_goodput(tmp_path / "run.png", found)
    [axis] = figure.axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("time since the first start, minutes", "training step")
    assert axis.get_title() == f"Training step over time: ETTR {found.ettr:.1%}, failures 1, steps kept 550"
    assert axis.get_xlim() == (0, found.wall_seconds / 60)
