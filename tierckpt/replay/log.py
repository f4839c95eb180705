"""Writes the steps behind a checkpoint to a file of this node, so that a job resumes at the step that was cut off.

    <directory>/<digest of the base>.gradients    frames, one behind the other (``frame``)

Invariants:
    L1  A frame is appended after the update it stands for, with the gradients that the update read, and whole frames
        follow each other without a gap: the chain of digests begins with the base, so a log fits one base only.
    L2  ``durable_step`` is the newest step before which everything is on the disk (fdatasync). A crash loses what came
        later, and nothing else: what lies behind the last whole frame is cut off when the log is continued.
    L3  A step never goes on with less than was asked for without a word: what cannot be logged (a parameter changed
        beside the optimizer is found at the next base, gradients that were written over at once) ends the log, with a
        reason, and the next base begins another.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..disk.durable import fsync_dir, make_dirs, translated
from ..disk.file_io import pread_all
from ..errors import CheckpointError, IntegrityError
from ..telemetry import logger
from ..types import ByteRange, Tier
from .apply import Replay
from .capture import Capture, Gradients, Step
from .frame import Frame, decode, encode
from .link import GRADIENTS, Copy, Link
from .optimizers import check_replayable, layout_digest, local, parameters_of

log = logger("replay")

SUFFIX = ".gradients"
FRAMES_AHEAD = 2
"""Steps whose gradients wait in memory to be written; then a step waits for the disk."""
WAIT_SECONDS = 600.0
STALL_SECONDS = 10.0
"""A disk that takes nothing for so long ends the log, with a word: a step does not wait for one that hangs."""


def path_of(directory: Path, base: str) -> Path:
    """Return where the log behind the checkpoint ``base`` lies in ``directory``."""
    return directory / f"{_first(base)}{SUFFIX}"


def _first(base: str) -> str:
    return xxhash.xxh3_128_hexdigest(base.encode())


@dataclass(slots=True)
class _Entry:
    """A step on its way to the file. ``copy`` is None: whoever closes or syncs waits for what is before it."""

    step: Step | None
    number: int
    attachment: bytes
    copy: Copy | None
    keys: list[str]
    dtypes: dict[str, torch.dtype]
    written: Future[None]


class GradientLog:
    """Logs every step of ``optimizer`` from ``begin`` on.

    Args:
        directory: of this rank, on storage that outlives the process.
        every_steps: how many steps are made durable together.
        link: between accelerator and host; None makes one.

    Raises:
        ConfigError: the optimizer cannot be replayed.
    Cost: the bytes of this rank's gradients for each step, on the link and on the disk; an fdatasync for each
        ``every_steps`` steps. A step waits when two before it are not written yet.
    Source: LowDiff, Checkmate; gradients are kept as they are.

    Example:
        >>> import tempfile
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> directory = Path(tempfile.mkdtemp())
        >>> with GradientLog(optimizer, directory) as log:
        ...     log.begin("step-0")
        ...     weight.grad = torch.ones(4)
        ...     optimizer.step()
        ...     log.end_of_step(1)
        >>> again = torch.nn.Parameter(torch.ones(4))
        >>> roll_forward(torch.optim.SGD([again], lr=0.5), directory, "step-0").step
        1
        >>> torch.equal(again, weight)
        True
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, directory: Path, *, every_steps: int = 1, link: Link | None = None
    ) -> None:
        check_replayable(optimizer)
        self.optimizer = optimizer
        self.directory = directory
        self.every_steps = every_steps
        self.durable_step = -1
        """The newest step that is on the disk with all before it; -1 for none."""
        self.blocked_seconds = 0.0
        """How long steps waited for memory or the disk."""
        self.failure = ""
        """Why steps are not logged any more. '' while they are."""
        self._link = link or Link()
        self._owns_link = link is None
        self._capture: Capture | None = None
        self._pending: tuple[Step, list[str], Copy] | None = None
        self._copying: tuple[list[str], Copy] | None = None
        self._waits_for_gradients = isinstance(optimizer, torch.optim.SGD)
        """Something writes over gradients before they are copied (Nesterov, ``zero_grad`` in place): a step waits."""
        self._queue: queue.Queue[_Entry | None] = queue.Queue(FRAMES_AHEAD)
        self._writer: threading.Thread | None = None

    def __enter__(self) -> GradientLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, base: str, after: Recovered | None = None) -> None:
        """Begin a log behind the checkpoint ``base``, which has the state of now. That of the base before is ended.

        Args:
            after: what ``roll_forward`` returned: the log that it read is continued, at the state that it led to. None:
                one that lies there and begins at the same base is replaced.

        Raises:
            PermissionDeniedError, CapacityError, StoreError: it cannot be made.
        """
        self._end_writer()
        if self._capture is not None:
            self._capture.close()
        self.failure, self.durable_step, self._pending, self._copying = "", -1, None, None
        path = path_of(self.directory, base)
        make_dirs(self.directory)
        with translated(path):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.ftruncate(file, after.end_bytes if after is not None else 0)
        fsync_dir(self.directory)
        version = after.version if after is not None else 0
        self._capture = Capture(self.optimizer, self._on_step, copy=self._on_gradients, version=version)
        previous = after.digest if after is not None and after.digest else _first(base)
        self._queue = queue.Queue(FRAMES_AHEAD)  # a writer that hung may still have the one before
        arguments = (self._queue, file, path, previous, layout_digest(self.optimizer))
        self._writer = threading.Thread(target=self._write, args=arguments, name="tierckpt-gradient-log", daemon=True)
        self._writer.start()

    def end_of_step(self, number: int, attachment: bytes = b"") -> None:
        """The step ``number`` is done: log it, with ``attachment`` (what else belongs to it: schedule, random state).

        Call it after each step, when all that belongs to it is done. An optimizer that was not stepped (a GradScaler
        skipped it, gradients are accumulated) has nothing to log.
        """
        if self._capture is not None and self._capture.broken and not self.failure:
            self._fail(self._capture.broken)
        if self._pending is None or self.failure:
            return
        (step, keys, copy), self._pending = self._pending, None
        dtypes = {one.key: one.tensor.dtype for one in parameters_of(self.optimizer)}
        self._put(_Entry(step, number, attachment, copy, keys, dtypes, Future()))

    def sync(self) -> None:
        """Return when every step that was ended is on the disk.

        Raises:
            CheckpointError: the log has ended before.
        """
        if not self.failure and self._writer is not None:
            entry = _Entry(None, -1, b"", None, [], {}, Future())
            if self._put(entry):
                entry.written.result(WAIT_SECONDS)
        if self.failure:
            raise CheckpointError(
                f"steps are not logged any more: {self.failure}", hint="Save a whole checkpoint: a new log begins there"
            )

    def close(self) -> None:
        """Write what was ended, and remove the hooks."""
        self._end_writer()
        if self._capture is not None:
            self._capture.close()
        if self._owns_link:
            self._link.close()

    def _put(self, entry: _Entry | None) -> bool:
        begun = time.perf_counter()
        try:
            self._queue.put(entry, timeout=STALL_SECONDS)
        except queue.Full:
            self._fail(f"the disk below {self.directory} has taken nothing for {STALL_SECONDS:g} s")
            return False
        finally:
            self.blocked_seconds += time.perf_counter() - begun
        return True

    def _end_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None and self._put(None):
            writer.join(WAIT_SECONDS)

    def _on_gradients(self, gradients: Gradients) -> Gradients:
        keys = list(gradients)
        copy = self._link.copy([gradients[key] for key in keys], GRADIENTS)
        if self._waits_for_gradients:
            copy.done.result(WAIT_SECONDS)
        self._copying = (keys, copy)
        return {}

    def _on_step(self, step: Step) -> None:
        if self._pending is not None:
            self._fail("the optimizer was stepped twice between two calls of end_of_step")
        elif self._copying is not None:
            self._pending = (step, *self._copying)

    def _fail(self, reason: str) -> None:
        if not self.failure:
            self.failure = reason
            log.warning("steps are not logged any more, until the next checkpoint: %s", reason)

    def _write(self, entries: queue.Queue[_Entry | None], file: int, path: Path, previous: str, layout: str) -> None:
        waiting: list[_Entry] = []

        def commit() -> None:
            if waiting:
                os.fdatasync(file)
                self.durable_step = max((entry.number for entry in waiting), default=self.durable_step)
                waiting.clear()

        try:
            while (entry := entries.get()) is not None:
                if self.failure:
                    entry.written.set_result(None)
                    continue
                try:
                    with translated(path):
                        if entry.copy is None or entry.step is None:
                            commit()
                            entry.written.set_result(None)
                            continue
                        previous = self._append(file, entry, previous, layout)
                        waiting.append(entry)
                        if len(waiting) >= self.every_steps:
                            commit()
                except Exception as error:
                    self._fail(str(error) or repr(error))
                    entry.written.set_result(None)  # whoever waits looks at ``failure``
            if not self.failure:
                with translated(path):
                    commit()
        except Exception as error:
            self._fail(str(error) or repr(error))
        finally:
            os.close(file)

    def _append(self, file: int, entry: _Entry, previous: str, layout: str) -> str:
        assert entry.copy is not None and entry.step is not None
        entry.copy.done.result(WAIT_SECONDS)
        if entry.copy.was_changed:
            self._waits_for_gradients = True  # from the next log on
            raise CheckpointError("gradients were written over before they were copied (zero_grad in place?)")
        gradients = dict(zip(entry.keys, entry.copy.result, strict=True))
        step = Step(entry.step.version, entry.step.hyperparameters, gradients, entry.step.found_inf)
        frame = Frame(step, layout, previous, number=entry.number, attachment=entry.attachment, dtypes=entry.dtypes)
        head, views, digest = encode(frame)
        for view in (memoryview(head), *views):
            at = 0
            while at < len(view):
                at += os.write(file, view[at:])
        return digest


