"""Saves the state of a training job as a DCP state dict, and restores it (docs/internals/state.md)."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from ...errors import ConfigError, StateMismatchError, TierckptError
from ...quantities import first_of
from ...torch_internals import flatten_state_dict
from ..rank_exchange import is_distributed
from . import optimizers, values
from .rank_state import PerRank, rank_key
from .reconstruction import NO_TEXT
from .stored import STRUCTURE, Path, Stored, not_plain
from .structure import NOTHING, Encoder, text_of
from .values import ValueTarget

SHARED = "state"
NUMBERED = "tensors"
"""The entry for tensors of values that DCP would flatten to equal names."""
PROBLEMS_SHOWN = 5

Target = values.ModuleTarget | optimizers.OptimizerTarget | optimizers.FlatTarget | ValueTarget


def structure_name(name: str, *, per_rank: bool = False) -> str:
    return f"{STRUCTURE}.{rank_key() if per_rank else SHARED}.{name}"


def check_step(step: Any) -> int:
    """Raise ConfigError unless ``step`` is a whole number of at least 0."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"step is {step!r}", hint="Pass a whole number of at least 0")
    return number


def _check_state(state: object) -> None:
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            f"the state is a {type(state).__name__}, not a dict of names",
            hint='Pass {"model": model, "optimizer": optimizer}',
        )


