"""Measures a live model for the sizer."""

from __future__ import annotations

import torch

from ..planning.training_state import Model, Tensor, TrainingState, take_stock


def measure(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> tuple[Model, TrainingState]:
    """Count the parameters of ``model``, and the bytes per parameter of it and ``optimizer``, however sharded.

    Raises ConfigError for a model without parameters.
    """
    tensors = [_tensor(name, parameter) for name, parameter in model.named_parameters()]
    if optimizer is not None:
        tensors += [
            _tensor(f"optimizer.state.{key}", value)
            for kept in optimizer.state.values()
            for key, value in kept.items()
            if isinstance(value, torch.Tensor)
        ]
    return take_stock(tensors, type(model).__name__)


def _tensor(name: str, tensor: torch.Tensor) -> Tensor:
    return Tensor(name, tensor.numel(), tensor.numel() * tensor.element_size(), tensor.is_floating_point())
