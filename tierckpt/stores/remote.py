"""S3, Azure Blob and GCS through obstore. The only module that imports it.

Three habits of obstore shape this file:
    - It sends buffers without copying them, even after ``write`` has returned: a piece that its producer may still
      change is copied first.
    - A request that is cancelled half way leaves a multipart transfer behind: requests are always awaited to their
      end, then aborted (``settled``).
    - It raises one wide type for most failures: ``_http_status`` below is the one place that reads its text.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import contextlib
import re
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import obstore
from obstore import exceptions as obstore_errors
from obstore.store import AzureStore, GCSStore, S3Store

from ..config import MiB, Settings
from ..errors import (
    BucketNotFoundError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from ..layout import Location
from ..telemetry import logger
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from .common import check_key, check_prefix, check_range, check_size, closing, settled, short_answer
from .credentials import Access, azure_access, gcs_access, s3_access

if TYPE_CHECKING:
    from obstore import GetOptions

log = logger("stores.remote")

Bucket: TypeAlias = S3Store | AzureStore | GCSStore

PART_SIZE_BYTES_MIN = 8 * MiB
PARTS_MAX = 10_000
"""S3's and GCS's limit on parts of one object; Azure allows more."""
DELETE_BATCH = 1000
CONNECT_TIMEOUT_SECONDS = 5.0
EXIT_PAUSE_SECONDS = 0.1

# obstore's threads let go of Python objects a moment after a request has been answered, and need the interpreter for
# it. One that is shutting down aborts the process then, after everything was done. So the exit leaves them that moment.
atexit.register(time.sleep, EXIT_PAUSE_SECONDS)

_ACCESS = {"s3": s3_access, "az": azure_access, "gs": gcs_access}
_CLASSES: dict[str, Any] = {"s3": S3Store, "az": AzureStore, "gs": GCSStore}


class RemoteStore:
    """Objects of a bucket or container below a key prefix.

    Credentials are looked up at the first verb, off the event loop. Memory: one ``put_stream`` holds at most
    ``settings.concurrency + 1`` parts of 8 MiB (larger only above 78 GiB per object).
    """

    def __init__(self, location: Location, settings: Settings) -> None:
        self.location = location
        self.settings = settings
        self.uri = location.uri
        self.has_put_if_absent = True
        self._lock = asyncio.Lock()
        self._opened: Bucket | None = None
        self._endpoint = ""
        self._bucket_exists = False

    async def _bucket(self) -> Bucket:
        if self._opened is None:
            async with self._lock:
                if self._opened is None:
                    self._opened = await settled(asyncio.to_thread(self._open))
        return self._opened

    def _open(self) -> Bucket:
        access = _ACCESS[self.location.scheme](self.location.authority)
        self._endpoint = access.endpoint
        try:
            return _build(self.location, self.settings, access)
        except (obstore_errors.BaseError, ValueError) as error:
            raise ConfigError(
                f"cannot open {self.uri}: {_first_line(error)}", hint="Check the environment variables of this cloud"
            ) from error

    async def head(self, key: str) -> ObjectInfo:
        bucket = await self._bucket()
        async with self._errors(key):
            meta = await obstore.head_async(bucket, check_key(key))
        return _info(meta)

    async def get(self, key: str) -> bytes:
        bucket = await self._bucket()
        async with self._errors(key):
            answer = await obstore.get_async(bucket, check_key(key))
            return bytes(await answer.bytes_async())

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        if not check_range(byte_range).size_bytes:  # no such request exists in HTTP
            return await self._get_nothing(key, if_match)
        bucket = await self._bucket()
        options: GetOptions = {"range": (byte_range.start, byte_range.stop)}
        if if_match is not None:
            options["if_match"] = if_match
        async with self._errors(key):
            try:
                answer = await obstore.get_async(bucket, check_key(key), options=options)
            except obstore_errors.GenericError as error:
                if _http_status(error) == 416:
                    raise short_answer(self.uri, key, byte_range, 0) from None
                raise
            data = memoryview(await answer.bytes_async())
        if len(data) != byte_range.size_bytes:
            raise short_answer(self.uri, key, byte_range, len(data))
        return data

    async def _get_nothing(self, key: str, if_match: str | None) -> bytes:
        info = await self.head(key)
        if if_match is not None and info.etag != if_match:
            raise PreconditionFailedError(f"{key} has changed", uri=self.uri, key=key)
        return b""

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Write a small object in one request.

        With ``if_absent``, a request whose success was lost on the way and was tried again finds its own object and
        raises PreconditionFailedError: the caller reads the object to see whose it is.
        """
        bucket = await self._bucket()
        mode = "create" if if_absent else "overwrite"
        async with self._errors(key, writing=True):
            await settled(obstore.put_async(bucket, check_key(key), data, mode=mode, use_multipart=False))  # type: ignore[arg-type]

    async def put_stream(self, key: str, pieces: AsyncIterator[Buffer], size_bytes: int) -> None:
        """Write a large object in parts. Aborted on any error: no object and, on S3 and GCS, no parts stay behind.

        Azure has no abort; parts that were never committed are invisible and go away by themselves after a week.
        """
        bucket = await self._bucket()
        writer = obstore.open_writer_async(
            bucket, check_key(key), buffer_size=_part_size_bytes(size_bytes), max_concurrency=self.settings.concurrency
        )
        async with closing(pieces):
            try:
                written = 0
                async for piece in pieces:
                    async with self._errors(key, writing=True):
                        written += await settled(writer.write(_frozen(piece)))
                check_size(self.uri, key, size_bytes, written)
                async with self._errors(key, writing=True):
                    await settled(writer.close())
            except BaseException as error:
                await self._abort(writer, key, error)
                raise

    async def _abort(self, writer: Any, key: str, cause: BaseException) -> None:
        try:
            await settled(writer.__aexit__(type(cause), cause, cause.__traceback__))
        except (obstore_errors.BaseError, OSError, ValueError) as error:
            # The cause is what the caller must see. Parts that stay are invisible; a lifecycle rule removes them.
            log.warning("could not abort the transfer of %s to %s: %s", key, self.uri, _first_line(error))

    async def link(self, key: str, source: Path) -> bool:
        """False: a bucket shares no filesystem with anyone."""
        return False

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        bucket = await self._bucket()
        stream = obstore.list(bucket, check_prefix(prefix) or None, chunk_size=1000)
        held: ObjectInfo | None = None  # an empty object may be the marker of the "directory" that comes after it
        while True:
            async with self._errors(None):
                try:
                    metas = await stream.__anext__()
                except StopAsyncIteration:
                    break
            for info in map(_info, metas):
                if not info.key:
                    continue  # the marker of the root itself
                if held is not None and not info.key.startswith(f"{held.key}/"):
                    yield held
                held = None if info.size_bytes else info
                if info.size_bytes:
                    yield info
        if held is not None:
            yield held

    async def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        bucket = await self._bucket()
        async with self._errors(None):
            answer = await obstore.list_with_delimiter_async(bucket, check_prefix(prefix) or None)
        return sorted({path.rstrip("/").rpartition("/")[2] for path in answer["common_prefixes"]})

    async def delete(self, key: str) -> None:
        await self._delete_all([check_key(key)])

    async def delete_dir(self, prefix: str) -> None:
        batch: builtins.list[str] = []
        async for info in self.list(prefix):
            batch.append(info.key)
            if len(batch) == DELETE_BATCH:
                await self._delete_all(batch)
                batch = []
        if batch:
            await self._delete_all(batch)

    async def _delete_all(self, keys: builtins.list[str]) -> None:
        """Delete ``keys``; one that is gone already does not keep the others."""
        bucket = await self._bucket()
        try:
            async with self._errors(keys[0]):
                await settled(obstore.delete_async(bucket, keys))
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError:  # Azure says so and may stop there; S3 never does
            for key in keys if len(keys) > 1 else []:
                await self._delete_all([key])

    async def close(self) -> None:
        """Drop the client; its connections close with it."""
        self._opened = None

    @contextlib.asynccontextmanager
    async def _errors(self, key: str | None, *, writing: bool = False) -> AsyncIterator[None]:
        """Translate what obstore raises. ``key`` None means that the request was about the bucket itself."""
        try:
            yield
        except (TierckptError, asyncio.CancelledError):
            raise
        except (obstore_errors.BaseError, OSError, ValueError) as error:
            ours = self._translate(error, key)
            if isinstance(ours, ObjectNotFoundError) and await self._bucket_is_missing(key, writing):
                ours = self._missing_bucket()
            raise ours from error
        else:
            self._bucket_exists = True

    async def _bucket_is_missing(self, key: str | None, writing: bool) -> bool:
        """Tell a missing bucket from a missing key, which answer alike. One listing, once per store."""
        if key is None or writing:  # neither a listing nor a put can miss anything but the bucket
            return True
        if self._bucket_exists:
            return False
        try:
            await obstore.list(await self._bucket(), chunk_size=1).__anext__()
        except StopAsyncIteration:
            pass
        except (obstore_errors.BaseError, OSError) as error:
            return _is_missing(error)
        self._bucket_exists = True
        return False

    def _missing_bucket(self) -> BucketNotFoundError:
        name = f"{self.location.scheme}://{self.location.authority}"
        return BucketNotFoundError(
            f"{name} does not exist",
            hint="Create it, or check the name and the endpoint",
            uri=self.uri,
            endpoint=self._endpoint or None,
        )

    def _translate(self, error: Exception, key: str | None) -> TierckptError:
        target = self.uri if key is None else f"{self.uri}/{key}"
        context: dict[str, Any] = {"uri": self.uri, "key": key, "endpoint": self._endpoint or None, "tier": Tier.SHARED}
        status = _http_status(error)
        if _is_missing(error):
            return ObjectNotFoundError(f"{target} does not exist", **context)
        if isinstance(error, obstore_errors.AlreadyExistsError):
            return PreconditionFailedError(f"{target} exists", **context)
        if isinstance(error, obstore_errors.PreconditionError | obstore_errors.NotModifiedError):
            return PreconditionFailedError(f"{target} has changed", **context)
        denied = obstore_errors.PermissionDeniedError | obstore_errors.UnauthenticatedError
        if isinstance(error, denied) or status in {401, 403}:
            return PermissionDeniedError(
                f"access to {target} was refused",
                hint=f"Check the credentials for {self._endpoint or self.location.scheme} and their rights on "
                f"{self.location.authority!r}",
                **context,
            )
        if isinstance(error, ValueError | obstore_errors.InvalidPathError | obstore_errors.NotSupportedError):
            return StoreError(f"{target}: {_first_line(error)}", **context)
        if status == 416:
            return IntegrityError(f"{target} is shorter than what was asked for", **context)
        if status is not None and 400 <= status < 500 and status not in {408, 425, 429}:
            return StoreError(f"{target}: HTTP {status}: {_first_line(error)}", **context)
        reason = f"HTTP {status}" if status else _first_line(error)
        return StoreUnavailableError(
            f"{target} cannot be reached: {reason}", hint="Retries are spent; try again later", **context
        )


