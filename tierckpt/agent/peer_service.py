"""The agent's peer service: serves this node's chunks, tracks the members, and reports them to the node's processes.

An agent that cannot serve or find peers works without them, reports the problem, and retries.

    A1  Nothing here ends the agent or delays a drain: every error is caught, and files are accessed on other threads.
    A2  A process's report about a directory it fills is valid while its connection lasts.
    A3  The secret is in no answer, log or process argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Settings
from ..disk.durable import durable_write, read_whole
from ..errors import ConfigError, TierckptError
from ..peer import discovery
from ..peer.gossip import Gossip
from ..peer.inventory import Answers, Holdings
from ..peer.membership import CONTESTED_MAX, Member, MemberList, balanced, is_member_name
from ..peer.peer_client import PeerClient
from ..peer.peer_http import address_of, host_and_port
from ..peer.replica_policy import holders
from ..planning.replica_placement import survival_probability, survives
from ..telemetry import PEER_MEMBERS, PEER_REFUSED, logger
from ..types import Json
from .options import AgentOptions

if TYPE_CHECKING:
    from .peer_server import PeerServer

log = logger("peer")

NODE_NAME = "node-name"
NAME_BYTES_MAX = 1 << 10
START_SECONDS = 20.0
RETRY_SECONDS = 2.0
LOOK_SECONDS = 2.0
FILLS_MAX = 1024
SETS_MAX = 20_000
TOLD_BYTES_MAX = 768 << 10
"""A message has at most a MiB. Enough for 5000 members."""
UNREACHABLE_MAX = 256
NOWHERE = ("192.0.2.1:9", "[2001:db8::1]:9")
"""Addresses for documentation (RFC 5737, RFC 3849): their route is the default route. Nothing is sent."""

_VERSION = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Fetched:
    by_source: Counter[str] = field(default_factory=Counter)
    by_peer: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Fetched) -> Fetched:
        return Fetched(self.by_source + other.by_source, self.by_peer + other.by_peer)


class PeerService:
    """Serves peers and tracks members, from ``start`` to ``close``. Runs on the agent's loop.

    ``directory`` stores the node's name.
    """

    def __init__(self, settings: Settings, directory: Path, options: AgentOptions, answers: Answers) -> None:
        self.settings, self.options = settings, options
        self.holdings = Holdings(settings.local_root)
        self.problem = ""
        """Reason why this node does not serve or find peers."""
        self.gossip: Gossip | None = None
        self.server: PeerServer | None = None
        self._directory, self._answers = directory, answers
        self._lookup: discovery.Lookup | None = None
        self._client: PeerClient | None = None
        self._fills: dict[Hashable, list[tuple[str, Path]]] = {}
        self._reports: dict[tuple[Hashable, str], Fetched] = {}
        self._settled = Fetched()
        self._task: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self._asked_at = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._has_renamed = False

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            while not await self._try_start():  # noqa: ASYNC110  # no event reports a free port
                await asyncio.sleep(RETRY_SECONDS)
            gossip, server = self.gossip, self.server
            assert gossip is not None and server is not None
            asking = asyncio.create_task(gossip.run())
            try:
                while gossip.table.contested < CONTESTED_MAX or self._has_renamed:
                    self._observe(gossip, server)
                    await asyncio.sleep(LOOK_SECONDS)
            finally:
                asking.cancel()
            await self._rename(gossip.me.name)

    async def _rename(self, name: str) -> None:
        """Take a new name, once only, so that a false report of the same name has no further effect."""
        log.error("another node is named %s too (was the local root copied?): this node takes a new name", name)
        self._has_renamed = True
        await self._stop()
        await asyncio.to_thread((self._directory / NODE_NAME).unlink, missing_ok=True)

    async def _try_start(self) -> bool:
        try:
            await self._start()
            self.problem = ""
        except Exception as error:
            await self._stop()
            problem = str(error) or type(error).__name__
            if problem != self.problem:
                is_expected = isinstance(error, TierckptError | OSError | ImportError)
                log.error("this node does not join the cluster: %s", problem, exc_info=not is_expected)
            self.problem = problem
        self._started.set()
        return not self.problem

    async def _start(self) -> None:
        from .peer_server import PeerServer

        settings = self.settings
        lookup = await asyncio.to_thread(discovery.Lookup, settings.peers or "")
        name = await asyncio.to_thread(node_name, self._directory)
        table = MemberList(Member(name, settings.peer_listen, 0.0, settings.peer_domain))
        self._client = PeerClient(settings, name)
        self.gossip = Gossip(table, self._client.members, self._look_up)
        limit = self.options.serve_bytes_per_second
        self.server = PeerServer(settings, self.holdings, self.gossip, self._answers, bytes_per_second=limit)
        await self.server.start()
        self._lookup = lookup
        await self._look_up()
        log.info("serving peers as %s on %s", name, table.me.address)

    async def _look_up(self) -> Sequence[str]:
        """Return the seeds. Determines this node's address for the others too: networks may come up after agents."""
        assert self.gossip is not None and self.server is not None and self._lookup is not None
        table, seeds = self.gossip.table, await self._lookup.addresses()
        address, source = await asyncio.to_thread(_my_address, self.options.advertise, self.server.address, seeds)
        weight = float(self.options.network_bytes_per_second or 0)
        weight = weight or await asyncio.to_thread(discovery.network_bytes_per_second, source)
        table.me = replace(table.me, address=address, weight=weight)
        return seeds

    async def close(self) -> None:
        """Leave the cluster, and stop. Bounded in time; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        if self.gossip is not None:
            with contextlib.suppress(Exception):
                await self.gossip.announce_departure()
        await self._stop()

    async def _stop(self) -> None:
        server, client = self.server, self._client
        self.server = self._client = self.gossip = None
        for part in (server, client):
            if part is not None:
                with contextlib.suppress(Exception):
                    await part.close()

    def _observe(self, gossip: Gossip, server: PeerServer) -> None:
        for state, count in gossip.table.states().items():
            PEER_MEMBERS.emit(count, state=state)
        for reason in ("refused", "malformed", "busy", "overflowed"):
            if more := server.counts[reason] - self._counts[reason]:
                PEER_REFUSED.emit(more, reason=reason)
        if any(server.counts[kind] > self._counts[kind] for kind in ("chunks", "missing", "busy")):
            self._asked_at = time.monotonic()
        self._counts = Counter(server.counts)

    @property
    def is_needed(self) -> bool:
        """True while a process of this node fills a version, or another node has recently requested chunks."""
        return bool(self._fills) or time.monotonic() - self._asked_at < self.options.idle_seconds

    # --- requests of the node's processes --------------------------------------------------------------------------

    async def ask(self, owner: Hashable, version: str | None, directory: str | None) -> Json:
        """Return the members. With a version and a directory, start serving that directory.

        Raises ConfigError: this node has not joined the cluster. ValueError: malformed version, or a relative path.
        """
        if version is not None:
            _check_version(version)
            if directory is not None:
                self._add_fill(owner, version, Path(directory))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS / 2):
                await self._started.wait()
        gossip, server = self.gossip, self.server
        if gossip is None or server is None:
            raise ConfigError(f"this node has not joined the cluster: {self.problem or 'it is starting'}")
        live = gossip.table.live()
        me = next((member for member in live if member.name == gossip.me.name), None) or balanced([gossip.me])[0]
        interested = await asyncio.to_thread(server.interested, version) if version is not None else set()
        if version is not None and any(version == known for fills in self._fills.values() for known, _ in fills):
            interested = interested | {me.name}
        return {
            "me": me.to_json(),
            "live": _fitting([member.to_json() for member in live]),
            "interested": sorted(interested),
            "slow_to": sorted(server.slow_to(version)) if version is not None else [],
            "unreachable": self.unreachable_nodes(),
            "denied": gossip.denied,
        }

    def _add_fill(self, owner: Hashable, version: str, directory: Path) -> None:
        if not directory.is_absolute():
            raise ValueError("the directory to fill must be absolute")
        fills = self._fills.setdefault(owner, [])
        if (version, directory) in fills:
            return
        if len(fills) >= FILLS_MAX:
            raise ValueError(f"a process fills at most {FILLS_MAX} directories at a time")
        fills.append((version, directory))
        self.holdings.add(version, directory)

    def end_fills(self, owner: Hashable, version: str | None = None) -> None:
        """A process exited, or no longer fills ``version`` (A2)."""
        kept = []
        for known, directory in self._fills.pop(owner, []):
            if version is None or known == version:
                self.holdings.remove(known, directory)
            else:
                kept.append((known, directory))
        if kept:
            self._fills[owner] = kept
        for key in [key for key in self._reports if key[0] == owner and version in (None, key[1])]:
            self._settled += self._reports.pop(key)

    def report(self, owner: Hashable, version: str, report: Json) -> None:
        """Record the fetches of a process since its start. Raises ValueError: malformed report."""
        _check_version(version)
        if (owner, version) in self._reports or len(self._reports) < FILLS_MAX:
            by_source, by_peer = _amounts(report.get("by_source"), 16), _amounts(report.get("by_peer"), 8192)
            self._reports[(owner, version)] = Fetched(by_source, by_peer)

    def add_job_addresses(self, addresses: Sequence[str]) -> None:
        if self._lookup is not None and self.gossip is not None:
            self._lookup.set_job_addresses([str(address) for address in addresses])
            self.gossip.look_up_now()

    # --- status ----------------------------------------------------------------------------------------------------

    async def status(self) -> Json:
        serves = await asyncio.to_thread(self.server.status) if self.server is not None else None
        gossip, server = self.gossip, self.server
        fetched = sum(self._reports.values(), self._settled)
        document: Json = {
            "problem": self.problem or (gossip.denied if gossip is not None else ""),
            "lookup_problem": self._lookup.problem if self._lookup is not None else "",
            "me": gossip.me.to_json() if gossip is not None else None,
            "members": [],
            "fetched_bytes_by_source": fetched.by_source,
            "serves": serves,
        }
        if gossip is None or server is None or serves is None:
            return document
        rows = self.members()
        document["members_by_state"] = Counter(state for _, state, _ in rows)
        members = [
            {
                **member.to_json(),
                "heard_seconds_ago": heard_seconds_ago,
                "state": state,
                "served_bytes": server.served.get(member.name, 0),
                "fetched_bytes": fetched.by_peer.get(member.name, 0),
            }
            for member, state, heard_seconds_ago in rows
        ]
        document["members"] = _fitting(members)
        document["survival"] = await asyncio.to_thread(survival, gossip.table.live(), self.settings.replicas)
        return document

    def members(self) -> list[tuple[Member, str, float]]:
        """Return the other nodes by name, each with its state and the seconds since its last message."""
        if self.gossip is None:
            return []
        table, now = self.gossip.table, time.monotonic()
        records = sorted(table.records.values(), key=lambda record: record.member.name)
        return [(record.member, table.state(record), max(0.0, now - record.heartbeat_at)) for record in records]

    def unreachable_nodes(self) -> list[str]:
        gossip, places = self.gossip, self._lookup.places() if self._lookup is not None else {}
        if gossip is None:
            return []
        found = [place for place, addresses in places.items() if not any(map(gossip.is_reachable, addresses))]
        return found[:UNREACHABLE_MAX]

    async def ask_drains(self, member: Member) -> Json:
        """Raises TierckptError: see ``PeerClient.chunk``."""
        if self._client is None:
            raise ConfigError(f"this node has not joined the cluster: {self.problem or 'it is starting'}")
        return await self._client.drains(member)


def survival(members: Sequence[Member], replicas: int) -> Json:
    """Return the probability that every shard keeps a copy if n nodes are lost at once, n from one to replicas + 1."""
    known = tuple(sorted((member.name, member.domain) for member in members))
    return {str(lost): found for lost, found in _survival(known, replicas)}


@lru_cache(maxsize=4)
def _survival(known: tuple[tuple[str, str], ...], replicas: int) -> tuple[tuple[int, float], ...]:
    copies, nodes = min(replicas, len(known)), len(known)
    placed = holders((Member(name, "", domain=domain) for name, domain in known), replicas)
    number = {name: at for at, name in enumerate(placed)}
    held = [[number[name] for name in names] for names in placed.values()]

    def likely(lost: int) -> float:
        sets = math.comb(nodes, lost)
        if sets > SETS_MAX:
            return survival_probability(nodes, copies, lost)
        return sum(survives(held, chosen) for chosen in itertools.combinations(range(nodes), lost)) / sets

    return tuple((lost, likely(lost)) for lost in range(1, min(copies + 1, nodes) + 1))


def node_name(directory: Path) -> str:
    """Return the name of this node, created once and stored next to the agent's lock. Raises OSError, TierckptError."""
    path = directory / NODE_NAME
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        known = read_whole(path, NAME_BYTES_MAX).decode().strip()
        if is_member_name(known):
            return known
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()).strip(".-")[:80] or "node"
    name = f"{host}-{secrets.token_hex(4)}"
    durable_write(path, f"{name}\n".encode())  # only the holder of the agent's lock creates one
    return name


