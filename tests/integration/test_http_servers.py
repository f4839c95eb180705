"""HTTP and S3 servers with different behaviour for ranges, versions, sizes and directories."""

from __future__ import annotations

import contextlib
import email.utils
import io
import random
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit
from xml.sax.saxutils import escape

import boto3
import botocore.config
import pytest

import tierckpt
from tests.agents import until
from tests.files import contents
from tests.services import HttpServer, S3Server
from tierckpt.cache.store_chunks import FileStream
from tierckpt.errors import IntegrityError, TierckptError
from tierckpt.loading.cached_view import open_cached

KIB = 1024
CHUNK = 64 * KIB


class Server(HttpServer):
    """A server and its behaviour."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.ranges = "given"  # or "ignored", "chunked" (200, of no length), "refused" (501)
        self.etags = "strong"  # or "weak", "disagreeing", "none"
        self.head = "given"  # or "refused", "without length"
        self.page: Callable[[str, list[str]], str] | None = index_page
        self.changed = 1_700_000_000.0
        self.conditions = "given"  # or "refused" (501), "never met" (412)
        self.listed = ""
        """Of S3: an etag that listings say, and answers do not."""
        self.redirects = False
        self.resets = 0
        """Answers that break off in the middle, of those with a body of more than a chunk."""
        self.sent: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.counting = threading.Lock()
        super().__init__()
        self.uri = f"{self.endpoint}/m"

    def behave(self, behaviour: dict[str, object]) -> None:
        for name, value in behaviour.items():
            setattr(self, name, value)

    def etag(self, name: str) -> str | None:
        known = f'"{hash(self.files[name]) & 0xFFFFFFFF:x}"'
        if self.etags == "disagreeing":
            return f'"{sum(self.asked.values()):x}"'
        return {"strong": known, "weak": f"W/{known}", "none": None}[self.etags]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            self._answer(request)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked[f"{request.command} {path}"] += 1
        if self.redirects and not path.startswith("/moved/"):
            return self._say(request, 302, b"", Location=f"/moved{quote(path)}")
        name = path.removeprefix("/moved").removeprefix("/m/").removeprefix("m/")
        if name in self.files:
            return self._file(request, name)
        if "list-type=2" in request.path:
            return self._say(request, 200, listing(self).encode(), Content_Type="application/xml")
        below = {key.removeprefix(name) for key in self.files if key.startswith(name)}
        if not path.endswith("/") or self.page is None or not below:
            return self._say(request, 404, b"<Error><Code>NoSuchKey</Code></Error>", Content_Type="application/xml")
        shown = sorted({key.partition("/")[0] + "/" * ("/" in key) for key in below})
        return self._say(request, 200, self.page(path, shown).encode(), Content_Type="text/html")

    def _file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        data, wanted, is_head = self.files[name], request.headers.get("Range"), request.command == "HEAD"
        etag = self.etag(name)
        facts = {"Last_Modified": email.utils.formatdate(self.changed, usegmt=True), **({"ETag": etag} if etag else {})}
        if is_head and self.head == "refused":
            return self._say(request, 405, b"")
        if self.head == "without length" and (is_head or self.ranges == "ignored"):
            return self._say(request, 200, data, is_chunked=True, **facts)
        condition = request.headers.get("If-Match")
        if condition is not None and self.conditions != "given":
            return self._say(request, 501 if self.conditions == "refused" else 412, b"")
        if condition not in (None, etag):
            return self._say(request, 412, b"")
        if wanted is None or self.ranges in ("ignored", "chunked"):
            is_chunked = self.ranges == "chunked" and not is_head
            return self._say(request, 200, data, is_chunked=is_chunked, name=name, **facts)
        if self.ranges == "refused":
            return self._say(request, 501, b"no ranges here")
        start, stop = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
        if start >= len(data):
            return self._say(request, 416, b"", Content_Range=f"bytes */{len(data)}")
        part = data[start : stop + 1]
        facts["Content_Range"] = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
        return self._say(request, 206, part, name=name, **facts)

    def _say(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        is_chunked: bool = False,
        name: str = "",
        **headers: str,
    ) -> None:
        request.send_response(status)
        headers |= {"Transfer_Encoding": "chunked"} if is_chunked else {"Content_Length": str(len(body))}
        for header, value in headers.items():
            request.send_header(header.replace("_", "-"), value)
        request.end_headers()
        if request.command == "HEAD":
            return
        if self.resets and len(body) > CHUNK:
            self.resets -= 1
            request.wfile.write(body[: len(body) // 2] if not is_chunked else b"10\r\nhalf")
            request.connection.shutdown(socket.SHUT_RDWR)
            request.close_connection = True
            return
        if is_chunked:
            for at in range(0, len(body), 10_000):
                piece = body[at : at + 10_000]
                request.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            request.wfile.write(b"0\r\n\r\n")
        else:
            request.wfile.write(body)
        if name:
            with self.counting:
                self.sent[name] += len(body)


def listing(told: Server) -> str:
    """Return the listing of a bucket."""
    objects = "".join(
        f"<Contents><Key>m/{escape(name)}</Key><LastModified>2023-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{escape(told.listed or str(told.etag(name)))}</ETag><Size>{len(data)}</Size></Contents>"
        for name, data in told.files.items()
    )
    return f'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>{objects}</ListBucketResult>'


def index_page(path: str, names: list[str]) -> str:
    """Return a page as Apache's, with links for sorting and to the parent directory."""
    links = "".join(f'<tr><td><a href="{quote(name)}">{name}</a></td><td>12K</td></tr>' for name in names)
    return f'<html><h1>Index of {path}</h1><a href="?C=N;O=D">Name</a> <a href="/m/../">Parent</a>{links}</html>'


