"""A bucket in another region than the one configured: followed once, on every way to it, and remembered."""

from __future__ import annotations

import http.client
import re
import secrets
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.services import HttpServer, S3Server
from tierckpt.config import Settings
from tierckpt.errors import ObjectNotFoundError, TierckptError
from tierckpt.format.layout import parse_uri
from tierckpt.stores import retry
from tierckpt.stores.obstore_store import RemoteStore
from tierckpt.types import ByteRange

HOME = "eu-west-1"
_SIGNED_FOR = re.compile(r"/\d{8}/([a-z0-9-]+)/s3/")
BODIES = {
    301: "<Error><Code>PermanentRedirect</Code><Message>another endpoint</Message></Error>",
    400: f"<Error><Code>AuthorizationHeaderMalformed</Code><Region>{HOME}</Region></Error>",
}


class Regional(HttpServer):
    """A server of S3 before moto: all its buckets are in HOME, and it refuses requests signed for a region other than
    ``taken``."""

    verbs = ("GET", "HEAD", "PUT", "POST", "DELETE")

    def __init__(self, behind: S3Server, status: int, tls: ssl.SSLContext | None = None) -> None:
        self.behind, self.status = urlsplit(behind.endpoint).netloc, status
        self.taken = HOME
        self.refused: list[str] = []
        self.direct: list[str] = []
        """Ranges that came on a connection of our own, not through the client."""
        super().__init__(tls)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        scope = _SIGNED_FOR.search(request.headers.get("Authorization", "") + unquote(request.path))
        if scope is None or scope[1] != self.taken:
            self.refused.append(f"{request.command} {request.path}")
            status = self.status if scope else 403
            self.say(request, status, BODIES[self.status].encode() if scope else b"", {"x-amz-bucket-region": HOME})
            return
        if request.headers.get("User-Agent") == "tierckpt":
            self.direct.append(request.headers["Range"])
        connection = http.client.HTTPConnection(self.behind)
        connection.request(request.command, request.path, body, dict(request.headers))
        answer = connection.getresponse()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
        if request.command == "HEAD" and (length := answer.headers.get("Content-Length")):
            kept["Content-Length"] = length
        self.say(request, answer.status, answer.read(), kept)
        connection.close()


_HOP = {"content-length", "transfer-encoding", "connection", "server", "date"}


@pytest.fixture(params=[301, 400])
def regional(request: pytest.FixtureRequest, moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Regional]:
    server = Regional(moto, request.param)
    for name, value in {**moto.environment(), "AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


def opened(bucket: str) -> RemoteStore:
    return RemoteStore(parse_uri(f"s3://{bucket}/run"), Settings.load())


async def pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(6 << 20)


async def first_head(store: RemoteStore) -> None:
    with pytest.raises(ObjectNotFoundError):
        await store.head("other")


async def first_list(store: RemoteStore) -> None:
    assert [info.key async for info in store.list()] == ["key"]


async def first_get(store: RemoteStore) -> None:
    assert len(await store.get("key")) == 1 << 20


async def first_range(store: RemoteStore) -> None:
    into = memoryview(bytearray(1 << 20))
    await store.get_range_into("key", ByteRange(0, 1 << 20), into)
    assert bytes(into[:3]) == b"abc"
    await store.get_range_into("key", ByteRange(0, 1 << 20), into)


async def first_put(store: RemoteStore) -> None:
    await store.put("new", b"value", if_absent=True)
    assert await store.get("new") == b"value"


async def first_parts(store: RemoteStore) -> None:
    await store.again(lambda: store.put_stream("new", pieces(3), 18 << 20))  # as all that write large objects do
    assert (await store.head("new")).size_bytes == 18 << 20


async def first_delete(store: RemoteStore) -> None:
    await store.delete("key")
    with pytest.raises(ObjectNotFoundError):
        await store.head("key")


async def first_remove(store: RemoteStore) -> None:
    info = await RemoteStore(store.location, store.settings).head("key")
    await store.remove("key", etag=info.etag or "")
    with pytest.raises(ObjectNotFoundError):
        await store.head("key")


@pytest.mark.server
@pytest.mark.parametrize(
    "first",
    [first_head, first_list, first_get, first_range, first_put, first_parts, first_delete, first_remove],
    ids=lambda verb: verb.__name__.removeprefix("first_"),
)
async def test_followed_by_whatever_comes_first(regional: Regional, moto: S3Server, first: Any) -> None:
    with moto.bucket() as bucket:
        moto.client().put_object(Bucket=bucket, Key="run/key", Body=b"abc" + bytes((1 << 20) - 3))
        await first(opened(bucket))
        asked = len(regional.refused)
        assert asked <= 5, regional.refused
        assert bool(regional.direct) == (first is first_range)
        await first_head(opened(bucket))  # another client of this process
        assert len(regional.refused) == asked


@pytest.mark.server
async def test_a_region_that_does_not_help_is_asked_for_once(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that names the region which it then refuses: an error soon, and no circle."""
    monkeypatch.setattr(retry, "RETRIES_MAX", 1)
    with closing(Regional(moto, 301)) as server:
        server.taken = "nowhere"
        for name, value in {**moto.environment(), "AWS_ENDPOINT_URL": server.endpoint}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(TierckptError):
            await opened(f"test-{secrets.token_hex(6)}").head("key")
        assert len(server.refused) < 10
