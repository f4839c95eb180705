"""The messages of peers, in a small part of HTTP/1.1 (RFC 9112). Pure.

Requests are GET or HEAD without a body, answers have a Content-Length. Transfer and content codings, trailers,
folding and redirects are refused, so two ends cannot read one message in two ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import quote

from ..errors import ConfigError
from ..stores.http_client import HEAD_BYTES_MAX as HEAD_BYTES_MAX
from ..stores.http_client import HttpError
from ..stores.http_client import Response as Response
from ..types import Json

HEADERS_MAX = 32
JSON_BYTES_MAX = 16 << 20
MANIFEST_BYTES_MAX = 256 << 20
CHUNK_BYTES_MAX = 1 << 30
CHUNKS_MAX = 1 << 22
"""Larger versions are read from the store, or in larger chunks."""
WAIT_SECONDS_MAX = 10.0
TARGET_BYTES_MAX = 1024
HUB_WAIT_SECONDS = 2.0
"""A member that reads a range from a Hub for others answers "busy" after so long."""
LINES_IN_HEAD_MAX = 64
LINES_MAX = 1 << 16

DIGEST = "x-tierckpt-digest"
HELD = "x-tierckpt-held"
ME = "x-tierckpt-me"
PROOF = "x-tierckpt-proof"
TIME = "x-tierckpt-time"

_END = b"\r\n\r\n"
_NAME = re.compile(rb"[A-Za-z0-9-]{1,64}")
_VALUE = re.compile(rb"[\x20-\x7e]*")
_TARGET = re.compile(r"/[\x21-\x7e]{0,1023}")
_STATUS = re.compile(r"HTTP/1\.1 ([1-5]\d\d)(?: [\x20-\x7e]*)?")
_LENGTH = re.compile(r"\d{1,18}")
_LINE = re.compile(r"(\d{1,10})(?::(t?[0-9a-f]{32}))?")
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")
_PATHS = {
    "members": re.compile(r"/v1/members"),
    "status": re.compile(r"/v1/status"),
    "fresh": re.compile(r"/v1/fresh"),
    "drains": re.compile(r"/v1/drains"),
    "held": re.compile(r"/v1/held/([0-9a-f]{32})/([1-9]\d{0,11})\?after=(\d{1,10})&interested=([01])"),
    "chunk": re.compile(
        r"/v1/chunk/([0-9a-f]{32})/([1-9]\d{0,11})/(0|[1-9]\d{0,9})\?after=(\d{1,10})&wait=(\d{1,2}(?:\.\d{1,3})?)"
    ),
    "manifest": re.compile(r"/v1/manifest/(t?[0-9a-f]{32})"),
    "steps": re.compile(r"/v1/steps/(t?[0-9a-f]{32})"),
    "segment": re.compile(r"/v1/segment/([0-9a-f]{32})/(0|[1-9]\d{0,15})/([1-9]\d{0,7})"),
    "hub": re.compile(r"/v1/hub/(0|[1-9]\d{0,15})/([1-9]\d{0,9})/([A-Za-z0-9%._~-]+)\?reads=([01])"),
    "slow": re.compile(r"/v1/slow/([0-9a-f]{32})"),
}


class WireError(HttpError):
    """Its connection is not used again."""


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """A node's report of its chunks of a version: ``new`` are the lines of its list from the requested one on.

    The list is append-only. A chunk may be in it twice (lost and fetched again), or may no longer exist.
    """

    total: int = 0
    """0 if the node does not have the version."""
    landed: int = 0
    next: int = 0
    new: tuple[tuple[int, str], ...] = ()
    """Ordinal, and the digest on arrival ('' if the version has its own)."""
    fetching: frozenset[int] = frozenset()
    """Ordinals that processes of the node fetch from shared storage now."""
    whole: bool = False
    """All chunks are present: ``new`` is empty."""
    interested: frozenset[str] = frozenset()

    def to_json(self) -> Json:
        return {
            "total": self.total,
            "landed": self.landed,
            "next": self.next,
            "new": [_line(*one) for one in self.new],
            "fetching": sorted(self.fetching),
            "whole": self.whole,
            "interested": sorted(self.interested),
        }

    def to_header(self) -> str:
        if self.whole:
            return f"{self.total};whole"
        lines = self.new[:LINES_IN_HEAD_MAX]
        after = self.next - len(self.new) + len(lines)
        return f"{self.total};{self.landed};{after};{','.join(_line(*one) for one in lines)}"

    @classmethod
    def of_json(cls, body: Json) -> ChunkReport:
        """Raises WireError."""
        try:
            total, whole = _number(body["total"], CHUNKS_MAX), body["whole"] is True
            new = tuple(_parse_line(str(one), total) for one in _list(body["new"]))
            fetching = frozenset(_number(one, total - 1) for one in _list(body["fetching"]))
            names = frozenset(str(one)[:256] for one in _list(body["interested"]))
            return cls(total, _number(body["landed"]), _number(body["next"]), new, fetching, whole, names)
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"holdings that cannot be: {type(error).__name__}") from None

    @classmethod
    def of_header(cls, text: str) -> ChunkReport:
        """Raises WireError."""
        total, _, rest = text.partition(";")
        try:
            count = _number(int(total), CHUNKS_MAX)
            if rest == "whole":
                return cls(count, count, count, whole=True)
            landed, after, lines = rest.split(";")
            new = tuple(_parse_line(one, count) for one in lines.split(",") if one)
            return cls(count, _number(int(landed)), _number(int(after)), new)
        except ValueError:
            raise WireError("holdings in a header that cannot be") from None


def route(target: str) -> tuple[str, tuple[str, ...]] | None:
    for name, pattern in _PATHS.items():
        if match := pattern.fullmatch(target):
            return name, match.groups()
    return None


def held_target(version: str, chunk_size_bytes: int, after: int, interested: bool) -> str:
    return f"/v1/held/{version}/{chunk_size_bytes}?after={after}&interested={int(interested)}"


def chunk_target(version: str, chunk_size_bytes: int, ordinal: int, after: int, wait_seconds: float) -> str:
    wait = min(max(wait_seconds, 0.0), WAIT_SECONDS_MAX)
    return f"/v1/chunk/{version}/{chunk_size_bytes}/{ordinal}?after={after}&wait={wait:.3f}"


def hub_target(uri: str, start: int, size_bytes: int, reads: bool = True) -> str:
    return f"/v1/hub/{start}/{size_bytes}/{quote(uri, safe='')}?reads={int(reads)}"


def parse_headers(target: str, version: tuple[int, int], lines: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers by lower-case name. Raises WireError: a repeated header, a body, an invalid byte."""
    headers = _headers(lines)
    if version != (1, 1) or _TARGET.fullmatch(target) is None:
        raise WireError("not HTTP/1.1, or a target that no peer sends")
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0" or "host" not in headers:
        raise WireError("a request with a body, or without a host")
    return headers


