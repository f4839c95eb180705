"""Turns a load plan into byte ranges of files, and their bytes into tensors.

An item of a dense tensor is a *frame* around its raw bytes (``items/item_format.py``), which dtype and shape determine.
So the needed rows are read straight into the tensor, and the frame's head is compared with the expected one. An item
without that frame (a strided tensor, a subclass, a transformed item) is read whole and parsed by torch.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from ..disk.file_io import address_of, copy_small
from ..read.parallel_read import Piece
from ..torch_internals import StorageInfo
from .items import item_format

T = TypeVar("T")

WINDOW_BYTES = 256 << 20
"""Memory that one window of items may need in addition to the target tensors."""

SMALL_BYTES = 16 << 10
"""Tensors up to this size are read in groups, and copied from there."""

GROUP_BYTES = 1 << 20
"""No group crosses a multiple of this, so damage is reported with its group."""

PADDING_BYTES = 4096
"""Maximum gap between adjacent small tensors."""


class Shapes:
    def __init__(self, metadata: Metadata) -> None:
        self._tensors = metadata.state_dict_metadata
        self._chunks: dict[str, dict[tuple[int, ...], torch.Size]] = {}

    def of(self, item: ReadItem) -> tuple[torch.dtype, torch.Size] | None:
        index = item.storage_index
        tensor = self._tensors.get(index.fqn)
        if not isinstance(tensor, TensorStorageMetadata):
            return None
        chunks = tensor.chunks
        if len(chunks) == 1:
            return tensor.properties.dtype, chunks[0].sizes
        known = self._chunks.get(index.fqn)
        if known is None:
            known = self._chunks[index.fqn] = {tuple(chunk.offsets): chunk.sizes for chunk in chunks}
        size = known.get(tuple(index.offset or ()))
        return None if size is None else (tensor.properties.dtype, size)


def frame_of(dtype: torch.dtype, size: torch.Size, length: int) -> item_format.ItemFrame | None:
    """Return our frame, or ``torch.save``'s. None: neither fits ``length``."""
    if dtype in item_format.QUANTIZED:
        return None
    for known in (item_format.frame, item_format.frame_by_torch):
        frame = known(dtype, tuple(size))
        if frame.total_bytes == length:
            return frame
    return None


