"""A value's part of a checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from ...telemetry import logger
from .rank_state import PerRank, rank_key
from .reconstruction import Decoder, empty_like
from .stored import STRUCTURE, Path, Stored, nested

log = logger("state")


class ValueTarget:
    """A value of a state, by name.

    Tensors with the same position, shape and dtype are filled in place: ``restore({"model": model.state_dict()})``
    works.
    """

    def __init__(self, state: dict[str, Any], stored: Stored, name: str, text: Any = None) -> None:
        self._state, self._name, self._value = state, name, state[name]
        self.is_plain = not isinstance(self._value, Stateful)
        self.unexpected: list[str] = []
        self.problems: list[str] = []
        self._below: dict[Path, str] = {}
        self._items = stored.items
        self._decoder: Decoder | None = None
        if text is not None:
            self._decoder = Decoder(text, stored.metadata, self._live)
        if self._decoder is None or self._decoder.has_paths:
            own = stored.below(name)
            if isinstance(self._value, PerRank):
                own = {path: key for path, key in own.items() if path and path[0] == rank_key()}
            self._below = own
        is_of_other_ranks = isinstance(self._value, PerRank) and _is_of_other_ranks(stored, name)
        self.missing = [] if self._below or text is not None or is_of_other_ranks else [name]
        if self.is_plain:
            self._compare()
        is_optimizers = isinstance(self._value, dict) and self._value.keys() >= {"state", "param_groups"}
        if is_optimizers and self._decoder is not None and self._decoder.has_paths:
            self.problems.append(
                f"{name} is the state dict of an optimizer, which the checkpoint has by parameter names: "
                f'pass the optimizer itself, {{"{name}": optimizer}}, next to its module'
            )

    def _live(self) -> Any:
        if self.is_plain:
            return self._value
        try:
            return self._value.state_dict()
        except Exception as error:
            log.debug("%s has no placement for its tensors: %s", self._name, error)
            return None

    def _compare(self) -> None:
        """Check a state dict: a tensor that replaces another one would not reach the module."""
        if not (isinstance(self._value, OrderedDict) and hasattr(self._value, "_metadata")):
            return
        found = self._decoder.value if self._decoder is not None and not self._decoder.has_paths else self._sizes()
        if not isinstance(found, Mapping):
            self.problems.append(f"{self._name} is a module's state dict here, but another value in the checkpoint")
            return
        for key, live in self._value.items():
            if key not in found:
                self.missing.append(f"{self._name}.{key}")
            elif isinstance(live, torch.Tensor):
                other = getattr(found[key], "shape", None)
                if other != live.shape:
                    sizes = f"{tuple(live.shape)} here and {other and tuple(other)} in the checkpoint"
                    self.problems.append(f"{self._name}.{key} is {sizes}")
        self.unexpected += [f"{self._name}.{key}" for key in found if key not in self._value]

    def _sizes(self) -> dict[Any, Any]:
        return {path[0]: torch.empty(one.size, device="meta") if isinstance(one, TensorStorageMetadata) else None
                for path, key in self._below.items() for one in [self._items[key]] if path}  # fmt: skip

    def destinations(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self._decoder.tensors) if self._decoder is not None else {}
        for key in self._below.values():
            one = self._items[key]
            found[key] = empty_like(one, None) if isinstance(one, TensorStorageMetadata) else ""
        return found

    def load(self, loaded: Mapping[str, Any], *, strict: bool) -> None:
        if self.missing and not self._below and self._decoder is None:
            return
        if self._decoder is not None:
            self._decoder.finish()
        if self._decoder is not None and not self._decoder.has_paths:
            found = self._decoder.value
        else:
            leaves = {path: loaded[key] for path, key in self._below.items()}
            odd = {} if self._decoder is None else {path: one for path, one in self._decoder.value.items() if path}
            found = leaves[()] if () in leaves else nested(leaves | odd)
        if isinstance(self._value, PerRank) and not found:
            found = {}
        if not self.is_plain:
            self._value.load_state_dict(found)
        else:
            self._state[self._name] = fill(self._value, found)


def _is_of_other_ranks(stored: Stored, name: str) -> bool:
    return bool(stored.below(name)) or any(path[1:] == (name,) for path in stored.below(STRUCTURE))


@torch.no_grad()
def fill(live: Any, found: Any, visited_ids: set[int] | None = None) -> Any:
    visited_ids = set() if visited_ids is None else visited_ids
    if isinstance(found, torch.Tensor):
        if not (isinstance(live, torch.Tensor) and type(live) is type(found) and _can_hold(live, found)):
            return found
        if id(live) in visited_ids:
            return found
        visited_ids.add(id(live))
        live.detach().copy_(found)
        return live
    if isinstance(found, dict) and isinstance(live, Mapping):
        for key, value in found.items():
            if key in live:
                found[key] = fill(live[key], value, visited_ids)
    elif type(found) is not type(live):
        return found
    elif isinstance(found, list) and len(found) == len(live):
        found[:] = [fill(other, value, visited_ids) for other, value in zip(live, found, strict=True)]
    elif type(found) is tuple and len(found) == len(live):
        return tuple(fill(other, value, visited_ids) for other, value in zip(live, found, strict=True))
    return found


def _can_hold(live: torch.Tensor, found: torch.Tensor) -> bool:
    if live.is_meta or live.shape != found.shape or live.dtype != found.dtype or live.is_inference():
        return False
    if live.requires_grad != found.requires_grad:
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(live.shape, live.stride(), strict=True))
    return live.numel() == 0 or span == live.numel()
