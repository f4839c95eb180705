"""The outline of a state dict: the facts that determine DCP's plan of it, compared at each save."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.tensor import DTensor

from .. import torch_internals
from .bulk_objects import are_same
from .items import item_format

CHUNK_TENSORS = 256

LOCAL_PART = ("global_shape", "global_offsets", "local_offsets", "local_sizes")

_HAS_STRIDES = "strides" in {field.name for field in dataclasses.fields(TensorProperties)}

_OBJECTS = frozenset({int, float, bool, complex, str, bytes, tuple, type(None)})
"""Types that are leaves; others are traversed."""


@dataclass(frozen=True)
class _Branch:
    """A container that DCP flattens. ``keys`` is None for a list."""

    kind: object
    length: int
    keys: list[Any] | None
    key_types: list[type] | None
    branches: list[tuple[int, _Branch]]
    inner_keys: tuple[str, ...] | None = None
    """Keys of each value, if all are dicts of leaves with these keys: an optimizer's state."""


@dataclass(frozen=True, eq=False)
class Outline:
    """All that the plan of a state dict depends on. Holds no tensor."""

    root: _Branch
    tensors: list[int]
    objects: list[int]
    facts: list[list[Any]]
    is_plain: bool

    @classmethod
    def of(cls, state_dict: Mapping[str, Any], flat: Iterable[Any]) -> Outline | None:
        """Describe ``state_dict``; None for an unsupported object: then each save is planned.

        The leaves must be the same objects as in ``flat``, DCP's values.
        """
        root = _branch(state_dict)
        leaves: list[Any] = []
        if root is None or not _collect(state_dict, root, leaves) or not are_same(leaves, list(flat)):
            return None
        tensors = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        known = set(tensors)
        objects = [position for position in range(len(leaves)) if position not in known]
        if not all(map(_is_plannable, (leaves[position] for position in tensors))):
            return None
        if not all(map(_is_object, (leaves[position] for position in objects))):
            return None
        found = [leaves[position] for position in tensors]
        is_plain = all(item_format.is_plain(tensor) for tensor in found)
        return cls(root, tensors, objects, list(map(_tensor_facts, _chunks(found))), is_plain)

    def leaves_of(
        self, state_dict: Mapping[str, Any], *, with_addresses: bool = False
    ) -> tuple[list[Any], list[int] | None] | None:
        """Return the values of ``state_dict`` in the order of DCP's flattening; None if it differs.

        ``with_addresses`` also returns the tensors' addresses, if all are contiguous in host memory (or conjugated).
        """
        leaves: list[Any] = []
        if not _collect(state_dict, self.root, leaves):
            return None
        if not all(map(_is_object, (leaves[position] for position in self.objects))):
            return None
        addresses: list[int] | None = [] if with_addresses and self.is_plain else None
        for chunk, known in zip(_chunks([leaves[at] for at in self.tensors]), self.facts, strict=True):
            # Types first: the other facts exist only for supported kinds of tensors.
            if list(map(type, chunk)) != known[0] or _tensor_facts(chunk) != known:
                return None
            if addresses is not None and _are_contiguous_on_host(chunk):
                addresses += map(torch.Tensor.data_ptr, chunk)
            else:
                addresses = None
        return leaves, addresses


def _are_contiguous_on_host(tensors: list[torch.Tensor]) -> bool:
    """Negated tensors are refused; conjugation is not checked."""
    if not (all(map(_IS_CPU, tensors)) and all(map(torch.Tensor.is_contiguous, tensors))):
        return False
    return not any(map(torch.Tensor.is_neg, tensors))


_IS_CPU = operator.attrgetter("is_cpu")


def _branch(value: Any) -> _Branch | None:
    keys: list[Any] | None = None
    types: list[type] | None = None
    if isinstance(value, Mapping):
        keys, values = list(value), list(value.values())
        # 0 == False, and an Enum may equal its text, but DCP names them differently: only plain keys are compared.
        types = list(map(type, keys)) if {str, int}.issuperset(map(type, keys)) else None
    elif isinstance(value, list):
        values = value
    else:
        return None
    branches = [(position, branch) for position, item in enumerate(values) if (branch := _branch(item)) is not None]
    if keys is None and not branches and not any(isinstance(item, torch.Tensor) for item in values):
        return None
    return _Branch(type(value), len(values), keys, types, branches, _inner_keys(values, branches))


