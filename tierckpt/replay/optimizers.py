"""Optimizers that can be replayed (``ELEMENTWISE``), and all that differs by their kind.

Invariant:
    R1  An optimizer is replayable if its step computes each element of a parameter and of its state only from that
        element, its gradient and the group's hyperparameters. Any subset can be stepped separately, with the same bits.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..errors import ConfigError

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
CLASS_BY_NAME = {one.__name__: one for one in ELEMENTWISE}


@dataclass(frozen=True, slots=True)
class Parameter:
    key: str
    """"group.index", both from 0."""
    tensor: torch.Tensor
    name: str


def may_overwrite_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``step`` may change gradients: SGD's does with Nesterov momentum, which a schedule may set."""
    return isinstance(optimizer, torch.optim.SGD)


def overwrites_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the next ``step`` changes gradients in place (foreach, torch 2.13)."""
    return any(group.get("nesterov") for group in optimizer.param_groups)


def optimizers_in(state: Mapping[str, Any]) -> dict[str, torch.optim.Optimizer]:
    return {name: one for name, one in state.items() if isinstance(one, torch.optim.Optimizer)}


def base_of(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    return next(optimizer_class for optimizer_class in kind.__mro__ if optimizer_class in ELEMENTWISE)


def check_replayable(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if ``optimizer`` cannot be replayed (R1)."""
    kind, reason = type(optimizer), ""
    if not issubclass(kind, ELEMENTWISE):
        reason = "it may not be elementwise"
    elif inspect.unwrap(kind.step) is not inspect.unwrap(base_of(kind).step):  # torch wraps the step of each class
        reason = f"it replaces the step of {base_of(kind).__name__}"
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        reason = "it is differentiable"
    if reason:
        raise ConfigError(
            f"steps of {kind.__name__} cannot be replayed: {reason}",
            hint=f'Use one of {", ".join(CLASS_BY_NAME)}, or save whole checkpoints (mode="async")',
        )
    for parameter in parameters_of(optimizer):
        if parameter.tensor.is_meta:
            raise ConfigError(
                f"parameter {parameter.name} is on the meta device and has no values",
                hint="Materialise the model (to_empty and initialisation, or a restore) before the first save",
            )


def parameters_of(optimizer: torch.optim.Optimizer) -> tuple[Parameter, ...]:
    groups = optimizer.param_groups
    tensors = [tensor for group in groups for tensor in group["params"]]
    sizes, cached_tensors, parameters = _parameters_cache.get(optimizer, ((), (), ()))
    if sizes == tuple(len(group["params"]) for group in groups) and all(map(operator.is_, cached_tensors, tensors)):
        return parameters
    new_parameters = []
    for number, group in enumerate(groups):
        names = group.get("param_names") or []
        for index, tensor in enumerate(group["params"]):
            name = names[index] if index < len(names) else f"{index} of group {number}"
            new_parameters.append(Parameter(f"{number}.{index}", tensor, name))
    _parameters_cache[optimizer] = tuple(len(group["params"]) for group in groups), tensors, tuple(new_parameters)
    return tuple(new_parameters)


_CacheEntry = tuple[Sequence[int], Sequence[torch.Tensor], tuple[Parameter, ...]]
_parameters_cache: WeakKeyDictionary[torch.optim.Optimizer, _CacheEntry] = WeakKeyDictionary()


def write_counters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return values that change with a write to a parameter or its state. Misses ``.data`` and fused steps."""
    tensors = [one.tensor for one in parameters_of(optimizer)]
    shards = [torch_internals.local_tensor_of(one) if isinstance(one, DTensor) else one for one in tensors]
    version_of = torch_internals.version_of
    counters: list[Any] = [*map(version_of, tensors), *map(version_of, shards), *map(torch.Tensor.data_ptr, shards)]
    states = optimizer.state.values()
    counters += map(id, state_values(optimizer))
    try:  # a model has thousands of states, read several times a step
        counters += map(version_of, itertools.chain.from_iterable(map(dict.values, states)))
    except (AttributeError, TypeError):
        counters += [getattr(one, "_version", one) for state in states for one in state.values()]
    return counters


def state_values(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Keep the list: the ``id`` of a freed object is reused."""
    return [value for state in optimizer.state.values() for value in state.values()]


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield this rank's shard of each parameter, then of its state by name."""
    for one in parameters_of(optimizer):
        yield from parameter_and_state(local_shard(one.tensor.detach()), optimizer.state.get(one.tensor) or {})


def parameter_and_state(parameter: torch.Tensor, state: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    yield parameter
    for name in sorted(state):
        if isinstance(state[name], torch.Tensor):
            yield local_shard(state[name].detach())


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of this rank's shard of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(value: Any, like: torch.Tensor) -> Any:
    if not (isinstance(value, torch.Tensor) and isinstance(like, DTensor)) or value.shape != local_shard(like).shape:
        return value
    mesh, shape, stride = like.device_mesh, like.shape, like.stride()
    return DTensor.from_local(value, mesh, like.placements, run_check=False, shape=shape, stride=stride)


def implementation_of(group: Mapping[str, Any]) -> str:
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    if foreach is None and group.get("fused") is None:
        _, foreach = torch_internals.default_to_fused_or_foreach(group["params"], differentiable=False, use_fused=False)
        if isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable"):
            foreach = False
    return "foreach" if foreach else "forloop"


def layout_digest(optimizer: torch.optim.Optimizer) -> str:
    shards = [(one.key, local_shard(one.tensor)) for one in parameters_of(optimizer)]
    described = [type(optimizer).__name__, *([key, str(shard.dtype), list(shard.shape)] for key, shard in shards)]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]
