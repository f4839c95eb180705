"""Fetches one version together with other nodes: does what scheduler.py decides, verifies, bans who sent wrong bytes.

Invariants:
    P1  A chunk from a peer is verified before it is used: by the digest of the manifest, or where there is none by the
        digest that the node recorded which read it from the store. Where nodes disagree the store decides, and members
        that were wrong get no more requests.
    P2  A peer can cost time, never bytes: at last a chunk is read from the store as if there were no peers.
    P3  Everything has a deadline: each request in the client, each wait in the schedule, the session by ``close``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from ...cache.file_set import FileSet
from ...cache.partial_entry import PartialEntry
from ...cache.peer_fill import NotNowError, PeerSources, ReceivedChunk, StoreReader, Work
from ...errors import IntegrityError, ObjectNotFoundError, PeerBusyError, TierckptError
from ...telemetry import BYTES, PEER_BANS, logger
from ...types import Json, Tier
from ..membership import Member
from ..peer_client import PeerClient
from ..peer_http import ChunkReport
from .peer_state import PeerState, Tuning
from .scheduler import SHARED, ChunkRequest, FetchScheduler

log = logger("peer")

TICK_SECONDS = 0.05
VIEW_SECONDS = 0.25
REPORT_SECONDS = 1.0
LATE_SECONDS = 0.25
POLL_TIMEOUT_SECONDS = 1.5
INTEREST_SECONDS = 10.0
WINDOW_CHUNKS = 64
"""After a chunk that somebody reads, so many are what it is going to need next."""
EXPECTED = frozenset({"owned", "no peers"})
"""Why a chunk came from the store when all went well."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Who is there, as this node's agent sees it."""

    me: Member
    live: tuple[Member, ...]
    interested: frozenset[str] = frozenset()
    slow_to: frozenset[str] = frozenset()
    """Members that have told the agent lately that this node is slow."""


class LocalChunks:
    """The node's own part in a fill: its store, and what others on the node should know."""

    def __init__(self, cached: StoreReader, filling: PartialEntry) -> None:
        self._cached, self._filling = cached, filling

    def has(self, index: int, chunk: int) -> bool:
        return self._filling.has(index, chunk)

    async def from_store(self, index: int, chunk: int, into: memoryview) -> str:
        """Read a chunk from shared storage; return its digest. Raises StoreError, IntegrityError."""
        return await self._cached.read_store(index, chunk, into)

    async def mark(self, index: int, chunk: int, is_fetched: bool) -> None:
        """Say, or take back, that this node fetches a chunk from shared storage: from the request until it is held.

        Peers see it (peer/inventory.py).
        """
        self._filling.mark_shared(index, chunk, is_fetched)


