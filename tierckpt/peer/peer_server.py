"""The server of a node's agent for the other nodes: it answers GET and HEAD of the paths in peer_http.py, for members
only.

    K1  Nothing is answered before the request is proven (auth.py), and nothing but what ``Holdings``, ``segment`` and
        ``hub`` give, and what ``fresh`` tells of: no path of a file of this node is ever part of a request. All that is
        not here is the same 404.
    K2  Bounded: connections, bytes of a head, headers, chunks under way in all and per peer, bytes per second, and the
        time that a head, an answer or a silence may take. No request has a body.
    K3  A chunk goes from the page cache to the socket (sendfile(2)); it is in the page cache before the first byte
        goes, so a slow disk never holds up the other connections.

It is written on asyncio's streams and not on an HTTP framework: what peers speak is a small part of HTTP, a framework
has no deadline for the head of a request, and most of what has gone wrong in such frameworks is in the parts that are
not needed here (bodies, forms, codings, static files).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from ..config import Settings
from ..errors import ConfigError
from ..resources import ThreadPool
from ..stores import get_concurrency
from ..telemetry import BYTES, Repeats, logger
from ..types import ByteRange, Json, Tier
from .auth import Crowded, OtherTime, Refused, Verifier, check_listen, read_secret, server_tls
from .gossip import Gossip
from .inventory import Holdings, Opened, open_range
from .peer_http import (
    DIGEST,
    HEAD_BYTES_MAX,
    HELD,
    HUB_WAIT_SECONDS,
    LINES_IN_HEAD_MAX,
    ME,
    TIME,
    WAIT_SECONDS_MAX,
    ChunkReport,
    Request,
    WireError,
    address_of,
    encode_head,
    parse_json,
    parse_request,
    route,
)

log = logger("peer")

T = TypeVar("T")
THREADS_MAX = 16
SERVES_MAX = 64
"""Chunks that this node serves at a time, to all peers together; a quarter of them to any one."""
CONNECTIONS_MAX = 2048
"""Never more than half of the files that this process may have open; and from one address half of what is left."""
HEAD_SECONDS = 10.0
"""What the head of a request may take once its first byte has come, and the first request of a connection."""
IDLE_SECONDS = 30.0
HANDSHAKE_SECONDS = 5.0
POLL_SECONDS = 0.01
POLL_SECONDS_MAX = 0.05
"""Between two looks for a chunk that somebody waits for: the first, and when it has been waited for for long."""
TRIES = 3
"""How often a chunk that is here, and then is not when it is opened, is looked for again."""
RETRY_AFTER_SECONDS = 1
INTEREST_SECONDS = 10.0
SLOW_SECONDS = 2.5
"""Who finds this node slow says so every second."""
INTERESTED_MAX = 8192
PIECE_BYTES = 1 << 20
"""What is sent at a time where the rate is bounded, or through TLS."""
RATE_SECONDS = 10


@dataclass(slots=True)
class Rates:
    """Bytes per second over the last ``RATE_SECONDS``, by name."""

    _slots: deque[tuple[int, Counter[str]]] = field(default_factory=deque)

    def add(self, name: str, size_bytes: int) -> None:
        now = int(time.monotonic())
        if not self._slots or self._slots[-1][0] != now:
            self._slots.append((now, Counter()))
        self._slots[-1][1][name] += size_bytes
        self._forget(now)

    def now(self) -> dict[str, float]:
        self._forget(int(time.monotonic()))
        total: Counter[str] = Counter()
        for _, counts in self._slots:
            total.update(counts)
        return {name: count / RATE_SECONDS for name, count in total.items()}

    def _forget(self, now: int) -> None:
        while self._slots and self._slots[0][0] <= now - RATE_SECONDS:
            self._slots.popleft()


class RecentNames:
    """Names that were noted under a version a short while ago. Bounded, in versions and in names of each."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, float]] = {}

    def note(self, version: str, name: str, seconds: float) -> None:
        """Where there are very many versions, those go of which nothing was noted for ``seconds``."""
        now = time.monotonic()
        if version not in self._names and len(self._names) >= INTERESTED_MAX:
            self._names = {key: fresh for key in self._names if (fresh := self._fresh(key, now - seconds))}
        if version in self._names or len(self._names) < INTERESTED_MAX:
            names = self._names.setdefault(version, {})
            if name in names or len(names) < INTERESTED_MAX:
                names[name] = now

    def names(self, version: str, seconds: float) -> set[str]:
        return set(self._fresh(version, time.monotonic() - seconds))

    def _fresh(self, version: str, since: float) -> dict[str, float]:
        return {name: at for name, at in self._names.get(version, {}).items() if at > since}


