"""What goes wrong between a client and a bucket, each with the error that says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import pytest

from tests.contract.places import S3Place
from tests.contract.store_contract import MiB, Pieces, keys_of
from tests.services import AzureServer, HttpServer, S3Server, free_port
from tierckpt.config import Settings
from tierckpt.errors import (
    BucketNotFoundError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreError,
    StoreUnavailableError,
)
from tierckpt.format.layout import parse_uri
from tierckpt.stores import access, aws, open_store, retry
from tierckpt.stores.base import Store
from tierckpt.types import ByteRange

SOON_SECONDS = 60.0
"""Neither the retries of a request nor a metadata service that is not there are waited for."""


def open_uri(uri: str, **settings: Any) -> Store:
    return open_store(parse_uri(uri), Settings.load(**settings))


VERBS: dict[str, Any] = {
    "head": lambda store: store.head("key"),
    "get": lambda store: store.get("key"),
    "get_range": lambda store: store.get_range("key", ByteRange(0, 1)),
    "put": lambda store: store.put("key", b"1"),
    "put_if_absent": lambda store: store.put("key", b"1", if_absent=True),
    "put_stream_small": lambda store: store.put_stream("key", Pieces([b"1"]).iterate(), 1),
    "put_stream_large": lambda store: store.put_stream("key", Pieces([b"1" * MiB] * 20).iterate(), 20 * MiB),
    "list": keys_of,
    "list_dirs": lambda store: store.list_dirs(),
    "delete": lambda store: store.delete("key"),
    "delete_dir": lambda store: store.delete_dir("dir"),
}
every_verb = pytest.mark.parametrize("verb", VERBS)


@pytest.fixture(params=["moto", "rgw", "azurite"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Server | AzureServer:
    server: S3Server | AzureServer = request.getfixturevalue(request.param)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.mark.server
@every_verb
async def test_missing_bucket(server: S3Server | AzureServer, verb: str) -> None:
    scheme = "az" if isinstance(server, AzureServer) else "s3"
    store = open_uri(f"{scheme}://no-such-bucket-here/run")
    with pytest.raises(BucketNotFoundError) as caught:
        await VERBS[verb](store)
    assert f"{scheme}://no-such-bucket-here does not exist" in str(caught.value)
    assert server.endpoint in str(caught.value)


@pytest.mark.server
async def test_a_missing_key_in_an_empty_bucket_is_no_missing_bucket(s3_uri: str) -> None:
    with pytest.raises(ObjectNotFoundError) as caught:
        await open_uri(s3_uri).head("key")
    assert not isinstance(caught.value, BucketNotFoundError)


@pytest.mark.server
@pytest.mark.parametrize(
    ("place", "variable", "value"),
    [
        ("rgw", "AWS_SECRET_ACCESS_KEY", "wrong"),  # moto accepts any credentials
        ("rgw", "AWS_ACCESS_KEY_ID", "nobody"),
        ("az", "AZURE_STORAGE_ACCOUNT_KEY", "A" * 86 + "=="),
    ],
)
@every_verb
async def test_wrong_credentials(
    place: str, variable: str, value: str, verb: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, server = (request.getfixturevalue(name) for name in (f"{place}_uri", {"az": "azurite"}.get(place, place)))
    monkeypatch.setenv(variable, value)
    with pytest.raises(PermissionDeniedError) as caught:
        await VERBS[verb](open_uri(uri))
    assert server.endpoint in str(caught.value)
    assert uri.partition("://")[2].partition("/")[0] in str(caught.value)


class Machine(HttpServer):
    """The metadata service of a machine of AWS: it gives out tokens, and has the role ``role`` or none."""

    verbs = ("GET", "PUT")

    def __init__(self, role: bytes) -> None:
        self.role = role
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.command == "PUT":
            return self.say(request, 200, b"token")
        allowed = self.role and request.headers["X-aws-ec2-metadata-token"] == "token"
        return self.say(request, 200 if allowed else 404, self.role)


@pytest.mark.parametrize("role", [b"", b"trainer"])
async def test_a_machine_of_aws_with_a_role_and_without(role: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the client would take the service's 404 for the bucket's: "s3://bucket does not exist"."""
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with contextlib.closing(Machine(role)) as server:
        for name in ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_METADATA_ENDPOINT"):  # boto3's, and the client's
            monkeypatch.setenv(name, f"{server.endpoint}/")
        address = urlsplit(server.endpoint)
        monkeypatch.setattr(access, "METADATA_ADDRESSES", {"s3": (address.hostname, address.port)})
        monkeypatch.setattr(access, "METADATA_TIMEOUT_SECONDS", 60.0)
        if role:
            assert aws.s3_access("bucket").keys == ""
        else:
            with pytest.raises(PermissionDeniedError, match="no credentials found for s3://bucket"):
                await open_uri("s3://bucket/run").head("key")


