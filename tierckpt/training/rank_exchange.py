"""Messages between the ranks of a job: results of a save through the rendezvous store, small values by all_gather.

The store needs no collective, so that any thread may use it (P8); ``all_gather`` is one, for the caller's thread.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from .. import torch_internals
from ..errors import CheckpointSkippedError, CommitAbandonedError, ConfigError, OperationTimeoutError, TierckptError
from ..poll import LOCAL, Poll

T = TypeVar("T")

RANKS_SHOWN = 4

VERDICT_SECONDS = 10.0
"""How much longer the other ranks wait than rank 0, so that they hear from it what it waited for in vain."""


class Exchange:
    """One gather and one broadcast among ranks through the rendezvous store: no collective, so any thread may do it.

    Every wait has the deadline; an error of any rank becomes an error of all.
    """

    def __init__(self, key: str, previous_key: str, timeout_seconds: float) -> None:
        self.key = key
        self.previous_key = previous_key
        self.timeout_seconds = timeout_seconds
        self.may_be_done = False
        """True from when rank 0 may have made something of this rank's work, until it says that it has not."""

    def gather_then(self, work: Callable[[], Any], then: Callable[[list[Any]], T]) -> T:
        """Run ``work`` on every rank, ``then`` on rank 0 with all results; return its value everywhere."""
        if not is_distributed():
            value = then([work()])
            self.may_be_done = True
            return value
        store, rank, world = own_store(), dist.get_rank(), dist.get_world_size()
        try:
            outcome: Any = ("ok", work())
        except BaseException as error:
            outcome = ("error", portable(error))
        self.may_be_done = outcome[0] == "ok" and rank != 0
        store.set(f"{self.key}/{rank}", pickle.dumps(outcome))
        if rank == 0:
            verdict = self._decide(store, world, then)
            self.may_be_done = verdict[0] == "ok"
            store.set(f"{self.key}/verdict", pickle.dumps(verdict))
        else:
            deadline = time.monotonic() + self.timeout_seconds + VERDICT_SECONDS
            verdict = self.get_value(store, f"{self.key}/verdict", "rank 0 to commit", deadline)
            self.may_be_done = verdict[0] == "ok"
        with contextlib.suppress(Exception):  # the store may end with rank 0, and what is decided is decided
            store.delete_key(f"{self.key}/{rank}")
        if outcome[0] == "error":
            raise outcome[1]
        if verdict[0] == "error":
            raise verdict[1]
        return verdict[1]  # type: ignore[no-any-return]

    def _decide(self, store: Any, world: int, then: Callable[[list[Any]], T]) -> tuple[str, Any]:
        deadline = time.monotonic() + self.timeout_seconds  # one for all: they write at the same time
        try:
            outcomes = [
                self.get_value(store, f"{self.key}/{rank}", f"rank {rank} to write its shards", deadline)
                for rank in range(world)
            ]
            if self.previous_key:
                store.delete_key(f"{self.previous_key}/verdict")  # every rank has read it: all are done with this one
            _raise_if_failed(outcomes)
            return "ok", then([value for _, value in outcomes])
        except BaseException as error:
            return "error", portable(error)

    def get_value(self, store: Any, key: str, what: str, deadline: float) -> Any:
        for _ in Poll(deadline - time.monotonic(), LOCAL):
            if store.check([key]):
                return pickle.loads(store.get(key))
        raise OperationTimeoutError(
            f"waited {self.timeout_seconds:g} s for {what}",
            hint="That rank has died or hangs; the previous checkpoint is whole",
        )


def _raise_if_failed(outcomes: list[Any]) -> None:
    failed = {rank: value for rank, (kind, value) in enumerate(outcomes) if kind == "error"}
    if failed:
        rank, cause = next(iter(failed.items()))
        if all(isinstance(error, CheckpointSkippedError) for error in failed.values()):
            raise cause
        raise CommitAbandonedError(
            f"{len(failed)} of {len(outcomes)} ranks could not write their shards; the first says: {cause}",
            hint="Nothing was committed; the previous checkpoint is whole",
            rank=rank,
        )


def portable(error: BaseException) -> BaseException:
    """Return an error that pickles: ours do, others are put into words."""
    if isinstance(error, TierckptError):
        return error
    return CommitAbandonedError(f"{type(error).__name__}: {error}")


def own_store() -> Any:
    """A connection of our own to the job's rendezvous store, so that waiting on it blocks nobody else's use."""
    store: Any = torch_internals.get_default_store()
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def agree_on_name(uri: str) -> str:
    """Return a name for the job, the same on every rank.

    Raises ConfigError, on all ranks, when they are not to save to one ``uri``: each would wait for the others' part.
    """
    told = all_gather((uuid.uuid4().hex, uri))
    first = told[0][1]
    others = [f"rank {rank} has {other}" for rank, (_, other) in enumerate(told) if other != first]
    if others:
        more = f" and {len(others) - RANKS_SHOWN} more" if len(others) > RANKS_SHOWN else ""
        raise ConfigError(
            f"the ranks of this job have different URIs: rank 0 has {first}, {', '.join(others[:RANKS_SHOWN])}{more}",
            hint="Give every rank the same one. A relative path is another place in another working directory",
        )
    return str(told[0][0])


def same_outcome(work: Callable[[], T]) -> T:
    """Run ``work`` on every rank. When it fails on some, the error of the first of those is raised on all."""
    try:
        value, error = work(), None
    except Exception as failure:
        value, error = None, failure
    told = all_gather(portable(error) if error is not None else None)
    first = next((rank for rank, found in enumerate(told) if found is not None), None)
    if first is None:
        return cast(T, value)
    if error is not None and first == (dist.get_rank() if is_distributed() else 0):
        raise error
    raise told[first]


def broadcast(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 and return its value on every rank. Its error is raised on all of them."""
    if not is_distributed():
        return work()
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [("ok", work())]
        except Exception as error:
            told = [("error", portable(error))]
    dist.broadcast_object_list(told, src=0)
    if told[0][0] == "error":
        raise told[0][1]
    return cast(T, told[0][1])


def all_gather(value: Any) -> list[Any]:
    if not is_distributed():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
