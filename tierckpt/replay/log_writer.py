"""Writes the frames of a gradient log on a thread of its own, and bounds the time that training waits for the disk.

Invariants:
    L5  Training waits for a slow disk, but not for a hung one: after a request has run for ``ILL_SECONDS``, steps
        continue without being durable, and a warning is logged. When the frames in memory reach their limit, the log
        ends (L3) and drops them.
    L6  One thread at a time uses the directory: the writer of the next log first joins the thread of the previous
        writer. No log begins while that thread hangs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..disk.durable import translated
from ..disk.illness import HINT, ILL_SECONDS
from ..errors import CheckpointError
from ..resources import start_thread
from ..save import log_segments
from ..save.log_segments import SegmentFile
from ..telemetry import LOG_BLOCKED_SECONDS, logger
from .frame import Frame, encode
from .link import COPY_TIMEOUT_SECONDS, OverwrittenError

log = logger("replay")

FRAMES_AHEAD, FRAMES_AHEAD_MAX, AHEAD_BYTES = 2, 256, 64 << 20
"""Maximum number of steps that wait in memory to be written: two, or what fits into 64 MiB. The next step blocks."""
JOIN_SECONDS = 0.05


@dataclass(slots=True)
class Base:
    """The next frames go to another segment."""

    step: int
    bases: list[str]


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """Number of steps, or seconds, between two fdatasync calls, and the bytes of one step."""

    steps: int
    seconds: float
    step_bytes: int

    @property
    def frames_ahead(self) -> int:
        return max(FRAMES_AHEAD, min(FRAMES_AHEAD_MAX, AHEAD_BYTES // max(1, self.step_bytes)))


class LogWriter:
    """Writes one log, until it ends or fails.

    Args:
        base: the state at the beginning of the log.
        previous: digest of the frame that the log continues; '' for none.
        owner: written to the head of each segment.
        reserve: called with the bytes of each frame before it is written. An error ends the log.
        overwritten: receives the names of optimizers whose gradients were overwritten before they were copied.
        after: the previous writer of the directory.
    """

    def __init__(
        self,
        directory: Path,
        base: Base,
        previous: str,
        *,
        group: GroupCommit,
        owner: Mapping[str, Any],
        reserve: Callable[[int], None],
        overwritten: set[str],
        after: LogWriter | None = None,
    ) -> None:
        self.durable_step = -1
        self.failure = ""
        self.is_disk_to_blame = False
        """The disk caused ``failure``: a checkpoint would fail too."""
        self.blocked_seconds = 0.0
        self._directory, self._base, self._previous = directory, base, previous
        self._group, self._owner = group, owner
        self._reserve, self._overwritten = reserve, overwritten
        self._superseded_from: int | None = base.step
        """Segments that begin at this step or later are obsolete; removed before this log creates its first one."""
        self._file: SegmentFile | None = None
        self._queue: deque[tuple[Frame, Future[str]] | Base | Future[None] | None] = deque()
        """Frames with the digest of the state after them; futures to set when all earlier frames are durable."""
        self._unsynced: deque[int] = deque()
        self._unsynced_since = 0.0
        self._newest, self._written, self._ahead, self._not_durable = base.step, base.step, 0, 0
        self._asked_at: float | None = None
        """Start of the current disk request."""
        self._is_ill = self._is_given_up = self._is_done = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, args=(after,), name="tierckpt-gradient-log", daemon=True)
        start_thread(self._thread)

    # --- for the training thread ----------------------------------------------------------------------------------

    @property
    def is_stuck(self) -> bool:
        """True while a request hangs."""
        asked = self._asked_at
        return asked is not None and time.monotonic() - asked >= ILL_SECONDS

    def put(self, frame: Frame, digest: Future[str]) -> None:
        """Queue a step. Waits until the number of earlier steps that are not durable is within the limit (L5).

        Args:
            digest: of parameters and state after the step. An error says why the step must not be logged.
        """
        begun = time.monotonic()
        with self._changed:
            if not self._await(lambda: self._ahead < self._group.frames_ahead):
                self._give_up(f"{self._hung()} while {self._ahead} steps wait in memory: {HINT}")
            if self._is_given_up:
                return
            self._newest, self._ahead, self._not_durable = frame.number, self._ahead + 1, self._not_durable + 1
            self._queue.append((frame, digest))
            self._changed.notify_all()
            if not (self._group.seconds or self._await(lambda: self._not_durable <= self._group.steps) or self._is_ill):
                self._is_ill = True
                log.warning(
                    "steps before %d are not durable: %s. The log continues when the disk does, and ends when %d "
                    "steps wait in memory: %s",
                    frame.number, self._hung(), self._group.frames_ahead, HINT,
                )  # fmt: skip
        waited = time.monotonic() - begun
        self.blocked_seconds += waited
        LOG_BLOCKED_SECONDS.emit(waited)

    def turn_to(self, base: Base | None) -> None:
        """Write the next frames to another segment; None: no more frames follow. Returns at once."""
        with self._changed:
            self._queue.append(base)
            self._changed.notify_all()

    def sync(self) -> None:
        """Wait until all queued frames are durable, or the log ends."""
        is_durable = Future[None]()
        with self._changed:
            self._queue.append(is_durable)
            self._changed.notify_all()
            if not self._await(lambda: is_durable.done() or self._is_done, since=time.monotonic()):
                self._give_up(f"{self._hung()}: {HINT}")

    def finish(self) -> None:
        """Wait until all queued frames are durable and the files closed, or the log ends."""
        self.turn_to(None)
        with self._changed:
            if not self._await(lambda: self._is_done, since=time.monotonic()):
                self._give_up(f"{self._hung()}: {HINT}")

    def end(self, reason: str, *, newest: int | None = None) -> None:
        """Accept no more steps, and log ``reason``. The first reason is kept; queued frames are still written.

        Args:
            newest: the last step that is logged; None: the last one queued.
        """
        with self._changed:
            if not self.failure and not self._is_done:
                self.failure = reason
                newest = self._newest if newest is None else newest
                log.warning("no step after %d is logged until the next checkpoint: %s", newest, reason)
            self._queue.append(None)
            self._changed.notify_all()

    def _give_up(self, reason: str, *, is_disk_to_blame: bool = True) -> None:
        with self._changed:
            self.is_disk_to_blame = is_disk_to_blame and not self.failure
            self.end(reason, newest=self._written)
            self._is_given_up = True
            self._queue.clear()  # with its gradients

    def _await(self, is_so: Callable[[], bool], *, since: float = 0.0) -> bool:
        """Wait until ``is_so`` or the log ends. False if a request hangs, counted from ``since``."""
        while not (is_so() or self._is_given_up):
            asked = self._asked_at
            seconds = ILL_SECONDS if asked is None else max(asked, since) + ILL_SECONDS - time.monotonic()
            if seconds <= 0:
                return False
            self._changed.wait(seconds)
        return True

    def _hung(self) -> str:
        return f"the disk of {self._directory} has not completed a request for {ILL_SECONDS:g} s"

    # --- the writer thread ----------------------------------------------------------------------------------------

    def _work(self, after: LogWriter | None) -> None:
        while after is not None and after._thread.is_alive():  # its hung request blocks this log too
            self._asked_at = after._asked_at
            after._thread.join(JOIN_SECONDS)
        self._asked_at = after = None
        while (entry := self._next()) is not None:
            with self._ends_on_error():
                if isinstance(entry, Base):
                    self._turn_to(entry)
                elif isinstance(entry, Future):
                    self._commit()
                else:
                    self._append(*entry)
            if isinstance(entry, Future):
                with self._changed:
                    entry.set_result(None)
                    self._changed.notify_all()
            del entry  # with its gradients
        with self._ends_on_error():
            self._commit()
        with self._ends_on_error():
            self._close()
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    def _next(self) -> tuple[Frame, Future[str]] | Base | Future[None] | None:
        """Return the next entry. Syncs frames first that have waited for ``GroupCommit.seconds``."""
        while True:
            with self._changed:
                waits = self._unsynced and self._group.seconds
                seconds = self._unsynced_since + self._group.seconds - time.monotonic() if waits else None
                if self._is_given_up:
                    return None
                if seconds is None or seconds > 0:
                    if self._queue:
                        entry = self._queue.popleft()
                        if isinstance(entry, tuple):
                            self._ahead -= 1
                            self._changed.notify_all()
                        return entry
                    self._changed.wait(seconds)
                    continue
            with self._ends_on_error():
                self._commit()

    @contextlib.contextmanager
    def _ends_on_error(self) -> Iterator[None]:
        """End the log with any error raised within."""
        try:
            with translated(self._directory):
                yield
        except Exception as error:
            self._give_up(str(error) or repr(error), is_disk_to_blame=not isinstance(error, CheckpointError))

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Time a request, or several with ``_on_write`` between them."""
        self._asked_at = time.monotonic()
        try:
            yield
        finally:
            self._asked_at = None

    def _on_write(self) -> None:
        self._asked_at = time.monotonic()
        if self._is_given_up:
            raise CheckpointError(self.failure)  # skip the rest of the frame

    def _commit(self) -> None:
        if self._file is None or not self._unsynced or self._is_given_up:
            return
        with self._asking():
            self._file.sync()
        with self._changed:
            self.durable_step = self._unsynced[-1]
            self._not_durable -= len(self._unsynced)
            if self._is_ill and self._not_durable <= self._group.steps:
                self._is_ill = False
                log.warning("%s is writable again; steps up to %d are durable", self._directory, self.durable_step)
            self._unsynced.clear()
            self._changed.notify_all()

    def _turn_to(self, base: Base) -> None:
        """Begin another segment at the next frame. Bases without a frame between them share a segment."""
        if self._file is None:
            self._base = Base(base.step, [*self._base.bases, *base.bases])
            return
        self._commit()
        self._close()
        self._base = base

    def _close(self) -> None:
        if self._file is not None:
            with self._asking():
                self._file.close()
        self._file = None

    def _append(self, frame: Frame, digest: Future[str]) -> None:
        parameters = digest.result(COPY_TIMEOUT_SECONDS)
        for name, step in frame.steps.items():
            try:
                next(iter(step.gradients.values()), None)  # waits for all of them
            except OverwrittenError:
                self._overwritten.add(name)  # steps of the next log wait for their copies
                raise
        if self._is_given_up:
            return
        file = self._file or self._begin_segment()
        head, views, following = encode(frame, self._previous, parameters)
        pieces = [memoryview(head), *views]
        with self._asking():
            self._reserve(sum(map(len, pieces)))
            file.append(pieces, self._on_write)
        self._previous = following
        if not self._unsynced:
            self._unsynced_since = time.monotonic()
        self._unsynced.append(frame.number)
        self._written = frame.number
        if not self._group.seconds and len(self._unsynced) >= self._group.steps:
            self._commit()

    def _begin_segment(self) -> SegmentFile:
        with self._asking():
            if self._superseded_from is not None:
                log_segments.remove_from(self._directory, self._superseded_from)
                self._superseded_from = None
            fields = {"bases": self._base.bases, "previous": self._previous, "owner": self._owner}
            self._file = SegmentFile(self._directory, self._base.step, fields)
        self._previous = self._file.digest
        return self._file
