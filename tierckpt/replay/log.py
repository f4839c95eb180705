"""Writes the steps behind a checkpoint to files of this node, so that a job resumes at the step that was cut off.

Invariants (S1 and S2 are in ``segments``):
    L1  A frame is appended after the update it stands for, with the gradients that the update read. Frames follow each
        other without a gap, across segments too, so a log fits the checkpoints that it names and no other.
    L2  ``durable_step`` is the newest step before which everything is on the disk (fdatasync). A crash loses what came
        later, and nothing else.
    L3  A step never goes on with less than was asked for without a word: what cannot be logged (a parameter changed
        beside the optimizer, gradients that were written over at once, a full disk) ends the log, with a reason, and
        the next base begins another. What writes through ``.data`` shows no change, and is not seen.
    L4  A new base begins a segment, in order with the frames, when its state is taken. Whether it is ever committed
        changes nothing: the segment continues the log of the base before.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..disk.durable import translated
from ..errors import CheckpointError, IntegrityError
from ..telemetry import logger
from . import segments
from .apply import Replay
from .capture import Capture, Gradients, Step
from .frame import Frame, decode, encode
from .link import GRADIENTS, Copy, Link
from .optimizers import Parameter, check_replayable, layout_digest, local, parameters_of
from .redo import explicit, implementation_of
from .segments import SegmentFile

log = logger("replay")

FRAMES_AHEAD = 2
"""Steps whose gradients wait in memory to be written; then a step waits for the disk."""
WAIT_SECONDS = 600.0
STALL_SECONDS = 10.0
"""A disk that takes nothing for so long ends the log, with a word: a step does not wait for one that hangs."""

Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]


def _named(optimizers: Optimizers) -> dict[str, torch.optim.Optimizer]:
    return {"": optimizers} if isinstance(optimizers, torch.optim.Optimizer) else dict(optimizers)


def fits(place: segments.Place, optimizers: Optimizers) -> bool:
    """True when the frame at ``place`` is of one of ``optimizers``, as it is sharded here."""
    optimizer = _named(optimizers).get(place.fields["optimizer"])
    return optimizer is not None and layout_digest(optimizer) == place.fields["layout"]


@dataclass(slots=True)
class _Part:
    """The step of one optimizer on its way to the file."""

    step: Step
    keys: list[str]
    copy: Copy
    dtypes: dict[str, torch.dtype]


@dataclass(slots=True)
class _Entry:
    """A training step on its way to the file. Without ``parts``: whoever syncs waits for what is before it."""

    number: int = -1
    attachment: bytes = b""
    parts: dict[str, _Part] = field(default_factory=dict)
    written: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class _Base:
    """From here on frames go to another segment."""

    step: int
    bases: list[str]


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
    digest: str = ""
    """Of the newest frame: a log is continued from there."""


class GradientLog:
    """Logs every step of ``optimizers`` from ``begin`` on.

    Args:
        optimizers: one, or several by name, whose steps are one frame.
        directory: of this rank, on storage that outlives the process.
        every_steps: how many steps are made durable together. No more than these are not durable when a step ends.
        every_seconds: make steps durable so often instead.
        link: between accelerator and host; None makes one.
        owner: said in the log, for who reads it: the job, rank and world size.
        reserve: is called with the bytes of each frame before it is written; what it raises ends the log.

    Raises:
        ConfigError: an optimizer cannot be replayed.
    Cost: the bytes of this rank's gradients for each step, on the link and on the disk; an fdatasync for each
        ``every_steps`` steps. A step waits when two before it are not written yet. 8 MiB of memory.
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
        self,
        optimizers: Optimizers,
        directory: Path,
        *,
        every_steps: int = 1,
        every_seconds: float = 0.0,
        link: Link | None = None,
        owner: Mapping[str, Any] | None = None,
        reserve: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self.optimizers = _named(optimizers)
        for optimizer in self.optimizers.values():
            check_replayable(optimizer)
        self.directory = directory
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.blocked_seconds = 0.0
        """How long steps waited for memory or the disk."""
        self.failure = ""
        """Why steps are not logged any more. '' while they are."""
        self.owner = dict(owner or {})
        self.reserve = reserve
        self._link = link or Link()
        self._owns_link = link is None
        self._recorders: dict[str, _Recorder] = {}
        self._waits_for_gradients = {name: isinstance(one, torch.optim.SGD) for name, one in self.optimizers.items()}
        """Something writes over gradients before they are copied (Nesterov, ``zero_grad`` in place): a step waits."""
        self._newest = 0
        self._writer: _Writer | None = None

    def __enter__(self) -> GradientLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def durable_step(self) -> int:
        """The newest step that is on the disk with all before it; -1 for none."""
        return self._writer.durable_step if self._writer is not None else -1

    @property
    def is_stepped(self) -> bool:
        """True when an optimizer was stepped since the last ``end_of_step``."""
        return any(one.pending is not None for one in self._recorders.values())

    def begin(self, base: str, after: Recovered | None = None, *, step: int | None = None) -> None:
        """Go on in a new segment: the checkpoint ``base`` has the state of now. Waits for nothing.

        While steps are logged, the log that leads here goes on to lead here (L4). Where none are, another log begins.

        Args:
            after: what ``roll_forward`` returned, before the first step: the log is continued at the state that it led
                to. What followed there is given up, once a step is logged.
            step: the step that the state is of. None: the last one that was ended.
        """
        at = step if step is not None else after.step if after is not None and after.steps else self._newest
        self._newest = at
        if self._writer is not None and not (after or self.is_stepped or self._is_broken()):
            self._put(_Base(at, [base]))
            return
        self._end(wait=not self.failure)
        self.failure = ""
        follows = after is not None and after.steps > 0
        self._recorders = {name: _Recorder(self, name, one) for name, one in self.optimizers.items()}
        head = _Base(at, [] if follows else [base])
        self._writer = _Writer(self, head, after.digest if after is not None and follows else "")

    def end_of_step(self, number: int, attachment: bytes | Callable[[], bytes] = b"") -> None:
        """The step ``number`` is done: log it, with ``attachment`` (what else belongs to it: schedule, random state).

        Call it after each step, when all that belongs to it is done. Where no optimizer was stepped (a GradScaler
        skipped it, gradients are accumulated) there is nothing to log, and ``attachment`` is not called.
        """
        if self._is_broken() or not self.is_stepped or self._writer is None:
            return
        if number <= self._newest:
            self.fail(f"step {number} came after step {self._newest}")
            return
        data = attachment if isinstance(attachment, bytes) else attachment()
        parts = {name: part for name, one in self._recorders.items() if (part := one.take()) is not None}
        self._newest = number
        if self._put(_Entry(number, data, parts)) and not self.every_seconds:
            begun = time.perf_counter()
            if not self._writer.wait_until_durable(self.every_steps):
                self.fail(f"the disk below {self.directory} has taken nothing for {STALL_SECONDS:g} s")
            self.blocked_seconds += time.perf_counter() - begun

    def sync(self) -> None:
        """Return when every step that was ended is on the disk.

        Raises:
            CheckpointError: the log has ended before.
        """
        if not self._is_broken() and self._writer is not None:
            entry = _Entry()
            if self._put(entry):
                entry.written.result(WAIT_SECONDS)
        if self.failure:
            raise CheckpointError(
                f"steps are not logged any more: {self.failure}", hint="Save a whole checkpoint: a new log begins there"
            )

    def close(self) -> None:
        """Write what was ended, and remove the hooks."""
        self._end(wait=True)
        if self._owns_link:
            self._link.close()

    def fail(self, reason: str) -> None:
        """Log no more until another base, and say why. The first ``reason`` is kept."""
        if not self.failure:
            self.failure = reason
            log.warning("steps are not logged any more, until the next checkpoint: %s", reason)

    def _is_broken(self) -> bool:
        for recorder in self._recorders.values():
            if reason := recorder.broken:
                self.fail(reason)
        return bool(self.failure)

    def _put(self, entry: _Entry | _Base | None) -> bool:
        assert self._writer is not None
        begun = time.perf_counter()
        try:
            self._writer.queue.put(entry, timeout=STALL_SECONDS)
        except queue.Full:
            self.fail(f"the disk below {self.directory} has taken nothing for {STALL_SECONDS:g} s")
            return False
        finally:
            self.blocked_seconds += time.perf_counter() - begun
        return True

    def _end(self, *, wait: bool) -> None:
        """``wait`` False: what a failed log has in its queue is of no use."""
        for recorder in self._recorders.values():
            recorder.close()
        self._recorders = {}
        if self._writer is None:
            return
        if wait and self._put(None):
            self._writer.thread.join(STALL_SECONDS)
        self._writer.give_up()
        with contextlib.suppress(queue.Full):
            self._writer.queue.put_nowait(None)
        self._writer = None


