"""Safetensors files made by hand, so that they can be wrong, and misaligned, in any way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

Fields = dict[str, Any]


def raw(*sizes: int) -> bytes:
    """Bytes that are never twice the same, in that many pieces."""
    return bytes(index % 251 for index in range(sum(sizes)))


def encode(fields: Fields | list[Any] | bytes, data: bytes, *, align: int = 1) -> bytes:
    """A file of these header fields and data. ``align``: pad the header so that the data begins at a multiple of it."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    text = text.ljust(-(-(8 + len(text)) // align) * align - 8)
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype: str, shape: list[int], start: int, stop: int) -> Fields:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def bytes_of(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