@dataclass(frozen=True, slots=True)
class Recovered:
    """Where a log led to."""

    step: int
    """The newest step that was applied; -1 when none was."""
    steps: int
    """How many were."""
    attachment: bytes = b""
    """Of the newest step."""
    ended: str = ""
    """Why nothing follows, when bytes do: a torn tail, damage, a frame of another place."""
    version: int = 0
    end_bytes: int = 0
    digest: str = ""
    """Of the newest frame, where it ends in the log, and the version that it led to: a log is continued from there."""


def frames(directory: Path, base: str, layout: str) -> Iterator[tuple[Frame, int] | str]:
    """Yield the frames behind ``base`` and where each ends, while they are whole and follow each other; then why not.

    The last is '' when no byte follows.

    Raises:
        IntegrityError: the log is that of another optimizer or sharding.
    """
    path = path_of(directory, base)
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        yield ""
        return
    previous, at = _first(base), 0
    with translated(path, Tier.LOCAL), path.open("rb", buffering=0) as file:

        def read(offset: int, size: int) -> memoryview:
            begin = min(at + offset, size_bytes)
            return memoryview(pread_all(file.fileno(), ByteRange(begin, min(begin + size, size_bytes)), path))

        while at < size_bytes:
            try:
                frame, length = decode(read, where=str(path))
            except IntegrityError as error:
                yield error.message
                return
            if frame.previous != previous:
                yield f"the frame of step {frame.number} in {path} does not follow the one before it"
                return
            if frame.layout != layout:
                raise IntegrityError(
                    f"the gradient log {path} was written by another optimizer, or with other parameters or shards",
                    hint="Restore the checkpoint alone: a log fits the optimizer and the sharding that made it",
                    path=path,
                )
            previous, at = frame.digest, at + length
            yield frame, at
    yield ""