def _build(location: Location, settings: Settings, access: Access) -> Bucket:
    timeout = timedelta(seconds=settings.store_timeout_seconds)
    bucket: Bucket = _CLASSES[location.scheme](
        location.authority,
        prefix=location.path or None,
        config=access.options,
        client_options={
            "allow_http": access.endpoint.startswith("http://"),
            "timeout": timeout,
            "connect_timeout": min(timeout, timedelta(seconds=CONNECT_TIMEOUT_SECONDS)),
        },
        retry_config={"max_retries": settings.retry_attempts_max, "retry_timeout": timeout},
        credential_provider=access.provider,
    )
    return bucket


def _part_size_bytes(size_bytes: int) -> int:
    """Return a part size, in whole MiB, that keeps the object within PARTS_MAX parts."""
    smallest = -(-size_bytes // PARTS_MAX)
    return max(PART_SIZE_BYTES_MIN, -(-smallest // MiB) * MiB)


def _frozen(piece: Buffer) -> Buffer:
    """Return ``piece`` if nobody can change it, else a copy. See the module's docstring."""
    owner = piece.obj if isinstance(piece, memoryview) else piece
    return piece if isinstance(owner, bytes) else bytes(piece)


def _info(meta: Any) -> ObjectInfo:
    etag = meta["e_tag"]
    if etag and not etag.endswith('"'):  # Azure's listings leave out the quotes that every other answer has
        etag = f'"{etag}"'
    return ObjectInfo(meta["path"], meta["size"], etag)


def _is_missing(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError) or _http_status(error) == 404


_STATUS = re.compile(r"non-2xx status code: (\d{3})")


def _http_status(error: Exception) -> int | None:
    """Return the HTTP status behind ``error``, None when there was no answer (refused, timeout, cut off).

    obstore raises GenericError for every failed listing and for every status it has no type for, and keeps the
    status in its text only. Only the first line is read: what follows repeats the server's own words. The name of the
    client's own refusal of a range past the end stands for the 416 that Azurite does not send.
    """
    if isinstance(error, obstore_errors.GenericError) and "source: InvalidRangeRequest" in str(error):
        return 416
    match = _STATUS.search(_first_line(error))
    return int(match[1]) if match else None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
