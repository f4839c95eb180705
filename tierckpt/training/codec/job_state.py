"""What a training job's ``state`` becomes in a checkpoint, and back.

modules      sharded parameters and buffers by name, as DCP's ``get_model_state_dict`` gives them
optimizers   state by parameter name, so that it follows its parameter when the world size changes
PerRank      one entry per rank: RNG, data loaders
Stateful     any other object with ``state_dict`` and ``load_state_dict``
values       numbers, strings, containers, tensors, arrays: put back into ``state`` under their key

The tensors lie in the checkpoint under the names that DCP gives them; what they were in, and all other values, are
given back exactly by their structure (``training/codec/structure.py``).
"""

from __future__ import annotations

import io
import operator
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from ...errors import ConfigError, StateMismatchError, TierckptError
from ...near_storage.optimizer import NearStorageOptimizer
from ...telemetry import logger
from ...torch_internals import flatten_state_dict, set_element
from .optimizer_state import member_lists, put_back_state, state_target
from .reconstruction import Decoder
from .structure import NOTHING, Encoder, text_of

log = logger("state")

STRUCTURE = "__tierckpt__"
"""The entry of a checkpoint that says what its values were in: texts, one for each entry of the state."""
SHARED = "state"
NUMBERED = "tensors"
"""Tensors of values in which two have one name, as DCP flattens them."""

_EXACT = frozenset({type(None), bool, float, complex, bytes, torch.dtype, torch.device, io.BytesIO})


class PerRank:
    """Wraps a Stateful whose state differs by rank (a data loader): each rank saves and gets back its own.

    A rank that the checkpoint does not know, because the job has grown, keeps the state it has; a log line says so.

    Args:
        stateful: anything with ``state_dict`` and ``load_state_dict``.

    Example:
        >>> loader = torch.nn.Linear(1, 1)  # stands for a data loader with a state
        >>> with tierckpt.Checkpointer("run") as checkpointer:
        ...     saved = checkpointer.save(1, {"loader": tierckpt.PerRank(loader)})
        ...     checkpointer.restore({"loader": tierckpt.PerRank(loader)})
        1
    """

    def __init__(self, stateful: Stateful) -> None:
        self.stateful = stateful

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"rank-N": state}`` of this rank alone; a checkpoint has the entries of all ranks.

        Raises what the wrapped object raises.
        """
        return {rank_key(): self.stateful.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's entry of ``state``. Without one nothing changes, and a warning is logged.

        Raises what the wrapped object raises.
        """
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
    """The random number generators of every rank: torch (CPU and CUDA), Python, NumPy.

    Example:
        >>> with tierckpt.Checkpointer("run") as checkpointer:
        ...     saved = checkpointer.save(1, {"rng": tierckpt.RngState()})
        ...     before = torch.rand(2)
        ...     step = checkpointer.restore({"rng": tierckpt.RngState()})
        >>> torch.equal(before, torch.rand(2))
        True
    """

    def __init__(self) -> None:
        super().__init__(_Rng())


def rank_key() -> str:
    return f"rank-{dist.get_rank() if dist.is_initialized() else 0}"


@dataclass
class Entry:
    """One entry of a state as its structure in the checkpoint has it, once the tensors are loaded.

    Attributes:
        value: of a module or optimizer: what is no tensor, by where it stands.
    """

    name: str
    decoder: Decoder

    @property
    def value(self) -> Any:
        return self.decoder.value


def structure_name(name: str, *, per_rank: bool = False) -> str:
    """What the structure of the entry ``name`` of a state is called in a checkpoint."""
    return f"{STRUCTURE}.{rank_key() if per_rank else SHARED}.{name}"


def check_step(step: Any) -> int:
    """Return the number of a step. Raises ConfigError: it is none, or its checkpoint would have the name of another."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"step is {step!r}", hint="Give a whole number of at least 0")
    return number


def _check_state(state: object) -> None:
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            f"the state is a {type(state).__name__}, and no dict of names",
            hint='Write {"model": model, "optimizer": optimizer}',
        )


def collect(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict to save. Tensors are the live ones, not copies.

    Below ``STRUCTURE`` are the texts of what its values are in, of each rank's own or of all. Ranks whose values
    differ without ``PerRank`` save those of one of them.

    Raises StateMismatchError naming what a restore could not give back.
    """
    _check_state(state)
    saved: dict[str, Any] = {}
    texts: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        if type(name) is not str or name == STRUCTURE:
            raise StateMismatchError(f"an entry of the state is called {name!r}", hint="Call it by another text")
        if isinstance(value, torch.nn.Module):
            saved[name], text = _split(name, get_model_state_dict(value))
        elif isinstance(value, torch.optim.Optimizer):
            saved[name], text = _split(name, _optimizer_state(name, value, state))
        else:
            saved[name], text = _encoded(name, value, saved, texts)
        if text:
            texts.setdefault(rank_key() if isinstance(value, PerRank) else SHARED, {})[name] = text
    return saved | ({STRUCTURE: texts} if texts else {})


