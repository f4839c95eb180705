"""``tierckpt prefetch --watch``: a rollout over all nodes, live. Asks each agent twice a second."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ...cache.pool import Pool
from ...config import Settings
from ...errors import ConfigError, ObjectNotFoundError, TierckptError
from ...format.layout import Location
from ...ipc.client import AgentClient
from ...peer.client import PeerClient
from ...peer.members import Member, member_of
from ...types import Json
from .output import Report
from .rollout import Rollout, line, picture, rows

T = TypeVar("T")

TICK_SECONDS = 0.5
LINE_SECONDS = 2.0
ASK_SECONDS = 2.0
ASKED_MAX = 512
"""Nodes that are looked at; of more, those first by name."""
ASKED_AT_A_TIME = 32
BEGIN_SECONDS = 60.0
SETTLED_TICKS = 2


def watch(
    location: Location | None, settings: Settings, *, as_json: bool, fetching: Future[Report] | None = None
) -> Report:
    """Watch one version fill all nodes that want it, until it is whole on all of them, or Ctrl-C.

    Args:
        location: whose; None: what most nodes are filling.
        fetching: what this node fetches meanwhile; when it fails there is nothing more to watch.

    Raises:
        ConfigError: there are no ``peers``.
        ObjectNotFoundError: nobody has begun to fill it in a minute.
    """
    if settings.peers is None:
        raise ConfigError("no peers are set, so there is one node to watch", hint="Set peers (TIERCKPT_PEERS)")
    watcher = _Watcher(location.uri if location is not None else None, settings, as_json=as_json, fetching=fetching)
    with contextlib.suppress(*(() if fetching is not None else (KeyboardInterrupt,))):
        asyncio.run(watcher.run())
    rollout = watcher.rollout
    if rollout is None:
        return Report({"uri": watcher.uri, "done": False, "nodes": []}, ["Nothing was being filled."])
    return Report(rollout.to_json(), [line(rollout)])


class _Watcher:
    def __init__(
        self, uri: str | None, settings: Settings, *, as_json: bool, fetching: Future[Report] | None = None
    ) -> None:
        self.uri, self.settings, self.fetching = uri, settings, fetching
        self.rollout: Rollout | None = None
        self._screen = _Screen(as_json=as_json)
        self._gate = asyncio.Semaphore(ASKED_AT_A_TIME)

    async def run(self) -> None:
        contact = AgentClient(self.settings)
        client: PeerClient | None = None
        try:
            me, _ = await self._live(contact)
            client = PeerClient(self.settings, me)
            with self._screen:
                await self._watch(contact, client)
        finally:
            contact.close()
            if client is not None:
                await client.close()

    async def _watch(self, contact: AgentClient, client: PeerClient) -> None:
        begun, settled = time.monotonic(), 0
        before: Mapping[str, Json | None] = {}
        while settled < SETTLED_TICKS:
            _, members = await self._live(contact)
            statuses = await self._all(members, {member.name: client.status(member) for member in members})
            if self.rollout is None:
                self.rollout = self._find(statuses)
                if self.rollout is not None:
                    self.rollout.remember(before)
                before = statuses
            if self.fetching is not None and self.fetching.done():
                if self.fetching.exception() is not None:
                    return
                settled += self.rollout is None  # a checkpoint, which no node tells of as something it fills
            elif self.rollout is None and self.fetching is None and time.monotonic() - begun > BEGIN_SECONDS:
                raise ObjectNotFoundError(
                    f"no node is filling {self.uri or 'anything'}", hint="`tierckpt prefetch URI` on each node fills it"
                )
            if self.rollout is not None:
                await self._look(self.rollout, client, members, statuses)
                settled = settled + 1 if self.rollout.is_done else 0
            self._screen.show(self.rollout, len(members))
            await asyncio.sleep(TICK_SECONDS)

    async def _look(
        self, rollout: Rollout, client: PeerClient, members: Sequence[Member], statuses: Mapping[str, Json | None]
    ) -> None:
        version, size = rollout.version, rollout.chunk_size_bytes
        asks = {
            member.name: client.held(member, version, size, after=rollout.node(member.name).after)
            for member in members
            if not rollout.node(member.name).is_whole
        }
        held = await self._all(members, asks)
        gone = {node.name: None for node in rollout.part if node.name not in statuses}  # left, or dead
        rollout.take({**held, **gone}, statuses, time.monotonic())

    async def _live(self, contact: AgentClient) -> tuple[Member, list[Member]]:
        answer = await asyncio.to_thread(contact.ask, {"op": "peers"})
        live = [member_of(row) for row in answer["live"][:ASKED_MAX]]
        return member_of(answer["me"]), live

    async def _all(self, members: Sequence[Member], asks: Mapping[str, Awaitable[T]]) -> dict[str, T | None]:
        """Ask some at a time; None for who does not answer."""

        async def one(ask: Awaitable[T]) -> T | None:
            try:
                async with self._gate, asyncio.timeout(ASK_SECONDS):
                    return await ask
            except (TierckptError, OSError, TimeoutError):
                return None

        return dict(zip(asks, await asyncio.gather(*map(one, asks.values())), strict=True))

    def _find(self, statuses: Mapping[str, Json | None]) -> Rollout | None:
        """What most nodes are filling now, of the URI that was asked for; else what is whole on this node already."""
        found: Counter[tuple[bool, str, str, int]] = Counter()
        for status in statuses.values():
            found.update(fill for fill in _fills(status) if self.uri in (None, fill[1]))
        if found:
            _, uri, version, size = max(found, key=lambda key: (key[0], found[key]))
            return Rollout(uri, version, size, time.monotonic())
        for row in Pool(self.settings).rows() if self.uri is not None else ():
            if row.uri == self.uri and row.state == "complete":
                return Rollout(row.uri, row.version, self.settings.chunk_size_bytes, time.monotonic())
        return None


def _fills(status: Json | None) -> Iterator[tuple[bool, str, str, int]]:
    """What a node says it fills: (a process is at it, URI, version, chunk size). What is none is left out."""
    for fill in rows((status or {}).get("fills")):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            version, size = str(fill["version"]), int(fill["chunk_size_bytes"])
            if re.fullmatch(r"[0-9a-f]{32}", version) and size > 0:
                yield fill["live"] is True, str(fill["uri"]), version, size


class _Screen:
    """Draws on stderr where a person looks at it; else writes a line now and then; nothing with ``--json``."""

    def __init__(self, *, as_json: bool) -> None:
        self._console = Console(file=sys.stderr, markup=False, highlight=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False) if sys.stderr.isatty() and not as_json else None
        self._is_quiet = as_json
        self._said_at = float("-inf")

    def __enter__(self) -> None:
        if self._live is not None:
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, rollout: Rollout | None, members: int) -> None:
        waiting = f"nothing is being filled yet on {members} nodes"
        if self._live is not None:
            drawn = picture(rollout, self._console.width) if rollout is not None else Text(waiting)
            self._live.update(drawn, refresh=True)
        elif not self._is_quiet and time.monotonic() - self._said_at >= LINE_SECONDS:
            self._said_at = time.monotonic()
            sys.stderr.write((line(rollout) if rollout is not None else waiting) + "\n")
            sys.stderr.flush()
