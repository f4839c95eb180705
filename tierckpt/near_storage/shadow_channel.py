"""The steps of a shadow, which training waits for only while the process works.

A thread of the trainer's sends steps and questions, and begins a process again that has ended: the thread that trains
meets neither the socket nor a start. It waits for a process that is ``STEPS_AHEAD`` behind and works, since one that is
slower than training never catches up by itself. One that does nothing for ``PATIENCE_SECONDS`` (it is stopped, its disk
hangs), and one that is just being begun, are not waited for: gradients go to the backlog. When that is full the shadow
is given up, until somebody begins it anew.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..arena.memory import Memory
from ..errors import CapacityError, CheckpointError, IntegrityError, UpdaterLostError
from ..ipc.agent_breaker import PATIENCE_SECONDS
from ..replay.link import halves_without_loss
from ..telemetry import logger
from .state_file import Tensors
from .states import END_SECONDS, begin_state, directory_lock
from .step_channel import Sent, StepChannel
from .updater_process import LOOK_SECONDS, Idleness

log = logger("replay")

STEPS_AHEAD = 2
"""Steps that a shadow may be behind before training waits for it."""
BACKLOG_BYTES = 1 << 30
"""Gradients that are kept for a process that does nothing, where the state itself is no larger. It takes no memory
before it is used."""
STARTS_MAX = 3
"""A process that ends so often without a step between is not begun again."""


@dataclass(slots=True, eq=False)
class Question:
    """What the process was asked when it had made ``step`` and no more."""

    step: int
    message: Mapping[str, Any]
    answer: Future[dict[str, Any]] = field(default_factory=Future)
    process: int = 0
    """As of ``Sent``."""


class ShadowChannel(StepChannel):
    """``copy`` and ``end`` are the trainer's; whatever may wait is done by a thread, in order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.failure = ""
        """Why the shadow was given up."""
        self._changed = self.process.changed
        self._waiting: list[Sent] = []
        self._copied: Sent | None = None
        self._questions: list[Question] = []
        """Those without an answer, in order."""
        self._calls: deque[Callable[[], None]] = deque()
        self._stalled_at = self._tried_at = -1
        self._tries = 0
        self._is_beginning = self._is_busy = self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="tierckpt-shadow", daemon=True)
        self._thread.start()

    def _allocated(self, size_bytes: int, numa_nodes: tuple[int, ...]) -> list[Memory]:
        memories = [Memory.allocate(STEPS_AHEAD * size_bytes, shared=True, numa_nodes=numa_nodes)]
        try:
            memories.append(Memory.reserve(max(BACKLOG_BYTES, self._layout.size_bytes)))
        except CapacityError as error:
            log.warning("a shadow that stops working is given up at once: %s", error)
        return memories

    # --- the thread that trains -------------------------------------------------------------------------------------

    @torch.no_grad()
    def copy(self, step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Copy the gradients of a step: in half the memory, where that loses no bit.

        Raises:
            CheckpointError: the shadow is given up, now or before.
        """
        sent = self._begun(step)
        shared = self._slots.tensors(sent.slot)
        for block in self._layout.blocks:
            keys, narrow = [key for key in block.keys if key in gradients], []
            for key in keys:
                halves = halves_without_loss(gradients[key])
                if halves is not None:
                    narrow.append(key)
                    shared[key].view(-1).view(torch.int16)[: halves.numel()].copy_(halves)
                else:
                    shared[key].copy_(gradients[key])
                self.moved_bytes += gradients[key].nbytes if halves is None else halves.nbytes
            if keys:
                sent.gradients.append((keys, narrow))

    def end(self, head: bytes, *, is_skipped: bool) -> None:
        """The step whose gradients were copied is made: have it sent."""
        with self._changed:
            assert self._copied is not None
            sent, self._copied = self._copied, None
            sent.head = head
            if is_skipped:
                sent.gradients.clear()
            self._waiting.append(sent)
            self._do(partial(self._send_new, sent))

    def ask(self, message: Mapping[str, Any], step: int) -> Future[dict[str, Any]]:
        question = Question(step, message)
        with self._changed:
            self._do(partial(self._ask_new, question))
            self._questions.append(question)
        return question.answer

    def begin(self, values: Tensors, step: int) -> None:
        """Have another state begun, and the process over it. Nobody changes ``values``. Steps go on behind it.

        Raises:
            CheckpointError: the one before is not begun yet.
        """
        with self._changed:
            if self._is_beginning:
                raise CheckpointError(
                    f"the shadow in {self.process.order['directory']} has not begun again since the last time",
                    hint="Look for a disk that hangs; save whole checkpoints (mode='async') meanwhile",
                )
            self._is_beginning = True
            self._abandon(CheckpointError("the shadow was begun anew", hint="Save again"))
            self.failure = ""
            self.process.kill()  # what the thread waits for has ended, then
            self._do(partial(self._begin, values, step))

    def settle(self) -> None:
        with self._changed:
            is_sent = not self.failure and self._changed.wait_for(self._is_sent, END_SECONDS)
            if not is_sent:
                self._abandon(CheckpointError("the shadow was given up", hint="Save again"))
                self.process.kill()
                self._changed.wait_for(lambda: not self._is_busy, END_SECONDS)
            self._waiting.clear()
            self.failure = ""
        if not is_sent:
            self.process.stop()

    def close(self) -> None:
        with self._changed:
            is_made = self._changed.wait_for(lambda: self._is_made() or self.failure, END_SECONDS)
            self._is_closed = True
            self._changed.notify_all()
        if self.failure or not is_made:
            self.process.kill()
        if threading.current_thread() is not self._thread:  # it may be the one that collects garbage
            self._thread.join(END_SECONDS)
        super().close()

    def _is_sent(self) -> bool:
        return not (self._calls or self._is_busy or self._has_lost())

    def _is_made(self) -> bool:
        """A process may end, and that be heard later, with steps that it was sent."""
        self._drop_made()
        return self._is_sent() and not self._waiting

    def _has_lost(self) -> bool:
        return bool(self._waiting or self._questions) and not self.process.is_alive

    def _begun(self, step: int) -> Sent:
        """Return the step, with a slot that is free. Waits for one that will be."""
        with self._changed:
            idle = Idleness(self.process)
            while self._is_worth_waiting():
                if idle.seconds() >= PATIENCE_SECONDS:
                    self._stalled_at = self.process.step
                    log.warning("the shadow is behind at step %d: %s; training goes on", step, idle.reason())
                    break
                self._changed.wait(min(LOOK_SECONDS, PATIENCE_SECONDS - idle.seconds()))
            used = {one.slot for one in self._waiting}
            free = next((slot for slot in range(self._slots.count) if slot not in used), None)
            if free is None and not self.failure:
                self._note_failure(f"it has made no step behind {self._waiting[0].step - 1}: {idle.reason()}")
            if free is None or self.failure:
                raise CheckpointError(self.failure, hint="The next save begins it again")
            self._copied = Sent(step, free)
            return self._copied

    @property
    def is_behind(self) -> bool:
        """Whether it would be waited for in vain, or for long."""
        with self._changed:
            self._drop_made()
            return len(self._waiting) > STEPS_AHEAD or not self.process.is_alive

    def _is_worth_waiting(self) -> bool:
        self._drop_made()
        return (
            len(self._waiting) >= STEPS_AHEAD
            and not self.failure
            and self.process.is_alive
            and self._stalled_at < self.process.step
        )

    def _drop_made(self) -> None:
        had = self._uses_backlog()
        self._waiting = [one for one in self._waiting if one.step > self.process.step]
        if had and not self._uses_backlog():
            self._memories[-1].discard()

    def _uses_backlog(self) -> bool:
        used = [*self._waiting, *([self._copied] if self._copied is not None else [])]
        return any(one.slot >= self._slots.first_of_second for one in used)

    def _note_failure(self, reason: str) -> None:
        self.failure = reason
        log.warning("the shadow is given up until the next checkpoint, and training goes on without: %s", reason)

    # --- the thread that sends --------------------------------------------------------------------------------------

    def _do(self, call: Callable[[], None]) -> None:
        if self._is_closed:
            raise CheckpointError("the optimizer near storage is closed", hint="Build it again, and call resume()")
        self._calls.append(call)
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._calls or self._is_closed or self._has_lost())
                if self._is_closed:
                    # What the process was asked it answers before it ends.
                    asked = [one for one in self._questions if self.process.is_alive and one.process > 0]
                    self._abandon(CheckpointError("the optimizer near storage is closed", hint=""), but=asked)
                    return
                self._is_busy = True
                call = self._calls.popleft() if self._calls else self._revive
            try:
                call()
            except UpdaterLostError:  # its steps and questions are sent again, to the next
                pass
            except Exception as error:
                with self._changed:
                    self._note_failure(str(error) or repr(error))
                    self._abandon(error)

    def _abandon(self, error: Exception, but: Sequence[Question] = ()) -> None:
        questions, self._questions = [one for one in self._questions if one not in but], list(but)
        self._calls.clear()
        self._waiting.clear()
        for one in questions:
            one.answer.set_exception(error)

    def _begin(self, values: Tensors, step: int) -> None:
        try:
            self.process.stop()
            directory = Path(self.process.order["directory"])
            with directory_lock(directory, os.getpid()):
                begin_state(directory, self._layout, values, step)
            self._stalled_at = self._tried_at = -1
            self.process.start()
        finally:
            self._is_beginning = False

    def _revive(self) -> None:
        """Begin a process again that has ended, with the steps that it was sent."""
        if self.process.is_alive:
            return
        with self._changed:
            self._tries = self._tries + 1 if self.process.step <= self._tried_at else 1
            self._tried_at = max(self._tried_at, self.process.step)
        if self._tries > STARTS_MAX:
            raise CheckpointError(f"its process has ended {STARTS_MAX} times at one step", hint="")
        self.process.start()
        with self._changed:
            self._drop_made()
            again = [one for one in self._waiting if one.process]
            oldest = min((one.step for one in self._waiting), default=self.process.step + 1)
        if oldest > self.process.step + 1:
            raise IntegrityError(
                f"the shadow is at step {self.process.step}, and the gradients behind it are gone", hint=""
            )
        for one in again:
            self._ask_up_to(one.step - 1)
            self._send(one)
        self._ask_up_to(max((one.step for one in again), default=self.process.step))

    def _send_new(self, sent: Sent) -> None:
        sent.process = -1  # whoever begins the process again sends it, too
        self._revive()
        with self._changed:  # one that was abandoned has no slot any more: ``begin`` ends the process that it may go to
            is_wanted = any(one is sent for one in self._waiting) and sent.step > self.process.step
        if is_wanted and sent.process != self.process.starts:
            self._send(sent)

    def _ask_new(self, question: Question) -> None:
        question.process = -1  # whoever begins the process again asks it, too
        self._revive()
        if question.process != self.process.starts:
            self._ask(question)

    def _ask_up_to(self, step: int) -> None:
        """Ask a new process what the one before was asked when it had made ``step``, or fewer."""
        for one in [one for one in self._questions if one.process not in (0, self.process.starts) and one.step <= step]:
            if one.step < self.process.step:  # that state is no more
                self._answer(one, None, self.process.lost())
            else:
                self._ask(one)

    def _ask(self, question: Question) -> None:
        question.process = self.process.starts

        def settle(done: Future[dict[str, Any]]) -> None:
            error = done.exception()
            if not isinstance(error, UpdaterLostError) or self._is_closed:  # else the thread asks the next process
                self._answer(question, None if error else done.result(), error)

        self.process.ask(question.message).add_done_callback(settle)

    def _answer(self, question: Question, answer: dict[str, Any] | None, error: BaseException | None) -> None:
        with self._changed:
            if question not in self._questions:  # it was abandoned
                return
            self._questions.remove(question)
        if answer is not None:
            question.answer.set_result(answer)
        else:
            question.answer.set_exception(error)