class TokenBucket:
    """A token bucket: ``take`` returns when as many bytes may go. None: at once."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self.bytes_per_second = bytes_per_second
        self._free_at = 0.0

    async def take(self, size_bytes: int) -> None:
        if self.bytes_per_second is None:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now - 0.1) + size_bytes / self.bytes_per_second
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class PeerServer:
    """Serves what ``holdings`` has. Runs on one event loop; files are touched on its threads."""

    def __init__(
        self,
        settings: Settings,
        holdings: Holdings,
        members: Gossip,
        *,
        fresh: Callable[[], Json | None] | None = None,
        segment: Callable[[str, ByteRange], Opened | None] | None = None,
        hub: Callable[[str, ByteRange, bool], Future[tuple[Path, str]] | None] | None = None,
        drains: Callable[[], Awaitable[Json]] | None = None,
        bytes_per_second: int | None = None,
    ) -> None:
        """``segment`` opens a range of a gradient log of this node. ``hub`` begins to have a range of a file of a Hub
        here, or looks whether it is, and comes to the file that has it and its digest; None: this node serves no Hub.
        ``drains`` is the answer to ``/v1/drains``.
        ``bytes_per_second``: most that is served to all peers together.

        Raises ConfigError: see ``check_listen``; or the secret or the certificates cannot be used."""
        self.settings, self.holdings, self.members = settings, holdings, members
        self._where = check_listen(settings)
        self.verifier = Verifier(read_secret(settings), members.me.name)
        self._strangers = Repeats(log, logging.WARNING, "requests are refused from %s: %s")
        self._malformed = Repeats(log, logging.INFO, "malformed requests from %s: %s")
        self._failures = Repeats(log, logging.ERROR, "a peer's request could not be answered: %s: %s")
        self._tls = server_tls(settings)
        self._fresh, self._segment, self._hub = fresh, segment, hub
        self._drains = drains
        self._threads = ThreadPool(THREADS_MAX, thread_name_prefix="tierckpt-peer")
        self._server: asyncio.Server | None = None
        self.connections: set[asyncio.Task[None]] = set()
        self._from: Counter[str] = Counter()
        self.bytes_per_second = bytes_per_second
        self._bucket = TokenBucket(bytes_per_second)
        self.serving: Counter[str] = Counter()
        self.freed = asyncio.Event()
        self._looks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._interested, self._slow = RecentNames(), RecentNames()
        self._rates = Rates()
        self.served: Counter[str] = Counter()
        """Bytes of chunks, by the peer that got them."""
        self.counts: Counter[str] = Counter()
        """Requests by what became of them: chunks, missing, busy, refused, malformed, overflowed."""

    # --- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. Raises ConfigError: the address cannot be listened on."""
        host, port = self._where
        timeout = HANDSHAKE_SECONDS if self._tls else None
        try:
            self._server = await asyncio.start_server(
                self._connected,
                host,
                port,
                limit=HEAD_BYTES_MAX,
                ssl=self._tls,
                ssl_handshake_timeout=timeout,
                backlog=1024,
            )
        except OSError as error:
            raise ConfigError(
                f"peers cannot be served on {self.settings.peer_listen}: {error.strerror or error}",
                hint="Another agent may have the port: set peer_listen",
            ) from None

    @property
    def address(self) -> str:
        """Where it listens, with the port that it has got."""
        if self._server is None or not self._server.sockets:
            raise ConfigError("the peer server does not listen")
        return address_of(*self._server.sockets[0].getsockname()[:2])

    def _in_thread(self, work: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Disks are waited for on threads of the server's own: a slow one holds up nobody else of the agent."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def close(self) -> None:
        """Stop listening, and end what is under way. Idempotent."""
        if self._server is not None:
            self._server.close()
        left = [*self.connections, *self._looks.values()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- one connection ------------------------------------------------------------------------------------------

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        most, host = _connections_max(), _host_of(writer)
        if len(self.connections) >= most or self._from[host] >= max(1, most // 2):
            self.counts["overflowed"] += 1
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve_connection(reader, writer))
        self.connections.add(task)
        self._from[host] += 1
        task.add_done_callback(lambda ended: self._disconnected(ended, host))

    def _disconnected(self, ended: asyncio.Task[None], host: str) -> None:
        self.connections.discard(ended)
        self._from[host] -= 1
        if not self._from[host]:
            del self._from[host]

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            patience = HEAD_SECONDS
            while await self._serve_request(reader, writer, patience):
                patience = IDLE_SECONDS
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError, asyncio.CancelledError) as error:
            log.debug("a peer's connection ends: %s", type(error).__name__)
        except Exception as error:
            log.debug("a peer's request could not be answered", exc_info=True)
            self._failures.note(type(error).__name__, error)
        finally:
            writer.transport.abort()

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float) -> bool:
        """Answer one request; True to wait for another."""
        async with asyncio.timeout(patience):
            first = await reader.readexactly(1)
        async with asyncio.timeout(HEAD_SECONDS):
            head = first + await reader.readuntil(b"\r\n\r\n")
        try:
            request = parse_request(head)
        except WireError as error:
            self.counts["malformed"] += 1
            self._malformed.note(_host_of(writer), error)
            return await _Reply(self, writer).refuse(HTTPStatus.BAD_REQUEST)
        if request.method not in ("GET", "HEAD"):
            self.counts["malformed"] += 1
            return await _Reply(self, writer).refuse(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
        try:
            name, nonce = self.verifier.check(request.method, request.target, request.headers)
        except OtherTime as error:
            self.counts["other_time"] += 1
            log.debug("a member's clock is another: %s", writer.get_extra_info("peername"))
            told = {TIME: str(int(error.now))}
            return await _Reply(self, writer, error.nonce).refuse(HTTPStatus.UNAUTHORIZED, told)
        except Refused as error:
            self.counts["refused"] += 1
            self._strangers.note(_host_of(writer), error)
            return await _Reply(self, writer).refuse(HTTPStatus.UNAUTHORIZED)
        except Crowded as error:
            self.counts["busy"] += 1
            return await _Reply(self, writer, error.nonce).busy()
        self.members.asked(name)
        return await self._answer(request, name, _Reply(self, writer, nonce, is_head=request.method == "HEAD"))

    async def _answer(self, request: Request, name: str, reply: _Reply) -> bool:
        found = route(request.target)
        if found is None or "range" in request.headers:
            return await reply.missing()
        kind, words = found
        if kind == "chunk":
            version, size, ordinal, after, wait = words
            return await self._chunk(reply, name, version, int(size), int(ordinal), int(after), float(wait))
        if kind == "segment":
            identity, start, size = words
            at = ByteRange(int(start), int(start) + int(size))
            return await self._range(reply, name, lambda: self._segment and self._segment(identity, at))
        if kind == "hub":
            start, size, uri, reads = words
            at = ByteRange(int(start), int(start) + int(size))
            return await self._from_hub(reply, name, unquote(uri), at, reads == "1")
        if kind == "held":
            version, size, after, interested = words
            return await reply.json(await self._held(name, version, int(size), int(after), interested == "1"))
        if kind == "manifest":
            data = await self._in_thread(self.holdings.manifest, words[0])
            return await (reply.missing() if data is None else reply.whole(data))
        if kind == "steps":
            return await reply.json({"steps": await self._in_thread(self.holdings.steps, words[0])})
        if kind == "slow":
            self._slow.note(words[0], name, SLOW_SECONDS)
            return await reply.json({})
        if kind == "status":
            return await reply.json(await self._in_thread(self.status))
        if kind == "fresh":
            fresh = None if self._fresh is None else await self._in_thread(self._fresh)
            return await (reply.missing() if fresh is None else reply.json(fresh))
        if kind == "drains":
            return await (reply.missing() if self._drains is None else reply.json(await self._drains()))
        return await reply.json(self.members.answer(_row(request.headers)))

    # --- what is asked -------------------------------------------------------------------------------------------

    async def _held(self, name: str, version: str, size: int, after: int, interested: bool) -> Json:
        if interested:
            self._interested.note(version, name, INTEREST_SECONDS)
        return await self._in_thread(self._held_by_us, version, size, after)

    def _held_by_us(self, version: str, size: int, after: int) -> Json:
        held = self.holdings.held(version, size, after)
        return {**held.to_json(), "interested": sorted(self.interested(version))}

    def interested(self, version: str) -> set[str]:
        """Who has asked for ``version`` as interested a short while ago, and this node if it fills. Blocking."""
        names = self._interested.names(version, INTEREST_SECONDS)
        return names | {self.members.me.name} if self.holdings.is_fetching(version) else names

    def slow_to(self, version: str) -> set[str]:
        """Who has said a short while ago that this node takes far longer than others to give chunks of ``version``."""
        return self._slow.names(version, SLOW_SECONDS)

    async def _chunk(
        self, reply: _Reply, name: str, version: str, size: int, ordinal: int, after: int, wait: float
    ) -> bool:
        deadline = time.monotonic() + min(wait, WAIT_SECONDS_MAX)
        for _ in range(TRIES):
            if not await self._slot(name, deadline):
                self.counts["busy"] += 1
                return await reply.busy()
            try:
                found = self.holdings.open_now(version, size, ordinal, after)
                found = found or await self._in_thread(self._open, version, size, ordinal, after)
                if found is not None:
                    with contextlib.closing(found[0]):
                        return await self._send_chunk(reply, name, *found)
            finally:
                self._free(name)
            if not await self._await_chunk(version, size, ordinal, deadline):
                break
        self.counts["missing"] += 1
        return await reply.missing()

    async def _from_hub(self, reply: _Reply, name: str, uri: str, at: ByteRange, reads: bool) -> bool:
        """Give a range of a file of a Hub, once it is here: it is read there for whoever asks first."""
        bringing = self._hub(uri, at, reads) if self._hub is not None else None
        if bringing is None:
            return await reply.refuse(HTTPStatus.METHOD_NOT_ALLOWED)
        future = asyncio.wrap_future(bringing)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([future], timeout=HUB_WAIT_SECONDS)  # that it is not waited for any longer ends nothing
        if future.done() and not (future.cancelled() or future.exception()):
            path, digest = future.result()
            return await self._range(reply, name, lambda: open_range(path, at, digest), is_coming=True)
        return await self._send_nothing(reply, is_coming=not future.done())

    async def _send_nothing(self, reply: _Reply, *, is_coming: bool) -> bool:
        self.counts["busy" if is_coming else "missing"] += 1
        return await (reply.busy() if is_coming else reply.missing())

    async def _range(
        self, reply: _Reply, name: str, open_: Callable[[], Opened | None], *, is_coming: bool = False
    ) -> bool:
        """Give what ``open_`` opens. ``is_coming``: where it opens nothing, there is something a moment later."""
        if not await self._slot(name, time.monotonic()):
            return await self._send_nothing(reply, is_coming=True)
        try:
            found = await self._in_thread(open_)
            if found is None:
                return await self._send_nothing(reply, is_coming=is_coming)
            with contextlib.closing(found):
                return await self._send_chunk(reply, name, found, ChunkReport())
        finally:
            self._free(name)

    def _open(self, version: str, size: int, ordinal: int, after: int) -> tuple[Opened, ChunkReport] | None:
        opened = self.holdings.open(version, size, ordinal)
        if opened is None:
            return None
        return opened, self.holdings.held(version, size, after, LINES_IN_HEAD_MAX)

    async def _send_chunk(self, reply: _Reply, name: str, opened: Opened, held: ChunkReport) -> bool:
        keeps = await reply.chunk(opened, held.to_header(), self._bucket)
        if not reply.is_head:
            self._note_served(name, opened.byte_range.size_bytes)
        return keeps

    async def _slot(self, name: str, deadline: float) -> bool:
        """Take one of the places there are for chunks under way; False when none is free in time."""
        while self.serving.total() >= SERVES_MAX or self.serving[name] >= max(1, SERVES_MAX // 4):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.freed.wait(), left)
        self.serving[name] += 1
        return True

    def _free(self, name: str) -> None:
        self.serving[name] -= 1
        if not self.serving[name]:
            del self.serving[name]
        self.freed.set()

    async def _await_chunk(self, version: str, size: int, ordinal: int, deadline: float) -> bool:
        """Return when a chunk is seen to be here, or not in time. All who wait for a version share each look."""
        pause = POLL_SECONDS
        while time.monotonic() < deadline:
            await self._look(version, size, pause)
            if self.holdings.has_seen(version, size, ordinal):
                return True
            pause = min(pause * 1.5, POLL_SECONDS_MAX)  # what has taken long may take longer
        return False

    async def _look(self, version: str, size: int, pause: float) -> None:
        key = version, size
        task = self._looks.get(key)
        if task is None or task.done():  # to await one that has ended is no pause: a loop of it stops the agent
            task = self._looks[key] = asyncio.ensure_future(self._look_later(version, size, pause))
            task.add_done_callback(lambda ended: self._looks.pop(key) if self._looks.get(key) is ended else None)
        await asyncio.shield(task)

    async def _look_later(self, version: str, size: int, pause: float) -> None:
        await asyncio.sleep(pause)
        await self._in_thread(self.holdings.locate, version, size, 0)

    def _note_served(self, name: str, size_bytes: int) -> None:
        self.counts["chunks"] += 1
        self.served[name if name in self.served or len(self.served) < INTERESTED_MAX else "others"] += size_bytes
        self._rates.add(name, size_bytes)
        BYTES.emit(size_bytes, tier=Tier.PEER, direction="served")

    def status(self) -> Json:
        """What this node serves and fetches now. Blocking."""
        return {
            "name": self.members.me.name,
            "served_bytes": dict(self.served),
            "bytes_per_second": self._rates.now(),
            "requests": dict(self.counts),
            "serving": self.serving.total(),
            "connections": len(self.connections),
            "bad_chunks": self.holdings.bad,
            "fills": self.holdings.fills(),
        }


class _Reply:
    """The answer to one request."""

    def __init__(
        self, server: PeerServer, writer: asyncio.StreamWriter, nonce: str = "", *, is_head: bool = False
    ) -> None:
        self._server, self._writer, self._nonce, self.is_head = server, writer, nonce, is_head

    async def refuse(self, status: HTTPStatus, headers: Mapping[str, str] = {}) -> bool:
        """Say no, to whom nothing else is said, and end the connection."""
        self._writer.write(self._head(status, {**headers, "Connection": "close"}, 0, b""))
        await self._drain(0)
        with contextlib.suppress(OSError):
            self._writer.write_eof()
        return False

    async def missing(self) -> bool:
        return await self._send(HTTPStatus.NOT_FOUND, b"", {})

    async def busy(self) -> bool:
        return await self._send(HTTPStatus.SERVICE_UNAVAILABLE, b"", {"Retry-After": str(RETRY_AFTER_SECONDS)})

    async def json(self, body: Json) -> bool:
        return await self.whole(json.dumps(body, separators=(",", ":")).encode())

    async def whole(self, body: bytes) -> bool:
        return await self._send(HTTPStatus.OK, body, {})

    async def _send(self, status: HTTPStatus, body: bytes, headers: Mapping[str, str]) -> bool:
        self._writer.write(self._head(status, headers, len(body), body))
        if not self.is_head:
            self._writer.write(body)
        await self._drain(len(body))
        return True

    async def chunk(self, opened: Opened, held: str, bucket: TokenBucket) -> bool:
        size = opened.byte_range.size_bytes
        self._writer.write(self._head(HTTPStatus.OK, {DIGEST: opened.digest, HELD: held}, size))
        if self.is_head:
            await self._drain(0)
            return True
        async with asyncio.timeout(self._seconds(size)):
            await self._send_file(opened, bucket)
        return True

    async def _send_file(self, opened: Opened, bucket: TokenBucket) -> None:
        loop, transport = asyncio.get_running_loop(), self._writer.transport
        is_plain = transport.get_extra_info("sslcontext") is None
        step = PIECE_BYTES if bucket.bytes_per_second is not None or not is_plain else opened.byte_range.size_bytes
        at, stop = opened.byte_range.start, opened.byte_range.stop
        with os.fdopen(os.dup(opened.file), "rb", buffering=0) as file:
            while at < stop:
                count = min(step, stop - at)
                await bucket.take(count)
                if is_plain:
                    try:
                        sent = await loop.sendfile(transport, file, at, count, fallback=False)
                    except asyncio.SendfileNotAvailableError:
                        if transport.is_closing():
                            raise EOFError("the peer has gone") from None
                        is_plain, sent, step = False, 0, PIECE_BYTES  # this file system has no sendfile
                        continue
                else:
                    data = await self._server._in_thread(os.pread, opened.file, count, at)
                    self._writer.write(data)
                    await self._writer.drain()
                    sent = len(data)
                if not sent:
                    raise EOFError("the file has become shorter")  # the connection ends: the peer sees too few bytes
                at += sent

    def _head(self, status: HTTPStatus, headers: Mapping[str, str], length: int, body: bytes | None = None) -> bytes:
        said = {"Content-Length": str(length), **headers}
        if self._nonce:
            said |= self._server.verifier.prove(self._nonce, status, said, body)
        return encode_head(f"HTTP/1.1 {status.value} {status.phrase}", said)

    async def _drain(self, size_bytes: int) -> None:
        async with asyncio.timeout(self._seconds(size_bytes)):
            await self._writer.drain()

    def _seconds(self, size_bytes: int) -> float:
        """What sending may take, before who receives it counts as hung."""
        bound = self._server.bytes_per_second
        paced = SERVES_MAX * size_bytes / bound if bound else 0.0
        return get_concurrency.WINDOW_SECONDS + size_bytes / get_concurrency.BYTES_PER_SECOND_MIN + paced


def _connections_max() -> int:
    return min(CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _host_of(writer: asyncio.StreamWriter) -> str:
    return str((writer.get_extra_info("peername") or ("?",))[0])


def _row(headers: Mapping[str, str]) -> Json | None:
    try:
        return parse_json(headers[ME].encode())
    except (KeyError, WireError):
        return None