@pytest.fixture
def served() -> Iterator[Server]:
    files = {
        "config.json": b"{}",
        "empty.txt": b"",
        "weights.bin": random.Random(1).randbytes(10 * CHUNK + 17),
        "more/part 1%.bin": random.Random(2).randbytes(3 * CHUNK),
    }
    server = Server(files)
    yield server
    server.close()


def fetch(told: Server, to: Path, **options: object) -> dict[str, bytes]:
    tierckpt.prefetch(told.uri, to=to, chunk_size_bytes=CHUNK, store_timeout_seconds=10, **options)
    return contents(to)


def by_curl(told: Server, to: Path) -> dict[str, bytes]:
    """Fetch with ``curl``, which retries broken connections."""
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    command = shlex.split("curl --fail --silent --location --retry 9 --retry-all-errors --retry-delay 0 --create-dirs")
    for name in told.files:
        url = f"{told.uri}/{quote(name)}"
        subprocess.run([*command, "--output", str(to / name), url], check=True, timeout=60)
    return contents(to)


def by_boto3(told: Server) -> dict[str, bytes]:
    client = boto3.client("s3", config=botocore.config.Config(retries={"max_attempts": 9}))
    keys = [one["Key"] for one in client.list_objects_v2(Bucket="m", Prefix="m/")["Contents"]]
    found = {}
    for key in keys:
        into = io.BytesIO()
        client.download_fileobj("m", key, into)
        found[key.removeprefix("m/")] = into.getvalue()
    return found


BEHAVIOURS = [
    {},
    {"ranges": "ignored"},
    {"ranges": "chunked"},
    {"ranges": "ignored", "etags": "weak"},
    {"ranges": "ignored", "head": "refused"},
    {"etags": "weak"},
    {"etags": "disagreeing"},
    {"etags": "disagreeing", "ranges": "ignored"},
    {"etags": "none"},
    {"head": "refused"},
    {"head": "without length"},
    {"redirects": True},
    {"redirects": True, "ranges": "ignored"},
    {"resets": 3},
    {"resets": 3, "ranges": "ignored"},
]


def ids(behaviour: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in behaviour.items())


@pytest.mark.parametrize(
    "behaviour", [pytest.param(one, marks=pytest.mark.slow) if "resets" in one else one for one in BEHAVIOURS], ids=ids
)
def test_each_file_is_sent_once_by_a_server_that_curl_accepts(
    behaviour: dict[str, object], served: Server, tmp_path: Path
) -> None:
    served.behave(behaviour)
    assert fetch(served, tmp_path / "to") == served.files
    until(lambda: served.sent["weights.bin"] >= len(served.files["weights.bin"]), "the count, which follows the write")
    for name, data in served.files.items():
        assert served.sent[name] <= len(data) * (1 if served.head == "given" else 2) + CHUNK
    served.behave(behaviour)
    assert by_curl(served, tmp_path / "curl") == served.files


def test_server_without_ranges_gets_one_request_per_file(served: Server, tmp_path: Path) -> None:
    """One request detects that the server ignores ranges; later files are requested whole."""
    served.ranges = "ignored"
    fetch(served, tmp_path / "to")
    requests_sent = sum(
        count for what, count in served.asked.items() if what.startswith("GET") and what.endswith(".bin")
    )
    assert requests_sent <= 2 + 2


