"""The page of a node, over HTTP. Read-only.

B1  Reads only: GET and HEAD, and no route that acts.
B2  A page of another site cannot read it through a browser on this node: the Host must be an address, or a name of
    this machine, except for ``/metrics``: Prometheus uses any name.
B3  Beyond loopback every request must carry the token.
B4  Events are sent while a page listens, at most once in ``PERIOD_SECONDS``, and with at most ``CPU_SHARE`` of one
    core. ``/status.json`` makes one per request.
B5  Documents are built on threads: the event loop never waits for a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from importlib import resources
from typing import TypeAlias
from urllib.parse import parse_qs, urlsplit

from ..config import Settings
from ..errors import ConfigError, TierckptError
from ..redaction import redact, redact_all
from ..resources import ThreadPool
from ..telemetry import logger
from ..types import Json
from .http_server import HttpServer, begin, web, write
from .node_document import Known, node_document, peers_document
from .page_documents import BusyError, NotNamedError, PageDocuments
from .rollout import RolloutWatch

log = logger("agent.web")

LOOPBACK = "127.0.0.1"
PERIOD_SECONDS = 1.0
PERIOD_SECONDS_MAX = 60.0
CPU_SHARE = 0.003
KEEPALIVE_SECONDS = 15.0
ROLLOUT_SECONDS = 5.0
"""Interval of checks while there is no rollout."""
LISTENERS_MAX = 16
THREADS_MAX = 16

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Route: TypeAlias = Callable[[str], tuple[bytes, str]]
"""Takes the Accept header; returns a body and its type. Called on a thread."""


class Documents:
    """The newest document of the node, for all open pages. Makes none while no page is open. One event loop."""

    def __init__(self, settings: Settings, make: Callable[[], Json] | None = None) -> None:
        self._settings, self._make = settings, make
        self._news, self._left = asyncio.Condition(), asyncio.Event()
        self._listeners = self._number = 0
        self._text = b""
        self._task: asyncio.Task[None] | None = None
        self._maker = ThreadPool(1, thread_name_prefix="tierckpt-page")
        self._known: Known = {}
        self._watch: RolloutWatch | None = None
        self._looked_at = float("-inf")

    def listen(self) -> bool:
        if self._listeners >= LISTENERS_MAX:
            return False
        self._listeners += 1
        self._left.clear()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return True

    def leave(self) -> None:
        self._listeners -= 1
        if not self._listeners:
            self._left.set()

    async def after(self, number: int, timeout_seconds: float) -> tuple[int, bytes]:
        """Wait for a document newer than ``number``. Returns its number and text, or the old number and no text."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds), self._news:
                await self._news.wait_for(lambda: self._number > number)
        return (self._number, self._text) if self._number > number else (number, b"")

    def now(self) -> bytes:
        """Make a document for this caller. Blocking; any thread."""
        return self._encoded(None, None)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._maker.shutdown(wait=False)

    async def _run(self) -> None:
        try:
            while self._listeners:
                rollout = await self._rollout() if self._settings.peers is not None else None
                made = asyncio.get_running_loop().run_in_executor(self._maker, self._make_news, rollout)
                text, cpu_seconds = await made
                async with self._news:
                    self._text, self._number = text, self._number + 1
                    self._news.notify_all()
                period = max(PERIOD_SECONDS, min(PERIOD_SECONDS_MAX, cpu_seconds / CPU_SHARE))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._left.wait(), period)
        finally:
            self._task = None
            watch, self._watch = self._watch, None
            if watch is not None:
                await watch.close()

    def _make_news(self, rollout: Json | None) -> tuple[bytes, float]:
        """Return the text of a new document, and the CPU time it took."""
        begun = time.thread_time()
        return self._encoded(self._known, rollout), time.thread_time() - begun

    def _encoded(self, known: Known | None, rollout: Json | None) -> bytes:
        try:
            document = self._make() if self._make is not None else self._make_document(known, rollout)
        except (OSError, TierckptError) as error:
            document = {"problem": f"the state of the node cannot be read: {error}"}
        except Exception as error:
            log.exception("cannot build the page's document")
            document = {"problem": f"this is a bug in tierckpt: {type(error).__name__}"}
        return json.dumps(redact_all(document)).encode()

    def _make_document(self, known: Known | None, rollout: Json | None) -> Json:
        peers = peers_document(self._settings) if self._settings.peers is not None else None
        return {**node_document(self._settings, known), "peers": peers, "rollout": rollout}

    async def _rollout(self) -> Json | None:
        """Return the progress of the newest rollout."""
        if self._watch is None:
            self._watch = await asyncio.to_thread(RolloutWatch, None, self._settings)
        is_active = self._watch.rollout is not None and not self._watch.rollout.is_done
        if is_active or time.monotonic() - self._looked_at >= ROLLOUT_SECONDS:
            self._looked_at = time.monotonic()
            with contextlib.suppress(Exception):  # a node's wrong answer must not end the page
                await self._watch.poll(start=False)
        return self._watch.rollout.to_json() if self._watch.rollout is not None else None


