"""``tierckpt simulate``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ..errors import ConfigError
from ..planning import Sizing
from ..planning.checked_numbers import parse_seconds, positive, whole
from ..planning.ettr import DAY_SECONDS
from ..types import Json
from .size import PlotOption, modes_view, plotted
from .ui import plots
from .ui.output import Report, facts, human_seconds, progress_bar, table
from .ui.planning_options import PlanningOptions
from .ui.session import JsonOption

if TYPE_CHECKING:
    from ..planning.simulator import Configuration, SimulationResult


logger = logging.getLogger(__name__)

HORIZON_MTBFS = 5
"""One of 150 such runs has no failure."""
PARTS = ("kept", "lost", "stalled", "restarting", "loading", "waiting")
MODE_POINTS = 4
MODE_SAVES_MAX = 20_000
"""One simulated point takes about a second."""


def simulate(
    options: PlanningOptions,
    days: Annotated[float, Option(help="Simulated days.")] = 30.0,
    seed: Annotated[int, Option(help="The same seed gives the same run.")] = 0,
    jobs: Annotated[int, Option(help="Number of such jobs on one shared storage.")] = 1,
    domain_nodes: Annotated[int, Option(help="Nodes of a rack, which fail together.")] = 16,
    spares: Annotated[int | None, Option(help="Spare nodes. Default: always enough.")] = None,
    repair: Annotated[str, Option(help="Time until a lost node is a spare again.")] = "4h",
    outage_every: Annotated[str | None, Option(help="Mean time between outages of the storage.")] = None,
    outage: Annotated[str, Option(help="Duration of each outage.")] = "10min",
    rpo: Annotated[str | None, Option(help="Maximum age of the newest shared checkpoint, like 30min.")] = None,
    only: Annotated[list[str] | None, Option(help="Only configurations whose name contains this.")] = None,
    modes: Annotated[
        bool, Option(help="Compare async, lazy, multi-step and gradient log instead, by interval.")
    ] = False,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> Report:
    """Simulate failures, drains and restores of a job with each configuration of tiers, and compare their ETTR.

    tierckpt simulate --gpus 64

    tierckpt simulate --params 1e12 --tp 8 --pp 16 --dp 128 --days 30
    """
    from ..planning.simulator import Cluster, configurations_of, failures_of
    from ..planning.simulator import simulate as run

    sizing = options.sizing()
    for text in sizing.warnings:
        logger.warning(text)
    positive(days, "--days")
    if modes:
        return _compare_modes(sizing, days, seed, plot, as_json=as_json)
    cluster = Cluster(
        nodes=sizing.mesh.nodes * whole(jobs, "--jobs"),
        rates=sizing.site.rates,
        failures=failures_of(sizing, whole(domain_nodes, "--domain-nodes")),
        jobs=jobs,
        spares=spares,
        repair_seconds=parse_seconds(repair, "--repair"),
        outage_every_seconds=parse_seconds(outage_every, "--outage-every") if outage_every else math.inf,
        outage_seconds=parse_seconds(outage, "--outage"),
    )
    hopeless = [row.name for row in sizing.tiers if row.schedule is None]
    chosen = configurations_of(sizing, parse_seconds(rpo, "--rpo") if rpo else math.inf)
    if only:
        known = [one.name for one in chosen]
        chosen = tuple(one for one in chosen if any(part in one.name for part in only))
        if not chosen:
            raise ConfigError(f"--only is {', '.join(only)}: configurations are {', '.join(map(repr, known))}")
    begun = time.process_time()
    with progress_bar(as_json=as_json, of="time") as listener:
        runs = [run(cluster, one, days=days, seed=seed, listener=listener) for one in chosen]
    seconds = time.process_time() - begun
    _warn_of_no_failure(runs, days, sizing.mtbf_seconds)
    document: Json = {
        "nodes": cluster.nodes,
        "jobs": jobs,
        "days": days,
        "seed": seed,
        "mtbf_seconds": sizing.mtbf_seconds,
        "cpu_seconds": seconds,
        "runs": [asdict(one) for one in runs],
        "gets_nowhere": hopeless,
        **plotted(plot, plots.plot_runs, runs),
    }
    summary = {
        "simulated": f"{cluster.nodes} nodes, {jobs} job{'s' if jobs > 1 else ''}, {days:g} days, seed {seed}",
        "failures": f"one in {human_seconds(sizing.mtbf_seconds)} of each job",
        "took": f"{seconds:.1f} s of processor time",
    }
    if hopeless:
        summary["no progress"] = f"{', '.join(hopeless)}: the next failure comes before a restart is done"
    rows = [
        asdict(run)
        | {"failures": sum(run.failures.values())}
        | {"from": ", ".join(f"{tier} {count}" for tier, count in sorted(run.restores.items())) or None}
        | {f"{part}_share": getattr(run, f"{part}_seconds") / run.wall_seconds for part in PARTS}
        for run in runs
    ]
    compared = (
        "tiers=name >ETTR=ettr:share >by_formula=expected_ettr:share >interval=interval_seconds:short >every >failures "
        "restores_from=from >exposure_at_most=exposure_seconds_max:short >to_shared=shared_bytes:decimal"
    )
    spent = "tiers=name " + " ".join(
        f">{part.replace('waiting', 'waiting_for_nodes')}={part}_share:share" for part in PARTS
    )
    return Report(document, [facts(summary), table(compared, rows), table(spent, rows)])


def _warn_of_no_failure(runs: list[SimulationResult], days: float, mtbf_seconds: float) -> None:
    calm = [one for one in runs if not sum(one.failures.values())]
    if not calm:
        return
    logger.warning(
        "no failure in %.3g simulated days (%s; --modes simulates %d checkpoints at most), so ETTR counts no restart "
        "and no lost work: one is due every %s, give --days %d",
        max(one.wall_seconds for one in calm) / DAY_SECONDS,
        "all configurations" if len(calm) == len(runs) else ", ".join(dict.fromkeys(one.name for one in calm)),
        MODE_SAVES_MAX,
        human_seconds(mtbf_seconds),
        math.ceil(max(HORIZON_MTBFS * mtbf_seconds / DAY_SECONDS, 2 * days)),
    )


def _compare_modes(sizing: Sizing, days: float, seed: int, plot: Path | None, *, as_json: bool) -> Report:
    from ..planning.simulator import Cluster, FailureKind
    from ..planning.simulator import simulate as run

    failures = FailureKind("process", DAY_SECONDS / sizing.mtbf_seconds / sizing.mesh.nodes, wipes=False)
    cluster = Cluster(sizing.mesh.nodes, sizing.site.rates, (failures,))
    with progress_bar(as_json=as_json, of="time") as listener:
        runs = []
        for one in _points(sizing):
            some = min(days, MODE_SAVES_MAX * one.interval_seconds / DAY_SECONDS)
            runs.append(run(cluster, one, days=some, seed=seed, listener=listener))
    _warn_of_no_failure(runs, days, sizing.mtbf_seconds)
    document: Json = {
        "mtbf_seconds": sizing.mtbf_seconds,
        "seed": seed,
        "modes": [asdict(one) for one in sizing.modes],
        "runs": [asdict(one) for one in runs],
        **plotted(plot, plots.plot_modes, sizing, runs),
    }
    rows = [
        (
            one.name,
            f"{one.interval_seconds / sizing.site.step_seconds:.0f} steps",
            one.stalled_seconds / (one.kept_seconds + one.lost_seconds),
            one.lost_by_failure_seconds,
            one.ettr,
            one.expected_ettr,
        )
        for one in runs
    ]
    columns = "simulated >interval >stalled:.3% >lost_by_a_failure:short >ETTR:share >by_formula:share"
    return Report(document, [modes_view(sizing), table(columns, rows)])


def _points(sizing: Sizing) -> Iterator[Configuration]:
    """Yield the best interval of each way, and longer ones."""
    from ..planning.simulator import configuration_of

    for mode in sizing.modes:
        best = mode.best_interval_seconds(sizing.mtbf_seconds)
        for index in range(MODE_POINTS):
            steps = round(best * 10 ** (index / (MODE_POINTS - 1)) / mode.step_seconds)
            yield configuration_of(mode, sizing, steps * mode.step_seconds)
