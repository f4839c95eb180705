"""Requests to S3 by URLs signed by the object-store library: ranges over plain HTTP, and conditional DELETEs.

``Get`` handles only 206 with exactly the requested range and version. A transient failure is ``StoreUnavailableError``;
after any other response, ``NotThisWay``, the caller repeats the request through the library.
"""

from __future__ import annotations

import http.client
import io
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from ..errors import PermissionDeniedError, PreconditionFailedError, StoreError, StoreUnavailableError
from ..telemetry import logger
from ..types import ByteRange, Tier
from . import get_concurrency
from .access import tls_context
from .base import RangesIgnoredError, retries_spent
from .http_client import Call, Connections, HttpError, Response, TlsError, TooSlow
from .proxies import direct_opener, routed

IDLE_MAX: Final = 64
CONNECT_SECONDS: Final = 5.0
MISSES_MAX: Final = 3
THREADS_MAX: Final = 32

log = logger("stores.ranges")

MAY_PASS: Final = {408, 425, 429, 500, 502, 503, 504}
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: [^\r\n]*)?\r\n")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


class NotThisWay(Exception):
    """A response that this client does not interpret. ``for_good``: do not try again."""

    def __init__(self, reason: str, *, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


def is_range(headers: Mapping[str, str], byte_range: ByteRange) -> bool:
    match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
    return match is not None and (int(match[1]), int(match[2])) == (byte_range.start, byte_range.stop - 1)


class Get(Call):
    def __init__(
        self,
        uri: str,
        url: str,
        byte_range: ByteRange,
        into: memoryview,
        window_seconds: float,
        size_bytes: int | None = None,
        is_version: Callable[[Mapping[str, str]], bool] | None = None,
        if_match: str | None = None,
    ) -> None:
        """``uri``: for messages, as the URL holds a signature. ``size_bytes``: of the object, if 200 with all of it is
        possible."""
        super().__init__()
        parts = urlsplit(url)
        self.uri, self.byte_range, self.into, self.if_match = uri, byte_range, into, if_match
        self.size_bytes, self._is_version = size_bytes, is_version
        self.is_tls = parts.scheme == "https"
        self.host, self.port = parts.hostname or "", parts.port or (443 if self.is_tls else 80)
        self.connect_seconds = min(CONNECT_SECONDS, window_seconds)
        self.head_seconds = self.window_seconds = window_seconds
        self.enough_bytes = max(1, int(get_concurrency.BYTES_PER_SECOND_MIN * window_seconds))
        condition = f"If-Match: {if_match}\r\n" if if_match is not None else ""
        self._head = (
            f"GET {parts.path}{'?' * bool(parts.query)}{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "User-Agent: tierckpt\r\n"
            f"Range: bytes={byte_range.start}-{byte_range.stop - 1}\r\nAccept-Encoding: identity\r\n{condition}\r\n"
        ).encode("latin-1")

    def head(self) -> bytes:
        return self._head

    def parse(self, head: bytes) -> Response:
        match = _STATUS.match(head)
        if match is None:
            raise HttpError("no status line")
        try:
            found = http.client.parse_headers(io.BytesIO(head[match.end() :]))
        except http.client.HTTPException as error:
            raise HttpError(type(error).__name__) from None
        headers = {name.lower(): value for name, value in found.items()}
        if match[1] == b"0":
            headers["connection"] = "close"
        length = headers.get("content-length", "")
        is_plain = length.isdecimal() and "transfer-encoding" not in headers
        return Response(int(match[2]), headers, int(length) if is_plain else -1)

    def judge(self, answer: Response) -> memoryview:
        byte_range, status, headers = self.byte_range, answer.status, answer.headers
        if status == 412:
            raise PreconditionFailedError(f"{self.uri} has changed", tier=Tier.SHARED)
        if status in MAY_PASS:
            raise self.unavailable(f"HTTP {status}", status=status)
        if status == 200 and self.size_bytes is not None:
            if not byte_range.size_bytes == self.size_bytes == answer.length:
                raise RangesIgnoredError(f"{self.uri} sends the whole object for a range", tier=Tier.SHARED)
        elif status != 206:
            raise NotThisWay(f"HTTP {status}")
        elif not is_range(headers, byte_range) or answer.length != byte_range.size_bytes:
            raise NotThisWay("not the requested range")
        if headers.get("content-encoding", "identity") not in ("identity", "", "aws-chunked"):
            raise NotThisWay("an encoded answer")
        etag = headers.get("etag")
        is_other = self.if_match is not None and etag is not None and etag.strip('"') != self.if_match.strip('"')
        if is_other or (self._is_version is not None and not self._is_version(headers)):
            raise PreconditionFailedError(f"{self.uri} has changed", tier=Tier.SHARED)
        return self.into[: byte_range.size_bytes]

    def check(self, answer: Response, body: memoryview) -> None:
        """The caller's digests verify content and version."""

    def failure(self, error: HttpError) -> Exception:
        if isinstance(error, TlsError):
            return NotThisWay(str(error), for_good=True)
        if isinstance(error, TooSlow):
            return self.unavailable(str(error), too_slow=True, moved_bytes=error.moved_bytes)
        return self.unavailable(str(error))

    def unavailable(self, reason: str, **context: object) -> StoreUnavailableError:
        return retries_spent(f"{self.uri} cannot be reached", reason, **context)


class Ranges:
    def __init__(self) -> None:
        self.connections = Connections("get", THREADS_MAX, IDLE_MAX)
        self._misses = 0
        self._tls: ssl.SSLContext | None = None
        self._trusted = ""
        self.is_usable = True

    @property
    def tls(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = tls_context(self._trusted)
        return self._tls

    def run(self, get: Get) -> Coroutine[Any, Any, memoryview]:
        """Raises NotThisWay: an unusable response."""
        get.tls = self.tls if get.is_tls else None
        return self.connections.run(get)

    def trust(self, pem: str) -> None:
        """Also trust ``pem``. Resets ``is_usable``, as the server may be another."""
        if pem != self._trusted:
            self._trusted, self._tls = pem, None
        self._misses, self.is_usable = 0, True

    def count_used(self) -> None:
        self._misses = 0

    def count_unused(self, reason: NotThisWay) -> None:
        self._misses += 1
        if self.is_usable and (reason.for_good or self._misses >= MISSES_MAX):
            self.is_usable = False
            log.info("large ranges are read through the library from here on: %s", reason)


def delete_if(url: str, etag: str, target: str, timeout_seconds: float, tls: ssl.SSLContext) -> None:
    """Delete the object if its version is ``etag``; no error without the object. Blocking.

    ``target``: for messages, as the URL holds a signature. Raises PreconditionFailedError, PermissionDeniedError,
    StoreUnavailableError, StoreError.
    """
    request = urllib.request.Request(url, method="DELETE", headers={"If-Match": etag})
    try:
        with direct_opener(tls).open(routed(request), timeout=timeout_seconds) as answer:
            status = answer.status
    except OSError as error:
        raise StoreUnavailableError(
            f"{target} cannot be reached: {type(error).__name__}", hint="Try again later", tier=Tier.SHARED
        ) from None
    if status < 300 or status == 404:
        return
    if status == 412:
        raise PreconditionFailedError(f"{target} has changed", tier=Tier.SHARED)
    if status in {401, 403}:
        raise PermissionDeniedError(f"access to {target} was refused", status=status, tier=Tier.SHARED)
    kind = StoreUnavailableError if status >= 500 or status in {408, 409, 429} else StoreError
    raise kind(f"{target} cannot be deleted: HTTP {status}", status=status, tier=Tier.SHARED)
