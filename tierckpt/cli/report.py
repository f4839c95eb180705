"""``tierckpt report``: what a run's time became, from the records that its processes left beside the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime

from rich.console import RenderableType
from rich.text import Text

from ..checkpoint.run_log_reader import Lines, read_history
from ..errors import CheckpointNotFoundError, ConfigError
from ..format.layout import Location
from ..planning.goodput import Goodput, What, analyse, read_start
from ..types import Json
from .size import PlotOption
from .ui.output import Report, facts, human_seconds, plain, table
from .ui.session import JsonOption, LocalRootOption, UriArgument, location_of, open_client

WIDTH = 80
STARTS_SHOWN = 12
LOOKS: Mapping[What, tuple[str, str, str]] = {
    "kept": ("█", "green", "training, kept"),
    "lost": ("▒", "red", "training, lost by a failure"),
    "blocked": ("▪", "yellow", "blocked by saves"),
    "down": (" ", "default", "no process"),
    "starting": ("·", "bright_black", "starting"),
    "loading": ("▸", "blue", "loading a checkpoint"),
    "warming": ("◦", "cyan", "first step"),
    "other": ("?", "magenta", "after the last step"),
}


def report(
    uri: UriArgument, plot: PlotOption = None, as_json: JsonOption = False, local_root: LocalRootOption = None
) -> Report:
    """Show what became of a run's time: ETTR, goodput, work lost by failure, where the time went.

    Measured by the Checkpointer of the run's processes. ETTR is training that was kept over all the time since the
    first one began; goodput the same over the time in which there were processes.
    """
    location = location_of(uri)
    with open_client(local_root) as client:
        history = client.run(read_history(client.mover.directory(location), client.mover.store(location)))
    return _report(location, history, plot)


def _report(location: Location, history: dict[str, Lines], plot: object) -> Report:
    starts = [start for lines in history.values() if (start := read_start(lines)) is not None]
    try:
        found = analyse(starts)
    except ConfigError as error:
        raise CheckpointNotFoundError(
            f"{location.uri} has no records of training",
            hint="They are written by `tierckpt.Checkpointer`; name the run it was given, not one of its checkpoints",
        ) from error
    if plot is not None:
        from .ui.plots import plot_goodput

        plot_goodput(plot, found)  # type: ignore[arg-type]
    document: Json = {"uri": location.uri, **_document(found)} | ({"plot": str(plot)} if plot else {})
    return Report(document, [facts(_summary(location, found)), _timeline(found), _spent(found), _failures(found)])


def _document(found: Goodput) -> Json:
    document = asdict(found)
    document["starts"] = [
        {name: value for name, value in start.items() if name not in ("work", "durable_seconds")}
        for start in document["starts"]
    ]
    lost = [one.lost_seconds for one in found.failures]
    return document | {
        "lost_seconds_per_failure": sum(lost) / len(lost) if lost else None,
        "lost_steps_per_failure": sum(one.lost_steps for one in found.failures) / len(lost) if lost else None,
    }


def _summary(location: Location, found: Goodput) -> dict[str, object]:
    first, last = found.starts[0], found.starts[-1]
    lost = [one.lost_seconds for one in found.failures]
    summary: dict[str, object] = {
        "run": location.uri,
        "from, to": f"{_day(first.began_at)} to {_day(last.ended_at)}, {human_seconds(found.wall_seconds)}",
        "ETTR": f"{found.ettr:.2%}" + (f" (by formula {found.expected_ettr:.2%})" if found.expected_ettr else ""),
        "goodput": f"{found.goodput:.2%} of the time with processes, {found.steps_per_hour:.0f} steps an hour",
        "kept": f"{found.kept_steps} steps, {human_seconds(found.kept_seconds)} of training",
        "saves": _saves(found),
        "starts": f"{len(found.starts)}, {len(found.failures)} after a failure",
    }
    if lost:
        steps = sum(one.lost_steps for one in found.failures) / len(lost)
        summary["lost by a failure"] = (
            f"{_short(sum(lost) / len(lost))} of training ({steps:.1f} steps), and "
            f"{_short(found.restart_seconds or 0)} until training went on"
        )
    if found.replayed_steps:
        summary["not lost"] = f"{found.replayed_steps} steps that no checkpoint had: the gradient log had them"
    return summary


def _saves(found: Goodput) -> str:
    if not found.saves or found.interval_seconds is None:
        return "none"
    durable = f", durable after {_short(found.durable_seconds)}" if found.durable_seconds is not None else ""
    blocked = _short(found.blocked_seconds or 0.0)
    return f"{found.saves}, one every {_short(found.interval_seconds)} of training, each blocked {blocked}{durable}"


def _timeline(found: Goodput) -> Text:
    """One line of blocks, from the first process to the last: in each, what most of that time was."""
    begin, wall = found.starts[0].began_at, found.wall_seconds
    line = Text("\n")
    for column in range(WIDTH):
        left, right = begin + column * wall / WIDTH, begin + (column + 1) * wall / WIDTH
        shares: dict[What, float] = {}
        for stretch in found.stretches:
            overlap = min(right, stretch.ended_at) - max(left, stretch.began_at)
            if overlap > 0:
                shares[stretch.what] = shares.get(stretch.what, 0.0) + overlap
        mark, style, _ = LOOKS[max(shares, key=lambda what: shares[what]) if shares else "down"]
        line.append(mark, style)
    line.append("\n")
    for what in dict.fromkeys(stretch.what for stretch in found.stretches):
        mark, style, name = LOOKS[what]
        line.append(f"{mark if mark != ' ' else '(blank)'} ", style)
        line.append(f"{name}   ")
    return line


def _spent(found: Goodput) -> RenderableType:
    rows = [
        (LOOKS[what][2], _short(seconds), f"{seconds / found.wall_seconds:.2%}")
        for what, seconds in found.spent.items()
        if seconds > 0
    ]
    return table("where_the_time_went >time >share", rows)


def _failures(found: Goodput) -> RenderableType:
    shown = found.failures[-STARTS_SHOWN:]
    rows = [
        (
            _day(one.at),
            one.last_step,
            one.restored_step,
            one.lost_steps,
            _short(one.lost_seconds),
            _short(one.away_seconds),
        )
        for one in shown
    ]
    if len(found.failures) > len(shown):
        rows.insert(0, (f"({len(found.failures) - len(shown)} before)", None, None, None, None, None))  # type: ignore[arg-type]
    return table("failure >at_step >back_to >steps_lost >training_lost >away", rows) if rows else plain("no failures")


def _day(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 60 else human_seconds(seconds)