class _Recorder:
    """Takes the steps of one optimizer."""

    def __init__(self, owner: GradientLog, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.pending: tuple[Step, list[str], Copy] | None = None
        self._owner, self._name = owner, name
        self._copying: tuple[list[str], Copy] | None = None
        self._reason = ""
        self._changes = _changes(optimizer)
        self._implementations = [implementation_of(group) for group in optimizer.param_groups]
        self._look = optimizer.register_step_pre_hook(self._before)
        self.capture = Capture(optimizer, self._on_step, copy=self._on_gradients)

    @property
    def broken(self) -> str:
        if not self._reason and _changes(self.optimizer) != self._changes:
            self._reason = "a parameter was changed beside the optimizer"
        return self._reason or self.capture.broken

    def take(self) -> _Part | None:
        if self.pending is None:
            return None
        (step, keys, copy), self.pending = self.pending, None
        dtypes = {one.key: one.tensor.dtype for one in parameters_of(self.optimizer)}
        return _Part(step, keys, copy, dtypes)

    def close(self) -> None:
        self._look.remove()
        self.capture.close()

    def _before(self, *_: Any) -> None:
        self._reason = self.broken

    def _on_gradients(self, gradients: Gradients) -> Gradients:
        keys = list(gradients)
        copy = self._owner._link.copy([gradients[key] for key in keys], GRADIENTS)
        if self._owner._waits_for_gradients[self._name]:
            copy.wait(WAIT_SECONDS)
        self._copying = (keys, copy)
        return {}

    def _on_step(self, step: Step) -> None:
        self._changes = _changes(self.optimizer)
        step = replace(step, hyperparameters=explicit(step.hyperparameters, self._implementations))
        if self.pending is not None:
            self._reason = self._reason or "the optimizer was stepped twice between two calls of end_of_step"
        elif self._copying is not None:
            self.pending, self._copying = (step, *self._copying), None


def _changes(optimizer: torch.optim.Optimizer) -> list[tuple[int, int, int]]:
    """What moves when something writes to a parameter, whoever it is."""
    found = []
    for one in parameters_of(optimizer):
        shard = one.tensor._local_tensor if isinstance(one.tensor, DTensor) else one.tensor
        found.append((one.tensor._version, shard._version, shard.data_ptr()))
    return found


class _Writer:
    """The thread that writes a log, from one ``begin`` to the next that begins anew."""

    def __init__(self, owner: GradientLog, base: _Base, previous: str) -> None:
        self.queue: queue.Queue[_Entry | _Base | None] = queue.Queue(FRAMES_AHEAD)
        self.durable_step = -1
        self.is_given_up = False
        """Its log has failed, and another has begun: nothing it writes counts."""
        self._owner, self._base, self._previous = owner, base, previous
        self._given_up: int | None = base.step
        """Segments from here on were, and go before the first of this log is made."""
        self._layouts = {name: layout_digest(one) for name, one in owner.optimizers.items()}
        self._file: SegmentFile | None = None
        self._unsynced: deque[int] = deque()
        self._unsynced_since = 0.0
        self._not_durable = 0
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._work, name="tierckpt-gradient-log", daemon=True)
        self.thread.start()

    def give_up(self) -> None:
        with self._changed:
            self.is_given_up = True

    def wait_until_durable(self, steps_max: int) -> bool:
        """Return when at most ``steps_max`` steps of those in the queue are not durable, or the log has failed. False
        when that takes longer than ``STALL_SECONDS``."""
        with self._changed:
            self._not_durable += 1
            return self._changed.wait_for(
                lambda: self._not_durable <= steps_max or bool(self._owner.failure), STALL_SECONDS
            )

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            try:
                with translated(self._owner.directory):
                    if isinstance(entry, _Base):
                        self._turn_to(entry)
                    elif not self._is_ended and entry.parts:
                        self._append(entry)
                        if not self._owner.every_seconds and len(self._unsynced) >= self._owner.every_steps:
                            self._commit()
                    elif not self._is_ended:
                        self._commit()
            except Exception as error:
                self._fail(error)
            if isinstance(entry, _Entry):
                entry.written.set_result(None)  # whoever waits looks at ``failure``
            del entry  # with its gradients
        try:
            with translated(self._owner.directory):
                self._commit()
        except Exception as error:
            self._fail(error)
        if self._file is not None:
            self._file.close()

    @property
    def _is_ended(self) -> bool:
        return self.is_given_up or bool(self._owner.failure)

    def _next(self) -> _Entry | _Base | None:
        """The next entry. Before it, what waits longer than ``every_seconds`` is made durable."""
        while True:
            waits = self._unsynced and self._owner.every_seconds
            seconds = max(0.0, self._unsynced_since + self._owner.every_seconds - time.monotonic()) if waits else None
            if seconds != 0.0:
                with contextlib.suppress(queue.Empty):
                    return self.queue.get(timeout=seconds)
            try:
                with translated(self._owner.directory):
                    self._commit()
            except Exception as error:
                self._fail(error)
                self._unsynced.clear()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if not self.is_given_up:
                self._owner.fail(str(error) or repr(error))
            self._changed.notify_all()

    def _commit(self) -> None:
        if self._is_ended:
            self._unsynced.clear()
        if self._file is None or not self._unsynced:
            return
        self._file.sync()
        with self._changed:
            self.durable_step = self._unsynced[-1]
            self._not_durable -= len(self._unsynced)
            self._unsynced.clear()
            self._changed.notify_all()

    def _turn_to(self, base: _Base) -> None:
        """The segment is made when its first frame comes. Until then all bases lead to it: none is an update apart."""
        if self._file is None:
            self._base = _Base(base.step, [*self._base.bases, *base.bases])
            return
        self._commit()
        self._file.close()
        self._file, self._base = None, base

    def _append(self, entry: _Entry) -> None:
        steps: dict[str, Step] = {}
        for name, part in entry.parts.items():
            part.copy.done.result(WAIT_SECONDS)
            if part.copy.was_changed:
                self._owner._waits_for_gradients[name] = True  # from the next log on
                raise CheckpointError("gradients were written over before they were copied (zero_grad in place?)")
            steps[name] = replace(part.step, gradients=dict(zip(part.keys, part.copy.result, strict=True)))
        if self._file is None:
            if self._given_up is not None:
                segments.remove_from(self._owner.directory, self._given_up)
                self._given_up = None
            fields = {"bases": self._base.bases, "previous": self._previous, "owner": self._owner.owner}
            self._file = SegmentFile(self._owner.directory, self._base.step, fields)
            self._previous = self._file.digest
        for place, (name, step) in enumerate(steps.items(), 1):
            is_last = place == len(steps)
            dtypes, attachment = entry.parts[name].dtypes, entry.attachment if is_last else b""
            frame = Frame(step, self._layouts[name], self._previous, entry.number, attachment, dtypes, name, is_last)
            head, views, digest = encode(frame)
            pieces = [memoryview(head), *views]
            self._owner.reserve(sum(map(len, pieces)))
            self._file.append(pieces)
            self._previous = digest
        if not self._unsynced:
            self._unsynced_since = time.monotonic()
        self._unsynced.append(entry.number)


