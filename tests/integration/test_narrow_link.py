"""A store behind a narrow link: many GETs at a time each get less than what counts as moving, and all must arrive."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from tests.services import HttpServer
from tierckpt.config import Settings
from tierckpt.errors import StoreUnavailableError
from tierckpt.format.layout import parse_uri
from tierckpt.stores import get_concurrency, retry
from tierckpt.stores.get_concurrency import GetConcurrency
from tierckpt.stores.obstore_store import RemoteStore
from tierckpt.types import ByteRange

RATE = 500_000
"""Bytes per second of the link."""
LEAST = 90_000
"""What one GET must get of that: half of the GETs can, all of them cannot."""
SIZE = 256 * 1024
GETS = 8
DATA = os.urandom(SIZE)


class Narrow(HttpServer):
    """Answers share one link evenly, a slice each in turn. ``most`` is how many there were at a time."""

    def __init__(self) -> None:
        self._link = threading.Condition()
        self._line: list[object] = []
        self._due = 0.0
        self.rate = RATE
        self.most = 0
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.command == "HEAD":
            request.send_error(404)
            return
        start, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
        body = DATA[int(start) : int(last) + 1]
        request.send_response(206)
        request.send_header("ETag", '"e"')
        request.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
        request.send_header("Content-Range", f"bytes {start}-{last}/{SIZE}")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        me = object()
        with self._link:
            if not self._line:
                self._due = time.monotonic()
            self._line.append(me)
            self.most = max(self.most, len(self._line))
        try:
            for at in range(0, len(body), 4096):
                with self._link:
                    self._link.wait_for(lambda: self._line[0] is me, 60)
                    # Late for a slice, on a busy machine, the next one comes the sooner.
                    self._due = max(self._due, time.monotonic() - 0.5) + 4096 / self.rate
                    time.sleep(max(0.0, self._due - time.monotonic()))
                    self._line.append(self._line.pop(0))
                    self._link.notify_all()
                request.wfile.write(body[at : at + 4096])
        except OSError:
            request.close_connection = True
        finally:
            with self._link:
                self._line.remove(me)
                self._link.notify_all()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Narrow]:
    made = Narrow()
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(get_concurrency, "WINDOW_SECONDS", 2.0)
    monkeypatch.setattr(get_concurrency, "BYTES_PER_SECOND_MIN", LEAST)
    monkeypatch.setattr(retry, "RETRIES_MAX", 1)
    yield made
    made.close()


async def get_all(*, into: bool) -> list[BaseException | None]:
    store = RemoteStore(parse_uri("s3://bucket/run"), Settings.load())

    async def get() -> None:
        if into:
            memory = memoryview(bytearray(SIZE))
            await store.get_range_into("object", ByteRange(0, SIZE), memory)
            assert bytes(memory) == DATA
        else:
            assert bytes(await store.get_range("object", ByteRange(0, SIZE))) == DATA

    try:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(get() for _ in range(GETS)), return_exceptions=True)
    finally:
        await store.close()


@pytest.mark.slow
async def test_gets_become_fewer_and_all_arrive(server: Narrow) -> None:
    for _ in range(5):  # on a busy machine the last may begin when the first has ended
        assert await get_all(into=True) == [None] * GETS
        if server.most >= GETS:
            return
    raise AssertionError(f"they never began together: {server.most} of {GETS}")


@pytest.mark.slow
async def test_gets_by_the_library_too(server: Narrow, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time that one of those does not end in time, nobody knows whether it crept: that takes a retry more."""
    monkeypatch.setattr(retry, "RETRIES_MAX", 2)
    assert await get_all(into=False) == [None] * GETS


@pytest.mark.slow
async def test_otherwise_they_would_be_broken_off_again(server: Narrow, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a link that one GET at a time could use, and no two."""
    server.rate = 3 * LEAST // 2
    monkeypatch.setattr(GetConcurrency, "reduce", lambda *_: None)
    failed = [error for error in await get_all(into=True) if error is not None]
    assert failed
    assert all(isinstance(error, StoreUnavailableError) for error in failed)
