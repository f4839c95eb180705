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
from http.server import BaseHTTPRequestHandler
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


class Proxy(HttpServer):
    """A HTTP proxy: CONNECT and absolute URLs. Every name resolves to this machine. ``seen``: its requests."""

    verbs = ("CONNECT", "GET", "HEAD", "PUT", "POST", "DELETE")

    def __init__(self, refusal: int = 0, authorization: str = "") -> None:
        """``refusal``: the status of every answer. ``authorization``: USER:PASSWORD that it wants, else 407."""
        self.seen: list[str] = []
        self.refusal = refusal
        self.wanted = f"Basic {base64.b64encode(authorization.encode()).decode()}" if authorization else None
        super().__init__()
        self.address = self.endpoint.removeprefix("http://")

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        self.seen.append(f"{request.command} {request.path}")
        if self.refusal or (self.wanted and request.headers.get("Proxy-Authorization") != self.wanted):
            self.say(request, self.refusal or 407, b"")
        elif request.command == "CONNECT":
            with socket.create_connection(("127.0.0.1", int(request.path.rpartition(":")[2]))) as origin:
                request.send_response(200)
                request.end_headers()
                _pump(request.connection, origin)
        else:
            self._forward(request)

    def _forward(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        with socket.create_connection(("127.0.0.1", parts.port or 80)) as origin:
            target = parts.path + (f"?{parts.query}" if parts.query else "")
            skipped = ("proxy-authorization", "proxy-connection", "connection")
            kept = [f"{name}: {value}" for name, value in request.headers.items() if name.lower() not in skipped]
            lines = [f"{request.command} {target} HTTP/1.1", *kept, "Connection: close", "", ""]
            body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
            origin.sendall("\r\n".join(lines).encode() + body)
            while data := origin.recv(65536):
                request.connection.sendall(data)


def _pump(one: socket.socket, other: socket.socket) -> None:
    to = {one: other, other: one}
    while True:
        for side in select.select([*to], [], [], 30)[0] or [None]:
            data = side.recv(65536) if side is not None else b""
            if not data:
                return
            to[side].sendall(data)
