"""Saves a window of a multi-step save as a redo log, and makes a checkpoint of it (docs/adr/0015-redo-log.md).

<run>/.tierckpt-windows/step-N     committed, drained, verified and removed like a checkpoint
    __tierckpt_window__            parts at their versions, gradients; a recipe in JSON, as bytes, for each rank
    other entries                  the rest of the state at step N

R1  No reader takes a redo log for a checkpoint: ``<run>/step-N`` does not exist before it is folded.
R2  Folding compares before it writes: a crash leaves the redo log, and the checkpoint complete or absent.
R3  Each rank folds its own part. Other ranks, groups or shards are rejected on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ...checkpoint import retention
from ...checkpoint.branches import NOTE
from ...dcp.reader import TierStorageReader
from ...errors import IntegrityError, StateMismatchError
from ...format.layout import WINDOWS_DIR, Location, parse_uri, step_of
from ...format.manifest import BASE_NOTE
from ...replay.optimizers import layout_digest, optimizers_in, parameters_of
from ...replay.redo import Conditions, Exact, Redo, gradient_names, pack, unpack
from ...replay.tree import gaps, without_gaps, wrap_shard
from ...telemetry import logger
from ...torch_internals import flatten_state_dict, set_element
from ...types import Json
from ..codec import job_state as states
from ..codec.rank_state import rank_key
from ..codec.reconstruction import empty_like
from ..rank_exchange import is_distributed, same_outcome
from ..saves import Notes, SaveRecord

log = logger("checkpointer")

WINDOW = "__tierckpt_window__"
TENSORS, RECIPE = f"{WINDOW}.tensors.", f"{WINDOW}.recipe."
HINT = "The previous checkpoint is used. To use this one, restore on the ranks and with the shards that saved it"


def is_window(location: Location) -> bool:
    return location.parent.name == WINDOWS_DIR


def stored(tree: Any, redos: Mapping[int, Redo]) -> tuple[dict[str, Any], Notes]:
    """Return the state to save for a window, and notes. ``tree`` has gaps for tensors of optimizers."""
    found = list(gaps(tree))
    names: dict[int, dict[str, str]] = {number: {} for number in redos}
    for path, (number, key, _) in found:
        called = "/".join(map(str, path))
        if key in redos[number].sharded:
            called = f"{rank_key()}/{called}"
        names[number].setdefault(key, called)
    tensors: dict[str, torch.Tensor] = {}
    recipes = []
    for number, redo in redos.items():
        for key, _ in redo.devices:
            names[number].setdefault(key, f"{rank_key()}/{number}/{key}")
        packed, recipe = pack(redo, names[number])
        tensors |= packed
        recipes.append([number, recipe])
    text = json.dumps(
        {
            "world_size": dist.get_world_size() if is_distributed() else 1,
            "optimizers": recipes,
            "places": [[list(path), list(place)] for path, place in found],
        },
        separators=(",", ":"),
    )
    recipe_bytes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    window = {"tensors": tensors, "recipe": {rank_key(): recipe_bytes}}
    return without_gaps(tree) | {WINDOW: window}, _notes([*redos.values()], "redo log", "")


def _notes(redos: Sequence[Redo], what: str, accepted: str, steps: int = 0) -> Notes:
    return notes_of(redos[0].conditions, [redo.kind.__name__ for redo in redos], what, accepted, steps)


def notes_of(conditions: Conditions, kinds: Iterable[str], what: str, accepted: str, steps: int) -> Notes:
    """Return manifest notes about a replay. ``accepted``: differences to training; '' for none."""
    notes: Notes = {
        "replay": what,
        "exact": not accepted,
        "optimizer": ", ".join(sorted(set(kinds))),
        "build": conditions.build,
        "device": conditions.device,
        "implementation": conditions.implementation,
    }
    if accepted:
        notes["other than in training"] = accepted
        bounds = f"parameters {8 * steps} x 2**-24 of max(abs(p), lr), second moments {4 * steps} x 2**-24 of v"
        notes["tolerance"] = bounds
    return notes


def fold(reader: TierStorageReader, state: Mapping[str, Any], exact: Exact) -> tuple[dict[str, Any], Notes]:
    """Return the state at the last step of ``reader``'s redo log, and the notes of its manifest.

    ``state`` is not changed. Host memory: the window, 1 + r (K - 1) / 2 of the state.

    Raises:
        StateMismatchError: R3; or, with "required", another build, device or implementation.
        IntegrityError: the log is damaged, or parameters were changed outside the optimizer during the window.
    """
    metadata = reader.read_metadata()
    recipe = _recipe(reader, metadata)
    optimizers = [*optimizers_in(state).values()]
    _check_fits(recipe, optimizers, reader.path)
    target = _target(metadata, recipe, state, reader.path)
    reader.read_alone(metadata, target)
    tensors = {name.removeprefix(TENSORS): one for name, one in target.items() if name.startswith(TENSORS)}
    redos = {number: unpack(tensors, one) for number, one in recipe["optimizers"]}
    steps = max(redo.replay_steps for redo in redos.values())
    accepted = "; ".join(filter(None, (redo.fold(exact) for redo in redos.values())))
    paths = metadata.planner_data or {}
    tree: dict[str, Any] = {}
    for name, value in target.items():
        if not name.startswith(f"{WINDOW}."):
            set_element(tree, paths.get(name, (name,)), value)
    live = [{one.key: one.tensor for one in parameters_of(optimizer)} for optimizer in optimizers]
    try:
        for path, (number, key, name) in recipe["places"]:
            set_element(tree, tuple(path), _as_live(live[number][key], redos[number].tensors[key, name]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _bad(reader.path, error) from error
    return tree, _notes([*redos.values()], "replayed", accepted, steps)


def make_checkpoint(
    reader: TierStorageReader,
    state: Mapping[str, Any],
    exact: Exact,
    write: Callable[[SaveRecord, Mapping[str, Any], dict[str, Any]], Future[None]],
) -> str:
    """Fold the redo log of ``reader``, and save the result. Returns its URI. Collective.

    Raises the errors of ``fold``, on all ranks, and of the save.
    """
    window = parse_uri(reader.path)
    try:
        collected, notes = same_outcome(lambda: fold(reader, state, exact))
        base = str(reader.notes().get(BASE_NOTE, ""))
        notes |= {name: note for name, note in reader.notes().items() if name in {NOTE, retention.NOTE}}
    finally:
        reader.reset()  # its lease keeps the log from retention
    uri = window.parent.parent.child(window.name).uri
    record = SaveRecord(step_of(window.name) or 0, uri, notes=notes, base=base)
    write(record, state, collected).result()
    log.info("%s was made of its redo log, %s", record.uri, "bit for bit" if notes["exact"] else notes)
    return record.uri


def _recipe(reader: TierStorageReader, metadata: Metadata) -> Json:
    name = f"{RECIPE}{rank_key()}"
    found = metadata.state_dict_metadata.get(name)
    if not isinstance(found, TensorStorageMetadata):
        raise StateMismatchError(
            f"{reader.path} was saved by fewer ranks than this job has; it is not replayed", hint=HINT
        )
    target = {name: torch.empty(found.size, dtype=torch.uint8, device="cpu")}
    reader.read_alone(metadata, target)
    try:
        recipe: Json = json.loads(bytes(target[name].numpy()))
    except ValueError as error:
        raise _bad(reader.path, error) from error
    if not isinstance(recipe, dict) or recipe.keys() != {"world_size", "optimizers", "places"}:
        raise _bad(reader.path, "other fields")
    return recipe


def _check_fits(recipe: Json, optimizers: Sequence[torch.optim.Optimizer], path: str) -> None:
    world_size = dist.get_world_size() if is_distributed() else 1
    if any(one["sharded"] for _, one in recipe["optimizers"]) and recipe["world_size"] != world_size:
        raise StateMismatchError(
            f"{path} has the shards of {recipe['world_size']} ranks, this job has {world_size}; it is not replayed",
            hint=HINT,
        )
    layouts = dict(enumerate(map(layout_digest, optimizers)))
    if any(layouts.get(number) != one["layout"] for number, one in recipe["optimizers"]):
        raise StateMismatchError(
            f"{path} was saved with other optimizers, groups, parameters or shards than the state has", hint=HINT
        )


def _target(metadata: Metadata, recipe: Json, state: Mapping[str, Any], path: str) -> dict[str, Any]:
    own_names: set[str] = set()
    for _, one in recipe["optimizers"]:
        own_names |= {f"{TENSORS}{stored}" for _, _, stored, _ in one["tensors"]}
        own_names |= {f"{TENSORS}{stored}" for step in one["steps"] for stored in gradient_names(step, one["names"])}
    live, _ = flatten_state_dict(states.collect(state))
    target: dict[str, Any] = {}
    for name, found in metadata.state_dict_metadata.items():
        if name.startswith(f"{WINDOW}.") and name not in own_names:
            continue
        if not isinstance(found, TensorStorageMetadata):
            target[name] = ""
        else:  # on the host, unless it is sharded
            target[name] = empty_like(found, one if isinstance(one := live.get(name), DTensor) else None)
    if missing := own_names - target.keys():
        raise _bad(path, f"{len(missing)} of its tensors are missing")
    return target


def _as_live(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    is_shard = isinstance(parameter, DTensor) and tensor.shape == parameter.to_local().shape
    return wrap_shard(parameter, tensor) if is_shard else tensor


def _bad(path: str, why: object) -> IntegrityError:
    return IntegrityError(f"the recipe in {path} cannot be used: {why}", hint="The previous checkpoint is used")