class WebServer:
    """Serves the page of a node on the running event loop, from ``start`` to ``close``.

    Args:
        host: an address. Beyond loopback a token is created, which ``url`` contains.
        port: 0 selects a free one.
        routes: more pages, by path.

    Raises:
        ConfigError: ``host`` is not an address.

    Example:
        >>> async def serve(settings: Settings) -> None:
        ...     server = WebServer(settings)
        ...     await server.start()
        ...     print(server.url)
        ...     await server.close()
    """

    def __init__(
        self,
        settings: Settings,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        routes: Mapping[str, Route] | None = None,
        documents: Documents | None = None,
    ) -> None:
        address = _address(host)
        self.host, self.port = str(address), port
        self.documents = documents or Documents(settings)
        self.pages = PageDocuments(settings)
        self.routes = dict(routes or {})
        self.token = "" if address.is_loopback else secrets.token_urlsafe(24)
        name = socket.gethostname().lower()
        self.names = frozenset({"localhost", name, name.partition(".")[0]})
        self._http = HttpServer("the page", self._handle)
        self._threads = ThreadPool(THREADS_MAX, thread_name_prefix="tierckpt-web")

    async def start(self) -> None:
        """Raises ConfigError: the port is in use."""
        await self._http.start(self.host, self.port)
        _, self.port = self._http.address

    @property
    def url(self) -> str:
        """The page's address, including the token."""
        unspecified = ipaddress.ip_address(self.host).is_unspecified
        host = socket.gethostname() if unspecified else f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    async def close(self) -> None:
        """Stop serving. Idempotent."""
        await self._http.close()
        await self.documents.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def is_own_name(self, host: str) -> bool:
        """True for an address, and a name of this machine, with or without a port (B2)."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return name in self.names

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _, text = request.raw_path.partition("?")
        query = {name: values[0] for name, values in parse_qs(text).items()}
        if request.method not in ("GET", "HEAD"):
            return _text_response(HTTPStatus.METHOD_NOT_ALLOWED, "The page is read-only", Allow="GET, HEAD")  # B1
        if path != "/metrics" and not self.is_own_name(request.headers.get("Host", "")):
            return _text_response(HTTPStatus.FORBIDDEN, "Host is neither an address nor a name of this machine")  # B2
        if self.token:  # B3
            given = query.get("token") or request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.token.encode()):
                return _text_response(
                    HTTPStatus.UNAUTHORIZED, "Open the address that `tierckpt status --web` prints"
                )  # B3
        if path == "/events":
            return await self._events(request)
        if path not in ("/", "/status.json", *self.pages.paths, *self.routes):
            known = ", ".join(["/events", "/status.json", *self.pages.paths, *self.routes])
            return _text_response(HTTPStatus.NOT_FOUND, f"Available: /, {known}")
        accept = request.headers.get("Accept", "")
        try:
            body, kind = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._make, path, query, accept
            )
        except NotNamedError:
            return _text_response(HTTPStatus.NOT_FOUND, "This node has no such run or checkpoint")
        except BusyError:
            again = {"Retry-After": "2"}
            return _text_response(HTTPStatus.SERVICE_UNAVAILABLE, "Too many documents are in progress", **again)
        except (OSError, TierckptError) as error:
            body, kind = json.dumps({"problem": redact(str(error))}).encode(), "application/json"
        return _reply(body, kind)

    def _make(self, path: str, query: Mapping[str, str], accept: str) -> tuple[bytes, str]:
        if path == "/":
            return resources.files(__package__).joinpath("page.html").read_bytes(), "text/html; charset=utf-8"
        if path == "/status.json":
            return self.documents.now(), "application/json"
        if path in self.pages.paths:
            return json.dumps(self.pages.make(path, query)).encode(), "application/json"
        return self.routes[path](accept)

    async def _events(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "HEAD":
            return _reply(b"", "text/event-stream")
        if not self.documents.listen():
            again = {"Retry-After": "10"}
            return _text_response(HTTPStatus.SERVICE_UNAVAILABLE, f"{LISTENERS_MAX} pages are open", **again)
        try:
            response = await begin(request, {"Content-Type": "text/event-stream", **HEADERS})
            number = 0
            while True:
                number, text = await self.documents.after(number, KEEPALIVE_SECONDS)
                # A document may be older, and a page's clock may be wrong.
                now = b'{"sent_unix_seconds": %.3f, ' % time.time()
                await write(response, b"id: %d\ndata: %b%b\n\n" % (number, now, text[1:]) if text else b":\n\n")
        finally:
            self.documents.leave()


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ConfigError(
            f"{host!r} is not an address", hint="Use 127.0.0.1, or 0.0.0.0 for all interfaces of this machine"
        ) from None


def _text_response(status: HTTPStatus, text: str, **headers: str) -> web.Response:
    return _reply(f"{text}\n".encode(), "text/plain; charset=utf-8", status, headers)


def _reply(body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] = {}) -> web.Response:
    return web.Response(status=status, body=body, headers={"Content-Type": kind, **HEADERS, **headers})
