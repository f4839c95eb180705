"""Sends steps to the updater through shared memory, also to a new process (N4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from ..arena.memory import Memory
from ..errors import IntegrityError, UpdaterLostError
from ..replay.optimizers import local_shard
from .state_file import BlockLayout, TrainerParameter, shared_bytes, shared_tensors
from .updater_process import UpdaterProcess


@dataclass(slots=True)
class Sent:
    step: int
    head: bytes
    gradients: list[list[str]] = field(default_factory=list)
    is_whole: bool = False


class StepChannel:
    def __init__(
        self,
        members: Sequence[TrainerParameter],
        layout: BlockLayout,
        tensors: Mapping[str, torch.Tensor],
        order: Mapping[str, Any],
        *,
        numa_nodes: tuple[int, ...],
        timeout_seconds: float,
    ) -> None:
        self.moved_bytes = 0
        self._layout, self._tensors = layout, tensors
        self._memory = Memory.allocate(shared_bytes(members), shared=True, numa_nodes=numa_nodes)
        self._shared = shared_tensors(members, self._memory.view)
        descriptor = cast(int, self._memory.fd)
        shared_order = {
            "members": [[one.key, one.name, one.shape, one.dtype] for one in members],
            "memory": [descriptor, str(self._memory.kind)],
        }
        self.process = UpdaterProcess({**order, **shared_order}, (descriptor,), timeout_seconds)
        self._begun: Sent | None = None

    def close(self) -> None:
        self.process.close()
        self.process.is_closed = True
        self._shared = {}
        self._memory.close()

    @property
    def is_interrupted(self) -> bool:
        return self._begun is not None

    def forget(self) -> None:
        self._begun = None

    def check_step(self, step: int) -> None:
        if self.process.step != step:
            raise IntegrityError(
                f"the optimizer's state in {self.process.order['directory']} is of step {self.process.step}, but "
                f"training is at step {step}",
                hint="The gradient log is damaged. Call resume() to continue at that step, or restore a checkpoint",
            )

    def ask(self, message: Mapping[str, Any], step: int) -> Future[dict[str, Any]]:
        if not self.process.is_alive:
            self.process.start()
            self.check_step(step)
        return self.process.ask(message)

    def make(self, step: int, head: bytes) -> set[str]:
        """Make a step and take its parameters. Returns keys with a gradient. Repeats an interrupted step unchanged."""
        sent = self._begun = self._begun or Sent(step, head)
        process = self.process
        for attempt in (0, 1):
            try:
                if not process.is_alive:
                    process.start()
                if process.step < step:
                    self.check_step(step - 1)
                    self._send(sent)
                    process.await_step(step)
                else:  # all gradients were in the file
                    process.call({"op": "settle"})
                break
            except UpdaterLostError:
                if attempt:
                    raise
            except BaseException:  # its files have all of the step, or nothing
                process.stop()
                raise
        self.take_parameters()
        self._begun = None
        return {key for keys in sent.gradients for key in keys}

    def others(self) -> list[str]:
        bits = {key: local_shard(one.detach()).view(torch.int16) for key, one in self._tensors.items()}
        return [key for key, one in self._shared.items() if not torch.equal(one.view(torch.int16), bits[key])]

    @torch.no_grad()
    def take_parameters(self) -> None:
        for key, found in self._shared.items():
            local_shard(self._tensors[key].detach()).copy_(found)
            self.moved_bytes += found.nbytes

    def _send(self, sent: Sent) -> None:
        self.process.send({"op": "begin_step"}, sent.head)
        for keys in sent.gradients if sent.is_whole else self._copied(sent):
            self.process.send({"op": "take", "keys": keys})
        self.process.send({"op": "end_step"})

    @torch.no_grad()
    def _copied(self, sent: Sent) -> Iterator[list[str]]:
        """Yield blocks as they are copied: each is stepped during the next copy. Copies stay (N4)."""
        sent.gradients.clear()
        for block in self._layout.blocks:
            found = {key: local_shard(one) for key in block.keys if (one := self._tensors[key].grad) is not None}
            for key, gradient in found.items():
                self._shared[key].copy_(gradient)
                self.moved_bytes += gradient.nbytes
            if found:
                sent.gradients.append(list(found))
                yield sent.gradients[-1]
        sent.is_whole = True
