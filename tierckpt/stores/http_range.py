"""Ranges of objects over plain HTTP, straight into memory of the caller's.

The object-store library hands out new memory for every answer: that, and copying out of it, costs more processor time
than all the rest of a GET (measured against a local S3 server, GiB for GiB: a bare socket 0.25 s, this 0.30 s, the
library 0.71 s and with the copy 0.88 s, boto3 1.28 s). So large ranges are asked for with a URL that the library has
signed, on connections of our own, and received where they are to be.

Only what went as it should is done here: 206 with exactly the range, of the version that was asked for. A failure that
may pass is ``StoreUnavailableError``, for the caller's retries; whatever else the server says is ``NotThisWay``, and
the caller asks again through the library, which knows what it means.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http.client
import io
import os
import re
import socket
import ssl
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, urlsplit

from ..errors import PreconditionFailedError, StoreUnavailableError
from ..telemetry import logger
from ..types import ByteRange, Tier
from .common import ended

IDLE_SECONDS_MAX: Final = 15.0
"""A connection that was not used for so long may be closed at the other end by now."""
IDLE_MAX: Final = 64
CONNECT_SECONDS: Final = 5.0

MISSES_MAX: Final = 3
THREADS_MAX: Final = 32

log = logger("stores.ranges")
_threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="tierckpt-get")

_MAY_PASS = {408, 425, 429, 500, 502, 503, 504}
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


class NotThisWay(Exception):  # it is no error: it says which way to go
    """The server answered something that is not for us to judge. ``for_good``: do not try this way again."""

    def __init__(self, reason: str, *, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


@dataclass(slots=True)
class Get:
    """One request under way. ``abort`` from another thread ends it at once."""

    uri: str
    """What it is about, for messages; the URL itself holds a signature."""
    url: str
    byte_range: ByteRange
    into: memoryview
    if_match: str | None
    window_seconds: float
    enough_bytes: int
    """What has to come in each window, or the connection counts as hung."""
    _connection: http.client.HTTPConnection | None = None
    _is_aborted: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def abort(self) -> None:
        with self._lock:
            self._is_aborted = True
            if self._connection is not None and self._connection.sock is not None:
                try:
                    self._connection.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it has ended by itself

    def use(self, connection: http.client.HTTPConnection | None) -> None:
        with self._lock:
            self._connection = connection
            if self._is_aborted and connection is not None:
                raise self.unavailable("the request was given up")

    def unavailable(self, reason: str, **context: object) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self.uri} cannot be reached: {reason}",
            hint="Retries are spent; try again later",
            tier=Tier.SHARED,
            **context,
        )

    def too_slow(self, moved_bytes: int) -> StoreUnavailableError:
        """``moved_bytes``: what came of it in the last window."""
        reason = f"too little moved in {self.window_seconds:g} s"
        return self.unavailable(reason, too_slow=True, moved_bytes=moved_bytes)


class Connections:
    """Idle connections, by where they lead. Any thread may use it."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[tuple[float, http.client.HTTPConnection]]] = {}
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None

    def read(self, get: Get) -> None:
        """Fill ``get.into`` with the range. Blocking.

        Raises:
            PreconditionFailedError: the object is of another version than ``if_match``.
            StoreUnavailableError: no answer, a broken one, or one that came too slowly.
            NotThisWay: any other answer.
        """
        url = urlsplit(get.url)
        idle = self._take(url)
        while True:
            connection = idle or self._open(url, get)
            try:
                with self._lent(connection, url, get), _ask(connection, url, get) as answer:
                    _check(answer, get)
                    _receive(answer, get, Watermark(connection.sock, get.enough_bytes))
                return
            except _Stale as error:
                if idle is None:
                    raise get.unavailable(str(error)) from None
                idle = None  # the server had closed it before we asked: that is no failure

    def close(self) -> None:
        """Close what is idle. Idempotent; it can be used on."""
        with self._lock:
            left = [connection for idle in self._idle.values() for _, connection in idle]
            self._idle.clear()
        for connection in left:
            connection.close()

    def _take(self, url: SplitResult) -> http.client.HTTPConnection | None:
        with self._lock:
            idle = self._idle.get((url.scheme, url.netloc), [])
            while idle:
                since, connection = idle.pop()
                if time.monotonic() - since < IDLE_SECONDS_MAX:
                    return connection
                connection.close()
        return None

    def _keep(self, url: SplitResult, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            idle = self._idle.setdefault((url.scheme, url.netloc), [])
            if len(idle) < IDLE_MAX:
                idle.append((time.monotonic(), connection))
                return
        connection.close()

    def _open(self, url: SplitResult, get: Get) -> http.client.HTTPConnection:
        host = url.hostname or ""
        timeout = min(CONNECT_SECONDS, get.window_seconds)
        if url.scheme == "https":
            self._tls = self._tls or ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, url.port, timeout=timeout, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(host, url.port, timeout=timeout)
        try:
            connection.connect()
        except ssl.SSLError as error:
            raise NotThisWay(f"TLS: {error.reason}", for_good=True) from None
        except OSError as error:
            raise get.unavailable(_said(error)) from None
        return connection

    @contextlib.contextmanager
    def _lent(self, connection: http.client.HTTPConnection, url: SplitResult, get: Get) -> Iterator[None]:
        """Within it a request is made on ``connection``, which is kept when the answer was whole, closed when not."""
        is_good = False
        try:
            get.use(connection)
            connection.sock.settimeout(get.window_seconds)
            yield
            is_good = connection.sock is not None  # else the server has closed it after its answer
        except TimeoutError:
            raise get.too_slow(_waiting_bytes(connection.sock)) from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, StoreUnavailableError | PreconditionFailedError):
                raise
            raise get.unavailable(_said(error)) from None
        finally:
            get.use(None)
            if is_good:
                self._keep(url, connection)
            else:
                connection.close()


