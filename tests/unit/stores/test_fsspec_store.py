"""HTTP through fsspec: proxy variables, and permanent errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.servers.ill_endpoints import Proxy, Says
from tierckpt.config import Settings
from tierckpt.errors import EndpointError
from tierckpt.format.layout import parse_uri
from tierckpt.stores import open_store


async def get(url: str) -> bytes:
    store = open_store(parse_uri(url), Settings.load())
    try:
        return await store.get("weights.bin")
    finally:
        await store.close()


async def test_urls_are_read_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    server, proxy = Says(200, b"bytes"), Proxy()
    monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
    assert await get(server.endpoint.replace("127.0.0.1", "files.example") + "/model") == b"bytes"
    assert proxy.seen and all("files.example" in one for one in proxy.seen)
    proxy.seen.clear()
    monkeypatch.setenv("no_proxy", "127.0.0.0/8")
    assert await get(f"{server.endpoint}/direct") == b"bytes"
    assert proxy.seen == []
    proxy.close()
    server.close()


async def test_certificate_and_name_errors_are_permanent(tmp_path: Path) -> None:
    server = Says(200, b"bytes", tls=Authority(tmp_path).server_side())
    with pytest.raises(EndpointError, match="certificate"):
        await get(f"{server.endpoint}/model")
    with pytest.raises(EndpointError, match="does not exist"):
        await get("http://files.invalid/model")
    server.close()
