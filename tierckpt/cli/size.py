"""``tierckpt size``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from ..planning import Sizing
from ..planning.sizer import TierRow
from ..types import Json
from .ui import plots
from .ui.output import Report, decimal, facts, human_seconds, short, table
from .ui.planning_options import PlanningOptions, human_count
from .ui.session import JsonOption

PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it: .svg, .png or .pdf (needs matplotlib).")
]


def size(options: PlanningOptions, plot: PlotOption = None, as_json: JsonOption = False) -> Report:
    """Compute bytes, bandwidths, restore times, intervals and ETTR of a training job. Accesses no cluster.

    tierckpt size --gpus 64

    tierckpt size --params 175e9 --optimizer adam --tp 8 --pp 16 --dp 8
    """
    sizing = options.sizing()
    return Report(document_of(sizing) | plotted(plot, plots.plot_sizing, sizing), view_of(sizing))


def plotted(plot: Path | None, draw: Callable[..., object], *what: object) -> Json:
    """Draw to ``plot``, and return the part of the document that names it."""
    if plot is None:
        return {}
    draw(plot, *what)
    return {"plot": str(plot)}


def document_of(sizing: Sizing) -> Json:
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
        "levels": [
            {
                "tier": level.name,
                "interval_seconds": row.interval_seconds(index),
                "interval_steps": schedule.steps_by_level[index] if schedule else None,
                "bound_by": schedule.bound_by[index] if schedule else None,
                "stall_seconds": level.stall_seconds,
                "latency_seconds": level.latency_seconds,
                "restart_seconds": level.restart_seconds,
                "mtbf_seconds": level.mtbf_seconds if level.mtbf_seconds != float("inf") else None,
            }
            for index, level in enumerate(row.levels)
        ],
    }


def view_of(sizing: Sizing) -> list[RenderableType]:
    nodes = sizing.load_nodes
    paths = [
        *((f"restore, {row.name}", row.shared_bytes, row.seconds) for row in sizing.restores),
        *((f"model on {nodes} nodes, {row.name}", row.shared_bytes, row.seconds) for row in sizing.loads),
        (f"SSDs of {nodes} nodes together", f"{decimal(nodes * sizing.site.rates.local_read)}/s", None),
    ]
    tiers = [
        (
            row.name,
            row.ettr if row.schedule else "none",
            _interval(row, 0),
            row.schedule.bound_by[0] if row.schedule else None,
            _interval(row, len(row.levels) - 1),
        )
        for row in sizing.tiers
    ]
    return [
        facts(_summary(sizing)),
        table(
            "component=name >bytes_per_parameter:.4g >all=total_bytes:decimal >a_rank=rank_bytes:decimal saved:yes",
            sizing.components,
        ),
        table(
            ">a_blocking_save_in=stall_seconds:short >needs=bytes_per_second:decimals "
            ">a_node=node_bytes_per_second:decimals >a_rank=rank_bytes_per_second:decimals",
            sizing.writes,
        ),
        table("what >from_shared_storage:decimal >time:short", paths),
        table("tiers >ETTR:share >interval bound_by >to_shared", tiers),
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


def modes_view(sizing: Sizing) -> RenderableType:
    rows = []
    for mode in sizing.modes:
        interval = mode.best_interval_seconds(sizing.mtbf_seconds)
        rows.append(
            (
                mode.name,
                mode.window_steps or None,
                f"{short(mode.stall_step_seconds)} a step" if mode.is_log else mode.stall_seconds,
                f"{decimal(mode.link_step_bytes)} a step" if mode.is_log else mode.link_bytes,
                f"{interval / mode.step_seconds:.0f} steps, {short(interval)}",
                mode.lost_seconds(interval),
                mode.ettr(interval, sizing.mtbf_seconds, sizing.copy_restart_seconds),
            )
        )
    columns = "mode >window >stall:short >a_rank's_link:decimal >interval >lost_by_a_failure:short >ETTR:share"
    return table(columns, rows)


def _interval(row: TierRow, index: int) -> str | None:
    seconds = row.interval_seconds(index)
    if seconds is None or row.schedule is None:
        return None
    return f"{row.schedule.steps_by_level[index]} steps, {short(seconds)}"
