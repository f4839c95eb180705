"""A value's part of a checkpoint; of a module, its ``state_dict`` with names that omit DDP and ``torch.compile``."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ... import torch_internals
from ...replay.optimizers import local_shard
from ...telemetry import logger
from .rank_state import PerRank, rank_key
from .reconstruction import Decoder, NewTensors, empty_like
from .stored import STRUCTURE, Path, Stored, nested

CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"
EXTRA_STATE = "_extra_state"
"""The last key part of ``get_extra_state``'s result."""
VERSIONS: Path = ()
"""The path of ``_metadata`` of a state dict."""


class ModuleKeys:
    def __init__(self, module: torch.nn.Module) -> None:
        self._wrapped = [(prefix, child) for prefix, one in _submodules(module) if (child := _child_of_wrapper(one))]

    @property
    def differ(self) -> bool:
        return bool(self._wrapped)

    def saved(self, key: str) -> str:
        for prefix, child in reversed(self._wrapped):
            if key.startswith(f"{prefix}{child}."):
                key = prefix + key[len(prefix) + len(child) + 1 :]
        return key

    def live(self, key: str) -> str:
        for prefix, child in self._wrapped:
            if key.startswith(prefix):
                key = f"{prefix}{child}.{key[len(prefix) :]}"
        return key


