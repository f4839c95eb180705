"""The agent as a read-only Hub: ``HF_ENDPOINT=http://127.0.0.1:PORT`` serves unmodified Hugging Face clients.

Files come through the node cache; where there are ``peers``, the Hub sends each chunk to one node, its owner, and the
others have it from there (peer/fetch/hub_owners.py). Of its API, what readers ask of repositories is passed on
(``_READS``), without the mention of xet, which would go round the cache.

Invariants:
    X1  Read only: GET, HEAD, and the POST that asks what some paths are. On the loopback address, for requests that
        name it as their host.
    X2  The token is the agent's own: whoever can connect to the port reads the repositories that it may read, and gets
        nothing else by it: a Hub also answers a GET with tokens that may write, and with whose the token is. A client's
        token is not looked at, passed on, or kept.
        Members of the cluster read files of commits by each other's tokens.
    X3  The last piece of a file is sent when all of it has passed the digest that the Hub lists. What cannot be had
        ends the connection early, so that no client takes it for whole. A file that came damaged is read from the Hub
        by this node alone the next time: an owner that has a part of it does not know.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from ..cache.entry import STALL_SECONDS_MIN, CacheEntry
from ..cache.node_cache import NodeCache
from ..client import Client
from ..config import Settings
from ..errors import (
    BucketNotFoundError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreUnavailableError,
    TierckptError,
)
from ..format.layout import Location, parse_uri
from ..format.manifest import digest_of, is_safe_path
from ..peer.fetch.hub_owners import HubOwners
from ..peer.peer_catalog import Live
from ..stores.hub.api import NAME, Answer, Repository, hub_of, repository_of
from ..telemetry import ignore_progress, logger
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
"""What is kept of each piece for that."""
PIECES_AHEAD: Final = 8
"""Pieces under way for a client; the settings bound those of all of them."""
_PASSED_ON = ("content-type", "x-error-code", "x-error-message", "x-repo-commit")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
_KINDS = ("datasets", "spaces")
_READS = ("revision", "tree", "refs", "commits", "discussions", "paths-info", "auth-check")
"""What of a repository is asked of the API, besides what it is."""
_LISTS = ("tree", "paths-info")
"""Of these, what lists files."""
FORM_BYTES_MAX: Final = 4 << 20
"""Of a POST that names paths: a client asks for a few hundred at a time."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a commit."""

    location: Location
    info: ObjectInfo
    commit: str


