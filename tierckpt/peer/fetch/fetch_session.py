"""Fetches one version together with other nodes: makes the requests of scheduler.py, and verifies the chunks.

P1  A chunk from a peer is verified before use: against the manifest's digest, else against the digest recorded by
    the node that read it from the store. If nodes disagree, the store decides, and wrong members are banned.
P2  A peer can cost time, never bytes: as a last resort a chunk is read from the store.
P3  Each request and each wait has a deadline.
E1  Without an agent that has joined the cluster, everything is read from the store, with one warning.
E2  Small entries are read from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...cache.fetch_job import NotNowError, PeerSources, ReceivedChunk, Work
from ...cache.file_set import FileSet
from ...cache.partial_entry import PartialEntry
from ...cache.store_chunks import StoreChunks
from ...config import Settings
from ...errors import IntegrityError, ObjectNotFoundError, PeerBusyError, TierckptError
from ...ipc.agent_client import private_client
from ...resources import Tasks
from ...telemetry import BYTES, PEER_BANS, logger
from ...types import Json, Tier
from ..membership import Member
from ..peer_catalog import PEERS_MESSAGE, Live, live_of
from .peer_table import SHARED, ChunkRequest, PeerTable, Tuning
from .scheduler import FetchScheduler

if TYPE_CHECKING:
    from ..peer_client import PeerClient
    from ..peer_http import ChunkReport

log = logger("peer")

SMALL_BYTES = 1 << 20
AGENT_TIMEOUT_SECONDS = 15.0
TICK_SECONDS = 0.05
VIEW_SECONDS = 0.25
REPORT_SECONDS = 1.0
LATE_SECONDS = 0.25
POLL_TIMEOUT_SECONDS = 1.5
INTEREST_SECONDS = 10.0
WINDOW_CHUNKS = 64
EXPECTED = frozenset({"owned", "no peers"})
"""These requests to the store are no fallback."""
REASONS = {type(None): "cancelled", ObjectNotFoundError: "missing", PeerBusyError: "busy", IntegrityError: "wrong"}


class AgentConnection:
    """The agent serves the chunks in ``directory`` while the connection is open."""

    def __init__(self, settings: Settings, frozen: FileSet, directory: str) -> None:
        self._contact = private_client(settings)
        self._version, self._directory = frozen.version, directory

    async def view(self, is_fetching: bool) -> Live:
        fill = {"version": self._version, "directory": self._directory} if is_fetching else {}
        ask = partial(self._contact.ask, PEERS_MESSAGE | fill, timeout_seconds=AGENT_TIMEOUT_SECONDS)
        return live_of(await asyncio.to_thread(ask))

    async def report(self, report: Json) -> None:
        message = {"op": "fetched", "version": self._version, "report": report}
        await asyncio.to_thread(self._contact.ask, message, start=False)

    async def close(self) -> None:
        await asyncio.to_thread(self._contact.close)


class PeerJoiner:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._has_warned = False

    async def join(self, chunks: StoreChunks, filling: PartialEntry) -> FetchSession | None:
        """Return the started session of a fill; None to read from the store (E1, E2)."""
        if filling.frozen.size_bytes < SMALL_BYTES:
            return None
        agent = AgentConnection(self.settings, filling.frozen, str(filling.directory.absolute()))
        try:
            from ..peer_client import PeerClient  # it loads TLS

            view = await agent.view(False)
            return FetchSession(chunks, filling, agent, view, PeerClient(self.settings, view.me))
        except (TierckptError, ImportError, OSError, KeyError, ValueError) as error:
            await agent.close()
            log.log(logging.DEBUG if self._has_warned else logging.WARNING, "reading without peers: %s", error)
            self._has_warned = True
            return None


class FetchSession:
    """One fill together with the other nodes (``cache.fill_protocols.PeerFill``), on one event loop."""

    def __init__(
        self,
        chunks: StoreChunks,
        filling: PartialEntry,
        agent: AgentConnection,
        view: Live,
        client: PeerClient,
        *,
        tuning: Tuning | None = None,
    ) -> None:
        self.frozen, self.sources = filling.frozen, PeerSources()
        self._chunks, self._filling, self._agent, self._client = chunks, filling, agent, client
        self._work = list(self.frozen.chunks())
        self._firsts = self.frozen.first_ordinals
        missing = [number for number, work in enumerate(self._work) if not filling.has(*work)]
        self.table = PeerTable(len(self._work), view.me, tuning=tuning, chunks_wanted=missing)
        self.scheduler = FetchScheduler(self.table, self.frozen.version)
        self._is_fetching = False
        self._interested_since: dict[str, float] = {}
        self.requests: dict[int, asyncio.Task[str]] = {}
        self._marked: set[int] = set()
        self._claims: dict[int, dict[str, str]] = {}
        """Digests that members report, by chunk and member."""
        self._truth: dict[int, str] = {}
        self._tasks = Tasks()
        self._polling: set[str] = set()
        self._changed = asyncio.Event()
        self._choosing = asyncio.Lock()
        self._window: range | None = None
        self._apply_view(view)
        self._tasks.spawn(self._run())

    # --- life ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._report()
        await self._client.close()
        await self._agent.close()

    @property
    def slots(self) -> int:
        return self.table.tuning.slots

    async def _run(self) -> None:
        refresh: asyncio.Task[Any] | None = None
        refresh_at = report_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= refresh_at and (refresh is None or refresh.done()):
                refresh_at, refresh = now + VIEW_SECONDS, self._tasks.spawn(self._refresh_view())
            if now >= report_at:
                report_at = now + REPORT_SECONDS
                self._tasks.spawn(self._report())
                for name in self.table.slow & self.table.members.keys():
                    self._tasks.spawn(self._report_slow(self.table.members[name]))
            for name, cursor in self.table.due_polls(now, is_idle=self.scheduler.is_idle):
                if name not in self._polling:
                    self._polling.add(name)
                    self._tasks.spawn(self._poll(name, cursor))
            self._cancel_unwanted()
            await asyncio.sleep(TICK_SECONDS)

    async def _refresh_view(self) -> None:
        try:
            self._apply_view(await self._agent.view(self._is_fetching))
        except (TierckptError, OSError) as error:
            log.info("%s: cannot refresh the members: %s", self.frozen.uri, error)

    def _apply_view(self, view: Live) -> None:
        self._member_view = view
        now = time.monotonic()
        recent = {name for name, at in self._interested_since.items() if now - at < INTEREST_SECONDS}
        self.scheduler.set_members(view.members, view.interested | recent, now, slow_to=view.slow_to)
        self._changed.set()

    async def _report(self) -> None:
        with contextlib.suppress(TierckptError, OSError):
            await self._agent.report(self.sources.report())

    async def _report_slow(self, member: Member) -> None:
        """A slow member owns no chunks. A lost message costs time only."""
        with contextlib.suppress(TierckptError, OSError, TimeoutError):
            async with asyncio.timeout(POLL_TIMEOUT_SECONDS):
                await self._client.report_slow(member, self.frozen.version)

    async def _poll(self, name: str, cursor: int) -> None:
        try:
            member = self.table.members.get(name)
            if member is None:
                return
            async with asyncio.timeout(max(POLL_TIMEOUT_SECONDS, self.table.poll_timeout_seconds)):
                report = await self._client.chunk_report(
                    member,
                    self.frozen.version,
                    self.frozen.chunk_size_bytes,
                    after=cursor,
                    interested=self._is_fetching,
                )
            self._apply_report(name, report, cursor, is_full=True)
        except PeerBusyError:
            pass
        except (TierckptError, OSError, TimeoutError) as error:
            log.debug("%s does not list its chunks: %r", name, error)
            self.table.mark_unreachable(name, time.monotonic())
        finally:
            self._polling.discard(name)
            self._changed.set()

    def _apply_report(self, name: str, report: ChunkReport, cursor: int, *, is_full: bool) -> None:
        now = time.monotonic()
        if is_full:
            has_new = not report.interested <= self._interested_since.keys()
            self._interested_since.update(dict.fromkeys(report.interested, now))
            if has_new:
                self._apply_view(self._member_view)
        if report.total not in (0, len(self._work)):
            log.warning("%s: %s has %d chunks of it, not %d", self.frozen.uri, name, report.total, len(self._work))
            self.table.update(name, now)
            return
        if report.landed < cursor and not report.whole:
            self.table.reset_chunks(name)
            self.table.update(name, now)
            return
        self.table.update(
            name,
            now,
            new=[ordinal for ordinal, _ in report.new],
            fetching=report.fetching if is_full else None,
            whole=report.whole,
            cursor=report.next,
        )
        for ordinal, digest in report.new:
            if digest and not self._expected(ordinal):
                self._note_digest(ordinal, name, digest)
        self._changed.set()

    # --- digests -------------------------------------------------------------------------------------------------

    def _expected(self, ordinal: int) -> str:
        index, chunk = self._work[ordinal]
        digests = self.frozen.files[index].digests
        return digests[chunk] if digests else ""

    def _note_digest(self, ordinal: int, name: str, digest: str) -> bool:
        """Record a member's digest. False on a conflict: then the store decides."""
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
        self.scheduler.distrust(ordinal, claims)
        return False

    def _resolve_digest(self, ordinal: int, truth: str) -> None:
        """Use the store's digest. Lift the bans of members that were right, if this chunk was their only reason."""
        self._truth[ordinal] = truth
        for name, digest in self._claims.pop(ordinal, {}).items():
            if digest != truth:
                self._ban(name, f"it says {digest} of chunk {ordinal}, the store {truth}")
            elif name not in self.sources.banned:
                self.table.set_banned(name, False)

    def _ban(self, name: str, reason: str) -> None:
        if name not in self.sources.banned:
            self.sources.banned.add(name)
            PEER_BANS.emit(1)
            log.error("peer %s gets no more requests for %s: %s", name, self.frozen.uri, reason)
        self.table.set_banned(name, True)

    # --- order ---------------------------------------------------------------------------------------------------

    def order(self, todo: Iterable[tuple[int, int]], *, whole: bool) -> FetchSession:
        """``whole``: these are all that is missing, so that other nodes may rely on this one."""
        self._is_fetching = whole
        self.scheduler.set_missing(self._firsts[index] + chunk for index, chunk in todo)
        return self

    async def take(self) -> Work | None:
        async with self._choosing:
            while True:
                self._changed.clear()
                now = time.monotonic()
                decision = self.scheduler.choose(now, self._window)
                self._cancel_unwanted()
                if decision is None:
                    return None
                if isinstance(decision, ChunkRequest):
                    return Work(*self._work[decision.chunk], decision)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.001, decision.until - now)):
                        await self._changed.wait()

    def put_back(self, work: Work) -> None:
        request = work.request
        if isinstance(request, ChunkRequest) and self.scheduler.is_in_flight(request):
            self.scheduler.failed(request, time.monotonic(), "cancelled")

    def done(self, work: Work) -> None:
        self.put_back(work)
        self.table.landed(self._firsts[work.index] + work.chunk, time.monotonic())

    def _cancel_unwanted(self) -> None:
        for request in self.scheduler.take_unwanted():
            task = self.requests.get(id(request))
            if task is not None:
                task.cancel()

    # --- fetching ------------------------------------------------------------------------------------------------

    async def fetch_chunk(
        self, index: int, chunk: int, into: memoryview, request: object | None = None
    ) -> ReceivedChunk:
        """Receive one verified chunk in ``into``, from the scheduled source; from another one if that is late.

        Peers see the chunk as being fetched until ``chunk_written``.

        Raises:
            NotNowError: no node has the chunk now (with ``request``). It can be taken again at once.
            StoreError, IntegrityError: no holder, and the store failed.
        """
        ordinal = self._firsts[index] + chunk
        hedged, received = _HedgedRequest(self, ordinal, into), None
        planned = request if isinstance(request, ChunkRequest) else None
        if planned is None:
            self._window = range(ordinal, min(ordinal + WINDOW_CHUNKS, len(self._work)))
        chosen = planned or await self._source(ordinal, hedged.tried)
        try:
            while True:
                hedged.begin(chosen)
                while hedged.running:
                    received = await hedged.wait()
                    if received is not None:
                        return received
                if hedged.store_error is not None:
                    raise hedged.store_error
                if planned is not None:
                    raise NotNowError
                chosen = await self._source(ordinal, hedged.tried)
        finally:
            await hedged.end()
            if received is None:
                self._unmark(ordinal)
            self._changed.set()

    async def chunk_written(self, index: int, chunk: int) -> None:
        self._unmark(self._firsts[index] + chunk)

    async def _source(self, ordinal: int, tried: set[str | None]) -> ChunkRequest:
        while True:
            now = time.monotonic()
            found = self.scheduler.source(ordinal, now, tried)
            if isinstance(found, ChunkRequest):
                return found
            await asyncio.sleep(max(0.001, found.until - now))

    async def send(self, request: ChunkRequest, into: memoryview) -> str:
        if request.source is SHARED:
            return await self._read_store(request, into)
        member, peer = self.table.members.get(request.source), self.table.peers.get(request.source)
        if member is None or peer is None:
            raise ObjectNotFoundError(f"peer {request.source} has left", tier=Tier.PEER)
        cursor, expected = peer.cursor, self._expected(request.chunk)
        begun = time.monotonic()
        answer = await self._client.chunk(
            member,
            self.frozen.version,
            self.frozen.chunk_size_bytes,
            request.chunk,
            into,
            expected=expected or self._truth.get(request.chunk, ""),
            after=cursor,
            wait_seconds=request.wait_seconds,
        )
        self._apply_report(request.source, answer.held, cursor, is_full=False)
        if not expected and not self._note_digest(request.chunk, request.source, answer.digest):
            raise ObjectNotFoundError("members disagree on its digest", tier=Tier.PEER)
        BYTES.emit(len(into), tier=Tier.PEER, direction="read")
        self.sources.peer_bytes[request.source] += len(into)
        self.sources.peer_seconds[request.source] += time.monotonic() - begun  # type: ignore[assignment]
        return answer.digest

    async def _read_store(self, request: ChunkRequest, into: memoryview) -> str:
        if request.reason not in EXPECTED:
            self.sources.fallbacks[request.reason] += 1
            log.info("%s: chunk %d from shared storage: %s", self.frozen.uri, request.chunk, request.reason)
        self._marked.add(request.chunk)
        self._filling.mark_shared(*self._work[request.chunk], True)
        _, digest = await self._chunks.read(*self._work[request.chunk], into)
        self.sources.shared_bytes += len(into)
        if not self._expected(request.chunk):
            self._resolve_digest(request.chunk, digest)
        return digest

    def _unmark(self, ordinal: int) -> None:
        if ordinal in self._marked:
            self._marked.discard(ordinal)
            self._filling.mark_shared(*self._work[ordinal], False)

    def failed(self, request: ChunkRequest, error: BaseException | None) -> None:
        """Without ``error`` the request was cancelled."""
        why = next((why for kind, why in REASONS.items() if isinstance(error, kind)), "unreachable")
        if why == "wrong" and request.source is not SHARED:
            self._ban(request.source, str(error))
        self.scheduler.failed(request, time.monotonic(), why)
        if error is not None and request.source is not SHARED:
            level = logging.DEBUG if why in ("missing", "busy") else logging.INFO
            log.log(level, "chunk %d did not come from %s: %s", request.chunk, request.source, error)


