"""The way of a step to the process: gradients through shared memory, in order, and again to a new process (N4)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from ..arena.memory import Memory
from ..errors import IntegrityError, UpdaterLostError
from ..replay.link import halves_without_loss
from ..replay.optimizers import local
from .blocks import Layout, Member, shared_places, view_of
from .updater_process import UpdaterProcess

SHADOW_AHEAD = 2
"""Steps that a shadow may be behind before training waits for it."""
STALL_SECONDS = 10.0
"""A shadow that is behind for so long is given up, and training goes on without."""


@dataclass(slots=True)
class _Sent:
    """A step that the process has not made yet, by what it said."""

    step: int
    memory: int = 0
    head: bytes = b""
    """'' while its gradients are being copied."""
    gradients: list[tuple[list[str], list[str]]] = field(default_factory=list)
    """By block: whose gradients are in shared memory, and which of them in half of it."""
    process: int = 0
    """Which process it was sent to, by its number."""


class StepChannel:
    """Shared memory for the gradients of one step (offload) or two, and the steps in it.

    Args:
        tensors: the trainer's parameters by key.
        order: what the process is to do; ``UpdaterProcess``.
    """

    def __init__(
        self,
        members: Sequence[Member],
        layout: Layout,
        tensors: Mapping[str, torch.Tensor],
        order: Mapping[str, Any],
        *,
        numa_nodes: tuple[int, ...],
        timeout_seconds: float,
    ) -> None:
        self.moved_bytes = 0
        self._layout, self._tensors = layout, tensors
        self._waiting: list[_Sent] = []
        offsets, size_bytes = shared_places(members)
        count = 1 if order["mode"] == "offload" else SHADOW_AHEAD
        memories = [Memory.allocate(max(1, size_bytes), shared=True, numa_nodes=numa_nodes) for _ in range(count)]
        self._shared = [
            {one.key: view_of(memory.view, offsets[one.key], one) for one in members} for memory in memories
        ]
        descriptors = tuple(cast(int, memory.fd) for memory in memories)
        told = {
            "members": [[one.key, one.name, one.shape, one.dtype] for one in members],
            "memories": [[memory.fd, str(memory.kind)] for memory in memories],
        }
        self.process = UpdaterProcess({**order, **told}, descriptors, timeout_seconds)
        self.close = weakref.finalize(self, _close, os.getpid(), self.process, self._shared, memories)

    def forget(self) -> None:
        """The trainer is at the process's step again: nothing is on its way."""
        self._waiting.clear()

    @property
    def is_interrupted(self) -> bool:
        """A step of offload was begun and not made."""
        return bool(self._waiting)

    def check_step(self, step: int) -> None:
        """Raise IntegrityError unless the process is at ``step``."""
        if self.process.step != step:
            raise IntegrityError(
                f"the optimizer's state in {self.process.order['directory']} is of step {self.process.step}, and "
                f"training is at {step}",
                hint="Its log of gradients is damaged. Call resume() and go on there, or restore a checkpoint",
            )

    # --- offload ----------------------------------------------------------------------------------------------------

    def make(self, step: int, head: bytes) -> None:
        """Have the process make a step, and take its parameters. One that was interrupted is made as it was begun."""
        if not self._waiting:
            self._waiting.append(_Sent(step, head=head))
        sent, process = self._waiting[0], self.process
        for attempt in (0, 1):
            try:
                if not process.is_alive:
                    process.start()
                if process.step < step:
                    self.check_step(step - 1)
                    self._send_copying(sent)
                    process.await_step(step)
                else:  # it had the gradients when it ended
                    process.call({"op": "settle"})
                break
            except UpdaterLostError:
                if attempt:
                    raise
            except BaseException:  # it may have a part of the step: its files have nothing of it, or all
                process.stop()
                raise
        self.take_parameters()
        self._waiting.clear()

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Copy the parameters, which the process has put into shared memory, into the trainer's."""
        for key, tensor in self._tensors.items():
            local(tensor.detach()).copy_(self._shared[0][key])
            self.moved_bytes += self._shared[0][key].nbytes

    @torch.no_grad()
    def _send_copying(self, sent: _Sent) -> None:
        """A block is stepped while the gradients of the next are copied. What is copied stays (N4)."""
        if sent.process:
            self._send(sent)
            return
        sent.gradients.clear()
        self.process.send({"op": "begin_step"}, sent.head)
        for block in self._layout.blocks:
            found = {key: local(one) for key in block.keys if (one := self._tensors[key].grad) is not None}
            for key, gradient in found.items():
                self._shared[0][key].copy_(gradient)
                self.moved_bytes += gradient.nbytes
            if found:
                sent.gradients.append((list(found), []))
                self.process.send({"op": "take", "keys": list(found), "narrow": [], "memory": 0})
        sent.process = self.process.starts
        self.process.send({"op": "end_step"})

    # --- shadow -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def copy(self, step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Copy the gradients of a step: in half the memory, where that loses no bit. Waits until there is room."""
        self.follow(step - SHADOW_AHEAD)
        sent = _Sent(step, step % SHADOW_AHEAD)
        shared = self._shared[sent.memory]
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
        self._waiting.append(sent)

    def end(self, head: bytes, *, is_skipped: bool) -> None:
        """The step whose gradients were copied is made: send it."""
        sent = self._waiting[-1]
        sent.head = head
        if is_skipped:
            sent.gradients.clear()
        self.follow(0)

    def follow(self, step: int) -> None:
        """Send what was not sent, and return when the process has made ``step``. One that has ended is begun again."""
        for attempt in (0, 1):
            try:
                if not self.process.is_alive:
                    self.process.start()
                for one in self._waiting:
                    if one.head and one.process != self.process.starts and one.step > self.process.step:
                        one.process = self.process.starts
                        self._send(one)
                self.process.await_step(step, STALL_SECONDS)
                break
            except UpdaterLostError:
                if attempt:
                    raise
        self._waiting = [one for one in self._waiting if one.step > self.process.step]

    def _send(self, sent: _Sent) -> None:
        self.process.send({"op": "begin_step"}, sent.head)
        for keys, narrow in sent.gradients:
            self.process.send({"op": "take", "keys": keys, "narrow": narrow, "memory": sent.memory})
        self.process.send({"op": "end_step"})


def _close(owner: int, process: UpdaterProcess, shared: list[dict[str, torch.Tensor]], memories: list[Memory]) -> None:
    if os.getpid() != owner:
        return  # a forked child ends, and nothing here is its
    process.close()
    process.is_closed = True
    shared.clear()
    for memory in memories:
        memory.close()