def parse_response(data: bytes) -> Response:
    """Decode the head of an answer, blank line included.

    Raises WireError: no length, a transfer or content coding, too many headers, an invalid byte.
    """
    first, headers = _parse_head(data)
    match, length = _STATUS.fullmatch(first), headers.get("content-length", "")
    if match is None:
        raise WireError("no status line")
    if "transfer-encoding" in headers or "content-encoding" in headers or not _LENGTH.fullmatch(length):
        raise WireError("an answer that is coded, or of no length")
    return Response(int(match[1]), headers, int(length))


def _parse_head(data: bytes) -> tuple[str, dict[str, str]]:
    if len(data) > HEAD_BYTES_MAX or not data.endswith(_END):
        raise WireError("a head without an end")
    first, *lines = data[: -len(_END)].split(b"\r\n")
    if not first.isascii() or not all(b":" in line for line in lines):
        raise WireError("a head that is not ASCII, or a malformed header")
    return first.decode(), _headers([(name, value) for name, _, value in (line.partition(b":") for line in lines)])


def _headers(lines: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    if len(lines) > HEADERS_MAX:
        raise WireError("too many headers")
    headers: dict[str, str] = {}
    for name, value in lines:
        key = name.lower().decode("latin-1")
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value) or key in headers:
            raise WireError("an invalid header, or one that is there twice")
        headers[key] = value.decode().strip(" ")
    return headers


def encode_head(first: str, headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{first}\r\n{lines}\r\n".encode("ascii")


def parse_json(data: bytes | bytearray | memoryview) -> Json:
    """Raises WireError."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(name)

    try:
        body = json.loads(bytes(data), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {type(error).__name__}") from None
    if not isinstance(body, dict):
        raise WireError("no JSON object")
    return body


def host_and_port(address: str) -> tuple[str, int]:
    """Raises ConfigError: neither ``host:port`` nor ``[v6]:port``."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(f"{address!r:.100} is not an address", hint="Write host:port, or [v6]:port")
    return match["six"] or match["host"], int(match["port"])


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _line(ordinal: int, digest: str) -> str:
    return f"{ordinal}:{digest}" if digest else str(ordinal)


def _parse_line(text: str, total: int) -> tuple[int, str]:
    match = _LINE.fullmatch(text)
    if match is None or int(match[1]) >= total:
        raise ValueError(text)
    return int(match[1]), match[2] or ""


def _number(value: Any, most: int = 1 << 32) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(value)
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > LINES_MAX:
        raise TypeError
    return value