def has_same_scale(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not other.is_quantized or one.qscheme() != other.qscheme():
        return False
    if one.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return (one.q_scale(), one.q_zero_point()) == (other.q_scale(), other.q_zero_point())
    return (
        one.q_per_channel_axis() == other.q_per_channel_axis()
        and torch.equal(one.q_per_channel_scales(), other.q_per_channel_scales())
        and torch.equal(one.q_per_channel_zero_points(), other.q_per_channel_zero_points())
    )


class RowBufferPool:
    """Memory for rows that cannot be read into their tensor directly.

    Never holds more than ``size_bytes_max``, unless more is taken at once.
    """

    def __init__(self, size_bytes_max: int = WINDOW_BYTES) -> None:
        self._size_bytes_max = size_bytes_max
        self._size_bytes = 0
        self._free: list[torch.Tensor] = []

    def acquire(self, size_bytes: int) -> torch.Tensor:
        """Return uninitialized bytes, at most twice ``size_bytes``."""
        for number, free in enumerate(self._free):
            if size_bytes <= free.nbytes <= 2 * size_bytes:
                return self._free.pop(number)
        while self._free and self._size_bytes + size_bytes > self._size_bytes_max:
            self._size_bytes -= self._free.pop(0).nbytes
        self._size_bytes += size_bytes
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def release(self, taken: torch.Tensor) -> None:
        self._free.append(taken)


@dataclass(slots=True)
class RawRead:
    """A tensor item with raw bytes to read: all of them, or some rows.

    ``target`` receives the rows, from ``rows`` if they cannot be read into it directly.
    """

    item: ReadItem
    path: str
    offset: int
    frame: item_format.ItemFrame
    dtype: torch.dtype
    size: torch.Size
    target: torch.Tensor
    rows: RowBufferPool
    count: ClassVar = 1
    extra_bytes: int = 0
    _is_direct: bool = False
    _start: int = 0
    _size_bytes: int = 0
    _row_count: int = 1
    _dim: int = 0
    _head: bytearray = field(default_factory=bytearray)
    _memory: torch.Tensor | None = None

    def __post_init__(self) -> None:
        size, lengths, target = self.size, self.item.lengths, self.target
        is_same = target.dtype == self.dtype and type(target) is torch.Tensor and item_format.is_raw_on_host(target)
        if size:
            # With one index of the first dimensions, the next dimension has the rows.
            while lengths[self._dim] == 1 and self._dim < len(size) - 1:
                self._dim += 1
            self._row_count = lengths[self._dim]
        offsets = self.item.storage_offsets[: self._dim + 1]
        self._size_bytes = self._row_count * self._bytes_per_index(self._dim)
        self._start = sum(offset * self._bytes_per_index(dim) for dim, offset in enumerate(offsets))
        self._is_direct = is_same and lengths[self._dim + 1 :] == size[self._dim + 1 :]
        if not self._is_direct:
            self.extra_bytes = self._size_bytes

    def _bytes_per_index(self, dim: int) -> int:
        return self.size[dim + 1 :].numel() * self.dtype.itemsize

    def pieces(self) -> Iterator[Piece]:
        head = self.frame.head
        self._head = bytearray(len(head))
        yield Piece(self.offset, self.offset + len(head), address_of(self._head), is_unverified=True)
        if not self._size_bytes:
            return
        into = self.target
        if not self._is_direct:
            into = self._memory = (
                torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
                if self.target.is_cuda
                else self.rows.acquire(self._size_bytes)
            )
        start = self.offset + len(head) + self._start
        yield Piece(start, start + self._size_bytes, into.data_ptr())

    def finish(self) -> Iterator[Finished]:
        """Start a copy to a CUDA device; torch keeps the pinned rows until it is complete."""
        is_expected = self._head == self.frame.head
        if is_expected and self._memory is not None:
            shape = (self._row_count, *self.size[self._dim + 1 :]) if self.size else ()
            part = self._memory[: self._size_bytes].view(self.dtype).view(shape)
            for dim in range(self._dim + 1, len(self.size)):
                part = part.narrow(dim - self._dim, self.item.storage_offsets[dim], self.item.lengths[dim])
            self.target.copy_(part, non_blocking=self.target.is_cuda)
            if not self.target.is_cuda:
                self.rows.release(self._memory)
            self._memory = None
        yield self.item, self.target if is_expected else None


@dataclass(slots=True)
class WholeRead:
    item: ReadItem
    path: str
    offset: int
    length: int
    take: Callable[[ReadItem, io.BytesIO], None]
    count: ClassVar = 1
    _data: bytearray = field(default_factory=bytearray)

    @property
    def extra_bytes(self) -> int:
        return self.length

    def pieces(self) -> Iterator[Piece]:
        self._data = bytearray(self.length)
        if self.length:
            yield Piece(self.offset, self.offset + self.length, address_of(self._data))

    def finish(self) -> Iterator[Finished]:
        data, self._data = self._data, bytearray()
        self.take(self.item, io.BytesIO(data))
        return iter(())


@dataclass(slots=True)
class GroupRead:
    """Adjacent small tensors of one file that are read whole."""

    path: str
    start: int
    stop: int
    members: list[tuple[ReadItem, int, item_format.ItemFrame, torch.Tensor]]
    _data: bytearray = field(default_factory=bytearray)

    @property
    def item(self) -> ReadItem:
        return self.members[0][0]

    @property
    def extra_bytes(self) -> int:
        return self.stop - self.start

    @property
    def count(self) -> int:
        return len(self.members)

    def pieces(self) -> Iterator[Piece]:
        self._data = bytearray(self.stop - self.start)
        yield Piece(self.start, self.stop, address_of(self._data))

    def finish(self) -> Iterator[Finished]:
        data, self._data = self._data, bytearray()
        base = address_of(data) - self.start
        for item, offset, frame, target in self.members:
            head = frame.head
            if data.startswith(head, offset - self.start):
                copy_small(target.data_ptr(), base + offset + len(head), frame.size_bytes)
                yield item, target
            else:
                yield item, None


Finished: TypeAlias = tuple[ReadItem, torch.Tensor | None]
"""None: the bytes differ from the expected frame, and the item must be read whole."""

Read: TypeAlias = RawRead | GroupRead | WholeRead


class SmallTensorGrouper:
    """Nearly all small tensors resemble the previous one, so that case is checked first."""

    def __init__(self, plain: Mapping[str, Any], shapes: Shapes, chunk_size_bytes: int) -> None:
        self._plain = plain
        self._shapes = shapes
        self._group_bytes = min(GROUP_BYTES, chunk_size_bytes)
        self._dtype: torch.dtype | None = None
        self._size: torch.Size | None = None
        self._length = 0
        self._frame: item_format.ItemFrame | None = None
        self._first: Any = None

    def group(self, group: GroupRead | None, item: ReadItem, info: StorageInfo) -> GroupRead | None:
        """Return None if ``item`` is not for a group."""
        target, offset, length = self._plain.get(item.dest_index.fqn), info.offset, info.length
        if type(target) is not torch.Tensor or length > 2 * SMALL_BYTES or not is_framed(item, info):
            return None
        stored = self._shapes.of(item)
        if stored is None:
            return None
        dtype, size = stored
        if dtype is not self._dtype or length != self._length or size != self._size:
            self._dtype, self._length, self._size = dtype, length, size
            frame = frame_of(dtype, size, length)
            self._frame = frame if frame is not None and 0 < frame.size_bytes <= SMALL_BYTES else None
        frame, lengths, offsets = self._frame, item.lengths, item.storage_offsets
        if (
            frame is None
            or target.dtype is not dtype
            or not (lengths is size or lengths == size)
            or target.size() != size
            or not (offsets is self._first or not any(offsets))
            or target.requires_grad
            or not item_format.is_raw_on_host(target)
        ):
            return None
        self._first = offsets
        end = offset + length
        last = (end - 1) // self._group_bytes
        if (
            group is None
            or group.path != info.relative_path
            or not 0 <= offset - group.stop < PADDING_BYTES
            or group.start // self._group_bytes != last
        ):
            if offset // self._group_bytes != last:
                return None
            group = GroupRead(info.relative_path, offset, offset, [])
        group.members.append((item, offset, frame, target))
        group.stop = end
        return group


def is_framed(item: ReadItem, info: StorageInfo) -> bool:
    """Old DCP metadata has no ``transform_descriptors``."""
    return item.type is not LoadItemType.BYTE_IO and not getattr(info, "transform_descriptors", None)


class DeviceCopies:
    """Copies of one window to CUDA devices, while the next window is read: memory is bounded."""

    def __init__(self) -> None:
        self._under_way: list[torch.cuda.Event] = []

    def wait(self) -> None:
        for event in self._under_way:
            event.synchronize()
        self._under_way = []

    def register(self, reads: Iterable[Read]) -> None:
        devices = {read.target.device for read in reads if isinstance(read, RawRead) and read.target.is_cuda}
        self._under_way += [torch.cuda.current_stream(device).record_event() for device in devices]


def pieces_by_file(reads: Sequence[Read]) -> dict[str, list[tuple[Piece, Read]]]:
    files: dict[str, list[tuple[Piece, Read]]] = {}
    for read in reads:
        owned = files.setdefault(read.path, [])
        for piece in read.pieces():
            owned.append((piece, read))
    for pieces in files.values():
        pieces.sort(key=lambda owned: owned[0].start)
    return files
