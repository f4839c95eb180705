"""Says what answers at an endpoint that does not answer as a store does: for error messages, after a request failed."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
from typing import Final
from urllib.parse import urlsplit

from .proxies import Proxy, proxy_for

PROBE_SECONDS_MAX: Final = 3.0
"""Of each of the few steps of a probe."""
SHOWN_MAX: Final = 60
_TITLE = re.compile(r"<title[^>]*>\s*([^<]{1,200}?)\s*</title>", re.IGNORECASE)
_HTML = re.compile(r"\s*(<!--.*?-->\s*)*<(!doctype\s+html|html|head|body)", re.IGNORECASE | re.DOTALL)


def what_answers(endpoint: str) -> str:
    """Return what ``endpoint`` serves instead of a store ("it sends an HTML page"), '' if unknown. Blocking.

    Nothing secret is sent: the requests are not signed.
    """
    parts = urlsplit(endpoint)
    host, is_tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    try:
        if proxy_for(endpoint) is not None:
            return ""
        if is_tls:
            return _without_tls(host, port)
        request = f"GET / HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
        first = _exchange(host, port, request.encode())
        if not first.startswith(b"HTTP/"):
            return _greeting(first) or ("it speaks TLS: write https://" if _speaks_tls(host, port) else "")
        return language_of(first.partition(b"\r\n\r\n")[2].decode("utf-8", "replace"))
    except (OSError, UnicodeError):
        return ""


def refusal_of_proxy(proxy: Proxy, url: str) -> int | None:
    """Return the status of a proxy that refuses a tunnel to the host of ``url``; None if it makes one. Blocking.

    Raises OSError: it does not answer.
    """
    parts, at = urlsplit(url), urlsplit(proxy.url)
    target = f"{parts.hostname}:{parts.port or 443}"
    connection_type = http.client.HTTPSConnection if at.scheme == "https" else http.client.HTTPConnection
    connection = connection_type(at.hostname or "", at.port or (443 if at.scheme == "https" else 80), timeout=3.0)
    try:
        headers = {"Proxy-Authorization": proxy.authorization} if proxy.authorization else {}
        connection.request("CONNECT", target, headers=headers)
        status = connection.getresponse().status
        return None if status < 300 else status
    except http.client.HTTPException as error:
        raise OSError(type(error).__name__) from None
    finally:
        connection.close()


def language_of(body: str) -> str:
    """Return the kind of a response body; '' for XML or an empty body."""
    text = body.strip()
    if _HTML.match(text):
        title = _TITLE.search(text)
        return "it sends an HTML page" + (f" ({title[1][:SHOWN_MAX]!r})" if title else "")
    if text.startswith(("{", "[")):
        return f"it sends JSON ({text[:SHOWN_MAX]})"
    return f"it sends text ({text[:SHOWN_MAX]!r})" if text and not text.startswith("<") else ""


def _without_tls(host: str, port: int) -> str:
    if _speaks_tls(host, port):
        return ""
    first = _exchange(host, port, b"GET / HTTP/1.0\r\n\r\n")
    return "it speaks HTTP without TLS: write http://" if first.startswith(b"HTTP/") else _greeting(first)


def _greeting(first: bytes) -> str:
    line = first.partition(b"\n")[0].decode("latin-1").strip()
    return f"it says {line[:SHOWN_MAX]!r}" if line.isprintable() and line else ""


def _exchange(host: str, port: int, request: bytes) -> bytes:
    with socket.create_connection((host, port), PROBE_SECONDS_MAX) as connection:
        connection.sendall(request)
        found = b""
        with contextlib.suppress(OSError):  # what came before is enough
            while len(found) < 4096 and (more := connection.recv(4096)):
                found += more
                if not found.startswith(b"HTTP/"):
                    break
        return found


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # sends no data
    try:
        with (
            socket.create_connection((host, port), PROBE_SECONDS_MAX) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            return True
    except OSError:
        return False
