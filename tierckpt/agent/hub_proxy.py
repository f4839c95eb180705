"""The agent as a read-only Hub: ``HF_ENDPOINT=http://127.0.0.1:PORT`` serves unmodified Hugging Face clients.

Files come through the node cache, and so from other nodes where there are ``peers``; the Hub sends each chunk of a
large file to one node. Of its API, what readers ask of repositories is passed on (``_READS``), without the mention of
xet, which would go round the cache.

Invariants:
    X1  Read only: GET and HEAD. On the loopback address, for requests that name it as their host.
    X2  The token is the agent's own: whoever can connect to the port reads the repositories that it may read, and gets
        nothing else by it: a Hub also answers a GET with tokens that may write, and with whose the token is. A client's
        token is not looked at, passed on, or kept.
    X3  The last piece of a file is sent when all of it has passed the digest that the Hub lists. What cannot be had
        ends the connection early, so that no client takes it for whole.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from ..cache.entry import CacheEntry
from ..client import CLOSE_TIMEOUT_SECONDS, Client
from ..config import Settings
from ..errors import (
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    OperationTimeoutError,
    PermissionDeniedError,
    StoreUnavailableError,
    TierckptError,
)
from ..format.layout import Location, parse_uri
from ..format.manifest import is_safe_path
from ..stores.hub.api import NAME, Answer, Repository, hub_of
from ..telemetry import logger
from ..types import ByteRange, ObjectInfo

log = logger("agent.hub")

HOST: Final = "127.0.0.1"
KNOWN_SECONDS: Final = 10.0
"""What a revision is, and what the API said, is as good as new for so long."""
KNOWN_MAX: Final = 256
IDLE_SECONDS_MAX: Final = 60.0
TURN_SECONDS: Final = 5.0
"""A client that waits for a piece gets a byte so often: Hugging Face's give up after 10 s without one."""
HELD_BYTES: Final = 12
"""What is kept of each piece for that. So many turns a piece may come with the fill, in which nodes share out the
chunks, before it is fetched for itself; the first one has one turn."""
_PASSED_ON = ("content-type", "x-error-code", "x-error-message", "x-repo-commit")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_KINDS = ("datasets", "spaces")
_READS = ("revision", "tree", "refs", "commits", "discussions")
"""What of a repository is asked of the API, besides what it is."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a commit."""

    location: Location
    info: ObjectInfo
    commit: str