def _my_address(advertise: str | None, listening: str, seeds: Sequence[str]) -> tuple[str, str]:
    """Return (address for the others, IP address of outgoing connections). Blocking: may resolve a name."""
    host, port = host_and_port(listening)
    others = [seed for seed in seeds if seed != listening]
    source = discovery.source_address(others) or discovery.source_address(NOWHERE) or "127.0.0.1"
    if advertise is not None:
        address = discovery.resolve(advertise, port)
        return address, host_and_port(address)[0]
    if host not in ("0.0.0.0", "::"):
        return listening, host
    return address_of(source, port), source


def _fitting(rows: list[Json]) -> list[Json]:
    sizes = itertools.accumulate(len(json.dumps(row)) for row in rows)
    return [row for row, size in zip(rows, sizes, strict=True) if size <= TOLD_BYTES_MAX]


def _check_version(version: Any) -> None:
    if not (isinstance(version, str) and _VERSION.fullmatch(version)):
        raise ValueError("a version has 32 hex digits")


def _amounts(value: Any, most: int) -> Counter[str]:
    items = list(value.items())[:most] if isinstance(value, dict) else []
    sizes = [(name, size) for name, size in items if isinstance(size, int | float) and 0 <= size < 1e18]
    return Counter({str(name)[:128]: int(size) for name, size in sizes})
