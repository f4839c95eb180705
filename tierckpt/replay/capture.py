"""Records each step of an optimizer: gradients, hyperparameters, whether it was skipped.

Invariants:
    C1  Gradients are copied as the update reads them: when the step begins, after ``clip_grad_norm_`` and the closure;
        when it ends for a fused step under a GradScaler, which unscales them in place.
    C2  Hyperparameters are read before the step: a scheduler may change them between two steps.
    C3  Changed groups, ``load_state_dict``, a write to parameters or state outside the optimizer, or to gradients after
        their copy, end the recording.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import torch_internals
from ..errors import TierckptError
from ..telemetry import logger
from .optimizers import (
    check_replayable,
    implementation_of,
    local_shard,
    overwrites_gradients,
    parameters_of,
    state_values,
    write_counters_of,
)

log = logger("replay")


@dataclass(frozen=True, slots=True)
class Step:
    """All inputs of the replay of one step. Reading a gradient may wait for its copy."""

    version: int
    """Version of the state after this step: 1 more than before, even if it was skipped."""
    hyperparameters: Sequence[Mapping[str, Any]]
    gradients: Mapping[str, torch.Tensor]
    found_inf: torch.Tensor | None = None
    """Flag of the GradScaler for a fused step. Nonzero: the update is skipped."""

    @property
    def is_skipped(self) -> bool:
        """True if the step changed nothing. Waits for the device."""
        return self.found_inf is not None and bool(self.found_inf.item())


class Capture:
    """Records steps on the calling thread. Raises ConfigError if ``optimizer`` cannot be replayed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_replayable(optimizer)
        self.optimizer = optimizer
        self.version = 0
        self.steps: list[Step] = []
        self.failure = ""
        """Reason why the recording ended."""
        self.implementations = [implementation_of(group) for group in optimizer.param_groups]
        self._gradients: Mapping[str, torch.Tensor] | None = None
        self._has_copied = False
        self._copied_gradients: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        """Parameter, gradient, and version counter of the gradient at its copy."""
        self._group_ids, self._write_counters = _group_ids(optimizer), write_counters_of(optimizer)
        self._state_values = state_values(optimizer)
        self._parameter_ids = frozenset(itertools.chain.from_iterable(self._group_ids))
        self._hyperparameters: list[Mapping[str, Any]] = []
        self._found_inf: torch.Tensor | None = None
        updated = optimizer.register_step_post_hook(self._after_update)
        torch_internals.step_post_hooks_of(optimizer).move_to_end(updated.id, last=False)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            updated,
            optimizer.register_step_post_hook(self._after_step),
            register_optimizer_step_pre_hook(self._before_any_step),
            optimizer.register_load_state_dict_post_hook(lambda _: self.end("load_state_dict replaced its state")),
        ]

    def copy(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        """Copy this rank's gradients, or queue copies in stream order. None: the step is not recorded."""
        return {key: gradient.clone() for key, gradient in gradients.items()}

    def on_step_end(self) -> None:
        """Allow the caller to overwrite the gradients."""

    def before_other_optimizer(self) -> None: ...

    def take_steps(self) -> list[Step]:
        taken, self.steps = self.steps, []
        return taken

    def end(self, reason: str) -> None:
        if not self.failure:
            self.failure = reason
            log.info("steps of %s are no longer recorded: %s", type(self.optimizer).__name__, reason)

    def check(self) -> str:
        if self.failure:
            return self.failure
        if _group_ids(self.optimizer) != self._group_ids:
            self.end("its groups or parameters changed")
        elif write_counters_of(self.optimizer) != self._write_counters:
            self.end(
                "a parameter or its state was changed outside the optimizer, or a step bypassed its hooks (fused "
                "into backward, or by another optimizer)"
            )
        return self.failure

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.failure = self.failure or "closed"

    def _before_any_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """A fused step leaves the version counters of its parameters unchanged."""
        if optimizer is self.optimizer or self.failure:
            return
        if any(id(tensor) in self._parameter_ids for group in optimizer.param_groups for tensor in group["params"]):
            self.before_other_optimizer()
            name = type(optimizer).__name__
            self.end(f"another optimizer ({name}) stepped its parameters")

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._gradients, self._copied_gradients, self._has_copied = None, [], False
        if _is_compiled():
            self.end("its step is compiled, and rounds differently from torch.optim")
        if not self.check():
            groups = (hyperparameters_of(optimizer, group) for group in optimizer.param_groups)
            self._hyperparameters = [
                {**one, "foreach": chosen == "foreach"}
                if one.get("foreach") is None and one.get("fused") is None
                else one
                for one, chosen in zip(groups, self.implementations, strict=True)
            ]
            found = getattr(optimizer, "found_inf", None)  # GradScaler sets it for the call
            self._found_inf = found.detach().clone() if found is not None else None
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is not None:
                return args[:1], {**kwargs, "closure": self._copying_closure(closure)}
            if self._found_inf is None:
                self._copy_gradients()
        return None

    def _copying_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            loss = closure()
            self._copy_gradients()
            return loss

        return call

    def _copy_gradients(self) -> None:
        self._has_copied = True
        gradients: dict[str, torch.Tensor] = {}
        for parameter in parameters_of(self.optimizer):
            gradient = parameter.tensor.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided or gradient.dtype != parameter.tensor.dtype:
                self.end(f"the gradient of {parameter.name} is {gradient.dtype} ({gradient.layout})")
                return
            gradients[parameter.key] = local_shard(gradient.detach())
            self._copied_gradients.append((parameter.tensor, gradient, torch_internals.version_of(gradient)))
        try:
            self._gradients = self.copy(gradients)
        except (TierckptError, MemoryError, OSError) as error:  # training continues without a record
            self.end(str(error) or repr(error))

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        taken, self._copied_gradients = self._copied_gradients, []
        if self.failure:
            return
        self._write_counters, self._state_values = write_counters_of(optimizer), state_values(optimizer)
        if overwrites_gradients(optimizer):  # (C1)
            return
        for parameter, gradient, version in taken:
            if torch_internals.version_of(gradient) != version or parameter.grad is not gradient:
                self.end("a step hook changed gradients after they were recorded")
                return

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not (self._has_copied or self.failure):
            self._copy_gradients()
        self.version += 1
        gradients, self._gradients = self._gradients, None
        try:
            self.on_step_end()
        except (TierckptError, MemoryError, OSError) as error:
            self.end(str(error) or repr(error))
        if gradients is not None and not self.failure:
            self.steps.append(Step(self.version, self._hyperparameters, gradients, self._found_inf))


def _is_compiled() -> bool:
    get_callback = getattr(torch_internals.eval_frame, "get_eval_frame_callback", None)
    return get_callback is not None and bool(get_callback())


def hyperparameters_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy_value(group[name]) for name in optimizer.defaults if name in group}


def _copy_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return tuple(_copy_value(one) for one in value)
    return value


def _group_ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]