class HubProxy:
    """Serves one Hub from ``serve`` until ``close``."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError: ``HF_ENDPOINT`` of this process is no URL."""
        self._client = Client(settings)
        self._hub = hub_of(self._client.mover.drainer.retries)
        self._known: dict[str, tuple[float, Any]] = {}
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    def serve(self, port: int) -> int:
        """Listen on ``port`` (0: any) and return it; threads answer. Raises ConfigError: the port is taken, or
        is that of the Hub which is served."""
        proxy = self
        if self._hub.host in (f"{HOST}:{port}", f"localhost:{port}"):
            raise ConfigError(
                "HF_ENDPOINT of the agent names the agent itself", hint="Start the agent without it, or with the Hub's"
            )

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = IDLE_SECONDS_MAX

            def do_GET(self) -> None:
                try:
                    proxy.answer(self)
                except (
                    ConnectionError,
                    TimeoutError,
                    concurrent.futures.CancelledError,
                ):  # the client, or we, have gone
                    self.close_connection = True

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None: ...

        try:
            self._server = ThreadingHTTPServer((HOST, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"no Hub can be served on port {port}: {error.strerror or error}", hint="Give another --hf-proxy"
            ) from error
        threading.Thread(target=self._server.serve_forever, name="tierckpt-hub", daemon=True).start()
        log.info("HF_ENDPOINT=http://%s:%d serves %s", HOST, self._server.server_port, self._hub.endpoint)
        return int(self._server.server_port)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._client.close()

    # --- requests ------------------------------------------------------------------------------------------------

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request, on a thread of its own."""
        request.has_begun = False  # type: ignore[attr-defined]
        if (request.headers.get("Host") or "").rpartition(":")[0] not in (HOST, "localhost"):
            return _say(request, 403, b"", {})  # a page in a browser that was told another name of this address
        parts = [unquote(part) for part in urlsplit(request.path).path.split("/") if part]
        if not request.path.startswith("/") or not is_safe_path("/".join(parts)):
            return _say(request, 404, b"", {})  # it would lead elsewhere on the Hub, or to another host
        try:
            if parts[0] == "api" and _is_for_readers(parts[1:]):
                return self._pass_on(request, parts[4:5] == ["tree"])
            kind = parts.pop(0) if parts[0] in _KINDS else "models"
            if len(parts) >= 5 and parts[2] == "resolve" and all(map(NAME.fullmatch, parts[:2])):
                return self._send(request, self._file(kind, "/".join(parts[:2]), parts[3], "/".join(parts[4:])))
            return _say(request, 404, b"", {})
        except TierckptError as error:
            log.info("%s: %s", request.path, error.message)
            return _refuse(request, error)

    def _pass_on(self, request: BaseHTTPRequestHandler, is_tree: bool) -> None:
        path = request.path
        found: Answer = self._recent(path, lambda: self._client.run(self._hub.answer(path)))
        headers = {name: value for name, value in found.headers.items() if name in _PASSED_ON}
        for name in ("link", "location"):  # pages of a list, and repositories that were renamed
            if name in found.headers:
                own = f"http://{request.headers['Host']}"
                headers[name] = found.headers[name].replace(self._hub.endpoint, own)
        body = found.body
        if found.status == 200 and is_tree:
            body = json.dumps([{k: v for k, v in item.items() if k != "xetHash"} for item in found.json()]).encode()
        _say(request, found.status, body, headers)

    def _file(self, kind: str, name: str, revision: str, path: str) -> _File:
        repository = Repository(kind, name, revision)
        commit = self._recent(f"{kind}/{name}@{revision}", lambda: self._client.run(self._hub.commit(repository)))
        location = parse_uri(f"hf://{'' if kind == 'models' else f'{kind}/'}{name}@{commit}/{path}")
        store = self._client.mover.store(location.parent)
        return _File(location, self._client.run(store.head(location.name)), commit)

    def _recent(self, key: str, ask: Any) -> Any:
        """What ``ask`` has said within ``KNOWN_SECONDS``, so that the clients of a node ask once."""
        with self._lock:
            at, known = self._known.get(key, (0.0, None))
            if known is not None and time.monotonic() - at < KNOWN_SECONDS:
                return known
        found = ask()
        with self._lock:
            now = time.monotonic()
            old = [name for name, (at, _) in self._known.items() if now - at >= KNOWN_SECONDS]
            for name in old if len(self._known) < KNOWN_MAX else [*self._known]:
                del self._known[name]
            self._known[key] = now, found
        return found

    # --- files ---------------------------------------------------------------------------------------------------

    def _send(self, request: BaseHTTPRequestHandler, file: _File) -> None:
        kind, _, digest = (file.info.etag or "").partition(":")
        size_bytes, status = file.info.size_bytes, 200
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": file.commit, "Accept-Ranges": "bytes"}
        if kind == "sha256":
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(size_bytes)}
        wanted = ByteRange(0, size_bytes)
        if asked := _RANGE.fullmatch(request.headers.get("Range") or ""):
            wanted = ByteRange(int(asked[1]), min(size_bytes, int(asked[2] or size_bytes) + 1))
            if wanted.start >= wanted.stop:
                return _say(request, 416, b"", headers | {"Content-Range": f"bytes */{size_bytes}"})
            headers["Content-Range"], status = f"bytes {wanted.start}-{wanted.stop - 1}/{size_bytes}", 206
        if request.command == "HEAD" or not wanted.size_bytes:
            return _begin(request, status, wanted.size_bytes, headers)
        held = memoryview(b"")
        with self._opened(file) as (entry, filling):
            path = entry.only.path if entry.only is not None else file.location.name
            for number, at in enumerate(_pieces(wanted, entry.chunk_size_bytes)):
                is_last = at.stop == size_bytes
                while not self._has_come(entry, filling, path, at, is_last) and (held or is_last):
                    request.wfile.write(held[:1])
                    held = held[1:]
                piece = memoryview(bytearray(at.size_bytes))
                self._client.run(entry.read_into(path, at, piece))
                if not number:  # what cannot be had at all has been refused by now
                    _begin(request, status, wanted.size_bytes, headers)
                request.wfile.write(held)
                request.wfile.write(piece[:-HELD_BYTES])
                held = piece[-HELD_BYTES:]
            request.wfile.write(held)
        return None

    def _has_come(
        self, entry: CacheEntry, filling: concurrent.futures.Future[None], path: str, at: ByteRange, is_last: bool
    ) -> bool:
        """Wait a turn for a piece; the last one has come when the whole file has passed its digest (X3)."""
        if is_last or filling.done():
            concurrent.futures.wait([filling], TURN_SECONDS)
            if filling.done():
                filling.result()
            return filling.done()
        with contextlib.suppress(OperationTimeoutError):
            self._client.run(entry.wait(path, at, TURN_SECONDS))
            return True
        return False

    @contextlib.contextmanager
    def _opened(self, file: _File) -> Iterator[tuple[CacheEntry, concurrent.futures.Future[None]]]:
        """Within it the file is fetched, ahead of whoever reads it; the future ends when it is whole and checked."""
        mover = self._client.mover
        entry = self._client.run(mover.cached(file.location, kind="object", info=file.info))
        filling = self._client.start(entry.fill())
        try:
            yield entry, filling
        finally:
            filling.cancel()  # nothing, when all of it is here
            concurrent.futures.wait([filling], CLOSE_TIMEOUT_SECONDS)
            self._client.run(entry.close())


def _is_for_readers(parts: list[str]) -> bool:
    """True for lists of repositories, what one is, and ``_READS`` of it, by the parts of a path of the API."""
    is_named = parts[:1] != [] and parts[0] in ("models", *_KINDS) and all(map(NAME.fullmatch, parts[1:3]))
    return is_named and (len(parts) <= 3 or parts[3] in _READS)


def _pieces(wanted: ByteRange, size_bytes: int) -> Iterator[ByteRange]:
    """Cut a range where chunks are cut."""
    at = wanted.start
    while at < wanted.stop:
        stop = min(wanted.stop, (at // size_bytes + 1) * size_bytes)
        yield ByteRange(at, stop)
        at = stop


def _refuse(request: BaseHTTPRequestHandler, error: TierckptError) -> None:
    if request.has_begun:  # type: ignore[attr-defined]
        request.close_connection = True  # the client sees that it is cut short (X3)
    elif isinstance(error, ObjectNotFoundError):
        _say(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
    elif isinstance(error, PermissionDeniedError):
        _say(request, 403, b"", {"X-Error-Code": "GatedRepo"})
    else:
        is_later = isinstance(error, StoreUnavailableError)
        status = 503 if is_later else 502 if isinstance(error, IntegrityError) else 500
        _say(request, status, error.message.encode(), {"Retry-After": "5"} if is_later else {})


def _say(request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    _begin(request, status, len(body), headers)
    if request.command != "HEAD":
        request.wfile.write(body)


def _begin(request: BaseHTTPRequestHandler, status: int, length: int, headers: dict[str, str]) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(length))
    request.end_headers()
    request.has_begun = True  # type: ignore[attr-defined]
