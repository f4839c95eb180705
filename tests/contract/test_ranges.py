"""Large ranges of S3 objects on connections of our own: right bytes in the caller's memory, or the usual error.

The server here answers each request as configured. Cites tierckpt/stores/signed_requests.py.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.services import HttpServer, S3Server
from tierckpt.config import Settings
from tierckpt.errors import (
    EndpointError,
    IntegrityError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from tierckpt.format.layout import parse_uri
from tierckpt.format.manifest import digest_of
from tierckpt.stores import get_concurrency, retry
from tierckpt.stores.http_client import IDLE_SECONDS_MAX, Connections
from tierckpt.stores.obstore_store import DIRECT_BYTES_MIN, RemoteStore
from tierckpt.stores.signed_requests import MISSES_MAX, Get
from tierckpt.types import ByteRange

SIZE = 3 * DIRECT_BYTES_MIN
DATA = os.urandom(SIZE)
ETAG = '"first"'
WHOLE = ByteRange(0, SIZE)
PART = ByteRange(DIRECT_BYTES_MIN - 5, 2 * DIRECT_BYTES_MIN + 7)


class Server(HttpServer):
    """One object. ``plan`` says how the next requests are answered: first come, first served; then well."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.plan: deque[str] = deque()
        self.signed = 0
        """Requests with a signature in the URL: ours. The library signs with a header."""
        self.other = 0
        self.connections: set[tuple[str, int]] = set()
        self.asked = threading.Event()
        self.is_over = threading.Event()
        self.stalled_to_the_end = False
        super().__init__(tls)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        is_ours = "X-Amz-Signature=" in request.path
        self.signed, self.other = self.signed + is_ours, self.other + (not is_ours)
        self.connections.add(request.client_address)
        self.asked.set()
        how = self.plan.popleft() if self.plan else "well"
        start, _, last = request.headers.get("Range", f"bytes=0-{SIZE - 1}").removeprefix("bytes=").partition("-")
        body = DATA[int(start) : int(last) + 1]
        headers = {"ETag": ETAG, "Last-Modified": "Sat, 21 Nov 2026 00:00:00 GMT"}
        headers["Content-Range"] = f"bytes {start}-{last}/{SIZE}"
        status = 206
        if how.isdigit():
            status, body = int(how), b"<Error><Code>Told</Code></Error>"
        elif request.headers.get("If-Match", ETAG) != ETAG and how != "ignores the condition":
            status, body = 412, b""
        elif how == "ignores the range":
            status, body = 200, DATA
        elif how == "another range":
            headers["Content-Range"] = f"bytes {int(start) + 1}-{int(last) + 1}/{SIZE}"
        elif how == "encoded":
            headers["Content-Encoding"] = "gzip"
        request.send_response(status)
        headers["Content-Length"] = str(len(body) + (10 if how == "lies about its length" else 0))
        for name, value in headers.items():
            request.send_header(name, value)
        if how == "comes with its head":
            request._headers_buffer += [b"\r\n", body]  # type: ignore[attr-defined]
            request.flush_headers()
            return
        request.end_headers()
        self._body(request, body, how)

    def _body(self, request: BaseHTTPRequestHandler, body: bytes, how: str) -> None:
        try:
            if how in {"breaks off", "resets"}:
                request.wfile.write(body[: len(body) // 2])
                if how == "resets":
                    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                request.connection.shutdown(socket.SHUT_RDWR)
                request.close_connection = True
            elif how == "stalls":
                request.wfile.write(body[:1000])
                self.stalled_to_the_end = not self.is_over.wait(60)
            elif how == "drips":
                for at in range(50):
                    request.wfile.write(body[at : at + 1])
                    time.sleep(0.1)
            else:
                request.wfile.write(body)
            if how == "closes after it":
                request.close_connection = True
        except OSError:
            request.close_connection = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    yield from served(Server(), monkeypatch)


def served(made: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """``made`` is the S3 server of the environment, until the test is over."""
    for name, value in S3Server(made.endpoint, "testing", "testing").environment().items():
        monkeypatch.setenv(name, value)
    yield made
    made.is_over.set()
    made.close()


@pytest.fixture
async def store(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RemoteStore]:
    monkeypatch.setattr(get_concurrency, "BYTES_PER_SECOND_MIN", 4096)
    monkeypatch.setattr(retry, "RETRIES_MAX", 2)
    made = RemoteStore(parse_uri("s3://bucket/run"), Settings.load())
    yield made
    await made.close()


async def read(store: RemoteStore, at: ByteRange = PART, if_match: str | None = ETAG) -> str:
    into = memoryview(bytearray(at.size_bytes + 3))
    await store.get_range_into("object", at, into, if_match=if_match)
    assert bytes(into[at.size_bytes :]) == b"\0\0\0", "written past the range"
    return digest_of(into[: at.size_bytes])


def expected(at: ByteRange = PART) -> str:
    return digest_of(DATA[at.start : at.stop])


async def test_ranges_come_one_after_the_other_on_one_connection(store: RemoteStore, server: Server) -> None:
    for at in (PART, WHOLE, PART):
        assert await read(store, at) == expected(at)
    assert (server.signed, server.other, len(server.connections)) == (3, 0, 1)


def test_what_came_with_the_head_is_not_waited_for(server: Server) -> None:
    """Some of the body is read with the head: of the rest, less is to come than the range is long."""
    connections, into = Connections("get", 1, 1), memoryview(bytearray(SIZE))
    before = [WHOLE] * 8  # so that the kernel would hold back all of it, not only the part for a new connection
    server.plan.extend(["well"] * len(before) + ["comes with its head"])
    for at in (*before, ByteRange(0, 100_000)):
        part = into[: at.size_bytes]
        connections.exchange(Get("s3://bucket/object", f"{server.endpoint}/bucket/object", at, part, 16.0))
        assert digest_of(part) == expected(at)
    assert len(server.connections) == 1
    connections.close()


async def test_many_at_a_time(store: RemoteStore, server: Server) -> None:
    ranges = [ByteRange(number, number + DIRECT_BYTES_MIN) for number in range(12)]
    assert await asyncio.gather(*(read(store, at) for at in ranges)) == [expected(at) for at in ranges]
    assert server.signed == 12


async def test_small_ranges_go_through_the_library(store: RemoteStore, server: Server) -> None:
    at = ByteRange(3, 1000)
    assert await read(store, at) == expected(at)
    assert (server.signed, server.other) == (0, 1)


@pytest.mark.parametrize(
    "how", ["503", "500", "429", "breaks off", "resets", "lies about its length", "stalls", "drips", "closes after it"]
)
async def test_what_may_pass_is_asked_for_again(
    how: str, store: RemoteStore, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how in {"stalls", "drips"}:  # the first answer has half a second, after its head
        window = property(lambda _: 0.5 if server.signed == 1 else 15.0, lambda *_: None)
        monkeypatch.setattr(Get, "window_seconds", window, raising=False)
    server.plan.append(how)
    assert await read(store) == expected()
    assert await read(store) == expected()
    assert not server.plan
    retried = 0 if how in {"closes after it", "lies about its length"} else 1
    assert server.signed + server.other == 2 + max(retried, how == "lies about its length")
    assert store.retries.counts["retries"] == retried


async def test_what_does_not_pass_is_unavailable_after_the_retries(store: RemoteStore, server: Server) -> None:
    server.plan.extend(["503"] * 10)
    with pytest.raises(StoreUnavailableError) as caught:
        await read(store)
    assert "Signature" not in str(caught.value)
    assert caught.value.context["attempts"] == 3
    assert server.signed == 3


async def test_a_server_that_is_not_there_is_unavailable(store: RemoteStore, server: Server) -> None:
    server.close()
    with pytest.raises(StoreUnavailableError) as caught:
        await read(store)
    assert "Signature" not in repr(caught.value.__cause__) + str(caught.value)


async def test_a_connection_that_was_idle_for_long_is_not_used_again(
    store: RemoteStore, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert await read(store) == expected()
    assert len(server.connections) == 1
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + IDLE_SECONDS_MAX + 1)
    assert await read(store) == expected()
    assert len(server.connections) == 2


@pytest.mark.parametrize("how", ["well", "ignores the condition"])
async def test_another_version_is_refused_even_by_a_server_that_gives_it(
    how: str, store: RemoteStore, server: Server
) -> None:
    server.plan.append(how)
    with pytest.raises(PreconditionFailedError):
        await read(store, if_match='"second"')
    assert await read(store, if_match=None) == expected()


@pytest.mark.parametrize(
    ("how", "kind"), [("404", ObjectNotFoundError), ("416", IntegrityError), ("ignores the range", Exception)]
)
async def test_what_is_not_for_us_to_judge_the_library_judges(
    how: str, kind: type[Exception], store: RemoteStore, server: Server
) -> None:
    server.plan.extend([how] * 6)
    with pytest.raises(kind):
        await read(store)
    assert server.signed == 1
    assert server.other >= 1


@pytest.mark.parametrize("how", ["403", "301", "another range", "encoded", "ignores the range"])
async def test_where_our_way_does_not_work_the_library_does_the_work_and_soon_all_of_it(
    how: str, store: RemoteStore, server: Server
) -> None:
    for _ in range(MISSES_MAX):
        server.plan.append(how)
        assert await read(store) == expected()
    assert (server.signed, server.other) == (MISSES_MAX, MISSES_MAX)
    assert await read(store) == expected()
    assert (server.signed, server.other) == (MISSES_MAX, MISSES_MAX + 1)


async def test_behind_a_proxy_the_library_does_it(
    store: RemoteStore, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.endpoint)  # asked as a proxy, it answers in the same way
    assert await read(store) == expected()
    assert (server.signed, server.other) == (0, 1)


async def test_who_gives_up_gets_back_memory_that_nothing_writes_to(store: RemoteStore, server: Server) -> None:
    server.plan.append("stalls")
    into = memoryview(bytearray(PART.size_bytes))
    task = asyncio.ensure_future(store.get_range_into("object", PART, into, if_match=ETAG))
    await asyncio.to_thread(server.asked.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not server.stalled_to_the_end, "it waited for the server"
    into.release()  # BufferError if a thread still has it


# --- TLS ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls_server(
    authority: Authority, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """Its certificate names the host that is the parameter."""
    yield from served(Server(authority.server_side(request.param)), monkeypatch)


@pytest.mark.parametrize("tls_server", ["127.0.0.1"], indirect=True)
async def test_over_tls_it_is_the_same(
    tls_server: Server, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    store = RemoteStore(parse_uri("s3://bucket/run"), Settings.load())
    assert [await read(store) for _ in range(3)] == [digest_of(DATA[PART.start : PART.stop])] * 3
    assert (tls_server.signed, tls_server.other, len(tls_server.connections)) == (3, 0, 1)
    await store.close()


@pytest.mark.parametrize(
    ("tls_server", "trusts"),
    [("elsewhere.example", True), ("127.0.0.1", False)],
    indirect=["tls_server"],
    ids=["another name", "unknown authority"],
)
async def test_a_server_that_cannot_be_believed_is_asked_nothing(
    tls_server: Server, trusts: bool, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trusts:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    monkeypatch.setattr(retry, "RETRIES_MAX", 0)
    store = RemoteStore(parse_uri("s3://bucket/run"), Settings.load(store_timeout_seconds=5))
    with pytest.raises(EndpointError, match="certificate"):
        await read(store)
    assert (tls_server.signed, tls_server.other) == (0, 0)
    await store.close()
