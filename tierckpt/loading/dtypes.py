"""The dtypes of safetensors and their torch dtypes."""

from __future__ import annotations

import torch

from ..errors import StateMismatchError
from .header import Entry

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def of_entry(entry: Entry) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape that torch has for a tensor of a file.

    Raises:
        StateMismatchError: torch has no such tensor.
    """
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None or (dtype is torch.float4_e2m1fn_x2 and (not entry.shape or entry.shape[-1] % 2)):
        raise StateMismatchError(
            f"torch has no tensor of {entry.dtype} and shape {entry.shape}",
            hint="Leave it out with names=",
            tensor=entry.name,
        )
    if dtype is torch.float4_e2m1fn_x2:  # two numbers in each element
        return dtype, (*entry.shape[:-1], entry.shape[-1] // 2)
    return dtype, entry.shape


def name_of(dtype: torch.dtype) -> str | None:
    """Return what safetensors calls ``dtype``; None when it cannot hold it."""
    return _NAMES.get(dtype)


def shape_in_file(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    if dtype is torch.float4_e2m1fn_x2 and shape:
        return (*shape[:-1], shape[-1] * 2)
    return shape