@pytest.mark.parametrize(
    ("uri", "environment", "variable"),
    [
        ("s3://bucket/run", {}, "AWS_ACCESS_KEY_ID"),
        ("s3://bucket/run", {"AWS_ACCESS_KEY_ID": "half"}, "AWS_SECRET_ACCESS_KEY"),
        ("az://container/run", {}, "AZURE_STORAGE_ACCOUNT_NAME"),
        ("az://container/run", {"AZURE_STORAGE_ACCOUNT_NAME": "someone"}, "AZURE_STORAGE_ACCOUNT_KEY"),
        ("gs://bucket/run", {}, "GOOGLE_APPLICATION_CREDENTIALS"),
    ],
)
@pytest.mark.parametrize("metadata_service", ["disabled", "not there"])
async def test_missing_credentials(
    uri: str, environment: dict[str, str], variable: str, metadata_service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    if metadata_service == "not there":  # as on a machine of no cloud; never ask the one this test may run on
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        nobody = ("127.0.0.1", free_port())
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{nobody[0]}:{nobody[1]}/")
        monkeypatch.setattr(access, "METADATA_ADDRESSES", dict.fromkeys(("s3", "az", "gs"), nobody))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    with pytest.raises(PermissionDeniedError) as caught:
        await open_uri(uri).head("key")
    assert time.monotonic() - started < SOON_SECONDS
    assert variable in caught.value.hint
    assert uri.rpartition("/")[0] in str(caught.value)


async def test_a_profile_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(PermissionDeniedError, match="nobody"):
        await open_uri("s3://bucket/run").head("key")


async def test_an_account_key_that_is_no_base64_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "someone")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not base64!!")
    with pytest.raises(ConfigError) as caught:
        await open_uri("az://container/run").head("key")
    assert "not base64!!" not in str(caught.value)


@every_verb
async def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    _point_s3_at(f"http://127.0.0.1:{free_port()}", monkeypatch)
    monkeypatch.setattr(retry, "RETRIES_MAX", 1)
    with pytest.raises(StoreUnavailableError) as caught:
        await VERBS[verb](open_uri("s3://bucket/run"))
    assert caught.value.retryable


def _point_s3_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3Server(endpoint, "a", "b").environment().items():
        monkeypatch.setenv(name, value)


class StubServer(HttpServer):
    """Gives scripted answers: (status, headers, body), the last one for ever."""

    verbs = ("GET", "PUT", "HEAD", "POST", "DELETE")

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = [*answers]
        self.requests: list[str] = []
        self.stall_puts = threading.Event()
        self.stall_puts.set()
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests.append(request.command)
        if request.command == "PUT":
            self.stall_puts.wait(60)
        status, headers, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client was aborted
            self.say(request, status, body, headers)
        if int(headers.get("Content-Length", len(body))) != len(body):
            request.close_connection = True


Answer: TypeAlias = tuple[int, dict[str, str], bytes]
ETAG = {"ETag": '"e"', "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}
BEGUN = (200, {}, b"<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>")
BUSY = (503, {}, b"<Error><Code>SlowDown</Code></Error>")
DENIED = (403, {}, b"<Error><Code>AccessDenied</Code></Error>")
INVALID = (400, {}, b"<Error><Code>InvalidRequest</Code></Error>")


@pytest.fixture
def s3_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StubServer]]:
    """Make a stub that is the S3 server of the environment."""
    with contextlib.ExitStack() as stack:

        def make(*answers: Answer) -> StubServer:
            stub = stack.enter_context(contextlib.closing(StubServer(answers)))
            _point_s3_at(stub.endpoint, monkeypatch)
            return stub

        yield make


async def test_a_busy_server_is_tried_again(s3_answers: Callable[..., StubServer]) -> None:
    stub = s3_answers(BUSY, BUSY, (200, ETAG, b""))
    await open_uri("s3://bucket/run").put("key", b"data")
    assert stub.requests == ["PUT", "PUT", "PUT"]


