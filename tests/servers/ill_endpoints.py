"""Servers at a wrong endpoint (other protocols, other APIs, refusals), and a proxy that counts."""

from __future__ import annotations

import base64
import contextlib
import select
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.services import HttpServer


class Says(HttpServer):
    """Answers every request alike."""

    def __init__(
        self,
        status: int,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.status, self.body, self.headers = status, body, headers or {}
        self.requests: Counter[str] = Counter()
        super().__init__(tls)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests[f"{request.command} {request.path}"] += 1
        self.say(request, self.status, self.body, self.headers)


class Greets:
    """Sends a line to each client, reads a little, and closes. ``data`` b"": it only closes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.connections = data, 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self.connections += 1
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            connection.sendall(self.data)
            connection.recv(4096)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


class Proxy:
    """A HTTP proxy: CONNECT and absolute URLs. Every name resolves to this machine. ``seen``: its requests."""

    def __init__(self, refusal: int = 0, authorization: str = "") -> None:
        """``refusal``: the status of every answer. ``authorization``: USER:PASSWORD that it wants, else 407."""
        self.seen: list[str] = []
        proxy = self
        wanted = f"Basic {base64.b64encode(authorization.encode()).decode()}" if authorization else None

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def _is_refused(self) -> bool:
                proxy.seen.append(f"{self.command} {self.path}")
                is_known = wanted is None or self.headers.get("Proxy-Authorization") == wanted
                if is_known and not proxy.refusal:
                    return False
                self.send_response(proxy.refusal or 407)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return True

            def do_CONNECT(self) -> None:
                self.close_connection = True
                if self._is_refused():
                    return
                port = int(self.path.rpartition(":")[2])
                with socket.create_connection(("127.0.0.1", port)) as origin:
                    self.send_response(200)
                    self.end_headers()
                    _pump(self.connection, origin)

            def do_GET(self) -> None:
                if self._is_refused():
                    return
                self.close_connection = True
                parts = urlsplit(self.path)
                with socket.create_connection(("127.0.0.1", parts.port or 80)) as origin:
                    target = parts.path + (f"?{parts.query}" if parts.query else "")
                    lines = [f"{self.command} {target} HTTP/1.1"]
                    skipped = ("proxy-authorization", "proxy-connection", "connection")
                    lines += [f"{name}: {value}" for name, value in self.headers.items() if name.lower() not in skipped]
                    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                    origin.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
                    while data := origin.recv(65536):
                        self.connection.sendall(data)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        self.refusal = refusal
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _pump(one: socket.socket, other: socket.socket) -> None:
    to = {one: other, other: one}
    while True:
        for side in select.select([*to], [], [], 30)[0] or [None]:
            data = side.recv(65536) if side is not None else b""
            if not data:
                return
            to[side].sendall(data)
