"""The trainer's parameters of an optimizer near storage, and checks of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from ..errors import ConfigError
from ..replay.frame import dtype_name
from ..replay.optimizers import local_shard, parameters_of
from .blocks import TrainerParameter

LOW_PRECISION = (torch.bfloat16, torch.float16)


def build_optimizer(
    params: Any, kind: type[torch.optim.Optimizer] | None, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    if isinstance(params, torch.optim.Optimizer):
        raise ConfigError(
            "an existing optimizer keeps its state in the trainer",
            hint="Pass parameters and the optimizer class, or keep it and use EveryStep(gradient_log=True)",
        )
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"not an optimizer class: {kind!r}; pass a class of torch.optim after the parameters")
    made = cast(Any, kind)(params, **options)
    if made.state:  # Adagrad creates it at once: with one value, in the parameter's precision
        one = torch.zeros(1, device="cpu")
        initial_state = cast(Any, kind)([one], **options).state[one]
        for parameter in parameters_of(made):
            shape = local_shard(parameter.tensor).shape
            made.state[parameter.tensor] = {k: v.expand(shape) if v.ndim else v for k, v in initial_state.items()}
    return cast(torch.optim.Optimizer, made)


def check_parameter(member: TrainerParameter, tensor: torch.Tensor) -> None:
    if tensor.dtype not in LOW_PRECISION or hasattr(tensor, "main_grad"):
        raise ConfigError(
            f"parameter {member.name} is {member.dtype}, or has float32 gradients; the trainer's parameters and "
            "gradients must be 16-bit, as the float32 masters are in the updater process",
            hint="Use model.to(torch.bfloat16) without autocast and GradScaler (bfloat16 needs no scaling), or "
            "EveryStep(gradient_log=True), which keeps your optimizer and its precision",
        )


def check_gradients(optimizer: torch.optim.Optimizer) -> None:
    for one in parameters_of(optimizer):
        gradient = one.tensor.grad
        if gradient is not None and (gradient.dtype != one.tensor.dtype or gradient.layout is not torch.strided):
            raise ConfigError(
                f"the gradient of parameter {one.name} is {gradient.dtype} ({gradient.layout}), and the parameter "
                f"{one.tensor.dtype}",
                hint="Use dense gradients of the parameter's precision, and accumulate in that precision",
            )


def members_of(optimizer: torch.optim.Optimizer) -> list[TrainerParameter]:
    has_names = all(group.get("param_names") for group in optimizer.param_groups)
    return [
        TrainerParameter(
            one.key,
            one.name if has_names else str(number),
            tuple(local_shard(one.tensor).shape),
            dtype_name(one.tensor.dtype),
        )
        for number, one in enumerate(parameters_of(optimizer))
    ]
