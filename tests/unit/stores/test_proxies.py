"""Proxy variables have one meaning: for the function, and for each kind of request through a real proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.servers.hub import Repository, fake_hub
from tests.servers.ill_endpoints import Proxy, Says
from tests.services import HttpServer, S3Server, free_port
from tierckpt.cli.ui.app import run as cli
from tierckpt.config import Settings
from tierckpt.errors import ConfigError, EndpointError
from tierckpt.format.layout import parse_uri
from tierckpt.stores import retry
from tierckpt.stores.obstore_store import DIRECT_BYTES_MIN, RemoteStore
from tierckpt.stores.proxies import proxy_for
from tierckpt.types import ByteRange

# --- proxy selection -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "url", "found"),
    [
        ({}, "http://a/", None),
        ({"http_proxy": "http://p:1"}, "http://a/", "http://p:1"),
        ({"http_proxy": "http://p:1"}, "https://a/", None),
        ({"HTTPS_PROXY": "p:1"}, "https://a/", "http://p:1"),
        ({"http_proxy": "http://p:1", "HTTP_PROXY": "http://q:1"}, "http://a/", "http://p:1"),
        ({"http_proxy": "", "HTTP_PROXY": "http://q:1"}, "http://a/", "http://q:1"),
        ({"HTTP_PROXY": "http://q:1", "REQUEST_METHOD": "GET"}, "http://a/", None),
        ({"http_proxy": "http://q:1", "REQUEST_METHOD": "GET"}, "http://a/", "http://q:1"),
        ({"ALL_PROXY": "http://q:1"}, "https://a/", "http://q:1"),
        ({"ALL_PROXY": "socks5://q:1", "https_proxy": "http://p:1"}, "https://a/", "http://p:1"),
        ({"https_proxy": " ", "HTTPS_PROXY": ""}, "https://a/", None),
    ],
)
def test_proxy_variable_for_each_scheme(
    environment: dict[str, str], url: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    proxy = proxy_for(url)
    assert (proxy.url if proxy else None) == found


DIRECT = {
    "*": ["http://a/", "http://10.0.0.1/", "http://[::1]/"],
    "example.com": ["http://example.com/", "http://a.EXAMPLE.com./"],
    ".example.com": ["http://a.example.com/", "http://example.com/"],
    "*.example.com": ["http://a.b.example.com/"],
    "other, example.com": ["http://example.com/"],
    "other example.com": ["http://example.com/"],
    "store:9000": ["http://store:9000/"],
    "store:80": ["http://store/"],
    "10.1.2.3": ["http://10.1.2.3:9000/"],
    "10.0.0.0/8": ["http://10.1.2.3/"],
    "fd00::/8": ["http://[fd00::1]:9000/"],
    "[fd00::1]:9000": ["http://[fd00::1]:9000/"],
    "::1": ["http://[::1]/"],
    "": ["http://169.254.169.254/", "http://metadata.google.internal/"],
}
PROXIED = {
    "example.com": ["http://notexample.com/", "http://example.com.evil/"],
    "store:9000": ["http://store:9001/", "http://store/"],
    "10.0.0.0/8": ["http://11.0.0.1/", "http://ten.example/"],
    "[fd00::1]:9000": ["http://[fd00::1]:9001/"],
    "": ["http://a/"],
    ",": ["http://a/"],
}


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_no_proxy_matches_are_direct(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    for table, is_proxied in ((DIRECT, False), (PROXIED, True)):
        for value, urls in table.items():
            monkeypatch.setenv(name, value)
            for url in urls:
                assert (proxy_for(url) is not None) == is_proxied, (value, url)


def test_unsupported_proxy_schemes_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("socks5://127.0.0.1:1080", "http://", "http://host:port"):
        monkeypatch.setenv("ALL_PROXY", value)
        with pytest.raises(ConfigError, match="ALL_PROXY"):
            proxy_for("https://a/")


# --- each kind of request --------------------------------------------------------------------------------------------


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.close()


DATA = bytes(range(256)) * (DIRECT_BYTES_MIN // 128)


class S3(HttpServer):
    """One object."""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        headers = {"ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        first, last = 0, len(DATA) - 1
        if asked := request.headers.get("Range"):
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {first}-{last}/{len(DATA)}"
        self.say(request, 206 if asked else 200, DATA[first : last + 1], headers)


async def read(store: RemoteStore) -> None:
    await store.head("key")
    into = bytearray(DIRECT_BYTES_MIN)
    await store.get_range_into("key", ByteRange(0, DIRECT_BYTES_MIN), memoryview(into))
    await store.close()
    assert into == DATA[:DIRECT_BYTES_MIN]


def s3(monkeypatch: pytest.MonkeyPatch, endpoint: str, token: str = "") -> RemoteStore:
    for name, value in (S3Server(endpoint, "key", "secret").environment() | {"AWS_SESSION_TOKEN": token}).items():
        monkeypatch.setenv(name, value)
    return RemoteStore(parse_uri("s3://bucket/run"), Settings.load(store_timeout_seconds=10))


@pytest.mark.parametrize("token", ["", "session"])
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("variable", ["{}_proxy", "ALL_PROXY"])
def test_store_requests_use_the_proxy(
    variable: str, scheme: str, token: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's host name does not resolve here: every request must use the proxy."""
    authority = Authority(tmp_path)
    server = S3(authority.server_side("store.example") if scheme == "https" else None)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    monkeypatch.setenv(variable.format(scheme), f"http://{proxy.address}")
    endpoint = server.endpoint.replace("127.0.0.1", "store.example")
    asyncio.run(read(s3(monkeypatch, endpoint, token)))
    assert len(proxy.seen) >= (2 if scheme == "http" else 1)
    assert all("store.example" in one for one in proxy.seen)
    server.close()


