"""Restores a checkpoint, or the part under a prefix, into live objects."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ..checkpoint.branches import NOTE, Branch
from ..checkpoint.branches import parse as parse_branch
from ..checkpoint.catalog import (
    LISTINGS_MAX,
    UNREADABLE_ERRORS,
    Checkpoint,
    WalkBack,
    changing_run_error,
    is_newer,
    read_newest,
)
from ..client import Client, get_client
from ..config import Settings
from ..dcp.planner import TargetPlanner
from ..dcp.reader import TierStorageReader
from ..errors import CheckpointNotFoundError, StateMismatchError, TierckptError, UncommittedCheckpointError
from ..format.layout import WINDOWS_DIR, Location, parse_uri, step_name, step_of
from ..format.manifest import BASE_NOTE
from ..loading.tensor_parts import check_device
from ..rank_store import portable
from ..stores.schemes import check_location
from ..telemetry import logger
from ..tracebacks import short_traceback
from .codec import job_state as states
from .codec.reconstruction import NO_TEXT
from .codec.stored import STRUCTURE, Stored
from .codec.values import ModuleTarget
from .codec.values import state_of as module_state
from .every_step.redo_log import is_window
from .rank_exchange import all_gather, is_distributed, same_outcome

log = logger("checkpointer")

NAMES_SHOWN = 20


class _Skips:
    missing_keys: Sequence[str] = ()
    unexpected_keys: Sequence[str] = ()

    @property
    def skipped_keys(self) -> list[str]:
        return [*self.missing_keys, *self.unexpected_keys]


class Restored(_Skips, int):
    """The restored step, with ``strict=False``.

    Attributes:
        missing_keys: keys of the state that the checkpoint lacks; they keep their values.
        unexpected_keys: keys of the checkpoint that the state lacks.
    """


class LoadedModel(_Skips, dict[str, Any]):
    """A state dict, with the keys that ``strict=False`` skipped."""


@dataclass
class Restoring:
    only: Collection[str] | None = None
    strict: bool = True
    trust_pickle: bool = False
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)


def restore_into(reader: TierStorageReader, state: dict[str, Any], options: Restoring) -> str:
    """Load the checkpoint of ``reader`` into ``state``. Returns its base name in gradient logs.

    Raises an error of any rank on all.
    """

    def make_plan() -> tuple[states.RestorePlan, str]:
        metadata = reader.read_metadata()
        base = str(reader.notes().get(BASE_NOTE, "")) or getattr(metadata.storage_meta, "save_id", None) or ""
        stored = Stored(metadata)
        names = states.structures(state, stored, options.only)
        texts = reader.read_objects(metadata, list(names.values()))
        objects = {name: texts[key] for name, key in names.items()}
        return states.RestorePlan(state, stored, objects, options.only), base or reader.path

    with unwrapped():
        plan, base = same_outcome(make_plan)
        options.missing_keys, options.unexpected_keys = plan.missing, _unexpected_on_all_ranks(plan.unexpected)
        same_outcome(lambda: _check_keys(options))
        target = same_outcome(plan.destinations)
        _load(reader, target)
        same_outcome(lambda: plan.put_back(target, strict=options.strict, own_code=True))
        same_outcome(lambda: plan.put_back(target, strict=options.strict, own_code=False))
    if plan.skipped and options.only is None:
        log.info("%s also has %s, which the state does not have", reader.path, ", ".join(plan.skipped))
    return base


def _unexpected_on_all_ranks(unexpected: list[str]) -> list[str]:
    every = [set(keys) for keys in all_gather(unexpected)]
    return sorted(set.intersection(*every))


def _check_keys(options: Restoring) -> None:
    if options.strict and (options.missing_keys or options.unexpected_keys):
        raise states.mismatch(
            [f"{key} is not in the checkpoint" for key in options.missing_keys]
            + [f"{key} is in the checkpoint but not in the state" for key in options.unexpected_keys]
        )


def restore_newest(
    client: Client,
    location: Location,
    state: dict[str, Any],
    options: Restoring,
    fold: Callable[[TierStorageReader, Mapping[str, Any]], str],
    step: int | None,
) -> tuple[str, str] | None:
    """Restore ``step``, else the newest checkpoint with a good copy of every file. Returns URI and name of the save.

    ``fold`` makes a checkpoint of a redo log that is newer than all checkpoints. Raises the newest checkpoint's error
    if no older one can be restored, and the errors of ``agreed_latest``.
    """

    def open_checkpoint(uri: str) -> TierStorageReader:
        return TierStorageReader(uri, trust_pickle=options.trust_pickle, settings=client.settings)

    if step is not None:
        uri = location.child(step_name(step)).uri
        try:
            return uri, restore_into(open_checkpoint(uri), state, options)
        except (CheckpointNotFoundError, UncommittedCheckpointError) as error:
            window = open_checkpoint(location.child(WINDOWS_DIR).child(step_name(step)).uri)
            try:
                same_outcome(window.read_metadata)
            except TierckptError:
                raise error from None
            return uri, restore_into(open_checkpoint(fold(window, state)), state, options)
    walk = WalkBack(location)
    while True:
        try:
            newest = agreed_latest(client, location, walk.step_max, windows=True)
        except CheckpointNotFoundError:
            walk.end()
            raise
        if newest is None:
            walk.end()
            return None
        found = newest
        try:
            if is_window(parse_uri(newest)):
                newest = fold(open_checkpoint(newest), state)
            save = restore_into(open_checkpoint(newest), state, options)
        except (StateMismatchError, *UNREADABLE_ERRORS) as error:
            if isinstance(error, StateMismatchError) and not is_window(parse_uri(found)):
                raise
            if is_newer(agreed_latest(client, location, walk.step_max, windows=True), found):
                walk.note_removed()
            else:
                walk.note_lost(parse_uri(found), error)
            continue
        if walk.lost:
            message = "; ".join(
                f"{passed.uri} {'was not replayed' if is_window(passed) else 'has no good copy left'}: {error}"
                for passed, error in walk.lost
            )
            log.warning("restored %s, because %s", newest, message)
        return newest, save


def newest_base(client: Client, location: Location) -> tuple[int, Branch | None, str, int] | None:
    """Return step and branch of the newest checkpoint, and name and step of the newest base of gradient logs.

    Collective. Reads the manifests since that base.
    """
    newest: tuple[int, Branch | None] | None = None
    limit: int | None = None
    while True:
        try:
            uri = agreed_latest(client, location, limit, windows=True)
        except CheckpointNotFoundError:
            return None
        step = step_of(uri) if uri is not None else None
        if uri is None or step is None:
            return None
        limit = step - 1
        reader = TierStorageReader(uri, settings=client.settings)
        try:
            notes = same_outcome(reader.notes)
        except UNREADABLE_ERRORS:
            notes = {}
        finally:
            reader.reset()  # retention keeps checkpoints that a reader holds
        newest = newest or (step, parse_branch(notes.get(NOTE)))
        if base := str(notes.get(BASE_NOTE, "")):
            return *newest, base, step


def restore_from(base: int | None, restore: Callable[[int | None], tuple[str, str] | None]) -> tuple[str, str] | None:
    if base is not None:
        try:
            return restore(base)
        except UNREADABLE_ERRORS as error:
            log.warning("the gradient log after step %d is unusable: %s", base, error)
    return restore(None)


@dataclass(frozen=True, slots=True)
class _Sight:
    step: int | None = None
    attempt: str | None = None
    is_blind: bool = False
    """The shared tier could not be listed; this is the newest save of the rank's node."""
    error: BaseException | None = None


