"""An optimizer's part of a checkpoint: its ``state_dict`` by parameter name.

    state.NAME.KEY            the state of a parameter
    param_groups.N.params     the names of a group's parameters
    param_groups.N.OPTION     the options of a group

A parameter of no module is ``param.GROUP.INDEX``. With several modules, names begin with the name of the module.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ... import torch_internals
from ...near_storage.optimizer import NearStorageOptimizer
from .reconstruction import Decoder, NewTensors, has_device
from .stored import STRUCTURE, Path, Stored, is_plain, nested, not_plain, not_plain_below
from .values import is_flat, parameters_by_name

UNNAMED = "param."
STATE, GROUPS, PARAMS = "state", "param_groups", "params"


class ParameterNames:
    def __init__(self, state: Mapping[str, Any]) -> None:
        self.modules = {name: one for name, one in state.items() if isinstance(one, torch.nn.Module)}
        self._flat = [entry for entry, one in self.modules.items() if is_flat(one)]
        self._first_names: dict[str, dict[int, str]] = {}
        self._other_names: dict[tuple[str, int], list[str]] = {}
        for entry, module in self.modules.items():
            found = self._first_names.setdefault(entry, {})
            for name, parameter in parameters_by_name(module):
                if found.setdefault(id(parameter), name) is not name:
                    self._other_names.setdefault((entry, id(parameter)), []).append(name)

    def flat_owner(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
        """Return the module of FSDP1, as only DCP can name its parameters."""
        ids = {id(one) for one in parameters_of(optimizer)} if self._flat else set()
        return next((self.modules[entry] for entry in self._flat if ids & self._first_names[entry].keys()), None)

    def of(self, optimizer: torch.optim.Optimizer) -> list[list[list[str]]]:
        """Return the possible names of each parameter of each group. A save uses the first."""
        saved, owner = self.saved(optimizer), self._owner(optimizer)
        return [
            [[first, *(one for one in self._of(parameter, owner) if one != first)]
             for parameter, first in zip(group[PARAMS], names, strict=True)]
            for group, names in zip(optimizer.param_groups, saved, strict=True)
        ]  # fmt: skip

    def saved(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        owner = self._owner(optimizer)
        found = self._first_names.get(owner)
        if found is None:
            found = {}
            for entry, names in reversed(self._first_names.items()):
                found |= {key: f"{entry}.{name}" for key, name in names.items()}
        lists: list[list[Any]] = [list(map(found.get, map(id, group[PARAMS]))) for group in optimizer.param_groups]
        if all(None not in names for names in lists):
            return lists
        used_names = {*self._first_names.get(owner, {}).values()}
        used_names |= {name for (entry, _), some in self._other_names.items() if entry == owner for name in some}
        return [
            [name or _name_by_position(number, index, used_names) for index, name in enumerate(names)]
            for number, names in enumerate(lists)
        ]

    def _owner(self, optimizer: torch.optim.Optimizer) -> str:
        ids = {id(one) for one in parameters_of(optimizer)}
        known = {entry: ids & names.keys() for entry, names in self._first_names.items()}
        every = set().union(*known.values())
        return next((entry for entry, some in known.items() if some and some == every), "")

    def _of(self, parameter: torch.Tensor, owner: str) -> list[str]:
        key = id(parameter)
        found = [
            (entry, name)
            for entry, names in self._first_names.items() if key in names
            for name in (names[key], *self._other_names.get((entry, key), ()))
        ]  # fmt: skip
        bare = [name for _, name in sorted(found, key=lambda one: one[0] != owner)]
        full = [f"{entry}.{name}" for entry, name in found]
        return bare + full if owner else full + bare

    def are_on_all_ranks(self, optimizer: torch.optim.Optimizer) -> bool:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return True
        size = dist.get_world_size()
        replicated = {
            id(one) for module in self.modules.values() for part in module.modules()
            if isinstance(part, DistributedDataParallel) for one in part.parameters()
        }  # fmt: skip
        return all(
            one.device_mesh.size() == size if isinstance(one, DTensor) else id(one) in replicated
            for one in parameters_of(optimizer)
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group[PARAMS]]


def _name_by_position(group: int, index: int, used_names: set[str]) -> str:
    name = f"{UNNAMED}{group}.{index}"
    while name in used_names:
        name += "_"
    return name


def _holder(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


Saved: TypeAlias = tuple[dict[str, Any], str, list[tuple[Path, Any]]]
"""The tree; this rank's parameter names as JSON, if other ranks may have others; values that DCP would not restore
exactly."""


def state_of(optimizer: torch.optim.Optimizer, names: ParameterNames) -> Saved | None:
    if (owner := names.flat_owner(optimizer)) is not None:
        tree = _flat_state(owner, optimizer)
        return tree, "", _unsupported_values(tree)
    holder = _holder(optimizer)
    with optimizer.mapped() if isinstance(optimizer, NearStorageOptimizer) else contextlib.nullcontext():
        saved = holder.state_dict()
    if not _is_of_torch(saved, holder):
        return None
    lists, parameters = names.saved(optimizer), parameters_of(optimizer)
    numbers = list(chain.from_iterable(lists))
    if holder is not optimizer:
        called = dict(zip(map(id, parameters), numbers, strict=True))
        numbers = [called[id(one)] for one in parameters_of(holder)]
    groups = saved[GROUPS] if holder is optimizer else optimizer.param_groups
    tree = {
        **saved,
        STATE: {numbers[key] if type(key) is int else key: value for key, value in saved[STATE].items()},
        GROUPS: [{**group, PARAMS: found} for group, found in zip(groups, lists, strict=True)],
    }
    if not tree[STATE]:
        del tree[STATE]
    inexact = _unsupported_values(tree)
    inexact += [((STATE, name, key), one) for name, inner in saved[STATE].items() if type(name) is str
            for key, one in (inner.items() if isinstance(inner, dict) else ())
            if isinstance(one, torch.Tensor) and is_plain(one) and has_device(one.device.type)]  # fmt: skip
    every = zip(chain.from_iterable(lists), parameters, strict=True)
    if shapes := {name: one.shape for name, one in every if isinstance(one, DTensor)}:
        inexact += [((STATE, name, key), one) for name, parameter_state in tree.get(STATE, {}).items()
                for key, one in parameter_state.items()
                if isinstance(one, DTensor) and one.shape != shapes.get(name) and is_plain(one)]  # fmt: skip
    for name in {path[1] for path, _ in inexact if path[0] == STATE}:
        tree[STATE][name] = dict(tree[STATE][name])  # odd values are removed from it
    return tree, "" if names.are_on_all_ranks(optimizer) else json.dumps(lists), inexact


def _is_of_torch(saved: Any, optimizer: torch.optim.Optimizer) -> bool:
    groups, state = (saved.get(GROUPS), saved.get(STATE)) if isinstance(saved, dict) else (None, None)
    if not (isinstance(groups, list) and isinstance(state, dict) and len(groups) == len(optimizer.param_groups)):
        return False
    if not {int, str}.issuperset(map(type, state)):
        return False
    numbers = [key for key in state if type(key) is int]
    return not numbers or (
        min(numbers) >= 0 and max(numbers) < sum(len(group[PARAMS]) for group in optimizer.param_groups)
    )


def _flat_state(owner: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state by DCP, without its fake step for an optimizer without state."""
    if optimizer.state:
        return dict(get_optimizer_state_dict(owner, optimizer))
    try:
        optimizer.state.update((one, {}) for one in parameters_of(optimizer))
        saved = dict(get_optimizer_state_dict(owner, optimizer))
    finally:
        optimizer.state.clear()
    saved.pop(STATE, None)
    return saved


