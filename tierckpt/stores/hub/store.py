"""``hf://org/name[@revision]`` as a store: one commit of a repository of a Hugging Face Hub.

Invariants:
    H1  A listing resolves a revision to a commit once; its files are read at that commit.
    H2  Requests to the Hub: one for the revision, for each 1000 listed files, and for each file read. Ranges are read
        from the resolver's URL, which is renewed after it expires.
    H3  A file is identified by its content digest, which ``cache`` compares with each complete file.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, NoReturn, TypeVar
from urllib.parse import urlsplit

from ...config import Settings
from ...errors import (
    IntegrityError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreError,
    TierckptError,
)
from ...format.layout import Location
from ...types import ByteRange, ObjectInfo, Tier
from ..base import RangesIgnoredError, Store, check_key, check_prefix, check_range, short_answer, untrusted
from ..http_reader import UrlStore
from ..retry import Retries
from ..signed_requests import NotThisWay
from .api import HubFile, Repository, hub_of, no_object, repository_of

T = TypeVar("T")

LISTED_SECONDS: Final = 10.0
"""The verbs that freeze a model share a listing."""
URLS_MAX: Final = 3
DIRECT: Final = "direct"
_POINTER = b"version https://git-lfs"


class HubStore(UrlStore, Store):
    def __init__(self, location: Location, settings: Settings, retries: Retries | None = None) -> None:
        super().__init__(location.uri, settings, retries)
        self.has_put_if_absent = False
        self._repository = repository_of(location)
        self._is_whole_only = False
        self._listed: dict[str, HubFile] = {}
        self._listed_at = 0.0
        self.commit = ""
        self._listing = asyncio.Lock()
        self._commits: dict[tuple[str, str], tuple[str, HubFile]] = {}
        self._urls: dict[tuple[str, str], str] = {}
        self._locating: dict[str, asyncio.Lock] = {}

    @property
    def repository(self) -> Repository:
        if self._repository is None:
            hint = "Write hf://ORG/NAME or hf://ORG/NAME@REVISION"
            raise ObjectNotFoundError(f"{self.uri} names no repository", hint=hint, tier=Tier.SHARED)
        return self._repository

    async def _probe(self) -> bool:
        return await hub_of(self.retries).probe()

    async def _files(self) -> dict[str, HubFile]:
        async with self._listing:
            repository, hub = self.repository, hub_of(self.retries)
            is_old = not repository.is_commit and time.monotonic() - self._listed_at > LISTED_SECONDS
            if not self._listed_at or is_old:
                commit = await hub.commit(repository)
                if commit != self.commit:
                    below = f"{repository.path}/" if repository.path else ""
                    found = [file for file in await hub.tree(repository, commit) if file.path.startswith(below)]
                    self._listed = {file.path.removeprefix(below): file for file in found}
                    self._commits |= {(key, file.etag): (commit, file) for key, file in self._listed.items()}
                self._listed_at, self.commit = time.monotonic(), commit
            return self._listed

    async def _file(self, key: str, etag: str | None) -> tuple[str, HubFile]:
        if etag is not None and (known := self._commits.get((key, etag))) is not None:
            return known
        file = (await self._files()).get(check_key(key))
        if file is None:
            raise ObjectNotFoundError(f"{self.uri} has no file {key}", tier=Tier.SHARED, key=key)
        if etag is not None and file.etag != etag:
            raise PreconditionFailedError(f"{key} has changed", uri=self.uri, key=key)
        return self.commit, file

    async def head(self, key: str) -> ObjectInfo:
        _, file = await self._file(key, None)
        return ObjectInfo(key, file.size_bytes, file.etag)

    async def get(self, key: str) -> bytes:
        _, file = await self._file(key, None)
        return bytes(await self.get_range(key, ByteRange(0, file.size_bytes), if_match=file.etag))

    async def get_range_into(
        self, key: str, byte_range: ByteRange, into: memoryview, *, if_match: str | None = None
    ) -> None:
        """``get_range`` into the caller's memory.

        Raises ObjectNotFoundError; IntegrityError: other bytes than listed; RangesIgnoredError: use ``reading``.
        """
        commit, file = await self._file(key, if_match)
        size_bytes = check_range(byte_range).size_bytes
        if byte_range.stop > file.size_bytes:
            raise short_answer(self.uri, key, byte_range, max(0, file.size_bytes - byte_range.start))
        if not size_bytes:
            return
        try:
            await self._read(commit, file, byte_range, into)
        except RangesIgnoredError:
            self._is_whole_only = True
            raise

    async def _read(self, commit: str, file: HubFile, byte_range: ByteRange, into: memoryview) -> None:
        if self._is_whole_only and byte_range.size_bytes < file.size_bytes:
            raise self._ranges_ignored(file)
        reason = url = ""
        for _ in range(URLS_MAX):
            if not (url := await self._locate(commit, file, byte_range, into) or ""):
                return
            try:
                await self._receive(url, byte_range, into, file.size_bytes)
                return
            except NotThisWay as refusal:
                reason = str(refusal)
                if self._urls.get((commit, file.path)) == url:
                    del self._urls[commit, file.path]
        if reason.startswith("TLS"):
            raise untrusted(f"{file.path} of {self.uri}", urlsplit(url).netloc, reason, "hf", tier=Tier.SHARED)
        if reason == "HTTP 404":
            raise no_object(self.uri, file.path)
        raise StoreError(f"{file.path} of {self.uri} cannot be read: {reason}", file=file.path, tier=Tier.SHARED)

    async def _locate(self, commit: str, file: HubFile, byte_range: ByteRange, into: memoryview) -> str | None:
        name = commit, file.path
        if name not in self._urls:
            async with self._locating.setdefault(file.path, asyncio.Lock()):
                if name not in self._urls:
                    return await self._resolve(commit, file, byte_range, into)
        url = self._urls[name]
        return url if url != DIRECT else await self._resolve(commit, file, byte_range, into)

    async def _resolve(self, commit: str, file: HubFile, byte_range: ByteRange, into: memoryview) -> str | None:
        found = await hub_of(self.retries).resolve(self.repository, commit, file.path, byte_range)
        if isinstance(found, str):
            self._urls[commit, file.path] = found
            return found
        if found.is_more and found.headers.get("content-length", str(file.size_bytes)) == str(file.size_bytes):
            raise self._ranges_ignored(file)
        data = found.body[byte_range.start : byte_range.stop] if found.status == 200 else found.body
        if len(data) != byte_range.size_bytes:
            sent = found.headers.get("content-length", "more") if found.is_more else len(data)
            what = "a pointer without its object" if found.body.startswith(_POINTER) else f"{sent} bytes"
            hint = "The repository is damaged: inform its owner"
            message = f"{self.uri} lists {file.path} with {file.size_bytes} bytes, and sends {what}"
            raise IntegrityError(message, hint=hint, file=file.path, tier=Tier.SHARED)
        self._urls[commit, file.path] = DIRECT
        into[: len(data)] = data
        return None

    @contextlib.asynccontextmanager
    async def reading(
        self, key: str, *, if_match: str | None = None
    ) -> AsyncIterator[Callable[[memoryview], Awaitable[None]]]:
        commit, file = await self._file(key, if_match)
        hub = hub_of(self.retries)
        url = f"{hub.endpoint}{hub.path_of(self.repository, commit, file.path)}"
        known = self._urls.get((commit, file.path), "")
        async with self._read_whole(url, file.size_bytes, hub.authorization, received_at=known) as fill:
            yield fill

    def _ranges_ignored(self, file: HubFile) -> RangesIgnoredError:
        return RangesIgnoredError(f"{self.uri} sends all of {file.path} for a range", tier=Tier.SHARED)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        below = f"{check_prefix(prefix)}/" if prefix else ""
        for key, file in (await self._files()).items():
            if key.startswith(below):
                yield ObjectInfo(key, file.size_bytes, file.etag)

    async def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        level = await self.list_level(prefix)
        return level[1] if level is not None else []

    async def list_level(self, prefix: str = "") -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
        if self._repository is None:
            return None
        below = f"{check_prefix(prefix)}/" if prefix else ""
        files, names = [], set()
        for key, file in (await self._files()).items():
            name, is_deeper, _ = key.removeprefix(below).partition("/")
            if key.startswith(below) and is_deeper:
                names.add(name)
            elif key.startswith(below):
                files.append(ObjectInfo(key, file.size_bytes, file.etag))
        return (files, sorted(names)) if files or names or not prefix else None

    async def reconnect(self, damage: TierckptError) -> None:
        await super().reconnect(damage)
        self._urls.clear()

    async def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise PermissionDeniedError(
            f"{self.uri} is read only", hint="Save to s3://, az://, gs:// or a path", tier=Tier.SHARED
        )

    put = put_stream = delete = delete_dir = _refuse
