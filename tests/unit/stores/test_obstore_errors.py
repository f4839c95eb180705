"""Final errors, each caused by a real server: exit code, named cause, number of requests.

docs/guide/errors.md has the same causes in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.servers.ill_endpoints import Greets, Says
from tests.services import AzureServer, S3Server, free_port
from tierckpt.cli.ui.app import run as cli
from tierckpt.stores import retry

HTML = b"<!DOCTYPE html>\n<html><head><title>Object Browser</title></head><body>Please log in</body></html>"
TIMEOUT_SECONDS = 60.0


def code(name: str, message: str = "m") -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{name}</Code><Message>{message}</Message></Error>".encode()


class World:
    """Starts the servers of a test, and closes them at its end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.servers: list[Any] = []

    def says(self, *given: Any, **named: Any) -> str:
        self.servers.append(Says(*given, **named))
        return str(self.servers[-1].endpoint)

    def greets(self, scheme: str, data: bytes) -> str:
        self.servers.append(Greets(data))
        return f"{scheme}://{self.servers[-1].address}"

    def tls(self, host: str = "127.0.0.1", **issued: Any) -> str:
        return self.says(404, code("NoSuchKey"), tls=Authority(self.directory).server_side(host, **issued))

    @property
    def asked(self) -> int:
        """The number of requests, or of connections if there was no request, of the most frequent kind."""
        return max(
            [server.connections if isinstance(server, Greets) else max(server.requests.values(), default=0)
             for server in self.servers],
            default=0,
        )  # fmt: skip


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("TIERCKPT_STORE_TIMEOUT_SECONDS", str(TIMEOUT_SECONDS))
    world = World(tmp_path)
    yield world
    for server in world.servers:
        server.close()


def point(monkeypatch: pytest.MonkeyPatch, scheme: str, endpoint: str) -> str:
    """Set the variables of a cloud; return the URI of a directory in one of its buckets."""
    values = {
        "s3": S3Server(endpoint, "key", "secret").environment(),
        "az": AzureServer(endpoint, "account", "a2V5").environment(),
        "gs": {"GOOGLE_BASE_URL": endpoint, "GOOGLE_SKIP_SIGNATURE": "true"},
    }
    for name, value in values[scheme].items():
        monkeypatch.setenv(name, value)
    return f"{scheme}://bucket/model"


Case = tuple[str, Callable[[World], str], int, list[str]]

