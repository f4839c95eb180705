"""Logs the steps after a checkpoint to files of this node, and applies them to the checkpoint after a crash.

Invariants (F1, F2, S1 and S2 are in ``save.log_segments``, L5 and L6 in ``log_writer``):
    L1  A frame is appended after its update, with the gradients that the update read. Frames have no gap.
    L2  All steps up to ``durable_step`` are on the disk (fdatasync).
    L3  Anything that cannot be logged ends the log with a reason. The next base begins a new log.
    L4  A new base begins a segment of the same log when its state is taken, even if it is never committed.
    L7  A step is logged only if it began with the state after the previous step (version counters and ``guard``).
        Roll-forward to another digest raises an error that names the last verified step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..errors import CheckpointError, IntegrityError
from ..save import log_segments
from ..telemetry import logger
from .apply import Replay
from .capture import Capture, Step
from .checksum import Check, Guard, digest_values, digests_of, frame_digest, no_check
from .frame import Frame, decode
from .link import GRADIENTS, CopiedGradients, Link
from .log_writer import Base, LogWriter
from .optimizers import (
    check_replayable,
    layout_digest,
    local_shard,
    may_overwrite_gradients,
    parameter_and_state,
    parameters_of,
    shard_like,
    tensors_of,
)

log = logger("replay")

LINK_HANGS = "gradients do not reach host memory: the link hangs"

Attachment = bytes | Callable[[], bytes | tuple[bytes, Check]]
"""Other state of a step, and a ``guard.Check``."""
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]


def _optimizers_by_name(optimizers: Optimizers) -> dict[str, torch.optim.Optimizer]:
    return {"": optimizers} if isinstance(optimizers, torch.optim.Optimizer) else dict(optimizers)


def layouts_of(optimizers: Optimizers) -> dict[str, str]:
    return {name: layout_digest(one) for name, one in _optimizers_by_name(optimizers).items()}


@dataclass(frozen=True, slots=True)
class Recovered:
    step: int
    """The newest step applied; -1 for none."""
    steps: int
    end_reason: str = ""
    """Reason why later frames are unusable."""
    digest: str = ""
    verified_step: int = -1
    """The newest step whose parameters and optimizer state had the digest of training."""


class GradientLog:
    """Logs every step of ``optimizers`` after ``begin``. Raises ConfigError if one cannot be replayed.

    Args:
        optimizers: one, or several by name, which share frames.
        directory: of this rank, on storage that survives the process.
        every_steps: steps per fdatasync: at most as many are not durable when a step ends.
        every_seconds: between two fdatasync calls, instead of ``every_steps``.
        reserve: called with the bytes of each frame before it is written. An error ends the log.

    A step waits while two steps and 64 MiB of gradients are unwritten. A hung disk costs at most half a second in all.

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
        reserve: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self.optimizers = _optimizers_by_name(optimizers)
        for optimizer in self.optimizers.values():
            check_replayable(optimizer)
        self.directory = directory
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.owner: dict[str, Any] = {}
        self.reserve = reserve
        self._link = link or Link()
        self._owns_link = link is None
        self._recorders: dict[str, _Recorder] = {}
        self._waits_for_gradients = {name for name, one in self.optimizers.items() if may_overwrite_gradients(one)}
        """Their gradients are overwritten early (Nesterov, ``zero_grad``)."""
        self._newest_step = 0
        self._writer: LogWriter | None = None
        self._layouts: dict[str, str] = {}
        self._guard = Guard(self.optimizers)

    def __enter__(self) -> GradientLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def failure(self) -> str:
        return self._writer.failure if self._writer is not None else ""

    @property
    def blocked_seconds(self) -> float:
        return self._writer.blocked_seconds if self._writer is not None else 0.0

    @property
    def durable_step(self) -> int:
        """The newest durable step (L2); -1 for none."""
        return self._writer.durable_step if self._writer is not None else -1

    @property
    def has_pending_step(self) -> bool:
        return any(one.steps for one in self._recorders.values())

    @property
    def needs_base(self) -> bool:
        """True if a checkpoint would begin a new log: the disk did not end this one."""
        return self._writer is not None and self._has_failed() and not self._writer.is_disk_failure

    def begin(
        self, base: str, recovered: Recovered | None = None, *, step: int | None = None, check: Check = no_check
    ) -> None:
        """Begin a segment: the checkpoint ``base`` has the current state (L4). Returns at once.

        Args:
            recovered: of ``roll_forward``, before the first step. Later frames become obsolete at the next step.
            step: of the state. None: the last step logged.
            check: reads the checkpoint's parameters outside the optimizers.
        """
        continued = recovered if recovered is not None and recovered.steps else None
        base_step = step if step is not None else continued.step if continued is not None else self._newest_step
        self._newest_step, writer = base_step, self._writer
        if writer is not None:
            if self._recorders and not (recovered or self.has_pending_step or self._has_failed()):
                writer.switch_base(Base(base_step, [base]))
                self._guard.rebase()
                return
            if writer.is_hung:
                writer.end("its disk hangs")
                log.warning("steps after %d are not logged: the disk of %s hangs", base_step, self.directory)
                return
            writer.switch_base(None)
        self._close_recorders()
        self._recorders = {
            name: _Recorder(name, one, self._link, self._guard, waits_for_copies=name in self._waits_for_gradients)
            for name, one in self.optimizers.items()
        }
        self._guard.begin(base_step, check)
        self._layouts = layouts_of(self.optimizers)
        parameters = itertools.chain.from_iterable(map(parameters_of, self.optimizers.values()))
        size_bytes = sum(local_shard(one.tensor.detach()).nbytes for one in parameters)
        self._writer = LogWriter(
            self.directory,
            Base(base_step, [base] if continued is None else []),
            continued.digest if continued is not None else "",
            every_steps=self.every_steps,
            every_seconds=self.every_seconds,
            step_bytes=size_bytes,
            owner=self.owner,
            reserve=self.reserve,
            overwritten_optimizers=self._waits_for_gradients,
            predecessor=writer,
        )

    def end_of_step(self, number: int, attachment: Attachment = b"") -> None:
        """Log a step with ``attachment``, its other state. Does nothing if no optimizer was stepped."""
        if self._has_failed():
            self._close_recorders()
            return
        if not self.has_pending_step or self._writer is None:
            return
        if number <= self._newest_step:
            self.fail(f"step {number} follows step {self._newest_step}")
            return
        value = attachment if isinstance(attachment, bytes) else attachment()
        data, check = value if isinstance(value, tuple) else (value, no_check)
        steps = {name: recorded[0] for name, one in self._recorders.items() if (recorded := one.take_steps())}
        self._newest_step = number
        self._writer.put(Frame(number, steps, self._layouts, data), self._guard.end_of_step(number, check))

    def sync(self) -> None:
        """Wait until all steps are durable. Raises CheckpointError if the log has ended."""
        if not self._has_failed() and self._writer is not None:
            self._writer.sync()
        if self.failure:
            raise CheckpointError(
                f"steps are no longer logged: {self.failure}", hint="Save a whole checkpoint, which begins a new log"
            )

    def close(self) -> None:
        self._close_recorders()
        if self._writer is not None:
            self._writer.finish()
        self._guard.close()
        if self._owns_link:
            self._link.close()

    def fail(self, reason: str) -> None:
        """End the log until the next base. The first ``reason`` is kept."""
        if self._writer is not None:
            self._writer.end(reason)

    def _has_failed(self) -> bool:
        for recorder in self._recorders.values():
            if reason := recorder.check():
                self.fail(reason)
        if self._writer is not None and (changed := self._guard.failure) is not None:
            self._writer.end(changed[1], newest=changed[0] - 1)
        return bool(self.failure)

    def _close_recorders(self) -> None:
        for recorder in self._recorders.values():
            recorder.close()
        self._recorders = {}


