"""Tensor subclasses with fewer bytes than their shape and dtype imply, like quantized weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing


class Packed(torch.Tensor):
    """Values in int8 that look like float32, with a note that is no tensor."""

    values: torch.Tensor
    note: str

    @staticmethod
    def __new__(cls, values: torch.Tensor, shape: tuple[int, ...], note: str = "") -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, values: torch.Tensor, shape: tuple[int, ...], note: str = "") -> None:
        self.values, self.note = values, note

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values"], (tuple(self.shape), self.note)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Packed:
        return cls(inner["values"], *context)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Packed{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("detach", "alias"):
            made = cls(args[0].values, tuple(args[0].shape), args[0].note)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        if name == "copy_":
            args[0].values.copy_(args[1].values)
            return args[0]
        if name == "is_pinned":
            return False
        raise NotImplementedError(name)


torch.serialization.add_safe_globals([Packed])


def packed(fill: int) -> Packed:
    """256 times 256 float32 in 16 KiB."""
    return Packed(torch.full((1 << 14,), fill, dtype=torch.int8), (256, 256), "a note")


def packed_twice(fill: int) -> Packed:
    return Packed(packed(fill), (512, 256), "outer")


def large(fill: int) -> Packed:
    """16 MiB that a plan would cut between ranks, in 256 KiB."""
    return Packed(torch.full((1 << 18,), fill, dtype=torch.int8), (1 << 12, 1 << 10))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """What is stored of it."""
    while isinstance(tensor, Packed):
        tensor = tensor.values
    return tensor
