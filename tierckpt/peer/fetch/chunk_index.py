"""One version in chunks of one size: what the ordinals mean, and the list of what is here. Pure but for its sources."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from ...cache.file_set import FileSet
from ...types import ByteRange
from ..chunk_files import ChunkSource


class ChunkIndex:
    """The list that peers ask for: each chunk once it is here, in the order in which that was seen."""

    def __init__(self, frozen: FileSet) -> None:
        self.frozen = frozen
        self._firsts = frozen.first_ordinals
        self.total = self._firsts[-1]
        self.log: list[tuple[int, str]] = []
        self._from: dict[int, ChunkSource] = {}
        self._taken: dict[int, tuple[ChunkSource, int]] = {}

    def place(self, ordinal: int) -> tuple[int, int, ByteRange]:
        """The file, the chunk in it, and its range."""
        index = bisect_right(self._firsts, ordinal) - 1
        chunk = ordinal - self._firsts[index]
        return index, chunk, self.frozen.chunk_range(index, chunk)

    def take(self, sources: Iterable[ChunkSource]) -> None:
        """Append what has come since the last time."""
        for source in sources:
            _, done = self._taken.get(id(source), (source, 0))
            for index, own in source.order[done:]:
                self._append(source, index, own)
            self._taken[id(source)] = (source, len(source.order))  # holding it keeps its id its own

    def _append(self, source: ChunkSource, index: int, own: int) -> None:
        same_size = source.frozen.chunk_size_bytes == self.frozen.chunk_size_bytes
        for ordinal in self._ordinals(source, index, own):
            known = self._from.get(ordinal)
            if known is not None and not (known is source and same_size):  # twice from one: it was lost, and is back
                continue
            at = self.place(ordinal)[2]
            if same_size or source.covers(index, at):
                item, chunk = self.frozen.files[index], ordinal - self._firsts[index]
                self._from[ordinal] = source
                self.log.append(
                    (ordinal, "" if item.digests else source.digest(index, chunk, self.frozen.chunk_size_bytes))
                )

    def _ordinals(self, source: ChunkSource, index: int, own: int) -> Iterator[int]:
        """The chunks of this view that touch a chunk of the source."""
        first = self._firsts[index]
        if source.frozen.chunk_size_bytes == self.frozen.chunk_size_bytes:
            yield first + own
        else:
            for chunk in self.frozen.touched(source.frozen.chunk_range(index, own)):
                yield first + chunk

    def ordinals(self, source: ChunkSource, chunks: Iterable[tuple[int, int]]) -> Iterator[int]:
        """The chunks of this view that touch these of the source: each a file, and a chunk of it."""
        for index, own in chunks:
            yield from self._ordinals(source, index, own)
