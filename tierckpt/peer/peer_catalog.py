"""The peer catalog: finds checkpoints on other nodes, and reads them chunk by chunk, each verified.

A peer that does not reply within ``ASK_SECONDS`` is treated as having no data.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import Settings
from ..errors import ConfigError, ObjectNotFoundError, PeerBusyError, PeerError, PermissionDeniedError, TierckptError
from ..format.layout import BRANCHES_DIR, Location
from ..format.manifest import FileEntry, Manifest, decode, digest_of, is_token
from ..ipc.agent_client import private_client
from ..telemetry import logger
from ..types import Buffer, ByteRange, Json, Tier
from .chunk_files import frozen_of
from .membership import Member, member_of
from .replica_policy import FreshCheckpoint, LogRow, fresh_of, logs_of

if TYPE_CHECKING:
    from .peer_client import PeerClient

log = logger("peer")

T = TypeVar("T")

ASK_SECONDS = 3.0
LIVE_SECONDS = 1.0
MEET_SECONDS = 3.0
"""Maximum wait, once, for the node to find the others: the agent may have just started."""
CALM_SECONDS = 1.0
RETRY_SECONDS = 30.0
"""Pause after the agent did not return the members."""
MANIFEST_SECONDS = 60.0
ASKED_AT_A_TIME = 64
ASKED_FOR_MANIFEST = 4
NAMES_MAX = 100_000
BUSY_SECONDS = 20.0
BAN_SECONDS = 600.0
PLACES_MAX = 64
PEERS_MESSAGE: Json = {"op": "peers", "version": None, "directory": None}


@dataclass(frozen=True, slots=True)
class Live:
    """Members that can be reached. ``this_node`` is None while its agent does not respond."""

    this_node: Member | None
    other_nodes: tuple[Member, ...]
    unreachable: tuple[str, ...] = ()
    """Configured nodes that have not answered this node's agent."""
    denial_reason: str = ""
    """Reason why a node does not accept this one as a member."""
    interested: frozenset[str] = frozenset()
    """Members that fill the version asked about."""
    slow_to: frozenset[str] = frozenset()
    """Members that have lately reported that this node is slow."""

    @property
    def me(self) -> str:
        return self.this_node.name if self.this_node is not None else ""

    @property
    def members(self) -> tuple[Member, ...]:
        return (*self.other_nodes, self.this_node) if self.this_node is not None else self.other_nodes