class FetchSession:
    """The other nodes, for one fill. ``start`` it, ``close`` it. Runs on one event loop."""

    def __init__(
        self,
        frozen: FileSet,
        place: LocalChunks,
        view: Callable[[bool], Awaitable[ClusterView]],
        client: Callable[[Member], PeerClient],
        *,
        tell: Callable[[Json], Awaitable[None]] | None = None,
        leave: Callable[[], Awaitable[None]] | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        """
        Args:
            view: who is there; it is told whether all of the version is being fetched here.
            client: makes what asks peers in the name of a member, this node.
            tell: is given ``PeerSources.report`` now and then.
            leave: is called at the end.
        """
        self.frozen, self.sources = frozen, PeerSources()
        self._place, self._view, self._make_client = place, view, client
        self._tell, self._leave = tell, leave
        self._tuning = tuning or Tuning()
        self._work = list(frozen.chunks())
        self._firsts = frozen.first_ordinals
        self._is_fetching = False
        self._schedule: FetchScheduler | None = None
        self._client: PeerClient | None = None
        self._members: dict[str, Member] = {}
        self._interested_since: dict[str, float] = {}
        self._interested: frozenset[str] = frozenset()
        self._slow_to: frozenset[str] = frozenset()
        self.requests: dict[int, asyncio.Task[str]] = {}
        self._marked: set[int] = set()
        """Chunks that are said to be fetched from the store."""
        self._claims: dict[int, dict[str, str]] = {}
        """Where the version has no digests: those that members have told, by chunk."""
        self._truth: dict[int, str] = {}
        """And those of chunks that came from the store."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._polling: set[str] = set()
        self._changed = asyncio.Event()
        self._choosing = asyncio.Lock()
        self._window: range | None = None

    # --- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises TierckptError: nobody can be asked who is there."""
        view = await self._view(False)
        missing = [number for number, work in enumerate(self._work) if not self._place.has(*work)]
        state = PeerState(self.frozen.version, len(self._work), view.me.name, tuning=self._tuning, wanted=missing)
        self._schedule = FetchScheduler(state)
        self._client = self._make_client(view.me)
        self._apply_view(view)
        self._spawn(self._run())

    async def close(self) -> None:
        """End all requests. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._schedule is not None:
            await self._report()
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._leave is not None:
            await self._leave()

    @property
    def slots(self) -> int:
        """Chunks that it can have under way at a time."""
        return self._tuning.slots

    @property
    def schedule(self) -> FetchScheduler:
        if self._schedule is None:
            raise RuntimeError("the session has not been started")
        return self._schedule

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self) -> None:
        """See who is there, ask what they hold, break off what is not wanted any more: until cancelled."""
        looking: asyncio.Task[Any] | None = None
        look_at = tell_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= look_at and (looking is None or looking.done()):
                look_at, looking = now + VIEW_SECONDS, self._spawn(self._refresh_view())
            if now >= tell_at:
                tell_at = now + REPORT_SECONDS
                self._spawn(self._report())
                for name in self.schedule.state.slow & self._members.keys():
                    self._spawn(self._report_slow(self._members[name]))
            for name, cursor in self.schedule.state.due_polls(now):
                if name not in self._polling:
                    self._polling.add(name)
                    self._spawn(self._poll(name, cursor))
            self._break_off()
            await asyncio.sleep(TICK_SECONDS)

    async def _refresh_view(self) -> None:
        try:
            self._apply_view(await self._view(self._is_fetching))
        except (TierckptError, OSError) as error:
            log.info("%s: cannot refresh the members: %s", self.frozen.uri, error)

    def _apply_view(self, view: ClusterView) -> None:
        self._members = {member.name: member for member in view.live}
        self._interested, self._slow_to = view.interested, view.slow_to
        self._update_members()

    def _update_members(self) -> None:
        now = time.monotonic()
        fresh = {name for name, at in self._interested_since.items() if now - at < INTEREST_SECONDS}
        interested = self._interested | fresh
        self.schedule.state.set_members(list(self._members.values()), interested, now, slow_to=self._slow_to)
        self._changed.set()

    async def _report(self) -> None:
        if self._tell is not None:
            with contextlib.suppress(TierckptError, OSError):
                await self._tell(self.sources.report())

    async def _report_slow(self, member: Member) -> None:
        """Tell a member that it is slow: it had better own nothing. That it does not hear it costs time, no more."""
        if self._client is not None:
            with contextlib.suppress(TierckptError, OSError, TimeoutError):
                async with asyncio.timeout(POLL_TIMEOUT_SECONDS):
                    await self._client.tell_slow(member, self.frozen.version)

    async def _poll(self, name: str, cursor: int) -> None:
        """Ask a member what it holds."""
        member, client = self._members.get(name), self._client
        try:
            if member is None or client is None:
                return
            async with asyncio.timeout(max(POLL_TIMEOUT_SECONDS, self.schedule.usual_seconds)):
                held = await client.held(
                    member,
                    self.frozen.version,
                    self.frozen.chunk_size_bytes,
                    after=cursor,
                    interested=self._is_fetching,
                )
            self._update_holdings(name, held, cursor, is_full=True)
        except PeerBusyError:
            pass  # it is there
        except (TierckptError, OSError, TimeoutError) as error:
            log.debug("%s does not list its chunks: %r", name, error)
            self.schedule.state.mark_unreachable(name, time.monotonic())
        finally:
            self._polling.discard(name)
            self._changed.set()

    def _update_holdings(self, name: str, held: ChunkReport, cursor: int, *, is_full: bool) -> None:
        now = time.monotonic()
        if is_full:
            has_news = not held.interested <= self._interested_since.keys()
            self._interested_since.update(dict.fromkeys(held.interested, now))
            if has_news:
                self._update_members()
        if held.total not in (0, len(self._work)):
            log.warning("%s: %s has %d chunks of it, not %d", self.frozen.uri, name, held.total, len(self._work))
            self.schedule.state.update(name, now)
            return
        if held.landed < cursor and not held.whole:
            self.schedule.state.reset_holdings(name)
            self.schedule.state.update(name, now)
            return
        self.schedule.state.update(
            name,
            now,
            new=[ordinal for ordinal, _ in held.new],
            fetching=held.fetching if is_full else None,
            whole=held.whole,
            cursor=held.next,
        )
        for ordinal, digest in held.new:
            if digest and not self._expected(ordinal):
                self._note_digest(ordinal, name, digest)
        self._changed.set()

    # --- whom to believe -----------------------------------------------------------------------------------------

    def _expected(self, ordinal: int) -> str:
        index, chunk = self._work[ordinal]
        digests = self.frozen.files[index].digests
        return digests[chunk] if digests else ""

    def _note_digest(self, ordinal: int, name: str, digest: str) -> bool:
        """Note what a member says a chunk is. False when somebody says otherwise: then the store decides."""
        truth = self._truth.get(ordinal)
        if truth is not None:
            if digest != truth:
                self._ban(name, f"it says {digest} of chunk {ordinal}, the store {truth}")
            return digest == truth
        claims = self._claims.setdefault(ordinal, {})
        claims[name] = digest
        if len(set(claims.values())) <= 1:
            return True
        log.warning("%s: %s do not agree on chunk %d: the store decides", self.frozen.uri, ", ".join(claims), ordinal)
        self.schedule.distrust(ordinal, claims)
        return False

    def _resolve_digest(self, ordinal: int, truth: str) -> None:
        """The store has said what a chunk is. Who was right is asked again, unless it was banned for another chunk."""
        self._truth[ordinal] = truth
        for name, digest in self._claims.pop(ordinal, {}).items():
            if digest != truth:
                self._ban(name, f"it says {digest} of chunk {ordinal}, the store {truth}")
            elif name not in self.sources.banned:
                self.schedule.state.trust(name)

    def _ban(self, name: str, reason: str) -> None:
        if name not in self.sources.banned:
            self.sources.banned.add(name)
            PEER_BANS.emit(1)
            log.error("peer %s is not asked for anything of %s any more: %s", name, self.frozen.uri, reason)
        self.schedule.state.ban(name)

    # --- choosing ------------------------------------------------------------------------------------------------

    def order(self, todo: Iterable[tuple[int, int]], *, whole: bool) -> FetchSession:
        """The chunks of a fill, in the order in which they are to be fetched. ``whole``: they are all that is missing,
        so that other nodes may count on this one."""
        self._is_fetching = whole
        self.schedule.set_missing(self._firsts[index] + chunk for index, chunk in todo)
        return self

    async def take(self) -> Work | None:
        """The next chunk to fetch, and from whom; None when none is left."""
        async with self._choosing:
            while True:
                self._changed.clear()
                now = time.monotonic()
                decision = self.schedule.choose(now, self._window)
                self._break_off()
                if decision is None:
                    return None
                if isinstance(decision, ChunkRequest):
                    return Work(*self._work[decision.chunk], decision)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.001, decision.until - now)):
                        await self._changed.wait()

    def put_back(self, work: Work) -> None:
        ask = work.request
        if isinstance(ask, ChunkRequest) and self.schedule.is_under_way(ask):
            self.schedule.failed(ask, time.monotonic(), "cancelled")

    def done(self, work: Work) -> None:
        self.put_back(work)
        self.schedule.landed(self._firsts[work.index] + work.chunk, time.monotonic())

    def _break_off(self) -> None:
        for ask in self.schedule.take_unwanted():
            request = self.requests.get(id(ask))
            if request is not None:
                request.cancel()

    # --- fetching ------------------------------------------------------------------------------------------------

    async def fetch_chunk(
        self, index: int, chunk: int, into: memoryview, request: object | None = None
    ) -> ReceivedChunk:
        """Receive one chunk, verified, in ``into``: from whom the schedule says, from others too when it is late.

        Peers are told that the chunk is being fetched until ``chunk_written``, so that no other node fetches it from
        the store while it is written here.

        Raises:
            NotNowError: it was chosen by ``take`` (``request``), and nobody has it now. It can be taken again at once.
            StoreError, IntegrityError: no holder, and the store failed.
        """
        ordinal = self._firsts[index] + chunk
        hedged, received = _HedgedRequest(self, ordinal, into), None
        planned = request if isinstance(request, ChunkRequest) else None
        if planned is None:
            self._window = range(ordinal, min(ordinal + WINDOW_CHUNKS, len(self._work)))
        ask = planned or await self._source(ordinal, hedged.tried)
        try:
            while True:
                hedged.begin(ask)
                while hedged.running:
                    received = await hedged.wait()
                    if received is not None:
                        return received
                if hedged.store_error is not None:
                    raise hedged.store_error
                if planned is not None:
                    raise NotNowError
                ask = await self._source(ordinal, hedged.tried)
        finally:
            await hedged.end()
            if received is None:
                await self._unmark(ordinal)
            self._changed.set()

    async def chunk_written(self, index: int, chunk: int) -> None:
        """What ``fetch_chunk`` received can be seen by other nodes now, or is not kept."""
        await self._unmark(self._firsts[index] + chunk)

    async def _source(self, ordinal: int, tried: set[str | None]) -> ChunkRequest:
        while True:
            now = time.monotonic()
            found = self.schedule.source(ordinal, now, tried)
            if isinstance(found, ChunkRequest):
                return found
            await asyncio.sleep(max(0.001, found.until - now))

    async def ask(self, ask: ChunkRequest, into: memoryview) -> str:
        """Do one request. Returns the digest."""
        if ask.source is SHARED:
            return await self._ask_store(ask, into)
        member, client, peer = self._members.get(ask.source), self._client, self.schedule.state.peers.get(ask.source)
        if member is None or client is None or peer is None:
            raise ObjectNotFoundError(f"peer {ask.source} has left", tier=Tier.PEER)
        cursor, expected = peer.cursor, self._expected(ask.chunk)
        begun = time.monotonic()
        answer = await client.chunk(
            member,
            self.frozen.version,
            self.frozen.chunk_size_bytes,
            ask.chunk,
            into,
            expected=expected or self._truth.get(ask.chunk, ""),
            after=cursor,
            wait_seconds=ask.wait_seconds,
        )
        self._update_holdings(ask.source, answer.held, cursor, is_full=False)
        if not expected and not self._note_digest(ask.chunk, ask.source, answer.digest):
            raise ObjectNotFoundError("members disagree on its digest", tier=Tier.PEER)
        BYTES.emit(len(into), tier=Tier.PEER, direction="read")
        self.sources.peer_bytes[ask.source] += len(into)
        self.sources.peer_seconds[ask.source] += time.monotonic() - begun  # type: ignore[assignment]
        return answer.digest

    async def _ask_store(self, ask: ChunkRequest, into: memoryview) -> str:
        index, chunk = self._work[ask.chunk]
        if ask.reason not in EXPECTED:
            self.sources.fallbacks[ask.reason] += 1
            log.info("%s: chunk %d from shared storage: %s", self.frozen.uri, ask.chunk, ask.reason)
        self._marked.add(ask.chunk)
        await self._place.mark(index, chunk, True)
        digest = await self._place.from_store(index, chunk, into)
        self.sources.shared_bytes += len(into)
        if not self._expected(ask.chunk):
            self._resolve_digest(ask.chunk, digest)
        return digest

    async def _unmark(self, ordinal: int) -> None:
        if ordinal in self._marked:
            self._marked.discard(ordinal)
            await self._place.mark(*self._work[ordinal], False)

    def completed(self, ask: ChunkRequest, seconds: float) -> None:
        if seconds > self.sources.slowest[0]:
            index, chunk = self._work[ask.chunk]
            at = self.frozen.chunk_range(index, chunk)
            what = f"{self.frozen.files[index].path} {at.start}-{at.stop}"
            self.sources.slowest = (seconds, what, ask.source or "shared")
        self.schedule.completed(ask, time.monotonic())

    def failed(self, ask: ChunkRequest, error: BaseException | None) -> None:
        """Say what went wrong with a request. ``error`` None: it was broken off."""
        why = "unreachable"
        if error is None:
            why = "cancelled"
        elif isinstance(error, ObjectNotFoundError):
            why = "missing"
        elif isinstance(error, PeerBusyError):
            why = "busy"
        elif isinstance(error, IntegrityError) and ask.source is not SHARED:
            why = "wrong"
            self._ban(ask.source, str(error))
        self.schedule.failed(ask, time.monotonic(), why)
        if error is not None and ask.source is not SHARED:
            level = logging.DEBUG if why in ("missing", "busy") else logging.INFO
            log.log(level, "chunk %d did not come from %s: %s", ask.chunk, ask.source, error)


class _HedgedRequest:
    """The requests for one chunk: one, or two when the first is late. The first answer counts.

    Ends, whatever comes, with nothing under way that would write to the caller's memory."""

    def __init__(self, session: FetchSession, ordinal: int, into: memoryview) -> None:
        self._session, self._ordinal, self._into = session, ordinal, into
        self.running: dict[asyncio.Task[str], tuple[ChunkRequest, memoryview, float]] = {}
        self.tried: set[str | None] = set()
        self.store_error: BaseException | None = None

    def begin(self, ask: ChunkRequest) -> None:
        is_second = any(memory is self._into for _, memory, _ in self.running.values())
        memory = memoryview(bytearray(len(self._into))) if is_second else self._into
        task = asyncio.ensure_future(self._session.ask(ask, memory))
        self.running[task] = (ask, memory, time.monotonic())
        self._session.requests[id(ask)] = task

    async def wait(self) -> ReceivedChunk | None:
        """Wait for an answer, or until a second one should be asked for; None when there is nothing yet."""
        schedule = self._session.schedule
        now = time.monotonic()
        due = min(schedule.hedge_at(ask) for ask, _, _ in self.running.values())
        done, _ = await asyncio.wait(
            self.running, timeout=max(due - now, LATE_SECONDS), return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            received = await self._finished(task)
            if received is not None:
                return received
        if not done and time.monotonic() >= due:
            other = schedule.hedge(self._ordinal, time.monotonic())
            if other is not None:
                self.begin(other)
        return None

    async def _finished(self, task: asyncio.Task[str]) -> ReceivedChunk | None:
        ask, memory, begun = self.running.pop(task)
        self._session.requests.pop(id(ask), None)
        self.tried.add(ask.source)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._session.failed(ask, error)
            if error is not None and not isinstance(error, TierckptError | OSError | TimeoutError):
                raise error
            if ask.source is SHARED and error is not None:
                self.store_error = error
            return None
        await self.end()
        if memory is not self._into:
            self._into[:] = memory
        self._session.completed(ask, time.monotonic() - begun)
        return ReceivedChunk(task.result(), ask.source)

    async def end(self) -> None:
        """Break off what is still under way, and wait until nothing writes any more."""
        left = dict(self.running)
        self.running.clear()
        for task, (ask, _, _) in left.items():
            task.cancel()
            self._session.requests.pop(id(ask), None)
        if left:
            await asyncio.wait(left)
        for task, (ask, _, _) in left.items():
            if not task.cancelled():
                task.exception()  # it has been seen
            self._session.failed(ask, None)
