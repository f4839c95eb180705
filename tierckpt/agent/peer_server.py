"""The site of a node's agent for the other nodes: GET and HEAD of the paths in peer_http.py, for members only.

K1  A request is answered only after authentication (auth.py), and no request contains a path of a file of this
    node. Everything else is a 404.
K2  Bounded, besides http_server.py: chunks in flight in all and per peer, bytes per second, and the time of an
    answer.
K3  A chunk is in the page cache before its first byte is sent (sendfile(2)), so a slow disk never delays the other
    connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import unquote

from ..config import Settings
from ..drain.rate_limiter import RateLimiter
from ..peer.auth import Crowded, OtherTime, RejectedRequest, Verifier, check_listen, read_secret, tls_context
from ..peer.gossip import Gossip
from ..peer.inventory import Answers, Holdings, Opened, open_range
from ..peer.peer_http import (
    DIGEST,
    HELD,
    HUB_WAIT_SECONDS,
    LINES_IN_HEAD_MAX,
    ME,
    TIME,
    WAIT_SECONDS_MAX,
    ChunkReport,
    WireError,
    address_of,
    parse_headers,
    parse_json,
    route,
)
from ..resources import ThreadPool
from ..stores.base import acquired
from ..telemetry import BYTES, Repeats, logger
from ..types import ByteRange, Json, Tier
from .http_server import HttpServer, begin, refusal, send_seconds, web, write

log = logger("peer")

T = TypeVar("T")
THREADS_MAX = 16
SERVES_MAX = 64
"""Limit for all peers together; any one may have a quarter of it."""
POLL_SECONDS = 0.01
POLL_SECONDS_MAX = 0.05
"""Interval of the checks for a chunk that a peer waits for: initial, and after a long wait."""
TRIES = 3
RETRY_AFTER_SECONDS = 1
INTEREST_SECONDS = 10.0
SLOW_SECONDS = 2.5
"""Lifetime of a peer's report that this node is slow, which it repeats every second."""
INTERESTED_MAX = 8192
PIECE_BYTES = 1 << 20