def collect(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict to save. Tensors are the live ones.

    If values differ between ranks without ``PerRank``, those of one rank are saved. Raises StateMismatchError.
    """
    _check_state(state)
    saved: dict[str, Any] = {}
    texts: dict[str, dict[str, Any]] = {}
    names = optimizers.ParameterNames(state)
    for name, value in state.items():
        if type(name) is not str or name == STRUCTURE:
            raise StateMismatchError(f"an entry of the state is named {name!r}", hint="Use another string as its name")
        if isinstance(value, torch.nn.Module):
            tree, versions = values.state_of(value)
            inexact = not_plain(tree)
            saved[name], text = _split(name, tree, [*inexact, *([(values.VERSIONS, versions)] if versions else [])])
        elif isinstance(value, torch.optim.Optimizer) and (found := optimizers.state_of(value, names)):
            tree, lists, inexact = found
            saved[name], text = _split(name, tree, inexact)
            if lists:
                texts.setdefault(rank_key(), {})[name] = lists
        else:
            saved[name], text = _encoded(name, value, saved, texts)
        if text:
            texts.setdefault(rank_key() if isinstance(value, PerRank) else SHARED, {})[name] = text
    return saved | ({STRUCTURE: texts} if texts else {})


def _encoded(name: str, value: Any, saved: Mapping[str, Any], texts: dict[str, dict[str, Any]]) -> tuple[Any, str]:
    number = f"{rank_key()}.{name}" if isinstance(value, PerRank) else name
    below = f"{STRUCTURE}.{NUMBERED}.{number}"
    value = value.state_dict() if isinstance(value, Stateful) else value
    encoder = Encoder(below)
    node, flat = encoder.encode(value, (name,))
    near = {other: saved[other] for other in saved if name.startswith(f"{other}.") or other.startswith(f"{name}.")}
    try:
        flatten_state_dict(near | {name: flat})
    except ValueError:
        encoder, flat = Encoder(below, is_ambiguous=True), NOTHING
        node, _ = encoder.encode(value, (name,))
    if encoder.numbered:
        texts.setdefault(NUMBERED, {})[number] = encoder.numbered
    return {} if flat is NOTHING else flat, text_of(node)


def _split(name: str, tree: dict[str, Any], inexact: list[tuple[Path, Any]]) -> tuple[dict[str, Any], str]:
    nodes, encoder = [], Encoder(name)
    for path, value in inexact:
        node, shown = encoder.encode(value, (name, *path))
        nodes.append([{"tuple": list(path)}, node])
        if path:
            _put(tree, path, shown)
    return tree, text_of({"paths": nodes}) if nodes or optimizers.GROUPS in tree else ""


def _put(saved: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        saved = saved[key] if isinstance(saved, list) else saved.setdefault(key, {})
    if value is not NOTHING:
        saved[path[-1]] = value
    elif isinstance(saved, dict):
        saved.pop(path[-1], None)


def check_names(state: Mapping[str, Any], only: str | Collection[str] | None) -> Collection[str] | None:
    """Raise StateMismatchError for a name that ``state`` lacks."""
    _check_state(state)
    if only is None:
        return None
    names = (only,) if isinstance(only, str) else tuple(only)
    for name in names:
        if name not in state:
            raise StateMismatchError(
                f"the state to restore has no {name!r}; it has {', '.join(map(repr, state)) or 'nothing'}",
                hint="Name entries of the dict that is passed to restore",
            )
    return names


def structures(state: Mapping[str, Any], stored: Stored, only: Collection[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in state.items():
        if only is None or name in only:
            called = structure_name(name, per_rank=isinstance(value, PerRank))
            found |= {name: called} if called in stored.items else {}
            if isinstance(value, torch.optim.Optimizer):
                found |= {key: key for key in optimizers.lists_of(name, stored)}
    return found


class RestorePlan:
    """The items to read for each entry of a state. Every entry is compared before any changes.

    Attributes:
        missing: names that only the entries have.
        unexpected: names that only the checkpoint has. Other ranks may have them.

    Raises StateMismatchError: other shapes, or a class that is unknown here.
    """

    def __init__(
        self, state: dict[str, Any], stored: Stored, objects: Mapping[str, Any], only: Collection[str] | None = None
    ) -> None:
        self._targets: dict[str, Target] = {}
        names = optimizers.ParameterNames(state)
        for name in state:
            if only is None or name in only:
                try:
                    self._targets[name] = self._target(name, state, stored, objects, names)
                except TierckptError as error:
                    error.context.setdefault("key", name)
                    raise
        self.missing = [f"{prefix}{key}" for prefix, one in self._targets_with_prefix() for key in one.missing]
        self.unexpected = [f"{prefix}{key}" for prefix, one in self._targets_with_prefix() for key in one.unexpected]
        problems = [problem for one in self._targets.values() for problem in one.problems]
        problems += self._stale_parameters(state)
        if problems:
            raise mismatch(problems)
        self.skipped = [name for name in stored.names if name not in state]

    def _target(
        self, name: str, state: dict[str, Any], stored: Stored, objects: Mapping[str, Any],
        names: optimizers.ParameterNames,
    ) -> Target:  # fmt: skip
        value, text = state[name], objects.get(name, NO_TEXT)
        if isinstance(value, torch.nn.Module):
            return values.ModuleTarget(value, stored, name, text)
        if isinstance(value, torch.optim.Optimizer):
            if (owner := names.flat_owner(value)) is not None:
                return optimizers.FlatTarget(owner, value, stored, name)
            return optimizers.OptimizerTarget(value, names, stored, name, objects, text)
        return ValueTarget(state, stored, name, text)

    def _targets_with_prefix(self) -> Iterator[tuple[str, Target]]:
        yield from (("" if isinstance(one, ValueTarget) else f"{name}.", one) for name, one in self._targets.items())

    def _stale_parameters(self, state: Mapping[str, Any]) -> list[str]:
        if not any(isinstance(one, values.ModuleTarget) and one.replaces_parameters for one in self._targets.values()):
            return []
        return [
            f"{name} steps parameters on the meta device, which a restore replaces: build it after restoring the module"
            for name, one in state.items()
            if isinstance(one, torch.optim.Optimizer) and any(p.is_meta for p in optimizers.parameters_of(one))
        ]

    def destinations(self) -> dict[str, Any]:
        """Return the dict to load: new tensors on the devices of the state's."""
        return {key: value for one in self._targets.values() for key, value in one.destinations().items()}

    def put_back(self, loaded: Mapping[str, Any], *, strict: bool = True, own_code: bool) -> None:
        """Load the entries that run their own code (``own_code``), or the others, which only copy.

        ``own_code`` goes first, on all ranks: a failure leaves the others unchanged. StateMismatchError lists changed
        entries.
        """
        selected = {name: target for name, target in self._targets.items() if target.is_plain is not own_code}
        changed: list[str] = []
        for name, target in sorted(selected.items(), key=lambda item: isinstance(item[1], ValueTarget) is not own_code):
            try:
                target.load(loaded, strict=strict)
            except TierckptError:
                raise
            except Exception as error:
                done = f"{', '.join(changed) or 'no other entry'} was changed before"
                if is_distributed():
                    done += f"; other ranks may have changed {', '.join(selected)}"
                raise StateMismatchError(
                    f"load_state_dict of {name!r} raised {type(error).__name__}: {error}; {done}",
                    hint="Restore a checkpoint that fits this object, or exclude it with only=",
                    key=name,
                ) from error
            changed.append(name)


def mismatch(problems: Sequence[str]) -> StateMismatchError:
    return StateMismatchError(
        f"the state does not fit the checkpoint: {first_of(problems, PROBLEMS_SHOWN, '; ')}",
        hint="Build the state with the configuration it was saved with, or load the rest with strict=False; nothing "
        "was loaded",
    )
