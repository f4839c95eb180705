"""Restores a checkpoint, or the part of it below some name, into live objects: models, optimizers, ``state``."""

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
from ..checkpoint.catalog import LISTINGS_MAX, UNREADABLE, Checkpoint, WalkBack, changing, is_newer, read_newest
from ..client import Client, get_client
from ..config import Settings
from ..dcp.planner import TargetPlanner
from ..dcp.reader import TierStorageReader
from ..errors import (
    CheckpointNotFoundError,
    StateMismatchError,
    TierckptError,
    UncommittedCheckpointError,
)
from ..format.layout import WINDOWS_DIR, Location, parse_uri, step_name, step_of
from ..format.manifest import BASE_NOTE
from ..loading.tensor_parts import check_device
from ..rank_store import portable
from ..stores.schemes import check_location
from ..telemetry import logger
from ..tracebacks import short_traceback
from .codec import job_state as states
from .codec.modules import ModuleTarget
from .codec.modules import state_of as module_state
from .codec.stored import STRUCTURE, Stored
from .every_step.redo_log import is_window
from .rank_exchange import all_gather, is_distributed, same_outcome

log = logger("checkpointer")

NAMES_SHOWN = 20


class Restored(int):
    """The step that was restored, with ``strict=False``.

    Attributes:
        missing_keys: what the state has and the checkpoint lacks; it keeps its value.
        unexpected_keys: what the checkpoint has and the state lacks.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]

    @property
    def skipped_keys(self) -> list[str]:
        return self.missing_keys + self.unexpected_keys


class LoadedModel(dict[str, Any]):
    """The state dict that ``load_model`` returns, with the keys that ``strict=False`` skipped."""

    missing_keys: Sequence[str] = ()
    unexpected_keys: Sequence[str] = ()

    @property
    def skipped_keys(self) -> list[str]:
        return [*self.missing_keys, *self.unexpected_keys]


@dataclass
class Restoring:
    """What a restore is asked for, beside the state, and what it skipped."""

    only: Collection[str] | None = None
    strict: bool = True
    trust_pickle: bool = False
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)


def restore_into(reader: TierStorageReader, state: dict[str, Any], options: Restoring) -> str:
    """Load the checkpoint of ``reader`` into ``state``; nothing but what ``options.only`` names is read.
    Returns what gradient logs that lead on from it call it, on all ranks.

    An error of any rank is raised on all of them, so that they stay at one step.
    """
    base = ""

    def make_plan() -> states.RestorePlan:
        nonlocal base
        metadata = reader.read_metadata()
        base = str(reader.notes().get(BASE_NOTE, "")) or getattr(metadata.storage_meta, "save_id", None) or ""
        stored = Stored(metadata)
        names = states.structures(state, stored, options.only)
        texts = reader.read_objects(metadata, list(names.values()))
        return states.RestorePlan(state, stored, {name: texts[key] for name, key in names.items()}, options.only)

    with unwrapped():
        plan = same_outcome(make_plan)
        options.missing_keys, options.unexpected_keys = plan.missing, _seen_by_none(plan.unexpected)
        same_outcome(lambda: _check_keys(options))
        target = same_outcome(plan.destinations)
        _load(reader, target)
        same_outcome(lambda: plan.put_back(target, strict=options.strict, own_code=True))
        same_outcome(lambda: plan.put_back(target, strict=options.strict, own_code=False))
    if plan.left and options.only is None:
        log.info("%s has %s too, which the state has not", reader.path, ", ".join(plan.left))
    return base or reader.path


def _seen_by_none(unexpected: list[str]) -> list[str]:
    """Return the keys that no rank has a place for: those of another pipeline stage are not this rank's."""
    every = [set(keys) for keys in all_gather(unexpected)]
    return sorted(set.intersection(*every))


def _check_keys(options: Restoring) -> None:
    if options.strict and (options.missing_keys or options.unexpected_keys):
        raise states.mismatch(
            [f"{key} is not in the checkpoint" for key in options.missing_keys]
            + [f"{key} is in the checkpoint, and the state has no place for it" for key in options.unexpected_keys]
        )


