"""Progress of a rollout: which node has which chunks of one version, and the source of its bytes.

Peers report the bytes that they send; all others came from shared storage.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from ..cache.pool import Pool
from ..config import Settings
from ..errors import TierckptError
from ..ipc.agent_client import AgentClient
from ..peer.membership import member_of
from ..peer.peer_client import PeerClient
from ..peer.peer_http import CHUNKS_MAX, ChunkReport
from ..quantities import human_bytes, human_seconds
from ..types import Json

RATE_SECONDS = 5.0
CELLS_MAX = 128
DRAWN_MAX = 64
"""The slowest nodes are drawn with cells."""
SHARES = 9
ASKED = "a"


@dataclass
class Node:
    name: str
    chunks: bytearray = field(default_factory=bytearray)
    has: int = 0
    fetching: frozenset[int] = frozenset()
    after: int = 0
    """Line after which the next holdings are requested."""
    is_whole: bool = False
    is_silent: bool = False
    landed_bytes: int = 0
    from_peers_bytes: int = 0
    from_shared_bytes: int = 0
    served_bytes: int = 0
    history: deque[tuple[float, int, int]] = field(default_factory=deque)
    """Rows (time, from peers, from shared storage)."""
    before: tuple[int, int, int] | None = None
    """Landed, received and served bytes at the first request."""

    @property
    def is_part(self) -> bool:
        return self.is_whole or bool(self.chunks)

    def share(self) -> float:
        return 1.0 if self.is_whole else self.has / max(1, len(self.chunks))

    def rates(self) -> tuple[float, float]:
        """Bytes per second from peers, and from shared storage."""
        if len(self.history) < 2:
            return 0.0, 0.0
        (begun, *before), (now, *after) = self.history[0], self.history[-1]
        return (after[0] - before[0]) / max(now - begun, 1e-3), (after[1] - before[1]) / max(now - begun, 1e-3)


class Rollout:
    def __init__(self, uri: str, version: str, chunk_size_bytes: int, now: float) -> None:
        self.uri, self.version, self.chunk_size_bytes = uri, version, chunk_size_bytes
        self.size_bytes = self.total = 0
        self.nodes: dict[str, Node] = {}
        self.begun = self.now = now

    def node(self, name: str) -> Node:
        return self.nodes.setdefault(name, Node(name))

    @property
    def part(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_part]

    @property
    def is_done(self) -> bool:
        return bool(self.part) and all(node.is_whole for node in self.part)

    # --- reports of the nodes --------------------------------------------------------------------------------------

    def take(self, reports: Mapping[str, ChunkReport | None], statuses: Mapping[str, Json | None], now: float) -> None:
        """Add one round of answers; None for a node that did not answer."""
        self.now = now
        for name, found in reports.items():
            self._take_held(self.node(name), found)
        got = Counter[str]()
        for status in statuses.values():
            got.update(_amounts((status or {}).get("served_bytes")))
        for name, status in statuses.items():
            if status is not None:
                self._take_status(self.node(name), status, got)

    def _take_held(self, node: Node, report: ChunkReport | None) -> None:
        node.is_silent = report is None
        if report is None or not report.total or report.total > CHUNKS_MAX:
            return
        self.total = report.total
        if len(node.chunks) != report.total or report.landed < node.after:
            node.chunks, node.has, node.after = bytearray(report.total), 0, 0
        if report.whole:
            node.chunks, node.has = bytearray(b"\1") * report.total, report.total
        for ordinal, _ in report.new:
            node.has += not node.chunks[ordinal]
            node.chunks[ordinal] = 1
        node.after, node.is_whole, node.fetching = report.next, report.whole, report.fetching

    def _take_status(self, node: Node, status: Json, got: Mapping[str, int]) -> None:
        for fill in rows(status.get("fills")):
            if fill.get("version") == self.version:
                self.size_bytes = _count(fill.get("size_bytes")) or self.size_bytes
                node.landed_bytes = max(node.landed_bytes, _count(fill.get("landed_bytes")))
        if node.is_whole:
            node.landed_bytes = max(node.landed_bytes, self.size_bytes)
        now = (node.landed_bytes, got.get(node.name, 0), sum(_amounts(status.get("served_bytes")).values()))
        if not node.is_part:
            node.before = (0, *now[1:])  # a fill that starts before the next round starts at zero bytes
            return
        if node.before is None:
            node.before = now
        new_bytes, from_peers, served = (max(0, here - before) for here, before in zip(now, node.before, strict=True))
        node.from_peers_bytes = max(node.from_peers_bytes, min(from_peers, new_bytes))
        node.from_shared_bytes = new_bytes - node.from_peers_bytes
        node.served_bytes = max(node.served_bytes, served)
        node.history.append((self.now, node.from_peers_bytes, node.from_shared_bytes))
        while len(node.history) > 2 and node.history[1][0] <= self.now - RATE_SECONDS:
            node.history.popleft()

    # --- results ---------------------------------------------------------------------------------------------------

    def share(self) -> float:
        part = self.part
        return sum(node.share() for node in part) / len(part) if part else 0.0

    def to_json(self) -> Json:
        rates = [node.rates() for node in self.part]
        drawn = {node.name for node in sorted(self.part, key=Node.share)[:DRAWN_MAX]}
        return {
            "uri": self.uri,
            "version": self.version,
            "size_bytes": self.size_bytes,
            "chunks": self.total,
            "seconds": self.now - self.begun,
            "done": self.is_done,
            "share": self.share(),
            "bytes_by_source": {
                "peer": sum(node.from_peers_bytes for node in self.part),
                "shared": sum(node.from_shared_bytes for node in self.part),
            },
            "bytes_per_second": {"peer": sum(one[0] for one in rates), "shared": sum(one[1] for one in rates)},
            "nodes": [
                {
                    "name": node.name,
                    "chunks": node.has,
                    "share": node.share(),
                    "whole": node.is_whole,
                    "answers": not node.is_silent,
                    "from_peers_bytes": node.from_peers_bytes,
                    "from_shared_bytes": node.from_shared_bytes,
                    "served_bytes": node.served_bytes,
                    "cells": self.cells(node) if node.name in drawn else "",
                }
                for node in sorted(self.part, key=lambda node: node.name)
            ],
        }

    def cells(self, node: Node) -> str:
        """Return at most ``CELLS_MAX`` cells, from 0 (empty) to 9 (complete), or ``a`` (being read from the store)."""
        width = min(CELLS_MAX, self.total)
        bounds = [at * self.total // width for at in range(width + 1)] if width else []
        text = ""
        for start, stop in pairwise(bounds):
            share = 1.0 if node.is_whole else sum(node.chunks[start:stop]) / (stop - start)
            is_asked = any(start <= ordinal < stop for ordinal in node.fetching)
            text += ASKED if is_asked and share < 1 else str(int(share * SHARES))
        return text


# --- in a line -----------------------------------------------------------------------------------------------------


def line(rollout: Rollout) -> str:
    now, part = rollout.to_json(), rollout.part
    slowest = min(part, key=Node.share, default=None)
    rates, sizes = now["bytes_per_second"], now["bytes_by_source"]
    text = (
        f"{now['seconds']:.0f} s: {100 * now['share']:.0f} % on {len(part)} nodes, "
        f"{human_bytes(sizes['peer'])} from peers ({human_bytes(rates['peer'])}/s), "
        f"{human_bytes(sizes['shared'])} from shared storage ({human_bytes(rates['shared'])}/s)"
    )
    if slowest is not None and not rollout.is_done:
        text += f", slowest {slowest.name} at {100 * slowest.share():.0f} %"
    left = sum(rollout.size_bytes - min(node.landed_bytes, rollout.size_bytes) for node in part)
    if left and (rate := rates["peer"] + rates["shared"]) >= 1:
        text += f"; about {human_seconds(left / rate)} left"
    return text


# --- validation of reports ------------------------------------------------------------------------------------------


def _amounts(value: Any) -> dict[str, int]:
    return {str(name): _count(size) for name, size in value.items()} if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and 0 <= value < 1e18 else 0


def rows(value: Any) -> list[Json]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


T = TypeVar("T")

ASK_SECONDS = 2.0
ASKED_MAX = 512
"""Limit of nodes in a round; the first ones by name."""
ASKED_AT_A_TIME = 32


class RolloutWatch:
    """Follows the distribution of one version to all nodes. ``uri``: None: the one that most nodes fill."""

    def __init__(self, uri: str | None, settings: Settings) -> None:
        self.uri, self.settings = uri, settings
        self.rollout: Rollout | None = None
        self.members = 0
        self._before: Mapping[str, Json | None] = {}
        self._contact = AgentClient(settings)
        self._client: PeerClient | None = None
        self._gate = asyncio.Semaphore(ASKED_AT_A_TIME)

    async def poll(self, *, start: bool = True) -> None:
        """Query each node once, and update ``rollout``. ``start``: start an agent if none runs on this node.

        Raises TierckptError: the agent of this node rejects the request or is unavailable.
        """
        answer = await asyncio.to_thread(self._contact.ask, {"op": "peers"}, start=start)
        live = [member_of(row) for row in answer["live"][:ASKED_MAX]]
        client = self._client = self._client or PeerClient(self.settings, member_of(answer["me"]))
        statuses = await self._all({member.name: client.status(member) for member in live})
        self.members = len(live)
        if self.rollout is None or (self.uri is None and self.rollout.is_done):
            self._find(statuses)
        if (rollout := self.rollout) is None:
            return
        version, size = rollout.version, rollout.chunk_size_bytes
        reports = await self._all(
            {
                member.name: client.chunk_report(member, version, size, after=rollout.node(member.name).after)
                for member in live
                if not rollout.node(member.name).is_whole
            }
        )
        silent = {node.name: None for node in rollout.part if node.name not in statuses}
        rollout.take({**reports, **silent}, statuses, time.monotonic())

    async def close(self) -> None:
        await asyncio.to_thread(self._contact.close)
        if self._client is not None:
            await self._client.close()

    async def _all(self, asks: Mapping[str, Awaitable[T]]) -> dict[str, T | None]:
        async def one(ask: Awaitable[T]) -> T | None:
            try:
                async with self._gate, asyncio.timeout(ASK_SECONDS):
                    return await ask
            except (TierckptError, OSError, TimeoutError):
                return None

        return dict(zip(asks, await asyncio.gather(*map(one, asks.values())), strict=True))

    def _find(self, statuses: Mapping[str, Json | None]) -> None:
        """Select the version that most nodes fill; else the complete version on this node."""
        found: Counter[tuple[bool, str, str, int]] = Counter()
        for status in statuses.values():
            found.update(fill for fill in _fills(status) if self.uri in (None, fill[1]))
        new: Rollout | None = None
        if found:
            _, uri, version, size = max(found, key=lambda key: (key[0], found[key]))
            new = Rollout(uri, version, size, time.monotonic())
        elif self.rollout is None and self.uri is not None:
            for row in Pool(self.settings).rows():
                if row.uri == self.uri and row.state == "complete":
                    new = Rollout(row.uri, row.version, self.settings.chunk_size_bytes, time.monotonic())
        if new is not None and (self.rollout is None or new.version != self.rollout.version):
            new.take({}, self._before, new.now)  # the byte counts before the fill started
            self.rollout = new
        self._before = statuses


def _fills(status: Json | None) -> Iterator[tuple[bool, str, str, int]]:
    """Yield the valid fills of a status: (a process is active, URI, version, chunk size)."""
    for fill in rows((status or {}).get("fills")):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            version, size = str(fill["version"]), int(fill["chunk_size_bytes"])
            if re.fullmatch(r"[0-9a-f]{32}", version) and size > 0:
                yield fill["live"] is True, str(fill["uri"]), version, size