def roll_forward(
    optimizers: Optimizers,
    directory: Path,
    base: str,
    *,
    last_step: int | None = None,
    attached: Callable[[bytes], None] = lambda attachment: None,
) -> Recovered:
    """Apply the steps behind ``base`` to ``optimizers``, whose parameters and state are those of that checkpoint.

    Args:
        last_step: apply none that is newer: the newest that all ranks have.
        attached: is given the attachment of each step, in order.

    Raises:
        ConfigError: an optimizer cannot be replayed.
        IntegrityError: the log is that of another optimizer or sharding.
    """
    targets = {name: _Target(one) for name, one in _named(optimizers).items()}
    newest, segment, pending = Recovered(-1, 0), None, list[Frame]()
    for place in segments.walk(directory, base):
        if isinstance(place, str):
            newest = replace(newest, ended=place)
            break
        if not fits(place, optimizers):
            raise IntegrityError(
                f"the gradient log {place.segment.path} was written by another optimizer, or with other parameters or "
                "shards",
                hint="Restore the checkpoint alone: a log fits the optimizer and the sharding that made it",
                path=place.segment.path,
            )
        if last_step is not None and place.fields["number"] > last_step:
            break
        try:
            pending.append(decode(place.read, where=str(place.segment.path))[0])
        except IntegrityError as error:
            newest = replace(newest, ended=error.message)
            break
        if not pending[-1].is_last:
            continue
        if place.segment is not segment:
            segment = place.segment
            for target in targets.values():
                target.is_at_head = True
        for frame in pending:
            targets[frame.optimizer].apply(frame.step)
        frame, pending = pending[-1], []
        attached(frame.attachment)
        newest = Recovered(frame.number, newest.steps + 1, frame.attachment, digest=frame.digest)
    for target in targets.values():
        target.finish()
    return newest