def restore_newest(
    client: Client,
    location: Location,
    state: dict[str, Any],
    options: Restoring,
    fold: Callable[[TierStorageReader, Mapping[str, Any]], str],
    step: int | None,
) -> tuple[str, str] | None:
    """Restore ``step``, else the newest checkpoint of the run that has a good copy of every file. Returns its URI, and
    what its save was called.

    Where a redo log is newer than all checkpoints, ``fold`` makes one of it, and returns its URI; a redo log that
    cannot be replayed is passed over like a damaged checkpoint.

    None when there is none. Raises what keeps the newest from being restored, when no older one can be either, and what
    ``agreed_latest`` raises: "none" is never said for a shared tier that nobody could ask.
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
            walk.end()  # what is wrong with the newest says more
            return None
        found = newest
        try:
            if is_window(parse_uri(newest)):
                newest = fold(open_checkpoint(newest), state)
            save = restore_into(open_checkpoint(newest), state, options)
        except (StateMismatchError, *UNREADABLE) as error:
            if isinstance(error, StateMismatchError) and not is_window(parse_uri(found)):
                raise  # one of a checkpoint is the caller's to know
            if is_newer(agreed_latest(client, location, walk.step_max, windows=True), found):
                walk.note_removed()  # while it was read, by a job that has committed a newer one
            else:
                walk.note_lost(parse_uri(found), error)
            continue
        if walk.lost:
            told = "; ".join(
                f"{passed.uri} {'was not replayed' if is_window(passed) else 'has no good copy left'}: {error}"
                for passed, error in walk.lost
            )
            log.warning("restored %s, because %s", newest, told)
        return newest, save
    raise changing(location)


def newest_base(client: Client, location: Location) -> tuple[int, Branch | None, str, int] | None:
    """Return step and branch of the newest checkpoint; what gradient logs call the newest one that they lead on from;
    and the step of that. None without one. On all ranks together. Cost: a manifest of each checkpoint from it to the
    newest.
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
        except UNREADABLE:
            notes = {}  # a restore passes it over, and says so
        finally:
            reader.reset()  # retention removes none that a reader holds
        newest = newest or (step, parse_branch(notes.get(NOTE)))
        if base := str(notes.get(BASE_NOTE, "")):
            return *newest, base, step


def restore_from(base: int | None, restore: Callable[[int | None], tuple[str, str] | None]) -> tuple[str, str] | None:
    """Restore the checkpoint ``base``, from which the gradient log leads furthest; the newest without one, or where it
    cannot be read."""
    if base is not None:
        try:
            return restore(base)
        except UNREADABLE as error:
            log.warning("the gradient log behind step %d is of no use: %s", base, error)
    return restore(None)


@dataclass(frozen=True, slots=True)
class _Sight:
    """What one rank sees as the newest."""

    step: int | None = None
    attempt: str | None = None
    """None: there is none."""
    is_blind: bool = False
    """It could not ask the shared tier, and goes by what its node has saved."""
    error: BaseException | None = None


def agreed_latest(
    client: Client, location: Location, step_max: int | None = None, *, windows: bool = False
) -> str | None:
    """Lower everybody's newest step to the lowest, until all can load it: never a mix of steps.

    With ``windows`` a redo log that is newer than every checkpoint counts as one.

    None when no rank sees any, and all could look. A rank that could not look neither resets nor sets back the job: as
    long as others could, it waits for the shared tier; its error is raised on all ranks, and names it.

    Raises:
        StoreUnavailableError, PermissionDeniedError: a rank could not look.
        CheckpointNotFoundError: ranks see checkpoints, and there is none that all of them do.
        OperationTimeoutError: another job removes them faster than all ranks can look.
    """
    told = ""
    for _ in range(LISTINGS_MAX):
        try:
            return _agreed_once(client, location, step_max, windows)
        except CheckpointNotFoundError as error:
            if error.message == told:  # else a job has saved and removed steps between the looks of two ranks
                raise
            told = error.message
    raise changing(location)


def _agreed_once(client: Client, location: Location, step_max: int | None, windows: bool) -> str | None:
    limit, newest = step_max, ""
    while True:
        mine, found = _look(client, location, limit, windows)
        seen = _agree(mine)
        if len({sight.is_blind for sight in seen}) > 1:  # what others see may be newer than what is on this node
            if mine.is_blind:
                mine, found = _look(client, location, limit, windows, may_be_own=False)
            seen = _agree(mine)
        if all(sight.attempt is None for sight in seen):
            if newest:
                raise _nothing_common(location, newest)
            return None
        newest = newest or _told_of(seen)
        if any(sight.attempt is None for sight in seen):
            raise _nothing_common(location, newest)
        steps = {sight.step for sight in seen if sight.step is not None}
        if len({(sight.step, sight.attempt) for sight in seen}) == 1:
            return found.location.uri if found is not None else None
        if len(steps) == 0:
            raise _nothing_common(location, newest)
        # Ranks that see different saves under one step must not mix them: look below it.
        limit = min(steps) if len(steps) > 1 else min(steps) - 1


def _look(
    client: Client, location: Location, step_max: int | None, windows: bool, *, may_be_own: bool = True
) -> tuple[_Sight, Checkpoint | None]:
    try:
        newest = client.run(client.mover.selector.newest(location, step_max, may_be_own=may_be_own, windows=windows))
    except Exception as error:
        return _Sight(error=portable(error)), None
    found = newest.checkpoint
    attempt, step = (found.attempt, found.step) if found is not None else (None, None)
    return _Sight(step, attempt, newest.unseen is not None), found