class PeerCatalog:
    """Requests to peers in the name of this node. ``live`` returns them; None: asks this node's agent, which it starts
    if necessary."""

    def __init__(self, settings: Settings, live: Callable[[], Awaitable[Live]] | None = None) -> None:
        self._settings, self._expected = settings, _expected(settings.peers or "")
        self._agent = private_client(settings) if live is None else None
        self._query_members = live or self._ask_agent
        self._client: PeerClient | None = None
        self._banned: dict[str, float] = {}
        self._live = Live(None, ())
        self._next_query_at = float("-inf")
        self._has_waited = False
        self._gate = asyncio.Semaphore(ASKED_AT_A_TIME)
        self._committed: dict[Location, tuple[float, dict[str, dict[str, list[Member]]], list[str]]] = {}
        """By parent: when asked, holders by name and attempt, and members without an answer."""

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._agent is not None:
            await asyncio.to_thread(self._agent.close)

    async def _ask_agent(self) -> Live:
        assert self._agent is not None
        return live_of(await asyncio.to_thread(self._agent.ask, PEERS_MESSAGE))

    async def live(self) -> Live:
        """Return the reachable members; none, with a log line, if the agent does not respond."""
        if time.monotonic() >= self._next_query_at:
            pause = LIVE_SECONDS
            try:
                self._live = await self._query_members()
            except (TierckptError, OSError) as error:
                log.warning("cannot find the other nodes, using this node's disk only: %s", error)
                self._live, pause = (
                    Live(None, (), (f"the other nodes, as this node's agent says: {error}",)),
                    RETRY_SECONDS,
                )
            self._next_query_at = time.monotonic() + pause
        return self._live

    async def wait_for_members(self) -> Live:
        """Wait, once, until all expected members have joined, or for a moment without a new one; then return ``live``.

        A node whose agent has just started would otherwise see its own disk only.
        """
        found = await self.live()
        begun = changed = time.monotonic()
        while not self._has_waited and found.this_node is not None and time.monotonic() - begun < MEET_SECONDS:
            count = len(found.members)
            if count >= (self._expected or count + 1) or (count > 1 and time.monotonic() - changed > CALM_SECONDS):
                break
            await asyncio.sleep(0.1)
            self._next_query_at = float("-inf")
            found = await self.live()
            changed = time.monotonic() if len(found.members) != count else changed
        self._has_waited = self._has_waited or found.this_node is not None
        return found

    # --- their checkpoints ---------------------------------------------------------------------------------------

    async def committed(self, parent: Location, *, is_fresh: bool = False) -> Mapping[str, Mapping[str, list[Member]]]:
        """Return the committed checkpoints of other nodes directly below ``parent``: holders by name and attempt.

        Cost: one small request to each member, at most once in ``LIVE_SECONDS`` per parent unless ``is_fresh``.
        """
        asked_at, known, _ = self._committed.get(parent, (float("-inf"), {}, []))
        if is_fresh or time.monotonic() - asked_at > LIVE_SECONDS:
            known, others = {}, (await self.wait_for_members()).other_nodes
            answers = await self._all(lambda member: self.client.steps(member, parent.uri), others)
            silent = {*others} - {member for member, _ in answers}
            for member, answer in answers:
                for name, attempt in list(answer.items())[:NAMES_MAX]:
                    if _is_name(name) and is_token(attempt):  # as BRANCHES_DIR, the name of a step
                        known.setdefault(name, {}).setdefault(attempt, []).append(member)
            while len(self._committed) >= PLACES_MAX:
                del self._committed[next(iter(self._committed))]
            names = [f"{member.name} ({member.address})" for member in silent]
            self._committed[parent] = (time.monotonic(), known, names)
        return known

    async def silent(self, parent: Location) -> list[str]:
        """Return the nodes that did not report their checkpoints below ``parent``.

        Raises PermissionDeniedError: a node does not accept this one as a member.
        """
        self._next_query_at = float("-inf")
        await self.committed(parent, is_fresh=True)
        if self._live.denial_reason:
            raise PermissionDeniedError(
                f"other nodes' checkpoints of {parent.uri} are unknown: {self._live.denial_reason}",
                hint="Give every node the same secret (peer_secret_file, TIERCKPT_PEER_SECRET_FILE), or leave the node "
                "out of peers (TIERCKPT_PEERS)",
                tier=Tier.PEER,
            )
        return sorted([*self._live.unreachable, *self._committed[parent][2]])

    async def replicas_at(self, location: Location, known: Iterable[Manifest | None] = ()) -> dict[str, PeerReplicas]:
        """Return the checkpoints at ``location`` on other nodes, by attempt. ``known`` needs no request."""
        attempts = (await self.committed(location.parent)).get(location.name, {})
        manifests = {manifest.attempt: manifest for manifest in known if manifest is not None}
        found: dict[str, PeerReplicas] = {}
        for attempt, members in attempts.items():
            manifest = manifests.get(attempt) or await self._manifest(location, attempt, members)
            if manifest is not None:
                found[attempt] = PeerReplicas(self, location, manifest, list(members))
        return found

    async def _manifest(self, location: Location, attempt: str, members: Sequence[Member]) -> Manifest | None:
        for member in members[:ASKED_FOR_MANIFEST]:
            try:
                manifest = await self.manifest_of(member, location)
            except (TierckptError, OSError, TimeoutError) as error:
                log.warning("no manifest of %s from %s: %s", location.uri, member.name, error)
                continue
            if manifest is not None and manifest.attempt == attempt:
                return manifest
        return None

    async def manifest_of(self, member: Member, location: Location) -> Manifest | None:
        """Return None if ``member`` has none. Raises ManifestError: invalid."""
        try:
            async with asyncio.timeout(MANIFEST_SECONDS):
                data = await self.client.manifest(member, location.uri)
        except ObjectNotFoundError:
            return None
        return decode(data, where=f"the manifest of {member.name}")

    async def fresh(self, members: Iterable[Member]) -> Mapping[str, tuple[list[FreshCheckpoint], list[LogRow]]]:
        replies = await self._all(lambda member: self.client.fresh(member), members)
        return {member.name: (fresh_of(answer), logs_of(answer)) for member, answer in replies}

    # --- requests to one of them ---------------------------------------------------------------------------------

    @property
    def client(self) -> PeerClient:
        if self._client is None:
            from .peer_client import PeerClient  # it loads TLS

            self._client = PeerClient(self._settings, self._live.me)
        return self._client

    async def ordinals(self, member: Member, version: str, chunk_size_bytes: int) -> frozenset[int] | None:
        """Return the chunks of a version that ``member`` has; None: all of it."""
        found, after = set[int](), 0
        while True:
            report = await self.client.chunk_report(member, version, chunk_size_bytes, after=after)
            if report.whole:
                return None
            found |= {ordinal for ordinal, _ in report.new}
            if report.next <= after or report.next >= report.landed:
                return frozenset(found)
            after = report.next

    async def segment(self, member: Member, segment_id: str, at: ByteRange) -> Buffer:
        into = memoryview(bytearray(at.size_bytes))
        await self.retry_while_busy(member, partial(self.client.segment, member, segment_id, at.start, into))
        return into

    async def retry_while_busy(self, member: Member, ask: Callable[[], Awaitable[object]]) -> None:
        if time.monotonic() < self._banned.get(member.name, 0.0):
            raise PeerError(
                f"peer {member.name} sent wrong bytes: no data is requested from it for now", tier=Tier.PEER
            )
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                await ask()
                return
            except PeerBusyError as error:
                pause = float(error.context.get("retry_after_seconds", 1.0)) * random.uniform(0.5, 1.0)
                if time.monotonic() + pause > deadline:
                    raise
                await asyncio.sleep(pause)

    def ban(self, member: Member) -> None:
        """Request no data from ``member`` for a while. Its lists are still requested."""
        self._banned[member.name] = time.monotonic() + BAN_SECONDS

    async def _all(self, ask: Callable[[Member], Awaitable[T]], members: Iterable[Member]) -> list[tuple[Member, T]]:
        async def one(member: Member) -> tuple[Member, T] | None:
            try:
                async with self._gate, asyncio.timeout(ASK_SECONDS):
                    return member, await ask(member)
            except (TierckptError, OSError, TimeoutError) as error:
                log.info("%s does not list its checkpoints: %s", member.name, error)
                return None

        answers = await asyncio.gather(*(one(member) for member in members))
        return [answer for answer in answers if answer is not None]


