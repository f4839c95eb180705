"""A store on a narrow link: many concurrent GETs each fall below the minimum rate, and all must arrive."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from tests.services import HttpServer, S3Server
from tierckpt.config import Settings
from tierckpt.errors import StoreUnavailableError
from tierckpt.format.layout import parse_uri
from tierckpt.stores import get_concurrency, retry
from tierckpt.stores.get_concurrency import GetConcurrency
from tierckpt.stores.obstore_store import RemoteStore
from tierckpt.types import ByteRange

RATE = 500_000
"""Bytes per second of the link."""
MIN_RATE = 90_000
"""Minimum rate of one GET: half of the GETs can reach it, all together cannot."""
SIZE = 256 * 1024
GETS = 8
DATA = os.urandom(SIZE)


class Narrow(HttpServer):
    """Answers share one link in equal slices. ``most``: maximum number of concurrent answers."""

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
                    # After a late slice on a busy machine the next one follows sooner.
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
    narrow = Narrow()
    for name, value in S3Server(narrow.endpoint, "testing", "testing").environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(get_concurrency, "WINDOW_SECONDS", 2.0)
    monkeypatch.setattr(get_concurrency, "BYTES_PER_SECOND_MIN", MIN_RATE)
    monkeypatch.setattr(retry, "RETRIES_MAX", 1)
    yield narrow
    narrow.close()


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
async def test_gets_are_reduced_until_all_arrive(server: Narrow) -> None:
    for _ in range(5):  # on a busy machine the GETs may not overlap
        assert await get_all(into=True) == [None] * GETS
        if server.most >= GETS:
            return
    raise AssertionError(f"they never began together: {server.most} of {GETS}")


@pytest.mark.slow
async def test_gets_of_the_client_library_are_reduced_too(server: Narrow, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first timeout does not show whether the GET was making progress: one more retry."""
    monkeypatch.setattr(retry, "RETRIES_MAX", 2)
    assert await get_all(into=False) == [None] * GETS


@pytest.mark.slow
async def test_control_unreduced_gets_fail_again(server: Narrow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: on a link for a single GET, concurrent GETs fail again."""
    server.rate = 3 * MIN_RATE // 2
    monkeypatch.setattr(GetConcurrency, "reduce", lambda *_: None)
    failed = [error for error in await get_all(into=True) if error is not None]
    assert failed
    assert all(isinstance(error, StoreUnavailableError) for error in failed)