class _Recorder(Capture):
    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, link: Link, guard: Guard, *, waits_for_copies: bool
    ) -> None:
        super().__init__(optimizer)
        self._link, self._guard, self._waits_for_copies = link, guard, waits_for_copies
        self._step_gradients: CopiedGradients | None = None
        self._gradient_counters: dict[int, int] = {}
        self._copies_before_return = False
        """The gradients may be overwritten when the step ends."""
        after_update = optimizer.register_step_post_hook(lambda *_: guard.after(name))
        torch_internals.step_post_hooks_of(optimizer).move_to_end(after_update.id, last=False)
        self._handles += [optimizer.register_step_pre_hook(lambda *_: guard.before(name)), after_update]

    def copy(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        link, optimizer_id = self._link, id(self.optimizer)
        can_wait = self._can_wait(gradients.values())
        self._copies_before_return = not can_wait
        yields_to_update = can_wait and optimizer_id not in link.logged_gradients  # a window needs the link meanwhile
        step_gradients = CopiedGradients(
            link.copy([*gradients.values()], GRADIENTS, yields_to_update=yields_to_update), [*gradients]
        )
        if optimizer_id in link.logged_gradients:
            link.logged_gradients[optimizer_id] = step_gradients
        if self._waits_for_copies and not link.wait(step_gradients.copy):
            self.end(LINK_HANGS)
        self._step_gradients = step_gradients
        link.update_begins()
        return step_gradients

    def on_step_end(self) -> None:
        self._link.update_ends()
        gradients, self._step_gradients = self._step_gradients, None
        if self._copies_before_return and gradients is not None and not self._link.wait(gradients.copy):
            self.end(LINK_HANGS)

    def before_other_optimizer(self) -> None:
        self._guard.wait()

    def check(self) -> str:
        if len(self.steps) > 1:
            self.end("the optimizer was stepped twice between two calls of end_of_step")
        return super().check()

    def _can_wait(self, gradients: Iterable[torch.Tensor]) -> bool:
        """True if no gradient's memory was written since the last step: the copy may run after the update.

        ``grad.data.zero_()`` does not change version counters.
        """
        counters = {one.data_ptr(): torch_internals.version_of(one) for one in gradients}
        previous, self._gradient_counters = self._gradient_counters, counters
        was_written = any(previous.get(address, version) != version for address, version in counters.items())
        return bool(previous) and not was_written


def roll_forward(
    optimizers: Optimizers,
    directory: Path,
    base: str,
    *,
    last_step: int | None = None,
    on_attachment: Callable[[bytes], int | None] = lambda attachment: None,
) -> Recovered:
    """Apply the steps after the checkpoint ``base`` to ``optimizers``, which have its parameters and state.

    Args:
        last_step: the newest step that all ranks have.
        on_attachment: called in order. Returns the digest of the attachment's ``Check``.

    Raises:
        ConfigError: an optimizer cannot be replayed.
        IntegrityError: another optimizer or sharding wrote the log; or the result differs from training (L7): restore
            again, and apply steps up to ``error.context["verified_step"]``, -1 for none.
    """
    layouts = layouts_of(optimizers)
    targets = {name: _Target(one) for name, one in _optimizers_by_name(optimizers).items()}
    newest, segment = Recovered(-1, 0), None
    for position in log_segments.iterate_frames(directory, base):
        if isinstance(position, str):
            newest = replace(newest, end_reason=position)
            break
        if not position.layouts.items() <= layouts.items():
            raise IntegrityError(
                f"the gradient log {position.file_text} was written by another optimizer, or with other parameters or "
                "shards",
                hint="Restore the checkpoint alone: a log fits only the optimizer and the sharding that wrote it",
                path=position.segment.path,
            )
        if last_step is not None and position.number > last_step:
            break
        try:
            frame = decode(position.read, where=position.file_text)
        except IntegrityError as error:
            newest = replace(newest, end_reason=error.message)
            break
        if position.segment is not segment:
            segment = position.segment
            for target in targets.values():
                target.is_at_segment_start = True
        for name, step in frame.steps.items():
            targets[name].apply(step)
        other_digest, verified_step = on_attachment(frame.attachment) or 0, newest.verified_step
        if expected_digest := position.fields.get("parameters"):
            digests = {name: digest_values(digests_of(target.tensors())) for name, target in targets.items()}
            if frame_digest(digests, other_digest) != expected_digest:
                raise IntegrityError(
                    "the gradient log ends at other parameters or optimizer state than training had after step "
                    f"{position.number}: they were changed outside the optimizer (.data, a fused kernel), or the build "
                    "or device differs",
                    hint="Restore the checkpoint " + ("alone" if verified_step < 0 else
                    f"again, and roll forward to step {verified_step}"),
                    path=position.segment.path, verified_step=verified_step,
                )  # fmt: skip
            verified_step = position.number
        newest = Recovered(position.number, newest.steps + 1, digest=position.digest, verified_step=verified_step)
    for target in targets.values():
        target.finish()
    return newest


class _Target:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_replayable(optimizer)
        self.replay: Replay | None = None
        self.is_at_segment_start = True
        """Each process counts versions from 0; digests link segments (S1)."""
        self._optimizer = optimizer
        self._parameters = parameters_of(optimizer)

    def apply(self, step: Step) -> None:
        if self.replay is None:
            tensors = {one.key: local_shard(one.tensor.detach()) for one in self._parameters}
            with_state = [one for one in self._parameters if one.tensor in self._optimizer.state]
            state = {
                one.key: {name: local_shard(value) for name, value in self._optimizer.state[one.tensor].items()}
                for one in with_state
            }
            self.replay = Replay(type(self._optimizer), tensors, state, step.version - 1)
        if self.is_at_segment_start:
            self.replay.version, self.is_at_segment_start = step.version - 1, False
        self.replay.apply(step)

    def tensors(self) -> Iterator[torch.Tensor]:
        if self.replay is None:
            yield from tensors_of(self._optimizer)
            return
        state = self.replay.state
        for one in self._parameters:
            yield from parameter_and_state(local_shard(one.tensor.detach()), state[one.key])

    def finish(self) -> None:
        state = self.replay.state if self.replay is not None else {}
        for one in self._parameters:
            if new_state := state.get(one.key):
                old_state = self._optimizer.state.get(one.tensor, {})
                self._optimizer.state[one.tensor] = {
                    name: old_state[name] if isinstance(old_state.get(name), DTensor) else shard_like(value, one.tensor)
                    for name, value in new_state.items()
                }