def roll_forward(
    optimizer: torch.optim.Optimizer, directory: Path, base: str, *, last_step: int | None = None
) -> Recovered:
    """Apply the steps behind ``base`` to ``optimizer``, whose parameters and state are those of that checkpoint.

    Args:
        last_step: apply none that is newer: the newest that all ranks have.

    Raises:
        ConfigError: the optimizer cannot be replayed.
        IntegrityError: the log is that of another optimizer or sharding.
    """
    check_replayable(optimizer)
    members = list(parameters_of(optimizer))
    tensors = {one.key: local(one.tensor.detach()) for one in members}
    stepped = [one for one in members if one.tensor in optimizer.state]
    state = {one.key: _local_state(optimizer.state[one.tensor]) for one in stepped}
    replay: Replay | None = None
    newest = Recovered(-1, 0)
    for found in frames(directory, base, layout_digest(optimizer)):
        if isinstance(found, str):
            newest = replace(newest, ended=found)
            break
        frame, end_bytes = found
        if last_step is not None and frame.number > last_step:
            break
        if replay is None:
            replay = Replay(type(optimizer), tensors, state, frame.step.version - 1)
        replay.apply(frame.step)
        newest = Recovered(
            frame.number, newest.steps + 1, frame.attachment, "", replay.version, end_bytes, frame.digest
        )
    if replay is not None:
        made: dict[str, dict[str, Any]] = replay.state
        for one in members:
            if made[one.key]:
                optimizer.state[one.tensor] = made[one.key]
    return newest


def _local_state(state: dict[str, Any]) -> dict[str, Any]:
    return {name: local(one) if isinstance(one, torch.Tensor) else one for name, one in state.items()}