def _agree(mine: _Sight) -> list[_Sight]:
    """What all ranks see. The first rank's error is raised on all of them."""
    seen: list[_Sight] = all_gather(mine)
    for rank, sight in enumerate(seen):
        if sight.error is None:
            continue
        if isinstance(sight.error, TierckptError) and len(seen) > 1:
            sight.error.context.setdefault("rank", rank)
        raise sight.error
    return seen


def _told_of(seen: Sequence[_Sight]) -> str:
    return "; ".join(
        f"rank {rank} sees {'none' if sight.attempt is None else 'step ' + str(sight.step)}"
        for rank, sight in enumerate(seen)
    )


def _nothing_common(location: Location, seen: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"no checkpoint of {location.uri} is seen by every rank: {seen}",
        hint="What only some nodes have was not drained, or the ranks read different places. Run `tierckpt drain "
        "--wait` on the nodes that have it, or start on those nodes; to begin anew, give the run another URI",
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
    """Load only the model of a checkpoint, and read no more of it than that. Returns its state dict.

    Takes what ``Checkpointer``, ``TierStorageWriter`` and stock DCP have saved, by any number of ranks. Every byte of
    ours is verified. Under torchrun all ranks make the call together; those of one node read what they share once.

    Args:
        uri: a checkpoint, or a run: then its newest usable checkpoint.
        module: is filled in place, sharded as it is. None: whole tensors are made on ``device``.
        prefix: the name the model was saved under (``{"model": ...}``). ``""``: the checkpoint is a state dict.
        device: where the tensors of the returned state dict are; with ``module`` they are the module's own.
        strict: False loads what ``module`` and checkpoint both have; ``skipped_keys`` of the result are the others.
        trust_pickle: as of ``TierStorageReader``.
        settings: a ``Settings``; ``overrides`` are single fields of it.

    Raises:
        ConfigError: this machine has no such ``device``, or a setting that cannot work.
        StateMismatchError: nothing lies below ``prefix`` (names what does), or ``module`` is of other shapes.
        StoreUnavailableError, PermissionDeniedError: which checkpoints there are could not be asked.
        CheckpointNotFoundError, UncommittedCheckpointError, IntegrityError, StoreError: from the reader.
    Cost: the bytes of the model are read once, a seventh of an Adam checkpoint in mixed precision.

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> with tierckpt.Checkpointer("run") as checkpointer:
        ...     copied = checkpointer.save(1, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
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
        text = reader.read_objects(metadata, [called])[called] if called in stored.items else None
        found = ModuleTarget(module, stored, prefix, text)
        if found.problems:
            raise states.mismatch(found.problems)
        return {}, found

    with unwrapped():
        target, found = same_outcome(read_target)
        if found is not None:
            options = Restoring(None, strict, missing_keys=found.missing)
            options.unexpected_keys = _seen_by_none(found.unexpected)
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
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is a fine number
        # ShardedTensor, of FSDP's first version, may hold others, which only DCP's planner opens.
        odd = (one for one in target.values() if type(one) not in (torch.Tensor, str))
        is_nested = any(hasattr(one, "local_shards") for one in odd)
        state, planner = (target, DefaultLoadPlanner()) if is_nested else ({}, TargetPlanner(target))
        load(state, storage_reader=reader, planner=planner, no_dist=not is_distributed())


def _below(prefix: str, metadata: Metadata, where: str) -> list[str]:
    names = [name for name in metadata.state_dict_metadata if not name.startswith(f"{STRUCTURE}.")]
    found = [name for name in names if not prefix or name.startswith(f"{prefix}.")]
    if not found:
        tops = sorted({name.partition(".")[0] for name in names})
        more = f" and {len(tops) - NAMES_SHOWN} more" if len(tops) > NAMES_SHOWN else ""
        raise StateMismatchError(
            f"nothing in {where} lies below {prefix!r}; what does lie there: {', '.join(tops[:NAMES_SHOWN])}{more}",
            hint="Give the name that the model was saved under as prefix, or '' when it has none",
        )
    return found


def _placeholder(metadata: Metadata, name: str, device: str | torch.device) -> Any:
    stored = metadata.state_dict_metadata[name]
    if isinstance(stored, TensorStorageMetadata):
        return torch.empty(stored.size, dtype=stored.properties.dtype, device=device)
    return ""  # an object: it takes the place of whatever stands here


class unwrapped:
    """Raise the typed error inside DCP's CheckpointException (a BaseException, by rank) as itself.

    So is an interrupt of this rank (Ctrl-C, ``sys.exit`` in a signal handler), which DCP wraps like any failure.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CheckpointException):
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
            own = causes.get(dist.get_rank() if is_distributed() else 0)
            if own is not None and not isinstance(own, (Exception, CheckpointException)):
                raise own from None
            ours = next((cause for cause in causes.values() if isinstance(cause, TierckptError)), None)
            if ours is not None:
                ours.context.setdefault("rank", min(rank for rank, cause in causes.items() if cause is ours))
                raise ours from error
