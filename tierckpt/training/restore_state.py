"""Restores a checkpoint, or the part of it below some name, into live objects: models, optimizers, ``state``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from ..checkpoint.catalog import Checkpoint
from ..client import Client, get_client
from ..config import Settings
from ..dcp.reader import TierStorageReader
from ..errors import (
    CheckpointNotFoundError,
    IntegrityError,
    ObjectNotFoundError,
    StateMismatchError,
    TierckptError,
    UncommittedCheckpointError,
)
from ..format.layout import WINDOWS_DIR, Location, parse_uri, step_name, step_of
from ..loading.devices import check_device
from ..save.log_segments import BASE_NOTE
from ..stores.schemes import check_location
from ..telemetry import logger
from ..tracebacks import short_traceback
from .codec import job_state as states
from .every_step.redo_log import is_window
from .rank_exchange import all_gather, is_distributed, portable, same_outcome

log = logger("checkpointer")

NAMES_SHOWN = 20


def restore_into(reader: TierStorageReader, state: dict[str, Any], only: Collection[str] | None = None) -> str:
    """Load the checkpoint of ``reader`` into ``state``; of its entries, those named in ``only``. Nothing else is read.
    Returns what gradient logs that lead on from it call it, on all ranks.

    An error of any rank is raised on all of them, so that they stay at one step.
    """

    base = ""

    def read_target() -> tuple[Metadata, dict[str, Any], dict[str, states.Entry]]:
        nonlocal base
        metadata = reader.read_metadata()
        base = str(reader.notes().get(BASE_NOTE, "")) or getattr(metadata.storage_meta, "save_id", None) or ""
        names = states.structures(state, metadata, only)
        texts = reader.read_objects(metadata, list(names.values()))
        found = {name: texts[called] for name, called in names.items()}
        return metadata, *states.load_target(state, metadata, found, only)

    with unwrapped():
        metadata, target, entries = same_outcome(read_target)
        _load(reader, target)
        same_outcome(lambda: states.put_back(state, target, metadata, entries, only))
    return base or reader.path


def restore_newest(
    client: Client,
    location: Location,
    state: dict[str, Any],
    only: Collection[str] | None,
    fold: Callable[[TierStorageReader, Mapping[str, Any]], str],
    step: int | None,
    *,
    trust_pickle: bool = False,
) -> tuple[str, str] | None:
    """Restore ``step``, else the newest checkpoint of the run that has a good copy of every file. Returns its URI, and
    what its save was called.

    Where a redo log is newer than all checkpoints, ``fold`` makes one of it, and returns its URI; a redo log that
    cannot be replayed is passed over like a damaged checkpoint.

    None when there is none. Raises what keeps the newest from being restored, when no older one can be either, and what
    ``agreed_latest`` raises: "none" is never said for a shared tier that nobody could ask.
    """

    def open_checkpoint(uri: str) -> TierStorageReader:
        return TierStorageReader(uri, trust_pickle=trust_pickle, settings=client.settings)

    if step is not None:
        uri = location.child(step_name(step)).uri
        try:
            return uri, restore_into(open_checkpoint(uri), state, only)
        except (CheckpointNotFoundError, UncommittedCheckpointError) as error:
            window = open_checkpoint(location.child(WINDOWS_DIR).child(step_name(step)).uri)
            try:
                same_outcome(window.read_metadata)
            except TierckptError:
                raise error from None
            return uri, restore_into(open_checkpoint(fold(window, state)), state, only)
    lost: list[tuple[str, TierckptError]] = []
    step_max: int | None = None
    while True:
        try:
            newest = agreed_latest(client, location, step_max, windows=True)
        except CheckpointNotFoundError:
            if not lost:
                raise
            newest = None
        if newest is None:
            break
        found = newest
        try:
            if is_window(parse_uri(newest)):
                newest = fold(open_checkpoint(newest), state)
            save = restore_into(open_checkpoint(newest), state, only)
        except (IntegrityError, ObjectNotFoundError, StateMismatchError) as error:
            if isinstance(error, StateMismatchError) and not is_window(parse_uri(found)):
                raise  # one of a checkpoint is the caller's to know
            lost.append((found, error))
            damaged = step_of(newest)
            if damaged is None:
                break  # nothing is older than what has no step
            step_max = damaged - 1
            continue
        if lost:
            told = "; ".join(
                f"{passed} {'was not replayed' if is_window(parse_uri(passed)) else 'has no good copy left'}: {error}"
                for passed, error in lost
            )
            log.warning("restored %s, because %s", newest, told)
        return newest, save
    if lost:
        raise lost[0][1]  # what is wrong with the newest says more
    return None


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
    """
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
    device = check_device(device)
    reader = TierStorageReader(_newest(uri, settings), trust_pickle=trust_pickle, settings=settings)

    def read_target() -> dict[str, Any]:
        metadata = reader.read_metadata()
        names = _below(prefix, metadata, reader.path)
        if module is None:
            return {name: _placeholder(metadata, name, device) for name in names}
        model = get_model_state_dict(module)
        target: dict[str, Any] = {prefix: model} if prefix else model
        states.check_fits(target, metadata)
        return target

    with unwrapped():
        target = same_outcome(read_target)
        _load(reader, target)
        if module is not None:
            model = target[prefix] if prefix else target
            same_outcome(lambda: set_model_state_dict(module, model))
            return dict(model)
    start = len(prefix) + 1 if prefix else 0
    return {name[start:]: value for name, value in target.items()}


def _newest(uri: str | os.PathLike[str], settings: Settings) -> str | os.PathLike[str]:
    """The newest checkpoint at or under ``uri`` that every rank has; ``uri`` itself, for the error of its reader, when
    there is none."""
    client, location = get_client(settings), check_location(parse_uri(uri))
    client.wait_for_handoffs()
    return agreed_latest(client, location) or uri


def _load(reader: TierStorageReader, target: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is a fine number
        load(target, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=not is_distributed())


def _below(prefix: str, metadata: Metadata, where: str) -> list[str]:
    names = [name for name in metadata.state_dict_metadata if not name.startswith(f"{states.STRUCTURE}.")]
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
