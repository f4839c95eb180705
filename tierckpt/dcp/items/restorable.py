"""Warns at save of objects that a restore will refuse.

A warning and no error: whoever reads their own checkpoints with ``trust_pickle=True`` gets them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...errors import UnsafeCheckpointError
from ...telemetry import logger
from ..sealed import Objects

log = logger("save")

_DATA = frozenset({type(None), bool, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})
_INTEGER_BITS_MAX = 8 * 255 - 1
"""``torch.load(weights_only=True)`` reads no wider ones, so that they come back from plain values only."""

_warned: set[tuple[str, type]] = set()


def warn_of_refusal(name: str, value: Any, data: bytes | memoryview) -> None:
    """Log a warning when ``data``, what ``torch.save`` made of ``value``, holds more than data. Once for each name and
    type. Nothing is tried of plain values."""
    odd = next(_more_than_data(value), None)
    if odd is None or (name, type(odd)) in _warned:
        return
    _warned.add((name, type(odd)))
    try:
        Objects().inert(bytes(data), name)
    except UnsafeCheckpointError as error:
        log.warning("%s is saved, but a restore will refuse it: %s", name, error)
    except Exception as error:
        log.debug("%s cannot be tried: %s", name, error)


def _more_than_data(value: Any) -> Iterator[Any]:
    kind = type(value)
    if kind is int:
        if value.bit_length() > _INTEGER_BITS_MAX:
            yield value
    elif isinstance(value, Mapping):
        yield from () if kind is dict else (value,)
        for pair in value.items():
            for item in pair:
                yield from _more_than_data(item)
    elif kind in (list, tuple, set):
        for item in value:
            if type(item) not in _DATA:
                yield from _more_than_data(item)
    elif kind not in _DATA and not isinstance(value, torch.Tensor):
        yield value
