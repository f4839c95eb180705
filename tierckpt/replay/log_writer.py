"""The thread that has the steps of a gradient log on the disk, and what steps wait for of it.

Invariants:
    L5  Training waits for a disk that ends its requests, however slowly, and for no other. A request that has not ended
        for ``ILL_SECONDS`` says that the disk is ill: steps go on though they are not durable, which is said; and when
        more of them wait than memory is given to, the log ends (L3), and what it has in memory goes.
    L6  One thread at a time touches the directory: the next log's first joins that of the one before. While that one
        hangs no log begins.
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
"""Steps whose gradients wait in memory to be written: two, or as many as so much holds. Then a step waits too."""
JOIN_SECONDS = 0.05


@dataclass(slots=True)
class Base:
    """From here on frames go to another segment."""

    step: int
    bases: list[str]


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """How many steps are made durable together, or how often; and of how many bytes one is."""

    steps: int
    seconds: float
    step_bytes: int

    @property
    def frames_ahead(self) -> int:
        return max(FRAMES_AHEAD, min(FRAMES_AHEAD_MAX, AHEAD_BYTES // max(1, self.step_bytes)))


class LogWriter:
    """Writes a log, from one base to the next that begins anew, and as long as nothing fails.

    Args:
        base: what it begins with. ``previous``: digest of the frame that it continues; '' for none.
        owner: said in each segment.
        reserve: is called with the bytes of each frame before it is written; what it raises ends the log.
        overwritten: is given the names of optimizers whose gradients were written over before they were copied.
        after: the writer before this one in the directory, which is to end.
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
        """For ``failure``: a checkpoint of now would meet the same disk."""
        self.blocked_seconds = 0.0
        self._directory, self._base, self._previous = directory, base, previous
        self._group, self._owner = group, owner
        self._reserve, self._overwritten = reserve, overwritten
        self._superseded_from: int | None = base.step
        """Segments from this step on were given up, and go before the first of this log is made."""
        self._file: SegmentFile | None = None
        self._queue: deque[tuple[Frame, Future[str]] | Base | Future[None] | None] = deque()
        """Frames with the digest of the state after them; futures for what waits until all before is durable."""
        self._unsynced: deque[int] = deque()
        self._unsynced_since = 0.0
        self._newest, self._written, self._ahead, self._not_durable = base.step, base.step, 0, 0
        self._asked_at: float | None = None
        """When the disk was asked for what it has not done yet."""
        self._is_ill = self._is_given_up = self._is_done = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, args=(after,), name="tierckpt-gradient-log", daemon=True)
        start_thread(self._thread)

    # --- for the thread that trains -------------------------------------------------------------------------------

    @property
    def is_stuck(self) -> bool:
        """True while the disk is ill."""
        asked = self._asked_at
        return asked is not None and time.monotonic() - asked >= ILL_SECONDS

    def put(self, frame: Frame, digest: Future[str]) -> None:
        """Queue a step. Returns when no more steps before it are not durable than were asked for (L5).

        Args:
            digest: of parameters and state after the step. It fails when the step must not be logged.
        """
        begun = time.monotonic()
        with self._changed:
            if not self._await(lambda: self._ahead < self._group.frames_ahead):
                self._give_up(f"{self._hung()}, and {self._ahead} steps wait for it in memory: {HINT}")
            if self._is_given_up:
                return
            self._newest, self._ahead, self._not_durable = frame.number, self._ahead + 1, self._not_durable + 1
            self._queue.append((frame, digest))
            self._changed.notify_all()
            if not (self._group.seconds or self._await(lambda: self._not_durable <= self._group.steps) or self._is_ill):
                self._is_ill = True
                log.warning(
                    "step %d has ended, and the steps before it are not on the disk: %s. The log goes on when the disk "
                    "does, and ends when %d steps wait for it in memory: %s",
                    frame.number, self._hung(), self._group.frames_ahead, HINT,
                )  # fmt: skip
        waited = time.monotonic() - begun
        self.blocked_seconds += waited
        LOG_BLOCKED_SECONDS.emit(waited)

    def turn_to(self, base: Base | None) -> None:
        """Have frames go to another segment from here on; None: no more come. Waits for nothing."""
        with self._changed:
            self._queue.append(base)
            self._changed.notify_all()

    def sync(self) -> None:
        """Return when all that was queued is durable, or the log has ended."""
        is_durable = Future[None]()
        with self._changed:
            self._queue.append(is_durable)
            self._changed.notify_all()
            if not self._await(lambda: is_durable.done() or self._is_done, since=time.monotonic()):
                self._give_up(f"{self._hung()}: {HINT}")

    def finish(self) -> None:
        """Return when all that was queued is durable, and the files are closed; or the log has ended."""
        self.turn_to(None)
        with self._changed:
            if not self._await(lambda: self._is_done, since=time.monotonic()):
                self._give_up(f"{self._hung()}: {HINT}")

    def end(self, reason: str, *, newest: int | None = None) -> None:
        """Take no more, and say why. The first ``reason`` is kept. What was put is written.

        Args:
            newest: the last step that is logged; None: the last that was put.
        """
        with self._changed:
            if not self.failure and not self._is_done:
                self.failure = reason
                newest = self._newest if newest is None else newest
                log.warning("no step after %d is logged, until the next checkpoint: %s", newest, reason)
            self._queue.append(None)
            self._changed.notify_all()

    def _give_up(self, reason: str, *, is_disk_to_blame: bool = True) -> None:
        with self._changed:
            self.is_disk_to_blame = is_disk_to_blame and not self.failure
            self.end(reason, newest=self._written)
            self._is_given_up = True
            self._queue.clear()  # with its gradients

    def _await(self, is_so: Callable[[], bool], *, since: float = 0.0) -> bool:
        """Return when ``is_so``, or the log was given up; False when the disk is ill, and was so ``since``."""
        while not (is_so() or self._is_given_up):
            asked = self._asked_at
            seconds = ILL_SECONDS if asked is None else max(asked, since) + ILL_SECONDS - time.monotonic()
            if seconds <= 0:
                return False
            self._changed.wait(seconds)
        return True

    def _hung(self) -> str:
        return f"the disk below {self._directory} has not ended a request for {ILL_SECONDS:g} s"

    # --- the thread that writes -----------------------------------------------------------------------------------

    def _work(self, after: LogWriter | None) -> None:
        while after is not None and after._thread.is_alive():  # what hangs there hangs here
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
        """Return the next entry. Before it, what waits for longer than was asked for is made durable."""
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
        """End the log with what is raised within."""
        try:
            with translated(self._directory):
                yield
        except Exception as error:
            self._give_up(str(error) or repr(error), is_disk_to_blame=not isinstance(error, CheckpointError))

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """The disk is asked for something: one request, or several with ``_on_write`` between them."""
        self._asked_at = time.monotonic()
        try:
            yield
        finally:
            self._asked_at = None

    def _on_write(self) -> None:
        self._asked_at = time.monotonic()
        if self._is_given_up:
            raise CheckpointError(self.failure)  # it ends here, and not when the whole frame is written

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
                log.warning(
                    "the disk below %s takes steps again, and has all up to %d", self._directory, self.durable_step
                )
            self._unsynced.clear()
            self._changed.notify_all()

    def _turn_to(self, base: Base) -> None:
        """The segment is made when its first frame comes. Until then all bases lead to it: none is an update apart."""
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
                self._overwritten.add(name)  # from the next log on a step waits for its copies
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
