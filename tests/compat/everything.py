"""A state dict with every kind of value that DCP can save, blank ones to load into, and a comparison of bits.

Imports torch alone: stock_reader.py uses it in a process where tierckpt cannot be imported.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch

_FLOATS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
_OTHERS = "complex128 complex64 complex32 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
DTYPES = tuple(getattr(torch, name) for name in f"{_FLOATS} {_OTHERS}".split() if hasattr(torch, name))


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of arbitrary bits: NaNs with payloads, subnormals and negative zeros must survive too."""
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    count = int(torch.tensor(shape).prod()) if shape else 1
    raw = torch.randint(0, 256, (count * torch.empty((), dtype=dtype).element_size(),), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def everything(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    base = torch.randn(40, 30)
    return {
        "dtypes": {str(dtype): random_bits(dtype, 7, 5) for dtype in DTYPES},
        "scalars": {str(dtype): random_bits(dtype) for dtype in DTYPES},
        "empty": {"flat": torch.empty(0), "rows": torch.empty(0, 3), "columns": torch.empty(3, 0, dtype=torch.int8)},
        "strided": {
            "transposed": base.t(),
            "every_third": base[::3, 1::2],
            "expanded": torch.arange(4.0).expand(6, 4),
            "offset": base[11:17],
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "conjugate": torch.randn(6, 2, dtype=torch.complex64).conj(),
            "negative": torch.randn(6, 2, dtype=torch.complex64).conj().imag,
        },
        "views_of_one_storage": [base[:2], base[2:4]],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "big": torch.randn(600, 1100),
        "objects": {
            "none": None,
            "text": "ü",
            "number": 1.5,
            "list": [1, (2, 3), {"four": 4}],
            "bytes": b"\0\1",
            "ordered": OrderedDict(b=1, a=[{"deep": {"er": {1, 2}}}]),
            "stream": io.BytesIO(b"a stream"),
        },
    }


def blank(value: Any) -> Any:
    """The same structure with contiguous tensors of zero bits and no objects, for ``dcp.load`` to fill."""
    if isinstance(value, torch.Tensor):
        fresh = torch.empty(value.shape, dtype=value.dtype)
        if fresh.numel():
            _bytes(fresh).zero_()
        return fresh
    if isinstance(value, OrderedDict):
        return OrderedDict((key, blank(item)) for key, item in value.items())
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return None


def differences(got: Any, expected: Any, name: str = "") -> list[str]:
    """Names of the leaves that are not the same bits, dtype and shape."""
    if isinstance(expected, torch.Tensor):
        same = isinstance(got, torch.Tensor) and got.dtype == expected.dtype and got.shape == expected.shape
        return [] if same and (not got.numel() or torch.equal(_bytes(got), _bytes(expected))) else [name]
    if isinstance(expected, dict):
        if not isinstance(got, dict) or list(got) != list(expected):
            return [name]
        return [wrong for key in expected for wrong in differences(got[key], expected[key], f"{name}/{key}")]
    if isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            return [name]
        return [w for i, item in enumerate(expected) for w in differences(got[i], item, f"{name}/{i}")]
    if isinstance(expected, io.BytesIO):
        return [] if isinstance(got, io.BytesIO) and got.getvalue() == expected.getvalue() else [name]
    return [] if type(got) is type(expected) and got == expected else [name]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)