class HubProxy:
    """Serves one Hub from ``serve`` until ``close``."""

    def __init__(self, settings: Settings, live: Callable[[], Awaitable[Live]] | None = None) -> None:
        """``live``: who the nodes are; None: this one is alone.

        Raises ConfigError: ``HF_ENDPOINT`` of this process is no URL; or the secret or the certificates cannot be used.
        """
        self._client = Client(settings)
        mover = self._client.mover
        self._hub = hub_of(mover.drainer.retries)
        self._owners = (
            [HubOwners(settings, live, is_owner=is_owner) for is_owner in (False, True)] if live else [None] * 2
        )
        self._alone, self._shared, self._owned = (
            NodeCache(settings, mover.store, ignore_progress, owners) for owners in (None, *self._owners)
        )
        self._damaged: set[str | None] = set()
        """Etags of files that came with other bytes than the Hub lists."""
        self._bringing: dict[tuple[str, ByteRange, bool], concurrent.futures.Future[tuple[Path, str]]] = {}
        """What is on its way for other nodes."""
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

            do_HEAD = do_POST = do_GET

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
        for owners in self._owners:
            if owners is not None:
                self._client.run(owners.close())
        self._client.close()

    # --- requests ------------------------------------------------------------------------------------------------

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request, on a thread of its own."""
        request.has_begun = False  # type: ignore[attr-defined]
        form = _form_of(request) if request.command == "POST" else None
        if (request.headers.get("Host") or "").rpartition(":")[0] not in (HOST, "localhost"):
            return _say(request, 403, b"", {})  # a page in a browser that was told another name of this address
        parts = [unquote(part) for part in urlsplit(request.path).path.split("/") if part]
        if not request.path.startswith("/") or not is_safe_path("/".join(parts)):
            return _say(request, 404, b"", {})  # it would lead elsewhere on the Hub, or to another host
        try:
            is_form = parts[4:5] == ["paths-info"]
            if (request.command == "POST") != is_form or (is_form and form is None):
                return _say(request, 404, b"", {})
            if parts[0] == "api" and _is_for_readers(parts[1:]):
                return self._pass_on(request, form, is_list=parts[4:5] != [] and parts[4] in _LISTS)
            kind = parts.pop(0) if parts[0] in _KINDS else "models"
            if len(parts) >= 5 and parts[2] == "resolve" and all(map(NAME.fullmatch, parts[:2])):
                return self._send(request, self._file(kind, "/".join(parts[:2]), parts[3], "/".join(parts[4:])))
            return _say(request, 404, b"", {})
        except TierckptError as error:
            log.info("%s: %s", request.path, error.message)
            return _refuse(request, error)

    def _pass_on(self, request: BaseHTTPRequestHandler, form: bytes | None, is_list: bool) -> None:
        path = request.path
        key = path if form is None else f"{path} {digest_of(form)}"
        found: Answer = self._recent(key, lambda: self._client.run(self._hub.answer(path, form)))
        headers = {name: value for name, value in found.headers.items() if name in _PASSED_ON}
        for name in ("link", "location"):  # pages of a list, and repositories that were renamed
            if name in found.headers:
                own = f"http://{request.headers['Host']}"
                headers[name] = found.headers[name].replace(self._hub.endpoint, own)
        body = found.body
        if found.status == 200 and is_list:
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
        with self._opened(file) as (entry, path, coming):
            pieces = list(_pieces(wanted, entry.chunk_size_bytes))
            for number, at in enumerate(pieces):
                for more in pieces[number + len(coming) : number + PIECES_AHEAD]:
                    is_last = more.stop == size_bytes  # it has come when the whole file has passed its digest (X3)
                    coming.append(self._client.start(entry.fill([path]) if is_last else entry.ensure(path, more)))
                while not concurrent.futures.wait(coming[:1], TURN_SECONDS if held else None).done:
                    request.wfile.write(held[:1])
                    held = held[1:]
                coming.pop(0).result()
                piece = memoryview(bytearray(at.size_bytes))
                self._client.run(entry.read_into(path, at, piece))
                if not number:  # what cannot be had at all has been refused by now
                    _begin(request, status, wanted.size_bytes, headers)
                request.wfile.write(held)
                request.wfile.write(piece[:-HELD_BYTES])
                held = piece[-HELD_BYTES:]
            request.wfile.write(held)
        return None

    @contextlib.contextmanager
    def _opened(self, file: _File) -> Iterator[tuple[CacheEntry, str, list[concurrent.futures.Future[None]]]]:
        """The entry that has a file, its path there, and what is being fetched. Where the client has gone, that is
        waited for and kept: it comes again, and the Hub need not send it again."""
        cache = self._alone if file.info.etag in self._damaged else self._shared
        entry = self._client.run(_open(cache, file.location, file.info))
        coming: list[concurrent.futures.Future[None]] = []
        try:
            yield entry, _path_in(entry, file.location), coming
        except TierckptError as error:
            if isinstance(error, IntegrityError):
                self._damaged = {file.info.etag, *list(self._damaged)[: KNOWN_MAX - 1]}
            for future in coming:
                future.cancel()
            raise
        finally:
            concurrent.futures.wait(coming, STALL_SECONDS_MIN)
            for future in coming:
                future.cancel()
            self._client.run(entry.close())

    def bring(self, uri: str, at: ByteRange, reads: bool = True) -> concurrent.futures.Future[tuple[Path, str]]:
        """Begin to have a range of a file of a commit here, for another node; comes to the file that has it, and the
        digest ('': not known). Any thread.

        Args:
            reads: from the Hub, where it is not here; else the future comes to an ObjectNotFoundError then.

        Raises TierckptError: closed.
        """
        key = uri, at, reads
        with self._lock:
            future = self._bringing.get(key)
            if future is None:
                future = self._bringing[key] = self._client.start(self._bring(uri, at, reads))
                future.add_done_callback(lambda _: self._bringing.pop(key, None))
        return future

    async def _bring(self, uri: str, at: ByteRange, reads: bool) -> tuple[Path, str]:
        location = parse_uri(uri)
        repository = repository_of(location)
        is_file = repository is not None and repository.is_commit and is_safe_path(repository.path)
        if location.scheme != "hf" or not is_file:
            raise ObjectNotFoundError(f"{uri} is no file of a commit of a Hub")
        if not reads and not await asyncio.to_thread(self._owned.pool.rows, location.uri):
            raise ObjectNotFoundError(f"{uri} is not on this node")  # and the Hub is not asked what it is
        info = await self._client.mover.store(location.parent).head(location.name)
        entry = await _open(self._owned, location, info)
        try:
            path = _path_in(entry, location)
            if reads:
                await entry.ensure(path, at)
            elif not entry.landed(path, at):
                raise ObjectNotFoundError(f"{at} of {uri} is not on this node")
            index, chunk = entry.frozen.index_of(path), at.start // entry.chunk_size_bytes
            digest = entry.digest(index, chunk) if entry.frozen.chunk_range(index, chunk) == at else ""
            places = [directory / path for directory in reversed(entry.directories())]  # it may be published meanwhile
            return next((place for place in places if place.exists()), places[-1]), digest
        finally:
            await entry.close()


async def _open(cache: NodeCache, location: Location, info: ObjectInfo) -> CacheEntry:
    return await cache.open(await cache.freeze(location, kind="object", info=info))


def _path_in(entry: CacheEntry, location: Location) -> str:
    return entry.only.path if entry.only is not None else location.name


def _is_for_readers(parts: list[str]) -> bool:
    """True for lists of repositories, what one is, and ``_READS`` of it, by the parts of a path of the API."""
    is_named = parts[:1] != [] and parts[0] in ("models", *_KINDS) and all(map(NAME.fullmatch, parts[1:3]))
    return is_named and (len(parts) <= 3 or parts[3] in _READS)


def _form_of(request: BaseHTTPRequestHandler) -> bytes | None:
    """The body of a POST; None for one that is not read, whose connection ends with the answer."""
    length = request.headers.get("Content-Length", "")
    kind = request.headers.get("Content-Type", "").partition(";")[0]
    if not length.isdecimal() or int(length) > FORM_BYTES_MAX or kind != "application/x-www-form-urlencoded":
        request.close_connection = True
        return None
    return request.rfile.read(int(length))


def _pieces(wanted: ByteRange, size_bytes: int) -> Iterator[ByteRange]:
    """Cut a range where chunks are cut."""
    at = wanted.start
    while at < wanted.stop:
        stop = min(wanted.stop, (at // size_bytes + 1) * size_bytes)
        yield ByteRange(at, stop)
        at = stop


def _refuse(request: BaseHTTPRequestHandler, error: TierckptError) -> None:
    says = {"X-Error-Message": " ".join(error.message.split()).encode("ascii", "replace").decode()}
    if request.has_begun:  # type: ignore[attr-defined]
        request.close_connection = True  # the client sees that it is cut short (X3)
    elif isinstance(error, BucketNotFoundError):
        what = "Revision" if "revision" in error.context else "Repo"
        _say(request, 404, b"", {"X-Error-Code": f"{what}NotFound"} | says)
    elif isinstance(error, ObjectNotFoundError):
        _say(request, 404, b"", {"X-Error-Code": "EntryNotFound"} | says)
    elif isinstance(error, PermissionDeniedError):
        _say(request, 403, b"", {"X-Error-Code": "GatedRepo"} | says)
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