def parameters_by_name(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    pending = [("", module)]
    while pending:
        prefix, one = pending.pop()
        for key, parameter in one._parameters.items():
            if parameter is not None:
                yield prefix + key, parameter
        inner = _child_of_wrapper(one)
        for key, child in reversed(one._modules.items()):
            if child is not None:
                pending.append((prefix if key in (inner, CHECKPOINT_WRAPPED) else f"{prefix}{key}.", child))


def _child_of_wrapper(module: torch.nn.Module) -> str:
    if isinstance(module, DistributedDataParallel):
        return "module"
    return "_orig_mod" if torch_internals.is_compiled(module) else ""


def _submodules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    pending = [("", module)]
    while pending:
        prefix, one = pending.pop()
        yield prefix, one
        pending += [(f"{prefix}{key}.", child) for key, child in reversed(one._modules.items()) if child is not None]


def is_flat(module: torch.nn.Module) -> bool:
    """True for FSDP1, as only DCP can name its parameters."""
    return any(isinstance(one, FullyShardedDataParallel) for _, one in _submodules(module))


def state_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    if is_flat(module):
        return dict(get_model_state_dict(module)), {}
    names, found = ModuleKeys(module), module.state_dict()
    saved = {names.saved(key): value for key, value in found.items()} if names.differ else dict(found)
    versions = getattr(found, "_metadata", None) or {}
    versions_of = {names.saved(f"{path}.")[:-1]: dict(one) for path, one in versions.items() if one != {"version": 1}}
    return saved, versions_of


class ModuleTarget:
    """The module's part of a checkpoint, and how it is loaded.

    Attributes:
        missing: keys that only the module has.
        unexpected: keys that only the checkpoint has.
        problems: values that ``load_state_dict`` would reject.
        is_plain: loading only copies tensors and cannot fail.
    """

    def __init__(self, module: torch.nn.Module, stored: Stored, name: str, text: Any) -> None:
        self._module, self._name = module, name
        self._is_flat = is_flat(module)
        self._names = ModuleKeys(module)
        self._live = state_of(module)[0]
        self._decoder = Decoder(text, stored.metadata, self._live_values)
        below = stored.below(name)
        replaced = {str(path[0]) for path in self._decoded() if path}
        self._below = {path: key for path, key in below.items() if str(path[0]) not in replaced}
        self._items = {path: stored.items[key] for path, key in self._below.items()}
        own = torch_internals.submodules_that_load_themselves(module)
        self.is_plain = not own and not self._is_flat
        self._compare(tuple(f"{self._names.saved(path)}." if path else "" for path in own))

    def _live_values(self) -> dict[Any, Any]:
        return {**self._live, **{(key,): one for key, one in self._live.items()}}

    def _decoded(self) -> dict[Path, Any]:
        value = self._decoder.value
        if not isinstance(value, Mapping):
            return {}
        if not self._decoder.has_paths:
            versions = getattr(value, "_metadata", None)
            return {(key,): one for key, one in value.items()} | ({VERSIONS: dict(versions)} if versions else {})
        return dict(value)

    def destinations(self) -> dict[str, Any]:
        new = NewTensors()
        made = {key: self._destination(path, self._items[path], new) for path, key in self._below.items()}
        return made | self._decoder.tensors

    def _destination(self, path: Path, found: Any, new: NewTensors) -> Any:
        if not isinstance(found, TensorStorageMetadata):
            return ""
        live = self._live.get(str(path[0])) if len(path) == 1 else None
        is_alike = isinstance(live, torch.Tensor) and _sizes(live) == tuple(found.size)
        return live if is_alike and self._is_flat else new.like(found, live if is_alike else None)

    def _compare(self, loose: tuple[str, ...]) -> None:
        """Compare keys and shapes. Submodules with a prefix in ``loose`` have their own rules."""
        decoded = {str(path[0]): value for path, value in self._decoded().items() if path}
        found = {str(path[0]): one for path, one in self._items.items()} | decoded
        self.missing = [key for key in self._live if key not in found and not key.startswith(loose)]
        self.unexpected = [key for key in found.keys() - self._live.keys() if not key.startswith(loose)]
        self.problems = []
        for key, live in self._live.items():
            if not isinstance(live, torch.Tensor) or key.endswith(EXTRA_STATE):
                self.is_plain = False
            elif key in found and not key.startswith(loose):
                self.problems += _problem(f"{self._name}.{key}" if self._name else key, live, found[key])
        foreign = set(self.unexpected)
        self._below = {path: key for path, key in self._below.items() if str(path[0]) not in foreign}
        self.is_meta = any(isinstance(one, torch.Tensor) and one.is_meta for one in self._live.values())
        if self.is_meta:
            self._compare_meta()

    def _compare_meta(self) -> None:
        tensors = [*self._module.named_parameters(), *self._module.named_buffers()]
        pending = [key for key, one in tensors if one.is_meta and self._names.saved(key) not in self._live]
        made = [key for key, one in tensors if not one.is_meta]
        if pending or made:
            what = f"the checkpoint has no {pending[0]}" if pending else f"{made[0]} is not"
            self.problems.append(f"{self._name} is on the meta device, but {what}")

    @property
    def replaces_parameters(self) -> bool:
        """True if the module gets new parameters, which its optimizer does not step."""
        return self.is_meta and not torch.__future__.get_swap_module_params_on_conversion()

    def load(self, loaded: Mapping[str, Any], *, strict: bool) -> None:
        self._decoder.finish()
        values = nested({path: loaded[key] for path, key in self._below.items()})
        own = self._decoded()
        versions = own.pop(VERSIONS, None)
        values |= {path[0]: value for path, value in own.items()}
        foreign = set(self.unexpected)
        values = {key: value for key, value in values.items() if key not in foreign}
        if self._is_flat:
            set_model_state_dict(self._module, values, options=StateDictOptions(strict=strict))
        elif self.is_plain and not self.is_meta:
            _copy([(self._live[key], value) for key, value in values.items()])
        else:
            state: Any = OrderedDict((self._names.live(key), value) for key, value in values.items())
            if self._decoder.has_text:
                state._metadata = self._all_versions(versions or {})
            self._module.load_state_dict(
                state, **({} if strict else {"strict": False}), **({"assign": True} if self.is_meta else {})
            )

    def _all_versions(self, versions: Mapping[str, Any]) -> dict[str, Any]:
        """Return all versions: those equal to 1 are not saved."""
        paths = [path for path, _ in self._module.named_modules()]
        return {path: dict(versions.get(self._names.saved(f"{path}.")[:-1], {"version": 1})) for path in paths}


def _problem(name: str, live: torch.Tensor, found: Any) -> list[str]:
    if torch.nn.parameter.is_lazy(live):
        return []
    if isinstance(found, TensorStorageMetadata | torch.Tensor):
        sizes = tuple(found.size if isinstance(found, TensorStorageMetadata) else found.shape)
        live_sizes = _sizes(live)
        # load_state_dict accepts one element for a number, as saved before torch 0.4.
        same = sizes == live_sizes or (sizes, live_sizes) == ((1,), ())
        return [] if same else [f"{name} is {live_sizes} here and {sizes} in the checkpoint"]
    return [f"{name} is a tensor here and an object in the checkpoint"]


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if torch.nn.parameter.is_lazy(tensor) else tuple(tensor.size())


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})


