"""What a training job's ``state`` becomes in a checkpoint, and back.

modules      sharded parameters and buffers by name, as DCP's ``get_model_state_dict`` gives them
optimizers   state by parameter name, so that it follows its parameter when the world size changes
PerRank      one entry per rank: RNG, data loaders
Stateful     any other object with ``state_dict`` and ``load_state_dict``
values       numbers, strings, containers, tensors: put back into ``state`` under their key
"""

from __future__ import annotations

import io
import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from ..dcp.sealed import Objects
from ..errors import StateMismatchError, UnsafeCheckpointError
from ..telemetry import logger

log = logger("state")

_DATA = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})
_told: set[tuple[str, type]] = set()


class PerRank:
    """Wraps a Stateful whose state differs by rank (a data loader): each rank saves and gets back its own.

    A rank that the checkpoint does not know, because the job has grown, keeps the state it has; a log line says so.
    """

    def __init__(self, stateful: Stateful) -> None:
        self.stateful = stateful

    def state_dict(self) -> dict[str, Any]:
        return {rank_key(): self.stateful.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if rank_key() not in state:
            log.warning("the checkpoint has no state of its own for %s; it goes on with a fresh one", rank_key())
            return
        self.stateful.load_state_dict(state[rank_key()])


class _Rng:
    """The random number generators of this process: torch (CPU and CUDA), Python, NumPy.

    As tensors, numbers and lists of numbers, which a restore reads without trusting the checkpoint.
    """

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": _listed(random.getstate())}
        try:
            import numpy as np

            name, keys, *rest = np.random.get_state()
            state["numpy"] = [name, [int(key) for key in keys], *rest]
        except ImportError:
            pass
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"].cpu())
        random.setstate(_tupled(state["python"]))
        if "numpy" in state:
            import numpy as np

            name, keys, *rest = state["numpy"]
            np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())


class RngState(PerRank):
    """The random number generators of every rank, for ``state={"rng": RngState(), ...}``."""

    def __init__(self) -> None:
        super().__init__(_Rng())


def rank_key() -> str:
    return f"rank-{dist.get_rank() if dist.is_initialized() else 0}"


