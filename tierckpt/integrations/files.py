"""Files of ``tierckpt://``: read through the node cache, written to the store when complete."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from itertools import islice
from pathlib import Path
from typing import Any

from ..cache import space
from ..checkpoint.catalog import Checkpoint
from ..checkpoint.journal import JournalEntry
from ..checkpoint.namespace import Thing, root_of
from ..client import get_client
from ..config import Settings
from ..disk import read_lease
from ..disk.file_io import open_file, pread_all
from ..drain import write_back as drained
from ..errors import IntegrityError, ObjectNotFoundError, PreconditionFailedError, TierckptError
from ..format.layout import Location, written_file
from ..format.manifest import FileEntry, has_digest
from ..loading.cached_view import CachedView
from ..read.replicated_file import FileCopy, LocalCopy, RangeFile, RemoteCopy, ReplicatedFile, VerifiedFile
from ..save.spool import PIECE_BYTES, Spool, spool_stream
from ..stores.schemes import check_target
from ..telemetry import logger
from ..types import Buffer, ByteRange, ObjectInfo

log = logger("fsspec")

BUFFER_BYTES = 256 << 10
_CLOSING_FRAMES = 4
_CLOSES_ALWAYS = ("fsspec.core", "pandas.io.common")
"""Their ``with`` closes files even after an exception."""


class _CachedFile(RangeFile):
    """Thread-safe; a forked child reopens it in the same version."""

    def __init__(self, entry: Thing, settings: Settings) -> None:
        super().__init__(entry.size_bytes)
        self._entry, self._settings = entry, settings
        self._path = entry.location.name if entry.entry is None else entry.entry.path
        self._pid = 0
        self._lock = threading.Lock()
        self._view = self._opened()

    def _opened(self) -> CachedView:
        if self._pid != os.getpid():
            client, entry = get_client(self._settings), self._entry
            if entry.checkpoint is not None:
                location = entry.checkpoint.location
                cached = client.run(client.mover.node_cache.open_at(location, kind="directory"))
            else:
                info = ObjectInfo(entry.location.name, entry.size_bytes, entry.etag)
                cached = client.run(client.mover.node_cache.open_at(entry.location, kind="object", info=info))
            self._view, self._pid = CachedView(client, cached), os.getpid()
            only = self._view.only
            self._path = only.path if only is not None else self._path
        return self._view

    def read_into(self, start: int, into: memoryview) -> None:
        with self._lock:
            view = self._opened()
        view.read_into(self._path, start, into)

    def close(self) -> None:
        if not self.closed and self._pid == os.getpid():
            self._view.close()
        super().close()


class _LocalFile(VerifiedFile):
    """Damaged chunks are read from the shared tier. The checkpoint stays while this is open."""

    def __init__(self, thing: Thing, checkpoint: Checkpoint, entry: FileEntry, local: Path, settings: Settings) -> None:
        self._lease = contextlib.ExitStack()
        self._lease.enter_context(read_lease.reading(settings.local_root, checkpoint.directory))
        chunk = checkpoint.manifest.chunk_size_bytes if checkpoint.manifest else int(settings.chunk_size_bytes)
        self._settings, self._entry = settings, thing
        self._shared_view: _CachedFile | None = None
        copies: list[FileCopy] = [LocalCopy(local), RemoteCopy(thing.location.uri, self._read_shared)]
        super().__init__(ReplicatedFile(entry, chunk, copies))

    def _read_shared(self, byte_range: ByteRange) -> Buffer:
        if self._shared_view is None:
            self._shared_view = _CachedFile(self._entry, self._settings)
            self._lease.callback(self._shared_view.close)
        data = bytearray(byte_range.size_bytes)
        self._shared_view.read_into(byte_range.start, memoryview(data))
        return data

    def close(self) -> None:
        super().close()
        self._lease.close()


class _WrittenFile(RangeFile):
    """An undrained file. It stays while this is open, drained or not."""

    def __init__(self, entry: JournalEntry, settings: Settings) -> None:
        (self._file,) = entry.files
        super().__init__(self._file.size_bytes)
        self._chunk_size_bytes = entry.chunk_size_bytes
        self._place = written_file(settings.local_root, entry.token)
        self._descriptor = open_file(self._place)
        self._latest: tuple[int, Buffer] = (-1, b"")

    def read_into(self, start: int, into: memoryview) -> None:
        stop, chunk = start + len(into), self._chunk_size_bytes
        for base in range(start - start % chunk, stop, chunk):
            first, last = max(start, base), min(stop, base + chunk)
            into[first - start : last - start] = memoryview(self._chunk(base // chunk))[first - base : last - base]

    def _chunk(self, index: int) -> Buffer:
        known, data = self._latest
        if known != index:
            start = index * self._chunk_size_bytes
            byte_range = ByteRange(start, min(start + self._chunk_size_bytes, self._file.size_bytes))
            data = pread_all(self._descriptor, byte_range, self._place)
            if not has_digest(data, self._file.digests[index]):
                raise IntegrityError(f"{self._place} is damaged", hint="Write it again", file=self._file.path)
            self._latest = (index, data)
        return data

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def open_raw(entry: Thing, settings: Settings) -> RangeFile:
    if not entry.size_bytes:
        return RangeFile(0)
    if entry.written is not None:
        try:
            return _WrittenFile(entry.written, settings)
        except ObjectNotFoundError:
            client = get_client(settings)
            return open_raw(client.run(client.mover.browser.find(entry.location)), settings)
    if entry.checkpoint is not None and entry.entry is not None:
        local = entry.checkpoint.local_path(entry.entry)
        if local is not None:
            return _LocalFile(entry, entry.checkpoint, entry.entry, local, settings)
    return _CachedFile(entry, settings)


class Reader(io.BufferedReader):
    """A file open for reading, in one version."""

    def __init__(self, fs: Any, path: str, entry: Thing, details: dict[str, Any], settings: Settings) -> None:
        super().__init__(open_raw(entry, settings), BUFFER_BYTES)
        self.fs, self.path, self.size, self.details = fs, path, entry.size_bytes, details
        self.blocksize = BUFFER_BYTES

    def info(self) -> dict[str, Any]:
        return self.details

    def __reduce__(self) -> tuple[Any, ...]:
        """Reopen in a spawned worker: same position, current version."""
        return _opened_anew, (self.fs, self.path, self.tell())


def _opened_anew(fs: Any, path: str, position: int) -> Any:
    file = fs.open(path, "rb")
    file.seek(position)
    return file


class Writer(io.BufferedIOBase):
    """It appears on close, whole; after an exception or without ``close``, not at all."""

    def __init__(
        self, fs: Any, path: str, put: Callable[[Spool, int], None], spool: Spool, *, autocommit: bool
    ) -> None:
        self.fs, self.path, self.mode = fs, path, "wb"
        self._put, self._autocommit, self._spool = put, autocommit, spool
        self._failure: TierckptError | None = None
        self._is_open = True
        self._handled = sys.exception()

    @property
    def closed(self) -> bool:
        return not self._is_open

    def writable(self) -> bool:
        return self._is_open

    def seekable(self) -> bool:
        return self._is_open

    def write(self, data: Any) -> int:
        self._check()
        try:
            return self._spool.write(data)
        except TierckptError as error:
            self._failure = error
            raise

    def tell(self) -> int:
        self._check()
        return self._spool.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._check()
        return self._spool.seek(offset, whence)

    def flush(self) -> None:
        """Do nothing: the file is invisible before it is complete."""

    def fileno(self) -> int:
        """Stock FsspecWriter syncs by it; without it, the whole machine is synced."""
        self._check()
        return self._spool.fileno()

    def _check(self) -> None:
        if not self._is_open:
            raise ValueError("I/O operation on closed file")

    def close(self) -> None:
        if not self._is_open:
            return
        if self._is_left_by_an_exception():
            self.discard()
            return
        self._is_open = False
        if self._autocommit:
            self.commit()

    def _is_left_by_an_exception(self) -> bool:
        """True below a ``with fsspec.open(...)`` left by an exception, which closes the file without notice."""
        if sys.exception() in (None, self._handled):
            return False
        frames = islice(traceback.walk_stack(sys._getframe(2)), _CLOSING_FRAMES)
        return any(
            frame.f_code.co_name == "__exit__" and frame.f_globals.get("__name__") in _CLOSES_ALWAYS
            for frame, _ in frames
        )

    def commit(self) -> None:
        self._is_open = False
        if self._spool.closed:
            return
        with self._spool as spool:
            if self._failure is not None:
                raise self._failure
            size_bytes = spool.seek(0, io.SEEK_END)
            spool.seek(0)
            self._put(spool, size_bytes)

    def discard(self) -> None:
        self._is_open = False
        self._spool.close()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
            return
        self.discard()
        # torch.save would turn it into another error.
        if self._failure is not None and self._failure is not error and isinstance(error, Exception):
            raise self._failure

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            log.warning("%s was opened for writing and never closed: nothing was written", self.path)
            self.discard()


class CompressingWriter(io.BufferedIOBase):
    """Writes through ``compressor`` into ``file`` and closes it too; few compressors do."""

    def __init__(self, compressor: Any, file: Writer) -> None:
        self._compressor, self._file = compressor, file

    @property
    def closed(self) -> bool:
        return self._file.closed

    def writable(self) -> bool:
        return self._file.writable()

    def seekable(self) -> bool:
        return bool(self._compressor.seekable())

    def tell(self) -> int:
        return int(self._compressor.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._compressor.seek(offset, whence))

    def write(self, data: Any) -> int:
        self._compressor.write(data)
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            self._compressor.close()
            self._file.close()

    def discard(self) -> None:
        self._file.discard()
        with contextlib.suppress(ValueError):
            self._compressor.close()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class TextWriter(io.TextIOWrapper):
    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.buffer.discard()  # type: ignore[attr-defined]


async def pieces_of(stream: io.BufferedIOBase) -> AsyncIterator[Buffer]:
    while piece := await asyncio.to_thread(stream.read, PIECE_BYTES):
        yield piece


def put(
    settings: Settings,
    location: Location,
    stream: io.BufferedIOBase,
    size_bytes: int,
    *,
    if_absent: bool,
    write_back: bool,
) -> None:
    """Write ``stream``, all or nothing: to this node, then drained (``write_back``), or to the store.

    Raises FileExistsError: ``if_absent``, and it exists. ConfigError: part of a tierckpt checkpoint, or an invalid
    name.
    """
    check_target(location, settings.local_root)
    root, key = root_of(location)
    client = get_client(settings)
    client.run(client.mover.browser.check_write(location))
    if write_back:
        client.recover()
        with stream if isinstance(stream, Spool) else spool_stream(settings, stream) as spool:
            space.make_room(settings, spool.size_bytes, settings.local_root, reserved_bytes=spool.reserved_bytes)
            client.drain_in_background(drained.write(settings, location, spool.size_bytes, spool.link_to))
        return
    if size_bytes <= PIECE_BYTES:
        data = stream.read()
        try:
            client.run(client.mover.store(root).put(key, data, if_absent=if_absent))
        except PreconditionFailedError as error:
            raise FileExistsError(f"{location.uri} is there already") from error
    else:
        client.run(client.mover.store(root).put_stream(key, pieces_of(stream), size_bytes))