@torch.no_grad()
def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first. Tied tensors one by one, as a batched call on a GPU has no order."""
    plain = []
    owners = Counter(local_shard(to).data_ptr() for to, _ in pairs if type(to) in _PLAIN)
    for to, source in pairs:
        shard = local_shard(to)
        is_lazy_view = shard.is_conj() or shard.is_neg()  # torch cannot copy to these in a batched call
        is_like = type(to) in _PLAIN and type(source) is type(to) and to.shape == source.shape
        if is_like and not is_lazy_view and owners[shard.data_ptr()] == 1:
            plain.append((to, source))
        else:
            to.copy_(source[0] if to.ndim == 0 and source.ndim == 1 else source)
    if plain:
        torch_internals.foreach_copy(*(list(map(local_shard, side)) for side in zip(*plain, strict=True)))


log = logger("state")


class ValueTarget:
    """A value of a state, by name.

    Tensors with the same position, shape and dtype are filled in place: ``restore({"model": model.state_dict()})``
    works.
    """

    def __init__(self, state: dict[str, Any], stored: Stored, name: str, text: Any) -> None:
        self._state, self._name, self._value = state, name, state[name]
        self.is_plain = not isinstance(self._value, Stateful)
        self.unexpected: list[str] = []
        self.problems: list[str] = []
        self._below: dict[Path, str] = {}
        self._items = stored.items
        self._decoder = Decoder(text, stored.metadata, self._live)
        if self._decoder.has_paths:
            own = stored.below(name)
            if isinstance(self._value, PerRank):
                own = {path: key for path, key in own.items() if path and path[0] == rank_key()}
            self._below = own
        is_of_other_ranks = isinstance(self._value, PerRank) and (
            bool(stored.below(name)) or any(path[1:] == (name,) for path in stored.below(STRUCTURE))
        )
        self.missing = [] if self._below or self._decoder.has_text or is_of_other_ranks else [name]
        if self.is_plain:
            self._compare()
        is_optimizers = isinstance(self._value, dict) and self._value.keys() >= {"state", "param_groups"}
        if is_optimizers and self._decoder.has_text and self._decoder.has_paths:
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
        found = self._sizes() if self._decoder.has_paths else self._decoder.value
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
        found: dict[str, Any] = dict(self._decoder.tensors)
        for key in self._below.values():
            one = self._items[key]
            found[key] = empty_like(one, None) if isinstance(one, TensorStorageMetadata) else ""
        return found

    def load(self, loaded: Mapping[str, Any], *, strict: bool) -> None:
        if self.missing and not self._below and not self._decoder.has_text:
            return
        self._decoder.finish()
        found = self._decoder.value
        if self._decoder.has_paths:
            leaves = {path: loaded[key] for path, key in self._below.items()}
            odd = {path: one for path, one in found.items() if path}
            found = leaves[()] if () in leaves else nested(leaves | odd)
        if self.is_plain:
            self._state[self._name] = fill(self._value, found)
        else:
            self._value.load_state_dict({} if isinstance(self._value, PerRank) and not found else found)


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
