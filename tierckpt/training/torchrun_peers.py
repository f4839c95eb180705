"""``peers=torchrun``: the nodes of a job find each other through the store that the job has already.

Each node's first process asks its agent for its address, adds it to a list in the store, and hands the agent what
stands there. Nobody waits for anybody: who comes later finds those before it, and they learn of it from its agent.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..config import Settings
from ..errors import TierckptError
from ..ipc.agent_client import contact_for
from ..telemetry import logger
from .rank_exchange import is_distributed, own_store

log = logger("peer")

STORE_SECONDS = 30.0
ADDRESSES_BYTES_MAX = 512 << 10
"""Of the list, its end: an elastic job that restarted often leaves many places where nobody is."""


def meet(settings: Settings) -> None:
    """Have this node's agent know where the job's other agents are. Never fails a job: without them a node reads for
    itself, which is logged.

    Cost: two requests to the job's store and two to the agent, on the first rank of each node.
    """
    if settings.peers != "torchrun" or int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return
    try:
        store = _store()
        if store is None:
            log.warning("peers is torchrun, and this process belongs to no job of torch.distributed: it has no peers")
            return
        contact = contact_for(settings)
        mine = contact.ask({"op": "peers"})["me"]["address"]
        key = f"tierckpt/peers/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
        store.append(key, f"{mine},")
        told = bytes(store.get(key)).decode("ascii", "replace")
        if len(told) > ADDRESSES_BYTES_MAX:
            told = told[-ADDRESSES_BYTES_MAX:].partition(",")[2]
        others = [address for address in dict.fromkeys(told.split(",")) if address not in ("", mine)]
        contact.ask({"op": "peer_addresses", "addresses": others})
        log.info("found %d other agents of the job", len(others))
    except (TierckptError, RuntimeError, OSError, ValueError) as error:  # DistError and its kin are RuntimeErrors
        log.warning("cannot find the agents of the job's other nodes: %s", error)


def _store() -> Any:
    """The store of the job: the process group's, else the one that torchrun's variables point to; None: neither.

    A connection of our own, so that no other use of it waits for ours.
    """
    if is_distributed():
        return own_store()
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not (host and port.isdigit() and os.environ.get("TORCHELASTIC_RUN_ID")):
        return None
    patience = timedelta(seconds=STORE_SECONDS)
    return dist.TCPStore(host, int(port), is_master=False, timeout=patience)  # type: ignore[attr-defined]
