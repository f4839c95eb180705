"""The multi-step save of a Checkpointer: a window of K steps, saved as a checkpoint of the last step.

save(n), or a step that is due    ranks agree on K; the copy of the first part begins
step(n+1) ... step(n+K-2)         the next part; gradients of earlier parts follow
step(n+K-1)                       the last part begins; the rest of the state is copied
a later step                      all ranks have their parts: they are saved

M1  A checkpoint has one step on all ranks. They exchange their outcomes from the last step on. If a rank fails, all
    save a full copy of that step.
M2  A window that ends before its last step saves a full copy of the current state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from ...errors import CheckpointError, ConfigError
from ...format.layout import WINDOWS_DIR, Location, step_name
from ...planning.transfer_times import STEPS_MAX, Traffic
from ...replay.link import COPY_TIMEOUT_SECONDS
from ...replay.multi_step import COPY_HANGS, OUT_OF_MEMORY, MultiStepStager, checked_steps
from ...replay.optimizers import optimizers_in
from ...replay.redo import Exact, Snapshot, checked_exact
from ...replay.tree import detach, fill
from ...telemetry import logger
from ..codec import job_state as states
from ..rank_exchange import all_gather, is_distributed, same_outcome
from ..saves import SaveRecord
from .redo_log import notes_of, stored
from .step_log import StepLog, parse

log = logger("checkpointer")

State: TypeAlias = Mapping[str, Any]

DONE, PENDING = "", "pending"


@dataclass(frozen=True, kw_only=True)
class EveryStep:
    """``Checkpointer(every_step=...)``: work in every training step. See docs/guide/every-step.md.

    Args:
        gradient_log: True: each ``step`` can be restored, as the gradients of the optimizers in the state are logged on
            this node's SSD. "10 steps" or "500 ms" makes several steps durable together. The first ``step`` saves.
        window_steps: copies the optimizers' state over this many steps: a save at step n makes the checkpoint of step n
            + window_steps - 1. At most ``interval`` if that is a number. "auto": from measured times; 7 before they are
            known. Call ``step`` after every training step; with several ranks once more, or ``wait("local")``, before
            ``result()`` of a save.
        exact: for multi-step saves on an accelerator. "required": saves a redo log, which a restore turns into a
            checkpoint on such a device. "approximate": the last bits may differ from training.

    Raises ConfigError: an invalid value.

    Example:
        >>> every_step = tierckpt.EveryStep(gradient_log=True)
        >>> with tierckpt.Checkpointer("run", every_step=every_step) as checkpointer:
        ...     start = checkpointer.restore({"x": torch.zeros(1)})
    """

    gradient_log: bool | str = False
    window_steps: int | Literal["auto"] | None = None
    exact: Exact = "required"

    def __post_init__(self) -> None:
        parse(self.gradient_log)
        checked_exact(self.exact)
        if self.window_steps is not None:
            checked_steps(self.window_steps)


class MultiStepSave(Future[None]):
    """Done when the checkpoint is committed on the local tier. ``record`` has its step, URI and statistics.

    The next ``step`` or ``wait`` writes a complete window. In a job of one rank, ``result`` on the training thread also
    ends an incomplete one. With several ranks it raises CheckpointError: call ``wait("local")`` first, on all ranks.
    """

    def __init__(self, record: SaveRecord, write: Callable[[MultiStepSave], None]) -> None:
        super().__init__()
        self.record = record
        self._write, self._thread = write, threading.get_ident()
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> None:
        self._wait_for_parts(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait_for_parts(timeout)
        return super().exception(timeout)

    def _wait_for_parts(self, timeout: float | None) -> None:
        if timeout != 0 and threading.get_ident() == self._thread:
            self._write(self)


Write: TypeAlias = Callable[..., Future[None]]
"""Saves ``state``, or ``collected``, which the save then owns: ``(record, state, collected, *, is_asked)``."""


@dataclass
class _Window:
    handle: MultiStepSave
    steps: int
    is_asked: bool
    step: int
    state: State
    made: int = 0
    updates: list[int] = field(default_factory=list)
    copies: list[Future[Snapshot]] = field(default_factory=list)
    rest: list[Future[None]] = field(default_factory=list)
    tree: Any = None
    failure: str = ""

    @property
    def is_sealed(self) -> bool:
        return self.made == self.steps


class SaveWindow:
    """The windows of one Checkpointer, one at a time. All ranks must call the same methods in the same order."""

    def __init__(
        self, location: Location, every_step: EveryStep, longest: int | None, write: Write, step_log: StepLog
    ) -> None:
        steps = every_step.window_steps
        self.is_on = steps is not None
        self._steps, self._longest = checked_steps("auto" if steps is None else steps), longest
        if self._longest is not None and self._steps > self._longest:
            raise ConfigError(
                f"window_steps is {steps}, but a save begins every {self._longest} steps (interval)",
                hint="Use an interval of at least window_steps",
            )
        self._location, self._exact, self._write = location, every_step.exact, write
        self._step_log = step_log
        self._stagers: list[MultiStepStager] = []
        self._window: _Window | None = None

    @property
    def is_open(self) -> bool:
        return self._window is not None

    @property
    def is_moving(self) -> bool:
        """True before the last step of the window: no other window can begin."""
        return self._window is not None and not self._window.is_sealed

    def open(self, step: int, state: State, *, is_asked: bool) -> Future[None]:
        """Begin a window at ``step``. The future is done when the checkpoint of its last step is committed locally.

        Raises CheckpointError: a window is open. ConfigError: no optimizer that can be replayed.
        """
        if self.is_moving:
            raise CheckpointError(
                "a multi-step checkpoint is still being copied; a second one cannot begin",
                hint="Call step() after every step of training, and save less often than window_steps",
            )
        self.conclude()
        same_outcome(lambda: self._match_stagers(state))
        steps = max(all_gather(self._steps_here()))
        record = SaveRecord(step + steps - 1, self._location.child(step_name(step + steps - 1)).uri)
        window = self._window = _Window(MultiStepSave(record, self._conclude_for), steps, is_asked, step, state)
        log.debug("a window of %d steps begins at step %d", steps, step)

        def begin(stager: MultiStepStager) -> None:
            window.copies.append(stager.begin(stager.tensors, steps))

        self._advance(window, step, state, begin)
        return window.handle

    def end_of_step(self, step: int, state: State) -> None:
        """Copy the next part, with the last one the rest of the state."""
        window = self._window
        if window is None:
            return
        if window.is_sealed:
            self._now_at(window, step, state)
            self._settle(window)
        else:
            self._advance(window, step, state, MultiStepStager.end_of_step)

    def _now_at(self, window: _Window, step: int, state: State) -> None:
        window.step, window.state, window.updates = step, state, [one.steps for one in self._stagers]

    def conclude(self, reason: str = "the loop ended before the last step of its window") -> None:
        """End the window now (M2). After its last step, waits for its parts while they make progress."""
        window = self._window
        if window is None:
            return
        if window.is_sealed:
            started_at = time.perf_counter()
            futures.wait(window.rest, COPY_TIMEOUT_SECONDS)
            for stager, copied in zip(self._stagers, window.copies, strict=True):
                if not copied.done() and (stager.failure or not stager.wait([copied])):
                    window.failure = window.failure or stager.failure or COPY_HANGS
            window.handle.record.blocked_seconds += time.perf_counter() - started_at
            self._settle(window)
        else:
            self._copy_whole(window, reason)

    def _conclude_for(self, save: MultiStepSave) -> None:
        if self._window is None or self._window.handle is not save:
            return
        if is_distributed():
            raise CheckpointError(
                "the training thread waits for a multi-step save before the last step of its window",
                hint='Call wait("local") of the Checkpointer first, on all ranks, or wait in another thread',
            )
        self.conclude("result() was called before the last step of its window")

    def copy_whole(self, step: int, state: State, reason: str) -> Future[None] | None:
        window = self._window
        if window is None:
            return None
        self._now_at(window, step, state)
        self._copy_whole(window, reason)
        return window.handle

    def close(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.handle.set_exception(CheckpointError("the Checkpointer was closed before the window ended"))
        for stager in self._stagers:
            stager.close()
        self._stagers.clear()

    def _match_stagers(self, state: State) -> None:
        optimizers = [*optimizers_in(state).values()]
        if not optimizers:
            raise ConfigError(
                "a multi-step checkpoint needs an optimizer in the state",
                hint='Pass it next to its module ({"model": model, "optimizer": optimizer}), or use mode="async"',
            )
        if list(map(id, optimizers)) == [id(stager.optimizer) for stager in self._stagers]:
            return
        for stager in self._stagers:
            stager.close()
        self._stagers.clear()
        for optimizer in optimizers:
            self._stagers.append(MultiStepStager(optimizer, link=self._step_log.link, exact=self._exact))

    def _steps_here(self) -> int:
        found = [stager.traffic() for stager in self._stagers]
        traffic = Traffic(
            sum(one.state_bytes for one in found),
            sum(one.gradient_bytes for one in found),
            found[0].bytes_per_second,
            max(one.step_seconds for one in found),
        )
        return self._steps or min(traffic.best_steps(), self._longest or STEPS_MAX)

    def _advance(self, window: _Window, step: int, state: State, move: Callable[[MultiStepStager], None]) -> None:
        started_at, inside = time.perf_counter(), 0.0
        window.made += 1
        collected: dict[str, Any] = {}
        if window.is_sealed:
            try:
                collected = states.collect(state)
            except Exception as error:  # the full copy raises it on all ranks
                window.failure = f"{type(error).__name__}: {error}"
        for stager in self._stagers:
            at = time.perf_counter()
            move(stager)
            inside += time.perf_counter() - at
        self._now_at(window, step, state)
        if window.is_sealed and not window.failure:
            try:
                live = _by_place(stager.tensors() for stager in self._stagers)
                window.tree, rest = detach(collected, live, self._stagers[0].link)
                window.rest += [rest.done] if rest is not None else []
            except MemoryError:
                window.failure = OUT_OF_MEMORY
        window.handle.record.blocked_seconds += time.perf_counter() - started_at - inside
        if window.is_sealed:
            record = window.handle.record
            record.name(self._location, step)
            record.base = self._step_log.new_base()
            self._step_log.based(record.base, step, state)
            self._settle(window)

    def _settle(self, window: _Window) -> None:
        outcomes = all_gather(_outcome(window))
        reason = next((one for one in outcomes if one not in (DONE, PENDING)), "")
        if reason:
            self._copy_whole(window, reason)
        elif PENDING not in outcomes:
            self._write_parts(window)

    def _write_parts(self, window: _Window) -> None:
        snapshots = [copied.result() for copied in window.copies]
        copies = _by_place(snapshot.state or {} for snapshot in snapshots)
        redos = {number: one.redo for number, one in enumerate(snapshots) if one.redo is not None}
        record = window.handle.record
        record.window_steps = window.steps
        inexact = "; ".join({one.inexact for one in snapshots if one.inexact})
        kinds = [type(stager.optimizer).__name__ for stager in self._stagers]
        if (conditions := snapshots[0].conditions) is not None:
            record.notes = notes_of(conditions, kinds, "beside training", inexact, window.steps - 1)
        record.moved_bytes = sum(one.moved_bytes for one in snapshots)
        record.waited_bytes = sum(one.waited_bytes for one in snapshots)
        record.blocked_seconds += sum(one.blocked_seconds for one in snapshots)
        tree = fill(window.tree, copies)
        if redos:
            record.uri = self._location.child(WINDOWS_DIR).child(step_name(record.step)).uri
            tree, record.notes = stored(tree, redos)
        self._write_as(window, tree)

    def _copy_whole(self, window: _Window, reason: str) -> None:
        updates = [one.steps for one in self._stagers]
        for stager in self._stagers:
            stager.abandon(reason)
        if updates != window.updates:
            self._window = None
            error = CheckpointError(
                f"a multi-step save ends within the step after {window.step}, without a complete state: {reason}",
                hint="Call wait, restore and close between a call of step() and the next training step",
            )
            window.handle.set_exception(error)
            raise error
        record = window.handle.record
        record.name(self._location, window.step)
        record.fallback = reason
        log.warning("%s is copied whole: %s", record.uri, reason)
        self._write_as(window, None)

    def _write_as(self, window: _Window, collected: dict[str, Any] | None) -> None:
        self._window, handle = None, window.handle
        try:
            future = self._write(handle.record, window.state, collected, is_asked=window.is_asked)
        except BaseException as error:
            handle.set_exception(error)
            raise

        def follow(done: Future[None]) -> None:
            error = done.exception()
            handle.set_exception(error) if error is not None else handle.set_result(None)

        future.add_done_callback(follow)


def _by_place(states: Iterable[Mapping[str, Mapping[str, torch.Tensor]]]) -> dict[tuple[int, str, str], torch.Tensor]:
    return {
        (number, key, name): tensor
        for number, state in enumerate(states)
        for key, named in state.items()
        for name, tensor in named.items()
    }


def _outcome(window: _Window) -> str:
    work: list[Future[Any]] = [*window.copies, *window.rest]
    failed = [error for one in work if one.done() and (error := one.exception()) is not None]
    if window.failure or failed:
        return window.failure or str(failed[0])
    return DONE if all(one.done() for one in work) else PENDING
