"""Bring a checkpoint, or the part of it below some name, back into live objects."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from ..client import Client, latest
from ..config import Settings
from ..dcp.reader import TierStorageReader
from ..errors import IntegrityError, ObjectNotFoundError, StateMismatchError, TierckptError
from ..layout import Location, step_name, step_of
from ..telemetry import logger
from ..tracebacks import short_traceback
from . import state as states
from .exchange import all_gather, is_distributed, same_outcome

log = logger("checkpointer")

NAMES_SHOWN = 20


def restore_into(reader: TierStorageReader, state: dict[str, Any], only: Collection[str] | None = None) -> None:
    """Load the checkpoint of ``reader`` into ``state``; of its entries, those named in ``only``. Nothing else is read.

    An error of any rank is raised on all of them, so that they stay at one step.
    """

    def read_target() -> tuple[Metadata, dict[str, Any]]:
        metadata = reader.read_metadata()
        return metadata, states.load_target(state, metadata, only)

    with unwrapped():
        metadata, target = same_outcome(read_target)
        _load(reader, target)
        same_outcome(lambda: states.put_back(state, target, metadata, only))


def restore_newest(
    client: Client, location: Location, state: dict[str, Any], only: Collection[str] | None, step: int | None
) -> str | None:
    """Restore ``step``, else the newest checkpoint of the run that has a good copy of every file. Returns its URI.

    None when there is none. Raises what keeps the newest from being restored, when no older one can be either.
    """
    passed_over: list[tuple[str, BaseException]] = []
    while True:
        uri = location.child(step_name(step)).uri if step is not None else _newest_below(client, location, passed_over)
        if uri is None:
            if passed_over:
                raise passed_over[0][1]
            return None
        try:
            restore_into(TierStorageReader(uri, settings=client.settings), state, only)
        except (IntegrityError, ObjectNotFoundError) as error:
            if step is not None:
                raise
            passed_over.append((uri, error))
            continue
        if passed_over:
            told = "; ".join(f"{passed} has no good copy left: {error}" for passed, error in passed_over)
            log.warning("restored %s, because %s", uri, told)
        return uri


def _newest_below(client: Client, location: Location, passed_over: Sequence[tuple[str, BaseException]]) -> str | None:
    steps = [step_of(uri) for uri, _ in passed_over]
    below = min((found for found in steps if found is not None), default=None)
    return agreed_latest(client, location, below - 1 if below is not None else None)


def agreed_latest(client: Client, location: Location, step_max: int | None = None) -> str | None:
    """Lower everybody's newest step to the lowest, until all can load it: never a mix of steps."""
    while True:
        limit = step_max
        found = client.run(lambda engine: engine.latest(location, limit))  # noqa: B023
        attempt = found.manifest.attempt if found is not None and found.manifest is not None else ""
        seen = all_gather((found.step, attempt) if found is not None else None)
        if any(item is None for item in seen):
            return None
        if len(set(seen)) == 1:
            return found.location.uri if found is not None else None
        steps = {step for step, _ in seen}
        # Ranks that see different saves under one step must not mix them: look below it.
        step_max = min(steps) if len(steps) > 1 else min(steps) - 1


@short_traceback
def load_model(
    uri: str | os.PathLike[str],
    module: torch.nn.Module | None = None,
    *,
    prefix: str = "model",
    device: str | torch.device = "cpu",
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
        settings: a ``Settings``; ``overrides`` are single fields of it.

    Raises:
        StateMismatchError: nothing lies below ``prefix`` (names what does), or ``module`` is of other shapes.
        CheckpointNotFoundError, UncommittedCheckpointError, IntegrityError, StoreError: from the reader.
    Cost: the bytes of the model are read once, a seventh of an Adam checkpoint in mixed precision.
    """
    settings = Settings.load(settings, **overrides)
    reader = TierStorageReader(_newest(uri, settings), settings=settings)

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
    some rank has none."""
    found = same_outcome(lambda: latest(uri, settings=settings))
    everywhere = all_gather(found)
    if any(one is None for one in everywhere):
        return uri
    return str(min(everywhere, key=lambda one: (step_of(one) or 0, one)))


def _load(reader: TierStorageReader, target: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is a fine number
        load(target, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=not is_distributed())


def _below(prefix: str, metadata: Metadata, where: str) -> list[str]:
    names = list(metadata.state_dict_metadata)
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
    """Raise the typed error inside DCP's CheckpointException (a BaseException, by rank) as itself."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CheckpointException):
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
            ours = next((cause for cause in causes.values() if isinstance(cause, TierckptError)), None)
            if ours is not None:
                ours.context.setdefault("rank", min(rank for rank, cause in causes.items() if cause is ours))
                raise ours from error
