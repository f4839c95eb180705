"""Messages between ranks: results of a save through the rendezvous store, small values by all_gather.

The store needs no collective, so any thread may use it (P8).

``peers=torchrun``: each node's first process adds its agent's address to a list in the store, and passes the list to
the agent. No node waits for another: earlier agents learn about a later one from it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..config import Settings
from ..errors import CheckpointSkippedError, CommitAbandonedError, ConfigError, TierckptError
from ..ipc.agent_client import shared_client
from ..rank_store import RankStore, own_store, portable
from ..telemetry import logger

T = TypeVar("T")

VERDICT_SECONDS = 10.0
"""The other ranks wait this much longer, for rank 0's own timeout report."""

_HINT = "A rank died or hangs; the previous checkpoint is intact"


@dataclass
class Exchange:
    """One gather and one broadcast through the rendezvous store, on any thread.

    An error of one rank becomes an error of all.
    """

    key: str
    previous_key: str
    timeout_seconds: float
    may_be_done: bool = False
    """Rank 0 may have used this rank's value."""

    def gather_then(self, work: Callable[[], Any], then: Callable[[list[Any]], Any]) -> Any:
        """Run ``work`` on every rank, then ``then`` on rank 0 with all results. Returns its value on all ranks.

        With several ranks, results and value are JSON.
        """
        if not is_distributed():
            value = then([work()])
            self.may_be_done = True
            return value
        store, failure = RankStore(self.key, self.timeout_seconds), None
        try:
            value = work()
        except BaseException as error:
            value = failure = portable(error)
        self.may_be_done = failure is None and store.rank != 0
        store.put(str(store.rank), value)
        if store.rank == 0:
            verdict = self._decide(store, then)
            self.may_be_done = not isinstance(verdict, TierckptError)
            store.put("verdict", verdict)
        else:
            [verdict] = store.wait(["verdict"], "rank 0 did not commit", _HINT, self.timeout_seconds + VERDICT_SECONDS)
            self.may_be_done = not isinstance(verdict, TierckptError)
        store.delete(str(store.rank))
        if failure is not None:
            raise failure
        if isinstance(verdict, TierckptError):
            raise verdict
        return verdict

    def _decide(self, store: RankStore, then: Callable[[list[Any]], Any]) -> Any:
        try:
            ranks = [str(rank) for rank in range(store.world_size)]
            outcomes = store.wait(ranks, "some ranks did not write their shards", _HINT)
            if self.previous_key:  # every rank has read the previous verdict
                store.delete("verdict", self.previous_key)
            _raise_if_failed(outcomes)
            return then(outcomes)
        except BaseException as error:
            return portable(error)


def _raise_if_failed(outcomes: list[Any]) -> None:
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, TierckptError)}
    if failed:
        rank, cause = next(iter(failed.items()))
        if all(isinstance(error, CheckpointSkippedError) for error in failed.values()):
            raise cause
        raise CommitAbandonedError(
            f"{len(failed)} of {len(outcomes)} ranks could not write their shards; first error: {cause}",
            hint="Nothing was committed; the previous checkpoint is intact",
            rank=rank,
        )


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def agree_on_name(uri: str) -> str:
    """Return a name for the job, the same on every rank. Raises ConfigError on all ranks if their ``uri`` differ."""
    gathered = all_gather((uuid.uuid4().hex, uri))
    name, first = gathered[0]
    for rank, (_, other) in enumerate(gathered):
        if other != first:
            raise ConfigError(
                f"the ranks of this job have different URIs: rank 0 has {first}, rank {rank} has {other}",
                hint="Give every rank the same URI. A relative path depends on the working directory",
            )
    return str(name)


def same_outcome(work: Callable[[], T]) -> T:
    """Run ``work`` on every rank. Raises the first failed rank's error on all."""
    try:
        value, error = work(), None
    except Exception as failure:
        value, error = None, failure
    gathered = all_gather(portable(error) if error is not None else None)
    first = next((rank for rank, found in enumerate(gathered) if found is not None), None)
    if first is None:
        return cast(T, value)
    if error is not None and first == (dist.get_rank() if is_distributed() else 0):
        raise error
    raise gathered[first]


def broadcast(work: Callable[[], T]) -> T:
    if not is_distributed():
        return work()
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [work()]
        except Exception as error:
            outcome = [portable(error)]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], TierckptError):
        raise outcome[0]
    return cast(T, outcome[0])


def all_gather(value: Any) -> list[Any]:
    if not is_distributed():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


log = logger("peer")

STORE_SECONDS = 30.0
ADDRESSES_BYTES_MAX = 512 << 10
"""Only the list's end is read: an elastic job may leave many stale addresses."""


def exchange_addresses(settings: Settings) -> None:
    """Pass the addresses of the job's other agents to this node's agent. Only logs failures."""
    if settings.peers != "torchrun" or int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return
    try:
        if (connect := _connector()) is None:
            log.warning("peers is torchrun, but this process is in no torch.distributed job: it has no peers")
            return
        contact = shared_client(settings)
        own_address = contact.ask({"op": "peers"})["me"]["address"]
        store = RankStore("tierckpt/peers", STORE_SECONDS, connect=connect)
        address_list = store.append(os.environ.get("TORCHELASTIC_RUN_ID", ""), f"{own_address},")
        if len(address_list) > ADDRESSES_BYTES_MAX:
            address_list = address_list[-ADDRESSES_BYTES_MAX:].partition(",")[2]
        others = [one for one in dict.fromkeys(address_list.split(",")) if one not in ("", own_address)]
        contact.ask({"op": "peer_addresses", "addresses": others})
        log.info("found %d other agents of the job", len(others))
    except (TierckptError, OSError, ValueError) as error:
        log.warning("cannot find the agents of the job's other nodes: %s", error)


def _connector() -> Callable[[], Any] | None:
    if is_distributed():
        return own_store
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not (host and port.isdigit() and os.environ.get("TORCHELASTIC_RUN_ID")):
        return None
    patience = timedelta(seconds=STORE_SECONDS)
    return lambda: dist.TCPStore(host, int(port), is_master=False, timeout=patience)  # type: ignore[attr-defined]
