"""What variables say reaches the client: empty ones, and certificates of a private authority."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.contract.test_regions import HOME, Regional, first_delete, first_list, first_parts, first_put, opened
from tests.services import HttpServer, S3Server
from tierckpt.config import Settings
from tierckpt.errors import TierckptError
from tierckpt.format.layout import parse_uri
from tierckpt.stores import retry
from tierckpt.stores.obstore_store import RemoteStore
from tierckpt.types import ByteRange

EMPTY = (
    "AWS_CA_BUNDLE",
    "AWS_CHECKSUM_ALGORITHM",
    "AWS_CONDITIONAL_PUT",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_SERVER_SIDE_ENCRYPTION",
    "AWS_SESSION_TOKEN",
    "AWS_SKIP_SIGNATURE",
    "AWS_TIMEOUT",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "SSL_CERT_FILE",
)


@pytest.mark.server
@pytest.mark.parametrize("value", ["", " ", "\n"])
async def test_empty_variables_of_s3(s3_uri: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EMPTY:
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"{os.environ[name]}{value}")
    store = RemoteStore(parse_uri(s3_uri), Settings.load())
    await store.put("key", b"value", if_absent=True)
    assert await store.get("key") == b"value"


@pytest.mark.parametrize("scheme", ["az", "gs"])
async def test_empty_variables_of_others(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the client; no server answers there."""
    monkeypatch.setattr(retry, "RETRIES_MAX", 0)
    for name in ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_CLIENT_ID", "AZURE_TIMEOUT", "AZURE_STORAGE_ENCRYPTION_KEY"):
        monkeypatch.setenv(name, "")
    for name in ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BASE_URL", "SERVICE_ACCOUNT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1/me")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=2024-11-04&sig=abc\n")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:1")
    with pytest.raises(TierckptError, match=r"cannot be reached|is down"):
        await RemoteStore(parse_uri(f"{scheme}://bucket/run"), Settings.load()).head("key")


class Emulator(HttpServer):
    """One object of GCS. It refuses a request with credentials."""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        headers = {"ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        self.say(request, 401 if request.headers.get("Authorization") else 200, b"value", headers)


async def test_an_emulator_of_gcs_needs_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nonexistent")
    with closing(Emulator()) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint.removeprefix("http://"))
        store = RemoteStore(parse_uri("gs://bucket/run"), Settings.load())
        assert await store.get("key") == b"value"
        assert "STORAGE_EMULATOR_HOST" in store.sources["endpoint"]


@pytest.fixture(autouse=True)
def system_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the system, whatever the machine of these tests names."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def private(moto: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Regional, Path]]:
    """A server with a certificate of a private authority, and a bundle with that authority after another one."""
    authority = Authority(tmp_path)
    server = Regional(moto, 301, tls=authority.server_side())
    for name, value in {**moto.environment(), "AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": HOME}.items():
        monkeypatch.setenv(name, value)
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(Authority(tmp_path, "other").path.read_bytes() + authority.path.read_bytes())
    yield server, bundle
    server.close()


@pytest.mark.server
@pytest.mark.parametrize("way", ["AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "profile"])
async def test_a_private_authority_is_believed_on_every_way(
    private: tuple[Regional, Path], moto: S3Server, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto.bucket() as bucket:
        moto.client().put_object(Bucket=bucket, Key="run/key", Body=b"abc" + bytes((1 << 20) - 3))
        if way == "profile":
            (tmp_path / "config").write_text(f"[profile lab]\nca_bundle = {private[1]}\n")
            monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_PROFILE" if way == "profile" else way, "lab" if way == "profile" else str(private[1]))
        store = opened(bucket)
        await first_list(store)
        into = memoryview(bytearray(1 << 20))
        await store.get_range_into("key", ByteRange(0, 1 << 20), into)
        assert private[0].direct
        await first_put(store)
        await store.remove("new", etag=(await store.head("new")).etag or "")
        await first_parts(store)
        await first_delete(store)
