"""From the tensors of a real checkpoint or a live job to a model and its state: what they hold, by component.

Names are all there is to go by: the last part of an optimizer tensor's name says which moment it is, everything else
that is floating point counts as a weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .model_size import EXPERT_MARK, Model
from .training_state import State, measured_state

OTHER = "other"

_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
_MASTERS = frozenset({"master", "master_param", "master_weight", "fp32_param"})


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as it is saved: its name, elements and bytes over all ranks."""

    name: str
    count: int
    size_bytes: int
    is_floating: bool = True


def component_of(tensor: Tensor) -> str:
    """``weights``, ``master``, the name of a moment, or ``other``: what a tensor is, by its name."""
    last = tensor.name.rpartition(".")[2]
    if last in _MOMENTS:
        return last
    if last in _MASTERS:
        return "master"
    top = tensor.name.partition(".")[0]
    is_state = top.startswith("optim") or ".state." in tensor.name
    return OTHER if is_state or not tensor.is_floating else "weights"


def take_stock(tensors: Iterable[Tensor], name: str = "") -> tuple[Model, State]:
    """Count what there is. Experts are the weights below ``.experts.``.

    Raises:
        ConfigError: no tensor that looks like a weight.
    """
    size_bytes: dict[str, float] = {}
    parameters = expert_parameters = 0
    for tensor in tensors:
        component = component_of(tensor)
        size_bytes[component] = size_bytes.get(component, 0.0) + tensor.size_bytes
        if component == "weights":
            parameters += tensor.count
            expert_parameters += tensor.count if EXPERT_MARK in tensor.name else 0
    state = measured_state(size_bytes, parameters)
    return Model(parameters, expert_parameters, name=name), state
