"""``tierckpt size``: what checkpoints of a job will take, and how often to take them, from first principles."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..planning import Sizing
from ..planning.sizer import TierRow
from ..planning.transfer_times import local_aggregate_rate
from ..types import Json
from .ui.output import Report, facts, human_seconds, table
from .ui.planning_options import PlanningOptions, human_count, taking_options
from .ui.session import JsonOption

PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw it too: .svg, .png or .pdf (needs matplotlib).")
]


@taking_options
def size(options: PlanningOptions, plot: PlotOption = None, as_json: JsonOption = False) -> Report:
    """Bytes, bandwidths, restore times, intervals and ETTR of a training job, by arithmetic. Touches no cluster.

    tierckpt size --gpus 64

    tierckpt size --params 175e9 --optimizer adam --tp 8 --pp 16 --dp 8
    """
    sizing = options.sizing()
    if plot is not None:
        from .ui.plots import plot_sizing

        plot_sizing(plot, sizing)
    return Report(document_of(sizing) | ({"plot": str(plot)} if plot else {}), view_of(sizing))


def document_of(sizing: Sizing) -> Json:
    """The same for programs: bytes, bytes per second, seconds."""
    return {
        "model": asdict(sizing.model),
        "mesh": asdict(sizing.mesh) | {"gpus": sizing.mesh.gpus, "nodes": sizing.mesh.nodes},
        "assumptions": asdict(sizing.site),
        "model_bytes": sizing.model_bytes,
        "checkpoint_bytes": sizing.checkpoint_bytes,
        "bytes_per_parameter": sizing.bytes_per_parameter,
        "components": [asdict(row) for row in sizing.components],
        "per_rank": {"held_bytes": sizing.rank_held_bytes, "written_bytes": sizing.rank_written_bytes},
        "per_node": {
            "held_bytes": sizing.node_held_bytes,
            "written_bytes": sizing.node_written_bytes,
            "staging_bytes": sizing.host_bytes,
            "replica_bytes": sizing.replica_bytes,
        },
        "writing_nodes": sizing.writing_nodes,
        "stage_seconds": sizing.stage_seconds,
        "write_bandwidth": [asdict(row) for row in sizing.writes],
        "ssd": asdict(sizing.ssd),
        "drain": {"seconds": sizing.drain_seconds, "bytes_per_second": sizing.drain_bytes_per_second},
        "restore": {_key(row.name): _path(row) for row in sizing.restores},
        "load": {"nodes": sizing.load_nodes} | {_key(row.name): _path(row) for row in sizing.loads},
        "mtbf_seconds": sizing.mtbf_seconds,
        "tiers": [_tier(row) for row in sizing.tiers],
        "gradient_log": {
            "step_bytes": sizing.log_step_bytes,
            "fewer_bytes_below_interval_steps": sizing.log_interval_steps,
            "drive_writes_per_day": sizing.log_drive_writes_per_day,
            "node_update_seconds": sizing.node_update_seconds,
        },
        "modes": [asdict(mode) for mode in sizing.modes],
        "warnings": list(sizing.warnings),
    }


def _path(row: Any) -> Json:
    return {"shared_bytes": row.shared_bytes, "seconds": row.seconds}


def _key(name: str) -> str:
    return name.replace(" ", "_")


def _tier(row: TierRow) -> Json:
    schedule = row.schedule
    return {
        "name": row.name,
        "ettr": row.ettr,
        "young_seconds": row.young_seconds,
        "daly_seconds": row.daly_seconds,
        "exact_seconds": row.exact_seconds,
        "levels": [
            {
                "tier": level.name,
                "interval_seconds": row.interval_seconds(place),
                "interval_steps": schedule.steps_by_level[place] if schedule else None,
                "bound_by": schedule.bound_by[place] if schedule else None,
                "stall_seconds": level.stall_seconds,
                "latency_seconds": level.latency_seconds,
                "restart_seconds": level.restart_seconds,
                "mtbf_seconds": level.mtbf_seconds if level.mtbf_seconds != float("inf") else None,
            }
            for place, level in enumerate(row.levels)
        ],
    }


# --- for people ---------------------------------------------------------------------------------------------------


def view_of(sizing: Sizing) -> list[Table | str]:
    return [
        facts(_summary(sizing)),
        _components(sizing),
        _writes(sizing),
        _paths(sizing),
        _tiers(sizing),
        modes_view(sizing),
        *(f"note: {text}" for text in sizing.warnings),
    ]


def _summary(sizing: Sizing) -> dict[str, object]:
    mesh, site, ssd = sizing.mesh, sizing.site, sizing.ssd
    return {
        "model": f"{human_count(sizing.model.parameters)} parameters, {decimal(sizing.model_bytes)}",
        "checkpoint": f"{decimal(sizing.checkpoint_bytes)}, {sizing.bytes_per_parameter:.4g} bytes per parameter",
        "job": f"{mesh.gpus} GPUs on {mesh.nodes} nodes (tp {mesh.tp}, pp {mesh.pp}, cp {mesh.cp}, dp {mesh.dp}, "
        f"ep {mesh.ep}, stage {mesh.stage})",
        "a rank": f"holds {decimal(sizing.rank_held_bytes)}, writes {decimal(sizing.rank_written_bytes)}",
        "a node": f"holds {decimal(sizing.node_held_bytes)}, writes {decimal(sizing.node_written_bytes)}, "
        f"stages in {decimal(sizing.host_bytes)} of memory, {decimal(sizing.replica_bytes)} for peers",
        "staging": f"{short(sizing.stage_seconds)} of stall for each checkpoint",
        "SSD of a node": f"{decimal(ssd.needed_bytes)} needed, {ssd.drive_writes_per_day:.2g} drive writes per day, "
        f"worn in {ssd.years:.3g} years",
        "drain": f"{short(sizing.drain_seconds)} for one, {decimal(sizing.drain_bytes_per_second)}/s on average",
        "gradient log": f"{decimal(sizing.log_step_bytes)} a step, fewer than full checkpoints more often than every "
        f"{sizing.log_interval_steps:.3g} steps; {sizing.log_drive_writes_per_day:.2g} drive writes per day",
        "failures": f"one in {human_seconds(sizing.mtbf_seconds)}",
        "restart": f"{human_seconds(site.restart_seconds)}, and loading",
    }


def _components(sizing: Sizing) -> Table:
    rows = [
        (
            row.name,
            f"{row.bytes_per_parameter:.4g}",
            decimal(row.total_bytes),
            decimal(row.rank_bytes),
            "yes" if row.saved else "no",
        )
        for row in sizing.components
    ]
    return table("component >bytes_per_parameter >all >a_rank saved", rows)


def _writes(sizing: Sizing) -> Table:
    rows = [
        (
            short(row.stall_seconds),
            f"{decimal(row.bytes_per_second)}/s",
            f"{decimal(row.node_bytes_per_second)}/s",
            f"{decimal(row.rank_bytes_per_second)}/s",
        )
        for row in sizing.writes
    ]
    return table(">a_blocking_save_in >needs >a_node >a_rank", rows)


def _paths(sizing: Sizing) -> Table:
    rows = [(f"restore, {row.name}", decimal(row.shared_bytes), short(row.seconds)) for row in sizing.restores]
    rows += [
        (f"model on {sizing.load_nodes} nodes, {row.name}", decimal(row.shared_bytes), short(row.seconds))
        for row in sizing.loads
    ]
    together = local_aggregate_rate(sizing.load_nodes, sizing.site.rates)
    rows.append((f"SSDs of {sizing.load_nodes} nodes together", f"{decimal(together)}/s", ""))
    return table("what >from_shared_storage >time", rows)


def _tiers(sizing: Sizing) -> Table:
    return table(
        "tiers >ETTR >interval bound_by >to_shared >Young >Daly >exact",
        [
            (
                row.name,
                f"{row.ettr:.2%}" if row.schedule else "none",
                _interval(row, 0),
                row.schedule.bound_by[0] if row.schedule else None,
                _interval(row, len(row.levels) - 1),
                short(row.young_seconds),
                short(row.daly_seconds),
                short(row.exact_seconds),
            )
            for row in sizing.tiers
        ],
    )


def modes_view(sizing: Sizing) -> Table:
    """The four ways to take checkpoints, each at its best interval."""
    rows = []
    for mode in sizing.modes:
        interval = mode.best_interval_seconds(sizing.mtbf_seconds)
        rows.append(
            (
                mode.name,
                mode.window_steps or None,
                f"{short(mode.stall_step_seconds)} a step" if mode.is_log else short(mode.stall_seconds),
                f"{decimal(mode.link_step_bytes)} a step" if mode.is_log else decimal(mode.link_bytes),
                f"{interval / mode.step_seconds:.0f} steps, {short(interval)}",
                short(mode.lost_seconds(interval)),
                f"{mode.ettr(interval, sizing.mtbf_seconds, sizing.copy_restart_seconds):.2%}",
            )
        )
    return table("mode >window >stall >a_rank's_link >interval >lost_by_a_failure >ETTR", rows)


def _interval(row: TierRow, place: int) -> str | None:
    seconds = row.interval_seconds(place)
    if seconds is None or row.schedule is None:
        return None
    return f"{row.schedule.steps_by_level[place]} steps, {short(seconds)}"


def decimal(value: float) -> str:
    """Bytes as the field quotes them: decimal, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} EB"


def short(seconds: float) -> str:
    """A duration to three digits where it is short, as people say it where it is long."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else human_seconds(seconds)
