"""HTTP/1.1 requests that receive the body in the caller's memory: from S3, and from peers.

A GET takes half the CPU time of the object-store library, and a thread, which waits without the interpreter lock. Every
wait has a deadline (``Call``), a response is never longer than announced and allowed, and a connection with an
unexpected byte is not reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import select
import socket
import ssl
import sys
import termios
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ..errors import TierckptError
from ..process_start import is_ready
from ..resources import ThreadPool
from .base import ended

IDLE_SECONDS_MAX: Final = 15.0
"""Peers close an idle connection after twice that."""
IDLE_MAX: Final = 256
HEAD_BYTES_MAX: Final = 16 << 10
WATERMARK_BYTES: Final = 256 * 1024

_END: Final = b"\r\n\r\n"


class HttpError(Exception):
    """No complete response. The text omits the URL, which may hold a signature."""


class Stale(HttpError):
    """The connection was closed before the first response byte."""


class TooSlow(HttpError):
    def __init__(self, reason: str, moved_bytes: int = 0) -> None:
        super().__init__(reason)
        self.moved_bytes = moved_bytes


class TlsError(HttpError): ...


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    length: int


class Call(ABC):
    """One running request. ``abort`` from another thread ends it at once."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    connect_seconds: float
    head_seconds: float
    window_seconds: float
    enough_bytes: int
    """Minimum bytes per window; a slower connection counts as hung."""

    answer: Response

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._is_aborted = False
        self._lock = threading.Lock()

    @abstractmethod
    def head(self) -> bytes:
        """The request, made for each connection tried."""

    @abstractmethod
    def parse(self, head: bytes) -> Response: ...

    @abstractmethod
    def judge(self, answer: Response) -> memoryview:
        """Return memory of the body's exact size. Raises if the head is wrong."""

    @abstractmethod
    def check(self, answer: Response, body: memoryview) -> None:
        """Raise if a complete response is wrong, before its connection is reused."""

    @abstractmethod
    def failure(self, error: HttpError) -> Exception: ...

    def abort(self) -> bool:
        """Return False if no byte will be received any more."""
        with self._lock:
            self._is_aborted = True
            if self._socket is None:
                return False
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            return True

    def use(self, sock: socket.socket | None) -> None:
        with self._lock:
            self._socket = sock
            if self._is_aborted and sock is not None:
                raise HttpError("the request was given up")


