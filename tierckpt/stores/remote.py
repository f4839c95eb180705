"""S3, Azure Blob and GCS through obstore. The only module that imports it.

Four habits of obstore shape this file:
    - It sends buffers without copying them, even after ``write`` has returned: a piece that its producer may still
      change is copied first.
    - A request that is cancelled half way leaves a multipart transfer behind: requests are always awaited to their
      end, then aborted (``settled``).
    - It raises one wide type for most failures: remote_errors.py reads its text.
    - Its retries know no budget: they are off, and stores/retry.py does it. Except for the parts of a large object,
      which nobody outside can send again: each has ``PART_RETRIES_MAX`` inside, because the alternative is to send the
      whole object again. A transfer is not begun while the store is down, so an outage sees them once.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import obstore
from obstore import exceptions as obstore_errors
from obstore.store import AzureStore, GCSStore, S3Store

from ..config import MiB, Settings
from ..errors import (
    BucketNotFoundError,
    ConfigError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from ..layout import CLAIM, Location
from ..redaction import printable
from ..telemetry import logger
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from .common import check_key, check_prefix, check_range, check_size, closing, settled, short_answer
from .credentials import Access, azure_access, gcs_access, s3_access
from .ranges import Get, NotThisWay, Ranges, is_behind_proxy
from .redirects import bounds
from .remote_errors import (
    error_code,
    first_line,
    http_status,
    is_expiry,
    is_missing,
    refused,
    renewed_meanwhile,
    still_refused,
    translate,
)
from .retry import PROBE_SECONDS_MAX, Retries
from .signed import delete_if

if TYPE_CHECKING:
    from obstore import GetOptions

log = logger("stores.remote")

T = TypeVar("T")
Bucket: TypeAlias = S3Store | AzureStore | GCSStore

PART_SIZE_BYTES_MIN = 8 * MiB
PARTS_MAX = 10_000
"""S3's and GCS's limit on parts of one object; Azure allows more."""
DELETE_BATCH = 1000
CONNECT_TIMEOUT_SECONDS = 5.0
PART_RETRIES_MAX = 3
DIRECT_BYTES_MIN = 256 << 10
"""Smaller ranges are not worth a request of our own."""
SIGNED_FOR = timedelta(minutes=15)
RENEWAL_SECONDS_MIN = 10.0
"""Least time between two looks for newer credentials: a key that may not delete is not looked up for every delete."""
EXIT_PAUSE_SECONDS = 0.1

# obstore's threads let go of Python objects a moment after a request has been answered, and need the interpreter for
# it. One that is shutting down aborts the process then, after everything was done. So the exit leaves them that moment.
atexit.register(time.sleep, EXIT_PAUSE_SECONDS)

_ACCESS = {"s3": s3_access, "az": azure_access, "gs": gcs_access}
_CLASSES: dict[str, Any] = {"s3": S3Store, "az": AzureStore, "gs": GCSStore}


class RemoteStore:
    """Objects of a bucket or container below a key prefix.

    Credentials are looked up at the first verb, off the event loop, and once more when the server no longer takes
    them. Requests that fail in a way that may pass are tried again as ``retries`` allows. Memory: one ``put_stream``
    holds at most ``settings.concurrency + 1`` parts of 8 MiB (larger only above 78 GiB per object).
    """

    def __init__(self, location: Location, settings: Settings, retries: Retries | None = None) -> None:
        self.location = location
        self.settings = settings
        self.uri = location.uri
        self.has_put_if_absent = True
        self.retries = retries or Retries(settings)
        bucket = f"{location.scheme}://{location.authority}"
        self._breaker = self.retries.breaker(bucket)
        self._congestion = self.retries.congestion(bucket)
        self._lock = asyncio.Lock()
        self._access: Access | None = None
        self._clients: dict[int, Bucket] = {}
        """By how many retries they make themselves."""
        self._endpoint = ""
        self._bucket_exists = False
        self._is_watching = False
        self._ranges = Ranges()
        self._generation = 0
        """Counts the credentials used so far, so that of many requests refused at once one looks for newer ones."""
        self._is_proven = False
        """True when the server has taken the present credentials: only then can a refusal mean that they expired."""
        self._renewed_at = -RENEWAL_SECONDS_MIN

    async def _bucket(self, part_retries: int = 0) -> Bucket:
        if part_retries not in self._clients:
            async with self._lock:
                if part_retries not in self._clients:
                    self._clients[part_retries] = await settled(asyncio.to_thread(self._open, part_retries))
        return self._clients[part_retries]

    def _open(self, part_retries: int) -> Bucket:
        if self._access is None:
            self._access = self._look_up()
        self._endpoint = self._access.endpoint
        try:
            return _build(self.location, self._access, part_retries, self._client_timeout_seconds(part_retries))
        except (obstore_errors.BaseError, ValueError) as error:
            raise ConfigError(
                f"cannot open {self.uri}: {first_line(error)}", hint="Check the environment variables of this cloud"
            ) from printable(error)

    def _client_timeout_seconds(self, part_retries: int) -> float:
        # A part is not watched while it is sent, so its whole time is limited.
        return self._limit_seconds(PART_SIZE_BYTES_MIN) if part_retries else self.settings.store_timeout_seconds

    # --- one request ---------------------------------------------------------------------------------------------

    async def _request(self, key: str | None, call: Callable[[Bucket], Awaitable[T]], *, writing: bool = False) -> T:
        """Make one request by ``call``, again where that helps. ``key`` None: the request is about the bucket."""
        return await self.retries.run(self._breaker, self._probe, lambda: self._permitted(key, call, writing))

    async def _permitted(self, key: str | None, call: Callable[[Bucket], Awaitable[T]], writing: bool) -> T:
        """Make one request; when it is refused because the credentials have expired, once more with newer ones."""
        generation = self._generation
        try:
            return await self._call(key, call, writing)
        except PermissionDeniedError as refusal:
            if not await self._renewed(generation, refusal):
                raise
        try:
            return await self._call(key, call, writing)
        except PermissionDeniedError as error:
            raise still_refused(error) from error

    async def _call(self, key: str | None, call: Callable[[Bucket], Awaitable[T]], writing: bool) -> T:
        bucket = await self._bucket()
        async with self._errors(key, writing=writing):
            return await call(bucket)

    async def _renewed(self, generation: int, refusal: PermissionDeniedError) -> bool:
        """Replace the credentials that a request of ``generation`` was refused with. True when there are newer ones.

        Once per expiry: what was never accepted has not expired, and whoever comes second finds it done.
        """
        async with self._lock:
            if generation != self._generation:
                return True
            if not self._is_proven or self._access is None:
                return False
            if time.monotonic() < self._renewed_at + RENEWAL_SECONDS_MIN:
                return False
            self._renewed_at = time.monotonic()
            try:
                newer = await settled(asyncio.to_thread(self._look_up))
            except TierckptError as error:
                raise still_refused(refusal) from error
            if not newer.is_newer_than(self._access):
                if is_expiry(refusal):
                    raise still_refused(refusal) from refusal
                return False
            self._access, self._is_proven = newer, False
            self._generation += 1
            self._clients.clear()
        self.retries.counts["credentials_renewed"] += 1
        log.warning("%s no longer takes our credentials: going on with newer ones", self._breaker.name)
        return True

    def _look_up(self) -> Access:
        return _ACCESS[self.location.scheme](self.location.authority)

    async def _probe(self) -> bool:
        """Ask for something cheap, once. True when the store answered, if only to refuse or to say "not found"."""
        try:
            bucket = await self._bucket()
            async with asyncio.timeout(min(PROBE_SECONDS_MAX, self._limit_seconds(0))):
                await obstore.head_async(bucket, CLAIM)
        except (obstore_errors.BaseError, OSError, ValueError) as error:
            self.retries.counts["probes"] += 1
            return not isinstance(self._translate(error, None, self._is_proven), StoreUnavailableError)
        self.retries.counts["probes"] += 1
        return True

    def _limit_seconds(self, size_bytes: int) -> float:
        """Longest that a request of ``size_bytes`` may take, from the least throughput that counts as moving."""
        settings = self.settings
        least = int(settings.throughput_min_bytes_per_second)
        moving = settings.throughput_window_seconds + size_bytes / least if least else settings.store_timeout_seconds
        return min(moving, settings.store_timeout_seconds)

    async def again(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do ``work``, made of verbs of this store, again while it fails in a way that may pass (within the budget)."""
        return await self.retries.again(work)

    async def reconnect(self, damage: TierckptError) -> None:
        """Give up the connections after a damaged answer, so that the next request takes another way.

        Raises ``damage`` when the budget has nothing left to ask again with.
        """
        await self.retries.pay(damage)
        self.retries.counts["damaged_answers"] += 1
        self._clients.clear()  # requests under way keep the client they have
        self._ranges.close()

    async def available(self) -> bool:
        """Wait, as long as it takes, until the store is up. False, at once, when it was not down."""
        if not self._breaker.is_open:
            return False
        await self._breaker.passed(self._probe, patient=True)
        return True

    def hasten(self) -> None:
        self._breaker.hasten()

    # --- verbs ---------------------------------------------------------------------------------------------------

    async def head(self, key: str) -> ObjectInfo:
        check_key(key)

        async def call(bucket: Bucket) -> Any:
            async with asyncio.timeout(self._limit_seconds(0)):
                return await obstore.head_async(bucket, key)

        return _info(await self._request(key, call))

    async def get(self, key: str) -> bytes:
        check_key(key)
        return bytes(await self._request(key, lambda bucket: self._read(bucket, key, {})))

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        check_key(key)
        if not check_range(byte_range).size_bytes:  # no such request exists in HTTP
            return await self._get_nothing(key, if_match)
        options: GetOptions = {"range": (byte_range.start, byte_range.stop)}
        if if_match is not None:
            options["if_match"] = if_match

        async def call(bucket: Bucket) -> Buffer:
            try:
                return await self._read(bucket, key, options)
            except obstore_errors.GenericError as error:
                if http_status(error) == 416:
                    raise short_answer(self.uri, key, byte_range, 0) from None
                raise

        data = await self._request(key, call)
        if len(data) != byte_range.size_bytes:
            raise short_answer(self.uri, key, byte_range, len(data))
        return data

    async def get_range_into(
        self, key: str, byte_range: ByteRange, into: memoryview, *, if_match: str | None = None
    ) -> None:
        """``get_range`` into memory of the caller's. From S3, large ranges on connections of our own (ranges.py)."""
        check_key(key)
        size_bytes = check_range(byte_range).size_bytes
        if size_bytes >= DIRECT_BYTES_MIN and self.location.scheme == "s3" and self._ranges.is_usable:
            try:
                await self._request(key, lambda bucket: self._receive(bucket, key, byte_range, into, if_match))
                return
            except NotThisWay as reason:
                self._ranges.miss(reason)
        into[:size_bytes] = await self.get_range(key, byte_range, if_match=if_match)

    async def _receive(
        self, bucket: Bucket, key: str, byte_range: ByteRange, into: memoryview, if_match: str | None
    ) -> None:
        try:
            url = await obstore.sign_async(bucket, "GET", key, SIGNED_FOR)
        except (obstore_errors.BaseError, ValueError) as error:
            raise NotThisWay(f"no URL can be signed ({type(error).__name__})", for_good=True) from None
        if is_behind_proxy(url):
            raise NotThisWay("there is a proxy", for_good=True)
        window = self._limit_seconds(0)
        enough = max(1, int(self.settings.throughput_min_bytes_per_second * window))

        async def get() -> Buffer:
            await self._ranges.read(Get(f"{self.uri}/{key}", url, byte_range, into, if_match, window, enough))
            return into[: byte_range.size_bytes]

        await self._congestion.run(get)

    async def _read(self, bucket: Bucket, key: str, options: GetOptions) -> Buffer:
        """Return the body of one GET. Broken off when a window passes in which too little of it came."""
        return await self._congestion.run(lambda: self._watch(bucket, key, options))

    async def _watch(self, bucket: Bucket, key: str, options: GetOptions) -> Buffer:
        """Receive the body.

        What is there within one window, all of it, is taken in one piece, for half of the CPU. The first time that it
        is not, nobody knows whether it crept or stood: from then on bodies are watched piece by piece, until they are
        quick again.
        """
        window, begun = self._limit_seconds(0), time.monotonic()
        enough = max(1, int(self.settings.throughput_min_bytes_per_second * window))
        moved = counted = 0
        try:
            async with asyncio.timeout(window) as limit:
                answer = await obstore.get_async(bucket, key, options=options)
                if not self._is_watching:
                    return memoryview(await answer.bytes_async())
                pieces = []
                async for piece in answer.stream(min_chunk_size=min(MiB, max(4096, enough // 2))):
                    pieces.append(piece)
                    moved += len(piece)
                    if moved - counted >= enough:
                        counted = moved
                        limit.reschedule(asyncio.get_running_loop().time() + window)
        except TimeoutError:
            self.retries.counts["broken_off"] += 1
            error = self._too_slow(key, window)
            error.context |= {"too_slow": self._is_watching, "moved_bytes": moved - counted}
            self._is_watching = True
            raise error from None
        self._is_watching = time.monotonic() > begun + window / 2
        return b"".join(pieces)

    def _too_slow(self, key: str, seconds: float) -> StoreUnavailableError:
        least = int(self.settings.throughput_min_bytes_per_second)
        return StoreUnavailableError(
            f"{self.uri}/{key} cannot be reached: too little moved in {seconds:g} s",
            hint=f"The request was broken off. Less than {least} bytes per second (throughput_min_bytes_per_second) "
            "is taken for a connection that hangs",
            uri=self.uri,
            endpoint=self._endpoint or None,
            tier=Tier.SHARED,
        )

    async def _get_nothing(self, key: str, if_match: str | None) -> bytes:
        info = await self.head(key)
        if if_match is not None and info.etag != if_match:
            raise PreconditionFailedError(f"{key} has changed", uri=self.uri, key=key)
        return b""

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Write a small object in one request.

        With ``if_absent``, a request whose answer was lost and that was tried again may find its own object: what is
        there is read, and is a success when it is ``data`` byte for byte.
        """
        await self._put(key, data, "create" if if_absent else "overwrite")

    async def _put(self, key: str, data: Buffer, mode: Any) -> None:
        check_key(key)
        body = _frozen(data)  # a request that is broken off may hold it a moment longer than we do
        size_bytes, tries = memoryview(body).nbytes, 0

        async def call(bucket: Bucket) -> None:
            nonlocal tries
            tries += 1
            put = obstore.put_async(bucket, key, body, mode=mode, use_multipart=False)
            try:
                await settled(_limited(put, self._limit_seconds(size_bytes)))
            except TimeoutError:
                self.retries.counts["broken_off"] += 1
                raise self._too_slow(key, self._limit_seconds(size_bytes)) from None

        try:
            await self._request(key, call, writing=isinstance(mode, str))
        except PreconditionFailedError:
            if tries == 1 or not await self._holds(key, body):
                raise

    async def replace(self, key: str, data: Buffer, *, etag: str) -> None:
        """``put`` on the condition that ``etag`` is there. On GCS a HEAD more: its condition is on another number."""
        mode = {"e_tag": etag}
        try:
            if self.location.scheme == "gs":
                mode["version"] = await self._generation_of(key, etag) or ""
            await self._put(key, data, mode)
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError:
            raise PreconditionFailedError(f"{self.uri}/{key} is gone", uri=self.uri, key=key) from None

    async def remove(self, key: str, *, etag: str) -> None:
        """``delete`` on that condition. Where no DELETE can be signed, or on GCS: looked at, then deleted."""
        check_key(key)

        async def call(bucket: Bucket) -> None:
            url = await obstore.sign_async(bucket, "DELETE", key, SIGNED_FOR)
            limit = self._limit_seconds(0)
            await settled(asyncio.to_thread(delete_if, url, etag, f"{self.uri}/{key}", limit))

        if self.location.scheme != "gs":
            try:
                await self._request(key, call)
                return
            except BucketNotFoundError:
                raise
            except (PreconditionFailedError, StoreUnavailableError):
                raise
            except StoreError as error:
                log.info("%s/%s is deleted without a condition: %s", self.uri, key, error.message)
        try:
            await self._generation_of(key, etag)
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError:
            return
        await self.delete(key)

    async def _generation_of(self, key: str, etag: str) -> str | None:
        """What GCS calls the version that ``etag`` names. Raises PreconditionFailedError when another one is there."""

        async def call(bucket: Bucket) -> Any:
            async with asyncio.timeout(self._limit_seconds(0)):
                return await obstore.head_async(bucket, key)

        meta = await self._request(key, call)
        if _info(meta).etag != etag:
            raise PreconditionFailedError(f"{self.uri}/{key} has changed", uri=self.uri, key=key)
        version: str | None = meta.get("version")
        return version

    async def _holds(self, key: str, data: Buffer) -> bool:
        try:
            return await self.get(key) == bytes(data)
        except ObjectNotFoundError:
            return False

    async def put_stream(self, key: str, pieces: AsyncIterator[Buffer], size_bytes: int) -> None:
        """Write a large object in parts. Aborted on any error: no object and, on S3 and GCS, no parts stay behind.

        What fits one part is one request, tried again here. A larger object cannot be: its pieces are gone. Callers
        that have them still use ``again``. Azure has no abort; parts that were never committed are invisible and go
        away by themselves after a week.
        """
        check_key(key)
        async with closing(pieces):
            if size_bytes <= PART_SIZE_BYTES_MIN:
                data = b"".join([_frozen(piece) async for piece in pieces])
                check_size(self.uri, key, size_bytes, len(data))
                await self.put(key, data)
                return
            generation = self._generation
            try:
                await self.retries.once(self._breaker, self._probe, lambda: self._put_parts(key, pieces, size_bytes))
            except PermissionDeniedError as error:
                if await self._renewed(generation, error):
                    raise renewed_meanwhile(error) from error
                raise

    async def _put_parts(self, key: str, pieces: AsyncIterator[Buffer], size_bytes: int) -> None:
        bucket = await self._bucket(min(PART_RETRIES_MAX, self.settings.retry_attempts_max))
        writer = obstore.open_writer_async(
            bucket, key, buffer_size=_part_size_bytes(size_bytes), max_concurrency=self.settings.concurrency
        )
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
            log.warning("could not abort the transfer of %s to %s: %s", key, self.uri, first_line(error))

    async def link(self, key: str, source: Path) -> bool:
        """False: a bucket shares no filesystem with anyone."""
        return False

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        held: ObjectInfo | None = None  # an empty object may be the marker of the "directory" that comes after it
        async for info in self._listed(check_prefix(prefix)):
            if held is not None and not info.key.startswith(f"{held.key}/"):
                yield held
            held = None if info.size_bytes else info
            if info.size_bytes:
                yield info
        if held is not None:
            yield held

    async def _listed(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield what the server lists, each key once. A page that fails begins the listing again."""
        seen: set[str] = set()
        stream: Any = None

        async def page(bucket: Bucket) -> Any:
            nonlocal stream
            stream = stream or obstore.list(bucket, prefix or None, chunk_size=1000)
            try:
                return await stream.__anext__()
            except StopAsyncIteration:
                return None
            except BaseException:
                stream = None
                raise

        while (metas := await self._request(None, page)) is not None:
            for info in map(_info, metas):
                if info.key and info.key not in seen:  # the empty key is the marker of the root itself
                    seen.add(info.key)
                    yield info

    async def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        directory = check_prefix(prefix) or None
        answer = await self._request(None, lambda bucket: obstore.list_with_delimiter_async(bucket, directory))
        return sorted({path.rstrip("/").rpartition("/")[2] for path in answer["common_prefixes"]})

    async def list_level(self, prefix: str = "") -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
        directory = check_prefix(prefix)
        answer = await self._request(None, lambda bucket: obstore.list_with_delimiter_async(bucket, directory or None))
        names = sorted({path.rstrip("/").rpartition("/")[2] for path in answer["common_prefixes"]})
        infos = [info for info in map(_info, answer["objects"]) if info.key and not _marks(info, directory, names)]
        return (infos, names) if infos or names or not directory else None

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
        try:
            await self._request(keys[0], lambda bucket: settled(obstore.delete_async(bucket, keys)))
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError:  # Azure says so and may stop there; S3 never does
            for key in keys if len(keys) > 1 else []:
                await self._delete_all([key])

    async def close(self) -> None:
        """Drop the clients; their connections close with them."""
        self._clients.clear()
        self._ranges.close()
        self._access = None

    @contextlib.asynccontextmanager
    async def _errors(self, key: str | None, *, writing: bool = False) -> AsyncIterator[None]:
        """Translate what obstore raises. ``key`` None means that the request was about the bucket itself."""
        generation, was_proven = self._generation, self._is_proven  # others may renew the credentials meanwhile
        try:
            yield
        except (TierckptError, asyncio.CancelledError):
            raise
        except (obstore_errors.BaseError, OSError, ValueError) as error:
            ours = self._translate(error, key, was_proven)
            if isinstance(ours, ObjectNotFoundError) and await self._bucket_is_missing(key, writing):
                ours = self._missing_bucket()
            if not isinstance(ours, PermissionDeniedError | StoreUnavailableError):
                self._is_proven |= generation == self._generation
            raise ours from printable(error)
        else:
            self._bucket_exists = True
            self._is_proven |= generation == self._generation

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
            return is_missing(error)
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

    def _translate(self, error: Exception, key: str | None, was_proven: bool) -> TierckptError:
        if http_status(error) == 400 and not error_code(error) and was_proven:
            # S3 says "expired" with status 400, and to a HEAD without a word more.
            return refused(self.location, key, self._endpoint, "HTTP 400")
        return translate(error, self.location, key, self._endpoint)


def _build(location: Location, access: Access, part_retries: int, timeout_seconds: float) -> Bucket:
    timeout = timedelta(seconds=timeout_seconds)
    bucket: Bucket = _CLASSES[location.scheme](
        location.authority,
        prefix=location.path or None,
        config=access.options,
        client_options={
            "allow_http": access.endpoint.startswith("http://"),
            "timeout": timeout,
            "connect_timeout": min(timeout, timedelta(seconds=CONNECT_TIMEOUT_SECONDS)),
            **bounds(access),
        },
        retry_config={"max_retries": part_retries, "retry_timeout": timeout},
        credential_provider=access.provider,
    )
    return bucket


async def _limited(request: Awaitable[T], timeout_seconds: float) -> T:
    async with asyncio.timeout(timeout_seconds):
        return await request


def _part_size_bytes(size_bytes: int) -> int:
    """Return a part size, in whole MiB, that keeps the object within PARTS_MAX parts."""
    smallest = -(-size_bytes // PARTS_MAX)
    return max(PART_SIZE_BYTES_MIN, -(-smallest // MiB) * MiB)


def _frozen(piece: Buffer) -> Buffer:
    """Return ``piece`` if nobody can change it, else a copy. See the module's docstring."""
    owner = piece.obj if isinstance(piece, memoryview) else piece
    return piece if isinstance(owner, bytes) else bytes(piece)


def _marks(info: ObjectInfo, directory: str, names: Sequence[str]) -> bool:
    """True for an empty object that stands for a "directory": this one, or one of ``names`` in it."""
    return not info.size_bytes and (info.key == directory or info.key.rpartition("/")[2] in names)


def _info(meta: Any) -> ObjectInfo:
    etag = meta["e_tag"]
    if etag and not etag.endswith('"'):  # Azure's listings leave out the quotes that every other answer has
        etag = f'"{etag}"'
    return ObjectInfo(meta["path"], meta["size"], etag)