def test_two_prefetches_of_one_target_stream_a_file_once(served: Server, tmp_path: Path) -> None:
    served.ranges = "ignored"
    served.files["weights.bin"] = random.Random(3).randbytes(600 * CHUNK)
    found: list[dict[str, bytes]] = []
    threads = [threading.Thread(target=lambda: found.append(fetch(served, tmp_path / "to"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [served.files] * 2
    assert served.sent["weights.bin"] <= 1.1 * len(served.files["weights.bin"])


def test_chunk_is_read_past_a_full_cache(served: Server, tmp_path: Path) -> None:
    served.ranges = "ignored"
    served.files = {"weights.bin": served.files["weights.bin"]}
    with open_cached(served.uri, local_root=tmp_path / "root", cache_bytes_max=1, chunk_size_bytes=CHUNK) as view:
        found = bytes(view.read("weights.bin", 5 * CHUNK + 7, 6 * CHUNK + 9))
        assert found == served.files["weights.bin"][5 * CHUNK + 7 : 6 * CHUNK + 9]
        assert not view.landed("weights.bin", 5 * CHUNK + 7, 6 * CHUNK + 9)


def change_weights(monkeypatch: pytest.MonkeyPatch, server: Server, path: str, requests: int) -> None:
    """After so many requests for ``path`` each file is another one."""
    real = server.etag

    def etag(name: str) -> str | None:
        if server.asked[f"GET {path}"] <= requests:
            return real(name)
        server.changed += 1000
        server.listed = '"another"'
        return '"another"'

    monkeypatch.setattr(server, "etag", etag)


@pytest.mark.parametrize("ranges", ["given", "ignored"])
def test_file_changed_during_a_fetch_is_an_error(
    ranges: str, served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.ranges, begun = ranges, int(ranges == "given")
    change_weights(monkeypatch, served, "/m/weights.bin", begun)
    with pytest.raises(IntegrityError, match="changed in the store"):
        fetch(served, tmp_path / "to")


def test_file_modified_in_the_same_second_raises(served: Server, tmp_path: Path) -> None:
    """``Last-Modified`` has a resolution of one second, so a file modified in this second may change again."""
    served.etags, served.changed = "disagreeing", time.time()
    with pytest.raises(IntegrityError, match="changed in the store"):
        fetch(served, tmp_path / "to")


@pytest.mark.parametrize("what", ["no page", "a link to nothing", "no sizes"])
def test_unlistable_directory_error_gives_the_reason(what: str, served: Server, tmp_path: Path) -> None:
    if what == "no page":
        served.page, match = None, "index page"
    elif what == "a link to nothing":
        served.page, match = (lambda path, names: index_page(path, [*names, "gone.bin"])), "gone.bin"
    else:
        served.ranges, served.head, match = "ignored", "without length", "how long"
    with pytest.raises(TierckptError, match=match):
        fetch(served, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_broken_stream_keeps_complete_chunks(served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    landed: list[int] = []
    real = FileStream.take

    async def take(whole: FileStream, chunk: int, data: memoryview, digest: str) -> None:
        landed.append(chunk)
        await real(whole, chunk, data, digest)

    monkeypatch.setattr(FileStream, "take", take)
    served.ranges, served.resets = "ignored", 2
    served.files = {"weights.bin": served.files["weights.bin"]}
    assert fetch(served, tmp_path / "to") == served.files
    assert sorted(landed) == list(range(11)), "each chunk must be written once"


@pytest.fixture
def bucket(served: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Serve the same files as objects of ``s3://m/m``."""
    for name, value in S3Server(served.endpoint, "testing", "testing").environment().items():
        monkeypatch.setenv(name, value)
    served.page, served.uri = None, "s3://m/m"
    return served


BUCKETS = [
    {},
    {"conditions": "refused"},
    {"conditions": "never met"},
    {"listed": '"another"'},
    {"listed": '"another"', "conditions": "never met"},
]


@pytest.mark.parametrize("behaviour", BUCKETS, ids=ids)
def test_each_object_of_a_bucket_is_fetched_as_by_boto3(
    behaviour: dict[str, object], bucket: Server, tmp_path: Path
) -> None:
    bucket.behave(behaviour)
    assert by_boto3(bucket) == bucket.files
    bucket.behave(behaviour)
    assert fetch(bucket, tmp_path / "to") == bucket.files


@pytest.mark.parametrize("requests", [0, 2], ids=["at once", "while it is fetched"])
@pytest.mark.parametrize("conditions", ["given", "refused", "never met"])
def test_an_object_that_changes_is_an_error(
    conditions: str, requests: int, bucket: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.conditions = conditions
    change_weights(monkeypatch, bucket, "/m/m/weights.bin", requests)
    with pytest.raises(IntegrityError, match="changed in the store"):
        fetch(bucket, tmp_path / "to")
