"""The limits that the agent's HTTP server adds to aiohttp (L1 to L4 in tierckpt/agent/http_server.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.open_files import open_files
from tierckpt.agent import http_server
from tierckpt.agent.http_server import HttpServer, begin, web, write
from tierckpt.errors import ConfigError
from tierckpt.stores import get_concurrency

PATIENCE_SECONDS = 60.0
SOON_SECONDS = 15.0


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    """A site whose path names are its actions."""
    if request.raw_path == "/fails":
        raise ZeroDivisionError("a secret reason")
    if request.raw_path == "/waits":
        await asyncio.sleep(PATIENCE_SECONDS)
    if request.raw_path == "/large":  # more than the sockets hold, in the memory of this process
        assert request.transport is not None
        request.transport.set_write_buffer_limits(high=1 << 30)
        response = await begin(request, {"Content-Length": str(64 << 20)})
        await write(response, bytes(64 << 20))
        return response
    if request.raw_path == "/endless":
        response = await begin(request, {})
        while True:
            await write(response, bytes(1 << 20))
    return web.Response(text=f"{request.method} {request.raw_path}")


@asynccontextmanager
async def serving(body_bytes_max: int = 0) -> AsyncIterator[HttpServer]:
    server = HttpServer("a test", answer, body_bytes_max=body_bytes_max)
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.close()


async def connect(server: HttpServer, request: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(request)
    return reader, writer


async def ask(server: HttpServer, request: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    reader, writer = await connect(server, request)
    async with asyncio.timeout(PATIENCE_SECONDS):
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()


async def until_closed(reader: asyncio.StreamReader) -> float:
    begun = time.monotonic()
    async with asyncio.timeout(PATIENCE_SECONDS):
        with suppress(ConnectionError):
            await reader.read()
    return time.monotonic() - begun


def sockets() -> set[str]:
    return set(open_files("socket:").values())


def get(path: str = "/", *lines: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode("latin-1")


MALFORMED = [
    b"\r\n\r\n\r\nx\r\n\r\n",
    b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\nHost: x\n\n\r\n\r\n",
    b"GET /v1 HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET *\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    get("/", " folded: x"),
    get("/", "X : y"),
    get("/", "X"),
    get("/", "X: a\rY: b"),
    get("/", "X: a\0b"),
    get("/", "Host: y"),
    get("/", "Content-Length: 1, 1"),
    get("/", "Content-Length: 0", "Transfer-Encoding: chunked"),
    get("/", *[f"X-{number}: y" for number in range(http_server.HEADERS_MAX + 1)]),
    get("/", f"X: {'y' * 10_000}"),
    get("/" + "x" * 10_000),
]


@pytest.mark.parametrize("request_", MALFORMED)
async def test_what_is_no_http_is_refused_and_the_connection_ends(request_: bytes) -> None:
    async with serving() as server:
        said = await ask(server, request_)
        assert said.split(b" ")[1:2] in ([], [b"400"]), said
        assert said.partition(b"\r\n\r\n")[2] == b""
        assert b"aiohttp" not in said and b"Date:" not in said
        assert server.counts["malformed"] == 1


async def test_an_answer_names_no_version_and_a_connection_is_used_again() -> None:
    async with serving() as server:
        reader, writer = await connect(server)
        for path in ("/one", "/two?three=%20", "/three", "/four"):
            writer.write(get(path, f"X: {'y' * 6000}"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"\r\nServer: tierckpt\r\n" in head
            assert [word for word in (b"aiohttp", b"Python", b"\r\nDate:") if word in head] == []
            assert await reader.readexactly(4 + len(path)) == f"GET {path}".encode()
        assert len(server.connections) == 1
        writer.transport.abort()


async def test_the_head_of_a_later_request_has_a_deadline_from_its_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server:
        reader, writer = await connect(server, get())
        await reader.readuntil(b"GET /")
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + http_server.HEAD_SECONDS + 1)
        await asyncio.sleep(0.1)
        writer.write(get())  # an idle connection has longer
        await reader.readuntil(b"GET /")
        monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.5)
        begun = time.monotonic()
        writer.write(b"GET / HT")
        async with asyncio.timeout(SOON_SECONDS):
            await until_closed(reader)
        assert time.monotonic() - begun >= 0.4


async def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 0.3)
    async with serving() as server:
        reader, _ = await connect(server, get())
        await reader.readuntil(b"GET /")
        assert 0.2 <= await until_closed(reader) < SOON_SECONDS


async def test_a_request_that_is_too_long_is_not_kept() -> None:
    async with serving(body_bytes_max=1 << 16) as server:
        assert b" 200 " in await ask(server, get("/", "Connection: close", "Content-Length: 9000") + bytes(9000))
        heads = get("/", *[f"X-{number}: {'y' * 8000}" for number in range(20)])
        assert await ask(server, heads) == b""
        assert server.counts["malformed"] == 1


async def test_an_unread_body_ends_the_connection() -> None:
    async with serving() as server:
        said = await ask(server, get("/", "Content-Length: 1000") + b"x")
        assert said.count(b"HTTP/1.1") == 1


async def test_a_connection_counts_until_its_request_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS_MAX", 4)  # two from one address
    async with serving() as server:
        for _ in range(2):
            _, writer = await connect(server, get("/waits"))
            await asyncio.sleep(0.2)
            writer.transport.abort()
        assert await ask(server, get()) == b""
        assert server.counts["overflowed"] == 1
    assert not server.connections
    async with serving() as server:
        for _ in range(8):
            assert b" 200 " in await ask(server, get("/", "Connection: close"))
        assert server.counts["overflowed"] == 0


@pytest.mark.parametrize("path", ["/endless", "/large"])
async def test_a_client_that_does_not_receive_is_disconnected(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_concurrency, "WINDOW_SECONDS", 1.0)
    monkeypatch.setattr(get_concurrency, "BYTES_PER_SECOND_MIN", 1 << 40)
    monkeypatch.setattr(http_server, "LINGER_SECONDS", 1.0 if path == "/large" else PATIENCE_SECONDS)
    async with serving() as server:
        before = sockets()
        _, writer = await connect(server)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(get(path, "Connection: close"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(ours := sockets() - before) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while ours <= sockets() or server.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.transport.abort()


async def test_a_request_that_fails_is_not_answered_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        assert await ask(server, get("/fails")) == b""
        assert b" 200 " in await ask(server, get("/", "Connection: close"))
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "ZeroDivisionError: a secret reason" in said


async def test_close_ends_what_is_under_way_at_once_and_may_be_called_again() -> None:
    async with serving() as server:
        reader, _ = await connect(server, get("/waits"))
        await asyncio.sleep(0.1)
        where = server.address
        async with asyncio.timeout(PATIENCE_SECONDS):
            await server.close()
            await server.close()
            assert not server.connections
            await until_closed(reader)
        with pytest.raises(OSError):
            await asyncio.open_connection(*where)


async def test_a_taken_port_is_named() -> None:
    async with serving() as server:
        host, port = server.address
        with pytest.raises(ConfigError, match=f"cannot serve a test on port {port} of {host}"):
            await HttpServer("a test", answer).start(host, port)
