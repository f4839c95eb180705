"""The agent's HTTP server, on aiohttp. Peers, the page with the metrics, and the Hub proxy are its sites.

L1  The head of a request arrives within ``HEAD_SECONDS`` of its first byte, the first one within that time of the
    connection. A connection that is idle for ``IDLE_SECONDS`` is closed.
L2  A site has at most ``CONNECTIONS_MAX`` connections, and half of the process's open files; one address at most
    half of them. A connection counts until its request is answered.
L3  A request has at most ``HEAD_BYTES_MAX`` bytes, ``HEADERS_MAX`` headers, and the body that its site reads. An
    unread body ends the connection.
L4  A client that does not receive its answer in time is disconnected, as is one whose request fails.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import TypeAlias

from aiohttp import web as web

from ..errors import ConfigError
from ..stores import get_concurrency
from ..telemetry import Repeats, logger

log = logger("agent.http")

CONNECTIONS_MAX = 2048
HEAD_SECONDS = 10.0
IDLE_SECONDS = 30.0
HANDSHAKE_SECONDS = 5.0
LINGER_SECONDS = 10.0
"""Limit for the rest of an answer after its connection was closed."""
HEAD_BYTES_MAX = 16 << 10
HEADERS_MAX = 64
BACKLOG = 1024
WRITE_BYTES = 256 << 10

Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves one site on the running event loop, from ``start`` to ``close``.

    ``handler`` returns the answer, sent or not. It reads bodies of up to ``body_bytes_max``.
    """

    def __init__(self, name: str, handler: Handler, *, body_bytes_max: int = 0) -> None:
        self.name, self._handler = name, handler
        self.request_bytes_max = HEAD_BYTES_MAX + body_bytes_max
        self.connections: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        self.by_host: Counter[str] = Counter()
        self._listener: asyncio.Server | None = None
        self._malformed = Repeats(log, logging.INFO, "malformed requests from %s: %s")
        self._failures = Repeats(log, logging.ERROR, f"cannot answer a request to {name}: %s: %s")

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Listen; port 0 selects a free one. Raises ConfigError: cannot listen on the address."""
        loop = asyncio.get_running_loop()
        manager = web.Server(self._answer, request_factory=partial(_Request, loop=loop))
        try:
            self._listener = await loop.create_server(
                lambda: _Connection(self, manager),
                host,
                port,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if tls is not None else None,
                backlog=BACKLOG,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot serve {self.name} on port {port} of {host}: {error.strerror or error}",
                hint="Another process may use the port: choose another one",
            ) from None

    @property
    def address(self) -> tuple[str, int]:
        assert self._listener is not None
        host, port = self._listener.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def close(self) -> None:
        """Stop listening, and end open requests. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        left = set(self.connections)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    def note_malformed(self, host: str, reason: object) -> None:
        self.counts["malformed"] += 1
        self._malformed.note(host, reason)

    def admit(self, host: str) -> bool:
        """Count a connection of ``host``. False if there are too many (L2)."""
        most = min(CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        if self.by_host.total() >= most or self.by_host[host] >= max(1, most // 2):
            self.counts["overflowed"] += 1
            return False
        self.by_host[host] += 1
        return True

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, _Connection)
        connection.set_answering(True)
        try:
            response = await self._handler(request)
            async with asyncio.timeout(send_seconds(response.content_length or 0)):
                await response.prepare(request)
                await response.write_eof()
        except (OSError, EOFError) as error:
            log.debug("a connection to %s ends: %s", self.name, type(error).__name__)
        except Exception as error:
            log.debug("cannot answer a request to %s", self.name, exc_info=True)
            self._failures.note(type(error).__name__, error)
        else:
            connection.set_answering(False)
            return response
        connection.abort()
        raise ConnectionResetError("the request could not be answered")


class _Request(web.BaseRequest):
    """Its answer has no version headers, and no time header unless the client is a member."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        response.headers["Server"] = "tierckpt"
        response.headers.popall("Date", None)


class _Connection(web.RequestHandler):
    __slots__ = ("_client", "_deadline", "_has_room", "_is_answering", "_received_bytes", "_site", "_wire")

    def __init__(self, site: HttpServer, manager: web.Server) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_SECONDS,
            logger=log,
            access_log=None,  # type: ignore[arg-type]
            max_headers=HEADERS_MAX,
            lingering_time=0.0,
            auto_decompress=False,
        )
        self._site = site
        self._has_room = self._is_answering = False
        self._received_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._wire = transport
        self._client = str((transport.get_extra_info("peername") or ("?",))[0])
        self._has_room = self._site.admit(self._client)
        if not self._has_room:
            transport.abort()
            return
        self._abort_in(HEAD_SECONDS)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes > self._site.request_bytes_max:
            self._site.note_malformed(self._client, "a request that is too long")
            self.abort()
            return
        if self._deadline is None and not self._is_answering:
            self._abort_in(HEAD_SECONDS)
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel_deadline()
        if self._has_room:  # otherwise aiohttp has not seen it
            super().connection_lost(exc)

    async def start(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._site.connections.add(task)
        try:
            await super().start()
        except BaseException:
            self.abort()
            raise
        finally:
            self._site.connections.discard(task)
            self._site.by_host -= Counter((self._client,))
            self._abort_in(LINGER_SECONDS)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status != HTTPStatus.BAD_REQUEST:
            raise ConnectionResetError("the request could not be answered")
        self._site.note_malformed(self._client, type(exc).__name__)
        return refusal(HTTPStatus.BAD_REQUEST)

    def set_answering(self, value: bool) -> None:
        self._is_answering, self._received_bytes = value, 0
        self._cancel_deadline()

    def abort(self) -> None:
        self._wire.abort()

    def _abort_in(self, seconds: float) -> None:
        self._cancel_deadline()
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def refusal(status: HTTPStatus, headers: Mapping[str, str] = {}) -> web.Response:
    response = web.Response(status=status, headers={"Content-Length": "0", **headers})
    response.force_close()
    return response


async def begin(
    request: web.BaseRequest, headers: Mapping[str, str], *, status: int = HTTPStatus.OK
) -> web.StreamResponse:
    response = web.StreamResponse(status=status, headers=headers)
    async with asyncio.timeout(send_seconds(0)):
        await response.prepare(request)
    return response


async def write(response: web.StreamResponse, data: bytes | memoryview) -> None:
    """Raises OSError: the client left, or is too slow (L4)."""
    view = memoryview(data)
    async with asyncio.timeout(send_seconds(len(view))):
        for at in range(0, len(view), WRITE_BYTES):
            await response.write(view[at : at + WRITE_BYTES])


def send_seconds(size_bytes: int) -> float:
    return get_concurrency.WINDOW_SECONDS + size_bytes / get_concurrency.BYTES_PER_SECOND_MIN