@dataclass
class PeerReplicas:
    """The copies that other nodes have of one checkpoint, all of one attempt."""

    cluster: PeerCatalog
    location: Location
    manifest: Manifest
    members: list[Member] = field(default_factory=list)
    _holders: dict[str, list[Member]] | None = None

    def __post_init__(self) -> None:
        self.frozen = frozen_of(self.manifest, self.location.uri)
        self._first = dict(zip((item.key for item in self.frozen.files), self.frozen.first_ordinals, strict=False))

    @property
    def attempt(self) -> str:
        return self.manifest.attempt

    async def query_files(self) -> PeerReplicas:
        """Request the file list of each member, once. Returns itself."""
        if self._holders is not None:
            return self
        version, chunk = self.frozen.version, self.frozen.chunk_size_bytes
        answers = await self.cluster._all(lambda member: self.cluster.ordinals(member, version, chunk), self.members)
        me = (await self.cluster.live()).me
        holders: dict[str, list[Member]] = {}
        for index, item in enumerate(self.frozen.files):
            first = self._first[item.key]
            needed = range(first, first + self.frozen.chunks_of(index))
            having = [member for member, held in answers if held is None or all(map(held.__contains__, needed))]
            holders[item.key] = sorted(having, key=lambda member: digest_of(f"{me} {member.name} {item.key}".encode()))
        self._holders = holders
        return self

    def holders(self, entry: FileEntry) -> Sequence[Member]:
        """Return the members that had all of ``entry`` at the last ``query_files``."""
        return self._holders.get(entry.key, ()) if self._holders is not None else ()

    def missing(self, entries: Iterable[FileEntry]) -> list[FileEntry]:
        return [entry for entry in entries if not self.holders(entry)]

    def report_damage(self, member: Member) -> None:
        """Request no data from ``member`` for a while: it sent wrong bytes."""
        log.warning("%s sent wrong bytes of %s: no data is requested from it for now", member.name, self.location.uri)
        self.cluster.ban(member)

    async def chunk(self, member: Member, entry: FileEntry, index: int) -> Buffer:
        """Fetch a verified chunk of ``entry`` from ``member``.

        Raises IntegrityError: wrong bytes. ObjectNotFoundError, PeerError: no bytes.
        """
        chunk_bytes = self.frozen.chunk_size_bytes
        into = memoryview(bytearray(min(chunk_bytes, entry.size_bytes - index * chunk_bytes)))
        ordinal, digest = self._first[entry.key] + index, entry.digests[index]
        ask = partial(
            self.cluster.client.chunk, member, self.frozen.version, chunk_bytes, ordinal, into, expected=digest
        )
        await self.cluster.retry_while_busy(member, ask)
        return into


def _is_name(name: Any) -> bool:
    return name == BRANCHES_DIR or (
        isinstance(name, str) and 0 < len(name) <= 255 and "/" not in name and "\0" not in name and name[0] != "."
    )


def live_of(answer: Any) -> Live:
    me = member_of(answer["me"])
    rows = (member_of(row) for row in answer["live"])
    others = tuple(member for member in rows if member.name != me.name)
    interested, slow_to = (frozenset(map(str, answer.get(key, ()))) for key in ("interested", "slow_to"))
    unreachable = tuple(map(str, answer.get("unreachable", ())))
    return Live(me, others, unreachable, str(answer.get("denied", "")), interested, slow_to)


def _expected(peers: str) -> int | None:
    from . import discovery

    try:
        named = discovery.parse(peers)
    except ConfigError:
        return None
    return len(named.hosts) if named.kind == "static" else None
