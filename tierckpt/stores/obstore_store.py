"""S3, Azure Blob and GCS through obstore (obstore_module.py).

- obstore sends buffers without a copy, even after ``write``: a piece that may still change is copied first.
- A cancelled request leaves a multipart transfer on the server: requests end (``to_completion``), then are aborted.
- obstore's retries have no budget: stores/retry.py retries all but the parts of a large object, whose bytes are no
  longer in memory.

obstore ends a listing at a key that is no path (``a//b``, control characters). ``OddKeys`` lists and reads such keys
through fsspec, if listed: such a key from outside is refused (S5 of ``base``).
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import MiB, Settings
from ..errors import (
    BucketNotFoundError,
    EndpointError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
    TierckptError,
)
from ..format.layout import CLAIM, Location
from ..quantities import round_up
from ..redaction import printable
from ..telemetry import logger
from ..types import Buffer, ByteRange, ObjectInfo, Tier
from . import get_concurrency
from .base import (
    PART_SIZE_BYTES_MIN,
    PARTS_MAX,
    FolderMarkers,
    OddKeyError,
    Store,
    check_key,
    check_prefix,
    check_range,
    check_size,
    closing,
    frozen_piece,
    has_odd_parts,
    limited,
    short_answer,
    to_completion,
)
from .bucket import Client
from .obstore_errors import (
    error_code,
    first_line,
    foreign_body,
    foreign_protocol,
    http_status,
    in_another_region,
    is_missing,
    is_tunnel_refused,
    refused,
    renewed_meanwhile,
    still_refused,
    translate,
    tunnel_refused,
    wrong_protocol_error,
)
from .obstore_module import Module
from .proxies import proxy_for
from .retry import PROBE_SECONDS_MAX, Retries
from .signed_requests import Get, NotThisWay, delete_if

if TYPE_CHECKING:
    import obstore
    from obstore import GetOptions
    from obstore import exceptions as obstore_errors

    from .fsspec_store import UniversalStore
else:
    obstore, obstore_errors = Module(), Module("exceptions")


class OddKeys:
    def __init__(self, location: Location) -> None:
        self._location = location
        self._known: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._known

    @cached_property
    def store(self) -> UniversalStore:
        """Reads such keys. fsspec would return a cached client, perhaps of another endpoint."""
        from .fsspec_store import UniversalStore, open_filesystem

        filesystem, root = open_filesystem(self._location, skip_instance_cache=True)
        return UniversalStore(filesystem, root, self._location.uri, any_key=True)

    async def list(self, prefix: str, error: OddKeyError) -> builtins.list[ObjectInfo]:
        try:
            found = [info async for info in self.store.list(prefix) if info.key]
        except TierckptError as reason:
            error.hint = f"Rename or remove that object: fsspec, which lists such keys, cannot here ({reason.message})"
            raise error from None
        if not found:
            error.hint = "Rename or remove that object: fsspec, which lists such keys, sees nothing there"
            raise error
        self._known |= {info.key for info in found if _is_odd(info.key)}
        return found

    async def level(self, directory: str, error: OddKeyError) -> tuple[builtins.list[ObjectInfo], builtins.list[str]]:
        """Cost: a listing of everything below the folder."""
        start = len(directory) + 1 if directory else 0
        rest = [(info, info.key[start:]) for info in await self.list(directory, error)]
        paths = [(info, key) for info, key in rest if not _is_odd(key)]
        names = {key.partition("/")[0] for _, key in paths if "/" in key}
        return [info for info, key in paths if "/" not in key], sorted(names)


def _is_odd(key: str) -> bool:
    return has_odd_parts(key) or not key.isprintable()


log = logger("stores.remote")

T = TypeVar("T")

DELETE_BATCH = 1000
BUCKET_MISSING = {"NoSuchBucket", "ContainerNotFound"}
"""A deleted bucket is not an empty one."""
AZURE_MARKER = "hdi_isfolder"
PART_RETRIES_MAX = 3
DIRECT_BYTES_MIN = 256 << 10
SIGNED_FOR = timedelta(minutes=15)


class RemoteStore(Store):
    """Objects of a bucket or container below a key prefix.

    Memory: one ``put_stream`` holds at most ``settings.concurrency + 1`` parts of 8 MiB (larger above 78 GiB per
    object).
    """

    def __init__(self, location: Location, settings: Settings, retries: Retries | None = None) -> None:
        self.location = location
        self.settings = settings
        self.uri = location.uri
        self.has_put_if_absent = True
        self.retries = retries or Retries(settings)
        self._prefix = f"{check_key(location.path)}/" if location.path else ""
        self._bucket = self.retries.bucket(location.scheme, location.authority)
        self._breaker = self.retries.breaker(self._bucket.name)
        self._get_concurrency = self.retries.get_concurrency(self._bucket.name)
        self._is_watching = False
        self._odd = OddKeys(location)

    @property
    def sources(self) -> Mapping[str, str]:
        return self._bucket.sources

    async def _client(self, part_retries: int = 0) -> Client:
        # A part is not watched while it is sent: limit its total time.
        limit = self._limit_seconds(PART_SIZE_BYTES_MIN) if part_retries else self.settings.store_timeout_seconds
        return await self._bucket.client(part_retries, limit)

    def _request(
        self, key: str | None, call: Callable[[Client], Awaitable[T]], *, writing: bool = False
    ) -> Awaitable[T]:
        """Make one idempotent request, with retries and renewed credentials.

        Raises StoreUnavailableError: retries, time or budget exhausted, or the store is down.
        """
        is_renewed = False

        async def request() -> T:
            nonlocal is_renewed
            while True:
                generation = self._bucket.generation
                try:
                    async with self.retries.request(self._breaker, self._probe):
                        client = await self._client()
                        async with self._errors(key, writing=writing):
                            return await call(client)
                except PermissionDeniedError as refusal:
                    if is_renewed:
                        raise still_refused(refusal) from refusal
                    if not await self._bucket.renew(generation, refusal):
                        raise
                    is_renewed = True
                except StoreUnavailableError:
                    if generation == self._bucket.generation:  # else with newer credentials, or in another region
                        raise

        return self.retries.again(request, timeout_seconds=self.settings.store_timeout_seconds)

    async def _probe(self) -> bool:
        try:
            client = await self._client()
            async with asyncio.timeout(min(PROBE_SECONDS_MAX, self._limit_seconds(0))):
                await obstore.head_async(client, self._prefix + CLAIM)
        except (obstore_errors.BaseError, OSError, ValueError) as error:
            self.retries.counts["probes"] += 1
            return not isinstance(self._translate(error, None, self._bucket.is_proven), StoreUnavailableError)
        self.retries.counts["probes"] += 1
        return True

    def _limit_seconds(self, size_bytes: int) -> float:
        moving = get_concurrency.WINDOW_SECONDS + size_bytes / get_concurrency.BYTES_PER_SECOND_MIN
        return min(moving, self.settings.store_timeout_seconds)

    def again(self, work: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        return self.retries.again(work)

    async def reconnect(self, damage: TierckptError) -> None:
        """Raises ``damage`` when the budget is exhausted."""
        if not await self.retries.take_retry():
            raise damage
        self.retries.counts["damaged_answers"] += 1
        self._bucket.reconnect()

    async def available(self) -> bool:
        if not self._breaker.is_open:
            return False
        await self._breaker.wait_until_up(self._probe, is_unlimited=True)
        return True

    def probe_soon(self) -> None:
        self._breaker.probe_soon()

    async def head(self, key: str) -> ObjectInfo:
        if key in self._odd:
            return await self._odd.store.head(key)
        check_key(key)

        async def call(client: Client) -> Any:
            meta = await self._meta(client, key)
            self._check_language(meta["e_tag"], key)
            return meta

        return self._info(await self._request(key, call))

    def _meta(self, client: Client, key: str) -> Awaitable[Any]:
        return limited(obstore.head_async(client, self._prefix + key), self._limit_seconds(0))

    async def get(self, key: str) -> bytes:
        check_key(key)
        return bytes(await self._request(key, lambda client: self._read(client, key, {})))

    async def get_range(self, key: str, byte_range: ByteRange, *, if_match: str | None = None) -> Buffer:
        if key in self._odd:
            return await self._odd.store.get_range(key, byte_range, if_match=if_match)
        check_key(key)
        if not check_range(byte_range).size_bytes:
            info = await self.head(key)
            if if_match not in (None, info.etag):
                raise PreconditionFailedError(f"{key} has changed", uri=self.uri, key=key)
            return b""
        options: GetOptions = {"range": (byte_range.start, byte_range.stop)}
        if if_match is not None:
            options["if_match"] = if_match

        data = await self._request(key, lambda client: self._read(client, key, options))
        if len(data) != byte_range.size_bytes:
            raise short_answer(self.uri, key, byte_range, len(data))
        return data

    async def get_range_into(
        self, key: str, byte_range: ByteRange, into: memoryview, *, if_match: str | None = None
    ) -> None:
        is_odd = key in self._odd
        if not is_odd:
            check_key(key)
        size_bytes = check_range(byte_range).size_bytes
        is_direct = self.location.scheme == "s3" and not is_odd and self._bucket.ranges.is_usable
        if is_direct and size_bytes >= DIRECT_BYTES_MIN:
            try:
                await self._request(key, lambda client: self._receive(client, key, byte_range, into, if_match))
                self._bucket.ranges.count_used()
                return
            except NotThisWay as reason:
                self._bucket.ranges.count_unused(reason)
        into[:size_bytes] = await self.get_range(key, byte_range, if_match=if_match)

    async def _receive(
        self, client: Client, key: str, byte_range: ByteRange, into: memoryview, if_match: str | None
    ) -> None:
        try:
            url = await obstore.sign_async(client, "GET", self._prefix + key, SIGNED_FOR)
        except (obstore_errors.BaseError, ValueError) as error:
            raise NotThisWay(f"no URL can be signed ({type(error).__name__})", for_good=True) from None
        if proxy_for(url) is not None:
            raise NotThisWay("there is a proxy", for_good=True)
        get = Get(f"{self.uri}/{key}", url, byte_range, into, self._limit_seconds(0), if_match=if_match)
        await self._get_concurrency.run(partial(self._bucket.ranges.run, get))

    async def _read(self, client: Client, key: str, options: GetOptions) -> Buffer:
        return await self._get_concurrency.run(lambda: self._watch(client, key, options))

    async def _watch(self, client: Client, key: str, options: GetOptions) -> Buffer:
        """A body within one window is received in one piece, at half the CPU time; after a slower one, by pieces."""
        window, started_at = self._limit_seconds(0), time.monotonic()
        enough = max(1, int(get_concurrency.BYTES_PER_SECOND_MIN * window))
        moved = counted = 0
        try:
            async with asyncio.timeout(window) as limit:
                answer = await obstore.get_async(client, self._prefix + key, options=options)
                self._check_language(answer.meta["e_tag"], key)
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
        self._is_watching = time.monotonic() > started_at + window / 2
        return b"".join(pieces)

    def _too_slow(self, key: str, seconds: float) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self.uri}/{key} cannot be reached: too little moved in {seconds:g} s",
            hint=f"The request was aborted: less than {get_concurrency.BYTES_PER_SECOND_MIN} bytes per second is taken "
            "for a connection that hangs",
            uri=self.uri,
            endpoint=self._bucket.endpoint or None,
            tier=Tier.SHARED,
        )

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        await self._put(key, data, "create" if if_absent else "overwrite")

    async def _put(self, key: str, data: Buffer, mode: Any) -> None:
        """A retry of a conditional put, after a lost response, may find its own object: equality is success."""
        check_key(key)
        body = frozen_piece(data)  # an aborted request may hold it a moment longer
        limit, tries = self._limit_seconds(memoryview(body).nbytes), 0

        async def call(client: Client) -> None:
            nonlocal tries
            tries += 1
            name = self._prefix + key
            try:
                await to_completion(
                    limited(obstore.put_async(client, name, body, mode=mode, use_multipart=False), limit)
                )
            except TimeoutError:
                self.retries.counts["broken_off"] += 1
                raise self._too_slow(key, limit) from None

        try:
            await self._request(key, call, writing=isinstance(mode, str))
        except PreconditionFailedError:
            if tries == 1 or not await self.holds(key, body):
                raise

    async def replace(self, key: str, data: Buffer, *, etag: str) -> None:
        """GCS needs one more HEAD: its condition is on another number."""
        mode = {"e_tag": etag}
        try:
            if self.location.scheme == "gs":
                mode["version"] = await self._generation_of(key, etag) or ""
            try:
                await self._put(key, data, mode)
            except PreconditionFailedError:
                # Ceph RGW compares with its unquoted etag.
                if self.location.scheme != "s3" or (await self.head(key)).etag != etag:
                    raise
                await self._put(key, data, {"e_tag": etag.strip('"')})
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError:
            raise PreconditionFailedError(f"{self.uri}/{key} no longer exists", uri=self.uri, key=key) from None

    async def remove(self, key: str, *, etag: str) -> None:
        """After a HEAD, as servers without conditional DELETE ignore the condition (Ceph RGW 16)."""
        check_key(key)

        async def call(client: Client) -> None:
            url = await obstore.sign_async(client, "DELETE", self._prefix + key, SIGNED_FOR)
            limit = self._limit_seconds(0)
            tls = self._bucket.ranges.tls
            await to_completion(asyncio.to_thread(delete_if, url, etag, f"{self.uri}/{key}", limit, tls))

        try:
            await self._generation_of(key, etag)
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError:
            return
        if self.location.scheme != "gs":
            try:
                await self._request(key, call)
                return
            except (BucketNotFoundError, PreconditionFailedError, StoreUnavailableError):
                raise
            except StoreError as error:
                log.info("%s/%s is deleted without a condition: %s", self.uri, key, error.message)
        await self.delete(key)

    async def _generation_of(self, key: str, etag: str) -> str | None:
        """GCS's number of the version ``etag``. Raises PreconditionFailedError."""
        meta = await self._request(key, lambda client: self._meta(client, key))
        if self._info(meta).etag != etag:
            raise PreconditionFailedError(f"{self.uri}/{key} has changed", uri=self.uri, key=key)
        version: str | None = meta.get("version")
        return version

    async def holds(self, key: str, data: Buffer) -> bool:
        try:
            return await self.get(key) == bytes(data)
        except ObjectNotFoundError:
            return False

    async def put_stream(self, key: str, pieces: AsyncIterator[Buffer], size_bytes: int) -> None:
        """Write a large object in parts. After any error no object and, on S3 and GCS, no parts remain.

        Only an object of one part is retried here: the pieces of others are no longer in memory. Azure deletes
        uncommitted parts after a week.
        """
        check_key(key)
        async with closing(pieces):
            if size_bytes <= PART_SIZE_BYTES_MIN:
                data = b"".join([frozen_piece(piece) async for piece in pieces])
                check_size(self.uri, key, size_bytes, len(data))
                await self.put(key, data)
                return
            generation = self._bucket.generation
            try:
                async with self.retries.request(self._breaker, self._probe):
                    writer = obstore.open_writer_async(
                        await self._client(PART_RETRIES_MAX),
                        self._prefix + key,
                        buffer_size=max(PART_SIZE_BYTES_MIN, round_up(-(-size_bytes // PARTS_MAX), MiB)),
                        max_concurrency=self.settings.concurrency,
                    )
                    try:
                        written = 0
                        async for piece in pieces:
                            async with self._errors(key, writing=True):
                                written += await to_completion(writer.write(frozen_piece(piece)))
                        check_size(self.uri, key, size_bytes, written)
                        async with self._errors(key, writing=True):
                            await to_completion(writer.close())
                    except BaseException as error:
                        await self._abort(writer, key, error)
                        raise
            except PermissionDeniedError as error:
                if await self._bucket.renew(generation, error):
                    raise renewed_meanwhile(error) from error
                raise

    async def _abort(self, writer: Any, key: str, cause: BaseException) -> None:
        try:
            await to_completion(writer.__aexit__(type(cause), cause, cause.__traceback__))
        except (obstore_errors.BaseError, OSError, ValueError) as error:
            # Remaining parts are invisible; a lifecycle rule removes them.
            log.warning("could not abort the transfer of %s to %s: %s", key, self.uri, first_line(error))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Extra cost: a request per folder with only empty objects; on Azure one per such object."""
        markers = FolderMarkers()
        async for info in self._listed(check_prefix(prefix)):
            if markers.take(info):
                yield info
        folders: dict[str, builtins.list[str]] = {}
        for info in markers.empty():
            parent, _, name = info.key.rpartition("/")
            # A listing returns ``x/`` as ``x``; a listing of one level distinguishes them.
            if parent not in folders:
                folders[parent] = await self.list_dirs(parent)
            if name not in folders[parent] and not await self._is_azure_folder(info.key):
                yield info

    async def _is_azure_folder(self, key: str) -> bool:
        if self.location.scheme != "az":
            return False

        try:
            answer = await self._request(key, lambda client: obstore.get_async(client, self._prefix + key))
        except ObjectNotFoundError:
            return False
        return str(answer.attributes.get(AZURE_MARKER, "")).lower() == "true"

    async def _listed(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield each listed key once. After a failed page the listing restarts."""
        seen_keys: set[str] = set()
        stream: Any = None

        async def page(client: Client) -> Any:
            nonlocal stream
            stream = stream or obstore.list(client, self._directory(prefix), chunk_size=1000)
            try:
                metas = await stream.__anext__()
            except StopAsyncIteration:
                metas = None
            except BaseException:
                stream = None
                raise
            if not metas:
                await self._check_empty(client)
            return metas

        while True:
            try:
                metas = await self._request(None, page)
            except OddKeyError as error:
                for info in await self._odd.list(prefix, error):
                    if info.key not in seen_keys:
                        yield info
                return
            if metas is None:
                return
            for info in map(self._info, metas):
                if info.key and info.key not in seen_keys:
                    seen_keys.add(info.key)
                    yield info

    async def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        return (await self._level(check_prefix(prefix)))[1]

    async def list_level(self, prefix: str = "") -> tuple[builtins.list[ObjectInfo], builtins.list[str]] | None:
        directory = check_prefix(prefix)
        infos, names = await self._level(directory)
        return (infos, names) if infos or names or not directory else None

    async def _level(self, directory: str) -> tuple[builtins.list[ObjectInfo], builtins.list[str]]:
        async def call(client: Client) -> Any:
            answer = await obstore.list_with_delimiter_async(client, self._directory(directory))
            if not (answer["objects"] or answer["common_prefixes"]):
                await self._check_empty(client)
            return answer

        try:
            answer = await self._request(None, call)
        except OddKeyError as error:
            return await self._odd.level(directory, error)
        names = sorted({path.rstrip("/").rpartition("/")[2] for path in answer["common_prefixes"]} - {""})
        infos = []
        for info in map(self._info, answer["objects"]):
            is_marker = not info.size_bytes and (info.key == directory or info.key.rpartition("/")[2] in names)
            if info.key and not is_marker:
                infos.append(info)
        return infos, names

    async def delete(self, key: str) -> None:
        await self._delete_all([check_key(key)])

    async def delete_dir(self, prefix: str) -> None:
        batch: builtins.list[str] = []
        async for info in self._listed(check_prefix(prefix)):
            if info.key in self._odd:
                await self._odd.store.delete(info.key)
                continue
            batch.append(info.key)
            if len(batch) == DELETE_BATCH:
                await self._delete_all(batch)
                batch = []
        if batch:
            await self._delete_all(batch)

    async def _delete_all(self, keys: builtins.list[str]) -> None:
        try:
            names = [self._prefix + key for key in keys]
            await self._request(keys[0], lambda client: to_completion(obstore.delete_async(client, names)))
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError:  # Azure may stop there
            for key in keys if len(keys) > 1 else []:
                await self._delete_all([key])

    async def close(self) -> None:
        self._bucket.close()

    @contextlib.asynccontextmanager
    async def _errors(self, key: str | None, *, writing: bool = False) -> AsyncIterator[None]:
        bucket = self._bucket
        credentials = bucket.generation, bucket.is_proven  # others may renew them
        try:
            yield
        except (TierckptError, asyncio.CancelledError):
            raise
        except (obstore_errors.BaseError, OSError, ValueError) as error:
            # Bind no name: an error named by a frame of its own traceback is a cycle.
            raise await self._typed_error(error, key, writing, *credentials) from printable(error)
        else:
            bucket.exists = True
            bucket.note_accepted(credentials[0])

    async def _typed_error(
        self, error: Exception, key: str | None, writing: bool, generation: int, was_proven: bool
    ) -> TierckptError:
        if await self._bucket.follow_region(generation, error):
            return in_another_region(self.location, key)
        typed_error = await self._endpoint_error(error, key, was_proven) or self._translate(error, key, was_proven)
        if isinstance(typed_error, ObjectNotFoundError) and (
            error_code(error) in BUCKET_MISSING or await self._bucket_is_missing(key, writing)
        ):
            typed_error = BucketNotFoundError(
                f"{self._bucket.name} does not exist",
                hint="Create it, or check the name and the endpoint",
                uri=self.uri,
                endpoint=self._bucket.endpoint or None,
            )
        if not isinstance(typed_error, PermissionDeniedError | StoreUnavailableError | EndpointError):
            self._bucket.note_accepted(generation)
        return typed_error

    async def _endpoint_error(self, error: Exception, key: str | None, was_proven: bool) -> TierckptError | None:
        endpoint = self._bucket.endpoint
        if is_tunnel_refused(error):
            return await asyncio.to_thread(tunnel_refused, self.location, key, endpoint)
        if was_proven or self._bucket.exists or not endpoint:
            return None
        what = foreign_body(error, endpoint) or await asyncio.to_thread(foreign_protocol, error, endpoint)
        return wrong_protocol_error(self.location, key, endpoint, what) if what else None

    def _check_language(self, etag: str | None, key: str | None) -> None:
        """Raise EndpointError if a first response has no ETag."""
        if etag is None and not self._bucket.exists and self._bucket.endpoint:
            raise wrong_protocol_error(self.location, key, self._bucket.endpoint, "its answer has no ETag")

    async def _check_empty(self, client: Client) -> None:
        """Raise EndpointError if a first, empty listing is no store's."""
        if not self._bucket.exists and self._bucket.endpoint:
            try:
                answer = await obstore.get_async(client, self._prefix + CLAIM)
            except (obstore_errors.BaseError, OSError) as error:
                self._check_body(error, None)
                return
            self._check_language(answer.meta["e_tag"], None)

    def _check_body(self, error: Exception, key: str | None) -> None:
        if what := foreign_body(error, self._bucket.endpoint):
            raise wrong_protocol_error(self.location, key, self._bucket.endpoint, what) from None

    async def _bucket_is_missing(self, key: str | None, writing: bool) -> bool:
        """Distinguish a missing bucket from a missing key by one listing per bucket: their responses are equal."""
        if key is None or writing:
            return True
        if self._bucket.exists:
            return False
        try:
            await obstore.list(await self._client(), self._directory(), chunk_size=1).__anext__()
        except StopAsyncIteration:
            pass
        except (obstore_errors.BaseError, OSError) as error:
            self._check_body(error, key)
            return is_missing(error)
        self._bucket.exists = True
        return False

    def _directory(self, prefix: str = "") -> str | None:
        return (self._prefix + prefix).rstrip("/") or None

    def _info(self, meta: Any) -> ObjectInfo:
        etag = meta["e_tag"]
        if etag and not etag.endswith('"'):
            etag = f'"{etag}"'
        return ObjectInfo(meta["path"][len(self._prefix) :], meta["size"], etag, meta["last_modified"].timestamp())

    def _translate(self, error: Exception, key: str | None, was_proven: bool) -> TierckptError:
        if http_status(error) == 400 and not error_code(error) and was_proven:
            # S3 reports expiry with status 400, for a HEAD without a code.
            return refused(self.location, key, self._bucket.endpoint, "HTTP 400")
        return translate(error, self.location, key, self._bucket.endpoint, was_proven)
