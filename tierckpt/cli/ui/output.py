"""The only printer: results on stdout, everything else on stderr, for people or as JSON.

Text for people has no control characters: object names are untrusted, and a terminal executes them.
"""

from __future__ import annotations

import json
import logging
import re
import string
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from ... import types
from ...errors import PartialTransferError, TierckptError
from ...quantities import human_bytes as human_bytes
from ...quantities import human_seconds as human_seconds
from ...redaction import redact_all
from ...telemetry import LogFormat, LogLevel, ignore_progress, log_to

WIDTH_WHEN_PIPED = 100_000
LINE_SECONDS = 0.5
TRANSFERS_SHOWN, FILES_SHOWN = 4, 8
INDENT = "  "
WIDTH_WIDE = 100
"""Narrower bars do not show the remaining time."""
Progressing = Literal["auto", "json", "none"]

_STYLES = (
    dict.fromkeys(("ok", "committed", "good"), "green")
    | dict.fromkeys(("warn", "uncommitted", "held", "waiting"), "yellow")
    | dict.fromkeys(("fail", "failed", "lost"), "bold red")
)


@dataclass(frozen=True)
class Report:
    document: types.Json
    view: Sequence[RenderableType] = ()
    exit_code: int = 0


class Output:
    """Collects the library's warnings until ``close``. An error as JSON takes one line, as progress does."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.verb: str | None = None
        self.log_format: LogFormat = "text"
        self.warnings: list[str] = []
        self._handler = _Warnings(self)
        self._stop_logging: Callable[[], None] = lambda: None
        logging.getLogger("tierckpt").addHandler(self._handler)

    def log(self, log_format: LogFormat, level: LogLevel) -> None:
        """Also write events to stderr, except warnings as text, which are printed already."""
        self.log_format = log_format
        if log_format == "text" and level in {"warning", "error"}:
            return
        if not self.as_json:
            logging.getLogger("tierckpt").removeHandler(self._handler)
        self._stop_logging = log_to(sys.stderr, log_format, level)

    def close(self) -> None:
        logging.getLogger("tierckpt").removeHandler(self._handler)
        self._stop_logging()

    def show(self, report: Report) -> None:
        if self.as_json:
            self._dump(report.document, sys.stdout)
            return
        out = console(sys.stdout)
        for part in report.view:
            out.print(safe(part))
        sys.stdout.flush()

    def error(self, error: TierckptError) -> None:
        failures = error.failures if isinstance(error, PartialTransferError) else {}
        if self.as_json:
            self._dump(error.to_json() | ({"failures": failures} if failures else {}), sys.stderr)
            return
        out = console(sys.stderr)
        out.print(_labelled("error", "bold red", error.message))
        for name, reason in failures.items():
            out.print(plain(f"  {name}: {reason}"))
        if error.hint:
            out.print(_labelled("hint", "cyan", error.hint))

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        if not self.as_json:
            console(sys.stderr).print(_labelled("warning", "yellow", text))

    def _dump(self, document: types.Json, stream: TextIO) -> None:
        if self.warnings:
            document = {**document, "warnings": self.warnings}
        stream.write(json.dumps(document, indent=2 if stream is sys.stdout else None) + "\n")
        stream.flush()


class _Warnings(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.warn(record.getMessage())


class _Lines:
    """Writes progress as NDJSON on stderr: per task at most one line every ``LINE_SECONDS``, and its end."""

    def __init__(self) -> None:
        self._written_at: dict[str, float] = {}

    def __call__(self, progress: types.Progress, /) -> None:
        now, is_done = time.monotonic(), progress.done_bytes >= progress.total_bytes
        if not is_done and now - self._written_at.get(progress.what, float("-inf")) < LINE_SECONDS:
            return
        self._written_at[progress.what] = now
        fields = asdict(replace(progress, files=()))
        del fields["files"]
        line = {"at_unix_seconds": round(time.time(), 3), **redact_all(fields)}
        sys.stderr.write(json.dumps(line) + "\n")
        sys.stderr.flush()


def _one_line(max_width: int | None = None) -> Column:
    return Column(no_wrap=True, overflow="ellipsis", max_width=max_width)


class _Bars(Progress):
    """A row for each of a few transfers, and a line for each of a few of their files in flight."""

    def __init__(self, *columns: ProgressColumn, console: Console) -> None:
        self._transfers: dict[str, TaskID] = {}
        self._files: dict[str, tuple[types.FileProgress, ...]] = {}
        super().__init__(*columns, console=console, transient=True)

    def show(self, progress: types.Progress, /) -> None:
        what, is_done = progress.what, progress.done_bytes >= progress.total_bytes
        if is_done:
            self._files.pop(what, None)
        else:
            self._files[what] = progress.files
        if what not in self._transfers and not self._add_transfer(what):
            return
        note, row = printable(progress.note), self._transfers[what]
        self.update(row, completed=progress.done_bytes, total=progress.total_bytes, note=note)

    def _add_transfer(self, what: str) -> bool:
        """Take the row of a finished transfer if all are taken."""
        if len(self._transfers) >= TRANSFERS_SHOWN:
            done = next((one for one, row in self._transfers.items() if self._tasks[row].finished), None)
            if done is None:
                return False
            self.remove_task(self._transfers.pop(done))
        self._transfers[what] = self.add_task(printable(what), total=None, note="")
        return True

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        files = [file for some in [*self._files.values()] for file in some]
        shown = [f"{100 * file.done_bytes / max(1, file.total_bytes):3.0f} % {printable(file.path)}" for file in files]
        more = len(shown) - FILES_SHOWN
        for text in [*shown[:FILES_SHOWN], *([f"{more} more files"] if more > 0 else [])]:
            yield Text(INDENT + text, no_wrap=True, overflow="ellipsis")


@contextmanager
def progress_bar(
    *, as_json: bool, of: Literal["bytes", "time"] = "bytes", progress: Progressing = "auto"
) -> Iterator[types.ProgressListener]:
    """Yield a listener that draws a bar on a terminal, or writes lines with ``progress="json"``.

    ``of="time"``: progress is not in bytes.
    """
    if progress == "json":
        yield _Lines()
        return
    if as_json or progress == "none" or not sys.stderr.isatty():
        yield ignore_progress
        return
    target = console(sys.stderr)
    name = TextColumn("{task.description}", markup=False, table_column=_one_line(target.width // 3))
    columns: list[ProgressColumn] = [name, BarColumn(), TaskProgressColumn()]
    if of == "bytes":
        columns += [DownloadColumn(binary_units=True, table_column=_one_line()), TransferSpeedColumn(_one_line())]
    if target.width >= WIDTH_WIDE:
        columns.append(TimeRemainingColumn(table_column=_one_line()))
    columns.append(TextColumn("{task.fields[note]}", markup=False, table_column=_one_line(target.width // 6)))
    with _Bars(*columns, console=target) as bars:
        yield bars.show


class _Formatter(string.Formatter):
    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if key in kwargs:
            return kwargs[str(key)]
        return args[0][key] if isinstance(args[0], Mapping) else getattr(args[0], str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None and format_spec not in ("none", "whole"):
            return "-"
        if format_spec not in FORMATS:
            return format(value, format_spec)
        return value if isinstance(value, str) and value else FORMATS[format_spec](value)


_fill = _Formatter()


def table(columns: str, rows: Iterable[object]) -> RenderableType:
    """Return a table, or nothing without ``rows``: mappings or objects with the keys, or tuples of all cells.

    ``columns`` are ``title=key:format``, separated by spaces. ``_`` in a title is a space, a leading ``>`` aligns
    right. The key defaults to the title, and may be nested: ``copy.name``, ``copy[name]``.
    """
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    parts = [re.fullmatch(r"(>?)([^=:]+)(?:=([^:]+))?(?::(.+))?", column) for column in columns.split()]
    cells = [(found[2] if found[3] is None else found[3], found[4] or "") for found in parts if found]
    for found in filter(None, parts):
        result.add_column(found[2].replace("_", " "), justify="right" if found[1] else "left", overflow="fold")
    for row in rows:
        if isinstance(row, tuple):
            texts = [_fill.format_field(cell, spec) for cell, (_, spec) in zip(row, cells, strict=True)]
        else:
            texts = [_fill.format(f"{{{key}:{spec}}}", row) for key, spec in cells]
        result.add_row(*map(plain, texts))
    return result if result.rows else Group()


def facts(pairs: Mapping[str, object], row: object = None, **more: object) -> Table:
    """Return names and values, one per line, without empty values.

    With ``row``, the values are templates like ``{files}, {size_bytes:bytes}``, which must not contain untrusted text.
    """
    result = Table.grid(padding=(0, 2))
    result.add_column(style="bold")
    result.add_column(overflow="fold")
    for name, value in pairs.items():
        text = _fill.format_field(value, "") if row is None else _fill.format(str(value), row, **more)
        if text:
            result.add_row(plain(name), plain(text))
    return result


def decimal(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} EB"


def short(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else human_seconds(seconds)


def day(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


FORMATS: Mapping[str, Callable[[Any], str]] = {
    "bytes": human_bytes,
    "decimal": decimal,
    "decimals": lambda value: f"{decimal(value)}/s",
    "rate": lambda value: f"{human_bytes(value)}/s" if value else "-",
    "seconds": human_seconds,
    "short": short,
    "since": lambda unix_seconds: human_seconds(time.time() - unix_seconds),
    "day": day,
    "none": lambda value: "none" if value is None else str(value),
    "whole": lambda value: value or "whole",
    "share": lambda value: f"{value:.2%}",
    "count": lambda values: str(len(values)),
    "yes": lambda value: "yes" if value else "no",
    "list": ", ".join,
    "-": lambda value: value or "-",
    "of": lambda part: f"{100 * part[0] / max(1, part[1]):.0f} %",
    "lost": lambda names: ", ".join(names) or "lost",
}
"""Views know these formats and Python's own."""


def plain(text: str) -> Text:
    """Make control characters visible."""
    return Text(printable(text), style=_STYLES.get(text, ""))


def safe(part: RenderableType) -> RenderableType:
    return plain(part) if isinstance(part, str) else part


def printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _labelled(label: str, style: str, text: str) -> Text:
    return Text.assemble((f"{label}: ", style), printable(text))


def console(stream: TextIO) -> Console:
    width = None if stream.isatty() else WIDTH_WHEN_PIPED
    return _Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


@contextmanager
def redrawing(stream: TextIO, *, transient: bool = False) -> Iterator[Callable[..., None]]:
    """Yield a function that draws over its last picture on a terminal, and else prints each."""
    out = console(stream)
    can_move = out.is_terminal and not out.is_dumb_terminal
    with Live(console=out, auto_refresh=False, transient=transient) if can_move else nullcontext() as live:

        def draw(*parts: RenderableType) -> None:
            picture = Group(*map(safe, parts))
            if live is None:
                out.print(picture)
            else:
                live.update(picture, refresh=True)

        yield draw


class _Console(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor visible: a signal may end the command before it is shown again."""
        return False
