"""``http://`` and ``https://``: read-only files from a server's index pages.

The version is the etag, else the modification time. A response with another etag is still the listed version if its
``Last-Modified`` is the same, and was a minute old when listed (RFC 9110, 8.8.2.2): servers at one address may
disagree.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from time import time
from typing import Final
from urllib.parse import quote, unquote

from ..config import Settings
from ..errors import IntegrityError, ObjectNotFoundError, PreconditionFailedError, StoreError, TierckptError
from ..format.layout import Location
from ..types import ByteRange, ObjectInfo, Tier
from .base import check_key, check_range, short_answer
from .fsspec_store import UniversalStore, errors_of, open_filesystem
from .http_reader import UrlStore
from .retry import Retries
from .signed_requests import NotThisWay

HEADS_AT_ONCE: Final = 16
STRONG_SECONDS: Final = 60.0
"""Minimum age of a ``Last-Modified`` (1 s resolution) that identifies one version."""


@dataclass(frozen=True)
class _FileVersion:
    url: str
    size_bytes: int
    etag: str
    last_modified: str
    is_strong: bool

    def matches(self, headers: Mapping[str, str]) -> bool:
        etag, last_modified = headers.get("etag", ""), headers.get("last-modified", "")
        if etag and self.etag:
            return _weak(etag) == _weak(self.etag) or (self.is_strong and last_modified == self.last_modified)
        return not (last_modified and self.last_modified) or last_modified == self.last_modified


class HttpStore(UrlStore, UniversalStore):
    def __init__(self, location: Location, settings: Settings, retries: Retries | None = None) -> None:
        UniversalStore.__init__(self, *open_filesystem(location), location.uri)
        UrlStore.__init__(self, location.uri, settings, retries)
        self._versions: dict[tuple[str, str | None], _FileVersion] = {}

    def _path(self, key: str) -> str:
        return f"{self.root}/{quote(check_key(key))}"

    def _directory(self, prefix: str) -> str:
        return f"{self.root}/{quote(prefix)}" if prefix else self.root

    async def _probe(self) -> bool:
        try:
            await self._call(self.fs.exists, self.root)
        except TierckptError:
            return False
        return True

    def _head(self, key: str) -> ObjectInfo:
        info = self.fs.info(self._path(key))
        if not isinstance(info.get("size"), int):
            hint = "It has to answer HEAD or GET with Content-Length"
            message = f"{self.uri}: the server does not say how long {key} is"
            raise StoreError(message, hint=hint, tier=Tier.SHARED, file=key)
        own, last_modified = str(info.get("ETag") or ""), str(info.get("Last-Modified") or "")
        etag = own or last_modified or None
        self._versions[key, etag] = _FileVersion(
            str(info["url"]), info["size"], own, last_modified, _is_strong(last_modified)
        )
        return ObjectInfo(key, info["size"], etag)

    async def _version(self, key: str, if_match: str | None) -> _FileVersion:
        known = self._versions.get((key, if_match))
        if known is not None and if_match is not None:
            return known
        found = await self.head(key)
        if if_match not in (None, found.etag):
            raise PreconditionFailedError(f"{self.uri}/{key} has changed", uri=self.uri, key=key)
        return self._versions[key, found.etag]

    async def get_range_into(
        self, key: str, byte_range: ByteRange, into: memoryview, *, if_match: str | None = None
    ) -> None:
        version = await self._version(key, if_match)
        if check_range(byte_range).stop > version.size_bytes:
            raise short_answer(self.uri, key, byte_range, max(0, version.size_bytes - byte_range.start))
        if not byte_range.size_bytes:
            return
        try:
            await self._receive(version.url, byte_range, into, version.size_bytes, version.matches)
        except NotThisWay as answer:
            data = await UniversalStore.get_range(self, key, byte_range, if_match=if_match)
            if len(data) != byte_range.size_bytes:
                message = f"{self.uri}: {key} is answered with {answer}"
                raise IntegrityError(message, tier=Tier.SHARED, file=key) from None
            into[: byte_range.size_bytes] = data

    @contextlib.asynccontextmanager
    async def reading(
        self, key: str, *, if_match: str | None = None
    ) -> AsyncIterator[Callable[[memoryview], Awaitable[None]]]:
        version = await self._version(key, if_match)
        async with self._read_whole(version.url, version.size_bytes, lambda _: {}, version.matches) as fill:
            yield fill

    def _find(self, prefix: str) -> builtins.list[ObjectInfo]:
        keys = list(self._keys(prefix))
        with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
            return list(pool.map(partial(_named, self.uri, self._head), keys))

    def _keys(self, prefix: str) -> Iterator[str]:
        """Yield each key once, although pages may link in a circle."""
        pending, known = [prefix], {prefix}
        while pending:
            directory = pending.pop()
            files, names = self._page(directory)
            yield from files
            below = [f"{directory}/{name}" if directory else name for name in names]
            pending += [name for name in below if name not in known]
            known.update(below)

    def _page(self, prefix: str) -> tuple[builtins.list[str], builtins.list[str]]:
        directory = f"{self._directory(prefix).rstrip('/')}/"
        files, names = set(), set()
        try:
            shown = self.fs.ls(directory, detail=True)
        except FileNotFoundError:
            hint = "HTTP has no other listing: have the server show one, or name a file"
            message = f"{directory} is not found, or has no index page"
            raise ObjectNotFoundError(message, hint=hint, tier=Tier.SHARED) from None
        for info in shown:
            name = unquote(str(info["name"]).removeprefix(directory))
            is_below = str(info["name"]).startswith(directory) and not {"?", "#"} & set(str(info["name"]))
            if is_below and name.endswith("/") and name.count("/") == 1 and name not in ("./", "../"):
                names.add(name[:-1])
            elif is_below and name and "/" not in name and name not in (".", ".."):
                files.add(f"{prefix}/{name}" if prefix else name)
        return sorted(files), sorted(names)

    async def list_level(self, prefix: str = "") -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
        try:
            files, names = await self._call(self._page, prefix)
        except ObjectNotFoundError:
            return None
        return [await self.head(key) for key in files], names

    def _list_dirs(self, prefix: str) -> builtins.list[str]:
        try:
            return self._page(prefix)[1]
        except FileNotFoundError:
            return []


def _named(uri: str, head: Callable[[str], ObjectInfo], key: str) -> ObjectInfo:
    try:
        with errors_of(uri):
            return head(key)
    except ObjectNotFoundError as error:
        hint = "Leave it out (--exclude), or have the link removed"
        message = f"{uri}: the server shows {key} on a page, and does not give it"
        raise StoreError(message, hint=hint, tier=Tier.SHARED, file=key) from error


def _weak(etag: str) -> str:
    return etag.removeprefix("W/")


def _is_strong(last_modified: str) -> bool:
    try:
        return time() - parsedate_to_datetime(last_modified).timestamp() > STRONG_SECONDS
    except (TypeError, ValueError):
        return False
