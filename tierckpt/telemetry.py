"""Loggers, metrics and progress. The library configures none.

No label of a metric names a step, a rank or a URI: their number has no bound.

    T1  No secret: every record of a ``tierckpt.*`` logger is redacted before any handler sees it.
    T2  A failing listener or log handler never fails the work that it observes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TextIO, TypeAlias

from .process_start import MESSAGE_SECONDS, is_ready
from .redaction import redact, redact_all
from .types import FileProgress, Progress, ProgressListener

# --- metrics ---------------------------------------------------------------------------------------------------

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Labels: TypeAlias = Mapping[str, str]

SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)

METRICS: dict[str, Metric] = {}


MetricListener: TypeAlias = Callable[["Metric", float, Labels], None]


@dataclass(frozen=True, eq=False)
class Metric:
    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS

    def __post_init__(self) -> None:
        METRICS[self.name] = self

    def emit(self, value: float, **labels: str) -> None:
        for listener in listeners:
            try:
                listener(self, value, labels)
            except Exception as error:
                logger("telemetry").debug("a listener failed on %s: %s", self.name, error)


listeners: tuple[MetricListener, ...] = ()
_listeners_lock = threading.Lock()
os.register_at_fork(after_in_child=_listeners_lock._at_fork_reinit)  # type: ignore[attr-defined]


def listen(listener: MetricListener) -> Callable[[], None]:
    """Call ``listener`` on the measuring thread. Returns a stop function."""
    global listeners
    with _listeners_lock:
        listeners = (*listeners, listener)

    def stop() -> None:
        global listeners
        with _listeners_lock:
            listeners = tuple(one for one in listeners if one is not listener)

    return stop


BYTES = Metric(
    "counter", "tierckpt_bytes_total", "Bytes of files read, written or linked, by tier.", ("tier", "direction")
)
FILES = Metric("counter", "tierckpt_files_total", "Files moved, by operation.", ("operation",))
FILE_SECONDS = Metric("histogram", "tierckpt_file_seconds", "Time to move one file.", ("operation",))
DRAIN_SECONDS = Metric("histogram", "tierckpt_drain_seconds", "Time from the start of a drain to its shared commit.")
FLUSH_SECONDS = Metric("histogram", "tierckpt_flush_seconds", "Time to write one rank's shards to the local tier.")
BLOCKED_SECONDS = Metric("histogram", "tierckpt_save_blocked_seconds", "Time that a save blocked training.")
LOG_BLOCKED_SECONDS = Metric(
    "counter", "tierckpt_log_blocked_seconds_total", "Time that steps waited for the disk of a gradient log."
)
RETRIES = Metric("counter", "tierckpt_retries_total", "Retries after a failure, by operation.", ("operation",))
QUARANTINES = Metric("counter", "tierckpt_quarantines_total", "Bad copies moved to quarantine, by tier.", ("tier",))
ERRORS = Metric("counter", "tierckpt_errors_total", "Errors that ended an operation.", ("operation", "error"))
EVICTED_BYTES = Metric(
    "counter", "tierckpt_evicted_bytes_total", "Bytes evicted from the local tier for room, by kind.", ("kind",)
)
COMMITS = Metric("counter", "tierckpt_commits_total", "Checkpoints committed by this node, by tier.", ("tier",))
REPLICAS = Metric("counter", "tierckpt_replicas_total", "Copies of other nodes' checkpoints, by outcome.", ("outcome",))
READS_ALONE = Metric("counter", "tierckpt_reads_alone_total", "Loads of a rank that left the shared read of its node.")
STEPPED_BACK_SECONDS = Metric("counter", "tierckpt_stepped_back_seconds_total", "Time that drains paused for a flush.")

PEER_MEMBERS = Metric("gauge", "tierckpt_peer_members", "Other nodes, by state.", ("state",))
PEER_REFUSED = Metric("counter", "tierckpt_peer_refused_total", "Refused requests of peers, by reason.", ("reason",))
PEER_BANS = Metric("counter", "tierckpt_peer_bans_total", "Temporary bans of peers that sent wrong bytes.")

RELAYED_VALUES_MAX = 2000


class MetricsRelay:
    """Collects measurements for another process. Histograms keep at most ``RELAYED_VALUES_MAX`` values."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._values: list[tuple[str, float, dict[str, str]]] = []
        self._lock = threading.Lock()

    def __call__(self, metric: Metric, value: float, labels: Labels, /) -> None:
        key = (metric.name, tuple(sorted(labels.items())))
        with self._lock:
            if metric.kind == "histogram":
                if len(self._values) < RELAYED_VALUES_MAX:
                    self._values.append((metric.name, value, dict(labels)))
            else:
                self._sums[key] = self._sums.get(key, 0.0) + value

    def start_anew(self) -> None:
        """Drop all measurements in a forked child: the parent forwards them."""
        self._lock = threading.Lock()
        self._sums, self._values = {}, []

    def take(self) -> list[list[Any]]:
        with self._lock:
            rows: list[list[Any]] = [[name, value, dict(labels)] for (name, labels), value in self._sums.items()]
            rows += [[name, value, labels] for name, value, labels in self._values]
            self._sums, self._values = {}, []
        return rows


