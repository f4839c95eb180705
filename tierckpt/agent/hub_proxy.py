"""The agent as a read-only Hub: ``HF_ENDPOINT=http://127.0.0.1:PORT`` serves unmodified Hugging Face clients.

Files come through the node cache, with ``peers`` through the owner of each chunk (``HubOwners``). API
requests about repositories are forwarded, without the fields for xet, which would bypass the cache.

    X1  Read only: GET, HEAD, and the POST that queries paths. On the loopback address, for requests with that Host.
    X2  The token is the agent's own: a client reads the repositories that this token may read, and nothing else. A
        client's token is neither read, forwarded, nor stored. Members of the cluster read files of commits by each
        other's tokens.
    X3  The last piece of a file is sent after the whole file has passed the digest that the Hub lists. An error ends
        the connection early, so that no client accepts the file as complete.
    X4  Requests are answered on the agent's event loop; files and stores are read on the client's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from ..cache.entry import STALL_SECONDS_MIN, CacheEntry
from ..cache.fetch_job import InOrder, PeerSources, ReceivedChunk
from ..cache.node_cache import NodeCache
from ..cache.partial_entry import PartialEntry
from ..cache.store_chunks import StoreChunks
from ..client import Client
from ..config import Settings
from ..errors import (
    BucketNotFoundError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    PeerBusyError,
    PermissionDeniedError,
    StoreUnavailableError,
    TierckptError,
)
from ..format.layout import Location, parse_uri
from ..format.manifest import digest_of, is_safe_path
from ..peer.fetch.scheduler import fraction
from ..peer.membership import Member
from ..peer.peer_catalog import Live
from ..peer.peer_client import PeerClient
from ..peer.peer_http import TARGET_BYTES_MAX, hub_target
from ..stores.base import acquired, to_completion
from ..stores.hub.api import NAME, Answer, Repository, hub_of, repository_of
from ..telemetry import BYTES, ignore_progress, logger
from ..types import ByteRange, ObjectInfo, Tier
from .http_server import IDLE_SECONDS, HttpServer, begin, web, write

SILENT_SECONDS: Final = 15.0
AVOID_SECONDS: Final = 30.0
RANKS_MAX: Final = 3
"""Owners that may fail before a node reads a chunk itself."""
HOLDERS_MAX: Final = 8
"""Members that may lack a chunk before its owner reads it from the Hub."""
VIEW_SECONDS: Final = 0.25
GONE_SECONDS: Final = 60.0
BUSY_SECONDS: Final = 0.05


class HubOwners:
    """Fetches each chunk through its owner, which reads it at the first request. Runs on one event loop; close it.

        O1  While all members are healthy and agree on the members, one member reads each chunk from the Hub, once. It
            requests the chunk from the next ranks first: after a change of members another node may have it.
        O2  No two nodes wait for each other: an owner makes no node read, and a node without a chunk answers at once.
        O3  An owner can cost time, never the chunk: one that is silent for ``SILENT_SECONDS``, or unreachable, is
            skipped for ``AVOID_SECONDS``. After ``STALL_SECONDS_MIN`` a node reads the chunk itself.

    ``is_owner``: this node reads for others.
    """

    def __init__(self, settings: Settings, live: Callable[[], Awaitable[Live]], *, is_owner: bool = False) -> None:
        self._settings, self._ask_live, self._is_owner = settings, live, is_owner
        self._me, self._refresh_at = "", 0.0
        self._seen: dict[str, tuple[Member, float]] = {}
        self._avoided: dict[str, float] = {}
        self._client: PeerClient | None = None

    async def join(self, chunks: StoreChunks, filling: PartialEntry) -> OwnerFill:
        return OwnerFill(self, chunks, filling)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def receive(self, uri: str, key: str, start: int, into: memoryview) -> ReceivedChunk | None:
        """Fill ``into`` from the owner of ``key``; None if this node must read it."""
        is_mine, failed, fits = self._is_owner, 0, len(hub_target(uri, start, len(into))) <= TARGET_BYTES_MAX
        members = await self._members() if fits else []
        for member in sorted(members, key=lambda member: fraction(f"{key}/{member.name}")):
            if member.name == self._me:
                is_mine, failed = True, 0
                continue
            if failed == (HOLDERS_MAX if is_mine else RANKS_MAX):
                return None
            if self._avoided.get(member.name, 0.0) > time.monotonic():
                continue
            try:
                digest = await self._ask(member, uri, start, into, is_mine)
            except ObjectNotFoundError:
                failed += 1
            except (TierckptError, OSError) as error:
                log.info("%s gets no requests for Hub files for %g s: %s", member.name, AVOID_SECONDS, error)
                self._avoided[member.name] = time.monotonic() + AVOID_SECONDS
            else:
                BYTES.emit(len(into), tier=Tier.PEER, direction="read")
                return ReceivedChunk(digest, member.name)
        return None

    async def _members(self) -> list[Member]:
        """Return members that were live lately: nodes notice a death at different times (O1)."""
        now = time.monotonic()
        if now >= self._refresh_at:
            with contextlib.suppress(TierckptError, OSError):
                live = await self._ask_live()
                self._me = live.me
                self._seen.update({member.name: (member, now) for member in live.members})
            self._refresh_at = now + VIEW_SECONDS
        return [member for member, at in self._seen.values() if now - at < GONE_SECONDS]

    async def _ask(self, member: Member, uri: str, start: int, into: memoryview, is_mine: bool) -> str:
        if self._client is None:
            self._client = PeerClient(self._settings, self._me)
        while True:
            with contextlib.suppress(PeerBusyError):
                return await self._client.hub_range(member, uri, start, into, SILENT_SECONDS, reads=not is_mine)
            await asyncio.sleep(BUSY_SECONDS)


class OwnerFill:
    slots = 16

    def __init__(self, owners: HubOwners, chunks: StoreChunks, filling: PartialEntry) -> None:
        self._owners, self._chunks, self._frozen = owners, chunks, filling.frozen
        self.sources = PeerSources()

    def order(self, todo: Iterable[tuple[int, int]], *, whole: bool) -> InOrder:
        return InOrder(todo)

    async def fetch_chunk(
        self, index: int, chunk: int, into: memoryview, request: object | None = None
    ) -> ReceivedChunk:
        item, at = self._frozen.files[index], self._frozen.chunk_range(index, chunk)
        uri = self._frozen.uri
        if not uri.endswith(f"/{item.path}"):
            uri = f"{uri}/{item.path}"
        received = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STALL_SECONDS_MIN):
                received = await self._owners.receive(uri, f"{item.etag}/{at.start}", at.start, into)
        return received or ReceivedChunk((await self._chunks.read(index, chunk, into))[1], None)

    async def chunk_written(self, index: int, chunk: int) -> None: ...

    async def close(self) -> None: ...


T = TypeVar("T")

log = logger("agent.hub")

HOST: Final = "127.0.0.1"
KNOWN_SECONDS: Final = 10.0
"""Time during which the commit of a revision and an answer of the API are reused."""
KNOWN_MAX: Final = 256
TURN_SECONDS: Final = 5.0
"""Interval of single bytes to a waiting client: Hugging Face's end after 10 s without one."""
HELD_BYTES: Final = 12
PIECES_AHEAD: Final = 8
"""Limit for one client; the settings limit all clients."""
_PASSED_ON = ("content-type", "x-error-code", "x-error-message", "x-repo-commit")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
_KINDS = ("datasets", "spaces")
_READS = ("revision", "tree", "refs", "commits", "discussions", "paths-info", "auth-check")
_LISTS = ("tree", "paths-info")
FORM_BYTES_MAX: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class _File:
    location: Location
    info: ObjectInfo
    commit: str