class Ranges:
    """``Connections`` for coroutines: each request takes a thread, which waits without the interpreter lock."""

    def __init__(self) -> None:
        self._connections = Connections()
        self._misses = 0
        self.is_usable = True
        """False once it is clear that this way does not work here."""

    async def read(self, get: Get) -> memoryview:
        """``Connections.read``; return what it filled. Cancelled, it returns only when nothing writes to ``get.into``
        any more."""
        future = asyncio.get_running_loop().run_in_executor(_threads, self._connections.read, get)
        try:
            await asyncio.shield(future)
            self._misses = 0
            return get.into[: get.byte_range.size_bytes]
        except asyncio.CancelledError:
            get.abort()
            await ended(future)
            raise
        finally:
            del future  # it holds its error, whose traceback holds this frame

    def miss(self, reason: NotThisWay) -> None:
        """Note that a request had to go the other way."""
        self._misses += 1
        if self.is_usable and (reason.for_good or self._misses >= MISSES_MAX):
            self.is_usable = False
            log.info("large ranges are read through the library from here on: %s", reason)

    def close(self) -> None:
        self._connections.close()


class _Stale(Exception):
    """The connection was closed before a byte of an answer came."""


def _ask(connection: http.client.HTTPConnection, url: SplitResult, get: Get) -> http.client.HTTPResponse:
    at = get.byte_range
    headers = {"Range": f"bytes={at.start}-{at.stop - 1}", "Accept-Encoding": "identity"}
    if get.if_match is not None:
        headers["If-Match"] = get.if_match
    try:
        connection.request("GET", f"{url.path}?{url.query}" if url.query else url.path, headers=headers)
        return connection.getresponse()
    except (ConnectionError, http.client.BadStatusLine) as error:
        raise _Stale(_said(error)) from None


