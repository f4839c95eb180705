"""From a load plan to pieces of files, and from those back to tensors.

An item of a dense tensor is a *frame* around its raw bytes (``wire.py``), and the frame follows from dtype and shape.
So no item is unpickled to find its bytes: the raw rows that this rank wants go straight to the tensor that wants them,
and the head of the frame is read beside them and compared. What does not have the frame that its metadata lets expect
(a strided or conjugate tensor, a subclass, an item behind a transform) is read whole and parsed by torch.

Source: FastPersist and Universal Checkpointing read by plan in the same way; the frame is PyTorch's own.
"""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from ..mover.pull import Piece
from . import wire

WINDOW_BYTES = 256 << 20
"""What one window of items may need besides the tensors they are read into."""


class Shapes:
    """Dtype and shape of each stored chunk of a checkpoint's tensors, as its metadata has them."""

    def __init__(self, metadata: Metadata) -> None:
        self._tensors = metadata.state_dict_metadata
        self._chunks: dict[str, dict[tuple[int, ...], torch.Size]] = {}

    def of(self, item: ReadItem) -> tuple[torch.dtype, torch.Size] | None:
        """None: nothing is known, or it is no tensor."""
        index = item.storage_index
        tensor = self._tensors.get(index.fqn)
        if not isinstance(tensor, TensorStorageMetadata):
            return None
        if len(tensor.chunks) == 1:
            size = tensor.chunks[0].sizes
        else:
            chunks = self._chunks.get(index.fqn)
            if chunks is None:
                chunks = self._chunks[index.fqn] = {tuple(chunk.offsets): chunk.sizes for chunk in tensor.chunks}
            found = chunks.get(tuple(index.offset or ()))
            if found is None:
                return None
            size = found
        return tensor.properties.dtype, size


def frame_of(dtype: torch.dtype, size: torch.Size, length: int) -> wire.Frame | None:
    """The frame of an item of ``length`` bytes: ours, or that of plain ``torch.save``. None: neither fits."""
    for known in (wire.frame, wire.frame_by_torch):
        frame = known(dtype, tuple(size))
        if frame.total_bytes == length:
            return frame
    return None


@dataclass(slots=True)
class RawRead:
    """A tensor item whose raw bytes are read: all of them, or the rows that are wanted.

    Attributes:
        offset: where the item begins in its file.
        size: of the stored tensor.
        target: what it is read into, of the item's ``lengths``.
    """

    item: ReadItem
    offset: int
    frame: wire.Frame
    dtype: torch.dtype
    size: torch.Size
    target: torch.Tensor
    extra_bytes: int = 0
    _direct: bool = False
    _head: bytearray = field(default_factory=bytearray)
    _rows: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._direct = self._is_direct()
        if not self._direct:
            self.extra_bytes = self._row_bytes() * (self.item.lengths[0] if self.size else 1)

    def _row_bytes(self) -> int:
        return self.size[1:].numel() * self.dtype.itemsize if self.size else self.dtype.itemsize

    def _is_direct(self) -> bool:
        """True when the wanted rows can be put where they belong without another copy."""
        target = self.target
        return (
            target.device.type == "cpu"
            and target.dtype == self.dtype
            and type(target) is torch.Tensor
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
            and tuple(self.item.lengths[1:]) == tuple(self.size[1:])
        )

    def pieces(self) -> Iterator[Piece]:
        head, row_bytes = self.frame.head, self._row_bytes()
        self._head = bytearray(len(head))
        yield Piece(self.offset, self.offset + len(head), _address(self._head))
        into = self.target
        if not self._direct:
            rows = (self.item.lengths[0], *self.size[1:]) if self.size else ()
            into = self._rows = torch.empty(rows, dtype=self.dtype, pin_memory=self.target.is_cuda)
        start = self.offset + len(head) + (self.item.storage_offsets[0] * row_bytes if self.size else 0)
        size_bytes = row_bytes * (self.item.lengths[0] if self.size else 1)
        if size_bytes:
            yield Piece(start, start + size_bytes, into.data_ptr())

    def finish(self) -> bool:
        if self._head != self.frame.head:
            return False
        if self._rows is not None:
            part = self._rows
            for dim in range(1, len(self.size)):
                part = part.narrow(dim, self.item.storage_offsets[dim], self.item.lengths[dim])
            self.target.copy_(part)
            self._rows = None
        return True


@dataclass(slots=True)
class WholeRead:
    """An item that is read whole and handed to ``take`` as a stream."""

    item: ReadItem
    offset: int
    length: int
    take: Callable[[ReadItem, io.BytesIO], None]
    _data: bytearray = field(default_factory=bytearray)

    @property
    def extra_bytes(self) -> int:
        return self.length

    def pieces(self) -> Iterator[Piece]:
        self._data = bytearray(self.length)
        if self.length:
            yield Piece(self.offset, self.offset + self.length, _address(self._data))

    def finish(self) -> bool:
        data, self._data = self._data, bytearray()
        self.take(self.item, io.BytesIO(data))
        return True


Read: TypeAlias = RawRead | WholeRead
"""One item on its way: ``pieces`` makes the memory it needs and says where its bytes lie and go; ``finish`` brings them
to their target, and returns False when they are not what was expected: then the item must be read whole."""


def windows(reads: Iterable[Read]) -> Iterator[list[Read]]:
    """Cut ``reads`` into runs that need at most ``WINDOW_BYTES`` besides their targets, or are one item."""
    window: list[Read] = []
    extra_bytes = 0
    for read in reads:
        if window and extra_bytes + read.extra_bytes > WINDOW_BYTES:
            yield window
            window, extra_bytes = [], 0
        window.append(read)
        extra_bytes += read.extra_bytes
    if window:
        yield window


def by_file(reads: Sequence[Read], file_of: Callable[[Read], str]) -> dict[str, list[tuple[Piece, Read]]]:
    """The pieces of ``reads`` and whose they are, by file, in order of where they begin."""
    files: dict[str, list[tuple[Piece, Read]]] = {}
    for read in reads:
        files.setdefault(file_of(read), []).extend((piece, read) for piece in read.pieces())
    for pieces in files.values():
        pieces.sort(key=lambda owned: owned[0].start)
    return files


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