NOT_S3 = ["AWS_ENDPOINT_URL", "does not answer as S3 does"]
CASES: dict[str, Case] = {
    # certificates
    "unknown authority": ("s3", World.tls, 2, ["certificate", "AWS_CA_BUNDLE"]),
    "another name": ("s3", lambda w: w.tls("elsewhere.example"), 2, ["certificate"]),
    "expired": ("s3", lambda w: w.tls(expired=True), 2, ["certificate"]),
    "self-signed": ("s3", lambda w: w.tls(self_signed=True), 2, ["certificate"]),
    "unknown authority of azure": ("az", World.tls, 2, ["certificate", "SSL_CERT_FILE"]),
    # other protocols
    "HTML": ("s3", lambda w: w.says(200, HTML, {"Content-Type": "text/html"}), 2, NOT_S3),
    "HTML 404": ("s3", lambda w: w.says(404, HTML), 2, [*NOT_S3, "HTML", "Object Browser"]),
    "HTML 405": ("s3", lambda w: w.says(405, HTML), 2, [*NOT_S3, "HTML"]),
    "HTML 403": ("s3", lambda w: w.says(403, HTML), 2, [*NOT_S3, "HTML"]),
    "HTML of azure": ("az", lambda w: w.says(404, HTML), 2, ["AZURE_STORAGE_ENDPOINT", "HTML"]),
    "HTML of gcs": ("gs", lambda w: w.says(404, HTML), 2, ["GOOGLE_BASE_URL", "HTML"]),
    "captive portal": ("s3", lambda w: w.says(302, b"", {"Location": w.says(200, HTML)}), 2, NOT_S3),
    "JSON": ("s3", lambda w: w.says(200, b'{"status": "ok"}'), 2, NOT_S3),
    "JSON 404": ("s3", lambda w: w.says(404, b'{"detail": "Not Found"}'), 2, [*NOT_S3, "JSON"]),
    "empty 200": ("s3", lambda w: w.says(200), 2, NOT_S3),
    "HTTP behind https": ("s3", lambda w: w.says(200).replace("http:", "https:"), 2, [*NOT_S3, "is it http://?"]),
    "TLS behind http": ("s3", lambda w: w.tls().replace("https:", "http:"), 2, [*NOT_S3, "write https://"]),
    "SSH": ("s3", lambda w: w.greets("http", b"SSH-2.0-OpenSSH_9.2\r\n"), 2, [*NOT_S3, "does not speak HTTP"]),
    "SSH behind https": ("s3", lambda w: w.greets("https", b"SSH-2.0\r\n"), 2, [*NOT_S3, "does not speak TLS"]),
    "no such name": ("s3", lambda _: "http://store.invalid", 2, ["store.invalid does not exist", "AWS_ENDPOINT_URL"]),
    # regions
    "301": ("s3", lambda w: w.says(301, code("PermanentRedirect")), 2, ["region", "AWS_REGION"]),
    "malformed": ("s3", lambda w: w.says(400, code("AuthorizationHeaderMalformed")), 2, ["region", "AWS_REGION"]),
    # refused credentials
    "signature": ("s3", lambda w: w.says(403, code("SignatureDoesNotMatch")), 6, ["AWS_SECRET_ACCESS_KEY"]),
    "unknown key": ("s3", lambda w: w.says(403, code("InvalidAccessKeyId")), 6, ["AWS_ACCESS_KEY_ID"]),
    "expired token": ("s3", lambda w: w.says(400, code("ExpiredToken")), 6, ["expired", "AWS_SESSION_TOKEN"]),
    "denied": ("s3", lambda w: w.says(403, code("AccessDenied")), 6, ["policy", "'bucket'"]),
    "clock": ("s3", lambda w: w.says(403, code("RequestTimeTooSkewed")), 6, ["clock"]),
    "azure key": ("az", lambda w: w.says(403, code("AuthenticationFailed")), 6, ["AZURE_STORAGE_ACCOUNT_KEY"]),
    "azure role": ("az", lambda w: w.says(403, code("AuthorizationPermissionMismatch")), 6, ["role", "Storage Blob"]),
    "gcs 401": ("gs", lambda w: w.says(401, code("AuthenticationRequired")), 6, ["GOOGLE_APPLICATION_CREDENTIALS"]),
    # errors of the store
    "no bucket": ("s3", lambda w: w.says(404, code("NoSuchBucket")), 4, ["s3://bucket does not exist"]),
    "no container": ("az", lambda w: w.says(404, code("ContainerNotFound")), 4, ["az://bucket does not exist"]),
    "archived": ("s3", lambda w: w.says(403, code("InvalidObjectState")), 1, ["archived", "restore-object"]),
    "quota": ("s3", lambda w: w.says(403, code("QuotaExceeded")), 1, ["quota"]),
    "507": ("s3", lambda w: w.says(507), 1, ["full"]),
    "405": ("s3", lambda w: w.says(405, code("MethodNotAllowed")), 1, ["405"]),
    "501": ("s3", lambda w: w.says(501, code("NotImplemented")), 1, ["501"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_final_error_raises_at_once_and_names_the_cause(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scheme, start, exit_code, named = CASES[name]
    uri = point(monkeypatch, scheme, start(world))
    found = cli(["prefetch", uri, "--to", str(world.directory / "to")])
    said = capsys.readouterr().err
    assert found == exit_code, said
    assert [word for word in named if word not in " ".join(said.split())] == [], said
    assert "Debug source" not in said
    assert "try again later" not in said.lower()
    assert world.asked <= 3


def test_transient_errors_remain_retryable(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retry, "RETRIES_MAX", 1)
    for endpoint in (
        f"http://127.0.0.1:{free_port()}",
        world.says(503, code("SlowDown")),
        world.says(502, HTML),
        world.greets("http", b""),
        world.greets("https", b""),
    ):
        uri = point(monkeypatch, "s3", endpoint)
        assert cli(["prefetch", uri, "--to", str(world.directory / "to")]) == 7, capsys.readouterr().err
        assert "later" in capsys.readouterr().err
