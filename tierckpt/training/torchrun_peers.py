"""``peers=torchrun``: the nodes of a job find each other through the job's rendezvous store.

Each node's first process adds its agent's address to a list in the store, and passes the list to the agent. No node
waits for another: earlier agents learn about a later one from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..config import Settings
from ..errors import TierckptError
from ..ipc.agent_client import shared_client
from ..rank_store import RankStore, own_store
from ..telemetry import logger
from .rank_exchange import is_distributed

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
        other_addresses = [
            address for address in dict.fromkeys(address_list.split(",")) if address not in ("", own_address)
        ]
        contact.ask({"op": "peer_addresses", "addresses": other_addresses})
        log.info("found %d other agents of the job", len(other_addresses))
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