def _unsupported_values(tree: Mapping[str, Any]) -> list[tuple[Path, Any]]:
    found = not_plain({key: one for key, one in tree.items() if key not in (STATE, GROUPS)})
    found += not_plain_below(tree.get(STATE, {}), (STATE,))
    for number, group in enumerate(tree.get(GROUPS, ())):
        found += not_plain({key: one for key, one in group.items() if key != PARAMS}, (GROUPS, number))
    return found


def lists_of(name: str, stored: Stored) -> list[str]:
    groups = [key for path, key in stored.below(name).items() if len(path) == 3 and path[::2] == (GROUPS, PARAMS)]
    ranks = [key for path, key in stored.below(STRUCTURE).items() if is_rank(path[0]) and path[1:] == (name,)]
    return groups + ranks


class _Numbers(list[int]):
    def __contains__(self, number: object) -> bool:
        return len(self) > 0 and isinstance(number, int) and self[0] <= number <= self[-1]


class _Placement(dict[Any, Any]):
    def get(self, path: Any, default: Any = None) -> Any:
        return super().get(path[1] if isinstance(path, tuple) and path[0] == STATE else path, default)


def _loads_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    return (
        kind.load_state_dict is torch.optim.Optimizer.load_state_dict
        and kind.__setstate__.__module__.startswith("torch.")
        and not any(torch_internals.load_hooks_of(optimizer))
    )