def agreed_latest(
    client: Client, location: Location, step_max: int | None = None, *, windows: bool = False
) -> str | None:
    """Return the newest checkpoint that all ranks can load: lower the step until all agree, never mix steps.

    None if all ranks could list and see no checkpoint. If only some could list, the job waits for the shared tier. With
    ``windows``, a redo log counts too.

    Raises the errors of ``Checkpointer.restore``, on all ranks, and OperationTimeoutError: another job removes
    checkpoints faster than all ranks can list them.
    """
    message = ""
    for _ in range(LISTINGS_MAX):
        try:
            return _agreed_once(client, location, step_max, windows)
        except CheckpointNotFoundError as error:
            if error.message == message:  # else another job has changed the run between two listings
                raise
            message = error.message
    raise changing_run_error(location)


def _agreed_once(client: Client, location: Location, step_max: int | None, windows: bool) -> str | None:
    limit, newest = step_max, ""
    while True:
        own_view, found = _find_newest(client, location, limit, windows)
        views = _agree(own_view)
        if len({view.is_blind for view in views}) > 1:  # other ranks may see newer checkpoints
            if own_view.is_blind:
                own_view, found = _find_newest(client, location, limit, windows, may_be_own=False)
            views = _agree(own_view)
        if all(view.attempt is None for view in views):
            if newest:
                raise _no_common_step(location, newest)
            return None
        seen = ("none" if view.attempt is None else f"step {view.step}" for view in views)
        newest = newest or "; ".join(f"rank {rank} sees {what}" for rank, what in enumerate(seen))
        if len({(view.step, view.attempt) for view in views}) == 1:
            return found.location.uri if found is not None else None
        steps = {view.step for view in views if view.step is not None}
        if not steps or any(view.attempt is None for view in views):
            raise _no_common_step(location, newest)
        # Different saves under one step must not mix.
        limit = min(steps) if len(steps) > 1 else min(steps) - 1