def _check(answer: http.client.HTTPResponse, get: Get) -> None:
    at, status = get.byte_range, answer.status
    if status == 412:
        raise PreconditionFailedError(f"{get.uri} has changed", tier=Tier.SHARED)
    if status in _MAY_PASS:
        raise get.unavailable(f"HTTP {status}", status=status)
    if status != 206:
        raise NotThisWay(f"HTTP {status}")
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if match is None or (int(match[1]), int(match[2])) != (at.start, at.stop - 1) or answer.length != at.size_bytes:
        raise NotThisWay("another range than was asked for")
    if answer.headers.get("Content-Encoding", "identity") not in ("identity", "", "aws-chunked"):
        raise NotThisWay("an encoded answer")
    etag = answer.headers.get("ETag")
    if get.if_match is not None and etag is not None and etag.strip('"') != get.if_match.strip('"'):
        raise PreconditionFailedError(f"{get.uri} has changed", tier=Tier.SHARED)


def _receive(answer: http.client.HTTPResponse, get: Get, watermark: Watermark) -> None:
    """Receive the body: each ``recv`` goes straight into ``get.into``."""
    size, done = get.byte_range.size_bytes, 0
    begun, counted = time.monotonic(), 0
    while done < size:
        watermark.expect(size - done - io.DEFAULT_BUFFER_SIZE)  # so much may have come with the head
        count = answer.fp.readinto1(get.into[done:size])
        if not count:
            raise get.unavailable(f"the answer ended {size - done} bytes early")
        done += count
        now = time.monotonic()
        if now - begun > get.window_seconds:
            if done - counted < get.enough_bytes:
                raise get.too_slow(done - counted)
            begun, counted = now, done
    watermark.expect(1)


def _waiting_bytes(sock: socket.socket | None) -> int:
    """What has come and was not enough to be handed out; 0 where the connection is let go of already."""
    found = bytearray(4)
    if sock is not None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(sock.fileno(), termios.FIONREAD, found)
    return int.from_bytes(found, sys.byteorder)


def _said(error: BaseException) -> str:
    """What to say of ``error``: never its own words, which may hold the URL."""
    strerror = getattr(error, "strerror", None)
    return f"{type(error).__name__}{f' ({strerror})' if strerror else ''}"


def is_behind_proxy(url: str) -> bool:
    """True when the environment wants requests to ``url`` to go through a proxy: the library does that, we do not."""
    parts = urlsplit(url)
    return parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.netloc)


def _start_anew() -> None:
    global _threads
    _threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="tierckpt-get")


os.register_at_fork(after_in_child=_start_anew)


WAKE_BYTES: Final = 256 * 1024
"""Measured, a GiB in GETs of 8 MiB from one server on this machine: flat out 0.42 to 0.34 CPU-s (a bare socket, without
a watermark: 0.33), at 100 MB/s 0.95 to 0.49 (0.73). Twice as much gains
another 0.04 and 0.10; what must come in a window (``most_bytes``) is 240 KiB unless set otherwise."""


class Watermark:
    """When the kernel calls a socket readable: once ``expect`` bytes have come, its end or an error at once.

    A sender that is slower than this process wakes it for each packet. SO_RCVLOWAT (socket(7)) is honoured by poll and
    epoll on Linux. Where TLS is in between, what comes has other lengths than what is read, so nothing is set.

    Safe, since never more is waited for than must still come, nor more than must come for the link not to be too slow.
    """

    __slots__ = ("_at", "_most", "_sock")

    def __init__(self, sock: socket.socket | None, most_bytes: int = WAKE_BYTES) -> None:
        """``most_bytes``: what must come in a window of time, where slow links are given up; 0 where none is."""
        self._sock = None if isinstance(sock, ssl.SSLSocket) else sock
        self._most = max(1, min(most_bytes, WAKE_BYTES))
        self._at = 1

    def expect(self, missing_bytes: int) -> None:
        """``missing_bytes`` are still to come; 1 before anything whose length is not known."""
        at = max(1, min(missing_bytes, self._most))
        if self._sock is not None and at != self._at:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at)
            self._at = at
