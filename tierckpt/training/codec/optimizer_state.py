"""The state of an optimizer as a checkpoint has it: of each parameter what that had, no more and no less, in its dtype.

DCP loads something else: what a step makes of parameters that all have a gradient now. And torch's ``load_state_dict``
gives all but "step" the dtype of the parameter (``mu_product`` of NAdam is float32).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel


def member_lists(name: str, metadata: Metadata) -> list[str]:
    """Return the keys of the lists that say which parameters the optimizer ``name`` of a checkpoint had."""
    paths = (metadata.planner_data or {}).items()
    return [key for key, path in paths if len(path) == 4 and path[:2] == (name, "param_groups") and path[3] == "params"]


def state_target(
    name: str, saved: Mapping[str, Any], owner: torch.nn.Module, module: str, metadata: Metadata, objects: Any
) -> dict[str, Any]:
    """Return what is to be loaded of each parameter's state. A parameter that no step had changed has none.

    Args:
        saved: what DCP would load. ``owner`` has the parameters, and is called ``module``.
        objects: of the checkpoint, by key, with ``member_lists``.
    """
    known, stored = metadata.state_dict_metadata, dict[str, dict[str, Any]]()
    for key, path in (metadata.planner_data or {}).items():
        if path[:2] == (name, "state") and len(path) > 3:
            values = stored.setdefault(path[2], {})
            values |= {path[3]: known[key]} if len(path) == 4 else {}
    if not stored or _is_flat(owner):
        return dict(saved["state"])
    members = set(chain.from_iterable(objects.get(key, ()) for key in member_lists(name, metadata)))
    parameters: dict[str, Any] = get_model_state_dict(owner)
    made: dict[str, Any] = {}
    for fqn in chain.from_iterable(group["params"] for group in saved["param_groups"]):
        values = saved["state"].get(fqn, {})
        if fqn not in stored and fqn in members:
            continue
        made[fqn] = dict(values)
        parameter: Any = parameters.get(fqn)
        is_as_saved = parameter is not None and _dtype(known.get(f"{module}.{fqn}")) == parameter.dtype
        for key, found in stored.get(fqn, {}).items():
            value, dtype = values.get(key), _dtype(found)
            if dtype is None:
                made[fqn].setdefault(key, "")
            elif value is None:
                is_shaped = parameter is not None and parameter.shape == found.size and key != "step"
                like = parameter.detach() if is_shaped else torch.empty(found.size)
                made[fqn][key] = torch.empty_like(like, dtype=dtype)
            elif is_as_saved and isinstance(value, torch.Tensor) and value.dtype != dtype:
                made[fqn][key] = torch.empty_like(value, dtype=dtype)
    return made


def put_back_state(optimizer: torch.optim.Optimizer, owner: torch.nn.Module, loaded: Mapping[str, Any]) -> None:
    """Make ``loaded`` the state and the groups of ``optimizer``."""
    every = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    frozen = [one for one in every if not one.requires_grad and one.is_floating_point()]
    try:
        for one in frozen:  # they may have a state, of when they were not, and torch would drop it
            one.requires_grad_()
        set_optimizer_state_dict(owner, optimizer, dict(loaded), options=StateDictOptions(strict=False))
    finally:
        for one in frozen:
            one.requires_grad_(False)
    if not loaded["state"] or _is_flat(owner):
        return
    live: Any = get_optimizer_state_dict(owner, optimizer)["state"]
    for fqn, values in loaded["state"].items():
        for key, value in values.items():
            known = live.get(fqn, {}).get(key)
            if key != "step" and isinstance(known, torch.Tensor) and known.dtype != value.dtype:
                live[fqn][key] = value.to(known.device)


def _dtype(stored: Any) -> torch.dtype | None:
    return stored.properties.dtype if isinstance(stored, TensorStorageMetadata) else None


def _is_flat(owner: torch.nn.Module) -> bool:
    """Whether its parameters are not those that checkpoints know (FSDP's first version)."""
    return any(isinstance(one, FullyShardedDataParallel) for one in owner.modules())
