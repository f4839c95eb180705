"""The records of a run: how its processes spend their time, for ``tierckpt report``.

At each start, rank 0 opens a file in ``layout.HISTORY_DIR``; copies go to shared storage. Every line carries totals, so
a torn or missing line loses only its own increment.

    L1  The records never fail or delay training: a thread writes the file; an error ends the records, logged once.
    L2  A file has at most ``LINES_MAX`` lines: at the limit, every second line of progress is removed.
    O1  Another job that saves to the run has records that change, or appear, after this process began. An ended process
        does not count.
    O2  The search for other jobs never fails or delays a save.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from ..checkpoint.run_records import Lines, has_ended_here, parse_lines
from ..client import get_client
from ..config import Settings
from ..disk.durable import fsync_file, make_dirs
from ..disk.illness import ILL_SECONDS
from ..disk.local_root import use_local_root
from ..disk.processes import pid_namespace, start_ticks
from ..disk.quarantine import open_regular
from ..format.layout import HISTORY_DIR, Location, local_dir
from ..mover import Mover
from ..resources import start_thread
from ..telemetry import logger

log = logger("ledger")

LINES_MAX = 4000
LINE_SECONDS = 1.0
SEND_SECONDS = 5.0
WRITE_WAIT_SECONDS = 0.05
"""Maximum wait of a step for the file write; 0.1 ms on a healthy disk."""
LAST_SEND_SECONDS = 5.0
CHECK_SECONDS = 5.0
_own_names: set[str] = set()
PROGRESS = ("step", "save", "durable")


class RunLog:
    """The records of one Checkpointer. Thread-safe. ``is_on`` False: writes nothing (other ranks)."""

    def __init__(
        self, location: Location, settings: Settings, *, is_on: bool = True, has_gradient_log: bool = False
    ) -> None:
        self._settings, self._location, self._has_gradient_log = settings, location, has_gradient_log
        self._lock = threading.Condition()
        self._totals = dict.fromkeys(("productive", "blocked", "starting", "loading", "warming"), 0.0)
        self._saves = 0
        self._step: int | None = None
        self._mark: float | None = None
        self._first_seconds: float | None = None
        self._has_begun = False
        self._trains = False
        self._written_at = self._sent_at = 0.0
        self._sending: Future[None] | None = None
        self._lines: list[str] = []
        self._tail = ""
        self._changes = self._written = self._thinned = 0
        self._left_seconds = 0.0
        self._thread: threading.Thread | None = None
        now = time.time()
        self._process_at = min(process_started_at(), now)
        name = f"{int(now * 1000):014d}-{os.getpid()}.jsonl"
        self._key = f"{HISTORY_DIR}/{name}"
        self._path = local_dir(settings.local_root, location) / self._key
        _own_names.add(name)
        self._others = OtherJobs(location, self._process_at)
        self._looking: Future[None] | None = None
        self._is_on = is_on
        self._begun_at = time.monotonic()

    def restored(self, step: int | None, seconds: float, replayed_steps: int = 0) -> None:
        with self._lock:
            self._begin(seconds)
            self._totals["loading"] += seconds
            self._mark = time.monotonic()
            if step is not None:
                self._step = step
                self._write("restored", step=step, replayed_steps=replayed_steps)

    def stepped(self, step: int, *, is_save: bool = False) -> None:
        """Record the end of a step. The time since the last call counts as work."""
        with self._lock:
            self._step = step if self._step is None else self._step
            self._begin(0.0, begins_with="save" if is_save else "step")
            self._trains = True
            now = time.monotonic()
            if self._mark is not None:
                self._count(now - self._mark)
            self._mark, self._step = None, step
            if now - self._written_at >= LINE_SECONDS or self._thread is None:
                self._write("step")
            else:
                self._write_tail()

    def resumed(self, blocked_seconds: float) -> None:
        with self._lock:
            self._totals["blocked"] += blocked_seconds
            self._mark = time.monotonic()

    def saved(self, step: int, age_seconds: float, *, is_sent: bool = True) -> None:
        with self._lock:
            self._begin(0.0)
            self._trains = True
            self._saves += 1
            self._step = step
            self._write("save", save_at=round(time.time() - age_seconds, 3), is_sent=is_sent)

    def durable(self, step: int, seconds: float, size_bytes: int, *, is_direct_put: bool = False) -> None:
        """Record a commit. With ``is_direct_put`` it is only shared."""
        with self._lock:
            if self._has_begun:
                self._write(
                    "durable",
                    step=step,
                    durable_seconds=round(seconds, 6),
                    size_bytes=size_bytes,
                    is_direct_put=is_direct_put,
                    reached_step=self._step,
                )
        if self._flush(LAST_SEND_SECONDS):
            with contextlib.suppress(OSError):  # L1; a power cut loses at most the lines since the last checkpoint
                fsync_file(self._path)
        self.send()
        self._check_jobs()

    def _check_jobs(self) -> None:
        if not (self._is_on and self._settings.drain) or (self._looking is not None and not self._looking.done()):
            return

        async def look(mover: Mover) -> None:
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    has_news = await self._others.has_progress(mover, frozenset(_own_names))
            except Exception as error:  # L1
                log.debug("cannot check whether other jobs save to %s: %s", self._location.uri, error)
                return
            if has_news:
                self.send(at_once=True)

        with contextlib.suppress(Exception):  # L1
            self._looking = get_client(self._settings).start(look(get_client(self._settings).mover))

    def is_alone(self, wait_seconds: float = CHECK_SECONDS) -> bool:
        if self._looking is not None:
            with contextlib.suppress(Exception):
                self._looking.result(wait_seconds)
        return self._others.is_alone

    def ended(self, reason: str, *, wait_seconds: float = 0.0) -> None:
        with self._lock:
            if not self._trains:
                return
            self._mark = None  # the job waited for its drains, or failed
            self._write("end", reason=reason)
        self._flush(ILL_SECONDS)
        if wait_seconds > 0:
            self.send(at_once=True)
            if self._sending is not None:
                with contextlib.suppress(Exception):
                    self._sending.result(min(LAST_SEND_SECONDS, wait_seconds))

    def _begin(self, loading_seconds: float, begins_with: str = "restore") -> None:
        if self._has_begun:
            return
        self._has_begun = True
        if self._mark is None:
            since_start = loading_seconds or time.monotonic() - self._begun_at
            self._totals["starting"] = max(0.0, time.time() - self._process_at - since_start)
            self._mark = None if loading_seconds else self._begun_at
        self._write(
            "start",
            process_at=round(self._process_at, 3),
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            begins_with=begins_with,
            drain=self._settings.drain,
            replicas=self._settings.replicas,
            gradient_log=self._has_gradient_log,
            **identity(),
        )

    def _count(self, seconds: float) -> None:
        """Count a step. The first step's excess over the second counts as warm-up."""
        if self._first_seconds is not None:
            extra = max(0.0, self._first_seconds - seconds)
            self._totals["warming"] += extra
            self._totals["productive"] -= extra
            self._first_seconds = None
        elif self._totals["productive"] == 0:
            self._first_seconds = seconds
        self._totals["productive"] += seconds

    def _write(self, what: str, **more: Any) -> None:
        if not self._is_on:
            return
        self._written_at = time.monotonic()
        self._lines.append(self._text(what, **more))
        self._tail = ""
        if self._trains:
            if len(self._lines) > LINES_MAX:
                self._compact()
            self._warn()

    def _text(self, what: str, **more: Any) -> str:
        line = {"what": what, "at": round(time.time(), 3), "step": self._step, "saves": self._saves}
        line |= {f"{name}_seconds": round(seconds, 4) for name, seconds in self._totals.items()} | more
        return json.dumps(line) + "\n"

    def _write_tail(self) -> None:
        """Write the latest step as the tail, which the next line overwrites, so that a kill hides no step.

        A kill tears no write of one page. The reader skips a line torn by a power cut.
        """
        if self._is_on:
            self._tail = self._text("step")[:-1].ljust(len(self._tail) - 1) + "\n"
            self._warn()

    def _compact(self) -> None:
        """Remove every second line of progress (L2), lines of saves last. Replaces the file atomically."""
        kinds = [json.loads(text)["what"] for text in self._lines]
        newest = max((n for n, what in enumerate(kinds) if what == "durable"), default=-1)
        removed = set([n for n, what in enumerate(kinds[:-1]) if what == "step"][1::2])
        if len(self._lines) - len(removed) > LINES_MAX * 3 // 4:
            removed = set([n for n, what in enumerate(kinds[:-1]) if what in PROGRESS and n != newest][1::2])
        self._lines = [text for n, text in enumerate(self._lines) if n not in removed]
        self._thinned += 1

    def _warn(self) -> None:
        self._left_seconds = WRITE_WAIT_SECONDS if self._written == self._changes else self._left_seconds
        self._changes += 1
        if self._thread is None:
            self._thread = start_thread(threading.Thread(target=self._keep, name="tierckpt-run-log", daemon=True))
        self._lock.notify_all()
        if self._left_seconds > 0:  # a hanging disk costs at most this budget, once
            started_at = time.monotonic()
            self._lock.wait_for(lambda: self._written == self._changes, self._left_seconds)
            self._left_seconds -= time.monotonic() - started_at

    def _flush(self, seconds: float) -> bool:
        with self._lock:
            return self._thread is not None and self._lock.wait_for(lambda: self._written == self._changes, seconds)

    def _keep(self) -> None:
        file, size_bytes, shown, thinned = -1, 0, 0, -1
        beside = self._path.with_suffix(".new")
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._written < self._changes or not self._is_on)
                    if self._written == self._changes:
                        return
                    changes, tail, is_anew, thinned = self._changes, self._tail, self._thinned != thinned, self._thinned
                    lines, shown = self._lines[0 if is_anew else shown :], len(self._lines)
                data = "".join(lines).encode()
                if is_anew:
                    if file >= 0:
                        os.close(file)
                    use_local_root(self._settings)  # first: it creates directories that other users cannot read
                    make_dirs(beside.parent)
                    file, size_bytes = open_regular(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 0
                if data:  # replaces a perhaps longer tail
                    os.pwrite(file, data, size_bytes)
                    size_bytes += len(data)
                    os.ftruncate(file, size_bytes)
                if is_anew:
                    beside.rename(self._path)
                if tail:
                    os.pwrite(file, tail.encode(), size_bytes)
                with self._lock:
                    self._written = changes
                    self._lock.notify_all()
        except Exception as error:  # L1
            log.warning("the records of %s end here: %s", self._location.uri, error)
            with self._lock:
                self._is_on, self._written = False, self._changes
        finally:
            if file >= 0:
                os.close(file)

    def send(self, *, at_once: bool = False) -> None:
        """Copy the file to shared storage, at most every ``SEND_SECONDS``."""
        with self._lock:
            is_early = time.monotonic() - self._sent_at < SEND_SECONDS and self._sent_at > 0
            is_busy = self._sending is not None and not self._sending.done()
            if not (self._is_on and self._lines and self._settings.drain) or is_busy or (is_early and not at_once):
                return
            self._sent_at = time.monotonic()
            data = "".join([*self._lines, self._tail]).encode()
        try:
            client = get_client(self._settings)
            self._sending = client.start(_put(client.mover, self._location, self._key, data))
        except Exception as error:  # L1
            log.debug("the records of %s stay on this node: %s", self._location.uri, error)

    def close(self) -> None:
        with self._lock:
            self._is_on = False
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(ILL_SECONDS)


async def _put(mover: Mover, location: Location, key: str, data: bytes) -> None:
    try:
        await mover.store(location).put(key, data)
    except Exception as error:  # L1
        log.debug("the records of %s stay on this node for now: %s", location.uri, error)


def process_started_at() -> float:
    """Return Unix seconds."""
    ticks = start_ticks(os.getpid())
    boot_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot_at + ticks / os.sysconf("SC_CLK_TCK") if ticks else time.time()


RECORDS_READ_MAX = 4
OTHER_JOB_SECONDS = 3600.0
"""Another job counts for this time after its last sign."""


class OtherJobs:
    """Other jobs that save to the run. One check at a time."""

    def __init__(self, location: Location, process_at: float) -> None:
        self._location, self._process_at = location, process_at
        self._versions: dict[str, tuple[str | None, int]] | None = None
        self._told: set[str] = set()
        self._seen_at = -math.inf

    @property
    def is_alone(self) -> bool:
        return time.monotonic() - self._seen_at > OTHER_JOB_SECONDS

    async def has_progress(self, mover: Mover, own: frozenset[str]) -> bool:
        """Return True if another job made progress. Cost: one listing, and a GET per changed record."""
        store, found = mover.store(self._location), {}
        async for info in store.list(HISTORY_DIR):
            name = info.key.rpartition("/")[2]
            if name.endswith(".jsonl") and name not in own:
                found[name] = (info.etag, info.size_bytes)
        before, self._versions = self._versions, found
        changed = [name for name, version in found.items() if before is None or before.get(name) != version]
        has_progress = False
        for name in sorted(changed)[-RECORDS_READ_MAX:]:
            lines = parse_lines(await store.get(f"{HISTORY_DIR}/{name}"))
            if lines and self._is_at_work(lines, is_first_look=before is None):
                self._seen_at = time.monotonic()
                has_progress |= self._warn(name, lines)
        return has_progress

    def _is_at_work(self, lines: Lines, *, is_first_look: bool) -> bool:
        first, last = lines[0], lines[-1]
        if last.get("what") == "end" or has_ended_here(first):
            return False
        at = last.get("at")
        return not is_first_look or (isinstance(at, int | float) and at > self._process_at)

    def _warn(self, name: str, lines: Lines) -> bool:
        if name in self._told:
            return False
        self._told.add(name)
        log.warning(
            "%s: another job saves there too (host %s, process %s, begun %s, now at step %s). "
            "A restore takes the newest step of both. Stop one of them, or give it another URI. "
            "Until then, this job removes no checkpoints",
            self._location.uri,
            lines[0].get("host", "unknown"),
            lines[0].get("pid", "unknown"),
            time.strftime("%F %T", time.localtime(float(lines[0].get("at", 0.0)))),
            lines[-1].get("step", "unknown"),
        )
        return True


def identity() -> dict[str, Any]:
    """Return the fields that name this process, uniquely across hosts and containers."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "process": f"{pid_namespace()}-{start_ticks(pid)}"}
