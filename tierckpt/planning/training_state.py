"""The state of each parameter while training: components, their bytes, and which of them a checkpoint holds.

The default, mixed-precision Adam, is 14 bytes: weights 2, master 4, two moments of 4. Gradients (2 or 4 more) are in
memory and never in a checkpoint; the popular 16 and 18 bytes per parameter count them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ..errors import ConfigError

Kind: TypeAlias = Literal["weights", "optimizer", "gradients"]

DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
_BLOCK_SCALES = 4 / 256
"""8-bit states carry one fp32 scale for each block of 256."""

OPTIMIZERS: dict[str, dict[str, float]] = {
    "adam": {"exp_avg": 4.0, "exp_avg_sq": 4.0},
    "adamw": {"exp_avg": 4.0, "exp_avg_sq": 4.0},
    "amsgrad": {"exp_avg": 4.0, "exp_avg_sq": 4.0, "max_exp_avg_sq": 4.0},
    "adam8bit": {"exp_avg": 1 + _BLOCK_SCALES, "exp_avg_sq": 1 + _BLOCK_SCALES},
    "adafactor": {},
    "lion": {"exp_avg": 4.0},
    "muon": {"momentum_buffer": 4.0},
    "momentum": {"momentum_buffer": 4.0},
    "sgd": {},
}
"""Bytes per parameter that each optimizer adds. Adafactor's rows and columns vanish beside the parameters."""


@dataclass(frozen=True, slots=True)
class Component:
    """One value stored for each parameter. Gradients are the only one that is not saved."""

    name: str
    bytes_per_parameter: float
    kind: Kind

    @property
    def is_saved(self) -> bool:
        return self.kind != "gradients"

    def is_sharded(self, stage: int) -> bool:
        """True when the data-parallel ranks of sharding ``stage`` (ZeRO) hold a part of it each, not all."""
        return stage >= {"optimizer": 1, "gradients": 2, "weights": 3}[self.kind]


@dataclass(frozen=True, slots=True)
class State:
    """All components of one training job."""

    components: tuple[Component, ...]

    @property
    def weight_bytes(self) -> float:
        """Bytes per parameter of a model file: the weights alone."""
        return sum(part.bytes_per_parameter for part in self.components if part.kind == "weights")

    @property
    def saved(self) -> tuple[Component, ...]:
        return tuple(part for part in self.components if part.is_saved)

    @property
    def saved_bytes(self) -> float:
        """Bytes per parameter of a checkpoint."""
        return sum(part.bytes_per_parameter for part in self.saved)


def state_of(
    optimizer: str = "adam", weights: str = "bf16", *, master: bool | None = None, gradients: str | None = None
) -> State:
    """What training with ``optimizer`` keeps for a parameter.

    Args:
        optimizer: a key of ``OPTIMIZERS``.
        weights: dtype of the weights that the model computes with.
        master: a second copy of the weights in fp32. None: where the weights are smaller than that.
        gradients: their dtype; None: the weights' dtype.

    Raises:
        ConfigError: an unknown optimizer or dtype; says what is known.
    """
    moments = OPTIMIZERS.get(optimizer.lower())
    if moments is None:
        raise ConfigError(f"optimizer is {optimizer!r}: known are {', '.join(OPTIMIZERS)}")
    size = _dtype_bytes(weights, "weights dtype")
    parts = [Component("weights", size, "weights")]
    if (size < 4) if master is None else master:
        parts.append(Component("master", 4.0, "optimizer"))
    parts += [Component(name, value, "optimizer") for name, value in moments.items()]
    parts.append(Component("gradients", _dtype_bytes(gradients or weights, "gradients dtype"), "gradients"))
    return State(tuple(parts))


def measured_state(component_bytes: Mapping[str, float], parameters: int) -> State:
    """What a checkpoint that exists really holds: bytes by component, ``weights`` among them.

    Raises:
        ConfigError: no weights.
    """
    if not component_bytes.get("weights"):
        raise ConfigError(
            "the checkpoint holds no tensor that looks like a weight, so its parameters cannot be counted",
            hint="Size it by number: --params 70b --optimizer adam",
        )
    parts = [
        Component(name, size_bytes / parameters, "weights" if name == "weights" else "optimizer")
        for name, size_bytes in component_bytes.items()
    ]
    weights = next(part for part in parts if part.name == "weights")
    return State((*parts, replace(weights, name="gradients", kind="gradients")))


def _dtype_bytes(name: str, what: str) -> float:
    if name not in DTYPE_BYTES:
        raise ConfigError(f"{what} is {name!r}: known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]
