"""Reads objects by URL: ranges on our own connections, and whole objects of servers that ignore ranges."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import socket
import ssl
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import urljoin, urlsplit

from ..config import Settings
from ..errors import (
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from ..types import Buffer, ByteRange, Tier
from . import get_concurrency
from .base import RangesIgnoredError, check_range, retries_spent, to_completion
from .http_client import describe_error
from .proxies import AnyStatus, proxy_for, routed
from .retry import Retries
from .signed_requests import MAY_PASS, Get, NotThisWay, Ranges, is_range

ANSWER_SECONDS_MAX: Final = 30.0
REDIRECTS_MAX: Final = 5

T = TypeVar("T")
Headers: TypeAlias = Mapping[str, str]
IsVersion: TypeAlias = Callable[[Headers], bool]


class UrlStore(ABC):
    """What the read-only stores over HTTP share: reads by URL, and recovery from failures."""

    def __init__(self, uri: str, settings: Settings, retries: Retries | None) -> None:
        self.uri, self._settings, self.retries = uri, settings, retries or Retries(settings)
        self._ranges = Ranges()
        self._learning = asyncio.Lock()
        self._gives_ranges: set[str] = set()
        self._ignores_ranges: set[str] = set()
        self._whole: dict[str, Any] = {}

    @abstractmethod
    async def _probe(self) -> bool:
        """Return whether the server answers."""

    @abstractmethod
    async def get_range_into(
        self, key: str, byte_range: ByteRange, into: memoryview, *, if_match: str | None = None
    ) -> None: ...

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        into = memoryview(bytearray(check_range(byte_range).size_bytes))
        await self.get_range_into(key, byte_range, into, if_match=if_match)
        return into

    async def _receive(
        self, url: str, byte_range: ByteRange, into: memoryview, size_bytes: int, is_version: IsVersion | None = None
    ) -> None:
        """Fill ``into`` with a range of an object of ``size_bytes``.

        Raises RangesIgnoredError: use ``_read_whole``. PreconditionFailedError: another version. NotThisWay: the URL is
        unsuitable or expired. StoreUnavailableError, after retries.
        """
        host = urlsplit(url).netloc
        by_itself = partial(self._receive_or_keep, url, byte_range, into, size_bytes, is_version)
        if byte_range.size_bytes < size_bytes and host not in self._gives_ranges:
            async with self._learning:  # else several requests would each receive the whole object
                if host in self._ignores_ranges:
                    raise _ranges_ignored(self.uri, host)
                if host not in self._gives_ranges:
                    await self._again(host, by_itself)
                    self._gives_ranges.add(host)
                    return
        if proxy_for(url) is not None:
            await self._again(host, by_itself)
            return
        crowd = self.retries.get_concurrency(host)
        window = min(get_concurrency.WINDOW_SECONDS, self._settings.store_timeout_seconds)

        def receive() -> Awaitable[object]:
            get = Get(f"{self.uri} at {host}", url, byte_range, into, window, size_bytes, is_version)
            return crowd.run(partial(self._ranges.run, get))

        await self._again(host, receive)

    async def _again(self, host: str, request: Callable[[], Awaitable[object]]) -> None:
        async def ask() -> None:
            async with self.retries.request(self.retries.breaker(host), self._probe):
                await request()

        await self.retries.again(ask, timeout_seconds=self._settings.store_timeout_seconds)

    async def _receive_or_keep(
        self, url: str, byte_range: ByteRange, into: memoryview, size_bytes: int, is_version: IsVersion | None
    ) -> None:
        host = urlsplit(url).netloc
        reply = await to_completion(asyncio.to_thread(_open, self.uri, url, lambda _: range_header(byte_range)))
        is_kept = False
        try:
            headers = _headers_of(reply)
            if is_version is not None and not is_version(headers):
                raise PreconditionFailedError(f"{self.uri}: an object has changed at {host}", tier=Tier.SHARED)
            if reply.status == 200 and byte_range.size_bytes < size_bytes:
                self._ignores_ranges.add(host)
                if (known := self._whole.pop(url, None)) is not None:
                    known.close()
                self._whole[url] = reply
                is_kept = True
                raise _ranges_ignored(self.uri, host)
            if reply.status != 200 and not is_range(headers, byte_range):
                raise NotThisWay(f"HTTP {reply.status}, and not the requested range")
            await to_completion(asyncio.to_thread(_fill, self.uri, host, reply, into[: byte_range.size_bytes]))
        finally:
            if not is_kept:
                reply.close()

    @contextlib.asynccontextmanager
    async def _read_whole(
        self,
        url: str,
        size_bytes: int,
        headers_for: Callable[[str], Headers],
        is_version: IsVersion | None = None,
        *,
        received_at: str = "",
    ) -> AsyncIterator[Callable[[memoryview], Awaitable[None]]]:
        """Yield a function that fills a view with the next bytes of a whole object.

        ``headers_for``: by URL, as not all hosts get a token. ``received_at``: the URL of ``_receive``, if different.

        Both raise PreconditionFailedError, ObjectNotFoundError, PermissionDeniedError, StoreError;
        StoreUnavailableError: a retry from the beginning may succeed.
        """
        host = urlsplit(url).netloc
        reply = self._whole.pop(received_at or url, None)
        if reply is None:
            async with self.retries.request(self.retries.breaker(host), self._probe):
                try:
                    reply = await to_completion(asyncio.to_thread(_open, self.uri, url, headers_for))
                except NotThisWay as refusal:
                    raise _refused(self.uri, host, refusal) from None
        try:
            headers = _headers_of(reply)
            length = headers.get("content-length", str(size_bytes))
            if length != str(size_bytes) or (is_version is not None and not is_version(headers)):
                raise PreconditionFailedError(f"{self.uri}: an object has changed at {host}", tier=Tier.SHARED)

            async def fill(view: memoryview) -> None:
                await to_completion(asyncio.to_thread(_fill, self.uri, host, reply, view))

            yield fill
        finally:
            reply.close()

    def again(self, work: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        return self.retries.again(work)

    async def reconnect(self, damage: TierckptError) -> None:
        if not await self.retries.take_retry():
            raise damage
        await self.close()

    async def available(self) -> bool:
        return False

    def probe_soon(self) -> None:
        return

    async def close(self) -> None:
        self._ranges.connections.close()
        for reply in self._whole.values():
            reply.close()
        self._whole.clear()


def range_header(byte_range: ByteRange) -> dict[str, str]:
    return {"Range": f"bytes={byte_range.start}-{byte_range.stop - 1}", "Accept-Encoding": "identity"}


def _ranges_ignored(uri: str, host: str) -> RangesIgnoredError:
    hint = "Fetch it whole: `tierckpt prefetch`"
    return RangesIgnoredError(f"{uri}: {host} sends the whole object for a range", hint=hint, tier=Tier.SHARED)


def _open(uri: str, url: str, headers_for: Callable[[str], Headers]) -> Any:
    for _ in range(REDIRECTS_MAX):
        host = urlsplit(url).netloc
        headers = {"User-Agent": "tierckpt", "Accept-Encoding": "identity", **headers_for(url)}
        try:
            reply = opener.open(routed(urllib.request.Request(url, headers=headers)), timeout=ANSWER_SECONDS_MAX)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLError):
                raise NotThisWay(f"TLS: {reason.reason or describe_error(reason)}", for_good=True) from None
            raise _unavailable(uri, host, describe_error(reason if isinstance(reason, OSError) else error)) from None
        if reply.status < 300:
            return reply
        reply.close()
        status, location = reply.status, reply.headers.get("location", "")
        if 300 <= status < 400 and urljoin(url, location).startswith(("http://", "https://")):
            url = urljoin(url, location)
            continue
        if status in MAY_PASS:
            raise _unavailable(uri, host, f"HTTP {status}", status=status)
        raise NotThisWay(f"HTTP {status}")
    raise StoreError(f"{uri}: {host} redirects in a circle", tier=Tier.SHARED)


def _refused(uri: str, host: str, refusal: NotThisWay) -> StoreError:
    message = f"{uri}: {host} refuses an object: {refusal}"
    if str(refusal) in ("HTTP 401", "HTTP 403"):
        return PermissionDeniedError(message, hint="Check the credentials", tier=Tier.SHARED)
    if str(refusal) in ("HTTP 404", "HTTP 410"):
        return ObjectNotFoundError(message, tier=Tier.SHARED)
    return StoreError(message, tier=Tier.SHARED)


def _headers_of(reply: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in reply.headers.items()}


def _fill(uri: str, host: str, reply: Any, view: memoryview) -> None:
    done = 0
    try:
        while done < len(view):
            count = reply.readinto(view[done:])
            if not count:
                raise _unavailable(uri, host, f"an answer ended {len(view) - done} bytes early")
            done += count
    except (OSError, http.client.HTTPException) as error:
        raise _unavailable(uri, host, describe_error(error)) from None


def _unavailable(uri: str, host: str, reason: str, **context: object) -> StoreUnavailableError:
    return retries_spent(f"{uri} cannot be read from {host}", reason, **context)


class _Paced(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw, self._sock = raw, sock
        self._ends_at = time.monotonic() + ANSWER_SECONDS_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int | None:
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        count = self._raw.readinto(into)
        self._ends_at += (count or 0) / get_concurrency.BYTES_PER_SECOND_MIN
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _PacedAnswer(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *given: Any, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self.fp = io.BufferedReader(_Paced(self.fp.detach(), sock))


class _HttpConnection(http.client.HTTPConnection):
    response_class = _PacedAnswer


class _TlsConnection(http.client.HTTPSConnection):
    response_class = _PacedAnswer


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpConnection, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_TlsConnection, request)


opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Http, _Https, AnyStatus)
