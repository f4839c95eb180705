"""Tells whether a file in a store is still the version that was listed, where the server refuses to.

Servers disagree about conditions: some refuse ``If-Match``, or compare a weak etag with it, which never matches; some
give an object another etag in a listing than in an answer. A refused condition is looked into once for each file: while
the store still says what it said when the file was listed, the file has not changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from ..errors import PreconditionFailedError, StoreError, TierckptError
from ..stores.base import RangeSource, ReadsInto, ReadsWhole, Store
from ..telemetry import logger
from ..types import Buffer, ByteRange, Tier
from .file_set import FileSpec

T = TypeVar("T")

log = logger("prefetch")

REFUSALS = {400, 405, 501}
"""Of a condition, by servers that do not know it."""


class Versions:
    """Reads files of one store, each of the version that was listed."""

    def __init__(self, store: RangeSource) -> None:
        self.store = store
        self._etags: dict[str, str | None] = {}
        """For keys whose condition was refused: what ``head`` says of the version that was listed."""
        self._unconditional: set[str] = set()

    async def read(self, item: FileSpec, byte_range: ByteRange, memory: memoryview | None) -> Buffer:
        """Return a range, in ``memory`` if there is some. Raises PreconditionFailedError: the file has changed.

        Cost: where the condition was refused, a ``head`` after each range.
        """
        data = await self._conditional(item, lambda etag: self._get(item.key, byte_range, memory, etag))
        await self._check_after(item)
        return data

    @contextlib.asynccontextmanager
    async def reading(self, item: FileSpec) -> AsyncIterator[Callable[[memoryview], Awaitable[None]]]:
        """``ReadsWhole.reading`` of a file, as ``read`` reads its ranges. Raises StoreError: the store cannot."""
        store = self.store
        if not isinstance(store, ReadsWhole):
            raise StoreError(f"{store.uri} gives no whole files", file=item.path, tier=Tier.SHARED)
        async with contextlib.AsyncExitStack() as stack:
            receive = await self._conditional(
                item, lambda etag: stack.enter_async_context(store.reading(item.key, if_match=etag))
            )

            async def fill(view: memoryview) -> None:
                await receive(view)
                await self._check_after(item)

            yield fill

    async def _conditional(self, item: FileSpec, request: Callable[[str | None], Awaitable[T]]) -> T:
        """Make a request on the condition that the file is the version that was listed, as far as the server lets."""
        while True:
            etag = None if item.key in self._unconditional else self._etags.get(item.key, item.etag)
            try:
                return await request(etag)
            except StoreError as error:
                is_refused = isinstance(error, PreconditionFailedError) or error.context.get("status") in REFUSALS
                if etag is None or not is_refused or not isinstance(self.store, Store):
                    raise
                if not await self._has_listed(self.store, item, error):
                    raise self._changed(item) from error

    async def _check_after(self, item: FileSpec) -> None:
        if item.key in self._unconditional and not await self._is_as_before(item):
            raise self._changed(item)

    def _changed(self, item: FileSpec) -> PreconditionFailedError:
        return PreconditionFailedError(f"{item.key} has changed", uri=self.store.uri, key=item.key)

    async def _get(self, key: str, byte_range: ByteRange, memory: memoryview | None, etag: str | None) -> Buffer:
        if memory is not None and isinstance(self.store, ReadsInto):
            await self.store.get_range_into(key, byte_range, memory, if_match=etag)
            return memory
        return await self.store.get_range(key, byte_range, if_match=etag)

    async def _has_listed(self, store: Store, item: FileSpec, refusal: TierckptError) -> bool:
        """True when the store still has the version that was listed, and another way to read it is noted."""
        key = item.key
        found = await store.head(key)
        if found.size_bytes != item.size_bytes:
            return False
        if found.etag != item.etag:
            below = key.rpartition("/")[0]
            if not [info async for info in store.list(below) if (info.key, info.etag) == (key, item.etag)]:
                return False
            if key not in self._etags and found.etag is not None:
                self._etags[key] = found.etag
                return True
        log.info("%s: %s is read without a condition, and compared after: %s", store.uri, key, refusal.message)
        self._etags[key] = found.etag
        self._unconditional.add(key)
        return True

    async def _is_as_before(self, item: FileSpec) -> bool:
        assert isinstance(self.store, Store)
        found = await self.store.head(item.key)
        return (found.size_bytes, found.etag) == (item.size_bytes, self._etags[item.key])