def collect(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict to save. Tensors are the live ones, not copies.

    Objects that a restore will refuse, because they are more than data, are warned about now, while it can be helped.
    """
    collected = {name: _to_save(name, value, state) for name, value in state.items()}
    for name, value in state.items():
        if not isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            _warn_of_more_than_data(name, collected[name])
    return collected


def _to_save(name: str, value: Any, state: Mapping[str, Any]) -> Any:
    if isinstance(value, torch.nn.Module):
        return get_model_state_dict(value)
    if isinstance(value, torch.optim.Optimizer):
        return _optimizer_state(name, value, state)
    if isinstance(value, Stateful):
        return value.state_dict()
    return value


def _warn_of_more_than_data(name: str, value: Any) -> None:
    """Once for each name and type."""
    for key, item in _not_plain(name, value):
        if (key, type(item)) in _told:
            continue
        _told.add((key, type(item)))
        try:
            stream = io.BytesIO()
            torch.save(item, stream)
            Objects().inert(stream.getvalue(), key)
        except UnsafeCheckpointError as error:
            log.warning("%s is saved, but a restore will not give it back: %s", key, error)
        except Exception as error:
            log.debug("%s cannot be tried: %s", key, error)  # the save itself will say so


def _not_plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _not_plain(f"{name}.{key}", item)
    elif type(value) in (list, tuple, set):
        for item in value:
            if type(item) not in _DATA:
                yield from _not_plain(name, item)
    elif type(value) not in _DATA and not isinstance(value, torch.Tensor):
        yield name, value


def _optimizer_state(name: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """DCP fills an empty optimizer with a pretended step; undo that, or saving before the first step changes it."""
    fresh = not optimizer.state
    saved = dict(get_optimizer_state_dict(_owner(name, optimizer, state), optimizer))
    if fresh:
        optimizer.state.clear()
        saved.pop("state", None)
    return saved


def _owner(name: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> torch.nn.Module:
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for value in state.values():
        if isinstance(value, torch.nn.Module) and wanted <= {id(parameter) for parameter in value.parameters()}:
            return value
    raise StateMismatchError(
        f"no module in the state owns the parameters of the optimizer {name!r}",
        hint="Pass the module beside its optimizer: optimizer state is saved by parameter name",
    )


def check_names(state: Mapping[str, Any], only: str | Collection[str] | None) -> Collection[str] | None:
    """Return the names in ``only``, each of which is in ``state``; None for all. Raises StateMismatchError."""
    if only is None:
        return None
    names = (only,) if isinstance(only, str) else tuple(only)
    for name in names:
        if name not in state:
            raise StateMismatchError(
                f"there is no {name!r} in the state to restore; there is {', '.join(map(repr, state)) or 'nothing'}",
                hint="Name entries of the dict that is passed to restore",
            )
    return names


def load_target(state: Mapping[str, Any], metadata: Metadata, only: Collection[str] | None = None) -> dict[str, Any]:
    """Return the dict for ``dcp.load``: modules and optimizers in place, everything else as the checkpoint has it.

    Raises StateMismatchError naming what the checkpoint lacks or has in another shape. Nothing was changed then.
    """
    target: dict[str, Any] = {}
    for name, value in state.items():
        if only is not None and name not in only:
            continue
        if isinstance(value, torch.nn.Module):
            target[name] = get_model_state_dict(value)
        elif isinstance(value, torch.optim.Optimizer):
            target[name] = _optimizer_target(name, value, state, metadata)
        else:
            target.update(_placeholders(name, value, metadata))
    check_fits(target, metadata)
    return target


def _optimizer_target(
    name: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], metadata: Metadata
) -> dict[str, Any]:
    saved = dict(get_optimizer_state_dict(_owner(name, optimizer, state), optimizer))
    if not any(key.startswith(f"{name}.state.") for key in metadata.state_dict_metadata):
        saved.pop("state", None)  # it was saved before its first step
        optimizer.state.clear()
    return saved


def _placeholders(name: str, value: Any, metadata: Metadata) -> dict[str, Any]:
    prefix = f"{name}.{rank_key()}" if isinstance(value, PerRank) else name
    found: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if key == prefix or key.startswith(f"{prefix}."):
            if isinstance(stored, TensorStorageMetadata):
                found[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
            else:
                found[key] = ""
    return found


def check_fits(target: Mapping[str, Any], metadata: Metadata) -> None:
    flat, _ = flatten_state_dict(dict(target))
    problems = []
    for key, value in flat.items():
        stored = metadata.state_dict_metadata.get(key)
        if stored is None:
            problems.append(f"{key} is not in the checkpoint")
        elif isinstance(stored, TensorStorageMetadata) and isinstance(value, torch.Tensor):
            if tuple(stored.size) != tuple(value.shape):
                problems.append(f"{key} is {tuple(value.shape)} here and {tuple(stored.size)} in the checkpoint")
        elif isinstance(stored, BytesStorageMetadata) and isinstance(value, torch.Tensor):
            problems.append(f"{key} is a tensor here and an object in the checkpoint")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise StateMismatchError(
            f"the state does not fit the checkpoint: {'; '.join(problems[:5])}{more}",
            hint="Build the model with the configuration it was saved with; nothing was loaded",
        )


def put_back(
    state: dict[str, Any], loaded: Mapping[str, Any], metadata: Metadata, only: Collection[str] | None = None
) -> None:
    """Hand what was loaded to its owners. Modules and optimizers share storage with ``loaded`` already or take it."""
    wanted = [(name, value) for name, value in state.items() if only is None or name in only]
    for name, value in wanted:
        if isinstance(value, torch.nn.Module):
            set_model_state_dict(value, loaded[name])
    for name, value in wanted:
        if isinstance(value, torch.nn.Module):
            continue
        if isinstance(value, torch.optim.Optimizer):
            _put_back_optimizer(name, value, state, loaded[name])
        elif isinstance(value, Stateful):
            nested = _nested(name, loaded, metadata)
            value.load_state_dict({} if nested is None else nested)
        else:
            state[name] = _nested(name, loaded, metadata)


def _put_back_optimizer(
    name: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], loaded: dict[str, Any]
) -> None:
    if "state" in loaded:
        set_optimizer_state_dict(_owner(name, optimizer, state), optimizer, loaded)
        return
    for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _nested(name: str, loaded: Mapping[str, Any], metadata: Metadata) -> Any:
    """Rebuild the nested value of ``name`` from DCP's flat keys."""
    root: dict[Any, Any] = {}
    paths = metadata.planner_data or {}
    for key, value in loaded.items():
        if key == name or key.startswith(f"{name}."):
            set_element(root, paths.get(key, (key,)), value)
    return root.get(name)


def _listed(value: Any) -> Any:
    """Tuples to lists: DCP flattens lists by index and keeps tuples as objects, and either must come back the same."""
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, list) else value
