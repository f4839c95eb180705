"""``check_same``: equal in type and in value, all the way down, where ``==`` says less or more."""

from __future__ import annotations

import collections
import dataclasses
import io
from typing import Any

import numpy as np
import torch


def check_same(left: Any, right: Any, where: str = "$") -> None:
    assert type(left) is type(right), (where, left, right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape, left.requires_grad) == (right.dtype, right.shape, right.requires_grad), where
        assert torch.equal(left.cpu(), right.cpu()), where
    elif isinstance(left, torch.Generator):
        assert torch.equal(left.get_state(), right.get_state()), where
    elif isinstance(left, dict):
        _check_dict(left, right, where)
    elif isinstance(left, list | tuple | collections.deque):
        assert len(left) == len(right), where
        assert getattr(left, "maxlen", None) == getattr(right, "maxlen", None), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            check_same(*pair, f"{where}[{index}]")
    elif isinstance(left, set | frozenset):
        assert left == right and sorted(map(_typed, left)) == sorted(map(_typed, right)), where
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape, left.flags.f_contiguous) == (right.dtype, right.shape, right.flags.f_contiguous)
        if left.dtype == object:
            check_same(left.tolist(), right.tolist(), where)
        else:
            assert left.tobytes() == right.tobytes(), where
    elif isinstance(left, io.BytesIO):
        assert (left.getvalue(), left.tell()) == (right.getvalue(), right.tell()), where
    elif dataclasses.is_dataclass(left) and not hasattr(left, "__dict__"):
        for field in dataclasses.fields(left):
            check_same(getattr(left, field.name), getattr(right, field.name), f"{where}.{field.name}")
    elif type(left) is int:
        assert left == right, where
    elif isinstance(left, float):
        assert left.hex() == right.hex(), (where, left, right)
    elif hasattr(left, "__dict__") and type(left).__eq__ is not object.__eq__ and type(left).__hash__ is None:
        check_same(vars(left), vars(right), where)
    else:
        assert repr(left) == repr(right), (where, left, right)


def _check_dict(left: dict[Any, Any], right: dict[Any, Any], where: str) -> None:
    assert list(map(_typed, left)) == list(map(_typed, right)), where
    assert getattr(left, "default_factory", None) is getattr(right, "default_factory", None), where
    for (key, one), other in zip(left.items(), right.values(), strict=True):
        check_same(one, other, f"{where}.{_typed(key)[1][:60]}")


def _typed(key: Any) -> tuple[str, str]:
    if type(key) is int:
        return "int", format(key, "x")
    return type(key).__name__, repr(sorted(map(repr, key)) if isinstance(key, frozenset) else key)