class _Target:
    """An optimizer that steps are applied to."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_replayable(optimizer)
        self.replay: Replay | None = None
        self.is_at_head = True
        """Each process counts versions anew. From a segment to the next the digests say what follows (S1)."""
        self._optimizer = optimizer
        self._members = list(parameters_of(optimizer))

    def apply(self, step: Step) -> None:
        if self.replay is None:
            tensors = {one.key: local(one.tensor.detach()) for one in self._members}
            stepped = [one for one in self._members if one.tensor in self._optimizer.state]
            state = {one.key: _local_state(self._optimizer.state[one.tensor]) for one in stepped}
            self.replay = Replay(type(self._optimizer), tensors, state, step.version - 1)
        if self.is_at_head:
            self.replay.version, self.is_at_head = step.version - 1, False
        self.replay.apply(step)

    def finish(self) -> None:
        """Give the optimizer its state: what it had was changed in place, what its first step makes is new."""
        for key, made in self.replay.state.items() if self.replay is not None else ():
            one = next(member for member in self._members if member.key == key)
            known = self._optimizer.state.get(one.tensor, {})
            if made:
                self._optimizer.state[one.tensor] = {
                    name: known[name] if isinstance(known.get(name), DTensor) else _sharded(value, one)
                    for name, value in made.items()
                }


def _local_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: local(one) if isinstance(one, torch.Tensor) else one for name, one in state.items()}


def _sharded(value: Any, parameter: Parameter) -> Any:
    """As the optimizer itself makes its state: of the placement of the parameter, where it has its shape."""
    tensor = parameter.tensor
    if not (isinstance(value, torch.Tensor) and isinstance(tensor, DTensor)) or value.shape != local(tensor).shape:
        return value
    return DTensor.from_local(
        value, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