class HubProxy:
    """Serves one Hub on the running event loop, from ``start`` to ``close``. ``live`` returns the nodes.

    Raises ConfigError: invalid ``HF_ENDPOINT`` of this process, or unusable secret or certificates.
    """

    def __init__(self, settings: Settings, live: Callable[[], Awaitable[Live]] | None = None) -> None:
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
        self._bringing: dict[tuple[str, ByteRange, bool], concurrent.futures.Future[tuple[Path, str]]] = {}
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, Any]] = {}
        self._http = HttpServer("the Hub", self._handle, body_bytes_max=FORM_BYTES_MAX)

    async def start(self, port: int) -> int:
        """Listen on ``port`` (0: a free one) and return it. Raises ConfigError: it is taken, or the Hub's own."""
        if self._hub.host in (f"{HOST}:{port}", f"localhost:{port}"):
            raise ConfigError(
                "HF_ENDPOINT of the agent is the agent itself", hint="Unset it for the agent, or set the Hub's address"
            )
        await self._http.start(HOST, port)
        _, port = self._http.address
        log.info("HF_ENDPOINT=http://%s:%d serves %s", HOST, port, self._hub.endpoint)
        return port

    async def close(self) -> None:
        await self._http.close()
        for owners in self._owners:
            if owners is not None:
                await self._run(owners.close())
        await asyncio.to_thread(self._client.close)

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._client.start(work))

    # --- requests ------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path
        form = await _form_of(request) if request.method == "POST" else None
        if request.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            return web.Response(status=403)  # a page in a browser, by another name of this address
        parts = [unquote(part) for part in re.split("[?#]", path, maxsplit=1)[0].split("/") if part]
        if not path.startswith("/") or not path.isascii() or not is_safe_path("/".join(parts)):
            return web.Response(status=404)  # would lead elsewhere on the Hub, or to another host
        is_form = parts[4:5] == ["paths-info"]
        is_allowed = form is not None if is_form else request.method in ("HEAD", "GET")
        if not is_allowed:
            return web.Response(status=404)
        try:
            if parts[0] == "api" and _is_for_readers(parts[1:]):
                return await self._pass_on(request, form, is_list=parts[4:5] != [] and parts[4] in _LISTS)
            kind = parts.pop(0) if parts[0] in _KINDS else "models"
            if len(parts) >= 5 and parts[2] == "resolve" and all(map(NAME.fullmatch, parts[:2])):
                return await self._send(
                    request, await self._file(kind, "/".join(parts[:2]), parts[3], "/".join(parts[4:]))
                )
            return web.Response(status=404)
        except TierckptError as error:
            log.info("%s: %s", path, error.message)
            if request.writer.output_size:
                raise EOFError("the answer has started") from None  # the client sees a truncated answer (X3)
            return _refusal(error)

    async def _pass_on(self, request: web.BaseRequest, form: bytes | None, is_list: bool) -> web.StreamResponse:
        path = request.raw_path
        key = path if form is None else f"{path} {digest_of(form)}"
        found: Answer = await self._recent(key, lambda: self._hub.answer(path, form))
        headers = {name: value for name, value in found.headers.items() if name in _PASSED_ON}
        for name in ("link", "location"):
            if name in found.headers:
                own = f"http://{request.headers['Host']}"
                headers[name] = found.headers[name].replace(self._hub.endpoint, own)
        body = found.body
        if found.status == 200 and is_list:
            body = json.dumps([{k: v for k, v in item.items() if k != "xetHash"} for item in found.json()]).encode()
        return web.Response(status=found.status, body=body, headers=headers)

    async def _file(self, kind: str, name: str, revision: str, path: str) -> _File:
        repository = Repository(kind, name, revision)
        commit = await self._recent(f"{kind}/{name}@{revision}", lambda: self._hub.commit(repository))
        location = parse_uri(f"hf://{'' if kind == 'models' else f'{kind}/'}{name}@{commit}/{path}")
        store = self._client.mover.store(location.parent)
        return _File(location, await self._run(store.head(location.name)), commit)

    async def _recent(self, key: str, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        at, known = self._known.get(key, (0.0, None))
        if known is not None and time.monotonic() - at < KNOWN_SECONDS:
            return known
        found, now = await self._run(ask()), time.monotonic()
        fresh = {name: known for name, known in self._known.items() if now - known[0] < KNOWN_SECONDS}
        self._known = (fresh if len(fresh) < KNOWN_MAX else {}) | {key: (now, found)}
        return found

    # --- files ---------------------------------------------------------------------------------------------------

    async def _send(self, request: web.BaseRequest, file: _File) -> web.StreamResponse:
        kind, _, digest = (file.info.etag or "").partition(":")
        size_bytes, status = file.info.size_bytes, 200
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": file.commit, "Accept-Ranges": "bytes"}
        if kind == "sha256":
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(size_bytes)}
        byte_range = ByteRange(0, size_bytes)
        if range_header := _RANGE.fullmatch(request.headers.get("Range") or ""):
            byte_range = ByteRange(int(range_header[1]), min(size_bytes, int(range_header[2] or size_bytes) + 1))
            if byte_range.start >= byte_range.stop:
                return web.Response(status=416, headers=headers | {"Content-Range": f"bytes */{size_bytes}"})
            headers["Content-Range"], status = f"bytes {byte_range.start}-{byte_range.stop - 1}/{size_bytes}", 206
        headers["Content-Length"] = str(byte_range.size_bytes)
        if request.method == "HEAD" or not byte_range.size_bytes:
            return web.Response(status=status, headers=headers)
        buffered, response = memoryview(b""), None
        async with self._opened(file) as (entry, path, coming):
            pieces = _pieces(byte_range, entry.chunk_size_bytes)
            for number, at in enumerate(pieces):
                for more in pieces[number + len(coming) : number + PIECES_AHEAD]:
                    is_last = more.stop == size_bytes  # the whole file must have passed its digest (X3)
                    fetch = entry.fill([path]) if is_last else entry.ensure(path, more)
                    coming.append(asyncio.wrap_future(self._client.start(fetch)))
                while not (await asyncio.wait(coming[:1], timeout=TURN_SECONDS if buffered else None))[0]:
                    assert response is not None
                    await write(response, buffered[:1])
                    buffered = buffered[1:]
                coming.pop(0).result()
                piece = memoryview(bytearray(at.size_bytes))
                await self._run(entry.read_into(path, at, piece))
                if response is None:
                    response = await begin(request, headers, status=status)
                await write(response, buffered)
                await write(response, piece[:-HELD_BYTES])
                buffered = piece[-HELD_BYTES:]
            assert response is not None
            await write(response, buffered)
        return response

    @contextlib.asynccontextmanager
    async def _opened(self, file: _File) -> AsyncIterator[tuple[CacheEntry, str, list[asyncio.Future[None]]]]:
        """Yield the entry of a file, its path there, and the fetches in flight, which outlive the client."""
        cache = self._alone if file.info.etag in self._damaged else self._shared
        opening = self._run(_open(cache, file.location, file.info))
        entry = await acquired(opening, lambda entry: self._client.start(entry.close()))
        coming: list[asyncio.Future[None]] = []
        try:
            yield entry, _path_in(entry, file.location), coming
        except (TierckptError, asyncio.CancelledError) as error:
            if isinstance(error, IntegrityError):
                self._damaged = {file.info.etag, *list(self._damaged)[: KNOWN_MAX - 1]}
            for future in coming:
                future.cancel()
            raise
        finally:
            try:
                if coming:
                    await asyncio.wait(coming, timeout=STALL_SECONDS_MIN)
            finally:
                for future in coming:
                    future.cancel()
                closing = asyncio.ensure_future(self._run(entry.close()))  # runs even if this task is cancelled again
                await asyncio.gather(to_completion(closing), *coming, return_exceptions=True)

    def fetch_range(self, uri: str, at: ByteRange, reads: bool = True) -> concurrent.futures.Future[tuple[Path, str]]:
        """Return a future of a file with a range of a Hub file and its digest ('': unknown), for another node.
        Thread-safe.

        Without ``reads`` it raises ObjectNotFoundError instead of reading from the Hub. Raises TierckptError: closed.
        """
        key = uri, at, reads
        with self._lock:
            future = self._bringing.get(key)
            if future is None:
                future = self._bringing[key] = self._client.start(self._fetch_piece(uri, at, reads))
                future.add_done_callback(lambda _: self._bringing.pop(key, None))
        return future

    async def _fetch_piece(self, uri: str, at: ByteRange, reads: bool) -> tuple[Path, str]:
        location = parse_uri(uri)
        repository = repository_of(location)
        is_file = repository is not None and repository.is_commit and is_safe_path(repository.path)
        if location.scheme != "hf" or not is_file:
            raise ObjectNotFoundError(f"{uri} is not a file of a commit of a Hub")
        if not reads and not await asyncio.to_thread(self._owned.pool.rows, location.uri):
            raise ObjectNotFoundError(f"{uri} is not on this node")
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
            paths = [directory / path for directory in reversed(entry.directories())]  # may be published meanwhile
            return next((place for place in paths if place.exists()), paths[-1]), digest
        finally:
            await entry.close()