class RecentNames:
    """Names recently noted under a version, at most ``INTERESTED_MAX`` in all."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, str], float] = {}

    def note(self, version: str, name: str, seconds: float) -> None:
        """At the limit, those older than ``seconds`` are dropped."""
        now = time.monotonic()
        if len(self._noted) >= INTERESTED_MAX:
            self._noted = {key: at for key, at in self._noted.items() if at > now - seconds}
        if (version, name) in self._noted or len(self._noted) < INTERESTED_MAX:
            self._noted[version, name] = now

    def names(self, version: str, seconds: float) -> set[str]:
        since = time.monotonic() - seconds
        return {name for (known, name), at in self._noted.items() if known == version and at > since}


class PeerServer:
    """Serves ``holdings`` on one event loop; reads files on threads of its own.

    ``bytes_per_second`` limits all peers together.

    Raises ConfigError: see ``check_listen``; or the secret or the certificates are unusable.
    """

    def __init__(
        self,
        settings: Settings,
        holdings: Holdings,
        members: Gossip,
        answers: Answers | None = None,
        *,
        bytes_per_second: int | None = None,
    ) -> None:
        self.holdings, self.members = holdings, members
        self._where = check_listen(settings)
        self.verifier = Verifier(read_secret(settings), members.me.name)
        self._strangers = Repeats(log, logging.WARNING, "requests from %s are rejected: %s")
        self._tls = tls_context(settings, ssl.PROTOCOL_TLS_SERVER)
        self._answers = answers or Answers()
        self._threads = ThreadPool(THREADS_MAX, thread_name_prefix="tierckpt-peer")
        self.http = HttpServer("the peer server", self._handle)
        self.counts = self.http.counts
        """Results: chunks, missing, busy, refused, malformed, overflowed."""
        self.bytes_per_second = bytes_per_second
        self._limiter = RateLimiter(bytes_per_second, SERVES_MAX)
        self.serving: Counter[str] = Counter()
        self.freed = asyncio.Event()
        self._looks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._interested, self._slow = RecentNames(), RecentNames()
        self.served: Counter[str] = Counter()

    async def start(self) -> None:
        """Raises ConfigError: cannot listen on the address."""
        await self.http.start(*self._where, self._tls)

    @property
    def address(self) -> str:
        return address_of(*self.http.address)

    def _in_thread(self, work: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Run ``work`` on a thread: a slow disk delays nothing else in the agent."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def close(self) -> None:
        """Stop listening, and end open requests. Idempotent."""
        await self.http.close()
        for task in (looks := [*self._looks.values()]):
            task.cancel()
        if looks:
            await asyncio.wait(looks)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- requests ------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        client, target = request.remote or "?", request.raw_path
        try:
            headers = parse_headers(target, request.version, request.raw_headers)
        except WireError as error:
            self.http.note_malformed(client, error)
            return refusal(HTTPStatus.BAD_REQUEST)
        if request.method not in ("GET", "HEAD"):
            self.counts["malformed"] += 1
            return refusal(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
        try:
            name, nonce = self.verifier.check(request.method, target, headers)
        except OtherTime as error:
            self.counts["other_time"] += 1
            log.debug("a member's clock differs: %s", client)
            return self._signed(refusal(HTTPStatus.UNAUTHORIZED, {TIME: str(int(error.now))}), error.nonce)
        except RejectedRequest as error:
            self.counts["refused"] += 1
            self._strangers.note(client, error)
            return refusal(HTTPStatus.UNAUTHORIZED)
        except Crowded as error:
            self.counts["busy"] += 1
            return self._signed(_busy(), error.nonce)
        self.members.asked(name)
        kind, words = (route(target) if "range" not in headers else None) or ("", ())
        response = await self._answer(_Asked(request, name, nonce), kind, words)
        return self._signed(response, nonce) if isinstance(response, web.Response) else response

    def _signed(self, response: web.Response, nonce: str) -> web.Response:
        body = response.body if isinstance(response.body, bytes) else b""
        response.headers["Content-Length"] = str(len(body))
        response.headers.update(self.verifier.prove(nonce, response.status, response.headers, body))
        return response

    async def _answer(self, request: _Asked, kind: str, words: tuple[str, ...]) -> web.StreamResponse:
        match kind, words:
            case "chunk", (version, size, ordinal, after, wait):
                return await self._chunk(request, version, int(size), int(ordinal), int(after), float(wait))
            case "segment", (identity, start, size):
                at, open_ = ByteRange(int(start), int(start) + int(size)), self._answers.segment
                return await self._range(request, lambda: open_(identity, at) if open_ is not None else None)
            case "hub", (start, size, uri, reads):
                at = ByteRange(int(start), int(start) + int(size))
                return await self._from_hub(request, unquote(uri), at, reads == "1")
            case "held", (version, size, after, interested):
                if interested == "1":
                    self._interested.note(version, request.name, INTEREST_SECONDS)
                return _json(await self._in_thread(self._held_here, version, int(size), int(after)))
            case "manifest", (key,):
                data = await self._in_thread(self.holdings.manifest, key)
                return web.Response(body=data) if data is not None else _missing()
            case "steps", (key,):
                return _json({"steps": await self._in_thread(self.holdings.steps, key)})
            case "slow", (version,):
                self._slow.note(version, request.name, SLOW_SECONDS)
                return _json({})
            case "status", _:
                return _json(await self._in_thread(self.status))
            case "fresh", _ if self._answers.fresh is not None:
                fresh = await self._in_thread(self._answers.fresh)
                return _json(fresh) if fresh is not None else _missing()
            case "drains", _ if self._answers.drains is not None:
                return _json(await self._answers.drains())
            case "members", _:
                return _json(self.members.answer(_row(request.request.headers)))
        return _missing()

    def _held_here(self, version: str, size: int, after: int) -> Json:
        report = self.holdings.report(version, size, after)
        return {**report.to_json(), "interested": sorted(self.interested(version))}

    def interested(self, version: str) -> set[str]:
        """Return the peers that recently requested ``version``, and this node if it is fetching that. Blocking."""
        names = self._interested.names(version, INTEREST_SECONDS)
        return names | {self.members.me.name} if self.holdings.is_fetching(version) else names

    def slow_to(self, version: str) -> set[str]:
        return self._slow.names(version, SLOW_SECONDS)

    # --- chunks --------------------------------------------------------------------------------------------------

    async def _chunk(
        self, request: _Asked, version: str, size: int, ordinal: int, after: int, wait: float
    ) -> web.StreamResponse:
        deadline = time.monotonic() + min(wait, WAIT_SECONDS_MAX)
        for _ in range(TRIES):
            if not await self._take_slot(request.name, deadline):
                self.counts["busy"] += 1
                return _busy()
            try:
                found = self.holdings.open_now(version, size, ordinal, after)
                if found is None:
                    opening = self._in_thread(self._open, version, size, ordinal, after)
                    found = await acquired(opening, lambda found: _close(found and found[0]))
                if found is not None:
                    return await self._send_chunk(request, *found)
            finally:
                self._free_slot(request.name)
            if not await self._await_chunk(version, size, ordinal, deadline):
                break
        self.counts["missing"] += 1
        return _missing()

    async def _from_hub(self, request: _Asked, uri: str, at: ByteRange, reads: bool) -> web.StreamResponse:
        bringing = self._answers.hub(uri, at, reads) if self._answers.hub is not None else None
        if bringing is None:
            return refusal(HTTPStatus.METHOD_NOT_ALLOWED)
        future = asyncio.wrap_future(bringing)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([future], timeout=HUB_WAIT_SECONDS)  # the fetch continues after a timeout
        if future.done() and not (future.cancelled() or future.exception()):
            path, digest = future.result()
            return await self._range(request, lambda: open_range(path, at, digest), is_coming=True)
        return self._nothing(request, is_coming=not future.done())

    def _nothing(self, request: _Asked, *, is_coming: bool) -> web.StreamResponse:
        self.counts["busy" if is_coming else "missing"] += 1
        return _busy() if is_coming else _missing()

    async def _range(
        self, request: _Asked, open_: Callable[[], Opened | None], *, is_coming: bool = False
    ) -> web.StreamResponse:
        """``is_coming``: if nothing opens, the range is expected soon."""
        if not await self._take_slot(request.name, time.monotonic()):
            return self._nothing(request, is_coming=True)
        try:
            found = await acquired(self._in_thread(open_), _close)
            if found is None:
                return self._nothing(request, is_coming=is_coming)
            return await self._send_chunk(request, found, ChunkReport())
        finally:
            self._free_slot(request.name)

    def _open(self, version: str, size: int, ordinal: int, after: int) -> tuple[Opened, ChunkReport] | None:
        opened = self.holdings.open(version, size, ordinal)
        if opened is None:
            return None
        return opened, self.holdings.report(version, size, after, LINES_IN_HEAD_MAX)

    async def _send_chunk(self, request: _Asked, opened: Opened, report: ChunkReport) -> web.StreamResponse:
        size = opened.byte_range.size_bytes
        said = {"Content-Length": str(size), DIGEST: opened.digest, HELD: report.to_header()}
        said |= self.verifier.prove(request.nonce, HTTPStatus.OK, said, None)
        paced = SERVES_MAX * size / self.bytes_per_second if self.bytes_per_second else 0.0
        with contextlib.closing(opened):
            response = await begin(request.request, said)
            if request.request.method == "HEAD":
                return response
            async with asyncio.timeout(send_seconds(size) + paced):
                await self._send_file(request.request, response, opened)
        self.counts["chunks"] += 1
        name = request.name if request.name in self.served or len(self.served) < INTERESTED_MAX else "others"
        self.served[name] += size
        BYTES.emit(size, tier=Tier.PEER, direction="served")
        return response

    async def _send_file(self, request: web.BaseRequest, response: web.StreamResponse, opened: Opened) -> None:
        loop, transport = asyncio.get_running_loop(), request.transport
        if transport is None:
            raise EOFError("the peer closed the connection")
        is_plain = transport.get_extra_info("sslcontext") is None
        at, stop = opened.byte_range.start, opened.byte_range.stop
        with os.fdopen(os.dup(opened.file), "rb", buffering=0) as file:
            while at < stop:
                in_pieces = self.bytes_per_second is not None or not is_plain
                count = min(PIECE_BYTES, stop - at) if in_pieces else stop - at
                await self._limiter.spend(count)
                if is_plain:
                    try:
                        sent = await loop.sendfile(transport, file, at, count, fallback=False)
                    except asyncio.SendfileNotAvailableError:
                        if transport.is_closing():
                            raise EOFError("the peer closed the connection") from None
                        is_plain = False
                        continue
                else:
                    data = await self._in_thread(os.pread, opened.file, count, at)
                    await write(response, data)
                    sent = len(data)
                if not sent:
                    raise EOFError("the file was truncated")  # the connection ends: the peer sees too few bytes
                at += sent

    async def _take_slot(self, name: str, deadline: float) -> bool:
        while self.serving.total() >= SERVES_MAX or self.serving[name] >= max(1, SERVES_MAX // 4):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.freed.wait(), left)
        self.serving[name] += 1
        return True

    def _free_slot(self, name: str) -> None:
        self.serving[name] -= 1
        if not self.serving[name]:
            del self.serving[name]
        self.freed.set()

    async def _await_chunk(self, version: str, size: int, ordinal: int, deadline: float) -> bool:
        """False after the deadline. Requests for a version share each check."""
        pause = POLL_SECONDS
        while time.monotonic() < deadline:
            await self._scan_version(version, size, pause)
            if self.holdings.has_seen(version, size, ordinal):
                return True
            pause = min(pause * 1.5, POLL_SECONDS_MAX)
        return False

    async def _scan_version(self, version: str, size: int, pause: float) -> None:
        key = version, size
        task = self._looks.get(key)
        if task is None or task.done():  # awaiting a finished task does not yield: a loop of it would block the agent
            task = self._looks[key] = asyncio.ensure_future(self._look_later(version, size, pause))
            task.add_done_callback(lambda ended: self._looks.pop(key) if self._looks.get(key) is ended else None)
        await asyncio.shield(task)

    async def _look_later(self, version: str, size: int, pause: float) -> None:
        await asyncio.sleep(pause)
        await self._in_thread(self.holdings.locate, version, size, 0)

    def status(self) -> Json:
        return {
            "name": self.members.me.name,
            "served_bytes": dict(self.served),
            "requests": dict(self.counts),
            "serving": self.serving.total(),
            "connections": len(self.http.connections),
            "bad_chunks": self.holdings.bad,
            "fills": self.holdings.fills(),
        }


@dataclass(slots=True)
class _Asked:
    """An authenticated request of member ``name``. Its answer is bound to ``nonce``."""

    request: web.BaseRequest
    name: str
    nonce: str


def _missing() -> web.Response:
    return web.Response(status=HTTPStatus.NOT_FOUND)


def _close(found: Opened | None) -> None:
    if found is not None:
        found.close()


def _busy() -> web.Response:
    return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def _json(body: Json) -> web.Response:
    return web.Response(body=json.dumps(body, separators=(",", ":")).encode())


def _row(headers: Mapping[str, str]) -> Json | None:
    try:
        return parse_json(headers[ME].encode())
    except (KeyError, WireError):
        return None
