"""What a training job's ``state`` is made of, as JSON: enough to make another one that checkpoints and logs fit.

A gradient log has it in its segments, so that a process without the job's code makes the steps again, and a checkpoint
of what they lead to (``training/log_fold``). Modules are trees of parameters and buffers under their names, optimizers
those of ``torch.optim``; of all other entries their value is enough. A rank's shards are those of the same rank in
another group of as many. No code runs from it (P9).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as distributed
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import StateMismatchError
from ...replay.frame import DTYPES, dtype_name, from_json, to_json
from ...replay.optimizers import BY_NAME, ELEMENTWISE
from ...replay.redo import Conditions
from ...types import Json
from .attachment import inner
from .job_state import PerRank


class _Value:
    """Stands for an object with a state."""

    def __init__(self) -> None:
        self._state: Any = None

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state


def template_of(state: Mapping[str, Any]) -> Json:
    """Return the template of ``state``.

    Raises StateMismatchError for one that can have none, and says why; and what its objects raise.
    """
    tensors: dict[int, tuple[int, torch.Tensor]] = {}
    modules = {name: _module(name, one, tensors) for name, one in state.items() if isinstance(one, torch.nn.Module)}
    entries: Json = {}
    for name, value in state.items():
        if name in modules:
            entries[name] = {"module": modules[name]}
        elif isinstance(value, torch.optim.Optimizer):
            entries[name] = {"optimizer": _optimizer(name, value, tensors)}
        else:
            entries[name] = "rank" if isinstance(value, PerRank) else "value"
    described = [
        [dtype_name(one.dtype), list(one.shape), one.requires_grad, *_shards(one)] for _, one in tensors.values()
    ]
    conditions = asdict(Conditions.here(torch.device("cpu"), ""))
    made: Json = {"tensors": described, "entries": entries, "conditions": [*conditions.values()]}
    json.dumps(made)  # options of a group may be anything
    return made


def state_of(template: Json) -> dict[str, Any]:
    """Return a state of ``template`` in host memory, with arbitrary values: a restore fills it.

    Raises KeyError, TypeError, ValueError, IndexError: it is none.
    """
    mesh = functools.cache(lambda *sizes: init_device_mesh("cpu", sizes))

    def empty(shape: list[int], dtype: torch.dtype, sizes: Sequence[int] = (), along: Sequence[Any] = ()) -> Any:
        if not sizes:
            return torch.empty(shape, dtype=dtype)
        placements = [Replicate() if one is None else Shard(one) for one in along]
        return distributed.empty(shape, dtype=dtype, device_mesh=mesh(*sizes), placements=placements)

    tensors = [
        torch.nn.Parameter(empty(shape, DTYPES[dtype], *shards), requires_grad=bool(has_gradient))
        for dtype, shape, has_gradient, *shards in template["tensors"]
    ]
    made: dict[str, Any] = {}
    for name, entry in template["entries"].items():
        if entry in ("rank", "value"):
            made[name] = PerRank(_Value()) if entry == "rank" else None
        elif "module" in entry:
            made[name] = _module_of(entry["module"], tensors)
        else:
            made[name] = _optimizer_of(entry["optimizer"], tensors)
    return made


def _module(name: str, module: torch.nn.Module, tensors: dict[int, tuple[int, torch.Tensor]]) -> Json:
    module = inner(module)
    saved = get_model_state_dict(module)
    found: Json = {"parameters": [], "buffers": []}
    for path, one in module.named_parameters(remove_duplicate=False):
        found["parameters"].append([path, _number(f"{name}.{path}", one, tensors)])
    for path, buffer in module.named_buffers(remove_duplicate=False):
        if path in saved:
            found["buffers"].append([path, _number(f"{name}.{path}", buffer, tensors)])
    if saved.keys() != {path for kind in found.values() for path, _ in kind}:
        raise _cannot(f"the state dict of {name} has other names than its parameters and buffers (is it wrapped?)")
    return found


def _number(name: str, tensor: torch.Tensor, tensors: dict[int, tuple[int, torch.Tensor]]) -> int:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, DTensor) and tensor.layout == torch.strided
    if not is_plain or dtype_name(tensor.dtype) not in DTYPES:
        raise _cannot(f"{name} is a {type(tensor).__name__} of {tensor.dtype}")
    if not tensor.is_contiguous():
        raise _cannot(f"{name} is not contiguous, and fused steps of a copy that is have other last bits")
    if tensor.device.type != "cpu":
        raise _cannot(f"{name} is on {tensor.device}, whose steps have other last bits on the CPU")
    if isinstance(tensor, DTensor):
        ranks = tensor.device_mesh.mesh.flatten().tolist()
        if ranks != [*range(dist.get_world_size())] or {*map(type, tensor.placements)} - {Shard, Replicate}:
            raise _cannot(f"{name} lies as {tensor.placements} on ranks {ranks}, not as Shard or Replicate on all")
    return tensors.setdefault(id(tensor), (len(tensors), tensor))[0]


def _optimizer(name: str, optimizer: torch.optim.Optimizer, tensors: Mapping[int, tuple[int, torch.Tensor]]) -> Json:
    if type(optimizer) not in ELEMENTWISE:
        raise _cannot(f"{name} is a {type(optimizer).__name__}, and none of torch.optim itself")
    groups = []
    for group in optimizer.param_groups:
        if any(id(one) not in tensors for one in group["params"]):
            raise _cannot(f"{name} has parameters of no module of the state")
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append([to_json(options), group.get("param_names"), [tensors[id(one)][0] for one in group["params"]]])
    return {"kind": type(optimizer).__name__, "groups": groups}


def _shards(tensor: torch.Tensor) -> list[Any]:
    """Of a DTensor the sizes of its mesh, and for each of these the dimension of the tensor that is sharded along it,
    None for none."""
    if not isinstance(tensor, DTensor):
        return []
    placements = [one.dim if isinstance(one, Shard) else None for one in tensor.placements]
    return [list(tensor.device_mesh.shape), placements]


def _module_of(described: Json, tensors: list[torch.nn.Parameter]) -> torch.nn.Module:
    root = torch.nn.Module()
    for path, number in described["parameters"]:
        owner, name = _owner(root, path)
        owner.register_parameter(name, tensors[number])
    for path, number in described["buffers"]:
        owner, name = _owner(root, path)
        owner.register_buffer(name, tensors[number].data)
    return root


def _owner(root: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, torch.nn.Module())
        root = root.get_submodule(parent)
    return root, name


def _optimizer_of(described: Json, tensors: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    kind: Any = BY_NAME[described["kind"]]
    groups = [{**from_json(options), "params": [tensors[number] for number in of]} for options, _, of in
              described["groups"]]  # fmt: skip
    made: torch.optim.Optimizer = kind(groups)
    for group, (_, names, _) in zip(made.param_groups, described["groups"], strict=True):
        if names is not None:
            group["param_names"] = names
    return made


def _cannot(why: str) -> StateMismatchError:
    return StateMismatchError(why, hint="A restore replays the log all the same; save more often for a shorter one")