def _encoded(name: str, value: Any, saved: Mapping[str, Any], texts: dict[str, dict[str, Any]]) -> tuple[Any, str]:
    """What DCP saves of a value beside what is ``saved``, and the text of its structure."""
    number = f"{rank_key()}.{name}" if isinstance(value, PerRank) else name
    below = f"{STRUCTURE}.{NUMBERED}.{number}"
    value = value.state_dict() if isinstance(value, Stateful) else value
    encoder = Encoder(below)
    node, flat = encoder.encode(value, (name,))
    near = {other: saved[other] for other in saved if name.startswith(f"{other}.") or other.startswith(f"{name}.")}
    if not _is_unambiguous(near | {name: flat}):
        encoder, flat = Encoder(below, is_ambiguous=True), NOTHING
        node, _ = encoder.encode(value, (name,))
    if encoder.numbered:
        texts.setdefault(NUMBERED, {})[number] = encoder.numbered
    return {} if flat is NOTHING else flat, text_of(node)


def _is_unambiguous(flat: dict[str, Any]) -> bool:
    try:
        flatten_state_dict(flat)
    except ValueError:  # two of its values have one name
        return False
    return True


def _split(name: str, saved: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The state dict of a module or optimizer as DCP saves it, and the text of those values that would not come back
    from that as they are."""
    nodes, encoder = [], Encoder(name)
    for path, value in list(_beside_tensors(saved)):
        node, flat = encoder.encode(value, (name, *path))
        nodes.append([{"tuple": list(path)}, node])
        _put(saved, path, flat)
    return saved, text_of({"map": nodes}) if nodes else ""


def _beside_tensors(saved: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The values of a module's or optimizer's state dict that are neither tensors nor what DCP gives back exactly."""
    for key, value in saved.items():
        if key == "state" and isinstance(value, dict):
            for fqn, of_parameter in value.items():
                if isinstance(of_parameter, dict):
                    yield from (((key, fqn, *path), found) for path, found in _odd(of_parameter))
        elif key == "param_groups" and isinstance(value, list):
            for index, group in enumerate(value):
                yield from (((key, index, *path), found) for path, found in _odd(group) if path != ("params",))
        else:
            yield from _odd({key: value})


def _odd(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str], Any]]:
    for key, value in values.items():
        if not (isinstance(value, torch.Tensor) or _is_exact(value)):
            yield (key,), value


def _is_exact(value: Any) -> bool:
    """True for what DCP saves as one object, and a restore reads as data."""
    kind = type(value)
    if kind is tuple:
        return all(map(_is_exact, value))
    if kind is int:
        return int(value).bit_length() < 64
    return kind in _EXACT or (kind is str and value.isascii())


