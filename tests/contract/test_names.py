"""Each name of a place or a file reaches its store character for character: other tools find it, our lists too."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

import fsspec
import pytest

from tests.services import AzureServer, HttpServer, S3Server
from tierckpt.config import Settings
from tierckpt.errors import ConfigError, StoreError
from tierckpt.format.layout import parse_uri
from tierckpt.stores import open_store
from tierckpt.stores.base import Conditional, ReadsInto
from tierckpt.stores.fsspec_store import UniversalStore
from tierckpt.stores.schemes import check_object_name, check_target
from tierckpt.types import ByteRange

NAMES = [
    "".join(f"{character}x" for character in " !\"#$%&'()*+,-."),
    "0:;<=>?@",
    "[\\]^_`",
    "{|}~",
    *(" a", "a ", "~", "-a", ".a", "a.", "..a", "...", "#", "?", "%", "a#1", "a?x=1", "a%20b", "a%2Fb", "%2e%2e"),
    *("a*", "a[1]", "a+b", "é", "e\u0301", "日本", "🙂", "a\x85\u2028b", "a\u200bb"),
]
DATA = bytes(range(256)) * 2048


async def check(uri: str, raw_get: Callable[[str], bytes]) -> None:
    """Store an object at ``uri`` under a directory and a file of the same name; ``raw_get`` reads its key."""
    store, name = open_store(parse_uri(uri), Settings.load()), uri.rpartition("/")[2]
    key = f"{name}/{name}"
    await store.put(key, DATA)
    assert raw_get(f"{parse_uri(uri).path}/{key}") == DATA
    assert await store.get(key) == DATA
    assert [info.key async for info in store.list(name)] == [key]
    assert await store.list_dirs() == [name]
    level = await store.list_level(name)
    assert level is not None and [info.key for info in level[0]] == [key]
    if isinstance(store, ReadsInto):
        into = bytearray(len(DATA))
        await store.get_range_into(key, ByteRange(0, len(DATA)), memoryview(into))
        assert into == DATA
    if isinstance(store, Conditional):
        await store.replace(key, b"newer", etag=str((await store.head(key)).etag))
        await store.remove(key, etag=str((await store.head(key)).etag))
        assert [info async for info in store.list()] == []
    await store.put(key, b"once more")
    await store.delete_dir("")
    assert [info async for info in store.list()] == []
    await store.close()


@pytest.mark.parametrize("name", [*NAMES, "a\nb", "a\x7f"])
async def test_of_a_directory(name: str, tmp_path: Path) -> None:
    def raw_get(path: str) -> bytes:
        data: bytes = fsspec.filesystem("file").cat_file(path)
        assert data == Path(path).read_bytes()
        return data

    await check(f"{tmp_path}/{name}", raw_get)
    if name.isprintable():
        await check(f"file://{tmp_path}/{name}", raw_get)


@pytest.mark.parametrize("name", NAMES)
async def test_of_fsspec(name: str) -> None:
    await check(f"memory://names/{name}", lambda path: fsspec.filesystem("memory").cat_file(f"/{path}"))


async def test_a_directory_with_wildcards_in_its_name_goes_alone(tmp_path: Path) -> None:
    fs = fsspec.filesystem("file")
    for root, store in (
        ("memory://wild", open_store(parse_uri("memory://wild"), Settings.load())),
        (f"file://{tmp_path}", UniversalStore(fs, str(tmp_path), str(tmp_path))),
    ):
        for key in ("a*/x/y", "a*/z", "ab/x/y"):
            await store.put(key, DATA)
        await store.delete_dir("a*")
        assert [info.key async for info in store.list()] == ["ab/x/y"]
        assert await store.list_dirs() == ["ab"], root


@pytest.mark.parametrize("uri", ["ftp://host/run?x=1", "webhdfs://host/run?x=1", "memory://a::b://c"])
def test_a_name_that_fsspec_takes_apart_is_refused_before_a_save(uri: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        check_target(parse_uri(uri), tmp_path)


@pytest.mark.server
@pytest.mark.parametrize("name", NAMES)
async def test_of_s3(name: str, s3_uri: str, moto: S3Server) -> None:
    bucket, client = parse_uri(s3_uri).authority, moto.client()
    keys = {"key": moto.access_key, "secret": moto.secret_key, "endpoint_url": moto.endpoint}
    s3fs, root = fsspec.url_to_fs(f"{s3_uri}/{name}", skip_instance_cache=True, **keys)

    def raw_get(key: str) -> bytes:
        data: bytes = s3fs.cat_file(f"{root}/{name}/{name}")
        assert data == client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    await check(f"{s3_uri}/{name}", raw_get)


@pytest.mark.server
@pytest.mark.parametrize("name", [name for name in NAMES if "\\" not in name])
async def test_of_azure(name: str, az_uri: str, azurite: AzureServer) -> None:
    with azurite.client(parse_uri(az_uri).authority) as client:
        await check(f"{az_uri}/{name}", lambda key: client.download_blob(key).readall())


class Recorder(HttpServer):
    """Answers with the requested name."""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        headers = {"ETag": '"1"', "Last-Modified": "Thu, 26 Nov 2026 00:00:00 GMT"}
        self.say(request, 200, unquote(urlsplit(request.path).path).encode(), headers)


async def test_of_google(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Recorder()
    monkeypatch.setenv("GOOGLE_BASE_URL", server.endpoint)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    for name in NAMES:
        store = open_store(parse_uri(f"gs://bucket/{name}"), Settings.load())
        assert (await store.get(name)).decode() == f"/bucket/{name}/{name}"
        await store.close()
    server.close()


@pytest.mark.server
@pytest.mark.parametrize(
    ("key", "unlisted"), [*((key, ConfigError) for key in ("/x", "../x", "step-1//x")), ("a\x01b", StoreError)]
)
async def test_a_key_that_no_uri_names_is_read_once_it_is_listed_and_deleted(
    key: str, unlisted: type[Exception], s3_uri: str, moto: S3Server
) -> None:
    location, client = parse_uri(s3_uri), moto.client()
    for name, data in (("step-1/x", b"1"), (key, b"of another tool")):
        client.put_object(Bucket=location.authority, Key=f"run/{name}", Body=data)
    store = open_store(location, Settings.load())
    with pytest.raises(unlisted):
        await store.get_range(key, ByteRange(0, 2))
    assert await store.list_dirs() == ["step-1"]
    found = {info.key: info async for info in store.list()}
    assert found.keys() == {"step-1/x", key}
    assert bytes(await store.get_range(key, ByteRange(0, 2), if_match=found[key].etag)) == b"of"
    assert await store.get("step-1/x") == b"1"
    if unlisted is StoreError:  # moto removes no control character beside other keys
        client.delete_object(Bucket=location.authority, Key=f"run/{key}")
    await store.delete_dir("")
    assert [info async for info in store.list()] == []
    await store.close()


@pytest.mark.parametrize("scheme", ["s3", "az", "gs"])
def test_a_file_whose_name_no_list_can_hold_is_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match=r"control character '\\n'"):
        check_object_name(parse_uri(f"{scheme}://bucket/run").child("a\nb"))
    check_object_name(parse_uri("/d").child("a\nb"))