class Connections:
    def __init__(self, threads: str, threads_max: int, idle_max: int) -> None:
        """``idle_max``: idle connections per host."""
        self._name, self._threads_max, self._idle_max = threads, threads_max, idle_max
        self._idle: dict[tuple[str, int], list[tuple[float, socket.socket]]] = {}
        self._lock = threading.Lock()
        self._calls: set[Call] = set()

    async def run(self, call: Call) -> memoryview:
        """Run ``exchange`` on a thread. Returns after the last write to memory, also if cancelled."""
        executor = _executor(self._name, self._threads_max)
        future = asyncio.get_running_loop().run_in_executor(executor, self.exchange, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if call.abort():
                await ended(future)
            else:
                future.add_done_callback(lambda done: done.cancelled() or done.exception())  # asyncio would log it
            raise
        finally:
            del future  # breaks a reference cycle

    def exchange(self, call: Call) -> memoryview:
        """Make a request; return the body. Blocking. Raises the error of ``call``."""
        idle = self._take(call)
        while True:
            try:
                sock = idle or _open(call)
                with self._connection(sock, call) as reply:
                    sock.sendall(call.head())
                    while len(room := reply.buffer()):
                        reply.advance(sock.recv_into(room))
                    return reply.result()
            except HttpError as error:
                if idle is None or not isinstance(error, Stale):
                    raise call.failure(error) from None
                idle = None  # closed before the request: not a failure

    def close(self) -> None:
        with self._lock:
            remaining = [sock for idle in self._idle.values() for _, sock in idle]
            self._idle.clear()
        for sock in remaining:
            sock.close()

    def abort(self) -> None:
        with self._lock:
            calls = tuple(self._calls)
        for call in calls:
            call.abort()
        self.close()

    def _take(self, call: Call) -> socket.socket | None:
        with self._lock:
            idle = self._idle.get((call.host, call.port), [])
            while idle:
                since, sock = idle.pop()
                if time.monotonic() - since < IDLE_SECONDS_MAX and not is_ready(sock.fileno(), select.POLLIN):
                    return sock
                sock.close()
        return None

    @contextlib.contextmanager
    def _connection(self, sock: socket.socket, call: Call) -> Iterator[Reply]:
        reply = Reply(call, sock)
        with self._lock:
            self._calls.add(call)
        try:
            call.use(sock)
            yield reply
        except TierckptError:
            raise
        except TimeoutError:
            raise reply.too_slow(_waiting_bytes(sock)) from None
        except OSError as error:
            raise reply.broken(describe_error(error)) from None
        finally:
            call.use(None)
            with self._lock:
                self._calls.discard(call)
                idle = self._idle.setdefault((call.host, call.port), [])
                has_room = len(idle) < self._idle_max and sum(map(len, self._idle.values())) < IDLE_MAX
                if is_kept := reply.is_good and has_room:
                    idle.append((time.monotonic(), sock))
            if not is_kept:
                sock.close()


class Reply:
    def __init__(self, call: Call, sock: socket.socket) -> None:
        self._call, self._sock = call, sock
        self._head = bytearray(HEAD_BYTES_MAX)
        self._received_bytes = 0
        self._has_answer = False
        self._body = memoryview(b"")
        self._done = self._counted = 0
        self._began = time.monotonic()
        self._watermark = Watermark(sock, call.enough_bytes)
        self.is_good = False
        sock.settimeout(call.head_seconds)

    def buffer(self) -> memoryview:
        if not self._has_answer:
            remaining = self._began + self._call.head_seconds - time.monotonic()
            if remaining <= 0:
                raise self.too_slow()
            self._sock.settimeout(remaining)
            return memoryview(self._head)[self._received_bytes :]
        missing = len(self._body) - self._done
        self._watermark.expect(missing)
        return self._body[self._done :]

    def advance(self, count: int) -> None:
        if not count:
            raise self.broken("end of stream")
        if not self._has_answer:
            self._take_head(count)
            return
        self._done += count
        now = time.monotonic()
        if now - self._began > self._call.window_seconds:
            if self._done < len(self._body) and self._done - self._counted < self._call.enough_bytes:
                raise self.too_slow(self._done - self._counted)
            self._began, self._counted = now, self._done

    def _take_head(self, count: int) -> None:
        search_start = max(0, self._received_bytes - len(_END) + 1)
        self._received_bytes += count
        end = self._head.find(_END, search_start, self._received_bytes)
        if end < 0:
            if self._received_bytes == len(self._head):
                raise HttpError("the head of the answer has no end")
            return
        end += len(_END)
        answer = self._call.parse(bytes(self._head[:end]))
        body = self._call.judge(answer)
        self._done = self._received_bytes - end
        if self._done > len(body):
            raise HttpError("more comes than was announced")
        body[: self._done] = memoryview(self._head)[end : self._received_bytes]
        self._call.answer, self._has_answer, self._body = answer, True, body
        self._began, self._counted = time.monotonic(), 0
        self._sock.settimeout(self._call.window_seconds)

    def result(self) -> memoryview:
        answer = self._call.answer
        self._watermark.expect(1)
        self._call.check(answer, self._body)
        self.is_good = answer.headers.get("connection", "").lower() != "close"
        return self._body

    def too_slow(self, moved_bytes: int = 0) -> TooSlow:
        if not self._has_answer:
            return TooSlow(f"it does not answer in {self._call.head_seconds:g} s")
        reason = f"too little of its answer comes in {self._call.window_seconds:g} s"
        return TooSlow(reason, moved_bytes)

    def broken(self, reason: str) -> HttpError:
        if not self._has_answer:
            return HttpError(reason) if self._received_bytes else Stale(f"the connection was closed: {reason}")
        return HttpError(f"the answer ended {len(self._body) - self._done} bytes early: {reason}")


class Watermark:
    """Makes a socket readable only after ``expect`` bytes, or at its end: fewer wakeups.

    Not set under TLS, where the lengths differ. Safe: never more than the missing bytes, nor than the slow-link check
    requires.
    """

    __slots__ = ("_at", "_most", "_sock")

    def __init__(self, sock: socket.socket, most_bytes: int = WATERMARK_BYTES) -> None:
        self._sock = None if isinstance(sock, ssl.SSLSocket) else sock
        self._most = max(1, min(most_bytes, WATERMARK_BYTES))
        self._at = 1

    def expect(self, missing_bytes: int) -> None:
        at = max(1, min(missing_bytes, self._most))
        if self._sock is not None and at != self._at:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at)
            self._at = at


def _open(call: Call) -> socket.socket:
    try:
        sock = socket.create_connection((call.host, call.port), timeout=call.connect_seconds)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return call.tls.wrap_socket(sock, server_hostname=call.host) if call.tls is not None else sock
        except OSError:
            sock.close()
            raise
    except ssl.SSLError as error:
        raise TlsError(f"TLS: {error.reason or describe_error(error)}") from None
    except OSError as error:
        raise HttpError(describe_error(error)) from None


def _waiting_bytes(sock: socket.socket) -> int:
    found = bytearray(4)
    with contextlib.suppress(OSError):
        fcntl.ioctl(sock.fileno(), termios.FIONREAD, found)
    return int.from_bytes(found, sys.byteorder)


def describe_error(error: BaseException) -> str:
    """Describe ``error`` without its own text, which may hold the URL."""
    strerror = getattr(error, "strerror", None)
    return f"{type(error).__name__}{f' ({strerror})' if strerror else ''}"


@functools.cache
def _executor(name: str, threads_max: int) -> ThreadPool:
    return ThreadPool(threads_max, thread_name_prefix=f"tierckpt-{name}")


os.register_at_fork(after_in_child=_executor.cache_clear)
