"""Replays recorded steps with the ``torch.optim`` implementation of training.

Invariants:
    A1  A step is applied only to a state of the version before it.
    A2  A replay gives the same bits only with the same optimizer class and implementation (fused or not), and the same
        shape and strides of each parameter and gradient. Groups and the number of threads do not matter (R1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from ..errors import IntegrityError, StateMismatchError
from .capture import Step
from .optimizers import base_of, overwrites_gradients

Key = tuple[str, str]
"""Key of a parameter, and name of a tensor in its state; "" for the parameter itself."""
NARROW_DTYPES = (torch.bfloat16, torch.float16)


class Replay:
    """Applies steps to parameters of an optimizer and their state, in place, by key ("group.index").

    Example:
        >>> weight = torch.ones(4)
        >>> replay = Replay(torch.optim.SGD, {"0.0": weight}, {}, version=0)
        >>> replay.apply(Step(1, [{"lr": 0.5}], {"0.0": torch.ones(4)}))
        >>> weight
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        parameters: Mapping[str, torch.Tensor],
        state: Mapping[str, Mapping[str, Any]],
        version: int,
    ) -> None:
        self.kind = base_of(kind)  # a subclass may take other arguments
        self.version = version
        self.parameters = dict(parameters)
        self._state = {key: dict(state.get(key, {})) for key in parameters}
        self._optimizer: torch.optim.Optimizer | None = None
        self._group_numbers: list[int] = []

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        if self._optimizer is not None:
            return {key: dict(self._optimizer.state.get(tensor, {})) for key, tensor in self.parameters.items()}
        return self._state

    def tensors(self) -> dict[Key, torch.Tensor]:
        tensors: dict[Key, torch.Tensor] = {}
        for key, state in self.state.items():
            tensors[key, ""] = self.parameters[key]
            tensors |= {(key, name): one for name, one in state.items() if isinstance(one, torch.Tensor)}
        return tensors

    def values(self) -> dict[str, dict[str, Any]]:
        return {
            key: {name: one for name, one in state.items() if not isinstance(one, torch.Tensor)}
            for key, state in self.state.items()
        }

    def to_devices(self, device_of: Callable[[Key], torch.device]) -> Replay:
        parameters, state = dict[str, torch.Tensor](), {key: dict(one) for key, one in self.state.items()}
        for (key, name), tensor in self.tensors().items():
            device = device_of((key, name))
            (state[key] if name else parameters)[name or key] = tensor if tensor.device == device else tensor.to(device)
        return Replay(self.kind, parameters, state, self.version)

    def apply(self, step: Step) -> None:
        """Bring parameters and state to ``step.version``. Raises IntegrityError at another version than the one before
        (A1).

        Raises StateMismatchError if ``step`` lacks a group, or a gradient has another shape or dtype.
        """
        if step.version != self.version + 1:
            raise IntegrityError(
                f"step {step.version} of the log cannot follow version {self.version}",
                hint="A frame is missing, or frames are out of order. Restore the previous version",
            )
        self.version = step.version
        if step.is_skipped:
            return
        optimizer = self._get_optimizer(step.hyperparameters)
        for index, number in enumerate(self._group_numbers):
            optimizer.param_groups[index].update(step.hyperparameters[number])
        for key, tensor in self.parameters.items():
            tensor.grad = self._convert_gradient(key, step.gradients.get(key))
        if overwrites_gradients(optimizer):
            for tensor in self.parameters.values():
                tensor.grad = tensor.grad.clone() if tensor.grad is not None else None
        update: Any = type(optimizer).step
        (update.__wrapped__ if getattr(update, "hooked", False) else update)(optimizer)
        for tensor in self.parameters.values():
            tensor.grad = None

    def _convert_gradient(self, key: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        tensor = self.parameters[key]
        is_narrow = tensor.dtype is torch.float32 and gradient.dtype in NARROW_DTYPES
        if gradient.shape != tensor.shape or not (is_narrow or gradient.dtype == tensor.dtype):
            raise StateMismatchError(
                f"the gradient of parameter {key} is {gradient.dtype} {list(gradient.shape)}, but the parameter is "
                f"{tensor.dtype} {list(tensor.shape)}",
                hint="The log has another sharding or precision. Restore the newest whole checkpoint",
            )
        converted = gradient.to(tensor.device).to(tensor.dtype)
        return converted if converted.stride() == tensor.stride() else torch.empty_like(tensor).copy_(converted)

    def _get_optimizer(self, hyperparameters: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
        if self._optimizer is None:
            tensors_by_group: dict[int, list[torch.Tensor]] = {}
            for key, tensor in self.parameters.items():
                tensors_by_group.setdefault(int(key.partition(".")[0]), []).append(tensor)
            self._group_numbers = sorted(tensors_by_group)
            if self._group_numbers and self._group_numbers[-1] >= len(hyperparameters):
                raise StateMismatchError(
                    f"the log has {len(hyperparameters)} groups, but the state has parameters of group "
                    f"{self._group_numbers[-1]}",
                    hint="Restore the newest whole checkpoint",
                )
            groups = [{**hyperparameters[number], "params": tensors_by_group[number]} for number in self._group_numbers]
            self._optimizer = cast(Any, self.kind)(groups)
            for key, tensor in self.parameters.items():
                if self._state[key]:
                    self._optimizer.state[tensor] = self._state[key]
                elif self.kind is not torch.optim.Adagrad:  # its constructor makes the state
                    self._optimizer.state.pop(tensor, None)
            self._state.clear()
        return self._optimizer
