"""The page of a node, over HTTP: ``/`` is the page, ``/events`` the documents it draws (server-sent events), and
``/status.json`` one of them; ``page_documents.py`` makes the others. Other routes, ``/metrics``
of the agent, are handed in. Nothing can be changed through it.

    B1  Reads only: GET and HEAD, and no route that acts.
    B2  A page of another site cannot read it through a browser on this node: the Host must be an address, or a name of
        this machine, since a name that somebody else's DNS resolves is what such a page would use. ``/metrics`` is
        exempt: Prometheus names it as a site likes.
    B3  Beyond loopback every request must bear the token.
    B4  Events are made while somebody listens, at most once in ``PERIOD_SECONDS``, every ``QUIET_SECONDS`` when
        nothing has changed, and never for more than ``CPU_SHARE`` of one core. ``/status.json`` makes one each time.

Measured over 20 s on two busy cores, eight local checkpoints: 0.15 % of a core with a page open and nothing changing,
0.35 % while 32 MiB are saved and drained every 2.5 s (18 documents), nothing without a page.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from socketserver import TCPServer
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

from ..config import Settings
from ..errors import ConfigError, TierckptError
from ..redaction import redact, redact_all
from ..telemetry import logger
from ..types import Json
from .node_document import Known, node_document, peers_document
from .page_documents import BusyError, NotNamedError, PageDocuments
from .rollout_watch import RolloutWatch

log = logger("agent.web")

LOOPBACK = "127.0.0.1"
PERIOD_SECONDS = 1.0
QUIET_SECONDS = 5.0
QUIET_AFTER = 5
"""Documents without a change, after which they are made less often."""
PERIOD_SECONDS_MAX = 60.0
REFRESH_SECONDS = 60.0
"""A document is told after so long even if there is no news in it: the free space has changed."""
CPU_SHARE = 0.003
KEEPALIVE_SECONDS = 15.0
ROLLOUT_SECONDS = 5.0
"""Between two looks for a rollout while there is none."""
LISTENERS_MAX = 16
SEND_SECONDS = 10.0
AGES = re.compile(r"(age|lag|uptime|failing)_seconds$|heard_seconds_ago$|^at_unix_seconds$|^(free|served)_bytes$")
"""Fields that change by themselves: a document in which no other has changed is no news."""

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Route: TypeAlias = Callable[[str], tuple[bytes, str]]
"""Takes the Accept header; returns a body and its type."""


class Documents:
    """The newest document of the node, for all who listen. Makes none while nobody does.

    Args:
        make: makes one; called on a thread of its own.
    """

    def __init__(self, settings: Settings, make: Callable[[], Json] | None = None) -> None:
        self._settings, self._make = settings, make or self._make_document
        self._news = threading.Condition()
        self._listeners = self._number = 0
        self._document: Json = {}
        self._text = b""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._known: Known = {}
        self._watch: RolloutWatch | None = None
        self._looked_at = float("-inf")
        self._loop: asyncio.Runner | None = None

    def listen(self) -> bool:
        """Count a listener. False when there are too many."""
        with self._news:
            if self._listeners >= LISTENERS_MAX or self._closed:
                return False
            self._listeners += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tierckpt-page", daemon=True)
                self._thread.start()
            return True

    def leave(self) -> None:
        with self._news:
            self._listeners -= 1
            self._news.notify_all()

    def after(self, number: int, timeout_seconds: float) -> tuple[int, bytes]:
        """Wait for a document that is newer than ``number``. Returns its number and text; the old number and nothing
        when the time is up or the server closes."""
        with self._news:
            self._news.wait_for(lambda: self._number > number or self._closed, timeout_seconds)
            return (self._number, self._text) if self._number > number else (number, b"")

    def now(self) -> bytes:
        """Make one for this caller."""
        return json.dumps(self._document_or_problem()).encode()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(5.0)

    def _run(self) -> None:
        """Make documents until nobody listens any more."""
        unchanged, told_at = 0, float("-inf")
        while True:
            begun = time.thread_time()
            document = self._document_or_problem()
            is_old = time.monotonic() - told_at > REFRESH_SECONDS
            changed = is_old or _without_ages(document) != _without_ages(self._document)
            told_at = time.monotonic() if changed else told_at
            text = json.dumps(document).encode() if changed else b""
            unchanged = 0 if changed else unchanged + 1
            period = max(
                PERIOD_SECONDS if unchanged < QUIET_AFTER else QUIET_SECONDS,
                min(PERIOD_SECONDS_MAX, (time.thread_time() - begun) / CPU_SHARE),
            )
            with self._news:
                if changed:
                    self._document, self._text, self._number = document, text, self._number + 1
                    self._news.notify_all()
                self._news.wait_for(lambda: self._closed or not self._listeners, period)
                if self._closed or not self._listeners:
                    self._thread, watch, loop = None, self._watch, self._loop
                    self._watch = self._loop = None
                    break
        if loop is not None:
            with contextlib.suppress(Exception):
                if watch is not None:
                    loop.run(watch.close())
                loop.close()

    def _document_or_problem(self) -> Json:
        """A document, or one that says why there is none."""
        try:
            document = self._make()
        except (OSError, TierckptError) as error:
            document = {"problem": f"the state of the node cannot be read: {error}"}
        except Exception as error:
            log.exception("the page has no document")
            document = {"problem": f"this is a bug in tierckpt: {type(error).__name__}"}
        redacted: Json = redact_all(document)
        return redacted

    def _make_document(self) -> Json:
        is_ours = threading.current_thread() is self._thread
        document = node_document(self._settings, self._known if is_ours else None)
        document["peers"] = document["rollout"] = None
        if self._settings.peers is not None:
            document["peers"] = peers_document(self._settings)
            if is_ours and document["agent"] is not None:
                document["rollout"] = self._rollout()
        return document

    def _rollout(self) -> Json | None:
        """What nodes are filling now. All of them are asked only while there is something."""
        rollout = self._watch.rollout if self._watch is not None else None
        is_active = rollout is not None and not rollout.is_done
        if is_active or time.monotonic() - self._looked_at >= ROLLOUT_SECONDS:
            self._looked_at = time.monotonic()
            self._loop = self._loop or asyncio.Runner()
            with contextlib.suppress(TierckptError, OSError):
                self._loop.run(self._look_at_nodes())
            rollout = self._watch.rollout if self._watch is not None else None
        return rollout.to_json() if rollout is not None else None

    async def _look_at_nodes(self) -> None:
        self._watch = self._watch or RolloutWatch(None, self._settings)
        await self._watch.look(start=False)


def _without_ages(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: _without_ages(value) for name, value in document.items() if not AGES.search(name)}
    return [_without_ages(value) for value in document] if isinstance(document, list) else document


class WebServer:
    """Serves the page of a node on threads of its own until ``close``.

    Args:
        host: an address. Beyond loopback a token is made, which ``url`` has.
        port: 0 chooses a free one.
        routes: more pages, by path.

    Raises:
        ConfigError: ``host`` is no address, or the port is taken.

    Example:
        >>> from tierckpt.config import Settings
        >>> server = WebServer(Settings.load(), port=0)
        >>> server.url.startswith("http://127.0.0.1:")
        True
        >>> server.close()
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
        self.documents = documents or Documents(settings)
        self.pages = PageDocuments(settings)
        self.routes = dict(routes or {})
        self.token = "" if address.is_loopback else secrets.token_urlsafe(24)
        self.names = _own_names()
        try:
            self._server = _Server(self, str(address), port)
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host} cannot be served: {error.strerror or error}", hint="Give another port"
            ) from error
        self.host, self.port = str(address), int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="tierckpt-web", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the page is. It has the token: whoever knows it may read the page."""
        unspecified = ipaddress.ip_address(self.host).is_unspecified
        host = socket.gethostname() if unspecified else f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self.documents.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

    def is_own_name(self, host: str) -> bool:
        """B2: True for an address, and a name of this machine, with or without a port."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return name in self.names


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ConfigError(
            f"{host!r} is no address to serve on", hint="127.0.0.1, or 0.0.0.0 for all of this machine"
        ) from None


