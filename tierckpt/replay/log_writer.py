"""Writes the frames of a gradient log on a thread of its own, and bounds the time that training waits for the disk.

Invariants:
    L5  Training waits for a slow disk, but not for a hung one: after a request has run for ``ILL_SECONDS``, steps
        continue without being durable. At the limit of frames in memory, the log ends (L3) and drops them.
    L6  A writer first joins the thread of the previous one. No log begins while that thread hangs.
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

QUEUED_FRAMES_MIN, QUEUED_FRAMES_MAX, QUEUED_BYTES = 2, 256, 64 << 20
"""The next step blocks at two waiting steps, or at 64 MiB of them."""
JOIN_POLL_SECONDS = 0.05


@dataclass(slots=True)
class Base:
    step: int
    bases: list[str]


class LogWriter:
    """Writes one log, until it ends or fails.

    ``overwritten_optimizers`` receives those whose gradients were overwritten before their copy.
    """

    def __init__(
        self,
        directory: Path,
        base: Base,
        previous: str,
        *,
        every_steps: int,
        every_seconds: float,
        step_bytes: int,
        owner: Mapping[str, Any],
        reserve: Callable[[int], None],
        overwritten_optimizers: set[str],
        predecessor: LogWriter | None = None,
    ) -> None:
        self.durable_step = -1
        self.failure = ""
        self.is_disk_failure = False
        """A checkpoint would fail too."""
        self.blocked_seconds = 0.0
        self._directory, self._base, self._previous = directory, base, previous
        self._every_steps, self._every_seconds, self._owner = every_steps, every_seconds, owner
        self._queued_frames_max = max(QUEUED_FRAMES_MIN, min(QUEUED_FRAMES_MAX, QUEUED_BYTES // max(1, step_bytes)))
        self._reserve, self._overwritten_optimizers = reserve, overwritten_optimizers
        self._obsolete_from_step: int | None = base.step
        """Segments from this step are removed before this log creates its first one."""
        self._file: SegmentFile | None = None
        self._queue: deque[tuple[Frame, Future[str]] | Base | Future[None] | None] = deque()
        """Frames with the digest of the state after them; futures to set when all earlier frames are durable."""
        self._unsynced: deque[int] = deque()
        self._unsynced_since = 0.0
        self._newest_step, self._written_step, self._queued_frames, self._pending_frames = base.step, base.step, 0, 0
        self._request_started_at: float | None = None
        self._has_warned = self._is_abandoned = self._is_done = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._work, args=(predecessor,), name="tierckpt-gradient-log", daemon=True
        )
        start_thread(self._thread)

    # --- for the training thread ----------------------------------------------------------------------------------

    @property
    def is_hung(self) -> bool:
        started_at = self._request_started_at
        return started_at is not None and time.monotonic() - started_at >= ILL_SECONDS

    def put(self, frame: Frame, digest: Future[str]) -> None:
        """Queue a step. Waits until the number of earlier steps that are not durable is within the limit (L5).

        An error in ``digest`` is the reason not to log the step.
        """
        started_at = time.monotonic()
        with self._changed:
            if not self._wait_until(lambda: self._queued_frames < self._queued_frames_max):
                self._abandon(f"{self._hang_message()} while {self._queued_frames} steps wait in memory: {HINT}")
            if self._is_abandoned:
                return
            self._queue.append((frame, digest))
            self._newest_step = frame.number
            self._queued_frames += 1
            self._pending_frames += 1
            self._changed.notify_all()
            if not (
                self._every_seconds
                or self._wait_until(lambda: self._pending_frames <= self._every_steps)
                or self._has_warned
            ):
                self._has_warned = True
                log.warning(
                    "steps before %d are not durable: %s. The log continues when the disk does, and ends when %d "
                    "steps wait in memory: %s",
                    frame.number, self._hang_message(), self._queued_frames_max, HINT,
                )  # fmt: skip
        seconds = time.monotonic() - started_at
        self.blocked_seconds += seconds
        LOG_BLOCKED_SECONDS.emit(seconds)

    def switch_base(self, base: Base | None) -> None:
        with self._changed:
            self._queue.append(base)
            self._changed.notify_all()

    def sync(self) -> None:
        is_durable = Future[None]()
        self._queue_and_wait(is_durable, is_durable.done)

    def finish(self) -> None:
        """Wait until all queued frames are durable, or the log ends."""
        self._queue_and_wait(None, lambda: False)

    def _queue_and_wait(self, entry: Future[None] | None, is_over: Callable[[], bool]) -> None:
        with self._changed:
            self._queue.append(entry)
            self._changed.notify_all()
            if not self._wait_until(lambda: is_over() or self._is_done, since=time.monotonic()):
                self._abandon(f"{self._hang_message()}: {HINT}")

    def end(self, reason: str, *, newest: int | None = None) -> None:
        """Accept no steps after ``newest``. Queued frames are still written; the first reason is kept."""
        with self._changed:
            if not self.failure and not self._is_done:
                self.failure = reason
                newest = self._newest_step if newest is None else newest
                log.warning("no step after %d is logged until the next checkpoint: %s", newest, reason)
            self._queue.append(None)
            self._changed.notify_all()

    def _abandon(self, reason: str, *, is_disk_to_blame: bool = True) -> None:
        with self._changed:
            self.is_disk_failure = is_disk_to_blame and not self.failure
            self.end(reason, newest=self._written_step)
            self._is_abandoned = True
            self._queue.clear()  # with its gradients

    def _wait_until(self, condition: Callable[[], bool], *, since: float = 0.0) -> bool:
        """False if the log ends, or a request hangs, counted from ``since``."""
        while not (condition() or self._is_abandoned):
            started_at = self._request_started_at
            seconds = ILL_SECONDS if started_at is None else max(started_at, since) + ILL_SECONDS - time.monotonic()
            if seconds <= 0:
                return False
            self._changed.wait(seconds)
        return True

    def _hang_message(self) -> str:
        return f"the disk of {self._directory} has not completed a request for {ILL_SECONDS:g} s"

    # --- the writer thread ----------------------------------------------------------------------------------------

    def _work(self, predecessor: LogWriter | None) -> None:
        while predecessor is not None and predecessor._thread.is_alive():  # its hung request blocks this log too
            self._request_started_at = predecessor._request_started_at
            predecessor._thread.join(JOIN_POLL_SECONDS)
        self._request_started_at = predecessor = None
        while (entry := self._next()) is not None:
            with self._abandon_on_error():
                if isinstance(entry, Base):
                    self._switch_base(entry)
                elif isinstance(entry, Future):
                    self._commit()
                else:
                    self._append(*entry)
            if isinstance(entry, Future):
                with self._changed:
                    entry.set_result(None)
                    self._changed.notify_all()
            del entry
        with self._abandon_on_error():
            self._commit()
        with self._abandon_on_error():
            self._close()
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    def _next(self) -> tuple[Frame, Future[str]] | Base | Future[None] | None:
        while True:
            with self._changed:
                has_deadline = self._unsynced and self._every_seconds
                seconds = self._unsynced_since + self._every_seconds - time.monotonic() if has_deadline else None
                if self._is_abandoned:
                    return None
                if seconds is None or seconds > 0:
                    if self._queue:
                        entry = self._queue.popleft()
                        if isinstance(entry, tuple):
                            self._queued_frames -= 1
                            self._changed.notify_all()
                        return entry
                    self._changed.wait(seconds)
                    continue
            with self._abandon_on_error():
                self._commit()

    @contextlib.contextmanager
    def _abandon_on_error(self) -> Iterator[None]:
        try:
            with translated(self._directory):
                yield
        except Exception as error:
            self._abandon(str(error) or repr(error), is_disk_to_blame=not isinstance(error, CheckpointError))

    @contextlib.contextmanager
    def _timed_request(self) -> Iterator[None]:
        self._request_started_at = time.monotonic()
        try:
            yield
        finally:
            self._request_started_at = None

    def _on_write(self) -> None:
        self._request_started_at = time.monotonic()
        if self._is_abandoned:
            raise CheckpointError(self.failure)

    def _commit(self) -> None:
        if self._file is None or not self._unsynced or self._is_abandoned:
            return
        with self._timed_request():
            self._file.sync()
        with self._changed:
            self.durable_step = self._unsynced[-1]
            self._pending_frames -= len(self._unsynced)
            self._has_warned &= self._pending_frames > self._every_steps
            self._unsynced.clear()
            self._changed.notify_all()

    def _switch_base(self, base: Base) -> None:
        """Bases without a frame between them share a segment."""
        if self._file is None:
            self._base = Base(base.step, [*self._base.bases, *base.bases])
            return
        self._commit()
        self._close()
        self._base = base

    def _close(self) -> None:
        if self._file is not None:
            with self._timed_request():
                self._file.close()
        self._file = None

    def _append(self, frame: Frame, digest: Future[str]) -> None:
        parameters_digest = digest.result(COPY_TIMEOUT_SECONDS)
        for name, step in frame.steps.items():
            try:
                next(iter(step.gradients.values()), None)  # waits for all of them
            except OverwrittenError:
                self._overwritten_optimizers.add(name)  # steps of the next log wait for their copies
                raise
        if self._is_abandoned:
            return
        file = self._file or self._begin_segment()
        head, views, digest_of_frame = encode(frame, self._previous, parameters_digest)
        pieces = [memoryview(head), *views]
        with self._timed_request():
            self._reserve(sum(map(len, pieces)))
            file.append(pieces, self._on_write)
        self._previous = digest_of_frame
        if not self._unsynced:
            self._unsynced_since = time.monotonic()
        self._unsynced.append(frame.number)
        self._written_step = frame.number
        if not self._every_seconds and len(self._unsynced) >= self._every_steps:
            self._commit()

    def _begin_segment(self) -> SegmentFile:
        with self._timed_request():
            if self._obsolete_from_step is not None:
                log_segments.remove_from(self._directory, self._obsolete_from_step)
                self._obsolete_from_step = None
            fields = {"bases": self._base.bases, "previous": self._previous, "owner": self._owner}
            self._file = SegmentFile(self._directory, self._base.step, fields)
        self._previous = self._file.digest
        return self._file
