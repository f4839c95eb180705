"""A server that redirects elsewhere: no credentials are sent along (stores/bucket.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.contract.test_remote_errors import VERBS
from tests.services import HttpServer, S3Server
from tierckpt.config import Settings
from tierckpt.errors import TierckptError
from tierckpt.format.layout import parse_uri
from tierckpt.stores import bucket, retry
from tierckpt.stores.obstore_store import RemoteStore
from tierckpt.types import ByteRange

TOKEN = "canaryToken0123456789"
SIGNATURE = "canarySignature0123456789"


class Server(HttpServer):
    """Records its requests, and redirects each to ``elsewhere``, if set."""

    verbs = ("GET", "HEAD", "PUT", "POST", "DELETE")

    def __init__(self, elsewhere: str = "", status: int = 404) -> None:
        self.elsewhere, self.status = elsewhere, status
        self.seen: list[str] = []
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.seen.append(f"{request.command} {request.path}\n{request.headers}")
        headers = {"Location": f"{self.elsewhere}{urlsplit(request.path).path}"} if self.elsewhere else {}
        self.say(request, self.status, b"", headers)

    def saw_a_secret(self) -> bool:
        return any(TOKEN in one or SIGNATURE in one for one in self.seen)

    def url(self, host: str) -> str:
        return self.endpoint.replace("127.0.0.1", host)


@pytest.fixture
def settings(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(retry, "RETRIES_MAX", 0)
    return Settings.load(None, local_root=tmp_path / "local", store_timeout_seconds=2)


@pytest.fixture(params=[302, 307])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[tuple[Server, int]]:
    with closing(Server()) as server:
        yield server, request.param


async def ask_everything(store: RemoteStore) -> None:
    into = memoryview(bytearray(1 << 20))
    for request in (*VERBS.values(), lambda store: store.get_range_into("key", ByteRange(0, len(into)), into)):
        with pytest.raises(TierckptError):
            await request(store)
            raise TierckptError("a store that has nothing may say so")
    await store.close()


async def s3(endpoint: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = S3Server(endpoint, "canaryKey", "canarySecret").environment()
    for name, value in (keys | {"AWS_SESSION_TOKEN": TOKEN}).items():
        monkeypatch.setenv(name, value)
    await ask_everything(RemoteStore(parse_uri("s3://bucket/run"), settings))


async def azure(endpoint: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ENDPOINT": f"{endpoint}/account",
        "AZURE_STORAGE_SAS_TOKEN": f"sv=2024-11-04&ss=b&srt=co&sp=rwdl&sig={SIGNATURE}",
    }.items():
        monkeypatch.setenv(name, value)
    await ask_everything(RemoteStore(parse_uri("az://container/run"), settings))


@pytest.mark.slow
@pytest.mark.parametrize("cloud", [s3, azure])
@pytest.mark.parametrize(("there", "is_near"), [("127.0.0.1", True), ("localhost", True), ("localhost", False)])
async def test_nobody_else_is_asked_anything(
    cloud: Any,
    there: str,
    is_near: bool,
    elsewhere: tuple[Server, int],
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of another machine, its hosts count."""
    if not is_near:
        monkeypatch.setattr(bucket, "is_this_machine", lambda _: False)
    other, status = elsewhere
    with closing(Server(other.url(there), status)) as server:
        await cloud(server.endpoint, settings, monkeypatch)
        assert server.saw_a_secret()
    assert other.seen == []


@pytest.mark.parametrize("cloud", [s3, azure])
async def test_without_bounds_it_is_seen(cloud: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    settings = settings.model_copy(update={"store_timeout_seconds": 60.0})
    monkeypatch.setattr(bucket, "redirect_bounds", lambda _: {})
    with closing(Server()) as other, closing(Server(other.url("localhost"), 307)) as server:
        await cloud(server.endpoint, settings, monkeypatch)
        assert other.saw_a_secret()


@pytest.mark.parametrize("is_near", [True, False])
async def test_a_store_that_sends_nobody_away_is_used_as_before(
    is_near: bool, s3_uri: str, moto: S3Server, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "is_this_machine", lambda _: is_near)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    store, data = RemoteStore(parse_uri(s3_uri), settings), bytes(range(256)) * 4096
    await store.put("a/key", data)
    into = memoryview(bytearray(1 << 20))
    await store.get_range_into("a/key", ByteRange(0, len(into)), into)
    assert into == data
    assert bytes(await store.get("a/key")) == data
    assert [info.key async for info in store.list()] == ["a/key"]
    await store.delete("a/key")
    assert [info.key async for info in store.list()] == []
    await store.close()