def _own_names() -> frozenset[str]:
    name = socket.gethostname().lower()
    return frozenset({"localhost", name, name.partition(".")[0]})


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, web: WebServer, host: str, port: int) -> None:
        self.web = web
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As HTTPServer, but for asking DNS what the address is called."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request of %s ended early", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SEND_SECONDS
    server_version = "tierckpt"
    sys_version = ""

    def do_GET(self) -> None:
        url, web = urlsplit(self.path), self.server.web
        is_metrics = url.path == "/metrics"
        if not is_metrics and not web.is_own_name(self.headers.get("Host", "")):
            self._say(HTTPStatus.FORBIDDEN, "Host is neither an address nor a name of this machine")  # B2
        elif web.token and not self._has_token(parse_qs(url.query), web.token):
            self._say(HTTPStatus.UNAUTHORIZED, "Open the address that `tierckpt status --web` has printed")  # B3
        elif url.path == "/events":
            self._events(web.documents)
        elif url.path == "/status.json":
            self._send(web.documents.now(), "application/json")
        elif url.path == "/":
            self._send(resources.files(__package__).joinpath("page.html").read_bytes(), "text/html; charset=utf-8")
        elif url.path in web.pages.paths:
            self._send_page(web.pages, url.path, {name: values[0] for name, values in parse_qs(url.query).items()})
        elif (route := web.routes.get(url.path)) is not None:
            self._send(*route(self.headers.get("Accept", "")))
        else:
            there = ", ".join(["/events", "/status.json", *web.pages.paths, *web.routes])
            self._say(HTTPStatus.NOT_FOUND, f"There is /, {there}")

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self.close_connection = True  # with a body that is not read
        self._say(HTTPStatus.METHOD_NOT_ALLOWED, "Nothing can be changed here", Allow="GET, HEAD")  # B1

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _send_page(self, pages: PageDocuments, path: str, query: Mapping[str, str]) -> None:
        try:
            body = json.dumps(pages.make(path, query)).encode()
        except NotNamedError:
            self._say(HTTPStatus.NOT_FOUND, "This node has no such run or checkpoint")
        except BusyError:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, "Other pages are being made", **{"Retry-After": "2"})
        except (OSError, TierckptError) as error:
            self._send(json.dumps({"problem": redact(str(error))}).encode(), "application/json")
        else:
            self._send(body, "application/json")

    def _has_token(self, query: Mapping[str, list[str]], token: str) -> bool:
        given = query.get("token", [""])[0] or self.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), token.encode())

    def _events(self, documents: Documents) -> None:
        if self.command == "HEAD":
            self._send(b"", "text/event-stream")
            return
        if not documents.listen():
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"{LISTENERS_MAX} pages are open", **{"Retry-After": "10"})
            return
        try:
            self._begin(HTTPStatus.OK, "text/event-stream")
            number = 0
            while not documents.is_closed:
                number, text = documents.after(number, KEEPALIVE_SECONDS)
                # The time is that of sending: a document without news may be older, and a page's clock may be wrong.
                now = b'{"sent_unix_seconds": %.3f, ' % time.time()
                self.wfile.write(b"id: %d\ndata: %b%b\n\n" % (number, now, text[1:]) if text else b":\n\n")
                self.wfile.flush()
        except OSError:
            pass  # the page was closed
        finally:
            documents.leave()
            self.close_connection = True

    def _say(self, status: HTTPStatus, text: str, **headers: str) -> None:
        self._send(f"{text}\n".encode(), "text/plain; charset=utf-8", status, headers)

    def _send(
        self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
    ) -> None:
        self._begin(status, kind, {"Content-Length": str(len(body)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: a page asks now and then, and its address may have the token."""