@pytest.mark.parametrize(
    ("answer", "kind", "said", "tries"),
    [
        (BUSY, StoreUnavailableError, "HTTP 503", 3),
        (DENIED, PermissionDeniedError, "refused", 1),
        (INVALID, StoreError, "400", 1),
    ],
)
async def test_retries_end_and_a_refusal_has_none(
    answer: Answer,
    kind: type[StoreError],
    said: str,
    tries: int,
    s3_answers: Callable[..., StubServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "RETRIES_MAX", 2)
    stub = s3_answers(answer)
    with pytest.raises(kind, match=said) as caught:
        await open_uri("s3://bucket/run").put("key", b"data")
    assert caught.value.retryable == (tries > 1)
    assert stub.requests == ["PUT"] * tries


async def test_a_range_that_comes_back_short(s3_answers: Callable[..., StubServer]) -> None:
    s3_answers((206, {**ETAG, "Content-Range": "bytes 0-4/5"}, b"01234"))
    with pytest.raises(IntegrityError, match="bytes 0-10 of key"):
        await open_uri("s3://bucket/run").get_range("key", ByteRange(0, 10))


async def test_a_failed_part_is_aborted_and_the_source_closed(s3_answers: Callable[..., StubServer]) -> None:
    stub = s3_answers(BEGUN, DENIED)
    source = Pieces([b"x" * MiB] * 40)
    with pytest.raises(PermissionDeniedError):
        await open_uri("s3://bucket/run").put_stream("key", source.iterate(), 40 * MiB)
    assert stub.requests[0] == "POST"
    assert stub.requests.count("POST") == 1, "the multipart transfer was never completed"
    assert stub.requests.count("DELETE") == 1, "but aborted"
    assert source.closed


@pytest.mark.slow
async def test_the_source_is_asked_only_for_what_fits_in_memory(s3_answers: Callable[..., StubServer]) -> None:
    """A stalled bucket must stall the source: unread data stays within a few parts of 8 MiB."""
    asked_mib = 0

    async def count() -> AsyncIterator[bytes]:
        nonlocal asked_mib
        for _ in range(128):
            asked_mib += 1
            yield b"x" * MiB

    stub = s3_answers(BEGUN, (200, ETAG, b""))
    stub.stall_puts.clear()
    store = open_uri("s3://bucket/run", concurrency=2)
    transfer = asyncio.create_task(store.put_stream("key", count(), 128 * MiB))
    while len(stub.requests) < 1 + 2:  # it is begun, two parts are under way  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    try:
        assert 8 <= asked_mib <= 8 * (2 + 2)
    finally:
        transfer.cancel()
        stub.stall_puts.set()
        with pytest.raises(asyncio.CancelledError):
            await transfer


@pytest.mark.server
async def test_directory_markers_are_not_objects(moto: S3Server, s3_uri: str) -> None:
    place = S3Place(moto, s3_uri)
    place.raw_put("", b"")
    place.raw_put("dir/", b"")
    place.raw_put("dir/file", b"1")
    place.raw_put("empty", b"")
    store = place.open()
    assert await keys_of(store) == ["dir/file", "empty"]
    assert await store.list_dirs() == ["dir"]
    assert await keys_of(store, "dir") == ["dir/file"]


@pytest.mark.server
async def test_a_bucket_without_a_prefix(moto: S3Server, s3_uri: str) -> None:
    store = open_uri(s3_uri.rpartition("/")[0])
    await store.put("dir/key", b"1")
    assert await keys_of(store) == ["dir/key"]
    assert await store.list_dirs() == ["dir"]


@pytest.mark.server
async def test_azure_by_connection_string(azurite: AzureServer, az_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in azurite.environment():
        monkeypatch.delenv(name)
    account = f"DefaultEndpointsProtocol=http;AccountName={azurite.account};AccountKey={azurite.key}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{account};BlobEndpoint={azurite.endpoint};")
    store = open_uri(az_uri)
    await store.put("key", b"1")
    assert await store.get("key") == b"1"


@pytest.mark.server
@pytest.mark.parametrize("way", ["variable", "connection string"])
async def test_azure_by_shared_access_signature(
    azurite: AzureServer, az_uri: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import UTC, datetime, timedelta

    from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

    token = generate_account_sas(
        azurite.account,
        azurite.key,
        ResourceTypes(container=True, object=True),
        AccountSasPermissions(read=True, list=True),
        datetime.now(UTC) + timedelta(hours=1),
    )
    await open_uri(az_uri).put("key", b"1")
    if way == "variable":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "")
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"?{token}\n")
    else:  # which counts before the key of another account that is in the environment
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "b3RoZXI=")
        string = f"BlobEndpoint={azurite.endpoint};SharedAccessSignature={token}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", string)
    store = open_uri(az_uri)
    assert await store.get("key") == b"1"
    assert await keys_of(store) == ["key"]
    with pytest.raises(PermissionDeniedError) as caught:
        await store.put("other", b"2")
    assert "sig=" not in f"{caught.value} {caught.value.__cause__}", "the signature must not be logged"