def emit_rows(rows: list[list[Any]]) -> int:
    """Return the number of rows emitted. Rows are untrusted: invalid ones are skipped."""
    taken = 0
    for row in rows:
        try:
            name, value, labels = row
            metric = METRICS[name]
            if set(labels) != set(metric.labels) or not all(isinstance(item, str) for item in labels.values()):
                continue
            metric.emit(float(value), **{key: item[:80] for key, item in labels.items()})
            taken += 1
        except (KeyError, TypeError, ValueError):
            continue
    return taken


# --- logs ------------------------------------------------------------------------------------------------------

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

REPEAT_SECONDS = 60.0
EVENTS_PER_MINUTE = 120
SOURCES_MAX = 256

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class _Redacting(logging.Filter):
    """Filters the logger, not a handler, so that it also protects other handlers (T1)."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
            clean = redact(text)
            if clean != text:
                record.msg, record.args = clean, None
            if record.exc_info and not record.exc_text:
                record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        except Exception:
            record.msg, record.args = f"a log message that could not be formed ({record.msg!r:.80})", None
            record.msg = redact(record.msg)
        return True


_redacting = _Redacting()


def logger(name: str) -> logging.Logger:
    found = logging.getLogger(f"tierckpt.{name}")
    found.addFilter(_redacting)
    found.callHandlers = partial(_call_handlers, found)  # type: ignore[method-assign]
    return found


_stuck: weakref.WeakSet[logging.Handler] = weakref.WeakSet()
"""Their last event was dropped."""


def _call_handlers(log: logging.Logger, record: logging.LogRecord) -> None:
    """Keep handlers from raising or blocking (T2): a closed standard error raises ValueError, a gone pipe SystemExit in
    rich.
    """
    handlers, each = list[logging.Handler](), log
    while each is not None:
        handlers += each.handlers
        each = each.parent if each.propagate else None  # type: ignore[assignment]
    if not handlers and logging.lastResort is not None:
        handlers = [logging.lastResort]
    for handler in handlers:
        with contextlib.suppress(Exception, SystemExit):
            if record.levelno >= handler.level and _takes_events(handler):
                handler.handle(record)


def _takes_events(handler: logging.Handler) -> bool:
    """Wait ``MESSAGE_SECONDS`` once for a full pipe."""
    try:
        descriptor = handler.stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return True
    if is_ready(descriptor, select.POLLOUT, 0.0 if handler in _stuck else MESSAGE_SECONDS):
        _stuck.discard(handler)
        return True
    _stuck.add(handler)
    return False


def log_failure(log: logging.Logger, error: BaseException, message: str, *arguments: object, level: int) -> None:
    """Log at DEBUG if ``error`` is part of an outage that has its own record."""
    level = logging.DEBUG if getattr(error, "is_logged", False) else level
    log.log(level, message, *arguments, stacklevel=2)


class Repeats:
    """Logs the first event of each source at once, then once a minute with a count. Thread-safe.

    Sources beyond ``SOURCES_MAX`` count as one.
    """

    def __init__(self, log: logging.Logger, level: int, what: str) -> None:
        self._log, self._level, self._what = log, level, what
        self.seen: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def note(self, source: str, reason: object) -> None:
        now = time.monotonic()
        with self._lock:
            if source not in self.seen and len(self.seen) >= SOURCES_MAX:
                self.seen = {key: one for key, one in self.seen.items() if now - one[0] < REPEAT_SECONDS}
                if len(self.seen) >= SOURCES_MAX:
                    source = "others"
            said_at, count = self.seen.get(source, (-REPEAT_SECONDS, 0))
            is_due = now - said_at >= REPEAT_SECONDS
            self.seen[source] = (now, 0) if is_due else (said_at, count + 1)
        if is_due:
            more = f" (and {count} more since the last message)" if count else ""
            self._log.log(self._level, f"{self._what}%s", source, reason, more)


class _Sparing(logging.Filter):
    """Limits events of a program line per minute: remote requests or retries cannot fill a disk."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, int], list[float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        counted = self._counts.setdefault((record.pathname, record.lineno), [now, 0, 0])
        if now - counted[0] >= REPEAT_SECONDS:
            if counted[2]:
                text = f"{record.getMessage()} ({int(counted[2])} similar events were dropped before it)"
                record.msg, record.args = text, None
            counted[:] = [now, 0, 0]
        counted[1] += 1
        if counted[1] > EVENTS_PER_MINUTE:
            counted[2] += 1
            return False
        return True


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        fields = {key: value for key, value in vars(record).items() if key not in _STANDARD and key not in line}
        if record.exc_info:
            fields["traceback"] = record.exc_text or self.formatException(record.exc_info)
        return json.dumps(redact_all({**line, **json.loads(json.dumps(fields, default=str))}))


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def log_to(stream: TextIO, log_format: LogFormat, level: LogLevel, *, is_sparing: bool = False) -> Callable[[], None]:
    """Write redacted events of the package to ``stream``. Returns a stop function.

    Events that already go to ``stream`` are not written twice. ``is_sparing``: at most ``EVENTS_PER_MINUTE`` per
    program line.
    """
    target = logging.getLogger("tierckpt")
    handlers = [each for each in target.handlers if isinstance(each, logging.StreamHandler) and each.stream is stream]
    handler = logging.StreamHandler(stream)
    handler.setLevel(min([level_of(level), *(each.level for each in handlers)]))
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else _TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    if is_sparing:
        handler.addFilter(_Sparing())
    before = target.level
    for each in handlers:
        target.removeHandler(each)
    target.addHandler(handler)
    target.setLevel(min(level_of(level), before) if before else level_of(level))

    def stop() -> None:
        target.removeHandler(handler)
        for each in handlers:
            target.addHandler(each)
        target.setLevel(before)

    return stop


def level_of(level: LogLevel) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


# --- progress --------------------------------------------------------------------------------------------------


class ProgressCounter:
    """Counts the bytes of an operation, and calls ``listener`` at each change."""

    def __init__(self, listener: ProgressListener, what: str, total_bytes: int) -> None:
        self._listener, self._what, self._total_bytes = listener, what, total_bytes
        self.done_bytes, self._files = 0, list[FileProgress]()

    def add(self, count: int) -> None:
        self.done_bytes += count
        self._listener(Progress(self._what, self.done_bytes, self._total_bytes, files=tuple(self._files)))

    @contextlib.contextmanager
    def moving(self, path: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts the bytes of one file."""
        file = FileProgress(path, 0, size_bytes)

        def on_file(count: int) -> None:
            file.done_bytes += count
            self.add(count)

        self._files.append(file)
        try:
            yield on_file
        finally:
            self._files.remove(file)


def ignore_progress(progress: Progress, /) -> None: ...
