"""CachedView: the node cache for synchronous callers."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..cache.entry import CacheEntry
from ..cache.file_set import FileSet, FileSpec
from ..cache.node_cache import Kind
from ..client import Client, get_client
from ..config import Settings
from ..event_loop import CLOSE_TIMEOUT_SECONDS
from ..format.layout import parse_uri
from ..stores.schemes import check_location
from ..types import Buffer, ByteRange


class CachedView:
    """The files of a URI through the node cache, for synchronous callers. Thread-safe; close it.

    All bytes are of the version at opening.
    """

    def __init__(self, client: Client, cached: CacheEntry) -> None:
        self._client, self._cached = client, cached
        self._fill_task: concurrent.futures.Future[None] | None = None

    @property
    def files(self) -> dict[str, FileSpec]:
        """A URI of one object has that object."""
        return self._cached.files

    @property
    def only(self) -> FileSpec | None:
        return self._cached.only

    @property
    def directory(self) -> Path | None:
        return self._cached.directory

    def path(self, path: str) -> Path:
        """May change once, when the entry is complete."""
        return self._cached.path(path)

    def landed(self, path: str, start: int = 0, stop: int | None = None) -> bool:
        return self._cached.landed(path, self._range(path, start, stop))

    def read(self, path: str, start: int = 0, stop: int | None = None) -> memoryview:
        """Raise IntegrityError, StoreError."""
        byte_range = self._range(path, start, stop)
        into = memoryview(bytearray(byte_range.size_bytes))
        self.read_into(path, start, into)
        return into.toreadonly()

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        view = memoryview(into).cast("B")
        byte_range = ByteRange(start, start + len(view))
        if not self._cached.read_available(path, byte_range, view):  # no event loop needed
            self._client.run(self._cached.read_into(path, byte_range, view))

    def is_good(self, path: str, start: int, data: Buffer) -> bool:
        """``read_into`` repairs bad bytes."""
        view = memoryview(data).cast("B")
        return self._cached.is_good(path, ByteRange(start, start + len(view)), view)

    def wait(self, path: str, start: int = 0, stop: int | None = None, timeout_seconds: float = 60.0) -> None:
        """Wait until any process has cached the bytes. Raises OperationTimeoutError."""
        byte_range = self._range(path, start, stop)
        self._client.run(self._cached.wait(path, byte_range, timeout_seconds))

    def fill(self, paths: Iterable[str] | None = None) -> None:
        self._client.run(self._cached.fill(paths))

    def fill_in_background(self, paths: Iterable[str] | None = None) -> None:
        if self._fill_task is None:
            self._fill_task = self._client.start(self._cached.fill(paths))

    def close(self) -> None:
        """Stop the background fetch. Idempotent."""
        if not self._client.is_ours:
            return
        if self._fill_task is not None:
            self._fill_task.cancel()
            concurrent.futures.wait([self._fill_task], timeout=CLOSE_TIMEOUT_SECONDS)
        self._client.run(self._cached.close())

    def _range(self, path: str, start: int, stop: int | None) -> ByteRange:
        return ByteRange(start, self._cached.file(path).size_bytes if stop is None else stop)

    def __enter__(self) -> CachedView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_cached(
    uri: str | os.PathLike[str], *, kind: Kind = "auto", settings: Settings | None = None, **overrides: Any
) -> CachedView:
    """Open the current content of ``uri`` through the node cache. ``kind`` saves requests.

    Raises ObjectNotFoundError, UncommittedCheckpointError, StoreError.
    """
    location = check_location(parse_uri(uri))
    client = get_client(Settings.load(settings, **overrides))
    return CachedView(client, client.run(client.mover.node_cache.open_at(location, kind=kind)))


def open_entry(frozen: FileSet, settings: Settings) -> CachedView:
    """Raise ConfigError, StoreError."""
    client = get_client(settings)
    return CachedView(client, client.run(client.mover.node_cache.reopen(frozen)))