def _put(saved: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set the value at ``path``; take it out when it is NOTHING. A container on the way that is not there is made."""
    for key in path[:-1]:
        saved = saved[key] if isinstance(saved, list) else saved.setdefault(key, {})
    if value is not NOTHING:
        saved[path[-1]] = value
    elif isinstance(saved, dict):
        saved.pop(path[-1], None)


def _optimizer_state(name: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """DCP makes a pretended step of an optimizer without any state, with its hooks; so it gets an empty one here."""
    if isinstance(optimizer, NearStorageOptimizer):
        with optimizer.mapped():
            return dict(get_optimizer_state_dict(_owner(name, optimizer, state), optimizer))
    owner = _owner(name, optimizer, state)
    if optimizer.state:
        return dict(get_optimizer_state_dict(owner, optimizer))
    try:
        optimizer.state.update((one, {}) for group in optimizer.param_groups for one in group["params"])
        saved = dict(get_optimizer_state_dict(owner, optimizer))
    finally:
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
    _check_state(state)
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


def structures(state: Mapping[str, Any], metadata: Metadata, only: Collection[str] | None) -> dict[str, str]:
    """The structures that the checkpoint has of the entries of ``state``, by entry. None of those saved before 0.3.

    And which parameters its optimizers had, by key (``member_lists``).
    """
    names = {
        name: structure_name(name, per_rank=isinstance(value, PerRank))
        for name, value in state.items()
        if only is None or name in only
    }
    lists = [member_lists(name, metadata) for name in names if isinstance(state[name], torch.optim.Optimizer)]
    names = {name: called for name, called in names.items() if called in metadata.state_dict_metadata}
    return names | {key: key for keys in lists for key in keys}


def load_target(
    state: Mapping[str, Any],
    metadata: Metadata,
    texts: Mapping[str, Any] | None = None,
    only: Collection[str] | None = None,
) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Return the dict for ``dcp.load``, and the entries of ``state`` that are complete once it is loaded.

    Modules and optimizers are in place; what has no structure is as the checkpoint's flat names have it.

    Args:
        texts: of ``structures``.

    Raises StateMismatchError naming what the checkpoint lacks or has in another shape. Nothing was changed then.
    """
    target: dict[str, Any] = {}
    entries: dict[str, Entry] = {}
    for name, value in state.items():
        if only is not None and name not in only:
            continue
        text = texts.get(name) if texts is not None else None
        if text is not None:
            entries[name] = Entry(name, _decoder(name, text, metadata, partial(_live, value, state, name)))
            target.update(entries[name].decoder.tensors)
        if isinstance(value, torch.nn.Module):
            target[name] = get_model_state_dict(value)
        elif isinstance(value, torch.optim.Optimizer):
            target[name] = _optimizer_target(name, value, state, metadata, texts)
        elif text is None:
            target.update(_placeholders(name, value, metadata))
        if name in entries and isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            for path in entries[name].value:
                _put(target[name], path, NOTHING)
    check_fits(target, metadata)
    return target, entries


def _decoder(name: str, text: Any, metadata: Metadata, live: Callable[[], Any]) -> Decoder:
    try:
        return Decoder(text, metadata, live)
    except TierckptError as error:
        error.context.setdefault("key", name)
        raise


def _live(value: Any, state: Mapping[str, Any], name: str) -> Any:
    """The value in whose place one of the checkpoint is put: says where its tensors belong."""
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer) or not isinstance(value, Stateful):
        return value
    try:
        return value.state_dict()
    except Exception as error:
        log.debug("%s cannot say where its tensors lie: %s", name, error)
        return None


def _optimizer_target(
    name: str,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    metadata: Metadata,
    texts: Mapping[str, Any] | None,
) -> dict[str, Any]:
    if isinstance(optimizer, NearStorageOptimizer):
        with optimizer.mapped_anew():
            found: Any = get_optimizer_state_dict(_owner(name, optimizer, state), optimizer)
        known, prefix = metadata.state_dict_metadata, f"{name}.param_groups"
        of = {
            fqn: {key: one for key, one in tensors.items() if f"{name}.state.{fqn}.{key}" in known}
            for fqn, tensors in found["state"].items()
        }
        groups = [
            {key: one for key, one in group.items() if key == "params" or f"{prefix}.{number}.{key}" in known}
            for number, group in enumerate(found["param_groups"])
        ]
        return {"state": of, "param_groups": groups}
    owner = _owner(name, optimizer, state)
    saved = dict(get_optimizer_state_dict(owner, optimizer))
    if not any(key.startswith(f"{name}.state.") for key in metadata.state_dict_metadata):
        saved.pop("state", None)  # it was saved before its first step
        optimizer.state.clear()
    else:
        module = next(key for key, value in state.items() if value is owner)
        saved["state"] = state_target(name, saved, owner, module, metadata, texts or {})
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
    state: dict[str, Any],
    loaded: Mapping[str, Any],
    metadata: Metadata,
    entries: Mapping[str, Entry],
    only: Collection[str] | None = None,
) -> None:
    """Hand what was loaded to its owners. Modules and optimizers share storage with ``loaded`` already or take it."""
    wanted = [(name, value) for name, value in state.items() if only is None or name in only]
    for entry in entries.values():
        entry.decoder.finish()
        if isinstance(state[entry.name], torch.nn.Module | torch.optim.Optimizer):
            for path, value in entry.value.items():
                _put(loaded[entry.name], path, value)
    for name, value in wanted:
        if isinstance(value, torch.nn.Module):
            set_model_state_dict(value, loaded[name])
    for name, value in wanted:
        if isinstance(value, torch.nn.Module):
            continue
        if isinstance(value, torch.optim.Optimizer):
            _put_back_optimizer(name, value, state, loaded[name])
            continue
        found = entries[name].value if name in entries else _nested(name, loaded, metadata)
        if isinstance(value, Stateful):
            value.load_state_dict({} if found is None else found)
        else:
            state[name] = found


def _put_back_optimizer(
    name: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], loaded: dict[str, Any]
) -> None:
    if isinstance(optimizer, NearStorageOptimizer):
        optimizer.put_back(loaded)
        return
    if "state" in loaded:
        put_back_state(optimizer, _owner(name, optimizer, state), loaded)
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
