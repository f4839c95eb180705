"""``torch.save`` that leaves nothing for a garbage collector, which a training loop may have switched off."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from io import BytesIO
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem


class _Pickler(pickle.Pickler):
    def __init__(self, stream: BinaryIO, protocol: int, persistent_id: Callable[[Any, Any], Any]) -> None:
        super().__init__(stream, protocol)
        self._persistent_id = persistent_id

    def persistent_id(self, value: Any) -> Any:
        return self._persistent_id(self, value)


class _Base:
    """An instance in place of the class that ``torch.save`` derives for each call: only a collector frees a class."""

    def __init__(self, _: str, __: tuple[Any, ...], namespace: dict[str, Any]) -> None:
        self._namespace = namespace

    def __call__(self, stream: BinaryIO, protocol: int) -> _Pickler:
        return _Pickler(stream, protocol, self._namespace["persistent_id"])


_module = SimpleNamespace(Pickler=_Base("", (), {}), __name__="pickle")


def save_object(value: Any, stream: BinaryIO) -> None:
    """Write the bytes of ``torch.save``."""
    torch.save(value, stream, pickle_module=_module)


Texts = dict[str, tuple[list[str], bytes]]


def resolve_object(planner: SavePlanner, item: WriteItem, known: Texts | None = None) -> BytesIO:
    """Serialise the planner's value of an item that is no tensor.

    ``known`` has lists of the previous save, such as the parameters' names: an equal list is not pickled again.
    """
    kind, stock = type(planner), DefaultSavePlanner
    if not all(getattr(kind, name) is getattr(stock, name, None) for name in ("resolve_data", "transform_object")):
        return cast(BytesIO, planner.resolve_data(item))
    value, name = cast(DefaultSavePlanner, planner).lookup_object(item.index), item.index.fqn
    is_texts = known is not None and type(value) is list and {str}.issuperset(map(type, value))
    if known is not None and is_texts and name in known and known[name][0] == value:
        return BytesIO(known[name][1])
    stream = BytesIO()
    save_object(value, stream)
    if known is not None and is_texts:
        known[name] = [*value], stream.getvalue()
    return stream
