"""The entries of a checkpoint's training state."""

from __future__ import annotations

import io
import operator
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from ... import torch_internals
from ...dcp.plan_outline import CHUNK_TENSORS

STRUCTURE = "__tierckpt__"

Path = tuple[str | int, ...]
_EXACT = frozenset({type(None), bool, float, complex, bytes, torch.dtype, torch.device, io.BytesIO})


class Stored:
    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.items = metadata.state_dict_metadata
        self._entries: dict[str | int, dict[Path, str]] = {}
        paths = metadata.planner_data or {}
        # In the order of the saved state.
        for key in (*(key for key in paths if key in self.items), *(key for key in self.items if key not in paths)):
            first, *rest = paths.get(key, (key,))
            self._entries.setdefault(first, {})[tuple(rest)] = key

    @property
    def names(self) -> list[str]:
        return [str(name) for name in self._entries if name != STRUCTURE]

    def below(self, name: str) -> dict[Path, str]:
        """Return the items of the entry ``name`` by path, or of a prefix of a flat state dict."""
        if name in self._entries:
            return self._entries[name]
        return dict(self._search(f"{name}." if name else ""))

    def _search(self, prefix: str) -> Iterator[tuple[Path, str]]:
        paths: Mapping[str, Any] = self.metadata.planner_data or {}
        for key in self.items:
            if key.startswith(prefix) and not key.startswith(f"{STRUCTURE}."):
                path, rest = tuple(paths.get(key, (key,))), key[len(prefix) :]
                while len(path) > 1 and len(".".join(map(str, path))) > len(rest):
                    path = path[1:]
                yield (path if ".".join(map(str, path)) == rest else (rest,)), key


def nested(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
    root: dict[Any, Any] = {}
    for path, value in leaves.items():
        if len(path) == 1:
            root[path[0]] = value
        else:
            torch_internals.set_element(root, path, value)
    return root


def is_plain(value: Any) -> bool:
    if type(value) is torch.Tensor:
        return value.layout is torch.strided and not value.is_quantized
    if isinstance(value, torch.Tensor):
        if torch.nn.parameter.is_lazy(value):
            return False
        is_dense = isinstance(value, DTensor) or not hasattr(value, "__tensor_flatten__")
        return is_dense and value.layout is torch.strided
    return _is_exact(value)


def _is_exact(value: Any) -> bool:
    kind = type(value)
    if kind is tuple:
        return all(map(_is_exact, value))
    if kind is int:
        return int(value).bit_length() < 64
    return kind in _EXACT or (kind is str and value.isascii())


def not_plain(values: Mapping[Any, Any], path: Path = ()) -> list[tuple[Path, Any]]:
    if _are_plain_tensors(list(values.values())):
        return []
    return [((*path, key), value) for key, value in values.items() if not is_plain(value)]


def not_plain_below(values: Mapping[Any, Mapping[Any, Any]], path: Path) -> list[tuple[Path, Any]]:
    if _are_plain_tensors(list(chain.from_iterable(one.values() for one in values.values()))):
        return []
    return [found for key, inner in values.items() for found in not_plain(inner, (*path, key))]


def _are_plain_tensors(values: list[Any]) -> bool:
    """Check one attribute at a time over all tensors: ten times cheaper than a call per tensor."""
    if not {torch.Tensor}.issuperset(map(type, values)):
        return False
    layout, is_quantized = operator.attrgetter("layout"), operator.attrgetter("is_quantized")
    chunks = (values[start : start + CHUNK_TENSORS] for start in range(0, len(values), CHUNK_TENSORS))
    return all({torch.strided}.issuperset(map(layout, some)) and not any(map(is_quantized, some)) for some in chunks)
