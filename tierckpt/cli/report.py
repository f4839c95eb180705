"""``tierckpt report``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.text import Text

from ..checkpoint.journal import DRAIN_STATES
from ..checkpoint.run_records import Lines, local_records, read_history, read_shared_commits
from ..client import Client
from ..errors import CheckpointNotFoundError, ConfigError
from ..format.layout import Location, step_name, step_of
from ..planning.goodput import Goodput, Seen, TierTimes, What, analyse, commits_of, read_start, tier_times
from ..types import Json
from .size import PlotOption, plotted
from .ui import plots
from .ui.output import Report, day, facts, human_seconds, short, table
from .ui.session import Session, UriArgument, location_of

WIDTH = 80
FAILURES_SHOWN = 12
STEPS_SHOWN = 8
LOOKS: Mapping[What, tuple[str, str, str]] = {
    "kept": ("█", "green", "training, kept"),
    "unsaved": ("▓", "yellow", "training, not saved yet"),
    "lost": ("▒", "red", "training, lost by a failure"),
    "blocked": ("▪", "yellow", "blocked by saves"),
    "down": (" ", "default", "no process"),
    "starting": ("·", "bright_black", "starting"),
    "loading": ("▸", "blue", "loading a checkpoint"),
    "warming": ("◦", "cyan", "first step"),
    "other": ("?", "magenta", "after the last step"),
}


def report(session: Session, uri: UriArgument, plot: PlotOption = None) -> Report:
    """Show how a run spent its time: ETTR, goodput, work lost by failures.

    Measured by the Checkpointer in the run's processes. ETTR is kept training divided by the time since the first
    process started; goodput is kept training divided by the time in which processes ran. For each tier: the time until
    saves were durable, and the saves that are not durable yet.
    """
    location = location_of(uri)
    with session.client() as client:
        history = client.run(read_history(client.mover.directory(location), client.mover.store(location)))
        commits, seen = _commits(location, history, client)
    starts = [start for lines in history.values() if (start := read_start(lines)) is not None]
    try:
        found = analyse(starts, commits)
    except ConfigError as error:
        raise CheckpointNotFoundError(
            f"{location.uri} has no records of training",
            hint="`tierckpt.Checkpointer` writes them; give the run, not one of its checkpoints",
        ) from error
    tiers = tier_times(found.starts, commits, seen, time.time())
    document: Json = {"uri": location.uri, **_document(found, tiers), **plotted(plot, plots.plot_goodput, found)}
    spent = [(LOOKS[what][2], took, took / found.wall_seconds) for what, took in found.spent.items() if took > 0]
    shares = table("where_the_time_went >time:short >share:share", spent)
    view = [facts(_summary(location, found)), _timeline(found), shares, *_tiers(tiers), _failures(found)]
    return Report(document, view)


def _commits(location: Location, history: dict[str, Lines], client: Client) -> tuple[Lines, Seen]:
    """Include commits that the shared tier has without a record."""
    recorded = {name: start for name, lines in history.items() if (start := read_start(lines)) is not None}
    starts = [recorded[name] for name in sorted(recorded)]
    commits = [line for name, lines in history.items() if name not in recorded for line in lines]
    known = commits_of(starts, commits, "shared")
    saves = [((n, m), save.step) for n, start in enumerate(starts) for m, save in enumerate(start.made)]
    names = {step_name(step) for key, step in saves if known.get(key) is None}
    mover = client.mover
    there = client.run(
        read_shared_commits(lambda name: mover.store(location.child(name)), mover.store(location), names)
    )
    entries = [entry for entry in mover.journal.entries() if entry.state in DRAIN_STATES]
    steps = [step_of(entry.location.name) for entry in entries if entry.location.parent == location]
    here = local_records(mover.directory(location))
    seen = Seen(
        max(recorded, default="") in here, frozenset(step for step in steps if step is not None), there is not None
    )
    return [*commits, *(there or [])], seen


def _document(found: Goodput, tiers: Sequence[TierTimes]) -> Json:
    document = asdict(found)
    document["starts"] = [
        {name: value for name, value in start.items() if name not in ("work", "made")} for start in document["starts"]
    ]
    document["tiers"] = {
        one.tier: {name: value for name, value in asdict(one).items() if name != "tier"} | {"saves": one.saves}
        for one in tiers
    }
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
        "from, to": f"{day(first.began_at)} to {day(last.ended_at)}, {human_seconds(found.wall_seconds)}",
        "ETTR": f"{found.ettr:.2%}" + (f" (by formula {found.expected_ettr:.2%})" if found.expected_ettr else ""),
        "goodput": f"{found.goodput:.2%} of the time with processes, {found.steps_per_hour:.0f} steps an hour",
        "kept": f"{found.kept_steps} of {found.trained_steps} steps, {short(found.kept_seconds)} of training",
        "saves": _saves(found),
        "starts": f"{len(found.starts)}, {len(found.failures)} after a failure",
    }
    if lost:
        steps = sum(one.lost_steps for one in found.failures) / len(lost)
        summary["lost by a failure"] = (
            f"{short(sum(lost) / len(lost))} of training ({steps:.1f} steps), and "
            f"{short(found.restart_seconds or 0)} until training continued"
        )
    if found.unsaved_steps:
        took = short(found.spent["unsaved"])
        summary["not saved"] = (
            f"{_steps(found.unsaved_steps)} after the newest save, {took} of training: lost, unless the job still runs "
            "and saves again"
        )
    elif found.after_save_steps:
        count = _steps(found.after_save_steps)
        summary["not saved"] = f"the last {count} of those kept: the job ended without saving them"
    if found.replayed_steps:
        summary["not lost"] = f"{found.replayed_steps} steps without a checkpoint, replayed from the gradient log"
    return summary


def _saves(found: Goodput) -> str:
    if not found.saves or found.interval_seconds is None:
        return "none"
    blocked = short(found.blocked_seconds or 0.0)
    return f"{found.saves}, one every {short(found.interval_seconds)} of training, each blocked {blocked}"


TIERS = {"local": "local SSD", "peer": "peers", "shared": "shared storage"}


def _tiers(tiers: Sequence[TierTimes]) -> list[RenderableType]:
    rows = [
        (
            TIERS[one.tier],
            f"{one.reached} of {one.saves}",
            *(one.median_seconds, one.p90_seconds, one.maximum_seconds),
            len(one.waiting_steps),
            one.oldest_waiting_seconds,
        )
        if one.is_used
        else (TIERS[one.tier], "not set up", *5 * [None])
        for one in tiers
    ]
    notes = [note for one in tiers if one.is_used for note in _tier_notes(one)]
    columns = "from_save_to_durable_on >saves >median:short >p90:short >maximum:short >not_yet >oldest:short"
    return [table(columns, rows), *notes]


def _tier_notes(one: TierTimes) -> list[str]:
    name = TIERS[one.tier]
    notes = [
        (one.waiting_steps, f"not yet on {name}"),
        (one.unknown_steps, f"unknown whether on {name}"),
        (one.skipped_steps, f"will not be on {name} (failed, replaced, forgotten, or local only)"),
    ]
    shown = [f"{text}: {_ranges(steps)}" for steps, text in notes if steps]
    if one.untimed:
        shown.append(f"on {name} at an unknown time: {one.untimed} (no record, or the clocks differ)")
    return shown


def _ranges(steps: Sequence[int]) -> str:
    if len(steps) <= STEPS_SHOWN:
        return f"{len(steps)}, {'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}"
    return f"{len(steps)}, newest: steps {', '.join(map(str, steps[-STEPS_SHOWN:]))}"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _timeline(found: Goodput) -> Text:
    begin, wall = found.starts[0].began_at, found.wall_seconds
    line = Text("\n")
    for column in range(WIDTH):
        at = begin + (column + 0.5) * wall / WIDTH
        what: What = next((one.what for one in found.stretches if one.began_at <= at < one.ended_at), "down")
        mark, style, _ = LOOKS[what]
        line.append(mark, style)
    line.append("\n")
    for what in dict.fromkeys(stretch.what for stretch in found.stretches):
        mark, style, name = LOOKS[what]
        line.append(f"{mark if mark != ' ' else '(blank)'} ", style)
        line.append(f"{name}   ")
    return line


def _failures(found: Goodput) -> RenderableType:
    if not found.failures:
        return "no failures"
    columns = (
        "failure=at:day >at_step=last_step >back_to=restored_step >steps_lost=lost_steps "
        ">training_lost=lost_seconds:short >away=away_seconds:short"
    )
    return table(columns, found.failures[-FAILURES_SHOWN:])