@pytest.mark.parametrize("no_proxy", ["*", "127.0.0.1", "127.0.0.0/8", "PORT"])
def test_store_requests_bypass_the_proxy_for_no_proxy_hosts(
    no_proxy: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = S3()
    monkeypatch.setenv("HTTP_PROXY", f"http://{proxy.address}")
    monkeypatch.setenv("NO_PROXY", no_proxy.replace("PORT", server.endpoint.removeprefix("http://")))
    asyncio.run(read(s3(monkeypatch, server.endpoint)))
    assert proxy.seen == []
    server.close()


def test_local_credential_endpoints_bypass_the_proxy(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials of an EKS or ECS agent. The store itself is reached through the proxy."""
    keys = Says(
        200,
        b'{"AccessKeyId": "a", "SecretAccessKey": "b", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}',
        {"Content-Type": "application/json"},
    )
    server = S3()
    store = s3(monkeypatch, server.endpoint.replace("127.0.0.1", "store.example"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "token").write_text("token")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{keys.endpoint}/keys")
    monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
    asyncio.run(read(store))
    assert keys.requests and proxy.seen and all("store.example" in one for one in proxy.seen)
    keys.close()
    server.close()


@pytest.mark.parametrize("is_excluded", [False, True])
def test_hub_requests_use_the_proxy(
    is_excluded: bool, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
    monkeypatch.setenv("no_proxy", "127.0.0.0/8" if is_excluded else "")
    with fake_hub() as hub:
        hub.repositories["org/model"] = Repository()
        hub.repositories["org/model"].commit({"a.safetensors": b"1" * 5000, "config.json": b"{}"})
        monkeypatch.setenv("HF_ENDPOINT", f"{hub.endpoint}/")
        assert cli(["prefetch", "hf://org/model", "--to", str(tmp_path / "to")]) == 0
        seen = " ".join(proxy.seen)
        assert (f"{hub.endpoint}/api" in seen, hub.cdn in seen) == ((not is_excluded,) * 2)


# --- failing proxies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["s3://bucket/model", "hf://org/model"])
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(
    ("refusal", "exit_code", "named"),
    [(407, 2, "user and a password"), (403, 2, "NO_PROXY"), (503, 7, "HTTP 503"), (0, 7, "proxy")],
    ids=["407", "403", "503", "down"],
)
def test_errors_name_the_failing_proxy(
    refusal: int,
    exit_code: int,
    named: str,
    scheme: str,
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if scheme == "http" and refusal in (403, 503):
        pytest.skip("such an answer may be the origin's")
    monkeypatch.setattr(retry, "RETRIES_MAX", 1)
    proxy = Proxy(refusal)
    address = proxy.address if refusal else f"127.0.0.1:{free_port()}"
    monkeypatch.setenv(f"{scheme}_proxy", f"http://user:hunter22@{address}")
    monkeypatch.setenv("HF_ENDPOINT", f"{scheme}://hub.example")
    s3(monkeypatch, f"{scheme}://store.example")
    assert cli(["prefetch", target, "--to", str(tmp_path / "to")]) == exit_code
    said = " ".join(capsys.readouterr().err.split())
    assert f"the proxy {address} ({scheme}_proxy)" in said and named in said
    assert "hunter22" not in said
    if exit_code == 2:
        assert len(proxy.seen) <= 2
    proxy.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxy_user_and_password(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, proxy = Authority(tmp_path), Proxy(authorization="us@er:p/w")
    server = S3(authority.server_side("store.example") if scheme == "https" else None)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    endpoint = server.endpoint.replace("127.0.0.1", "store.example")
    monkeypatch.setenv(f"{scheme}_proxy", f"http://us%40er:p%2Fw@{proxy.address}")
    asyncio.run(read(s3(monkeypatch, endpoint)))
    monkeypatch.setenv(f"{scheme}_proxy", f"http://us%40er:wrong@{proxy.address}")
    with pytest.raises(EndpointError, match="user and a password"):
        asyncio.run(read(s3(monkeypatch, endpoint)))
    proxy.close()
    server.close()