def _inner_keys(values: Sequence[Any], branches: Sequence[tuple[int, _Branch]]) -> tuple[str, ...] | None:
    if len(branches) < len(values) or {one.kind for _, one in branches} != {dict}:
        return None
    if any(one.branches or one.key_types is None for _, one in branches):
        return None
    keys, types = set(map(tuple, values)), {kind for _, one in branches for kind in one.key_types or ()}
    return next(iter(keys)) if len(keys) == 1 and types == {str} else None


def _collect(value: Any, branch: _Branch, leaves: list[Any]) -> bool:
    """Append the leaves in order. False, with some appended, if ``value`` differs from ``branch``."""
    if branch.kind is not type(value) or len(value) != branch.length:
        return False
    values = value
    if branch.keys is not None:
        keys = list(value)
        if list(map(type, keys)) != branch.key_types or keys != branch.keys:
            return False
        values = list(value.values())
    if branch.inner_keys is not None:
        if set(map(type, values)) != {dict} or set(map(tuple, values)) != {branch.inner_keys}:
            return False
        leaves += chain.from_iterable(map(dict.values, values))
        return set(map(type, chain.from_iterable(values))) == {str}
    start = 0
    for position, child in branch.branches:
        leaves += values[start:position]
        if not _collect(values[position], child, leaves):
            return False
        start = position + 1
    leaves += values[start:] if start else values
    return True


def _is_object(value: Any) -> bool:
    if type(value) in _OBJECTS:
        return True
    if type(value) is list and _OBJECTS.issuperset(map(type, value)):
        return True
    if isinstance(value, (torch.Tensor, Mapping)) or hasattr(value, "__create_write_items__"):
        return False
    return not isinstance(value, list) or _branch(value) is None


def _is_plannable(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, DTensor):
        local = torch_internals.local_tensor_of(tensor)
        return type(tensor) is DTensor and not hasattr(local, "__create_write_items__")
    plans_for_itself = hasattr(tensor, "local_shards") or hasattr(tensor, "__create_write_items__")
    return not plans_for_itself and not is_local_part(tensor)


def is_local_part(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a ``CheckpointableTensor`` (torch 2.15): parts of a global tensor."""
    return hasattr(tensor, LOCAL_PART[0]) and all(hasattr(tensor, name) for name in LOCAL_PART)


@cache
def _can_pin() -> bool:
    return torch.accelerator.is_available()


def _are_local_parts(tensors: list[torch.Tensor]) -> list[bool]:
    begun = list(map(hasattr, tensors, repeat(LOCAL_PART[0])))
    return list(map(is_local_part, tensors)) if any(begun) else begun


def _tensor_facts(tensors: list[torch.Tensor]) -> list[Any]:
    """Columns: one C pass each is far cheaper than a loop over tensors."""
    sharded = [tensor for tensor in tensors if type(tensor) is DTensor]
    local = [torch_internals.local_tensor_of(tensor) for tensor in sharded]
    plain = [tensor for tensor in tensors if type(tensor) is not DTensor] if sharded else tensors
    meshes = _attribute_of_each(sharded, "device_mesh")
    here = {id(mesh): mesh.get_coordinate() for mesh in meshes}
    return [
        list(map(type, tensors)),
        *_properties(plain),
        *_properties(local),
        list(map(type, local)),
        _attribute_of_each(sharded, "shape"),
        _attribute_of_each(sharded, "requires_grad"),
        _attribute_of_each(sharded, "placements"),
        meshes,
        list(here.values()),
        torch.is_grad_enabled() if sharded else None,  # decides whether a local tensor requires grad
    ]


def _properties(tensors: list[torch.Tensor]) -> list[list[Any] | None]:
    return [
        *(_attribute_of_each(tensors, name) for name in ("shape", "dtype", "layout", "requires_grad")),
        list(map(torch.Tensor.is_pinned, tensors)) if _can_pin() else None,
        list(map(torch.Tensor.stride, tensors)) if _HAS_STRIDES else None,
        _are_local_parts(tensors),
    ]


def _chunks(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Small chunks: facts are dropped before they trigger a garbage collection."""
    return (tensors[start : start + CHUNK_TENSORS] for start in range(0, len(tensors), CHUNK_TENSORS))


def _attribute_of_each(tensors: Iterable[torch.Tensor], name: str) -> list[Any]:
    return list(map(operator.attrgetter(name), tensors))