class _HedgedRequest:
    """The requests for one chunk: one, or two when the first is late. The first answer counts."""

    def __init__(self, session: FetchSession, ordinal: int, into: memoryview) -> None:
        self._session, self._ordinal, self._into = session, ordinal, into
        self.running: dict[asyncio.Task[str], tuple[ChunkRequest, memoryview]] = {}
        self.tried: set[str | None] = set()
        self.store_error: BaseException | None = None

    def begin(self, request: ChunkRequest) -> None:
        is_second = any(memory is self._into for _, memory in self.running.values())
        memory = memoryview(bytearray(len(self._into))) if is_second else self._into
        task = asyncio.ensure_future(self._session.send(request, memory))
        self.running[task] = (request, memory)
        self._session.requests[id(request)] = task

    async def wait(self) -> ReceivedChunk | None:
        scheduler = self._session.scheduler
        now = time.monotonic()
        due = min(scheduler.hedge_at(request) for request, _ in self.running.values())
        done, _ = await asyncio.wait(
            self.running, timeout=max(due - now, LATE_SECONDS), return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            received = await self._finished(task)
            if received is not None:
                return received
        if not done and time.monotonic() >= due:
            other = scheduler.hedge(self._ordinal, time.monotonic())
            if other is not None:
                self.begin(other)
        return None

    async def _finished(self, task: asyncio.Task[str]) -> ReceivedChunk | None:
        request, memory = self.running.pop(task)
        self._session.requests.pop(id(request), None)
        self.tried.add(request.source)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._session.failed(request, error)
            if error is not None and not isinstance(error, TierckptError | OSError | TimeoutError):
                raise error
            if request.source is SHARED and error is not None:
                self.store_error = error
            return None
        await self.end()
        if memory is not self._into:
            self._into[:] = memory
        self._session.scheduler.completed(request, time.monotonic())
        return ReceivedChunk(task.result(), request.source)

    async def end(self) -> None:
        """Cancel the requests in flight, and wait until they no longer write to the caller's memory."""
        left = dict(self.running)
        self.running.clear()
        for task, (request, _) in left.items():
            task.cancel()
            self._session.requests.pop(id(request), None)
        if left:
            await asyncio.wait(left)
        for task, (request, _) in left.items():
            if not task.cancelled():
                task.exception()  # marks it as retrieved
            self._session.failed(request, None)
