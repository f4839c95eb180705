"""From a load plan to pieces of files, and from those back to tensors.

An item of a dense tensor is a *frame* around its raw bytes (``wire.py``), and the frame follows from dtype and shape.
So no item is unpickled to find its bytes: the raw rows that this rank wants go straight to the tensor that wants them,
and the head of the frame is looked at and compared (which needs no digest: damage makes a difference). What does not
have the frame that its metadata lets expect (a strided or conjugate tensor, a subclass, an item behind a transform) is
read whole and parsed by torch.

Source: FastPersist and Universal Checkpointing read by plan in the same way; the frame is PyTorch's own.
"""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from ..mover.pull import Piece
from . import wire

T = TypeVar("T")

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

    def wanted_bytes(self, item: ReadItem, length: int) -> int:
        """About how many of the ``length`` bytes of an item are read for ``item``: the rows that it wants."""
        stored = self.of(item)
        if stored is None or not stored[1] or not item.lengths:
            return length
        dtype, size = stored
        return item.lengths[0] * size[1:].numel() * dtype.itemsize


def frame_of(dtype: torch.dtype, size: torch.Size, length: int) -> wire.Frame | None:
    """The frame of an item of ``length`` bytes: ours, or that of plain ``torch.save``. None: neither fits."""
    for known in (wire.frame, wire.frame_by_torch):
        frame = known(dtype, tuple(size))
        if frame.total_bytes == length:
            return frame
    return None


class Rows:
    """Memory for rows on their way to where they do not fit as they are: that of one window serves the next.

    New memory for each would be faulted in page by page each time: for half of the columns of 2 GiB that was a third of
    the processor time. Never holds more than ``size_bytes_max``, unless more is taken at one time.
    """

    def __init__(self, size_bytes_max: int = WINDOW_BYTES) -> None:
        self._size_bytes_max = size_bytes_max
        self._size_bytes = 0
        self._free: list[torch.Tensor] = []

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return bytes with anything in them: at least ``size_bytes``, and at most twice as many."""
        fitting = [bytes_ for bytes_ in self._free if size_bytes <= bytes_.nbytes <= 2 * size_bytes]
        if fitting:
            best = min(fitting, key=lambda bytes_: bytes_.nbytes)
            self._free = [bytes_ for bytes_ in self._free if bytes_ is not best]
            return best
        while self._free and self._size_bytes + size_bytes > self._size_bytes_max:
            self._size_bytes -= self._free.pop(0).nbytes
        self._size_bytes += size_bytes
        return torch.empty(size_bytes, dtype=torch.uint8)

    def give_back(self, taken: torch.Tensor) -> None:
        self._free.append(taken)


@dataclass(slots=True)
class RawRead:
    """A tensor item whose raw bytes are read: all of them, or the rows that are wanted.

    Attributes:
        path, offset: where the item begins.
        size: of the stored tensor.
        target: what it is read into, of the item's ``lengths``.
        rows: where rows come from that cannot be read into ``target``.
    """

    item: ReadItem
    path: str
    offset: int
    frame: wire.Frame
    dtype: torch.dtype
    size: torch.Size
    target: torch.Tensor
    rows: Rows
    extra_bytes: int = 0
    _is_direct: bool = False
    _row_bytes: int = 0
    _row_count: int = 1
    _dim: int = 0
    _head: bytearray = field(default_factory=bytearray)
    _memory: torch.Tensor | None = None

    def __post_init__(self) -> None:
        size, lengths = self.size, self.item.lengths
        self._row_bytes = self.dtype.itemsize
        if size:
            # Where one index of the first dimensions is wanted, rows are those of the dimension after them.
            while lengths[self._dim] == 1 and self._dim < len(size) - 1:
                self._dim += 1
            self._row_bytes *= size[self._dim + 1 :].numel()
            self._row_count = lengths[self._dim]
        self._is_direct = self._fits_as_it_is() and lengths[self._dim + 1 :] == size[self._dim + 1 :]
        if not self._is_direct:
            self.extra_bytes = self._row_bytes * self._row_count

    def _fits_as_it_is(self) -> bool:
        """True when rows can be put into the target without another copy."""
        target = self.target
        return (
            type(target) is torch.Tensor
            and target.dtype == self.dtype
            and target.is_cpu
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
        )

    def pieces(self) -> Iterator[Piece]:
        head = self.frame.head
        start = self.offset + len(head)
        self._head = bytearray(len(head))
        yield Piece(self.offset, start, _address(self._head), is_peek=True)
        into, size_bytes = self.target, self._row_bytes * self._row_count
        if not self._is_direct:
            into = self._memory = (
                torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
                if self.target.is_cuda
                else self.rows.take(size_bytes)
            )
        if size_bytes:
            for dim, offset in enumerate(self.item.storage_offsets[: self._dim + 1]):
                start += offset * self.size[dim + 1 :].numel() * self.dtype.itemsize
            yield Piece(start, start + size_bytes, into.data_ptr())

    def finish(self) -> bool:
        """A copy to a CUDA device is only begun: torch keeps the pinned rows until it has ended (``DeviceCopies``)."""
        if self._head != self.frame.head:
            return False
        if self._memory is not None:
            shape = (self._row_count, *self.size[self._dim + 1 :]) if self.size else ()
            part = self._memory[: self._row_bytes * self._row_count].view(self.dtype).view(shape)
            for dim in range(self._dim + 1, len(self.size)):
                part = part.narrow(dim - self._dim, self.item.storage_offsets[dim], self.item.lengths[dim])
            self.target.copy_(part, non_blocking=self.target.is_cuda)
            if not self.target.is_cuda:  # of those torch knows when the copy has ended
                self.rows.give_back(self._memory)
            self._memory = None
        return True


@dataclass(slots=True)
class WholeRead:
    """An item that is read whole and handed to ``take`` as a stream."""

    item: ReadItem
    path: str
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


class DeviceCopies:
    """Copies to CUDA devices that go on while the next window is read: of one window, so that memory is bounded."""

    def __init__(self) -> None:
        self._under_way: list[torch.cuda.Event] = []

    def wait(self) -> None:
        """Return when all of them have ended."""
        for event in self._under_way:
            event.synchronize()
        self._under_way = []

    def begun(self, reads: Iterable[Read]) -> None:
        """``reads`` have been finished, each on the current stream of its device."""
        devices = {read.target.device for read in reads if isinstance(read, RawRead) and read.target.is_cuda}
        self._under_way += [torch.cuda.current_stream(device).record_event() for device in devices]


def by_file(reads: Sequence[Read]) -> dict[str, list[tuple[Piece, Read]]]:
    """The pieces of ``reads`` and whose they are, by file, in order of where they begin."""
    files: dict[str, list[tuple[Piece, Read]]] = {}
    for read in reads:
        owned = files.setdefault(read.path, [])
        for piece in read.pieces():
            owned.append((piece, read))
    for pieces in files.values():
        pieces.sort(key=lambda owned: owned[0].start)
    return files


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