def _find_newest(
    client: Client, location: Location, step_max: int | None, windows: bool, *, may_be_own: bool = True
) -> tuple[_Sight, Checkpoint | None]:
    try:
        found = client.run(client.mover.selector.newest(location, step_max, may_be_own=may_be_own, windows=windows))
    except Exception as error:
        return _Sight(error=portable(error)), None
    if found is None:
        return _Sight(), None
    return _Sight(found.step, found.attempt, found.unseen is not None), found


def _agree(own_view: _Sight) -> list[_Sight]:
    views: list[_Sight] = all_gather(own_view)
    for rank, view in enumerate(views):
        if view.error is None:
            continue
        if isinstance(view.error, TierckptError) and len(views) > 1:
            view.error.context.setdefault("rank", rank)
        raise view.error
    return views


def _no_common_step(location: Location, views: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"no checkpoint of {location.uri} is visible to every rank: {views}",
        hint="Some nodes hold undrained checkpoints, or the ranks read different places. Run `tierckpt drain "
        "--wait` on the nodes that hold them, or start there; to start over, use another URI",
    )


@short_traceback
def load_model(
    uri: str | os.PathLike[str],
    module: torch.nn.Module | None = None,
    *,
    prefix: str = "model",
    device: str | torch.device = "cpu",
    strict: bool = True,
    trust_pickle: bool = False,
    settings: Settings | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Load only the model of a checkpoint, and read nothing else. Returns its state dict.

    Reads checkpoints of ``Checkpointer``, ``TierStorageWriter`` and stock DCP, of any number of ranks, and verifies
    every byte of the first two. Under torchrun all ranks must call it.

    Args:
        uri: a checkpoint, or a run: then its newest usable checkpoint.
        module: filled in place, with its sharding. None: whole tensors are made on ``device``.
        prefix: the name the model was saved under. ``""``: the checkpoint is a state dict.
        strict: False loads the keys that ``module`` and checkpoint share; ``skipped_keys`` of the result has the rest.
        trust_pickle: as in ``TierStorageReader``.
        settings: a ``Settings``; ``overrides`` are single fields of it.

    Raises:
        ConfigError: this machine has no such ``device``, or a setting is invalid.
        StateMismatchError: no key starts with ``prefix`` (lists the keys), or ``module`` has other shapes.
        StoreUnavailableError, PermissionDeniedError: the checkpoints could not be listed.
        CheckpointNotFoundError, UncommittedCheckpointError, IntegrityError, StoreError: from the reader.

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> with tierckpt.Checkpointer("run") as checkpointer:
        ...     saved = checkpointer.save(1, {"model": model})
        >>> {name: tuple(tensor.shape) for name, tensor in tierckpt.load_model("run").items()}
        {'weight': (3, 2), 'bias': (3,)}
    """
    settings = Settings.load(settings, **overrides)
    client, location, device = get_client(settings), check_location(parse_uri(uri)), check_device(device)
    client.wait_for_handoffs()

    def load_from(found: str) -> dict[str, Any]:
        reader = TierStorageReader(found, trust_pickle=trust_pickle, settings=settings)
        return _load_model(reader, module, prefix, device, strict=strict)

    return read_newest(location, lambda: agreed_latest(client, location), load_from)


def _load_model(
    reader: TierStorageReader, module: torch.nn.Module | None, prefix: str, device: torch.device, *, strict: bool
) -> dict[str, Any]:
    def read_target() -> tuple[dict[str, Any], ModuleTarget | None]:
        metadata = reader.read_metadata()
        names = _below(prefix, metadata, reader.path)
        if module is None:
            return {name: _placeholder(metadata, name, device) for name in names}, None
        stored, called = Stored(metadata), states.structure_name(prefix)
        text = reader.read_objects(metadata, [called])[called] if called in stored.items else NO_TEXT
        found = ModuleTarget(module, stored, prefix, text)
        if found.problems:
            raise states.mismatch(found.problems)
        return {}, found

    with unwrapped():
        target, found = same_outcome(read_target)
        if found is not None:
            options = Restoring(None, strict, missing_keys=found.missing)
            options.unexpected_keys = _unexpected_on_all_ranks(found.unexpected)
            same_outcome(lambda: _check_keys(options))
            target = found.destinations()
        _load(reader, target)
        if module is not None and found is not None:
            same_outcome(lambda: found.load(target, strict=strict))
            loaded = LoadedModel(module_state(module)[0])
            loaded.missing_keys, loaded.unexpected_keys = options.missing_keys, options.unexpected_keys
            return loaded
    start = len(prefix) + 1 if prefix else 0
    return {name[start:]: value for name, value in target.items()}


def _load(reader: TierStorageReader, target: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        # Only DCP's planner unpacks FSDP1's ShardedTensor.
        unsupported = (one for one in target.values() if type(one) not in (torch.Tensor, str))
        is_nested = any(hasattr(one, "local_shards") for one in unsupported)
        state, planner = (target, DefaultLoadPlanner()) if is_nested else ({}, TargetPlanner(target))
        load(state, storage_reader=reader, planner=planner, no_dist=not is_distributed())


def _below(prefix: str, metadata: Metadata, where: str) -> list[str]:
    names = [name for name in metadata.state_dict_metadata if not name.startswith(f"{STRUCTURE}.")]
    found = [name for name in names if not prefix or name.startswith(f"{prefix}.")]
    if not found:
        entries = sorted({name.partition(".")[0] for name in names})[:NAMES_SHOWN]
        raise StateMismatchError(
            f"nothing in {where} is under {prefix!r}; its entries: {', '.join(entries)}",
            hint="Pass the name that the model was saved under as prefix, or '' if it has none",
        )
    return found


def _placeholder(metadata: Metadata, name: str, device: str | torch.device) -> Any:
    stored = metadata.state_dict_metadata[name]
    if isinstance(stored, TensorStorageMetadata):
        return torch.empty(stored.size, dtype=stored.properties.dtype, device=device)
    return ""


class unwrapped:
    """Raise the error inside DCP's CheckpointException, which also wraps an interrupt."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CheckpointException):
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
            own = causes.get(dist.get_rank() if is_distributed() else 0)
            if own is not None and not isinstance(own, (Exception, CheckpointException)):
                raise own from None
            typed_error = next((cause for cause in causes.values() if isinstance(cause, TierckptError)), None)
            if typed_error is not None:
                typed_error.context.setdefault("rank", next(r for r, cause in causes.items() if cause is typed_error))
                raise typed_error from error
