"""Fetches the missing chunks of an entry: several workers take one chunk after the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ..errors import CapacityError, IntegrityError, PartialTransferError, TierckptError
from ..poll import Poll
from ..telemetry import ignore_progress, logger
from ..types import Buffer, ByteRange, FileProgress, Progress, ProgressListener
from .file_set import FileSet
from .partial_entry import PartialEntry, Turn
from .peer_fill import ChunkOrder, NotNowError, PeerFill, Work

log = logger("prefetch")


class FillTarget(Protocol):
    """What is filled (``entry.CacheEntry``)."""

    frozen: FileSet
    tally: FetchStats
    peer_fetch: PeerFill | None
    gate: asyncio.Semaphore
    """Bounds what this process fetches at a time."""
    idle: asyncio.Lock
    stall_seconds: float
    fetches_max: int

    async def fetch(
        self, filling: PartialEntry, index: int, chunk: int, *, keep: bool, request: object | None = None
    ) -> Buffer | None: ...

    def has_streamed(self, index: int, chunk: int) -> bool: ...


class InOrder:
    """One after the other; what is put back comes last."""

    def __init__(self, todo: Iterable[tuple[int, int]]) -> None:
        self._todo = deque(Work(*one) for one in todo)

    async def take(self) -> Work | None:
        return self._todo.popleft() if self._todo else None

    def put_back(self, work: Work) -> None:
        self._todo.append(work)

    def done(self, work: Work) -> None:
        pass


class FetchJob:
    """One pass over the chunks that are missing: some workers take chunk after chunk, whoever gets it."""

    def __init__(
        self, cached: FillTarget, filling: PartialEntry, indexes: Iterable[int], listener: ProgressListener
    ) -> None:
        self.cached, self.filling, self.listener = cached, filling, listener
        self.frozen = cached.frozen
        filling.refresh()
        wanted = list(indexes)
        todo = [
            (index, chunk)
            for index in wanted
            for chunk in range(self.frozen.chunks_of(index))
            if not filling.has(index, chunk)
        ]
        self.total = sum(self.frozen.files[index].size_bytes for index in wanted)
        self._lacking_bytes = Counter[int]()
        for index, chunk in todo:
            self._lacking_bytes[index] += self.frozen.chunk_range(index, chunk).size_bytes
        self._files: dict[int, FileProgress] = {}
        self._fetching: list[int] = []
        """The file of each chunk that is being fetched."""
        self.count = len(todo)
        peer_fetch = cached.peer_fetch
        is_all = len(wanted) == len(self.frozen.files)
        self.order: ChunkOrder = InOrder(todo) if peer_fetch is None else peer_fetch.order(todo, whole=is_all)
        self.done_bytes = self.total - self._lacking_bytes.total()
        self.failures: dict[int, TierckptError] = {}
        self.wanted = wanted
        self.fatal = False
        self.poll = Poll()
        self.moved_at = time.monotonic()
        self.is_overtaking = False
        """Once other processes have stalled: their claims count no more in this pass."""

    async def run(self) -> None:
        self._say()
        workers = min(self.cached.fetches_max, self.count)
        tasks = [asyncio.ensure_future(self._work()) for _ in range(workers)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self.failures:
            raise self._error()

    async def _work(self) -> None:
        while not self.fatal and (work := await self.order.take()) is not None:
            index, chunk = work.index, work.chunk
            if index in self.failures:
                self.order.done(work)
                continue
            if self.filling.has(index, chunk):
                self._advance(work, others=not self.cached.has_streamed(index, chunk))
                continue
            try:
                async with self.cached.gate:
                    with self._turn(index, chunk) as turn:
                        if turn == "fetch":
                            with self._moving(index):
                                await self.cached.fetch(self.filling, index, chunk, keep=False, request=work.request)
                if turn == "later":
                    self.order.put_back(work)
                    await self._rest()
                else:
                    self._advance(work, others=turn == "landed" and not self.cached.has_streamed(index, chunk))
            except NotNowError:
                pass  # the schedule has had it back since, and another worker may be at it
            except TierckptError as error:
                self.order.done(work)
                self.failures.setdefault(index, error)
                self.fatal |= isinstance(error, IntegrityError | CapacityError)

    @contextlib.contextmanager
    def _moving(self, index: int) -> Iterator[None]:
        """The file is in flight in the block."""
        item = self.frozen.files[index]
        if index not in self._files:
            done_bytes = item.size_bytes - self._lacking_bytes[index]
            self._files[index] = FileProgress(item.path, done_bytes, item.size_bytes)
        self._fetching.append(index)
        try:
            self._say()
            yield
        finally:
            self._fetching.remove(index)

    @contextlib.contextmanager
    def _turn(self, index: int, chunk: int) -> Iterator[Turn]:
        """Hold the claim on a chunk; yield what to do with the chunk."""
        if not self.is_overtaking and time.monotonic() >= self.moved_at + self.cached.stall_seconds:
            log.warning("%s: other processes make no progress, fetching the chunks they claimed", self.filling.incoming)
            self.is_overtaking = True
        with self.filling.claimed(index, chunk) as turn:
            if self.is_overtaking:
                yield "fetch" if turn == "later" else turn
            elif turn == "fetch" and self.filling.count_fetches() > self.cached.fetches_max:
                yield "later"  # the node fetches enough of it
            else:
                yield turn

    async def _rest(self) -> None:
        """Wait a moment for others. One worker at a time looks; the rest wait for it."""
        before = self.filling.landed_bytes
        async with self.cached.idle:
            self.filling.refresh()
            if self.filling.landed_bytes == before:
                await self.poll.pause_async()
                self.filling.refresh()
        if self.filling.landed_bytes != before:
            self.poll, self.moved_at = Poll(), time.monotonic()

    def _advance(self, work: Work, *, others: bool) -> None:
        size_bytes = self.frozen.chunk_range(work.index, work.chunk).size_bytes
        self.done_bytes += size_bytes
        self._lacking_bytes[work.index] -= size_bytes
        if (file := self._files.get(work.index)) is not None:
            file.done_bytes += size_bytes
        self.moved_at = time.monotonic()
        self.order.done(work)
        if others:
            self.cached.tally.others_bytes += size_bytes
        self._say()

    def _say(self) -> None:
        if self.listener is ignore_progress:
            return
        tally = self.cached.tally
        sources = {
            "here": tally.here_bytes,
            "peers": tally.peer_bytes,
            "shared": tally.fetched_bytes,
            "other processes": tally.others_bytes,
        }
        note = ", ".join(f"{size_bytes >> 20} MiB {source}" for source, size_bytes in sources.items() if size_bytes)
        files = tuple(self._files[index] for index in dict.fromkeys(self._fetching))
        self.listener(Progress(f"prefetch {self.frozen.uri}", self.done_bytes, self.total, note, files))

    def _error(self) -> TierckptError:
        errors = [self.failures[index] for index in sorted(self.failures)]
        first = next((error for error in errors if isinstance(error, IntegrityError | CapacityError)), errors[0])
        if len(errors) == len(self.wanted) or isinstance(first, IntegrityError | CapacityError):
            return first
        names = {self.frozen.files[index].path: error for index, error in sorted(self.failures.items())}
        return PartialTransferError(
            f"{len(errors)} of {len(self.wanted)} files of {self.frozen.uri} could not be fetched",
            hint="Nothing was published; run the same command again to fetch only what is missing",
            uri=self.frozen.uri,
            failures={path: f"{type(error).__name__}: {error}" for path, error in names.items()},
        )


SHARED_NAME = "shared"


@dataclass(slots=True)
class FetchStats:
    """Where the bytes of a fill came from. ``here`` was there when it began; ``others`` landed meanwhile."""

    here_bytes: int = 0
    cached_bytes: int = 0
    """Copied from the node cache."""
    fetched_bytes: int = 0
    """From shared storage."""
    peer_bytes: int = 0
    others_bytes: int = 0
    requests: int = 0
    slowest_seconds: float = 0.0
    slowest: str = ""
    slowest_from: str = SHARED_NAME

    def note(self, path: str, at: ByteRange, seconds: float, peer: str | None = None) -> None:
        """``peer``: whom it came from; None: shared storage."""
        self.requests += 1
        if peer is None:
            self.fetched_bytes += at.size_bytes
        else:
            self.peer_bytes += at.size_bytes
        if seconds > self.slowest_seconds:
            self.slowest_seconds, self.slowest = seconds, f"{path} {at.start}-{at.stop}"
            self.slowest_from = peer or SHARED_NAME
