"""Any URL that fsspec opens: sftp://, hdfs://, smb://, webdav, memory:// and the rest.

An fsspec file publishes its data on close, even after an error. So pieces go to a temporary name, which is moved only
when complete. Backends without a rename copy on the server.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import secrets
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.registry import known_implementations
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ..config import MiB
from ..disk.durable import translate_os_error
from ..disk.processes import is_temporary, stem_of
from ..errors import (
    ConfigError,
    MissingExtraError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from ..format.layout import Location
from ..redaction import printable
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from .access import drop_empty
from .base import (
    FolderMarkers,
    Store,
    check_key,
    check_prefix,
    check_range,
    check_size,
    closing,
    no_such_name,
    short_answer,
    to_completion,
    untrusted,
)
from .proxies import proxy_for
from .schemes import check_location, check_read_as

T = TypeVar("T")

BLOCK_SIZE_BYTES = 8 * MiB
DELETES_AT_ONCE = 16

# Errors of client libraries that are no OSError, by name, to avoid imports.
MESSAGE_CHARS_MAX = 300
_DENIED_TYPES = {
    "AuthenticationException",
    "BadHostKeyException",
    "ClientAuthenticationError",
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "SMBAuthenticationError",
}
# Version keys of backends, in order of trust.
_VERSION_FIELDS = ("ETag", "etag", "checksum", "sha256", "blob_id", "oid")
_TIME_FIELDS = ("mtime", "modified", "LastModified", "last_modified", "updated", "created")


def open_filesystem(location: Location, **options: Any) -> tuple[AbstractFileSystem, str]:
    """Return the file system for a URL, and its root path.

    Raises ConfigError: unknown scheme or bad URL. MissingExtraError: the scheme's package is missing.
    """
    check_location(location)
    try:
        fsspec.get_filesystem_class(location.scheme)
    except ImportError as error:
        said = known_implementations.get(location.scheme, {}).get("err") or str(error)
        raise MissingExtraError(f"{location.scheme}:// needs a package that is not installed: {said}") from None
    drop_empty()  # s3fs, adlfs and gcsfs read the environment
    if location.scheme in ("http", "https") and (proxy := proxy_for(location.uri)) is not None:
        options["proxy"] = proxy.url
    try:
        fs, root = fsspec.url_to_fs(location.uri, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"fsspec cannot open {location.uri}: {error}", uri=location.uri) from printable(error)
    except Exception as error:
        raise _translate(error, location.uri) from printable(error)
    check_read_as(location, root)
    return fs, root


class UniversalStore(Store):
    """Files of an fsspec filesystem below ``root``. ``put(if_absent=True)`` checks, then puts: two may both win.

    ``any_key`` accepts keys like ``a//b``.
    """

    def __init__(self, fs: AbstractFileSystem, root: str, uri: str, *, any_key: bool = False) -> None:
        self.fs = fs
        self.root = root.rstrip("/")
        self.uri = uri
        self.has_put_if_absent = False
        self._any_key = any_key
        self._lock: Any = contextlib.nullcontext() if fs.async_impl else threading.Lock()

    def _path(self, key: str) -> str:
        return f"{self.root}/{key if self._any_key else check_key(key)}"

    def _directory(self, prefix: str) -> str:
        return f"{self.root}/{prefix}" if prefix else self.root

    async def _call(self, verb: Callable[..., T], *args: Any, **options: Any) -> T:

        def run() -> T:
            with errors_of(self.uri), self._lock:
                return verb(*args, **options)

        return await to_completion(asyncio.to_thread(run))

    async def head(self, key: str) -> ObjectInfo:
        return await self._call(self._head, key)

    def _head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        self.fs.invalidate_cache()
        info = self.fs.info(path)
        if info["type"] != "file":
            raise ObjectNotFoundError(f"{self.uri}/{key} is not a file", uri=self.uri, key=key)
        moment = _modified(info)
        seconds = float(moment) if isinstance(moment, int | float) else None
        return ObjectInfo(key, self._size(path, info), _etag(info), seconds)

    async def get(self, key: str) -> bytes:
        return bytes(await self._call(self.fs.cat_file, self._path(key)))

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        return await self._call(self._get_range, key, check_range(byte_range), if_match)

    def _get_range(self, key: str, byte_range: ByteRange, if_match: str | None) -> bytes:
        start, stop = byte_range.start, byte_range.stop
        # Backends disagree about ranges past the end.
        size_bytes = self._head(key).size_bytes
        if stop > size_bytes:
            raise short_answer(self.uri, key, byte_range, max(0, size_bytes - start))
        data = bytes(self.fs.cat_file(self._path(key), start=start, end=stop)) if stop > start else b""
        # After the read: an etag that still matches was the etag during the read.
        if if_match is not None and self._head(key).etag != if_match:
            raise PreconditionFailedError(f"{self.uri}/{key} has changed", uri=self.uri, key=key)
        if len(data) != byte_range.size_bytes:
            raise short_answer(self.uri, key, byte_range, len(data))
        return data

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        if if_absent and await self._call(self._exists, key):
            raise PreconditionFailedError(f"{self.uri}/{key} exists", uri=self.uri, key=key)
        await self.put_stream(key, _one(data), len(memoryview(data).cast("B")))

    def _exists(self, key: str) -> bool:
        try:
            self._head(key)
        except FileNotFoundError:
            return False
        return True

    async def put_stream(self, key: str, pieces: AsyncIterator[Buffer], size_bytes: int) -> None:
        path = self._path(key)
        parent, _, name = path.rpartition("/")
        temporary = f"{parent}/.{stem_of(name)}.{secrets.token_hex(6)}.tmp"
        async with closing(pieces):
            opened: builtins.list[Any] = []  # a cancellation cannot lose it
            try:
                await self._call(self._create, temporary, opened)
                (file,) = opened
                written = 0
                async for piece in pieces:
                    await self._call(file.write, bytes(piece))  # backends may keep the buffer
                    written += len(piece)
                check_size(self.uri, key, size_bytes, written)
                await self._call(file.close)
                await self._call(self._publish, temporary, path, key, size_bytes)
            except BaseException:
                await self._call(self._abandon, opened, temporary)
                raise

    def _create(self, path: str, opened: builtins.list[Any]) -> None:
        try:
            opened.append(self.fs.open(path, "wb", block_size=BLOCK_SIZE_BYTES))
        except FileNotFoundError:
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            opened.append(self.fs.open(path, "wb", block_size=BLOCK_SIZE_BYTES))

    def _publish(self, temporary: str, path: str, key: str, size_bytes: int) -> None:
        self.fs.invalidate_cache()
        check_size(self.uri, key, size_bytes, self.fs.info(temporary)["size"])
        if type(self.fs).mv is AbstractFileSystem.mv:
            self.fs.cp_file(temporary, path)
            self.fs.rm_file(temporary)
            return
        try:
            self.fs.mv(temporary, path)
        except FileExistsError:  # no replacing rename; the new bytes are in the temporary file
            self.fs.rm_file(path)
            self.fs.mv(temporary, path)

    def _abandon(self, opened: builtins.list[Any], temporary: str) -> None:
        """Never raises: the caller must see the first error."""
        for file in opened:
            with contextlib.suppress(Exception):
                _discard(file)
        with contextlib.suppress(Exception):
            self.fs.rm_file(temporary)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        markers = FolderMarkers()
        for info in await self._call(self._find, check_prefix(prefix)):
            if markers.take(info):
                yield info
        for info in markers.empty():
            yield info

    def _find(self, prefix: str) -> builtins.list[ObjectInfo]:
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(self._directory(prefix), detail=True)
        except FileNotFoundError:
            return []
        infos = []
        below = self._directory(prefix) + "/"
        for path, info in found.items():
            path = self._normal(path)
            if path.startswith(below) and info["type"] == "file" and not is_temporary(path.rpartition("/")[2]):
                if info.get("size") is None:
                    info = self.fs.info(path)
                infos.append(ObjectInfo(path[len(self.root) + 1 :], self._size(path, info), _etag(info)))
        return infos

    def _size(self, path: str, info: dict[str, Any]) -> int:
        if not isinstance(info.get("size"), int):
            raise StoreError(f"{self.uri} does not say how long {path} is", tier=Tier.SHARED, file=path)
        return int(info["size"])

    def _normal(self, path: str) -> str:
        if self.root.startswith("/") and not path.startswith("/"):
            return f"/{path}"
        return path if self.root.startswith("/") else path.lstrip("/")

    async def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        return await self._call(self._list_dirs, check_prefix(prefix))

    def _list_dirs(self, prefix: str) -> builtins.list[str]:
        level = self._list_level(prefix)
        return level[1] if level is not None else []

    async def list_level(self, prefix: str = "") -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
        return await self._call(self._list_level, check_prefix(prefix))

    def _list_level(self, prefix: str) -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
        self.fs.invalidate_cache()
        directory = self._directory(prefix)
        try:
            found = {self._normal(info["name"]).rstrip("/"): info for info in self.fs.ls(directory, detail=True)}
        except (FileNotFoundError, NotADirectoryError):
            return None
        itself = found.pop(directory.rstrip("/"), None)
        if itself is not None and itself["type"] == "file" and not found:
            return None
        files = [
            ObjectInfo(path[len(self.root) + 1 :], info["size"], _etag(info))
            for path, info in found.items()
            if info["type"] == "file" and not is_temporary(path.rpartition("/")[2])
        ]
        return files, sorted(path.rpartition("/")[2] for path, info in found.items() if info["type"] == "directory")

    async def delete(self, key: str) -> None:
        await self._call(self._remove, self._path(key))

    async def delete_dir(self, prefix: str) -> None:
        directory = self._directory(check_prefix(prefix))
        paths = await self._call(self._paths, directory)
        for start in range(0, len(paths), DELETES_AT_ONCE):
            batch = paths[start : start + DELETES_AT_ONCE]
            await asyncio.gather(*(self._call(self._remove, path) for path in batch))
        await self._call(self._remove_empty, directory)

    def _paths(self, directory: str) -> builtins.list[str]:
        self.fs.invalidate_cache()
        try:
            return [path for path in self.fs.find(directory) if self._normal(path).startswith(f"{directory}/")]
        except FileNotFoundError:
            return []

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(path)

    def _remove_empty(self, directory: str) -> None:
        """Remove empty directories one by one: ``rm`` expands wildcards, and would remove other data."""
        self.fs.invalidate_cache()
        if directory == self.root or not self.fs.isdir(directory):
            return
        found = self.fs.find(directory, withdirs=True, detail=True).items()
        below = [path for path, info in found if info["type"] == "directory"]
        for path in sorted({*below, directory}, reverse=True):
            with contextlib.suppress(OSError, NotImplementedError):
                self.fs.rmdir(path)

    async def close(self) -> None: ...


def _discard(file: Any) -> None:
    if not isinstance(file, AbstractBufferedFile):
        file.close()
        return
    try:
        file.discard()
    finally:
        file.closed = True  # or the garbage collector would publish it


async def _one(data: Buffer) -> AsyncIterator[Buffer]:
    yield data


def _etag(info: dict[str, Any]) -> str | None:
    for field in _VERSION_FIELDS:
        if info.get(field):
            return str(info[field])
    moment = _modified(info)
    return f"{moment}-{info['size']}" if moment is not None else None


def _modified(info: dict[str, Any]) -> Any:
    moment = next((info[field] for field in _TIME_FIELDS if info.get(field)), None)
    return moment.timestamp() if isinstance(moment, datetime) else moment


@contextlib.contextmanager
def errors_of(uri: str) -> Iterator[None]:
    try:
        yield
    except TierckptError:
        raise
    except Exception as error:
        raise _translate(error, uri) from printable(error)


def _translate(error: Exception, uri: str) -> TierckptError:
    names = {kind.__name__ for kind in type(error).__mro__}
    said = str(error).partition("\n")[0].partition("\\n")[0][:MESSAGE_CHARS_MAX]
    context: dict[str, Any] = {"uri": uri, "tier": Tier.SHARED}
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(f"not found: {said}", **context)
    status = getattr(error, "status", None)
    if isinstance(error, PermissionError) or names & _DENIED_TYPES or status in {401, 403}:
        return PermissionDeniedError(f"access to {uri} was refused: {said}", hint="Check the credentials", **context)
    if isinstance(error, FileExistsError):
        return PreconditionFailedError(f"exists: {said}", **context)
    certificate = getattr(error, "certificate_error", error)
    if isinstance(certificate, ssl.SSLCertVerificationError):
        return untrusted(uri, "its server", certificate.verify_message, "", **context)
    cause = getattr(error, "os_error", error)
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
        return no_such_name(uri, uri, "the URL", **context)
    if isinstance(error, NotImplementedError | TypeError | AttributeError | ValueError):
        return StoreError(f"{uri}: the filesystem cannot do this: {said}", **context)
    is_away = isinstance(error, ConnectionError | TimeoutError) or "ClientConnectionError" in names
    if isinstance(error, OSError) and error.errno is not None and not is_away:
        return translate_os_error(error, Path(uri), Tier.SHARED)
    return StoreUnavailableError(f"{uri}: {type(error).__name__}: {said}", hint="Try again later", **context)