async def _open(cache: NodeCache, location: Location, info: ObjectInfo) -> CacheEntry:
    return await cache.open(await cache.freeze(location, kind="object", info=info))


def _path_in(entry: CacheEntry, location: Location) -> str:
    return entry.only.path if entry.only is not None else location.name


def _is_for_readers(parts: list[str]) -> bool:
    is_named = parts[:1] != [] and parts[0] in ("models", *_KINDS) and all(map(NAME.fullmatch, parts[1:3]))
    return is_named and (len(parts) <= 3 or parts[3] in _READS)


async def _form_of(request: web.BaseRequest) -> bytes | None:
    length = request.headers.get("Content-Length", "")
    kind = request.headers.get("Content-Type", "").partition(";")[0]
    if not length.isdecimal() or int(length) > FORM_BYTES_MAX or kind != "application/x-www-form-urlencoded":
        return None
    async with asyncio.timeout(IDLE_SECONDS):
        return await request.content.read()


def _pieces(byte_range: ByteRange, size_bytes: int) -> list[ByteRange]:
    start, stop = byte_range.start, byte_range.stop
    inner = range((start // size_bytes + 1) * size_bytes, stop, size_bytes)
    return [ByteRange(*piece) for piece in pairwise([start, *inner, stop])]


def _refusal(error: TierckptError) -> web.Response:
    says = {"X-Error-Message": " ".join(error.message.split()).encode("ascii", "replace").decode()}
    missing = "Revision" if "revision" in error.context else "Repo"
    for kind, status, code in (
        (BucketNotFoundError, 404, f"{missing}NotFound"),
        (ObjectNotFoundError, 404, "EntryNotFound"),
        (PermissionDeniedError, 403, "GatedRepo"),
    ):
        if isinstance(error, kind):
            return web.Response(status=status, headers={"X-Error-Code": code} | says)
    if isinstance(error, StoreUnavailableError):
        return web.Response(status=503, body=error.message.encode(), headers={"Retry-After": "5"})
    return web.Response(status=502 if isinstance(error, IntegrityError) else 500, body=error.message.encode())