class FlatTarget:
    is_plain = False
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    problems: Sequence[str] = ()

    def __init__(self, owner: torch.nn.Module, optimizer: torch.optim.Optimizer, stored: Stored, name: str) -> None:
        self._owner, self._optimizer, self._stored, self._name = owner, optimizer, stored, name
        self._paths: dict[str, Any] = {}

    def destinations(self) -> dict[str, Any]:
        saved = dict(get_optimizer_state_dict(self._owner, self._optimizer))
        if not any(path[0] == STATE for path in self._stored.below(self._name)):
            saved.pop(STATE, None)
            self._optimizer.state.clear()
        flat, self._paths = torch_internals.flatten_state_dict({self._name: saved})
        return {key: value for key, value in flat.items() if key in self._stored.items}

    def load(self, loaded: Mapping[str, Any], *, strict: bool) -> None:
        made = nested({self._paths[key][1:]: loaded[key] for key in self._paths if key in self._stored.items})
        if STATE in made:
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(self._owner, self._optimizer, made, options=options)
            return
        for group, saved in zip(self._optimizer.param_groups, made[GROUPS], strict=True):
            group.update({key: value for key, value in saved.items() if key != PARAMS})


def is_rank(key: Any) -> bool:
    return str(key).startswith("rank-")


class OptimizerTarget:
    """The optimizer's part of a checkpoint. Attributes: as in ``ModuleTarget``, of parameters and groups."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: ParameterNames, stored: Stored, name: str,
        objects: Mapping[str, Any], text: Any,
    ) -> None:  # fmt: skip
        self._optimizer, self._stored, self._name, self._modules = optimizer, stored, name, names.modules
        self._parameters = parameters_of(optimizer)
        device = torch.get_default_device()
        self._default_device = "cpu" if device.type == "meta" else device
        self._local_state: dict[str, dict[str, torch.Tensor]] | None = None
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.problems: list[str] = []
        self._saved_name: dict[int, Any] = {}
        self._new, self._numbers = NewTensors(), NewTensors()
        holder = _holder(optimizer)
        self.is_plain = _loads_as_torch(holder) and not isinstance(optimizer, NearStorageOptimizer)
        below = dict(stored.below(name))
        self._decoder = Decoder(text, stored.metadata, self._live_values)
        self._whole = not self._decoder.has_paths
        if self._whole:
            self._below: dict[Path, str] = {}
            return
        lists = self._lists(below, objects)
        candidates = names.of(optimizer)
        self._saved_name = self._match(candidates, lists)
        decoded = {path[:3] for path in self._decoded()}
        saved = {*self._saved_name.values()}
        listed = {found for group in lists for found in group}
        self._below = {
            path: key for path, key in below.items()
            if path[:3] not in decoded and path[2:] != (PARAMS,)
            and not (path[0] == STATE and path[1] not in saved and (path[1] in listed or self._is_parameter(path[1])))
        }  # fmt: skip
        self._compare(candidates, lists)

    def _lists(self, below: Mapping[Path, str], objects: Mapping[str, Any]) -> list[list[Any]]:
        numbers = [int(path[1]) for path in below if path[0] == GROUPS]
        lists: list[list[Any]] = [[] for _ in range(max(numbers, default=-1) + 1)]
        for path, key in below.items():
            if len(path) == 3 and path[::2] == (GROUPS, PARAMS):
                lists[int(path[1])] += objects[key]
        for path, key in self._stored.below(STRUCTURE).items():
            if is_rank(path[0]) and path[1:] == (self._name,):
                for known, found in zip(lists, json.loads(objects[key]), strict=False):
                    known_names = set(known)
                    known += [one for one in found if one not in known_names]
        return lists

    def _match(self, candidates: Sequence[Sequence[Sequence[str]]], lists: Sequence[Sequence[Any]]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        numbers = {name for group in lists for name in group if type(name) is int}
        if numbers:  # a state dict of torch, saved directly by DCP
            for group, saved in zip(self._optimizer.param_groups, lists, strict=False):
                found |= dict(zip(map(id, group[PARAMS]), saved, strict=False))
            return found
        with_state = {path[1] for path in self._stored.below(self._name) if path[0] == STATE}
        free = {name for group in lists for name in group} | with_state
        for group, names in zip(self._optimizer.param_groups, candidates, strict=True):
            for parameter, possible in zip(group[PARAMS], names, strict=True):
                if (name := next((one for one in possible if one in free), None)) is not None:
                    found[id(parameter)] = name
                    free.discard(name)
        for number, saved in enumerate(lists[: len(candidates)]):
            left = [one for one in self._optimizer.param_groups[number][PARAMS] if id(one) not in found]
            open_names = [name for name in saved if name in free]
            loose = {id(one) for one, possible in zip(self._optimizer.param_groups[number][PARAMS], candidates[number],
                     strict=True) if possible[0].startswith(UNNAMED)}  # fmt: skip
            is_loose = all(id(one) in loose for one in left) or all(
                str(name).startswith(UNNAMED) for name in open_names
            )
            # A module that translates its keys has other names too: only the order is left.
            is_loose |= any(map(torch_internals.submodules_that_load_themselves, self._modules.values()))
            if len(left) == len(open_names) and is_loose:
                found |= dict(zip(map(id, left), open_names, strict=True))
        return found

    def _is_parameter(self, name: Any) -> bool:
        return any(f"{entry}.{name}" in self._stored.items for entry in self._stored.names)

    def _compare(self, candidates: Any, lists: Sequence[Sequence[Any]]) -> None:
        groups = self._optimizer.param_groups
        has_every_name = self._decoder.has_text or any(type(name) is int for group in lists for name in group)
        if len(groups) != len(lists):
            more = self.unexpected if len(lists) > len(groups) else self.missing
            more += [f"{GROUPS}.{number}" for number in range(*sorted((len(lists), len(groups))))]
        group_of = {name: number for number, group in enumerate(lists) for name in group}
        for number, (group, names) in enumerate(zip(groups, candidates, strict=True)):
            for parameter, possible in zip(group[PARAMS], names, strict=True):
                saved = self._saved_name.get(id(parameter))
                if saved is None:
                    # Stock DCP saves only the names of the first rank.
                    if number < len(lists) and (has_every_name or not self._is_parameter(possible[0])):
                        self.missing.append(f"{STATE}.{possible[0]}")
                elif group_of.get(saved, number) != number:
                    self.problems.append(
                        f"{self._name}: {saved} is in group {number} here and in {group_of[saved]} in the checkpoint"
                    )
        matched = {*self._saved_name.values()}
        left = [name for group in lists[: len(groups)] for name in group if name not in matched]
        self.unexpected += [f"{STATE}.{name}" for name in left]

    def destinations(self) -> dict[str, Any]:
        if isinstance(self._optimizer, NearStorageOptimizer):
            self._local_state = self._near_tensors(self._optimizer)
            self._below = {path: key for path, key in self._below.items() if path[0] != STATE
                           or path[2] in self._local_state.get(str(path[1]), {})}  # fmt: skip
        by_name: dict[Any, torch.Tensor] = {
            found: one for one in self._parameters if (found := self._saved_name.get(id(one))) is not None
        }
        made = {key: self._destination(path, by_name) for path, key in self._below.items()}
        return made | self._decoder.tensors

    def _live_values(self) -> dict[Path, Any]:
        names = ParameterNames({**self._modules}).of(self._optimizer)
        found: dict[Any, Any] = {}
        for number, (group, of_group) in enumerate(zip(self._optimizer.param_groups, names, strict=True)):
            found |= {(GROUPS, number, key): value for key, value in group.items()}
            for parameter, possible in zip(group[PARAMS], of_group, strict=True):
                found |= dict.fromkeys(possible, parameter)
        return _Placement(found)

    def _near_tensors(self, optimizer: NearStorageOptimizer) -> dict[str, dict[str, torch.Tensor]]:
        with optimizer.mapped_anew():
            state = optimizer.state_dict()[STATE]
        return {self._saved_name[id(one)]: dict(state.get(number, {})) for number, one in enumerate(self._parameters)
                if id(one) in self._saved_name}  # fmt: skip

    def _destination(self, path: Path, by_name: Mapping[Any, torch.Tensor]) -> Any:
        found = self._stored.items[self._below[path]]
        if not isinstance(found, TensorStorageMetadata):
            return ""
        if path[0] == STATE and len(path) == 3:
            if self._local_state is not None:
                return self._local_state[str(path[1])][str(path[2])]
            if path[2] == "step":
                return self._numbers.like(found, None, device=self._default_device if found.size == () else "cpu")
            parameter = by_name.get(path[1])
            if parameter is None or torch.nn.parameter.is_lazy(parameter) or parameter.shape != found.size:
                return self._new.like(found, None)
            return self._new.like(found, parameter)
        if path[0] == GROUPS and len(path) == 3 and int(path[1]) < len(self._optimizer.param_groups):
            return self._new.like(found, self._optimizer.param_groups[int(path[1])].get(str(path[2])))
        return self._new.like(found, None)

    def _decoded(self) -> dict[Path, Any]:
        return {} if self._whole else dict(self._decoder.value)

    def load(self, loaded: Mapping[str, Any], *, strict: bool) -> None:
        optimizer, holder = self._optimizer, _holder(self._optimizer)
        self._decoder.finish()
        if self._whole:
            optimizer.load_state_dict(self._decoder.value)
            return
        values = {path: loaded[key] for path, key in self._below.items()} | self._decoded()
        by_name: dict[Any, dict[Path, Any]] = {}
        by_group: dict[int, dict[Path, Any]] = {}
        more: dict[Path, Any] = {}
        for path, value in values.items():
            if path[0] == STATE:
                by_name.setdefault(path[1], {})[path[2:]] = value
            elif path[0] == GROUPS:
                by_group.setdefault(int(path[1]), {})[path[2:]] = value
            else:
                more[path] = value
        state = {name: nested(found) for name, found in by_name.items()}
        groups = {number: nested(found) for number, found in by_group.items()}
        if isinstance(optimizer, NearStorageOptimizer):
            lists = [[self._saved_name.get(id(one)) for one in group[PARAMS]] for group in optimizer.param_groups]
            optimizer.put_back({STATE: state, GROUPS: [{**groups.get(number, {}), PARAMS: found}
                                                       for number, found in enumerate(lists)]})  # fmt: skip
            return
        live = holder.state_dict() if not strict else {STATE: {}}
        numbered: dict[Any, Any] = {}
        for number, parameter in enumerate(parameters_of(holder)):
            saved = self._saved_name.get(id(parameter))
            if saved in state:
                numbered[number] = state[saved]
            elif saved is None and number in live[STATE]:
                numbered[number] = live[STATE][number]
        matched = {*self._saved_name.values()}
        numbered |= {key: value for key, value in state.items() if key not in matched}
        before = [dict(group) for group in holder.param_groups]
        starts = count()
        described = []
        for number, group in enumerate(before):
            ids = [next(starts) for _ in group[PARAMS]]
            options = groups.get(number) or {key: one for key, one in group.items() if key != PARAMS}
            described.append({**options, PARAMS: _Numbers(ids)})
        holder.load_state_dict({**nested(more), STATE: numbered, GROUPS: described})
        self._keep_dtypes(holder, state)
        for group, old in zip(holder.param_groups, before, strict=True):
            group.update({key: old[key] for key in optimizer.defaults if key in old and key not in group})
        if holder is not optimizer:
            for group, loaded_group in zip(optimizer.param_groups, holder.param_groups, strict=True):
                group.update({key: value for key, value in loaded_group.items() if key != PARAMS})

    def _keep_dtypes(self, optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> None:
        """Undo the cast of ``Optimizer.load_state_dict`` to the parameter's dtype.

        Numbers keep the dtype that the optimizer gave them; so does all state if the parameter has its saved dtype.
        """
        for parameter in parameters_of(optimizer):
            name = self._saved_name.get(id(parameter))
            for key, value in state.get(name, {}).items():
                if not isinstance(value, torch.Tensor) or value.dtype == parameter.dtype or key == "step":
                    continue
                live = optimizer.state[parameter].get(key)
                is_cast = isinstance(live, torch.Tensor) and live.dtype != value.dtype
                is_number = value.ndim == 0 and parameter.ndim > 0
                if is_cast and (is_number or self._has_its_dtype(parameter, name)):
                    optimizer.state[parameter][key] = value.to(live.device)

    def _has_its_dtype(self, parameter: torch.Tensor, name: Any) -> bool:
        found = (self._stored.items.get(f"{entry}.{name}") for entry in self._modules)
        return any(isinstance(one, TensorStorageMetadata) and one.properties.dtype == parameter.dtype for one in found)
